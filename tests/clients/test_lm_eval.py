"""lm-eval through local-completions: its numbers are those that `LLM` computes, token by token.

The harness takes the server's own tokenizer (/tokenizer_info, /tokenize), sends token ids, and reads echoed
log-probabilities. Tasks are made here from a few sentences, so nothing is fetched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from child_server import Server
from headrace import LLM, SamplingParams

SENTENCES = (
    "The capital of France is Paris", "Water freezes at zero degrees", "The sun rises in the east",
    "A week has seven days", "Two and two make four", "The opposite of hot is cold", "Bees make honey",
    "She opened the door and saw a rhinoceros",
)  # fmt: skip
CHOICES = ["four", "a red fire engine", "two hundred"]
TASKS = {
    "last_words": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.rsplit(' ', 1)[0]}}",
        "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "which": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}. Two and two make",
        "doc_to_choice": CHOICES,
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}. And",
        "doc_to_target": "",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 20, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def samples(served: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the harness got for each sentence, by task."""
    folder = tmp_path_factory.mktemp("lm_eval")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(texts)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))  # JSON is YAML
    told = f"model=smollm2,base_url={served.url}/v1/completions,num_concurrent=4,max_length=2048,max_retries=1"
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", told,
        "--tasks", ",".join(TASKS), "--include_path", str(folder), "--log_samples", "--output_path", str(folder),
    ]  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder), "TQDM_DISABLE": "1"}
    ran = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return {name: _read(next(folder.rglob(f"samples_{name}_*.jsonl"))) for name in TASKS}


def _read(path: Path) -> list[Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), max_model_len=2048) as llm:
        yield llm


def loglikelihood(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Of the continuation's tokens, and whether each is the most likely."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(context + continuation, add_special_tokens=False)
    begin = len(tokenizer.encode(context, add_special_tokens=False))
    (output,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    said = [(output.prompt_logprobs[at] or {})[ids[at]] for at in range(begin, len(ids))]
    return sum(token.logprob for token in said), all(token.rank == 1 for token in said)


def test_last_words(samples: dict[str, list[Any]], llm: LLM) -> None:
    for text, ((got,),) in zip(SENTENCES, samples["last_words"], strict=True):
        context, _, word = text.rpartition(" ")
        value, best = loglikelihood(llm, context, " " + word)
        assert float(got[0]) == pytest.approx(value, abs=1e-5), text
        assert str(got[1]) == str(best), text


def test_choices(samples: dict[str, list[Any]], llm: LLM) -> None:
    for text, got in zip(SENTENCES, samples["which"], strict=True):
        for choice, ((value, _),) in zip(CHOICES, got, strict=True):
            assert float(value) == pytest.approx(
                loglikelihood(llm, f"{text}. Two and two make", " " + choice)[0], abs=1e-5
            )


def test_texts(samples: dict[str, list[Any]], llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop=[".", "\n"])
    outputs = llm.generate([f"{text}. And" for text in SENTENCES], params)
    assert [got for ((got,),) in samples["go_on"]] == [output.outputs[0].text for output in outputs]
