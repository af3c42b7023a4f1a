"""The least case that fails as a given one does: delta debugging on the module, its passes and its sizes.

Each reduction proposes smaller cases; the first that fails in the same way takes the case's place, until none does.
What is illegal fails in another way, so proposals need not be careful.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from relaxlite.ir.equality import structural_equal
from relaxlite.ir.expr import (
    Body,
    Call,
    Constant,
    Expr,
    Function,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr, SymVar, substitute, sym
from relaxlite.ir.types import TensorType, defined_symbols, type_symbols
from relaxlite.ir.visitor import Rewriter, bodies, body_uses, expr_symbols, program_calls, substitute_type
from relaxlite.passes.graph.eliminate import eliminate_dead
from tests.fuzz.case import Case, Problem, check

SECONDS = 120.0  # for one failure
Reduction = Callable[[Case], Iterator[Case]]


def shrunk(case: Case, kind: str, seconds: float = SECONDS) -> tuple[Case, Problem | None]:
    """The least case found in that time with a problem of this kind, and the problem."""
    end = time.monotonic() + seconds
    best = check(case)
    if best is None or best.kind != kind:
        return case, best
    if not case.each_pass:  # which pass is to blame, if one is
        checked = replace(case, each_pass=True)
        problem = check(checked)
        if problem is not None:
            case, best, kind = checked, problem, problem.kind
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for reduction in REDUCTIONS:
            refused = 0  # before a success: these are not proposed again at once
            while (proposal := next(itertools.islice(reduction(case), refused, None), None)) is not None:
                if time.monotonic() > end:
                    return case, best
                problem = check(proposal) if size_of(proposal) < size_of(case) else None
                if problem is not None and problem.kind == kind:
                    case, best, changed = proposal, problem, True
                else:
                    refused += 1
    return case, best


def size_of(case: Case) -> tuple[int, int]:
    """Bindings, then letters: what a reduction must bring down, so that none goes round in circles."""
    functions = case.module.functions().values()
    return sum(len(body.bindings()) for f in functions for body in bodies(f)), len(str(case))


# The case


def fewer_sizes(case: Case) -> Iterator[Case]:
    if len(case.styles) > 1:
        yield from (replace(case, styles=(style,)) for style in case.styles)


def fewer_passes(case: Case) -> Iterator[Case]:
    if case.passes is None:
        return
    yield replace(case, passes=None)
    for size in (8, 4, 2, 1):
        for k in range(0, len(case.passes), size):
            yield replace(case, passes=case.passes[:k] + case.passes[k + size :])


# The module


def main_of(case: Case) -> Function:
    main = case.module["main"]
    assert isinstance(main, Function)
    return main


def with_main(case: Case, main: Function) -> Case:
    """Without what nothing uses any more."""
    module = eliminate_dead(case.module.updated({"main": main}))
    main = module["main"]  # type: ignore[assignment]
    used, symbols = set(body_uses(main.body)), _symbols_in(main.body)
    kept = list(main.params)
    for param in main.params:
        rest = [p for p in kept if p is not param]
        bound = {s for p in rest for s in defined_symbols(p.ty)}
        needed = symbols | {s for p in rest for s in type_symbols(p.ty)}
        if rest and param not in used and needed <= bound | _bound_inside(main.body):
            kept = rest
    module = module.updated({"main": replace(main, params=tuple(kept))})
    return replace(case, module=_called_only(module))


def _called_only(module: IRModule) -> IRModule:
    while True:
        called = {call.callee.name for call in program_calls(module)} | {"main"}
        if called >= set(module):
            return module
        module = module.updated({name: None for name in module if name not in called})


def _symbols_in(body: Body) -> set[SymVar]:
    found: set[SymVar] = set(expr_symbols(body.result))
    for inner in bodies(Function((), body)):
        for binding in inner.bindings():
            found.update(type_symbols(binding.var.ty))
            found.update(expr_symbols(binding.value if isinstance(binding, Let) else binding.source))
    return found


def _bound_inside(body: Body) -> set[SymVar]:
    found: set[SymVar] = set()
    for inner in bodies(Function((), body)):
        for binding in inner.bindings():
            if isinstance(binding, MatchShape):
                found.update(defined_symbols(binding.var.ty))
            elif isinstance(binding.value, Loop):
                found.update(s for p in binding.value.params for s in defined_symbols(p.ty))
    return found


def fewer_results(case: Case) -> Iterator[Case]:
    main = main_of(case)
    result = main.body.result
    if isinstance(result, Tuple):
        yield from (with_main(case, replace(main, body=Body(main.body.blocks, field))) for field in result.fields)
        for k in range(len(result.fields)):
            rest = Tuple(result.fields[:k] + result.fields[k + 1 :])
            yield with_main(case, replace(main, body=Body(main.body.blocks, rest)))


def earlier_result(case: Case) -> Iterator[Case]:
    """An intermediate value as the result."""
    main = main_of(case)
    if not isinstance(main.body.result, Tuple):
        for binding in main.body.bindings():
            if isinstance(binding.var.ty, TensorType) and binding.var.ty.shape is not None:
                yield with_main(case, replace(main, body=Body(main.body.blocks, binding.var)))


class _Edit(Rewriter):
    """Puts leaves, or the insides of branches, in the place of variables."""

    def __init__(self, places: dict[Var, Expr | Body]) -> None:
        super().__init__()
        self._places = places

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        place = self._places.get(var)
        if not isinstance(place, Body):
            return place
        for binding in place.bindings():
            self.bb.append(binding)
        return place.result

    def match_shape(self, binding: MatchShape) -> Expr | None:
        place = self._places.get(binding.var)
        return None if isinstance(place, Body) else place


def _edited(case: Case, places: dict[Var, Expr | Body], new_params: tuple[Var, ...] = ()) -> Case:
    main = _Edit(places).function(main_of(case))
    return with_main(case, replace(main, params=(*main.params, *new_params)))


def flatter(case: Case) -> Iterator[Case]:
    """A branch in place of an If, the initial values in place of a Loop."""
    for body in bodies(main_of(case)):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else None
            if isinstance(value, If):
                yield _edited(case, {binding.var: value.then_body})
                yield _edited(case, {binding.var: value.else_body})
            if isinstance(value, Loop):
                yield _edited(case, {binding.var: Body((), Tuple(value.inits))})


def values_as_parameters(case: Case) -> Iterator[Case]:
    """A parameter, another value or zeros in place of what a binding computes; later ones first."""
    main = main_of(case)
    known = {s for p in main.params for s in defined_symbols(p.ty)}
    for k, body in enumerate(bodies(main)):
        for binding in reversed(body.bindings()):
            ty = binding.var.ty
            if not isinstance(ty, TensorType) or ty.shape is None:
                continue
            same = [p for p in main.params if p.ty == ty]
            if same:
                yield _edited(case, {binding.var: same[0]})
            elif set(type_symbols(ty)) <= known or (k == 0 and isinstance(binding, MatchShape)):
                param = Var(f"p_{binding.var.name}", ty)
                yield _edited(case, {binding.var: param}, (param,))
            elif not type_symbols(ty):
                yield _edited(case, {binding.var: Constant.of(np.zeros([d.const for d in ty.shape]), ty.dtype)})


def operands_forwarded(case: Case) -> Iterator[Case]:
    """An operand of the same type in place of a call."""
    for body in bodies(main_of(case)):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else None
            if isinstance(value, Call):
                same = [arg for arg in value.args if isinstance(arg, Var) and arg.ty == binding.var.ty]
                yield from (_edited(case, {binding.var: arg}) for arg in same)


# Sizes


class _Substitute(Rewriter):
    """Gives symbols other values, in types, shapes and arguments."""

    def __init__(self, values: dict[SymVar, SymExpr]) -> None:
        super().__init__()
        self._values = values
        self._vars: dict[Var, Var] = {}

    def var(self, var: Var) -> Var:
        ty = substitute_type(var.ty, self._values)
        if ty == var.ty:
            return var
        if var not in self._vars:
            self._vars[var] = Var(var.name, ty, var.loc)
        return self._vars[var]

    def function(self, function: Function) -> Function:
        params = tuple(map(self.var, function.params))
        return replace(function, params=params, body=self.body(function.body))

    def body(self, body: Body) -> Body:
        with self.bb.body() as scope:
            for binding in body.bindings():
                if isinstance(binding, MatchShape):
                    shape = tuple(substitute(d, self._values) for d in binding.shape)
                    source = self.operand(binding.source)
                    self.bb.append(replace(binding, var=self.var(binding.var), source=source, shape=shape))
                else:
                    self.bb.append(Let(self.var(binding.var), self.operand(binding.value)))
            self.bb.result(self.operand(body.result))
        return self.bb.finish(scope)

    def operand(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            return self.var(expr)
        if isinstance(expr, ShapeValue):
            return ShapeValue(tuple(substitute(v, self._values) for v in expr.values))
        expr = super().operand(expr)
        if isinstance(expr, Call):
            sizes = tuple(substitute(s, self._values) for s in expr.sym_args)
            return replace(expr, sym_args=sizes, ty=substitute_type(expr.ty, self._values))
        if isinstance(expr, If):
            return replace(expr, ty=substitute_type(expr.ty, self._values))
        if isinstance(expr, Loop):
            params = tuple(map(self.var, expr.params))
            return replace(expr, params=params, ty=substitute_type(expr.ty, self._values))
        return expr


def simpler_symbols(case: Case) -> Iterator[Case]:
    """A constant, another symbol, or one of fewer facts in place of a symbol."""
    main = main_of(case)
    symbols = list(dict.fromkeys(s for p in main.params for s in defined_symbols(p.ty)))
    for symbol in symbols:
        others: list[SymExpr] = [sym(1), sym(2), sym(3), sym(0), *(s for s in symbols if s is not symbol)]
        if (symbol.lower, symbol.upper, symbol.divisor) != (0, None, 1):
            others.insert(0, SymVar(symbol.name))
        for other in others:
            yield with_main(case, _Substitute({symbol: other}).function(main))


def simpler_constants(case: Case) -> Iterator[Case]:
    """Ones, then rounded values, in place of a constant."""
    main = main_of(case)
    constants: dict[Constant, None] = {}
    for body in bodies(main):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else None
            if isinstance(value, Call):
                constants.update(dict.fromkeys(a for a in value.args if isinstance(a, Constant) and a.value.size > 1))
    for constant in constants:
        for made in (np.ones_like(constant.value), np.round(constant.value.astype(np.float64))):
            other = Constant.of(made.astype(constant.value.dtype).reshape(constant.value.shape), constant.ty.dtype)
            if other.value.tobytes() != constant.value.tobytes():
                yield with_main(case, _Constants(constant, other).function(main))


class _Constants(Rewriter):
    def __init__(self, old: Constant, new: Constant) -> None:
        super().__init__()
        self._old, self._new = old, new

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, Call) and self._old in value.args:
            return replace(value, args=tuple(self._new if a is self._old else a for a in value.args))
        return None


def without_dead_code(case: Case) -> Iterator[Case]:
    smaller = with_main(case, main_of(case))
    if not structural_equal(smaller.module, case.module):
        yield smaller


REDUCTIONS: tuple[Reduction, ...] = (
    fewer_results,
    without_dead_code,
    fewer_sizes,
    fewer_passes,
    flatter,
    earlier_result,
    values_as_parameters,
    operands_forwarded,
    simpler_symbols,
    simpler_constants,
)
