"""Casts, also to and from element types that the IR does not have."""

from __future__ import annotations

import numpy as np

from relaxlite import dtypes
from relaxlite.frontend.onnx.narrow import decode, encode
from relaxlite.frontend.onnx.narrow_types import NarrowType
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr

SMALL_BYTES = 1 << 16  # larger floats may be weights that stay in the bits that they have


@onnx_op("Cast")
def cast_1(n: Node) -> Result:
    """Before opset 6, the type is named by text."""
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
    """saturate and round_mode speak of floats of 8 bits only."""
    saturate, rounding = n.flag("saturate", True), n.text("round_mode", "up")
    x, source = n.input(0), n.importer.narrow.get(n.input(0))
    if source is not None and source is target:
        return _marked(n, x, target)
    wide = x if source is None else decode(n, x, source)
    if target is None:
        return _plain_cast(n, wide, dtype)
    rounding = rounding if target.name == "FLOAT8E8M0" else "nearest"
    return _marked(n, encode(n, wide, target, saturate=saturate, rounding=rounding), target)


def _marked(n: Node, x: Expr, ty: NarrowType) -> Expr:
    n.importer.narrow[x] = ty
    return x


def _plain_cast(n: Node, x: Expr, dtype: str) -> Result:
    if n.type_of(x).dtype == dtype:
        return x
    if isinstance(x, Constant) and (x.value.nbytes <= SMALL_BYTES or not dtypes.is_float(x.ty.dtype)):
        return Constant.of(ops.cast.reference(x.value, dtype=dtype), name=x.name)
    return ops.cast(x, dtype=dtype)


@onnx_op("BitCast", since=26)
def bit_cast(n: Node) -> Result:
    """The same bits as another type of the same size: integers wrap; floats only where they are constants."""
    dtype, source = n.element_type("to"), n.dtype()
    value = n.const(0)
    if source == dtype:
        return n.input(0)
    if dtypes.itemsize(dtype) != dtypes.itemsize(source):
        n.fail(f"a cast of the bits of {source} to {dtype}, which differ in size, is not supported")
    if value is not None:
        return Constant.of(np.ascontiguousarray(value).view(dtypes.to_numpy(dtype)))
    if dtypes.is_float(dtype) or dtypes.is_float(source) or dtype == "bool":
        n.fail(f"a cast of the bits of {source} to {dtype} is supported for constants only")
    return ops.cast(n.input(0), dtype=dtype)
