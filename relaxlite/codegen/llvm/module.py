"""Lower tensor programs to LLVM IR, one module per program.

Kernels have the signature i32(ptr buffers, ptr symbols) of docs/runtime-abi.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, ModuleEmitter, Val
from relaxlite.codegen.llvm.gpu.context import HostContext
from relaxlite.codegen.llvm.gpu.device import emit_device_function
from relaxlite.codegen.llvm.guarded import unschedule
from relaxlite.codegen.llvm.indices import BufferBase, Indices
from relaxlite.codegen.llvm.statements import emit_statement
from relaxlite.codegen.llvm.types import memory_elem
from relaxlite.errors import CodegenError
from relaxlite.ir.attributes import CHECKED, IN_ORDER, IN_PLACE, PREFETCH_BYTES, WRITES_INPUTS
from relaxlite.ir.launch import has_launches
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.records import dataclass
from relaxlite.runtime.executable import launch_symbol
from relaxlite.target import Target


@dataclass(frozen=True, slots=True)
class KernelText:
    """LLVM IR of a kernel, and the messages of its checks: `checks[k - 1]` for status k.

    `device`: LLVM IR of the functions of its launches, of which there are `launches`; empty without launches.
    """

    text: str
    checks: tuple[str, ...]
    device: str = ""
    launches: int = 0


def emit_program(name: str, program: TensorProgram, target: Target) -> str:
    """LLVM IR of a program before LLVM's passes; of a program with launches, also of their functions.

    CodegenError names a program that cannot be lowered.
    """
    kernel = emit_kernel(name, program, target, "kernel_" + re.sub(r"[^A-Za-z0-9_]", "_", name))
    return "\n".join(filter(None, (kernel.text, kernel.device)))


def emit_kernel(
    name: str, program: TensorProgram, target: Target, symbol: str, *, is_guarded: bool = False
) -> KernelText:
    """Emit a module that exports `symbol`; `is_guarded`: unscheduled and bounds-checked (guarded.py). CodegenError
    names a program that cannot be lowered."""
    module = ModuleEmitter(target.host_part)
    try:
        program = unschedule(program) if is_guarded else program
        kind = HostContext if target.kind == "cuda" and has_launches(program) else KernelContext
        k = _emit_function(module, symbol, name, program, kind, is_guarded)
        device = _emit_device_functions(k, program, target) if isinstance(k, HostContext) else ""
    except CodegenError as error:
        raise CodegenError(f"program {name!r}: {error}") from error
    except Exception as error:
        raise CodegenError(f"program {name!r}: {type(error).__name__}: {error}") from error
    return KernelText(module.text(), tuple(k.checks), device, len(k.launches) if isinstance(k, HostContext) else 0)


def _emit_function(
    module: ModuleEmitter, symbol: str, name: str, program: TensorProgram, kind: type[KernelContext], is_guarded: bool
) -> KernelContext:
    e = Emitter(module)
    e.start("entry")
    entry = e.reserve()
    k = kind(symbol, e, Indices(e), {}, entry, is_checked=bool(program.attrs.get(CHECKED)), is_guarded=is_guarded)
    prefetch_bytes: Any = program.attrs.get(PREFETCH_BYTES, ())
    k.prefetch_distances = {program.params[number]: count for number, count in prefetch_bytes}
    ordered_params: Any = program.attrs.get(IN_ORDER, ())
    k.ordered_buffers = frozenset(program.params[number] for number in ordered_params)
    for number, buffer in enumerate(program.params):
        pointer = _load_argument(e, "buffers", number, "ptr", buffer.name)
        k.ix.bases[buffer] = BufferBase(pointer, 0, memory_elem(buffer.dtype))
    values = [_load_argument(e, "symbols", number, "i64", var.name) for number, var in enumerate(program.symbols)]
    with k.ix.scope():
        for var, value in zip(program.symbols, values, strict=True):
            k.ix.define(var, value)
        emit_statement(k, program.body)
    k.finish()
    module.add_function(f"define i32 @{symbol}(ptr %buffers, ptr %symbols)", e, _describe(name, program))
    return k


def _emit_device_functions(k: HostContext, program: TensorProgram, target: Target) -> str:
    """LLVM IR of the functions of all launches of a program."""
    module = ModuleEmitter(target)
    in_place: Any = program.attrs.get(IN_PLACE, ())
    aliased = {program.params[number] for pair in in_place for number in pair}
    if program.attrs.get(WRITES_INPUTS):
        aliased |= set(program.params)
    for number, launch in enumerate(k.launches):
        emit_device_function(module, launch_symbol(k.name, number), launch, k.checks, aliased, emit_statement)
    return module.text()


def _load_argument(e: Emitter, array: str, number: int, elem: str, hint: str) -> Val:
    address = e.op(f"getelementptr i64, ptr %{array}, i64 {number}", "ptr", 0, f"{hint}_slot")
    return e.op(f"load {elem}, {address}, align 8", elem, 0, hint)


def _describe(name: str, program: TensorProgram) -> str:
    """Comment above a kernel with its program's signature."""

    def list_of(buffers: Sequence[Buffer]) -> str:
        return ", ".join(f"{b.name}: {b.dtype}[{', '.join(map(str, b.shape))}]" for b in buffers)

    symbols = f"; symbols {', '.join(v.name for v in program.symbols)}" if program.symbols else ""
    attrs = f"; {program.identity!r}" if program.identity else ""
    text = f"; program {name}({list_of(program.inputs)}) -> {list_of(program.outputs)}{symbols}{attrs}"
    return " ".join(text.split())  # one line, whatever characters names have
