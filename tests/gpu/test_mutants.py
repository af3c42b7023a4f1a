"""Mutants of schedules: a barrier that is taken out is noticed by the oracle and by the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from relaxlite.codegen.interpreter import run_program
from relaxlite.errors import KernelFaultError
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Barrier, Seq, Stmt, TensorProgram
from relaxlite.ir.program_visitor import ProgramRewriter, walk_stmts
from relaxlite.passes.schedule.gpu.programs import schedule_program
from tests.gpu.device import DeviceProgram
from tests.gpu.execution import FaultError
from tests.gpu.templates import lowered, random_inputs
from tests.support import tiers

PROGRAMS: dict[str, Callable[[], TensorProgram]] = {
    "rows": lambda: lowered(lambda x: get_op("softmax")(x, axis=-1), x=(("n", 1500), "float32")),
    "matmul_simt": lambda: lowered(
        lambda a, b: get_op("matmul")(a, b), a=(("n", 40), "float32"), b=((40, 9), "float32")
    ),
    "matmul_mma": lambda: lowered(
        lambda a, b: get_op("matmul")(a, b), a=(("n", 70), "float16"), b=((70, 9), "float16")
    ),
    "reduction": lambda: lowered(lambda x: get_op("mean")(x, axes=(1,)), x=(("n", 600), "float32")),
}
EQUIVALENT = {
    ("rows", 3): "the last barrier: no combination writes the parts after it",
    ("reduction", 1): "the last barrier: no combination writes the parts after it",
}


class _Without(ProgramRewriter):
    """Takes one barrier out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Barrier):
            self.left -= 1
            return Seq(()) if self.left == -1 else stmt
        return super().stmt(stmt)


@pytest.mark.parametrize("name", tiers.only(("rows", "matmul_mma"), PROGRAMS))
def test_each_barrier_is_needed(name: str) -> None:
    program = PROGRAMS[name]()
    scheduled = schedule_program(program)
    count = sum(isinstance(s, Barrier) for s in walk_stmts(scheduled.body))
    assert count >= 2
    values = dict.fromkeys(program.symbols, 3)
    inputs = random_inputs(program, values)
    for number in range(count):
        mutant = replace(scheduled, body=_Without(number).stmt(scheduled.body))
        if (name, number) in EQUIVALENT:
            run_program(mutant, inputs, values)
            continue
        with pytest.raises(KernelFaultError, match=r"a race|nobody wrote"):
            run_program(mutant, inputs, values)
        with pytest.raises(FaultError, match=r"a race|nobody wrote"):
            DeviceProgram(mutant)(inputs, values)
