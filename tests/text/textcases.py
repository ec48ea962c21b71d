"""Reference values, and small vocabularies for tests that need no real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.text.bytelevel import _alphabet

SPACE = "\u2581"
_GOLDEN = Path(__file__).parent.parent / "data" / "golden"
_FILES = {
    "smollm2": "smollm2-135m-instruct-q4_1",
    "qwen_coder": "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "gemma3": "gemma-3-270m-q4_k_m",
}


def golden(name: str) -> dict[str, Any]:
    """The reference values of a model, by its fixture's name, or of a file."""
    values: dict[str, Any] = json.loads((_GOLDEN / f"{_FILES.get(name, name)}.json").read_text())
    return values


def scored(words: dict[str, float], *, space: bool = True, **more: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece-style vocabulary: <unk> <s> </s>, 256 byte tokens, then `words` (token -> score)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space,
    } | more


def byte_level(control: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"), **more: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary: the 256 bytes, two merges, then control tokens."""
    tokens = [*_alphabet().values(), "he", "hel", *control]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3] * len(control),
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.eos_token_id": 258 + len(control) - 1,
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.add_bos_token": False,
    } | more
