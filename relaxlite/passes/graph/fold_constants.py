"""Constant folding: evaluate pure ops on constants with their NumPy references.

Not folded are results that are much larger than their operands, and ops that widen quantized or half-precision weights
of matrix products (quantized_weights.py). Exceptions in the size limit are tables of sines and cosines, as in Fourier
transforms, and filters of convolutions, because only constant filters can be packed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import result_types
from relaxlite.ir.expr import Call, Constant, Expr, Function, Let, ShapeValue, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.ops.nn_conv import Convolution
from relaxlite.ir.ops.scalars import HALF
from relaxlite.ir.symbolic import as_int
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, bodies, map_functions, used_vars

ALWAYS_FOLDED_BYTES = 1 << 16  # results up to this size are always folded
_PRESERVED = ("unpack_integers", "dequantize_blocks")
_TABLES = ("dft_matrix", "cosine_window")  # of sines and cosines: a load is much cheaper than computing an element
MAX_TABLE_BYTES = 1 << 26  # maximum size of a folded table: a transform of 4096 points
MAX_GROWTH = 2  # maximum ratio of larger results to their operands: an Expand of a scalar stays a loop


def fold_constants(module: IRModule) -> IRModule:
    """Replace calls of pure ops on constants by their results, evaluated with NumPy.

    Results above `ALWAYS_FOLDED_BYTES` are only folded up to `MAX_GROWTH` times the size of the operands.
    Exceptions are filters of convolutions, and tables of sines and cosines up to `MAX_TABLE_BYTES`.
    Errors in evaluation leave the call to run time.
    """
    return map_functions(module, lambda f: _FoldConstants(_widened_weights(f), _filters(f)).function(f))


def _calls(function: Function) -> Iterator[tuple[Call, Op]]:
    for body in bodies(function):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            if isinstance(value, Call) and isinstance(value.callee, Op):
                yield value, value.callee


def _filters(function: Function) -> set[Var]:
    """The variables that convolutions read as filters."""
    read = (call.args[1] for call, op in _calls(function) if isinstance(op, Convolution))
    return {w for w in read if isinstance(w, Var)}


def _widened_weights(function: Function) -> set[Var]:
    """Casts of half-precision constants to float32 that only matrix products read, as right operands."""
    casts: set[Var] = set()
    excluded: set[Var] = set()
    for body in bodies(function):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "matmul":
                excluded.update(used_vars(value.args[0]))
                continue
            excluded.update(used_vars(value))
            if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "cast":
                source = value.args[0]
                if isinstance(source, Constant) and source.ty.dtype in HALF and value.attrs["dtype"] == "float32":
                    casts.add(binding.var)
        excluded.update(used_vars(body.result))
    return casts - excluded


class _FoldConstants(Rewriter):
    def __init__(self, preserved: set[Var], filters: set[Var]) -> None:
        super().__init__()
        self._preserved, self._filters = preserved, filters
        self._tuples: dict[Var, tuple[Constant, ...]] = {}

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, TupleGetItem) and isinstance(value.value, Var) and value.value in self._tuples:
            return self._tuples[value.value][value.index]
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or not value.callee.is_pure:
            return None
        if var in self._preserved or value.callee.name in _PRESERVED:
            return None
        operands = [_concrete(arg) for arg in value.args]
        if any(o is None for o in operands) or not _is_worth(value, operands, any_growth=var in self._filters):
            return None
        try:
            with np.errstate(all="ignore"):
                result = value.callee.reference(*operands, **value.attrs)
        except (IndexError, ValueError, ArithmeticError):  # reported at run time, if the call is reached
            return None
        if isinstance(result, tuple):
            self._tuples[var] = tuple(_constant(r, t) for r, t in zip(result, value.ty.fields, strict=True))  # type: ignore[union-attr]
            return Tuple(self._tuples[var])
        return _constant(result, value.ty)


def _concrete(arg: Expr) -> Any:
    if isinstance(arg, Constant):
        return arg.value
    if isinstance(arg, ShapeValue):
        values = tuple(as_int(v) for v in arg.values)
        return None if None in values else values
    return None


def _constant(result: Any, ty: object) -> Constant:
    assert isinstance(ty, TensorType)
    return Constant.of(np.asarray(result).astype(dtypes.to_numpy(ty.dtype), copy=False))


def _is_worth(call: Call, operands: list[Any], *, any_growth: bool) -> bool:
    if not isinstance(call.callee, Op) or type(call.callee).reference is Op.reference:
        return False
    types: list[Any] = list(result_types(call.ty))
    if not all(isinstance(t, TensorType) and t.shape is not None and all(d.is_const for d in t.shape) for t in types):
        return False
    size = sum(math.prod(d.const for d in t.shape) * dtypes.itemsize(t.dtype) for t in types)
    if call.callee.name in _TABLES:
        return bool(size <= MAX_TABLE_BYTES)
    operand_bytes = sum(o.nbytes for o in operands if isinstance(o, np.ndarray))
    return any_growth or bool(size <= max(ALWAYS_FOLDED_BYTES, MAX_GROWTH * operand_bytes))
