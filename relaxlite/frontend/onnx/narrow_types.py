"""Element types of at most 8 bits that the IR lacks: float8, float4, int4, int2, ...

Their tensors are stored as 8-bit tensors: floats as bit patterns, integers by value. They can be moved, cast, quantized
and dequantized; other ops raise an error. Text is stored as 64-bit codes (strings.py), which can be moved and
compared. The function's attributes "input_forms" and "output_forms" list the inputs and outputs of such types.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from relaxlite import strings
from relaxlite.forms import STRING
from relaxlite.ir.expr import Array
from relaxlite.records import dataclass

# Ops that take tensors of narrow types and whose outputs are of the same type.
DATA_MOVEMENT_OPS = frozenset((
    "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather", "Concat", "Expand",
    "Split", "Tile", "Pad", "GatherElements", "GatherND", "Compress", "ReverseSequence", "SpaceToDepth", "DepthToSpace",
    "SequenceAt", "SequenceConstruct", "SequenceInsert", "SequenceErase", "SplitToSequence", "ConcatFromSequence",
    "Optional", "OptionalGetElement",
))  # fmt: skip
# Ops whose subgraphs see what narrow types their inputs have.
CONTROL_FLOW_OPS = frozenset(("If", "Loop", "Scan", "SequenceMap"))
# Ops that convert narrow types.
CONVERSION_OPS = frozenset(("Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "GatherBlockQuantized"))
# Ops that read only the shape of a tensor.
SHAPE_QUERY_OPS = frozenset(("Shape", "Size", "SequenceLength", "OptionalHasElement"))
# Ops that take text and mark their outputs themselves.
TEXT_OPS = frozenset((
    "Equal", "StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer", "Unique",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class NarrowType:
    """An element type that the IR lacks and the dtype that stores it."""

    name: str  # in ONNX
    numpy: str  # in ml_dtypes; "string" for text
    bits: int
    storage: str  # the dtype of its tensors in the IR
    is_float: bool = False
    has_negative_zero: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ml_dtypes."""
        return np.dtype(getattr(ml_dtypes, self.numpy))

    @property
    def integer_range(self) -> tuple[int, int]:
        """The least and the greatest value of an integer type."""
        signed = self.storage == "int8"
        return (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1) if signed else (0, (1 << self.bits) - 1)

    @property
    def is_text(self) -> bool:
        """Whether elements are strings."""
        return self.numpy == STRING

    def to_storage(self, values: Array) -> Array:
        """Convert an array of ml_dtypes, or of strings, to the storage dtype."""
        if self.is_text:
            return strings.encode(values)[0]
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
TEXT = NarrowType("STRING", STRING, 64, "int64")
NARROW_TYPES = {ty.name: ty for ty in _TABLE if hasattr(ml_dtypes, ty.numpy)} | {TEXT.name: TEXT}
