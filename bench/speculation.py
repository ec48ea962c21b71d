"""What guessing tokens buys: the same requests with and without, in turn, in one process. Answers must be equal.

    .venv/bin/python bench/speculation.py qwen2.5-coder-0.5b --config '{"method": "suffix"}'

rewrite: a file of code is to be written again with one change. chat: free answers. Both greedy and drawn, for one
sequence and eight. Prints tokens a second and their ratio, tokens a step, and how many of the drafted were right.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics

from headrace import LLM, SamplingParams
from headrace.core import waiting
from headrace.runtime.draft import Speculator

QUESTIONS = [
    "Explain how a hash table works, and when it is slow.",
    "Write a Python function that merges two sorted lists. Explain it.",
    "Describe how a TCP connection is opened and closed.",
    "Compare recursion and iteration, with an example of each in C.",
    "Tell me a short story about a lighthouse keeper.",
    "How do plants turn sunlight into energy?",
    "What is a race condition, and how can it be avoided?",
    "Give me a recipe for a simple vegetable soup.",
]


def conversations(kind: str) -> list[str]:
    """Eight user messages."""
    if kind == "chat":
        return QUESTIONS
    source = inspect.getsource(waiting.Waiting)
    code = source[: source.rindex("\n", 0, 1500)]  # some 300 tokens
    names = ["Line", "Queue", "Backlog", "Pending", "Lobby", "Buffer", "Hall", "Room"]
    return [
        f"Write this Python code again, with the class renamed to {name} and nothing else changed. Answer with the "
        f"code alone.\n\n```python\n{code}\n```"
        for name in names
    ]


def measure(
    llm: LLM, texts: list[str], params: SamplingParams, speculator: Speculator | None, together: int
) -> tuple[float, list[list[int]]]:
    """(tokens a second of the steps that decode, answers), `together` sequences at a time."""
    engine = llm.engine
    engine.speculator = speculator
    answers: list[list[int]] = []
    tokens, seconds = 0, 0.0
    for at in range(0, len(texts), together):
        first = engine.stats().steps
        messages = [[{"role": "user", "content": text}] for text in texts[at : at + together]]
        outputs = [output.outputs[0].token_ids for output in llm.chat(messages, params, use_tqdm=False)]
        records = [r for r in engine.trace.since(first) if r.decode_tokens and not r.prefill_tokens]
        seconds += sum(r.schedule_s + r.run_s + r.commit_s for r in records)
        tokens += sum(len(ids) - 1 for ids in outputs)
        answers += outputs
    return tokens / seconds, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--config", type=json.loads, default={"method": "suffix"})
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", default=["rewrite", "chat"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=2048, speculative_config=args.config, dtype=args.dtype)
    speculator = llm.engine.speculator
    assert speculator is not None
    for kind in args.kinds:
        for count in args.sequences:
            for temperature in args.temperatures:
                params = SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=1)
                texts = conversations(kind)
                measure(llm, texts, params, None, count)  # prompts are cached from now on
                ratios, rates = [], []
                drafts, drafted, accepted, _ = speculator.tally.told()
                for _ in range(args.rounds):
                    plain, wanted = measure(llm, texts, params, None, count)
                    fast, got = measure(llm, texts, params, speculator, count)
                    assert got == wanted, "the answers differ"
                    ratios.append(fast / plain)
                    rates.append((plain, fast))
                c = speculator.tally
                plain, fast = (statistics.median(column) for column in zip(*rates, strict=True))
                print(
                    f"{kind:8} {count} sequences, temperature {temperature}: {plain:6.0f} -> {fast:6.0f} tokens/s, "
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
                    f"drafts {c.drafts - drafts}, drafted {c.drafted - drafted}, accepted {c.accepted - accepted}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
