"""Kernels of a compiled model: ops, calls, schedules, and costs in the model's own symbols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from relaxlite.explain.fusion import FusedCall, stem
from relaxlite.ir.expr import Call, ExternFunction, GlobalVar, Let
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar, substitute
from relaxlite.ir.visitor import bodies
from relaxlite.passes.cost import Cost
from relaxlite.passes.schedule.primitives import steps_of
from relaxlite.records import dataclass

FLOPS_PER_BYTE = 8
"""FLOPs that take as long as moving one byte: ranks kernels in the same way on every machine. Present cores compute 5
to 20 float32 operations per byte from the last-level cache; `relaxlite profile` measures this machine."""


@dataclass(slots=True, eq=False)
class Kernel:
    """Tensor program of the compiled module.

    `cost` is the total of all its calls in the model's symbols, None if unknown; a call inside a Loop counts once.
    """

    name: str
    program: TensorProgram
    calls: list[str] = field(default_factory=list)  # names of results
    ops: list[str] = field(default_factory=list)  # fused ops, in order
    cost: Cost | None = None

    @property
    def steps(self) -> tuple[str, ...]:
        """Steps of the schedule as text."""
        return steps_of(self.program)

    @property
    def signature(self) -> str:
        """Parameters with dtypes and shapes: inputs -> outputs."""
        outputs = self.program.params[len(self.program.inputs) :]
        sides = (", ".join(_buffer_text(b) for b in side) for side in (self.program.inputs, outputs))
        return " -> ".join(sides)


def _buffer_text(buffer: Buffer) -> str:
    return f"{buffer.name}: {buffer.dtype}[{', '.join(map(str, buffer.shape))}]"


def modelled_work(flops: float, nbytes: float) -> float:
    """Cost of a kernel by the model: the greater of bytes moved and FLOPs / FLOPS_PER_BYTE."""
    return max(nbytes, flops / FLOPS_PER_BYTE)


def find_kernels(
    calls: IRModule, final: IRModule, costs: Mapping[str, Cost], fused: Mapping[str, FusedCall]
) -> list[Kernel]:
    """Collect every program of the final module; `calls` is the module in which calls still return results."""
    kernels = {name: Kernel(name, program) for name, program in final.programs().items()}
    for var, call in _program_calls(calls):
        callee = call.callee.name
        kernel = kernels.get(callee)
        program = calls[callee]
        if kernel is None or not isinstance(program, TensorProgram):
            continue
        if not kernel.ops:
            kernel.ops = [m.what for m in fused[var].members] if var in fused else [stem(callee)]
        kernel.calls.append(var)
        if callee in costs:
            kernel.cost = _add_costs(
                kernel.cost, costs[callee], dict(zip(program.symbols, call.sym_args, strict=False))
            )
    return list(kernels.values())


def _program_calls(module: IRModule) -> Iterable[tuple[str, Call]]:
    for function in module.functions().values():
        for body in bodies(function):
            for binding in body.bindings():
                value = binding.value if isinstance(binding, Let) else None
                if isinstance(value, Call) and isinstance(value.callee, GlobalVar):
                    yield binding.var.name, value


def _add_costs(total: Cost | None, cost: Cost, at: Mapping[SymVar, SymExpr]) -> Cost:
    """Sum of costs, with the symbols of the second substituted."""
    flops, read, written = (substitute(e, at) for e in (cost.flops, cost.bytes_read, cost.bytes_written))
    if total is None:
        return Cost(flops, read, written, cost.is_bound)
    is_bound = total.is_bound and cost.is_bound
    return Cost(total.flops + flops, total.bytes_read + read, total.bytes_written + written, is_bound)


def library_calls(module: IRModule) -> dict[str, list[str]]:
    """Names of results of library calls, by the symbol of the routine."""
    result: dict[str, list[str]] = {}
    for var, call in _program_calls(module):
        callee = module.get(call.callee.name)
        if isinstance(callee, ExternFunction):
            result.setdefault(callee.symbol, []).append(var)
    return result
