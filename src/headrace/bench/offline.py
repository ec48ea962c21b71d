"""`LLM` on many requests at once (throughput), and one batch after another (latency)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from headrace.base.settings import EngineSettings
from headrace.bench.report import per_million, quantiles
from headrace.bench.work import Ask, Lengths, asks
from headrace.core.sampling import SamplingParams
from headrace.engine.llm import LLM
from headrace.engine.output import RequestOutput


def throughput(
    settings: EngineSettings, work: Sequence[Ask], *, price_per_hour: float | None = None, show: bool = True
) -> dict[str, Any]:
    """All requests at once. Keys are those of `load.results` where they mean the same. price_per_hour: in dollars."""
    with opened(settings) as llm:
        _run(llm, [Ask(work[0].prompt, 2)])
        start = time.perf_counter()
        outs = _run(llm, work, show=show)
        seconds = time.perf_counter() - start
    read, written = sum(len(ask.prompt) for ask in work), _generated(outs)
    return {
        "completed": len(outs),
        "duration": seconds,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(outs) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
        **({} if price_per_hour is None else _costs(outs, price_per_hour / 3600, read, written)),
    }


def _costs(outs: Sequence[RequestOutput], per_second: float, read: int, written: int) -> dict[str, float]:
    accounts = [account for out in outs for account in out.metrics.accounts.values()]
    prompt, completion = sum(a.prompt_machine for a in accounts), sum(a.completion_machine for a in accounts)
    return per_million(per_second * prompt, per_second * completion, read, written)


def latency(
    settings: EngineSettings, *, sequences: int, inputs: int, outputs: int, warmups: int, rounds: int
) -> dict[str, Any]:
    """Batches of `sequences` prompts, each begun when the last has ended: time to first token and between tokens."""
    settings = replace(settings, max_num_seqs=max(settings.max_num_seqs, sequences))
    work = asks(sequences * (warmups + rounds), Lengths(inputs, inputs), Lengths(outputs, outputs))
    batches = [work[i : i + sequences] for i in range(0, len(work), sequences)]
    done: list[RequestOutput] = []
    seconds = []
    with opened(settings) as llm:
        for number, batch in enumerate(batches):
            start = time.perf_counter()
            outs = _run(llm, batch)
            if number >= warmups:
                seconds.append(time.perf_counter() - start)
                done += outs
    first = [out.metrics.first_token - out.metrics.arrival for out in done]
    each = [(out.metrics.finished - out.metrics.first_token) / (outputs - 1) for out in done if outputs > 1]
    return {
        "sequences": sequences,
        "rounds": rounds,
        "output_throughput": _generated(done) / sum(seconds),
        **quantiles("ttft", first),
        **quantiles("tpot", each),
        **quantiles("e2el", seconds),
    }


def opened(settings: EngineSettings) -> LLM:
    """The model of these settings."""
    return LLM(**asdict(settings))


def _run(llm: LLM, work: Sequence[Ask], *, show: bool = False) -> list[RequestOutput]:
    params = [SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True) for ask in work]
    return llm.generate([{"prompt_token_ids": ask.prompt} for ask in work], params, use_tqdm=show)


def _generated(outs: Sequence[RequestOutput]) -> int:
    return sum(len(choice.token_ids) for out in outs for choice in out.outputs)
