"""Check a memory plan by replaying the function without data: no value is read after its memory was overwritten.

The replay runs the function step by step at concrete sizes, along one path through branches and loops, on ranges of
addresses in place of tensors. It is independent of the planner, of alias sets and of lifetimes: a value *is* the region
of memory in which it was written. A write to an overlapping region clobbers a region, until the region itself is
written again. A region is also clobbered when it had contents and a part of it is written, as by an in-place result.
Errors are: a read of a clobbered region, a region outside of the arena, and a call that writes where it also reads,
except for a region and its part. The verifier proves separately that memory is allocated on every path before its use.
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
from relaxlite.passes.memory.arena_order import representative_values
from relaxlite.records import dataclass

_MAX_SIZES, _MAX_PATHS = 8, 12
_ITERATIONS = 3  # of every loop: values carried by the first and by a later iteration
_UNKNOWN_SIZE = 5  # for sizes that depend on data
_MAX_BYTES = (1 << 63) - 1  # of all addresses


@dataclass(slots=True, eq=False)
class _Region:
    """Range of addresses with the state of its contents. An arena is a region that is never written itself."""

    name: str
    low: int
    high: int
    enclosing: _Region | None = None  # enclosing region
    is_written: bool = False
    clobbered_by: str | None = None  # writer and step

    def is_part_of(self, other: _Region) -> bool:
        """Whether the region is the other region, or inside of it."""
        return self is other or (self.enclosing is not None and self.enclosing.is_part_of(other))


_Value: TypeAlias = (
    "_Region | tuple[_Value, ...] | _AnyOf | None"  # None: the caller's memory, a constant, or no tensor
)


@dataclass(frozen=True, slots=True)
class _AnyOf:
    """Value that may be any of these values, or a tuple of some of them."""

    values: tuple[_Value, ...]


class _RefusedError(Exception):
    """The model stops at these sizes: a MatchShape fails, or the sizes exceed the address space."""


@dataclass(frozen=True, slots=True)
class _Path:
    """Branches taken by the Ifs.

    Every If takes the first branch, or the second if `is_else`, but the opposite one at `flipped`; `alternates`
    switches the branch in every iteration of a loop.
    """

    is_else: bool = False
    flipped: Var | None = None
    alternates: bool = False
    iterations: int = _ITERATIONS


def replay_plan(name: str, function: Function, module: IRModule) -> None:
    """Replay a function of stage "dps" at some sizes along some paths.

    Raises PassError with the tensor, the step and the sizes.
    """
    symbols = tuple(dict.fromkeys(s for param in function.params for s in type_symbols(param.ty)))
    paths = list(_paths(function))
    for sizes in representative_values(symbols)[:_MAX_SIZES]:
        for path in paths:
            with suppress(_RefusedError, ZeroDivisionError):
                _Replay(name, module, sizes, path).function(function)


def _paths(function: Function) -> Iterator[_Path]:
    """Paths that cover each branch of each If."""
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
    """Replay of one function at one assignment of sizes along one path."""

    def __init__(self, name: str, module: IRModule, sizes: Mapping[SymVar, int], path: _Path) -> None:
        self._name, self._module, self._path = name, module, path
        self._sizes, self._symbols = dict(sizes), dict(sizes)
        self._values: dict[Var, _Value] = {}
        self._regions: list[_Region] = []
        self._lows, self._highs = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._end = 0  # of all allocated addresses
        self._steps = 0
        self._iteration = 0
        self._binding: Binding | None = None

    def function(self, function: Function) -> None:
        for param in function.params:
            self._values[param] = None
        self._read(self._body(function.body))

    def _fail(self, message: str) -> PassError:
        step = f"step {self._steps}" if self._binding is None else f"step {self._steps} ({_describe(self._binding)})"
        sizes = ", ".join(f"{symbol.name}={size}" for symbol, size in self._sizes.items())
        return PassError(f"the memory plan of {self._name} is wrong: {step}: {message}, at {sizes or 'any size'}")

    # memory

    def _view(self, var: Var, offset: int, enclosing: _Region) -> _Region:
        size, capacity = self._bytes_of(var), enclosing.high - enclosing.low
        if offset < 0 or offset + size > capacity:
            raise self._fail(f"{var.name}, {size} bytes at {offset}, leaves {enclosing.name} of {capacity} bytes")
        return self._add_region(_Region(var.name, enclosing.low + offset, enclosing.low + offset + size, enclosing))

    def _allocate(self, name: str, size: int) -> _Region:
        """A region that is part of no other."""
        self._end += size
        if self._end > _MAX_BYTES:
            raise _RefusedError
        return self._add_region(_Region(name, self._end - size, self._end))

    def _add_region(self, region: _Region) -> _Region:
        number = len(self._regions)
        self._regions.append(region)
        if number == len(self._lows):
            padding = np.zeros(64 + number, np.int64)
            self._lows, self._highs = np.append(self._lows, padding), np.append(self._highs, padding)
        self._lows[number], self._highs[number] = region.low, region.high
        return region

    def _bytes_of(self, var: Var) -> int:
        assert isinstance(var.ty, TensorType) and var.ty.shape is not None
        return math.prod(map(self._size, var.ty.shape)) * dtypes.itemsize(var.ty.dtype)

    def _size(self, expr: SymExpr) -> int:
        """Value of a size, clamped to 0 as run-time checks reject negative sizes; arbitrary if data-dependent."""
        value = self._evaluate(expr)
        return _UNKNOWN_SIZE if value is None else max(0, value)

    def _read(self, value: _Value) -> None:
        for region in _regions_of(value):
            if region.clobbered_by is not None and region.low < region.high:
                raise self._fail(f"{region.name} is read, but {region.clobbered_by} has overwritten it")

    def _write(self, value: _Value) -> None:
        for written in _regions_of(value):
            if written.low == written.high:
                continue
            overlapping = (self._lows < written.high) & (written.low < self._highs)
            for k in np.flatnonzero(overlapping[: len(self._regions)]).tolist():
                region = self._regions[k]
                if region.is_part_of(written):
                    region.clobbered_by = None
                elif region.is_written or not written.is_part_of(region):
                    region.clobbered_by = f"{written.name} in step {self._steps}"
            written.is_written = True

    # control

    def _body(self, body: Body) -> _Value:
        for binding in body.bindings():
            self._binding, self._steps = binding, self._steps + 1
            if isinstance(binding, MatchShape):
                self._values[binding.var] = self._value(binding.source)
                self._match(binding, self._values[binding.var])
            else:
                self._values[binding.var] = self._let(binding.var, binding.value)
        self._binding = None
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
            self._bind_params(loop, carried, types, symbols)
            yielded, ty = self._body(loop.body), loop.body.result.ty
            assert isinstance(yielded, tuple) and isinstance(ty, TupleType)
            types = ty.fields[1:]
            cond, *rest = yielded
            self._read(cond)
            carried = tuple(rest)
        self._iteration = outer
        return carried

    def _bind_params(
        self, loop: Loop, carried: Sequence[_Value], types: Sequence[Type], symbols: Sequence[SymVar]
    ) -> None:
        """Bind loop parameters to values, and the symbols of their types to sizes, which may change in every iteration.

        `symbols` are the symbols from before the loop.
        """
        known_sizes = []  # of each parameter's sizes, before the symbols change
        for param, ty in zip(loop.params, types, strict=True):
            dims = _sizes_of(param.ty, 0)
            known_sizes.append(dict(zip(dims, map(self._evaluate, _sizes_of(ty, len(dims))), strict=False)))
        self._symbols = {symbol: self._symbols[symbol] for symbol in symbols}
        defined: set[SymVar] = set()
        for param, value, sizes in zip(loop.params, carried, known_sizes, strict=True):
            self._values[param] = value
            unknown = []
            for symbol in defined_symbols(param.ty):
                size = sizes.get(symbol)
                if symbol not in defined:
                    self._symbols[symbol] = _UNKNOWN_SIZE if size is None else size
                    unknown += [symbol] if size is None else []
                defined.add(symbol)
            if unknown and isinstance(value, _Region):
                self._infer_size(unknown, param, value)

    def _value(self, expr: Expr) -> _Value:
        if isinstance(expr, Var):
            return self._values[expr]
        if isinstance(expr, Tuple):
            return tuple(map(self._value, expr.fields))
        if isinstance(expr, TupleGetItem):
            value = self._value(expr.value)
            return value[expr.index] if isinstance(value, tuple) else value
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
            return _AnyOf(tuple(values))  # a function may return any of its arguments
        count = len(call.args) - (callee.num_outputs if is_destination_passing(call) else 0)
        for value in values[:count]:
            self._read(value)
        self._check_call(values[:count], values[count:])
        for value in values[count:]:
            self._write(value)
        return None

    def _check_call(self, inputs: Sequence[_Value], outputs: Sequence[_Value]) -> None:
        input_regions, output_regions = list(_regions_of(tuple(inputs))), list(_regions_of(tuple(outputs)))
        for k, output in enumerate(output_regions):
            for other in (*input_regions, *output_regions[:k]):
                is_nested = output.is_part_of(other) or other.is_part_of(output)
                if not is_nested and max(output.low, other.low) < min(output.high, other.high):
                    raise self._fail(f"{output.name} is written where {other.name} lies, in one call")

    def _op(self, name: str, var: Var, call: Call, values: Sequence[_Value]) -> _Value:
        if name == "memory.alloc_arena":
            (size,) = self._shape(call.args[0])
            return self._allocate("the arena", max(0, size))
        if name == "memory.view":
            arena = values[0]
            assert isinstance(arena, _Region)
            return self._view(var, self._shape(call.args[1])[0], arena)
        if name == "memory.part":
            source = values[0]
            return self._view(var, self._shape(call.args[1])[0], source) if isinstance(source, _Region) else source
        if name == "memory.alloc_tensor":
            return self._allocate(var.name, self._bytes_of(var))
        if name in ("tensor_to_shape", "memory.copy"):
            self._read(values[0])
            return None
        if name == "reshape" and isinstance(call.args[0], Var) and self._bytes_of(var) != self._bytes_of(call.args[0]):
            raise _RefusedError
        operands = [value for value in values if value is not None]
        return operands[0] if len(operands) == 1 else tuple(operands)  # the same memory

    def _shape(self, expr: Expr) -> tuple[int, ...]:
        assert isinstance(expr, ShapeValue)
        return tuple(evaluate(value, self._symbols) for value in expr.values)

    def _match(self, binding: MatchShape, value: _Value) -> None:
        unknown = []
        for dim, size in zip(binding.shape, _sizes_of(binding.source.ty, len(binding.shape)), strict=True):
            actual, expected = self._evaluate(size), self._evaluate(dim)
            if isinstance(dim, SymVar) and expected is None:
                self._symbols[dim] = _UNKNOWN_SIZE if actual is None else actual
                unknown += [dim] if actual is None else []
            elif None not in (actual, expected) and actual != expected:
                raise _RefusedError
        if unknown and isinstance(value, _Region):
            self._infer_size(unknown, binding.var, value)

    def _infer_size(self, symbols: Sequence[SymVar], var: Var, region: _Region) -> None:
        """Infer unknown sizes, as after a branch, such that the tensor fills its region."""
        self._symbols.update(dict.fromkeys(symbols, 1))
        unit, capacity = self._bytes_of(var), region.high - region.low
        if unit == 0 or capacity % unit:
            raise _RefusedError
        self._symbols[symbols[0]] = capacity // unit

    def _evaluate(self, expr: SymExpr | None) -> int | None:
        """Value of an expression; None where a symbol has no value."""
        is_known = expr is not None and all(symbol in self._symbols for symbol in expr.free_vars())
        return evaluate(expr, self._symbols) if is_known else None  # type: ignore[arg-type]


def _regions_of(value: _Value) -> Iterator[_Region]:
    if isinstance(value, tuple | _AnyOf):
        for part in value if isinstance(value, tuple) else value.values:
            yield from _regions_of(part)
    elif value is not None:
        yield value


def _sizes_of(ty: Type, rank: int) -> Sequence[SymExpr | None]:
    sizes = ty.shape if isinstance(ty, TensorType) else ty.values if isinstance(ty, ShapeType) else None
    return sizes if sizes is not None else [None] * rank


def _describe(binding: Binding) -> str:
    value = binding.value if isinstance(binding, Let) else binding.source
    operation = value.callee.name if isinstance(value, Call) else type(value).__name__
    return operation if binding.var.name == "_" else f"{binding.var.name} = {operation}"
