"""Run programs and models on the simulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.interpreter import program_symbols
from relaxlite.codegen.llvm import compile_programs
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import evaluate
from relaxlite.runtime.executable import ExecutableData, Signature, TargetInfo
from relaxlite.runtime.gpu.driver import use_driver
from relaxlite.runtime.tensor import import_tensor
from relaxlite.runtime.vm import VirtualMachine
from relaxlite.target import Target
from tests.gpu.simulator import SimulatedDriver

SM_80 = Target.parse("cuda -arch=sm_80")


class DeviceProgram:
    """A program of launches that is compiled for the simulated device."""

    def __init__(self, program: TensorProgram, driver: SimulatedDriver | None = None) -> None:
        self.program, self.driver = program, driver or SimulatedDriver()
        code = compile_programs({"program": program}, SM_80)
        self.ptx = b"\n".join(code.device_modules).decode()
        data = ExecutableData(
            functions={},
            signature=Signature((), ()),
            kernels=code.kernels,
            objects=code.objects,
            device_modules=code.device_modules,
            target=TargetInfo(device=str(SM_80)),
        )
        with use_driver(self.driver):
            self.vm = VirtualMachine(data, is_checked=True)

    def __call__(self, inputs: Sequence[Any], symbols: Any = None) -> list[Any]:
        """The outputs for inputs, which are copied to the device. Raises what a launch did wrong."""
        values = program_symbols(self.program, inputs, symbols)
        shapes = [tuple(evaluate(d, values) for d in b.shape) for b in self.program.outputs]
        space = self.vm.space
        outputs = [
            space.new_tensor(shape, b.dtype, "an output", poison=True)
            for shape, b in zip(shapes, self.program.outputs, strict=True)
        ]
        names = [dtypes.from_numpy(np.asarray(x).dtype) or "" for x in inputs]
        placed = [space.import_tensor(import_tensor(x, n, "an input")) for x, n in zip(inputs, names, strict=True)]
        assert self.vm._modules is not None
        self.vm._modules.forget_failures()
        buffers = (ctypes.c_uint64 * (len(placed) + len(outputs)))(*(t.ptr for t in (*placed, *outputs)))
        numbers = (ctypes.c_int64 * max(len(self.program.symbols), 1))(*(values[s] for s in self.program.symbols))
        status = self.vm.kernels["program"](bytes(buffers), ctypes.addressof(numbers))
        if status and self.driver.fault is not None:
            raise self.driver.fault
        assert status == 0, status
        self.vm.raise_failed_check()
        return [space.export_tensor(t).numpy() for t in outputs]
