"""Calls of library routines from kernels.

A kernel loads a routine's address from an external global, its cell, which the runtime fills in when it loads the
kernel (runtime/libraries.py); null where the routine is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.codegen.llvm import memory
from relaxlite.codegen.llvm.amx import emit_amx_routine
from relaxlite.codegen.llvm.checked import emit_index
from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import TRUE, Val, int_const
from relaxlite.codegen.llvm.gpu.warp import emit_warp_instruction
from relaxlite.codegen.llvm.types import convert, literal
from relaxlite.errors import CodegenError
from relaxlite.ir.program import AddressOf, CallLibrary, IndexValue, LibraryFound, Literal, Value
from relaxlite.ir.warp import LIBRARY as WARP_LIBRARY
from relaxlite.runtime.libraries import AMX, cell_name


def emit_library_present(k: KernelContext, value: LibraryFound) -> Val:
    """Emit whether a library routine is present, as i1."""
    if value.is_required:
        return TRUE
    return k.e.icmp("ne", _routine(k, value.library, value.symbol), Val("null", "ptr"), "found")


def emit_library_call(k: KernelContext, stmt: CallLibrary) -> None:
    """Emit the call of a routine; a nonzero status fails the kernel. CodegenError inside a vectorized loop."""
    if k.lanes:
        raise CodegenError(f"{stmt.symbol} of {stmt.library} is called inside a vectorized loop")
    if stmt.library == WARP_LIBRARY:
        emit_warp_instruction(k, stmt.symbol, [_argument(k, arg) for arg in stmt.args])
        return
    if stmt.library == AMX:
        emit_amx_routine(k, stmt.symbol, [_argument(k, arg) for arg in stmt.args], list(stmt.args))
        return
    routine = _routine(k, stmt.library, stmt.symbol)
    values = [_argument(k, arg) for arg in stmt.args]
    if stmt.convention == "arrays":
        addresses = [v for v in values if v.elem == "ptr"]
        numbers = [v for v in values if v.elem != "ptr"]
        values = [_stack_array(k, "addresses", addresses), _stack_array(k, "words", numbers)]
    arguments = ", ".join(map(str, values))
    k.forget_loads()
    if stmt.convention == "c":
        k.e.line(f"call void {routine.text}({arguments})")
        return
    if stmt.convention == "arrays":  # a Python function may run long and use all cores, so let idle workers sleep
        k.e.call_void("relaxlite_hold_workers", [int_const(-1, "i32")])
    status = k.e.op(f"call i32 {routine.text}({arguments})", "i32", 0, "status")
    if stmt.convention == "arrays":
        k.e.call_void("relaxlite_hold_workers", [int_const(1, "i32")])
    message = f"the routine {stmt.symbol} of the library {stmt.library} failed"
    failure_status = k.checks.setdefault(message, len(k.checks)) + 1
    k.fail_if(k.e.icmp("ne", status, int_const(0, "i32"), "wrong"), failure_status)


def _routine(k: KernelContext, library: str, symbol: str) -> Val:
    cell = k.e.module.external(cell_name(library, symbol))
    return k.e.op(f"load ptr, {cell}, align 8", "ptr", 0, symbol)


def _argument(k: KernelContext, arg: Value) -> Val:
    if isinstance(arg, AddressOf):
        access = memory.classify_access(k, arg.buffer, arg.indices)
        return k.ix.pointer(access.buffer, access.offset)
    if isinstance(arg, IndexValue):
        return convert(k.e, emit_index(k, arg.index), "int64", arg.dtype)
    assert isinstance(arg, Literal)
    return literal(arg.value, arg.dtype)


def _stack_array(k: KernelContext, name: str, values: Sequence[Val]) -> Val:
    """Store 8-byte values to a stack array; returns its address."""
    array = k.stack_array(name, "i64", max(len(values), 1))
    for number, value in enumerate(values):
        address = k.e.op(f"getelementptr i64, {array}, i64 {number}", "ptr", 0, "slot")
        k.e.line(f"store {value}, {address}, align 8")
    return array
