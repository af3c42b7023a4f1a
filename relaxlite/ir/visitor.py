"""Traversal and rewriting of graph-level functions; ir/program_visitor.py is the counterpart for tensor programs.

Rewriters return the same object if nothing changes, so callers detect changes by `is`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import is_

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import (
    Binding,
    Body,
    Call,
    Constant,
    Expr,
    Function,
    GlobalVar,
    If,
    Leaf,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import (
    TensorProgram,
)
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, substitute
from relaxlite.ir.types import ShapeType, TensorType, TupleType, Type, type_symbols


def bodies(function: Function) -> Iterator[Body]:
    """Yield the function's body and all nested bodies, outer first."""
    return _nested(function.body)


def _nested(body: Body) -> Iterator[Body]:
    yield body
    for binding in body.bindings():
        if isinstance(binding, Let):
            for inner in inner_bodies(binding.value):
                yield from _nested(inner)


def inner_bodies(expr: Expr) -> tuple[Body, ...]:
    """Bodies of an If or Loop; none for other expressions."""
    if isinstance(expr, If):
        return (expr.then_body, expr.else_body)
    return (expr.body,) if isinstance(expr, Loop) else ()


def operands(expr: Expr) -> tuple[Expr, ...]:
    """Direct operands of an expression, without those in nested bodies; a leaf has none."""
    if isinstance(expr, Call):
        return (*expr.args, expr.callee) if isinstance(expr.callee, Var) else expr.args
    if isinstance(expr, Tuple):
        return expr.fields
    if isinstance(expr, TupleGetItem):
        return (expr.value,)
    if isinstance(expr, If):
        return (expr.cond,)
    if isinstance(expr, Loop):
        return (*expr.inits, expr.cond)
    return ()


def used_vars(expr: Expr) -> Iterator[Var]:
    """Yield every use of a variable in an expression, nested bodies included."""
    if isinstance(expr, Var):
        yield expr
    for operand in operands(expr):
        yield from used_vars(operand)
    for body in inner_bodies(expr):
        yield from body_uses(body)


def body_uses(body: Body) -> Iterator[Var]:
    """Yield every use of a variable in a body, including uses of variables that it binds."""
    for binding in body.bindings():
        yield from used_vars(binding.value if isinstance(binding, Let) else binding.source)
    yield from used_vars(body.result)


def expr_symbols(expr: Expr) -> tuple[SymVar, ...]:
    """Symbols of an expression: in shape values, symbolic arguments, operands and its type."""
    symbols: dict[SymVar, None] = {}
    exprs: list[SymExpr] = list(expr.values) if isinstance(expr, ShapeValue) else []
    if isinstance(expr, Call):
        exprs.extend(expr.sym_args)
    for e in exprs:
        symbols.update(dict.fromkeys(e.free_vars()))
    for operand in operands(expr):
        symbols.update(dict.fromkeys(expr_symbols(operand)))
    symbols.update(dict.fromkeys(type_symbols(expr.ty)))
    return tuple(symbols)


def map_functions(module: IRModule, fn: Callable[[Function], Function]) -> IRModule:
    """Replace every graph-level function f of a module by fn(f)."""
    return module.updated({name: fn(f) for name, f in module.functions().items()})


def map_programs(module: IRModule, fn: Callable[[TensorProgram], TensorProgram]) -> IRModule:
    """Replace every tensor program p of a module by fn(p)."""
    return module.updated({name: fn(p) for name, p in module.programs().items()})


def program_calls(module: IRModule, names: Iterable[str] | None = None) -> list[Call]:
    """Calls of definitions of the module, in the functions of these names (None: all), nested bodies included."""
    functions = module.functions()
    within = functions.values() if names is None else [functions[name] for name in names]
    bindings = [binding for f in within for body in bodies(f) for binding in body.bindings()]
    values = [binding.value for binding in bindings if isinstance(binding, Let)]
    return [v for v in values if isinstance(v, Call) and isinstance(v.callee, GlobalVar)]


class Rewriter:
    """Rewriter of functions, binding by binding. Subclasses override `rewrite`, and `match_shape` if needed.

    `bb` is the builder of the new function: an override may emit further bindings before it returns.
    """

    def __init__(self, module: IRModule | None = None) -> None:
        self.bb = BlockBuilder(module)
        self.env: dict[Var, Expr] = {}
        self.changed = False

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        """Replacement of `value`, whose operands are already rewritten; None keeps the value.

        A leaf as replacement also replaces all uses of `var`, and the binding is removed.
        """
        return None

    def may_rewrite(self, value: Expr) -> bool:
        """Whether `rewrite` or `match_shape` may change a binding of this value. A function without such is skipped."""
        return True

    def match_shape(self, binding: MatchShape) -> Expr | None:
        """Leaf that replaces the variable of a MatchShape; None keeps the binding."""
        return None

    def function(self, function: Function) -> Function:
        """Rewrite a function; the same object if nothing changes."""
        self.changed = False
        bindings = (binding for body in bodies(function) for binding in body.bindings())
        if not any(self.may_rewrite(b.value if isinstance(b, Let) else b.source) for b in bindings):
            return function
        body = self.body(function.body)
        return replace(function, body=body) if self.changed else function

    def body(self, body: Body) -> Body:
        """Rewrite a body into a new one."""
        with self.bb.body() as scope:
            for binding in body.bindings():
                self._binding(binding)
            self.bb.result(self.operand(body.result))
        return self.bb.finish(scope)

    def _binding(self, binding: Binding) -> None:
        if isinstance(binding, MatchShape):
            self._match_shape(binding)
            return
        self.bb.loc = getattr(binding.value, "loc", None)
        old = self.operand(binding.value)
        new = self.rewrite(binding.var, old)
        if new is not None and new is not old:
            self.changed = True
        self.bind(binding.var, old if new is None else new)
        self.bb.loc = None

    def bind(self, var: Var, value: Expr) -> None:
        """Bind `value` to `var`, or replace uses of `var` if the value is a leaf or of another type."""
        if isinstance(value, Leaf):
            self.env[var] = value
        elif value.ty is var.ty or value.ty == var.ty:
            self.bb.emit_let(var, value)
        else:
            self.env[var] = self.bb.emit(value, var.name)

    def _match_shape(self, binding: MatchShape) -> None:
        source = self.operand(binding.source)
        rewritten = binding if source is binding.source else replace(binding, source=source)
        leaf = self.match_shape(rewritten)
        if leaf is None:
            self.bb.append(rewritten)
        else:
            self.changed = True
            self.env[binding.var] = leaf

    def operand(self, expr: Expr) -> Expr:
        """Replace variables in an expression and rewrite nested bodies; the same object if nothing changes."""
        if isinstance(expr, Var):
            return self.env.get(expr, expr)
        if isinstance(expr, Call):
            args = self._operands(expr.args)
            callee = expr.callee
            if isinstance(callee, Var):
                new_callee = self.env.get(callee, callee)
                assert isinstance(new_callee, Var | GlobalVar)
                callee = new_callee
            if args is expr.args and callee is expr.callee:
                return expr
            return replace(expr, args=args, callee=callee)
        if isinstance(expr, Tuple):
            fields = self._operands(expr.fields)
            return expr if fields is expr.fields else Tuple(fields)
        if isinstance(expr, TupleGetItem):
            value = self.operand(expr.value)
            return expr if value is expr.value else TupleGetItem(value, expr.index)
        if isinstance(expr, If):
            then_body, else_body = self.body(expr.then_body), self.body(expr.else_body)
            return replace(expr, cond=self.operand(expr.cond), then_body=then_body, else_body=else_body)
        if isinstance(expr, Loop):
            inits, cond = self._operands(expr.inits), self.operand(expr.cond)
            return replace(expr, inits=inits, cond=cond, body=self.body(expr.body))
        return expr

    def _operands(self, exprs: tuple[Expr, ...]) -> tuple[Expr, ...]:
        env, new = self.env, [*exprs]
        for k, e in enumerate(exprs):
            new[k] = env.get(e, e) if isinstance(e, Var) else e if isinstance(e, Constant) else self.operand(e)
        if all(map(is_, new, exprs)):
            return exprs
        self.changed = True
        return tuple(new)


def substitute_type(ty: Type, values: Mapping[SymVar, IntLike]) -> Type:
    """Substitute symbols in a type."""
    if isinstance(ty, TensorType) and ty.shape is not None:
        return TensorType(tuple(substitute(d, values) for d in ty.shape), ty.dtype, ty.rank)
    if isinstance(ty, ShapeType) and ty.values is not None:
        return ShapeType(tuple(substitute(d, values) for d in ty.values), ty.rank)
    if isinstance(ty, TupleType):
        return TupleType(tuple(substitute_type(f, values) for f in ty.fields))
    return ty
