"""Execution of tensor programs for validation: few steps by the interpreter, many by bounds-checked machine code.

Both execute a program literally, one element after the other, and detect accesses outside of a buffer. The machine code
(codegen/llvm/guarded.py) ignores schedules, so that schedules are compared with their meaning. Vectorized code, and
LLVM's optimizations, are checked at the end, by running the compiled model.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite.codegen import interpreter
from relaxlite.codegen.llvm import machine_code
from relaxlite.codegen.llvm.context import OUT_OF_BOUNDS, OUT_OF_MEMORY
from relaxlite.codegen.llvm.module import emit_kernel
from relaxlite.errors import ExecutionError, OutOfBoundsError, OutOfMemoryError
from relaxlite.ir.attributes import WRITES_INPUTS
from relaxlite.ir.launch import has_launches
from relaxlite.ir.program import Allocate, For, IfThenElse, IndexValue, LetIndex, Seq, Stmt, TensorProgram
from relaxlite.ir.program_visitor import stmt_values, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate
from relaxlite.runtime.native import NativeLibrary, load_objects
from relaxlite.target import Target

MAX_STEPS = 20_000  # of the interpreter, at some microseconds each; machine code takes 50 ms to compile
MAX_UNOPTIMIZED_STEPS = 100_000_000  # some 0.1 s; optimizing a large program takes seconds
_SYMBOL = "program"
_Kernel = Callable[[Any, Any], int]


def run_program(
    program: TensorProgram,
    inputs: Sequence[Any],
    symbols: Mapping[SymVar, int] | Sequence[int] | None = None,
    outputs: Sequence[Any] | None = None,
    name: str = "program",
) -> list[Any]:
    """Run a tensor program; the same arguments, results and errors as `interpreter.run_program`."""
    values = interpreter.program_symbols(program, inputs, symbols)
    steps = _steps(program.body, values)
    if steps <= MAX_STEPS or has_launches(program):
        return interpreter.run_program(program, inputs, values, outputs, name)
    result = interpreter.program_outputs(program, inputs, values, outputs, name)
    arrays = [np.require(array, requirements="C") for array in (*inputs, *result)]
    kernel, checks, _ = _compiled(program, steps > MAX_UNOPTIMIZED_STEPS)
    pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    numbers = (ctypes.c_int64 * max(len(program.symbols), 1))(*(values[s] for s in program.symbols))
    status = kernel(pointers, numbers)
    if status == OUT_OF_BOUNDS:
        raise OutOfBoundsError(f"{name}: a buffer is accessed outside its bounds")
    if status == OUT_OF_MEMORY:
        raise OutOfMemoryError(f"{name}: there is no memory for what it allocates")
    if status:
        raise ExecutionError(checks[status - 1] if status > 0 else f"{name}: a size does not fit into 64 bits")
    for array, output in zip(arrays[len(inputs) :], result, strict=True):
        if array is not output:
            output[...] = array
    return list(result)


@functools.lru_cache(maxsize=512)
def _compiled(program: TensorProgram, is_optimized: bool) -> tuple[_Kernel, tuple[str, ...], NativeLibrary]:
    """Compile a program with bounds checks. Returns the kernel, its error messages, and the library to keep alive."""
    target = Target.host()
    text = emit_kernel("program", program, target, _SYMBOL, is_guarded=True)
    library = load_objects([machine_code.to_object(text.text, target, optimize=is_optimized)])
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(library.address(_SYMBOL)), text.checks, library


def _steps(stmt: Stmt, values: Mapping[SymVar, int]) -> int:
    """Estimate the number of values that a run computes; loops of data-dependent extent count once."""
    if isinstance(stmt, Seq):
        return sum(_steps(part, values) for part in stmt.stmts)
    if isinstance(stmt, For):
        extent = _value(stmt.extent, values)
        extent = 1 if extent is None else max(extent, 0)
        return extent * _steps(stmt.body, {**values, stmt.var: extent // 2})  # inner extents may depend on the variable
    if isinstance(stmt, LetIndex):
        value = _value(stmt.value.index, values) if isinstance(stmt.value, IndexValue) else None
        return _steps(stmt.body, values if value is None else {**values, stmt.var: value})
    if isinstance(stmt, Allocate):
        return _steps(stmt.body, values)
    if isinstance(stmt, IfThenElse):
        return max(_steps(side, values) for side in (stmt.then, stmt.other) if side is not None)
    return len({id(part) for value in stmt_values(stmt) for part in walk_values(value)}) + 1


def _value(expr: SymExpr, values: Mapping[SymVar, int]) -> int | None:
    try:
        return evaluate(expr, values)
    except (KeyError, ZeroDivisionError):  # data-dependent, or in code that never runs
        return None


class CachedRunner:
    """Cache of `run_program` by program, symbols and inputs.

    Most passes leave most programs and their inputs unchanged.

    Results are cached up to `limit` bytes. Programs that update operands, or get memory for results, which they may
    read, run each time.
    """

    def __init__(self, limit: int = 1 << 29) -> None:
        self._limit, self._bytes = limit, 0
        self._results: OrderedDict[tuple[Any, ...], tuple[TensorProgram, list[Any]]] = OrderedDict()

    def __call__(
        self,
        program: TensorProgram,
        inputs: Sequence[Any],
        symbols: Mapping[SymVar, int] | Sequence[int] | None = None,
        outputs: Sequence[Any] | None = None,
        name: str = "program",
    ) -> list[Any]:
        if outputs is not None or program.attrs.get(WRITES_INPUTS):
            return run_program(program, inputs, symbols, outputs, name)
        values = interpreter.program_symbols(program, inputs, symbols)
        key = (id(program), *(values[s] for s in program.symbols), *map(_digest, inputs))
        entry = self._results.get(key)
        if entry is None:
            entry = program, run_program(program, inputs, values, None, name)
            self._results[key] = entry
            self._bytes += sum(array.nbytes for array in entry[1])
            while self._bytes > self._limit:
                _, (_, evicted) = self._results.popitem(last=False)
                self._bytes -= sum(array.nbytes for array in evicted)
        else:
            self._results.move_to_end(key)
        return [array.copy() for array in entry[1]]


def _digest(array: Any) -> tuple[Any, ...]:
    """Hashable key of an array."""
    content = np.ascontiguousarray(array)
    return (
        array.shape,
        array.dtype.name,
        hashlib.blake2b(content.reshape(-1).view(np.uint8).data, digest_size=16).digest(),
    )
