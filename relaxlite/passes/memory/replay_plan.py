"""Replays a planned function without its data: does anything read bytes that something else has overwritten?

The replay runs the function step by step at concrete sizes, along one path through its branches and loops, with ranges
of addresses in place of tensors. It knows nothing of how the plan was made, of alias sets or lives: a value *is* the
piece of memory that it was made in, wherever it goes. A piece is spoiled once another one that overlaps it is written
to, until it is written to itself; a whole is also spoiled where it had contents and a part of it is written, as by a
result in place. Reading a spoiled piece is an error, and so is a piece outside of the arena, and a call that writes
where it also reads, but for a whole and its part. That memory is made on every path before use, the verifier proves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import PassError
from relaxlite.ir.expr import (
    Binding,
    Body,
    Call,
    Expr,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.signatures import is_destination_passing
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate
from relaxlite.ir.types import ShapeType, TensorType, TupleType, Type, defined_symbols, type_symbols
from relaxlite.ir.visitor import bodies
from relaxlite.passes.memory.arena_order import valuations
from relaxlite.records import dataclass

_MAX_SIZES, _MAX_PATHS = 8, 12
_ITERATIONS = 3  # of every loop: what the first carries to the second, and that to the third
_UNKNOWN_SIZE = 5  # of what only data tells
_MAX_BYTES = (1 << 63) - 1  # that an address tells


@dataclass(slots=True, eq=False)
class _Piece:
    """Addresses, and what has happened to their contents. An arena is a piece to which nothing is ever written."""

    name: str
    low: int
    high: int
    whole: _Piece | None = None  # what it is a part of
    is_written: bool = False
    spoiled: str | None = None  # by whom, and when

    def is_part_of(self, other: _Piece) -> bool:
        return self is other or (self.whole is not None and self.whole.is_part_of(other))


_Value: TypeAlias = "_Piece | tuple[_Value, ...] | _Any | None"  # None: the caller's memory, a constant, or no tensor


@dataclass(frozen=True, slots=True)
class _Any:
    """What may be any of these values, or a tuple of some of them."""

    values: tuple[_Value, ...]


class _RefusedError(Exception):
    """A MatchShape does not hold at these sizes, or no memory holds them: the model ends there, as where a size divides
    by zero."""


@dataclass(frozen=True, slots=True)
class _Path:
    """Which branch every If takes: the first one, but the other one at `flipped`; the other way round if `is_else`;
    and in turn in a loop's iterations if `alternates`."""

    is_else: bool = False
    flipped: Var | None = None
    alternates: bool = False
    iterations: int = _ITERATIONS


def replay_plan(name: str, function: Function, module: IRModule) -> None:
    """Replay a function of stage "dps" at some sizes along some paths.

    Raises PassError naming the tensor, the step and the sizes.
    """
    symbols = tuple(dict.fromkeys(s for param in function.params for s in type_symbols(param.ty)))
    paths = list(_paths(function))
    for sizes in valuations(symbols)[:_MAX_SIZES]:
        for path in paths:
            with suppress(_RefusedError, ZeroDivisionError):
                _Replay(name, module, sizes, path).function(function)


def _paths(function: Function) -> Iterator[_Path]:
    """Each branch of each If is on one of them."""
    bindings = [b for body in bodies(function) for b in body.bindings() if isinstance(b, Let)]
    branches = [b.var for b in bindings if isinstance(b.value, If)]
    has_loop = any(isinstance(b.value, Loop) for b in bindings)
    yield _Path()
    if branches:
        yield _Path(is_else=True)
    if branches and has_loop:
        yield from (_Path(alternates=True), _Path(is_else=True, alternates=True))
    if has_loop:
        yield _Path(iterations=0)
    if len(branches) > 1:
        yield from (_Path(flipped=var) for var in branches[:_MAX_PATHS])


class _Replay:
    def __init__(self, name: str, module: IRModule, sizes: Mapping[SymVar, int], path: _Path) -> None:
        self._name, self._module, self._path = name, module, path
        self._sizes, self._symbols = dict(sizes), dict(sizes)
        self._values: dict[Var, _Value] = {}
        self._pieces: list[_Piece] = []
        self._lows, self._highs = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._end = 0  # of all addresses that are taken
        self._steps = 0
        self._iteration = 0
        self._at: Binding | None = None

    def function(self, function: Function) -> None:
        for param in function.params:
            self._values[param] = None
        self._read(self._body(function.body))

    def _fail(self, message: str) -> PassError:
        step = f"step {self._steps}" if self._at is None else f"step {self._steps} ({_text(self._at)})"
        sizes = ", ".join(f"{symbol.name}={size}" for symbol, size in self._sizes.items())
        return PassError(f"the memory plan of {self._name} is wrong: {step}: {message}, at {sizes or 'any size'}")

    # memory

    def _view(self, var: Var, offset: int, whole: _Piece) -> _Piece:
        size, room = self._bytes_of(var), whole.high - whole.low
        if offset < 0 or offset + size > room:
            raise self._fail(f"{var.name}, {size} bytes at {offset}, leaves {whole.name} of {room} bytes")
        return self._keep(_Piece(var.name, whole.low + offset, whole.low + offset + size, whole))

    def _own(self, name: str, size: int) -> _Piece:
        """A piece that is part of no other."""
        self._end += size
        if self._end > _MAX_BYTES:
            raise _RefusedError
        return self._keep(_Piece(name, self._end - size, self._end))

    def _keep(self, piece: _Piece) -> _Piece:
        at = len(self._pieces)
        self._pieces.append(piece)
        if at == len(self._lows):
            room = np.zeros(64 + at, np.int64)
            self._lows, self._highs = np.append(self._lows, room), np.append(self._highs, room)
        self._lows[at], self._highs[at] = piece.low, piece.high
        return piece

    def _bytes_of(self, var: Var) -> int:
        assert isinstance(var.ty, TensorType) and var.ty.shape is not None
        return math.prod(map(self._size, var.ty.shape)) * dtypes.itemsize(var.ty.dtype)

    def _size(self, expr: SymExpr) -> int:
        """Negative sizes are errors before any memory is touched; what only data tells is some number."""
        known = self._known(expr)
        return _UNKNOWN_SIZE if known is None else max(0, known)

    def _read(self, value: _Value) -> None:
        for piece in _pieces_of(value):
            if piece.spoiled is not None and piece.low < piece.high:
                raise self._fail(f"{piece.name} is read, but {piece.spoiled} has overwritten it")

    def _write(self, value: _Value) -> None:
        for written in _pieces_of(value):
            if written.low == written.high:
                continue
            overlapping = (self._lows < written.high) & (written.low < self._highs)
            for k in np.flatnonzero(overlapping[: len(self._pieces)]).tolist():
                piece = self._pieces[k]
                if piece.is_part_of(written):
                    piece.spoiled = None
                elif piece.is_written or not written.is_part_of(piece):
                    piece.spoiled = f"{written.name} in step {self._steps}"
            written.is_written = True

    # control

    def _body(self, body: Body) -> _Value:
        for binding in body.bindings():
            self._at, self._steps = binding, self._steps + 1
            if isinstance(binding, MatchShape):
                self._values[binding.var] = self._value(binding.source)
                self._match(binding, self._values[binding.var])
            else:
                self._values[binding.var] = self._let(binding.var, binding.value)
        self._at = None
        return self._value(body.result)

    def _let(self, var: Var, value: Expr) -> _Value:
        if isinstance(value, Call):
            return self._call(var, value)
        if isinstance(value, If):
            self._read(self._value(value.cond))
            is_else = self._path.is_else ^ (self._path.flipped is var)
            is_else ^= self._path.alternates and self._iteration % 2 == 1
            return self._body(value.else_body if is_else else value.then_body)
        return self._loop(value) if isinstance(value, Loop) else self._value(value)

    def _loop(self, loop: Loop) -> _Value:
        self._read(self._value(loop.cond))
        carried, types = tuple(map(self._value, loop.inits)), tuple(init.ty for init in loop.inits)
        outer, symbols = self._iteration, tuple(self._symbols)
        for iteration in range(self._path.iterations):
            self._iteration = iteration
            self._enter(loop, carried, types, symbols)
            yielded, ty = self._body(loop.body), loop.body.result.ty
            assert isinstance(yielded, tuple) and isinstance(ty, TupleType)
            types = ty.fields[1:]
            cond, *rest = yielded
            self._read(cond)
            carried = tuple(rest)
        self._iteration = outer
        return carried

    def _enter(self, loop: Loop, carried: Sequence[_Value], types: Sequence[Type], symbols: Sequence[SymVar]) -> None:
        """Give the parameters their values, and the symbols of their types the sizes of these, which may be others in
        every iteration, as what the body matches may be: of before the loop are `symbols` alone."""
        known = []  # of each parameter's sizes, before the symbols change
        for param, ty in zip(loop.params, types, strict=True):
            wanted = _sizes_of(param.ty, 0)
            known.append(dict(zip(wanted, map(self._known, _sizes_of(ty, len(wanted))), strict=False)))
        self._symbols = {symbol: self._symbols[symbol] for symbol in symbols}
        defined: set[SymVar] = set()
        for param, value, sizes in zip(loop.params, carried, known, strict=True):
            self._values[param] = value
            unknown = []
            for symbol in defined_symbols(param.ty):
                size = sizes.get(symbol)
                if symbol not in defined:
                    self._symbols[symbol] = _UNKNOWN_SIZE if size is None else size
                    unknown += [symbol] if size is None else []
                defined.add(symbol)
            if unknown and isinstance(value, _Piece):
                self._fit(unknown, param, value)

    def _value(self, expr: Expr) -> _Value:
        if isinstance(expr, Var):
            return self._values[expr]
        if isinstance(expr, Tuple):
            return tuple(map(self._value, expr.fields))
        if isinstance(expr, TupleGetItem):
            whole = self._value(expr.value)
            return whole[expr.index] if isinstance(whole, tuple) else whole
        return None

    # calls and shapes

    def _call(self, var: Var, call: Call) -> _Value:
        values = [self._value(arg) for arg in call.args]
        if isinstance(call.callee, Op):
            return self._op(call.callee.name, var, call, values)
        callee = self._module.get(call.callee.name) if isinstance(call.callee, GlobalVar) else None
        if not isinstance(callee, TensorProgram | ExternFunction):
            for value in values:
                self._read(value)
            return _Any(tuple(values))  # it may give back whatever it was given
        count = len(call.args) - (callee.num_outputs if is_destination_passing(call) else 0)
        for value in values[:count]:
            self._read(value)
        self._check_call(values[:count], values[count:])
        for value in values[count:]:
            self._write(value)
        return None

    def _check_call(self, inputs: Sequence[_Value], outputs: Sequence[_Value]) -> None:
        read, written = list(_pieces_of(tuple(inputs))), list(_pieces_of(tuple(outputs)))
        for k, piece in enumerate(written):
            for other in (*read, *written[:k]):
                is_same = piece.is_part_of(other) or other.is_part_of(piece)
                if not is_same and max(piece.low, other.low) < min(piece.high, other.high):
                    raise self._fail(f"{piece.name} is written where {other.name} lies, in one call")

    def _op(self, name: str, var: Var, call: Call, values: Sequence[_Value]) -> _Value:
        if name == "memory.alloc_arena":
            (size,) = self._shape(call.args[0])
            return self._own("the arena", max(0, size))
        if name == "memory.view":
            arena = values[0]
            assert isinstance(arena, _Piece)
            return self._view(var, self._shape(call.args[1])[0], arena)
        if name == "memory.part":
            whole = values[0]
            return self._view(var, self._shape(call.args[1])[0], whole) if isinstance(whole, _Piece) else whole
        if name == "memory.alloc_tensor":
            return self._own(var.name, self._bytes_of(var))
        if name in ("tensor_to_shape", "memory.copy"):
            self._read(values[0])
            return None
        if name == "reshape" and isinstance(call.args[0], Var) and self._bytes_of(var) != self._bytes_of(call.args[0]):
            raise _RefusedError
        given = [value for value in values if value is not None]
        return given[0] if len(given) == 1 else tuple(given)  # the same memory

    def _shape(self, expr: Expr) -> tuple[int, ...]:
        assert isinstance(expr, ShapeValue)
        return tuple(evaluate(value, self._symbols) for value in expr.values)

    def _match(self, binding: MatchShape, value: _Value) -> None:
        new = []
        for dim, size in zip(binding.shape, _sizes_of(binding.source.ty, len(binding.shape)), strict=True):
            result, expected = self._known(size), self._known(dim)
            if isinstance(dim, SymVar) and expected is None:
                self._symbols[dim] = _UNKNOWN_SIZE if result is None else result
                new += [dim] if result is None else []
            elif None not in (result, expected) and result != expected:
                raise _RefusedError
        if new and isinstance(value, _Piece):
            self._fit(new, binding.var, value)

    def _fit(self, symbols: Sequence[SymVar], var: Var, piece: _Piece) -> None:
        """Sizes that no type tells, as after a branch: such that the tensor fills the memory that it has."""
        self._symbols.update(dict.fromkeys(symbols, 1))
        unit, room = self._bytes_of(var), piece.high - piece.low
        if unit == 0 or room % unit:
            raise _RefusedError
        self._symbols[symbols[0]] = room // unit

    def _known(self, expr: SymExpr | None) -> int | None:
        """The value, where its symbols have one."""
        is_known = expr is not None and all(symbol in self._symbols for symbol in expr.free_vars())
        return evaluate(expr, self._symbols) if is_known else None  # type: ignore[arg-type]


def _pieces_of(value: _Value) -> Iterator[_Piece]:
    if isinstance(value, tuple | _Any):
        for part in value if isinstance(value, tuple) else value.values:
            yield from _pieces_of(part)
    elif value is not None:
        yield value


def _sizes_of(ty: Type, rank: int) -> Sequence[SymExpr | None]:
    sizes = ty.shape if isinstance(ty, TensorType) else ty.values if isinstance(ty, ShapeType) else None
    return sizes if sizes is not None else [None] * rank


def _text(binding: Binding) -> str:
    value = binding.value if isinstance(binding, Let) else binding.source
    what = value.callee.name if isinstance(value, Call) else type(value).__name__
    return what if binding.var.name == "_" else f"{binding.var.name} = {what}"
