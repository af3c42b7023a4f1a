"""Converters of onnxruntime's ops on blocked weights (com.microsoft): MatMulNBits, GatherBlockQuantized.

Codes stay packed (passes/graph/quantized_weights.py), except with zero points that are no integers or with `g_idx`:
such weights are dequantized at import.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from relaxlite.frontend.onnx.convert_contrib import MICROSOFT
from relaxlite.frontend.onnx.convert_linalg import emit_matmul
from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.op import get_op
from relaxlite.ir.ops.block_codes import BIT_PLANES, fills_words, pack_codes

Array: TypeAlias = "np.ndarray[Any, Any]"


@onnx_op("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(n: Node) -> Result:
    """MatMulNBits: x (..., k) @ w.T, where w (n, k) has codes of 2, 4 or 8 bits in blocks along k.

    Each block has a scale and a zero point. `g_idx` (k,): the block of each column, if columns are not in order.
    """
    depth, width, bits, block = n.int("K"), n.int("N"), n.int("bits", 4), n.int("block_size")
    n.ignore("accuracy_level")  # permits approximations; this conversion is exact
    if n.int("weight_prepacked", 0):
        n.fail("the weights are packed for one processor; export the model without 'weight_prepacked'")
    packed = n.const(1)
    if packed is None or bits not in (2, 4, 8):
        n.fail("MatMulNBits needs constant weights of 2, 4 or 8 bits")
    blocks = math.ceil(depth / block)
    codes = _unpack_codes(packed.reshape(width, -1), bits)[:, :depth]
    zeros = _zeros(n, (width, blocks), bits)
    if n.optional(4) is not None or zeros.dtype != np.uint8:
        weight: Expr = _dequantized_weight(n, codes, zeros, np.arange(depth) // block)
    else:
        scale = n.emit(ops.reshape(n.input(2), (width, blocks)))
        dequantized = ops.dequantize_linear(Constant.of(codes), scale, Constant.of(zeros), axis=1, block_size=block)
        weight = n.emit(dequantized)
    product = emit_matmul(n, n.input(0), n.emit(ops.transpose(weight, axes=(1, 0))))
    return product if n.optional(5) is None else ops.add(product, n.input(5))


def _zeros(n: Node, shape: tuple[int, int], bits: int) -> Array:
    """Return the zero point of each block, in uint8, or in floats if the node has them in floats."""
    if n.optional(3) is None:
        return np.full(shape, 1 << (bits - 1), np.uint8)
    zeros = n.const(3)
    if zeros is None:
        n.fail("MatMulNBits needs constant zero points")
    return (
        _unpack_codes(zeros.reshape(shape[0], -1), bits)[:, : shape[1]]
        if zeros.dtype == np.uint8
        else zeros.reshape(shape)
    )


def _dequantized_weight(n: Node, codes: Array, zeros: Array, groups: Array) -> Constant:
    """Return the dequantized weight; `groups`: the default block of each column."""
    scales, columns = n.const(2), n.const(4) if n.optional(4) is not None else groups
    if scales is None or columns is None:
        n.fail("MatMulNBits needs constant scales and group indices")
    if columns.shape != groups.shape or columns.min(initial=0) < 0 or columns.max(initial=0) >= zeros.shape[1]:
        n.fail(f"group indices must be {groups.size} numbers from 0 to {zeros.shape[1] - 1}")
    column_scales = scales.reshape(zeros.shape).astype(np.float32)[:, columns]
    weight = (codes.astype(np.float32) - zeros.astype(np.float32)[:, columns]) * column_scales
    return Constant.of(weight.astype(scales.dtype))


@onnx_op("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(n: Node) -> Result:
    """GatherBlockQuantized: gather of rows of a blocked weight; inputs data, indices, scales, zero points.

    Codes of less than 8 bits are packed into bytes along the last axis, or are of a 4-bit type.
    """
    bits, block = n.int("bits", 4), n.int("block_size", 128)
    data, zeros = n.const(0), n.const(3)
    if data is None or n.const(2) is None or (n.optional(3) is not None and zeros is None):
        n.fail("GatherBlockQuantized needs constant data, scales and zero points")
    axis, block_axis = normalize_axis(n, n.int("gather_axis", 0), data.ndim), n.int("quantize_axis", 1)
    block_axis = normalize_axis(n, block_axis, data.ndim)
    if data.dtype == np.uint8 and n.input(0) not in n.importer.narrow:
        if block_axis != data.ndim - 1 and bits < 8:
            n.fail("bytes of several codes must be quantized along the last axis")
        data = _unpack_codes(data, bits)
        if zeros is None:
            zeros = np.full(n.shape(2), 1 << (bits - 1), np.uint8)
        else:
            zeros = _unpack_codes(zeros, bits)[..., : int(n.shape(2)[-1])]
    if axis == block_axis:
        n.fail("GatherBlockQuantized along the axis of its blocks is not supported")
    scales, indices = n.input(2), n.input(1)
    packed = _packed_operands(n, data, zeros, bits, block) if (axis, block_axis, data.ndim) == (0, 1, 2) else None
    if packed is not None:
        result = n.emit(get_op("gather_blocks")(indices, *packed[:-1], bits=bits, zero=packed[-1]))
        return result if n.dtype(2) == "float32" else ops.cast(result, dtype=n.dtype(2))
    rows = [n.emit(ops.gather(x, indices, axis=axis)) for x in (Constant.of(data), scales)]
    zero = () if zeros is None else (n.emit(ops.gather(Constant.of(zeros), indices, axis=axis)),)
    new_block_axis = block_axis + n.rank(1) - 1 if block_axis > axis else block_axis
    return ops.dequantize_linear(*rows, *zero, axis=new_block_axis, block_size=block)


def _packed_operands(n: Node, codes: Array, zeros: Array | None, bits: int, block: int) -> tuple[Any, ...] | None:
    """Return operands of gather_blocks for a table (rows, k), then their zero point; None if codes cannot be packed."""
    scales = n.const(2)
    assert scales is not None
    rows = codes.shape[1]
    is_whole = rows == block * scales.shape[1] and bits in BIT_PLANES and fills_words(rows, block, bits)
    if not is_whole or codes.dtype != np.uint8 or zeros is None:
        return None
    is_uniform = bool((zeros == zeros.flat[0]).all())
    if not is_uniform and bits == 8:  # bytes need no packing, and no rounded offsets
        return None
    words = Constant.of(pack_codes(codes.T, block, bits))
    if is_uniform:
        return words, Constant.of(scales.T), int(zeros.flat[0])
    offsets = -zeros.astype(np.float32) * scales.astype(np.float32)
    return words, Constant.of(scales.T.astype(np.float32)), Constant.of(offsets.T), 0


def _unpack_codes(packed: Array, bits: int) -> Array:
    """Unpack the codes of bytes along the last axis, from the lowest bits on."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * bits
    elements = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(elements.reshape(*packed.shape[:-1], -1).astype(np.uint8))
