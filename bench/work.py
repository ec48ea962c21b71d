"""One engine behind one question, so that engines can be timed in turn: `python work.py ENGINE MODEL THREADS CONTEXT`.

Reads lines ``B P N`` (B sequences, prompts of P random tokens, N new tokens each, greedy) and answers each with the
seconds it took. A fourth number is a seed: all of a prompt but its last 32 tokens comes from it, so that what was
asked with the same seed before may be cached. First it says ``ready SECONDS``, since the process began. CONTEXT:
tokens of the longest sequence.
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
SEQUENCES = 64
OWN = 32  # tokens of a prompt that no other has, where prompts begin alike
Prompts = list[list[int]]
Run = Callable[[Prompts, int], float]


def timed(package: Any, llm: Any) -> Run:
    """With the classes that vLLM and Headrace share."""

    def run(prompts: Prompts, n: int) -> float:
        params = package.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    return run


def headrace(model: str, threads: int, context: int) -> Run:
    """A folder's bf16 weights meet inputs rounded to bf16, as elsewhere."""
    package = importlib.import_module("headrace")
    dtype = "bfloat16" if os.path.isdir(model) else "auto"
    llm = package.LLM(model, dtype=dtype, threads=threads, max_model_len=context, max_num_seqs=SEQUENCES)
    return timed(package, llm)


def vllm(model: str, threads: int, context: int) -> Run:
    """A folder of bf16 safetensors. Threads are bound to the first processors."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
    package = importlib.import_module("vllm")
    settings = {"max_model_len": context, "max_num_seqs": SEQUENCES, "enable_prefix_caching": False}
    return timed(package, package.LLM(model, dtype="bfloat16", **settings))


def openvino(model: str, threads: int, context: int) -> Run:
    """OpenVINO GenAI's continuous batching, out of a GGUF or a converted folder."""
    numpy, tensors, package = map(importlib.import_module, ("numpy", "openvino", "openvino_genai"))
    plan = package.SchedulerConfig()
    plan.cache_size, plan.max_num_seqs, plan.max_num_batched_tokens = 4, SEQUENCES, 512
    plan.enable_prefix_caching, plan.dynamic_split_fuse = False, True
    pipe = package.ContinuousBatchingPipeline(model, plan, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def run(prompts: Prompts, n: int) -> float:
        asked = package.GenerationConfig()
        asked.max_new_tokens, asked.ignore_eos, asked.do_sample = n, True, False
        inputs = [tensors.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        start = time.perf_counter()
        pipe.generate(inputs, [asked] * len(inputs))
        return time.perf_counter() - start

    return run


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level names: one context a run, made before the clock starts."""

    BATCH = 512

    def __init__(self, model: str, threads: int, _: int) -> None:
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


ENGINES: dict[str, Callable[[str, int, int], Run]] = {
    "headrace": headrace,
    "llamacpp": LlamaCpp,
    "openvino": openvino,
    "vllm": vllm,
}


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 40000) for _ in range(count)]


def main() -> None:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # engines import modules of the same names as ours
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    name, model, threads, context = sys.argv[1:]
    run = ENGINES[name](model, int(threads), int(context))
    answers.write(f"ready {time.perf_counter() - BEGAN:.3f}\n")
    rng = random.Random(0)
    for line in sys.stdin:
        b, p, n, *seed = map(int, line.split())
        shared = ids(random.Random(seed[0]), max(p - OWN, 0)) if seed else []
        prompts = [shared + ids(rng, p - len(shared)) for _ in range(b)]
        answers.write(f"{run(prompts, n):.6f}\n")


if __name__ == "__main__":
    main()
