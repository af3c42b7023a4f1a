"""BlockBuilder: build functions of a module binding by binding, typed and in A-normal form.

    bb = BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", x=TensorType.of((n, 4), "float32")) as (x,):
        y = bb.emit(ops.relu(bb.emit(ops.add(x, x))))
        bb.result(y)
    module = bb.module()

The builder also tracks the *symbolic value* of small integer tensors (`known_value`): it evaluates shape computations
such as Shape -> Gather -> Concat element by element, so that no run-time tensor is needed for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.expr import (
    NO_ATTRS,
    Array,
    Attrs,
    Binding,
    Block,
    Body,
    Call,
    Constant,
    ControlFlow,
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
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, sym, syms
from relaxlite.ir.types import ShapeType, TensorType, TupleType, Type

MAX_KNOWN_ELEMENTS = 1024  # larger integer tensors are data, not shapes


class _OpenBody:
    """Body under construction: closed blocks, bindings of the open block, result."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.open: list[Binding] = []
        self.result: Expr | None = None

    def close_block(self, is_dataflow: bool) -> None:
        if self.open:
            self.blocks.append(Block(tuple(self.open), is_dataflow))
            self.open = []


class BlockBuilder:
    """Builder of an IRModule; see the module docstring."""

    def __init__(self, module: IRModule | None = None) -> None:
        self._definitions: dict[str, Definition] = dict(module or {})
        self._scopes: list[_OpenBody] = []
        self._known: dict[Var, Array] = {}
        self._values: dict[Var, Expr] = {}
        self._names: dict[str, int] = {}
        self.loc: str | None = None  # source location of the next emitted bindings

    # names

    def unique_name(self, hint: str) -> str:
        """Name that is unique among the variables of this builder: `hint`, or hint_1, hint_2, ..."""
        count = self._names.get(hint)
        self._names[hint] = 0 if count is None else count + 1
        return hint if count is None else self.unique_name(f"{hint}_{count + 1}")

    def symbol(self, name: str, *, lower: int | None = 0, upper: int | None = None, divisor: int = 1) -> SymVar:
        """Create a symbol. Its bounds and divisor are checked at run time wherever it is bound."""
        return SymVar(name, lower=lower, upper=upper, divisor=divisor)

    # functions and bodies

    @contextmanager
    def function(self, name: str, /, attrs: Attrs = NO_ATTRS, **params: Type) -> Iterator[tuple[Var, ...]]:
        """Build a function with new parameters of these types; end its body with `result`."""
        variables = tuple(Var(self.unique_name(p), ty) for p, ty in params.items())
        with self.function_with_params(name, variables, attrs):
            yield variables

    @contextmanager
    def function_with_params(self, name: str, params: tuple[Var, ...], attrs: Attrs = NO_ATTRS) -> Iterator[None]:
        """Build a function with existing parameters; end its body with `result`."""
        with self.body() as scope:
            yield
        self._definitions[name] = Function(params, self.finish(scope), attrs)

    @contextmanager
    def body(self) -> Iterator[_OpenBody]:
        """Open a body of a function, branch or loop. Bindings emitted inside the context go there; see `finish`."""
        scope = _OpenBody()
        self._scopes.append(scope)
        try:
            yield scope
        finally:
            self._scopes.pop()

    def finish(self, scope: _OpenBody) -> Body:
        """Close a body. Raises InvalidArgumentError if `result` was not called."""
        if scope.result is None:
            raise InvalidArgumentError("a body needs a result: call bb.result(expr) inside it")
        scope.close_block(is_dataflow=True)
        return Body(tuple(scope.blocks), scope.result)

    def result(self, expr: Expr) -> None:
        """Set the result of the body under construction."""
        value = Tuple(tuple(self.leaf(f) for f in expr.fields)) if isinstance(expr, Tuple) else self.leaf(expr)
        self._scope.result = value

    @property
    def _scope(self) -> _OpenBody:
        if not self._scopes:
            raise InvalidArgumentError("nothing is being built: emit inside `with bb.function(...)`")
        return self._scopes[-1]

    def define(self, name: str, definition: Definition) -> GlobalVar:
        """Add a tensor program, extern function or function, under `name` or a unique name derived from it."""
        unique, count = name, 0
        while unique in self._definitions:
            count += 1
            unique = f"{name}_{count}"
        self._definitions[unique] = definition
        return GlobalVar(unique)

    def module(self, attrs: Attrs = NO_ATTRS) -> IRModule:
        """Module of all definitions so far."""
        return IRModule(self._definitions, attrs)

    # bindings

    def leaf(self, expr: Expr, hint: str = "v") -> Expr:
        """Return the expression if it is a leaf, else a new variable bound to it."""
        return expr if isinstance(expr, Leaf) else self.emit(expr, hint)

    def emit(self, expr: Expr, name: str | None = None) -> Var:
        """Bind an expression to a new variable. Nested operands are bound to variables first."""
        value = self._normalize(expr)
        var = Var(self.unique_name(name or _default_name(value)), value.ty, getattr(value, "loc", None))
        self._append(Let(var, value), is_dataflow=not isinstance(value, ControlFlow))
        self._values[var] = value
        known = self.evaluate(value)
        if known is not None:
            self._known[var] = known
        return var

    def emit_let(self, var: Var, value: Expr) -> Var:
        """Bind an existing variable, so that rewriting passes preserve variables."""
        self._append(Let(var, self._normalize(value)), is_dataflow=not isinstance(value, ControlFlow))
        known = self.evaluate(value)
        if known is not None:
            self._known[var] = known
        return var

    def append(self, binding: Binding) -> None:
        """Append an existing binding unchanged."""
        effect = isinstance(binding, Let) and isinstance(binding.value, ControlFlow)
        self._append(binding, is_dataflow=not effect)

    def match_shape(self, source: Expr, shape: tuple[IntLike, ...] | list[IntLike], name: str | None = None) -> Var:
        """Cast a tensor or shape to this shape, checked at run time; binds symbols that are new."""
        source, dims = self.leaf(source), syms(shape)
        ty: Type = ShapeType(dims, len(dims))
        if isinstance(source.ty, TensorType):
            ty = TensorType(dims, source.ty.dtype, len(dims))
        var = Var(self.unique_name(name or "matched"), ty, self.loc)
        self._append(MatchShape(var, source, dims, self.loc), is_dataflow=True)
        if isinstance(source, Var) and source in self._known:
            self._known[var] = self._known[source]
        return var

    def _append(self, binding: Binding, *, is_dataflow: bool) -> None:
        scope = self._scope
        if is_dataflow:
            scope.open.append(binding)
            return
        scope.close_block(is_dataflow=True)
        scope.open.append(binding)
        scope.close_block(is_dataflow=False)

    def _normalize(self, expr: Expr) -> Expr:
        if isinstance(expr, Call):
            loc = expr.loc or self.loc
            if loc is expr.loc and all(isinstance(arg, Leaf) for arg in expr.args):
                return expr
            args = tuple(self.leaf(a) for a in expr.args)
            return Call(expr.callee, args, expr.attrs, expr.sym_args, expr.ty, loc)
        if isinstance(expr, Tuple):
            return Tuple(tuple(self.leaf(f) for f in expr.fields))
        if isinstance(expr, TupleGetItem):
            return TupleGetItem(self.leaf(expr.value), expr.index)
        return expr

    def bound_value(self, var: Var) -> Expr | None:
        """Expression that `emit` bound to the variable; None for any other variable."""
        return self._values.get(var)

    # symbolic values

    def set_known_value(self, var: Var, values: Array | None) -> None:
        """Set the symbolic elements of a variable, such as symbols that a MatchShape binds; None removes them."""
        if values is None:
            self._known.pop(var, None)
        else:
            self._known[var] = values

    def known_value(self, expr: Expr) -> Array | None:
        """Elements of a small integer tensor as an object array of SymExpr; None if unknown."""
        if isinstance(expr, Constant):
            return _constant_value(expr)
        if isinstance(expr, ShapeValue):
            return _object_array(expr.values, (len(expr.values),))
        return self._known.get(expr) if isinstance(expr, Var) else None

    def known_shape(self, expr: Expr) -> tuple[SymExpr, ...] | None:
        """Elements of an integer vector or scalar as a tuple; None if unknown."""
        value: Any = self.known_value(expr)
        return None if value is None or value.ndim > 1 else tuple(sym(v) for v in value.reshape(-1))

    def evaluate(self, value: Expr) -> Array | None:
        """Evaluate an expression symbolically; None unless the elements follow from those of its operands."""
        if isinstance(value, ShapeValue):
            return self.known_value(value)
        if not isinstance(value, Call) or not _may_be_shape(value.ty) or not isinstance(value.callee, Op):
            return None
        operands = []
        for arg in value.args:
            known: Any = arg if value.callee.name == "shape_of" else self.known_value(arg)
            if known is None:
                return None
            operands.append(tuple(known) if isinstance(arg.ty, ShapeType) else known)
        try:
            result = value.callee.evaluate_symbolic(*operands, **value.attrs)
        except (TypeError, ValueError, IndexError, ZeroDivisionError):  # depends on run-time values
            return None
        if result is None:
            return None
        elements = np.asarray(result, dtype=object)
        return elements if _fits_dtype(elements, value.ty) else None


def _fits_dtype(elements: Array, ty: Type) -> bool:
    """Whether the values fit the dtype of the type. Symbolic values are assumed to fit int32."""
    assert isinstance(ty, TensorType)
    if ty.dtype == "bool":
        return True
    limits = np.iinfo(dtypes.to_numpy(ty.dtype))
    values = [sym(v) for v in elements.reshape(-1).tolist()]
    return all(limits.min <= v.const <= limits.max if v.is_const else ty.dtype in ("int32", "int64") for v in values)


def _may_be_shape(ty: Type) -> bool:
    if not isinstance(ty, TensorType) or ty.shape is None or not (dtypes.is_integer(ty.dtype) or ty.dtype == "bool"):
        return False
    count = 1
    for dim in ty.shape:
        if not dim.is_const:
            return False
        count *= dim.const
    return count <= MAX_KNOWN_ELEMENTS


def _constant_value(constant: Constant) -> Array | None:
    if not _may_be_shape(constant.ty):
        return None
    return _object_array([sym(int(v)) for v in constant.value.reshape(-1)], constant.value.shape)


def _object_array(values: object, shape: tuple[int, ...]) -> Array:
    array = np.empty(shape, dtype=object)
    array.reshape(-1)[:] = values
    return array


def _default_name(expr: Expr) -> str:
    if isinstance(expr, Call):
        return expr.callee.name
    return {TupleGetItem: "item", Tuple: "pair", If: "branch", Loop: "loop"}.get(type(expr), "v")


def result_types(ty: Type) -> tuple[Type, ...]:
    """Types of a call's results: the fields of a tuple type, else the type itself."""
    return ty.fields if isinstance(ty, TupleType) else (ty,)
