"""The part of what a block of quantized weights adds that products of tiles can compute (schedule_tiles.py).

    start + x[row, 0:4] . quads[0, column] + x[row, 4:8] . quads[1, column] + ...

with bytes of both; or two such sums, the first shifted, of the high and low bytes of x. Zero points that stand in the
start go into the quads where these stay signed bytes; and where shifted quads are bytes, too, two sums are one of twice
the depth.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.ir.intrinsics import LOOKUP, WORD, WORDS
from relaxlite.ir.ops.block_codes import four_bytes
from relaxlite.ir.ops.scalars import Scalar
from relaxlite.ir.program import Binary, Cast, Intrinsic, Literal, Load, Value
from relaxlite.ir.program_visitor import value_children, walk_values
from relaxlite.ir.symbolic import SymVar, as_int
from relaxlite.passes.prologue import Instead, symbols_of
from relaxlite.records import dataclass

MOST_DEPTH = 64  # bytes in a row of a tile
ORIGIN = 3 << 22
"""As a float32, its bits plus an integer below 2**22 are those of ORIGIN + this integer: MOST_DEPTH * 255 * 128 is."""

_ONES, _SIGN = 0x01010101, 128
_SIGNS = _SIGN * _ONES - (1 << 32)
_BITS = {"float16": 11, "bfloat16": 8, "int8": 8, "uint8": 8}  # of a number, without its exponent
_FLOAT_BITS = 24
_EXACT = _FLOAT_BITS - (ORIGIN >> 22).bit_length()


@dataclass(frozen=True, slots=True)
class _Sum:
    """start + the products of a block's quads with words of x."""

    start: Value
    codes: tuple[Value, ...]
    x: Load  # the first byte

    @property
    def depth(self) -> int:
        return 4 * len(self.codes)


@dataclass(frozen=True, slots=True)
class Products:
    """`value`, the integer that a block comes to, by products of tiles: start + (the first << shift) + the second."""

    value: Value
    x: tuple[Load, ...]  # where the first row of each product's x begins
    quads: tuple[Value, ...]  # what they are multiplied by, one row of a tile each
    is_signed: bool
    start: Value | None
    shift: int = 0

    @property
    def depth(self) -> int:
        """Bytes in a row."""
        return 4 * len(self.quads)

    def of_floats(self, value: Value, rows: SymVar, made: Value) -> Value | None:
        """`value` out of ORIGIN + products, or None. A product times a scale of its column is rounded once, as
        float(product) * scale would be: the scale has so few bits that ORIGIN * scale is exact."""
        if len(self.x) > 1 or self.start is not None:
            return None
        for part in walk_values(value):
            if not isinstance(part, Binary) or part.op != "mul" or not isinstance(part.a, Cast):
                continue
            if part.a.x is self.value and rows not in symbols_of(part.b) and _significant(part.b) <= _EXACT:
                offset = Binary("mul", part.b, Literal(-float(ORIGIN), "float32"))
                found = Instead({id(part): Intrinsic("fma", (made, part.b, offset), "float32")}).value(value)
                return None if any(v is self.value for v in walk_values(found)) else found
        return None

    def combined(self, made: Sequence[Value]) -> Value:
        total = Scalar(made[0])
        if len(made) > 1:
            total = total.binary("shift_left", self.shift) + Scalar(made[1])
        return (total if self.start is None else Scalar(self.start) + total).value


def find_products(value: Value) -> Products | None:
    """The part of a value that tiles can compute; None: there is none, or more than one."""
    found = _products(value)
    if found is not None:
        return found
    parts = [part for child in value_children(value) if (part := find_products(child)) is not None]
    return parts[0] if len(parts) == 1 else None


def _products(value: Value) -> Products | None:
    """A sum of dot products, or such a sum shifted plus another."""
    last = _sum(value)
    if last is not None:
        return _laid_out(value, (last,), 0)
    if not isinstance(value, Binary) or value.op != "add" or not isinstance(value.a, Binary):
        return None
    shifted, last = value.a, _sum(value.b)
    if shifted.op != "shift_left" or not isinstance(shifted.b, Literal):
        return None
    high = _sum(shifted.a)
    if high is None or last is None or _zero_of(high.start) != 0 or len(high.codes) != len(last.codes):
        return None
    if any(a is not b for a, b in zip(high.codes, last.codes, strict=True)):
        return None
    return _laid_out(value, (high, last), int(shifted.b.value))


def _laid_out(value: Value, sums: tuple[_Sum, ...], shift: int) -> Products:
    """Zero points that starts stand for go into the codes. Two sums are one where shifted codes are bytes, too."""
    last = sums[-1]
    zero, bits = _zero_of(last.start), max(map(_bits_of, last.codes))
    is_signed = bool(zero) and (bits < 8 or zero == _SIGN)
    codes = [Scalar(code) for code in last.codes]
    if is_signed and zero == _SIGN:
        codes = [code.binary("xor", _SIGNS) for code in codes]
    elif is_signed:  # no byte borrows from the next
        codes = [((code | _SIGNS) - (zero or 0) * _ONES).binary("xor", _SIGNS) for code in codes]
    x = tuple(s.x for s in sums)
    start = None if is_signed or zero == 0 else last.start
    follows = len(x) > 1 and as_int(x[1].indices[-1] - x[0].indices[-1]) == last.depth
    least, most = (-(zero or 0), (1 << bits) - 1 - (zero or 0)) if is_signed else (0, (1 << bits) - 1)
    is_byte = least << shift >= -128 and most << shift <= (127 if is_signed else 255)
    if follows and is_byte and 2 * last.depth <= MOST_DEPTH:
        raised = [code.binary("shift_left", shift) & four_bytes(255 << shift & 255) for code in codes]
        codes, x = [*raised, *codes], x[:1]
    return Products(value, x, tuple(code.value for code in codes), is_signed, start, shift)


def _zero_of(start: Value) -> int | None:
    """The zero point z in 0 - z * (the sum of x), which matmul_blocks starts from; 0 for 0."""
    if isinstance(start, Literal) and start.value == 0:
        return 0
    if not isinstance(start, Binary) or start.op != "sub" or _zero_of(start.a) != 0:
        return None
    taken = start.b
    if not isinstance(taken, Binary) or taken.op != "mul" or not isinstance(taken.a, Load):
        return None
    return int(taken.b.value) if isinstance(taken.b, Literal) else None


def _bits_of(code: Value) -> int:
    """Of the bytes of a quad, which are masked or anything."""
    if isinstance(code, Binary) and code.op == "and" and isinstance(code.b, Literal):
        return (int(code.b.value) & 255).bit_length()
    if isinstance(code, Intrinsic) and code.name == LOOKUP:
        words = [int(word.value) for word in code.args[1:] if isinstance(word, Literal)]
        return max(word >> shift & 255 for word in words for shift in (0, 8, 16, 24)).bit_length()
    if isinstance(code, Binary) and code.op == "or":
        return max(_bits_of(code.a), _bits_of(code.b))
    if isinstance(code, Binary) and code.op == "shift_left" and isinstance(code.b, Literal):
        return _bits_of(code.a) + int(code.b.value)
    return 8


def _sum(value: Value) -> _Sum | None:
    """Two chains of dot products, added."""
    if not isinstance(value, Binary) or value.op != "add":
        return None
    (start, first), (other, second) = _chain(value.a), _chain(value.b)
    if not first or not second or not isinstance(other, Literal) or other.value != 0:
        return None
    terms: list[tuple[int, Value, Load]] = []
    base = first[0][1]
    for code, load in (*first, *second):
        offset = as_int(load.indices[-1] - base.indices[-1])
        if load.buffer is not base.buffer or load.indices[:-1] != base.indices[:-1] or offset is None:
            return None
        terms.append((offset, code, load))
    terms.sort(key=lambda term: term[0])
    if [offset for offset, _, _ in terms] != list(range(0, 4 * len(terms), 4)):
        return None
    return _Sum(start, tuple(code for _, code, _ in terms), terms[0][2])


def _chain(value: Value) -> tuple[Value, list[tuple[Value, Load]]]:
    """What a chain of dot products starts from, and its terms: quads, and the first byte of their words of x."""
    terms: list[tuple[Value, Load]] = []
    while isinstance(value, Intrinsic) and value.name == WORDS:
        total, code, word, _ = value.args
        if not isinstance(word, Intrinsic) or word.name != WORD or not isinstance(word.args[0], Load):
            return value, []
        terms.append((code, word.args[0]))
        value = total
    return value, terms[::-1]


def _significant(value: Value) -> int:
    """How many bits a float32 needs at most, its exponent aside."""
    if isinstance(value, Cast) and value.dtype == "float32" and isinstance(value.x, Load):
        return _BITS.get(value.x.dtype, _FLOAT_BITS)
    if isinstance(value, Binary) and value.op == "mul":
        return min(_FLOAT_BITS, _significant(value.a) + _significant(value.b))
    return _FLOAT_BITS
