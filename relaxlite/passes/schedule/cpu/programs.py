"""Schedule rules for CPUs: the first that matches a loop nest, in the order of `nest`, by accesses and registers.

    reduction           a register tile: rows x vectors of outputs accumulate while the reduced loops run inside
                        (matmul, convolution, column sums), or, where only a reduced loop is contiguous, partial sums
                        in vector lanes (row sums, dot products)
    grouped product     a reduction for each group of rows, with the weight of the group (blocks_grouped.py)
    row program         one loop over rows, several over each row (row_programs.py)
    body with arrays    parallel loops around a serial body
    transpose           tiles transposed in registers (transpose.py); sizes below a tile take the next rules
    injective nest      fuse loops whose accesses stay linear; vectorize the innermost; run the outermost in parallel
    other nests         vectorize innermost loops whose iterations are independent or combine into one element

Shapes may be symbolic: tiles have exact tails, masked along vectors and with fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from functools import reduce
from typing import Any

from relaxlite import dtypes
from relaxlite.ir.attributes import BATCH_INVARIANT, IN_PLACE, MIN_PREPARED_ROWS, SCHEDULED, WRITES_INPUTS
from relaxlite.ir.expr import Attrs, AttrValue
from relaxlite.ir.module import IRModule
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    CallLibrary,
    For,
    IfThenElse,
    Seq,
    Stmt,
    StmtWithBody,
    Store,
    TensorProgram,
    seq,
)
from relaxlite.ir.program_visitor import stores, walk_stmts
from relaxlite.ir.symbolic import SymVar, as_int, product
from relaxlite.ir.visitor import map_programs
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.access import can_fuse
from relaxlite.passes.loops.in_place import Pairs, has_only_final_stores, in_place_pairs, sink_aliasable_stores
from relaxlite.passes.loops.join_parallel import join_parallel_loops, read_only_by_writers
from relaxlite.passes.loops.parallel import (
    collapse_outer_loops,
    collapse_parallel,
    is_contiguous,
    is_independent,
    is_scalar_reduction,
    make_serial,
    mark_parallel,
    outermost_parallel,
)
from relaxlite.passes.loops.pattern import calls_library, injective_store, perfect_nest, plain_store, top_stages
from relaxlite.passes.loops.row_program import match_row_program
from relaxlite.passes.loops.transforms import (
    fuse,
    hoist_lets,
    less,
    masked_tail,
    prefetch_arrays,
    select_version,
    split,
    split_reduction,
    when_positive,
    with_nontemporal_stores,
    without_unit_loops,
)
from relaxlite.passes.loops.versioning import Unclamp, clamped_indices
from relaxlite.passes.products.blocks_grouped import groups_of
from relaxlite.passes.products.choice import DEFAULT, ONE_SUM, ScheduleChoice
from relaxlite.passes.products.reduction import reduction_block
from relaxlite.passes.products.scheduler import ENOUGH_WORK, OperandLayouts, ReductionScheduler, lanes_of
from relaxlite.passes.products.strategy_table import BY_NAME
from relaxlite.passes.products.winograd_tile import ORDINARY_ROWS
from relaxlite.passes.schedule.cpu.row_programs import can_alias_result, schedule_rows
from relaxlite.passes.schedule.cpu.transpose import MAX_TILE_LANES, all_of, tiled_transpose
from relaxlite.passes.schedule.primitives.trace import Step, parse_step, steps_of, with_steps
from relaxlite.records import dataclass
from relaxlite.target import Target

MAX_UNROLLED = 4  # vector iterations of a loop that is fully unrolled, so that values stay in registers for later loops


def schedule_cpu(module: IRModule, context: PassContext) -> IRModule:
    """Schedule every program for the CPU target: tile, vectorize and parallelize loops, choose layouts of constants.

    Programs in the tuning database use its choice. Outputs that the schedule excludes from aliasing an input leave a
    decision with the reason.
    """
    target, tuning = context.target, context.tuning

    def schedule(program: TensorProgram) -> TensorProgram:
        if program.attrs.get(SCHEDULED):
            return program
        choice = tuning.choice(program, target) if tuning is not None else DEFAULT
        if module.attrs.get(BATCH_INVARIANT):
            choice = replace(choice, sums=ONE_SUM)
        result: tuple[TensorProgram] = context.program_cache.get_or_compute(
            "schedule", program, repr(choice), lambda: (schedule_program(program, target, choice),)
        )
        return result[0]

    scheduled = map_programs(module, schedule)
    after = scheduled.programs()
    for name, program in module.programs().items():
        _note_operands(name, program, after[name], context)
        if not program.attrs.get(SCHEDULED):
            _note_strategies(name, after[name], context)
    return scheduled


def _note_strategies(name: str, program: TensorProgram, context: PassContext) -> None:
    """Record the strategies of a program's products, with their minimum numbers of rows, and the refused strategies."""
    for line in steps_of(program):
        if not line.startswith(("strategy(", "refuse(")):
            continue
        step = parse_step(line)
        options = dict(step.options)
        if step.name == "strategy":
            strategy = BY_NAME[str(step.args[0])]
            rounds = f"; rounds {strategy.rounds}" if strategy.rounds else ""
            reason = f"from {options['rows']} rows on: {strategy.summary}{rounds}"
            context.decide("strategy", f"{name} by {strategy.name}", True, reason)
        elif step.name == "refuse":
            context.decide("strategy", f"{name} by {step.args[0]}", False, str(options["reason"]))


def _note_operands(name: str, before: TensorProgram, after: TensorProgram, context: PassContext) -> None:
    """Record which outputs of a program cannot alias an input of their size, and why."""
    pairs, reasons = in_place_pairs(sink_aliasable_stores(before)) if before is not after else ((), ())
    for reason in reasons:
        context.decide("in_place", name, False, reason)
    for x, out in pairs:
        if (x, out) not in after.attrs.get(IN_PLACE, ()):  # type: ignore[operator]
            subject = f"{after.params[out].name} of {name} in {after.params[x].name}"
            reason = "its schedule computes elements twice, or stages other values in the result"
            context.decide("in_place", subject, False, reason)


def schedule_program(program: TensorProgram, target: Target, choice: ScheduleChoice = DEFAULT) -> TensorProgram:
    """Schedule one program for a target; a program that is scheduled already is returned unchanged.

    The result has the attributes of packed operands, prefetch distances, aliasing and the schedule trace.
    """
    if program.attrs.get(SCHEDULED):
        return program
    program = sink_aliasable_stores(program)
    pairs = _in_place(program)
    in_place = {(program.params[x], program.params[out]) for x, out in pairs}
    if program.num_outputs > 1 and not program.attrs.get(MIN_PREPARED_ROWS):  # its loops will be joined
        in_place = {(x, out) for x, out in in_place if read_only_by_writers(top_stages(program), x, out)}
    steps: list[Step] = []
    layouts = OperandLayouts()
    few_rows = replace(choice, rows=choice.rows or ORDINARY_ROWS) if program.attrs.get(MIN_PREPARED_ROWS) else choice
    reductions = ReductionScheduler(program, target, choice, few_rows, layouts, steps)
    rules = _Rules(program, target, reductions, steps, in_place)
    if program.attrs.get(MIN_PREPARED_ROWS):
        stages = [rules.variants(s) for s in top_stages(program)]
    else:
        stages = [rules.stage(hoist_lets(s)) for s in top_stages(program)]
    body = seq(*(join_parallel_loops(stages) if program.num_outputs > 1 else stages))
    packing = layouts.attrs(program.inputs)
    parallel = [s for s in walk_stmts(body) if isinstance(s, For) and s.kind == "parallel"]
    notes = dict.fromkeys([*steps, *(Step("parallelize", (loop.var.name,)) for loop in parallel)])
    aliases = tuple((x, out) for x, out in pairs if rules.keeps(program.params[x], program.params[out], body))
    old = {name: value for name, value in program.attrs.items() if name != IN_PLACE}
    attrs = with_steps(Attrs({**old, **packing, **({IN_PLACE: aliases} if aliases else {})}), notes)
    return replace(program, body=body, attrs=attrs)  # symbols keep their order, on which callers rely


def _in_place(program: TensorProgram) -> Pairs:
    """The pairs of inputs and outputs that may alias; for programs with strategies in branches, those declared by the
    pass that made the branches."""
    declared: Any = program.attrs.get(IN_PLACE, ())
    return declared if program.attrs.get(MIN_PREPARED_ROWS) else in_place_pairs(program)[0]


@dataclass(frozen=True, slots=True)
class _Rules:
    """Schedules the stages of one program and collects the attributes that follow from the chosen tiles."""

    program: TensorProgram
    target: Target
    reductions: ReductionScheduler
    steps: list[Step]  # the schedule trace
    in_place: set[tuple[Buffer, Buffer]]  # (input, output) that may alias; rules remove the pairs that they break
    staged: set[Buffer] = field(default_factory=set)  # outputs that hold local rows, for which `in_place` is checked

    def note(self, name: str, *args: str | int, **options: AttrValue) -> None:
        """Record a step in the schedule trace."""
        self.steps.append(Step(name, args, tuple(options.items())))

    def lanes(self, stmt: Stmt) -> int:
        """The number of vector lanes for the widest dtype in a statement."""
        return lanes_of(stmt, self.target)

    def keeps(self, x: Buffer, out: Buffer, body: Stmt) -> bool:
        """Whether an output may still alias an input with the scheduled loops."""
        return (x, out) in self.in_place and (out in self.staged or has_only_final_stores(body, out))

    def _forbid(self, out: Buffer, inputs: Iterable[Buffer]) -> None:
        self.in_place.difference_update({(x, out) for x in inputs})

    def stage(self, stage: Stmt) -> Stmt:
        """Schedule one top-level stage, with a version without clamped indices if it has some."""
        if calls_library(stage):
            return self.beside_library(stage)
        clamps = clamped_indices(stage)
        if not clamps:
            return self.nest(stage)
        conds = [less(extent - 1, limit + 1) for (_, limit), extent in clamps.items()]
        usual = reduce(lambda a, b: Binary("and", a, b), conds)
        return IfThenElse(usual, self.nest(Unclamp(clamps).stmt(stage)), self.nest(stage))

    def beside_library(self, stage: IfThenElse) -> Stmt:
        """Schedule the loops around a library call: its epilogue and its fallback.

        Constants are not packed, as the library reads them in their original layout.
        """
        rules = replace(self, reductions=replace(self.reductions, packs=False))

        def scheduled(stmt: Stmt) -> Stmt:
            if isinstance(stmt, Allocate) and stmt.buffer.scope == "global":
                return replace(stmt, body=scheduled(stmt.body))
            parts = stmt.stmts if isinstance(stmt, Seq) else (stmt,)
            return seq(*(s if _is_library_call(s) else rules.stage(hoist_lets(s)) for s in parts))

        return replace(stage, then=scheduled(stage.then), other=None if stage.other is None else scheduled(stage.other))

    def variants(self, stmt: Stmt) -> Stmt:
        """Schedule strategies in branches; parallel loops in them are scheduled already."""
        if isinstance(stmt, Allocate):
            widened = self.reductions.widened(stmt)
            return replace(stmt, body=self.variants(stmt.body)) if widened is None else widened
        if isinstance(stmt, IfThenElse):
            then = self.variants(stmt.then)
            return replace(stmt, then=then, other=None if stmt.other is None else self.variants(stmt.other))
        if isinstance(stmt, Seq):
            return seq(*join_parallel_loops([self.variants(s) for s in stmt.stmts]))
        is_scheduled = isinstance(stmt, Store) or (isinstance(stmt, For) and stmt.kind == "parallel")
        return stmt if is_scheduled else self.stage(stmt)

    def nest(self, stage: Stmt) -> Stmt:
        """Schedule a stage by the first rule that matches."""
        if _never_runs(stage):
            return seq()  # an empty nest
        block = reduction_block(stage)
        if block is not None:
            return self.reductions.reduction(block)
        groups = groups_of(stage)
        grouped = None if groups is None else seq() if _never_runs(groups.nest) else self.reductions.grouped(groups)
        if grouped is not None:
            return grouped
        rows = None if self.program.attrs.get(WRITES_INPUTS) else match_row_program(stage)
        if rows is not None:
            prefetches = self.target.cpu_facts.prefetches_next_row
            rows = replace(rows, prefetches_next=prefetches, cores=None if prefetches else self.target.cores)
        scheduled = None if rows is None else schedule_rows(rows, self.lanes(stage), self.target.l3_bytes)
        if rows is not None and scheduled is not None:
            self.note("row_program", lanes=self.lanes(stage))
            out = rows.result.buffer
            self._forbid(out, [x for x, to in self.in_place if to is out and not can_alias_result(rows, x)])
            self.staged.add(out)
            return scheduled
        marked = mark_parallel(without_unit_loops(stage))
        outer = perfect_nest(marked)
        if outer.loops and _is_worth_a_task(outer.body) and all(loop.kind == "parallel" for loop in outer.loops):
            return collapse_parallel(outer.loops, make_serial(self.inner(outer.body)))
        usual = self.streamed(stage, outermost_parallel(self.inner(collapse_outer_loops(self.fused(marked)))))
        return self.transposed(stage, usual)

    def transposed(self, stage: Stmt, usual: Stmt) -> Stmt:
        """Tile a nest with transposed loads, with the usual schedule as fallback for sizes below a tile."""
        store = plain_store(perfect_nest(stage))
        if store is None or store.buffer.scope != "global":
            return usual
        tiling = tiled_transpose(self.fused(stage), min(MAX_TILE_LANES, self.lanes(stage)))
        if tiling is None:
            return usual
        conditions, tiles = tiling
        self._forbid(store.buffer, self.program.inputs)  # overlapping tiles compute elements twice
        return IfThenElse(all_of(conditions), tiles, usual) if conditions else tiles

    def streamed(self, stage: Stmt, scheduled: Stmt) -> Stmt:
        """Add a version with nontemporal stores for results larger than the L3 cache."""
        store = injective_store(perfect_nest(stage))
        if store is None or store.buffer not in self.program.outputs:
            return scheduled
        self.note("store_past_caches", store.buffer.name)
        max_elements = self.target.l3_bytes // dtypes.itemsize(store.buffer.dtype)
        nontemporal = with_nontemporal_stores(scheduled, store.buffer)
        if self.target.cpu_facts.elementwise_prefetch_bytes:
            nontemporal = prefetch_arrays(nontemporal, store.buffer, self.target.cpu_facts.elementwise_prefetch_bytes)
        return select_version(less(max_elements, product(store.buffer.shape)), nontemporal, scheduled)

    # Generic nests

    def fused(self, stmt: Stmt) -> Stmt:
        """Fuse perfectly nested loops if all accesses stay linear."""
        if not isinstance(stmt, For):
            return stmt
        inner = self.fused(stmt.body)
        stmt = stmt if inner is stmt.body else replace(stmt, body=inner)
        if (
            isinstance(inner, For)
            and inner.kind == stmt.kind
            and stmt.var not in inner.extent.free_vars()
            and can_fuse(inner.body, stmt.var, inner.var, inner.extent)
        ):
            self.note("fuse", stmt.var.name, inner.var.name)
            return fuse(stmt, inner)
        return stmt

    def inner(self, stmt: Stmt) -> Stmt:
        """Vectorize innermost loops, and tile nested reductions, such as those in the steps of a recurrence."""
        if _never_runs(stmt):
            return seq()
        if isinstance(stmt, For) and not any(isinstance(s, For) for s in walk_stmts(stmt.body)):
            return self.vectorized(stmt)
        block = reduction_block(stmt) if isinstance(stmt, For) else None
        if block is not None:
            assert isinstance(stmt, For)
            return self.reductions.step_reduction(block, unknown=1 if stmt.kind == "serial" else ENOUGH_WORK)
        if isinstance(stmt, Seq):
            return seq(*(self.inner(s) for s in stmt.stmts))
        if isinstance(stmt, StmtWithBody):
            return replace(stmt, body=self.inner(stmt.body))
        return stmt

    def vectorized(self, loop: For) -> Stmt:
        """Vectorize an innermost loop if that is legal and its accesses are contiguous."""
        lanes = self.lanes(loop.body)
        if lanes == 1 or as_int(loop.extent) == 1:
            return loop
        if is_scalar_reduction(loop) and is_contiguous(loop):
            store = loop.body
            assert isinstance(store, Store) and store.combine is not None
            max_sums = self.reductions.partial_sums
            self.note("split_reduction", loop.var.name, lanes, max_sums)
            partial = max(1, min(max_sums, (as_int(loop.extent) or lanes * max_sums) // lanes))
            return split_reduction(loop, lanes, partial, identity(store.combine, store.buffer.dtype))
        if not is_independent(loop) or not is_contiguous(loop):
            return loop
        short = as_int(loop.extent) or lanes
        if short < lanes and short.bit_count() == 1:
            lanes = short
        self.note("vectorize", loop.var.name, lanes=lanes)
        main, inner, start, count = split(loop, lanes)
        steps = as_int(main.extent)
        is_short = steps is not None and steps <= MAX_UNROLLED
        main = replace(
            main, body=_with_kind(main.body, inner, "vectorized"), kind="unrolled" if is_short else main.kind
        )
        return seq(*when_positive(main.extent, main), *when_positive(count, masked_tail(loop, start, lanes)))


def _never_runs(stmt: Stmt) -> bool:
    """Whether a loop of the nest has extent 0 for all sizes."""
    return any(as_int(loop.extent) == 0 for loop in perfect_nest(stmt).loops)


def _is_library_call(stmt: Stmt) -> bool:
    """Whether a statement is a library call, perhaps in loops, without stores."""
    return any(isinstance(s, CallLibrary) for s in walk_stmts(stmt)) and not any(stores(stmt))


def _is_worth_a_task(body: Stmt) -> bool:
    """Whether an iteration is large enough for a loop collapsed with division of the index: it allocates a buffer that
    is not a scalar."""
    return isinstance(body, Allocate) and bool(body.buffer.shape)


def _with_kind(stmt: Stmt, var: SymVar, kind: str) -> Stmt:
    assert isinstance(stmt, For)
    return replace(stmt, kind=kind)  # type: ignore[arg-type]
