"""What is asked of an engine: prompts, lengths, arrivals. All random, all from a seed.

Lengths are written ``512`` (always), ``64-1024`` (uniform, both ends included) or ``256~0.8`` (log-normal with median
256 and that standard deviation of its logarithm, as lengths of real traffic are, cut at sixteen medians).
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from headrace.base.errors import SettingError

IDS = range(100, 256)  # token ids that every model has
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "at", "be")
_LENGTHS = re.compile(r"(\d+)(?:-(\d+)|~(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths, from 1 on. low, high: bounds of a uniform one; sigma: of a log-normal one, or 0."""

    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def of(cls, text: str | Lengths) -> Lengths:
        """Reads one; SettingError says how it is written."""
        if isinstance(text, Lengths):
            return text
        match = _LENGTHS.fullmatch(text.strip())
        if match is None or int(match[1]) < 1 or (match[2] and int(match[2]) < int(match[1])):
            raise SettingError(f"{text!r} is no length; write 512, 64-1024 or 256~0.8 (median~sigma)", param="length")
        low = int(match[1])
        return cls(low, int(match[2] or low), float(match[3] or 0))

    def __str__(self) -> str:
        tail = f"~{self.sigma:g}" if self.sigma else f"-{self.high}" if self.high > self.low else ""
        return f"{self.low}{tail}"

    @property
    def most(self) -> int:
        """The largest that can come."""
        return 16 * self.low if self.sigma else self.high

    def draw(self, rng: random.Random) -> int:
        """One of them."""
        if self.sigma:
            return max(1, min(self.most, round(self.low * math.exp(rng.gauss(0, self.sigma)))))
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompt ids, tokens to generate, seconds after the start at which it arrives."""

    prompt: list[int]
    output: int
    at: float = 0.0

    @property
    def text(self) -> str:
        """As many common words: about a token each, and the answers to them are text, not pieces of characters."""
        return " ".join(WORDS[i % len(WORDS)] for i in self.prompt)


def asks(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    prefix: int = 0,
    rate: float = math.inf,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[Ask]:
    """Requests of random ids. prefix: ids that all prompts begin with, besides `inputs`.

    rate: requests a second; inf: all at once. burstiness: shape of the gamma distribution that gaps are drawn from: 1
    is a Poisson process, less is burstier, inf is one at a time at fixed intervals.
    """
    if not (rate > 0 and burstiness > 0):
        raise SettingError("request_rate and burstiness must be above zero", param="request_rate")
    rng, gaps = random.Random(seed), random.Random(seed + 1)
    shared = rng.choices(IDS, k=prefix)
    at, made = 0.0, []
    for _ in range(count):
        made.append(Ask(shared + rng.choices(IDS, k=inputs.draw(rng)), outputs.draw(rng), at))
        at += _gap(gaps, rate, burstiness)
    return made


def _gap(rng: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(rate) or math.isinf(burstiness):
        return 1 / rate
    return rng.gammavariate(burstiness, 1 / (rate * burstiness))
