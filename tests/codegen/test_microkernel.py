"""The matrix-multiplication micro-kernel of bench/microkernel.py, which measures it: its sums stay in registers."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import numpy as np
import pytest

from relaxlite.codegen.interpreter import run_program
from relaxlite.codegen.llvm import emit_assembly
from relaxlite.target import Target
from tests.support.paths import ROOT

_X86 = "-mtriple=x86_64-unknown-linux-gnu"


def _load_bench() -> ModuleType:
    path = ROOT / "bench" / "microkernel.py"
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


@pytest.mark.parametrize("kind", bench.DOT_PRODUCTS)
def test_a_dot_product_per_vector_of_the_tile(kind: str) -> None:
    """One instruction per 16 results and step, the pair or quad of A broadcast from memory, and nothing spilled."""
    program, target = bench.narrow_matmul(kind, 6), Target.parse(f"llvm -mcpu=znver4 {_X86}")
    text = emit_assembly({"kernel": program}, target)
    name = {"dot2_bf16": "vdpbf16ps", "dot4_u8s8": "vpdpbusd", "dot2_i16": "vpmaddwd|vpdpwssd"}[kind]
    assert len(re.findall(rf"\b(?:{name})\b.*zmm", text)) == 24
    assert not any(stem in text for stem in ("vpmovzx", "vpmovsx", "vpslld", "vpmulld"))
    assert bench.stack_references(program, target) == 0


@pytest.mark.parametrize("cpu", ["host", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("kind", bench.DOT_PRODUCTS)
def test_dot_products_are_right(kind: str, cpu: str) -> None:
    """As the interpreter has it, to the last bit, with the instruction and without."""
    target = Target.host() if cpu == "host" else Target.parse(f"llvm -mcpu={cpu} {_X86}")
    if not set(target.required_features) <= set(Target.host().required_features):
        pytest.skip(f"this machine is no {cpu}")
    program = bench.narrow_matmul(kind, 3)
    kernel, _library = bench.load_kernel(program, target)
    a, b = bench.operands(kind, 6, 20, 128)
    c = np.zeros((6, 128), program.params[2].dtype)
    packed = bench.panels(kind, b)
    symbols = [2, 2, 20 // bench.DOT_PRODUCTS[kind].length]
    assert kernel([a, packed, c], symbols) == 0
    (wanted,) = run_program(program, [a, packed], symbols)
    np.testing.assert_array_equal(c, wanted)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)
