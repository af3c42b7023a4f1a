"""Compiler driver: runs passes, code generation and host compilation to build an Executable from a module."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import llvmlite.binding as llvm

from relaxlite.codegen.bytecode import compile_functions
from relaxlite.codegen.kernel_cache import open_cache, sources_key
from relaxlite.codegen.llvm import ObjectCode, compile_host, compile_programs, compile_support
from relaxlite.errors import InvalidArgumentError
from relaxlite.garbage import with_gc_disabled
from relaxlite.ir import ops  # noqa: F401  (registers the ops)
from relaxlite.ir.expr import Call, Function, Let
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import LibraryFound
from relaxlite.ir.program_cache import ProgramCache
from relaxlite.ir.program_visitor import all_values
from relaxlite.ir.symbolic import SymVar, to_text
from relaxlite.ir.verifier import verify
from relaxlite.library import rules_for
from relaxlite.passes.context import PassContext
from relaxlite.passes.cost import Cost
from relaxlite.passes.graph.reachable import entry_points
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import pipeline_of
from relaxlite.passes.schedule.tuning import Tuning
from relaxlite.runtime.executable import (
    ENTRY,
    Entry,
    ExecutableData,
    KernelCost,
    KernelInfo,
    LibraryInfo,
    Metadata,
    TargetInfo,
)
from relaxlite.runtime.libraries import registered_functions
from relaxlite.runtime.module import Executable
from relaxlite.signature import signature_of, unique_names
from relaxlite.target import Target
from relaxlite.updatable import attach_source
from relaxlite.validation import Validator
from relaxlite.version import __version__

Validate: TypeAlias = "bool | Sequence[Sequence[Any]] | Mapping[str, Sequence[Sequence[Any]]]"


def compile(
    module: IRModule,
    target: str | Target = "llvm",
    *,
    passes: Sequence[Pass] | None = None,
    context: PassContext | None = None,
    precision: str | None = None,
    constant_memory: bool | None = None,
    threads: int | None = None,
    tuning: str | os.PathLike[str] | Tuning | None = None,
    validate: Validate = False,
    libraries: Sequence[str] | str | None = None,
    updatable: bool = False,
) -> Executable:
    """Compile the function "main" of a module for a target, by default the host's processor.

    `precision`: rounding that the compiler may add. `"bf16"` allows the operands of matrix products with constant
    weights, and of attention where bfloat16 dot products are fast, to be rounded to bfloat16 precision (8 significant
    bits; rows by 2**-8 of their length). This is faster on processors with such instructions
    (docs/measurements/cpus.md, precision_bf16); results stay within some 1 % of the largest element. Where additions
    issue in parallel with products, most rows are instead rounded to integers of 14 bits relative to their largest
    element, which is faster and more accurate (passes/products/int16_products.py), also in 1x1 convolutions. For
    products with blocked weights of few bits, as in language models, the other operand is rounded to integers in
    blocks: `"int8"` to 8 bits as in llama.cpp, `"int12"` to 12 (logits move by some 3e-3 of the largest), `"int16"` to
    16 (2e-4), `"float32"` not at all. `"auto"`, the default, rounds to 12 bits where the processor multiplies bytes
    faster than floats (passes/graph/integer_products.py).

    `constant_memory` plans intermediates at the upper bounds of the symbols: every call uses the same memory, at
    constant offsets. A decision in the context names symbols without a bound.

    `tuning`: measured schedules (`relaxlite tune`), or the file that holds them; RELAXLITE_TUNING names a file for
    every compilation. `context` receives timings and decisions.

    `validate=True` runs the module before and after each pass on random inputs of sampled sizes, and compares the
    compiled model with it (relaxlite/validation). Example inputs replace random ones: a list, each in the parameter
    order of "main", or a mapping of such lists by the names of entry points. Validation takes seconds for small models
    and minutes for large ones; a RuntimeWarning reports if it compares hardly anything.

    `updatable` stores the imported module with the compiled model, so that `Executable.load_weights` can put other
    weights into it.

    `libraries`: names of libraries or rules to which library calls are restricted, or "none". By default, rules of
    `rl.register_library` and OpenBLAS, where installed, are used where they pay.

    Raises InvalidArgumentError for a module without "main", an unknown target or an unreadable tuning file, VerifyError
    for an illegal module, PassError and CodegenError with the pass or program that failed, LibraryError for a requested
    library that is missing, and ValidationError with the pass that changes the results.
    """
    if updatable:
        if passes is not None or context is not None:
            raise InvalidArgumentError("updatable=True: passes and a context of the caller cannot be stored")
        tuning = Tuning.of(tuning) or Tuning()
    data = build(
        module,
        target,
        passes=passes,
        context=context,
        precision=precision,
        constant_memory=constant_memory,
        tuning=tuning,
        validate=validate,
        libraries=libraries,
    )
    if updatable:
        options = {"target": target, "precision": precision, "constant_memory": constant_memory, "libraries": libraries}
        assert isinstance(tuning, Tuning)
        data = attach_source(data, module, {**options, "tuning": tuning.to_json()})
    return Executable(data, threads=threads, update=with_weights)


def with_weights(data: ExecutableData, weights: Any) -> ExecutableData:
    """Compile an updatable model with other weights and the same options; raises as `module_with_weights` does."""
    from relaxlite.weights_update import module_with_weights

    module, options = module_with_weights(data, weights)
    options["tuning"] = Tuning.of_json(options["tuning"])
    return replace(build(module, **options), attachments=data.attachments)


@with_gc_disabled
def build(
    module: IRModule,
    target: str | Target = "llvm",
    *,
    passes: Sequence[Pass] | None = None,
    context: PassContext | None = None,
    precision: str | None = None,
    constant_memory: bool | None = None,
    tuning: str | os.PathLike[str] | Tuning | None = None,
    validate: Validate = False,
    libraries: Sequence[str] | str | None = None,
) -> ExecutableData:
    """Compile as `compile` does, and return plain data.

    The target may be another processor; `validate` then checks the passes only, as the compiled model cannot run.
    """
    machine = Target.parse(target) if isinstance(target, str) else target
    if not isinstance(module.get(ENTRY), Function):
        raise InvalidArgumentError(f"the module has no function {ENTRY!r}; it defines {', '.join(module) or 'nothing'}")
    context = context or PassContext(machine)
    if precision is not None:
        context.precision = precision
    if constant_memory is not None:
        context.constant_memory = constant_memory
    if tuning is not None or context.tuning is None:
        context.tuning = Tuning.of(tuning)
    if machine.kind == "cuda":
        context.libraries = ()  # libraries of CPUs do not reach the memory of a GPU
    elif libraries is not None or context.libraries is None:
        context.libraries = rules_for(libraries, machine)
    verify(module, "graph")
    validators = _validators(module, context, validate)
    context.program_cache = ProgramCache(open_cache(), _passes_key(machine))
    try:
        lowered = run_passes(module, pipeline_of(machine.kind) if passes is None else passes, context)
        context.program_cache.write()
    finally:
        for validator in validators:
            context.observers.remove(validator.check)
    start = time.perf_counter()
    code = compile_programs(lowered.programs(), machine)
    host_part = machine.host_part
    context.timings.append(("codegen", time.perf_counter() - start))
    functions, constants = compile_functions(lowered)
    signature = signature_of(module[ENTRY])  # type: ignore[arg-type]
    start = time.perf_counter()
    host = compile_host(functions, signature, code.kernels, constants, machine)
    signatures = {name: signature_of(module[name]) for name in entry_points(module)[1:]}  # type: ignore[arg-type]
    others = {
        name: Entry(entry_signature, compile_host(functions, entry_signature, code.kernels, constants, machine, name))
        for name, entry_signature in signatures.items()
    }
    context.timings.append(("host function", time.perf_counter() - start))
    data = ExecutableData(
        functions=functions,
        signature=signature,
        kernels=_with_costs(code.kernels, lowered, context),
        objects=code.objects,
        device_modules=code.device_modules,
        constants=constants,
        host=host,
        libraries=_libraries(lowered, context),
        target=TargetInfo(host_part.triple, host_part.cpu, host_part.required_features, _device_text(machine)),
        metadata=_metadata(module, lowered, context, code),
        support=compile_support(host_part),
        extra_entries=others,
    )
    for validator in validators if machine.runs_here else ():
        validator.check_compiled(Executable(data).entry(validator.entry), lowered)
    context.validations.extend(str(validator.coverage()) for validator in validators)
    for warning in filter(None, (validator.doubt() for validator in validators)):
        warnings.warn(warning, RuntimeWarning, stacklevel=4)  # the caller of `compile`
    return data


def _device_text(target: Target) -> str:
    """The target of launches, for the runtime; empty for CPUs."""
    return "" if target.kind == "llvm" else str(target)


_TARGET_SOURCES = ("target.py", "cpus.py", "gpus.py", "llvm_names.py")


@cache
def _passes_key(target: Target) -> str:
    """Cache key of everything, apart from the program, that determines the results of passes."""
    sources = map(sources_key, ("passes/**/*.py", "ir/*.py", "dtypes.py", *_TARGET_SOURCES))
    return "\n".join([__version__, str(sys.implementation.cache_tag), repr(target), *sources])


def _validators(module: IRModule, context: PassContext, validate: Validate) -> list[Validator]:
    """Create validators of the entry points that have inputs, and register them as observers of the passes."""
    if validate is False:
        return []
    if isinstance(validate, Mapping):
        inputs_of: Mapping[str, Sequence[Sequence[Any]] | None] = validate
    else:
        inputs_of = dict.fromkeys(entry_points(module)) if validate is True else {ENTRY: validate}
    externs, folder = registered_functions(), str(context.dump_dir or "") or None
    validators = [
        Validator(module, inputs=x, externs=externs, folder=folder, entry=name) for name, x in inputs_of.items()
    ]
    for validator in validators:
        context.observers.append(validator.check)
    return validators


def _libraries(module: IRModule, context: PassContext) -> tuple[LibraryInfo, ...]:
    """Libraries that programs call, with the symbols of each."""
    symbols: dict[str, dict[str, bool]] = {}
    for program in module.programs().values():
        for value in all_values(program.body):
            if isinstance(value, LibraryFound):
                known = symbols.setdefault(value.library, {})
                known[value.symbol] = known.get(value.symbol, False) or value.is_required
    files = {rule.library: rule.file for rule in context.libraries or ()}
    return tuple(
        LibraryInfo(
            name, tuple(result), files.get(name, ""), tuple(s for s, is_required in result.items() if is_required)
        )
        for name, result in symbols.items()
    )


def _with_costs(kernels: Mapping[str, KernelInfo], module: IRModule, context: PassContext) -> dict[str, KernelInfo]:
    """Kernels with their estimated costs."""
    programs, costs = module.programs(), context.costs
    return {
        name: replace(kernel, cost=_kernel_cost(costs[name], programs[name].symbols)) if name in costs else kernel
        for name, kernel in kernels.items()
    }


def _kernel_cost(cost: Cost, symbols: tuple[SymVar, ...]) -> KernelCost | None:
    """Cost in terms of the symbols of the final program; None if the cost depends on other symbols."""
    places = {symbol: f"s{k}" for k, symbol in enumerate(symbols)}
    parts = (cost.flops, cost.bytes_read, cost.bytes_written)
    if any(v not in places for part in parts for v in part.free_vars()):
        return None
    flops, bytes_read, bytes_written = (to_text(part, places.__getitem__) for part in parts)
    names = tuple(unique_names(symbols).values())
    return KernelCost(names, flops, bytes_read, bytes_written, is_bound=cost.is_bound)


def _metadata(module: IRModule, lowered: IRModule, context: PassContext, code: ObjectCode) -> Metadata:
    info: dict[str, Any] = {
        "ops": _count_ops(module),
        "passes_s": {name: round(seconds, 4) for name, seconds in context.timings},
        "codegen_s": {name: round(seconds, 4) for name, seconds in code.timings.items()},
        "kernels": len(lowered.programs()),
        "kernels_compiled": code.num_compiled,
    }
    plan = context.memory_plans[ENTRY].summary() if ENTRY in context.memory_plans else {}
    return Metadata(
        llvm=".".join(map(str, llvm.llvm_version_info)), provenance=dict(module.attrs), memory_plan=plan, info=info
    )


def _count_ops(module: IRModule) -> dict[str, int]:
    """Number of calls of each op, the most frequent first."""
    counts: dict[str, int] = {}
    for function in module.functions().values():
        for binding in function.body.bindings():
            if isinstance(binding, Let) and isinstance(binding.value, Call) and isinstance(binding.value.callee, Op):
                name = binding.value.callee.name
                counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
