"""Weights in half precision stay so from the checkpoint to the artifact, tied embeddings are there once, and logits are
those of the same weights in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import dtypes
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight
from relaxlite.frontend.llm.config import Rope
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.step import build_step
from relaxlite.llm.compiled_engine import CompiledEngine
from tests.support import tiers
from tests.support.dense_llm import build_dense
from tests.support.llm_models import ARCHITECTURES, VOCAB, small_checkpoint

TARGET = "llvm -l2-bytes=1024"  # so that small weights count as large ones
SIZES = {
    "vocab": 4096, "hidden": 256, "heads": 4, "kv_heads": 2, "head_width": 64, "intermediate": 320, "is_tied": True,
    "rope": Rope(1e4, 64),
}  # fmt: skip


def of_dtype(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """With all weights, vectors too, rounded to a type."""
    rounded = {n: Weight(w.data.astype(dtypes.to_numpy(dtype)), w.shape) for n, w in checkpoint.weights.items()}
    return replace(checkpoint, weights=rounded)


def widened(checkpoint: Checkpoint) -> Checkpoint:
    """The same numbers in float32."""
    weights = {name: Weight(w.to_float32(), w.shape) for name, w in checkpoint.weights.items()}
    return replace(checkpoint, weights=weights)


def untied(checkpoint: Checkpoint) -> Checkpoint:
    """With a matrix of its own for the logits, which holds what the embedding does."""
    embed = checkpoint.weights["embed"]
    weights = {**checkpoint.weights, "head": Weight(embed.data.copy(), embed.shape)}
    return replace(checkpoint, weights=weights, config=replace(checkpoint.config, is_tied=False))


def assert_close(got: Any, want: Any) -> None:
    """Within 1e-5 of the largest."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


KINDS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "float32": lambda c: c,
    "bfloat16": lambda c: of_dtype(c, "bfloat16"),
    "float16": lambda c: of_dtype(c, "float16"),
    "q8_0": lambda c: quantize_checkpoint(c, "q8_0"),
}


@pytest.mark.parametrize("kind", tiers.only(("bfloat16",), KINDS))
def test_a_tied_embedding_is_there_once(kind: str) -> None:
    checkpoint = KINDS[kind](small_checkpoint("llama", **SIZES))
    exe = rl.compile(build_step(checkpoint), TARGET, precision="float32")
    stored = sum(weight.nbytes for weight in checkpoint.weights.values())
    assert sum(constant.nbytes for constant in exe.data.constants) == pytest.approx(stored, rel=0.02)

    separate = rl.compile(build_step(untied(widened(checkpoint))), TARGET)
    engines = [CompiledEngine(each) for each in (exe, separate)]
    for count in (1, 5, 40):
        tokens = np.random.default_rng(count).integers(0, checkpoint.config.vocab, count).tolist()
        got, want = (e.forward([(e.new(), tokens)], wanted=[count])[0] for e in engines)
        assert_close(got, want)


BY_DEFAULT = ("llama", "gpt2")


def case(name: str, dtype: str) -> object:
    return pytest.param(name, dtype, marks=[] if name in BY_DEFAULT else [pytest.mark.exhaustive])


@pytest.mark.parametrize(
    ("name", "dtype"), [*(case(name, "bfloat16") for name in ARCHITECTURES), case("llama", "float16")]
)
def test_logits_are_those_of_the_same_weights_in_float32(name: str, dtype: str) -> None:
    checkpoint = of_dtype(small_checkpoint(name), dtype)
    exe = rl.compile(build_dense(checkpoint), TARGET)
    large = [c for c in exe.data.constants if c.ndim > 1 and c.nbytes > 1024]
    matrices = [c for c in large if c.any() and 4 not in c.shape]  # no states to begin with, no filters of 4 tokens
    assert matrices and all(c.dtype.name == dtype for c in matrices)
    wide = rl.compile(build_dense(widened(checkpoint)), TARGET)
    for batch, count in ((1, 1), (2, 3), (1, 50)):
        tokens = np.random.default_rng(count).integers(0, VOCAB, (batch, count))
        assert_close(exe(tokens), wide(tokens))
