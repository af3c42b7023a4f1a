"""Decoders of weights in floats of 8 and 4 bits with scales: FP8, bitsandbytes' NF4 and FP4, NVFP4, MXFP4.

FP8 is as in DeepSeek and compressed-tensors, NVFP4 and MXFP4 as in compressed-tensors. The latter two stay codes with
scales (quantized.py). The others become floats, usually float16, which has at least as many bits as the operands of the
libraries' own kernels. Formats: DeepSeek-V3, inference/kernel.py; compressed-tensors, compressors/naive_quantized and
nvfp4; bitsandbytes, functional.py (QuantState).
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.quantized import (
    MXFP4,
    GroupedWeight,
    GroupScales,
    PackedRows,
    RowIndex,
    decode_mxfp4,
    unpack_nibbles,
)
from relaxlite.frontend.llm.quantized_module import FLOATS, QuantizedModule, float_weight, max_magnitude

Array: TypeAlias = "np.ndarray[Any, Any]"

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
_FP8 = (E4M3.name, E5M2.name)
_NVFP4_BLOCK, _MXFP4_BLOCK = 16, 32
_STATE = "weight.quant_state.bitsandbytes__"


def read_fp8(module: QuantizedModule) -> Weight:
    """Decode weight float8 [n, k] times weight_scale_inv or weight_scale.

    A scale is for the whole weight, a row, or a block of the size that config.json says; the last blocks may be
    smaller.
    """
    weight = module.part("weight", _FP8)
    name = next((name for name in ("weight_scale_inv", "weight_scale") if name in module.parts), "weight_scale_inv")
    stored_scales = module.parts.get(name)
    kinds = (*FLOATS, "uint8")  # exponents
    scales = module.part(name, kinds, 2 if stored_scales is None else stored_scales.ndim)
    if scales.dtype == np.uint8:
        scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    n, k = weight.shape
    if scales.size == 1:
        scales = scales.reshape(1, 1)
    elif scales.ndim == 1:
        scales = scales[:, None]
    block_rows, block_columns = _block(module, weight.shape, scales.shape)
    numbers = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)
    scales = scales.astype(np.float32)
    codes = weight.view(np.uint8)

    def read(rows: Array) -> Array:
        result = np.take(numbers, codes[rows])
        result *= scales[rows // block_rows].repeat(block_columns, axis=1)[:, :k]
        return result

    peak = max_magnitude(scales) * float(ml_dtypes.finfo(weight.dtype).max)
    return float_weight((n, k), peak, weight.nbytes + scales.nbytes, read)


def _block(module: QuantizedModule, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns per scale."""
    setting = module.settings.get("weight_block_size")
    sizes = setting if isinstance(setting, list) and len(setting) == 2 else [1, 1]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise module.error(f"weight_block_size = {setting!r} must be two positive integers")
    result = []
    for axis, size, count in zip(shape, sizes, scales, strict=False):
        if -(-axis // size) != count:
            size = max(axis // count, 1)  # one scale for the axis, or groups of equal size
        if -(-axis // size) != count:
            raise module.error(f"scales {scales} are none of blocks {tuple(sizes)} of {shape}")
        result.append(size)
    if len(scales) != 2:
        raise module.error(f"scales {scales} must have as many dimensions as the weight")
    return result[0], result[1]


def read_packed_fp4(module: QuantizedModule) -> Weight:
    """Decode MXFP4 or NVFP4 of compressed-tensors.

    weight_packed uint8 [n, k / 2], two adjacent codes per byte. MXFP4: weight_scale uint8 [n, k / 32], exponents.
    NVFP4: weight_scale float8 [n, k / 16], divided by weight_global_scale.
    """
    packed = module.part("weight_packed", ("uint8",))
    scales = module.part("weight_scale", ("uint8", E4M3.name))
    (n, pairs), nbytes = packed.shape, packed.nbytes + scales.nbytes
    is_mx = scales.dtype == np.uint8
    block = _MXFP4_BLOCK if is_mx else _NVFP4_BLOCK
    if scales.shape != (n, 2 * pairs // block) or 2 * pairs % block:
        raise module.error(f"weight_scale must have a number for each {block} columns of {2 * pairs}")
    if is_mx:
        rows = PackedRows.of(n, nbytes, lambda selected: decode_mxfp4(packed[selected], scales[selected]))
        return Weight(rows, (n, 2 * pairs), "MXFP4")
    divisor = module.parts.get("weight_global_scale")
    divisor = module.part("weight_global_scale", FLOATS, 1 if divisor is None else divisor.ndim)
    if divisor.size != 1 or not divisor.reshape(-1)[0] > 0:
        raise module.error("weight_global_scale must be one positive number")
    factor = np.float32(0.5) / divisor.reshape(-1)[0].astype(np.float32)  # the codebook holds doubled values

    def read(selected: RowIndex) -> GroupedWeight:
        return GroupedWeight(
            unpack_nibbles(packed[selected]), GroupScales(scales[selected].astype(np.float32) * factor), None, MXFP4
        )

    return Weight(PackedRows.of(n, nbytes, read), (n, 2 * pairs), "NVFP4")


def read_bitsandbytes_4bit(module: QuantizedModule) -> Weight:
    """Decode NF4 or FP4 of bitsandbytes.

    weight: codes of the whole matrix in order, two per byte, the high nibble first, stored as uint8 or as floats of as
    many bytes. A code is an index of weight.quant_map; values are multiplied by weight.absmax of their block, which
    with double quantization is quantized as well.
    """
    state, shape = _state(module)
    n, k = shape
    packed = np.ascontiguousarray(module.part("weight", ("uint8", *FLOATS))).reshape(-1).view(np.uint8)
    table = module.part("weight.quant_map", FLOATS, 1).astype(np.float32)
    size, blocks = state["blocksize"], -(-n * k // state["blocksize"])
    if k % 2 or packed.size * 2 != n * k or len(table) != 16:
        raise module.error(f"a weight of shape {shape} has {n * k // 2} bytes of 4-bit codes, and a quant_map of 16")
    is_nested = "weight.nested_absmax" in module.parts
    peaks = _dequantize_absmax(module, state) if is_nested else module.part("weight.absmax", FLOATS, 1)
    if peaks.shape != (blocks,):
        raise module.error(f"weight.absmax must have a number for each of {blocks} blocks of {size}")
    pairs, columns = packed.reshape(n, k // 2), np.arange(k)
    table_pairs = table[np.stack([np.arange(256) >> 4, np.arange(256) & 15], axis=1)].view(np.uint64)[
        :, 0
    ]  # two floats per byte

    def read(rows: Array) -> Array:
        result = np.take(table_pairs, pairs[rows]).view(np.float32)
        if k % size == 0:
            result *= peaks.reshape(n, -1)[rows].astype(np.float32).repeat(size, axis=1)
        else:
            result *= peaks[(rows[:, None] * k + columns) // size].astype(np.float32)
        return result

    nbytes = sum(part.nbytes for part in module.parts.values())
    return float_weight((n, k), max_magnitude(peaks) * max_magnitude(table), nbytes, read)


def _state(module: QuantizedModule) -> tuple[dict[str, Any], tuple[int, int]]:
    """Parse the JSON of the quantization state; return it with the shape of the weight."""
    name = next((name for name in module.parts if name.startswith(_STATE)), f"{_STATE}nf4")
    text = module.part(name, ("uint8",), 1).tobytes()
    try:
        state = json.loads(text)
        n, k = (int(size) for size in state["shape"])
        sizes = [n, k, state["blocksize"], state.get("nested_blocksize", 1)]
        is_good = all(isinstance(size, int) and size > 0 for size in sizes)
        float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError):
        is_good = False
    if not is_good:
        raise module.error(f"{name} says no shape of two numbers and no blocksize: {text[:80]!r}")
    return state, (n, k)


def _dequantize_absmax(module: QuantizedModule, state: dict[str, Any]) -> Array:
    """Dequantize absmax, float32: nested_quant_map[absmax] * nested_absmax + nested_offset."""
    codes = module.part("weight.absmax", ("uint8",), 1)
    table = module.part("weight.nested_quant_map", FLOATS, 1).astype(np.float32)
    peaks = module.part("weight.nested_absmax", FLOATS, 1).astype(np.float32)
    size = state.get("nested_blocksize", 256)
    if len(table) != 256 or len(peaks) != -(-len(codes) // size):
        raise module.error(f"weight.nested_absmax must have a number for each {size} of {len(codes)} blocks")
    result = table[codes] * peaks[np.arange(len(codes)) // size]
    return np.asarray(result + np.float32(state.get("nested_offset", 0.0)), np.float32)
