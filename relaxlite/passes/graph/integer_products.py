"""Integer products with block-quantized weights: `precision="int8"`, "int12", "int16", and "auto" on some targets.

    matmul(x, dequantize_blocks(w))   =>   matmul_blocks(quantize_blocks(x), w)
    grouped_matmul(x, spans, w)       =>   grouped_matmul_blocks(quantize_blocks(x), spans, w)

Weights stay unchanged. Activations are quantized dynamically, in blocks of the length of the weights' blocks, to 8 bits
(as in llama.cpp), 12 or 16 bits (sign included); calls with the same activations share the quantization.

Weights marked for relaxed precision (attribute `coarse`), with codes or codebook entries of up to 5 bits, are
multiplied by 8-bit activations after a Walsh-Hadamard rotation of dp4a groups on both sides (ops/block_quantized.py),
which spreads outliers. Functions that only fill a KV cache mark all weights but those of keys and values
(frontend/llm/step.py). Accuracy: docs/measurements/passes.md.

"auto" is 12 bits if that is faster than float32 products: with dp4a, and with maddubs for codes of less than 8 bits
(docs/measurements/cpus.md, integers_by_byte_pairs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaxlite.ir.expr import Attrs, Call, Expr, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.block_codes import Coding, RotatedCoding
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import IntLike, SymExpr, product, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.passes.products.contraction import Contraction, Encoding
from relaxlite.passes.products.strategy import Precision, Strategy, allowed_of, candidates
from relaxlite.passes.products.strategy_table import REQUESTED_BLOCKS, ROTATED_BLOCKS, ROUNDED_BLOCKS, TABLE
from relaxlite.target import Target

LOW_BITS: Mapping[str, int] = {"int8": 0, "int12": 4, "int16": 8}
"""Bits of an activation below its upper eight, by precision."""
_ROTATION = 8  # dp4a groups per rotation with dp4a, if the codes have enough headroom
_MIN_ROTATION = 4  # dp4a groups for which 8-bit activations are accurate enough
_PAIRED_ROTATION = (
    4  # with maddubs: 16 bits hold a sum of two products after a rotation of 4 groups, one product after 8
)


def integer_products(module: IRModule, context: PassContext) -> IRModule:
    """Replace products with block-quantized weights by integer products of quantized activations.

    The precision of the context decides whether, and to how many bits activations are quantized.
    """
    strategy = _strategy(context.precision)
    if strategy.lacking(context.target, Precision(context.precision)) is not None:
        return module
    return map_functions(module, lambda f: _IntegerProducts(context).function(f))


def blocked_contraction(coding: Coding | RotatedCoding, block: int, depth: IntLike, columns: IntLike) -> Contraction:
    """The product of float32 rows and a weight (depth, columns) of this coding and block length in rows."""
    w = Encoding("blocked", coding.max_value.bit_length(), block)
    return Contraction("matmul", None, sym(columns), sym(depth), Encoding.of_dtype("float32"), w)


def _strategy(precision: str) -> Strategy:
    """The strategy by which a precision multiplies in integers."""
    return REQUESTED_BLOCKS if precision in LOW_BITS else ROUNDED_BLOCKS


def relaxed_rotation(coding: Coding, block: int, target: Target, precision: str) -> int:
    """The number of dp4a groups per rotation for weights with relaxed precision (`coarse`) and 8-bit activations.

    1 (no rotation) if 8 bits would be too inaccurate or not faster, or the precision demands more bits.
    """
    rotation = min(coding.max_rotation(block), _ROTATION if target.has_dp4a else _PAIRED_ROTATION)
    contraction = blocked_contraction(coding.with_rotation(rotation), block, block, 1)
    options = candidates(TABLE, contraction, target, Precision(precision, is_relaxed=True))
    return rotation if rotation >= _MIN_ROTATION and ROTATED_BLOCKS in allowed_of(options) else 1


class _IntegerProducts(Rewriter):
    def __init__(self, context: PassContext) -> None:
        super().__init__()
        self._context = context
        self._weights: dict[Var, Call] = {}
        self._gathered: dict[Var, Call] = {}  # gathers of at least as many rows as the matrix has

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        if not isinstance(value, Call):
            return
        if _is_call(value, "dequantize_blocks"):
            self._weights[var] = value
        elif _is_call(value, "gather") and _repeats_rows(value):
            self._gathered[var] = value

    def may_rewrite(self, value: Expr) -> bool:
        return _is_call(value, "dequantize_blocks") or _is_call(value, "grouped_matmul")

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call):
            return None
        if _is_call(value, "grouped_matmul"):
            return self._grouped_matmul(var, value)
        w = value.args[1] if _is_call(value, "matmul") else None
        if not isinstance(w, Var) or w not in self._weights:
            return None
        x, weight = value.args[0], self._weights[w]
        depth, rows, emit = _dims(x)[-1], _dims(w)[0], self.bb.emit
        block = int((rows // _dims(weight.args[1])[0]).const)
        problem = self._problem(blocked_contraction(_coding(weight.attrs), block, *_dims(w)))
        if problem is None and not depth.is_const:
            problem = f"only run time knows that rows of {depth} elements are {rows}"
        if problem is not None:
            self._context.decide("integer_products", var.name, False, problem)
            return None
        is_matrix = len(_dims(x)) == 2
        rows_of_x = x if is_matrix else emit(get_op("reshape")(x, (product(_dims(x)[:-1]), depth)))
        rounded, attrs = self._quantized(var, rows_of_x, weight.attrs, block)
        integer_product = get_op("matmul_blocks")(*rounded, *weight.args, **attrs, loc=value.loc)
        return integer_product if is_matrix else get_op("reshape")(emit(integer_product), _dims(value))

    def _grouped_matmul(self, var: Var, value: Call) -> Expr | None:
        x, spans, *weight = value.args
        coding, words, blocks = _coding(value.attrs), _dims(weight[0])[1], _dims(weight[1])[1]
        block = int((words * 32 // coding.bits // blocks).const)
        problem = self._problem(blocked_contraction(coding, block, _dims(x)[-1], _dims(weight[0])[2]))
        if problem is not None:
            self._context.decide("integer_products", var.name, False, problem)
            return None
        rounded, attrs = self._quantized(var, x, value.attrs, block)
        return get_op("grouped_matmul_blocks")(*rounded, spans, *weight, **attrs, loc=value.loc)

    def _problem(self, contraction: Contraction) -> str | None:
        """Why a product stays in floating point; None: it is computed in integers."""
        precision = self._context.precision
        (option,) = candidates((_strategy(precision),), contraction, self._context.target, Precision(precision))
        return option.refusal

    def _quantized(self, var: Var, x: Expr, weight_attrs: Attrs, block: int) -> tuple[list[Var], dict[str, Any]]:
        """The quantized rows of `x` (codes, scales, sums) for a weight, and the attributes of their product."""
        coding, rotation, low_bits = _coding(weight_attrs), 1, LOW_BITS.get(self._context.precision, LOW_BITS["int12"])
        if weight_attrs["coarse"]:
            rotation = relaxed_rotation(coding, block, self._context.target, self._context.precision)
            low_bits = low_bits if rotation == 1 else 0
        rotated = f", {rotation} quads mixed" if rotation > 1 else ""
        reason = f"activations are rounded to {8 + low_bits} bits in blocks{rotated}, and sums of a block are exact"
        self._context.decide("integer_products", var.name, True, reason)
        gathered = self._gathered.get(x) if isinstance(x, Var) else None
        if gathered is not None:  # quantize each source row once, then gather
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
    """Whether a gather takes rows of a matrix, at least as many as there are."""
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
