"""Structured outputs in the engine: what random weights say fits, whatever else is asked; a dead end is an error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headrace import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutputs
from headrace.core.sequence import NONE_ALLOWED
from headrace.engine import grammars
from headrace.engine.output import CompletionOutput
from headrace.text.grammar import source

SETTINGS = {"max_model_len": 512, "max_num_seqs": 8}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"$ref": "#/$defs/kind"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 17}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["a", 'b"', "c\n", "dé", None]}},
}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **SETTINGS) as opened:
        yield opened


def asked(wanted: StructuredOutputs | None = None, **fields: Any) -> SamplingParams:
    wanted = wanted or StructuredOutputs(json=SCHEMA)
    return SamplingParams(**{"seed": 1, "max_tokens": 200, "structured_outputs": wanted, **fields})


def answers(llm: LLM, params: SamplingParams | list[SamplingParams], prompt: str = "Hi") -> list[CompletionOutput]:
    prompts = [prompt] * len(params) if isinstance(params, list) else prompt
    return [choice for out in llm.generate(prompts, params) for choice in out.outputs]


def fits(choice: CompletionOutput) -> bool:
    assert choice.finish_reason == "stop", choice
    jsonschema.validate(json.loads(choice.text), SCHEMA)
    return True


OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"temperature": 5.0}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.2},
    {"frequency_penalty": 2.0, "presence_penalty": 1.0}, {"repetition_penalty": 3.0},
    {"logit_bias": {31: 100, 48: 50}}, {"bad_words": ["x", "1"]}, {"ignore_eos": True}, {"min_tokens": 190},
    {"logprobs": 3, "frequency_penalty": 0.5}, {"prompt_logprobs": 1}, {"stop_token_ids": [90, 91]},
    {"logit_bias": {0: 100, 2: 100}}, {"stop_token_ids": [70, 71], "logit_bias": {70: 100, 71: 100}},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whatever_else_is_asked_the_answer_fits(llm: LLM, options: dict[str, Any]) -> None:
    for choice in answers(llm, [asked(**(options | {"seed": seed})) for seed in range(4)]):
        assert fits(choice)
        assert "<|" not in choice.text
        if choice.logprobs is not None:
            assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
            assert all(len(entry) in (3, 4) for entry in choice.logprobs)


def test_each_choice_goes_its_own_way(llm: LLM) -> None:
    choices = answers(llm, asked(n=5, temperature=2.0))
    assert all(map(fits, choices)) and len({choice.text for choice in choices}) == 5
    alone = answers(llm, asked(n=1, temperature=2.0))
    assert alone[0].token_ids == choices[0].token_ids


KINDS = [
    (StructuredOutputs(json_object=True), r"\{.*"),
    (StructuredOutputs(regex="[a-c]{2}-[0-9]{3}"), "[a-c]{2}-[0-9]{3}"),
    (StructuredOutputs(choice=["left", "right", "straight on"]), "left|right|straight on"),
    (StructuredOutputs(grammar='start: "x" %json {"type": "boolean"} "y"'), "x(true|false)y"),
]


@pytest.mark.parametrize(("wanted", "pattern"), KINDS, ids=str)
def test_every_kind(llm: LLM, wanted: StructuredOutputs, pattern: str) -> None:
    for choice in answers(llm, asked(wanted, n=4)):
        assert re.fullmatch(pattern, choice.text, re.DOTALL), choice
        assert choice.finish_reason in ("stop", "length")


def test_what_nothing_can_follow_ends_without_an_end_token(llm: LLM) -> None:
    for options in ({"ignore_eos": True}, {"min_tokens": 50, "max_tokens": 50}, {"max_tokens": 3}):
        (choice,) = answers(llm, asked(StructuredOutputs(regex="abc"), **options))
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("abc", "stop", None)
        assert llm.get_tokenizer().decode(choice.token_ids) == "abc"


def test_an_end_token_that_the_model_draws_is_not_in_the_text(llm: LLM) -> None:
    """Where the text may go on, an end is drawn: any of them, and those of the request are told."""
    ends = answers(llm, asked(StructuredOutputs(regex="a+"), logit_bias={2: 100}))[0]
    assert ends.text == "a" * len(ends.text) and ends.token_ids[-1] == 2 and ends.stop_reason is None
    own = answers(llm, asked(StructuredOutputs(regex="a+"), stop_token_ids=[70], logit_bias={70: 100}))[0]
    assert own.text == "a" * len(own.text) and own.stop_reason == 70


def test_max_tokens_cuts_and_says_so(llm: LLM) -> None:
    (choice,) = answers(llm, asked(max_tokens=5))
    assert choice.finish_reason == "length" and len(choice.token_ids) == 5


def test_a_stop_string_acts_on_the_text_of_a_value_too(llm: LLM) -> None:
    (choice,) = answers(llm, asked(StructuredOutputs(regex="abcdef"), stop=["cd"]))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "cd")


def test_a_dead_end_is_that_requests_error_and_nobody_elses(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = answers(llm, [free, asked()])
    dead = asked(StructuredOutputs(regex="[0-9]+"), allowed_token_ids=llm.get_tokenizer().encode("abc"))
    costly = asked(StructuredOutputs(regex="(.*[a-f].{20}){10}"))
    first, stuck, second, heavy = answers(llm, [free, dead, asked(), costly])
    assert [first, second] == expected
    assert stuck.finish_reason == "error" and stuck.token_ids == [] and stuck.error == NONE_ALLOWED
    assert heavy.finish_reason in ("error", "length", "stop")
    assert answers(llm, [free, asked()]) == expected


def test_where_only_an_end_is_left_and_none_is_allowed_it_ends(llm: LLM) -> None:
    params = asked(StructuredOutputs(regex="a*"), bad_words=["a", "aa"], ignore_eos=True)
    (choice,) = answers(llm, params)
    assert (choice.text, choice.finish_reason, choice.error) == ("", "stop", None)


@pytest.mark.parametrize(
    "settings",
    [
        {"batching": "static", "max_num_seqs": 3},
        {"kv_cache": False, "max_num_seqs": 3},
        {"max_num_batched_tokens": 16},
        {"kv_cache_memory_bytes": 9 * 32768, "max_model_len": 256},  # 9 pages: preempts
        {"threads": 1, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_no_setting_changes_an_answer(llm: LLM, tiny: Path, settings: dict[str, Any]) -> None:
    params = [asked(seed=seed, temperature=1.5, frequency_penalty=0.3) for seed in range(6)]
    expected = [choice.token_ids for choice in answers(llm, params, "Hello there " * 8)]
    with LLM(str(tiny), **(SETTINGS | settings)) as other:
        assert [choice.token_ids for choice in answers(other, params, "Hello there " * 8)] == expected
        if "kv_cache_memory_bytes" in settings:
            assert other.engine.stats().preemptions > 0


BAD = [
    {"json": {"properties": {"a": {"not": {}}}}}, {"json": {"type": "strng"}}, {"json": ""}, {"regex": "("},
    {"choice": []}, {"grammar": "start: nothing"}, {"json_object": False}, {"regex": "a", "choice": ["a"]}, {},
]  # fmt: skip


@pytest.mark.parametrize("wanted", BAD, ids=str)
def test_a_bad_one_is_refused_by_name_and_the_next_works(llm: LLM, wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        answers(llm, asked(StructuredOutputs(**wanted)))
    assert caught.value.param and caught.value.param.startswith("structured_outputs")
    assert fits(answers(llm, asked())[0])
    assert llm.engine.stats().running == 0


# -- in a process of its own


@pytest.fixture
async def remote(tiny: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(tiny), **SETTINGS) as opened:
        yield opened


async def said(remote: AsyncLLM, params: SamplingParams) -> list[CompletionOutput]:
    outputs: list[CompletionOutput] = []
    async for out in remote.generate("Hi", params):
        outputs = out.outputs
    return outputs


async def test_the_process_says_what_the_library_says(remote: AsyncLLM, llm: LLM) -> None:
    params = [asked(seed=1, n=2, logprobs=2), SamplingParams(seed=2, max_tokens=20), asked(seed=3, temperature=0)]
    together = await asyncio.gather(*(said(remote, p) for p in params))
    assert [choice for outputs in together for choice in outputs] == answers(llm, params)


async def test_a_bad_one_is_refused_there_too_and_neighbours_go_on(remote: AsyncLLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    neighbour = asyncio.ensure_future(said(remote, free))
    for wanted in BAD:
        with pytest.raises(RequestError) as caught:
            await said(remote, asked(StructuredOutputs(**wanted)))
        assert caught.value.param and caught.value.param.startswith("structured_outputs")
    assert fits((await said(remote, asked()))[0])
    assert len((await neighbour)[0].token_ids) == 300


async def test_one_given_up_while_its_grammar_is_compiled_leaves_nothing(remote: AsyncLLM) -> None:
    streams = [remote.client.submit([65], asked(seed=i), request_id=str(i)) for i in range(20)]
    for stream in streams[::2]:
        await stream.aclose()
    for stream in streams[1::2]:
        async for _ in stream:
            pass
    assert fits((await said(remote, asked()))[0])
    for _ in range(200):
        stats = remote.client.stats()
        if not stats.running and not stats.waiting and not stats.pages_used:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(stats)


async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = grammars.Checker(llm.get_tokenizer(), llm.info.vocab_size)
    slow = StructuredOutputs(json={"enum": [f"value {i}" for i in range(9000)]})
    with monkeypatch.context() as hurried:
        hurried.setattr(grammars, "SECONDS", 1e-4)
        with pytest.raises(RequestError, match="too long") as caught:
            await checker.grammar(slow)
    assert caught.value.param == "structured_outputs.json"
    assert await checker.grammar(StructuredOutputs(regex="a")) == source(StructuredOutputs(regex="a"))
    checker.close()
