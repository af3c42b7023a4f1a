"""Replace a matched tensor by the source of its MatchShape, so that producer and consumer may fuse.

    b = match_shape(a, (m, 4))             _ = match_shape(shape(n), (m))
    c = relu(b)                     =>     c = relu(a)                  with n in place of m from there on

This applies to a tensor `a` of the known shape (n, 4) where no run-time check remains: m is defined by this match, and
n provably satisfies the bounds and the divisor of m. A size that must be compared at run time keeps its check and the
matched tensor, and so does a symbol that abbreviates a long expression.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import (
    Binding,
    Block,
    Body,
    Call,
    Expr,
    Function,
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
from relaxlite.ir.simplify import has_many_atoms
from relaxlite.ir.symbolic import SymExpr, SymVar, substitute
from relaxlite.ir.types import ShapeType, TensorType, type_symbols
from relaxlite.ir.visitor import bodies, map_functions, substitute_type
from relaxlite.passes.context import PassContext

_ANALYZER = Analyzer()


def resolve_matches(module: IRModule, context: PassContext) -> IRModule:
    """Replace uses of a matched tensor by the source of its MatchShape, which then no longer separates programs."""

    def resolved(function: Function) -> Function:
        """The function with matched tensors replaced."""
        if not any(isinstance(b, MatchShape) for body in bodies(function) for b in body.bindings()):
            return function
        return replace(function, body=_Resolve(function, context).body(function.body))

    return map_functions(module, resolved)


class _Resolve:
    """Rewriter of one function in order of bindings, with the replacements of symbols and variables so far."""

    def __init__(self, function: Function, context: PassContext) -> None:
        self._context = context
        self._defined = {s for p in function.params for s in type_symbols(p.ty)}
        loops = [
            b.value
            for body in bodies(function)
            for b in body.bindings()
            if isinstance(b, Let) and isinstance(b.value, Loop)
        ]
        self._in_loops = {s for loop in loops for p in loop.params for s in type_symbols(p.ty)}
        self._symbols: dict[SymVar, SymExpr] = {}
        self._vars: dict[Expr, Expr] = {}

    def body(self, body: Body) -> Body:
        blocks = tuple(
            Block(tuple(result for b in block.bindings for result in self._binding(b)), block.is_dataflow)
            for block in body.blocks
        )
        return Body(tuple(b for b in blocks if b.bindings), self._expr(body.result))

    def _binding(self, binding: Binding) -> tuple[Binding, ...]:
        if isinstance(binding, Let):
            value = self._expr(binding.value)
            return (Let(self._var(binding.var), value),)
        source, shape = self._expr(binding.source), self._dims(binding.shape)
        match = replace(binding, source=source, shape=shape)
        values = self._resolved(match) if isinstance(source.ty, TensorType) else None
        self._defined.update(v for d in shape for v in d.free_vars())
        if values is None:
            return (replace(match, var=self._var(binding.var)),)
        self._symbols.update(values)
        self._vars[binding.var] = source
        if not values:
            return ()
        symbols = tuple(values)
        var = Var(binding.var.name, ShapeType(symbols, len(symbols)), binding.var.loc)
        return (MatchShape(var, ShapeValue(tuple(values.values())), symbols, binding.loc),)

    def _resolved(self, match: MatchShape) -> dict[SymVar, SymExpr] | None:
        """Values of the symbols that a match defines, if they make both shapes equal; else None."""
        ty = match.source.ty
        assert isinstance(ty, TensorType)
        reason, values = None, dict[SymVar, SymExpr]()
        if ty.shape is None:
            reason = "only data tells the shape of its source"
        for size, dim in zip(ty.shape or (), match.shape, strict=False):
            if isinstance(dim, SymVar) and dim not in self._defined and dim not in values:
                values[dim] = size
                if dim in self._in_loops:
                    reason = f"a loop binds {dim.name} anew"
                elif not _satisfies_declaration(dim, size):
                    reason = f"{dim.name} has bounds that are not proven of {size}"
                elif has_many_atoms(size):
                    reason = f"{dim.name} is short for {size}"
            elif not _ANALYZER.can_prove_equal(size, substitute(dim, values)):
                reason = f"{size} and {dim} are equal only by this check"
        subject = f"{match.var.name} as its source"
        self._context.decide("resolve_matches", subject, reason is None, reason or "nothing is left to check")
        return values if reason is None else None

    def _dims(self, dims: tuple[SymExpr, ...]) -> tuple[SymExpr, ...]:
        return tuple(substitute(d, self._symbols) for d in dims)

    def _var(self, var: Var) -> Var:
        ty = substitute_type(var.ty, self._symbols) if self._symbols else var.ty
        if ty == var.ty:
            return var
        result = Var(var.name, ty, var.loc)
        self._vars[var] = result
        return result

    def _expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            return self._vars.get(expr, expr)
        if isinstance(expr, ShapeValue):
            return ShapeValue(self._dims(expr.values))
        if isinstance(expr, Tuple):
            return Tuple(tuple(map(self._expr, expr.fields)))
        if isinstance(expr, TupleGetItem):
            return TupleGetItem(self._expr(expr.value), expr.index)
        if isinstance(expr, Call):
            callee = self._expr(expr.callee) if isinstance(expr.callee, Var) else expr.callee
            args, ty = tuple(map(self._expr, expr.args)), substitute_type(expr.ty, self._symbols)
            return replace(expr, callee=callee, args=args, sym_args=self._dims(expr.sym_args), ty=ty)  # type: ignore[arg-type]
        if isinstance(expr, If):
            then_body, else_body = self._branch(expr.then_body), self._branch(expr.else_body)
            ty = substitute_type(expr.ty, self._symbols)
            return replace(expr, cond=self._expr(expr.cond), then_body=then_body, else_body=else_body, ty=ty)
        if isinstance(expr, Loop):
            inits, cond = tuple(map(self._expr, expr.inits)), self._expr(expr.cond)
            return replace(expr, inits=inits, cond=cond, body=self._branch(expr.body))
        return expr

    def _branch(self, body: Body) -> Body:
        """Rewrite a nested body; its definitions end with it."""
        outer = self._symbols, self._vars, self._defined
        self._symbols, self._vars, self._defined = dict(self._symbols), dict(self._vars), set(self._defined)
        result = self.body(body)
        self._symbols, self._vars, self._defined = outer
        return result


def _satisfies_declaration(symbol: SymVar, value: SymExpr) -> bool:
    """Whether a value provably satisfies the bounds and the divisor of a symbol."""
    if symbol.lower is not None and symbol.lower > 0 and not _ANALYZER.can_prove_le(symbol.lower, value):
        return False
    if symbol.upper is not None and not _ANALYZER.can_prove_le(value, symbol.upper):
        return False
    return symbol.divisor == 1 or _ANALYZER.can_prove_divisible(value, symbol.divisor)
