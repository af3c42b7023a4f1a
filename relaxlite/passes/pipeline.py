"""The table of contents of compilation: every pass, in order, and what holds after it."""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.ir.module import IRModule
from relaxlite.passes.context import PassContext
from relaxlite.passes.cost import estimate_costs
from relaxlite.passes.fuse.dispatch import dispatch
from relaxlite.passes.fuse.fuse_ops import fuse_ops
from relaxlite.passes.fuse.fuse_programs import fuse_programs
from relaxlite.passes.fuse.fuse_prologues import fuse_prologues
from relaxlite.passes.fuse.join_calls import join_calls
from relaxlite.passes.fuse.pair_products import pair_products
from relaxlite.passes.fuse.resolve_matches import resolve_matches
from relaxlite.passes.fuse.sink_into_branches import sink_into_branches
from relaxlite.passes.graph.byte_products import byte_products
from relaxlite.passes.graph.channels_last import channels_last
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.eliminate import eliminate_common, eliminate_dead
from relaxlite.passes.graph.fold_constants import fold_constants
from relaxlite.passes.graph.fold_shapes import fold_shapes
from relaxlite.passes.graph.fuse_attention import fuse_attention
from relaxlite.passes.graph.integer_products import integer_products
from relaxlite.passes.graph.lower_precision import lower_precision, narrow_attention
from relaxlite.passes.graph.quantized_weights import keep_quantized
from relaxlite.passes.graph.reachable import drop_unused
from relaxlite.passes.graph.recognize import recognize
from relaxlite.passes.graph.simplify_algebra import simplify_algebra
from relaxlite.passes.graph.split_products import split_products
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.manager import Pass
from relaxlite.passes.memory.donate import donate
from relaxlite.passes.memory.join_parts import join_parts
from relaxlite.passes.memory.lift_workspaces import lift_workspaces
from relaxlite.passes.memory.lower_dps import lower_dps
from relaxlite.passes.memory.lower_shapes import lower_shapes
from relaxlite.passes.memory.make_views import make_views
from relaxlite.passes.memory.plan_memory import plan_memory
from relaxlite.passes.memory.reuse_operands import reuse_operands
from relaxlite.passes.products.int16_products import word_products
from relaxlite.passes.products.pack_constants import pack_constants
from relaxlite.passes.products.winograd_convolution import winograd
from relaxlite.passes.products.winograd_products import inner_products
from relaxlite.passes.schedule.cpu.programs import schedule_cpu


def _pure(name: str, run: Callable[[IRModule], IRModule], stage: str) -> Pass:
    """A pass that needs nothing but the module."""
    return Pass(name, lambda module, context: run(module), stage, (run.__doc__ or "").strip().split("\n")[0])


def _note_costs(module: IRModule, context: PassContext) -> IRModule:
    """Note what each program costs; the module stays as it is."""
    context.costs.update(estimate_costs(module, context.program_cache))
    return module


def default_pipeline() -> tuple[Pass, ...]:
    """From graph operators to what codegen takes.

    A  canonicalize       small and equal things disappear; shapes become symbols; quantized weights keep to few bits;
                          ops made of others are taken apart, and those that exporters took apart are put together;
                          convolutions get their channels last
    B  dispatch           library calls where they pay, with loops beside them for where they do not
    C  lower and fuse     ops become loop nests; nests that belong together, or read one operand, become one
    D  schedule           loops are tiled, vectorized and run in parallel for the target
    E  memory and shapes  explicit outputs, one arena, symbols in slots of a heap
    """
    return (
        # A
        _pure("fold_shapes", fold_shapes, "graph"),
        _pure("decompose", decompose, "graph"),
        Pass("integer_products", integer_products, "graph", rounds=True),
        Pass("byte_products", byte_products, "graph"),
        Pass("keep_quantized", keep_quantized, "graph"),
        _pure("fold_constants", fold_constants, "graph"),
        _pure("simplify_algebra", simplify_algebra, "graph"),
        _pure("fold_constants_again", fold_constants, "graph"),
        _pure("channels_last", channels_last, "graph"),
        _pure("simplify_algebra_again", simplify_algebra, "graph"),
        Pass("split_products", split_products, "graph"),
        Pass("lower_precision", lower_precision, "graph", rounds=True),
        _pure("eliminate_common", eliminate_common, "graph"),
        Pass("recognize", recognize, "graph"),
        Pass("fuse_attention", fuse_attention, "graph"),
        Pass("narrow_attention", narrow_attention, "graph", rounds=True),
        _pure("decompose_again", decompose, "graph"),
        _pure("eliminate_dead", eliminate_dead, "graph"),
        # B
        Pass("dispatch", dispatch, "graph", (dispatch.__doc__ or "").split("\n")[0]),
        # C
        _pure("legalize", legalize, "lowered"),
        Pass("resolve_matches", resolve_matches, "lowered"),
        Pass("sink_into_branches", sink_into_branches, "lowered"),
        Pass("fuse_prologues", fuse_prologues, "lowered"),
        Pass("fuse_ops", fuse_ops, "lowered"),
        _pure("fuse_programs", fuse_programs, "lowered"),
        Pass("make_views", make_views, "lowered"),
        Pass("pair_products", pair_products, "lowered"),
        Pass("join_calls", join_calls, "lowered"),
        Pass("donate", donate, "lowered"),
        _pure("drop_unused", drop_unused, "lowered"),
        Pass("estimate_costs", _note_costs, "lowered"),
        # D
        Pass("winograd", winograd, "lowered"),
        Pass("word_products", word_products, "lowered", rounds=True),
        Pass("inner_products", inner_products, "lowered"),
        Pass("schedule", schedule_cpu, "lowered"),
        _pure("pack_constants", pack_constants, "lowered"),
        # E
        _pure("lower_dps", lower_dps, "dps"),
        _pure("eliminate_dead_again", eliminate_dead, "dps"),
        Pass("lift_workspaces", lift_workspaces, "dps"),
        Pass("join_parts", join_parts, "dps"),
        Pass("reuse_operands", reuse_operands, "dps"),
        Pass("plan_memory", plan_memory, "dps"),
        _pure("lower_shapes", lower_shapes, "vm"),
    )


PASSES: dict[str, Pass] = {step.name: step for step in default_pipeline()}
