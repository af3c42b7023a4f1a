"""Symbolic evaluation of the subgraphs that compute shapes.

If the elements of a small integer tensor are known symbolically (`BlockBuilder.evaluate`), the subgraph that computes
them (Shape -> Gather -> Add -> Concat ...) becomes one `shape_to_tensor` of symbolic integers, or a constant. Ops that
only computed shapes are then dead.
"""

from __future__ import annotations

import numpy as np

from relaxlite import dtypes
from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Constant, Expr, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.symbolic import sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions


def fold_shapes(module: IRModule) -> IRModule:
    """Replace tensor computations of shapes by symbolic integers (`shape_to_tensor`) or constants."""
    return map_functions(module, lambda f: _FoldShapes().function(f))


class _FoldShapes(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self._folded: set[Var] = set()  # shape_to_tensor, its casts and reshapes: already folded

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or not isinstance(value.ty, TensorType):
            return None
        if self._is_from_shape(value):
            self._folded.add(var)
            return None
        known = self.bb.evaluate(value)
        if known is None:
            return None
        flat = tuple(sym(v) for v in known.reshape(-1).tolist())
        if all(v.is_const for v in flat):
            data = np.array([v.const for v in flat], dtype=np.int64).reshape(known.shape)
            return Constant.of(data.astype(dtypes.to_numpy(value.ty.dtype)))
        if value.ty.dtype not in ("int32", "int64"):
            return None
        self._folded.add(var)
        return self._materialize(flat, known.shape, value.ty.dtype)

    def _is_from_shape(self, call: Call) -> bool:
        name = call.callee.name
        return name == "shape_to_tensor" or (name in ("cast", "reshape") and call.args[0] in self._folded)

    def _materialize(self, values: tuple[object, ...], shape: tuple[int, ...], dtype: str) -> Expr:
        result: Expr = ops.shape_to_tensor(ShapeValue(values))  # type: ignore[arg-type]
        if shape != (len(values),):
            result = ops.reshape(self.bb.emit(result), shape)
        if dtype != "int64":
            result = ops.cast(self.bb.emit(result), dtype=dtype)
        return result
