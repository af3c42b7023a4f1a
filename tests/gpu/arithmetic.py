"""Arithmetic instructions of PTX in NumPy: functions of (parts of the name, element type, operands...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu.ptx import BITS

Array = Any
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
ROUND = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def is_float(kind: Any) -> bool:
    return kind.kind not in "iub"


def wide(kind: Any) -> Any:
    return np.dtype(f"{kind.kind}{2 * kind.itemsize}")


def shift(kind: Any, a: Array, n: Array, *, is_left: bool) -> Array:
    """Shifts by the width or more give 0, or copies of the sign."""
    bits = 8 * kind.itemsize
    n = np.asarray(n).view(BITS[np.asarray(n).dtype.itemsize]).astype(np.uint64)
    small = np.minimum(n, bits - 1).astype(kind)
    moved = np.left_shift(a, small) if is_left else np.right_shift(a, small)
    beyond = np.right_shift(a, kind.type(bits - 1)) if not is_left and kind.kind == "i" else 0
    return np.where(n >= bits, beyond, moved).astype(kind)


def multiply(op: Any, kind: Any, a: Array, b: Array) -> Array:
    if "wide" in op:
        return a.astype(wide(kind)) * b.astype(wide(kind))
    if "hi" in op and kind.itemsize == 8:
        pairs = np.broadcast(a, b)
        high = np.array([(int(x) * int(y)) >> 64 & (1 << 64) - 1 for x, y in pairs], np.uint64).reshape(pairs.shape)
        return high.view(kind)
    if "hi" in op:
        return ((a.astype(wide(kind)) * b.astype(wide(kind))) >> wide(kind).type(8 * kind.itemsize)).astype(kind)
    return (a * b).astype(kind)


def multiply_add(op: Any, kind: Any, a: Array, b: Array, c: Array) -> Array:
    total = wide(kind) if "wide" in op else kind
    return multiply(op, kind, a, b).view(total) + np.asarray(c).view(total)


def fused(op: Any, kind: Any, a: Array, b: Array, c: Array) -> Array:
    exact = np.float64 if kind.itemsize == 4 else np.longdouble
    return (a.astype(exact) * b + c).astype(kind)


def divide(op: Any, kind: Any, a: Array, b: Array) -> Array:
    if is_float(kind):
        return a / b
    safe = np.where(b == 0, kind.type(1), b)
    quotient = a // safe
    if kind.kind == "i":  # towards zero
        quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, kind.type(-1) if kind.kind == "i" else np.iinfo(kind).max, quotient).astype(kind)


def remainder(op: Any, kind: Any, a: Array, b: Array) -> Array:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, kind.type(1), b))).astype(kind)


def extremum(name: str) -> Callable[..., Array]:
    with_nan, without = getattr(np, f"{name}imum"), getattr(np, f"f{name}")
    return lambda op, kind, a, b: (with_nan if "NaN" in op or not is_float(kind) else without)(a, b)


def extract(op: Any, kind: Any, a: Array, at: Array, count: Array) -> Array:
    bits = 8 * kind.itemsize
    return (a << kind.type(bits - int(at) - int(count))) >> kind.type(bits - int(count))


def permute(op: Any, kind: Any, a: Array, b: Array, selector: Array) -> Array:
    """prmt: byte k of the result is the byte of b:a that digit k of the selector names."""
    both = np.asarray(b).astype(np.uint64) << np.uint64(32) | np.asarray(a).astype(np.uint64)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for k in range(4):
        digit = np.asarray(selector).astype(np.uint32) >> np.uint32(4 * k) & np.uint32(0xF)
        byte = (both >> (8 * (digit & 7)).astype(np.uint64) & np.uint64(0xFF)).astype(np.uint32)
        byte = np.where(digit & 8, np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0)), byte)
        result |= byte << np.uint32(8 * k)
    return result.view(kind)


def count_leading_zeros(op: Any, kind: Any, a: Array) -> Array:
    bits = 8 * kind.itemsize
    return np.array([bits - int(x).bit_length() for x in np.ravel(a)], np.uint32).reshape(np.shape(a))


def population(op: Any, kind: Any, a: Array) -> Array:
    return np.array([int(x).bit_count() for x in np.ravel(a)], np.uint32).reshape(np.shape(a))


ALU: dict[str, Callable[..., Array]] = {
    "add": lambda op, k, a, b: a + b,
    "sub": lambda op, k, a, b: a - b,
    "mul": multiply,
    "mad": multiply_add,
    "fma": fused,
    "div": divide,
    "rem": remainder,
    "neg": lambda op, k, a: (-a).astype(k),
    "abs": lambda op, k, a: abs(a),
    "and": lambda op, k, a, b: a & b,
    "or": lambda op, k, a, b: a | b,
    "xor": lambda op, k, a, b: a ^ b,
    "not": lambda op, k, a: ~a,
    "shl": lambda op, k, a, n: shift(k, a, n, is_left=True),
    "shr": lambda op, k, a, n: shift(k, a, n, is_left=False),
    "min": extremum("min"),
    "max": extremum("max"),
    "sqrt": lambda op, k, a: np.sqrt(a),
    "rsqrt": lambda op, k, a: (1 / np.sqrt(a)).astype(k),
    "rcp": lambda op, k, a: (1 / a).astype(k),
    "ex2": lambda op, k, a: np.exp2(a),
    "lg2": lambda op, k, a: np.log2(a),
    "tanh": lambda op, k, a: np.tanh(a),
    "copysign": lambda op, k, a, b: np.copysign(b, a),
    "bfe": extract,
    "prmt": permute,
    "clz": count_leading_zeros,
    "popc": population,
}
