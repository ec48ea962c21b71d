"""Floor 2, text: words to token ids and back. Owes tokenizers, chat templates, streams of text, stop strings.

Does not know: the engine, HTTP.
"""

from headrace.text.detokenizer import Detokenizer
from headrace.text.messages import normalise_messages
from headrace.text.rendered import Rendered
from headrace.text.stops import StopStrings
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Rendered", "StopStrings", "Tokenizer", "normalise_messages"]
