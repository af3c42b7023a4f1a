"""Contractions: sums of products over shared steps, described apart from how they are computed.

    out[rows, columns] = epilogue(sum over depth of x[rows, depth] * w[depth, columns])

A `Contraction` says what is multiplied and how its operands are stored, for any processor; strategy.py says how a
contraction may be computed. The loops from which a contraction was read define its semantics.
"""

from __future__ import annotations

from typing import Literal

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Binary, Cast, For, Load, Value
from relaxlite.ir.symbolic import SymExpr, product, sym
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.products.prologue import symbols_of
from relaxlite.passes.products.reduction import ReductionBlock
from relaxlite.records import dataclass

_ANALYZER = Analyzer()

Form = Literal["matmul", "transposed", "convolution", "window"]
"""Form of the loops of a contraction. "matmul": w[k, j] lies along the columns; "transposed": w[j, k] lies along the
depth; "convolution": positions of an image share filters; "window": each channel has a window of its own."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Storage format of an operand: what an inner loop loads.

    `kind`: a dtype whose numbers are multiplied as they are; "blocked": integers in blocks with scales, multiplied as
    integers; "dequantized": narrow numbers that become float32 where they are loaded. `bits`: of one number or code.
    `block`: numbers in a block; 0: there are no blocks, or they do not matter.
    """

    kind: str
    bits: int
    block: int = 0

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


@dataclass(frozen=True, slots=True)
class Contraction:
    """A sum of products over shared steps: form, sizes and operand encodings. `rows` are None where unknown.

    `is_constant`: w is known, so that a pass may transform it.
    """

    form: Form
    rows: SymExpr | None
    columns: SymExpr
    depth: SymExpr
    x: Encoding
    w: Encoding
    is_constant: bool = False

    @staticmethod
    def of_block(block: ReductionBlock, form: Form, row: For | None, column: For) -> Contraction | None:
        """Read the contraction off a block, given its row loop and its vectorized column loop; None: the block sums
        something else than products. Of a pair of sums it is the first."""
        update = block.update
        if not isinstance(update.value, Binary) or update.value.op != "mul" or update.combine != "add":
            return None
        a, b = update.value.a, update.value.b
        x, w = (b, a) if column.var in symbols_of(a) else (a, b)
        return Contraction.of_loops(block, form, row, column, Encoding.of_value(x), Encoding.of_value(w))

    @staticmethod
    def of_loops(
        block: ReductionBlock, form: Form, row: For | None, column: For, x: Encoding, w: Encoding
    ) -> Contraction:
        """Read the sizes off a block whose operands have these encodings."""
        depth = product(loop.extent for loop in perfect_nest(block.stmts[1]).loops)
        return Contraction(form, sym(1) if row is None else row.extent, column.extent, depth, x, w)

    @property
    def max_rows(self) -> int | None:
        """Upper bound of the rows; None where unknown."""
        return None if self.rows is None else _ANALYZER.bounds(self.rows)[1]
