"""Convert bit fields of a packed int32 to float32 without an integer conversion, and mostly without a shift.

    float32((word >> s & 15) - 8)    =>    bits_as_float(word & 15 << s | exponent) - (2**(23 - s) + 8)

With the exponent of 2**(23 - s), mantissa bits from s on have integer weights; both steps are exact.
"""

from __future__ import annotations

from relaxlite import dtypes
from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, Val, float_const, int_const
from relaxlite.ir.program import Binary, Cast, IndexValue, Literal, Value
from relaxlite.ir.symbolic import as_int
from relaxlite.records import dataclass

_INT32_BITS = 32
_MANTISSA_BITS = 23  # of a float32
_HIGH_FIELD_SHIFT = 16  # fields above the mantissa share one shift by this


@dataclass(frozen=True, slots=True)
class BitField:
    """The integer in `size` bits of the packed int32 `packed` from bit `start` on, plus `offset`."""

    packed: Value
    start: int
    size: int
    offset: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest possible value."""
        return self.offset, self.offset + (1 << self.size) - 1


def bit_field(k: KernelContext, value: Value) -> BitField | None:
    """Match shift, mask, integer casts and constant offsets as a bit field of an int32; None for other values."""
    if isinstance(value, Cast) and dtypes.is_integer(value.dtype):
        field = bit_field(k, value.x)
        return field if field is not None and _holds(value.dtype, field) else None
    if not isinstance(value, Binary) or value.dtype != "int32":
        return None
    constant = _constant(k, value.b)
    if constant is None:
        return None
    if value.op in ("add", "sub"):
        field = bit_field(k, value.a)
        sign = 1 if value.op == "add" else -1
        return None if field is None else _with_offset(field, sign * constant)
    if value.op != "and" or constant <= 0 or constant & (constant + 1):
        return None
    packed, start, size = value.a, 0, constant.bit_length()
    if isinstance(packed, Binary) and packed.op == "shift_right" and (shift := _constant(k, packed.b)) is not None:
        packed, start = packed.a, shift
    first = start - _HIGH_FIELD_SHIFT if start + size > _MANTISSA_BITS else start
    is_inside = start >= 0 and start + size <= _INT32_BITS  # above, an arithmetic shift repeats the sign
    return BitField(packed, start, size) if is_inside and first >= 0 and first + size <= _MANTISSA_BITS else None


def _with_offset(field: BitField, offset: int) -> BitField | None:
    total = field.offset + offset
    return BitField(field.packed, field.start, field.size, total) if abs(total) < 1 << 15 else None


def _holds(dtype: str, field: BitField) -> bool:
    bits = 8 * dtypes.itemsize(dtype)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtypes.is_signed(dtype) else (0, (1 << bits) - 1)
    return low <= field.bounds[0] and field.bounds[1] <= high


def _constant(k: KernelContext, value: Value) -> int | None:
    if isinstance(value, Literal):
        return int(value.value)
    return as_int(k.ix.resolve(value.index)) if isinstance(value, IndexValue) else None


def field_to_float(e: Emitter, word: Val, field: BitField) -> Val:
    """Emit a bit field as float32; `packed` is the packed int32 in register form."""
    start = field.start
    if start + field.size > _MANTISSA_BITS:
        word, start = e.binary("lshr", word, int_const(_HIGH_FIELD_SHIFT, "i32")), start - _HIGH_FIELD_SHIFT
    bits = e.binary("and", word, int_const(((1 << field.size) - 1) << start, "i32"))
    bits = e.binary("or", bits, int_const((127 + _MANTISSA_BITS - start) << _MANTISSA_BITS, "i32"))
    return e.fsub(e.cast("bitcast", bits, "float"), float_const(float((1 << _MANTISSA_BITS - start) - field.offset)))
