"""Random blocks of GGUF's formats, whose floats are what a test wants."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS

gguf = pytest.importorskip("gguf")

DOT2_INT16: Mapping[str, tuple[int, ...]] = {  # where the float16 of a block lie; else at its beginning
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
NIBBLES = (49, 51, 53, 55)  # of IQ1_M, the upper ones of which are one float16
EXPONENTS = np.array([0, 1, 2, 3, 100, 110, 120, 127, 128, 129, 140, 250])  # of MXFP4: the least, and others


def dequantized(data: np.ndarray, kind: str) -> np.ndarray:
    """Floats of rows of blocks as bytes, by the `gguf` package or, of what it does not know, as llama.cpp says it: a
    float16, and behind it 1 or -1 for each bit, or two bits less one."""
    if kind not in ("Q1_0", "Q2_0"):
        return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    floats = []
    for block in data.reshape(-1, BLOCK_FORMATS[kind].nbytes):
        (scale,) = block[:2].copy().view(np.float16).astype(np.float32)
        for byte in block[2:].tolist():
            bits = [byte >> k & 1 for k in range(8)]
            pairs = [byte >> k & 3 for k in range(0, 8, 2)]
            floats += [scale * (2 * b - 1) for b in bits] if kind == "Q1_0" else [scale * (p - 1) for p in pairs]
    return np.array(floats, np.float32).reshape(len(data), -1)


def random_blocks(kind: str, scales: np.ndarray, seed: int = 0) -> np.ndarray:
    """Blocks [count, bytes] of random codes, and `scales` [count] in float16 wherever a block has one; of MXFP4, which
    has powers of two, some of EXPONENTS."""
    rng, count = np.random.default_rng(seed), len(scales)
    blocks = rng.integers(0, 256, (count, BLOCK_FORMATS[kind].nbytes), dtype=np.uint8)
    halves = np.asarray(scales).astype(np.float16)[:, None].view(np.uint8)
    for at in DOT2_INT16.get(kind, (0,)):
        blocks[:, at : at + 2] = halves
    if kind == "IQ1_M":
        nibbles = np.stack([halves[:, 0] & 15, halves[:, 0] >> 4, halves[:, 1] & 15, halves[:, 1] >> 4], axis=1)
        blocks[:, NIBBLES] = blocks[:, NIBBLES] & 15 | nibbles << 4
    if kind == "MXFP4":
        blocks[:, 0] = np.resize(EXPONENTS, count)
    if kind == "NVFP4":
        blocks[:, :4] &= 127  # the first bit of a scale is never set
    return blocks
