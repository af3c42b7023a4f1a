"""Matching of the integer sums that a block of weights contributes, which AMX and others compute (blocks_amx.py).

    start + x[row, 0:4] . quads[0, column] + x[row, 4:8] . quads[1, column] + ...

with bytes of both, quads being dp4a groups of codes; or two such sums, the first shifted, of the high and low bytes
of x. Zero points, and offsets of mixed codes, that the start subtracts are folded into the codes where these stay
signed bytes; and where shifted codes are bytes, too, two sums become one of twice the depth.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.ir.intrinsics import DOT4_PACKED_U8S8, PACK_BYTES
from relaxlite.ir.ops.block_codes import replicate_byte
from relaxlite.ir.ops.scalars import Scalar
from relaxlite.ir.program import Binary, Cast, Intrinsic, Literal, Load, Value
from relaxlite.ir.program_visitor import value_children, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int
from relaxlite.passes.products.prologue import Replacement, symbols_of
from relaxlite.records import dataclass

MAX_DEPTH = 64  # bytes in a row of an AMX tile
ORIGIN = 3 << 22
"""Bits of float32(ORIGIN) plus an integer below MAX_ORIGIN_OFFSET: those of float32(ORIGIN + integer). Sums of
MAX_DEPTH products are below: MAX_DEPTH * 255 * 128."""
ORIGIN_BITS, MAX_ORIGIN_OFFSET = 0x4B400000, 1 << 22

SIGN = 128  # added to a signed byte to make it unsigned, by xor
SIGNS = replicate_byte(SIGN)
_ONES = 0x01010101
_SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8, "int8": 8, "uint8": 8}  # significant bits of a number
FLOAT_BITS = 24
_MAX_SCALE_BITS = FLOAT_BITS - (ORIGIN >> 22).bit_length()


@dataclass(frozen=True, slots=True)
class _Term:
    """A dot product of four bytes: a dp4a group of codes, the first byte of x, and the maximum of the codes."""

    code: Value
    x: Load
    greatest: int


@dataclass(frozen=True, slots=True)
class Sum:
    """start + the sum of products of a block's dp4a groups of codes with bytes of x."""

    start: Value
    codes: tuple[Value, ...]
    greatest: int  # maximum of the codes
    x: Load  # the first byte of x

    @property
    def depth(self) -> int:
        return 4 * len(self.codes)

    def word(self, q: SymExpr) -> Value:
        """Return the packed int32 of the four bytes of x that dp4a group `q` is multiplied by."""
        *before, first = self.x.indices
        return Intrinsic(
            PACK_BYTES, tuple(Load(self.x.buffer, (*before, first + q * 4 + b)) for b in range(4)), "int32"
        )


@dataclass(frozen=True, slots=True)
class Products:
    """The integer sum `value` of a block as AMX products: start + (first << shift) + second, or start + first."""

    value: Value
    x: tuple[Load, ...]  # the first byte of x of each product
    dp4a_groups: tuple[Value, ...]  # dp4a groups of codes, one row of an AMX tile each
    is_signed: bool
    start: Value | None
    shift: int = 0

    @property
    def depth(self) -> int:
        """Bytes in a row of x."""
        return 4 * len(self.dp4a_groups)

    def of_floats(self, value: Value, rows: SymVar, float_result: Value) -> Value | None:
        """Rewrite `value` to read `float_result`, the float ORIGIN + product, instead of the integer sum; None:
        impossible.

        fma(ORIGIN + product, scale, -ORIGIN * scale) is rounded once, as float(product) * scale would be: the scale has
        so few bits that ORIGIN * scale is exact.
        """
        if len(self.x) > 1 or self.start is not None:
            return None
        scaling = scaled_at_once(value, self.value, rows)
        if scaling is None:
            return None
        offset = Binary("mul", scaling.b, Literal(-float(ORIGIN), "float32"))
        rewritten = Replacement({id(scaling): Intrinsic("fma", (float_result, scaling.b, offset), "float32")}).value(
            value
        )
        return None if any(v is self.value for v in walk_values(rewritten)) else rewritten

    def combined(self, products: Sequence[Value]) -> Value:
        """Return the integer sum of a block from its one or two AMX products."""
        total = Scalar(products[0])
        if len(products) > 1:
            total = total.binary("shift_left", self.shift) + Scalar(products[1])
        return (total if self.start is None else Scalar(self.start) + total).value


@dataclass(frozen=True, slots=True)
class Sums:
    """The integer sum `value` of a block: one `Sum`, or (first << shift) + second with the same codes."""

    value: Value
    sums: tuple[Sum, ...]
    shift: int = 0

    @property
    def symbols(self) -> set[SymVar]:
        """Symbols in the indices of x."""
        return {v for part in self.sums for index in part.x.indices for v in index.free_vars()}


def scaled(value: Value, total: Value) -> Binary | None:
    """Find the product of float(total) and a scale in a value; None: there is none."""
    for part in walk_values(value):
        if isinstance(part, Binary) and part.op == "mul" and isinstance(part.a, Cast) and part.a.x is total:
            return part
    return None


def scaled_at_once(value: Value, total: Value, rows: SymVar) -> Binary | None:
    """Find the product of float(total) and a scale of the column so short that ORIGIN * scale is exact; None: none."""
    part = scaled(value, total)
    return None if part is None or rows in symbols_of(part.b) or significant_bits(part.b) > _MAX_SCALE_BITS else part


def find_products(value: Value) -> Products | None:
    """Find the part of a value that AMX products compute; None: there is none, or more than one."""
    sums = find_sums(value)
    return None if sums is None else _fold_zeros(sums.value, sums.sums, sums.shift)


def find_sums(value: Value) -> Sums | None:
    """Find the part of a value that is sums of dot products; None: there is none, or more than one."""
    result = _match_sums(value)
    if result is not None:
        return result
    parts = [part for child in value_children(value) if (part := find_sums(child)) is not None]
    return parts[0] if len(parts) == 1 else None


def largest(found: Sums) -> int | None:
    """Return a bound of the absolute value of the sums; None: unknown."""
    last = found.sums[-1]
    zeros = zeros_of(last)
    if not any(zeros) and _zero_of(last.start) != 0:
        return None
    of_codes = sum(4 * max(zero, last.greatest - zero) for zero in zeros)
    return of_codes * (SIGN if len(found.sums) == 1 else SIGN + (SIGN << found.shift))


def _match_sums(value: Value) -> Sums | None:
    """Match a sum of dot products, or such a sum shifted plus another; None: neither."""
    last = _match_sum(value)
    if last is not None:
        return Sums(value, (last,))
    if not isinstance(value, Binary) or value.op != "add" or not isinstance(value.a, Binary):
        return None
    shifted, last = value.a, _match_sum(value.b)
    if shifted.op != "shift_left" or not isinstance(shifted.b, Literal):
        return None
    high = _match_sum(shifted.a)
    if high is None or last is None or _zero_of(high.start) != 0 or len(high.codes) != len(last.codes):
        return None
    if any(a is not b for a, b in zip(high.codes, last.codes, strict=True)):
        return None
    return Sums(value, (high, last), int(shifted.b.value))


def _fold_zeros(value: Value, sums: tuple[Sum, ...], shift: int) -> Products:
    """Fold zero points of the start into the codes, and merge two sums into one where shifted codes are bytes."""
    last = sums[-1]
    zeros, greatest, codes = zeros_of(last), last.greatest, [Scalar(code) for code in last.codes]
    is_signed = any(zeros) and fit_signed(zeros, greatest)
    if is_signed:
        codes = [subtract_zero_point(code, zero) for code, zero in zip(codes, zeros, strict=True)]
    x = tuple(s.x for s in sums)
    start = None if is_signed or _zero_of(last.start) == 0 else last.start
    is_contiguous = len(x) > 1 and as_int(x[1].indices[-1] - x[0].indices[-1]) == last.depth
    bits = greatest.bit_length()
    min_code, max_code = (-max(zeros), (1 << bits) - 1 - min(zeros)) if is_signed else (0, (1 << bits) - 1)
    is_byte = min_code << shift >= -128 and max_code << shift <= (127 if is_signed else 255)
    if is_contiguous and is_byte and 2 * last.depth <= MAX_DEPTH:
        shifted = [code.binary("shift_left", shift) & replicate_byte(255 << shift & 255) for code in codes]
        codes, x = [*shifted, *codes], x[:1]
    return Products(value, x, tuple(code.value for code in codes), is_signed, start, shift)


def fit_signed(zeros: Sequence[int], greatest: int) -> bool:
    """Whether `subtract_zero_point` makes signed bytes of codes up to `greatest` with these zero points."""
    return all(zero == SIGN or greatest < SIGN for zero in zeros)


def subtract_zero_point(code: Scalar, zero: int) -> Scalar:
    """Subtract the zero point from each byte of a dp4a group; the results are signed bytes."""
    if zero == SIGN:
        return code.binary("xor", SIGNS)
    return ((code | SIGNS) - zero * _ONES).binary("xor", SIGNS) if zero else code  # no byte borrows from the next


def zeros_of(summed: Sum) -> list[int]:
    """Return the zero point that the start subtracts from each dp4a group; zeros where unknown."""
    zero = _zero_of(summed.start)
    if zero is not None:
        return [zero] * len(summed.codes)
    offset = _offset_of(summed.start)
    if offset is None:
        return [0] * len(summed.codes)
    return [offset if _has_offset(code, offset) else 0 for code in summed.codes]


def _zero_of(start: Value) -> int | None:
    """Match the start 0 - z * (sum of x) of matmul_blocks and return z; 0 for a start of 0; None: neither."""
    if isinstance(start, Literal) and start.value == 0:
        return 0
    match = _match_subtraction(start)
    return match[0] if match is not None and _zero_of(match[1]) == 0 else None


def _offset_of(start: Value) -> int | None:
    """Match the start 0 + z * (a partial sum of x) - z * (sum of x) of mixed codes and return the offset z; None: no.

    Some codes have the offset; the partial sum is over the x of codes that have none.
    """
    outer = _match_subtraction(start)
    inner = None if outer is None else _match_subtraction(outer[1])
    if outer is None or inner is None or _zero_of(inner[1]) != 0:
        return None
    return outer[0] if inner[0] == -outer[0] else None


def _has_offset(code: Value, offset: int) -> bool:
    """Whether `code` adds the offset to each byte of a dp4a group."""
    if not isinstance(code, Binary) or code.op != "add" or not isinstance(code.b, Literal):
        return False
    return code.b.value == replicate_byte(offset)


def _match_subtraction(start: Value) -> tuple[int, Value] | None:
    """Match rest - z * (a sum) and return (z, rest); None: no match."""
    if not isinstance(start, Binary) or start.op != "sub":
        return None
    term = start.b
    if not isinstance(term, Binary) or term.op != "mul" or not isinstance(term.a, Load):
        return None
    return (int(term.b.value), start.a) if isinstance(term.b, Literal) else None


def _match_sum(value: Value) -> Sum | None:
    """Match the sum of two chains of dot products over contiguous bytes of x; None: no match."""
    if not isinstance(value, Binary) or value.op != "add":
        return None
    (start, first), (second_start, second) = _match_chain(value.a), _match_chain(value.b)
    if not first or not second or not isinstance(second_start, Literal) or second_start.value != 0:
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
    sorted_terms = [term for _, term in terms]
    return Sum(start, tuple(t.code for t in sorted_terms), max(t.greatest for t in sorted_terms), sorted_terms[0].x)


def _match_chain(value: Value) -> tuple[Value, list[_Term]]:
    """Return the start of a chain of dot products, and its terms in order; no terms: it is no such chain."""
    terms: list[_Term] = []
    while isinstance(value, Intrinsic) and value.name == DOT4_PACKED_U8S8:
        total, code, word, greatest, _ = value.args
        if not isinstance(word, Intrinsic) or word.name != PACK_BYTES or not isinstance(word.args[0], Load):
            return value, []
        if not isinstance(greatest, Literal):
            return value, []
        terms.append(_Term(code, word.args[0], int(greatest.value)))
        value = total
    return value, terms[::-1]


def significant_bits(value: Value) -> int:
    """Return an upper bound of the significant bits of a float32 value."""
    if isinstance(value, Cast) and value.dtype == "float32" and isinstance(value.x, Load):
        return _SIGNIFICANT_BITS.get(value.x.dtype, FLOAT_BITS)
    if isinstance(value, Binary) and value.op == "mul":
        return min(FLOAT_BITS, significant_bits(value.a) + significant_bits(value.b))
    return FLOAT_BITS
