"""Quantizing: the bytes of the `gguf` package's quantizers, and checkpoints whose matrices became blocks."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from relaxlite.errors import ImportModelError, InvalidArgumentError
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight
from relaxlite.frontend.llm.config import DecoderConfig, Rope
from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS
from relaxlite.frontend.llm.quantize import QUANTIZERS, quantize, quantize_checkpoint

gguf = pytest.importorskip("gguf")


def blocks(case: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((64, 96)).astype(np.float32)
    if case == "zeros":
        values[::2] = 0
    if case == "halves":  # many ties between two codes
        values = rng.integers(-127, 128, (64, 96)).astype(np.float32) / 2
        values[:, ::32] = 127
    if case == "equal":
        values[:] = values[:, :1]
    if case == "tiny":
        values *= np.float32(1e-7)
    if case == "one sign":
        values = abs(values) + 3
    return values


@pytest.mark.parametrize("case", ["normal", "zeros", "halves", "equal", "tiny", "one sign"])
@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the package divides by scales that are almost zero
def test_bytes_are_those_of_the_reference(kind: str, case: str) -> None:
    values = blocks(case)
    wanted = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    found = quantize(Weight(values, values.shape), kind)
    assert (found.shape, found.block_format) == (values.shape, kind)
    np.testing.assert_array_equal(found.data, wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_signs_of_zeros_are_those_of_the_reference(kind: str) -> None:
    """Of quantize_row_*_ref: a peak or least value is taken where it is beyond the one before, from +0 and up."""
    values = np.full((2, 32), -0.0, np.float32)
    values[1, :2] = 0.0, 1.0
    found = quantize(Weight(values, values.shape), kind).data.view(np.uint16)
    if kind in ("Q4_0", "Q5_0"):
        assert found[0, 0] == 0x8000  # 0 / -8
    else:
        assert found[0, 1] == 0x8000 and found[1, 1] == 0  # the first of zeros


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_errors_are_below_a_step(kind: str) -> None:
    values = blocks("normal")
    found = quantize(Weight(values, values.shape), kind)
    step = abs(found.grouped().scales.to_float32()).repeat(32, axis=1)
    assert (abs(found.to_float32() - values) <= 1.01 * step).all()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_values_whose_inverse_is_infinite_become_zero(kind: str) -> None:
    values = blocks("normal") * np.float32(1e-40)
    assert not quantize(Weight(values, values.shape), kind).to_float32().any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_floats_are_taken_as_what_they_are(dtype: type) -> None:
    values = blocks("normal").astype(dtype)
    exact = values.astype(np.float32)
    a, b = (quantize(Weight(data, exact.shape), "Q5_1") for data in (values, exact))
    np.testing.assert_array_equal(a.data, b.data)


def checkpoint(**weights: Weight) -> Checkpoint:
    config = DecoderConfig("llama", 8, 64, 1, 2, 2, 32, 64, 16, 1e-5, Rope(1e4, 32), True)
    return Checkpoint(config, weights, None, {"source": "tiny"})


def floats(*shape: int) -> Weight:
    return Weight(np.ones(shape, np.float32), shape)


def test_matrices_become_blocks_and_the_rest_stays() -> None:
    weights = {"embed": floats(8, 64), "norm": floats(64), "layers.0.q": floats(64, 64), "layers.0.v": floats(4, 40)}
    seen: list[str] = []
    made = quantize_checkpoint(checkpoint(**weights), "q4_0", progress=seen.append)
    formats = {name: weight.block_format for name, weight in made.weights.items()}
    assert formats == {"embed": "Q8_0", "norm": None, "layers.0.q": "Q4_0", "layers.0.v": None}
    assert seen == ["embed", "layers.0.q"]
    assert made.provenance == {"source": "tiny", "quantized": "Q4_0; 1 matrices kept"}
    assert made.weights["layers.0.q"].nbytes == 64 * 2 * BLOCK_FORMATS["Q4_0"].nbytes


def test_what_chooses_experts_or_says_positions_stays() -> None:
    weights = {"embed": floats(8, 64), "layers.0.router": floats(4, 64), "layers.0.experts.3.up": floats(32, 64)}
    made = quantize_checkpoint(checkpoint(**weights, positions=floats(16, 64)), "q4_1").weights
    assert [weight.block_format for weight in made.values()] == ["Q8_0", None, "Q4_1", None]


def test_what_is_in_blocks_already_stays_so() -> None:
    """As checkpoints have it whose embeddings are floats beside layers in few bits."""
    first = quantize_checkpoint(checkpoint(**{"layers.0.q": floats(8, 64)}), "q4_1")
    both = replace(first, weights={**first.weights, "embed": floats(8, 64), "layers.0.o": floats(8, 40)})
    made = quantize_checkpoint(both, "q4_0")
    assert made.weights["layers.0.q"] is first.weights["layers.0.q"]
    assert [made.weights[name].block_format for name in ("embed", "layers.0.o")] == ["Q8_0", None]
    assert made.provenance["quantized"] == "Q4_0; 1 matrices kept; 1 in Q4_1 before"


def test_what_cannot_be_quantized_is_refused() -> None:
    whole = checkpoint(embed=floats(8, 64))
    with pytest.raises(InvalidArgumentError, match="cannot quantize to 'q3_k'; known are q4_0, q4_1, q5_0, q5_1, q8_0"):
        quantize_checkpoint(whole, "q3_k")
    for other in (5, b"q4_0", ["q4_0"], True):
        with pytest.raises(InvalidArgumentError, match="cannot quantize to "):
            quantize_checkpoint(whole, other)  # type: ignore[arg-type]
    with pytest.raises(ImportModelError, match=r"tiny: the weights are quantized already \(Q8_0\)"):
        quantize_checkpoint(quantize_checkpoint(whole, "q4_0"), "q4_0")
    with pytest.raises(ImportModelError, match="no weight has rows of whole blocks of 32"):
        quantize_checkpoint(checkpoint(q=floats(8, 40)), "q8_0")
    for kind, value, problem in (
        ("q8_0", np.nan, "not finite"),
        ("q8_0", 1e30, "too large"),
        ("q4_1", -7e4, "too large"),
    ):
        values = np.zeros((3, 32), np.float32)
        values[1, 5] = value
        part = {"head" if kind == "q8_0" else "q": Weight(values, values.shape)}
        with pytest.raises(ImportModelError, match=f"weight {next(iter(part))} has values .*{problem}"):
            quantize_checkpoint(checkpoint(**part), kind)
