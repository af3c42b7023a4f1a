"""Symbolic shapes become slots of a run-time heap.

Each function gets an int64 heap. Its parameters, and every MatchShape, are matched against it: a symbol that is new
binds a slot, everything else is a check. All expressions that it needs (dimensions, offsets, symbolic arguments) get
slots too; after each point that binds symbols, one *shape program*, an ordinary tensor program over the heap, computes
those that have become computable. What remains has no symbol left: ops take constants and slots (`vm.*`), calls
of programs the first of their consecutive slots (the attribute `first_slot`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from relaxlite.errors import PassError
from relaxlite.ir.attributes import CHECKED, SCHEDULED
from relaxlite.ir.expr import (
    Attrs,
    Binding,
    Block,
    Body,
    Call,
    Expr,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.program import Buffer, IndexValue, LetIndex, Load, Stmt, Store, TensorProgram, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, substitute, sym
from relaxlite.ir.types import UNIT, ShapeType, TensorType, TupleType, Type

AttrTuple = tuple[object, ...]
Source = tuple[Expr, Type, str]  # a value, its type, and what to call it in an error


def lower_shapes(module: IRModule) -> IRModule:
    """Replace symbolic shapes by slots of a heap that is filled at run time."""
    definitions: dict[str, Definition] = dict(module)
    for name, function in module.functions().items():
        definitions[name] = _LowerFunction(name, module, definitions).lower(function)
    return module.updated(definitions)


class _LowerFunction:
    def __init__(self, name: str, module: IRModule, definitions: dict[str, Definition]) -> None:
        self._name, self._module, self._definitions = name, module, definitions
        self._slots: dict[SymExpr, int] = {}  # every expression that is needed, in order of first need
        self._groups: dict[tuple[SymExpr, ...], int] = {}  # symbolic arguments of programs: consecutive slots
        self._count = 0
        self._shape_programs: list[tuple[str, list[tuple[int, SymExpr]]]] = []
        self.heap = Var("heap", TensorType.of((0,), "int64"))

    def lower(self, function: Function) -> Function:
        for param in function.params:
            self._need_type(param.ty)
        self._need_body(function.body)
        self.heap = Var("heap", TensorType.of((self._count,), "int64"))
        scope = _Scope(self, set(), set())
        head: list[Binding] = [Let(self.heap, get_op("vm.alloc_heap")(slots=self._count))]
        head += scope.match([(p, p.ty, f"argument {p.name!r}") for p in function.params])
        body = scope.body(function.body)
        self._make_shape_programs()
        return replace(function, body=Body((Block(tuple(head), False), *body.blocks), body.result))

    # What needs a slot

    def _need(self, exprs: Iterable[SymExpr]) -> None:
        for expr in exprs:
            if not expr.is_const and expr not in self._slots:
                self._slots[expr] = self._count
                self._count += 1

    def _need_type(self, ty: Type) -> None:
        self._need(dims_of(ty))

    def _need_body(self, body: Body) -> None:
        for binding in body.bindings():
            if isinstance(binding, MatchShape):
                self._need(binding.shape)
                if isinstance(binding.source, ShapeValue):
                    self._need(binding.source.values)
                continue
            value = binding.value
            if isinstance(value, If):
                self._need_body(value.then_body)
                self._need_body(value.else_body)
            elif isinstance(value, Loop):
                for param in value.params:
                    self._need_type(param.ty)
                self._need_body(value.body)
            elif isinstance(value, Call):
                for arg in value.args:
                    self._need(arg.values if isinstance(arg, ShapeValue) else ())
                if value.sym_args and value.sym_args not in self._groups:
                    self._need(s for e in value.sym_args for s in e.free_vars())
                    self._groups[value.sym_args] = self._count
                    self._count += len(value.sym_args)

    def slot(self, expr: SymExpr) -> int:
        return self._slots[expr]

    def dim(self, expr: SymExpr) -> int:
        """A constant, or -1 - slot."""
        value = as_int(expr)
        if value is None:
            return -1 - self._slots[expr]
        if value < 0:
            raise PassError(f"{self._name}: a dimension or size is the negative constant {value}")
        return value

    def first_slot(self, sym_args: tuple[SymExpr, ...]) -> int:
        return self._groups.get(sym_args, 0)

    def targets(self) -> Iterable[tuple[int, SymExpr]]:
        """Every slot that is computed, not bound, with its expression."""
        for expr, slot in self._slots.items():
            if not isinstance(expr, SymVar):
                yield slot, expr
        for group, first in self._groups.items():
            for k, expr in enumerate(group):
                yield first + k, expr

    # Shape programs

    def shape_call(self, targets: list[tuple[int, SymExpr]]) -> Let:
        name = f"{self._name}_shapes_{len(self._shape_programs)}"
        self._shape_programs.append((name, targets))
        return Let(Var("_", UNIT), Call(GlobalVar(name), (self.heap,), ty=UNIT))

    def _make_shape_programs(self) -> None:
        for name, targets in self._shape_programs:
            buffer = Buffer("heap", (sym(self._count),), "int64")
            used = dict.fromkeys(v for _, expr in targets for v in expr.free_vars())
            local = {v: SymVar(v.name, lower=v.lower, upper=v.upper, divisor=v.divisor) for v in used}
            result = {self._slots[v]: v for v in used if any(slot == self._slots[v] for slot, _ in targets)}
            body: Stmt = seq()
            for slot, expr in reversed(targets):
                if slot in result:  # a name that later expressions mention
                    body = LetIndex(local[result[slot]], Load(buffer, (sym(slot),)), body)
                body = seq(Store(buffer, (sym(slot),), IndexValue(substitute(expr, local))), body)
            for var in reversed([v for v in used if self._slots[v] not in result]):
                body = LetIndex(local[var], Load(buffer, (sym(self._slots[var]),)), body)
            self._definitions[name] = TensorProgram((buffer,), (), body, 1, Attrs({CHECKED: True, SCHEDULED: True}))


def dims_of(ty: Type) -> tuple[SymExpr, ...]:
    if isinstance(ty, TensorType):
        return ty.shape or ()
    if isinstance(ty, TupleType):
        return tuple(dim for field in ty.fields for dim in dims_of(field))
    return (ty.values or ()) if isinstance(ty, ShapeType) else ()


def _fields(sources: Sequence[Source], bindings: list[Binding]) -> Iterator[Source]:
    """The values, and for each tuple its fields, which are bound to variables for that."""
    for source, ty, what in sources:
        if not isinstance(ty, TupleType):
            yield source, ty, what
            continue
        parts = [Var(f"field_{k}", field) for k, field in enumerate(ty.fields)]
        bindings += [Let(part, TupleGetItem(source, k)) for k, part in enumerate(parts)]
        yield from _fields([(part, part.ty, f"{what}, field {k}") for k, part in enumerate(parts)], bindings)


def _is_definition(binding: Binding) -> bool:
    """Whether it names expressions."""
    return isinstance(binding, MatchShape) and isinstance(binding.source, ShapeValue)


class _Scope:
    """Lowers bodies; knows which symbols are bound and which slots are computed where it stands."""

    def __init__(self, owner: _LowerFunction, bound: set[SymVar], computed: set[int]) -> None:
        self._owner, self._bound, self._computed = owner, bound, computed

    def match(self, sources: Sequence[Source]) -> list[Binding]:
        """Bind the new symbols of these values, compute what depends on them, check the rest."""
        bindings: list[Binding] = []
        later: list[tuple[Expr, list[AttrTuple], str]] = []
        for source, ty, what in _fields(sources, bindings):
            first, second = self._spec(dims_of(ty))
            if (
                isinstance(ty, TensorType | ShapeType)
                and (ty.shape if isinstance(ty, TensorType) else ty.values) is not None
            ):
                bindings.append(self._check(source, first, what))
                if any(item[0] != "any" for item in second):
                    later.append((source, second, what))
        bindings += self._compute()
        bindings += [self._check(source, spec, what) for source, spec, what in later]
        return bindings

    def _spec(self, dims: tuple[SymExpr, ...]) -> tuple[list[AttrTuple], list[AttrTuple]]:
        first: list[AttrTuple] = []
        second: list[AttrTuple] = []
        for dim in dims:
            early: AttrTuple = ("any",)
            late: AttrTuple = ("any",)
            value = as_int(dim)
            if value is not None:
                early = ("const", value)
            elif isinstance(dim, SymVar) and dim not in self._bound:
                self._bound.add(dim)
                early = ("bind", self._owner.slot(dim), dim.name, dim.lower, dim.upper, dim.divisor)
            elif isinstance(dim, SymVar):
                early = ("check", self._owner.slot(dim), dim.name)
            else:
                late = ("check", self._owner.slot(dim), str(dim))
            first.append(early)
            second.append(late)
        return first, second

    def _check(self, source: Expr, spec: list[AttrTuple], what: str) -> Binding:
        call = get_op("vm.match_shape")(source, self._owner.heap, spec=tuple(spec), what=what)
        return Let(Var("_", UNIT), call)

    def _compute(self) -> list[Binding]:
        ready = [
            (slot, expr)
            for slot, expr in self._owner.targets()
            if slot not in self._computed and all(v in self._bound for v in expr.free_vars())
        ]
        self._computed.update(slot for slot, _ in ready)
        return [self._owner.shape_call(ready)] if ready else []

    def body(self, body: Body) -> Body:
        bindings: list[Binding] = []
        for is_definition, group in itertools.groupby(body.bindings(), _is_definition):
            if is_definition:
                bindings += self._define(list(group))  # type: ignore[arg-type]
            else:
                bindings += [result for binding in group for result in self._binding(binding)]
        return Body((Block(tuple(bindings), False),), body.result)

    def _binding(self, binding: Binding) -> list[Binding]:
        if isinstance(binding, MatchShape):
            what = binding.loc or f"MatchShape of {binding.var.name!r}"
            checks = self.match([(binding.source, binding.var.ty, what)])
            return [*checks, Let(binding.var, binding.source)]
        value = binding.value
        if isinstance(value, If):
            then_body, else_body = self._inner().body(value.then_body), self._inner().body(value.else_body)
            return [Let(binding.var, replace(value, then_body=then_body, else_body=else_body))]
        if isinstance(value, Loop):
            inner = self._inner()
            head = inner.match([(p, p.ty, f"loop value {p.name!r}") for p in value.params])
            body = inner.body(value.body)
            body = Body((Block(tuple(head), False), *body.blocks), body.result)
            return [Let(binding.var, replace(value, body=body))]
        return [Let(binding.var, self._call(value) if isinstance(value, Call) else value)]

    def _define(self, definitions: list[MatchShape]) -> list[Binding]:
        """Symbols that name expressions: one after the other computed into their slots, then what depends on them."""
        result = []
        for binding in definitions:
            assert isinstance(binding.source, ShapeValue)
            for symbol, expr in zip(binding.shape, binding.source.values, strict=True):
                if not isinstance(symbol, SymVar) or symbol in self._bound:
                    raise PassError(f"MatchShape of the shape {binding.source.values}: {symbol} is no new symbol")
                result.append((self._owner.slot(symbol), expr))
                self._bound.add(symbol)
        call = self._owner.shape_call(result)
        return [call, *self._compute()]

    def _inner(self) -> _Scope:
        return _Scope(self._owner, set(self._bound), set(self._computed))

    def _call(self, call: Call) -> Call:
        heap, dim = self._owner.heap, self._owner.dim
        if isinstance(call.callee, GlobalVar) and call.sym_args:
            attrs = Attrs({**call.attrs, "first_slot": self._owner.first_slot(call.sym_args)})
            return replace(call, attrs=attrs, sym_args=())
        if not isinstance(call.callee, Op):
            return call
        name, args = call.callee.name, call.args
        shapes = [tuple(map(dim, a.values)) for a in args if isinstance(a, ShapeValue)]
        tensors = tuple(a for a in args if not isinstance(a, ShapeValue))
        make = _LOWERED.get(name)
        if make is None:
            return call
        result: dict[str, Any] = {k: v for k, v in call.attrs.items() if k == "dtype"}
        for attr, values in zip(make[1], shapes, strict=True):
            result[attr] = values if attr == "dims" else values[0]
        return replace(get_op(make[0])(*tensors, heap, **result), ty=call.ty, loc=call.loc)


# op -> (vm op, the attributes that its shape operands become)
_LOWERED = {
    "memory.alloc_tensor": ("vm.alloc_tensor", ("dims",)),
    "memory.alloc_arena": ("vm.alloc_arena", ("size",)),
    "memory.view": ("vm.view", ("offset", "dims")),
    "memory.part": ("vm.view", ("offset", "dims")),
    "reshape": ("vm.reshape", ("dims",)),
}
