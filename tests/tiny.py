"""The tiny checkpoints of tests/data/tiny (random, made with transformers): read, changed and converted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from headrace.backends import Backend, Limits
from headrace.backends.reference import ReferenceBackend
from headrace.runtime.load import LoadedModel, load_model, prepare
from tiny_model import TEMPLATE, byte_alphabet

TINY = Path(__file__).parent / "data" / "tiny"
KINDS = sorted(path.name for path in TINY.iterdir() if path.is_dir())
VOCAB, TOKENS = 320, 48
LIMITS = Limits(tokens=96, sequences=2, pages=8, context=256, vocab=VOCAB)

Arrays = dict[str, np.ndarray]


def expected(kind: str) -> tuple[list[list[int]], np.ndarray]:
    """Token ids of two sequences, and their logits [2, 48, 320]."""
    held = load_file(TINY / kind / "expected.safetensors")
    return [list(map(int, row)) for row in held["input_ids"]], held["logits"]


def config(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TINY / kind / "config.json").read_text())
    return found


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays(kind).items()}


def arrays(kind: str) -> Arrays:
    """The weights as float32. numpy has no bfloat16: the bytes are read by hand."""
    raw = (TINY / kind / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (np.frombuffer(data[slice(*t["data_offsets"])], "<u2").astype("<u4") << 16)
        .view("<f4")
        .reshape(t["shape"])
        for name, t in header.items()
    }


def write_folder(folder: Path, settings: Mapping[str, Any], tensors: Arrays) -> Path:
    """A checkpoint as Hugging Face lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, folder / "model.safetensors")
    return folder


def with_tokenizer(folder: Path, kind: str) -> Path:
    """A tiny checkpoint with a byte-level tokenizer of its own."""
    write_folder(folder, config(kind), arrays(kind))
    tokens = ["<s>", "</s>", *byte_alphabet(), "he", "hel", "Ġt"]
    library = Library(models.BPE({t: i for i, t in enumerate(tokens)}, [("h", "e"), ("he", "l"), ("Ġ", "t")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def load(path: Path, backend: Backend | None = None, limits: Limits = LIMITS) -> LoadedModel:
    return load_model(prepare(path), backend or ReferenceBackend(), limits)


# kind of checkpoint: (architecture of the GGUF file, are q and k interleaved by the converter)
CONVERTED = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "llama-linear-rope": (gguf.MODEL_ARCH.LLAMA, True),
    "llama-yarn-rope": (gguf.MODEL_ARCH.LLAMA, True),
    "llama-tied-llama3-rope": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral-sliding": (gguf.MODEL_ARCH.LLAMA, True),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, True),
    "granite": (gguf.MODEL_ARCH.GRANITE, True),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
    "qwen3-moe": (gguf.MODEL_ARCH.QWEN3MOE, False),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, False),
    "gemma3": (gguf.MODEL_ARCH.GEMMA3, False),
    "phi3": (gguf.MODEL_ARCH.PHI3, False),
}


def interleave(a: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves (0, 1, ..) (n, n+1, ..) to pairs (0, n, 1, n+1, ..), as llama.cpp turns them."""
    halves = a.reshape(heads, 2, -1, *a.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(a.shape)


def _gguf_tensors(kind: str, c: Mapping[str, Any]) -> Arrays:
    arch, pairs = CONVERTED[kind]
    names = gguf.get_tensor_name_map(arch, c["num_hidden_layers"])
    heads = {"attn_q": c["num_attention_heads"], "attn_k": c["num_key_value_heads"]}
    out: Arrays = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, a in arrays(kind).items():
        head, _, expert = name.partition(".experts.")
        if expert:  # model.layers.0.mlp.experts.3.up_proj.weight: one of a stack
            number, _, rest = expert.partition(".")
            stacks.setdefault(f"{head}.experts.{rest}", {})[int(number)] = a
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        part = target.split(".")[-2]
        if pairs and part in heads:
            a = interleave(a, heads[part])
        if kind.startswith("gemma") and "norm" in name:
            a = a + 1
        out[target] = a
    for name, experts in stacks.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        out[target] = np.stack([experts[e] for e in sorted(experts)])
    return out


def _whole(w: gguf.GGUFWriter, c: Mapping[str, Any]) -> None:
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_vocab_size(c["vocab_size"])
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_rope_dimension_count(head_dim)


# key of config.json: what writes it, if the config has it
OPTIONAL: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "sliding_window": gguf.GGUFWriter.add_sliding_window,
    "attn_logit_softcapping": gguf.GGUFWriter.add_attn_logit_softcapping,
    "final_logit_softcapping": gguf.GGUFWriter.add_final_logit_softcapping,
    "num_local_experts": gguf.GGUFWriter.add_expert_count,
    "num_experts_per_tok": gguf.GGUFWriter.add_expert_used_count,
    "moe_intermediate_size": gguf.GGUFWriter.add_expert_feed_forward_length,
    "embedding_multiplier": gguf.GGUFWriter.add_embedding_scale,
    "residual_multiplier": gguf.GGUFWriter.add_residual_scale,
    "attention_multiplier": gguf.GGUFWriter.add_attention_scale,
    "logits_scaling": gguf.GGUFWriter.add_logit_scale,
}


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """The factors that converters write for rope kind llama3: how much slower each pair turns."""
    base = rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    wave = 2 * np.pi * base
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    smooth = (low / wave - 1) * rope["low_freq_factor"] / (rope["high_freq_factor"] - rope["low_freq_factor"])
    mixed = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.where(wave < high, 1, np.where(wave > low, rope["factor"], mixed)).astype(np.float32)


def _rope(w: gguf.GGUFWriter, c: Mapping[str, Any]) -> None:
    rope = c["rope_parameters"].get("full_attention", c["rope_parameters"])
    w.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        w.add_tensor("rope_freqs.weight", _llama3_factors(rope, c["head_dim"]))


def write_gguf(path: Path, kind: str, changes: Callable[[Arrays], None] = lambda _: None, half: bool = False) -> Path:
    """A tiny checkpoint as a GGUF file, after llama.cpp's converter. half: matrices as bfloat16, else all float32."""
    c = config(kind)
    w = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[CONVERTED[kind][0]])
    _whole(w, c)
    for key, write in OPTIONAL.items():
        if c.get(key) is not None:
            write(w, c[key])
    _rope(w, c)
    tensors = _gguf_tensors(kind, c)
    changes(tensors)
    for name, a in tensors.items():
        if half and a.ndim > 1:
            bits = (np.ascontiguousarray(a, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            w.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            w.add_tensor(name, np.ascontiguousarray(a, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
