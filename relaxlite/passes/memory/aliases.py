"""Alias and lifetime analysis: in whose memory each value of a function may lie, and the last use of that memory.

The *roots* of a value are the possible owners of its memory: parameters, constants, and variables bound to new memory
(an allocation, a program called by value). Views, reshapes, MatchShapes, tuples and the results of calls, `If`s and
`Loop`s have the roots of all values that they may be, including constants of called functions. Two values may overlap
only if they share a root.

Lifetimes count *steps*: every binding is one step, in textual order, and an `If` or `Loop` has another step at its end.
The steps of one branch come before those of the other although only one branch runs; lifetimes are then longer than
necessary, never shorter. A value defined outside of a loop and used inside is used at the end of the loop, as the next
iteration reads it again.
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
    """Roots of the fields of a tuple."""

    fields: tuple[_FieldRoots, ...]


_FieldRoots: TypeAlias = "Roots | _Fields"

# Ops that allocate, beside calls of programs. The result of any other op may alias its operands.
_NEW_MEMORY = frozenset({"memory.alloc_tensor", "memory.view", "memory.copy"})


@dataclass(slots=True)
class Aliases:
    """Alias sets and lifetimes of one function (`find_aliases`)."""

    steps: list[Binding]  # binding of each step; an If or Loop occurs again at its end
    end: int  # step after all bindings, at which the result of the function is used
    _roots_of: dict[Var, _FieldRoots]
    _first: dict[Var, int] = field(default_factory=dict)
    _last: dict[Root, int] = field(default_factory=dict)
    _arms: dict[Var, tuple[tuple[Var, int], ...]] = field(default_factory=dict)
    _arm_steps: dict[tuple[Var, int], tuple[int, int]] = field(default_factory=dict)
    _carried: dict[Root, None] = field(default_factory=dict)

    def roots(self, expr: Expr) -> Roots:
        """Possible owners of the memory of the value, or of any field of a tuple."""
        return _flat(_expr_roots(expr, self._roots_of))

    def may_alias(self, a: Expr, b: Expr) -> bool:
        """Whether two values may share memory."""
        roots = self.roots(b)
        return any(root in roots for root in self.roots(a))

    def step(self, var: Var) -> int:
        """Step that binds the variable.

        For a parameter of a loop the step of the loop, for a parameter of the function -1.
        """
        return self._first[var]

    def last_use(self, root: Root) -> int:
        """Last step that uses memory of this root under any name: its own step if unused, `end` if it escapes."""
        return self._last.get(root, self._first[root] if isinstance(root, Var) else self.end)

    def is_carried(self, root: Root) -> bool:
        """Whether memory allocated in an iteration of a loop is live in the next iteration or after the loop."""
        return root in self._carried

    def dies_at(self, var: Var, at: Var) -> bool:
        """Whether the memory of `var` is dead after the step that binds `at`, so that this step may overwrite it.

        False for memory that the function does not own: arguments and constants.
        """
        roots, step = self.roots(var), self.step(at)
        owned = all(isinstance(root, Var) and self._first[root] >= 0 for root in roots)
        return bool(roots) and owned and all(self.last_use(r) <= step and not self.is_carried(r) for r in roots)

    def are_exclusive(self, a: Var, b: Var) -> bool:
        """Whether two variables are bound in different branches of one If, so that at most one is ever live."""
        arm_of = dict(self._arms[b])
        return any(branch in arm_of and arm_of[branch] != arm for branch, arm in self._arms[a])

    def exclusive_branches(self, var: Var) -> list[tuple[int, int]]:
        """Steps (first, last) of the later branches that run in place of the branch that binds the variable."""
        step_ranges = (self._arm_steps[branch, 1] for branch, arm in reversed(self._arms[var]) if arm == 0)
        return [(first, last) for first, last in step_ranges if first <= last]


def find_aliases(function: Function, module: IRModule) -> Aliases:
    """Compute the alias sets of a function of any stage before "vm". `module` holds the callees."""
    finder = _FindRoots(module)
    finder.function(function)
    aliases = Aliases([], 0, finder.roots)
    _FindLifetimes(aliases).function(function)
    return aliases


# Roots


def _new_roots(var: Var, ty: Type) -> _FieldRoots:
    """Roots of new memory bound to this variable.

    Fields of a tuple share a root, as their memory is not distinguished.
    """
    if isinstance(ty, TupleType):
        return _Fields(tuple(_new_roots(var, part) for part in ty.fields))
    return () if isinstance(ty, ShapeType | ObjectType) else (var,)


def _uniform_roots(roots: Roots, ty: Type) -> _FieldRoots:
    """Roots of a value of this type, any part of which may lie in memory of these roots."""
    if isinstance(ty, TupleType):
        return _Fields(tuple(_uniform_roots(roots, part) for part in ty.fields))
    return () if isinstance(ty, ShapeType | ObjectType) else roots


def _flat(field_roots: _FieldRoots) -> Roots:
    if isinstance(field_roots, _Fields):
        return tuple(dict.fromkeys(root for part in field_roots.fields for root in _flat(part)))
    return field_roots


def _join(a: _FieldRoots, b: _FieldRoots) -> _FieldRoots:
    if isinstance(a, _Fields) and isinstance(b, _Fields):
        return _Fields(tuple(map(_join, a.fields, b.fields)))
    return tuple(dict.fromkeys(_flat(a) + _flat(b)))


def _expr_roots(expr: Expr, roots: Mapping[Var, _FieldRoots]) -> _FieldRoots:
    if isinstance(expr, Var):
        return roots[expr]
    if isinstance(expr, Constant):
        return (expr,)
    if isinstance(expr, Tuple):
        return _Fields(tuple(_expr_roots(part, roots) for part in expr.fields))
    if isinstance(expr, TupleGetItem):
        field_roots = _expr_roots(expr.value, roots)
        return field_roots.fields[expr.index] if isinstance(field_roots, _Fields) else field_roots
    return ()


class _FindRoots:
    """Compute the roots of variables. `follows`: results of called functions may be constants of their own."""

    def __init__(self, module: IRModule, constants: dict[str, Roots] | None = None, *, follows: bool = True) -> None:
        self._module, self._follows = module, follows
        self.roots: dict[Var, _FieldRoots] = {}
        self._constants = {} if constants is None else constants  # that functions may return, by function name

    def function(self, function: Function) -> _FieldRoots:
        for param in function.params:
            self.roots[param] = _new_roots(param, param.ty)
        return self.body(function.body)

    def body(self, body: Body) -> _FieldRoots:
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            self.roots[binding.var] = self._value(binding.var, value)
        return _expr_roots(body.result, self.roots)

    def _value(self, var: Var, value: Expr) -> _FieldRoots:
        if isinstance(value, Call):
            return (
                _new_roots(var, var.ty) if self._is_new(value) else _uniform_roots(self._operand_roots(value), var.ty)
            )
        if isinstance(value, If):
            return _join(self.body(value.then_body), self.body(value.else_body))
        return self._loop(value) if isinstance(value, Loop) else _expr_roots(value, self.roots)

    def _is_new(self, call: Call) -> bool:
        if isinstance(call.callee, Op):
            return call.callee.name in _NEW_MEMORY
        callee = self._module.get(call.callee.name) if isinstance(call.callee, GlobalVar) else None
        return isinstance(callee, TensorProgram | ExternFunction)

    def _operand_roots(self, call: Call) -> Roots:
        result = [r for arg in operands(call) for r in _flat(_expr_roots(arg, self.roots))]
        if self._follows and isinstance(call.callee, GlobalVar):
            result += self._constants_of(call.callee.name)
        return tuple(dict.fromkeys(result))

    def _constants_of(self, name: str) -> Roots:
        """Constants that a function, or a function that it calls, may return."""
        constants: dict[Root, None] = {}
        for called in reachable(self._module, [name]):
            callee = self._module[called]
            if isinstance(callee, Function):
                if called not in self._constants:
                    roots = _flat(_FindRoots(self._module, self._constants, follows=False).function(callee))
                    self._constants[called] = tuple(root for root in roots if isinstance(root, Constant))
                constants.update(dict.fromkeys(self._constants[called]))
        return tuple(constants)

    def _loop(self, loop: Loop) -> _FieldRoots:
        """Fixed point over iterations: a parameter is an initial value or a value that an iteration yields."""
        roots: tuple[_FieldRoots, ...] = tuple(_expr_roots(init, self.roots) for init in loop.inits)
        while True:
            self.roots.update(zip(loop.params, roots, strict=True))
            yielded = self.body(loop.body)
            assert isinstance(yielded, _Fields)
            joined = tuple(map(_join, roots, yielded.fields[1:]))
            if joined == roots:
                return _Fields(roots)
            roots = joined


# Lifetimes


class _FindLifetimes:
    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._loops: list[dict[Root, None]] = []  # enclosing loops: roots from outside that each loop uses
        self._depth: dict[Root, int] = {}  # number of loops around the allocation
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
    """Variables and constants that a value reads itself, without those of nested bodies."""
    if isinstance(value, Var | Constant):
        yield value
    for operand in operands(value):
        yield from _leaves(operand)
