"""Printer of modules and functions, as Python syntax that `parse_module` parses back, one statement per line.

    constants = [
        constant((384, 384), "float32", hash="0b5f...", name="w"),
    ]

    n = symbol("n", lower=1, upper=512)
    @function
    def main(x: Tensor((n, 384), "float32"), flag: Tensor((), "bool")):
        with dataflow():
            y: Tensor((n, 384), "float32") = matmul(x, constants[0], loc="/fc/MatMul")
            z: Tensor((n, 384), "float32") = call(fused_add, y, sym=(n,))
        w: Tensor(rank=2, dtype="float32")
        if flag:
            w = z
        else:
            w = x
        k = symbol("k")
        v: Tensor((k, 384), "float32") = match_shape(w, (k, 384))
        return v

`with dataflow():` is a dataflow block; other statements form a block that is not (`with block():` separates two).
`w: T` declares the result of the `if` that follows; each branch assigns it last. A loop is a nested function:

        @loop(cond, x)
        def out(x_1: Tensor((m, 4), "float32")) -> Tuple(Tensor(rank=2, dtype="float32")):
            return (next_cond, next_x)

An annotation is the variable's type: the parser infers no types. A call whose type differs has `ty=`. `loc=` is the
source location of the call and the variable; `var(T, name=..., loc=...)` overrides it. A symbol is declared before the
line of its first use. A call without result is a statement. Large constants are listed in a table by shape, dtype and
hash; their elements are those of `module_constants`, or in the table itself (`embed=True`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from relaxlite import dtypes
from relaxlite.ir.expr import (
    Binding,
    Block,
    Body,
    Call,
    Constant,
    ControlFlow,
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
from relaxlite.ir.program import (
    Allocate,
    Barrier,
    CallLibrary,
    Check,
    For,
    IfThenElse,
    LetIndex,
    Prefetch,
    Seq,
    Stmt,
    Store,
    TensorProgram,
)
from relaxlite.ir.program_printer import ProgramWriter, print_program, print_stmt, print_value
from relaxlite.ir.text import (
    TextWriter,
    UniqueNames,
    array_text,
    attr_items,
    content_digest,
    header,
    identifier,
    name_items,
    quote,
    tuple_text,
)
from relaxlite.ir.types import UNIT, FuncType, ShapeType, TensorType, TupleType, Type
from relaxlite.ir.visitor import body_uses

__all__ = [
    "excerpt",
    "module_constants",
    "print_expr",
    "print_function",
    "print_module",
    "print_program",
    "print_stmt",
    "print_type",
    "print_value",
]

MAX_INLINE = 16  # elements of a constant that is printed inline
CALL_WORDS = ("call", "const", "global_var", "match_shape", "op", "shape")  # called in the text form, but not ops
_STATEMENTS = (For, Store, LetIndex, IfThenElse, Allocate, Check, Prefetch, Barrier, CallLibrary, Seq)
_DECLARATION = re.compile(r"\s*\w+ = symbol\(")
CALL_KEYWORDS = ("sym", "ty", "loc", "attrs")
FUNCTION_KEYWORDS = ("name", "attrs")
EXTERN_KEYWORDS = ("outputs", "name", "attrs")


def print_module(module: IRModule, *, embed: bool = False) -> str:
    """Print a module; with `embed`, including the elements of large constants."""
    pool = _ConstantTable()
    sections = _sections(module, pool)
    table = [pool.table(embed=embed)] if pool.constants else []
    head = [f"module({', '.join(attr_items(module.attrs, ('attrs',)))})\n"] if module.attrs else []
    return "\n".join([*head, *table, *sections])


def module_constants(module: IRModule) -> list[Constant]:
    """Constants that the text of the module refers to as `constants[0]`, `constants[1]`, ..."""
    pool = _ConstantTable()
    _sections(module, pool)
    return pool.constants


def print_function(name: str, function: Function) -> str:
    """Print one function; its callees need not exist."""
    pool = _ConstantTable()
    writer = _FunctionWriter(pool, UniqueNames([identifier(name)]), {})
    writer.function(name, identifier(name), function)
    return f"{pool.table(embed=False)}\n{writer.text()}" if pool.constants else writer.text()


def print_expr(expr: Expr | Binding) -> str:
    """Print an expression or binding, for messages; large constants are shown as `constants[k]`."""
    writer = _FunctionWriter(_ConstantTable(), UniqueNames(), {})
    if isinstance(expr, ControlFlow):
        expr = Let(Var("_", expr.ty, expr.loc), expr)
    if isinstance(expr, Let | MatchShape):
        writer.binding(expr)
        return "\n".join(writer.lines)
    return writer.value(expr, expr.ty)


def print_type(ty: Type) -> str:
    """Print a type, for messages."""
    return _FunctionWriter(_ConstantTable(), UniqueNames(), {}).type(ty)


def excerpt(node: Expr | Binding | Stmt, *, lines: int = 3) -> str:
    """Print the first lines of a node, without declarations of symbols, for error messages."""
    is_loop_level = isinstance(node, _STATEMENTS)
    text = print_stmt(node) if is_loop_level else print_expr(node)  # type: ignore[arg-type]
    shown = [line for line in text.split("\n") if not _DECLARATION.match(line)]
    return "\n".join(shown[:lines] + ["    ..."] * (lines > 1 and len(shown) > lines))


def _sections(module: IRModule, pool: _ConstantTable) -> list[str]:
    """Text of each definition."""
    top = UniqueNames()
    idents = {name: top.bind(name, name) for name in module}
    sections = []
    for name, definition in module.items():
        if isinstance(definition, TensorProgram):
            programs = ProgramWriter(UniqueNames())
            programs.program(name, idents[name], definition)
            sections.append(programs.text())
            continue
        writer = _FunctionWriter(pool, UniqueNames(idents.values()), idents)
        if isinstance(definition, Function):
            writer.function(name, idents[name], definition)
        else:
            writer.extern(name, idents[name], definition)
        sections.append(writer.text())
    return sections


class _ConstantTable:
    """Table of constants too large to print inline."""

    def __init__(self) -> None:
        self.constants: list[Constant] = []
        self._index: dict[Constant, int] = {}

    def index(self, constant: Constant) -> int:
        if constant not in self._index:
            self._index[constant] = len(self.constants)
            self.constants.append(constant)
        return self._index[constant]

    def table(self, *, embed: bool) -> str:
        rows = "".join(f"    {self._row(constant, embed)},\n" for constant in self.constants)
        return f"constants = [\n{rows}]\n"

    def _row(self, constant: Constant, embed: bool) -> str:
        array = constant.value
        content = f"hash={quote(content_digest(array))}"
        if embed:
            content = f"data={quote(base64.b64encode(array.tobytes()).decode())}"
        items = [tuple_text(map(str, array.shape)), quote(str(dtypes.from_numpy(array.dtype))), content]
        return f"constant({', '.join(items + _constant_name(constant))})"


def _constant_name(constant: Constant) -> list[str]:
    return [] if constant.name is None else [f"name={quote(constant.name)}"]


class _FunctionWriter(TextWriter):
    """Printer of functions, bodies and expressions. `idents`: name -> identifier of definitions; empty if unknown."""

    def __init__(self, pool: _ConstantTable, names: UniqueNames, idents: Mapping[str, str]) -> None:
        super().__init__(names)
        self._table = pool
        self._idents = dict(idents)
        self._is_closed = bool(idents)
        self._types: dict[Type, str] = {}
        self._used: frozenset[Var] = frozenset()

    # definitions

    def function(self, name: str, ident: str, function: Function) -> None:
        items = [*name_items(name, shown=ident), *attr_items(function.attrs, FUNCTION_KEYWORDS)]
        self._used = frozenset(body_uses(function.body))
        params = [self._declare(p, None, is_public=True) for p in function.params]
        self.emit(f"@function({', '.join(items)})" if items else "@function")
        self.emit(header(f"def {ident}", params, ":"))
        with self.indented():
            self._body(function.body, "return")

    def extern(self, name: str, ident: str, extern: ExternFunction) -> None:
        params = tuple_text(map(self.type, extern.params))
        items = [quote(extern.symbol), params, f"outputs={extern.num_outputs}", *name_items(name, shown=ident)]
        self.emit(f"{ident} = extern({', '.join(items + attr_items(extern.attrs, EXTERN_KEYWORDS))})")

    def _declare(self, var: Var, loc: str | None, *, is_public: bool = False) -> str:
        """Declaration `name: type`; `loc` is the source location that the printed value has already."""
        ident = self.names.bind(var, var.name)
        items = name_items(var.name, shown=ident if is_public else None)
        items += [] if var.loc == loc else [f"loc={quote(var.loc) if var.loc is not None else None}"]
        ty = self.type(var.ty)
        return f"{ident}: var({', '.join([ty, *items])})" if items else f"{ident}: {ty}"

    # bodies

    def _body(self, body: Body, result: str) -> None:
        is_open = False  # the previous block was printed without a `with`
        for block in body.blocks:
            is_open = not block.is_dataflow and bool(block.bindings) and not is_open
            self._block(block, is_open)
        self.emit(f"{result} {self.value(body.result)}")

    def _block(self, block: Block, is_open: bool) -> None:
        if is_open:
            for binding in block.bindings:
                self.binding(binding)
            return
        self.emit("with dataflow():" if block.is_dataflow else "with block():")
        with self.indented():
            for binding in block.bindings:
                self.binding(binding)

    def binding(self, binding: Binding) -> None:
        var = binding.var
        if isinstance(binding, MatchShape):
            target = self._declare(var, binding.loc)
            items = [self.value(binding.source), self.dims(binding.shape)]
            items += [] if binding.loc is None else [f"loc={quote(binding.loc)}"]
            self.emit(f"{target} = match_shape({', '.join(items)})")
        elif isinstance(binding.value, If):
            self._if(var, binding.value)
        elif isinstance(binding.value, Loop):
            self._loop(var, binding.value)
        elif self._is_statement(binding):
            self.emit(self.value(binding.value, UNIT))
        else:
            loc = binding.value.loc if isinstance(binding.value, Call) else None
            self.emit(f"{self._declare(var, loc)} = {self.value(binding.value, var.ty)}")

    def _is_statement(self, let: Let) -> bool:
        """Whether a binding is printed as a statement: a call without result, as in destination-passing style."""
        value, var = let.value, let.var
        return isinstance(value, Call) and var.ty == value.ty == UNIT and var.loc == value.loc and var not in self._used

    def _if(self, var: Var, value: If) -> None:
        cond = self.value(value.cond)
        extra = self._own_keywords(value, var.ty)
        self.emit(self._declare(var, value.loc))
        ident = self.names.get(var)
        self.emit(f"if branch({', '.join([cond, *extra])}):" if extra else f"if {cond}:")
        with self.indented():
            self._body(value.then_body, f"{ident} =")
        self.emit("else:")
        with self.indented():
            self._body(value.else_body, f"{ident} =")

    def _loop(self, var: Var, value: Loop) -> None:
        items = [self.value(value.cond), *map(self.value, value.inits), *self._own_keywords(value, var.ty)]
        ident, _, annotation = self._declare(var, value.loc).partition(": ")
        params = [self._declare(p, None) for p in value.params]
        self.emit(f"@loop({', '.join(items)})")
        self.emit(header(f"def {ident}", params, f" -> {annotation}:"))
        with self.indented():
            self._body(value.body, "return")

    def _own_keywords(self, value: Call | If | Loop, ty: Type | None) -> list[str]:
        """Keywords of a value for the type and location that the variable's declaration does not imply."""
        items = [] if ty == value.ty else [f"ty={self.type(value.ty)}"]
        return items if value.loc is None else [*items, f"loc={quote(value.loc)}"]

    # expressions

    def value(self, expr: Expr, ty: Type | None = None) -> str:
        """Print an expression; `ty` is the printed type of its variable."""
        if isinstance(expr, Var):
            return self.names.get(expr) or self.names.bind(expr, expr.name)
        if isinstance(expr, Call):
            return self._call(expr, ty)
        if isinstance(expr, Constant):
            return self._constant(expr)
        if isinstance(expr, ShapeValue):
            return f"shape({', '.join(map(self.expr, expr.values))})"
        if isinstance(expr, GlobalVar):
            return self._global(expr.name)
        if isinstance(expr, Tuple):
            return tuple_text(map(self.value, expr.fields))
        if isinstance(expr, TupleGetItem):
            return f"{self.value(expr.value)}[{expr.index}]"
        return f"<{type(expr).__name__} as an operand>"

    def _call(self, call: Call, ty: Type | None) -> str:
        args = [self.value(a) for a in call.args]
        if isinstance(call.callee, Op):
            function = _op_text(call.callee.name)
        else:
            function, args = "call", [self.value(call.callee), *args]
        sym = [f"sym={self.dims(call.sym_args)}"] if call.sym_args else []
        items = [*args, *attr_items(call.attrs, CALL_KEYWORDS), *sym, *self._own_keywords(call, ty)]
        return f"{function}({', '.join(items)})"

    def _constant(self, constant: Constant) -> str:
        array = constant.value
        if array.size > MAX_INLINE:
            return f"constants[{self._table.index(constant)}]"
        dtype = quote(str(dtypes.from_numpy(array.dtype)))
        if array.size == 0 and array.shape != (0,):
            items = ["[]", dtype, f"shape={tuple_text(map(str, array.shape))}"]
        else:
            items = [array_text(array), dtype]
        return f"const({', '.join(items + _constant_name(constant))})"

    def _global(self, name: str) -> str:
        ident = self._idents.get(name)
        if ident is None and not self._is_closed and identifier(name) == name and self.names.fresh(name) == name:
            ident = self._idents[name] = name
        return ident or f"global_var({quote(name)})"

    # types

    def type(self, ty: Type) -> str:
        result = self._types.get(ty)
        if result is None:
            self._types[ty] = result = self._type(ty)
        return result

    def _type(self, ty: Type) -> str:
        if isinstance(ty, TensorType):
            if ty.shape is not None:
                return f"Tensor({self.dims(ty.shape)}, {quote(ty.dtype)})"
            rank = "" if ty.rank is None else f"rank={ty.rank}, "
            return f"Tensor({rank}dtype={quote(ty.dtype)})"
        if isinstance(ty, ShapeType):
            if ty.values is not None:
                return f"Shape({self.dims(ty.values)})"
            return "Shape()" if ty.rank is None else f"Shape(rank={ty.rank})"
        if isinstance(ty, TupleType):
            return f"Tuple({', '.join(map(self.type, ty.fields))})"
        if isinstance(ty, FuncType):
            return f"Func({tuple_text(map(self.type, ty.params))}, {self.type(ty.result)})"
        return "Object"


def _op_text(name: str) -> str:
    is_plain = name not in CALL_WORDS and all(identifier(part) == part for part in name.split("."))
    return name if is_plain else f"op({quote(name)})"
