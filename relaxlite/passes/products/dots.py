"""Reductions of narrow numbers by the target's dot products: several terms of a sum in one instruction.

    for k in n: e += float32(a[i, k]) * float32(b[k, j])
        =>  for ko in n/2: e = dot2_bf16(e, a[i, 2*ko], a[i, 2*ko + 1], b[2*ko, j], b[2*ko + 1, j])

The terms of `a` are contiguous in memory; `b`, a constant, is packed so that its terms are (pack_constants.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from relaxlite.ir.intrinsics import DOT_PRODUCTS
from relaxlite.ir.program import Allocate, Binary, Buffer, Cast, For, Load, Seq
from relaxlite.ir.symbolic import as_int
from relaxlite.passes.loops.access import stride
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import split
from relaxlite.passes.products.pair_tile import apart, together
from relaxlite.passes.products.reduction import Block
from relaxlite.passes.schedule.primitives.tensorize import tensorize
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Dots:
    """A block whose sum is computed by a dot-product intrinsic, with the packing that its operands need."""

    name: str  # of the intrinsic
    body: Allocate  # of the block, with the dot product
    operands: tuple[Buffer, ...]  # to be packed in groups of rows
    group: int  # rows in a group: terms of one dot product


def dot_products(block: Block, column: For, is_available: Callable[[str], bool]) -> Dots | None:
    """Rewrite the innermost reduced loop of a block in steps of a dot product.

    None: no dot product whose intrinsic name passes `is_available` fits the block.
    """
    if not block.is_pair:
        return _dot_product(block, column, is_available)
    first, second = (_dot_product(Block(block.spatial, body), column, is_available) for body in apart(block.body))
    if first is None or second is None or first.group != second.group:
        return None
    return Dots(first.name, together(first.body, second.body), (*first.operands, *second.operands), first.group)


def _dot_product(block: Block, column: For, is_available: Callable[[str], bool]) -> Dots | None:
    update, reduced = block.update, perfect_nest(block.stmts[1]).loops
    value, loop = update.value, reduced[-1]
    if not isinstance(value, Binary) or value.op != "mul" or update.combine != "add":
        return None
    for left, right in ((value.a, value.b), (value.b, value.a)):
        if not (isinstance(left, Cast) and isinstance(right, Cast)):
            continue
        a, b = left.x, right.x
        if not (isinstance(a, Load) and isinstance(b, Load)):
            continue
        is_matrix = len(b.indices) > 1 and b.indices[-1] is column.var and b.indices[-2] is loop.var
        if not is_matrix or stride(a, loop.var) != 1 or stride(a, column.var) != 0:
            continue
        for name, dot in DOT_PRODUCTS.items():
            length = as_int(loop.extent)
            is_type_match = (a.dtype, b.dtype, update.buffer.dtype) == (dot.a, dot.b, dot.total)
            if is_type_match and length and length % dot.length == 0 and is_available(name):
                return Dots(name, _tensorized(block, loop, name, dot.length), (b.buffer,), dot.length)
    return None


def _tensorized(block: Block, loop: For, name: str, length: int) -> Allocate:
    """Split `loop` of the block by the length of the dot product and tensorize the inner part."""

    def change(stmt: For) -> For:
        if stmt is not loop:
            assert isinstance(stmt.body, For)
            return replace(stmt, body=change(stmt.body))
        main, _, _, _ = split(stmt, length)
        assert isinstance(main.body, For)
        result = tensorize(main, main.body, name)
        assert isinstance(result, For)
        return result

    init, reduced, *final = block.stmts
    assert isinstance(reduced, For)
    return replace(block.body, body=Seq((init, change(reduced), *final)))
