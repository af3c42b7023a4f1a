"""Parser of tensor programs: text -> `TensorProgram`. The docstring of program_printer.py defines the syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

from relaxlite import dtypes
from relaxlite.ir.expr import Attrs
from relaxlite.ir.parser_base import CallArguments, ParserBase, is_call, is_number
from relaxlite.ir.program import (
    BINARY,
    COMBINE,
    UNARY,
    AddressOf,
    Allocate,
    Barrier,
    Binary,
    Buffer,
    CallingConvention,
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
    LoopKind,
    MemoryScope,
    Prefetch,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.symbolic import SymExpr, sym

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "floormod",
    ast.Pow: "pow", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.LShift: "shift_left",
    ast.RShift: "shift_right",
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "neg", ast.Not: "not", ast.Invert: "bitwise_not"}
_FUNCTIONS = (*UNARY, *BINARY, *dtypes.ALL, "index", "intrinsic", "address_of", "written", "library_found")
_STATEMENTS = (
    "a store, `for`, `if`, `with let_index`, `with allocate`, `assert`, combine(...), nontemporal(...), "
    "prefetch(x[i]), call_library(...), barrier(), pass"
)
_VALUE_TYPES = (Literal, Load, Unary, Binary, Compare, Select, Cast, IndexValue, Intrinsic, LibraryFound)


class ProgramParser(ParserBase):
    """Parser of one program. `scope` maps names to symbols, buffers and named values."""

    def program(self, node: ast.FunctionDef, arguments: CallArguments, scope: dict[str, object]) -> TensorProgram:
        """Parse a program definition; `arguments` are those of its decorator. Raises ParseError."""
        self.scope = scope
        symbols, outputs = arguments.take("symbols"), arguments.take("outputs")
        arguments.take("name")
        names = [] if symbols is None else self.items(symbols)
        declared = tuple(self.symbol(item) for item in names)
        attrs = Attrs(self.attrs(arguments))
        self.finish(arguments, (0,), "program")
        params = tuple(self._param(arg) for arg in self.parameters(node))
        count = 1 if outputs is None else self.integer(outputs)
        return TensorProgram(params, declared, self.body(node.body), count, attrs)

    def _param(self, arg: ast.arg) -> Buffer:
        if not is_call(arg.annotation, "Buffer"):
            self.fail(arg, f'a parameter of a program is written {arg.arg}: Buffer((n, 4), "float32")')
        return self.define(arg, arg.arg, self._buffer(arg.annotation, arg.arg))

    def _buffer(self, call: ast.Call, name: str) -> Buffer:
        arguments = self.arguments(call)
        own_name = self.optional_string(arguments.take("name"))
        self.finish(arguments, (2, 3), "a buffer")
        shape, dtype, *rest = arguments.positional
        scope: MemoryScope = "global"
        if rest:
            scope = self.string(rest[0])  # type: ignore[assignment]
            if scope not in get_args(MemoryScope):
                self.fail(rest[0], f"unknown scope {scope!r}", near=(scope, get_args(MemoryScope)))
        return Buffer(name if own_name is None else own_name, self.exprs(shape), self.dtype(dtype), scope)

    # statements

    def body(self, stmts: list[ast.stmt]) -> Stmt:
        """Parse statements, flattening sequences."""
        parsed_stmts: list[Stmt] = []
        for stmt in stmts:
            parsed = self._stmt(stmt)
            if parsed is not None:
                parsed_stmts.extend(parsed.stmts if isinstance(parsed, Seq) else (parsed,))
        return parsed_stmts[0] if len(parsed_stmts) == 1 else Seq(tuple(parsed_stmts))

    def _stmt(self, stmt: ast.stmt) -> Stmt | None:
        if self.symbol_statement(stmt) or isinstance(stmt, ast.Pass):
            return None
        if isinstance(stmt, ast.For):
            return self._for(stmt)
        if isinstance(stmt, ast.With):
            return self._with(stmt)
        if isinstance(stmt, ast.If):
            cond, then = self.value(stmt.test), self.body(stmt.body)  # in order: names of values may be redefined
            return IfThenElse(cond, then, self.body(stmt.orelse) if stmt.orelse else None)
        if isinstance(stmt, ast.Assert) and stmt.msg is not None:
            return Check(self.value(stmt.test), self.string(stmt.msg))
        if isinstance(stmt, ast.Assign):
            return self._assign(stmt)
        if isinstance(stmt, ast.AugAssign):
            combine = _BINARY.get(type(stmt.op))
            if combine not in COMBINE:
                self.fail(stmt, 'this operator combines nothing; write += *= &= |= or combine("max", x[i], value)')
            return self._store(stmt.target, stmt.value, combine)
        call = stmt.value if isinstance(stmt, ast.Expr) else None
        if is_call(call, "combine"):
            return self._combine(call)
        if is_call(call, "nontemporal"):
            self.finish(self.arguments(call), (2,), "nontemporal")
            return replace(self._store(call.args[0], call.args[1], None), nontemporal=True)
        if is_call(call, "prefetch"):
            return self._prefetch(call)
        if is_call(call, "barrier"):
            self.finish(self.arguments(call), (0,), "barrier")
            return Barrier()
        if is_call(call, "call_library"):
            return self._call_library(call)
        self.fail(stmt, f"expected {_STATEMENTS}")

    def _prefetch(self, call: ast.Call) -> Prefetch:
        self.finish(self.arguments(call), (1, 2), "prefetch")
        if not isinstance(call.args[0], ast.Subscript):
            self.fail(call, "prefetch takes an element: prefetch(buffer[i, j])")
        cache = self.literal(call.args[1]) if len(call.args) > 1 else 2
        if cache not in (1, 2):
            self.fail(call, "prefetch brings an element to cache 1 or 2: prefetch(buffer[i, j], 1)")
        return Prefetch(*self._element(call.args[0]), 1 if cache == 1 else 2)

    def _for(self, stmt: ast.For) -> For:
        call, kinds = stmt.iter, get_args(LoopKind)
        kind = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
        if kind is None or not isinstance(call, ast.Call) or not isinstance(stmt.target, ast.Name) or stmt.orelse:
            self.fail(stmt, f"a loop is written `for i in serial(n):`; kinds: {', '.join(kinds)}")
        if kind not in kinds:
            self.fail(call, f"unknown kind of loop {kind}", near=(kind, kinds))
        arguments = self.arguments(call)
        if len(arguments.positional) != 1:
            self.fail(call, f"{kind} takes the extent")
        extent = self.expr(arguments.positional.pop())
        name = self.optional_string(arguments.take("name"))
        var = self.new_symbol(arguments, stmt.target.id if name is None else name)
        with self._scoped_name(stmt.target.id, var):
            return For(var, extent, self.body(stmt.body), kind)  # type: ignore[arg-type]

    def _with(self, stmt: ast.With) -> Stmt:
        call, name = stmt.items[0].context_expr, stmt.items[0].optional_vars
        if len(stmt.items) == 1 and isinstance(call, ast.Call) and isinstance(name, ast.Name):
            if is_call(call, "allocate"):
                buffer = self._buffer(call, name.id)
                with self._scoped_name(name.id, buffer):
                    return Allocate(buffer, self.body(stmt.body))
            if is_call(call, "let_index"):
                return self._let_index(stmt, call, name.id)
        self.fail(stmt, "expected `with allocate(shape, dtype) as name:` or `with let_index(value) as name:`")

    def _let_index(self, stmt: ast.With, call: ast.Call, ident: str) -> LetIndex:
        arguments = self.arguments(call)
        if len(arguments.positional) != 1:
            self.fail(call, "let_index takes a value")
        value = self.value(arguments.positional.pop())
        name = self.optional_string(arguments.take("name"))
        var = self.new_symbol(arguments, ident if name is None else name)
        with self._scoped_name(ident, var):
            return LetIndex(var, value, self.body(stmt.body))

    @contextmanager
    def _scoped_name(self, name: str, meaning: object) -> Iterator[None]:
        outer = self.scope.get(name)
        self.scope[name] = meaning
        yield
        del self.scope[name]
        if outer is not None:
            self.scope[name] = outer

    def _assign(self, stmt: ast.Assign) -> Stmt | None:
        if len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Subscript):
            return self._store(stmt.targets[0], stmt.value, None)
        name = self.target(stmt)
        if not isinstance(self.scope.get(name), (*_VALUE_TYPES, type(None))):
            self.fail(stmt, f"{name} is defined already; an element is stored by {name}[i] = ...")
        self.scope[name] = self.value(stmt.value)
        return None

    def _combine(self, call: ast.Call) -> Store:
        self.finish(self.arguments(call), (3,), "combine")
        kind = self.string(call.args[0])
        if kind not in COMBINE:
            self.fail(call.args[0], f"unknown combination {kind!r}", near=(kind, COMBINE))
        return self._store(call.args[1], call.args[2], kind)

    def _store(self, target: ast.expr, value: ast.expr, combine: str | None) -> Store:
        if not isinstance(target, ast.Subscript):
            self.fail(target, "a store needs an element: buffer[i, j] = ...")
        buffer, indices = self._element(target)
        return Store(buffer, indices, self.value(value), combine)

    def _element(self, node: ast.Subscript) -> tuple[Buffer, tuple[SymExpr, ...]]:
        if not isinstance(node.value, ast.Name):
            self.fail(node, "only buffers have elements")
        buffer = self.lookup(node.value, Buffer, "buffer")
        if isinstance(node.slice, ast.Tuple):
            return buffer, self.exprs(node.slice)
        return buffer, (self.expr(node.slice),)

    def _call_library(self, call: ast.Call) -> CallLibrary:
        arguments = self.arguments(call)
        work, convention = arguments.take("work"), self.optional_string(arguments.take("convention")) or "c"
        if len(call.args) < 2:
            self.fail(call, 'a call of a library is written call_library("library", "symbol", arguments...)')
        if convention not in get_args(CallingConvention):
            self.fail(call, f"unknown convention {convention!r}", near=(convention, get_args(CallingConvention)))
        self.finish(arguments, (len(call.args),), "call_library")
        library, symbol, *args = call.args
        values = tuple(map(self.value, args))
        amount = sym(0) if work is None else self.expr(work)
        return CallLibrary(self.string(library), self.string(symbol), values, convention, amount)  # type: ignore[arg-type]

    # values

    def value(self, node: ast.expr) -> Value:
        """Parse a value. Raises ParseError."""
        if isinstance(node, ast.Subscript):
            return Load(*self._element(node))
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return Binary(_BINARY[type(node.op)], self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Name):
            return self._value_of_name(node)
        if is_number(node):
            self.fail(node, "a number needs a dtype: float32(1.0)")
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return Unary(_UNARY[type(node.op)], self.value(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            return Compare(_COMPARE[type(node.ops[0])], self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            return Select(self.value(node.test), self.value(node.body), self.value(node.orelse))
        self.fail(node, "expected a value; conditions are joined by & and |, not by `and` and `or`, and not chained")

    def _value_of_name(self, node: ast.Name) -> Value:
        result = self.scope.get(node.id)
        if isinstance(result, _VALUE_TYPES):
            return result
        if isinstance(result, SymExpr):
            self.fail(node, f"{node.id} is a symbol; as data it is written index({node.id})")
        if isinstance(result, Buffer):
            self.fail(node, f"{node.id} is a buffer; an element is written {node.id}[...]")
        self.fail(node, f"unknown name {node.id}", near=(node.id, self.scope))

    def _call(self, node: ast.Call) -> Value:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "intrinsic":
            return self._intrinsic(node)
        arguments = self.arguments(node)
        if name in ("address_of", "written"):
            self.finish(arguments, (1,), name)
            if not isinstance(node.args[0], ast.Subscript):
                self.fail(node, f"an address is that of an element: {name}(buffer[i, j])")
            return AddressOf(*self._element(node.args[0]), is_written=name == "written")
        if name == "library_found":
            required = arguments.take("required")
            self.finish(arguments, (2,), name)
            is_required = required is not None and self.literal(required) is True
            return LibraryFound(self.string(node.args[0]), self.string(node.args[1]), is_required)
        if name == "index":
            self.finish(arguments, (1, 2), name)
            return IndexValue(self.expr(node.args[0]), self.dtype(node.args[1]) if len(node.args) == 2 else "int64")
        if name in dtypes.ALL:
            self.finish(arguments, (1,), name)
            if is_number(node.args[0]):
                return Literal(self.literal(node.args[0]), name)  # type: ignore[arg-type]
            return Cast(self.value(node.args[0]), name)
        if name in UNARY:
            self.finish(arguments, (1,), name)
            return Unary(name, self.value(node.args[0]))
        if name in BINARY:
            self.finish(arguments, (2,), name)
            return Binary(name, self.value(node.args[0]), self.value(node.args[1]))
        self.fail(node, f"unknown function {name}", near=(name, _FUNCTIONS))

    def _intrinsic(self, node: ast.Call) -> Intrinsic:
        arguments = self.arguments(node)
        dtype = arguments.take("dtype")
        if dtype is None or not node.args:
            self.fail(node, 'an intrinsic is written intrinsic("fma", a, b, c, dtype="float32")')
        self.finish(arguments, (len(node.args),), "intrinsic")
        return Intrinsic(self.string(node.args[0]), tuple(map(self.value, node.args[1:])), self.dtype(dtype))
