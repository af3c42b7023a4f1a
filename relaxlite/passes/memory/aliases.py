"""Alias and liveness analysis: the memory that each value of a function may lie in, and its last use.

The *roots* of a value are the possible owners of its memory: parameters, constants, and the variables whose value is
new memory (an allocation, a program called by value). Views, reshapes, MatchShapes, tuples and the results of calls,
`If`s and `Loop`s have the roots of the values that they may be, including constants of called functions. Two values may
overlap only if they have a root in common.

Live ranges are measured in *steps*: every binding is a step, in textual order; an `If` or `Loop` is one more at its
end. One branch's steps come before the other's although only one runs, so live ranges may be overestimated, never
underestimated. A root from outside a loop that is used in the loop is used at the loop's end, for the next iteration.
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
    """The possible roots of each field of a tuple."""

    fields: tuple[_Places, ...]


_Places: TypeAlias = "Roots | _Fields"

# Ops that return new memory, as calls of programs do. Any other op may return its operands.
_NEW_MEMORY = frozenset({"memory.alloc_tensor", "memory.view", "memory.copy"})


@dataclass(slots=True)
class Aliases:
    """The roots and live ranges of the values of one function (`find_aliases`)."""

    steps: list[Binding]  # the binding of each step; an If or Loop again at its end
    end: int  # the step after all others, which uses the function's result
    _places: dict[Var, _Places]
    _first: dict[Var, int] = field(default_factory=dict)
    _last: dict[Root, int] = field(default_factory=dict)
    _arms: dict[Var, tuple[tuple[Var, int], ...]] = field(default_factory=dict)
    _arm_steps: dict[tuple[Var, int], tuple[int, int]] = field(default_factory=dict)
    _carried: dict[Root, None] = field(default_factory=dict)

    def roots(self, expr: Expr) -> Roots:
        """Return the roots of a value, or of all fields of a tuple."""
        return _flat(_places_of(expr, self._places))

    def may_alias(self, a: Expr, b: Expr) -> bool:
        """Whether two values may share memory."""
        roots_of_b = self.roots(b)
        return any(root in roots_of_b for root in self.roots(a))

    def step(self, var: Var) -> int:
        """Return the step that binds a variable: the loop's for its parameters, -1 for a function's parameters."""
        return self._first[var]

    def last_use(self, root: Root) -> int:
        """Return the last step that uses a root under any name: its own step if none does, `end` if it is returned."""
        return self._last.get(root, self._first[root] if isinstance(root, Var) else self.end)

    def is_carried(self, root: Root) -> bool:
        """Whether memory allocated in a loop iteration is live in the next one, or after the loop."""
        return root in self._carried

    def dies_at(self, var: Var, at: Var) -> bool:
        """Whether nothing reads the memory of `var` after the step that binds `at`, so that this step may overwrite it.

        False for memory that the function does not own: parameters and constants.
        """
        roots, step = self.roots(var), self.step(at)
        owned = all(isinstance(root, Var) and self._first[root] >= 0 for root in roots)
        return bool(roots) and owned and all(self.last_use(r) <= step and not self.is_carried(r) for r in roots)

    def are_exclusive(self, a: Var, b: Var) -> bool:
        """Whether the two variables are bound in different branches of one If, so that only one ever is."""
        other = dict(self._arms[b])
        return any(branch in other and other[branch] != arm for branch, arm in self._arms[a])

    def other_branches(self, var: Var) -> list[tuple[int, int]]:
        """Return (first step, last step) of the later branches that run instead of the one that binds the variable."""
        ranges = (self._arm_steps[branch, 1] for branch, arm in reversed(self._arms[var]) if arm == 0)
        return [(first, last) for first, last in ranges if first <= last]


def find_aliases(function: Function, module: IRModule) -> Aliases:
    """Analyze a function of any stage before "vm"; `module` resolves its calls."""
    places = _FindPlaces(module)
    places.function(function)
    aliases = Aliases([], 0, places.known)
    _FindLives(aliases).function(function)
    return aliases


# Places


def _own(var: Var, ty: Type) -> _Places:
    """Return the places of new memory owned by `var`; the fields of a tuple share one root."""
    if isinstance(ty, TupleType):
        return _Fields(tuple(_own(var, part) for part in ty.fields))
    return () if isinstance(ty, ShapeType | ObjectType) else (var,)


def _with_roots(roots: Roots, ty: Type) -> _Places:
    """Return the places of a value of a type, any part of which may lie in memory of `roots`."""
    if isinstance(ty, TupleType):
        return _Fields(tuple(_with_roots(roots, part) for part in ty.fields))
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
    """Finds the places of all variables. `follows`: whether to include constants that called functions may return."""

    def __init__(self, module: IRModule, constants: dict[str, Roots] | None = None, *, follows: bool = True) -> None:
        self._module, self._follows = module, follows
        self.known: dict[Var, _Places] = {}
        self._constants = {} if constants is None else constants  # that functions may return, by function name

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
            return _own(var, var.ty) if self._is_new(value) else _with_roots(self._argument_roots(value), var.ty)
        if isinstance(value, If):
            return _join(self.body(value.then_body), self.body(value.else_body))
        return self._loop(value) if isinstance(value, Loop) else _places_of(value, self.known)

    def _is_new(self, call: Call) -> bool:
        if isinstance(call.callee, Op):
            return call.callee.name in _NEW_MEMORY
        callee = self._module.get(call.callee.name) if isinstance(call.callee, GlobalVar) else None
        return isinstance(callee, TensorProgram | ExternFunction)

    def _argument_roots(self, call: Call) -> Roots:
        roots = [r for arg in operands(call) for r in _flat(_places_of(arg, self.known))]
        if self._follows and isinstance(call.callee, GlobalVar):
            roots += self._constants_of(call.callee.name)
        return tuple(dict.fromkeys(roots))

    def _constants_of(self, name: str) -> Roots:
        """Return the constants that a function, or a function it calls, may return."""
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
        """Return the places of a loop's results: parameters and results are initial values or yielded ones."""
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
        self._loops: list[dict[Root, None]] = []  # loops around the current step: the roots from outside that each uses
        self._depth: dict[Root, int] = {}  # number of loops around the step that allocates the memory
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
    """Yield the variables and constants that a value reads, not counting its nested bodies."""
    if isinstance(value, Var | Constant):
        yield value
    for operand in operands(value):
        yield from _leaves(operand)
