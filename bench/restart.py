"""What --kv-cache-dir buys after a restart, and what it costs meanwhile.

    .venv/bin/python bench/restart.py smollm2-135m --tokens 1500

Time to the first token of a prompt: computed, found in memory, found in the file by a model that was loaded again. Then
the same requests on a model with the store and on one without, in turn: the ratio of their times, and where it lies in
half of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

from headrace import LLM, SamplingParams

FIRST = SamplingParams(temperature=0, max_tokens=1)


def prompt(rng: random.Random, tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [rng.randrange(100, 1000) for _ in range(tokens)]}


def timed(llm: LLM, prompts: list[dict[str, list[int]]], params: SamplingParams) -> float:
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def first_tokens(model: str, folder: str, tokens: int) -> None:
    rng = random.Random(1)
    asked, other = prompt(rng, tokens), prompt(rng, tokens)
    names = ("computed", "in memory"), ("in the file", "in memory")
    for run in names:
        with LLM(model, max_model_len=2 * tokens, kv_cache_dir=folder) as llm:
            timed(llm, [prompt(random.Random(run[0]), 64)], FIRST)
            for name in run:
                print(f"first token, {name:12} {1e3 * timed(llm, [asked], FIRST):8.1f} ms")
            if run is names[0]:
                timed(llm, [other], FIRST)


def cost(model: str, folder: str, rounds: int, together: int, tokens: int, answer: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    shared = {"max_model_len": tokens + answer, "max_num_seqs": together}
    with LLM(model, **shared) as plain, LLM(model, **shared, kv_cache_dir=folder) as kept:
        rng, ratios = random.Random(2), []
        for number in range(rounds + 1):
            prompts = [prompt(rng, tokens) for _ in range(together)]
            order = (plain, kept) if number % 2 else (kept, plain)
            seconds = {llm: timed(llm, prompts, params) for llm in order}
            if number:
                ratios.append(seconds[kept] / seconds[plain])
        low, middle, high = statistics.quantiles(ratios, n=4)
        written = kept.engine.stats().file_traffic[1]
    print(
        f"{together} x ({tokens} + {answer}): {middle:.3f} of the time [{low:.3f}, {high:.3f}], {written} pages written"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first_tokens(args.model, folder, args.tokens)
        for together, tokens, answer in ((1, 64, 128), (8, 64, 64), (4, 512, 8)):
            cost(args.model, f"{folder}/{together}", args.rounds, together, tokens, answer)


if __name__ == "__main__":
    main()
