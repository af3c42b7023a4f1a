"""Schedule rules for GPUs: the first that matches a stage of a program; `threads` takes every stage.

A stage becomes one or more launches (ir/launch.py); what stands around launches is the host's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from relaxlite.ir.attributes import CHECKED
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import IfThenElse, Stmt, TensorProgram, seq
from relaxlite.ir.symbolic import as_int
from relaxlite.ir.visitor import map_programs
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.pattern import top_stages
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.gpu.matmul_mma import matmul_mma
from relaxlite.passes.schedule.gpu.matmul_simt import matmul_simt
from relaxlite.passes.schedule.gpu.product import product_of
from relaxlite.passes.schedule.gpu.reduction import launch_reduction
from relaxlite.passes.schedule.gpu.rows import launch_rows
from relaxlite.passes.schedule.gpu.threads import launch_threads


def schedule_gpu(module: IRModule, context: PassContext) -> IRModule:
    """Schedule every program for the GPU target: stages become launches on block and thread axes."""

    def schedule(program: TensorProgram) -> TensorProgram:
        result: tuple[TensorProgram] = context.program_cache.get_or_compute(
            "schedule_gpu", program, "", lambda: (schedule_program(program),)
        )
        return result[0]

    return map_programs(module, schedule)


def schedule_program(program: TensorProgram) -> TensorProgram:
    """The program as launches. Programs that compute sizes stay on the host."""
    if program.attrs.get(CHECKED):
        return program
    return replace(program, body=seq(*map(launch_stage, top_stages(program))))


def launch_stage(stage: Stmt) -> Stmt:
    """Launches for a stage, by the first template that takes it."""
    for template in _TEMPLATES:
        launch = template(stage)
        if launch is not None:
            return launch
    return launch_threads(stage)


def launch_product(stage: Stmt) -> Stmt | None:
    """Tiles for a sum of products; for few rows whose operands lie along the sum, a warp for each result."""
    product = product_of(stage)
    if product is None:
        return None
    tiles, dots = matmul_mma(product) or matmul_simt(product), launch_reduction(stage)
    rows = as_int(product.a.size)
    if dots is None or (rows is not None and rows > FEW_ROWS):
        return tiles
    return dots if rows is not None else IfThenElse(less(product.a.size, FEW_ROWS + 1), dots, tiles)


FEW_ROWS = 8
"""Rows up to which each result of a product reads its operands anew."""
_TEMPLATES: tuple[Callable[[Stmt], Stmt | None], ...] = (launch_rows, launch_product, launch_reduction)
