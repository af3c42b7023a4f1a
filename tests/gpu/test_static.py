"""NVIDIA's assembler accepts the PTX, without spills. Skipped without `ptxas` on PATH (a wheel: nvidia-cuda-nvcc)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from relaxlite.codegen.llvm import emit_assembly
from relaxlite.ir.program import TensorProgram
from relaxlite.passes.schedule.gpu.programs import schedule_program
from relaxlite.target import Target
from tests.gpu import programs
from tests.gpu.test_mutants import PROGRAMS
from tests.support.ir_text import program

PTXAS = shutil.which("ptxas")
MAX_REGISTERS = 128  # of a thread: two blocks of 256 threads fit on a multiprocessor
ALL: dict[str, Callable[[], TensorProgram]] = {
    **{name: (lambda text=text: program(text)) for name, text in vars(programs).items() if name.isupper()},
    **{name: (lambda make=make: schedule_program(make())) for name, make in PROGRAMS.items()},
}


@pytest.mark.skipif(PTXAS is None, reason="there is no ptxas on PATH")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_assembler_takes_all_templates_without_spills(arch: str, tmp_path: Path) -> None:
    for name, make in ALL.items():
        source = tmp_path / f"{name}.ptx"
        source.write_text(emit_assembly({name: make()}, Target.parse(f"cuda -arch={arch}")))
        command = [str(PTXAS), f"-arch={arch}", "-v", str(source), "-o", str(tmp_path / "out.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert set(re.findall(r"(\d+) bytes spill", done.stderr)) == {"0"}, f"{name}: {done.stderr}"
        assert all(int(n) <= MAX_REGISTERS for n in re.findall(r"Used (\d+) registers", done.stderr)), done.stderr
