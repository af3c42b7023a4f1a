"""Pattern matching on graph-level expressions, for rewrite rules.

    x = wildcard("x")
    p = is_op("mul", commutative=True)(x, is_op("sigmoid")(x))          # x * sigmoid(x)
    matcher = Matcher.of_body(function.body)
    match = matcher.match(p, var)
    if match is None:
        note(f"not rewritten: {matcher.reason}")
    elif match.is_removable:                                            # no use outside of the match
        rewrite(match["x"])

Matching follows variables through `Let`, not through `MatchShape`. A name that occurs twice must match the same value
both times. Alternatives and operand orders are tried with backtracking.
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

MatchCheck = Callable[[Expr, "Matcher"], str | None]  # reason for a mismatch, or None
Continuation = Callable[[], bool]  # continuation: match the rest of the pattern


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Pattern of an expression: any expression that passes the checks. Immutable; methods return new patterns."""

    name: str | None = None
    checks: tuple[MatchCheck, ...] = ()

    def named(self, name: str) -> Pattern:
        """Capture the matched expression under a name."""
        return replace(self, name=name)

    def where(self, check: Callable[[Expr], bool], reason: str) -> Pattern:
        """Add a condition on the matched expression, which may be a variable; `reason` explains a mismatch."""
        return self._checked(lambda expr, _: None if check(expr) else reason)

    def has_dtype(self, *dtypes: str) -> Pattern:
        """Require a tensor of one of these dtypes."""
        reason = f"dtype is not {' or '.join(dtypes)}"
        return self.where(lambda e: isinstance(e.ty, TensorType) and e.ty.dtype in dtypes, reason)

    def has_rank(self, rank: int) -> Pattern:
        """Require a tensor or shape of this rank."""
        reason = f"rank is not {rank}"
        return self.where(lambda e: isinstance(e.ty, TensorType | ShapeType) and e.ty.rank == rank, reason)

    def has_attr(self, **attrs: AttrValue) -> Pattern:
        """Require a call with these attribute values."""

        def check(expr: Expr, matcher: Matcher) -> str | None:
            call = matcher.value_of(expr)
            actual = call.attrs if isinstance(call, Call) else {}
            wrong = [name for name, value in attrs.items() if name not in actual or actual[name] != value]
            return f"attribute {wrong[0]} is {actual.get(wrong[0])}, not {attrs[wrong[0]]}" if wrong else None

        return self._checked(check)

    def used_once(self) -> Pattern:
        """Require that a matched variable has exactly one use."""

        def check(expr: Expr, matcher: Matcher) -> str | None:
            if not isinstance(expr, Var):
                return None
            count = None if matcher.uses is None else matcher.uses[expr]
            return None if count == 1 else f"{expr.name} is used {'?' if count is None else count} times"

        return self._checked(check)

    def _checked(self, check: MatchCheck) -> Pattern:
        return replace(self, checks=(*self.checks, check))

    def __or__(self, other: Pattern) -> Pattern:
        return _Alternatives(options=(self, other))

    @property
    def root_ops(self) -> tuple[str, ...]:
        """Names of the ops whose calls can match; empty if other expressions can match."""
        return ()

    def fits(self, expr: Expr, state: _MatchState, then: Continuation) -> bool:
        """Match the expression, then the rest of the pattern by the continuation `then`; backtracks on failure."""
        return then()


@dataclass(frozen=True, slots=True, eq=False)
class _Alternatives(Pattern):
    """Pattern that matches if one of its options does."""

    options: tuple[Pattern, ...] = ()

    @property
    def root_ops(self) -> tuple[str, ...]:
        options = [option.root_ops for option in self.options]
        return tuple(dict.fromkeys(name for names in options for name in names)) if all(options) else ()

    def __or__(self, other: Pattern) -> Pattern:
        return _Alternatives(options=(*self.options, other))

    def fits(self, expr: Expr, state: _MatchState, then: Continuation) -> bool:
        return any(state.match(option, expr, then) for option in self.options)


@dataclass(frozen=True, slots=True, eq=False)
class _Constant(Pattern):
    """Pattern of a constant, optionally of one value; see `is_const`."""

    value: float | int | bool | None = None
    ulps: int = 0

    def fits(self, expr: Expr, state: _MatchState, then: Continuation) -> bool:
        value = state.matcher.value_of(expr)
        if not isinstance(value, Constant):
            return state.refuse(f"{_describe(expr)} is no constant")
        if self.value is not None and not (value.value.size and self._equals(value)):
            return state.refuse(f"the constant is not {self.value}")
        state.follow(expr)
        return then()

    def _equals(self, constant: Constant) -> bool:
        assert self.value is not None
        if not self.ulps:
            return bool(np.all(constant.value == self.value))
        step = _RESOLUTION.get(constant.ty.dtype, 0.0) * abs(self.value)
        return bool(np.all(np.abs(constant.value.astype(np.float64) - self.value) <= self.ulps * step))


@dataclass(frozen=True, slots=True, eq=False)
class OpPattern(Pattern):
    """Pattern of a call of one of these ops. Calling the pattern sets operand patterns; by default, any match."""

    ops: tuple[str, ...] = ()
    commutative: bool = False
    operands: tuple[Pattern, ...] | None = None

    @property
    def root_ops(self) -> tuple[str, ...]:
        return self.ops

    def __call__(self, *operands: Pattern) -> OpPattern:
        return replace(self, operands=operands)

    def fits(self, expr: Expr, state: _MatchState, then: Continuation) -> bool:
        value = state.matcher.value_of(expr)
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or value.callee.name not in self.ops:
            return state.refuse(f"{_describe(expr)} is no {' or '.join(self.ops)}")
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
    """Pattern of a tuple field; see `is_field`."""

    source: Pattern = field(default_factory=Pattern)
    index: int | None = None

    def fits(self, expr: Expr, state: _MatchState, then: Continuation) -> bool:
        value = state.matcher.value_of(expr)
        if not isinstance(value, TupleGetItem) or self.index not in (None, value.index):
            return state.refuse(f"{_describe(expr)} is no field {'' if self.index is None else self.index} of a tuple")
        state.follow(expr)
        return state.match(self.source, value.value, then)


def wildcard(name: str | None = None) -> Pattern:
    """Pattern that matches any expression, captured under `name`."""
    return Pattern(name)


def is_op(*names: str, commutative: bool = False) -> OpPattern:
    """Pattern of a call of one of the ops; `commutative`: its two operands match in either order."""
    return OpPattern(ops=names, commutative=commutative)


def is_const(value: float | int | bool | None = None, *, ulps: int = 0) -> Pattern:
    """Pattern of a constant; `value`, unless None, is the value of all its elements.

    `ulps`: tolerance in units in the last place of the dtype, as exporters round numbers like sqrt(2) differently.
    """
    return _Constant(value=value, ulps=ulps)


def is_field(source: Pattern, index: int | None = None) -> Pattern:
    """Pattern of field `index` (None: any field) of a tuple that matches `source`."""
    return _Field(source=source, index=index)


@dataclass(frozen=True, slots=True)
class Match:
    """Result of a match: root expression, captures by name, and variables between root and captures, root first."""

    root: Expr
    captures: Mapping[str, Expr]
    inner: tuple[Var, ...]
    is_removable: bool  # variables of `inner` other than the root have no use outside of the match

    def __getitem__(self, name: str) -> Expr:
        return self.captures[name]


@dataclass(slots=True)
class Matcher:
    """Matcher of expressions of one body. `reason`: why the last match failed.

    `uses`: use counts of variables; if None, no variable counts as used once, and no match as removable.
    """

    bindings: Mapping[Var, Expr]
    uses: Counter[Var] | None = None
    reason: str = ""

    @staticmethod
    def of_body(body: Body) -> Matcher:
        """Matcher with the bindings and use counts of a body and all nested bodies."""
        return Matcher(let_values(body), Counter(body_uses(body)))

    def value_of(self, expr: Expr) -> Expr:
        """Resolve a variable to the expression it is bound to, transitively; any other expression is returned."""
        while isinstance(expr, Var) and expr in self.bindings:
            expr = self.bindings[expr]
        return expr

    def match(self, pattern: Pattern, expr: Expr) -> Match | None:
        """Match an expression; None on failure, with `reason` set."""
        self.reason = ""
        state = _MatchState(self)
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
    """Match one expression; None on failure. A `Matcher` also records the reason of a failure."""
    return Matcher(bindings, uses).match(pattern, expr)


def let_values(body: Body) -> dict[Var, Expr]:
    """Map variable -> value for every Let of a body and all nested bodies."""
    exprs: dict[Var, Expr] = {}
    for binding in body.bindings():
        if isinstance(binding, Let):
            exprs[binding.var] = binding.value
            for nested in inner_bodies(binding.value):
                exprs.update(let_values(nested))
    return exprs


class _MatchState:
    """State of a match in progress: captures and matched variables, restored on failure."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.captures: dict[str, Expr] = {}
        self.inner: dict[Var, None] = {}

    def refuse(self, reason: str) -> bool:
        """Record the reason of a mismatch; False."""
        self.matcher.reason = reason
        return False

    def follow(self, expr: Expr) -> None:
        """Record the variables between `expr` and its value as part of the match."""
        while isinstance(expr, Var) and expr in self.matcher.bindings:
            self.inner[expr] = None
            expr = self.matcher.bindings[expr]

    def match(self, pattern: Pattern, expr: Expr, then: Continuation) -> bool:
        captures, inner = dict(self.captures), dict(self.inner)  # to backtrack to
        if pattern.fits(expr, self, lambda: self._accept(pattern, expr) and then()):
            return True
        self.captures, self.inner = captures, inner
        return False

    def match_all(self, pairs: tuple[tuple[Pattern, Expr], ...], then: Continuation) -> bool:
        if not pairs:
            return then()
        (pattern, expr), *rest = pairs
        return self.match(pattern, expr, lambda: self.match_all(tuple(rest), then))

    def _accept(self, pattern: Pattern, expr: Expr) -> bool:
        """Run the checks of a pattern whose structure matches, and capture the expression under its name."""
        for check in pattern.checks:
            reason = check(expr, self.matcher)
            if reason is not None:
                return self.refuse(reason)
        if pattern.name is None:
            return True
        captured = self.captures.setdefault(pattern.name, expr)
        return _is_same(captured, expr) or self.refuse(
            f"{pattern.name} is both {_describe(captured)} and {_describe(expr)}"
        )


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


def _describe(expr: Expr) -> str:
    if isinstance(expr, Var):
        return expr.name
    if isinstance(expr, Call):
        return f"a call of {expr.callee.name}"
    return {Constant: "a constant", ShapeValue: "a shape", Tuple: "a tuple"}.get(type(expr), "an expression")
