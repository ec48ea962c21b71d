"""The engine and who guesses for it: a guesser that fails takes its step with it, no more; requests may say no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.messages import Add, Terms

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PROMPT = {"prompt_token_ids": [70, 71, 72] * 8}


@pytest.mark.parametrize("part", ["guesses", "fill"])
def test_a_guesser_that_fails_ends_its_step_alone(tiny: Path, part: str) -> None:
    with LLM(str(tiny), speculative_config={"method": "suffix"}) as llm:
        wanted = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

        def fail(*_: Any) -> Any:
            raise ValueError("no idea")

        speculator = llm.engine.speculator
        assert speculator is not None
        able = lambda items: [(item, (5,)) for item in items if item.count == 1 and item.sample]  # noqa: E731
        speculator.guesses = able  # type: ignore[method-assign]
        kept = getattr(speculator, part)
        setattr(speculator, part, fail)
        failed = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
        assert failed.finish_reason == "error" and "ValueError" in str(failed.error)
        llm.engine.scheduler.check()
        setattr(speculator, part, kept)
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted


@pytest.mark.parametrize(("asked", "most"), [(None, 8), (3, 3), (0, 0), (16, 8)])
def test_a_request_says_how_much_may_be_guessed(tiny: Path, asked: int | None, most: int) -> None:
    with LLM(str(tiny), speculative_config={"method": "suffix"}) as llm:
        engine = llm.engine
        engine.speculator._prices.of = lambda items: [1.0] * 16  # type: ignore[union-attr]
        params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        engine.add(Add("r", [70, 71, 72] * 20, params, 1, [], Terms(drafted=asked)))
        while engine.has_work:
            engine.step()
        drafted = [record.drafted_tokens for record in engine.trace]
        assert max(drafted) == most
        assert engine.stats().drafted_tokens == sum(drafted)
        assert engine.stats().accepted_tokens == sum(record.accepted_tokens for record in engine.trace)
