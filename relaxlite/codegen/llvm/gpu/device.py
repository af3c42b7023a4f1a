"""Emit launches as device functions: void(buffers..., symbols..., status), one thread of one block each.

Buffers are generic pointers inside of a function; LLVM finds the address spaces again. `status`, which functions with
checks have, is the address of a word (gpu/context.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from relaxlite import dtypes
from relaxlite.codegen.llvm.emitter import Emitter, ModuleEmitter, Val
from relaxlite.codegen.llvm.gpu.context import DeviceContext
from relaxlite.codegen.llvm.indices import BufferBase, Indices
from relaxlite.codegen.llvm.types import memory_elem
from relaxlite.errors import CodegenError
from relaxlite.ir.launch import BLOCK_AXES, Launch
from relaxlite.ir.program import Allocate, Buffer, Check, For, Stmt
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import as_int, product

EmitStatement = Callable[[DeviceContext, Stmt], None]

ALIGNMENT = 16
"""Bytes to which buffers on a device are aligned at least."""
_MAX_LOCAL_BYTES = 512 << 10  # of one thread


def has_status(launch: Launch) -> bool:
    """Whether the device function of a launch takes the address of a status word."""
    return any(isinstance(s, Check) for s in walk_stmts(launch.stmt))


def emit_device_function(
    module: ModuleEmitter,
    name: str,
    launch: Launch,
    checks: dict[str, int],
    aliased: Iterable[Buffer],
    emit_statement: EmitStatement,
) -> None:
    """Add the function of a launch to a module. `checks`: messages of the program; `aliased`: buffers that may share
    memory with others."""
    e = Emitter(module)
    e.start("entry")
    k = DeviceContext(name, e, Indices(e), checks, e.reserve())
    params = [_buffer_parameter(k, n, buffer, launch, frozenset(aliased)) for n, buffer in enumerate(launch.buffers)]
    params += [f"i64 %symbol{n}" for n in range(len(launch.symbols))]
    if has_status(launch):
        k.status = e.op("addrspacecast ptr addrspace(1) %status_word to ptr", "ptr", 0, "status")
        params.append("ptr addrspace(1) %status_word")
    with k.ix.scope():
        for n, var in enumerate(launch.symbols):
            k.ix.define(var, Val(f"%symbol{n}", "i64"))
        emit_statement(k, launch.stmt)
    k.finish()
    threads = ",".join(map(str, launch.threads))
    module.add_function(f'define ptx_kernel void @{name}({", ".join(params)}) "nvvm.reqntid"="{threads}"', e)


def _buffer_parameter(k: DeviceContext, number: int, buffer: Buffer, launch: Launch, aliased: frozenset[Buffer]) -> str:
    generic = k.e.op(f"addrspacecast ptr addrspace(1) %buffer{number} to ptr", "ptr", 0, buffer.name)
    k.ix.bases[buffer] = BufferBase(generic, 0, memory_elem(buffer.dtype))
    is_constant = buffer not in launch.written and buffer not in aliased
    return f"ptr addrspace(1){' readonly noalias' if is_constant else ''} align {ALIGNMENT} %buffer{number}"


# Statements


def emit_axis(k: DeviceContext, stmt: For, emit_statement: EmitStatement) -> None:
    """Emit the body of a loop on an axis, whose variable is the place of the thread or block."""
    register, dim = "ctaid" if stmt.kind in BLOCK_AXES else "tid", stmt.kind[-1]
    with k.e.place(k.entry):
        number = k.e.call(f"llvm.nvvm.read.ptx.sreg.{register}.{dim}", [], "i32", 0, stmt.var.name)
        place = k.e.cast("zext", number, "i64", stmt.var.name)
    extent = as_int(stmt.extent)
    with k.ix.scope(), k.ix.bound(stmt.var, place, (0, None if extent is None else max(extent - 1, 0))):
        emit_statement(k, stmt.body)


def allocate_on_device(k: DeviceContext, stmt: Allocate) -> Val:
    """The address of a local buffer, or of a block's shared buffer."""
    buffer, elem = stmt.buffer, memory_elem(stmt.buffer.dtype)
    count = as_int(product(buffer.shape))
    if buffer.scope == "global" or count is None:
        raise CodegenError(f"{buffer.name} is allocated inside of a launch with the scope {buffer.scope}; lift it out")
    if buffer.scope == "local":
        if count * dtypes.itemsize(buffer.dtype) > _MAX_LOCAL_BYTES:
            raise CodegenError(f"{buffer.name} has {count} elements for each thread, which local memory does not hold")
        return k.stack_array(buffer.name, elem, count)
    shared = k.e.module.shared(f"{k.name}.{k.e.fresh(buffer.name)}", elem, count)
    with k.e.place(k.entry):
        return k.e.op(f"addrspacecast ptr addrspace(3) {shared} to ptr", "ptr", 0, buffer.name)


def emit_barrier(k: DeviceContext) -> None:
    """Emit a barrier of the threads of a block."""
    k.e.call_void("llvm.nvvm.barrier0", [])
    k.forget_loads()
