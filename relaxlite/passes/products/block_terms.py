"""The part of what a block of quantized weights adds that products of tiles can compute (blocks_amx.py).

    start + x[row, 0:4] . quads[0, column] + x[row, 4:8] . quads[1, column] + ...

with bytes of both; or two such sums, the first shifted, of the high and low bytes of x. Zero points, and offsets of
mixed codes, that stand in the start go into the quads where these stay signed bytes; and where shifted quads are bytes,
too, two sums are one of twice the depth.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.ir.intrinsics import DOT4_BYTES, PACKED_BYTES
from relaxlite.ir.ops.block_codes import four_bytes
from relaxlite.ir.ops.scalars import Scalar
from relaxlite.ir.program import Binary, Cast, Intrinsic, Literal, Load, Value
from relaxlite.ir.program_visitor import value_children, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int
from relaxlite.passes.products.prologue import Replacement, symbols_of
from relaxlite.records import dataclass

MAX_DEPTH = 64  # bytes in a row of a tile
ORIGIN = 3 << 22
"""As a float32, its bits plus an integer below MOVED are those of ORIGIN + this integer: MAX_DEPTH * 255 * 128 is."""
ORIGIN_BITS, MOVED = 0x4B400000, 1 << 22

SIGN = 128  # that a signed byte is moved by to be an unsigned one, as its xor with it does
SIGNS = four_bytes(SIGN)
_ONES = 0x01010101
_BITS = {"float16": 11, "bfloat16": 8, "int8": 8, "uint8": 8}  # of a number, without its exponent
FLOAT_BITS = 24
_EXACT = FLOAT_BITS - (ORIGIN >> 22).bit_length()


@dataclass(frozen=True, slots=True)
class _Term:
    """A dot product: a quad, the first byte of a word of x, and the greatest that the quad's bytes may be."""

    code: Value
    x: Load
    greatest: int


@dataclass(frozen=True, slots=True)
class Sum:
    """start + the products of a block's quads with words of x."""

    start: Value
    codes: tuple[Value, ...]
    greatest: int  # of their bytes
    x: Load  # the first byte

    @property
    def depth(self) -> int:
        return 4 * len(self.codes)

    def word(self, q: SymExpr) -> Value:
        """The four bytes of x that quad q is multiplied by."""
        *before, first = self.x.indices
        return Intrinsic(
            PACKED_BYTES, tuple(Load(self.x.buffer, (*before, first + q * 4 + b)) for b in range(4)), "int32"
        )


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
        part = scaled_at_once(value, self.value, rows)
        if part is None:
            return None
        offset = Binary("mul", part.b, Literal(-float(ORIGIN), "float32"))
        result = Replacement({id(part): Intrinsic("fma", (made, part.b, offset), "float32")}).value(value)
        return None if any(v is self.value for v in walk_values(result)) else result

    def combined(self, made: Sequence[Value]) -> Value:
        total = Scalar(made[0])
        if len(made) > 1:
            total = total.binary("shift_left", self.shift) + Scalar(made[1])
        return (total if self.start is None else Scalar(self.start) + total).value


@dataclass(frozen=True, slots=True)
class Sums:
    """`value`, the integer that a block comes to: a sum, or one shifted plus another of the same quads."""

    value: Value
    sums: tuple[Sum, ...]
    shift: int = 0

    @property
    def symbols(self) -> set[SymVar]:
        """What the places of x depend on."""
        return {v for part in self.sums for index in part.x.indices for v in index.free_vars()}


def scaled(value: Value, total: Value) -> Binary | None:
    """Where a value multiplies the total, as a float, with something."""
    for part in walk_values(value):
        if isinstance(part, Binary) and part.op == "mul" and isinstance(part.a, Cast) and part.a.x is total:
            return part
    return None


def scaled_at_once(value: Value, total: Value, rows: SymVar) -> Binary | None:
    """The same, where the other is a scale of the column of so few bits that ORIGIN * scale is exact."""
    part = scaled(value, total)
    return None if part is None or rows in symbols_of(part.b) or significant(part.b) > _EXACT else part


def find_products(value: Value) -> Products | None:
    """The part of a value that tiles can compute; None: there is none, or more than one."""
    sums = find_sums(value)
    return None if sums is None else _laid_out(sums.value, sums.sums, sums.shift)


def find_sums(value: Value) -> Sums | None:
    """The part of a value that is sums of dot products; None: there is none, or more than one."""
    result = _sums(value)
    if result is not None:
        return result
    parts = [part for child in value_children(value) if (part := find_sums(child)) is not None]
    return parts[0] if len(parts) == 1 else None


def largest(found: Sums) -> int | None:
    """How far from 0 the sums may be; None: that is not known."""
    last = found.sums[-1]
    zeros = zeros_of(last)
    if not any(zeros) and _zero_of(last.start) != 0:
        return None
    of_codes = sum(4 * max(zero, last.greatest - zero) for zero in zeros)
    return of_codes * (SIGN if len(found.sums) == 1 else SIGN + (SIGN << found.shift))


def _sums(value: Value) -> Sums | None:
    """A sum of dot products, or such a sum shifted plus another."""
    last = _sum(value)
    if last is not None:
        return Sums(value, (last,))
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
    return Sums(value, (high, last), int(shifted.b.value))


def _laid_out(value: Value, sums: tuple[Sum, ...], shift: int) -> Products:
    """Zero points that starts stand for go into the codes. Two sums are one where shifted codes are bytes, too."""
    last = sums[-1]
    zeros, greatest, codes = zeros_of(last), last.greatest, [Scalar(code) for code in last.codes]
    is_signed = any(zeros) and fit_signed(zeros, greatest)
    if is_signed:
        codes = [less_zero(code, zero) for code, zero in zip(codes, zeros, strict=True)]
    x = tuple(s.x for s in sums)
    start = None if is_signed or _zero_of(last.start) == 0 else last.start
    follows = len(x) > 1 and as_int(x[1].indices[-1] - x[0].indices[-1]) == last.depth
    bits = greatest.bit_length()
    least, most = (-max(zeros), (1 << bits) - 1 - min(zeros)) if is_signed else (0, (1 << bits) - 1)
    is_byte = least << shift >= -128 and most << shift <= (127 if is_signed else 255)
    if follows and is_byte and 2 * last.depth <= MAX_DEPTH:
        raised = [code.binary("shift_left", shift) & four_bytes(255 << shift & 255) for code in codes]
        codes, x = [*raised, *codes], x[:1]
    return Products(value, x, tuple(code.value for code in codes), is_signed, start, shift)


def fit_signed(zeros: Sequence[int], greatest: int) -> bool:
    """Whether all quads, of bytes up to `greatest`, less their zero points are made signed bytes by `less_zero`."""
    return all(zero == SIGN or greatest < SIGN for zero in zeros)


def less_zero(code: Scalar, zero: int) -> Scalar:
    """Each byte of a quad less the zero point, as a signed byte."""
    if zero == SIGN:
        return code.binary("xor", SIGNS)
    return ((code | SIGNS) - zero * _ONES).binary("xor", SIGNS) if zero else code  # no byte borrows from the next


def zeros_of(summed: Sum) -> list[int]:
    """What the start takes off each quad; nothing where that is not known."""
    zero = _zero_of(summed.start)
    if zero is not None:
        return [zero] * len(summed.codes)
    offset = _offset_of(summed.start)
    if offset is None:
        return [0] * len(summed.codes)
    return [offset if _has_offset(code, offset) else 0 for code in summed.codes]


def _zero_of(start: Value) -> int | None:
    """The zero point z in 0 - z * (the sum of x), which matmul_blocks starts from; 0 for 0."""
    if isinstance(start, Literal) and start.value == 0:
        return 0
    taken = _taken(start)
    return taken[0] if taken is not None and _zero_of(taken[1]) == 0 else None


def _offset_of(start: Value) -> int | None:
    """The offset z in 0 + z * (a sum of x) - z * (the sum of x), which mixed codes start from: some have an offset, and
    the first sum is that of the others' x."""
    last = _taken(start)
    first = None if last is None else _taken(last[1])
    if last is None or first is None or _zero_of(first[1]) != 0:
        return None
    return last[0] if first[0] == -last[0] else None


def _has_offset(code: Value, offset: int) -> bool:
    """Whether an offset was added to each byte."""
    if not isinstance(code, Binary) or code.op != "add" or not isinstance(code.b, Literal):
        return False
    return code.b.value == four_bytes(offset)


def _taken(start: Value) -> tuple[int, Value] | None:
    """(z, rest) where the start is the rest - z * a sum."""
    if not isinstance(start, Binary) or start.op != "sub":
        return None
    taken = start.b
    if not isinstance(taken, Binary) or taken.op != "mul" or not isinstance(taken.a, Load):
        return None
    return (int(taken.b.value), start.a) if isinstance(taken.b, Literal) else None


def _sum(value: Value) -> Sum | None:
    """Two chains of dot products, added."""
    if not isinstance(value, Binary) or value.op != "add":
        return None
    (start, first), (other, second) = _chain(value.a), _chain(value.b)
    if not first or not second or not isinstance(other, Literal) or other.value != 0:
        return None
    terms: list[tuple[int, _Term]] = []
    base = first[0].x
    for term in (*first, *second):
        offset = as_int(term.x.indices[-1] - base.indices[-1])
        if term.x.buffer is not base.buffer or term.x.indices[:-1] != base.indices[:-1] or offset is None:
            return None
        terms.append((offset, term))
    terms.sort(key=lambda term: term[0])
    if [offset for offset, _ in terms] != list(range(0, 4 * len(terms), 4)):
        return None
    result = [term for _, term in terms]
    return Sum(start, tuple(t.code for t in result), max(t.greatest for t in result), result[0].x)


def _chain(value: Value) -> tuple[Value, list[_Term]]:
    """What a chain of dot products starts from, and its terms."""
    terms: list[_Term] = []
    while isinstance(value, Intrinsic) and value.name == DOT4_BYTES:
        total, code, word, greatest, _ = value.args
        if not isinstance(word, Intrinsic) or word.name != PACKED_BYTES or not isinstance(word.args[0], Load):
            return value, []
        if not isinstance(greatest, Literal):
            return value, []
        terms.append(_Term(code, word.args[0], int(greatest.value)))
        value = total
    return value, terms[::-1]


def significant(value: Value) -> int:
    """How many bits a float32 needs at most, its exponent aside."""
    if isinstance(value, Cast) and value.dtype == "float32" and isinstance(value.x, Load):
        return _BITS.get(value.x.dtype, FLOAT_BITS)
    if isinstance(value, Binary) and value.op == "mul":
        return min(FLOAT_BITS, significant(value.a) + significant(value.b))
    return FLOAT_BITS
