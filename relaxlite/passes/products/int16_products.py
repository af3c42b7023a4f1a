"""Products with constant weights in integers, where rounding is allowed and additions cost nothing.

`precision="bf16"` allows it in all of a module, the attribute RELAXED_PRECISION in one of its functions.

A dot product of int16 pairs takes the time of one of bfloat16 pairs, and accumulates in int32, which wraps. So rows of
x and columns of w are quantized to 14-bit integers, relative to their largest element; two of each lie in an int32. As
int16 pairs have additions, Winograd's inner product (winograd_products.py) applies, and is exact,

    e += dot(w2 + x1, w1 + x2);  e += dot(w3, x3);  e += dot(w5 + x4, w4 + x5);  e += dot(w6, x6)

four dot products and four additions for twelve terms of a sum, 1.5 times the bfloat16 peak where additions are free.
The integers are offset to start at 0, so that one addition of int32 adds two int16 without a carry between them. The
correction for the offset and for the pairs is one number of a row and one of a column, and the sum of the products
themselves is below 2**31 (int16_weights.py).

**Rounding.** The error of a row x is at most 2**-8 of its length (2-norm), and so is that of a column: the bound of
rounding each element to bfloat16. It is usually far less (docs/measurements/prod.md): 14 bits relative to the largest
element, where bfloat16 has 8 of each. But an element much smaller than the largest of its row keeps fewer digits than
in bfloat16. The strategy is refused for weights whose columns are mostly zeros or have few large elements.

**Fallback.** If any row has no scale, as it holds an infinity or NaN or its sum of squares is above 2**80 or below
2**-80, all rows are multiplied in float32, unrounded, by the rounded weights. Rows and columns of zeros give zeros.
Otherwise each row's result depends on that row alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from relaxlite.ir.attributes import RELAXED_PRECISION
from relaxlite.ir.expr import Constant
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Load, TensorProgram
from relaxlite.ir.symbolic import IntLike, as_int
from relaxlite.passes.context import PassContext
from relaxlite.passes.products.constant_weights import WeightStrategy, take
from relaxlite.passes.products.int16_loops import Int16Products
from relaxlite.passes.products.int16_weights import MAX_DEPTH, int16_of, steps_of
from relaxlite.passes.products.prepared_rows import Product, columns_for_pass
from relaxlite.passes.products.strategy_table import WINOGRAD_INT16
from relaxlite.target import Target

RELAXED_PRECISIONS: Final = ("auto", "int8")  # precisions in which functions with RELAXED_PRECISION round
MIN_COLUMNS: Final = 64  # see `columns_for_pass`
MIN_DEPTH: Final = 96  # terms of a sum


def word_products(module: IRModule, context: PassContext) -> IRModule:
    """Compute products with constant weights in integers where bfloat16 is precise enough and additions are free."""
    strategy = strategy_of(module, context)
    return module if strategy is None else take(strategy, module, context)


def strategy_of(module: IRModule, context: PassContext) -> WeightStrategy | None:
    """Return the strategy for a module; None: it does not pay on the target, or rounding is not allowed."""
    target, relaxed = context.target, [name for name, f in module.functions().items() if f.attrs.get(RELAXED_PRECISION)]
    is_everywhere = context.precision == "bf16"
    if not _is_fast(target) or not (is_everywhere or (relaxed and context.precision in RELAXED_PRECISIONS)):
        return None
    lanes = target.vector_lanes(4)

    def is_fit(part: Product) -> bool:
        is_stored = isinstance(part.w, Load) or not is_everywhere
        return is_stored and is_matrix_for_int16(target, part.step.extent, part.column.extent)

    def make(program: TensorProgram, parts: tuple[Product, ...]) -> Int16Products:
        return Int16Products(program, parts, lanes)

    strategy = WeightStrategy("word_products", is_fit, make, int16_of, "it is faster than in bfloat16")
    if is_everywhere:
        return strategy
    return replace(
        strategy, reason="the function may round, and it is faster than in floats", functions=relaxed, keeps=True
    )


def may_be_int16(weights: Constant, target: Target) -> bool:
    """Whether `word_products` will take the product of a float32 matrix by this constant."""
    shape, dtype = weights.value.shape, weights.ty.dtype
    if not _is_fast(target) or dtype != "float32" or not is_matrix_for_int16(target, *shape):
        return False
    return not isinstance(steps_of(weights.value), str)


def are_int16(target: Target, precision: str, *shape: int) -> bool:
    """Whether a function with RELAXED_PRECISION multiplies by a matrix of shape (k, n) in int16 pairs."""
    return _is_fast(target) and precision in RELAXED_PRECISIONS and is_matrix_for_int16(target, *shape)


def _is_fast(target: Target) -> bool:
    """Whether int16 pairs are faster than dot products or AMX tiles of bfloat16 on the target."""
    return WINOGRAD_INT16.lacking(target) is None


def is_matrix_for_int16(target: Target, *shape: IntLike) -> bool:
    """Whether a matrix of shape (..., k, n), the other dimensions ones, fits int16 pairs and pays for the pass over x.

    All sizes must be known, and k even.
    """
    *ones, depth, columns = (as_int(size) for size in shape)
    if any(size != 1 for size in ones) or depth is None or columns is None or depth % 2:
        return False
    return MIN_DEPTH <= depth <= MAX_DEPTH and columns >= columns_for_pass(MIN_COLUMNS, target)
