"""Converters of operators that create tensors: full, arange, linspace, eye, index ranges of triangles, one-hot."""

from __future__ import annotations

from typing import Any

import torch

from relaxlite import dtypes
from relaxlite.frontend.torch.complex_parts import combine
from relaxlite.frontend.torch.node import Complex, Node, Number
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var


@torch_op("aten.full", "aten.full_like", "aten.new_full", complex=True)
def full(n: Node, self: Any, size: Any = None, fill_value: Any = None, dtype: Any = None) -> Any:
    return filled(n, fill_value)


def filled(n: Node, value: Any) -> Any:
    """Return a tensor of the shape and type of the result, of equal elements."""
    if not n.is_complex():
        return n.full(n.shape(), value, n.dtype())
    if isinstance(value, Complex):
        n.fail("a complex tensor as the value to fill in")
    real, imaginary = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    return combine(n, *(n.full(n.shape(), v, n.dtype()) for v in (real, imaginary)))


@torch_op("aten.scalar_tensor", "aten.fill", complex=True)
def scalar_tensor(n: Node, self: Any, value: Any = None, dtype: Any = None) -> Any:
    return filled(n, self if n.target.startswith("aten.scalar_tensor") else value)


@torch_op("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.empty", "aten.empty_like", "aten.new_empty",
          "aten.empty_strided", "aten.new_empty_strided", "aten.empty_permuted", "aten.zero", complex=True)  # fmt: skip
def zeros(
    n: Node, self: Any, size: Any = None, stride: Any = None, dtype: Any = None, physical_layout: Any = None
) -> Any:
    return filled(n, 0)


@torch_op("aten.ones", "aten.ones_like", "aten.new_ones", complex=True)
def ones(n: Node, self: Any, size: Any = None, dtype: Any = None) -> Any:
    return filled(n, 1)


@torch_op("aten.arange")
def arange(n: Node, self: Any, start: Any = 0, end: Any = None, step: Any = 1, dtype: Any = None) -> Expr:
    start = self if n.overload != "default" else start
    return stepped(n, start, step, n.dtype())


def stepped(n: Node, start: Any, step: Any, dtype: str) -> Expr:
    """Return start, start + step, ... as the result; floats are computed in float64, as torch does."""
    wide = "float64" if dtypes.is_float(dtype) else dtype
    return n.cast(n.emit(ops.arange(n.operand(start, wide), n.operand(step, wide), n.shape())), dtype)


@torch_op("aten.linspace")
def linspace(n: Node, start: Any, end: Any, steps: int, dtype: Any = None) -> Expr:
    """Evenly spaced numbers; like torch, count from the start in the first half and from the end in the second."""
    if _are_numbers(start, end) and not n.is_complex():
        return n.importer.constant(torch.linspace(start, end, steps, dtype=n.result().dtype))  # type: ignore[return-value]
    return n.cast(_spaced(n, start, end, steps), n.dtype())


@torch_op("aten.logspace")
def logspace(n: Node, start: Any, end: Any, steps: int, base: float = 10.0, dtype: Any = None) -> Expr:
    if _are_numbers(start, end) and not n.is_complex():
        return n.importer.constant(torch.logspace(start, end, steps, base, dtype=n.result().dtype))  # type: ignore[return-value]
    exponents = _spaced(n, start, end, steps)
    return n.cast(n.emit(ops.power(Constant.of(base, "float64"), exponents)), n.dtype())


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(v, int | float) for v in values)


def _spaced(n: Node, start: Expr | Number, end: Expr | Number, steps: int) -> Expr:
    """Return evenly spaced numbers in float64; with an integer type, ends are truncated to integers."""
    if n.is_complex():
        n.fail("complex numbers in a range")
    ends = []
    for value in (start, end):
        x = n.operand(value, "float64")
        x = n.reshape(x, ()) if isinstance(x, Var) else x
        ends.append(n.cast(n.cast(x, "int64"), "float64") if dtypes.is_integer(n.dtype()) else x)
    first, last = ends
    zero, one = Constant.of(0.0, "float64"), Constant.of(1.0, "float64")
    if steps < 2:
        return n.emit(ops.full((steps,), first))
    step = n.emit(ops.divide(n.emit(ops.subtract(last, first)), Constant.of(float(steps - 1), "float64")))
    half = steps // 2
    ahead = n.emit(ops.multiply(step, n.emit(ops.arange(zero, one, (half,)))))
    back = n.emit(
        ops.arange(Constant.of(float(steps - 1 - half), "float64"), Constant.of(-1.0, "float64"), (steps - half,))
    )
    behind = n.emit(ops.multiply(step, back))
    return n.emit(ops.concat(n.emit(ops.add(first, ahead)), n.emit(ops.subtract(last, behind)), axis=0))


@torch_op("aten.eye")
def eye(n: Node, self: Any, m: Any = None, dtype: Any = None) -> Expr:
    name = n.dtype()
    return n.cast(n.emit(ops.eye(n.shape(), dtype="uint8" if name == "bool" else name)), name)


@torch_op("aten.tril_indices", "aten.triu_indices")
def triangle_indices(n: Node, row: int, col: int = 0, offset: int = 0, dtype: torch.dtype | None = None) -> Expr:
    indices = torch.tril_indices if n.target.startswith("aten.tril") else torch.triu_indices
    return n.importer.constant(indices(row, col, offset, dtype=n.result().dtype))  # type: ignore[return-value]


@torch_op("aten.one_hot")
def one_hot(n: Node, self: Expr, num_classes: Any = -1) -> Expr:
    if isinstance(num_classes, int) and num_classes < 0:
        n.fail("the number of classes must be given, not be counted in the data")
    depth = n.int(num_classes)
    is_above = n.emit(ops.greater_equal(self, n.operand(0, "int64")))
    is_inside = n.emit(ops.logical_and(is_above, n.emit(ops.less(self, n.operand(depth, "int64")))))
    n.check(n.emit(ops.all(is_inside)), "one_hot: a class is negative, or not below the number of classes")
    return n.emit(ops.one_hot(self, (depth,), Constant.of([0, 1], "int64")))
