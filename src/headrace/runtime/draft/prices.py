"""What steps with drafted tokens take: the learnt times of steps, put right by what such steps really took.

Owes: prices that a wrong prediction does not keep wrong. Does not know: what a draft is worth, clocks.

The learnt times are straight lines between one row and hundreds; a step of nine rows may take more than a line says, as
kernels work on eight at a time. So steps with drafts are compared with those without: how many times the prediction
each took. A correction fades while nothing is drafted, for a new trial now and then.
"""

from __future__ import annotations

from headrace.core.scheduler import Scheduled
from headrace.runtime.times import StepTimes

FRESH = 16  # steps without drafts after which prices are made anew
_MOST = 64  # drafted tokens in a step
_NEW = 0.1  # what one step changes
_FADING = 0.002  # of the correction, in each step without drafts
_OUTLIER = 3.0  # times the prediction: other work held the step up


class Prices:
    """By the number of sequences that decode. longest: tokens drafted after one."""

    def __init__(self, times: StepTimes, longest: int) -> None:
        self._times = times
        self._longest = longest
        self._predicted: dict[int, list[float]] = {}
        self._prices: dict[int, list[float]] = {}
        self._made: dict[int, int] = {}  # when
        self._off: dict[int, list[float]] = {}  # times the prediction, without drafts and with
        self._steps = 0

    def of(self, items: list[Scheduled]) -> list[float]:
        """Seconds of a step of these items with 0, 1, ... drafted tokens."""
        count = len(items)
        self._steps += 1
        if count not in self._made or self._steps - self._made[count] >= FRESH:
            self._made[count] = self._steps
            predicted = self._times.drafting(items, min(count * self._longest, _MOST))
            plain, drafted = self._off.setdefault(count, [1.0, 1.0])
            self._predicted[count] = predicted
            self._prices[count] = [predicted[0], *(seconds * max(drafted / plain, 1.0) for seconds in predicted[1:])]
        return self._prices[count]

    def learn(self, items: list[Scheduled], seconds: float) -> None:
        """A step of items that were priced took so long."""
        off, predicted = self._off.get(len(items)), self._predicted.get(len(items))
        if off is None or predicted is None:
            return
        drafted = sum([len(item.draft) for item in items])
        kind = 1 if drafted else 0
        ratio = min(seconds / predicted[min(drafted, len(predicted) - 1)], _OUTLIER * off[0])
        off[kind] += _NEW * (ratio - off[kind])
        if drafted:
            self._made.pop(len(items), None)
        else:
            off[1] += _FADING * (off[0] - off[1])
