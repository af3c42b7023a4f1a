"""Contractions: sums of products over shared steps, described apart from how they are computed.

    out[rows, columns] = epilogue(sum over depth of x[rows, depth] * w[depth, columns])

A `Contraction` says what is multiplied and how its operands are stored, for any processor; strategy.py says how a
contraction may be computed. The loops from which a contraction was read define its semantics.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Binary, Cast, For, Load, Value
from relaxlite.ir.symbolic import SymExpr, product, sym
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.products.prologue import symbols_of
from relaxlite.passes.products.reduction import Block
from relaxlite.records import dataclass

_ANALYZER = Analyzer()

Form = Literal["matmul", "transposed", "convolution", "window", "winograd"]
"""Form of the loops of a contraction. "matmul": w[k, j] lies along the columns; "transposed": w[j, k] lies along the
depth; "convolution": positions of an image share filters; "window": each channel has a window of its own; "winograd":
a step of the sum is several products of sums."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Storage format of an operand: what an inner loop loads.

    `kind`: a dtype whose numbers are multiplied as they are; "blocked": integers in blocks with scales, multiplied as
    integers; "dequantized": narrow numbers that become float32 where they are loaded. `bits`: of one number or code.
    """

    kind: str
    bits: int

    @staticmethod
    def of_dtype(dtype: str) -> Encoding:
        return Encoding(dtype, 8 * dtypes.itemsize(dtype))

    @staticmethod
    def of_value(value: Value) -> Encoding:
        """Return the encoding of an operand from the value that a loop multiplies."""
        stored = value.x if isinstance(value, Cast) else value
        if not isinstance(stored, Load):
            return Encoding("dequantized", 8 * dtypes.itemsize(value.dtype))
        return Encoding.of_dtype(stored.dtype)

    def __str__(self) -> str:
        return f"blocked {self.bits}-bit" if self.kind == "blocked" else self.kind


FLOAT32 = Encoding("float32", 32)


@dataclass(frozen=True, slots=True)
class Contraction:
    """A sum of products over shared steps: form, sizes and operand encodings.

    `rows`, `columns` and `depth` are None where unknown. `is_pair`: two sums share x, and the epilogue of the second
    reads the first.
    """

    form: Form
    rows: SymExpr | None
    columns: SymExpr | None
    depth: SymExpr | None
    x: Encoding = FLOAT32
    w: Encoding = FLOAT32
    is_pair: bool = False

    @staticmethod
    def of_block(block: Block, form: Form, row: For | None, column: For) -> Contraction:
        """Read the contraction off a block, given its row loop and its vectorized column loop."""
        steps = [loop.extent for loop in perfect_nest(block.stmts[1]).loops]
        contraction = Contraction(
            form, sym(1) if row is None else row.extent, column.extent, product(steps), is_pair=block.is_pair
        )
        value = block.update.value
        if not isinstance(value, Binary) or value.op != "mul":
            return contraction
        x, w = (value.b, value.a) if column.var in symbols_of(value.a) else (value.a, value.b)
        return replace(contraction, x=Encoding.of_value(x), w=Encoding.of_value(w))

    @property
    def max_rows(self) -> int | None:
        """Upper bound of the rows; None where unknown."""
        if self.rows is None:
            return None
        return _ANALYZER.bounds(self.rows)[1]

    def __str__(self) -> str:
        sizes = " x ".join("?" if size is None else str(size) for size in (self.rows, self.depth, self.columns))
        return f"{self.form} {sizes}, {self.x} by {self.w}"
