"""Parser of graph-level functions: text -> `Function`. The docstring of printer.py defines the syntax.

Types come from annotations; none are inferred. Omitted attributes of an op get their defaults.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.expr import (
    Attrs,
    Binding,
    Block,
    Body,
    Call,
    Constant,
    Expr,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.op import Op, all_ops, get_op
from relaxlite.ir.parser_base import CallArguments, ParserBase, is_call
from relaxlite.ir.types import UNIT, TensorType, Type

_NOT_BINDING = "expected `y: Tensor(...) = op(x)`, a call, `y: T` before an `if`, @loop, or a `with` block"


class FunctionParser(ParserBase):
    """Parser of one function. `scope` maps names to variables and symbols; `names` maps identifiers to definitions."""

    def __init__(
        self, lines: list[str], scope: dict[str, object], names: dict[str, str], constants: Sequence[Constant]
    ) -> None:
        super().__init__(lines)
        self.scope = scope
        self._names = names
        self._constants = constants

    def function(self, node: ast.FunctionDef, attrs: Attrs) -> Function:
        """Parse a function definition. Raises ParseError."""
        params = self._params(node)
        return Function(params, self._body(node.body, node, None), attrs)

    def _params(self, node: ast.FunctionDef) -> tuple[Var, ...]:
        return tuple(self._var(arg, arg.arg, arg.annotation, None) for arg in self.parameters(node))

    def _var(self, node: ast.AST, ident: str, annotation: ast.expr | None, loc: str | None) -> Var:
        """Define a variable annotated `T` or `var(T, name=..., loc=...)`; `loc` is the default source location."""
        if annotation is None:
            self.fail(node, f"{ident} needs a type: {ident}: Tensor(...)")
        name = ident
        if is_call(annotation, "var"):
            arguments = self.arguments(annotation)
            own_name, own_loc = arguments.take("name"), arguments.take("loc")
            self.finish(arguments, (1,), "var")
            name = ident if own_name is None else self.string(own_name)
            loc = loc if own_loc is None else self._loc(own_loc)
            annotation = arguments.positional[0]
        return self.define(node, ident, Var(name, self.type(annotation), loc))

    def _loc(self, node: ast.expr | None) -> str | None:
        is_none = node is None or (isinstance(node, ast.Constant) and node.value is None)
        return None if is_none else self.optional_string(node)

    # bodies

    def _body(self, stmts: list[ast.stmt], parent: ast.AST, target: str | None) -> Body:
        """Parse a body that ends with an assignment to `target`, or with `return` if `target` is None."""
        *rest, last = stmts
        blocks: list[Block] = []
        open_stmts: list[ast.stmt] = []
        for stmt in rest:
            if not isinstance(stmt, ast.With):
                open_stmts.append(stmt)
                continue
            self._close_block(open_stmts, blocks)
            open_stmts = []
            blocks.append(Block(self._bindings(stmt.body), self._is_dataflow(stmt)))
        self._close_block(open_stmts, blocks)
        if target is None and isinstance(last, ast.Return) and last.value is not None:
            return Body(tuple(blocks), self._result(last.value))
        if target is not None and isinstance(last, ast.Assign) and self.target(last) == target:
            return Body(tuple(blocks), self._result(last.value))
        expected = "return value" if target is None else f"{target} = value"
        self.fail(last, f"this body must end with `{expected}`")

    def _close_block(self, open_stmts: list[ast.stmt], blocks: list[Block]) -> None:
        bindings = self._bindings(open_stmts)
        if bindings:
            blocks.append(Block(bindings, is_dataflow=False))

    def _is_dataflow(self, stmt: ast.With) -> bool:
        call = stmt.items[0].context_expr
        if len(stmt.items) != 1 or not (is_call(call, "dataflow") or is_call(call, "block")):
            self.fail(stmt, "expected `with dataflow():` or `with block():`")
        return is_call(call, "dataflow")

    def _result(self, node: ast.expr) -> Expr:
        return self._value(node, None)

    def _bindings(self, stmts: Iterable[ast.stmt]) -> tuple[Binding, ...]:
        bindings: list[Binding] = []
        declaration: ast.AnnAssign | None = None
        for stmt in stmts:
            if isinstance(stmt, ast.If):
                if declaration is None:
                    self.fail(stmt, "the result of an `if` is announced in front of it: `y: Tensor(...)`")
                bindings.append(self._if(declaration, stmt))
                declaration = None
            elif declaration is not None:
                self.fail(declaration, "this announces the result of an `if`, which must follow")
            elif isinstance(stmt, ast.AnnAssign) and stmt.value is None:
                declaration = stmt
            elif not self.symbol_statement(stmt) and not isinstance(stmt, ast.Pass):
                bindings.append(self._binding(stmt))
        if declaration is not None:
            self.fail(declaration, "this announces the result of an `if`, which must follow")
        return tuple(bindings)

    def _binding(self, stmt: ast.stmt) -> Binding:
        if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name) and stmt.value is not None:
            if is_call(stmt.value, "match_shape"):
                return self._match_shape(stmt, stmt.target.id, stmt.value)
            ty = self._annotated_type(stmt.annotation)
            value = self._value(stmt.value, ty)
            loc = value.loc if isinstance(value, Call) else None
            return Let(self._var(stmt, stmt.target.id, stmt.annotation, loc), value)
        if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
            call = self._call(stmt.value, UNIT)
            return Let(Var("_", UNIT, call.loc), call)
        if isinstance(stmt, ast.FunctionDef):
            return self._loop(stmt)
        if isinstance(stmt, ast.Assign):
            self.fail(stmt, f"{ast.unparse(stmt.targets[0])} needs a type: `y: Tensor(...) = ...`")
        self.fail(stmt, _NOT_BINDING)

    def _annotated_type(self, annotation: ast.expr) -> Type:
        return self.type(annotation.args[0] if is_call(annotation, "var") and annotation.args else annotation)

    def _match_shape(self, stmt: ast.AnnAssign, ident: str, call: ast.Call) -> MatchShape:
        arguments = self.arguments(call)
        loc = self._loc(arguments.take("loc"))
        self.finish(arguments, (2,), "match_shape")
        source, shape = self._value(call.args[0], None), self.exprs(call.args[1])
        return MatchShape(self._var(stmt, ident, stmt.annotation, loc), source, shape, loc)

    def _if(self, declaration: ast.AnnAssign, stmt: ast.If) -> Let:
        if not isinstance(declaration.target, ast.Name):
            self.fail(declaration, "only one plain name can be announced")
        ident, ty = declaration.target.id, self._annotated_type(declaration.annotation)
        test, loc = stmt.test, None
        if is_call(test, "branch"):
            arguments = self.arguments(test)
            ty, loc = self._type_or(arguments.take("ty"), ty), self._loc(arguments.take("loc"))
            self.finish(arguments, (1,), "branch")
            test = arguments.positional[0]
        if not stmt.orelse:
            self.fail(stmt, f"both branches must give {ident} a value; `else:` is missing")
        cond = self._value(test, None)
        bodies = [self._body(stmts, stmt, ident) for stmts in (stmt.body, stmt.orelse)]
        return Let(self._var(declaration, ident, declaration.annotation, loc), If(cond, bodies[0], bodies[1], ty, loc))

    def _loop(self, node: ast.FunctionDef) -> Let:
        call = node.decorator_list[0] if len(node.decorator_list) == 1 else None
        if not isinstance(call, ast.Call) or not is_call(call, "loop") or not call.args or node.returns is None:
            self.fail(node, "a loop is written `@loop(cond, x)` and `def result(x_1: T) -> Tuple(T):`")
        arguments = self.arguments(call)
        ty = self._type_or(arguments.take("ty"), self._annotated_type(node.returns))
        loc = self._loc(arguments.take("loc"))
        self.finish(arguments, (len(call.args),), "loop")
        cond, *inits = [self._value(arg, None) for arg in call.args]
        params = self._params(node)
        body = self._body(node.body, node, None)
        return Let(self._var(node, node.name, node.returns, loc), Loop(params, tuple(inits), cond, body, ty, loc))

    def _type_or(self, node: ast.expr | None, default: Type) -> Type:
        return default if node is None else self.type(node)

    # expressions

    def _value(self, node: ast.expr, ty: Type | None) -> Expr:
        """Parse an expression; `ty` is the type of a call without `ty=`."""
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Tuple):
            return Tuple(tuple(self._value(item, None) for item in node.elts))
        if isinstance(node, ast.Subscript):
            index = self.integer(node.slice)
            if isinstance(node.value, ast.Name) and node.value.id == "constants":
                return self._table_constant(node, index)
            return TupleGetItem(self._value(node.value, None), index)
        if is_call(node, "const"):
            return self._const(node)
        if is_call(node, "shape"):
            arguments = self.arguments(node)
            self.finish(arguments, (len(arguments.positional),), "shape")
            return ShapeValue(tuple(map(self.expr, arguments.positional)))
        if is_call(node, "global_var"):
            return GlobalVar(self.string(self.arguments(node).positional[0]))
        if isinstance(node, ast.Call):
            return self._call(node, ty)
        if isinstance(node, ast.Constant):
            self.fail(node, 'a constant needs a dtype: const(1.0, "float32")')
        self.fail(node, "expected a variable, const(...), constants[k], shape(...), a tuple, x[k] or a call")

    def _name(self, node: ast.Name) -> Expr:
        if node.id in self._names and node.id not in self.scope:
            return GlobalVar(self._names[node.id])
        if node.id not in self.scope:
            known = [name for name, value in self.scope.items() if isinstance(value, Var)]
            self.fail(node, f"unknown variable {node.id}", near=(node.id, [*known, *self._names]))
        return self.lookup(node, Var, "variable")

    def _table_constant(self, node: ast.expr, index: int) -> Constant:
        if not 0 <= index < len(self._constants):
            self.fail(node, f"constants[{index}] is not in the table, which has {len(self._constants)} rows")
        return self._constants[index]

    def _const(self, node: ast.Call) -> Constant:
        arguments = self.arguments(node)
        name, shape = self.optional_string(arguments.take("name")), arguments.take("shape")
        self.finish(arguments, (2,), "const")
        numbers, dtype = self._numbers(node.args[0]), self.dtype(node.args[1])
        try:
            array = np.array(numbers, dtypes.to_numpy(dtype))
            if shape is not None:
                array = array.reshape(tuple(map(self.integer, self.items(shape))))
        except (ValueError, TypeError, OverflowError) as error:
            self.fail(node, f"this is no constant of {dtype}: {error}")
        return Constant(array, TensorType.of(array.shape, dtype), name)

    def _numbers(self, node: ast.expr) -> object:
        return [self._numbers(item) for item in node.elts] if isinstance(node, ast.List) else self.literal(node)

    def _call(self, node: ast.Call, default: Type | None) -> Call:
        arguments = self.arguments(node)
        callee = self._callee(node, arguments) if is_call(node, "call") else self._op(node.func)
        ty, loc = arguments.take("ty"), self._loc(arguments.take("loc"))
        sym = arguments.take("sym")
        sym_args = () if sym is None else self.exprs(sym)
        attrs = Attrs(self.attrs(arguments))
        if isinstance(callee, Op):
            try:
                attrs = callee.check_attrs(attrs)
            except InvalidArgumentError as error:
                self.fail(node, str(error))
        args = tuple(self._value(arg, None) for arg in arguments.positional)
        if ty is None and default is None:
            self.fail(node, "a call inside another expression must be bound to a variable first, or say its ty=...")
        return Call(callee, args, attrs, sym_args, self.type(ty) if ty is not None else default or UNIT, loc)

    def _callee(self, node: ast.Call, arguments: CallArguments) -> GlobalVar | Var:
        if arguments.positional:
            callee = self._value(arguments.positional.pop(0), None)
            if isinstance(callee, GlobalVar | Var):
                return callee
        self.fail(node, "call takes what to call first: a definition of the module, or a variable")

    def _op(self, func: ast.expr) -> Op:
        name = self.string(func.args[0]) if is_call(func, "op") and len(func.args) == 1 else self._dotted(func)
        try:
            return get_op(name)
        except KeyError:
            known = [op.name for op in all_ops()]
            hint = "" if known else " (no op is registered: import relaxlite.ir.ops)"
            self.fail(func, f"unknown op {name}{hint}", near=(name, [*known, "call", "const", "shape", "match_shape"]))

    def _dotted(self, func: ast.expr) -> str:
        if isinstance(func, ast.Name):
            return func.id
        if isinstance(func, ast.Attribute):
            return f"{self._dotted(func.value)}.{func.attr}"
        self.fail(func, "expected the name of an op")
