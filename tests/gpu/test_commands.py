"""Commands with a GPU as the target: compiling and looking need no device."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from relaxlite.cli import main
from tests.support import model_zoo


def test_compile_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = tmp_path / "m.onnx", tmp_path / "m.rlx"
    onnx.save(model_zoo.all_fixed(), model)
    target = ["--target", "cuda -arch=sm_90"]
    assert not main(["compile", str(model), *target, "-o", str(file)])
    assert "kernels for cuda -arch=sm_90" in capsys.readouterr().out
    assert not main(["inspect", str(file)])
    assert "cuda -arch=sm_90, the host's part for" in capsys.readouterr().out
    assert not main(["inspect", str(model), *target, "--after", "schedule_gpu"])
    assert "in block_x(" in capsys.readouterr().out
