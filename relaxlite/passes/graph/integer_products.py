"""Products with weights in blocks, in integers: `precision="int8"`, "int12", "int16", and "auto" where the target can.

    matmul(x, dequantize_blocks(w))   =>   matmul_blocks(quantize_blocks(x), w)
    grouped_matmul(x, spans, w)       =>   grouped_matmul_blocks(quantize_blocks(x), spans, w)

The weights stay what they are; activations are rounded, in blocks as long as the weights': to 8 bits, as llama.cpp
does, to 12 or to 16 (sign included). Whatever reads the same activations shares the rounding. Measured on SmolLM2-135M
with 4-bit weights, 1,314 tokens of a novel and a licence: the likeliest token stays what it is with float32 activations
for 96.9, 99.7 and 100 % of the tokens, logits move by up to 0.12, 3e-3 and 2e-4 of the largest, and perplexity by 0.3,
0.01 and 0.001 %.

What weights of up to 5 bits, or tables of such numbers, that are marked as `coarse` are multiplied by is rounded to 8
bits, and quads of both are mixed first (ops/block_quantized.py), which spreads outliers over neighbours: 98.7 % of the
tokens above stay what they are instead of 96.9, and the distance from the float model's probabilities falls to a
quarter. Functions that only fill a cache mark all weights but those of keys and values (frontend/llm/step.py): 99.5 %,
and a fortieth. That is with eight quads at a time; four, where bytes are multiplied in pairs, are about as good.

"auto" is 12 bits where that is faster than float32 products: with dot products of bytes, and by sums of pairs for codes
of less than 8 bits (docs/measurements/cpus.md, integers_by_byte_pairs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaxlite.ir.expr import Attrs, Call, Expr, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.block_codes import Coding
from relaxlite.ir.ops.block_quantized import BITS, LONGEST_BLOCK
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, product
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.target import Target

LOW_BITS: Mapping[str, int] = {"int8": 0, "int12": 4, "int16": 8}
"""Bits of an activation beyond eight, in each precision."""
_DEFAULT = LOW_BITS["int12"]
_ROTATION = 8  # quads, where codes have room for it
_MIN_ROTATION = 4  # which 8 bits are good enough for
_PAIRED_ROTATION = 4  # where bytes are multiplied in pairs: two products add up in 16 bits, of 8 quads only one
_PAIRED_BITS = 7  # of codes, whose products can be summed in pairs as they are (codegen/llvm/byte_pairs.py)


def integer_products(module: IRModule, context: PassContext) -> IRModule:
    """Round the activations of products with weights in blocks, where the precision asks for it."""
    rounding = _rounding(context.target, context.precision)
    if rounding is None:
        return module
    return map_functions(module, lambda f: _IntegerProducts(context, *rounding).function(f))


def _rounding(target: Target, precision: str) -> tuple[int, int] | None:
    """(bits of activations beyond eight, the most bits of codes); None: products are in floats."""
    if precision in ("auto", "bf16") and (target.has_dp4a or target.has_maddubs):
        return _DEFAULT, max(BITS) if target.has_dp4a else _PAIRED_BITS
    return (LOW_BITS[precision], max(BITS)) if precision in LOW_BITS else None


def _problem(coding: Coding, block: int, most_bits: int) -> str | None:
    """Why products with codes of at most so many bits, in such blocks, are not in integers; None: they can be."""
    if block > LONGEST_BLOCK:
        return f"the sums of blocks of {block} rows may not fit into 32 bits; at most {LONGEST_BLOCK} do"
    if (bits := coding.greatest.bit_length()) > most_bits:
        return f"this processor multiplies codes of {bits} bits faster as floats"
    return None


def are_integers(coding: Coding, block: int, target: Target, precision: str) -> bool:
    """Whether products with such weights are in integers."""
    rounding = _rounding(target, precision)
    return rounding is not None and _problem(coding, block, rounding[1]) is None


def relaxed_rotation(coding: Coding, block: int, target: Target, precision: str) -> int:
    """How many quads are mixed, to round to 8 bits what weights marked as `coarse` are multiplied by; 1: that would not
    be good enough, not be faster, or more bits are asked for."""
    wanted = _ROTATION if target.has_dp4a else _PAIRED_ROTATION
    rotation = min(coding.longest_rotation(block), wanted)
    if rotation < _MIN_ROTATION or precision not in ("auto", "bf16", "int8"):
        return 1
    has_pairs = target.has_maddubs and coding.rotated(rotation).greatest.bit_length() <= _PAIRED_BITS
    return rotation if target.has_dp4a or has_pairs else 1


class _IntegerProducts(Rewriter):
    def __init__(self, context: PassContext, low_bits: int, most_bits: int) -> None:
        super().__init__()
        self._context, self._low_bits, self._most_bits = context, low_bits, most_bits
        self._weights: dict[Var, Call] = {}
        self._gathered: dict[Var, Call] = {}  # as many rows of a matrix as it has, or more

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        if not isinstance(value, Call):
            return
        if _is_call(value, "dequantize_blocks"):
            self._weights[var] = value
        elif _is_call(value, "gather") and _repeats_rows(value):
            self._gathered[var] = value

    def concerns(self, value: Expr) -> bool:
        return _is_call(value, "dequantize_blocks") or _is_call(value, "grouped_matmul")

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call):
            return None
        if _is_call(value, "grouped_matmul"):
            return self._grouped(var, value)
        w = value.args[1] if _is_call(value, "matmul") else None
        if not isinstance(w, Var) or w not in self._weights:
            return None
        x, weight = value.args[0], self._weights[w]
        depth, rows, emit = _dims(x)[-1], _dims(w)[0], self.bb.emit
        block = int((rows // _dims(weight.args[1])[0]).const)
        problem = _problem(_coding(weight.attrs), block, self._most_bits)
        if problem is None and not depth.is_const:
            problem = f"only run time knows that rows of {depth} elements are {rows}"
        if problem is not None:
            self._context.decide("integer_products", var.name, False, problem)
            return None
        is_matrix = len(_dims(x)) == 2
        rows_of_x = x if is_matrix else emit(get_op("reshape")(x, (product(_dims(x)[:-1]), depth)))
        rounded, attrs = self._rounded(var, rows_of_x, weight.attrs, block)
        made = get_op("matmul_blocks")(*rounded, *weight.args, **attrs, loc=value.loc)
        return made if is_matrix else get_op("reshape")(emit(made), _dims(value))

    def _grouped(self, var: Var, value: Call) -> Expr | None:
        x, spans, *weight = value.args
        coding, words, blocks = _coding(value.attrs), _dims(weight[0])[1], _dims(weight[1])[1]
        block = int((words * 32 // coding.bits // blocks).const)
        problem = _problem(coding, block, self._most_bits)
        if problem is not None:
            self._context.decide("integer_products", var.name, False, problem)
            return None
        rounded, attrs = self._rounded(var, x, value.attrs, block)
        return get_op("grouped_matmul_blocks")(*rounded, spans, *weight, **attrs, loc=value.loc)

    def _rounded(self, var: Var, x: Expr, of_weight: Attrs, block: int) -> tuple[list[Var], dict[str, Any]]:
        """The rows x rounded for a weight, and the attributes of their product."""
        coding, rotation, low_bits = _coding(of_weight), 1, self._low_bits
        if of_weight["coarse"]:
            rotation = relaxed_rotation(coding, block, self._context.target, self._context.precision)
            low_bits = low_bits if rotation == 1 else 0
        mixed = f", {rotation} quads mixed" if rotation > 1 else ""
        reason = f"activations are rounded to {8 + low_bits} bits in blocks{mixed}, and sums of a block are exact"
        self._context.decide("integer_products", var.name, True, reason)
        gathered = self._gathered.get(x) if isinstance(x, Var) else None
        if gathered is not None:  # each of those that it takes is rounded once
            x = gathered.args[0]
        rounded = self.bb.emit(get_op("quantize_blocks")(x, block=block, low_bits=low_bits, rotation=rotation))
        parts = [self.bb.emit(TupleGetItem(rounded, k)) for k in range(3)]
        if gathered is not None:
            axes = (1, 1, -1)  # of the rows, in codes, scales and sums
            parts = [
                self.bb.emit(get_op("gather")(p, gathered.args[1], axis=a)) for p, a in zip(parts, axes, strict=True)
            ]
        return parts, {**coding.attrs, "low_bits": low_bits, "rotation": rotation}


def _is_call(value: Expr, name: str) -> bool:
    return isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == name


def _repeats_rows(gather: Call) -> bool:
    """Whether it takes rows of a matrix, no fewer than there are."""
    (x, indices), axis = gather.args, gather.attrs["axis"]
    shapes = [ty.shape if isinstance(ty, TensorType) else None for ty in (x.ty, indices.ty)]
    if [None if s is None else len(s) for s in shapes] != [2, 1] or axis not in (0, -2):
        return False
    (rows, _), (count,) = shapes  # type: ignore[misc]
    return PROVER.can_prove_le(rows, count)


def _coding(attrs: Attrs) -> Coding:
    return Coding(**{name: value for name, value in attrs.items() if name != "coarse"})  # type: ignore[arg-type]


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None  # as products and blocks have
    return x.ty.shape
