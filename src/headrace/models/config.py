"""What a model is in numbers: one frozen record for all architectures, read the same way for all of them.

Each architecture's `config` starts from `decoder` and replaces what it does differently. Knows nothing of formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.models.keys import Keys
from headrace.models.ropes import read_rope
from headrace.program import Rope
from headrace.program.recorder import Activation


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes and constants of a decoder.

    dim: width of the residual stream. hidden: of the MLP (of one expert, if experts > 0). vocab: rows of the embedding.
    windows: for each layer how many positions a row sees, 0 for all. ropes: for each layer its rotation, None for none.
    tied: whether the head is the embedding, as far as the file says. *_bias: whether there is one, as far as it says.
    """

    architecture: str
    vocab: int
    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    context: int
    activation: Activation
    attention_scale: float
    windows: tuple[int, ...]
    ropes: tuple[Rope | None, ...]
    tied: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: int = 0
    experts_used: int = 0
    renormalise: bool = True

    @property
    def rotary(self) -> int:
        return next((rope.rotary for rope in self.ropes if rope), self.head_dim)

    def with_rope_factors(self, factors: Sequence[float]) -> Config:
        """The same with every rotation's frequencies divided by `factors` (GGUF's `rope_freqs.weight`)."""
        divided = {rope: rope and replace(rope, freq_factors=tuple(factors)) for rope in set(self.ropes)}
        return replace(self, ropes=tuple(divided[rope] for rope in self.ropes))


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}

# Keys of config.json that ask for something that isn't done: harmless values, and what it is called.
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("quantization_config", ({},), "a configuration alone of a checkpoint quantised by another library"),
    ("kv_lora_rank", (0,), "multi-head latent attention (MLA)"),
    ("attention_sinks", (False, 0), "attention with sinks"),
    ("use_bidirectional_attention", (False,), "bidirectional attention"),
    ("use_qk_norm", (False,), "a norm of q and k in this architecture"),
    ("attention_chunk_size", (0,), "chunked attention"),
    ("shared_expert_intermediate_size", (0,), "a shared expert"),
    ("is_encoder_decoder", (False,), "an encoder"),
)


def decoder(keys: Keys, activation: Activation = "silu") -> Config:
    """The numbers that all architectures share. activation: where the file names none (GGUF never does)."""
    for refusal in REFUSED:
        keys.refuse(*refusal)
    heads, dim = keys.whole("heads", high=4096), keys.whole("dim", high=1 << 18)
    kv_heads = keys.whole("kv_heads", heads, high=4096)
    layers = keys.whole("layers", high=1024)
    head_dim = _head_dim(keys, dim, heads)
    if heads % kv_heads:
        names = keys.spelled("heads"), keys.spelled("kv_heads")
        raise keys.bad(f"{names[0]} = {heads} is not a multiple of {names[1]} = {kv_heads}")
    rope = read_rope(keys, head_dim)
    return Config(
        architecture=keys.architecture,
        vocab=_vocab(keys),
        dim=dim,
        hidden=keys.whole("hidden", high=1 << 20),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=keys.real("eps", high=1.0),
        context=keys.whole("context", 4096, high=1 << 31),
        activation=_activation(keys, activation),
        attention_scale=head_dim**-0.5,
        windows=(0,) * layers,
        ropes=(rope,) * layers,
        tied=keys.flag("tie_word_embeddings"),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def _head_dim(keys: Keys, dim: int, heads: int) -> int:
    if not keys.has("head_dim") and dim % heads:
        raise keys.bad(f"{keys.spelled('dim')} = {dim} is not a multiple of {keys.spelled('heads')} = {heads}")
    head_dim = keys.whole("head_dim", dim // heads, low=2, high=1024)
    if head_dim % 2:
        raise keys.bad(f"{keys.spelled('head_dim')} = {head_dim} is odd; rotary pairs need an even one")
    if keys.whole("value_dim", head_dim) != head_dim:
        raise keys.bad(f"{keys.spelled('value_dim')} differs from the {head_dim} of q and k: not supported")
    return head_dim


def _vocab(keys: Keys) -> int:
    """GGUF files may leave the size to the token list, or to the embedding itself."""
    tokens = keys.raw.get("tokenizer.ggml.tokens") if keys.gguf else None
    embedding = keys.shapes.get("token_embd.weight", ()) if keys.gguf else ()
    known = len(tokens) if tokens is not None else embedding[0] if len(embedding) == 2 else None
    return keys.whole("vocab", known)


def _activation(keys: Keys, default: Activation) -> Activation:
    name = None if keys.gguf else keys.raw.get("hidden_activation") or keys.raw.get("hidden_act")
    if name is None:
        return default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise keys.bad(f"the activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def sliding(keys: Keys, layers: int, default: Sequence[bool]) -> tuple[int, ...]:
    """Windows a layer, from `sliding_window` and from `layer_types` where the file has them, else from `default`."""
    if not keys.has("window") or keys.get("window") == 0:
        return (0,) * layers
    window = keys.whole("window", high=1 << 31)
    return tuple(window if local else 0 for local in _local_layers(keys, layers, default))


_LAYER_TYPES = {"sliding_attention": True, "full_attention": False}


def _local_layers(keys: Keys, layers: int, default: Sequence[bool]) -> Sequence[bool]:
    if keys.gguf:
        return _gguf_local_layers(keys, layers, default)
    types = keys.raw.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != layers:
        raise keys.bad(f"layer_types must list {layers} layers")
    if unknown := [t for t in types if not isinstance(t, str) or t not in _LAYER_TYPES]:
        raise keys.bad(f"the layer type {unknown[0]!r} is not supported; known: {', '.join(_LAYER_TYPES)}")
    return [_LAYER_TYPES[t] for t in types]


def _gguf_local_layers(keys: Keys, layers: int, default: Sequence[bool]) -> Sequence[bool]:
    """A list says for each layer whether it is local; a number n, that every n-th is not; nothing, the architecture."""
    name = f"{keys.architecture}.attention.sliding_window_pattern"
    pattern = keys.raw.get(name)
    if pattern is None:
        return default
    if not isinstance(pattern, list):
        every = keys.check_whole(name, pattern)
        return [(i + 1) % every != 0 for i in range(layers)]
    if len(pattern) != layers or any(v not in (0, 1) for v in pattern):
        raise keys.bad(f"{name} must list {layers} booleans")
    return [bool(v) for v in pattern]


def optional_sliding(keys: Keys, layers: int) -> tuple[int, ...]:
    """Windows of the families that have them behind `use_sliding_window`, from layer `max_window_layers` on."""
    if not keys.flag("use_sliding_window", False):
        return (0,) * layers
    first = keys.check_whole("max_window_layers", keys.raw.get("max_window_layers", layers), low=0)
    return sliding(keys, layers, [i >= first for i in range(layers)])
