"""Softmax and attention of scores far apart: no products of subnormal numbers, which take processors 10 to 80 times as
long, and no other result."""

from __future__ import annotations

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.ir.op import get_op

TINY = float(np.finfo(np.float32).tiny)
ROWS = np.random.default_rng(3)


def softmax(op: str, dtype: str) -> rl.Executable:
    bb = rl.BlockBuilder()
    with bb.function("main", x=rl.TensorType.of((bb.symbol("m"), bb.symbol("n")), dtype)) as (x,):
        bb.result(bb.emit(get_op(op)(x, axis=-1)))
    return rl.compile(bb.module())


def exps(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.longdouble)
    return np.exp(wide - wide.max(axis=-1, keepdims=True))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_softmax_of_scores_far_apart_is_exact_and_has_no_subnormal_numbers(scale: float) -> None:
    exe = softmax("softmax", "float32")
    for columns in (1, 15, 16, 1000):
        x = (ROWS.standard_normal((7, columns)) * scale).astype(np.float32)
        found, wanted = exe(x), exps(x) / exps(x).sum(axis=-1, keepdims=True)
        assert not ((found > 0) & (found < TINY / columns)).any()
        np.testing.assert_allclose(found, wanted, rtol=1e-5 * max(scale, 1), atol=TINY)


def test_exponentials_of_float64_are_subnormal_much_later() -> None:
    x = np.array([[0.0, -90.0, -700.0, -708.0, -720.0]])
    found = softmax("softmax", "float64")(x)
    np.testing.assert_allclose(found[0, :4], np.exp(x[0, :4]), rtol=1e-12)
    assert found[0, 4] == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_softmax_of_scores_far_apart_is_exact(dtype: str) -> None:
    x = (ROWS.standard_normal((5, 333)) * 50).astype(dtype)
    found = softmax("log_softmax", dtype)(x)
    wide = x.astype(np.longdouble)
    wanted = wide - wide.max(axis=-1, keepdims=True) - np.log(exps(x).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(found, wanted.astype(np.float64), rtol=2e-6, atol=1e-6)


def attention() -> rl.Executable:
    bb = rl.BlockBuilder()
    b, m, n = map(bb.symbol, "bmn")
    types = {"q": (b, m, 32), "k": (b, n, 32), "v": (b, n, 32)}
    with bb.function("main", **{k: rl.TensorType.of(t, "float32") for k, t in types.items()}) as (q, k, v):
        bb.result(bb.emit(get_op("attention")(q, k, v, scale=1.0)))
    return rl.compile(bb.module())


@pytest.mark.parametrize("scale", [0.1, 4.0, 30.0])
def test_attention_of_scores_far_apart(scale: float) -> None:
    exe = attention()
    for m, n in ((1, 1), (3, 70), (65, 200)):
        q, k = ((ROWS.standard_normal((2, size, 32)) * scale).astype(np.float32) for size in (m, n))
        v = ROWS.standard_normal((2, n, 32)).astype(np.float32)
        weights = exps(q.astype(np.longdouble) @ k.astype(np.longdouble).swapaxes(1, 2))
        wanted = (weights / weights.sum(axis=-1, keepdims=True)) @ v
        np.testing.assert_allclose(exe(q, k, v), wanted.astype(np.float64), rtol=1e-3 * scale, atol=1e-3 * scale)


def test_attention_leaves_out_what_weighs_less_than_its_sum_can_tell() -> None:
    q, k, v = (np.zeros((1, size, 32), np.float32) for size in (1, 3, 3))
    q[..., 0], k[0, :, 0], v[0, :, 0] = 1, (0, -60, -75), (1, 1e20, 1e33)  # e**-60 is 2**-87, e**-75 is 2**-108
    found = attention()(q, k, v)[0, 0, 0]
    np.testing.assert_allclose(found, 1 + np.exp(-60.0) * 1e20, rtol=1e-5)


def test_what_is_not_a_number_or_infinite_stays() -> None:
    x = np.array([[0, np.nan, -200], [0, -np.inf, -200], [-np.inf, -np.inf, -np.inf], [np.inf, 0, 0]], np.float32)
    found = softmax("softmax", "float32")(x)
    assert np.isnan(found[[0, 2, 3]]).any(axis=1).all()
    assert found[1].tolist() == [1, 0, 0]
