"""What the two printers share: unique names, quoting, exact numbers, and lines under construction.

Names. A variable, buffer or symbol is printed under its own name made an ASCII identifier, with a suffix where that is
taken in the same definition: x, x_1, x_2. Whatever an identifier cannot say is printed beside it: `name="conv/1:0"`.
Names that are no longer in scope (a loop that has ended) may be used again.
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
    """The ASCII identifier nearest to a name; itself if it is one."""
    result = _NOT_IDENTIFIER.sub("_", name) or "v"
    if result[0].isdigit():
        result = f"v{result}"
    return f"{result}_" if result in RESERVED else result


def quote(text: str) -> str:
    """A Python string literal, in double quotes where that needs no escape."""
    plain = repr(text)
    return plain if '"' in text or plain[0] == '"' else f'"{plain[1:-1]}"'


def number_text(value: float | int | bool | np.generic) -> str:
    """A Python literal of exactly this value; `nan` and `inf` are words of the text form."""
    return repr(value.item() if isinstance(value, np.generic) else value)


def attr_text(value: AttrValue) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, tuple):
        return tuple_text(map(attr_text, value))
    return number_text(value) if value is not None else "None"


def tuple_text(items: Iterable[str]) -> str:
    result = tuple(items)
    return f"({result[0]},)" if len(result) == 1 else f"({', '.join(result)})"


def attr_items(attrs: Mapping[str, AttrValue], taken: Iterable[str]) -> list[str]:
    """`name=value` for each attribute; those whose name cannot be a keyword here stand together in `attrs={...}`."""
    awkward = {n for n in attrs if n in taken or not n.isascii() or not n.isidentifier() or keyword.iskeyword(n)}
    items = [f"{name}={attr_text(value)}" for name, value in attrs.items() if name not in awkward]
    if awkward:
        pairs = (f"{quote(name)}: {attr_text(value)}" for name, value in attrs.items() if name in awkward)
        items.append(f"attrs={{{', '.join(pairs)}}}")
    return items


def fact_items(var: SymVar) -> list[str]:
    """What a symbol declares beyond the default facts, as keyword arguments."""
    items = [] if var.lower == 0 else [f"lower={var.lower}"]
    items += [] if var.upper is None else [f"upper={var.upper}"]
    return items if var.divisor == 1 else [*items, f"divisor={var.divisor}"]


def attrs_key(attrs: Attrs) -> str:
    """Equal for equal attributes: unlike `==`, it tells 1 from 1.0 and True, and NaN is itself."""
    return ",".join(f"{name}={attr_text(value)}" for name, value in attrs.items())


# Arrays


def array_text(array: Array) -> str:
    """Nested lists of exact numbers (a 0-d array: one number)."""
    if array.ndim:
        return f"[{', '.join(map(array_text, array))}]"
    is_float = dtypes.is_float(dtypes.from_numpy(array.dtype) or "")
    return _float_text(array) if is_float else number_text(array.item())


def _float_text(value: Array) -> str:
    """The shortest decimal that converts back to the same bits; zeros keep their sign."""
    exact = float(value)
    if exact != exact or exact in (float("inf"), -float("inf")):
        return repr(exact)
    text = str(value)
    text = text if any(mark in text for mark in ".e") else f"{text}.0"
    return text if np.asarray(float(text), value.dtype).tobytes() == value.tobytes() else repr(exact)


_digests: dict[int, tuple[weakref.ref[Array], str]] = {}  # by id: hashing all weights anew for each dump is slow


def content_digest(array: Array) -> str:
    """A hash of dtype, shape and elements (in hex); any NaN counts as the same NaN."""
    known = _digests.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    digest = hashlib.sha256(f"{array.dtype.name}{array.shape}".encode())
    digest.update(np.ascontiguousarray(_plain_nan(array)).reshape(-1).view(np.uint8).data)
    result, ident = digest.hexdigest()[:32], id(array)
    _digests[ident] = (weakref.ref(array, lambda _: _digests.pop(ident, None)), result)
    return result


def _plain_nan(array: Array) -> Array:
    if not dtypes.is_float(dtypes.from_numpy(array.dtype) or ""):
        return array
    with np.errstate(invalid="ignore"):  # signalling NaN
        is_nan = array != array
    return np.where(is_nan, np.array(np.nan, array.dtype), array) if is_nan.any() else array


# Names and lines


class Names:
    """Unique identifiers for nodes (compared by identity)."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._used = set(reserved)
        self._of: dict[Hashable, str] = {}
        self._tried: dict[str, int] = {}  # base -> suffixes below this one are all in use

    def get(self, node: Hashable) -> str | None:
        return self._of.get(node)

    def bind(self, node: Hashable, name: str) -> str:
        """A new identifier for a node, near to `name`."""
        self._of[node] = result = self.fresh(name)
        return result

    def fresh(self, name: str) -> str:
        base = identifier(name)
        result = base
        if base in self._used:
            count = self._tried.get(base, 1)
            while f"{base}_{count}" in self._used:
                count += 1
            self._tried[base] = count + 1
            result = f"{base}_{count}"
        self._used.add(result)
        return result

    def release(self, ident: str) -> None:
        """The identifier may be given to another node."""
        self._used.discard(ident)
        self._tried.clear()

    @contextmanager
    def scoped(self, node: Hashable, name: str) -> Iterator[str]:
        """`bind` for as long as the context lasts."""
        outer = self._of.get(node)
        ident = self.bind(node, name)
        yield ident
        self.release(ident)
        del self._of[node]
        if outer is not None:
            self._of[node] = outer


class Writer:
    """Lines under construction. What must be said before a line (`first`) is put in front of it."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.lines: list[str] = []
        self._first: list[str] = []
        self._depth = 0
        self._stand_ins: dict[str, SymVar] = {}  # symbols whose own names are not the ones shown

    def emit(self, text: str) -> None:
        """A line, or several: a header wrapped over lines."""
        margin = INDENT * self._depth
        self.lines.extend(margin + line for line in self._first)
        self._first.clear()
        self.lines.extend((margin + text).replace("\n", "\n" + margin).split("\n"))

    def first(self, *lines: str) -> None:
        """Lines to stand before the one that is being made."""
        self._first.extend(lines)

    def take_first(self) -> list[str]:
        """Take those lines back, to place them elsewhere."""
        lines, self._first = self._first, []
        return lines

    @contextmanager
    def indented(self) -> Iterator[None]:
        self._depth += 1
        start = len(self.lines)
        yield
        if len(self.lines) == start:
            self.emit("pass")
        self._depth -= 1

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    def symbol(self, var: SymVar) -> str:
        """A symbol is declared in front of the line where it first occurs."""
        known = self.names.get(var)
        if known is None:
            known = self.names.bind(var, var.name)
            self.first(f"{known} = symbol({', '.join([quote(var.name), *fact_items(var)])})")
        return known

    def expr(self, expr: SymExpr) -> str:
        """The canonical form under the names that are shown: the order of terms, and signs, depend on names."""
        if isinstance(expr, SymVar):
            return self.symbol(expr)
        shown = {v: self._shown(v) for v in expr.free_vars() if self.symbol(v) != v.name}
        expr = substitute(expr, shown) if shown else expr
        text = str(expr)
        return text[1:-1] if isinstance(expr, Division) else text  # its own parentheses

    def _shown(self, var: SymVar) -> SymVar:
        ident = self.symbol(var)
        if ident not in self._stand_ins:
            self._stand_ins[ident] = SymVar(ident)
        return self._stand_ins[ident]

    def dims(self, exprs: Iterable[SymExpr]) -> str:
        return tuple_text(map(self.expr, exprs))


def name_items(name: str, *, shown: str | None = None) -> list[str]:
    """`name=...` where the identifier does not tell the name: always if `shown` is given and differs."""
    is_told = name == shown if shown is not None else identifier(name) == name
    return [] if is_told else [f"name={quote(name)}"]


def header(start: str, params: list[str], end: str) -> str:
    """`start(params)end`, wrapped when it is long."""
    line = f"{start}({', '.join(params)}){end}"
    if len(line) <= MAX_LINE or not params:
        return line
    return f"{start}(\n" + "".join(f"{INDENT}{param},\n" for param in params) + f"){end}"
