"""Tensor programs to object code: one LLVM module for a batch of programs.

A kernel has the signature i32(ptr buffers, ptr symbols) that docs/architecture.md states. Schedules have decided about
loops, vectors and unrolling, so that only a few light LLVM passes run: more would cost time and change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import llvmlite.binding as llvm

from relaxlite.codegen.llvm.context import Kernel
from relaxlite.codegen.llvm.emitter import Emitter, ModuleEmitter, Val
from relaxlite.codegen.llvm.indices import Base, Indices
from relaxlite.codegen.llvm.statements import emit_statement
from relaxlite.codegen.llvm.types import memory_elem
from relaxlite.errors import CodegenError
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.runtime.executable import KernelInfo
from relaxlite.target import Target


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """Machine code of a batch of kernels as a relocatable object file, and what to call in it, by program name."""

    object_code: bytes
    kernels: dict[str, KernelInfo]


def emit_program(name: str, program: TensorProgram, target: Target) -> str:
    """The LLVM IR of one program, as it is before LLVM's own passes."""
    return _emit_module({name: program}, target)[0]


def compile_programs(programs: Mapping[str, TensorProgram], target: Target) -> ObjectCode:
    """Object code for `target`. CodegenError names the program that could not be compiled."""
    text, kernels = _emit_module(programs, target)
    machine = _target_machine(target)
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise CodegenError(f"{_blame(programs, target, str(error))}: LLVM rejects the code: {error}") from error
    _optimize(module, machine)
    return ObjectCode(machine.emit_object(module), kernels)


def emit_assembly(programs: Mapping[str, TensorProgram], target: Target) -> str:
    """The machine code as text, for people."""
    machine = _target_machine(target)
    module = llvm.parse_assembly(_emit_module(programs, target)[0])
    _optimize(module, machine)
    return str(machine.emit_assembly(module))


def _target_machine(target: Target) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=2, reloc="pic", codemodel="small"
    )


def _optimize(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0))
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)


def _blame(programs: Mapping[str, TensorProgram], target: Target, message: str) -> str:
    """Which program an LLVM error is about: the first that fails on its own."""
    for name, program in programs.items():
        try:
            llvm.parse_assembly(emit_program(name, program, target)).verify()
        except RuntimeError:
            return f"program {name!r}"
    return f"programs {', '.join(programs)}"


def _emit_module(programs: Mapping[str, TensorProgram], target: Target) -> tuple[str, dict[str, KernelInfo]]:
    module = ModuleEmitter(target)
    kernels: dict[str, KernelInfo] = {}
    taken: set[str] = set()
    for name, program in programs.items():
        symbol = _symbol_for(name, taken)
        try:
            checks = _emit_kernel(module, symbol, name, program)
        except CodegenError as error:
            raise CodegenError(f"program {name!r}: {error}") from error
        except (KeyError, AssertionError, ZeroDivisionError) as error:
            raise CodegenError(f"program {name!r}: {type(error).__name__}: {error}") from error
        kernels[name] = KernelInfo(
            name, symbol, checks, num_buffers=len(program.params), num_symbols=len(program.symbols)
        )
    return module.text(), kernels


def _symbol_for(name: str, taken: set[str]) -> str:
    """A prefix keeps a program called `exp` apart from the C library's function."""
    base = symbol = "kernel_" + re.sub(r"[^A-Za-z0-9_]", "_", name)
    count = 0
    while symbol in taken:
        count += 1
        symbol = f"{base}_{count}"
    taken.add(symbol)
    return symbol


def _emit_kernel(module: ModuleEmitter, symbol: str, name: str, program: TensorProgram) -> tuple[str, ...]:
    e = Emitter(module)
    e.start("entry")
    entry = e.reserve()
    k = Kernel(symbol, e, Indices(e), {}, entry, is_checked=bool(program.attrs.get("checked")))
    for number, buffer in enumerate(program.params):
        pointer = _load_argument(e, "buffers", number, "ptr", buffer.name)
        k.ix.bases[buffer] = Base(pointer, 0, memory_elem(buffer.dtype))
    values = [_load_argument(e, "symbols", number, "i64", var.name) for number, var in enumerate(program.symbols)]
    with k.ix.scope():
        for var, value in zip(program.symbols, values, strict=True):
            k.ix.define(var, value)
        emit_statement(k, program.body)
    k.finish()
    module.add_function(f"define i32 @{symbol}(ptr %buffers, ptr %symbols)", e, _describe(name, program))
    return tuple(k.checks)


def _load_argument(e: Emitter, array: str, number: int, elem: str, hint: str) -> Val:
    place = e.op(f"getelementptr i64, ptr %{array}, i64 {number}", "ptr", 0, f"{hint}_slot")
    return e.op(f"load {elem}, {place}, align 8", elem, 0, hint)


def _describe(name: str, program: TensorProgram) -> str:
    """The comment above a kernel: its program's signature."""

    def list_of(buffers: Sequence[Buffer]) -> str:
        return ", ".join(f"{b.name}: {b.dtype}[{', '.join(map(str, b.shape))}]" for b in buffers)

    symbols = f"; symbols {', '.join(v.name for v in program.symbols)}" if program.symbols else ""
    attrs = f"; {program.attrs!r}" if program.attrs else ""
    text = f"; program {name}({list_of(program.inputs)}) -> {list_of(program.outputs)}{symbols}{attrs}"
    return " ".join(text.split())  # one line, whatever the names hold
