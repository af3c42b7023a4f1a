"""The ladder of bench.ablation: every step compiles and computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from bench import ablation
from bench.decoder import DecoderConfig, build_decoder
from relaxlite import config
from relaxlite.passes.pipeline import PASSES

TINY = DecoderConfig(layers=1, hidden=32, heads=4, kv_heads=2, intermediate=48, vocab=50)


def test_the_parts_are_passes_of_the_pipeline() -> None:
    assert {name for part in ablation.PARTS.values() for name in part} <= set(PASSES)


@pytest.mark.exhaustive
def test_each_step_computes_the_same() -> None:
    rng, module = np.random.default_rng(0), build_decoder(TINY)
    cache = [rng.standard_normal((2, 2, 3, 8)).astype(np.float32) for _ in range(2)]
    tokens = rng.integers(0, 50, (2, 5))
    results = []
    for step in ablation.PARTS:
        with config.override(interpret=step != "+ native host"):
            results.append(rl.compile(module, passes=ablation.passes_of(step))(tokens, *cache))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_step_is_measured_and_printed(tmp_path: Path) -> None:
    model = ablation.Model(lambda: build_decoder(TINY), "7 tokens", lambda which: decoder_arrays(1 + 6 * which))
    found = {}
    for step in ("nothing", "+ native host"):
        ablation.build(model, step, tmp_path / "tiny.rlx")
        found[step] = ablation.measure_here(model, step, tmp_path / "tiny.rlx", 1, 1)
    assert found["+ native host"]["kernels"] < found["nothing"]["kernels"]
    assert all(step["ms"] > 0 for step in found.values())
    text = ablation.table("minilm-l6", found)
    assert len(text.splitlines()) == 4 and "1.00x" in text


def decoder_arrays(seq: int) -> tuple[np.ndarray, ...]:
    return np.zeros((1, seq), np.int64), *[np.zeros((1, 2, 0, 8), np.float32)] * 2


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ablation.main(["minilm-l7"])
    assert "no model 'minilm-l7'" in capsys.readouterr().err
