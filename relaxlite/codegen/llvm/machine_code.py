"""Compile LLVM IR text to machine code; thread-safe and concurrent.

Only a few cheap LLVM passes run, as schedules have decided about loops, vectors and unrolling. Each call has its own
LLVM context. llvmlite holds a global lock around LLVM calls; the three expensive calls bypass it where this llvmlite
allows that (see `_unlocked`), else threads take turns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

from relaxlite.errors import CodegenError
from relaxlite.target import Target


def to_object(text: str, target: Target, *, optimize: bool = True) -> bytes:
    """Compile LLVM IR to a relocatable object file, for a GPU to PTX.

    CodegenError has LLVM's message where LLVM rejects the text.

    `optimize=False` compiles about ten times as fast, for code without loops. LLVM aborts the process where the target
    lacks an instruction; isolated.py protects against that.
    """
    machine = _target_machine(target, opt=2 if optimize else 0)
    module = _optimized(text, machine) if optimize else _parse(text)
    return _emit(machine, module, as_object=target.kind != "cuda")


def to_assembly(text: str, target: Target) -> str:
    """Compile LLVM IR to assembly text, for inspection."""
    machine = _target_machine(target)
    return _emit(machine, _optimized(text, machine), as_object=False).decode()


def _emit(machine: llvm.TargetMachine, module: llvm.ModuleRef, *, as_object: bool) -> bytes:
    with ffi.OutputString() as error:
        buffer = _unlocked("LLVMPY_TargetMachineEmitToMemory")(machine, module, int(as_object), error)
        if not buffer:
            raise CodegenError(f"LLVM makes no machine code of it: {error}")
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def llvm_version() -> str:
    """LLVM's version, such as "20.1.8"."""
    return ".".join(map(str, llvm.llvm_version_info))


@cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _target_machine(target: Target, *, opt: int = 2) -> llvm.TargetMachine:
    _initialize()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=opt, reloc="pic", codemodel="small"
    )


def _optimized(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = _parse(text)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0))
    _unlocked("LLVMPY_RunNewModulePassManager")(passes, module, builder)
    return module


def _parse(text: str) -> llvm.ModuleRef:
    context = llvm.create_context()
    with ffi.OutputString() as error:
        pointer = _unlocked("LLVMPY_ParseAssembly")(context, ctypes.c_char_p(text.encode()), error)
        if error or not pointer:
            raise CodegenError(f"LLVM cannot read the code: {error}")
        module = llvm.ModuleRef(pointer, context)
    try:
        module.verify()
    except RuntimeError as error:
        raise CodegenError(f"LLVM rejects the code: {error}") from error
    return module


def _unlocked(name: str) -> Callable[..., Any]:
    """A function of llvmlite's C interface without llvmlite's lock, or with it where llvmlite's internals differ.

    Safe only for functions that access nothing but the caller's own context, module and target machine.
    """
    function = getattr(ffi.lib, name)
    return getattr(function, "_cfn", function)
