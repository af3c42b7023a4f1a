"""The matrix-multiplication micro-kernel of bench/microkernel.py, which measures it: its sums stay in registers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from relaxlite.target import Target

_X86 = "-mtriple=x86_64-unknown-linux-gnu"


def _load_bench() -> ModuleType:
    path = Path(__file__).parent.parent / "bench" / "microkernel.py"
    spec = importlib.util.spec_from_file_location("bench_microkernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = _load_bench()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("cpu", ["znver4", "x86-64-v4", "sapphirerapids"])
def test_tile_stays_in_registers(cpu: str, rows: int) -> None:
    assert bench.stack_references(bench.matmul(rows), Target.parse(f"llvm -mcpu={cpu} {_X86}")) == 0


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_results_are_right(rows: int) -> None:
    kernel, _library = bench.load_kernel(bench.matmul(rows), Target.host())
    blocks, panels, k = 3, 2, 37
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((blocks * rows, k)), rng.standard_normal((k, panels * 64))
    packed = np.ascontiguousarray(b.reshape(k, panels, 64).transpose(1, 0, 2), dtype=np.float32)
    c = np.zeros((blocks * rows, panels * 64), np.float32)
    assert kernel([a.astype(np.float32), packed, c], [blocks, panels, k]) == 0
    np.testing.assert_allclose(c, a @ b, atol=2e-5)
