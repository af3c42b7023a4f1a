"""Products with constant weights in integers, where rounding is allowed and additions cost nothing.

`precision="bf16"` allows it in all of a module, the attribute RELAXED_PRECISION in one of its functions.

A dot product of two words of 16 bits takes the time of one of two bfloat16, and sums in 32 bits that wrap. So rows of x
and columns of w become whole numbers of 14 bits, relative to their largest; two of each lie in an int32, and Winograd's
inner product (winograd_products.py) is exact, for words of integers have additions,

    e += dot(w2 + x1, w1 + x2);  e += dot(w3, x3);  e += dot(w5 + x4, w4 + x5);  e += dot(w6, x6)

four dot products and four additions for twelve terms of a sum, in the time of four dot products where adders are idle:
1.5 times the peak of bfloat16. Numbers are moved to start at 0, so that one addition of int32 adds two words without a
carry from one to the other; what that adds to a sum, and what the pairs add, is one number of a row and one of a
column, and the sum of the products themselves is below 2**31 (int16_weights.py).

**Rounding.** A row x moves by no more than 2**-8 of its length (2-norm), and so does a column, which is what rounding
each element to bfloat16 may do. Usually it is far less: 14 bits of the largest element, bfloat16 has 8 of each.
Measured on the rows that MiniLM multiplies, real text: 1.2e-4 to 3.5e-4 of a row's length, bfloat16 1.7e-3. But an
element much smaller than the largest of its row keeps fewer digits than in bfloat16. Weights are left alone where
columns are mostly zeros or have few large ones.

**Rows that have no scale**, for they hold an infinity or NaN or their squares add up to more than 2**80 or less than
2**-80: one of them, and all rows are multiplied in float32, unrounded, by the rounded weights. Rows and columns of
zeros give zeros. Otherwise each row's result depends on that row alone.
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
from relaxlite.target import Target

RELAXED_PRECISIONS: Final = ("auto", "int8")  # in which such functions round
MIN_COLUMNS: Final = 64  # see `columns_for_pass`
MIN_DEPTH: Final = 96  # terms of a sum


def word_products(module: IRModule, context: PassContext) -> IRModule:
    """Compute products with constant weights in integers where bfloat16 is precise enough and additions are free."""
    way = strategy_of(module, context)
    return module if way is None else take(way, module, context)


def strategy_of(module: IRModule, context: PassContext) -> WeightStrategy | None:
    """None: these are no faster on the target, or not precise enough."""
    target, coarse = context.target, [name for name, f in module.functions().items() if f.attrs.get(RELAXED_PRECISION)]
    is_everywhere = context.precision == "bf16"
    if not _is_fast(target) or not (is_everywhere or (coarse and context.precision in RELAXED_PRECISIONS)):
        return None
    lanes = target.vector_lanes(4)

    def is_fit(part: Product) -> bool:
        is_stored = isinstance(part.w, Load) or not is_everywhere
        return is_stored and is_matrix_for_int16(target, part.step.extent, part.column.extent)

    def make(program: TensorProgram, parts: tuple[Product, ...]) -> Int16Products:
        return Int16Products(program, parts, lanes)

    way = WeightStrategy("word_products", is_fit, make, int16_of, "it is faster than in bfloat16")
    if is_everywhere:
        return way
    return replace(way, reason="the function may round, and it is faster than in floats", functions=coarse, keeps=True)


def may_be_int16(weights: Constant, target: Target) -> bool:
    """Whether `word_products` will take the product of a float32 matrix by this constant."""
    shape, dtype = weights.value.shape, weights.ty.dtype
    if not _is_fast(target) or dtype != "float32" or not is_matrix_for_int16(target, *shape):
        return False
    return not isinstance(steps_of(weights.value), str)


def are_int16(target: Target, precision: str, *shape: int) -> bool:
    """Whether a function that may round multiplies by such a matrix (k, n) in words, where others do not."""
    return _is_fast(target) and precision in RELAXED_PRECISIONS and is_matrix_for_int16(target, *shape)


def _is_fast(target: Target) -> bool:
    """Than dot products of bfloat16, or tiles of it."""
    return target.cpu_facts.adds_beside_fmas and not target.has("amx-bf16")


def is_matrix_for_int16(target: Target, *shape: IntLike) -> bool:
    """Of known sizes (..., k, n), the others ones, as filters of one pixel are: rows that go in pairs and give as much
    work as the pass over x takes."""
    *ones, depth, columns = (as_int(size) for size in shape)
    if any(size != 1 for size in ones) or depth is None or columns is None or depth % 2:
        return False
    return MIN_DEPTH <= depth <= MAX_DEPTH and columns >= columns_for_pass(MIN_COLUMNS, target)
