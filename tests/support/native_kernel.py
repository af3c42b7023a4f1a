"""Runs one tensor program as machine code on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite.codegen.llvm import compile_programs
from relaxlite.ir.program import TensorProgram
from relaxlite.runtime.native import NativeLibrary, load_objects
from relaxlite.target import Target


class NativeKernel:
    """A compiled program; a call takes arrays (inputs, then outputs) and the symbols' values, and gives the status."""

    def __init__(self, program: TensorProgram, target: Target | None = None, name: str = "kernel") -> None:
        code = compile_programs({name: program}, target or Target.host())
        self.info = code.kernels[name]
        self.library: NativeLibrary = load_objects(code.objects)
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
        self._function = prototype(self.library.address(self.info.symbol))

    def __call__(self, arrays: Sequence[np.ndarray[Any, Any]], symbols: Sequence[int] = ()) -> int:
        arrays = [np.require(array, requirements="C") for array in arrays]  # packed constants are views
        pointers = (ctypes.c_void_p * max(len(arrays), 1))(*(array.ctypes.data for array in arrays))
        values = (ctypes.c_int64 * max(len(symbols), 1))(*symbols)
        return int(self._function(pointers, values))


def run(
    program: TensorProgram, arrays: Sequence[np.ndarray[Any, Any]], symbols: Sequence[int] = (), **options: Any
) -> None:
    """Compile, call once, and expect success."""
    status = NativeKernel(program, **options)(arrays, symbols)
    assert status == 0, f"status {status}"
