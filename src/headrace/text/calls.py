"""Calls of tools within what a model says, in the formats that chat templates teach.

Owes: every call told as it comes, its arguments as the model wrote them; whatever is no call, or not any more, is
content, and nothing is lost but the marks and the white space around calls. What comes out does not depend on how the
text was cut. How: a parser that reads on where it stopped for want of text (a generator), and holds back only what may
still become the beginning of a call.
Sources: the chat templates of Hermes 2 Pro and Qwen2.5, Llama 3.1, Mistral 7B v0.3 and Small 3.2.
Does not know: what the tools are, tokens.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from headrace.text.speech import CallArguments, CallStart, Content, Piece
from headrace.text.stops import overlap

_T = TypeVar("_T")
Reading = Generator[None, None, _T]  # yields when it needs more text

SPACE = " \t\n\r"
MAX_DEPTH = 128  # of arguments
_SPACES = re.compile(f"[{SPACE}]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_NUMERIC = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls.

    open, close: the marks around a call, or around a list of them; close may be "".
    head, before, middle, after, joint, tail: what a grammar has written:
        head  before NAME middle {...} after  joint  before NAME middle {...} after  tail
    bare: an object alone, without marks, is a call too, at the start of the answer and after another call.
    between: what may stand between two bare calls. fence: what may open one; three backticks close it then.
    named: ``open NAME [CALL_ID] ID [ARGS] {...}`` is a call, where the parts in brackets are such marks or absent.
    id_size: letters and digits of a call's id, where the template wants a number of them; otherwise 0.
    """

    name: str
    open: str
    close: str = ""
    head: str = ""
    before: str = '{"name": "'
    middle: str = '", "arguments": '
    after: str = "}"
    joint: str = ""
    tail: str = ""
    bare: bool = False
    between: str = ""
    fence: str = ""
    named: bool = False
    id_size: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks; a tokenizer may have control tokens for them."""
        return tuple(filter(None, (self.open, self.close, *(_NAMED_MARKS if self.named else ()))))


CALL_ID, ARGS = _NAMED_MARKS = ("[CALL_ID]", "[ARGS]")
HERMES = CallFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    before='<tool_call>\n{"name": "',
    after="}\n</tool_call>",
    joint="\n",
    bare=True,
    fence="```json",
)
LLAMA3 = CallFormat("llama3", "<|python_tag|>", middle='", "parameters": ', joint="; ", bare=True, between=";")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", head="[TOOL_CALLS][", joint=", ", tail="]", named=True, id_size=9)
MISTRAL_NAMED = CallFormat(
    "mistral with names", "[TOOL_CALLS]", before="[TOOL_CALLS]", middle=ARGS, after="", named=True, id_size=9
)


class _NoCall(Exception):
    """What was read does not go on as a call does."""


class CallReader:
    """A `Reader` of content and calls. names: of the tools that may be called; others are no calls.

    most: calls that are read; what comes after them is content.
    """

    reasoned = 0

    def __init__(self, form: CallFormat, names: Collection[str], most: int = sys.maxsize) -> None:
        self._form, self._names, self._most = form, frozenset(names), most
        self._text = ""  # what was not told yet; read up to _at
        self._at = 0
        self._over = False
        self.broken = False
        self._telling = False  # what is read are arguments of the last call
        self._calls = 0
        self._pieces: list[Piece] = []
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[Piece]:
        """See `Reader`."""
        self._text += text
        return self._read()

    def finish(self) -> list[Piece]:
        """See `Reader`."""
        self._over = True
        return self._read()

    def _read(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- telling -----------------------------------------------------------------------------------------------------

    def _content(self, size: int) -> None:
        """The next `size` characters are content."""
        if size:
            self._pieces.append(Content(self._text[:size]))
        self._drop(size)

    def _drop(self, size: int) -> None:
        """The next `size` characters are nothing that is told."""
        self._text, self._at = self._text[size:], 0

    def _begin(self, name: str) -> None:
        if self._calls == self._most:
            raise _NoCall
        self._pieces.append(CallStart(self._calls, name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(self._calls - 1, text))

    def _flush(self) -> None:
        if self._telling:
            self._arguments(self._text[: self._at])
            self._drop(self._at)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _more(self) -> Reading[bool]:
        """Wait for more text; False when there is none."""
        self._flush()
        if not self._over:
            yield
        return not self._over

    def _peek(self) -> Reading[str]:
        """The next character, which is not taken; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _take(self, *texts: str) -> Reading[str]:
        """Take the one of `texts` that comes next, "" if none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            if found := next(filter(rest.startswith, texts), ""):
                self._at += len(found)
                return found
            if not any(text.startswith(rest) for text in texts) or not (yield from self._more()):
                return ""

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take all characters that fit; `pattern` matches any number of them."""
        taken = ""
        while True:
            start = self._at
            match = pattern.match(self._text, start)
            self._at = match.end() if match else start
            taken += self._text[start : self._at]
            if self._at < len(self._text) or not (yield from self._more()):
                return taken

    def _expect(self, *texts: str) -> Reading[str]:
        """Take one of `texts`."""
        return (yield from self._take(*texts)) or _no_call()

    def _separated(self, *texts: str) -> Reading[str]:
        """Take one of `texts` and the white space around it."""
        yield from self._run(_SPACES)
        found = yield from self._expect(*texts)
        yield from self._run(_SPACES)
        return found

    # --- the answer --------------------------------------------------------------------------------------------------

    def _answer(self) -> Reading[None]:
        yield
        fresh = True  # nothing but white space since the start, or since a call
        while (yield from self._peek()):
            opened = yield from self._opens(fresh and self._form.bare)
            if opened is None:
                yield from self._talk(after_call=fresh and self._calls > 0)
                fresh = False
            else:
                fresh = yield from self._called(opened)

    def _opens(self, bare: bool) -> Reading[str | None]:
        """What opens a call here, taken with the white space around it: a mark, a fence, or nothing (""); or None."""
        yield from self._run(_SPACES)
        if (yield from self._take(self._form.open)):
            return self._form.open
        if bare and self._calls and self._form.between:
            yield from self._take(self._form.between)
            yield from self._run(_SPACES)
        fence = self._form.fence if bare and self._form.fence else ""
        if fence:
            fence = yield from self._take(fence)
            yield from self._run(_SPACES)
        return fence if bare and (yield from self._peek()) == "{" else None

    def _talk(self, after_call: bool) -> Reading[None]:
        """Content, up to what may be a call."""
        if after_call:
            self._drop(len(self._text) - len(self._text.lstrip(SPACE)))
        while True:
            end = self._text.find(self._form.open)
            sure = end if end >= 0 else len(self._text) - overlap(self._text, self._form.open)
            self._content(len(self._text[:sure].rstrip(SPACE)))
            if end >= 0:
                return
            self._at = len(self._text)
            if not (yield from self._more()):
                self._content(len(self._text))
                return

    def _called(self, opened: str) -> Reading[bool]:
        """A call, or several in a list, and the mark that closes them. False: there was none, or it broke."""
        calls, marked = self._calls, opened == self._form.open
        close = self._form.close if marked else "```" if opened else ""
        try:
            yield from self._run(_SPACES)
            yield from self._body(marked)
        except _NoCall:
            if self._over:  # for want of text: what is left belongs to it
                self._at = len(self._text)
            self._flush()
            self.broken = self.broken or self._telling
            self._telling = False
            self._content(self._at)
            return False
        if close:
            yield from self._run(_SPACES)
            yield from self._take(close)
        self._drop(self._at)
        return self._calls > calls

    def _body(self, marked: bool) -> Reading[None]:
        first = yield from self._peek()
        if first == "[" and marked:
            yield from self._list()
        elif first == "{" or not self._form.named:
            yield from self._object(marked)
        else:
            yield from self._named()

    def _list(self) -> Reading[None]:
        yield from self._separated("[")
        while True:
            yield from self._object(True)
            if (yield from self._separated(",", "]")) == "]":
                return

    def _named(self) -> Reading[None]:
        name = yield from self._run(_NAME)
        if (yield from self._take(CALL_ID)):
            yield from self._run(_NAME)
        yield from self._take(ARGS)
        yield from self._run(_SPACES)
        if name not in self._names:
            raise _NoCall
        yield from self._tell_arguments(name)

    def _object(self, marked: bool) -> Reading[None]:
        """An object with a name and arguments, in any order. A call begins with its arguments, once its name is known.

        marked: a mark said that this is a call, so that one without arguments is one too.
        """
        name, early = "", ""
        told = False
        yield from self._expect("{")
        while True:
            key = yield from self._key()
            start = self._at
            if key == "name" and not name:
                name = yield from self._known_name()
            elif key in _ARGUMENTS and name and not told:
                yield from self._tell_arguments(name)
                told = True
            elif key in _ARGUMENTS and not early and not told:
                yield from self._json_object(0)
                early = self._text[start : self._at]
            elif key == "name" or key in _ARGUMENTS:
                raise _NoCall
            else:
                yield from self._value(0)
            if name and early and not told:
                self._begin(name)
                told = True
                self._arguments(early)
                self._drop(self._at)
            if (yield from self._separated_end()):
                break
        if not told:
            if not (marked and name):
                raise _NoCall
            self._begin(name)
            self._arguments("{}")
        self._drop(self._at)

    def _separated_end(self) -> Reading[bool]:
        """Whether the object ends after this member."""
        yield from self._run(_SPACES)
        return (yield from self._expect(",", "}")) == "}"

    def _known_name(self) -> Reading[str]:
        name = json.loads((yield from self._string()))
        return str(name) if name in self._names else _no_call()

    def _tell_arguments(self, name: str) -> Reading[None]:
        """The call begins where its arguments do: until then all may be content."""
        if (yield from self._peek()) != "{":
            raise _NoCall
        self._begin(name)
        self._drop(self._at)
        self._telling = True
        yield from self._json_object(0)
        self._flush()
        self._telling = False

    # --- JSON (RFC 8259) ---------------------------------------------------------------------------------------------

    def _value(self, depth: int) -> Reading[None]:
        first = yield from self._peek()
        if first in _VALUES:
            yield from _VALUES[first](self, depth + 1)
        elif not _NUMBER.fullmatch((yield from self._run(_NUMERIC))):
            yield from self._expect("true", "false", "null")

    def _json_object(self, depth: int) -> Reading[None]:
        yield from self._expect("{")
        yield from self._run(_SPACES)
        if (yield from self._take("}")):
            return
        while True:
            yield from self._key()
            yield from self._value(_deeper(depth))
            if (yield from self._separated_end()):
                return

    def _array(self, depth: int) -> Reading[None]:
        yield from self._expect("[")
        yield from self._run(_SPACES)
        if (yield from self._take("]")):
            return
        while True:
            yield from self._run(_SPACES)
            yield from self._value(_deeper(depth))
            yield from self._run(_SPACES)
            if (yield from self._expect(",", "]")) == "]":
                return

    def _key(self) -> Reading[str]:
        """A member's name, and the colon and white space before its value."""
        yield from self._run(_SPACES)
        key = yield from self._string()
        yield from self._separated(":")
        return str(json.loads(key))

    def _string(self, depth: int = 0) -> Reading[str]:
        """A string as it is written, quotes and all."""
        yield from self._expect('"')
        parts = ['"']
        while True:
            parts.append((yield from self._run(_IN_STRING)))
            parts.append((yield from self._expect('"', "\\")))
            if parts[-1] == '"':
                return "".join(parts)
            parts.append((yield from self._expect(*'"\\/bfnrtu')))
            for _ in range(4 if parts[-1] == "u" else 0):
                parts.append((yield from self._expect(*_HEX)))


_VALUES: Mapping[str, Callable[[CallReader, int], Reading[object]]] = {
    "{": CallReader._json_object,
    "[": CallReader._array,
    '"': CallReader._string,
}


def _no_call() -> str:
    raise _NoCall


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise _NoCall
    return depth
