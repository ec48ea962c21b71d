"""Requests over time: add, abort, step. One engine owns one model, its KV cache, its scheduler and its step trace.

Does not know: text (ids in, ids out), HTTP, other processes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Any

from headrace.base.errors import CapacityError, EngineError, SettingError
from headrace.base.log import log
from headrace.base.settings import PAGE, EngineSettings
from headrace.base.speculation import Speculation
from headrace.core.scheduler import Batch, Limits, Scheduled, Scheduler
from headrace.core.sequence import TIMEOUT, Finish, Sequence
from headrace.core.trace import StepTrace
from headrace.engine.account import Ledger
from headrace.engine.messages import STEP_TOKENS, Add, ModelInfo, Stats, Update, WireLogprobs
from headrace.program.cost import work
from headrace.program.roof import Rates
from headrace.runtime.amounts import Amounts
from headrace.runtime.cache import Cache, Room
from headrace.runtime.draft import Apart, LookUps, ModelDraft, Shared, Speculator
from headrace.runtime.kvfile import PageFile
from headrace.runtime.load import LoadedModel
from headrace.runtime.runner import Runner, StepResult, TokenLogprobs
from headrace.runtime.times import Pace, StepTimes
from headrace.text.grammar import Constraint

_EVERY = 32  # steps after which the rates that are told are looked at again
_REMEMBERED = 16384  # sequences whose request the trace can still name


class Engine:
    """Sequences of requests on one model. Not thread-safe: one caller adds, aborts and steps.

    tokens: rows of a step at most. rates: the machine's, to tell how near to its roof the steps are.
    identity: see the function of that name. store: where prefixes are kept beyond this engine's life, its own from
    now on.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        info: ModelInfo,
        tokens: int,
        rates: Rates | None = None,
        store: PageFile | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.info = info
        limits = Limits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=tokens,
            max_model_len=info.max_model_len,
            pages=info.pages,
            page_size=PAGE,
            prefix_caching=settings.enable_prefix_caching,
            batching=settings.batching,
            kv_cache=settings.kv_cache,
            window=info.window,
            slots=info.slots,
        )
        growth = work(model.program, model.sizes, model.kv_bytes)
        self.times = StepTimes(growth)
        bf16 = settings.dtype == "bfloat16"
        self.amounts = Amounts(model.program, model.sizes, growth, tokens, rates, bf16)
        self.identity = identity(model.fingerprint, settings, info.kv_cache_dtype)
        pace = _pace(settings.max_inter_token_ms, self.times, tokens)
        self.scheduler = Scheduler(limits, salt=self.identity, pace=pace, store=store)
        if store is not None:
            store.slot_of = self.scheduler.slot_of
        self.runner = Runner(
            model.executor,
            max_num_seqs=settings.max_num_seqs,
            context=limits.context,
            vocab=info.vocab_size,
            slot_of=self.scheduler.slot_of,
        )
        self.speculator: Speculator | None = None
        if settings.speculative_config is not None and settings.kv_cache:
            self.speculator = self._speculator(Speculation.of(settings.speculative_config))
        self.trace = StepTrace()
        self.ledger = Ledger(self.times)
        self._requests: dict[str, list[Sequence]] = {}
        self._names: OrderedDict[int, str] = OrderedDict()
        self._prompt: dict[int, list[WireLogprobs | None]] = {}
        self._began: list[str] = []
        self._deadlines: list[tuple[float, int, str]] = []  # a heap: when, a sequence of the request, its name
        self._rates = (0.0, 0.0)
        self._next = 0
        self._prompt_tokens = self._cached_tokens = self._generated = self._steps = self._tokens = 0
        self._sizes = [0] * (len(STEP_TOKENS) + 1)
        self._schedule_s = self._run_s = self._commit_s = 0.0
        self._owed = 0.0  # seconds of the last commit, which the next step is charged

    def _speculator(self, config: Speculation) -> Speculator:
        drafter = self.model.drafter
        assert (drafter is not None) == (config.method in ("self", "draft_model"))
        if drafter is None:
            return LookUps(config, self.times)
        held = Apart(self.scheduler.pool) if drafter.apart else Shared()
        return ModelDraft(config, self.times, drafter, self.runner, held)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def add(self, request: Add, constraint: Constraint | None = None) -> None:
        """Queue a request's sequences; RequestError if they can never run. The parameters have been checked.

        constraint: of the request's grammar.
        """
        assert (constraint is None) == (request.grammar is None)
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is in use")
        sequences = [self._sequence(request, choice) for choice in range(request.params.n)]
        if constraint is not None:
            for sequence in sequences:
                sequence.constraint = constraint.copy()
        added: list[Sequence] = []
        try:
            for sequence in sequences:
                self.scheduler.add(sequence)
                added.append(sequence)
        except Exception:
            for sequence in added:
                self.scheduler.finish(sequence.id, Finish("abort"))
            for sequence in sequences:
                self._forget(sequence)
            raise
        self._requests[request.request_id] = sequences
        if request.terms.deadline:
            heappush(self._deadlines, (request.terms.deadline, sequences[0].id, request.request_id))

    def _sequence(self, request: Add, choice: int) -> Sequence:
        sequence = Sequence(
            self._next,
            request.request_id,
            choice,
            request.params,
            request.seed,
            request.prompt,
            stop_ids=request.stop_ids,
            max_len=self.info.max_model_len,
            salt=request.terms.cache_salt,
            priority=request.terms.priority,
            tenant=request.terms.tenant,
            weight=request.terms.weight,
            drafted=request.terms.drafted,
        )
        self._next += 1
        self._names[sequence.id] = request.request_id
        if len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)
        self.ledger.open(sequence, request.arrival)
        if sequence.wants_prompt_logprobs:
            self._prompt[sequence.id] = [None] * len(request.prompt)
        return sequence

    def abort(self, request_id: str) -> list[Update]:
        """End a request's sequences, whatever they are doing; their last news. Unknown or ended ids are fine."""
        sequences = self._requests.pop(request_id, [])
        return [update for sequence in sequences for update in self._stop(sequence, Finish("abort"))]

    def stopped(self, request_id: str, choice: int, stop: str) -> list[Update]:
        """End one choice whose text met a stop string; its last news."""
        sequences = [s for s in self._requests.get(request_id, []) if s.choice == choice]
        updates = [update for sequence in sequences for update in self._stop(sequence, Finish("stop", stop))]
        self._settle(request_id)
        return updates

    def _stop(self, sequence: Sequence, finish: Finish) -> list[Update]:
        if not self.scheduler.finish(sequence.id, finish):
            return []
        update = self._update(sequence, [], None)
        self._forget(sequence)
        return [update]

    def _forget(self, sequence: Sequence) -> None:
        self.runner.forget(sequence)
        self.ledger.drop(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        self._prompt.pop(sequence.id, None)

    def _settle(self, request_id: str) -> None:
        if all(s.finish is not None for s in self._requests.get(request_id, [])):
            self._requests.pop(request_id, None)

    def step(self) -> list[Update]:
        """Run one step; the news of every sequence that drew a token or ended. [] when there was nothing to do."""
        t0 = time.monotonic()
        updates = self._expire(t0) if self._deadlines else []
        batch = self.scheduler.schedule()
        if batch is None:
            return updates
        for sequence in batch.preempted:
            self.runner.forget(sequence)
            self.ledger.preempted(sequence)
        t1 = time.monotonic()
        try:
            if self.speculator is not None and (guesses := self.speculator.guesses(batch.items)):
                self.scheduler.draft(batch, guesses)
                self.scheduler.draft(batch, self.speculator.fill(batch))
                t1 = time.monotonic()
            result = self.runner.run(batch)
        except Exception as error:
            log.exception("a step failed; its requests end with an error")
            self._charge(batch, t0, t1, time.monotonic(), again=False)
            message = f"the step failed: {type(error).__name__}"
            return updates + self._fail([item.sequence for item in batch.items], message)
        t2 = time.monotonic()
        self._charge(batch, t0, t1, t2, again=result.again)
        ended = self.scheduler.commit(batch, result.outcome)
        accepted = 0 if self.speculator is None else self.speculator.learn(batch.items, t2 - t1)
        updates += self._news(batch, result, steady=result.again and not ended, now=t2)
        for sequence in ended:
            self._forget(sequence)
            self._settle(sequence.request)
        self.times.learn(batch.items, t2 - t1)
        t3 = time.monotonic()
        self._owed = t3 - t2
        self._commit_s += t3 - t2
        record = self.trace.record(
            batch,
            self.scheduler,
            schedule_s=t1 - t0,
            run_s=t2 - t1,
            commit_s=t3 - t2,
            again=result.again,
            accepted=accepted,
        )
        self._count(record.decode_tokens + record.prefill_tokens)
        return updates

    def _news(self, batch: Batch, result: StepResult, *, steady: bool, now: float) -> list[Update]:
        """Of a step that has been taken in. steady: the last one's sequences have each drawn one token more."""
        if steady and not result.logprobs and self.speculator is None:
            self._generated += len(batch.items)
            return [_drew(item.sequence) for item in batch.items]
        updates = []
        for item in batch.items:
            sequence = item.sequence
            new = sequence.tokens[item.start + item.count - len(item.draft) :] if item.sample else []
            if item.start < sequence.prompt_len:
                self._note_prompt(item, new, now, result)
            if new or sequence.finish is not None:
                updates.append(self._update(sequence, new, result))
        return updates

    def _expire(self, now: float) -> list[Update]:
        """End the requests whose deadline has passed, whatever they are doing; their last news."""
        updates: list[Update] = []
        heap = self._deadlines
        while heap and heap[0][0] <= now:
            updates += [u for s in self._timed(*heappop(heap)) for u in self._stop(s, Finish("length", TIMEOUT))]
        if len(heap) > 2 * len(self._requests) + _REMEMBERED:
            self._deadlines = [entry for entry in heap if self._timed(*entry)]
            heapify(self._deadlines)
        for name in {update.request_id for update in updates}:
            self._settle(name)
        return updates

    def _timed(self, deadline: float, sequence: int, name: str) -> list[Sequence]:
        """The sequences of the request that got that deadline; [] when it has ended, even if its name is used again."""
        sequences = self._requests.get(name, [])
        return sequences if sequences and sequences[0].id == sequence else []

    def _charge(self, batch: Batch, began: float, scheduled: float, now: float, *, again: bool) -> None:
        """Its sequences pay for a step until now, and for the end of the step before it."""
        self._schedule_s += scheduled - began
        self._run_s += now - scheduled
        self.ledger.charge(batch.items, began, now - began, self._owed, again=again)
        self.amounts.add(*self.ledger.extents, again=again)
        self._owed = 0.0

    def _count(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens
        self._sizes[bisect_left(STEP_TOKENS, tokens)] += 1
        if self._steps % _EVERY == 1:
            self._rates = self.times.rates(self.scheduler.limits.max_num_batched_tokens)

    def _note_prompt(self, item: Scheduled, new: list[int], now: float, result: StepResult) -> None:
        """Part of a prompt was computed, for the first time or again."""
        sequence = item.sequence
        entry = self.ledger.entries[sequence.id]
        if not entry.counted:
            entry.counted = True
            self._began.append(sequence.request)
            self._prompt_tokens += sequence.cached
            self._cached_tokens += sequence.cached
        if new and not entry.first:
            entry.first = now
        self._prompt_tokens += min(item.count, sequence.prompt_len - item.start)
        if sequence.id in self._prompt:
            self._collect_prompt(sequence, result)

    def _fail(self, sequences: list[Sequence], message: str) -> list[Update]:
        updates = []
        for sequence in sequences:
            self.scheduler.finish(sequence.id, Finish("error", message=message))
            updates.append(self._update(sequence, [], None))
            self._forget(sequence)
            self._settle(sequence.request)
        return updates

    def _update(self, sequence: Sequence, tokens: list[int], result: StepResult | None) -> Update:
        self._generated += len(tokens)
        number = sequence.id
        logprobs = result.logprobs.get(number) if result and result.logprobs else None
        finish = sequence.finish
        return Update(
            sequence.request,
            sequence.choice,
            tokens,
            None if logprobs is None else [_wire(entry) for entry in logprobs[: len(tokens)]],
            self._prompt.pop(number, None) if self._prompt else None,
            finish.reason if finish else None,
            finish.stop if finish else None,
            finish.message if finish else None,
            sequence.cached,
            sequence.preemptions,
            self.ledger.entries[number].scheduled,
            None if finish is None else self.ledger.close(sequence, time.monotonic()),
            *(() if self.speculator is None else self.speculator.tally.of(sequence)),
        )

    def _collect_prompt(self, sequence: Sequence, result: StepResult) -> None:
        entries = self._prompt[sequence.id]
        for position, entry in result.prompt_logprobs.get(sequence.id, {}).items():
            entries[position] = _wire(entry)

    def began(self) -> list[str]:
        """The request of each sequence that ran for the first time since this was asked last."""
        began, self._began = self._began, []
        return began

    def stats(self) -> Stats:
        """A snapshot of counts."""
        s = self.scheduler
        none: tuple[int, int, int, list[int]] = (0, 0, 0, [])
        drafts, drafted, accepted, accepted_at = none if self.speculator is None else self.speculator.tally.told()
        return Stats(
            s.running,
            s.waiting,
            s.pool.used,
            s.pool.cached,
            self.info.pages,
            self._prompt_tokens,
            self._generated,
            s.preemptions,
            s.prefix_queries,
            s.prefix_hits,
            self._steps,
            self._schedule_s,
            self._run_s,
            self._commit_s,
            self.ledger.prompt_seconds,
            self.ledger.completion_seconds,
            self.ledger.aborted_seconds,
            self.ledger.recomputed,
            self._tokens,
            self._sizes,
            *self._rates,
            self._cached_tokens,
            self.amounts.bytes,
            self.amounts.macs,
            self.amounts.seconds,
            *s.slots,
            self.info.slots,
            drafts,
            drafted,
            accepted,
            accepted_at,
            0 if self.store is None else len(self.store),
            [] if self.store is None else self.store.traffic.told(),
            s.loaded,
        )

    def records(self, last: int) -> list[dict[str, Any]]:
        """The last records of the step trace, with the request of each sequence where it is still known."""
        records = list(self.trace)[-last:] if last > 0 else []
        return [
            record.as_dict() | {"requests": [self._names.get(number) for number, _ in record.items]}
            for record in records
        ]

    def close(self) -> None:
        """Free the model's memory and threads."""
        if self.store is not None:
            self.store.close()
        self.model.close()


def _drew(sequence: Sequence) -> Update:
    """The news of a sequence that has drawn a token more, of which nothing else is to be told."""
    s = sequence
    return Update(s.request, s.choice, s.tokens[-1:], None, None, None, None, None, s.cached, s.preemptions)


def _wire(entry: TokenLogprobs) -> WireLogprobs:
    return entry.token, entry.logprob, entry.rank, entry.top


def _pace(milliseconds: float | None, times: StepTimes, tokens: int) -> Pace | None:
    seconds = None if milliseconds is None else milliseconds / 1000
    return None if seconds == 0 else Pace(times, seconds, tokens)


def identity(fingerprint: str, settings: EngineSettings, kv: str) -> str:
    """What decides every bit of an answer besides its request. fingerprint: of the weights. kv: format of the cache."""
    return f"{fingerprint}:{settings.backend}:{settings.dtype}:{kv}"


def context_length(settings: EngineSettings, own: int) -> int:
    """Tokens of the longest sequence: what was asked for, or the model's own context up to 8,192."""
    if settings.max_model_len is None:
        return min(own, 8192)
    if settings.max_model_len > own:
        raise SettingError(
            f"max_model_len is {settings.max_model_len}, but this model was trained for {own} tokens; "
            f"use at most {own}",
            param="max_model_len",
        )
    return settings.max_model_len


def cache_room(settings: EngineSettings, context: int, cache: Cache, free_bytes: int) -> Room:
    """Room of the KV cache; CapacityError, with what would fit, if not even one sequence of `context` does."""
    if settings.kv_cache_memory_bytes is not None:
        memory, limit = settings.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        memory = min(cache.likely_bytes(settings.max_num_seqs, context), int(free_bytes * 0.6))
        limit = "free memory"
    room = cache.room(memory, settings.max_num_seqs, context)
    if room is None:
        fits = cache.longest(memory, context)
        raise CapacityError(
            f"the KV cache of one sequence of {context} tokens needs {cache.least_bytes(context) / 2**20:.2f} MiB, "
            f"and {limit} allows {memory / 2**20:.2f} MiB; "
            + "give it more with --kv-cache-memory-bytes"
            + (f", or use --max-model-len {fits}" if fits else "")
        )
    return room
