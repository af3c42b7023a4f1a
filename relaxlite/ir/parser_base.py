"""Base class of the parsers of functions and programs: errors with location, scope, literals, symbolic integers, types.

The text is parsed by Python's `ast` and never evaluated.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from dataclasses import field
from typing import NoReturn, TypeGuard, TypeVar

from relaxlite import dtypes
from relaxlite.errors import ParseError
from relaxlite.ir.expr import AttrValue
from relaxlite.ir.symbolic import SymExpr, SymVar, floordiv, floormod, smax, smin, sym
from relaxlite.ir.types import FuncType, ObjectType, ShapeType, TensorType, TupleType, Type
from relaxlite.records import dataclass

T = TypeVar("T")
_NAMED_NUMBERS = {"nan": float("nan"), "inf": float("inf")}
_TYPE_NAMES = ("Tensor", "Shape", "Tuple", "Func", "Object")


@dataclass(slots=True)
class CallArguments:
    """Arguments of a call in the text. Parsers remove those that they handle; `finish` rejects the others."""

    call: ast.AST
    positional: list[ast.expr]
    keywords: dict[str, ast.expr] = field(default_factory=dict)

    def take(self, name: str) -> ast.expr | None:
        """Remove and return a keyword argument, if present."""
        return self.keywords.pop(name, None)


class ParserBase:
    """Parser of the constructs that functions and programs share. `scope` maps names to nodes in scope.

    Methods raise ParseError for any other construct.
    """

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.scope: dict[str, object] = {}

    def fail(self, node: ast.AST, message: str, *, near: tuple[str, Iterable[str]] | None = None) -> NoReturn:
        """Raise ParseError at a node. `near`: a misspelled word, and candidates for a hint."""
        raise place_error(self.lines, getattr(node, "lineno", 1), getattr(node, "col_offset", 0), message + _hint(near))

    # names

    def define(self, node: ast.AST, name: str, value: T) -> T:
        """Add a new name to the scope."""
        if name in self.scope:
            self.fail(node, f"{name} is defined already")
        self.scope[name] = value
        return value

    def lookup(self, node: ast.Name, kind: type[T], what: str) -> T:
        """Node of class `kind` that a name refers to; `what` describes it in messages."""
        result = self.scope.get(node.id)
        if isinstance(result, kind):
            return result
        if result is not None:
            self.fail(node, f"{node.id} is no {what}")
        candidates = [name for name, value in self.scope.items() if isinstance(value, kind)]
        self.fail(node, f"unknown {what} {node.id}", near=(node.id, candidates))

    def arguments(self, call: ast.Call) -> CallArguments:
        """Positional and keyword arguments of a call."""
        keywords = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                self.fail(keyword.value, "`**` has no meaning here")
            keywords[keyword.arg] = keyword.value
        return CallArguments(call, call.args, keywords)

    def parameters(self, node: ast.FunctionDef) -> list[ast.arg]:
        """Parameters of a definition, without defaults or variadic parameters."""
        signature = node.args
        for unsupported in (
            signature.vararg,
            signature.kwarg,
            *signature.kwonlyargs,
            *signature.posonlyargs,
            *signature.defaults,
        ):
            if unsupported is not None:
                self.fail(unsupported, "parameters are written name: type, nothing else")
        return signature.args

    def finish(self, arguments: CallArguments, counts: tuple[int, ...], what: str) -> None:
        """Reject remaining keyword arguments, and any number of positional arguments not in `counts`."""
        for name, node in arguments.keywords.items():
            self.fail(node, f"{what} has no argument {name}")
        if len(arguments.positional) not in counts:
            expected = " or ".join(map(str, counts))
            self.fail(arguments.call, f"{what} takes {expected} positional arguments, got {len(arguments.positional)}")

    # literals

    def literal(self, node: ast.expr) -> AttrValue:
        """Parse a number, string, bool, None, or tuple of these."""
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float | str)):
            return node.value
        if isinstance(node, ast.Name) and node.id in _NAMED_NUMBERS:
            return _NAMED_NUMBERS[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and is_number(node.operand):
            return -self.literal(node.operand)  # type: ignore[operator]
        if isinstance(node, ast.Tuple):
            return tuple(self.literal(item) for item in node.elts)
        self.fail(node, "expected a literal: a number, a string, True, False, None, or a tuple of these")

    def integer(self, node: ast.expr) -> int:
        value = self.literal(node)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self.fail(node, "expected an integer")

    def string(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        self.fail(node, "expected a string")

    def optional_string(self, node: ast.expr | None) -> str | None:
        return None if node is None else self.string(node)

    def dtype(self, node: ast.expr) -> str:
        name = self.string(node)
        if name not in dtypes.ALL:
            self.fail(node, f"unknown dtype {name!r}", near=(name, dtypes.ALL))
        return name

    def items(self, node: ast.expr) -> list[ast.expr]:
        if isinstance(node, ast.Tuple):
            return node.elts
        self.fail(node, "expected a tuple; one element is written (n,)")

    def attrs(self, arguments: CallArguments) -> dict[str, AttrValue]:
        """Parse all remaining keywords, and the entries of `attrs={...}`, as attributes."""
        attr_values: dict[str, AttrValue] = {}
        awkward = arguments.take("attrs")
        if awkward is not None:
            if not isinstance(awkward, ast.Dict):
                self.fail(awkward, "attrs must be a dictionary: attrs={'name': value}")
            for key, value in zip(awkward.keys, awkward.values, strict=True):
                attr_values[self.string(key if key is not None else awkward)] = self.literal(value)
        for name, node in arguments.keywords.items():
            attr_values[name] = self.literal(node)
        arguments.keywords = {}
        return attr_values

    # symbolic integers

    def symbol(self, node: ast.expr) -> SymVar:
        if isinstance(node, ast.Name):
            return self.lookup(node, SymVar, "symbol")
        self.fail(node, "expected a symbol")

    def expr(self, node: ast.expr) -> SymExpr:
        """Parse a symbolic integer."""
        if isinstance(node, ast.Name):
            return self.lookup(node, SymVar, "symbol")
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return sym(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.expr(node.operand)
        if isinstance(node, ast.BinOp):
            return self._binary(node, self.expr(node.left), self.expr(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self.finish(self.arguments(node), (max(len(node.args), 1),), node.func.id)
            make = smin if node.func.id == "min" else smax
            return make(*map(self.expr, node.args))
        self.fail(node, "expected a symbolic integer: symbols, integers, + - * // %, min(...), max(...)")

    def _binary(self, node: ast.BinOp, a: SymExpr, b: SymExpr) -> SymExpr:
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        if isinstance(node.op, ast.Mult):
            return a * b
        if not isinstance(node.op, ast.FloorDiv | ast.Mod):
            self.fail(node, "symbolic integers have only + - * // and %")
        if b.is_const and b.const == 0:
            self.fail(node, "division by zero")
        return floordiv(a, b) if isinstance(node.op, ast.FloorDiv) else floormod(a, b)

    def exprs(self, node: ast.expr) -> tuple[SymExpr, ...]:
        """Parse a tuple of symbolic integers."""
        return tuple(self.expr(item) for item in self.items(node))

    def symbol_statement(self, stmt: ast.stmt) -> bool:
        """Parse a declaration `n = symbol("n", lower=..., upper=..., divisor=...)`; False for any other statement."""
        if not isinstance(stmt, ast.Assign) or not is_call(stmt.value, "symbol"):
            return False
        arguments = self.arguments(stmt.value)
        if len(arguments.positional) != 1:
            self.fail(stmt, 'a symbol is declared as n = symbol("n")')
        name = self.string(arguments.positional.pop())
        self.define(stmt, self.target(stmt), self.new_symbol(arguments, name))
        return True

    def new_symbol(self, arguments: CallArguments, name: str) -> SymVar:
        """Create a symbol with the bounds and divisor of the keywords."""
        lower, upper, divisor = (arguments.take(fact) for fact in ("lower", "upper", "divisor"))
        self.finish(arguments, (0,), "a symbol's declaration")
        try:
            return SymVar(
                name,
                lower=0 if lower is None else self._bound_of(lower),
                upper=None if upper is None else self._bound_of(upper),
                divisor=1 if divisor is None else self.integer(divisor),
            )
        except ValueError as error:
            self.fail(arguments.call, str(error))

    def _bound_of(self, node: ast.expr) -> int | None:
        return None if isinstance(node, ast.Constant) and node.value is None else self.integer(node)

    def target(self, stmt: ast.Assign) -> str:
        """Name that a statement assigns."""
        if len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name):
            return stmt.targets[0].id
        self.fail(stmt, "only one plain name can be assigned")

    # types

    def type(self, node: ast.expr) -> Type:
        """Parse a type."""
        if isinstance(node, ast.Name) and node.id == "Object":
            return ObjectType()
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            self.fail(node, f"expected a type: {', '.join(_TYPE_NAMES)}")
        arguments, kind = self.arguments(node), node.func.id
        if kind == "Tensor":
            return self._tensor_type(arguments)
        if kind == "Shape":
            rank = arguments.take("rank")
            self.finish(arguments, (0, 1) if rank is None else (0,), kind)
            if arguments.positional:
                return ShapeType.of(self.exprs(arguments.positional[0]))
            return ShapeType(None, None if rank is None else self.integer(rank))
        if kind == "Tuple":
            self.finish(arguments, (len(arguments.positional),), kind)
            return TupleType(tuple(self.type(item) for item in arguments.positional))
        if kind == "Func":
            self.finish(arguments, (2,), kind)
            params, result = arguments.positional
            return FuncType(tuple(self.type(item) for item in self.items(params)), self.type(result))
        self.fail(node, f"unknown type {kind}", near=(kind, _TYPE_NAMES))

    def _tensor_type(self, arguments: CallArguments) -> TensorType:
        dtype, rank = arguments.take("dtype"), arguments.take("rank")
        if dtype is None:
            self.finish(arguments, (2,), "Tensor")
            shape, dtype = arguments.positional
            return TensorType.of(self.exprs(shape), self.dtype(dtype))
        self.finish(arguments, (0,), "Tensor of unknown shape")
        return TensorType(None, self.dtype(dtype), None if rank is None else self.integer(rank))


def is_call(node: object, name: str) -> TypeGuard[ast.Call]:
    """Whether a syntax node is a call `name(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def is_number(node: ast.expr) -> bool:
    """Whether a syntax node is a number, nan or inf, possibly negated."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return is_number(node.operand)
    if isinstance(node, ast.Name):
        return node.id in _NAMED_NUMBERS
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _hint(near: tuple[str, Iterable[str]] | None) -> str:
    if near is None:
        return ""
    matches = difflib.get_close_matches(near[0], list(near[1]), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def place_error(lines: list[str], line: int, byte_offset: int, message: str) -> ParseError:
    """Build a ParseError that shows the line and marks the column. `line` counts from 1."""
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    column = len(text.encode("utf-8", "replace")[:byte_offset].decode("utf-8", "replace"))
    error = ParseError(f"line {line}, column {column + 1}: {message}\n    {text}\n    {' ' * column}^")
    error.lineno, error.offset, error.text = line, column + 1, text
    return error
