"""Cost in FLOPs of scalar operations, for passes, profiles and the thread rule of the code generator."""

from __future__ import annotations

from collections.abc import Mapping

from relaxlite.ir.intrinsics import (
    BITCASTS,
    DOT2_PACKED_BF16,
    DOT2_PACKED_INT16,
    DOT4_PACKED_U8S8,
    DOT_PRODUCTS,
    LOOKUP,
    NARROW,
    PACK_BF16,
    PACK_BYTES,
    ROUND_TO_INT32,
    SHUFFLE_XOR,
)
from relaxlite.ir.program import Binary, Intrinsic, Stmt, Unary, Value
from relaxlite.ir.program_visitor import all_values, walk_values

# FLOPs per operation. One instruction counts 1, a fused multiply-add 2, division and square root 4 as is customary.
# Functions count about the operations of our float32 code (codegen/llvm/math.py). Moves, comparisons, selects and
# conversions count 0. Integer operations count like those on floats; operations on bool count 0.
FLOPS: Mapping[str, int] = {
    **dict.fromkeys(
        ("add", "sub", "mul", "min", "max", "maxnum", "neg", "abs", "sign", "floor", "ceil", "round", "trunc"), 1
    ),
    **dict.fromkeys(("and", "or", "xor", "not", "bitwise_not", "shift_left", "shift_right"), 1),
    **dict.fromkeys(("div", "sqrt", "floordiv", "truncdiv", "floormod", "fmod"), 4),
    "fma": 2,
    DOT4_PACKED_U8S8: 8,
    LOOKUP: 0,
    PACK_BYTES: 0,
    NARROW: 0,
    **dict.fromkeys(BITCASTS.values(), 0),
    ROUND_TO_INT32: 1,
    PACK_BF16: 0,
    DOT2_PACKED_BF16: 4,
    DOT2_PACKED_INT16: 4,
    SHUFFLE_XOR: 0,
    **{name: 2 * dot.length for name, dot in DOT_PRODUCTS.items()},
    "isnan": 0,
    "isinf": 0,
    "exp": 20,
    "exp2": 15,
    **dict.fromkeys(("log", "tanh", "erf", "gelu"), 30),
    **dict.fromkeys(("log1p", "expm1", "sin", "cos", "tan"), 50),
    **dict.fromkeys(("asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "pow"), 70),
}


def flops_of(op: str) -> int:
    """FLOPs of one operation; 1 for an operation that the table lacks."""
    return FLOPS.get(op, 1)


def value_flops(*values: Value) -> int:
    """FLOPs to compute the values; shared subexpressions count once."""
    parts = {id(part): part for value in values for part in walk_values(value)}
    return sum(_operation_flops(part) for part in parts.values())


def stmt_flops(stmt: Stmt) -> int:
    """FLOPs of all values inside a statement, each counted once: for a loop nest, the FLOPs of one iteration."""
    parts = {id(part): part for part in all_values(stmt)}
    return sum(_operation_flops(part) for part in parts.values())


def _operation_flops(value: Value) -> int:
    if isinstance(value, Unary):
        return 0 if value.x.dtype == "bool" else flops_of(value.op)
    if isinstance(value, Binary):
        return 0 if value.dtype == "bool" else flops_of(value.op)
    return flops_of(value.name) if isinstance(value, Intrinsic) else 0
