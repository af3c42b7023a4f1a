"""Lower to destination-passing style: outputs of programs and library routines are allocated by the caller.

y = call(f, x)      =>      y = memory.alloc_tensor(shape); call(f, x, y)
"""

from __future__ import annotations

from relaxlite.errors import PassError
from relaxlite.ir.expr import Call, Expr, ExternFunction, GlobalVar, ShapeValue, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.types import UNIT, TensorType, TupleType, Type
from relaxlite.ir.visitor import Rewriter, map_functions


def lower_dps(module: IRModule) -> IRModule:
    """Allocate the outputs of every call explicitly, and pass them as last arguments."""
    return map_functions(module, lambda f: _LowerDps(module).function(f))


class _LowerDps(Rewriter):
    """Rewriter of calls of programs and library routines."""

    def __init__(self, module: IRModule) -> None:
        super().__init__()
        self._module = module
        self._outputs: dict[Expr, tuple[Var, ...]] = {}  # of calls with several outputs

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, TupleGetItem) and value.value in self._outputs:
            return self._outputs[value.value][value.index]  # lifetimes of outputs stay separate
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar) or value.ty == UNIT:
            return None
        if not isinstance(self._module[value.callee.name], TensorProgram | ExternFunction):
            return None
        fields = value.ty.fields if isinstance(value.ty, TupleType) else (value.ty,)
        names = [var.name] if len(fields) == 1 else [f"{var.name}_{k}" for k in range(len(fields))]
        outs = [self._allocate(ty, name) for ty, name in zip(fields, names, strict=True)]
        call = Call(value.callee, (*value.args, *outs), value.attrs, value.sym_args, UNIT, value.loc)
        self.bb.emit(call, "_")
        if not isinstance(value.ty, TupleType):
            return outs[0]
        self._outputs[var] = tuple(outs)
        return Tuple(tuple(outs))

    def _allocate(self, ty: Type, name: str) -> Var:
        if not isinstance(ty, TensorType) or ty.shape is None:
            raise PassError(f"{name}: a result of unknown shape cannot be allocated")
        return self.bb.emit(get_op("memory.alloc_tensor")(ShapeValue(ty.shape), dtype=ty.dtype), name)
