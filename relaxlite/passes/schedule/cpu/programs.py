"""Schedule rules for CPUs: which primitives a loop nest gets, from its accesses and the target's registers.

    row program         one loop over rows, several over each row (rows.py)
    transpose           tiles that change places in registers (transpose.py)
    injective nest      fuse loops that stay linear; vectorize the innermost; run the outermost in parallel
    reduction           a register tile: rows x vectors of outputs accumulate while the reduced loops run inside
                        (matmul, convolution, column sums), or, where only a reduced loop is contiguous, partial sums
                        in vector lanes (row sums, dot products)
    anything else       innermost loops vectorized where their iterations are independent or combine into one element

Shapes may be symbolic: tiles have an exact tail, masked along vectors and narrower along rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from functools import reduce
from typing import Any

from relaxlite import dtypes
from relaxlite.ir.attributes import (
    BATCH_INVARIANT,
    IN_PLACE,
    MIN_PREPARED_ROWS,
    SCHEDULED,
    WRITES_INPUTS,
)
from relaxlite.ir.expr import Attrs, AttrValue
from relaxlite.ir.module import IRModule
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    CallLibrary,
    Enclosing,
    For,
    IfThenElse,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    seq,
)
from relaxlite.ir.program_visitor import stores, walk_stmts
from relaxlite.ir.symbolic import SymVar, as_int, product
from relaxlite.ir.visitor import map_programs
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.access import can_fuse
from relaxlite.passes.loops.edits import (
    fuse,
    hoist_lets,
    less,
    masked_rest,
    past_caches,
    prefetch_arrays,
    split,
    split_reduction,
    when_positive,
    with_variant,
    without_unit_loops,
)
from relaxlite.passes.loops.in_place import Pairs, in_place_pairs, keeps_order, with_late_stores
from relaxlite.passes.loops.join_parallel import joined_loops, reads_only_where_written
from relaxlite.passes.loops.parallel import (
    combines_into_one,
    is_contiguous,
    is_independent,
    mark_parallel,
    outermost_parallel,
    parallel_nest,
    serial,
    share_two_loops,
)
from relaxlite.passes.loops.pattern import calls_library, injective_store, perfect_nest, plain_store, top_stages
from relaxlite.passes.loops.row_program import rows_of
from relaxlite.passes.loops.versioning import Unclamp, clamped_loops
from relaxlite.passes.products.blocks_grouped import groups_of
from relaxlite.passes.products.choice import DEFAULT, ONE_SUM, ScheduleChoice
from relaxlite.passes.products.reduction import (
    reduction_block,
)
from relaxlite.passes.products.scheduler import ENOUGH_WORK, OperandLayouts, ReductionScheduler, lanes_of
from relaxlite.passes.products.strategy_table import BY_NAME
from relaxlite.passes.products.winograd_tile import ORDINARY_ROWS
from relaxlite.passes.schedule.cpu.rows import reads_in_time, schedule_rows
from relaxlite.passes.schedule.cpu.transpose import MAX_TILE_LANES, both, tiled_transpose
from relaxlite.passes.schedule.primitives.trace import Step, parse_step, steps_of, with_steps
from relaxlite.records import dataclass
from relaxlite.target import Target

MAX_UNROLLED = 4  # vectors of a loop as long as it is known to be: what one leaves behind the next finds in registers


def schedule_cpu(module: IRModule, context: PassContext) -> IRModule:
    """Arrange the loops of every program for the target's vectors, caches and cores."""
    target, tuning = context.target, context.tuning

    def schedule(program: TensorProgram) -> TensorProgram:
        if program.attrs.get(SCHEDULED):
            return program
        choice = tuning.choice(program, target) if tuning is not None else DEFAULT
        if module.attrs.get(BATCH_INVARIANT):
            choice = replace(choice, sums=ONE_SUM)
        made: tuple[TensorProgram] = context.program_cache.recall(
            "schedule", program, repr(choice), lambda: (schedule_program(program, target, choice),)
        )
        return made[0]

    scheduled = map_programs(module, schedule)
    after = scheduled.programs()
    for name, program in module.programs().items():
        _note_operands(name, program, after[name], context)
        if not program.attrs.get(SCHEDULED):
            _note_strategies(name, after[name], context)
    return scheduled


def _note_strategies(name: str, program: TensorProgram, context: PassContext) -> None:
    """How the products of a program are computed, from how many rows on, and which strategies were refused."""
    for step in map(parse_step, steps_of(program)):
        options = dict(step.options)
        if step.name == "strategy":
            strategy = BY_NAME[str(step.args[0])]
            reason = f"from {options['rows']} rows on: {strategy.summary}"
            context.decide("strategy", f"{name} by {strategy.name}", True, reason)
        elif step.name == "refuse":
            context.decide("strategy", f"{name} by {step.args[0]}", False, str(options["reason"]))


def _note_operands(name: str, before: TensorProgram, after: TensorProgram, context: PassContext) -> None:
    """Which inputs the results of a program cannot take over, and why."""
    pairs, reasons = in_place_pairs(with_late_stores(before)) if before is not after else ((), ())
    for reason in reasons:
        context.decide("in_place", name, False, reason)
    for x, out in pairs:
        if (x, out) not in after.attrs.get(IN_PLACE, ()):  # type: ignore[operator]
            subject = f"{after.params[out].name} of {name} in {after.params[x].name}"
            reason = "its schedule computes elements twice, or stages other values in the result"
            context.decide("in_place", subject, False, reason)


def schedule_program(program: TensorProgram, target: Target, choice: ScheduleChoice = DEFAULT) -> TensorProgram:
    """The same program with loops arranged for the target."""
    if program.attrs.get(SCHEDULED):
        return program
    program = with_late_stores(program)
    pairs = _in_place(program)
    in_place = {(program.params[x], program.params[out]) for x, out in pairs}
    if program.num_outputs > 1 and not program.attrs.get(MIN_PREPARED_ROWS):  # whose loops are joined
        in_place = {(x, out) for x, out in in_place if reads_only_where_written(top_stages(program), x, out)}
    steps: list[Step] = []
    layouts = OperandLayouts()
    few_rows = replace(choice, rows=choice.rows or ORDINARY_ROWS) if program.attrs.get(MIN_PREPARED_ROWS) else choice
    reductions = ReductionScheduler(program, target, choice, few_rows, layouts, steps)
    rules = _Rules(program, target, reductions, steps, in_place)
    if program.attrs.get(MIN_PREPARED_ROWS):
        stages = [rules.variants(s) for s in top_stages(program)]
    else:
        stages = [rules.stage(hoist_lets(s)) for s in top_stages(program)]
    body = seq(*(joined_loops(stages) if program.num_outputs > 1 else stages))
    packing = layouts.attrs(program.inputs)
    parallel = [s for s in walk_stmts(body) if isinstance(s, For) and s.kind == "parallel"]
    notes = dict.fromkeys([*steps, *(Step("parallelize", (loop.var.name,)) for loop in parallel)])
    kept = tuple((x, out) for x, out in pairs if rules.keeps(program.params[x], program.params[out], body))
    old = {name: value for name, value in program.attrs.items() if name != IN_PLACE}
    attrs = with_steps(Attrs({**old, **packing, **({IN_PLACE: kept} if kept else {})}), notes)
    return replace(program, body=body, attrs=attrs)  # and the symbols in their order, which the callers know


def _in_place(program: TensorProgram) -> Pairs:
    """Which operands results may take over; where they are written in branches, the pass that made these says it."""
    found: Any = program.attrs.get(IN_PLACE, ())
    return found if program.attrs.get(MIN_PREPARED_ROWS) else in_place_pairs(program)[0]


@dataclass(frozen=True, slots=True)
class _Rules:
    program: TensorProgram
    target: Target
    reductions: ReductionScheduler
    steps: list[Step]  # what was done, to be read beside the program
    in_place: set[tuple[Buffer, Buffer]]  # (input, output) that may share memory; what a rule would break, it takes out
    staged: set[Buffer] = field(default_factory=set)  # outputs that hold intermediate values, which was minded

    def note(self, name: str, *args: str | int, **options: AttrValue) -> None:
        self.steps.append(Step(name, args, tuple(options.items())))

    def lanes(self, stmt: Stmt) -> int:
        return lanes_of(stmt, self.target)

    def keeps(self, x: Buffer, out: Buffer, body: Stmt) -> bool:
        """Whether the output may still take over the input's memory when the loops are scheduled like this."""
        return (x, out) in self.in_place and (out in self.staged or keeps_order(body, out))

    def _forbid(self, out: Buffer, inputs: Iterable[Buffer]) -> None:
        self.in_place.difference_update({(x, out) for x in inputs})

    def stage(self, stage: Stmt) -> Stmt:
        if calls_library(stage):
            return self.beside_library(stage)
        clamps = clamped_loops(stage)
        if not clamps:
            return self.nest(stage)
        conds = [less(extent - 1, limit + 1) for (_, limit), extent in clamps.items()]
        usual = reduce(lambda a, b: Binary("and", a, b), conds)
        return IfThenElse(usual, self.nest(Unclamp(clamps).stmt(stage)), self.nest(stage))

    def beside_library(self, stage: IfThenElse) -> Stmt:
        """The loops behind the call of a library, and those for where it is not called. It reads constants as they are,
        so the loops do too."""
        rules = replace(self, reductions=replace(self.reductions, packs=False))

        def scheduled(stmt: Stmt) -> Stmt:
            if isinstance(stmt, Allocate) and stmt.buffer.scope == "global":
                return replace(stmt, body=scheduled(stmt.body))
            parts = stmt.stmts if isinstance(stmt, Seq) else (stmt,)
            return seq(*(s if _calls(s) else rules.stage(hoist_lets(s)) for s in parts))

        return replace(stage, then=scheduled(stage.then), other=None if stage.other is None else scheduled(stage.other))

    def variants(self, stmt: Stmt) -> Stmt:
        """Stages of which one or the other runs. What is parallel already has been scheduled."""
        if isinstance(stmt, Allocate):
            made = self.reductions.widened(stmt)
            return replace(stmt, body=self.variants(stmt.body)) if made is None else made
        if isinstance(stmt, IfThenElse):
            then = self.variants(stmt.then)
            return replace(stmt, then=then, other=None if stmt.other is None else self.variants(stmt.other))
        if isinstance(stmt, Seq):
            return seq(*joined_loops([self.variants(s) for s in stmt.stmts]))
        is_scheduled = isinstance(stmt, Store) or (isinstance(stmt, For) and stmt.kind == "parallel")
        return stmt if is_scheduled else self.stage(stmt)

    def nest(self, stage: Stmt) -> Stmt:
        if _never_runs(stage):
            return seq()  # nothing to tile
        block = reduction_block(stage)
        if block is not None:
            return self.reductions.reduction(block)
        groups = groups_of(stage)
        made = None if groups is None else seq() if _never_runs(groups.nest) else self.reductions.grouped(groups)
        if made is not None:
            return made
        rows = None if self.program.attrs.get(WRITES_INPUTS) else rows_of(stage)
        if rows is not None:
            asks = self.target.cpu_facts.prefetches_next_row
            rows = replace(rows, asks=asks, cores=None if asks else self.target.cores)
        scheduled = None if rows is None else schedule_rows(rows, self.lanes(stage), self.target.l3_bytes)
        if rows is not None and scheduled is not None:
            self.note("row_program", lanes=self.lanes(stage))
            out = rows.result.buffer
            self._forbid(out, [x for x, to in self.in_place if to is out and not reads_in_time(rows, x)])
            self.staged.add(out)
            return scheduled
        marked = mark_parallel(without_unit_loops(stage))
        outer = perfect_nest(marked)
        if outer.loops and _is_worth_a_task(outer.body) and all(loop.kind == "parallel" for loop in outer.loops):
            return parallel_nest(outer.loops, serial(self.inner(outer.body)))
        usual = self.streamed(stage, outermost_parallel(self.inner(share_two_loops(self.fused(marked)))))
        return self.transposed(stage, usual)

    def transposed(self, stage: Stmt, usual: Stmt) -> Stmt:
        """In tiles, where the nest reads along another loop than it writes and the tiles fit."""
        store = plain_store(perfect_nest(stage))
        if store is None or store.buffer.scope != "global":
            return usual
        found = tiled_transpose(self.fused(stage), min(MAX_TILE_LANES, self.lanes(stage)))
        if found is None:
            return usual
        conditions, tiles = found
        self._forbid(store.buffer, self.program.inputs)  # where tiles overlap, elements are computed twice
        return IfThenElse(both(conditions), tiles, usual) if conditions else tiles

    def streamed(self, stage: Stmt, scheduled: Stmt) -> Stmt:
        """Where the result is larger than the caches, it is stored past them."""
        store = injective_store(perfect_nest(stage))
        if store is None or store.buffer not in self.program.outputs:
            return scheduled
        self.note("store_past_caches", store.buffer.name)
        most = self.target.l3_bytes // dtypes.itemsize(store.buffer.dtype)
        past = past_caches(scheduled, store.buffer)
        if self.target.cpu_facts.elementwise_prefetch_bytes:
            past = prefetch_arrays(past, store.buffer, self.target.cpu_facts.elementwise_prefetch_bytes)
        return with_variant(less(most, product(store.buffer.shape)), past, scheduled)

    # Generic nests

    def fused(self, stmt: Stmt) -> Stmt:
        """Fuse perfectly nested loops whose accesses stay linear."""
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
        """Vectorize innermost loops; tile the reductions among them, such as those of a recurrence and of its steps."""
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
        if isinstance(stmt, Enclosing):
            return replace(stmt, body=self.inner(stmt.body))
        return stmt

    def vectorized(self, loop: For) -> Stmt:
        lanes = self.lanes(loop.body)
        if lanes == 1 or as_int(loop.extent) == 1:
            return loop
        if combines_into_one(loop) and is_contiguous(loop):
            store = loop.body
            assert isinstance(store, Store) and store.combine is not None
            most = self.reductions.partial_sums
            self.note("split_reduction", loop.var.name, lanes, most)
            partial = max(1, min(most, (as_int(loop.extent) or lanes * most) // lanes))
            return split_reduction(loop, lanes, partial, identity(store.combine, store.buffer.dtype))
        if not is_independent(loop) or not is_contiguous(loop):
            return loop
        short = as_int(loop.extent) or lanes
        if short < lanes and short.bit_count() == 1:
            lanes = short
        self.note("vectorize", loop.var.name, lanes=lanes)
        main, inner, start, count = split(loop, lanes)
        steps = as_int(main.extent)
        few = steps is not None and steps <= MAX_UNROLLED
        main = replace(main, body=_with_kind(main.body, inner, "vectorized"), kind="unrolled" if few else main.kind)
        return seq(*when_positive(main.extent, main), *when_positive(count, masked_rest(loop, start, lanes)))


def _never_runs(stmt: Stmt) -> bool:
    """Whether a loop of the nest has no iterations, whatever the sizes are."""
    return any(as_int(loop.extent) == 0 for loop in perfect_nest(stmt).loops)


def _calls(stmt: Stmt) -> bool:
    """Whether this is the call of a library and the loops round it."""
    return any(isinstance(s, CallLibrary) for s in walk_stmts(stmt)) and not any(stores(stmt))


def _is_worth_a_task(body: Stmt) -> bool:
    """Whether one iteration does so much that finding its place among all iterations costs nothing: it has blocks of
    its own to work on."""
    return isinstance(body, Allocate) and bool(body.buffer.shape)


def _with_kind(stmt: Stmt, var: SymVar, kind: str) -> Stmt:
    assert isinstance(stmt, For)
    return replace(stmt, kind=kind)  # type: ignore[arg-type]
