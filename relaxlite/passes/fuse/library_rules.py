"""Rules for library calls: a graph pattern, the routine, its arguments, and the range of sizes where the call pays.

Arguments are text, in the order of the C function: "int32 101", "int32 m * 2", "float32 1.0", "float32* a", "float32*
out[64 * j, 0]". Names are those of dimensions (`operands`) and of loops; expressions have + - * // %, min(...) and
max(...).
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import lru_cache

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError, ParseError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.parser_base import ParserBase
from relaxlite.ir.pattern import Match, Pattern
from relaxlite.ir.program import AddressOf, Buffer, CallingConvention, IndexValue, Literal, Value
from relaxlite.ir.symbolic import SymExpr, SymVar, substitute, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

OperandDims = tuple["str | int", ...]
SizeRange = tuple["int | None", "int | None"]

INTEGERS, FLOATS = ("int32", "int64"), ("float32", "float64")
OUT = "out"  # name of a single result; several are out0, out1, ...


@dataclass(frozen=True, slots=True)
class LibraryRule:
    """Entry of the rule table of `dispatch`. `relaxlite.register_library` documents each field."""

    name: str
    library: str
    symbol: str
    pattern: Pattern
    operands: Mapping[str, OperandDims | None]
    arguments: tuple[str, ...] = ()
    convention: CallingConvention = "c"
    loops: Mapping[str, str] = field(default_factory=dict)
    when: Mapping[str, SizeRange] = field(default_factory=dict)
    check: Callable[[Match], str | None] | None = None
    variable: tuple[str, ...] = ()  # operands that must depend on inputs of the model
    work: str = "0"
    keeps_fallback: bool = True
    file: str = ""
    reason: str = ""  # justification of `when`
    figures: Mapping[str, int] = field(default_factory=dict)  # amounts behind the reason

    def validate(self) -> None:
        """Raise InvalidArgumentError for a rule that can never be called.

        Built-in rules are not validated, to save time.
        """
        if not self.pattern.root_ops:
            raise self._error("its pattern does not begin with an op; begin it with is_op(...)")
        if not self.operands:
            raise self._error("it has no operands; name those that the pattern captures, in the routine's order")
        for name, dims in self.operands.items():
            for dim in dims or ():
                if not (isinstance(dim, int) or dim.isidentifier()):
                    raise self._error(f"the dimension {dim!r} of {name} is neither a name nor a number")
        names = {d for dims in self.operands.values() for d in dims or () if isinstance(d, str)}
        scope = {name: SymVar(name) for name in names}
        for text in self.when:
            self._expression(text, scope)
        for loop, extent in self.loops.items():
            self._expression(extent, scope)
            if not loop.isidentifier() or loop in names:
                raise self._error(f"the loop {loop!r} needs a name of its own")
        loops = {name: SymVar(name) for name in self.loops}
        self._expression(self.work, scope | loops)
        for text in self.arguments:
            self._check_argument(text, scope | loops)
        if self.convention != "arrays" and not self.arguments:
            raise self._error("a C function needs its arguments")

    def _check_argument(self, text: str, scope: Mapping[str, SymVar]) -> None:
        kind, rest = self._split(text)
        if kind.endswith("*"):
            name, indices = self._element(rest)
            outputs = [OUT, *(f"{OUT}{k}" for k in range(16))]
            if name not in self.operands and name not in outputs:
                raise self._error(f"argument {text!r} points to {name!r}{_suggestion(name, (*self.operands, OUT))}")
            for index in indices:
                self._expression(index, scope)
        elif kind in INTEGERS:
            self._expression(rest, scope)
        else:
            self._number(rest, text)

    def _error(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"library rule '{self.name}': {problem}")

    def _split(self, text: str) -> tuple[str, str]:
        kind, _, rest = text.strip().partition(" ")
        known = (*INTEGERS, *FLOATS)
        is_known = kind[:-1] in dtypes.ALL if kind.endswith("*") else kind in known
        if not is_known or not rest.strip():
            raise self._error(
                f"argument {text!r} is not one of {', '.join(known)} and a value, as 'int32 m * 2', nor the address of "
                f"an element, as 'float32* a[0, 0]'"
            )
        return kind, rest.strip()

    def _number(self, text: str, argument: str) -> float:
        try:
            return float(text)
        except ValueError as error:
            raise self._error(f"argument {argument!r} needs a number") from error

    def _element(self, text: str) -> tuple[str, tuple[str, ...]]:
        """Split "a[i, 0]" into the name and the indices; without indices the first element."""
        try:
            node = _parsed(text)
        except SyntaxError:
            node = None
        if isinstance(node, ast.Name):
            return node.id, ()
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            raise self._error(f"an address is written 'float32* a' or 'float32* a[i, 0]', not {text!r}")
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return node.value.id, tuple(map(ast.unparse, items))

    def _expression(self, text: str, scope: Mapping[str, SymVar]) -> SymExpr:
        reader = ParserBase([text])
        reader.scope = dict(scope)
        try:
            return reader.expr(_parsed(text))
        except (ParseError, SyntaxError) as error:
            raise self._error(f"{text!r} is no expression of its dimensions: {str(error).splitlines()[0]}") from error

    def evaluate(self, text: str, values: Mapping[str, SymExpr]) -> SymExpr:
        """Evaluate an expression for these values of dimensions and loops."""
        scope = {name: SymVar(name) for name in values}
        result = self._expression(text, scope)
        return substitute(result, {scope[name]: value for name, value in values.items()})

    def dtype_problem(self, types: Mapping[str, Type]) -> str | None:
        """Error text for an operand or result of another dtype than the routine takes; None if all match."""
        for kind, rest in map(self._split, self.arguments):
            ty = types.get(self._element(rest)[0]) if kind.endswith("*") else None
            if isinstance(ty, TensorType) and ty.dtype != kind[:-1]:
                return f"{self._element(rest)[0]} is {ty.dtype}, and {self.symbol} takes {kind[:-1]}; cast it before"
        return None

    # Application to a match

    def dimensions(self, match: Match, result: TensorType | None, analyzer: Analyzer) -> dict[str, SymExpr] | str:
        """Dimensions of a match by name; the reason as text where the operands do not fit the routine."""
        values: dict[str, SymExpr] = {}
        for name, dims in self.operands.items():
            if name not in match.captures and not name.startswith(OUT):
                return f"its pattern captures no '{name}'"
            ty = result if name == OUT else match.captures[name].ty
            if not isinstance(ty, TensorType) or ty.shape is None:
                return f"the shape of {name} is unknown"
            if dims is None:
                continue
            if len(dims) != len(ty.shape):
                return f"{name} has rank {len(ty.shape)}, not {len(dims)}"
            for dim, size in zip(dims, ty.shape, strict=True):
                expected = sym(dim) if isinstance(dim, int) else values.setdefault(dim, size)
                if not analyzer.can_prove_equal(expected, size):
                    return f"a dimension of {name} is {size}, which is not proven to be {expected}"
        return values

    def narrow_arguments(self, values: Mapping[str, SymExpr]) -> list[SymExpr]:
        """The 32-bit arguments that are the same in all iterations of the loops."""
        texts = [rest for kind, rest in map(self._split, self.arguments) if kind == "int32"]
        scope = {name: SymVar(name) for name in (*values, *self.loops)}
        loops = {scope[name] for name in self.loops}
        fixed = [text for text in texts if loops.isdisjoint(self._expression(text, scope).free_vars())]
        return [self.evaluate(text, values) for text in fixed]

    def call_arguments(self, buffers: Mapping[str, Buffer], values: Mapping[str, SymExpr]) -> tuple[Value, ...]:
        """Arguments of the call; `values` also holds the loop variables."""
        if self.convention == "arrays":
            return _array_descriptors(self._ordered_buffers(buffers))
        return tuple(self._argument(text, buffers, values) for text in self.arguments)

    def _ordered_buffers(self, buffers: Mapping[str, Buffer]) -> list[tuple[Buffer, bool]]:
        """Inputs in the order of the operands, then outputs, each with whether the routine writes the buffer."""
        inputs = [(buffers[name], False) for name in self.operands if not name.startswith(OUT)]
        return inputs + [(buffer, True) for name, buffer in buffers.items() if name.startswith(OUT)]

    def _argument(self, text: str, buffers: Mapping[str, Buffer], values: Mapping[str, SymExpr]) -> Value:
        kind, rest = self._split(text)
        if kind in INTEGERS:
            return IndexValue(self.evaluate(rest, values), kind)
        if kind in FLOATS:
            return Literal(self._number(rest, text), kind)
        name, index_texts = self._element(rest)
        buffer = buffers[name]
        indices = [self.evaluate(index, values) for index in index_texts] or [sym(0)] * len(buffer.shape)
        if len(indices) != len(buffer.shape):
            raise self._error(f"argument {text!r} has {len(indices)} indices, but {name} has rank {len(buffer.shape)}")
        return AddressOf(buffer, tuple(indices), is_written=name.startswith(OUT))


@lru_cache(maxsize=256)  # rules of several ranks share most texts
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f", which is none of {', '.join(known)}"


def _array_descriptors(operands: list[tuple[Buffer, bool]]) -> tuple[Value, ...]:
    """Descriptors of the arrays of a Python function in the format of runtime/libraries.py, then the addresses."""
    words: list[Value] = [Literal(sum(3 + len(buffer.shape) for buffer, _ in operands), "int64")]
    for buffer, is_written in operands:
        words += [Literal(n, "int64") for n in (dtypes.ALL.index(buffer.dtype), is_written, len(buffer.shape))]
        words += [IndexValue(dim) for dim in buffer.shape]
    starts = [AddressOf(b, (sym(0),) * len(b.shape), is_written) for b, is_written in operands]
    return (*words, *starts)


def remaining_compares(expr: SymExpr, limits: SizeRange, analyzer: Analyzer) -> list[tuple[SymExpr, str, int]]:
    """Comparisons of low <= expr <= high that are left for run time: (expression, "ge" or "le", limit)."""
    (low, high), (lower, upper) = limits, analyzer.bounds(expr)
    compares = []
    if low is not None and (lower is None or lower < low):
        compares.append((expr, "ge", low))
    if high is not None and (upper is None or upper > high):
        compares.append((expr, "le", high))
    return compares


def can_hold(expr: SymExpr, limits: SizeRange, analyzer: Analyzer) -> bool:
    """Whether low <= expr <= high may hold for some values of the symbols."""
    (low, high), (lower, upper) = limits, analyzer.bounds(expr)
    is_below = low is not None and upper is not None and upper < low
    return not is_below and not (high is not None and lower is not None and lower > high)
