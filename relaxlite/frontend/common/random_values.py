"""Random numbers by a counter-based generator: a hash of element index and key, the same in every run for one key."""

from __future__ import annotations

import math
from collections.abc import Callable

from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.symbolic import SymExpr, product

Emit = Callable[[Expr], Expr]
Shape = tuple[SymExpr, ...]


def hashed(emit: Emit, x: Expr) -> Expr:
    """Emit a low-bias permutation of 32-bit integers (Wellons, "Prospecting for hash functions", 2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = emit(ops.bitwise_xor(x, emit(ops.right_shift(x, Constant.of(shift, "uint32")))))
        x = emit(ops.multiply(x, Constant.of(factor, "uint32")))
    return emit(ops.bitwise_xor(x, emit(ops.right_shift(x, Constant.of(16, "uint32")))))


def words(emit: Emit, count: SymExpr, key: Expr) -> Expr:
    """Emit a vector of uint32, hashes of element index and key, a uint32 of rank 0."""
    zero, one = Constant.of(0, "int64"), Constant.of(1, "int64")
    position = emit(ops.cast(emit(ops.arange(zero, one, (count,))), dtype="uint32"))
    return hashed(emit, emit(ops.bitwise_xor(hashed(emit, position), key)))


def uniform(emit: Emit, shape: Shape, key: Expr) -> Expr:
    """Emit uniform float32 in (0, 1): 24 bits of a word, and half a step."""
    top = emit(ops.right_shift(words(emit, product(shape), key), Constant.of(8, "uint32")))
    fraction = emit(ops.multiply(emit(ops.cast(top, dtype="float32")), Constant.of(2.0**-24, "float32")))
    return emit(ops.reshape(emit(ops.add(fraction, Constant.of(2.0**-25, "float32"))), shape))


def normal(emit: Emit, shape: Shape, key: Expr) -> Expr:
    """Emit standard normal float32 by the Box-Muller transform."""
    logarithm = emit(ops.log(uniform(emit, shape, key)))
    radius = emit(ops.sqrt(emit(ops.multiply(logarithm, Constant.of(-2.0, "float32")))))
    other = emit(ops.bitwise_xor(key, Constant.of(0x9E3779B9, "uint32")))
    angle = emit(ops.multiply(uniform(emit, shape, other), Constant.of(2 * math.pi, "float32")))
    return emit(ops.multiply(radius, emit(ops.cos(angle))))


def gumbel(emit: Emit, shape: Shape, key: Expr) -> Expr:
    """Emit float32 of the standard Gumbel distribution, whose argmax with logits added samples a class."""
    return emit(ops.neg(emit(ops.log(emit(ops.neg(emit(ops.log(uniform(emit, shape, key)))))))))


def fraction(emit: Emit, shape: Shape, key: Expr, bits: int = 24) -> Expr:
    """Emit uniform float32 in [0, 1), multiples of 2 ** -bits."""
    top = emit(ops.right_shift(words(emit, product(shape), key), Constant.of(32 - bits, "uint32")))
    scaled = emit(ops.multiply(emit(ops.cast(top, dtype="float32")), Constant.of(2.0**-bits, "float32")))
    return emit(ops.reshape(scaled, shape))
