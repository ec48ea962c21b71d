"""A rendered chat: what the model is to read, and which control tokens in it are the template's own.

Owes: the value that `ChatTemplate.render` makes and `Tokenizer.encode_chat` takes. Does not know: either of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendered:
    """text: as the template rendered it. spans: (start, end) of each control token's text that the template wrote, in
    order.

    Control-token text outside the spans came from the caller and stays text.
    """

    text: str
    spans: tuple[tuple[int, int], ...] = ()
