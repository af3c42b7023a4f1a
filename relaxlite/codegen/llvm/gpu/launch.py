"""Emit the host's part of a launch: the grid from symbolic extents, and one call of cuLaunchKernel.

The handle of the device function, the stream and the address of the status word lie in cells, which the runtime fills
in when it loads the program (runtime/gpu/modules.py). Launches with an empty grid are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relaxlite.codegen.llvm.emitter import Val, int_const
from relaxlite.codegen.llvm.gpu.context import HostContext
from relaxlite.codegen.llvm.gpu.device import has_status
from relaxlite.codegen.llvm.loops import branch
from relaxlite.ir.launch import BLOCK_AXES, launch_of
from relaxlite.ir.program import For
from relaxlite.ir.symbolic import SymExpr, as_int
from relaxlite.runtime.executable import LAUNCH_CELLS, LAUNCH_FAILED, LAUNCH_ROUTINE, STREAM_CELL, launch_symbol

_NULL = Val("null", "ptr")


def emit_launch(k: HostContext, stmt: For) -> None:
    """Emit a launch, and note it in the context."""
    launch = launch_of(stmt)
    number = len(k.launches)
    k.launches.append(launch)
    e = k.e
    grid = [_extent(k, launch.extents[axis], axis) for axis in BLOCK_AXES]
    threads = [int_const(count, "i32") for count in launch.threads]
    values = [k.ix.bases[buffer].pointer for buffer in launch.buffers]
    values += [k.ix.value(symbol) for symbol in launch.symbols]
    if has_status(launch):
        values.append(_cell(k, LAUNCH_CELLS["status"] + k.name))
    arguments = _argument_table(k, values)
    function = _cell(k, LAUNCH_CELLS["function"] + launch_symbol(k.name, number))
    stream, no_bytes = _cell(k, STREAM_CELL), int_const(0, "i32")

    def start() -> None:
        operands = [function, *grid, *threads, no_bytes, stream, arguments, _NULL]
        error = e.call(LAUNCH_ROUTINE, operands, "i32", 0, "error")
        status = e.binary("sub", int_const(LAUNCH_FAILED, "i32"), error, "status")
        k.return_if(e.icmp("ne", error, int_const(0, "i32")), status)

    _unless_empty(k, grid, start)


def _extent(k: HostContext, extent: SymExpr, axis: str) -> Val:
    count = as_int(extent)
    return k.e.cast("trunc", k.ix.value(extent), "i32", axis) if count is None else int_const(count, "i32")


def _cell(k: HostContext, name: str) -> Val:
    """The word in a cell, as a pointer."""
    return k.e.op(f"load ptr, {k.e.module.external(name)}, align 8", "ptr", 0, "cell")


def _argument_table(k: HostContext, values: Sequence[Val]) -> Val:
    """An array with the address of each value, as the driver takes arguments."""
    slots = k.stack_array("values", "i64", max(len(values), 1))
    table = k.stack_array("arguments", "ptr", max(len(values), 1))
    for number, value in enumerate(values):
        slot = k.e.op(f"getelementptr i64, {slots}, i64 {number}", "ptr", 0, "slot")
        k.e.line(f"store {value}, {slot}, align 8")
        entry = k.e.op(f"getelementptr ptr, {table}, i64 {number}", "ptr", 0, "entry")
        k.e.line(f"store {slot}, {entry}, align 8")
    return table


def _unless_empty(k: HostContext, grid: Sequence[Val], start: Callable[[], None]) -> None:
    """Emit `start` under the condition that no extent of the grid is 0."""
    some: Val | None = None
    for extent in grid:
        if extent.is_const and extent.text == "0":
            return
        if not extent.is_const:
            positive = k.e.icmp("sgt", extent, int_const(0, "i32"))
            some = positive if some is None else k.e.binary("and", some, positive)
    if some is None:
        start()
    else:
        branch(k, some, start)
