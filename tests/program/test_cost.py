"""Costs against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from headrace.program.cost import Load, costs, kv_bytes_per_token, total, work
from headrace.runtime.load import prepare


def test_smollm2_by_hand(smollm2: Path) -> None:
    prepared = prepare(smollm2)
    layer = 576 * (9 + 3 + 3) * 64 + 576 * 576 + 3 * 576 * 1536  # weights of qkv, o, gate, up, down
    head = 49152 * 576
    stored = 30 * layer * 20 / 32 + head * 34 / 32 + 61 * 576 * 4  # Q4_1, Q8_0, norms in float32
    cache = 30 * 2 * 3 * 64 * 2  # bytes a token
    once = total(prepared.program, prepared.sizes(), Load(rows=[1], contexts=[100], logit_rows=1))
    assert once.bytes == pytest.approx(stored + 576 * 34 / 32 + 100 * cache)
    assert once.macs == 30 * layer + head + 30 * 100 * 2 * 9 * 64
    assert stored == pytest.approx(96.5e6, rel=0.002)
    assert kv_bytes_per_token(prepared.program) == cache


def test_batches_read_weights_once_and_heads_only_for_rows_with_logits() -> None:
    prepared = prepare(tiny.TINY / "llama")
    sizes = prepared.sizes()

    def of(rows: list[int], logit_rows: int) -> float:
        return total(prepared.program, sizes, Load(rows, rows, logit_rows, kv_bytes=0)).bytes

    embed_row = sizes["embed"] / 320
    assert of([1, 1, 1], 3) - of([1], 1) == pytest.approx(2 * embed_row)
    assert of([7], 1) - of([7], 0) == sizes["head"] + sizes["norm"]


def test_a_window_bounds_what_attention_reads() -> None:
    prepared = prepare(tiny.TINY / "mistral-sliding")
    attends = [op.kind == "attend" for op in prepared.program.ops]
    each = costs(prepared.program, prepared.sizes(), Load([1, 4], [100, 40], 2))
    first = next(c for c, attend in zip(each, attends, strict=True) if attend)
    assert first.bytes == (16 + 19) * 2 * 64 * 2
    assert first.macs == (16 + 4 * 16) * 2 * 4 * 32


def test_experts_read_what_rows_can_reach() -> None:
    prepared = prepare(tiny.TINY / "mixtral")
    sizes = prepared.sizes()
    at = [op.kind for op in prepared.program.ops].index("experts")
    stacks = sizes["0.mlp.gate_up"] + sizes["0.mlp.down"]
    one = costs(prepared.program, sizes, Load([1], [1], 1))[at]
    assert (one.bytes, one.macs) == (stacks / 2, 2 * 3 * 64 * 128)
    assert costs(prepared.program, sizes, Load([9], [9], 1))[at].bytes == stacks


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_growth_of_a_cost_adds_up_to_the_cost(kind: str) -> None:
    prepared = prepare(tiny.TINY / kind)
    sizes = prepared.sizes()
    grows = work(prepared.program, sizes)
    for rows, context, logit_rows in ((1, 1, 0), (3, 50, 1), (40, 90, 7)):
        cost = total(prepared.program, sizes, Load([rows, 1], [context, 20], logit_rows))
        macs, read = (rows + 1) * grows.row + logit_rows * grows.logit_row, 0.0
        for kind_of in grows.attention:
            window = kind_of.window or 1000
            macs += kind_of.macs * sum(min(n, window) for n in (20, *range(context - rows + 1, context + 1)))
            read += kind_of.bytes * (min(context, window + rows - 1) + min(20, window))
        assert cost.macs == pytest.approx(macs)
        assert (
            cost.bytes - total(prepared.program, sizes, Load([rows, 1], [context, 20], logit_rows, 0.0)).bytes == read
        )
