"""onnxruntime in the same process, as what compiled models are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import relaxlite as rl

ort.set_default_logger_severity(4)  # what it refuses is raised as well

Arrays = Mapping[str, np.ndarray]


def exact_integers(options: ort.SessionOptions) -> None:
    """Without VNNI its products of uint8 and int8 are summed in 16 bits, which cuts them off, unless it is told."""
    options.add_session_config_entry("session.x64quantprecision", "1")


def session(model: str | Path | onnx.ModelProto, *, optimize: bool = True) -> ort.InferenceSession:
    """Unoptimized, it also takes empty batches, which some of its optimizations refuse."""
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    options = ort.SessionOptions()
    exact_integers(options)
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def expected_outputs(reference: ort.InferenceSession, inputs: Arrays) -> dict[str, np.ndarray]:
    names = [output.name for output in reference.get_outputs()]
    return dict(zip(names, reference.run(names, dict(inputs)), strict=True))


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, against the largest magnitude of what is expected. Not finite: equal, or infinitely far.

    Integers and bools: 0 if all are equal, else the largest difference against 1.
    """
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (got, expected)
    same = (got == expected) | ((got != got) & (expected != expected))
    if same.all():
        return 0.0
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.abs(got.astype(np.float64) - expected.astype(np.float64)).max())
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(same, 0.0, np.abs(got.astype(np.float64) - expected.astype(np.float64)))
    scale = np.abs(expected[np.isfinite(expected)], dtype=np.float64).max(initial=np.finfo(np.float32).tiny)
    return float(np.inf if np.isnan(difference).any() else difference.max() / scale)


def errors(exe: rl.Executable, reference: ort.InferenceSession, inputs: Arrays) -> dict[str, float]:
    """The relative error of every output; the same outputs, dtypes and shapes are asserted."""
    expected = expected_outputs(reference, inputs)
    got = exe.run(dict(inputs))
    assert list(got) == list(expected)
    return {name: relative_error(got[name], value) for name, value in expected.items()}
