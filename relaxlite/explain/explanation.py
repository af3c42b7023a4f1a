"""Compilation with an observer: records passes, decisions, kernels, memory plans and graphs as an Explanation."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import field

import llvmlite
import numpy as np

from relaxlite.driver import build
from relaxlite.explain.fusion import FusedCall, fused_calls
from relaxlite.explain.graph import Graph, graph_of
from relaxlite.explain.kernels import Kernel, find_kernels, library_calls, modelled_work
from relaxlite.explain.passes import Snapshots
from relaxlite.explain.symbols import Symbols, find_symbols, value_of
from relaxlite.ir.expr import Constant, Function
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import module_constants
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.passes.context import Decision, PassContext
from relaxlite.passes.memory.plan import MemoryPlan
from relaxlite.passes.schedule.tuning import Tuning
from relaxlite.records import dataclass
from relaxlite.runtime.executable import ENTRY, ExecutableData
from relaxlite.target import Target
from relaxlite.version import __version__


@dataclass(slots=True)
class Explanation:
    """Record of one compilation.

    `imported` and `compiled` are graphs of "main" before the first pass and at the last stage with calls of kernels as
    values; `memory_plans` is by function; `final` is the module from which code was generated.
    """

    name: str
    data: ExecutableData
    target: Target
    symbols: Symbols
    snapshots: Snapshots
    timings: list[tuple[str, float]]  # seconds, of passes and other stages
    decisions: list[Decision]
    fused: dict[str, FusedCall]
    kernels: list[Kernel]
    library: dict[str, list[str]]
    memory_plans: dict[str, MemoryPlan]
    imported: Graph
    compiled: Graph
    final: IRModule
    weights: list[Constant] = field(default_factory=list)

    def values(self, values_by_name: Mapping[str, int] | None = None) -> dict[SymVar, int]:
        """Values of all symbols: given ones by name, else values within the bounds."""
        return self.symbols.values(values_by_name or {})

    def costliest(self, at: Mapping[SymVar, int]) -> list[tuple[Kernel, int, int]]:
        """Kernels of known cost with their FLOPs and bytes, the most expensive by the cost model first."""
        result = []
        for kernel in self.kernels:
            if kernel.cost is not None:
                nbytes = value_of(kernel.cost.bytes_read, at) + value_of(kernel.cost.bytes_written, at)
                result.append((kernel, value_of(kernel.cost.flops, at), nbytes))
        return sorted(result, key=lambda item: -modelled_work(item[1], item[2]))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the compiler, its dependencies and the target."""
        return {
            "relaxlite": __version__,
            "LLVM": self.data.metadata.llvm,
            "llvmlite": llvmlite.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
            "target": f"{self.target.cpu}, {self.target.triple}",
        }


def explain(
    module: IRModule,
    target: str | Target = "llvm",
    *,
    name: str = "model",
    context: PassContext | None = None,
    precision: str | None = None,
    tuning: str | os.PathLike[str] | Tuning | None = None,
) -> Explanation:
    """Compile a module as `compile` does, and record the compilation as an Explanation.

    Raises the errors of `compile`.
    """
    machine = Target.parse(target) if isinstance(target, str) else target
    context = context or PassContext(machine)
    snapshots = Snapshots()
    context.observers.append(snapshots)
    data = build(module, machine, context=context, precision=precision, tuning=tuning)
    final = snapshots.taken[-1].after if snapshots.taken else module
    calls = snapshots.last("lowered") or final
    fused = fused_calls(snapshot.after for snapshot in snapshots.taken)
    main = module[ENTRY]
    assert isinstance(main, Function)
    symbols = find_symbols(main)
    lowered = calls[ENTRY]
    assert isinstance(lowered, Function)
    kernels = find_kernels(calls, final, context.costs, fused)
    for expr in _amounts(kernels, context):
        symbols.add_all(expr)
    return Explanation(
        name=name,
        data=data,
        target=machine,
        symbols=symbols,
        snapshots=snapshots,
        timings=context.timings,
        decisions=context.decisions,
        fused=fused,
        kernels=kernels,
        library=library_calls(calls),
        memory_plans=context.memory_plans,
        imported=graph_of(main, module, text=symbols.text),
        compiled=graph_of(lowered, calls, fused, symbols.text),
        final=final,
        weights=module_constants(calls),
    )


def _amounts(kernels: list[Kernel], context: PassContext) -> Iterator[SymExpr]:
    """All symbolic amounts of kernels, memory plans and decisions, to register their symbols."""
    for kernel in kernels:
        if kernel.cost is not None:
            yield from (kernel.cost.flops, kernel.cost.bytes_read, kernel.cost.bytes_written)
    for plan in context.memory_plans.values():
        yield plan.arena
        for tensor in plan.tensors:
            yield from (tensor.nbytes, tensor.offset)
    for decision in context.decisions:
        yield from decision.figures.values()
