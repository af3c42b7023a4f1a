"""Fuse two products of one operand into one kernel where only the second result has other uses: gated layers.

    up = x @ b;  out = silu(x @ a) * up
        =>  for i, j: { e[]; e = 0; for k: e += x[i, k]*b[k, j]; { f[]; f = 0; for k: f += x[i, k]*a[k, j]
                        out[i, j] = silu(f) * e } }

Register tiles take the steps of both sums in one loop (pair_tile.py): both sums share the loads of x, and the
intermediate result is never stored. The first product may have an epilogue of its own, such as a bias or an activation.

Products with constant weights that a faster strategy computes (winograd_products.py, int16_products.py) stay apart, as
that strategy saves more than a pair (docs/measurements/passb.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Binding, Block, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Binary, Buffer, Cast, Check, Load, Stmt, Store, TensorProgram, Value, seq
from relaxlite.ir.program_visitor import ReplaceLoads, Substitute, loads
from relaxlite.ir.symbolic import product, sym
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.legalize import ProgramTable
from relaxlite.passes.loops.merge_calls import CallSite, ProgramInstances, call_sites, map_blocks, stem
from relaxlite.passes.loops.pattern import Reduction, perfect_nest, reduction_of, top_stages
from relaxlite.passes.loops.transforms import nest
from relaxlite.passes.products.constant_weights import ProductStrategies, WeightStrategy, strategy_for
from relaxlite.passes.products.reduction import reduction_block
from relaxlite.target import Target

_ANALYZER = Analyzer()
_FLOAT_BYTES = 4


def pair_products(module: IRModule, context: PassContext) -> IRModule:
    """Fuse the two products of a gated layer into one kernel."""

    products = {name for name, program in module.programs().items() if _is_product(program)}
    strategies = ProductStrategies(module, context)

    def change(
        block: Block, uses: Mapping[Var, int], table: ProgramTable, *, strategies: Sequence[WeightStrategy]
    ) -> Sequence[Binding]:
        """Fuse the pairs of products of one block."""
        bindings: dict[Var, Binding] = {b.var: b for b in block.bindings}
        sites = {site.var: site for site in call_sites(block.bindings, module) if site.call.callee.name in products}
        for second in list(sites.values()):
            for arg in second.call.args:
                first = sites.get(arg) if isinstance(arg, Var) else None
                if first is None or second.var not in sites or uses[first.var] != 1:
                    continue
                result = _pair(first, second, strategies, table, context)
                if result is not None:
                    bindings[second.var] = result
                    del bindings[first.var], sites[first.var], sites[second.var]
        return tuple(bindings.values())

    result = module
    for name in module.functions():
        result = map_blocks(result, partial(change, strategies=strategies.of(name)), [name])
    return result


def _is_product(program: TensorProgram) -> bool:
    """Whether the program is one sum of products."""
    stages = [stage for stage in top_stages(program) if not isinstance(stage, Check)]
    reduction = reduction_of(stages[0]) if len(stages) == 1 else None
    return reduction is not None and isinstance(reduction.update.value, Binary) and reduction.update.value.op == "mul"


def _pair(
    first: CallSite, second: CallSite, strategies: Sequence[WeightStrategy], table: ProgramTable, context: PassContext
) -> Let | None:
    """The second call with the first product fused into it; None where the calls are no pair of products."""
    parts = ProgramInstances()
    stages = [s for site in (first, second) for s in parts.stages(site)]
    checks = [s for s in stages if isinstance(s, Check)]
    reductions = [reduction_of(s) for s in stages if not isinstance(s, Check)]
    intermediate = parts.buffers[first.var]
    if len(reductions) != 2 or reductions[0] is None or reductions[1] is None:
        return None
    if any(load.buffer is intermediate for load in loads(reductions[1].update)):
        return None  # one product after another
    result = _merge_reductions(reductions[0], reductions[1], intermediate, context.target)
    if not isinstance(result, str) and (strategy := strategy_for((first, second), strategies)) is not None:
        result = f"each alone is one of {strategy.name}, which is faster"
    subject = f"{first.var.name} and {second.var.name}"
    if isinstance(result, str):
        context.decide("pair_products", subject, False, result)
        return None
    args = dict.fromkeys(a for a in (*first.call.args, *second.call.args) if a is not first.var)
    call = parts.call(f"pair_{stem(second)}", seq(*checks, result), tuple(args), (second.var,), table)
    ty = first.var.ty
    assert isinstance(ty, TensorType) and ty.shape is not None
    context.decide(
        "pair_products", subject, True, "both multiply one operand; the first result is not stored",
        kernels_saved=sym(1), bytes_not_moved=2 * dtypes.itemsize(ty.dtype) * product(ty.shape),
    )  # fmt: skip
    return Let(second.var, replace(call, loc=second.call.loc))


def _merge_reductions(first: Reduction, second: Reduction, intermediate: Buffer, target: Target) -> Stmt | str:
    """One nest of both reductions; the reason as text where that is impossible."""
    if len(first.spatial) != len(second.spatial):
        return "their results differ in rank"
    loops = list(zip(first.spatial, second.spatial, strict=True))
    inner = [perfect_nest(r.inner).loops for r in (first, second)]
    if len(inner[0]) != len(inner[1]):
        return "they sum over different numbers of loops"
    loops += zip(*inner, strict=True)
    if not all(_ANALYZER.can_prove_equal(a.extent, b.extent) for a, b in loops):
        return "their loops are not of the same lengths"
    if not _is_product_of_elements(first.update) or not _is_product_of_elements(second.update):
        return "they sum up more than products of two elements"
    loop_vars = {a.var: b.var for a, b in loops}
    update = Substitute(loop_vars).stmt(first.update)
    first_loads = {(load.buffer, load.indices) for load in loads(update)}
    if not first_loads & {(load.buffer, load.indices) for load in loads(second.update)}:
        return "their sums share no operand"
    final = Substitute({a.var: b.var for a, b in loops[: len(first.spatial)]}).stmt(first.final)
    indices = tuple(loop.var for loop in second.spatial)
    if not isinstance(final, Store) or final.buffer is not intermediate or final.indices != indices:
        return "the first result is not one element per sum"
    if any(load.buffer is intermediate and load.indices != indices for load in loads(second.final)):
        return "the second reads the first one's result elsewhere than at its own element"
    steps = nest([b for _, b in loops[len(first.spatial) :]], update)
    last = ReplaceLoads(intermediate, final.value).stmt(second.final)
    block = replace(second, final=last).block
    code = nest(second.spatial, replace(first, inner=steps, final=block).block)
    tiles = reduction_block(code)
    lanes = target.vector_bits // 8 // _FLOAT_BYTES
    if tiles is None or lanes < 2 or tiles.fused().vector_loop() is None:
        return "they would have no register tiles"
    return code


def _is_product_of_elements(update: Store) -> bool:
    """Whether a store is e += a * b of elements, as stored or converted, as register tiles of a pair require."""
    value = update.value
    return isinstance(value, Binary) and value.op == "mul" and _is_element(value.a) and _is_element(value.b)


def _is_element(value: Value) -> bool:
    return isinstance(value.x if isinstance(value, Cast) else value, Load)
