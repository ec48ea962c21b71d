"""Tiny models that can be served: random weights in any formats, a tokenizer of bytes, control tokens, a template.

They say nonsense, quickly, and by the same code paths as real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from headrace.base.formats import FORMATS
from headrace.quant.blocks import pack_random, quantize

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 320  # 3 control tokens, 256 bytes, and merges
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Which format each group of weights has.
MIXED = {"embed": "q8_0", "qk": "q5_0", "v": "q8_0", "o": "q4_k", "gate_up": "q4_1", "down": "q6_k"}
FLOATS = dict.fromkeys(MIXED, "f32")


def overflows_on(token: int) -> Callable[[str, np.ndarray], None]:
    """An `edit` for write_tiny(FLOATS): only where `token` is read, one unit of the first MLP leaves float32."""

    def edit(name: str, values: np.ndarray) -> None:
        if name == "token_embd.weight":
            values[:, 0] = 0
            values[token, 0] = 1
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            values[0] = 0
        elif name in ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"):
            values[0] = 0
            values[0, 0] = 1e30

    return edit


def byte_alphabet() -> list[str]:
    """The printable stand-ins of the 256 bytes that byte-level BPE uses, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 256 + 256 - len(printable)))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_tiny(
    path: Path,
    formats: Mapping[str, str] = MIXED,
    *,
    seed: int = 0,
    layers: int = 2,
    kv_heads: int = 2,
    context: int = 2048,
    vocab: int = VOCAB,
    edit: Callable[[str, np.ndarray], None] | None = None,
    norm: Callable[[np.ndarray], np.ndarray] = lambda weights: weights,
) -> Path:
    """A GGUF of architecture llama: width 256, 4 heads of 64, MLP 512. vocab: only the first so many tokens.

    edit: changes the matrix of a name in place, before it is quantised (not for K formats). norm: changes a
    norm's weights.
    """
    rng = np.random.default_rng(seed)
    dim, heads, head, hidden = 256, 4, 64, 512
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_name("tiny")
    w.add_block_count(layers)
    w.add_context_length(context)
    w.add_embedding_length(dim)
    w.add_feed_forward_length(hidden)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_rope_dimension_count(head)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    _tokenizer(w, vocab)

    def matrix(name: str, group: str, rows: int, columns: int) -> None:
        form = FORMATS[formats[group]]
        if form.name in ("q4_k", "q5_k", "q6_k"):
            data = pack_random(form, rows, columns, rng)
        else:
            values = rng.standard_normal((rows, columns), np.float32) * np.float32(1.5 / columns**0.5)
            if edit:
                edit(name, values)
            data = quantize(form, values)
        w.add_tensor(name, np.ascontiguousarray(data), raw_dtype=gguf.GGMLQuantizationType(form.ggml_type))

    def vector(name: str, n: int) -> None:
        w.add_tensor(name, norm((1 + 0.1 * rng.standard_normal(n)).astype(np.float32)))

    matrix("token_embd.weight", "embed", vocab, dim)
    for i in range(layers):
        vector(f"blk.{i}.attn_norm.weight", dim)
        matrix(f"blk.{i}.attn_q.weight", "qk", heads * head, dim)
        matrix(f"blk.{i}.attn_k.weight", "qk", kv_heads * head, dim)
        matrix(f"blk.{i}.attn_v.weight", "v", kv_heads * head, dim)
        matrix(f"blk.{i}.attn_output.weight", "o", dim, heads * head)
        vector(f"blk.{i}.ffn_norm.weight", dim)
        matrix(f"blk.{i}.ffn_gate.weight", "gate_up", hidden, dim)
        matrix(f"blk.{i}.ffn_up.weight", "gate_up", hidden, dim)
        matrix(f"blk.{i}.ffn_down.weight", "down", dim, hidden)
    vector("output_norm.weight", dim)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def _tokenizer(w: gguf.GGUFWriter, vocab: int) -> None:
    alphabet = byte_alphabet()
    space, letters = alphabet[32], "etaoinshrdlucmfwypvbgk"
    merges = [f"{space} {c}" for c in letters] + [
        f"{a} {b}" for a, b in zip("theinerandon", "heinreandsto", strict=True)
    ]
    pairs = [m.replace(" ", "") for m in dict.fromkeys(merges)]
    tokens = CONTROL + alphabet + pairs
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    kinds = [3] * len(CONTROL) + [1] * (len(alphabet) + len(pairs))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens[:vocab])
    w.add_token_types((kinds + [5] * (VOCAB - len(kinds)))[:vocab])
    w.add_token_merges([m for m in dict.fromkeys(merges) if m.replace(" ", "") in tokens[:vocab]])
    w.add_bos_token_id(0)
    w.add_eos_token_id(2)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
