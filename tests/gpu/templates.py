"""Programs of ops as templates get them, and checks of a schedule: the oracle, the device and a CPU agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.interpreter import run_program
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.program_printer import print_program
from relaxlite.ir.program_verifier import verify_program
from relaxlite.ir.symbolic import SymVar, evaluate
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import pipeline_of
from relaxlite.passes.schedule.gpu.programs import schedule_program
from tests.gpu.device import SM_80, DeviceProgram
from tests.support.native_kernel import NativeKernel

ROWS = (0, 1, 7, 65)


def lowered(build: Callable[..., Any], **types: tuple[Sequence[Any], str]) -> TensorProgram:
    """The one program of `build`, a function of the parameters, before it is scheduled; "n" is a symbol."""
    bb = BlockBuilder()
    n = bb.symbol("n")
    params = {
        name: TensorType.of(tuple(n if d == "n" else d for d in shape), dtype) for name, (shape, dtype) in types.items()
    }
    with bb.function("main", **params) as values:
        bb.result(bb.emit(build(*values)))
    steps = pipeline_of("cuda")
    before = [step.name for step in steps].index("schedule_gpu")
    module = run_passes(bb.module(), steps[:before], PassContext(SM_80, libraries=()))
    (program,) = module.programs().values()
    return program


def random_inputs(program: TensorProgram, values: Mapping[SymVar, int], seed: int = 0) -> list[Any]:
    """Inputs of the sizes that the symbols have."""
    rng, arrays = np.random.default_rng(seed), []
    for buffer in program.inputs:
        shape, dtype = tuple(evaluate(d, values) for d in buffer.shape), dtypes.to_numpy(buffer.dtype)
        is_float = dtypes.is_float(buffer.dtype)
        arrays.append((rng.standard_normal(shape) if is_float else rng.integers(0, 3, shape)).astype(dtype))
    return arrays


def check(program: TensorProgram, rows: Sequence[int] = ROWS, *, tolerance: float = 1e-5) -> DeviceProgram:
    """Assert that the schedule of a program means the same, on the oracle and on the device; returns the latter."""
    scheduled = schedule_program(program)
    verify_program("scheduled", scheduled)
    device, usual = DeviceProgram(scheduled), NativeKernel(program)
    for number in rows:
        values = dict.fromkeys(program.symbols, number)
        inputs = random_inputs(program, values)
        (out,) = program.outputs
        want = np.empty(tuple(evaluate(d, values) for d in out.shape), dtypes.to_numpy(out.dtype))
        assert usual([*inputs, want], [values[s] for s in program.symbols]) == 0
        for kind, got in (("oracle", run_program(scheduled, inputs, values)), ("device", device(inputs, values))):
            np.testing.assert_allclose(
                got[0].astype(np.float64), want.astype(np.float64), tolerance, tolerance,
                err_msg=f"{kind}, {number} rows: {print_program('scheduled', scheduled)}",
            )  # fmt: skip
    return device
