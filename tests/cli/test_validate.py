"""`relaxlite compile --validate` on inputs that the command line describes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxlite import cli

ROWS, FIRST = 3, 100  # of the table, and the number of its first: random numbers are smaller


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """rows = scale * table[ids - FIRST], which stops at indices that the table does not have."""
    table = np.arange(4.0 * ROWS, dtype=np.float32).reshape(ROWS, 4)
    graph = helper.make_graph(
        [
            helper.make_node("Sub", ["ids", "first"], ["places"]),
            helper.make_node("Gather", ["table", "places"], ["found"]),
            helper.make_node("Mul", ["found", "scale"], ["rows"]),
        ],
        "looked_up",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 8]),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array(FIRST, np.int64), "first")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, tmp_path / "model.onnx")
    np.save(tmp_path / "ids.npy", np.arange(24).reshape(3, 8) % ROWS + FIRST)
    return tmp_path / "model.onnx"


def compiled(model: Path, *options: str) -> int:
    return cli.main(["compile", str(model), "-o", str(model.with_suffix(".rlx")), *options])


def test_random_inputs_that_stop_a_model_are_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled(model, "--validate") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("relaxlite compile: warning: the model stops (")
    assert "`--validate --input NAME=FILE`" in line


@pytest.mark.parametrize(
    "options",
    [("--input", "ids={folder}/ids.npy"), ("--shape", "ids=5x8", "--range", f"ids={FIRST}..{FIRST + ROWS - 1}")],
)
def test_inputs_that_are_given_take_their_place(
    model: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(model, "--validate", *(option.format(folder=model.parent) for option in options)) == 0
    assert "validated main at 1 samples: " in capsys.readouterr().out


def test_a_range_alone_goes_with_random_sizes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(model, "--validate", "--range", f"ids={FIRST}..{FIRST + ROWS - 1}") == 0
    (count,) = re.findall(r"validated main at (\d+) samples: ", capsys.readouterr().out)
    assert int(count) > 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--input", "ids=ids.npy"), "--input describes inputs to validate with: add --validate"),
        (("--range", "ids=0..2"), "--range describes inputs to validate with: add --validate"),
        (("--validate", "--input", "idx=ids.npy"), "the model has no input 'idx'; it has 'ids', 'scale'"),
        (("--validate", "--input", "ids=none.npy"), "input 'ids': cannot read 'none.npy' as a .npy file"),
        (("--validate", "--shape", "ids=5x7"), "argument 'ids'"),
        (("--validate", "--shape", "ids=5"), "argument 'ids'"),
        (("--validate", "--input", "ids=short.npy"), "argument 'ids'"),
    ],
)
def test_inputs_that_cannot_be_are_refused(
    model: Path,
    options: tuple[str, ...],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(model.parent)
    np.save("short.npy", np.zeros((1, 8), np.int16))
    assert compiled(model, *options) != 0
    assert text in capsys.readouterr().err
    assert not model.with_suffix(".rlx").exists()


def test_a_language_model_takes_no_inputs_to_validate_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert compiled(tmp_path, "--validate", "--shape", "tokens=1x4") != 0
    assert "--shape needs an ONNX file: a language model" in capsys.readouterr().err
