"""Weights in integer codes, with a scale and maybe a zero point for each group of a row, as GPTQ, AWQ,
compressed-tensors and bitsandbytes (LLM.int8) lay them out:

    weight[n, k] = scale[n, group(k)] * (code[n, k] - zero[n, group(k)])

They stay codes: groups are cut into blocks of 32 or 16 columns that have its scale. One zero point for all is that of
the codes. Other zero points become offsets, -scale * zero as an integer times a float, so that nothing is rounded; and
so do scales that are no 16 bits. Where the columns of a group lie apart (act-order), they are sorted, and what the
weight is multiplied by is sorted as it runs. Formats: AutoGPTQ, nn_modules/qlinear; GPTQModel, utils/model.py;
AutoAWQ, modules/linear/gemm.py; compressed-tensors, compressors/pack_quantized; bitsandbytes, functional.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relaxlite.dtypes import to_numpy
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.quantized import GroupedWeight, GroupScales, PackedRows, Rows, neighbours
from relaxlite.frontend.llm.quantized_module import FLOATS, Module, in_floats, peak_of
from relaxlite.ir.ops.block_codes import BIT_PLANES, Coding, fills_words
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

_BLOCKS = (32, 16)  # columns with a scale, as the ops on weights in blocks take them best
_WORD = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of 8 columns, which 4 bits of a word
_GPTQ_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # one in each code of a word


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight [n, k]: `codes` of some rows uint8, `scales` [n, groups], `zeros` uint8 [n, groups] or the one of all,
    `groups` [k]: the group of each column."""

    shape: tuple[int, int]
    bits: int
    codes: Callable[[Rows], Array]
    scales: Array
    zeros: Array | int
    groups: Array
    nbytes: int

    def weight(self, method: str) -> Weight:
        """In codes; in floats where groups are no whole blocks."""
        for order in (None, np.argsort(self.groups, kind="stable")):
            groups = self.groups if order is None else self.groups[order]
            for block in _BLOCKS:
                if self.shape[1] % block == 0 and (groups[::block] == groups.reshape(-1, block).T).all():
                    read = self._grouped(groups[::block], order)
                    return Weight(PackedRows.of(self.shape[0], self.nbytes, read), self.shape, method)
        return in_floats(self.shape, peak_of(self.scales) * (1 << self.bits), self.nbytes, self._dequantized)

    def _grouped(self, groups: Array, order: Array | None) -> Callable[[Rows], GroupedWeight]:
        """`groups` of the blocks. Where there is one zero point, and scales have 16 bits, these are all."""
        block = self.shape[1] // len(groups)
        zero = self.zeros if isinstance(self.zeros, int) else 0
        least = max(self.bits, zero.bit_length())  # of 3 bits GPTQ's may be 8
        bits = next(b for b in BIT_PLANES if b >= least and fills_words(self.shape[1], block, b))
        coding = Coding(bits, zero)
        scales = _in_16_bits(self.scales)
        count = scales.shape[1]
        is_even = len(groups) % count == 0 and np.array_equal(groups, np.arange(count).repeat(len(groups) // count))
        of_factors = np.arange(count) if is_even else groups

        def read(rows: Rows) -> GroupedWeight:
            codes, some = self.codes(rows), scales[rows]
            codes = codes if order is None else codes[:, order]
            if isinstance(self.zeros, int) and scales.dtype != np.float32:
                return GroupedWeight(codes, GroupScales(some[:, groups]), None, coding, order)
            factors, offsets = some[:, of_factors], None
            if not isinstance(self.zeros, int):
                offsets = GroupScales(self.zeros[rows][:, groups], -factors)
            ones = np.ones((len(codes), len(groups)), np.uint8)
            return GroupedWeight(codes, GroupScales(ones, factors), offsets, coding, order)

        return read

    def _dequantized(self, rows: Array) -> Array:
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[rows][:, self.groups]
        numbers = self.codes(rows).astype(np.float32) - np.asarray(zeros, np.float32)
        numbers *= self.scales[rows].astype(np.float32)[:, self.groups]
        return numbers


def _in_16_bits(scales: Array) -> Array:
    """Where these float32 are float16 or bfloat16, as such."""
    for dtype in (np.dtype(np.float16), to_numpy("bfloat16")) if scales.dtype == np.float32 else ():
        with np.errstate(over="ignore"):
            halves = scales.astype(dtype)
        if np.array_equal(halves.astype(np.float32), scales):
            return halves
    return scales


def gptq_layout(settings: Mapping[str, Any]) -> str:
    """ "gptq", where zero points are one more than what is stored, "gptq_v2", or another one."""
    if settings.get("is_marlin_format"):
        return "marlin"
    return str(settings.get("checkpoint_format", settings.get("format")) or "gptq")


def read_gptq(module: Module) -> Weight:
    """qweight int32 [k * bits / 32, n]: a column's codes one after another, from the lowest bit; qzeros int32
    [groups, n * bits / 32], of a row's in the same way; scales [groups, n]; g_idx int32 [k]: the group of each k."""
    words, scales = module.part("qweight", ("int32",)), module.part("scales", FLOATS)
    packed = module.part("qzeros", ("int32",))
    groups, n = scales.shape
    bits = packed.shape[1] * _WORD // n
    if bits not in (2, 3, 4, 8) or packed.shape != (groups, n * bits // _WORD) or words.shape[1] != n:
        raise module.error("qzeros must have 2, 3, 4 or 8 bits for each number of scales, and qweight as many columns")
    k = len(words) * _WORD // bits
    is_less_one = gptq_layout(module.settings) == "gptq"  # qzeros
    if is_less_one and bits != 3:  # in words, as GPTQModel adds it
        packed = (np.ascontiguousarray(packed).view(np.uint32) + np.uint32(_GPTQ_ONES[bits])).view(np.int32)
    zeros = _unpacked(np.ascontiguousarray(packed), bits)[:, :n].T
    if is_less_one and bits == 3:
        zeros = zeros + np.uint8(1)

    def codes(rows: Rows) -> Array:
        return _unpacked(np.ascontiguousarray(words[:, rows].T), bits)

    return _weight(module, (n, k), bits, codes, scales.T, _one(zeros), "g_idx")


def read_awq(module: Module) -> Weight:
    """qweight int32 [k, n / 8] and qzeros int32 [groups, n / 8], words of columns in the order 0, 2, 4, 6, 1, 3, 5, 7;
    scales [groups, n]."""
    words, scales = module.part("qweight", ("int32",)), module.part("scales", FLOATS)
    packed = module.part("qzeros", ("int32",))
    (k, count), (groups, n) = words.shape, scales.shape
    if n != 8 * count or packed.shape != (groups, count):
        raise module.error(f"AWQ has 4 bits, so that scales must have {8 * count} columns, and qzeros {count}")
    nibbles = np.arange(n) // 8 * 8 + np.resize(_AWQ_PLACES, n)

    def columns(pairs: Array, rows: Rows) -> Array:
        places = nibbles[rows]
        return np.ascontiguousarray((pairs[:, places // 2] >> (places % 2 * 4).astype(np.uint8) & 15).T)

    pairs, of_zeros = (np.ascontiguousarray(given).view(np.uint8) for given in (words, packed))
    zeros = _one(columns(of_zeros, slice(None)))
    return _weight(module, (n, k), 4, lambda rows: columns(pairs, rows), scales.T, zeros, None)


def read_packed(module: Module) -> Weight:
    """compressed-tensors: weight_packed int32 [n, k * bits / 32], the codes of a row; weight_scale [n, groups];
    weight_zero_point, of the codes of a column int32 [n * bits / 32, groups] or int8 [n, groups], both less half of the
    codes; weight_shape; weight_g_idx."""
    words = module.part("weight_packed", ("int32",))
    n, k = _shape(module, words)
    bits = words.shape[1] * _WORD // k
    if words.shape[0] != n or bits not in (2, 4, 8) or words.shape[1] != -(-k * bits // _WORD):
        raise module.error(f"weight_packed must have rows of {k} codes of 2, 4 or 8 bits")
    half, scales = 1 << bits - 1, _scales(module, n)
    zeros: Array | int = half
    if "weight_zero_point" in module.parts:
        given = module.part("weight_zero_point", ("int32", "int8"))
        if given.dtype == np.int32:
            module.need("weight_zero_point", (-(-n * bits // _WORD), scales.shape[1]))
            result = _unpacked(np.ascontiguousarray(given.T), bits)[:, :n].T
        else:
            module.need("weight_zero_point", scales.shape)
            result = (given.astype(np.int16) + half).astype(np.uint8)
        zeros = _one(result)

    def codes(rows: Rows) -> Array:
        return _unpacked(np.ascontiguousarray(words[rows]), bits)[:, :k]

    return _weight(module, (n, k), bits, codes, scales, zeros, "weight_g_idx")


def read_bytes(module: Module, scales: Array) -> Weight:
    """weight int8 [n, k], maybe weight_zero_point int8 [n, groups]; scales [n, groups]."""
    weight = module.part("weight", ("int8",))
    n, k = weight.shape
    zeros: Array | int = 128
    if "weight_zero_point" in module.parts:
        given = module.parts["weight_zero_point"]
        given = module.part("weight_zero_point", ("int8",), given.ndim)
        if given.size not in (1, scales.size):
            raise module.error(f"weight_zero_point must have a number for each of weight_scale, {scales.shape}")
        zeros = _one(np.resize(given, scales.shape).view(np.uint8) ^ 128)

    def codes(rows: Rows) -> Array:
        return weight[rows].view(np.uint8) ^ np.uint8(128)

    return _weight(module, (n, k), 8, codes, scales, zeros, "weight_g_idx")


def read_int8(module: Module) -> Weight:
    """bitsandbytes: weight int8 [n, k], SCB float32 [n]: 127 times the scale of a row."""
    most, order = module.part("SCB", FLOATS, 1), module.parts.get("weight_format")
    if order is not None and order.size and order.reshape(-1)[0] != 0:
        raise module.error("weight_format must be 0: rows one after another")
    if len(most) != len(module.part("weight", ("int8",))):
        raise module.error("SCB must have a number for each row of weight")
    return read_bytes(module, most.astype(np.float32)[:, None] / np.float32(127))


def read_scaled_bytes(module: Module) -> Weight:
    """compressed-tensors: weight int8 [n, k] with weight_scale."""
    return read_bytes(module, _scales(module, len(module.part("weight", ("int8",)))))


def _weight(
    module: Module,
    shape: tuple[int, int],
    bits: int,
    codes: Callable[[Rows], Array],
    scales: Array,
    zeros: Array | int,
    index: str | None,
) -> Weight:
    """`index`: the part that says the group of each column, where there is one."""
    k, count = shape[1], scales.shape[1]
    given = None if index is None else module.parts.get(index)
    if given is not None and index is not None and (count == 1 or given.any()):  # else nobody has set it
        groups = module.part(index, ("int32", "int64"), 1)
        module.need(index, (k,))
        if groups.min() < 0 or groups.max() >= count:
            raise module.error(f"{index} must say one of {count} groups for each column")
    else:
        size = module.integer("group_size") or k
        if -(-k // size) != count:  # of this module another one
            if k % count:
                raise module.error(f"{k} columns are no {count} groups of {size}")
            size = k // count
        groups = np.arange(k) // size
    nbytes = sum(part.nbytes for part in module.parts.values())
    return Integers(shape, bits, codes, scales, zeros, groups, nbytes).weight(module.method)


def _shape(module: Module, words: Array) -> tuple[int, int]:
    """weight_shape, which says how many codes of the last word count."""
    said = module.part("weight_shape", ("int64", "int32"), 1)
    if len(said) != 2 or said.min() < 1:
        raise module.error(f"weight_shape must be two positive integers, it is {said.tolist()}")
    return int(said[0]), int(said[1])


def _scales(module: Module, n: int) -> Array:
    """weight_scale [n, groups], also of one number for all."""
    result = module.parts.get("weight_scale")
    scales = module.part("weight_scale", FLOATS, 2 if result is None else result.ndim)
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (n, 1))
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.ndim != 2 or len(scales) != n:
        raise module.error(f"weight_scale must have {n} rows")
    return scales


def _one(zeros: Array) -> Array | int:
    """The one that all are, if they are."""
    return int(zeros.flat[0]) if zeros.size and (zeros == zeros.flat[0]).all() else zeros


def _unpacked(words: Array, bits: int) -> Array:
    """Words int32 [n, w] of codes from the lowest bit on, as codes uint8 [n, 32 * w / bits]."""
    packed = words.view(np.uint8)
    if bits == 8:
        return packed
    if bits == 4:
        return neighbours(packed)
    if bits == 2:
        return (packed[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(packed), -1)
    ones = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    return np.packbits(ones, axis=2, bitorder="little").reshape(len(packed), -1)
