"""A real model through the reference back end: the GGUF path end to end, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.backends import Limits
from headrace.backends.reference import ReferenceBackend
from headrace.runtime.load import load_model, prepare
from real import golden
from steps import World


def test_smollm2_says_what_transformers_says(smollm2: Path) -> None:
    case = golden("smollm2")["completion"][0]
    prompt, greedy = case["prompt_ids"], case["greedy_ids"][:8]
    model = load_model(prepare(smollm2), ReferenceBackend(), Limits(128, 1, 8, 256, 49152))
    rows = World(model.executor, [prompt + greedy], 8).feed([{0: len(prompt) + len(greedy)}])[0]
    rows = rows[len(prompt) - 1 : -1].astype(np.float64)
    assert rows.argmax(axis=1).tolist() == greedy
    logprobs = (
        rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    )
    for row, best in zip(logprobs, case["top5"], strict=False):
        for token, logprob in best:
            assert abs(row[token] - logprob) < 1e-3
