"""Block formats of checkpoints against the decoder of the `gguf` package, on random bytes and on real ones."""

from __future__ import annotations

import numpy as np
import pytest

from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS
from tests.support.block_bytes import dequantized, random_blocks

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_are_read_as_their_authors_read_them(name: str) -> None:
    block = BLOCK_FORMATS[name]
    rows = random_blocks(name, np.random.default_rng(1).standard_normal(21)).reshape(7, -1)
    wanted = dequantized(rows, name)
    weight = block.unpack(rows)
    assert weight.shape == (7, 3 * block.size) and weight.codes.max() < 2**weight.coding.bits
    assert weight.codes.dtype == np.uint8 and weight.group in (16, 32)
    tolerance = (
        0 if name.startswith(("IQ", "TQ", "MX", "Q1", "Q2_0")) else 1e-6
    )  # those have no offsets to be added in another order
    np.testing.assert_allclose(weight.dequantize(), wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS.keys() & gguf.GGMLQuantizationType.__members__.keys()))
def test_sizes_are_those_of_the_format(name: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (
        BLOCK_FORMATS[name].size,
        BLOCK_FORMATS[name].nbytes,
    )
