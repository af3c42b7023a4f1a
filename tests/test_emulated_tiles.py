"""Kernels with AMX tiles, run on processors without them (tests/emulated_tiles.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from tests.emulated_tiles import emulated_tiles
from tests.test_bf16_tiles import product as float_product
from tests.test_bf16_tiles import rounded
from tests.test_block_products import LOW_BITS, WEIGHTS, exact_case, product
from tests.test_pass_bytes import integers, product_of_integers

ROWS = (0, 1, 15, 16, 17, 31, 33, 65, 129)
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
    ("k", "n", "step"), [(64, 64, 64), (128, 200, 64), (96, 80, 48), (312, 70, 52), (32, 128, 32), (384, 48, None)]
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
