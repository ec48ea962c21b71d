"""What a loaded model takes beside its packed weights and its KV cache: `python bench/memory.py [MODEL]`."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace import LLM, SamplingParams
from headrace.bench.report import write

RESULTS = Path(__file__).parent / "results" / "memory.json"


def resident() -> float:
    """MiB of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        loaded = resident()
        llm.generate({"prompt_token_ids": list(range(100, 612))}, SamplingParams(max_tokens=8, temperature=0))
        weights = llm.info.weight_bytes / 2**20
        rows = {
            "model": llm.info.name,
            "weights_mib": weights,
            "kv_cache_mib": llm.info.cache_bytes / 2**20,
            "resident_after_load_mib": loaded,
            "besides_weights_mib": loaded - weights,
            "resident_after_512_tokens_mib": resident(),
        }
    for name, value in rows.items():
        print(f"{name:32s} {value if isinstance(value, str) else f'{value:.1f}'}")
    write(RESULTS, "memory", {}, rows)
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
