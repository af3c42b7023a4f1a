"""Text utilities of the printers: unique names, quoting, exact numbers, lines under construction.

A variable, buffer or symbol is printed as an ASCII identifier derived from its name, with a suffix if that is taken in
the same definition: x, x_1, x_2. A name that is not an identifier is printed beside it: `name="conv/1:0"`. Identifiers
are reused when they go out of scope, as after a loop.
"""

from __future__ import annotations

import hashlib
import keyword
import re
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Array, Attrs, AttrValue
from relaxlite.ir.symbolic import Division, SymExpr, SymVar, substitute

INDENT = "    "
MAX_LINE = 110  # longer headers are wrapped, one parameter per line
_TYPE_NAMES = ("Tensor", "Shape", "Tuple", "Func", "Object", "Buffer")
RESERVED = frozenset({*keyword.kwlist, *_TYPE_NAMES, "constants", "nan", "inf"})
_NOT_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]")


def identifier(name: str) -> str:
    """Convert a name to an ASCII identifier; a valid identifier is unchanged."""
    result = _NOT_IDENTIFIER.sub("_", name) or "v"
    if result[0].isdigit():
        result = f"v{result}"
    return f"{result}_" if result in RESERVED else result


def quote(text: str) -> str:
    """Python string literal, in double quotes if that needs no escapes."""
    plain = repr(text)
    return plain if '"' in text or plain[0] == '"' else f'"{plain[1:-1]}"'


def number_text(value: float | int | bool | np.generic) -> str:
    """Python literal of exactly this value; `nan` and `inf` are keywords of the text form."""
    return repr(value.item() if isinstance(value, np.generic) else value)


def attr_text(value: AttrValue) -> str:
    """Python literal of an attribute value."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, tuple):
        return tuple_text(map(attr_text, value))
    return number_text(value) if value is not None else "None"


def tuple_text(items: Iterable[str]) -> str:
    """Python tuple of printed items."""
    texts = tuple(items)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def attr_items(attrs: Mapping[str, AttrValue], taken: Iterable[str]) -> list[str]:
    """Keyword arguments `name=value` of attributes; names in `taken` or invalid as keywords go into `attrs={...}`."""
    not_keywords = {n for n in attrs if n in taken or not n.isascii() or not n.isidentifier() or keyword.iskeyword(n)}
    items = [f"{name}={attr_text(value)}" for name, value in attrs.items() if name not in not_keywords]
    if not_keywords:
        pairs = (f"{quote(name)}: {attr_text(value)}" for name, value in attrs.items() if name in not_keywords)
        items.append(f"attrs={{{', '.join(pairs)}}}")
    return items


def fact_items(var: SymVar) -> list[str]:
    """Keyword arguments for the facts of a symbol that differ from the defaults."""
    items = [] if var.lower == 0 else [f"lower={var.lower}"]
    items += [] if var.upper is None else [f"upper={var.upper}"]
    return items if var.divisor == 1 else [*items, f"divisor={var.divisor}"]


def attrs_key(attrs: Attrs) -> str:
    """Comparison key of attributes: unlike `==`, it distinguishes 1, 1.0 and True, and NaN equals NaN."""
    return ",".join(f"{name}={attr_text(value)}" for name, value in attrs.items())


# Arrays


def array_text(array: Array) -> str:
    """Python literal of an array: nested lists of exact numbers; one number for a 0-d array."""
    if array.ndim:
        return f"[{', '.join(map(array_text, array))}]"
    is_float = dtypes.is_float(dtypes.from_numpy(array.dtype) or "")
    return _float_text(array) if is_float else number_text(array.item())


def _float_text(value: Array) -> str:
    """Shortest decimal that converts back to the same bits, with the sign of zeros."""
    exact = float(value)
    if exact != exact or exact in (float("inf"), -float("inf")):
        return repr(exact)
    text = str(value)
    text = text if any(mark in text for mark in ".e") else f"{text}.0"
    return text if np.asarray(float(text), value.dtype).tobytes() == value.tobytes() else repr(exact)


_digests: dict[
    int, tuple[weakref.ref[Array], str]
] = {}  # by array id: hashing weights is slow, and each dump needs the hashes


def content_digest(array: Array) -> str:
    """Hash of dtype, shape and elements, as 32 hexadecimal digits; all NaNs are equal."""
    known = _digests.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    digest = hashlib.sha256(f"{array.dtype.name}{array.shape}".encode())
    digest.update(np.ascontiguousarray(_canonical_nan(array)).reshape(-1).view(np.uint8).data)
    result, ident = digest.hexdigest()[:32], id(array)
    _digests[ident] = (weakref.ref(array, lambda _: _digests.pop(ident, None)), result)
    return result


def _canonical_nan(array: Array) -> Array:
    if not dtypes.is_float(dtypes.from_numpy(array.dtype) or ""):
        return array
    with np.errstate(invalid="ignore"):  # signalling NaN
        is_nan = array != array
    return np.where(is_nan, np.array(np.nan, array.dtype), array) if is_nan.any() else array


# Identifiers and lines


class UniqueNames:
    """Unique identifiers of nodes, which are compared by identity."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._used = set(reserved)
        self._of: dict[Hashable, str] = {}
        self._next_suffix: dict[str, int] = {}  # base -> first suffix that may be free

    def get(self, node: Hashable) -> str | None:
        """Identifier of a node, or None."""
        return self._of.get(node)

    def bind(self, node: Hashable, name: str) -> str:
        """Assign a new identifier, derived from `name`, to a node."""
        self._of[node] = result = self.fresh(name)
        return result

    def fresh(self, name: str) -> str:
        """Reserve a new identifier derived from `name`."""
        base = identifier(name)
        result = base
        if base in self._used:
            count = self._next_suffix.get(base, 1)
            while f"{base}_{count}" in self._used:
                count += 1
            self._next_suffix[base] = count + 1
            result = f"{base}_{count}"
        self._used.add(result)
        return result

    def release(self, ident: str) -> None:
        """Make an identifier available for another node."""
        self._used.discard(ident)
        self._next_suffix.clear()

    @contextmanager
    def scoped(self, node: Hashable, name: str) -> Iterator[str]:
        """Assign an identifier to a node, as `bind` does, until the context ends."""
        outer = self._of.get(node)
        ident = self.bind(node, name)
        yield ident
        self.release(ident)
        del self._of[node]
        if outer is not None:
            self._of[node] = outer


class TextWriter:
    """Text under construction, line by line. Declarations (`first`) are inserted before the next emitted line."""

    def __init__(self, names: UniqueNames) -> None:
        self.names = names
        self.lines: list[str] = []
        self._first: list[str] = []
        self._depth = 0
        self._renamed_symbols: dict[
            str, SymVar
        ] = {}  # identifier -> symbol of that name, for symbols that were renamed

    def emit(self, text: str) -> None:
        """Append a line, or several for a wrapped header, at the current indentation."""
        margin = INDENT * self._depth
        self.lines.extend(margin + line for line in self._first)
        self._first.clear()
        self.lines.extend((margin + text).replace("\n", "\n" + margin).split("\n"))

    def first(self, *lines: str) -> None:
        """Insert lines before the next emitted line."""
        self._first.extend(lines)

    def take_first(self) -> list[str]:
        """Remove and return the pending lines of `first`, to insert them elsewhere."""
        lines, self._first = self._first, []
        return lines

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Indent the lines emitted in the context; an empty block gets `pass`."""
        self._depth += 1
        start = len(self.lines)
        yield
        if len(self.lines) == start:
            self.emit("pass")
        self._depth -= 1

    def text(self) -> str:
        """Text of all lines."""
        return "".join(f"{line}\n" for line in self.lines)

    def symbol(self, var: SymVar) -> str:
        """Identifier of a symbol; declares the symbol before the line of its first use."""
        ident = self.names.get(var)
        if ident is None:
            ident = self.names.bind(var, var.name)
            self.first(f"{ident} = symbol({', '.join([quote(var.name), *fact_items(var)])})")
        return ident

    def expr(self, expr: SymExpr) -> str:
        """Print an expression in the canonical form under printed names: order of terms and signs depend on names."""
        if isinstance(expr, SymVar):
            return self.symbol(expr)
        renamed = {v: self._printed_symbol(v) for v in expr.free_vars() if self.symbol(v) != v.name}
        expr = substitute(expr, renamed) if renamed else expr
        text = str(expr)
        return text[1:-1] if isinstance(expr, Division) else text  # without outer parentheses

    def _printed_symbol(self, var: SymVar) -> SymVar:
        ident = self.symbol(var)
        if ident not in self._renamed_symbols:
            self._renamed_symbols[ident] = SymVar(ident)
        return self._renamed_symbols[ident]

    def dims(self, exprs: Iterable[SymExpr]) -> str:
        """Print a tuple of expressions."""
        return tuple_text(map(self.expr, exprs))


def name_items(name: str, *, shown: str | None = None) -> list[str]:
    """Keyword `name=...` if the printed identifier `shown` (by default, one derived from `name`) is not the name."""
    is_implied = name == shown if shown is not None else identifier(name) == name
    return [] if is_implied else [f"name={quote(name)}"]


def header(start: str, params: list[str], end: str) -> str:
    """Header `start(params)end`, one parameter per line if longer than `MAX_LINE`."""
    line = f"{start}({', '.join(params)}){end}"
    if len(line) <= MAX_LINE or not params:
        return line
    return f"{start}(\n" + "".join(f"{INDENT}{param},\n" for param in params) + f"){end}"
