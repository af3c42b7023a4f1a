"""Alias sets: whose memory each value of a function may lie in, and where that memory is used last.

The *roots* of a value are what may own the memory that it lies in: parameters, constants, and the variables whose value
is new memory (an allocation, a program called by value). Views, reshapes, MatchShapes, tuples and the results of calls,
`If`s and `Loop`s have the roots of what they may be, constants of a function that is called among them. Two values may
overlap only if they have a root in common.

Lives are measured in *steps*: every binding is one, in the order of the text, an `If` or `Loop` one more at its end.
One branch's steps come before the other's although only one runs, which makes lives longer than need be, never shorter.
What is made outside of a loop and used in it is used at the loop's end, for the next iteration reads it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TypeAlias

from relaxlite.ir.expr import (
    Binding,
    Body,
    Call,
    Constant,
    ControlFlow,
    Expr,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.types import ObjectType, ShapeType, TupleType, Type
from relaxlite.ir.visitor import operands
from relaxlite.passes.graph.reachable import reachable
from relaxlite.records import dataclass

Root: TypeAlias = "Var | Constant"
Roots: TypeAlias = "tuple[Root, ...]"


@dataclass(frozen=True, slots=True)
class _Fields:
    """The places of a tuple's fields."""

    fields: tuple[_Places, ...]


_Places: TypeAlias = "Roots | _Fields"

# Beside calls of programs, what makes new memory. Any other op may give its operands back.
_NEW_MEMORY = frozenset({"memory.alloc_tensor", "memory.view", "memory.copy"})


@dataclass(slots=True)
class Aliases:
    """What `find_aliases` found in one function."""

    steps: list[Binding]  # that runs at each step; an If or Loop a second time at its end
    end: int  # the step behind all others, at which the function's result is used
    _places: dict[Var, _Places]
    _first: dict[Var, int] = field(default_factory=dict)
    _last: dict[Root, int] = field(default_factory=dict)
    _arms: dict[Var, tuple[tuple[Var, int], ...]] = field(default_factory=dict)
    _arm_steps: dict[tuple[Var, int], tuple[int, int]] = field(default_factory=dict)
    _carried: dict[Root, None] = field(default_factory=dict)

    def roots(self, expr: Expr) -> Roots:
        """Whose memory the value, or any of a tuple's fields, may lie in."""
        return _flat(_places_of(expr, self._places))

    def may_alias(self, a: Expr, b: Expr) -> bool:
        """Whether the two may share memory."""
        others = self.roots(b)
        return any(root in others for root in self.roots(a))

    def step(self, var: Var) -> int:
        """The step that binds the variable; for a loop's parameters that of the loop, -1 for a function's."""
        return self._first[var]

    def last_use(self, root: Root) -> int:
        """The last step that uses memory of this root under any name: its own if none does, `end` if it leaves."""
        return self._last.get(root, self._first[root] if isinstance(root, Var) else self.end)

    def is_carried(self, root: Root) -> bool:
        """Whether memory made in an iteration of a loop lives on in the next, or behind the loop."""
        return root in self._carried

    def dies_at(self, var: Var, at: Var) -> bool:
        """Whether nothing reads the memory of `var` after the step that binds `at`, so that this may overwrite it.

        Never for memory that the function did not make: what callers pass, constants.
        """
        roots, step = self.roots(var), self.step(at)
        owned = all(isinstance(root, Var) and self._first[root] >= 0 for root in roots)
        return bool(roots) and owned and all(self.last_use(r) <= step and not self.is_carried(r) for r in roots)

    def are_exclusive(self, a: Var, b: Var) -> bool:
        """Whether the two variables are bound in different branches of one If, so that only one ever is."""
        other = dict(self._arms[b])
        return any(branch in other and other[branch] != arm for branch, arm in self._arms[a])

    def other_branches(self, var: Var) -> list[tuple[int, int]]:
        """The steps, first and last, of the branches behind the one that binds the variable that run in its place."""
        result = (self._arm_steps[branch, 1] for branch, arm in reversed(self._arms[var]) if arm == 0)
        return [(first, last) for first, last in result if first <= last]


def find_aliases(function: Function, module: IRModule) -> Aliases:
    """The alias sets of a function of any stage before "vm"; the module says what its calls call."""
    places = _FindPlaces(module)
    places.function(function)
    aliases = Aliases([], 0, places.known)
    _FindLives(aliases).function(function)
    return aliases


# Places


def _own(var: Var, ty: Type) -> _Places:
    """New memory under this name; a tuple's fields share it, for nothing tells their memory apart."""
    if isinstance(ty, TupleType):
        return _Fields(tuple(_own(var, part) for part in ty.fields))
    return () if isinstance(ty, ShapeType | ObjectType) else (var,)


def _spread(roots: Roots, ty: Type) -> _Places:
    """A value of this type any part of which may lie in memory of these roots."""
    if isinstance(ty, TupleType):
        return _Fields(tuple(_spread(roots, part) for part in ty.fields))
    return () if isinstance(ty, ShapeType | ObjectType) else roots


def _flat(places: _Places) -> Roots:
    if isinstance(places, _Fields):
        return tuple(dict.fromkeys(root for part in places.fields for root in _flat(part)))
    return places


def _join(a: _Places, b: _Places) -> _Places:
    if isinstance(a, _Fields) and isinstance(b, _Fields):
        return _Fields(tuple(map(_join, a.fields, b.fields)))
    return tuple(dict.fromkeys(_flat(a) + _flat(b)))


def _places_of(expr: Expr, known: Mapping[Var, _Places]) -> _Places:
    if isinstance(expr, Var):
        return known[expr]
    if isinstance(expr, Constant):
        return (expr,)
    if isinstance(expr, Tuple):
        return _Fields(tuple(_places_of(part, known) for part in expr.fields))
    if isinstance(expr, TupleGetItem):
        whole = _places_of(expr.value, known)
        return whole.fields[expr.index] if isinstance(whole, _Fields) else whole
    return ()


class _FindPlaces:
    """`follows`: functions that are called may give back constants of their own."""

    def __init__(self, module: IRModule, constants: dict[str, Roots] | None = None, *, follows: bool = True) -> None:
        self._module, self._follows = module, follows
        self.known: dict[Var, _Places] = {}
        self._constants = {} if constants is None else constants  # that functions may give back, by their names

    def function(self, function: Function) -> _Places:
        for param in function.params:
            self.known[param] = _own(param, param.ty)
        return self.body(function.body)

    def body(self, body: Body) -> _Places:
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            self.known[binding.var] = self._value(binding.var, value)
        return _places_of(body.result, self.known)

    def _value(self, var: Var, value: Expr) -> _Places:
        if isinstance(value, Call):
            return _own(var, var.ty) if self._is_new(value) else _spread(self._given(value), var.ty)
        if isinstance(value, If):
            return _join(self.body(value.then_body), self.body(value.else_body))
        return self._loop(value) if isinstance(value, Loop) else _places_of(value, self.known)

    def _is_new(self, call: Call) -> bool:
        if isinstance(call.callee, Op):
            return call.callee.name in _NEW_MEMORY
        callee = self._module.get(call.callee.name) if isinstance(call.callee, GlobalVar) else None
        return isinstance(callee, TensorProgram | ExternFunction)

    def _given(self, call: Call) -> Roots:
        result = [r for arg in operands(call) for r in _flat(_places_of(arg, self.known))]
        if self._follows and isinstance(call.callee, GlobalVar):
            result += self._constants_of(call.callee.name)
        return tuple(dict.fromkeys(result))

    def _constants_of(self, name: str) -> Roots:
        """Constants that a function may give back, or those that it calls."""
        constants: dict[Root, None] = {}
        for called in reachable(self._module, [name]):
            callee = self._module[called]
            if isinstance(callee, Function):
                if called not in self._constants:
                    roots = _flat(_FindPlaces(self._module, self._constants, follows=False).function(callee))
                    self._constants[called] = tuple(root for root in roots if isinstance(root, Constant))
                constants.update(dict.fromkeys(self._constants[called]))
        return tuple(constants)

    def _loop(self, loop: Loop) -> _Places:
        """Parameters may be what the loop starts with or what an iteration yields; so may the results."""
        places: tuple[_Places, ...] = tuple(_places_of(init, self.known) for init in loop.inits)
        while True:
            self.known.update(zip(loop.params, places, strict=True))
            yielded = self.body(loop.body)
            assert isinstance(yielded, _Fields)
            joined = tuple(map(_join, places, yielded.fields[1:]))
            if joined == places:
                return _Fields(places)
            places = joined


# Lives


class _FindLives:
    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._loops: list[dict[Root, None]] = []  # round the present step: the roots from outside that each one uses
        self._depth: dict[Root, int] = {}  # how many loops are round the step that makes the memory
        self._arms: tuple[tuple[Var, int], ...] = ()

    def function(self, function: Function) -> None:
        aliases = self._aliases
        for param in function.params:
            self._bind(param, -1)
        self._body(function.body)
        aliases.end = len(aliases.steps)
        self._use(function.body.result, aliases.end)

    def _bind(self, var: Var, step: int) -> None:
        self._aliases._first[var], self._aliases._arms[var] = step, self._arms
        self._depth[var] = len(self._loops)

    def _use(self, expr: Expr, step: int) -> None:
        for root in self._aliases.roots(expr):
            self._aliases._last[root] = max(self._aliases._last.get(root, -1), step)
            for loop in self._loops[self._depth.get(root, 0) :]:
                loop[root] = None

    def _body(self, body: Body) -> None:
        steps = self._aliases.steps
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            step = len(steps)
            steps.append(binding)
            self._bind(binding.var, step)
            for operand in _leaves(value):
                self._use(operand, step)
            if isinstance(value, If):
                self._if(binding.var, value)
            elif isinstance(value, Loop):
                self._loop(value, step)
            if isinstance(value, ControlFlow):
                steps.append(binding)

    def _if(self, var: Var, value: If) -> None:
        outer = self._arms
        for arm, body in enumerate((value.then_body, value.else_body)):
            self._arms = (*outer, (var, arm))
            first = len(self._aliases.steps)
            self._body(body)
            self._aliases._arm_steps[var, arm] = first, len(self._aliases.steps) - 1
        self._arms = outer

    def _loop(self, loop: Loop, step: int) -> None:
        aliases = self._aliases
        self._loops.append({})
        for param in loop.params:
            self._bind(param, step)
        self._body(loop.body)
        end = len(aliases.steps)
        for part in (*_leaves(loop.body.result), *loop.inits):
            self._use(part, end)
        for root in self._loops.pop():
            aliases._last[root] = end
        carried = (root for part in _leaves(loop.body.result) for root in aliases.roots(part))
        aliases._carried.update((root, None) for root in carried if self._depth.get(root, 0) > len(self._loops))


def _leaves(value: Expr) -> Iterator[Expr]:
    """The variables and constants that a value reads itself, not what nested bodies do."""
    if isinstance(value, Var | Constant):
        yield value
    for operand in operands(value):
        yield from _leaves(operand)
