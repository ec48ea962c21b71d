"""What the machine gives at best. Speeds are not judged here, only what must hold between them."""

from __future__ import annotations

import pytest

from headrace import _native


def test_reading_memory_has_a_rate() -> None:
    assert 1e8 < _native.read_rate(threads=1, bytes=8 << 20, repeats=2) < 1e13


@pytest.mark.parametrize("isa", _native.isa_names())
@pytest.mark.parametrize("kind", ["int8", "bf16", "f32"])
def test_multipliers_have_a_rate(isa: str, kind: str) -> None:
    """A compiler that left the products out would give absurd rates: 16 x 64 lanes at 6 GHz are 6e12."""
    assert 1e7 < _native.multiply_rate(isa=isa, kind=kind, threads=1, repeats=2) < 6e12


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: _native.read_rate(threads=1, bytes=10), "1 MiB"),
        (lambda: _native.read_rate(threads=0), "threads"),
        (lambda: _native.read_rate(threads=1, repeats=0), "repeats"),
        (lambda: _native.multiply_rate(isa="", kind="int4", threads=1), "int4"),
        (lambda: _native.multiply_rate(isa="vax", kind="int8", threads=1), "vax"),
        (lambda: _native.multiply_rate(isa="", kind="int8", threads=1, repeats=0), "repeats"),
    ],
)
def test_what_cannot_be_probed_is_refused(call: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()  # type: ignore[operator]
