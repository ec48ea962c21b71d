"""Grammars of answers that hold calls or reasoning, for what a request demands of them.

Owes: a Lark grammar, for `text.grammar`, of answers that `ThinkReader` and `CallReader` read as what was demanded.
Does not know: requests, what the schemas say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.text.calls import CallFormat
from headrace.text.dialect import Dialect
from headrace.text.reasoning import Thinking

_BARE = '{"name": "'
_SPACE = r"/[ \t\r\n]*/"
_ANYTHING = "(?s:.*)"


@dataclass(frozen=True, slots=True)
class Demand:
    """What an answer must be.

    calls: (name, grammar of its arguments) of each tool that may be called. called: the answer is calls, nothing else.
    parallel: there may be several. content: the grammar of an answer without calls; None: any text.
    strict: a call without marks follows its grammar too, so that no other text may begin as one does.
    uncalled: the prompt shows tools, but there must be no calls.
    """

    calls: Sequence[tuple[str, str]] = ()
    called: bool = False
    parallel: bool = True
    content: str | None = None
    strict: bool = False
    uncalled: bool = False


def demanded(demand: Demand, dialect: Dialect, opened: bool) -> str:
    """The grammar of a whole answer. opened: the prompt ends within reasoning."""
    lark = _Lark(dialect)
    start = " | ".join(lark.answer(demand))
    if dialect.thinking is not None:
        start = f"{lark.thinking(dialect.thinking, opened)} ({start})"
    return "\n".join([f"start: {start}", *lark.rules, ""])


class _Lark:
    """rules: those beside the first."""

    def __init__(self, dialect: Dialect) -> None:
        self.rules: list[str] = []
        self._form = dialect.calls
        self._control = dialect.control
        self._parts = re.compile("(" + "|".join([*map(re.escape, dialect.control), '"[^"]*"', "[{}]"]) + ")")

    def thinking(self, marks: Thinking, opened: bool) -> str:
        """Reasoning, which a model may leave out unless the prompt has begun it."""
        self._until("thought", marks.close)
        return f"thought {_SPACE}" if opened else f"({self._literal(marks.open)} thought {_SPACE})?"

    def answer(self, demand: Demand) -> list[str]:
        """What may follow the reasoning."""
        form = self._form
        if form is not None and demand.uncalled:
            return [self._text(form.open, *([_like_a_call(form)] if form.bare else []))]
        if form is None or not demand.calls:
            return [demand.content or self._text()]
        for n, (_, arguments) in enumerate(demand.calls):
            self.rules.append(f"arguments_{n}: {arguments}")
        if demand.called:
            return [self._calls(form, demand, form.head + form.before)]
        bare = [self._call("bare", demand, _BARE, form.middle, "}")] if form.bare else []
        if demand.content is not None:
            return [demand.content, self._calls(form, demand, form.head + form.before), *bare]
        return [*self._spoken(form, demand), *(bare if demand.strict else [])]

    def _spoken(self, form: CallFormat, demand: Demand) -> list[str]:
        """Text, and calls after it if their mark comes."""
        unlike = [_like_a_call(form)] if form.bare and demand.strict else []
        first, mark = form.head + form.before, form.open
        text = self._text(mark, *unlike)
        if not first.startswith(mark):
            return [text]
        begun = f"{text} {self._literal(mark)}" if mark in self._control else self._text_to(mark, *unlike)
        return [text, f"{begun} {self._calls(form, demand, first.removeprefix(mark))}"]

    def _calls(self, form: CallFormat, demand: Demand, before: str) -> str:
        """A call, and others that follow it. before: the name of the first."""
        calls = self._call("first", demand, before, form.middle, form.after)
        if demand.parallel:
            calls += f" ({self._call('more', demand, form.joint + form.before, form.middle, form.after)})*"
        return f"{calls} {self._literal(form.tail)}"

    def _call(self, rule: str, demand: Demand, before: str, middle: str, after: str) -> str:
        """The rule of one call of any of the tools."""
        each = [f"{rule}_{n}" for n in range(len(demand.calls))]
        self.rules.append(f"{rule}: {' | '.join(each)}")
        for n, (name, _) in enumerate(demand.calls):
            begins, ends = self._literal(before + name + middle), self._literal(after)
            self.rules.append(f"{each[n]}: {begins} arguments_{n} {ends}")
        return rule

    def _text(self, mark: str = "", *unlike: str) -> str:
        """Any text without the mark. unlike: regular expressions of what it may not be."""
        if mark and mark not in self._control:
            unlike = (f"{_ANYTHING}{_escaped(mark)}{_ANYTHING}", *unlike)
        return self._unlike("TEXT", _ANYTHING, unlike)

    def _text_to(self, mark: str, *unlike: str) -> str:
        """The same up to the mark, which is part of it."""
        end = f"{_ANYTHING}{_escaped(mark)}"
        return self._unlike("SAID", end, (f"{end}(?s:.+)", *unlike))

    def _unlike(self, rule: str, pattern: str, others: Sequence[str]) -> str:
        self.rules.append(f"{rule}: /{pattern}/{''.join(f' & ~/{each}/' for each in others)}")
        return rule

    def _until(self, rule: str, mark: str) -> None:
        """The rule of a text up to the first such mark, and the mark."""
        if mark in self._control:
            self.rules.append(f"{rule}: /{_ANYTHING}/ <[{self._control[mark]}]>")
        else:
            self.rules.append(f"{rule}[suffix={json.dumps(mark)}]: /{_ANYTHING}/")

    def _literal(self, text: str) -> str:
        """This text; marks in it that are control tokens are these tokens.

        It is cut as a schema's grammar is, whose lexemes must begin and end where these do.
        """
        parts = [part for part in self._parts.split(text) if part]
        return " ".join(f"<[{self._control[part]}]>" if part in self._control else json.dumps(part) for part in parts)


def _like_a_call(form: CallFormat) -> str:
    """A regular expression for texts that begin as a call without marks does."""
    fence = f"({_escaped(form.fence)}{_SPACE[1:-1]})?" if form.fence else ""
    return f"{_SPACE[1:-1]}{fence}\\{{{_ANYTHING}"


def _escaped(text: str) -> str:
    """A regular expression for this text, between slashes."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)
