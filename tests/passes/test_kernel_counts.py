"""How many kernels and library calls a layer of a transformer takes, and that no tensor is read to compute a shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import relaxlite as rl
from bench.decoder import DecoderConfig, build_decoder
from relaxlite.runtime.executable import ENTRY, Call
from tests.support import model_zoo

ENCODER = 7  # q, k and v; attention; its output and the residual; norm; up and GELU; down and the residual; norm
# norm; q, k, v, rotary and both appended to the cache; attention; its output and the residual; norm; gate and up; ...
DECODER = 8


def callees(exe: rl.Executable) -> list[str]:
    """What the entry calls, in order."""
    return [i.callee for i in exe.data.functions[ENTRY].instructions if isinstance(i, Call)]


def per_layer(exe: rl.Executable) -> set[int]:
    """Kernels and library calls from each layer's attention to the next one's."""
    launched = [name for name in callees(exe) if name.startswith(("kernel:", "extern:"))]
    attention = [k for k, name in enumerate(launched) if name.startswith("kernel:attention")]
    assert len(attention) > 1
    return {after - before for before, after in pairwise(attention)}


@pytest.mark.models
def test_minilm(model_path: Callable[[str], Path]) -> None:
    exe = rl.compile(rl.from_onnx(model_path("minilm-l6-onnx")))
    assert per_layer(exe) == {ENCODER}
    assert "builtin:tensor_to_shape" not in callees(exe)


def test_an_encoder_as_exporters_write_it() -> None:
    exe = rl.compile(rl.from_onnx(model_zoo.bert(layers=3)))
    assert per_layer(exe) == {ENCODER}
    assert "builtin:tensor_to_shape" not in callees(exe)


def test_a_decoder_with_rotary_embedding_and_grouped_queries() -> None:
    exe = rl.compile(build_decoder(DecoderConfig(layers=3, hidden=64, heads=4, intermediate=96, vocab=32)))
    assert max(per_layer(exe)) <= DECODER
    assert "builtin:tensor_to_shape" not in callees(exe)
