"""Printer of tensor programs, as Python syntax, one statement per line.

    n = symbol("n", lower=1)
    @program(symbols=(n,), outputs=1)
    def softmax(x: Buffer((n, 64), "float32"), y: Buffer((n, 64), "float32")):
        for i in parallel(n):
            with allocate((1,), "float32", "local") as top:
                top[0] = float32(-inf)
                for j in serial(64):
                    combine("max", top[0], x[i, j])
                for j in vectorized(64):
                    t = exp(x[i, j] - top[0])
                    y[i, j] = t if t > float32(0.0) else float32(0.0)

`float32(1.0)` of a number is a Literal, of a value a Cast; `index(i + 1)` is an IndexValue; `then if cond else other`
is a lazy Select; `+= *= &= |=` and `combine("max", ...)` are Stores with `combine`; `assert` is a Check; `with
let_index(value) as k` a LetIndex; `call_library("blas", "sasum", index(n, "int32"), address_of(x[0]), written(y[0]),
work=n)` a CallLibrary; `library_found("blas", "sasum")` a LibraryFound.
`t = value` names a value that is used more than once or nests deeply; it does not imply an evaluation order.
"""

from __future__ import annotations

from relaxlite.ir.attributes import SCHEDULE
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
from relaxlite.ir.program_visitor import value_children
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.text import (
    TextWriter,
    UniqueNames,
    attr_items,
    attr_text,
    fact_items,
    header,
    name_items,
    number_text,
    quote,
    tuple_text,
)

# Operators and their precedence in Python; other functions are printed as calls.
BINARY_SIGNS = {
    "or": ("|", 6), "xor": ("^", 7), "and": ("&", 8), "shift_left": ("<<", 9), "shift_right": (">>", 9),
    "add": ("+", 10), "sub": ("-", 10), "mul": ("*", 11), "div": ("/", 11), "floordiv": ("//", 11),
    "floormod": ("%", 11), "pow": ("**", 13),
}  # fmt: skip
COMPARE_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNARY_SIGNS = {"neg": ("-", 12), "bitwise_not": ("~", 12), "not": ("not ", 4)}
COMBINE_SIGNS = {"add": "+=", "mul": "*=", "and": "&=", "or": "|="}
PROGRAM_KEYWORDS = ("symbols", "outputs", "name", "attrs")
_ATOM, _COMPARE, _SELECT, _ANY = 14, 5, 2, 0
_MAX_HEIGHT = 16  # nesting of one line; Python's tokenizer fails at 200 parentheses


def print_program(name: str, program: TensorProgram) -> str:
    """Print a tensor program."""
    writer = ProgramWriter(UniqueNames())
    writer.program(name, name, program)
    return writer.text()


def print_stmt(stmt: Stmt) -> str:
    """Print a statement, for messages."""
    writer = ProgramWriter(UniqueNames())
    writer.stmt(stmt)
    return "\n".join(writer.lines)


def print_value(value: Value) -> str:
    """Print a value, for messages."""
    return ProgramWriter(UniqueNames()).value(value)


class ProgramWriter(TextWriter):
    """Printer of programs, statements and values."""

    def __init__(self, names: UniqueNames) -> None:
        super().__init__(names)
        self._uses: dict[int, int] = {}  # value id -> use count in the current statement
        self._printed: dict[int, tuple[str, int, int]] = {}  # value id -> text, precedence, height
        self._temporaries: list[str] = []

    def program(self, name: str, ident: str, program: TensorProgram) -> None:
        symbols = tuple_text([self.symbol(s) for s in program.symbols])
        params = [f"{self._bind(b)}: Buffer({self._buffer(b)})" for b in program.params]
        items = [f"symbols={symbols}", f"outputs={program.num_outputs}", *name_items(name, shown=ident)]
        steps = program.attrs.get(SCHEDULE)
        if isinstance(steps, tuple) and steps:
            lines = "".join(f"\n    {attr_text(step)}," for step in steps)
            items += [*attr_items(program.identity, PROGRAM_KEYWORDS), f"{SCHEDULE}=({lines}\n)"]
        else:
            items += attr_items(program.attrs, PROGRAM_KEYWORDS)
        self.emit(f"@program({', '.join(items)})")
        self.emit(header(f"def {ident}", params, ":"))
        with self.indented():
            self.stmt(program.body)

    def _bind(self, buffer: Buffer) -> str:
        return self.names.get(buffer) or self.names.bind(buffer, buffer.name)

    def _buffer(self, buffer: Buffer) -> str:
        items = [self.dims(buffer.shape), quote(buffer.dtype)]
        items += [] if buffer.scope == "global" else [quote(buffer.scope)]
        return ", ".join(items + name_items(buffer.name))

    # statements

    def stmt(self, stmt: Stmt) -> None:
        if isinstance(stmt, Seq):
            for inner in stmt.stmts:
                self.stmt(inner)
        elif isinstance(stmt, For):
            items = [self.expr(stmt.extent), *name_items(stmt.var.name), *fact_items(stmt.var)]
            with self.names.scoped(stmt.var, stmt.var.name) as var:
                self._nest(f"for {var} in {stmt.kind}({', '.join(items)}):", stmt.body)
        elif isinstance(stmt, LetIndex):
            value, temporaries = self._root_value(stmt.value)
            items = [value, *name_items(stmt.var.name), *fact_items(stmt.var)]
            with self.names.scoped(stmt.var, stmt.var.name) as var:
                self._nest(f"with let_index({', '.join(items)}) as {var}:", stmt.body, temporaries)
        elif isinstance(stmt, Allocate):
            items = [self._buffer(stmt.buffer)]
            with self.names.scoped(stmt.buffer, stmt.buffer.name) as name:
                self._nest(f"with allocate({', '.join(items)}) as {name}:", stmt.body)
        elif isinstance(stmt, IfThenElse):
            self._if(stmt)
        elif isinstance(stmt, Prefetch):
            cache = "" if stmt.cache == 2 else f", {stmt.cache}"
            self.emit(f"prefetch({self._element(stmt.buffer, stmt.indices)}{cache})")
        elif isinstance(stmt, Barrier):
            self.emit("barrier()")
        elif isinstance(stmt, CallLibrary):
            self._call_library(stmt)
        else:
            self._leaf_stmt(stmt)

    def _leaf_stmt(self, stmt: Store | Check) -> None:
        if isinstance(stmt, Check):
            cond, temporaries = self._root_value(stmt.cond)
            self.emit(f"assert {cond}, {quote(stmt.message)}")
        else:
            target = self._element(stmt.buffer, stmt.indices)
            value, temporaries = self._root_value(stmt.value)
            if stmt.nontemporal:
                self.emit(f"nontemporal({target}, {value})")
                self._release(temporaries)
                return
            sign = "=" if stmt.combine is None else COMBINE_SIGNS.get(stmt.combine)
            if sign is None:
                self.emit(f"combine({quote(stmt.combine or '')}, {target}, {value})")
            else:
                self.emit(f"{target} {sign} {value}")
        self._release(temporaries)

    def _call_library(self, stmt: CallLibrary) -> None:
        items = [quote(stmt.library), quote(stmt.symbol), *map(self.value, stmt.args)]
        items += [] if stmt.convention == "c" else [f"convention={quote(stmt.convention)}"]
        items += [] if stmt.work.is_const and stmt.work.const == 0 else [f"work={self.expr(stmt.work)}"]
        self.emit(f"call_library({', '.join(items)})")

    def _nest(self, head: str, body: Stmt, temporaries: tuple[str, ...] = ()) -> None:
        self.emit(head)
        self._release(temporaries)
        with self.indented():
            self.stmt(body)

    def _if(self, stmt: IfThenElse) -> None:
        cond, temporaries = self._root_value(stmt.cond)
        self._branches("if", cond, temporaries, stmt)

    def _branches(self, word: str, cond: str, temporaries: tuple[str, ...], stmt: IfThenElse) -> None:
        self._nest(f"{word} {cond}:", stmt.then, temporaries)
        if not isinstance(stmt.other, IfThenElse):
            if stmt.other is not None:
                self._nest("else:", stmt.other)
            return
        cond, temporaries = self._root_value(stmt.other.cond)
        before = self.take_first()
        if not before:
            self._branches("elif", cond, temporaries, stmt.other)
            return
        self.emit("else:")
        with self.indented():
            self.first(*before)
            self._branches("if", cond, temporaries, stmt.other)

    # values

    def _root_value(self, value: Value) -> tuple[str, tuple[str, ...]]:
        """Text of a statement's value, and names of temporaries to release after the statement."""
        self._uses, self._printed, self._temporaries = _count_uses(value), {}, []
        for part in postorder(value):
            self._printed[id(part)] = self._value(part)
        return self._printed[id(value)][0], tuple(self._temporaries)

    def _release(self, temporaries: tuple[str, ...]) -> None:
        for name in temporaries:
            self.names.release(name)

    def value(self, value: Value) -> str:
        """Text of a value outside of a statement."""
        return self._root_value(value)[0]

    def _value(self, value: Value) -> tuple[str, int, int]:
        """Text, precedence and height of a value whose operands are printed."""
        if isinstance(value, Literal):
            return f"{value.dtype}({number_text(value.value)})", _ATOM, 0
        if isinstance(value, Load):
            return self._element(value.buffer, value.indices), _ATOM, 0
        if isinstance(value, IndexValue):
            dtype = "" if value.dtype == "int64" else f", {quote(value.dtype)}"
            return f"index({self.expr(value.index)}{dtype})", _ATOM, 0
        if isinstance(value, AddressOf):
            word = "written" if value.is_written else "address_of"
            return f"{word}({self._element(value.buffer, value.indices)})", _ATOM, 0
        if isinstance(value, LibraryFound):
            required = ", required=True" if value.is_required else ""
            return f"library_found({quote(value.library)}, {quote(value.symbol)}{required})", _ATOM, 0
        text, precedence, height = self._compound(value)
        if self._uses[id(value)] == 1 and height < _MAX_HEIGHT:
            return text, precedence, height
        name = self.names.fresh("t")
        self.first(f"{name} = {text}")
        self._temporaries.append(name)
        return name, _ATOM, 0

    def _element(self, buffer: Buffer, indices: tuple[SymExpr, ...]) -> str:
        return f"{self._bind(buffer)}[{', '.join(map(self.expr, indices)) or '()'}]"

    def _compound(self, value: Unary | Binary | Compare | Select | Cast | Intrinsic) -> tuple[str, int, int]:
        if isinstance(value, Select):
            (then, cond, other), height = self._operands((value.then, value.cond, value.other), (_SELECT,) * 3)
            return f"{then} if {cond} else {other}", _SELECT - 1, height
        if isinstance(value, Compare) and value.op in COMPARE_SIGNS:
            (a, b), height = self._operands((value.a, value.b), (_COMPARE + 1, _COMPARE + 1))
            return f"{a} {COMPARE_SIGNS[value.op]} {b}", _COMPARE, height
        if isinstance(value, Binary) and value.op in BINARY_SIGNS:
            sign, level = BINARY_SIGNS[value.op]
            min_precedences = (_ATOM, _ATOM) if sign == "**" else (level, level + 1)
            (a, b), height = self._operands((value.a, value.b), min_precedences)
            return f"{a} {sign} {b}", level, height
        if isinstance(value, Unary) and value.op in UNARY_SIGNS:
            sign, level = UNARY_SIGNS[value.op]
            (x,), height = self._operands((value.x,), (level,))
            return f"{sign}{x}", level, height
        return self._function(value)

    def _function(self, value: Unary | Binary | Compare | Cast | Intrinsic) -> tuple[str, int, int]:
        children = value_children(value)
        args, height = self._operands(children, (_ANY,) * len(children))
        if isinstance(value, Cast):
            return f"{value.dtype}({args[0]})", _ATOM, height
        if isinstance(value, Intrinsic):
            parts = [quote(value.name), *args, f"dtype={quote(value.dtype)}"]
            return f"intrinsic({', '.join(parts)})", _ATOM, height
        return f"{value.op}({', '.join(args)})", _ATOM, height

    def _operands(self, values: tuple[Value, ...], min_precedences: tuple[int, ...]) -> tuple[list[str], int]:
        """Texts of operands, in parentheses if their precedence is below the minimum; height of the expression."""
        texts, height = [], 0
        for value, minimum in zip(values, min_precedences, strict=True):
            text, precedence, inner = self._printed[id(value)]
            texts.append(f"({text})" if precedence < minimum else text)
            height = max(height, inner)
        return texts, height + 1


def postorder(root: Value) -> list[Value]:
    """All values of an expression in post-order, each once. Iterative, as values may nest too deeply for recursion."""
    values: dict[int, Value] = {}
    stack: list[tuple[Value, bool]] = [(root, False)]
    while stack:
        value, is_done = stack.pop()
        if is_done:
            values[id(value)] = value
        elif id(value) not in values:
            stack.append((value, True))
            stack.extend((child, False) for child in reversed(value_children(value)))
    return list(values.values())


def _count_uses(root: Value) -> dict[int, int]:
    """Use count of each value object by id (1 for the root)."""
    uses = {id(root): 1}
    for value in postorder(root):
        for child in value_children(value):
            uses[id(child)] = uses.get(id(child), 0) + 1
    return uses
