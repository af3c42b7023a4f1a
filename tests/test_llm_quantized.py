"""Block formats of checkpoints against the decoder of the `gguf` package, on random bytes and on real ones."""

from __future__ import annotations

import numpy as np
import pytest

from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_are_read_as_their_authors_read_them(name: str) -> None:
    block = BLOCK_FORMATS[name]
    rows = np.random.default_rng(0).integers(0, 256, (7, 3 * block.nbytes), dtype=np.uint8)
    blocks = rows.reshape(-1, block.nbytes)
    for at in HALVES[name]:  # random bytes as float16 may be NaN
        blocks[:, at : at + 2] = np.random.default_rng(at).standard_normal((21, 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = np.resize([0, 1, 2, 3, 100, 120, 127, 128, 129, 140, 250], 21)  # powers of two
    wanted = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    weight = block.unpack(rows)
    assert weight.shape == (7, 3 * block.size) and weight.codes.max() < 2**weight.coding.bits
    assert weight.codes.dtype == np.uint8 and weight.group in (16, 32)
    tolerance = 0 if name == "MXFP4" else 1e-6
    np.testing.assert_allclose(weight.dequantize(), wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_sizes_are_those_of_the_format(name: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (
        BLOCK_FORMATS[name].size,
        BLOCK_FORMATS[name].nbytes,
    )
