"""Patterns of graph-level expressions, for rewriting.

    x = wildcard("x")
    p = is_op("mul", commutative=True)(x, is_op("sigmoid")(x))          # x * sigmoid(x)
    matcher = Matcher.of_body(function.body)
    found = matcher.match(p, var)
    if found is None:
        note(f"not rewritten: {matcher.reason}")
    elif found.is_removable:                                            # nothing else uses what was matched
        rewrite(found["x"])

Variables are followed to the values that `Let` binds them to, not through a MatchShape. A name that occurs twice must
match the same value both times. Alternatives and orders of operands are tried until everything fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field, replace

import numpy as np

from relaxlite.ir.expr import (
    AttrValue,
    Body,
    Call,
    Constant,
    Expr,
    GlobalVar,
    Let,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.op import Op
from relaxlite.ir.text import content_digest
from relaxlite.ir.types import ShapeType, TensorType
from relaxlite.ir.visitor import body_uses, inner_bodies
from relaxlite.records import dataclass

_RESOLUTION = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}

Check = Callable[[Expr, "Matcher"], str | None]  # why an expression is refused, or None
Then = Callable[[], bool]  # the rest of a match


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """What an expression must look like. Immutable: every method gives a new pattern."""

    name: str | None = None
    checks: tuple[Check, ...] = ()

    def named(self, name: str) -> Pattern:
        """Capture what matches under a name."""
        return replace(self, name=name)

    def where(self, check: Callable[[Expr], bool], reason: str) -> Pattern:
        """A condition on the matched expression (a variable, if it was matched as one)."""
        return self._checked(lambda expr, _: None if check(expr) else reason)

    def has_dtype(self, *dtypes: str) -> Pattern:
        reason = f"dtype is not {' or '.join(dtypes)}"
        return self.where(lambda e: isinstance(e.ty, TensorType) and e.ty.dtype in dtypes, reason)

    def has_rank(self, rank: int) -> Pattern:
        reason = f"rank is not {rank}"
        return self.where(lambda e: isinstance(e.ty, TensorType | ShapeType) and e.ty.rank == rank, reason)

    def has_attr(self, **attrs: AttrValue) -> Pattern:
        """The call has these values of attributes."""

        def check(expr: Expr, matcher: Matcher) -> str | None:
            result = matcher.value_of(expr)
            have = result.attrs if isinstance(result, Call) else {}
            wrong = [name for name, value in attrs.items() if name not in have or have[name] != value]
            return f"attribute {wrong[0]} is {have.get(wrong[0])}, not {attrs[wrong[0]]}" if wrong else None

        return self._checked(check)

    def used_once(self) -> Pattern:
        """Nothing but the matched expression uses this variable."""

        def check(expr: Expr, matcher: Matcher) -> str | None:
            if not isinstance(expr, Var):
                return None
            count = None if matcher.uses is None else matcher.uses[expr]
            return None if count == 1 else f"{expr.name} is used {'?' if count is None else count} times"

        return self._checked(check)

    def _checked(self, check: Check) -> Pattern:
        return replace(self, checks=(*self.checks, check))

    def __or__(self, other: Pattern) -> Pattern:
        return _Alternatives(options=(self, other))

    @property
    def root_ops(self) -> tuple[str, ...]:
        """The ops of which a call is what matches; none: it may be something else than a call."""
        return ()

    def fits(self, expr: Expr, state: _State, then: Then) -> bool:
        """Whether the expression has this form in a way that lets the rest of the match, `then`, succeed."""
        return then()


@dataclass(frozen=True, slots=True, eq=False)
class _Alternatives(Pattern):
    options: tuple[Pattern, ...] = ()

    @property
    def root_ops(self) -> tuple[str, ...]:
        result = [option.root_ops for option in self.options]
        return tuple(dict.fromkeys(name for names in result for name in names)) if all(result) else ()

    def __or__(self, other: Pattern) -> Pattern:
        return _Alternatives(options=(*self.options, other))

    def fits(self, expr: Expr, state: _State, then: Then) -> bool:
        return any(state.match(option, expr, then) for option in self.options)


@dataclass(frozen=True, slots=True, eq=False)
class _Constant(Pattern):
    value: float | int | bool | None = None
    ulps: int = 0

    def fits(self, expr: Expr, state: _State, then: Then) -> bool:
        value = state.matcher.value_of(expr)
        if not isinstance(value, Constant):
            return state.refuse(f"{_shown(expr)} is no constant")
        if self.value is not None and not (value.value.size and self._equals(value)):
            return state.refuse(f"the constant is not {self.value}")
        state.follow(expr)
        return then()

    def _equals(self, found: Constant) -> bool:
        assert self.value is not None
        if not self.ulps:
            return bool(np.all(found.value == self.value))
        step = _RESOLUTION.get(found.ty.dtype, 0.0) * abs(self.value)
        return bool(np.all(np.abs(found.value.astype(np.float64) - self.value) <= self.ulps * step))


@dataclass(frozen=True, slots=True, eq=False)
class OpPattern(Pattern):
    """A call of one of these ops; call the pattern with patterns of the operands, or leave them open."""

    ops: tuple[str, ...] = ()
    commutative: bool = False
    operands: tuple[Pattern, ...] | None = None

    @property
    def root_ops(self) -> tuple[str, ...]:
        return self.ops

    def __call__(self, *operands: Pattern) -> OpPattern:
        return replace(self, operands=operands)

    def fits(self, expr: Expr, state: _State, then: Then) -> bool:
        value = state.matcher.value_of(expr)
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or value.callee.name not in self.ops:
            return state.refuse(f"{_shown(expr)} is no {' or '.join(self.ops)}")
        state.follow(expr)
        if self.operands is None:
            return then()
        if len(self.operands) != len(value.args):
            return state.refuse(f"{value.callee.name} has {len(value.args)} operands, not {len(self.operands)}")
        orders = [value.args]
        if self.commutative and len(value.args) == 2:
            orders.append(value.args[::-1])
        return any(state.match_all(tuple(zip(self.operands, order, strict=True)), then) for order in orders)


@dataclass(frozen=True, slots=True, eq=False)
class _Field(Pattern):
    source: Pattern = field(default_factory=Pattern)
    index: int | None = None

    def fits(self, expr: Expr, state: _State, then: Then) -> bool:
        value = state.matcher.value_of(expr)
        if not isinstance(value, TupleGetItem) or self.index not in (None, value.index):
            return state.refuse(f"{_shown(expr)} is no field {'' if self.index is None else self.index} of a tuple")
        state.follow(expr)
        return state.match(self.source, value.value, then)


def wildcard(name: str | None = None) -> Pattern:
    """Anything."""
    return Pattern(name)


def is_op(*names: str, commutative: bool = False) -> OpPattern:
    """A call of one of the ops; `commutative`: its two operands may stand in either order."""
    return OpPattern(ops=names, commutative=commutative)


def is_const(value: float | int | bool | None = None, *, ulps: int = 0) -> Pattern:
    """A constant, all of whose elements are `value` if that is given, give or take `ulps` units in the last place of
    its dtype: for numbers like sqrt(2), which every exporter rounds in its own way."""
    return _Constant(value=value, ulps=ulps)


def is_field(source: Pattern, index: int | None = None) -> Pattern:
    """One result of what yields several."""
    return _Field(source=source, index=index)


@dataclass(frozen=True, slots=True)
class Match:
    """What matched: `root`, captures by name, and the variables between root and captures, root first."""

    root: Expr
    captures: Mapping[str, Expr]
    inner: tuple[Var, ...]
    is_removable: bool  # nothing outside of the match uses a variable of `inner` other than the root

    def __getitem__(self, name: str) -> Expr:
        return self.captures[name]


@dataclass(slots=True)
class Matcher:
    """Matches expressions of one body. `reason`: why the last match failed.

    `uses`: how often each variable is used; without it nothing is known to be used once, or removable.
    """

    bindings: Mapping[Var, Expr]
    uses: Counter[Var] | None = None
    reason: str = ""

    @staticmethod
    def of_body(body: Body) -> Matcher:
        """With the bindings and uses of a body and of every body nested in it."""
        return Matcher(let_values(body), Counter(body_uses(body)))

    def value_of(self, expr: Expr) -> Expr:
        """What a variable is bound to, also by way of other variables; any other expression itself."""
        while isinstance(expr, Var) and expr in self.bindings:
            expr = self.bindings[expr]
        return expr

    def match(self, pattern: Pattern, expr: Expr) -> Match | None:
        self.reason = ""
        state = _State(self)
        if not state.match(pattern, expr, lambda: True):
            return None
        self.reason = ""
        inner = tuple(state.inner)
        matched = [self.bindings[var] for var in inner] + ([] if isinstance(expr, Var) else [expr])
        inside = Counter(operand for value in matched for operand in _operands(value))
        uses = self.uses
        is_removable = uses is not None and all(uses[var] <= inside[var] for var in inner if var is not expr)
        return Match(expr, state.captures, inner, is_removable)


def match(pattern: Pattern, expr: Expr, bindings: Mapping[Var, Expr], uses: Counter[Var] | None = None) -> Match | None:
    """Match once; a `Matcher` also keeps the reason of a failure."""
    return Matcher(bindings, uses).match(pattern, expr)


def let_values(body: Body) -> dict[Var, Expr]:
    """Variable -> value for every Let of a body and of those nested in it."""
    exprs: dict[Var, Expr] = {}
    for binding in body.bindings():
        if isinstance(binding, Let):
            exprs[binding.var] = binding.value
            for nested in inner_bodies(binding.value):
                exprs.update(let_values(nested))
    return exprs


class _State:
    """Captures and variables of a match under way; what fails leaves no trace."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.captures: dict[str, Expr] = {}
        self.inner: dict[Var, None] = {}

    def refuse(self, reason: str) -> bool:
        self.matcher.reason = reason
        return False

    def follow(self, expr: Expr) -> None:
        """The match goes through this variable."""
        while isinstance(expr, Var) and expr in self.matcher.bindings:
            self.inner[expr] = None
            expr = self.matcher.bindings[expr]

    def match(self, pattern: Pattern, expr: Expr, then: Then) -> bool:
        captures, inner = dict(self.captures), dict(self.inner)
        if pattern.fits(expr, self, lambda: self._accept(pattern, expr) and then()):
            return True
        self.captures, self.inner = captures, inner
        return False

    def match_all(self, pairs: tuple[tuple[Pattern, Expr], ...], then: Then) -> bool:
        if not pairs:
            return then()
        (pattern, expr), *rest = pairs
        return self.match(pattern, expr, lambda: self.match_all(tuple(rest), then))

    def _accept(self, pattern: Pattern, expr: Expr) -> bool:
        """The checks and the capture of a pattern whose form fits."""
        for check in pattern.checks:
            reason = check(expr, self.matcher)
            if reason is not None:
                return self.refuse(reason)
        if pattern.name is None:
            return True
        known = self.captures.setdefault(pattern.name, expr)
        return _is_same(known, expr) or self.refuse(f"{pattern.name} is both {_shown(known)} and {_shown(expr)}")


def _operands(expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, Call):
        return expr.args
    if isinstance(expr, Var):
        return (expr,)
    return (expr.value,) if isinstance(expr, TupleGetItem) else ()


def _is_same(a: Expr, b: Expr) -> bool:
    if isinstance(a, Constant) and isinstance(b, Constant):
        return a is b or content_digest(a.value) == content_digest(b.value)
    if isinstance(a, ShapeValue) and isinstance(b, ShapeValue):
        return a.values == b.values
    return a is b or (isinstance(a, GlobalVar) and a == b)


def _shown(expr: Expr) -> str:
    if isinstance(expr, Var):
        return expr.name
    if isinstance(expr, Call):
        return f"a call of {expr.callee.name}"
    return {Constant: "a constant", ShapeValue: "a shape", Tuple: "a tuple"}.get(type(expr), "an expression")
