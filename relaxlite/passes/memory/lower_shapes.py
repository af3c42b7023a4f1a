"""Lower symbolic shapes to slots of a run-time heap.

Each function gets an int64 heap. Its parameters and every MatchShape are matched against the heap: a new symbol binds a
slot, everything else is a check. All expressions that the function needs (dimensions, offsets, symbolic arguments) get
slots too. After each point that binds symbols, a *shape program*, an ordinary tensor program over the heap, computes
the slots that have become computable. No symbols remain: ops take constants and slots (`vm.*`), and calls of programs
the first of their consecutive slots (the attribute `first_slot`).
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
Source = tuple[Expr, Type, str]  # value, type, description for error messages


def lower_shapes(module: IRModule) -> IRModule:
    """Replace symbolic shapes by slots of a heap that is filled at run time."""
    definitions: dict[str, Definition] = dict(module)
    for name, function in module.functions().items():
        definitions[name] = _LowerFunction(name, module, definitions).lower(function)
    return module.updated(definitions)


class _LowerFunction:
    """Lowering of one function: assigns slots and collects shape programs."""

    def __init__(self, name: str, module: IRModule, definitions: dict[str, Definition]) -> None:
        self._name, self._module, self._definitions = name, module, definitions
        self._slots: dict[SymExpr, int] = {}  # slot of every needed expression, in order of first use
        self._groups: dict[
            tuple[SymExpr, ...], int
        ] = {}  # symbolic arguments of a program -> first of consecutive slots
        self._count = 0
        self._shape_programs: list[tuple[str, list[tuple[int, SymExpr]]]] = []
        self.heap = Var("heap", TensorType.of((0,), "int64"))

    def lower(self, function: Function) -> Function:
        """Lower the function; adds its shape programs to the definitions."""
        for param in function.params:
            self._need_type(param.ty)
        self._need_body(function.body)
        self.heap = Var("heap", TensorType.of((self._count,), "int64"))
        scope = _Scope(self, set(), set())
        head: list[Binding] = [Let(self.heap, get_op("vm.alloc_heap")(slots=self._count))]
        head += scope.match([(p, p.ty, f"argument {p.name!r}") for p in function.params])
        body = scope.body(function.body)
        self._define_shape_programs()
        return replace(function, body=Body((Block(tuple(head), False), *body.blocks), body.result))

    # Assignment of slots

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
        """Slot of an expression."""
        return self._slots[expr]

    def dim(self, expr: SymExpr) -> int:
        """A dimension as an attribute: a constant, or -1 - slot. Raises PassError for a negative constant."""
        value = as_int(expr)
        if value is None:
            return -1 - self._slots[expr]
        if value < 0:
            raise PassError(f"{self._name}: a dimension or size is the negative constant {value}")
        return value

    def first_slot(self, sym_args: tuple[SymExpr, ...]) -> int:
        """First slot of the symbolic arguments of a call."""
        return self._groups.get(sym_args, 0)

    def targets(self) -> Iterable[tuple[int, SymExpr]]:
        """Slots that are computed, not bound, with their expressions."""
        for expr, slot in self._slots.items():
            if not isinstance(expr, SymVar):
                yield slot, expr
        for group, first in self._groups.items():
            for k, expr in enumerate(group):
                yield first + k, expr

    # Shape programs

    def shape_call(self, targets: list[tuple[int, SymExpr]]) -> Let:
        """Call of a new shape program that computes these slots."""
        name = f"{self._name}_shapes_{len(self._shape_programs)}"
        self._shape_programs.append((name, targets))
        return Let(Var("_", UNIT), Call(GlobalVar(name), (self.heap,), ty=UNIT))

    def _define_shape_programs(self) -> None:
        for name, targets in self._shape_programs:
            buffer = Buffer("heap", (sym(self._count),), "int64")
            used = dict.fromkeys(v for _, expr in targets for v in expr.free_vars())
            local = {v: SymVar(v.name, lower=v.lower, upper=v.upper, divisor=v.divisor) for v in used}
            computed = {self._slots[v]: v for v in used if any(slot == self._slots[v] for slot, _ in targets)}
            body: Stmt = seq()
            for slot, expr in reversed(targets):
                if slot in computed:  # symbol defined here that later expressions use
                    body = LetIndex(local[computed[slot]], Load(buffer, (sym(slot),)), body)
                body = seq(Store(buffer, (sym(slot),), IndexValue(substitute(expr, local))), body)
            for var in reversed([v for v in used if self._slots[v] not in computed]):
                body = LetIndex(local[var], Load(buffer, (sym(self._slots[var]),)), body)
            self._definitions[name] = TensorProgram((buffer,), (), body, 1, Attrs({CHECKED: True, SCHEDULED: True}))


def dims_of(ty: Type) -> tuple[SymExpr, ...]:
    """Dimensions and values of a type, those of tuple fields included."""
    if isinstance(ty, TensorType):
        return ty.shape or ()
    if isinstance(ty, TupleType):
        return tuple(dim for field in ty.fields for dim in dims_of(field))
    return (ty.values or ()) if isinstance(ty, ShapeType) else ()


def _fields(sources: Sequence[Source], bindings: list[Binding]) -> Iterator[Source]:
    """Flatten tuples: bind each field to a variable, and yield values that are no tuples."""
    for source, ty, description in sources:
        if not isinstance(ty, TupleType):
            yield source, ty, description
            continue
        field_vars = [Var(f"field_{k}", field) for k, field in enumerate(ty.fields)]
        bindings += [Let(field_var, TupleGetItem(source, k)) for k, field_var in enumerate(field_vars)]
        yield from _fields(
            [(field_var, field_var.ty, f"{description}, field {k}") for k, field_var in enumerate(field_vars)], bindings
        )


def _is_definition(binding: Binding) -> bool:
    """Whether the binding is a MatchShape that defines symbols by expressions."""
    return isinstance(binding, MatchShape) and isinstance(binding.source, ShapeValue)


class _Scope:
    """Lowering of bodies, with the symbols bound and the slots computed so far."""

    def __init__(self, owner: _LowerFunction, bound: set[SymVar], computed: set[int]) -> None:
        self._owner, self._bound, self._computed = owner, bound, computed

    def match(self, sources: Sequence[Source]) -> list[Binding]:
        """Bind the new symbols of these values, compute dependent slots, and check all other dimensions."""
        bindings: list[Binding] = []
        late_checks: list[tuple[Expr, list[AttrTuple], str]] = []
        for source, ty, description in _fields(sources, bindings):
            early_spec, late_spec = self._spec(dims_of(ty))
            if (
                isinstance(ty, TensorType | ShapeType)
                and (ty.shape if isinstance(ty, TensorType) else ty.values) is not None
            ):
                bindings.append(self._check(source, early_spec, description))
                if any(item[0] != "any" for item in late_spec):
                    late_checks.append((source, late_spec, description))
        bindings += self._compute()
        bindings += [self._check(source, spec, description) for source, spec, description in late_checks]
        return bindings

    def _spec(self, dims: tuple[SymExpr, ...]) -> tuple[list[AttrTuple], list[AttrTuple]]:
        """Items of the vm.match_shape attribute `spec`: binds and checks before the shape program, checks after it."""
        early_spec: list[AttrTuple] = []
        late_spec: list[AttrTuple] = []
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
            early_spec.append(early)
            late_spec.append(late)
        return early_spec, late_spec

    def _check(self, source: Expr, spec: list[AttrTuple], what: str) -> Binding:
        call = get_op("vm.match_shape")(source, self._owner.heap, spec=tuple(spec), what=what)
        return Let(Var("_", UNIT), call)

    def _compute(self) -> list[Binding]:
        """Call of a shape program that computes all slots that have become computable."""
        ready = [
            (slot, expr)
            for slot, expr in self._owner.targets()
            if slot not in self._computed and all(v in self._bound for v in expr.free_vars())
        ]
        self._computed.update(slot for slot, _ in ready)
        return [self._owner.shape_call(ready)] if ready else []

    def body(self, body: Body) -> Body:
        """Lower a body."""
        bindings: list[Binding] = []
        for is_definition, group in itertools.groupby(body.bindings(), _is_definition):
            if is_definition:
                bindings += self._define(list(group))  # type: ignore[arg-type]
            else:
                bindings += [lowered for binding in group for lowered in self._binding(binding)]
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
        """Compute symbols that abbreviate expressions, in order, then the slots that depend on them."""
        targets = []
        for binding in definitions:
            assert isinstance(binding.source, ShapeValue)
            for symbol, expr in zip(binding.shape, binding.source.values, strict=True):
                if not isinstance(symbol, SymVar) or symbol in self._bound:
                    raise PassError(f"MatchShape of the shape {binding.source.values}: {symbol} is no new symbol")
                targets.append((self._owner.slot(symbol), expr))
                self._bound.add(symbol)
        call = self._owner.shape_call(targets)
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
        lowering = _LOWERED.get(name)
        if lowering is None:
            return call
        attrs_of_op: dict[str, Any] = {k: v for k, v in call.attrs.items() if k == "dtype"}
        for attr, values in zip(lowering[1], shapes, strict=True):
            attrs_of_op[attr] = values if attr == "dims" else values[0]
        return replace(get_op(lowering[0])(*tensors, heap, **attrs_of_op), ty=call.ty, loc=call.loc)


# op -> (vm op, attributes that replace its shape operands)
_LOWERED = {
    "memory.alloc_tensor": ("vm.alloc_tensor", ("dims",)),
    "memory.alloc_arena": ("vm.alloc_arena", ("size",)),
    "memory.view": ("vm.view", ("offset", "dims")),
    "memory.part": ("vm.view", ("offset", "dims")),
    "reshape": ("vm.reshape", ("dims",)),
}
