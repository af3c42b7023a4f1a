"""Kernels with AMX tiles, run on processors without them (tests/support/emulated_tiles.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.ir import ops
from relaxlite.ir.attributes import IN_PLACE
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import TupleGetItem
from relaxlite.ir.op import get_op
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from tests.passes.graph.test_byte_products import convolution_of_integers, integers, product_of_integers
from tests.passes.products.test_bf16_tiles import needs_dots, rounded
from tests.passes.products.test_bf16_tiles import product as float_product
from tests.passes.products.test_blocks import (
    LOW_BITS,
    MIXED,
    WEIGHTS,
    exact_case,
    mixed_case,
    product,
    programs_with,
    weight_of,
)
from tests.support.emulated_tiles import emulated_tiles

ROWS = (0, 1, 15, 16, 17, 22, 31, 33, 65, 129)
rng = np.random.default_rng(3)


@pytest.mark.parametrize("precision", LOW_BITS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_sums_of_blocks_are_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, precision: str) -> None:
    weight, x = exact_case(name, 80, LOW_BITS[precision])
    wanted = x.astype(np.float64) @ weight.values
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        exe = rl.compile(product(weight), target, precision=precision)
        for m in ROWS:
            np.testing.assert_array_equal(exe(x[:m]), wanted[:m], err_msg=f"{m} rows")
    assert tiles.counts.keys() & {"dot", "dot_unsigned"}


def test_rows_of_two_tiles_were_added_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where sums take over the memory of what is added to them, a row is stored once, also by the last 16 rows, which
    are computed anew if some are left."""
    weight, x = exact_case("4 bits", 80, 0)
    more = rng.integers(-9, 9, (300, 80)).astype(np.float32)
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((m, 192), "float32"), r=TensorType.of((m, 80), "float32")) as (given, r):
        turned = bb.emit(ops.cumsum(r, axis=1))
        bb.result(bb.emit(ops.add(turned, bb.emit(ops.matmul(given, weight.emit(bb))))))
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        made = run_passes(bb.module(), default_pipeline(), PassContext(target, precision="int8"))
        assert all(p.attrs.get(IN_PLACE) for p in programs_with(made, "matmul_blocks").values())
        exe = rl.compile(bb.module(), target, precision="int8")
        for count in (*ROWS, *range(18, 32)):
            wanted = x[:count].astype(np.float64) @ weight.values + more[:count].cumsum(axis=1)
            np.testing.assert_array_equal(exe(x[:count], more[:count]), wanted, err_msg=f"{count} rows")
    assert tiles.counts["dot"]


@pytest.mark.parametrize("name", MIXED)
def test_sums_of_mixed_quads_are_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    weight, x = mixed_case(name, MIXED[name], 4 if name.startswith("6") else 8)
    wanted = x.astype(np.float64) @ weight.values
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        exe = rl.compile(product(weight, coarse=True), target)
        for m in ROWS:
            np.testing.assert_array_equal(exe(x[:m]), wanted[:m], err_msg=f"{m} rows")
    is_signed = name not in ("5 bits, offsets", "4 bits, a table of few bits")  # some of whose bytes are too large
    assert set(tiles.counts) & {"dot", "dot_unsigned"} == {"dot" if is_signed else "dot_unsigned"}
    assert set(tiles.counts) & {"start", "clear"} == {"start" if is_signed else "clear"}


@pytest.mark.parametrize("rotation", [2, 4, 8])
@pytest.mark.parametrize("name", ["4 bits", "4 bits, offsets"])
def test_two_sums_of_mixed_quads_are_those_of_rounded_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, rotation: int
) -> None:
    weight, x = weight_of(name, 80), rng.standard_normal((129, 192)).astype(np.float32)
    coding = {"bits": weight.bits, "zero": weight.zero, "low_bits": 4, "rotation": rotation}
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("m"), 192), "float32")) as (given,):
        rounded_x = bb.emit(get_op("quantize_blocks")(given, block=32, low_bits=4, rotation=rotation))
        parts = [bb.emit(TupleGetItem(rounded_x, k)) for k in range(3)]
        bb.result(bb.emit(get_op("matmul_blocks")(*parts, *weight.operands, **coding)))
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        exe = rl.compile(bb.module(), target)
        for m in ROWS:
            size = abs(x[:m]) @ abs(weight.values)
            assert (abs(exe(x[:m]) - x[:m] @ weight.values) <= 2e-3 * size).all(), f"{m} rows"
    assert tiles.counts["dot"]


@needs_dots  # of few rows
@pytest.mark.parametrize(("k", "n"), [(32, 64), (96, 80), (64, 200)])
def test_products_in_bfloat16_are_those_of_rounded_operands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, k: int, n: int
) -> None:
    module, w = float_product(k, n)
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        exe = rl.compile(module, target, precision="bf16")
        for m in ROWS:
            x = rng.standard_normal((m, k)).astype(np.float32)
            np.testing.assert_allclose(exe(x), rounded(x) @ rounded(w), rtol=1e-4, atol=1e-5)
    assert tiles.counts["dot_bf16"]


@pytest.mark.parametrize("x_type", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("k", "n", "step"),
    [(64, 64, 64), (128, 200, 64), (96, 80, 48), (312, 70, 52), (32, 128, 32), (64, 96, 64), (384, 48, None)],
)
def test_sums_of_bytes_are_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, k: int, n: int, step: int | None, x_type: str
) -> None:
    w = integers((k, n), "int8")
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        exe = rl.compile(product_of_integers(x_type, w, w_zero=np.asarray(3, np.int8)), target)
        for m in ROWS:
            x, zero = integers((m, k), x_type), integers((), x_type)
            wanted = np.subtract(x, zero, dtype=np.int32) @ np.subtract(w, 3, dtype=np.int32)
            np.testing.assert_array_equal(exe(x, zero), wanted, err_msg=f"{m} rows")
    squares = sum(-(-m // 32) * -(-n // 32) for m in ROWS if m >= 16)
    assert tiles.counts.get("dot_of_unsigned", 0) == (0 if step is None else squares * 4 * (k // step))


@pytest.mark.parametrize(
    ("shape", "attrs", "uses"),
    [
        ((64, 64, 1, 1), {}, True),
        ((70, 36, 1, 1), {"strides": (2, 2)}, True),
        ((64, 64, 3, 3), {}, True),
        ((96, 32, 3, 3), {"strides": (2, 1), "dilations": (1, 2)}, True),
        ((64, 64, 5), {"strides": (2,)}, True),
        ((64, 12, 3, 3), {}, False),  # rows that fill less than half a tile
        ((24, 64, 3, 3), {}, True),
        ((16, 64, 3, 3), {}, False),  # half of a square
    ],
)
def test_convolutions_of_bytes_are_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: tuple[int, ...], attrs: dict[str, object], uses: bool
) -> None:
    filters, pads = integers(shape, "int8"), (1,) * 2 * (len(shape) - 2)
    zeros = [np.asarray(77, np.uint8), np.asarray(-2, np.int8)]
    made = convolution_of_integers(filters, zeros, "uint8", pads, **attrs)
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        exe = rl.compile(made, target)
        for n, size in ((1, 7), (2, 15), (1, 16), (1, 40)):
            x = integers((n, shape[1], *range(size, size + len(shape) - 2)), "uint8")
            wanted = get_op("conv_integer").reference(
                x,
                filters,
                pads,
                *zeros,
                **{"strides": None, "dilations": None, "groups": 1, "layout": "first", **attrs},
            )
            np.testing.assert_array_equal(exe(x), wanted, err_msg=f"{n} x {size}")
    assert (tiles.counts.get("dot_of_unsigned", 0) > 0) == uses
