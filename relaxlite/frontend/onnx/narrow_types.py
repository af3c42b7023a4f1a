"""Element types of at most 8 bits that the IR does not have: float8, float4, int4, int2, ...

They are carried in 8-bit tensors: floats as their bits, integers by value. Such a tensor can be moved, cast, quantized
and dequantized; anything else is an error. The function's attribute "narrow_types" names the inputs and outputs that
are meant.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from relaxlite.ir.expr import Array
from relaxlite.records import dataclass

# What may be done with a tensor of a narrow type, beside casts and (de)quantization; all outputs are of the same type.
MOVES = frozenset((
    "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather", "Concat", "Expand",
    "Split", "Tile",
))  # fmt: skip
CONVERSIONS = frozenset(("Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "GatherBlockQuantized"))
MEASURES = frozenset(("Shape", "Size"))


@dataclass(frozen=True, slots=True)
class NarrowType:
    name: str  # as ONNX names it
    numpy: str  # as ml_dtypes names it
    bits: int
    storage: str  # the dtype that carries it
    is_float: bool = False
    has_negative_zero: bool = False

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.numpy))

    @property
    def integer_range(self) -> tuple[int, int]:
        signed = self.storage == "int8"
        return (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1) if signed else (0, (1 << self.bits) - 1)

    def carry(self, values: Array) -> Array:
        """An ml_dtypes array as it is carried."""
        return values.view(np.uint8) if self.is_float else values.astype(self.storage)


_TABLE = (
    NarrowType("FLOAT8E4M3FN", "float8_e4m3fn", 8, "uint8", is_float=True, has_negative_zero=True),
    NarrowType("FLOAT8E4M3FNUZ", "float8_e4m3fnuz", 8, "uint8", is_float=True),
    NarrowType("FLOAT8E5M2", "float8_e5m2", 8, "uint8", is_float=True, has_negative_zero=True),
    NarrowType("FLOAT8E5M2FNUZ", "float8_e5m2fnuz", 8, "uint8", is_float=True),
    NarrowType("FLOAT8E8M0", "float8_e8m0fnu", 8, "uint8", is_float=True),
    NarrowType("FLOAT4E2M1", "float4_e2m1fn", 4, "uint8", is_float=True, has_negative_zero=True),
    NarrowType("INT4", "int4", 4, "int8"),
    NarrowType("UINT4", "uint4", 4, "uint8"),
    NarrowType("INT2", "int2", 2, "int8"),
    NarrowType("UINT2", "uint2", 2, "uint8"),
)
NARROW_TYPES = {ty.name: ty for ty in _TABLE if hasattr(ml_dtypes, ty.numpy)}
