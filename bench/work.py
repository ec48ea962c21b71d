"""One engine behind one question, so that engines can be timed in turn: `python work.py ENGINE MODEL THREADS`.

Reads lines ``B P N`` (B sequences, prompts of P random tokens, N new tokens each, greedy, nothing cached) and answers
each with the seconds it took. First it says ``ready SECONDS``, since the process began.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

BEGAN = time.perf_counter()
CONTEXT, SEQUENCES = 2048, 64
Prompts = list[list[int]]
Run = Callable[[Prompts, int], float]


def headrace(model: str, threads: int) -> Run:
    package = importlib.import_module("headrace")
    settings = {"max_model_len": CONTEXT, "max_num_seqs": SEQUENCES, "enable_prefix_caching": False}
    llm = package.LLM(model, threads=threads, **settings)

    def run(prompts: Prompts, n: int) -> float:
        params = package.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    return run


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level names: one context a run, made before the clock starts."""

    BATCH = 512

    def __init__(self, model: str, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(model.encode(), self.lib.llama_model_default_params())
        self.vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.batch = self.lib.llama_batch_init(self.BATCH, 0, 1)
        self.threads = threads

    def __call__(self, prompts: Prompts, n: int) -> float:
        p = self.lib.llama_context_default_params()
        p.n_ctx = len(prompts) * (len(prompts[0]) + n + 8)
        p.n_batch, p.n_ubatch, p.n_seq_max = self.BATCH, self.BATCH, len(prompts)
        p.n_threads = p.n_threads_batch = self.threads
        p.kv_unified = False
        context = self.lib.llama_init_from_model(self.model, p)
        start = time.perf_counter()
        self._generate(context, prompts, n)
        took = time.perf_counter() - start
        self.lib.llama_free(context)
        return took

    def _generate(self, context: Any, prompts: Prompts, n: int) -> None:
        rows = [(t, i, s, i + 1 == len(p)) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        last = [0] * len(prompts)
        for at in range(0, len(rows), self.BATCH):
            self._step(context, rows[at : at + self.BATCH], last)
        for k in range(n - 1):
            self._step(context, [(t, len(prompts[0]) + k, s, True) for s, t in enumerate(last)], last)

    def _step(self, context: Any, rows: list[tuple[int, int, int, bool]], last: list[int]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if self.lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        numpy = importlib.import_module("numpy")
        for i, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                row = self.lib.llama_get_logits_ith(context, i)
                last[sequence] = int(numpy.ctypeslib.as_array(row, shape=(self.vocab,)).argmax())


ENGINES: dict[str, Callable[[str, int], Run]] = {"headrace": headrace, "llamacpp": LlamaCpp}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    run = ENGINES[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    answers.write(f"ready {time.perf_counter() - BEGAN:.3f}\n")
    rng = random.Random(0)
    for line in sys.stdin:
        b, p, n = map(int, line.split())
        prompts = [[rng.randrange(100, 40000) for _ in range(p)] for _ in range(b)]
        answers.write(f"{run(prompts, n):.6f}\n")


if __name__ == "__main__":
    main()
