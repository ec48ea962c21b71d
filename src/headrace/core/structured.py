"""What an answer must look like, as a caller says it.

Owes: the kinds, with vLLM's names, and the size that each may have. Does not know: what is in them; `text.grammar` says
whether that can be enforced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.base.rules import Rule, either, list_of, one_of, open_object, refuse, text

MAX_SCHEMA_CHARACTERS = 1 << 18
MAX_REGEX_CHARACTERS = 16384
MAX_STRUCTURED_CHOICES = 4096
MAX_CHOICE_CHARACTERS = 1 << 16
MAX_GRAMMAR_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer must look like: exactly one of these. Names: vLLM's `StructuredOutputsParams`.

    json: a JSON schema, as an object or as its text. regex: for the whole answer, in the syntax of Rust's regex crate,
    in which \\d is a digit of any script. choice: the answer is one of these. grammar: Lark, as llguidance reads it.
    json_object: any JSON object.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @property
    def kind(self) -> str:
        """Which of them is set."""
        return next((name for name in KINDS if getattr(self, name) is not None), "")

    def validate(self) -> None:
        """RequestError unless exactly one is set, to a value of its type and of a bearable size."""
        structured.check(FIELD, {name: getattr(self, name) for name in KINDS})


def _one(path: str, given: dict[str, Any]) -> None:
    """Exactly one kind, and no NUL, which would end a text in llguidance's C interface."""
    named = [name for name, value in given.items() if value is not None]
    for name in named:
        if name not in KINDS:
            refuse(f"{path}.{name[:60]}" if name.isidentifier() else path, f"is none of {', '.join(KINDS)}")
    if len(named) != 1:
        refuse(path, f"must set one of {', '.join(KINDS)}, got {' and '.join(named) or 'none'}")
    (name,) = named
    KINDS[name].check(f"{path}.{name}", given[name])
    if name in ("regex", "choice", "grammar"):
        texts = given[name] if name == "choice" else [given[name]]
        if any("\0" in each for each in texts):
            refuse(f"{path}.{name}", "must not hold a NUL character")
        if name == "choice" and sum(map(len, texts)) > MAX_CHOICE_CHARACTERS:
            refuse(f"{path}.choice", f"must hold at most {MAX_CHOICE_CHARACTERS} characters in all")


FIELD = "structured_outputs"
KINDS: dict[str, Rule] = {
    "json": either(open_object("a JSON schema"), text(MAX_SCHEMA_CHARACTERS, 1), says="a JSON schema, or its text"),
    "regex": text(MAX_REGEX_CHARACTERS, 1),
    "choice": list_of(text(MAX_CHOICE_CHARACTERS, 1), MAX_STRUCTURED_CHOICES, 1, of="strings"),
    "grammar": text(MAX_GRAMMAR_CHARACTERS, 1),
    "json_object": one_of(True),
}

structured = Rule(
    f"an object with one of {', '.join(KINDS)}",
    {"type": "object", "properties": {name: rule.schema for name, rule in KINDS.items()}, "maxProperties": 1},
    lambda value: isinstance(value, dict),
    _one,
)
"""What clients send under `structured_outputs`."""
