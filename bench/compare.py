"""Headrace and other engines on the same work in one run, taking turns: medians, and ratios round by round.

    python bench/compare.py MODEL.gguf llamacpp=/path/to/python ...

Each peer is named with a Python that has it (for llama.cpp: ``pip install llama-cpp-python``). Every item of work, B
sequences with P tokens of prompt and G steps of decoding, is run with 1 and with G + 1 new tokens: the first gives the
speed of prefill, the difference that of decoding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import save

WORK = ["1,512,64", "1,16,128", "8,128,48", "32,128,24"]


class Peer:
    """An engine's process."""

    def __init__(self, name: str, python: str, model: str, threads: int) -> None:
        self.name = name
        script = str(Path(__file__).parent / "work.py")
        self._process = subprocess.Popen(
            [python, script, name, model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.startup = float(self._answer().split()[1])

    def ask(self, b: int, p: int, n: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{b} {p} {n}\n")
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended early: is it installed for that Python?")
        return line


def measured(peers: list[Peer], item: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of one item: tokens a second of prefill and of decoding, and our ratio to each peer."""
    b, p, g = map(int, item.split(","))
    speeds: dict[str, dict[str, list[float]]] = {k: {x.name: [] for x in peers} for k in ("prefill", "decode")}
    for _ in range(rounds):
        for peer in peers:
            first, whole = peer.ask(b, p, 1), peer.ask(b, p, g + 1)
            speeds["prefill"][peer.name].append(b * p / first)
            speeds["decode"][peer.name].append(b * g / max(whole - first, 1e-9))
    rows = []
    for kind, by_name in speeds.items():
        ours = by_name["headrace"]
        ratios = {
            n: statistics.median(x / y for x, y in zip(ours, v, strict=True))
            for n, v in by_name.items()
            if n != "headrace"
        }
        rates = {n: statistics.median(v) for n, v in by_name.items()}
        rows.append({"sequences": b, "prompt": p, "kind": kind, "tokens_per_s": rates, "ratio": ratios})
        shown = "  ".join(f"{n} {x:8.1f}" for n, x in rates.items())
        print(f"B={b:<3d} P={p:<4d} {kind:8s} {shown}   " + "  ".join(f"/{n} {x:.2f}" for n, x in ratios.items()))
    return rows


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("peers", nargs="*", metavar="NAME=PYTHON")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument("--work", action="append", metavar="B,P,G", help=f"default: {' '.join(WORK)}")
    args = ap.parse_args()
    named = [("headrace", sys.executable), *(peer.split("=", 1) for peer in args.peers)]
    peers = [Peer(name, python, args.model, args.threads) for name, python in named]
    for peer in peers:
        peer.ask(1, 64, 8)
    print("start-up: " + "  ".join(f"{p.name} {p.startup:.2f} s" for p in peers))
    rows = [row for item in args.work or WORK for row in measured(peers, item, args.rounds)]
    print(f"written: {save('compare', {'model': Path(args.model).name, 'rows': rows})}")


if __name__ == "__main__":
    main()
