"""Structural equality and hashing of IR nodes, up to renaming of variables, buffers, loop variables and symbols.

A node becomes a stream of tokens in which every variable is the number of its binding; equal nodes have equal streams.
Ignored: names of variables and constants, source locations, the order of a module's definitions, nesting of `Seq`, and
sharing of equal values. Compared: facts of symbols, names of called definitions, attributes (1 is not 1.0), and bits of
constants (all NaNs are equal).
A variable bound outside of the compared nodes equals only itself. Unbound symbols in a whole function (stage "vm") are
matched in order of occurrence.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from relaxlite import dtypes
from relaxlite.ir.expr import (
    Binding,
    Body,
    Call,
    Constant,
    Expr,
    ExternFunction,
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
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.printer import excerpt
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Barrier,
    Binary,
    Buffer,
    CallLibrary,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    LibraryFound,
    Literal,
    Load,
    Prefetch,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.program_printer import postorder
from relaxlite.ir.program_visitor import value_children
from relaxlite.ir.symbolic import SymExpr, SymVar, substitute, to_text
from relaxlite.ir.text import attrs_key, content_digest, number_text
from relaxlite.ir.types import FuncType, ObjectType, ShapeType, TensorType, TupleType, Type, defined_symbols

Node: TypeAlias = "IRModule | Function | TensorProgram | ExternFunction | Body | Binding | Expr | Type | Stmt | Value"
_Definition: TypeAlias = Function | TensorProgram | ExternFunction | Body
_Bound: TypeAlias = Let | MatchShape
_Typed: TypeAlias = TensorType | ShapeType | TupleType | FuncType | ObjectType
_Statement: TypeAlias = For | Store | LetIndex | IfThenElse | Allocate | Check | Prefetch | Barrier | CallLibrary | Seq
_Operation: TypeAlias = Unary | Binary | Compare
Token: TypeAlias = "str | int | tuple[Token, ...] | None"


def structural_equal(a: Node, b: Node) -> bool:
    """Whether two nodes of any level are structurally equal."""
    return first_difference(a, b) is None


def structural_hash(node: Node) -> str:
    """Hash of a node, as 32 hexadecimal digits: equal for structurally equal nodes, stable across processes."""
    stream = _TokenStream(is_stable=True)
    stream.node(node)
    return hashlib.sha256(repr(stream.tokens).encode()).hexdigest()[:32]


def first_difference(a: Node, b: Node) -> str | None:
    """Describe the first difference of two nodes, for messages; None if they are structurally equal."""
    if a is b:
        return None
    if isinstance(a, IRModule) and isinstance(b, IRModule):
        return _module_difference(a, b)
    left, right = _TokenStream(is_stable=False), _TokenStream(is_stable=False)
    left.node(a)
    right.node(b)
    if left.tokens == right.tokens:
        return None
    pairs = enumerate(zip(left.tokens, right.tokens, strict=False))
    position = next((k for k, (x, y) in pairs if x != y), min(len(left.tokens), len(right.tokens)))
    left_excerpt, right_excerpt = left.excerpt_at(position), right.excerpt_at(position)
    if left_excerpt != right_excerpt:
        return f"`{left_excerpt}` against `{right_excerpt}`"
    tokens = (s.tokens[position] if position < len(s.tokens) else "nothing" for s in (left, right))
    return f"`{left_excerpt}`: {' against '.join(map(str, tokens))}"


def _module_difference(a: IRModule, b: IRModule) -> str | None:
    if a.keys() != b.keys():
        return f"definitions {sorted(a.keys() - b.keys())} against {sorted(b.keys() - a.keys())}"
    if attrs_key(a.attrs) != attrs_key(b.attrs):
        return f"attributes of the module: {a.attrs} against {b.attrs}"
    for name in a:
        difference = first_difference(a[name], b[name])
        if difference is not None:
            return f"{name}: {difference}"
    return None


class _TokenStream:
    """Collector of the tokens of a node. `is_stable`: tokens do not depend on the process."""

    def __init__(self, *, is_stable: bool) -> None:
        self.tokens: list[Token] = []
        self._is_stable = is_stable
        self._marks: list[tuple[int, Binding | Expr | Stmt]] = []
        self._numbers: dict[Var | SymVar | Buffer, int] = {}
        self._bound = 0
        self._free: dict[Var | SymVar | Buffer, int] = {}
        self._is_whole = False  # the node is a definition: no symbol is bound outside of it
        self._texts: dict[tuple[object, ...], str] = {}  # (expression, numbers of its symbols) -> text
        self._keys: dict[Token, int] = {}  # value numbering: operator and operand numbers -> number

    def add(self, *tokens: Token) -> None:
        self.tokens.extend(tokens)

    def excerpt_at(self, position: int) -> str:
        """First line of the statement or binding that a token belongs to."""
        nodes = [node for start, node in self._marks if start <= position]
        return excerpt(nodes[-1], lines=1) if nodes else str(self.tokens[0])

    def _mark(self, node: Binding | Expr | Stmt) -> None:
        self._marks.append((len(self.tokens), node))

    # variables and symbolic integers

    def _bind(self, node: Var | SymVar | Buffer) -> None:
        self._numbers[node] = self._bound
        self._bound += 1
        if isinstance(node, SymVar):
            self.add(("symbol", node.lower, node.upper, node.divisor))

    @contextmanager
    def _scoped(self, node: SymVar | Buffer) -> Iterator[None]:
        outer = self._numbers.get(node)
        self._bind(node)
        yield
        del self._numbers[node]
        if outer is not None:
            self._numbers[node] = outer

    def _bind_symbols(self, types: Iterable[Type]) -> None:
        for ty in types:
            for var in defined_symbols(ty):
                if var not in self._numbers:
                    self._bind(var)

    def _use(self, node: Var | SymVar | Buffer) -> str:
        if node not in self._numbers and self._is_whole and isinstance(node, SymVar):
            self._bind(node)
        number = self._numbers.get(node)
        if number is not None:
            return f"%{number:06}"
        return f"free {self._free.setdefault(node, len(self._free)) if self._is_stable else id(node)}"

    def _expr(self, expr: SymExpr) -> str:
        """Canonical text of an expression whose symbols are named by their numbers."""
        if expr.is_const:
            return str(expr.const)
        names = {v: self._use(v) for v in expr.free_vars()}
        key = (expr, *names.values())
        text = self._texts.get(key)
        if text is None:
            self._texts[key] = text = _renamed_text(expr, names)
        return text

    def _exprs(self, exprs: Iterable[SymExpr]) -> Token:
        return tuple(map(self._expr, exprs))

    def _type(self, ty: Type) -> Token:
        if isinstance(ty, TensorType):
            return ("Tensor", ty.rank if ty.shape is None else self._exprs(ty.shape), ty.dtype)
        if isinstance(ty, ShapeType):
            return ("Shape", ty.rank if ty.values is None else self._exprs(ty.values))
        if isinstance(ty, TupleType):
            return ("Tuple", *map(self._type, ty.fields))
        if isinstance(ty, FuncType):
            self._bind_symbols(ty.params)
            return ("Func", *map(self._type, ty.params), self._type(ty.result))
        return "Object"

    # any node

    def node(self, node: Node) -> None:
        if isinstance(node, IRModule):
            self.add(attrs_key(node.attrs))
            for name in sorted(node):
                self.add(name)
                self.node(node[name])
        elif isinstance(node, _Definition):
            self._is_whole = not isinstance(node, Body)
            self.add(type(node).__name__)
            _DEFINITIONS[type(node)](self, node)
        elif isinstance(node, _Bound):
            self._binding(node)
        elif isinstance(node, _Typed):
            self.add(self._type(node))
        elif isinstance(node, _Statement):
            self._stmt(node)
        elif isinstance(node, _VALUES):
            self.add(self._value(node))
        else:
            self._value_of(node)

    # functions

    def _function(self, function: Function) -> None:
        self.add(attrs_key(function.attrs))
        self._params(function.params)
        self._body(function.body)

    def _extern(self, extern: ExternFunction) -> None:
        self._bind_symbols(extern.params)
        self.add(extern.symbol, extern.num_outputs, attrs_key(extern.attrs), *map(self._type, extern.params))

    def _params(self, params: tuple[Var, ...]) -> None:
        for param in params:
            self._mark(param)
            self._bind_symbols((param.ty,))
        for param in params:
            self._mark(param)
            self._bind(param)
            self.add(self._type(param.ty))

    def _body(self, body: Body) -> None:
        for block in body.blocks:
            self.add("dataflow" if block.is_dataflow else "block")
            for binding in block.bindings:
                self._binding(binding)
        self._mark(body.result)
        self.add("result")
        self._value_of(body.result)

    def _binding(self, binding: Binding) -> None:
        self._mark(binding)
        if isinstance(binding, MatchShape):
            self.add("MatchShape")
            self._value_of(binding.source)
            self._bind_symbols((ShapeType(binding.shape),))
            self.add(self._exprs(binding.shape))
        else:
            self._value_of(binding.value)
            self._mark(binding)
        self._bind(binding.var)
        self.add(self._type(binding.var.ty))

    def _value_of(self, expr: Expr) -> None:
        if isinstance(expr, Var):
            self.add(self._use(expr))
        elif isinstance(expr, Constant):
            self.add(("Constant", content_digest(expr.value)))
        elif isinstance(expr, ShapeValue):
            self.add(("ShapeValue", self._exprs(expr.values)))
        elif isinstance(expr, GlobalVar):
            self.add(("GlobalVar", expr.name))
        elif isinstance(expr, Call):
            self._call(expr)
        elif isinstance(expr, Tuple):
            self.add("Tuple", len(expr.fields))
            for field in expr.fields:
                self._value_of(field)
        elif isinstance(expr, TupleGetItem):
            self.add("TupleGetItem", expr.index)
            self._value_of(expr.value)
        elif isinstance(expr, If):
            self.add("If", self._type(expr.ty))
            self._value_of(expr.cond)
            self._body(expr.then_body)
            self._body(expr.else_body)
        elif isinstance(expr, Loop):
            self._loop(expr)
        else:
            raise TypeError(f"{expr!r} is no node of the IR")

    def _call(self, call: Call) -> None:
        if isinstance(call.callee, Op):
            self.add(("Op", call.callee.name))
        else:
            self._value_of(call.callee)
        self.add(len(call.args), attrs_key(call.attrs), self._exprs(call.sym_args))
        for arg in call.args:
            self._value_of(arg)
        self.add(self._type(call.ty))

    def _loop(self, loop: Loop) -> None:
        self.add("Loop", len(loop.inits), self._type(loop.ty))
        for operand in (loop.cond, *loop.inits):
            self._value_of(operand)
        self._params(loop.params)
        self._body(loop.body)

    # programs

    def _program(self, program: TensorProgram) -> None:
        self.add(attrs_key(program.identity), program.num_outputs, len(program.params), len(program.symbols))
        for symbol in program.symbols:
            self._bind(symbol)
        for buffer in program.params:
            self._bind(buffer)
            self.add(self._buffer(buffer))
        self._stmt(program.body)

    def _buffer(self, buffer: Buffer) -> Token:
        return ("Buffer", self._exprs(buffer.shape), buffer.dtype, buffer.scope)

    def _stmt(self, stmt: Stmt) -> None:
        if isinstance(stmt, Seq):
            for inner in stmt.stmts:
                self._stmt(inner)
            return
        self._mark(stmt)
        self.add(type(stmt).__name__)
        if isinstance(stmt, Store):
            index, value = self._exprs(stmt.indices), self._value(stmt.value)
            self.add(self._use(stmt.buffer), index, value, stmt.combine, stmt.nontemporal)
        elif isinstance(stmt, Prefetch):
            self.add(self._use(stmt.buffer), self._exprs(stmt.indices), stmt.cache)
        elif isinstance(stmt, For):
            self.add(self._expr(stmt.extent), stmt.kind)
            self._nested(stmt.var, stmt.body)
        elif isinstance(stmt, LetIndex):
            self.add(self._value(stmt.value))
            self._nested(stmt.var, stmt.body)
        elif isinstance(stmt, Allocate):
            self.add(self._buffer(stmt.buffer))
            self._nested(stmt.buffer, stmt.body)
        elif isinstance(stmt, Check):
            self.add(self._value(stmt.cond), stmt.message)
        elif isinstance(stmt, CallLibrary):
            args = tuple(map(self._value, stmt.args))
            self.add(stmt.library, stmt.symbol, args, stmt.convention, self._expr(stmt.work))
        elif isinstance(stmt, IfThenElse):
            self.add(self._value(stmt.cond))
            for branch in (stmt.then, stmt.other):
                if branch is not None:
                    self._stmt(branch)
                self.add("end" if branch is not None else "none")

    def _nested(self, bound: SymVar | Buffer, body: Stmt) -> None:
        with self._scoped(bound):
            self._stmt(body)
        self.add("end")

    def _value(self, root: Value) -> int:
        """Value number: the same for equal values. A new number adds a token."""
        numbers: dict[int, int] = {}
        for value in postorder(root):
            key = (*self._head(value), *(numbers[id(child)] for child in value_children(value)))
            number = self._keys.get(key)
            if number is None:
                number = self._keys[key] = len(self._keys)
                self.add(key)
            numbers[id(value)] = number
        return numbers[id(root)]

    def _head(self, value: Value) -> tuple[Token, ...]:
        kind = type(value).__name__
        if isinstance(value, Literal):
            return (kind, value.dtype, _number_key(value))
        if isinstance(value, Load):
            return (kind, self._use(value.buffer), self._exprs(value.indices))
        if isinstance(value, AddressOf):
            return (kind, self._use(value.buffer), self._exprs(value.indices), value.is_written)
        if isinstance(value, LibraryFound):
            return (kind, value.library, value.symbol, value.is_required)
        if isinstance(value, _Operation):
            return (kind, value.op)
        if isinstance(value, Cast):
            return (kind, value.dtype)
        if isinstance(value, IndexValue):
            return (kind, value.dtype, self._expr(value.index))
        return (kind, value.name, value.dtype) if isinstance(value, Intrinsic) else (kind,)


def _renamed_text(expr: SymExpr, names: dict[SymVar, str]) -> str:
    """Canonical text under new names. Term order depends on names, so rebuild unless the new names sort alike."""
    new_names = [names[v] for v in sorted(names, key=lambda v: v.key)]
    if new_names == sorted(new_names):
        return to_text(expr, names.__getitem__)
    return str(substitute(expr, {v: _symbol_named(name) for v, name in names.items()}))


@functools.lru_cache(maxsize=4096)
def _symbol_named(name: str) -> SymVar:
    return SymVar(name)


_STATEMENTS = (For, Store, LetIndex, IfThenElse, Allocate, Check, Prefetch, Barrier, CallLibrary, Seq)
_VALUES = (Literal, Load, Unary, Binary, Compare, Select, Cast, IndexValue, Intrinsic, AddressOf, LibraryFound)
_DEFINITIONS: dict[type, Callable[..., None]] = {
    Function: _TokenStream._function,
    TensorProgram: _TokenStream._program,
    ExternFunction: _TokenStream._extern,
    Body: _TokenStream._body,
}


def _number_key(literal: Literal) -> str:
    """Text of a literal as its dtype: 1 and 1.0 are one float32, 1 and True one bool; 0.0 and -0.0 differ."""
    if literal.dtype == "bool":
        return str(bool(literal.value))
    return number_text(float(literal.value) if dtypes.is_float(literal.dtype) else literal.value)
