"""Winograd's inner product for matrices times constant weights, where additions are free beside FMAs.

Two terms of a sum take one multiplication and two additions of an operand and a weight,

    x1*w1 + x2*w2 = (x1 + w2)*(x2 + w1) - x1*x2 - w1*w2

as the sum of x1*x2 is one number of a row, and that of w1*w2 one of a column (Winograd, "A New Algorithm for Inner
Product", IEEE Transactions on Computers, 1968). There is no gain where one unit adds and multiplies; but some
processors have adders beside their FMA units. There, of three terms two are computed like this and the third by an FMA.
So that the surplus products cancel rather than accumulate, every other pair adds their opposites,

    x4*w4 + x5*w5 = x4*x5 + w4*w5 - (w5 - x4)*(w4 - x5)

and a step of six terms is

    e += (w2 + x1)*(w1 + x2);  e += x3*w3;  e -= (w5 - x4)*(w4 - x5);  e += x6*w6

four FMAs and four additions in place of six FMAs, 1.5 times the FMA peak where additions are free. For the speed of
whole products: docs/measurements/cpus.md, winograd_products.

**Rounding.** x and w must have similar magnitudes, or the smaller is lost in the sums: rows and columns are scaled by
powers of two to unit length (2-norm near 1), which is exact. The error is then within the bound of an ordinary
sum of products up to a small factor, eps * |x| * |w| (Brent, "Error Analysis of Algorithms for Matrix Multiplication
and Triangular Decomposition using Winograd's Identity", 1970; docs/measurements/prod.md). Each row's result depends on
that row alone. The strategy is refused for weights whose ordinary product would be much more exact than that bound:
where some columns are mostly zeros, as those of a selection, or most have few large weights. It is also refused for
large weights that other programs read, which would need a second copy.

**Fallback.** If any row has no such length, as it holds an infinity, NaN or numbers out of range, the ordinary product
of all rows is computed, as it is for few rows. Rows and columns of zeros give zeros.

    for i: { scale[i], shift[i] = ...; balanced[i, :] = x[i, :] / scale[i] }      one pass over x
    if all rows have a length:
        for i, j: { for t: e += the step of balanced[i, 6*t .. 6*t + 5] and w[6*t .. 6*t + 5, j];
                    out[i, j] = f(((e - offset[j]) * scale[i] + shift[i]) * width[j]) }
    else:
        for i, j: { e = sum of x[i, k] * w[k, j];  out[i, j] = f(e * width[j]) }

constant_weights.py finds programs of such products; winograd_weights.py checks and transforms weights;
winograd_loops.py builds the new program.
"""

from __future__ import annotations

from relaxlite.ir.attributes import BATCH_INVARIANT
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import as_int
from relaxlite.passes.context import PassContext
from relaxlite.passes.products.constant_weights import WeightStrategy, take
from relaxlite.passes.products.prepared_rows import Product, columns_for_pass
from relaxlite.passes.products.strategy_table import WINOGRAD_FLOAT32
from relaxlite.passes.products.winograd_loops import FloatProducts
from relaxlite.passes.products.winograd_weights import balanced

MIN_COLUMNS = 64  # see `columns_for_pass`
MIN_DEPTH = 96  # terms of a sum


def inner_products(module: IRModule, context: PassContext) -> IRModule:
    """Compute products with constant weights by Winograd's inner product where additions are free."""
    strategy = strategy_of(module, context)
    return module if strategy is None else take(strategy, module, context)


def strategy_of(module: IRModule, context: PassContext) -> WeightStrategy | None:
    """Return the strategy for a module; None: it does not pay on the target, or the module must be batch invariant."""
    if WINOGRAD_FLOAT32.lacking(context.target) is not None or module.attrs.get(BATCH_INVARIANT):
        return None
    lanes, min_columns = context.target.vector_lanes(4), columns_for_pass(MIN_COLUMNS, context.target)

    def is_fit(part: Product) -> bool:
        depth = as_int(part.step.extent)
        return depth is not None and depth >= MIN_DEPTH

    def make(program: TensorProgram, parts: tuple[Product, ...]) -> FloatProducts | None:
        products = FloatProducts(program, parts, lanes)
        return products if products.columns >= min_columns else None

    return WeightStrategy("inner_products", is_fit, make, balanced, "additions take no time beside multiply-adds")
