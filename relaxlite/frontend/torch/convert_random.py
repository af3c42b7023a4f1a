"""Converters of random operators: a counter-based generator (common/random_values.py), whose state the executable has.

`exe.state["random_state"]`, (seed, number of calls), counts on with each call, so calls differ and a seed repeats them.
The numbers are not torch's own. Random operators in branches and loops are refused.
"""

from __future__ import annotations

from typing import Any

from relaxlite import dtypes
from relaxlite.frontend.common import random_values
from relaxlite.frontend.torch.node import Node, Shape
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import product

_BITS = {"float16": 11, "bfloat16": 8}  # digits of numbers below 1, so that none is rounded to 1


def fraction(n: Node, shape: Shape, dtype: str) -> Expr:
    """Emit uniform numbers in [0, 1)."""
    return n.cast(random_values.fraction(n.emit, shape, n.importer.random_key(), _BITS.get(dtype, 24)), dtype)


def standard_normal(n: Node, shape: Shape) -> Expr:
    """Emit float32 of the standard normal distribution."""
    return random_values.normal(n.emit, shape, n.importer.random_key())


@torch_op("aten.rand", "aten.rand_like")
def rand(n: Node, self: Any, dtype: Any = None) -> Expr:
    return fraction(n, n.shape(), n.dtype())


@torch_op("aten.randn", "aten.randn_like")
def randn(n: Node, self: Any, dtype: Any = None) -> Expr:
    return n.cast(standard_normal(n, n.shape()), n.dtype())


@torch_op("aten.randint", "aten.randint_like")
def randint(n: Node, self: Any, high: Any = None, low: Any = 0, size: Any = None, dtype: Any = None) -> Expr:
    """Uniform integers from low to high - 1, of a range below 2**32: the remainder of 32 random bits."""
    if n.target.startswith("aten.randint."):
        low, high = (self, high) if n.overload.startswith("low") else (0, self)
    words = random_values.words(n.emit, product(n.shape()), n.importer.random_key())
    spread = n.emit(ops.subtract(n.operand(high, "int64"), n.operand(low, "int64")))
    value = n.emit(ops.add(n.emit(ops.floormod(n.cast(words, "int64"), spread)), n.operand(low, "int64")))
    return n.reshape(n.cast(value, n.dtype()), n.shape())


@torch_op("aten.randperm")
def randperm(n: Node, self: Any, dtype: Any = None) -> Expr:
    """A random order: that which sorts random words."""
    words = random_values.words(n.emit, product(n.shape()), n.importer.random_key())
    return n.cast(n.emit(ops.argsort(words)), n.dtype())


@torch_op("aten.bernoulli")
def bernoulli(n: Node, self: Expr, p: Any = None) -> Expr:
    """1 with the probability p, by default that of each element of self."""
    probability = n.cast(self, "float32") if p is None else n.operand(p, "float32")
    draws = fraction(n, n.shape(), "float32")
    return n.cast(n.emit(ops.less(draws, n.fit(probability, n.shape()))), n.dtype())


@torch_op("aten.normal", "aten.normal_functional")
def normal(n: Node, self: Any, mean: Any = 0, std: Any = 1, size: Any = None, dtype: Any = None) -> Expr:
    """Normal numbers of a mean and a standard deviation."""
    if not n.target.startswith("aten.normal_functional"):
        mean = self  # the first argument of these
    shape, result = n.shape(), n.dtype()
    wide = "float64" if result == "float64" else "float32"
    center, scale = (n.fit(n.operand(v, wide), shape) for v in (mean, std))
    scaled = n.emit(ops.multiply(n.cast(standard_normal(n, shape), wide), scale))
    return n.cast(n.emit(ops.add(scaled, center)), result)


@torch_op("aten.multinomial")
def multinomial(n: Node, self: Expr, num_samples: Any, replacement: bool = False) -> Expr:
    """Classes by unnormalized probabilities, by the Gumbel-max trick: of the greatest of log p + noise."""
    logits = n.emit(ops.log(n.cast(self, "float32")))
    rows = logits if n.rank(logits) == 2 else n.emit(ops.expand_dims(logits, axes=(0,)))
    batch, classes = n.shape_of(rows)
    count, key = n.int(num_samples), n.importer.random_key()
    if replacement:
        noise = random_values.gumbel(n.emit, (batch, count, classes), key)
        chosen: Expr = n.emit(ops.argmax(n.emit(ops.add(n.emit(ops.expand_dims(rows, axes=(1,))), noise)), axis=2))
    else:
        noise = random_values.gumbel(n.emit, (batch, classes), key)
        chosen = n.fields(ops.top_k(n.emit(ops.add(rows, noise)), (count,), axis=1))[1]
    return n.reshape(chosen, n.shape())


def dropped(n: Node, x: Expr, p: float) -> tuple[Expr, Expr]:
    """Emit x with elements set to 0 with the probability p and the others divided by 1 - p, and where they are kept."""
    dtype = n.dtype_of(x)
    if not dtypes.is_float(dtype):
        n.fail("dropout of integers is not supported")
    kept = n.emit(ops.greater_equal(fraction(n, n.shape_of(x), "float32"), n.operand(p, "float32")))
    scaled = n.emit(ops.multiply(x, n.operand(0.0 if p == 1 else 1 / (1 - p), dtype)))
    return n.emit(ops.where(kept, scaled, n.operand(0, dtype))), kept
