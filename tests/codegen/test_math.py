"""How accurate the mathematical functions are: largest error in units in the last place, against float64 NumPy.

The samples cover all float32 bit patterns evenly, denormals too, and the intervals where models live densely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relaxlite.ir.program import Binary, Unary
from relaxlite.target import Target
from tests.codegen.test_scalars import elementwise
from tests.support.native_kernel import run

Array = np.ndarray[Any, Any]

# function: (float64 reference, largest error in ulp)
FUNCTIONS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "exp": (np.exp, 1.0),
    "exp2": (np.exp2, 2.4),
    "log": (np.log, 1.0),
    "tanh": (np.tanh, 5.0),
    "erf": (np.vectorize(math.erf, otypes=[np.float64]), 5.0),
    "sqrt": (np.sqrt, 0.5002),
    "log1p": (np.log1p, 0.5002),
    "expm1": (np.expm1, 0.5002),
    "sin": (np.sin, 0.5002),
    "cos": (np.cos, 0.5002),
    "tan": (np.tan, 0.5002),
    "asin": (np.arcsin, 0.5002),
    "acos": (np.arccos, 0.5002),
    "atan": (np.arctan, 0.5002),
    "sinh": (np.sinh, 0.5002),
    "cosh": (np.cosh, 0.5002),
    "asinh": (np.arcsinh, 0.5002),
    "acosh": (np.arccosh, 0.5002),
    "atanh": (np.arctanh, 0.5002),
}
SPECIALS = (
    0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.17549435e-38, 1.0, -1.0, 0.99999994, 1.0000001, 88.7228, 88.73,
    89.0, -87.34, -103.9, -103.98, -104.0, -150.0, 2.0**20, 2.0**20 + 1, 1.5707964, 3.1415927, 16367173.0 * 2.0**72,
)  # fmt: skip


def dense(count: int = 300_000) -> Array:
    rng = np.random.default_rng(0)
    patterns = (
        rng.integers(0, np.array(np.finfo(np.float32).max).view(np.int32), count).astype(np.int32).view(np.float32)
    )
    parts = (patterns, -patterns, rng.uniform(-20, 20, count), rng.uniform(-1.2, 1.2, count), np.array(SPECIALS))
    return np.concatenate(parts).astype(np.float32)


def ulp_errors(got: Array, wanted: Array) -> Array:
    """In units of float32's spacing at the wanted value; infinite where one is NaN or infinite and the other is not."""
    with np.errstate(all="ignore"):
        rounded = wanted.astype(np.float32)
        errors = np.abs(got.astype(np.float64) - wanted) / np.spacing(np.abs(rounded)).astype(np.float64)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    return np.where(np.isfinite(errors), errors, np.where(same, 0.0, np.inf))


def measure(op: str, x: Array, lanes: int, target: Target | None = None) -> tuple[float, float, Array]:
    """(largest error, where, results)"""
    got = np.zeros_like(x)
    run(elementwise(lambda v: Unary(op, v), ("float32",), "float32", lanes), [x, got], [len(x)], target=target)
    with np.errstate(all="ignore"):
        errors = ulp_errors(got, FUNCTIONS[op][0](x.astype(np.float64)))
    worst = int(np.argmax(errors))
    return float(errors[worst]), float(x[worst]), got


@pytest.mark.each_value
@pytest.mark.parametrize("cpu", ["host", "x86-64-v3", "x86-64-v2"])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_float32_functions(op: str, cpu: str) -> None:
    if cpu != "host" and not Target.host().has("avx2"):
        pytest.skip("needs an x86 CPU with AVX2")
    target = Target.host() if cpu == "host" else Target.parse(f"llvm -mcpu={cpu}")
    limit = FUNCTIONS[op][1] + (1.5 if cpu == "x86-64-v2" else 0.0)  # without fused multiply-add
    x = dense() if cpu == "host" else dense(50_000)
    for lanes in (16, 0) if cpu == "host" else (8,):
        error, where, _ = measure(op, x, lanes, target)
        assert error <= limit, f"{error:.3f} ulp at {where!r}, with {lanes} lanes"


@pytest.mark.parametrize("op", FUNCTIONS)
def test_scalar_and_vector_code_agree(op: str) -> None:
    x = dense(20_000)
    _, _, scalar = measure(op, x, 0)
    for lanes in (3, 4, 8, 16, 32):
        _, _, vector = measure(op, x, lanes)
        np.testing.assert_array_equal(scalar, vector)


@pytest.mark.parametrize(
    "op", ["sin", "tan", "asin", "atan", "sinh", "asinh", "atanh", "tanh", "erf", "expm1", "log1p"]
)
def test_functions_that_vanish_at_zero_keep_its_sign(op: str) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40], np.float32)
    for lanes in (0, 8):
        _, _, got = measure(op, x, lanes)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize("cpu", ["host", "x86-64-v3", "x86-64-v2"])
@pytest.mark.parametrize("op", ["tanh", "erf"])
def test_functions_that_saturate_do_so_exactly(op: str, cpu: str) -> None:
    if cpu != "host" and not Target.host().has("avx2"):
        pytest.skip("needs an x86 CPU with AVX2")
    target = Target.host() if cpu == "host" else Target.parse(f"llvm -mcpu={cpu}")
    x = np.concatenate([np.linspace(0, 10, 200_001), [20.0, 1e30, np.inf]]).astype(np.float32)
    _, _, got = measure(op, x, 8, target)
    assert np.abs(got).max() == 1.0
    assert (got[-3:] == 1.0).all()
    _, _, negative = measure(op, -x, 8, target)
    np.testing.assert_array_equal(negative, -got)


@pytest.mark.parametrize("cpu", ["host", "x86-64-v3", "x86-64-v2"])
def test_gelu_is_off_by_little_and_ends_as_it_should(cpu: str) -> None:
    if cpu != "host" and not Target.host().has("avx2"):
        pytest.skip("needs an x86 CPU with AVX2")
    target = Target.host() if cpu == "host" else Target.parse(f"llvm -mcpu={cpu}")
    ends = [0.0, -0.0, 1e30, np.inf, -1e30, -np.inf, np.nan]
    x = np.concatenate([np.linspace(-8, 8, 400_001), ends]).astype(np.float32)
    for lanes in (0, 8, 16):
        got = np.zeros_like(x)
        program = elementwise(lambda v: Unary("gelu", v), ("float32",), "float32", lanes)
        run(program, [x, got], [len(x)], target=target)
        exact = x[: -len(ends)].astype(np.float64)
        wanted = exact * np.vectorize(math.erfc)(-exact / math.sqrt(2)) / 2
        error = np.abs(got[: -len(ends)] - wanted)
        most = 4e-7 if target.has("avx512f") else 1e-6
        assert (error <= most + 6e-8 * np.abs(exact)).all(), error.max()
        assert (error <= 4e-7 * np.abs(exact))[np.abs(exact) < 0.1].all()  # relative to what is small
        np.testing.assert_array_equal(got[-len(ends) :], np.float32([0, 0, 1e30, np.inf, 0, 0, np.nan]))


def test_exp_of_denormal_results() -> None:
    x = np.linspace(-104, -87, 100_000).astype(np.float32)
    for lanes in (0, 8, 16):
        error, where, _ = measure("exp", x, lanes)
        assert error <= 1.0, where


def test_float64_functions_are_those_of_the_c_library() -> None:
    x = np.random.default_rng(0).uniform(-0.9, 0.9, 1000)
    for op, (reference, _) in FUNCTIONS.items():
        inputs = x + 2 if op == "acosh" else np.abs(x) if op in ("log", "sqrt") else x
        got = np.zeros_like(inputs)
        run(elementwise(lambda v, op=op: Unary(op, v), ("float64",), "float64", 8), [inputs, got], [len(inputs)])
        np.testing.assert_allclose(got, reference(inputs), rtol=1e-15, atol=0)


# Two operands


_CORNERS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    -2.0,
    3.0,
    -3.0,
    0.5,
    -0.5,
    2.5,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    1e38,
    -1e38,
    16777217.0,
    1e9,
)


def _binary(op: str, a: Array, b: Array, lanes: int) -> Array:
    got = np.zeros_like(a)
    program = elementwise(lambda v, w: Binary(op, v, w), ("float32", "float32"), "float32", lanes)
    run(program, [a, b, got], [len(a)])
    return got


def test_pow() -> None:
    rng = np.random.default_rng(0)
    count = 300_000
    a = np.exp(rng.uniform(-80, 80, count)).astype(np.float32)
    b = (rng.uniform(-85, 85, count) / np.log(a.astype(np.float64))).astype(np.float32)
    near_one = (1 + rng.uniform(-1e-3, 1e-3, count)).astype(np.float32)
    large = rng.uniform(-80000, 80000, count).astype(np.float32)
    negative, whole = -rng.uniform(0, 9, count).astype(np.float32), rng.integers(-30, 30, count).astype(np.float32)
    x, y = np.concatenate([a, near_one, negative]), np.concatenate([b, large, whole])
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), y.astype(np.float64))
    for lanes in (0, 16):
        errors = ulp_errors(_binary("pow", x, y, lanes), wanted)
        worst = int(np.argmax(errors))
        assert errors[worst] <= 0.502, (errors[worst], x[worst], y[worst])


def test_pow_special_cases() -> None:
    """As in C (and IEEE 754-2008, section 9.2.1), which NumPy follows."""
    x, y = (v.astype(np.float32).ravel() for v in np.meshgrid(_CORNERS, _CORNERS))
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    for lanes in (0, 16):
        got = _binary("pow", x, y, lanes)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(wanted[~np.isnan(got)]))


def test_atan2() -> None:
    rng = np.random.default_rng(0)
    count = 300_000
    y, x = (np.exp(rng.uniform(-80, 80, count)) * rng.choice([-1, 1], count) for _ in range(2))
    corners = [v.ravel() for v in np.meshgrid(_CORNERS, _CORNERS)]
    y, x = (np.concatenate([a, b]).astype(np.float32) for a, b in zip((y, x), corners, strict=True))
    wanted = np.arctan2(y.astype(np.float64), x.astype(np.float64))
    for lanes in (0, 16):
        got = _binary("atan2", y, x, lanes)
        errors = ulp_errors(got, wanted)
        worst = int(np.argmax(errors))
        assert errors[worst] <= 0.502, (errors[worst], y[worst], x[worst])
        np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(wanted[~np.isnan(got)]))
