"""Checkpoints that other libraries quantised: the numbers are those of the formats' descriptions, exactly, and the
model says what it says with these numbers as floats. Files that do not fit are refused by the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packings
import tiny
from headrace.backends.cpu import CpuBackend
from headrace.base.errors import BadModelFile
from headrace.base.log import log
from headrace.quant.blocks import dequantize
from headrace.runtime.load import Prepared, load_model, prepare
from headrace.runtime.plan import of_path
from headrace.weights.inspect import describe
from packings import Grouped, rounded
from steps import World

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DOWN = "model.layers.1.mlp.down_proj"


def ct(format: str, **weights: Any) -> dict[str, Any]:
    found = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": found}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False} | changes


def awq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | changes


def bf16_scales(tensors: packings.Arrays) -> packings.Arrays:
    return {n: packings.bf16(a) if n.endswith("scale") else a for n, a in tensors.items()}


def whole(w: np.ndarray, bits: int = 8) -> Grouped:
    return rounded(w, -1, bits, symmetric=True, scale=packings.brain)


def one_scale(w: np.ndarray) -> Grouped:
    scale = packings.brain(np.abs(w).max() / 127)
    quants = np.clip(np.rint(w / scale), -128, 127) + 128
    rows = len(w)
    return Grouped(quants, np.full((rows, 1), scale, np.float32), np.full((rows, 1), 128), w.shape[1], 8)


def tensorwise(module: str, g: Grouped) -> packings.Arrays:
    return packings.int_quantized(module, g) | {f"{module}.weight_scale": packings.bf16(g.scales[:1, 0])}


def with_old_zeros(module: str, g: Grouped) -> packings.Arrays:
    """As early versions wrote them: int8, not packed."""
    made = bf16_scales(packings.pack_quantized(module, g, True))
    return made | {f"{module}.weight_zero_point": (g.zeros - 8).astype(np.int8)}


Round = Callable[[np.ndarray], Grouped]
Pack = Callable[[str, Grouped], packings.Arrays]
# name: (quantization_config, how weights are rounded, how they are packed, our format)
KINDS: dict[str, tuple[dict[str, Any], Round, Pack, str]] = {
    "gptq": (gptq(), lambda w: rounded(w, 32), packings.gptq, "q4_z"),
    "gptq-64": (gptq(group_size=64), lambda w: rounded(w, 64), packings.gptq, "q4_z"),
    "gptq-row": (gptq(group_size=-1), lambda w: rounded(w, -1), packings.gptq, "q4_z"),
    "gptq-96": (gptq(group_size=96), lambda w: rounded(w, 96), packings.gptq, "q4_z"),  # the last group is shorter
    "gptq-128": (gptq(group_size=128), lambda w: rounded(w, 128), packings.gptq, "q4_z"),  # more than some have inputs
    "gptq-v2": (
        gptq(checkpoint_format="gptq_v2"),
        lambda w: rounded(w, 32),
        lambda m, g: packings.gptq(m, g, 2),
        "q4_z",
    ),
    "gptq-symmetric": (gptq(sym=True), lambda w: rounded(w, 32, symmetric=True), packings.gptq, "q4_0"),
    "gptq-8": (gptq(bits=8, sym=True), lambda w: rounded(w, 32, 8, symmetric=True), packings.gptq, "q8_0"),
    "gptq-act-order": (gptq(), lambda w: packings.scattered(w, 32), packings.gptq, "f16"),
    "gptq-8-act-order": (
        gptq(bits=8, sym=True),
        lambda w: packings.scattered(w, 32, 8, symmetric=True),
        packings.gptq,
        "f16",
    ),
    "packed-act-order": (
        ct("pack-quantized", actorder="group"),
        lambda w: packings.scattered(w, 32, symmetric=True),
        lambda m, g: (
            packings.pack_quantized(m, g, True)
            | {f"{m}.weight_scale": g.scales.astype(np.float16), f"{m}.weight_g_idx": g.groups.astype(np.int32)}
        ),
        "f16",
    ),
    "awq": (awq(), lambda w: rounded(w, 32), packings.awq, "q4_z"),
    "awq-64": (awq(group_size=64), lambda w: rounded(w, 64), packings.awq, "q4_z"),
    "packed": (
        ct("pack-quantized"),
        lambda w: rounded(w, 32, symmetric=True, scale=packings.brain),
        lambda m, g: bf16_scales(packings.pack_quantized(m, g, True)),
        "q4_0",
    ),
    "packed-asymmetric": (
        ct("pack-quantized", symmetric=False, group_size=64),
        lambda w: rounded(w, 64, scale=packings.brain),
        lambda m, g: bf16_scales(packings.pack_quantized(m, g, False)),
        "q4_z",
    ),
    "packed-zeros-apart": (
        ct("pack-quantized", symmetric=False),
        lambda w: rounded(w, 32, scale=packings.brain),
        with_old_zeros,
        "q4_z",
    ),
    "packed-8": (
        ct("pack-quantized", num_bits=8, strategy="channel", group_size=None),
        whole,
        lambda m, g: bf16_scales(packings.pack_quantized(m, g, True)),
        "q8_0",
    ),
    "w8a8": (
        ct("int-quantized", num_bits=8, strategy="channel", group_size=None),
        whole,
        lambda m, g: bf16_scales(packings.int_quantized(m, g)),
        "q8_0",
    ),
    "w8a8-tensor": (ct("int-quantized", num_bits=8, strategy="tensor", group_size=None), one_scale, tensorwise, "q8_0"),
}


def made(folder: Path, kind: str, model: str = "llama", skip: str = " ", **changes: Any) -> tuple[Path, tiny.Arrays]:
    """A tiny model packed, but for modules whose names hold `skip`; and the weights that it means, as float32."""
    config, rounding, packing, form = KINDS[kind]
    tensors: packings.Arrays = {}
    meant = tiny.arrays(model)
    for name, a in tiny.arrays(model).items():
        module, _, end = name.rpartition(".")
        if end == "weight" and module.endswith(LINEARS) and skip not in module:
            found = rounding(a)
            tensors |= packing(module, found)
            meant[name] = found.values if form != "f16" else found.values.astype(np.float16).astype(np.float32)
        else:
            tensors[name] = a
    settings = tiny.config(model) | {"quantization_config": config | changes}
    return packings.write(folder, settings, tensors), meant


def rows_of(prepared: Prepared, weight: str) -> np.ndarray:
    return np.concatenate([dequantize(p.format, p.data) for p in prepared.weights.load(weight).parts])


def logits(path: Path, backend: Any, model: str = "llama") -> np.ndarray:
    ids, _ = tiny.expected(model)
    loaded = tiny.load(path, backend)
    try:
        return np.stack(World(loaded.executor, ids, tiny.LIMITS.pages).feed([{0: 48, 1: 48}]))
    finally:
        loaded.executor.close()


def sources(name: str) -> str:
    return f"model.layers.{name}.weight"


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_description(kind: str, tmp_path: Path) -> None:
    path, meant = made(tmp_path, kind)
    prepared = prepare(path)
    qkv = np.concatenate([meant[sources(f"0.self_attn.{n}_proj")] for n in "qkv"])
    np.testing.assert_array_equal(rows_of(prepared, "0.attn.qkv"), qkv)
    np.testing.assert_array_equal(rows_of(prepared, "1.mlp.down"), meant[f"{DOWN}.weight"])
    assert {part.format.name for part in prepared.weights.load("1.attn.o").parts} == {KINDS[kind][3]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_says_what_it_says_with_these_numbers_as_floats(kind: str, tmp_path: Path) -> None:
    path, meant = made(tmp_path / "packed", kind)
    floats = tiny.write_folder(tmp_path / "floats", tiny.config("llama"), meant)
    exact = logits(floats, None)
    np.testing.assert_array_equal(logits(path, None), exact)
    # What int8 activations cost with any quantised format. Rounding the weights to 4 bits costs ten times as much.
    assert np.abs(logits(path, CpuBackend()) - exact).mean() < 0.05
    assert of_path(path, CpuBackend()).weights[0].bytes == tiny.load(path, CpuBackend()).executor.weight_bytes


@pytest.mark.parametrize("model", ["qwen2", "mixtral", "phi3"])
def test_other_architectures(model: str, tmp_path: Path) -> None:
    """Biases beside packed weights, experts, fused projections."""
    linears = (*LINEARS, "w1", "w2", "w3", "qkv_proj", "gate_up_proj")
    tensors: packings.Arrays = {}
    meant = tiny.arrays(model)
    for name, a in tiny.arrays(model).items():
        module = name.removesuffix(".weight")
        if module != name and module.endswith(linears):
            found = rounded(a, 32)
            tensors |= packings.awq(module, found)
            meant[name] = found.values
        else:
            tensors[name] = a
    path = packings.write(tmp_path / "packed", tiny.config(model) | {"quantization_config": awq()}, tensors)
    floats = tiny.write_folder(tmp_path / "floats", tiny.config(model), meant)
    np.testing.assert_array_equal(logits(path, None, model), logits(floats, None, model))


def test_inspect_says_how_it_is_quantised(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "awq")
    about = describe(prepare(path).checkpoint)
    groups = {group.name: group for group in about.groups}
    assert about.scheme == "AWQ, 4 bits, groups of 32"
    assert groups["mlp"].formats == {"q4_z": 6} and groups["embedding"].formats == {"f32": 1}
    assert groups["mlp"].values == 6 * 64 * 128 and groups["mlp"].bytes == 6 * 64 * 128 * (4 + (16 + 4) / 32) / 8
    assert describe(prepare(tiny.TINY / "llama").checkpoint).scheme == ""


@pytest.mark.parametrize(("kind", "end", "unset"), [("gptq", "g_idx", 0), ("packed", "weight_g_idx", -1)])
def test_an_order_that_was_never_set_is_none(kind: str, end: str, unset: int, tmp_path: Path) -> None:
    path, meant = made(tmp_path, kind)
    change(path, lambda t: t.update({f"{DOWN}.{end}": np.full(128, unset, np.int32)}))
    prepared = prepare(path)
    np.testing.assert_array_equal(rows_of(prepared, "1.mlp.down"), meant[f"{DOWN}.weight"])
    assert prepared.weights.load("1.mlp.down").parts[0].format.name == KINDS[kind][3]


def test_modules_that_were_left_out_are_plain(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "gptq", skip="layers.1", dynamic={"-:.*layers.1.*": {}})
    prepared = prepare(path)
    assert prepared.weights.load("1.mlp.down").parts[0].format.name == "f32"
    assert prepared.weights.load("0.mlp.down").parts[0].format.name == "q4_z"
    np.testing.assert_array_equal(rows_of(prepared, "1.mlp.down"), tiny.arrays("llama")[f"{DOWN}.weight"])


def test_modules_of_other_bits_and_groups(tmp_path: Path) -> None:
    """Where rules by module change bits and groups, the tensors' shapes tell."""
    path, meant = made(tmp_path, "gptq", skip=DOWN, dynamic={"+:.*down.*": {"bits": 8, "group_size": 64}}, sym=True)
    found = rounded(tiny.arrays("llama")[f"{DOWN}.weight"], 64, 8, symmetric=True)
    change(path, lambda t: t.pop(f"{DOWN}.weight"), lambda t: t.update(packings.gptq(DOWN, found)))
    prepared = prepare(path)
    np.testing.assert_array_equal(rows_of(prepared, "1.mlp.down"), found.values)
    np.testing.assert_array_equal(rows_of(prepared, "0.mlp.down"), meant[sources("0.mlp.down_proj")])


def test_a_configuration_in_a_file_of_its_own(tmp_path: Path) -> None:
    for name, kind in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        path, meant = made(tmp_path / kind, kind)
        config = json.loads((path / "config.json").read_text())
        own = config.pop("quantization_config")
        if kind == "awq":
            own = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
        else:
            del own["quant_method"]
        (path / "config.json").write_text(json.dumps(config))
        (path / name).write_text(json.dumps(own))
        np.testing.assert_array_equal(rows_of(prepare(path), "1.mlp.down"), meant[f"{DOWN}.weight"])


def test_scales_that_float16_does_not_hold_are_rounded_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = made(tmp_path, "packed")
    values = tiny.arrays("llama")[f"{DOWN}.weight"]
    exact = rounded(values, 32, symmetric=True, scale=np.float32)
    change(path, lambda t: t.update(packings.pack_quantized(DOWN, exact, True)))
    log.addHandler(caplog.handler)
    try:
        got = rows_of(prepare(path), "1.mlp.down")
    finally:
        log.removeHandler(caplog.handler)
    assert "1 weights have float32 scales" in caplog.text
    assert 0 < np.abs(got - exact.values).max() <= np.abs(exact.values).max() / 2048


def test_other_scales_are_another_model(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "awq")
    before = prepare(path).fingerprint
    assert prepare(path).fingerprint == before
    change(path, lambda t: [a.__imul__(np.float16(2)) for name, a in t.items() if name.endswith("scales")])
    assert prepare(path).fingerprint != before


def test_what_was_left_as_floats_is_rounded_where_asked(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "awq")
    prepared = prepare(path, "q8_0")
    formats = {name: {format.name for format, _ in layout.parts} for name, layout in prepared.layouts().items()}
    assert formats["embed"] == formats["head"] == {"q8_0"} and formats["0.attn.qkv"] == {"q4_z"}
    cpu = CpuBackend()
    loaded = load_model(prepared, cpu, tiny.LIMITS)
    assert of_path(path, cpu, "q8_0").weights[0].bytes == loaded.executor.weight_bytes
    assert loaded.fingerprint != tiny.load(path, cpu).fingerprint
    loaded.executor.close()


def test_a_configuration_alone_is_planned_in_each_format(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "awq")
    (path / "model.safetensors").unlink()
    plain = of_path(tiny.TINY / "llama" / "config.json", CpuBackend())
    assert {w.format: w.bytes for w in of_path(path, CpuBackend()).weights} == {
        w.format: w.bytes for w in plain.weights
    }


def test_a_module_without_any_part_is_missing(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "gptq")
    change(path, *(drop(end) for end in ("qweight", "qzeros", "scales", "g_idx")))
    with pytest.raises(BadModelFile, match="is missing; expected shape") as caught:
        prepare(path)
    assert caught.value.tensor == f"{DOWN}.weight"


def test_act_order_is_said_and_made_small_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = made(tmp_path, "gptq-act-order")
    log.addHandler(caplog.handler)
    try:
        small = prepare(path, "q8_0")
    finally:
        log.removeHandler(caplog.handler)
    assert "in 14 weights" in caplog.text and "--quantization" in caplog.text
    assert {format.name for format, _ in small.layouts()["1.mlp.down"].parts} == {"q8_0"}


def test_zero_biases_of_modules_that_have_none_are_nothing(tmp_path: Path) -> None:
    """AutoGPTQ leaves them; others are refused as ever."""
    path, _ = made(tmp_path, "gptq", model="qwen2")
    bias = "model.layers.0.self_attn.o_proj.bias"
    change(path, lambda t: t.update({bias: np.zeros(64, np.float16)}))
    prepare(path)
    change(path, lambda t: t.update({bias: np.ones(64, np.float16)}))
    with pytest.raises(BadModelFile, match="no use"):
        prepare(path)


# --- what is refused -------------------------------------------------------------------------------------------------


def change(path: Path, *changes: Callable[[packings.Arrays], Any]) -> None:
    """Changes tensors of a packed checkpoint."""
    raw = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    types = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "<i1", "I32": "<i4", "I64": "<i8"}
    tensors = {
        name: np.frombuffer(raw[8 + length :][slice(*t["data_offsets"])], types[t["dtype"]]).reshape(t["shape"]).copy()
        for name, t in json.loads(raw[8 : 8 + length]).items()
        if name != "__metadata__"
    }
    for each in changes:
        each(tensors)
    packings.write(path, json.loads((path / "config.json").read_text()), tensors)


def put(end: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[packings.Arrays], Any]:
    return lambda tensors: tensors.update({f"{DOWN}.{end}": make(tensors[f"{DOWN}.{end}"])})


def drop(end: str) -> Callable[[packings.Arrays], Any]:
    return lambda tensors: tensors.pop(f"{DOWN}.{end}")


def with_value(value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def changed(a: np.ndarray) -> np.ndarray:
        a = a.copy()
        a.flat[-1] = value
        return a

    return changed


def to(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: a.astype(dtype)


def rows(n: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: np.ascontiguousarray(a[:n])


BAD: list[tuple[str, Callable[[packings.Arrays], Any], str, str]] = [
    ("gptq", drop("scales"), "scales", "is missing"),
    ("gptq", drop("qzeros"), "qzeros", "is missing"),
    ("gptq", drop("qweight"), "qweight", "is missing"),
    ("gptq", put("scales", rows(3)), "scales", "3 groups for 128 inputs"),
    ("gptq", put("scales", lambda a: a[:, :32]), "scales", r"expected shape \(4, 64\)"),
    ("gptq", put("scales", with_value(np.nan)), "scales", "NaN or Inf"),
    ("gptq", put("scales", with_value(np.inf)), "scales", "NaN or Inf"),
    ("gptq", put("scales", lambda a: np.full(a.shape, 1e6, np.float32)), "scales", "float16 cannot"),
    ("gptq", put("scales", to(np.int32)), "scales", "is i32, not f16"),
    ("gptq", put("qzeros", rows(2)), "qzeros", r"expected shape \(4, 8\)"),
    ("gptq", put("qzeros", to(np.int64)), "qzeros", "is i64, not i32"),
    ("gptq", put("qweight", rows(15)), "scales", "multiple of 32"),
    ("gptq", put("qweight", rows(8)), "scales", "4 groups for 64 inputs"),
    ("gptq", put("qweight", lambda a: a.reshape(-1)), "qweight", "must be a matrix"),
    ("gptq", put("qweight", lambda a: a[:0]), "qweight", "must be a matrix"),
    ("gptq", put("qweight", to(np.float32)), "qweight", "is f32, not i32"),
    ("gptq", put("g_idx", with_value(4)), "g_idx", "outside 0 to 3"),
    ("gptq", put("g_idx", with_value(2**31 - 1)), "g_idx", "outside 0 to 3"),
    ("gptq", put("g_idx", with_value(-1)), "g_idx", "outside 0 to 3"),
    ("gptq", put("g_idx", rows(100)), "g_idx", r"expected shape \(128,\)"),
    ("gptq", lambda t: t.update({f"{DOWN}.weight": np.ones((64, 128), np.float32)}), "weight", "and in packed parts"),
    ("gptq-symmetric", put("qzeros", with_value(0x77777776)), "qzeros", "other than 8"),
    ("gptq-8", put("qzeros", with_value(0x7F7F7F7E)), "qzeros", "other than 128"),
    ("awq", drop("scales"), "scales", "is missing"),
    ("awq", put("qzeros", lambda a: a[:, :4]), "qzeros", r"expected shape \(4, 8\)"),
    ("awq", put("qweight", rows(96)), "scales", "4 groups for 96 inputs"),
    ("awq", put("scales", with_value(np.inf)), "scales", "NaN or Inf"),
    ("packed", drop("weight_scale"), "weight_scale", "is missing"),
    ("packed", drop("weight_shape"), "weight_shape", "is missing"),
    ("packed", drop("weight_packed"), "weight_packed", "is missing"),
    ("packed", put("weight_shape", with_value(-128)), "weight_shape", "do not give"),
    ("packed", put("weight_shape", with_value(2**62)), "weight_shape", "do not give"),
    ("packed", put("weight_shape", lambda a: a[:1]), "weight_shape", "two integers"),
    ("packed", put("weight_scale", rows(63)), "weight_scale", r"expected shape \(64, groups\)"),
    ("packed", put("weight_scale", lambda a: a[:, :0]), "weight_scale", "0 groups"),
    ("packed", put("weight_scale", lambda a: a.reshape(64, 2, 2)), "weight_scale", "expected shape"),
    ("packed", put("weight_scale", with_value(0x7F80)), "weight_scale", "NaN or Inf"),
    ("packed-zeros-apart", put("weight_zero_point", with_value(8)), "weight_zero_point", "outside -8 to 7"),
    ("packed-zeros-apart", put("weight_zero_point", with_value(-100)), "weight_zero_point", "outside -8 to 7"),
    ("packed-zeros-apart", put("weight_zero_point", rows(3)), "weight_zero_point", "expected int8"),
    ("packed-asymmetric", put("weight_zero_point", rows(3)), "weight_zero_point", "expected int8"),
    ("w8a8", drop("weight_scale"), "weight_scale", "is missing"),
    ("w8a8", put("weight", to(np.int32)), "weight", "is i32, not i8"),
    (
        "w8a8",
        lambda t: t.update({f"{DOWN}.weight_zero_point": np.ones((64, 1), np.int8)}),
        "weight_zero_point",
        "asymmetric",
    ),
    ("w8a8", lambda t: t.update({f"{DOWN}.weight_g_idx": np.ones(128, np.int32)}), "weight_g_idx", "outside 0 to 0"),
    ("w8a8", lambda t: t.update({f"{DOWN}.weight_g_idx": np.ones(64, np.int32)}), "weight_g_idx", r"shape \(128,\)"),
]


@pytest.mark.parametrize(("kind", "spoil", "end", "says"), BAD, ids=[f"{b[0]}-{b[2]}-{i}" for i, b in enumerate(BAD)])
def test_parts_that_cannot_be_are_named(
    kind: str, spoil: Callable[[packings.Arrays], Any], end: str, says: str, tmp_path: Path
) -> None:
    path, _ = made(tmp_path, kind)
    rows_of(prepare(path), "1.mlp.down")
    change(path, spoil)
    with pytest.raises(BadModelFile, match=says) as caught:
        rows_of(prepare(path), "1.mlp.down")
    assert caught.value.tensor == f"{DOWN}.{end}"
    assert str(tmp_path) in caught.value.file


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not supported, only gptq, awq"),
    ("gptq", {"quant_method": ["gptq"]}, "quant_method"),
    ("gptq", {"bits": 3}, "bits = 3"),
    ("gptq", {"bits": "4"}, "bits is '4'"),
    ("gptq", {"bits": True}, "bits is True"),
    ("gptq", {"group_size": None}, "group_size is None"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    ("gptq", {"format": "bitblas"}, "format = 'bitblas'"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
    ("gptq", {"sym": 1}, "sym = 1"),
    ("gptq", {"dynamic": [1]}, "dynamic must be an object"),
    ("awq", {"bits": 3}, "bits = 3"),
    ("awq", {"version": "gemv"}, "version = 'gemv'"),
    ("awq", {"checkpoint_format": "gemv_fast"}, "checkpoint_format = 'gemv_fast'"),
    ("awq", {"zero_point": False}, "zero_point = False"),
    ("awq", {"backend": "llm-awq"}, "backend = 'llm-awq'"),
    ("packed", {"format": "marlin-24"}, "format = 'marlin-24'"),
    ("packed", {"format": {}}, "format = {} is not supported"),
    ("packed", {"config_groups": {}}, "config_groups"),
    ("packed", {"config_groups": {"g": {"targets": []}}}, "config_groups.g says nothing of weights"),
    ("packed", {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}, "type = 'float'"),
    ("packed", {"config_groups": {"g": {"weights": {"num_bits": 2}}}}, "num_bits = 2"),
    ("packed", {"config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "block"}}}}, "strategy = 'block'"),
    ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
]


@pytest.mark.parametrize(("kind", "changes", "says"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_what_is_not_supported_is_refused_by_name(
    kind: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path, _ = made(tmp_path, kind, **changes)
    with pytest.raises(BadModelFile, match=says) as caught:
        prepare(path)
    assert "config.json" in caught.value.file and "quantization_config" in str(caught.value)


def test_a_configuration_that_is_no_object(tmp_path: Path) -> None:
    path = packings.write(tmp_path, tiny.config("llama") | {"quantization_config": "gptq"}, tiny.arrays("llama"))
    with pytest.raises(BadModelFile, match="must be an object"):
        prepare(path)


def test_integers_where_floats_must_be(tmp_path: Path) -> None:
    tensors = tiny.arrays("llama") | {f"{DOWN}.weight": np.ones((64, 128), np.int8)}
    with pytest.raises(BadModelFile, match="i8 alone") as caught:
        prepare(packings.write(tmp_path, tiny.config("llama"), tensors))
    assert caught.value.tensor == f"{DOWN}.weight"
