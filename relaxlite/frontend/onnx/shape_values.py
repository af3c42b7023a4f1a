"""Integer tensors as symbolic shapes: the values where they are known, run-time checked symbols where they are not.

`BlockBuilder.known_value` follows shape arithmetic while all of it is known. Where one element comes out of data (a
length that the model computes), the elements around it are still resolved one by one, and only that one is read at run
time: `tensor_to_shape`, then a MatchShape that binds a fresh symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx.float_values import RatioReader, truncated_values
from relaxlite.frontend.onnx.symbols import SymbolTable
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, Var
from relaxlite.ir.op import Op
from relaxlite.ir.ops.broadcast import unless_empty
from relaxlite.ir.simplify import is_long
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, sym
from relaxlite.ir.types import TensorType

# Ops whose elements are resolved through their operands rather than read at run time.
_TRANSPARENT = frozenset((
    "concat", "expand_dims", "squeeze", "reshape", "cast", "add", "subtract", "multiply", "gather", "slice", "neg",
    "truncdiv", "maximum", "minimum", "transpose", "broadcast_to", "where", "equal", "not_equal", "less", "greater",
    "less_equal", "greater_equal", "floor_divide", "floormod", "power", "prod", "sum", "abs", "logical_not",
    "logical_and", "logical_or",
))  # fmt: skip
# Those of them whose elements are elements of their operands, each of them: what bounds a size bounds these too.
_MOVES = frozenset(("concat", "expand_dims", "squeeze", "reshape", "cast", "transpose", "broadcast_to"))
_Read: TypeAlias = "Callable[[Expr, int | None, Sequence[SymExpr | None] | None], object]"
_MAX_VISITED = 200  # variables that one question follows


class ShapeResolver:
    """Reads integer tensors as shapes. What is bound inside a branch or loop body is known there only (`scope`)."""

    def __init__(self, bb: BlockBuilder, symbols: SymbolTable) -> None:
        self._bb, self._symbols = bb, symbols
        self._learned: list[Var] = []
        self._names: dict[SymExpr, SymVar] = {}  # of sizes that are long expressions

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is learned inside is forgotten at the end."""
        count, names = len(self._learned), dict(self._names)
        yield
        self._names = names
        while len(self._learned) > count:
            self._bb.learn(self._learned.pop(), None)

    def with_short_sizes(self, x: Expr) -> Expr:
        """x, its sizes that are long expressions behind symbols of their own: where sizes cannot be compared, each
        broadcast mentions those of its operands several times, and what a chain of them mentions grows without end."""
        dims = (x.ty.shape or ()) if isinstance(x.ty, TensorType) else ()
        if not any(map(is_long, dims)):
            return x
        hint = x.name if isinstance(x, Var) else "dim"
        for k, d in enumerate(dims):
            if is_long(d) and d not in self._names:
                self._names[d] = self._symbols.fresh(f"{hint}_{k}")
        return self._bb.match_shape(x, tuple(self._names.get(d, d) for d in dims), hint)

    def _learn(self, x: Var, values: object, shape: tuple[int, ...]) -> None:
        array = np.empty(shape, dtype=object)
        array.reshape(-1)[:] = values
        self._bb.learn(x, array)
        self._learned.append(x)

    def known(self, x: Expr) -> tuple[SymExpr, ...] | None:
        """The elements of an integer tensor of rank 0 or 1, if they are known without reading any at run time."""
        self.derived(x)
        return self._bb.known_shape(x)

    def values(self, x: Expr, *, lower: int | None = None) -> tuple[SymExpr, ...]:
        """The elements of an integer tensor of rank 0 or 1; `lower` bounds those that are read at run time."""
        self._resolve(x, lower, set(), self._read)
        known = self._bb.known_shape(x)
        if known is None:
            raise ImportModelError(f"an input that stands for a shape is {x.ty}: its number of elements must be known")
        return known

    def reshape_target(self, x: Expr, target: Expr, *, allow_zero: bool) -> tuple[SymExpr, ...]:
        """The shape that ONNX Reshape means by a target that only run time knows: its 0 and -1 are resolved there."""
        assert isinstance(x.ty, TensorType) and isinstance(target.ty, TensorType) and target.ty.shape
        rank, emit = as_int(target.ty.shape[0]), self._bb.emit
        if rank is None:
            raise ImportModelError("the target shape has an unknown number of dimensions")
        if target.ty.dtype != "int64":
            target = emit(ops.cast(target, dtype="int64"))
        dims = x.ty.shape or ()
        if not allow_zero:
            kept = emit(ops.shape_to_tensor((*dims[:rank], *(sym(0),) * (rank - len(dims)))))
            target = emit(ops.where(emit(ops.equal(target, np.int64(0))), kept, target))
        is_open = emit(ops.equal(target, np.int64(-1)))
        given = emit(ops.prod(emit(ops.where(is_open, np.int64(1), target)), axes=(0,)))
        count = emit(ops.reshape(emit(ops.shape_to_tensor((product(dims),))), ()))
        left = emit(ops.truncdiv(count, emit(ops.maximum(given, np.int64(1)))))
        resolved = emit(ops.where(is_open, left, target), "target")
        return self._read(resolved, 0)

    def nonempty(self, target: tuple[SymExpr, ...]) -> tuple[SymExpr, ...]:
        """A shape in the simpler form that it has while no symbol is 0; where one is, the run checks it."""
        simpler = tuple(map(unless_empty, target))
        differ = [(a, b) for a, b in zip(target, simpler, strict=True) if a is not b]
        if differ:
            given, result = zip(*dict.fromkeys(differ), strict=True)
            shape = self._bb.emit(ops.tensor_to_shape(self._bb.emit(ops.shape_to_tensor(given))))
            self._bb.match_shape(shape, result)
        return simpler

    def ratios(self, x: Expr) -> Any:
        """The elements of a float tensor as fractions of symbols (an object array of `Ratio`), or None."""
        return RatioReader(self._bb, self.derived).values(x)

    def derived(self, x: Expr) -> Any:
        """The elements of an integer tensor, as far as they follow from what is known without reading any."""
        self._resolve(x, None, set(), None)
        return self._bb.known_value(x)

    def _resolve(self, x: Expr, lower: int | None, visited: set[Var], read: _Read | None) -> None:
        """Make the elements of x known, if they can be followed to values that are known or can be read."""
        if not isinstance(x, Var) or self._bb.known_value(x) is not None or x in visited:
            return
        visited.add(x)
        call, known = self._bb.definition(x), None
        if isinstance(call, Call) and isinstance(call.callee, Op) and len(visited) < _MAX_VISITED:
            result = self._from_floats(call)
            if result is None and call.callee.name in _TRANSPARENT and _is_integer(call):
                if lower is None or call.callee.name in _MOVES:
                    for operand in call.args:
                        self._resolve(operand, lower, visited, read)
                    result = self._bb.evaluate(call)
                else:
                    result, known = self._without_reading(call)
            if result is not None:
                self._learn(x, result.reshape(-1), result.shape)
                return
        if read is not None:
            read(x, lower, known)

    def _without_reading(self, call: Call) -> tuple[Any, list[SymExpr | None] | None]:
        """The elements of what a call computes. Where some depend on what only run time knows: None, and each of the
        others."""
        unread: set[SymVar] = set()

        def stand_in(x: Expr, lower: int | None, known: Sequence[SymExpr | None] | None) -> None:
            count = _count(x)
            if isinstance(x, Var) and count is not None:
                symbols = [SymVar("unread") for _ in range(count)]
                self._learn(x, symbols, _extents(x))
                unread.update(symbols)

        with self.scope():
            for operand in call.args:
                self._resolve(operand, None, set(), stand_in)
            result: Any = self._bb.evaluate(call)
        if result is None:
            return None, None
        elements = [sym(e) for e in result.reshape(-1).tolist()]
        known = [None if unread.intersection(e.free_vars()) else e for e in elements]
        return (None, known) if None in known else (result, None)

    def _from_floats(self, call: Call) -> Any:
        """What a cast of floats yields, where these are fractions of symbols."""
        source = call.args[0].ty if call.args else None
        if not isinstance(call.callee, Op) or call.callee.name != "cast" or not isinstance(source, TensorType):
            return None
        if (
            not dtypes.is_float(source.dtype)
            or not isinstance(call.ty, TensorType)
            or not dtypes.is_integer(call.ty.dtype)
        ):
            return None
        result = self.ratios(call.args[0])
        return None if result is None else truncated_values(result)

    def _read(self, x: Expr, lower: int | None, known: Sequence[SymExpr | None] | None = None) -> tuple[SymExpr, ...]:
        """Bind fresh symbols to the elements of x at run time, but those that are known; () if x cannot be read so."""
        count = _count(x)
        if count is None:
            return ()
        hint = x.name if isinstance(x, Var) else "dim"
        names = [hint if count == 1 else f"{hint}_{k}" for k in range(count)]
        given = known or [None] * count
        elements = [self._symbols.fresh(n, lower=lower) if e is None else e for n, e in zip(names, given, strict=True)]
        if elements:
            self._bb.match_shape(self._bb.emit(ops.tensor_to_shape(x)), tuple(elements))
        if isinstance(x, Var):
            self._learn(x, elements, _extents(x))
        return tuple(elements)


def _extents(x: Expr) -> tuple[int, ...]:
    assert isinstance(x.ty, TensorType)
    return tuple(as_int(d) or 0 for d in x.ty.shape or ())


def _count(x: Expr) -> int | None:
    """How many elements a scalar or vector of integers has; None for other values, and where only run time knows."""
    ty = x.ty
    if not isinstance(ty, TensorType) or ty.shape is None or len(ty.shape) > 1 or not dtypes.is_integer(ty.dtype):
        return None
    return as_int(product(ty.shape))


def _is_integer(call: Call) -> bool:
    """Whether its tensors are; what it takes as a shape (the target of a reshape) is in any case."""
    tensors = [(a, a.ty) for a in call.args if isinstance(a.ty, TensorType)]
    return all(dtypes.is_integer(ty.dtype) or isinstance(a, Constant) for a, ty in tensors)
