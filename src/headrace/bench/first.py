"""What `startup` runs in a fresh process: one prompt, one token, and when each part was done.

    python first.py SETTINGS PROMPT_TOKENS       (settings as JSON)

Writes seconds of the system's monotonic clock as JSON: when this file began, and after import, load and first token.
"""

import sys
import time

BEGAN = time.monotonic()

import json  # noqa: E402

from headrace import LLM, SamplingParams  # noqa: E402


def main() -> None:
    """Runs and reports."""
    imported = time.monotonic()
    settings, tokens = json.loads(sys.argv[1]), int(sys.argv[2])
    with LLM(**settings) as llm:
        loaded = time.monotonic()
        llm.generate({"prompt_token_ids": list(range(100, 100 + tokens))}, SamplingParams(max_tokens=1, temperature=0))
        first = time.monotonic()
    print(json.dumps({"began": BEGAN, "imported": imported, "loaded": loaded, "first": first}))


if __name__ == "__main__":
    main()
