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
from relaxlite.ir.ops.block_codes import Coding
from relaxlite.ir.ops.block_quantized import CODE_BITS, MAX_BLOCK_ROWS
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, product
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.target import Target

LOW_BITS: Mapping[str, int] = {"int8": 0, "int12": 4, "int16": 8}
"""Bits of an activation below its upper eight, by precision."""
_DEFAULT = LOW_BITS["int12"]
_ROTATION = 8  # dp4a groups per rotation with dp4a, if the codes have enough headroom
_MIN_ROTATION = 4  # dp4a groups for which 8-bit activations are accurate enough
_PAIRED_ROTATION = (
    4  # with maddubs: 16 bits hold a sum of two products after a rotation of 4 groups, one product after 8
)
_PAIRED_BITS = 7  # of codes whose products maddubs sums in pairs without overflow (codegen/llvm/maddubs.py)


def integer_products(module: IRModule, context: PassContext) -> IRModule:
    """Replace products with block-quantized weights by integer products of quantized activations.

    The precision of the context decides whether, and to how many bits activations are quantized.
    """
    rounding = _rounding(context.target, context.precision)
    if rounding is None:
        return module
    return map_functions(module, lambda f: _IntegerProducts(context, *rounding).function(f))


def _rounding(target: Target, precision: str) -> tuple[int, int] | None:
    """(bits of activations below the upper eight, maximum bits of codes); None: products stay in floating point."""
    if precision in ("auto", "bf16") and (target.has_dp4a or target.has_maddubs):
        return _DEFAULT, max(CODE_BITS) if target.has_dp4a else _PAIRED_BITS
    return (LOW_BITS[precision], max(CODE_BITS)) if precision in LOW_BITS else None


def _problem(coding: Coding, block: int, max_bits: int) -> str | None:
    """Why products with such codes and block length stay in floating point; None: they can be integer products.

    `most_bits`: maximum bits of codes.
    """
    if block > MAX_BLOCK_ROWS:
        return f"the sums of blocks of {block} rows may not fit into 32 bits; at most {MAX_BLOCK_ROWS} do"
    if (bits := coding.max_value.bit_length()) > max_bits:
        return f"this processor multiplies codes of {bits} bits faster as floats"
    return None


def uses_integer_products(coding: Coding, block: int, target: Target, precision: str) -> bool:
    """Whether products with weights of this coding and block length (in rows) become integer products."""
    rounding = _rounding(target, precision)
    return rounding is not None and _problem(coding, block, rounding[1]) is None


def relaxed_rotation(coding: Coding, block: int, target: Target, precision: str) -> int:
    """The number of dp4a groups per rotation for weights with relaxed precision (`coarse`) and 8-bit activations.

    1 (no rotation) if 8 bits would be too inaccurate or not faster, or the precision demands more bits.
    """
    wanted = _ROTATION if target.has_dp4a else _PAIRED_ROTATION
    rotation = min(coding.max_rotation(block), wanted)
    if rotation < _MIN_ROTATION or precision not in ("auto", "bf16", "int8"):
        return 1
    has_pairs = target.has_maddubs and coding.with_rotation(rotation).max_value.bit_length() <= _PAIRED_BITS
    return rotation if target.has_dp4a or has_pairs else 1


class _IntegerProducts(Rewriter):
    def __init__(self, context: PassContext, low_bits: int, max_bits: int) -> None:
        super().__init__()
        self._context, self._low_bits, self._max_bits = context, low_bits, max_bits
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
        problem = _problem(_coding(weight.attrs), block, self._max_bits)
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
        problem = _problem(coding, block, self._max_bits)
        if problem is not None:
            self._context.decide("integer_products", var.name, False, problem)
            return None
        rounded, attrs = self._quantized(var, x, value.attrs, block)
        return get_op("grouped_matmul_blocks")(*rounded, spans, *weight, **attrs, loc=value.loc)

    def _quantized(self, var: Var, x: Expr, weight_attrs: Attrs, block: int) -> tuple[list[Var], dict[str, Any]]:
        """The quantized rows of `x` (codes, scales, sums) for a weight, and the attributes of their product."""
        coding, rotation, low_bits = _coding(weight_attrs), 1, self._low_bits
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
