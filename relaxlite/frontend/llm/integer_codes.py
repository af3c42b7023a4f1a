"""Decoders of integer weights with scales and zero points per group: GPTQ, AWQ, compressed-tensors, bitsandbytes.

    weight[n, k] = scale[n, group(k)] * (code[n, k] - zero[n, group(k)])

Weights stay codes: groups are cut into blocks of 32 or 16 columns with the group's scale. A zero point that all groups
share becomes the zero point of the codes. Others become offsets, -scale * zero as an integer times a float, so that
nothing is rounded; scales that are neither float16 nor bfloat16 become 1 times a float32 factor. If the columns of a
group are not adjacent (act-order), columns are sorted by group, and activations are permuted at run time. Formats:
AutoGPTQ, nn_modules/qlinear; GPTQModel, utils/model.py; AutoAWQ, modules/linear/gemm.py; compressed-tensors,
compressors/pack_quantized; bitsandbytes, functional.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relaxlite.dtypes import to_numpy
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.quantized import GroupedWeight, GroupScales, PackedRows, RowIndex, unpack_nibbles
from relaxlite.frontend.llm.quantized_module import FLOATS, QuantizedModule, float_weight, max_magnitude
from relaxlite.ir.ops.block_codes import BIT_PLANES, Coding, fills_words
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

_BLOCKS = (32, 16)  # columns per scale, in the order in which ops on blocked weights prefer them
_INT32_BITS = 32
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of an int32 that holds each of 8 columns
_GPTQ_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a 1 in each code of an int32


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """An integer weight [n, k] with scales and zero points.

    `codes`: decodes some rows to uint8. `scales` [n, groups]. `zeros`: uint8 [n, groups], or the zero point of all
    groups. `groups` [k]: the group of each column.
    """

    shape: tuple[int, int]
    bits: int
    codes: Callable[[RowIndex], Array]
    scales: Array
    zeros: Array | int
    groups: Array
    nbytes: int

    def weight(self, method: str) -> Weight:
        """Return the weight in codes, or in floats if groups are no whole blocks. `method` names the library."""
        for order in (None, np.argsort(self.groups, kind="stable")):
            groups = self.groups if order is None else self.groups[order]
            for block in _BLOCKS:
                if self.shape[1] % block == 0 and (groups[::block] == groups.reshape(-1, block).T).all():
                    read = self._grouped(groups[::block], order)
                    return Weight(PackedRows.of(self.shape[0], self.nbytes, read), self.shape, method)
        return float_weight(self.shape, max_magnitude(self.scales) * (1 << self.bits), self.nbytes, self._dequantized)

    def _grouped(self, groups: Array, order: Array | None) -> Callable[[RowIndex], GroupedWeight]:
        """Make the function that decodes rows; `groups` are the groups of blocks, `order` the order of columns.

        Scales are float16 or bfloat16 without factors where they fit and there is one zero point.
        """
        block = self.shape[1] // len(groups)
        zero = self.zeros if isinstance(self.zeros, int) else 0
        min_bits = max(self.bits, zero.bit_length())  # GPTQ's zero point of codes of 3 bits may be 8
        bits = next(b for b in BIT_PLANES if b >= min_bits and fills_words(self.shape[1], block, b))
        coding = Coding(bits, zero)
        scales = _in_16_bits(self.scales)
        count = scales.shape[1]
        is_even = len(groups) % count == 0 and np.array_equal(groups, np.arange(count).repeat(len(groups) // count))
        factor_groups = np.arange(count) if is_even else groups

        def read(rows: RowIndex) -> GroupedWeight:
            codes, row_scales = self.codes(rows), scales[rows]
            codes = codes if order is None else codes[:, order]
            if isinstance(self.zeros, int) and scales.dtype != np.float32:
                return GroupedWeight(codes, GroupScales(row_scales[:, groups]), None, coding, order)
            factors, offsets = row_scales[:, factor_groups], None
            if not isinstance(self.zeros, int):
                offsets = GroupScales(self.zeros[rows][:, groups], -factors)
            ones = np.ones((len(codes), len(groups)), np.uint8)
            return GroupedWeight(codes, GroupScales(ones, factors), offsets, coding, order)

        return read

    def _dequantized(self, rows: Array) -> Array:
        """Dequantize some rows to float32."""
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[rows][:, self.groups]
        numbers = self.codes(rows).astype(np.float32) - np.asarray(zeros, np.float32)
        numbers *= self.scales[rows].astype(np.float32)[:, self.groups]
        return numbers


def _in_16_bits(scales: Array) -> Array:
    """Convert float32 scales to float16 or bfloat16 if that is exact."""
    for dtype in (np.dtype(np.float16), to_numpy("bfloat16")) if scales.dtype == np.float32 else ():
        with np.errstate(over="ignore"):
            narrow = scales.astype(dtype)
        if np.array_equal(narrow.astype(np.float32), scales):
            return narrow
    return scales


def gptq_layout(settings: Mapping[str, Any]) -> str:
    """Return the layout of GPTQ: "gptq", whose zero points are stored less one, "gptq_v2", or another one."""
    if settings.get("is_marlin_format"):
        return "marlin"
    return str(settings.get("checkpoint_format", settings.get("format")) or "gptq")


def read_gptq(module: QuantizedModule) -> Weight:
    """Decode a GPTQ weight, with bits of 2, 3, 4 or 8.

    qweight int32 [k * bits / 32, n]: the codes of a column from the lowest bit on; qzeros int32 [groups, n * bits /
    32]: zero points of a row, packed likewise; scales [groups, n]; g_idx int32 [k]: the group of each column.
    """
    packed_codes, scales = module.part("qweight", ("int32",)), module.part("scales", FLOATS)
    packed_zeros = module.part("qzeros", ("int32",))
    groups, n = scales.shape
    bits = packed_zeros.shape[1] * _INT32_BITS // n
    if (
        bits not in (2, 3, 4, 8)
        or packed_zeros.shape != (groups, n * bits // _INT32_BITS)
        or packed_codes.shape[1] != n
    ):
        raise module.error("qzeros must have 2, 3, 4 or 8 bits for each number of scales, and qweight as many columns")
    k = len(packed_codes) * _INT32_BITS // bits
    is_less_one = gptq_layout(module.settings) == "gptq"  # the stored zero points
    if is_less_one and bits != 3:  # added with carry between codes, as in GPTQModel
        packed_zeros = (np.ascontiguousarray(packed_zeros).view(np.uint32) + np.uint32(_GPTQ_ONES[bits])).view(np.int32)
    zeros = _unpack(np.ascontiguousarray(packed_zeros), bits)[:, :n].T
    if is_less_one and bits == 3:
        zeros = zeros + np.uint8(1)

    def codes(rows: RowIndex) -> Array:
        return _unpack(np.ascontiguousarray(packed_codes[:, rows].T), bits)

    return _weight(module, (n, k), bits, codes, scales.T, _shared_zero(zeros), "g_idx")


def read_awq(module: QuantizedModule) -> Weight:
    """Decode an AWQ weight.

    qweight int32 [k, n / 8] and qzeros int32 [groups, n / 8]: nibbles of columns in the order 0, 2, 4, 6, 1, 3, 5, 7;
    scales [groups, n].
    """
    packed_codes, scales = module.part("qweight", ("int32",)), module.part("scales", FLOATS)
    packed_zeros = module.part("qzeros", ("int32",))
    (k, count), (groups, n) = packed_codes.shape, scales.shape
    if n != 8 * count or packed_zeros.shape != (groups, count):
        raise module.error(f"AWQ has 4 bits, so that scales must have {8 * count} columns, and qzeros {count}")
    nibbles = np.arange(n) // 8 * 8 + np.resize(_AWQ_NIBBLES, n)

    def columns(nibble_pairs: Array, rows: RowIndex) -> Array:
        row_nibbles = nibbles[rows]
        return np.ascontiguousarray(
            (nibble_pairs[:, row_nibbles // 2] >> (row_nibbles % 2 * 4).astype(np.uint8) & 15).T
        )

    pairs, zero_pairs = (np.ascontiguousarray(array).view(np.uint8) for array in (packed_codes, packed_zeros))
    zeros = _shared_zero(columns(zero_pairs, slice(None)))
    return _weight(module, (n, k), 4, lambda rows: columns(pairs, rows), scales.T, zeros, None)


def read_packed_integers(module: QuantizedModule) -> Weight:
    """Decode a weight of compressed-tensors in packed int32.

    weight_packed int32 [n, k * bits / 32]: the codes of a row; weight_scale [n, groups]; weight_zero_point: packed
    along columns, int32 [n * bits / 32, groups], or int8 [n, groups], both less half of the code range; weight_shape;
    weight_g_idx.
    """
    packed = module.part("weight_packed", ("int32",))
    n, k = _shape(module, packed)
    bits = packed.shape[1] * _INT32_BITS // k
    if packed.shape[0] != n or bits not in (2, 4, 8) or packed.shape[1] != -(-k * bits // _INT32_BITS):
        raise module.error(f"weight_packed must have rows of {k} codes of 2, 4 or 8 bits")
    half, scales = 1 << bits - 1, _scales(module, n)
    zeros: Array | int = half
    if "weight_zero_point" in module.parts:
        stored_zeros = module.part("weight_zero_point", ("int32", "int8"))
        if stored_zeros.dtype == np.int32:
            module.check_shape("weight_zero_point", (-(-n * bits // _INT32_BITS), scales.shape[1]))
            result = _unpack(np.ascontiguousarray(stored_zeros.T), bits)[:, :n].T
        else:
            module.check_shape("weight_zero_point", scales.shape)
            result = (stored_zeros.astype(np.int16) + half).astype(np.uint8)
        zeros = _shared_zero(result)

    def codes(rows: RowIndex) -> Array:
        return _unpack(np.ascontiguousarray(packed[rows]), bits)[:, :k]

    return _weight(module, (n, k), bits, codes, scales, zeros, "weight_g_idx")


def read_int8_codes(module: QuantizedModule, scales: Array) -> Weight:
    """Decode weight int8 [n, k] with `scales` [n, groups] and, where present, weight_zero_point int8 [n, groups]."""
    weight = module.part("weight", ("int8",))
    n, k = weight.shape
    zeros: Array | int = 128
    if "weight_zero_point" in module.parts:
        stored_zeros = module.parts["weight_zero_point"]
        stored_zeros = module.part("weight_zero_point", ("int8",), stored_zeros.ndim)
        if stored_zeros.size not in (1, scales.size):
            raise module.error(f"weight_zero_point must have a number for each of weight_scale, {scales.shape}")
        zeros = _shared_zero(np.resize(stored_zeros, scales.shape).view(np.uint8) ^ 128)

    def codes(rows: RowIndex) -> Array:
        return weight[rows].view(np.uint8) ^ np.uint8(128)

    return _weight(module, (n, k), 8, codes, scales, zeros, "weight_g_idx")


def read_bitsandbytes_int8(module: QuantizedModule) -> Weight:
    """Decode a weight of bitsandbytes: weight int8 [n, k], SCB float32 [n], 127 times the scale of a row."""
    absmax, layout = module.part("SCB", FLOATS, 1), module.parts.get("weight_format")
    if layout is not None and layout.size and layout.reshape(-1)[0] != 0:
        raise module.error("weight_format must be 0: rows one after another")
    if len(absmax) != len(module.part("weight", ("int8",))):
        raise module.error("SCB must have a number for each row of weight")
    return read_int8_codes(module, absmax.astype(np.float32)[:, None] / np.float32(127))


def read_compressed_int8(module: QuantizedModule) -> Weight:
    """Decode a weight of compressed-tensors: weight int8 [n, k] with weight_scale."""
    return read_int8_codes(module, _scales(module, len(module.part("weight", ("int8",)))))


def _weight(
    module: QuantizedModule,
    shape: tuple[int, int],
    bits: int,
    codes: Callable[[RowIndex], Array],
    scales: Array,
    zeros: Array | int,
    index: str | None,
) -> Weight:
    """Make a weight of codes, scales and zero points. `index`: the part with the group of each column, if any."""
    k, count = shape[1], scales.shape[1]
    g_idx = None if index is None else module.parts.get(index)
    if g_idx is not None and index is not None and (count == 1 or g_idx.any()):  # zeros for several groups: never set
        groups = module.part(index, ("int32", "int64"), 1)
        module.check_shape(index, (k,))
        if groups.min() < 0 or groups.max() >= count:
            raise module.error(f"{index} must say one of {count} groups for each column")
    else:
        size = module.integer("group_size") or k
        if -(-k // size) != count:  # the module has another group size than config.json
            if k % count:
                raise module.error(f"{k} columns are no {count} groups of {size}")
            size = k // count
        groups = np.arange(k) // size
    nbytes = sum(part.nbytes for part in module.parts.values())
    return IntegerWeight(shape, bits, codes, scales, zeros, groups, nbytes).weight(module.method)


def _shape(module: QuantizedModule, packed: Array) -> tuple[int, int]:
    """Read the shape of a packed weight, whose rows may end with padding."""
    shape = module.part("weight_shape", ("int64", "int32"), 1)
    if len(shape) != 2 or shape.min() < 1:
        raise module.error(f"weight_shape must be two positive integers, it is {shape.tolist()}")
    return int(shape[0]), int(shape[1])


def _scales(module: QuantizedModule, n: int) -> Array:
    """Return weight_scale as [n, groups]; one number for all rows is broadcast."""
    stored = module.parts.get("weight_scale")
    scales = module.part("weight_scale", FLOATS, 2 if stored is None else stored.ndim)
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (n, 1))
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.ndim != 2 or len(scales) != n:
        raise module.error(f"weight_scale must have {n} rows")
    return scales


def _shared_zero(zeros: Array) -> Array | int:
    """Return the one value of all zero points, or the array if they differ."""
    return int(zeros.flat[0]) if zeros.size and (zeros == zeros.flat[0]).all() else zeros


def _unpack(packed: Array, bits: int) -> Array:
    """Unpack int32 [n, w] with codes from the lowest bit on to codes uint8 [n, 32 * w / bits]."""
    packed_bytes = packed.view(np.uint8)
    if bits == 8:
        return packed_bytes
    if bits == 4:
        return unpack_nibbles(packed_bytes)
    if bits == 2:
        return (packed_bytes[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(packed_bytes), -1)
    ones = np.unpackbits(packed_bytes, axis=1, bitorder="little").reshape(len(packed_bytes), -1, bits)
    return np.packbits(ones, axis=2, bitorder="little").reshape(len(packed_bytes), -1)
