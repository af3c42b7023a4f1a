"""Converters of casts, also from and to narrow element types, which the IR lacks."""

from __future__ import annotations

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.onnx.narrow import decode, encode
from relaxlite.frontend.onnx.narrow_types import NarrowType
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr

MAX_FOLDED_BYTES = 1 << 16  # larger float constants may be weights, which keep their dtype


@onnx_op("Cast")
def cast_1(n: Node) -> Result:
    """Cast before opset 6, whose attribute `to` is the name of a type."""
    name = n.text("to").lower()
    dtype = {"float": "float32", "double": "float64"}.get(name, name)
    return ops.cast(n.input(0), dtype=dtype)


@onnx_op("Cast", since=6)
def cast(n: Node) -> Result:
    return _cast(n, n.element_type("to"), n.narrow_type("to"))


@onnx_op("CastLike", since=15)
def cast_like(n: Node) -> Result:
    return _cast(n, n.dtype(1), n.importer.narrow.get(n.input(1)))


def _cast(n: Node, dtype: str, target: NarrowType | None) -> Result:
    """Convert a cast; `saturate` and `round_mode` affect casts to 8-bit floats only."""
    saturate, rounding = n.flag("saturate", True), n.text("round_mode", "up")
    x, source = n.input(0), n.importer.narrow.get(n.input(0))
    if source is not None and source is target:
        return _set_narrow_type(n, x, target)
    wide = x if source is None else decode(n, x, source)
    if target is None:
        return _cast_ir_types(n, wide, dtype)
    rounding = rounding if target.name == "FLOAT8E8M0" else "nearest"
    return _set_narrow_type(n, encode(n, wide, target, saturate=saturate, rounding=rounding), target)


def _set_narrow_type(n: Node, x: Expr, ty: NarrowType) -> Expr:
    n.importer.narrow[x] = ty
    return x


def _cast_ir_types(n: Node, x: Expr, dtype: str) -> Result:
    if n.type_of(x).dtype == dtype:
        return x
    if isinstance(x, Constant) and (x.value.nbytes <= MAX_FOLDED_BYTES or not dtypes.is_float(x.ty.dtype)):
        return Constant.of(ops.cast.reference(x.value, dtype=dtype), name=x.name)
    return ops.cast(x, dtype=dtype)


@onnx_op("BitCast", since=26)
def bit_cast(n: Node) -> Result:
    """BitCast: reinterpret the bits as another type of the same size."""
    dtype, source = n.element_type("to"), n.dtype()
    value = n.const(0)
    if source == dtype:
        return n.input(0)
    if dtypes.itemsize(dtype) != dtypes.itemsize(source):
        n.fail(f"a cast of the bits of {source} to {dtype}, which differ in size, is not supported")
    if value is not None:
        return Constant.of(np.ascontiguousarray(value).view(dtypes.to_numpy(dtype)))
    if source == "bool":
        return ops.cast(n.input(0), dtype=dtype)  # its bits are those of 0 and 1
    if dtype == "bool":
        n.fail(f"a cast of the bits of {source} to {dtype} is supported for constants only")
    return ops.bitcast(n.input(0), dtype=dtype)
