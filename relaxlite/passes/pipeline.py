"""The table of contents of compilation: every pass in order, what holds after it, and why it stands where it stands.

`why` of a pass says what it needs from passes before it, or what it must precede; `after` and `before` say the same by
names, and are checked when a pipeline is built (manager.checked_order).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, get_args

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
from relaxlite.passes.manager import Pass, checked_order
from relaxlite.passes.memory.donate import donate
from relaxlite.passes.memory.join_parts import join_parts
from relaxlite.passes.memory.lift_workspaces import lift_workspaces
from relaxlite.passes.memory.lower_dps import lower_dps
from relaxlite.passes.memory.lower_shapes import lower_shapes
from relaxlite.passes.memory.make_views import make_views
from relaxlite.passes.memory.plan_memory import plan_memory
from relaxlite.passes.memory.reuse_operands import reuse_operands
from relaxlite.passes.products.constant_weights import inner_products, word_products
from relaxlite.passes.products.pack_constants import pack_constants
from relaxlite.passes.products.winograd_convolution import winograd
from relaxlite.passes.schedule.cpu.programs import schedule_cpu
from relaxlite.passes.schedule.gpu.programs import schedule_gpu
from relaxlite.target import Kind

_CPU: tuple[Kind, ...] = ("llvm",)
"""Kinds of targets of passes that decide by facts of CPUs."""

PassFunction: TypeAlias = "Callable[[IRModule], IRModule] | Callable[[IRModule, PassContext], IRModule]"


def _step(
    name: str,
    run: PassFunction,
    stage: str,
    why: str,
    *,
    after: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    rounds: bool = False,
    kinds: tuple[Kind, ...] = get_args(Kind),
) -> Pass:
    """A row of the table; a function of the module alone gets no context."""
    summary = (run.__doc__ or "").strip().split("\n")[0]
    takes_context = run.__code__.co_argcount > 1
    whole: Any = run if takes_context else lambda module, _: run(module)  # type: ignore[call-arg]
    return Pass(name, whole, stage, summary, rounds, why, after, before, kinds)


def _note_costs(module: IRModule, context: PassContext) -> IRModule:
    """Note what each program costs; the module stays as it is."""
    context.costs.update(estimate_costs(module, context.program_cache))
    return module


def pipeline_of(kind: Kind) -> tuple[Pass, ...]:
    """The passes for targets of a kind, in order."""
    return checked_order(*(step for step in all_passes() if kind in step.kinds))


def default_pipeline() -> tuple[Pass, ...]:
    """The passes for CPUs."""
    return pipeline_of("llvm")


def all_passes() -> tuple[Pass, ...]:
    """From graph operators to what codegen takes, for every kind of target.

    A  canonicalize       small and equal things disappear; shapes become symbols; quantized weights keep to few bits;
                          ops made of others are taken apart, and those that exporters took apart are put together;
                          convolutions get their channels last
    B  dispatch           library calls where they pay, with loops beside them for where they do not
    C  lower and fuse     ops become loop nests; nests that belong together, or read one operand, become one
    D  schedule           loops are tiled, vectorized and run in parallel for the target
    E  memory and shapes  explicit outputs, one arena, symbols in slots of a heap
    """
    return checked_order(
        # A
        _step("fold_shapes", fold_shapes, "graph", "rules below ask for dimensions, which tensors hold until here"),
        _step("decompose", decompose, "graph", "rules below are written for basic ops"),
        _step(
            "integer_products", integer_products, "graph", "dequantize_blocks still stands beside its matmul",
            before=("fold_constants", "keep_quantized"), rounds=True, kinds=_CPU,
        ),
        _step(
            "byte_products", byte_products, "graph", "quantize and dequantize still stand around a product",
            before=("fold_constants", "keep_quantized"), kinds=_CPU,
        ),
        _step(
            "keep_quantized", keep_quantized, "graph", "folding would widen the codes of weights",
            after=("byte_products",), before=("fold_constants",),
        ),
        _step("fold_constants", fold_constants, "graph", "algebra sees constants as such", after=("fold_shapes",)),
        _step("simplify_algebra", simplify_algebra, "graph", "layouts and patterns are found in fewer ops"),
        _step(
            "fold_constants_again", fold_constants, "graph", "what algebra moved onto weights is computed now",
            after=("simplify_algebra",),
        ),
        _step(
            "channels_last", channels_last, "graph", "filters are constants, which are transposed here",
            after=("fold_constants_again",), before=("dispatch",), kinds=_CPU,
        ),
        _step(
            "simplify_algebra_again", simplify_algebra, "graph", "transposes that layouts brought meet and cancel",
            after=("channels_last",),
        ),
        _step(
            "split_products", split_products, "graph", "attention is recognized by a product for each operand",
            before=("fuse_attention",),
        ),
        _step(
            "lower_precision", lower_precision, "graph", "each part of a split product is rounded or not",
            after=("split_products",), before=("dispatch",), rounds=True, kinds=_CPU,
        ),
        _step(
            "eliminate_common", eliminate_common, "graph", "patterns below need one user of a value, not two copies",
            before=("recognize",),
        ),
        _step("recognize", recognize, "graph", "norms and activations are whole before fusion", before=("legalize",)),
        _step(
            "fuse_attention", fuse_attention, "graph", "softmax and rotary embeddings are whole", after=("recognize",),
            before=("decompose_again",),
        ),
        _step(
            "narrow_attention", narrow_attention, "graph", "needs attention as one op", after=("fuse_attention",),
            rounds=True, kinds=_CPU,
        ),
        _step(
            "decompose_again", decompose, "graph", "ops that no pattern wanted whole are taken apart",
            after=("recognize", "fuse_attention"), before=("dispatch",),
        ),
        _step("eliminate_dead", eliminate_dead, "graph", "what patterns replaced is not lowered", before=("dispatch",)),
        # B
        _step(
            "dispatch", dispatch, "graph", "rules match graph operators, the last time there are any",
            before=("legalize",),
        ),
        # C
        _step("legalize", legalize, "lowered", "fusion and schedules work on loops"),
        _step(
            "resolve_matches", resolve_matches, "lowered", "a MatchShape between two programs would keep them apart",
            after=("legalize",), before=("fuse_ops",),
        ),
        _step(
            "sink_into_branches", sink_into_branches, "lowered", "what a branch alone uses fuses there",
            after=("legalize",), before=("fuse_ops",),
        ),
        _step(
            "fuse_prologues", fuse_prologues, "lowered", "a product takes its dequantization before others may",
            after=("legalize",), before=("fuse_ops",),
        ),
        _step("fuse_ops", fuse_ops, "lowered", "groups programs, still whole", after=("legalize",)),
        _step("fuse_programs", fuse_programs, "lowered", "merges the loops of the groups", after=("fuse_ops",)),
        _step(
            "make_views", make_views, "lowered", "copies that nothing fused with cost nothing as views",
            after=("fuse_programs",),
        ),
        _step(
            "pair_products", pair_products, "lowered", "epilogues are known", after=("fuse_programs",),
            before=("join_calls",), kinds=_CPU,
        ),
        _step("join_calls", join_calls, "lowered", "what is left side by side is final", after=("fuse_programs",)),
        _step(
            "donate", donate, "lowered", "programs that update one tensor are whole", after=("fuse_programs",),
            before=("lower_dps",),
        ),
        _step("drop_unused", drop_unused, "lowered", "merged programs are not scheduled", before=("schedule",)),
        _step(
            "estimate_costs", _note_costs, "lowered", "costs are of programs as written, not of their tiles",
            before=("winograd", "schedule"),
        ),
        # D
        _step(
            "winograd", winograd, "lowered", "makes loops to be scheduled", after=("fuse_programs",),
            before=("schedule",), kinds=_CPU,
        ),
        _step(
            "word_products", word_products, "lowered", "makes loops to be scheduled; is faster than inner_products",
            before=("inner_products", "schedule"), rounds=True, kinds=_CPU,
        ),
        _step(
            "inner_products", inner_products, "lowered", "makes loops to be scheduled of products that are left",
            before=("schedule",), kinds=_CPU,
        ),
        _step(
            "schedule", schedule_cpu, "lowered", "tiles need whole loops, and say how weights are to lie",
            before=("pack_constants", "lower_dps"), kinds=_CPU,
        ),
        _step(
            "schedule_gpu", schedule_gpu, "lowered", "grids need whole loops", after=("fuse_programs",),
            before=("lower_dps",), kinds=("cuda",),
        ),
        _step(
            "pack_constants", pack_constants, "lowered", "lays weights as schedules want them", after=("schedule",),
            before=("lower_dps",), kinds=_CPU,
        ),
        # E
        _step("lower_dps", lower_dps, "dps", "memory is planned of explicit outputs", before=("plan_memory",)),
        _step("eliminate_dead_again", eliminate_dead, "dps", "unused outputs are not planned", after=("lower_dps",)),
        _step(
            "lift_workspaces", lift_workspaces, "dps", "workspaces share the arena", after=("lower_dps",),
            before=("plan_memory",),
        ),
        _step(
            "join_parts", join_parts, "dps", "parts of a concatenation get memory inside of it", after=("lower_dps",),
            before=("plan_memory",),
        ),
        _step(
            "reuse_operands", reuse_operands, "dps", "a result in place needs no memory", after=("join_parts",),
            before=("plan_memory",),
        ),
        _step("plan_memory", plan_memory, "dps", "offsets are still expressions of symbols", before=("lower_shapes",)),
        _step("lower_shapes", lower_shapes, "vm", "the last: no symbol is left after it", after=("plan_memory",)),
        is_complete=True,
    )  # fmt: skip


PASSES: dict[str, Pass] = {step.name: step for step in all_passes()}
