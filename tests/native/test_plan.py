"""Plans by themselves: what is built must fit together, threads share the work, and the machinery can be watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from headrace.base.formats import FORMATS
from headrace.program import Sampled, Step
from headrace.quant.blocks import quantize
from steps import sampling

native = pytest.importorskip("headrace._native", reason="the native module isn't built")
TOKENS = native.Extent.TOKENS
LOGITS = native.Extent.LOGITS
SLOTS = native.Extent.SLOTS

WIDTH, VOCAB = 32, 48


def packed(rows: int = VOCAB, columns: int = WIDTH, fmt: str = "f32", seed: int = 0) -> Any:
    made = native.Packed(fmt, rows, columns)
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    made.pack(0, quantize(FORMATS[fmt], values))
    return made


def plan(threads: int = 2, **changes: Any) -> Any:
    limits = {"tokens": 64, "sequences": 2, "pages": 4, "context": 64, "vocab": VOCAB, "chunk": 32}
    return native.Plan(isa="", threads=threads, merge=True, **{"layers": [(1, 32, False)]} | limits | changes)


class Parts:
    """A plan with one of everything that calls can refer to."""

    def __init__(self, **changes: Any) -> None:
        self.plan = plan(**changes)
        self.plan.route_to(2)
        self.x = (self.plan.buffer(WIDTH, TOKENS), 0, WIDTH)
        self.y = (self.plan.buffer(WIDTH, TOKENS), 0, WIDTH)
        self.wide = (self.plan.buffer(2 * WIDTH, TOKENS), 0, 2 * WIDTH)
        self.r = (self.plan.buffer(WIDTH, LOGITS), 0, WIDTH)
        self.z = (self.plan.buffer(VOCAB, LOGITS), 0, VOCAB)
        self.slots = (self.plan.buffer(WIDTH, SLOTS), 0, WIDTH)
        self.input = self.plan.prepared(WIDTH, TOKENS, True, False, False)
        self.slot_input = self.plan.prepared(WIDTH, SLOTS, True, False, False)
        self.routing = (self.plan.buffer(4, TOKENS), 0, 4)
        self.tail = self.plan.prepared(WIDTH, LOGITS, True, False, False)
        self.table = self.plan.table(*(np.ones((64, 8), np.float32),) * 2)
        self.weight = packed()
        self.ones = np.ones(WIDTH, np.float32)

    def choose(self) -> None:
        """Two of four experts."""
        self.plan.choose((self.x[0], 0, 4), 2, True, self.routing)

    def finish(self) -> None:
        """embed, rows, linear."""
        self.plan.embed([self.weight], 1.0, self.x)
        self.plan.rows(self.x, self.r)
        self.plan.prepare(self.r, self.tail)
        self.plan.linear("head", self.tail, [(self.weight, 0, VOCAB)], self.z)
        self.plan.finish(self.z)


MISFITS: dict[str, Callable[[Parts], None]] = {
    "a buffer that isn't there": lambda p: p.plan.add((99, 0, WIDTH), p.x, p.y),
    "a negative buffer": lambda p: p.plan.add((-1, 0, WIDTH), p.x, p.y),
    "columns beyond a buffer": lambda p: p.plan.add((p.x[0], 1, WIDTH), p.x, p.y),
    "columns that overflow": lambda p: p.plan.add((p.x[0], 2**31 - 1, WIDTH), p.x, p.y),
    "no columns": lambda p: p.plan.add((p.x[0], 0, 0), p.x, p.y),
    "a buffer without columns": lambda p: p.plan.buffer(0, TOKENS),
    "add of two widths": lambda p: p.plan.add(p.x, p.wide, p.y),
    "norm of another width": lambda p: p.plan.norm(p.x, np.ones(8, np.float32), 1, 1e-5, p.y),
    "norm of too many heads": lambda p: p.plan.norm(p.x, p.ones, 2, 1e-5, p.y),
    "norm of another width into an input": lambda p: p.plan.norm_into(
        p.wide, np.ones(2 * WIDTH, np.float32), 1e-5, p.input
    ),
    "norm by other weights into an input": lambda p: p.plan.norm_into(p.x, np.ones(8, np.float32), 1e-5, p.input),
    "norm of other rows into an input": lambda p: p.plan.norm_into(p.x, p.ones, 1e-5, p.tail),
    "glu that isn't half": lambda p: p.plan.glu(p.x, 0, p.y),
    "an activation that isn't there": lambda p: p.plan.glu(p.wide, 3, p.y),
    "bias of another width": lambda p: p.plan.bias(p.x, np.ones(3, np.float32), p.y),
    "scale into another width": lambda p: p.plan.scale(p.x, 1.0, p.wide),
    "softcap without a cap": lambda p: p.plan.softcap(p.x, 0.0, p.y),
    "rope without a table": lambda p: p.plan.rope(p.x, 32, 7, p.y),
    "rope over half a head": lambda p: p.plan.rope(p.x, 24, p.table, p.y),
    "rope of more than a head": lambda p: p.plan.rope(p.x, 8, p.table, p.y),
    "a table shorter than the context": lambda p: p.plan.table(*(np.ones((63, 8), np.float32),) * 2),
    "cos and sin of two sizes": lambda p: p.plan.table(np.ones((64, 8), np.float32), np.ones((64, 4), np.float32)),
    "a layer that isn't there": lambda p: p.plan.write(p.x, p.x, 1),
    "keys of another width": lambda p: p.plan.write(p.wide, p.wide, 0),
    "attend with half a head": lambda p: p.plan.attend((p.x[0], 0, 16), 0, 1.0, 0, 0.0, (p.y[0], 0, 16)),
    "a negative window": lambda p: p.plan.attend(p.x, 0, 1.0, -1, 0.0, p.y),
    "rows from logits": lambda p: p.plan.rows(p.r, p.r),
    "prepare of another width": lambda p: p.plan.prepare(p.wide, p.input),
    "prepare of other rows": lambda p: p.plan.prepare(p.x, p.tail),
    "an input that isn't there": lambda p: p.plan.prepare(p.x, 9),
    "linear of another width": lambda p: p.plan.linear("l", p.input, [(p.weight, 0, 32)], (p.wide[0], 0, 48)),
    "linear of other columns": lambda p: p.plan.linear("l", p.input, [(packed(32, 64), 0, 32)], p.y),
    "linear beyond the matrix": lambda p: p.plan.linear("l", p.input, [(p.weight, 32, 32)], p.y),
    "linear from the middle of a panel": lambda p: p.plan.linear("l", p.input, [(p.weight, 8, 32)], p.y),
    "linear of part of a panel": lambda p: p.plan.linear("l", p.input, [(p.weight, 0, 24), (p.weight, 0, 8)], p.y),
    "linear not prepared for its format": lambda p: p.plan.linear("l", p.input, [(packed(32, 32, "q8_0"), 0, 32)], p.y),
    "linear with another residual": lambda p: p.plan.linear("l", p.input, [(packed(32), 0, 32)], p.y, None, p.wide),
    "linear with rows of logits": lambda p: p.plan.linear("l", p.tail, [(packed(32), 0, 32)], p.y),
    "linear with another bias": lambda p: p.plan.linear("l", p.input, [(packed(32), 0, 32)], p.y, p.ones[:8]),
    "embed of another width": lambda p: p.plan.embed([p.weight], 1.0, p.wide),
    "embed of nothing": lambda p: p.plan.embed([], 1.0, p.x),
    "more choices than experts": lambda p: p.plan.choose((p.x[0], 0, 2), 3, True, (p.y[0], 0, 6)),
    "no experts": lambda p: p.plan.sort((p.x[0], 0, 4), 0),
    "more choices than announced": lambda p: p.plan.sort((p.x[0], 0, 6), 4),
    "combine of tokens": lambda p: p.plan.combine(p.x, p.y, p.y),
    "fewer logits than ids": lambda p: p.plan.finish(p.r),
    "logits of tokens": lambda p: p.plan.finish(p.wide),
    "norm of tokens into logits": lambda p: p.plan.norm(p.x, p.ones, 1, 1e-5, p.r),
    "norm of logits into tokens": lambda p: p.plan.norm(p.r, p.ones, 1, 1e-5, p.x),
    "glu of tokens into logits": lambda p: p.plan.glu(p.wide, 0, p.r),
    "add of tokens to logits": lambda p: p.plan.add(p.r, p.x, p.r),
    "bias of tokens into logits": lambda p: p.plan.bias(p.x, p.ones, p.r),
    "scale of logits into tokens": lambda p: p.plan.scale(p.r, 2.0, p.x),
    "softcap of logits into tokens": lambda p: p.plan.softcap(p.r, 2.0, p.x),
    "rope into logits": lambda p: p.plan.rope(p.x, 32, p.table, p.r),
    "embed into logits": lambda p: p.plan.embed([packed(VOCAB)], 1.0, p.r),
    "choose of logits for tokens": lambda p: p.plan.choose(p.r, 2, True, (p.x[0], 0, 4)),
    "sort of what nobody chose": lambda p: p.plan.sort((p.x[0], 0, 4), 4),
    "sort among other experts": lambda p: (p.choose(), p.plan.sort(p.routing, 5)),
    "slots that nothing fills": lambda p: p.plan.prepare(p.x, p.slot_input),
    "combine of what was not sorted": lambda p: p.plan.combine(p.slots, p.routing, p.x),
    "combine into logits": lambda p: (p.choose(), p.plan.sort(p.routing, 4), p.plan.combine(p.slots, p.routing, p.r)),
    "more choices once there are slots": lambda p: p.plan.route_to(8),
    "an op after the last": lambda p: (p.finish(), p.plan.attend(p.x, 0, 1.0, 0, 0.0, p.x)),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="plan"):
        MISFITS[what](Parts())


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 0},
        {"pages": 0},
        {"vocab": -1},
        {"chunk": 0},
        {"layers": [(1, 33, False)]},
        {"layers": [(1, 258, False)]},
        {"layers": [(0, 32, False)]},
        {"layers": [(1, 32, True)]},
        {"slots": -1},
        {"context": 2**31 - 1},
        {"tokens": 2**31 - 1},
        {"threads": 0},
        {"threads": 257},
        {"isa": "mmx"},
    ],
)
def test_plans_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        native.Plan(
            **{
                "isa": "",
                "threads": 1,
                "merge": True,
                "layers": [(1, 32, False)],
                "tokens": 8,
                "sequences": 1,
                "pages": 1,
                "context": 32,
                "vocab": VOCAB,
                "chunk": 8,
                **changes,
            }
        )


def step(rows: int = 40) -> tuple[Step, Sampled]:
    """One sequence whose every row yields logits."""
    arrays = (
        np.asarray(a, np.int32) for a in (np.arange(rows) % VOCAB, range(rows), [0, rows], [rows], [0, 2], [0, 1])
    )
    made = Step(
        *arrays, np.zeros(0, np.int32), np.arange(rows, dtype=np.int32), sampling(rows, VOCAB), keep_logits=True
    )
    ints, floats = [np.empty(rows, np.int32) for _ in range(3)], np.empty(rows, np.float32)
    top = np.empty((rows, 0), np.int32), np.empty((rows, 0), np.float32)
    logits = np.full((rows, VOCAB), np.nan, np.float32)
    return made, Sampled(ints[0], floats, ints[1], *top, ints[2], logits)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_finished_plan_runs_and_can_be_watched(threads: int) -> None:
    """40 logits rows: a chunk of 32 and one of 8."""
    parts = Parts(threads=threads)
    parts.finish()
    parts.plan.profile(True)
    made, out = step()
    parts.plan.run(made, out)
    table = np.stack([parts.weight.unpack_row(i) for i in range(VOCAB)])
    want = table[made.tokens] @ table.T
    assert out.logits is not None and np.allclose(out.logits, want, rtol=1e-4, atol=1e-4)
    assert np.array_equal(out.tokens, want.argmax(-1))
    runs = {name: n for name, n, seconds in parts.plan.timings() if seconds >= 0}
    assert runs == {"embed": 1, "rows": 2, "head": 2, "keep": 2, "pick": 2}
    rows = np.empty((40, WIDTH), np.float32)
    parts.plan.copy(parts.x, rows)
    assert np.array_equal(rows, table[made.tokens])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pieces", [(304,), (192, 112), (80, 224)], ids=str)
def test_the_heads_maxima_are_those_that_the_sampler_finds(pieces: tuple[int, ...], threads: int) -> None:
    """Tokens of a plan and of the sampler by itself, from the same logits: blocks of 64 across units and pieces."""
    vocab = 300  # and 4 of padding
    p = plan(threads, vocab=vocab)
    x, r = (p.buffer(WIDTH, TOKENS), 0, WIDTH), (p.buffer(WIDTH, LOGITS), 0, WIDTH)
    z, tail = (p.buffer(304, LOGITS), 0, 304), p.prepared(WIDTH, LOGITS, True, False, False)
    p.embed([packed()], 1.0, x)
    p.rows(x, r)
    p.prepare(r, tail)
    p.linear("head", tail, [(packed(n, seed=i), 0, n) for i, n in enumerate(pieces)], z)
    p.finish(z)
    many = {"temperature": np.linspace(0, 2, 40, dtype=np.float32), "top_p": np.tile(np.float32([1, 0.8]), 20)}
    made, out = step()
    made = replace(made, sampling=sampling(40, vocab, **many, logprobs=np.zeros(40, np.int32)))
    out.logits = np.empty((40, vocab), np.float32)
    for _ in range(2):  # with what the first one left
        p.run(made, out)
        at = {f.name: getattr(made.sampling, f.name) for f in fields(made.sampling)}
        tokens, logprob, rank, *_ = native.sample("", out.logits, vocab, **at)
        assert np.array_equal(out.tokens, tokens)
        assert out.logprob.tobytes() == logprob.tobytes() and np.array_equal(out.rank, rank)


def test_a_logit_that_is_no_number_is_reported_by_whoever_finds_the_maxima() -> None:
    parts = Parts(vocab=VOCAB)
    weight = native.Packed("f32", 256, WIDTH)
    rows = np.random.default_rng(1).normal(size=(256, WIDTH)).astype(np.float32)
    rows[200, 3] = np.nan
    weight.pack(0, rows.view(np.uint8))
    p = plan(2, vocab=256)
    x, r = (p.buffer(WIDTH, TOKENS), 0, WIDTH), (p.buffer(WIDTH, LOGITS), 0, WIDTH)
    z, tail = (p.buffer(256, LOGITS), 0, 256), p.prepared(WIDTH, LOGITS, True, False, False)
    p.embed([parts.weight], 1.0, x)
    p.rows(x, r)
    p.prepare(r, tail)
    p.linear("head", tail, [(weight, 0, 256)], z)
    p.finish(z)
    made, out = step()
    out.logits = np.empty((40, 256), np.float32)
    p.run(replace(made, sampling=sampling(40, 256)), out)
    assert (out.status == 1).all()


def test_copies_stay_inside_their_buffer() -> None:
    parts = Parts()
    with pytest.raises(ValueError, match="rows"):
        parts.plan.copy(parts.x, np.empty((65, WIDTH), np.float32))
    with pytest.raises(ValueError, match="widths"):
        parts.plan.copy(parts.x, np.empty((4, WIDTH + 1), np.float32))


def test_outputs_must_have_the_steps_sizes() -> None:
    parts = Parts()
    parts.finish()
    made, out = step()
    for name, array in {
        "tokens": np.empty(39, np.int32),
        "logprob": np.empty(40, np.float64),
        "top_logprobs": np.empty((40, 1), np.float32),
        "logits": np.empty((40, VOCAB - 1), np.float32),
        "status": np.broadcast_to(np.int32(0), (40,)),
    }.items():
        kept = getattr(out, name)
        setattr(out, name, array)
        with pytest.raises(ValueError):
            parts.plan.run(made, out)
        setattr(out, name, kept)
    parts.plan.run(made, out)


def test_a_plan_runs_only_when_finished_and_only_once_at_a_time() -> None:
    parts = Parts()
    with pytest.raises(ValueError, match="finished"):
        parts.plan.run(*step())
    parts.finish()
    with pytest.raises(ValueError, match="finished"):
        parts.plan.add(parts.x, parts.x, parts.y)
    refused = run_together(parts, 4, 50)
    assert all("one at a time" in str(e) for e in refused)
    parts.plan.run(*step())


def run_together(parts: Parts, threads: int, times: int) -> list[Exception]:
    """Errors of several Python threads that run the same plan."""
    errors: list[Exception] = []

    def work() -> None:
        for _ in range(times):
            try:
                parts.plan.run(*step())
            except RuntimeError as e:
                errors.append(e)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return errors


def test_many_more_threads_than_processors_still_make_progress() -> None:
    parts = Parts(threads=native.allowed_processors() * 4)
    parts.finish()
    start = time.monotonic()
    for _ in range(20):
        parts.plan.run(*step())
    assert time.monotonic() - start < 20


def test_plans_come_and_go_without_leaving_threads() -> None:
    def count() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads"))

    before = count()
    for _ in range(10):
        parts = Parts(threads=3)
        parts.finish()
        parts.plan.run(*step())
        del parts
    assert count() <= before  # a thread of an earlier test may have been ending


class Machine:
    """Steps of 4 ms, `alone` seconds on one thread; with company a thread is away for a while in steps of all."""

    def __init__(self, threads: int, alone: float = 0.016) -> None:
        self.company, self.all, self.alone = native.Company(threads), threads, alone

    def steps(self, n: int, away: float = 0.0, rows: int = 1) -> list[int]:
        """The threads of each step."""
        threads = []
        for _ in range(n):
            threads.append(self.company.threads())
            if threads[-1] == 1:
                self.company.ran(rows, self.alone, 0.0)
            else:
                self.company.ran(rows, 0.004 + away, away)
        return threads


def test_one_thread_takes_over_while_there_is_company() -> None:
    machine = Machine(2, alone=0.006)
    assert machine.steps(100) == [2] * 100
    assert machine.steps(100, 0.001) == [2] * 100  # a fifth of a step: nothing to speak of
    assert machine.steps(1000, 0.003).count(2) < 30
    assert machine.steps(400)[-200:] == [2] * 200
    assert machine.steps(4, 0.003) == [2, 1, 1, 2]  # the past is forgotten


def test_many_threads_stay_although_one_is_away_when_one_alone_is_slower() -> None:
    assert Machine(8).steps(5000, 0.003).count(1) < 40


def test_steps_of_other_sizes_are_not_held_against_a_disturbed_one() -> None:
    machine = Machine(2, alone=0.006)
    assert machine.steps(1, 0.003, rows=8) == [2]
    machine.alone = 1.0
    assert machine.steps(2, 0.003, rows=32) == [1, 1]
    assert machine.steps(2, 0.003, rows=8) == [2, 1]


def test_one_thread_has_no_company() -> None:
    assert Machine(1).steps(50) == [1] * 50


@pytest.mark.parametrize(
    "changes",
    [{"pages": 3}, {"threads": 1}, {"layers": [(1, 64, False)]}, {"layers": [(1, 32, False)] * 2}, {"slots": 2}],
)
def test_a_plan_beside_another_has_its_cache(changes: dict[str, Any]) -> None:
    first = plan()
    assert plan(beside=first, tokens=8, sequences=1).page_bytes == first.page_bytes
    with pytest.raises(ValueError, match="plans"):
        plan(beside=first, **changes)


def test_a_plan_apart_has_pages_of_its_own() -> None:
    first = plan()
    assert plan(beside=first, apart=True, pages=3, layers=[(1, 32, False)] * 2).page_bytes != first.page_bytes
    with pytest.raises(ValueError, match="threads"):
        plan(beside=first, apart=True, threads=1)
