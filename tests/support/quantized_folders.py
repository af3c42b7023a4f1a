"""What libraries write for a quantized module, packed from codes, scales and zero points as their formats say, with the
weight in float32 that it stands for. Code that packs one number after another, so that it shares nothing with ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
Tensors: TypeAlias = "dict[str, Array]"
Packer: TypeAlias = "Callable[[np.random.Generator, int, int], tuple[Tensors, Array]]"

KINDS = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": KINDS[value.dtype.name],
            "shape": value.shape,
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(v.tobytes() for v in tensors.values()))


def as_words(codes: Array, bits: int, places: tuple[int, ...] | None = None) -> Array:
    """Codes [rows, n] as int32 [rows, ceil(n * bits / 32)], one after another from the lowest bit; of each eight, those
    at `places`."""
    rows, n = codes.shape
    words = []
    for row in codes.tolist():
        if places is not None:
            row = [row[at + place] for at in range(0, n, 8) for place in places]
        whole = sum(code << bits * k for k, code in enumerate(row))
        words.append([whole >> 32 * w & 0xFFFFFFFF for w in range(-(-n * bits // 32))])
    return np.array(words, np.uint32).view(np.int32).reshape(rows, -1)


def _drawn(rng: np.random.Generator, n: int, k: int, bits: int, groups: int, dtype: Any) -> tuple[Array, Array]:
    """Codes [n, k], and scales [n, groups] with which the weight has about the variance of a trained one."""
    scales = rng.uniform(0.5, 1.5, (n, groups)) * 3 / (1 << bits) * k**-0.5
    return rng.integers(0, 1 << bits, (n, k)), scales.astype(dtype)


def _stands_for(codes: Array, zeros: Any, scales: Array, groups: Array) -> Array:
    spread = np.broadcast_to(zeros, scales.shape)[:, groups]
    return ((codes - spread) * scales.astype(np.float64)[:, groups]).astype(np.float32)


def gptq(
    *, bits: int = 4, group: int = 32, symmetric: bool = True, version: int = 1, is_sorted: bool = True,
    has_index: bool = True, dtype: Any = np.float16, zero: int | None = None,
) -> Packer:  # fmt: skip
    """`zero`: of all, where it is not the middle of the codes (`symmetric`) nor drawn."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        size = k if group == -1 else group
        count = -(-k // size)
        codes, scales = _drawn(rng, n, k, bits, count, dtype)
        zeros = np.full((n, count), 1 << bits - 1) if symmetric else rng.integers(1, 1 << bits, (n, count))
        if zero is not None:
            zeros[:] = zero
        groups = np.arange(k) // size
        if not is_sorted:  # the same for all modules that read the same, as GPTQ has it
            groups = np.random.default_rng(k).permutation(groups)
        tensors = {
            "qweight": np.ascontiguousarray(as_words(codes, bits).T),
            "qzeros": as_words(zeros.T - (1 if version == 1 else 0), bits),
            "scales": np.ascontiguousarray(scales.T),
        }
        if has_index:
            tensors["g_idx"] = groups.astype(np.int32)
        return tensors, _stands_for(codes, zeros, scales, groups)

    return pack


def awq(*, group: int = 32) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes, scales = _drawn(rng, n, k, 4, k // group, np.float16)
        zeros, order = rng.integers(0, 16, (n, k // group)), (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": as_words(codes.T, 4, order), "qzeros": as_words(zeros.T, 4, order),
            "scales": np.ascontiguousarray(scales.T),
        }  # fmt: skip
        return tensors, _stands_for(codes, zeros, scales, np.arange(k) // group)

    return pack


def compressed(
    *, bits: int = 4, group: int | None = 32, symmetric: bool = True, is_sorted: bool = True, dtype: Any = BF16
) -> Packer:
    """Format pack-quantized."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        size = group or k
        codes, scales = _drawn(rng, n, k, bits, k // size, dtype)
        zeros = rng.integers(0, 1 << bits, scales.shape)
        groups = np.arange(k) // size if is_sorted else rng.permutation(np.arange(k) // size)
        tensors = {
            "weight_packed": as_words(codes, bits), "weight_scale": scales,
            "weight_shape": np.array([n, k], np.int64),
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(as_words(zeros.T, bits).T)
        if not is_sorted:
            tensors["weight_g_idx"] = groups.astype(np.int32)
        return tensors, _stands_for(codes, 1 << bits - 1 if symmetric else zeros, scales, groups)

    return pack


def int8(*, symmetric: bool = True, of_rows: bool = True, dtype: Any = BF16) -> Packer:
    """Formats int-quantized and naive-quantized of compressed-tensors."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes, scales = _drawn(rng, n if of_rows else 1, k, 8, 1, dtype)
        codes = rng.integers(-128, 128, (n, k))
        zeros = np.zeros(scales.shape, np.int64) if symmetric else rng.integers(-128, 128, scales.shape)
        tensors = {"weight": codes.astype(np.int8), "weight_scale": scales if of_rows else scales[0]}
        tensors["input_scale"] = np.ones(1, dtype)
        if not symmetric:
            tensors["weight_zero_point"] = zeros.astype(np.int8)
        return tensors, ((codes - zeros) * scales.astype(np.float64)).astype(np.float32)

    return pack


def llm_int8() -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes = rng.integers(-127, 128, (n, k))
        most = rng.uniform(1, 3, n).astype(np.float32) * np.float32(k**-0.5)
        tensors = {"weight": codes.astype(np.int8), "SCB": most, "weight_format": np.zeros((), np.uint8)}
        return tensors, (codes * most[:, None].astype(np.float64) / 127).astype(np.float32)

    return pack


def fp8(
    *, block: tuple[int, int] | None = (128, 128), name: str = "weight_scale_inv", dtype: Any = np.float32,
    kind: Any = E4M3,
) -> Packer:  # fmt: skip
    """`block`: (1, 0) is a row; None: the whole matrix."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        weight = (rng.standard_normal((n, k)) * 100).astype(kind)
        rows, columns = block or (n, k)
        columns = columns or k
        shape = (-(-n // rows), -(-k // columns))
        scales = (rng.uniform(0.5, 1.5, shape) * 0.01 * k**-0.5).astype(dtype)
        spread = scales.astype(np.float32).repeat(rows, 0)[:n].repeat(columns, 1)[:, :k]
        return {"weight": weight, name: scales if block else scales.reshape(())}, weight.astype(np.float32) * spread

    return pack


def bnb(*, kind: str = "nf4", is_nested: bool = False, size: int = 64, storage: Any = np.uint8) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes, count = rng.integers(0, 16, n * k), -(-n * k // size)
        table = NF4 if kind == "nf4" else np.concatenate([FP4, -FP4])
        packed = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [n, k]}
        peaks = (rng.uniform(1, 3, count) * k**-0.5).astype(np.float32)
        tensors = {"weight": packed.view(storage)[:, None], "weight.absmax": peaks, "weight.quant_map": table}
        if is_nested:
            nested = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            places, most = rng.integers(128, 256, count), rng.uniform(0.01, 0.02, -(-count // 256)).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.11}
            peaks = nested[places] * most.repeat(256)[:count] + np.float32(0.11)
            tensors |= {
                "weight.absmax": places.astype(np.uint8), "weight.nested_absmax": most,
                "weight.nested_quant_map": nested,
            }  # fmt: skip
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return tensors, (table[codes] * peaks.repeat(size)[: n * k]).reshape(n, k)

    return pack


def fp4(*, is_mx: bool) -> Packer:
    """Formats nvfp4-pack-quantized and mxfp4-pack-quantized of compressed-tensors."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes, block = rng.integers(0, 16, (n, k)), 32 if is_mx else 16
        numbers = np.concatenate([E2M1, -E2M1])[codes]
        tensors = {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)}
        if is_mx:
            powers = rng.integers(121, 124, (n, k // block))
            scales, tensors["weight_scale"] = 2.0 ** (powers - 127), powers.astype(np.uint8)
        else:
            tensors["weight_scale"] = rng.uniform(100, 400, (n, k // block)).astype(E4M3)
            tensors["weight_global_scale"] = np.array([7000.0], np.float32)
            scales = tensors["weight_scale"].astype(np.float64) / 7000
        return tensors, (numbers * scales.repeat(block, 1)).astype(np.float32)

    return pack
