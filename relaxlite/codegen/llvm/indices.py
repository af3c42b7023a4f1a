"""Emit symbolic integers, with loop-invariant code motion and common subexpression elimination of index expressions.

A *scope* is opened where variables get values: function entry, loop body, `LetIndex`, allocation. Its prelude is an
insertion point that dominates everything inside, and a sum is split by the scopes of its terms: of `i*n + j*4 + 3` the
product is emitted in the prelude of i's loop, the sum with `j*4` in that of j's loop, and 3 folds into the addressing
mode. So inner loops have no invariant offset arithmetic, although no LICM pass of LLVM runs.

Division by zero does not trap: quotient and remainder are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import TypeAlias

from relaxlite.codegen.llvm.emitter import FALSE, Emitter, Lines, Val, int_const, lane_numbers
from relaxlite.ir.program import Buffer
from relaxlite.ir.symbolic import (
    Division,
    Extremum,
    FloorDiv,
    FloorMod,
    Max,
    Min,
    Monomial,
    SymExpr,
    SymVar,
    from_terms,
    map_atoms,
    monomial_expr,
    substitute,
    sym,
)
from relaxlite.records import dataclass

Interval: TypeAlias = "tuple[int | None, int | None]"  # inclusive; None: no bound known


@dataclass(slots=True)
class Scope:
    """A scope: its prelude, and the values, pointers and masks emitted there."""

    prelude: Lines
    values: dict[SymExpr, Val] = field(default_factory=dict)
    pointers: dict[tuple[Buffer, SymExpr], Val] = field(default_factory=dict)
    masks: dict[tuple[str, SymExpr, int], Val] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Variable:
    """A bound variable: its value, scope depth and interval."""

    value: Val
    depth: int
    bounds: Interval
    is_data: bool = False  # bound by LetIndex to loaded data: arithmetic may overflow


@dataclass(frozen=True, slots=True)
class BufferBase:
    """Base pointer of a buffer, valid from scope `depth` on; `elem`: LLVM type of its elements in memory."""

    pointer: Val
    depth: int
    elem: str


class Indices:
    """Variables in scope and emitter of index expressions, for one function."""

    def __init__(self, emitter: Emitter) -> None:
        self.e = emitter
        self.scopes: list[Scope] = []
        self.dynamic_masks: set[str] = set()  # text of masks that depend on run-time values
        self.variables: dict[SymVar, Variable] = {}
        self.constants: dict[SymVar, int] = {}
        self.bases: dict[Buffer, BufferBase] = {}

    # Scopes and variables

    @contextmanager
    def scope(self) -> Iterator[int]:
        """Open a scope with its prelude at this point; yields its depth."""
        self.scopes.append(Scope(self.e.reserve()))
        try:
            yield len(self.scopes) - 1
        finally:
            self.scopes.pop()

    @contextmanager
    def bound(self, var: SymVar, value: Val, bounds: Interval, *, is_data: bool = False) -> Iterator[None]:
        """Bind a variable to a value in the current scope, inside the `with` block."""
        shadowed = self.variables.get(var)
        self.variables[var] = Variable(value, len(self.scopes) - 1, bounds, is_data)
        try:
            yield
        finally:
            if shadowed is None:
                del self.variables[var]
            else:
                self.variables[var] = shadowed

    def define(self, var: SymVar, value: Val) -> None:
        """Bind a symbol of the program, with its declared bounds, for the whole function."""
        self.variables[var] = Variable(value, 0, (var.lower, var.upper))

    @contextmanager
    def fixed(self, var: SymVar, value: int) -> Iterator[None]:
        """Bind the variable of an unrolled loop to a constant, inside the `with` block."""
        self.constants[var] = value
        try:
            yield
        finally:
            del self.constants[var]

    def resolve(self, expr: SymExpr) -> SymExpr:
        """Substitute variables of unrolled loops, and fold divisions whose quotient is constant by interval
        arithmetic."""
        if self.constants and expr.terms:
            expr = _with_constants(expr, self.constants)
        if any([isinstance(atom, Division) for monomial, _ in expr.terms for atom in monomial]):
            return map_atoms(expr, self._fold_atom)
        return expr

    def _fold_atom(self, atom: SymExpr) -> SymExpr:
        if isinstance(atom, Division) and atom.b.is_const:
            lower, upper = self.bounds(atom.a)
            divisor = atom.b.const
            if lower is not None and upper is not None and divisor > 0 and lower // divisor == upper // divisor:
                quotient = lower // divisor
                return sym(quotient) if isinstance(atom, FloorDiv) else atom.a - quotient * divisor
        return atom

    def varies(self, expr: SymExpr) -> bool:
        """Whether an expression varies over the lanes of the enclosing vectorized loop."""
        return any(self.variables[v].value.lanes for v in expr.free_vars())

    # Interval arithmetic

    def bounds(self, expr: SymExpr) -> Interval:
        """Interval of a resolved expression by the bounds of its variables."""
        lower: int | None = expr.const
        upper: int | None = expr.const
        for monomial, coef in expr.terms:
            low, high = self._monomial_bounds(monomial)
            if coef < 0:
                low, high = high, low
            lower = None if lower is None or low is None else lower + coef * low
            upper = None if upper is None or high is None else upper + coef * high
        return lower, upper

    def _monomial_bounds(self, monomial: Monomial) -> Interval:
        low, high = self._atom_bounds(monomial[0])
        for atom in monomial[1:]:
            next_low, next_high = self._atom_bounds(atom)
            if low is None or next_low is None or low < 0 or next_low < 0:
                return None, None
            low *= next_low
            high = None if high is None or next_high is None else high * next_high
        return low, high

    def _atom_bounds(self, atom: SymExpr) -> Interval:
        if isinstance(atom, SymVar):
            return self.variables[atom].bounds if atom in self.variables else (atom.lower, atom.upper)
        assert isinstance(atom, FloorDiv | FloorMod | Min | Max)
        (al, ah), (bl, bh) = self.bounds(atom.a), self.bounds(atom.b)
        if isinstance(atom, FloorDiv):
            if al is None or al < 0 or bl is None or bl < 0:
                return None, None
            return (0 if bh is None else al // max(bh, 1)), (None if ah is None else ah // max(bl, 1))
        if isinstance(atom, FloorMod):
            return (0, None if bh is None else max(bh - 1, 0)) if bl is not None and bl >= 0 else (None, None)
        pick = min if isinstance(atom, Min) else max
        lows, highs = [x for x in (al, bl) if x is not None], [x for x in (ah, bh) if x is not None]
        needed_lows, needed_highs = (2, 1) if isinstance(atom, Min) else (1, 2)  # how many operand bounds must be known
        return pick(lows) if len(lows) >= needed_lows else None, pick(highs) if len(highs) >= needed_highs else None

    def is_nonneg(self, expr: SymExpr) -> bool:
        lower, _ = self.bounds(expr)
        return lower is not None and lower >= 0

    # Values

    def value(self, expr: SymExpr) -> Val:
        """Emit an expression as i64, a vector where it varies over lanes."""
        return self._sum(self.resolve(expr))

    def lane_mask(self, predicate: str, limit: SymExpr, lanes: int) -> Val:
        """Emit the mask `lane predicate limit` for a uniform limit, hoisted to the limit's scope.

        Compares 32-bit lane numbers, with the limit clamped to their range.
        """
        limit = self.resolve(limit)
        scope = self.scopes[self._depth(limit)]
        key = (predicate, limit, lanes)
        if key not in scope.masks:
            value = self._sum(limit)
            with self.e.place(scope.prelude):
                capped = self.e.intrinsic("smin", value, int_const(lanes))
                clamped = self.e.intrinsic("smax", capped, int_const(-1), hint="limit")
                narrow = self.e.cast("trunc", clamped, "i32")
                scope.masks[key] = self.e.icmp(predicate, lane_numbers(lanes, "i32"), narrow, "mask")
            if not value.is_const:
                self.dynamic_masks.add(scope.masks[key].text)
        return scope.masks[key]

    def pointer(self, buffer: Buffer, offset: SymExpr) -> Val:
        """Emit the address of element `offset`, a resolved, uniform expression."""
        base = self.bases[buffer]
        if offset.is_const and offset.const == 0:
            return base.pointer
        depth = max(base.depth, self._depth(offset))
        known = self.scopes[depth].pointers
        if (buffer, offset) not in known:
            if offset.const != 0:
                start, index = self.pointer(buffer, offset - offset.const), int_const(offset.const)
            else:
                outer, inner = self._split(offset, depth)
                start, index = (
                    (self.pointer(buffer, outer), self._sum(inner)) if inner.terms else (base.pointer, self._sum(outer))
                )
            with self.e.place(self.scopes[depth].prelude):
                text = f"getelementptr {base.elem}, {start}, {index}"
                known[buffer, offset] = self.e.op(text, "ptr", 0, f"{buffer.name}_at")
        return known[buffer, offset]

    def _depth(self, expr: SymExpr) -> int:
        return max([self.variables[v].depth for v in expr.free_vars()], default=0)

    def _split(self, expr: SymExpr, depth: int) -> tuple[SymExpr, SymExpr]:
        """Split a sum into (terms over variables of scopes outside `depth`, terms over variables of that scope)."""
        parts: tuple[list[tuple[Monomial, int]], list[tuple[Monomial, int]]] = [], []
        for term in expr.terms:
            parts[any(self._depth(atom) == depth for atom in term[0])].append(term)
        return from_terms(0, parts[0]), from_terms(0, parts[1])

    def _sum(self, expr: SymExpr) -> Val:
        if not expr.terms:
            return int_const(expr.const)
        depth = self._depth(expr)
        known = self.scopes[depth].values
        if expr not in known:
            known[expr] = self._sum_of(expr, depth)
        return known[expr]

    def _sum_of(self, expr: SymExpr, depth: int) -> Val:
        if len(expr.terms) == 1 and expr.const == 0:
            return self._term(*expr.terms[0], depth)
        if expr.const != 0:
            parts = [self._sum(expr - expr.const), int_const(expr.const)]
        else:
            outer, inner = self._split(expr, depth)
            parts = [self._sum(outer)] if outer.terms else []
            parts += [self._sum(monomial_expr(monomial, coef)) for monomial, coef in inner.terms]
        total = parts[0]
        with self.e.place(self.scopes[depth].prelude):
            for part in parts[1:]:
                total = self.e.binary("add" + self._no_wrap(expr), total, part, "x")
        return total

    def _term(self, monomial: Monomial, coef: int, depth: int) -> Val:
        """Emit coef * product of atoms; the factors of outer scopes are multiplied in their own scope."""
        if len(monomial) == 1 and coef == 1:
            return self._atom(monomial[0], depth)
        outer = [a for a in monomial if self._depth(a) < depth]
        inner = [a for a in monomial if self._depth(a) == depth]
        factors = [self._sum(monomial_expr(tuple(outer), coef))] if outer or coef != 1 else []
        factors += [self._sum(a) for a in inner]
        total = factors[-1]
        with self.e.place(self.scopes[depth].prelude):
            for factor in reversed(factors[:-1]):
                total = self._times(total, factor, self._no_wrap(monomial[0]))
        return total

    def _times(self, a: Val, b: Val, no_wrap: str) -> Val:
        if b.text == "-1":
            return self.e.binary("sub" + no_wrap, int_const(0), a, "x")
        if b.is_const and not b.lanes and int(b.text) > 0 and int(b.text).bit_count() == 1:
            return self.e.binary("shl" + no_wrap, a, int_const(int(b.text).bit_length() - 1), "x")
        return self.e.binary("mul" + no_wrap, a, b, "x")

    def _no_wrap(self, expr: SymExpr) -> str:
        return "" if any(self.variables[v].is_data for v in expr.free_vars()) else " nsw"

    def _atom(self, atom: SymExpr, depth: int) -> Val:
        if isinstance(atom, SymVar):
            return self.variables[atom].value
        assert isinstance(atom, FloorDiv | FloorMod | Min | Max)
        a, b = self._sum(atom.a), self._sum(atom.b)
        with self.e.place(self.scopes[depth].prelude):
            if isinstance(atom, Extremum):
                return self.e.intrinsic("smin" if isinstance(atom, Min) else "smax", a, b, hint="x")
            is_div = isinstance(atom, FloorDiv)
            lower, _ = self.bounds(atom.b)
            positive = lower is not None and lower > 0
            if not self.is_nonneg(atom.a) or lower is None or lower < 0:
                return divide_floor(self.e, a, b, is_div=is_div, is_positive=positive)
            is_small = not any(self.variables[v].is_data for v in atom.free_vars())
            return divide_unsigned(self.e, a, b, is_div=is_div, may_be_zero=not positive, is_small=is_small)


def divide_unsigned(e: Emitter, a: Val, b: Val, *, is_div: bool, may_be_zero: bool, is_small: bool) -> Val:
    """Emit a // b or a % b of nonnegative integers; `is_small`: both below 2**52, as indices of memory are."""
    if (shift := _log2(b)) is not None:
        return e.binary("lshr", a, int_const(shift, a.elem), "x") if is_div else _low_bits(e, a, shift)
    zero = int_const(0, a.elem)
    is_zero = e.icmp("eq", b, zero) if may_be_zero else FALSE
    divisor = e.select(is_zero, int_const(1, a.elem), b)
    if (a.lanes or b.lanes) and is_small:
        result = _divide_lanes(e, a, divisor, is_div=is_div)
    else:
        result = e.binary("udiv" if is_div else "urem", a, divisor, "x")
    return e.select(is_zero, zero, result, "x")


def _divide_lanes(e: Emitter, a: Val, b: Val, *, is_div: bool) -> Val:
    """Divide integer vectors by float64 division, as CPUs lack integer vector division; exact below 2**52."""
    quotient = e.fdiv(e.cast("sitofp", a, "double"), e.cast("sitofp", b, "double"))
    whole = e.cast("fptosi", quotient, "i64", "x")
    return whole if is_div else e.binary("sub", a, e.binary("mul", whole, b), "x")


def divide_floor(e: Emitter, a: Val, b: Val, *, is_div: bool, is_positive: bool) -> Val:
    """Emit a // b or a % b, rounded towards minus infinity; 0 for b == 0, and INT_MIN // -1 wraps."""
    if (shift := _log2(b)) is not None:
        return e.binary("ashr", a, int_const(shift, a.elem), "x") if is_div else _low_bits(e, a, shift)
    zero = int_const(0, a.elem)
    divisor, special = b, None
    if not is_positive and not (b.is_const and b.text not in ("0", "-1")):
        special = e.icmp("ule", e.binary("add", b, int_const(1, a.elem)), int_const(1, a.elem))  # 0 or -1
        divisor = e.select(special, int_const(1, a.elem), b)
    quotient = e.binary("sdiv", a, divisor, "x")
    remainder = e.binary("sub", a, e.binary("mul", quotient, divisor))
    signs = e.binary("xor", remainder, divisor)
    needs_adjustment = e.binary("and", e.icmp("ne", remainder, zero), e.icmp("slt", signs, zero))
    if is_div:
        result = e.binary("add", quotient, e.cast("sext", needs_adjustment, a.elem), "x")
        by_minus_one = e.binary("sub", zero, a)
    else:
        result = e.binary("add", remainder, e.select(needs_adjustment, divisor, zero), "x")
        by_minus_one = zero
    if special is None:
        return result
    return e.select(special, e.select(e.icmp("eq", b, zero), zero, by_minus_one), result, "x")


def _log2(b: Val) -> int | None:
    if not b.is_const or b.lanes:
        return None
    value = int(b.text)
    return value.bit_length() - 1 if value > 0 and value.bit_count() == 1 else None


def _low_bits(e: Emitter, a: Val, count: int) -> Val:
    return e.binary("and", a, int_const((1 << count) - 1, a.elem), "x")


def _with_constants(expr: SymExpr, constants: Mapping[SymVar, int]) -> SymExpr:
    """Fast `substitute` by numbers, as unrolled bodies need it for every index of every copy."""
    if constants.keys().isdisjoint(expr.free_vars()):
        return expr
    terms: list[tuple[Monomial, int]] = []
    for monomial, coef in expr.terms:
        symbolic_atoms: list[SymExpr] = []
        for atom in monomial:
            if isinstance(atom, SymVar) and atom in constants:
                coef *= constants[atom]
            elif not isinstance(atom, SymVar) and not constants.keys().isdisjoint(atom.free_vars()):
                return substitute(expr, constants)
            else:
                symbolic_atoms.append(atom)
        terms.append((tuple(symbolic_atoms), coef))
    return from_terms(expr.const, terms)


def split_lane(expr: SymExpr, lane: SymVar, varies: Mapping[SymVar, bool]) -> tuple[SymExpr, SymExpr] | None:
    """Write an expression as base + stride*lane with uniform base and stride; None where that is impossible."""
    base: list[tuple[Monomial, int]] = []
    stride: list[tuple[Monomial, int]] = []
    for monomial, coef in expr.terms:
        varying = [a for a in monomial if any(varies.get(v, False) for v in a.free_vars())]
        if not varying:
            base.append((monomial, coef))
        elif varying == [lane]:
            factors = list(monomial)
            factors.remove(lane)
            stride.append((tuple(factors), coef))
        else:
            return None
    return from_terms(expr.const, base), from_terms(0, stride)
