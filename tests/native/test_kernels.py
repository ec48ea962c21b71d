"""Native kernels: packed weights mean what the numpy reference says, and every instruction set gives the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import erf

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native as native
from headrace.base.formats import COMPUTED as FORMATS
from headrace.quant import blocks

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
ISAS: list[str] = native.isa_names()
BEST = ISAS[0]
PLAIN = [name for name, f in FORMATS.items() if f.block == 1]
BLOCKS = [name for name, f in FORMATS.items() if f.block > 1]
seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(1, 100)
sets = pytest.mark.parametrize("isa", ISAS)
all_formats = pytest.mark.parametrize("name", list(FORMATS))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> Array:
    return rng.normal(0, spread, shape).astype(np.float32)


def weight(name: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[native.Packed, Array]:
    """A random packed weight and its values, float32 [rows, columns]."""
    raw = blocks.pack_random(FORMATS[name], rows, columns, rng)
    packed = native.Packed(name, rows, columns)
    packed.pack(0, raw)
    return packed, blocks.dequantize(FORMATS[name], raw)


def columns_of(name: str, number: int) -> int:
    """A number of columns that the format can have: `number` blocks, or `number` odd values."""
    block = FORMATS[name].block
    return number * block if block > 1 else 17 * number - 2


def same(first: Array, second: Array) -> bool:
    return first.shape == second.shape and first.tobytes() == second.tobytes()


def in_all_sets(call: str, *arguments: object) -> Array:
    """What `call` returns, after making sure that all instruction sets agree on the bits."""
    results = [np.asarray(getattr(native, call)(isa, *arguments)) for isa in ISAS]
    for other, isa in zip(results, ISAS, strict=True):
        assert np.array_equal(np.isnan(other), np.isnan(results[0])), isa
        assert same(np.nan_to_num(other, nan=0), np.nan_to_num(results[0], nan=0)), isa
    return results[0]


# --- packing ----------------------------------------------------------------------------------------------------------


@all_formats
@given(rows=st.integers(1, 40), number=st.integers(1, 4), seed=seeds)
@settings(max_examples=12, deadline=None)
def test_a_packed_row_has_the_values_of_the_reference(name: str, rows: int, number: int, seed: int) -> None:
    packed, values = weight(name, rows, columns_of(name, number), generator(seed))
    assert same(np.stack([packed.unpack_row(i) for i in range(rows)]), values)


@pytest.mark.parametrize("name", PLAIN)
@given(columns=st.integers(2, 100), rows=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_plain_floats_pack_at_any_size(name: str, columns: int, rows: int) -> None:
    packed, values = weight(name, rows, columns, generator(columns))
    assert same(np.stack([packed.unpack_row(i) for i in range(rows)]), values)


@all_formats
@pytest.mark.parametrize("special", [0x7C00, 0xFC00, 0x7E00, 0x0001, 0x83FF, 0x8000])  # ±inf, NaN, denormals, -0 as f16
def test_special_scales_come_back_as_they_are(name: str, special: int) -> None:
    raw = blocks.pack_random(FORMATS[name], 3, columns_of(name, 2), generator())
    for field in ("d", "m"):
        records = raw.reshape(-1).view(blocks.LAYOUTS[name])
        if field in (records.dtype.names or ()) and name not in ("f32", "bf16"):
            records[field] = np.array(special, np.uint16).view(np.float16)
    packed = native.Packed(name, 3, columns_of(name, 2))
    packed.pack(0, raw)
    np.testing.assert_array_equal(packed.unpack_row(1), blocks.dequantize(FORMATS[name], raw)[1])


@all_formats
def test_parts_pack_in_any_order_and_from_two_threads(name: str) -> None:
    columns, rng = columns_of(name, 3), generator()
    raw = blocks.pack_random(FORMATS[name], 50, columns, rng)
    whole, parts = native.Packed(name, 50, columns), native.Packed(name, 50, columns)
    whole.pack(0, raw)
    cuts = [(40, 50), (0, 7), (23, 40), (7, 23)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cut: parts.pack(cut[0], raw[cut[0] : cut[1]]), cuts))
    x = floats(rng, 3, columns)
    assert same(native.linear(BEST, whole, x), native.linear(BEST, parts, x))
    assert all(same(whole.unpack_row(i), parts.unpack_row(i)) for i in range(50))


@all_formats
@given(rows=st.integers(1, 50), number=st.integers(1, 3), seed=seeds)
@settings(max_examples=12, deadline=None)
def test_matrices_in_turn_are_as_those_apart(name: str, rows: int, number: int, seed: int) -> None:
    columns, rng = columns_of(name, number), generator(seed)
    room = native.Room(2 * native.Packed(name, rows, columns).nbytes + 64)
    x = floats(rng, 3, columns)
    pairs = [
        (weight(name, rows, columns, rng)[0], packed) for packed in native.Packed.in_turn(name, rows, columns, room)
    ]
    for apart, packed in pairs:
        raw = blocks.pack_random(FORMATS[name], rows, columns, rng)
        apart.pack(0, raw)
        cut = rng.integers(0, rows + 1)
        packed.pack(cut, raw[cut:])
        packed.pack(0, raw[:cut])
    for apart, packed in pairs:
        assert same(native.linear(BEST, apart, x), native.linear(BEST, packed, x))
        assert all(same(apart.unpack_row(i), packed.unpack_row(i)) for i in range(rows))


def test_a_packed_matrix_takes_about_the_bytes_of_its_file() -> None:
    for name, f in FORMATS.items():
        packed = native.Packed(name, 32, 512)
        assert (packed.format, packed.rows, packed.columns, packed.panels) == (name, 32, 512, 2)
        assert packed.row_bytes == f.row_bytes(512)
        assert 1 <= packed.nbytes / (32 * f.row_bytes(512)) < 1.03, name


def test_mistakes_are_exceptions() -> None:
    with pytest.raises(ValueError, match=r"'q3_x'.*choose one of: f32"):
        native.Packed("q3_x", 16, 32)
    with pytest.raises(ValueError, match="blocks of 256"):
        native.Packed("q4_k", 16, 288)
    for rows, columns in ((0, 32), (16, 0), (-1, 32), (16, -32), (1 << 27, 32)):
        with pytest.raises(ValueError, match="rows and columns"):
            native.Packed("q8_0", rows, columns)
    packed = native.Packed("q8_0", 20, 64)
    for first, count in ((-1, 1), (20, 1), (19, 2), (2**31 - 1, 1)):
        with pytest.raises(IndexError, match="20 rows"):
            packed.pack(first, np.zeros((count, 68), np.uint8))
    with pytest.raises(ValueError, match="68 bytes, not 67"):
        packed.pack(0, np.zeros((1, 67), np.uint8))
    for row in (-1, 20):
        with pytest.raises(IndexError):
            packed.unpack_row(row)
    with pytest.raises(ValueError, match="65 columns"):
        native.linear(BEST, packed, np.zeros((1, 65), np.float32))
    with pytest.raises(ValueError, match="panels"):
        native.linear(BEST, packed, np.zeros((1, 64), np.float32), 1, 2)
    with pytest.raises(ValueError, match="not available"):
        native.exp("mmx", np.zeros(1, np.float32))
    with pytest.raises(TypeError):
        native.linear(BEST, packed, np.zeros((1, 64)))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        native.linear(BEST, packed, np.zeros((1, 128), np.float32)[:, ::2])


# --- linear -----------------------------------------------------------------------------------------------------------


def prepared(name: str, x: Array) -> Doubles:
    """What the kernels of a format see of x, as float64."""
    if name in ("f32", "f16"):
        return x.astype(np.float64)
    if name == "bf16":
        bits = np.asarray(native.prepare(BEST, "bf16", x)["bf16"]).astype(np.uint32) << 16
        return bits.view(np.float32)[:, : x.shape[1]].astype(np.float64)
    p = {key: np.asarray(value) for key, value in native.prepare(BEST, "q32", x).items()}
    return np.asarray(p["q"].astype(np.float64) * np.repeat(p["d"].astype(np.float64), 32, axis=1))


@all_formats
@sets
def test_linear_is_the_product_with_what_it_sees_of_the_input(name: str, isa: str) -> None:
    rng = generator(7)
    for rows, number, m in ((1, 1, 1), (37, 3, 5), (64, 2, 19)):
        packed, values = weight(name, rows, columns_of(name, number), rng)
        x = floats(rng, m, values.shape[1])
        seen = prepared(name, x)
        exact = seen @ values.T.astype(np.float64)
        size = np.abs(seen) @ np.abs(values.T.astype(np.float64))
        # one rounding a step of the chain; an affine block's two terms may be larger than their sum
        assert (np.abs(native.linear(isa, packed, x) - exact) <= 4e-6 * size + 1e-6).all()


def whole_numbers(name: str, rows: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Blocks with scales of one: every value a small whole number."""
    raw = blocks.pack_random(FORMATS[name], rows, columns_of(name, 8), rng)
    records = raw.reshape(-1).view(blocks.LAYOUTS[name])
    for field in {"d", "m"} & set(records.dtype.names or ()):
        records[field] = 1
    return raw


@pytest.mark.parametrize("name", BLOCKS)
@sets
def test_integer_parts_are_exact(name: str, isa: str) -> None:
    rng = generator(3)
    raw = whole_numbers(name, 24, rng)
    packed = native.Packed(name, 24, columns_of(name, 8))
    packed.pack(0, raw)
    values = blocks.dequantize(FORMATS[name], raw).astype(np.float64)
    x = rng.integers(-1, 2, (4, packed.columns)).astype(np.float32)
    x[:, ::32] = 127 * (-1) ** np.arange(packed.columns // 32)  # so that each block's step is one
    exact = x.astype(np.float64) @ values.T
    assert np.abs(exact).max() < 2**24
    np.testing.assert_array_equal(native.linear(isa, packed, x), exact)


@pytest.mark.parametrize("name", BLOCKS)
@sets
def test_the_largest_integers_do_not_overflow(name: str, isa: str) -> None:
    """All weight bits set, or none, against activations of 127 and -127."""
    for byte in (0, 255):
        raw = np.full((16, FORMATS[name].row_bytes(512)), byte, np.uint8)
        records = raw.reshape(-1).view(blocks.LAYOUTS[name])
        for field in {"d", "m"} & set(records.dtype.names or ()):
            records[field] = 1
        packed = native.Packed(name, 16, 512)
        packed.pack(0, raw)
        values = blocks.dequantize(FORMATS[name], raw).astype(np.float64)
        for x in (np.full((2, 512), 127, np.float32), np.full((2, 512), -127, np.float32)):
            np.testing.assert_allclose(native.linear(isa, packed, x), x.astype(np.float64) @ values.T, rtol=1e-6)


@all_formats
@given(rows=st.integers(1, 40), number=st.integers(1, 3), m=st.integers(1, 5), seed=seeds)
@settings(max_examples=8, deadline=None)
def test_all_instruction_sets_give_the_same_bits(name: str, rows: int, number: int, m: int, seed: int) -> None:
    rng = generator(seed)
    packed, values = weight(name, rows, columns_of(name, number), rng)
    in_all_sets("linear", packed, floats(rng, m, values.shape[1], spread=10.0 ** rng.integers(-3, 4)))


@all_formats
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
def test_a_row_gives_the_same_bits_among_any_others(name: str, isa: str) -> None:
    rng = generator(1)
    packed, values = weight(name, 40, columns_of(name, 3), rng)
    x = floats(rng, 33, values.shape[1])
    alone = np.concatenate([native.linear(isa, packed, x[i : i + 1]) for i in range(33)])
    for m in range(1, 34):
        chosen = rng.permutation(33)[:m]
        assert same(native.linear(isa, packed, np.ascontiguousarray(x[chosen])), alone[chosen]), m


@all_formats
def test_a_panel_gives_the_same_bits_alone(name: str) -> None:
    rng = generator(1)
    packed, values = weight(name, 150, columns_of(name, 2), rng)
    for m in (1, 3, 9):
        x = floats(rng, m, values.shape[1])
        whole = native.linear(BEST, packed, x)
        for first, count in ((0, 1), (3, 5), (9, 1), (1, 9)):
            part = np.ascontiguousarray(whole[:, 16 * first : 16 * (first + count)])
            assert same(native.linear(BEST, packed, x, first, count), part)


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_products_flush_denormals_everywhere(isa: str) -> None:
    """Sums near 1e-38, where results would differ if only some instruction sets kept denormals."""
    rng = generator(5)
    values = np.ldexp(floats(rng, 16, 64), -63)
    packed = native.Packed("bf16", 16, 64)
    packed.pack(0, blocks.quantize(FORMATS["bf16"], values))
    x = np.ldexp(floats(rng, 16, 64), -65)
    out = native.linear(isa, packed, x)
    assert same(out, native.linear("scalar", packed, x))
    assert (out != 0).any() and not ((np.abs(out) < 1.17e-38) & (out != 0)).any()


@all_formats
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@sets
def test_what_is_not_finite_stays_visible_in_its_row_only(name: str, bad: float, isa: str) -> None:
    rng = generator(2)
    packed, values = weight(name, 20, columns_of(name, 2), rng)
    x = floats(rng, 6, values.shape[1])
    clean = native.linear(isa, packed, x)
    x[3, values.shape[1] - 1] = bad
    out = native.linear(isa, packed, x)
    assert not np.isfinite(out[3]).any()
    assert same(np.delete(out, 3, axis=0), np.delete(clean, 3, axis=0))


# --- preparation ------------------------------------------------------------------------------------------------------


def quantised(x: Array) -> tuple[npt.NDArray[np.int8], Array]:
    parts = x.reshape(len(x), -1, 32)
    largest = np.abs(parts).max(axis=2)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(parts * inverse[..., None]).astype(np.int8), largest / np.float32(127)


@given(seed=seeds, exponent=st.integers(-30, 30))
@settings(max_examples=20, deadline=None)
def test_activations_are_quantised_to_the_nearest_step(seed: int, exponent: int) -> None:
    x = floats(generator(seed), 3, 512, spread=10.0**exponent)
    x[1, :300] = 0
    quants, steps = quantised(x)
    for isa in ISAS:
        p = native.prepare(isa, "q32", x)
        np.testing.assert_array_equal(p["q"], quants.reshape(3, -1))
        assert same(p["d"], steps)
        np.testing.assert_array_equal(p["sum"], quants.sum(axis=2, dtype=np.int32))
        np.testing.assert_array_equal(p["sum16"], quants.reshape(3, -1, 16).sum(axis=2, dtype=np.int32))
        assert same(p["s"], steps * quants.sum(axis=2).astype(np.float32))


@sets
def test_a_tail_is_padded_with_zeros_and_tiny_blocks_are_zero(isa: str) -> None:
    x = np.full((1, 40), 2.0, np.float32)
    p = native.prepare(isa, "q32", x)
    assert p["q"].tolist() == [[127] * 40 + [0] * 24]
    tiny = native.prepare(isa, "q32", np.full((1, 32), 1e-38, np.float32))
    assert not tiny["q"].any() and not tiny["d"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@sets
def test_a_block_that_is_not_finite_gets_a_nan_scale(bad: float, isa: str) -> None:
    x = floats(generator(), 1, 512)
    x[0, 300] = bad
    p = native.prepare(isa, "q32", x)
    assert np.isnan(p["d"]).nonzero()[1].tolist() == [300 // 32]
    assert not p["q"][0, 300 // 32 * 32 :][:32].any()


@given(seed=seeds, n=lengths)
@settings(max_examples=30, deadline=None)
def test_bf16_rounds_to_nearest_even(seed: int, n: int) -> None:
    bits = generator(seed).integers(0, 2**32, n, np.uint64).astype(np.uint32)
    bits[generator(seed).random(n) < 0.3] &= 0xFFFF8000  # halfway cases
    x = bits.view(np.float32)[None]
    expected = blocks.quantize(FORMATS["bf16"], x).view(np.uint16)
    for isa in ISAS:
        got = native.prepare(isa, "bf16", x)["bf16"]
        np.testing.assert_array_equal(got[:, :n], expected)
        assert not got[:, n:].any()


# --- rows -------------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 300), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_norm(n: int, seed: int) -> None:
    rng = generator(seed)
    x, w = floats(rng, n, spread=3), floats(rng, n)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5) * w
    np.testing.assert_allclose(in_all_sets("norm", x, w, 1e-5), exact, rtol=2e-6, atol=1e-7)


def test_a_norm_whose_squares_overflow_is_not_a_number() -> None:
    x = np.full(40, 1e20, np.float32)
    assert np.isnan(in_all_sets("norm", x, np.ones(40, np.float32), 1e-5)).all()


def silu(x: Doubles) -> Doubles:
    return np.asarray(x / (1 + np.exp(-x)))


def gelu_tanh(x: Doubles) -> Doubles:
    return np.asarray(x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def gelu_erf(x: Doubles) -> Doubles:
    return np.asarray(x / 2 * (1 + np.vectorize(erf)(x / np.sqrt(2))))


@pytest.mark.parametrize("activation", [silu, gelu_tanh, gelu_erf])
@given(n=lengths, seed=seeds)
@settings(max_examples=20, deadline=None)
def test_glu(activation: object, n: int, seed: int) -> None:
    rng = generator(seed)
    gate, up = floats(rng, n, spread=4), floats(rng, n)
    number = [silu, gelu_tanh, gelu_erf].index(activation)  # type: ignore[arg-type]
    exact = activation(gate.astype(np.float64)) * up  # type: ignore[operator]
    np.testing.assert_allclose(in_all_sets("glu", gate, up, number), exact, rtol=4e-6, atol=1e-6)


def test_activations_far_out() -> None:
    gate = np.array([-1e30, -200, -88, 88, 200, 1e12, 0, -0.0, np.nan], np.float32)
    for number in range(3):
        out = in_all_sets("glu", gate, np.ones_like(gate), number)
        np.testing.assert_allclose(out[:-1], np.maximum(gate[:-1], 0), rtol=1e-6, atol=1e-30)
        assert np.isnan(out[-1])


@given(n=lengths, seed=seeds, cap=st.sampled_from([0.5, 30.0, 50.0]))
@settings(max_examples=30, deadline=None)
def test_softcap(n: int, seed: int, cap: float) -> None:
    x = floats(generator(seed), n, spread=cap)
    exact = np.float64(cap) * np.tanh(x.astype(np.float64) / cap)
    np.testing.assert_allclose(in_all_sets("softcap", x, cap), exact, rtol=5e-7)
    extremes = in_all_sets("softcap", np.array([np.inf, -np.inf, 1e30, 0, np.nan], np.float32), cap)
    np.testing.assert_array_equal(extremes, np.array([cap, -cap, cap, 0, np.nan], np.float32))


@given(n=lengths, seed=seeds)
@settings(max_examples=40, deadline=None)
def test_exp(n: int, seed: int) -> None:
    x = generator(seed).uniform(-87.3, 88.7, n).astype(np.float32)
    np.testing.assert_allclose(in_all_sets("exp", x), np.exp(x.astype(np.float64)), rtol=3e-7)


def test_exp_at_its_borders() -> None:
    x = np.array([-np.inf, -1e30, -104, -87.4, 0, 88.8, 1e30, np.inf, np.nan], np.float32)
    out = in_all_sets("exp", x)
    np.testing.assert_array_equal(out, np.array([0, 0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan], np.float32))
    assert not np.signbit(out[:4]).any()
    near = np.nextafter(np.float32(-87.33654), np.array([-100, 0], np.float32))
    assert in_all_sets("exp", near)[1] > 0


@given(heads=st.integers(1, 4), half=st.integers(1, 40), rest=st.integers(0, 5), seed=seeds)
@settings(max_examples=30, deadline=None)
def test_rope_turns_pairs_and_leaves_the_rest(heads: int, half: int, rest: int, seed: int) -> None:
    rng = generator(seed)
    x, angles = floats(rng, heads, 2 * half + rest), rng.uniform(-9, 9, half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = in_all_sets("rope", x, cos, sin)
    turned = (x[:, :half] + 1j * x[:, half : 2 * half]) * (cos + 1j * sin)
    np.testing.assert_allclose(out[:, :half], turned.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[:, half : 2 * half], turned.imag, rtol=1e-5, atol=1e-6)
    assert same(np.ascontiguousarray(out[:, 2 * half :]), np.ascontiguousarray(x[:, 2 * half :]))


@given(n=lengths, seed=seeds)
@settings(max_examples=20, deadline=None)
def test_add_and_scale(n: int, seed: int) -> None:
    rng = generator(seed)
    x, y = floats(rng, n), floats(rng, n)
    assert same(in_all_sets("add", x, y), x + y)
    assert same(in_all_sets("scale", x, 0.3), x * np.float32(0.3))
