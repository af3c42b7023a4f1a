"""Every scalar function and cast on every element type: machine code, scalar and vector, against NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relaxlite import dtypes
from relaxlite.ir import scalar_functions
from relaxlite.ir.program import (
    BINARY,
    COMPARE,
    UNARY,
    Binary,
    Buffer,
    Cast,
    Compare,
    For,
    IfThenElse,
    Intrinsic,
    Literal,
    Store,
    TensorProgram,
    Unary,
    Value,
    index,
)
from relaxlite.ir.symbolic import SymVar, ceildiv, sym
from relaxlite.target import Target
from tests.support.native_kernel import run

Array = np.ndarray[Any, Any]
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 5e-7, "float64": 1e-15}
SPECIAL_FLOATS = (
    0.0, -0.0, 1, -1, 2, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1e30, -1e30, 3, 2.5, 1.5, 0.49999997, 127.5,
    255, 300, -300, 1e10, -1e10, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63), 6e4, 1e-5, 6e-8, 65520, 65519.996, 3e-8,
)  # fmt: skip


def elementwise(make: Callable[..., Value], inputs: tuple[str, ...], output: str, lanes: int) -> TensorProgram:
    """out[i] = make(x0[i], x1[i], ...); lanes == 0: a scalar loop."""
    n = SymVar("n")
    buffers = [Buffer.of(f"x{number}", (n,), dtype) for number, dtype in enumerate(inputs)]
    out = Buffer.of("out", (n,), output)
    if lanes == 0:
        i = SymVar("i")
        return TensorProgram((*buffers, out), (n,), For(i, n, Store(out, (i,), make(*(b[i] for b in buffers)))))
    outer, lane = SymVar("outer"), SymVar("lane")
    at = outer * lanes + lane
    store = Store(out, (at,), make(*(b[at] for b in buffers)))
    guarded = IfThenElse(Compare("lt", index(at), index(n)), store)
    return TensorProgram(
        (*buffers, out), (n,), For(outer, ceildiv(n, lanes), For(lane, sym(lanes), guarded, "vectorized"))
    )


def samples(dtype: str, seed: int, count: int = 2000) -> Array:
    """Values of all sizes, with the corners among them."""
    rng, numpy_type = np.random.default_rng(seed), dtypes.to_numpy(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(np.bool_)
    if dtypes.is_integer(dtype):
        info = np.iinfo(numpy_type)
        values = rng.integers(info.min, info.max, count, dtype=numpy_type, endpoint=True)
        values[: count // 2] = rng.integers(max(info.min, -9), 9, count // 2, dtype=numpy_type)
        corners = np.array(
            [0, 1, info.min, info.max, info.max - 1, info.min + 1, max(info.min, -1), 7, 8, 31], numpy_type
        )
        values[rng.integers(0, count, 200)] = rng.choice(corners, 200)
        return values
    values = rng.standard_normal(count) * np.exp(rng.uniform(-3, 3, count))
    values[:300] = rng.choice(np.array(SPECIAL_FLOATS), 300)
    with np.errstate(all="ignore"):
        return values.astype(numpy_type)


def pairs(dtype: str) -> tuple[Array, Array]:
    a, b = samples(dtype, 0), samples(dtype, 1)
    b[:150] = np.random.default_rng(2).permutation(a[:150])
    b[150:200] = a[150:200]
    return a, b


def mismatches(got: Array, wanted: Array, tolerance: float, zero_sign: bool = True, absolute: float = 0.0) -> Array:
    """Positions where the values differ by more than the tolerance, or in being NaN, or in the sign of zero."""
    if got.dtype.kind in "biu":
        return np.flatnonzero(got != wanted)
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), wanted.astype(np.float64)
        fits = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= tolerance * np.abs(b) + absolute)
        if zero_sign:
            fits &= ~((a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b)))
    return np.flatnonzero(~fits)


def check(
    make: Callable[..., Value], inputs: tuple[Array, ...], wanted: Array, lanes: int, tolerance: float, **options: Any
) -> None:
    names = tuple(str(dtypes.from_numpy(x.dtype)) for x in inputs)
    output = str(dtypes.from_numpy(wanted.dtype))
    got = np.zeros_like(wanted)
    target = options.pop("target", None)
    run(elementwise(make, names, output, lanes), [*inputs, got], [len(wanted)], target=target)
    bad = mismatches(got, wanted, tolerance, **options)
    shown = [(*(x[k] for x in inputs), "got", got[k], "wanted", wanted[k]) for k in bad[:5]]
    assert not len(bad), f"{len(bad)} differ, such as {shown}"


def check_unary(op: str, dtype: str, lanes: int, target: Target | None = None) -> None:
    x = samples(dtype, 0)
    wanted = scalar_functions.apply_unary(op, x)
    tolerance, is_gelu = TOLERANCE.get(dtype, 0.0), op == "gelu"
    absolute = 1e-6 if is_gelu and dtype != "float64" else 0.0
    check(
        lambda v: Unary(op, v), (x,), wanted, lanes, tolerance, target=target, absolute=absolute, zero_sign=not is_gelu
    )


def check_binary(op: str, dtype: str, lanes: int, target: Target | None = None) -> None:
    a, b = pairs(dtype)
    wanted = scalar_functions.apply_binary(op, a, b)
    tolerance = TOLERANCE.get(dtype, 0.0)
    check(
        lambda v, w: Binary(op, v, w),
        (a, b),
        wanted,
        lanes,
        tolerance,
        zero_sign=op not in ("min", "max"),
        target=target,
    )


def has_meaning(op: str, dtype: str) -> bool:
    sample = samples(dtype, 0, 400)
    try:
        scalar_functions.apply_unary(op, sample) if op in UNARY else scalar_functions.apply_binary(op, sample, sample)
    except TypeError:
        return False
    return True


@pytest.mark.each_value
@pytest.mark.parametrize("lanes", [0, 16])
@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op in UNARY for d in dtypes.ALL if has_meaning(op, d)])
def test_unary(op: str, dtype: str, lanes: int) -> None:
    check_unary(op, dtype, lanes)


@pytest.mark.each_value
@pytest.mark.parametrize("lanes", [0, 16])
@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op in BINARY for d in dtypes.ALL if has_meaning(op, d)])
def test_binary(op: str, dtype: str, lanes: int) -> None:
    check_binary(op, dtype, lanes)


@pytest.mark.each_value
@pytest.mark.parametrize("lanes", [0, 16])
@pytest.mark.parametrize("dtype", dtypes.ALL)
def test_compare(dtype: str, lanes: int) -> None:
    a, b = pairs(dtype)
    for op in COMPARE:
        check(lambda v, w, op=op: Compare(op, v, w), (a, b), scalar_functions.apply_compare(op, a, b), lanes, 0.0)


@pytest.mark.each_value
@pytest.mark.parametrize("lanes", [0, 16])
@pytest.mark.parametrize("source", dtypes.ALL)
def test_cast(source: str, lanes: int) -> None:
    x = samples(source, 0)
    for dtype in dtypes.ALL:
        check(lambda v, dtype=dtype: Cast(v, dtype), (x,), scalar_functions.cast(x, dtype), lanes, 0.0)


@pytest.mark.each_value
@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64-v2", "x86-64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int64"])
def test_older_cpus(dtype: str, cpu: str) -> None:
    """Without AVX-512, without F16C and FMA, without SSE4.1: all by the same generic code, run on this machine."""
    if not Target.host().has("avx2"):
        pytest.skip("needs an x86 CPU with AVX2")
    target = Target.parse(f"llvm -mcpu={cpu}")
    x = samples(dtype, 0)
    for source_lanes in (0, 8):
        for other in ("float16", "bfloat16", "float32", "int32", "uint8", "bool"):
            wanted = scalar_functions.cast(x, other)
            check(lambda v, other=other: Cast(v, other), (x,), wanted, source_lanes, 0.0, target=target)
        for op in ("exp", "tanh", "erf", "log", "round", "floor", "sin", "abs", "sign"):
            if has_meaning(op, dtype):
                check_unary(op, dtype, source_lanes, target)
        for op in ("add", "div", "floordiv", "floormod", "pow", "min", "max", "shift_left"):
            if has_meaning(op, dtype):
                check_binary(op, dtype, source_lanes, target)


def test_float16_round_trip_of_all_bit_patterns() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for name in ("float16", "bfloat16"):
        x = bits.view(dtypes.to_numpy(name))
        for target in (None, *([Target.parse("llvm -mcpu=x86-64-v2")] if Target.host().has("avx2") else [])):
            wide = np.zeros(1 << 16, np.float32)
            run(elementwise(lambda v: Cast(v, "float32"), (name,), "float32", 16), [x, wide], [1 << 16], target=target)
            np.testing.assert_array_equal(wide, x.astype(np.float32))
            back = np.zeros_like(x)
            run(
                elementwise(lambda v, n=name: Cast(v, n), ("float32",), name, 16),
                [wide, back],
                [1 << 16],
                target=target,
            )
            same = back.view(np.uint16) == bits
            assert (same | np.isnan(wide)).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("cpu", ["host", "x86-64-v2"])
def test_rounding_to_16_bits_at_ties(name: str, cpu: str) -> None:
    if cpu != "host" and not Target.host().has("avx2"):
        pytest.skip("needs an x86 CPU with AVX2")
    target = Target.host() if cpu == "host" else Target.parse(f"llvm -mcpu={cpu}")
    infinity = int(np.array(np.inf, dtypes.to_numpy(name)).view(np.uint16))
    exact = np.arange(infinity, dtype=np.uint16).view(dtypes.to_numpy(name)).astype(np.float64)
    middle = (exact[1:] + exact[:-1]) / 2
    x = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), -middle])
    for source in (x.astype(np.float32), x):
        type_name = str(source.dtype)
        got = np.zeros(len(x), dtypes.to_numpy(name))
        run(elementwise(lambda v: Cast(v, name), (type_name,), name, 16), [source, got], [len(x)], target=target)
        wide = source.astype(np.float64)
        position = np.searchsorted(exact, np.abs(wide))
        low, high = exact[np.maximum(position - 1, 0)], exact[np.minimum(position, len(exact) - 1)]
        near = np.where(np.abs(wide) - low < high - np.abs(wide), low, high)
        is_tie = np.abs(wide) - low == high - np.abs(wide)
        even = np.where((position - 1) % 2 == 0, low, high)
        wanted = np.copysign(np.where(is_tie, even, near), wide)
        np.testing.assert_array_equal(got.astype(np.float64), wanted)


def test_constant_exponents_are_exact() -> None:
    x = samples("float32", 0)
    x = x[~np.isinf(x)]  # NumPy takes pow(-inf, 0.5) for sqrt(-inf)
    with np.errstate(all="ignore"):
        cases = {2.0: x * x, 1.0: x, 3.0: x * x * x, -1.0: 1 / x, 0.5: np.sqrt(x + 0.0), 0.0: np.ones_like(x)}
    for exponent, wanted in cases.items():
        for lanes in (0, 16):
            check(lambda v, y=exponent: Binary("pow", v, Literal(y, "float32")), (x,), wanted, lanes, 0.0)


@pytest.mark.parametrize("lanes", [0, 16])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("swapped", [False, True])
def test_extremum_with_a_constant_hands_on_nan(op: str, lanes: int, swapped: bool) -> None:
    x = samples("float32", 0)
    for bound in (0.0, 6.0, float("nan")):
        constant = Literal(bound, "float32")
        wanted = scalar_functions.apply_binary(op, x, np.float32(bound))
        check(
            lambda v, c=constant: Binary(op, c, v) if swapped else Binary(op, v, c),
            (x,),
            wanted,
            lanes,
            0.0,
            zero_sign=False,
        )


def test_fma_intrinsic() -> None:
    a, b = pairs("float64")
    wanted = scalar_functions.apply_intrinsic("fma", (a, b, a))
    for lanes in (0, 16):
        make = lambda v, w: Intrinsic("fma", (v, w, v), "float64")  # noqa: E731
        with np.errstate(all="ignore"):
            check(make, (a, b), wanted, lanes, 1e-9, zero_sign=False)


def test_integer_division_by_a_constant() -> None:
    for dtype in ("int32", "int64", "uint8"):
        a = samples(dtype, 0)
        for divisor in (0, 1, 2, 3, 7, 8, -1, -2, -3):
            if divisor < 0 and dtype == "uint8":
                continue
            b = np.full_like(a, divisor)
            for op in ("floordiv", "floormod", "truncdiv", "fmod"):
                literal = Literal(divisor, dtype)
                check(
                    lambda v, op=op, c=literal: Binary(op, v, c), (a,), scalar_functions.apply_binary(op, a, b), 16, 0.0
                )
