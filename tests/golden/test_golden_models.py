"""Three real models of three architectures against transformers in float32 on the same dequantised weights.

Golden values: see tests/data/golden. The bounds are what the activations' int8 and the cache's float16 may cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from real import golden

BOUNDS = {"smollm2": 0.0035, "qwen_coder": 0.002, "gemma3": 0.0065}  # of the mean negative log-likelihood
AGREEING = 0.97  # of positions along the reference's greedy answer

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=0)


def opened(path: Path) -> LLM:
    return LLM(str(path), max_model_len=1024, max_num_seqs=8)


@pytest.fixture(params=BOUNDS)
def model(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return request.param, request.getfixturevalue(request.param)


def mean_nll(llm: LLM, ids: list[int]) -> float:
    entries = llm.generate({"prompt_token_ids": ids}, SCORE)[0].prompt_logprobs
    assert entries is not None
    values = [entry[token].logprob for entry, token in zip(entries[1:], ids[1:], strict=True) if entry is not None]
    assert len(values) == len(ids) - 1
    return -sum(values) / len(values)


def agreement(llm: LLM, cases: list[dict[str, Any]]) -> tuple[int, int]:
    """Positions along the reference's greedy ids where its next token is our best too, and how many there are."""
    prompts = [{"prompt_token_ids": case["prompt_ids"] + case["greedy_ids"]} for case in cases]
    same = total = 0
    for case, out in zip(cases, llm.generate(prompts, SCORE), strict=True):
        assert out.prompt_logprobs is not None
        for entry, token in zip(out.prompt_logprobs[len(case["prompt_ids"]) :], case["greedy_ids"], strict=True):
            assert entry is not None
            same += entry[token].rank == 1
            total += 1
    return same, total


@pytest.mark.real
def test_likelihood_and_greedy_answers_are_the_references(model: tuple[str, Path]) -> None:
    name, path = model
    reference = golden(name)
    with opened(path) as llm:
        nll = mean_nll(llm, reference["nll"]["prompt_ids"])
        same, total = agreement(llm, reference["chat"] + reference["completion"])
    print(f"{name}: mean NLL {nll:.5f}, reference {reference['nll']['mean_nll']:.5f}; arg-max {same} of {total}")
    assert abs(nll - reference["nll"]["mean_nll"]) <= BOUNDS[name]
    assert same >= AGREEING * total


def test_chat_gives_the_references_prompt_and_answer(smollm2: Path) -> None:
    case = golden("smollm2")["chat"][0]
    with opened(smollm2) as llm:
        out = llm.chat(case["messages"], SamplingParams(temperature=0, max_tokens=8))[0]
    assert out.prompt == case["rendered"] and out.prompt_token_ids == case["prompt_ids"]
    assert out.outputs[0].token_ids == case["greedy_ids"][:8]
