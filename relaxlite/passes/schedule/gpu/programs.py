"""Schedule rules for GPUs: the first that matches a stage of a program; `threads` takes every stage.

A stage becomes one or more launches (ir/launch.py); what stands around launches is the host's part.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.attributes import BATCH_INVARIANT, CHECKED
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

FEW_ROWS = 8
"""Rows up to which each result of a product reads its operands anew."""


def schedule_gpu(module: IRModule, context: PassContext) -> IRModule:
    """Schedule every program for the GPU target: stages become launches on block and thread axes."""
    one_order = bool(module.attrs.get(BATCH_INVARIANT))

    def schedule(program: TensorProgram) -> TensorProgram:
        result: tuple[TensorProgram] = context.program_cache.get_or_compute(
            "schedule_gpu", program, repr(one_order), lambda: (schedule_program(program, one_order=one_order),)
        )
        return result[0]

    return map_programs(module, schedule)


def schedule_program(program: TensorProgram, *, one_order: bool = False) -> TensorProgram:
    """The program as launches. Programs that compute sizes stay on the host.

    `one_order`: the order of a sum does not depend on how many results there are.
    """
    if program.attrs.get(CHECKED):
        return program
    stages = [launch_stage(stage, one_order=one_order) for stage in top_stages(program)]
    return replace(program, body=seq(*stages))


def launch_stage(stage: Stmt, *, one_order: bool) -> Stmt:
    """Launches for a stage, by the first template that takes it."""
    launch = launch_rows(stage) or launch_product(stage, one_order=one_order)
    return launch or launch_reduction(stage, one_order=one_order) or launch_threads(stage)


def launch_product(stage: Stmt, *, one_order: bool) -> Stmt | None:
    """Tiles for a sum of products; for few rows whose operands lie along the sum, a warp for each result."""
    product = product_of(stage)
    if product is None:
        return None
    tiles = matmul_mma(product) or matmul_simt(product)
    rows, dots = as_int(product.a.size), None if one_order else launch_reduction(stage, one_order=False)
    if dots is None or (rows is not None and rows > FEW_ROWS):
        return tiles
    return dots if rows is not None else IfThenElse(less(product.a.size, FEW_ROWS + 1), dots, tiles)
