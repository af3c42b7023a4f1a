"""Symbolic evaluation of integer tensors that stand for shapes, with run-time symbols for data-dependent elements.

`BlockBuilder.known_value` evaluates shape arithmetic if all of it is known. If one element depends on data, such as a
length that the model computes, only that element is read at run time: `tensor_to_shape`, then a MatchShape that binds a
fresh symbol. The other elements stay symbolic expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx.float_values import RatioReader, truncate_ratios
from relaxlite.frontend.onnx.symbols import SymbolTable
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, Var
from relaxlite.ir.op import Op
from relaxlite.ir.ops.broadcast import simplify_nonempty
from relaxlite.ir.simplify import has_many_atoms
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, sym
from relaxlite.ir.types import TensorType

# Ops that are evaluated symbolically from their operands' elements, not read at run time.
_SYMBOLIC_OPS = frozenset((
    "concat", "expand_dims", "squeeze", "reshape", "cast", "add", "subtract", "multiply", "gather", "slice", "neg",
    "truncdiv", "maximum", "minimum", "transpose", "broadcast_to", "where", "equal", "not_equal", "less", "greater",
    "less_equal", "greater_equal", "floor_divide", "floormod", "power", "prod", "sum", "abs", "logical_not",
    "logical_and", "logical_or",
))  # fmt: skip
# The ops among them that only move elements: a lower bound of the result's elements holds for the operands' too.
_MOVEMENT_OPS = frozenset(("concat", "expand_dims", "squeeze", "reshape", "cast", "transpose", "broadcast_to"))
_ReadFunction: TypeAlias = "Callable[[Expr, int | None, Sequence[SymExpr | None] | None], object]"
_MAX_VISITED = 200  # variables visited by one evaluation


class ShapeResolver:
    """Evaluates integer tensors as shapes. Values learned inside a branch or loop body hold only there (`scope`)."""

    def __init__(self, bb: BlockBuilder, symbols: SymbolTable) -> None:
        self._bb, self._symbols = bb, symbols
        self._learned: list[Var] = []
        self._names: dict[SymExpr, SymVar] = {}  # symbols for long size expressions

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Open a scope whose learned values and names of sizes are dropped at its end."""
        count, names = len(self._learned), dict(self._names)
        yield
        self._names = names
        while len(self._learned) > count:
            self._bb.set_known_value(self._learned.pop(), None)

    def with_named_sizes(self, x: Expr) -> Expr:
        """Return x with its long size expressions replaced by symbols.

        A broadcast of sizes that cannot be compared repeats its operands' sizes several times, so sizes in a chain of
        broadcasts would grow exponentially.
        """
        dims = (x.ty.shape or ()) if isinstance(x.ty, TensorType) else ()
        if not any(map(has_many_atoms, dims)):
            return x
        hint = x.name if isinstance(x, Var) else "dim"
        for k, d in enumerate(dims):
            if has_many_atoms(d) and d not in self._names:
                self._names[d] = self._symbols.fresh(f"{hint}_{k}")
        return self._bb.match_shape(x, tuple(self._names.get(d, d) for d in dims), hint)

    def _learn(self, x: Var, values: object, shape: tuple[int, ...]) -> None:
        array = np.empty(shape, dtype=object)
        array.reshape(-1)[:] = values
        self._bb.set_known_value(x, array)
        self._learned.append(x)

    def known(self, x: Expr) -> tuple[SymExpr, ...] | None:
        """Return the elements of an integer tensor of rank 0 or 1 if none depends on data, else None."""
        self.derive_values(x)
        return self._bb.known_shape(x)

    def values(self, x: Expr, *, lower: int | None = None) -> tuple[SymExpr, ...]:
        """Return the elements of an integer tensor of rank 0 or 1, binding symbols of at least `lower` at run time.

        Raises ImportModelError if the number of elements is not known.
        """
        self._resolve(x, lower, set(), self._read)
        known = self._bb.known_shape(x)
        if known is None:
            raise ImportModelError(f"an input that stands for a shape is {x.ty}: its number of elements must be known")
        return known

    def reshape_target(self, x: Expr, target: Expr, *, allow_zero: bool) -> tuple[SymExpr, ...]:
        """Return the result shape of ONNX Reshape for a data-dependent target, whose 0 and -1 are resolved at run time.

        `allow_zero`: a 0 is a size, not a dimension of x. Raises ImportModelError if the target's rank is not known.
        """
        assert isinstance(x.ty, TensorType) and isinstance(target.ty, TensorType) and target.ty.shape
        rank, emit = as_int(target.ty.shape[0]), self._bb.emit
        if rank is None:
            raise ImportModelError("the target shape has an unknown number of dimensions")
        if target.ty.dtype != "int64":
            target = emit(ops.cast(target, dtype="int64"))
        dims = x.ty.shape or ()
        if not allow_zero:
            copied = emit(ops.shape_to_tensor((*dims[:rank], *(sym(0),) * (rank - len(dims)))))
            target = emit(ops.where(emit(ops.equal(target, np.int64(0))), copied, target))
        is_inferred = emit(ops.equal(target, np.int64(-1)))
        fixed_size = emit(ops.prod(emit(ops.where(is_inferred, np.int64(1), target)), axes=(0,)))
        count = emit(ops.reshape(emit(ops.shape_to_tensor((product(dims),))), ()))
        inferred = emit(ops.truncdiv(count, emit(ops.maximum(fixed_size, np.int64(1)))))
        resolved = emit(ops.where(is_inferred, inferred, target), "target")
        return self._read(resolved, 0)

    def simplify_nonempty(self, target: tuple[SymExpr, ...]) -> tuple[SymExpr, ...]:
        """Simplify a shape as if no symbol were 0, and emit a run-time check that both forms are equal."""
        simpler = tuple(map(simplify_nonempty, target))
        differ = [(a, b) for a, b in zip(target, simpler, strict=True) if a is not b]
        if differ:
            originals, simplified = zip(*dict.fromkeys(differ), strict=True)
            shape = self._bb.emit(ops.tensor_to_shape(self._bb.emit(ops.shape_to_tensor(originals))))
            self._bb.match_shape(shape, simplified)
        return simpler

    def ratios(self, x: Expr) -> Any:
        """Return the elements of a float tensor as an object array of `Ratio`, fractions of symbols, or None."""
        return RatioReader(self._bb, self.derive_values).values(x)

    def derive_values(self, x: Expr) -> Any:
        """Return the elements of an integer tensor as an object array if none depends on data, else None."""
        self._resolve(x, None, set(), None)
        return self._bb.known_value(x)

    def _resolve(self, x: Expr, lower: int | None, visited: set[Var], read: _ReadFunction | None) -> None:
        """Learn the elements of x, evaluated from its operands or read by `read`."""
        if not isinstance(x, Var) or self._bb.known_value(x) is not None or x in visited:
            return
        visited.add(x)
        call, known = self._bb.bound_value(x), None
        if isinstance(call, Call) and isinstance(call.callee, Op) and len(visited) < _MAX_VISITED:
            values = self._from_floats(call)
            if values is None and call.callee.name in _SYMBOLIC_OPS and _is_integer(call):
                if lower is None or call.callee.name in _MOVEMENT_OPS:
                    for operand in call.args:
                        self._resolve(operand, lower, visited, read)
                    values = self._bb.evaluate(call)
                else:
                    values, known = self._evaluate_static(call)
            if values is not None:
                self._learn(x, values.reshape(-1), values.shape)
                return
        if read is not None:
            read(x, lower, known)

    def _evaluate_static(self, call: Call) -> tuple[Any, list[SymExpr | None] | None]:
        """Evaluate a call whose result may have data-dependent elements.

        Return (elements, None) if no element is; else (None, elements), with None for each that is.
        """
        placeholders: set[SymVar] = set()

        def bind_placeholder(x: Expr, lower: int | None, known: Sequence[SymExpr | None] | None) -> None:
            count = _count(x)
            if isinstance(x, Var) and count is not None:
                symbols = [SymVar("unread") for _ in range(count)]
                self._learn(x, symbols, _extents(x))
                placeholders.update(symbols)

        with self.scope():
            for operand in call.args:
                self._resolve(operand, None, set(), bind_placeholder)
            values: Any = self._bb.evaluate(call)
        if values is None:
            return None, None
        elements = [sym(e) for e in values.reshape(-1).tolist()]
        known = [None if placeholders.intersection(e.free_vars()) else e for e in elements]
        return (None, known) if None in known else (values, None)

    def _from_floats(self, call: Call) -> Any:
        """Return the elements of a cast from floats to integers if the floats are fractions of symbols, else None."""
        source = call.args[0].ty if call.args else None
        if not isinstance(call.callee, Op) or call.callee.name != "cast" or not isinstance(source, TensorType):
            return None
        if (
            not dtypes.is_float(source.dtype)
            or not isinstance(call.ty, TensorType)
            or not dtypes.is_integer(call.ty.dtype)
        ):
            return None
        ratios = self.ratios(call.args[0])
        return None if ratios is None else truncate_ratios(ratios)

    def _read(self, x: Expr, lower: int | None, known: Sequence[SymExpr | None] | None = None) -> tuple[SymExpr, ...]:
        """Bind fresh symbols at run time to the unknown elements of x; () if x is no integer vector or scalar."""
        count = _count(x)
        if count is None:
            return ()
        hint = x.name if isinstance(x, Var) else "dim"
        names = [hint if count == 1 else f"{hint}_{k}" for k in range(count)]
        partial = known or [None] * count
        elements = [
            self._symbols.fresh(n, lower=lower) if e is None else e for n, e in zip(names, partial, strict=True)
        ]
        if elements:
            self._bb.match_shape(self._bb.emit(ops.tensor_to_shape(x)), tuple(elements))
        if isinstance(x, Var):
            self._learn(x, elements, _extents(x))
        return tuple(elements)


def _extents(x: Expr) -> tuple[int, ...]:
    assert isinstance(x.ty, TensorType)
    return tuple(as_int(d) or 0 for d in x.ty.shape or ())


def _count(x: Expr) -> int | None:
    """Return the number of elements of an integer tensor of rank 0 or 1; None if unknown, and for other values."""
    ty = x.ty
    if not isinstance(ty, TensorType) or ty.shape is None or len(ty.shape) > 1 or not dtypes.is_integer(ty.dtype):
        return None
    return as_int(product(ty.shape))


def _is_integer(call: Call) -> bool:
    """Whether all tensor operands of a call are integers or constants; shape operands are integers anyway."""
    tensors = [(a, a.ty) for a in call.args if isinstance(a.ty, TensorType)]
    return all(dtypes.is_integer(ty.dtype) or isinstance(a, Constant) for a, ty in tensors)
