"""Primitives on buffers: stage a part in a copy, compute a buffer where it is used, take a reduction apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from relaxlite.errors import ScheduleError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Check,
    For,
    IfThenElse,
    Literal,
    Load,
    Scope,
    Select,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads, stores, walk_stmts
from relaxlite.ir.symbolic import SymVar, as_int, product
from relaxlite.passes.loops import edits as rewrite
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.schedule.primitives.dependence import accesses_of, carried_by
from relaxlite.passes.schedule.primitives.loops import check_concurrent
from relaxlite.passes.schedule.primitives.region import Redirect, box_of, copy_loops, guarded, inside, overwrites
from relaxlite.passes.schedule.primitives.tree import analyzer_at, describe, path_to, replaced, with_ranges

MAX_LOCAL_BYTES = 1 << 16  # of a buffer that compute_at makes local


def stage(
    root: Stmt, buffer: Buffer, loop: For, *, scope: Scope = "local", order: Sequence[int] | None = None
) -> tuple[Stmt, Buffer]:
    """In each iteration of the loop work on a copy of the part of the buffer that it touches:

    for i: body(b)  =>  for i: { c[...]; c = part of b; body(c); part of b = c }

    What is copied in and out is what the body needs: nothing comes in that is stored before it is read, and nothing
    goes out where the body only reads. `order` permutes the copy's dimensions: order=(1, 0) is a transposed copy. A
    "local" copy has a constant size; a "global" one is scratch memory. Gives the new root and the copy.
    """
    box = box_of(loop.body, buffer)
    order = tuple(range(len(buffer.shape))) if order is None else tuple(order)
    if sorted(order) != list(range(len(buffer.shape))):
        raise ScheduleError(
            f"order {order} of a copy of {buffer.name} is no permutation of its {len(order)} dimensions"
        )
    if scope == "local" and not all(size.is_const for size in box.size):
        shape = ", ".join(map(str, box.size))
        raise ScheduleError(
            f"a local copy of {buffer.name} in loop {loop.var.name!r} would have the shape ({shape}); split() loops by "
            "constants, or use scope='global'"
        )
    copy = Buffer(f"{buffer.name}_copy", tuple(box.size[d] for d in order), buffer.dtype, scope)
    touching = [access for access in accesses_of(loop.body) if access.buffer is buffer]
    is_stored = any(isinstance(access.node, Store) for access in touching)
    is_needed = not is_stored or not overwrites(loop.body, buffer, box)
    analyzer = with_ranges(analyzer_at(root, loop), [loop])

    def transfer(*, into: bool) -> Stmt:
        loops, known = copy_loops(f"{buffer.name}_", box.size, analyzer)
        at = tuple(start + x.var for start, x in zip(box.start, loops, strict=True))
        here = tuple(loops[d].var for d in order)
        move = Store(copy, here, Load(buffer, at)) if into else Store(buffer, at, Load(copy, here))
        return rewrite.nest([loops[d] for d in order] if not into else loops, guarded(inside(buffer, at, known), move))

    body = Redirect(buffer, copy, box.start, order).stmt(loop.body)
    parts = [transfer(into=True)] * is_needed + [body] + [transfer(into=False)] * is_stored
    new = replace(loop, body=Allocate(copy, seq(*parts)))
    root = replaced(root, loop, new)
    check_concurrent(root, new)
    return root, copy


def compute_at(root: Stmt, allocation: Allocate, loop: For) -> tuple[Stmt, Buffer]:
    """Compute the part of an allocated buffer that an iteration of the loop reads inside of that iteration:

    t[...]; for j in n: t[j] = f(j); ... for i: use(t[part(i)])
        =>  ... for i: { c[...]; for j in part(i): c[j] = f(j); use(c) }

    The statement that computes the buffer is a nest over its dimensions and nothing else; only the loop reads it.
    Gives the new root and the buffer that takes the place of t.
    """
    buffer = allocation.buffer
    producer = _producer_of(allocation, loop)
    _check_used_only_in(allocation, producer, loop)
    nest = _nest_over(producer, buffer)
    _check_inputs_stay(producer, _after(allocation, producer), buffer)
    box = box_of(loop.body, buffer)
    size = product(box.size)
    count = as_int(size)
    is_small = count is not None and all(d.is_const for d in box.size) and count * 8 <= MAX_LOCAL_BYTES
    part = Buffer(buffer.name, box.size, buffer.dtype, "local" if is_small else "global")
    loops, known = copy_loops(f"{buffer.name}_", box.size, with_ranges(analyzer_at(root, loop), [loop]))
    at = {x.var: box.start[d] + loops[d].var for d, x in enumerate(nest)}
    element = Substitute(at, fresh=True).stmt(_body_of(nest, producer))
    element = Redirect(buffer, part, box.start, range(len(buffer.shape))).stmt(element)
    cond = inside(buffer, [box.start[d] + x.var for d, x in enumerate(loops)], known)
    make = rewrite.nest(loops, guarded(cond, element))
    use = Redirect(buffer, part, box.start, range(len(buffer.shape))).stmt(loop.body)
    new = replace(loop, body=Allocate(part, seq(make, use)))
    changed = replaced(replaced(allocation.body, loop, new), producer, Seq(()))
    root = replaced(root, allocation, changed)
    check_concurrent(root, new)
    return root, part


def _producer_of(allocation: Allocate, loop: For) -> Stmt:
    """The statement that stores the buffer, before the one that holds the loop."""
    body = allocation.body
    while isinstance(body, Allocate):  # several allocations stand inside each other
        body = body.body
    name = allocation.buffer.name
    if not isinstance(body, Seq):
        raise ScheduleError(f"buffer {name} is computed and used by one statement, {describe(body)}; nothing to move")
    makers = [k for k, s in enumerate(body.stmts) if any(x.buffer is allocation.buffer for x in stores(s))]
    users = [k for k, s in enumerate(body.stmts) if path_to(s, loop)]
    if len(makers) != 1 or not users or makers[0] >= users[0]:
        raise ScheduleError(
            f"buffer {name} is not computed by one statement before the one with loop {loop.var.name!r}; distribute() "
            f"takes "
            "statements apart"
        )
    return body.stmts[makers[0]]


def _nest_over(producer: Stmt, buffer: Buffer) -> list[For]:
    """The producer's outer loops in the order of the buffer's dimensions."""
    nest = perfect_nest(producer)
    loops = {loop.var: loop for loop in nest.loops}
    wanted = next((s.indices for s in stores(producer) if s.buffer is buffer), ())
    found = [loops[v] for v in wanted if isinstance(v, SymVar) and v in loops]
    same = all(s.indices == wanted for s in stores(producer) if s.buffer is buffer)
    is_over = len(found) == len(buffer.shape) == len({loop.var for loop in found}) and same
    sizes = is_over and all(
        Analyzer().can_prove_equal(loop.extent, dim) for loop, dim in zip(found, buffer.shape, strict=True)
    )
    if not sizes or set(nest.loops[: len(found)]) != set(found):
        raise ScheduleError(
            f"buffer {buffer.name} is not computed element by element in a nest over its dimensions "
            f"({', '.join(map(str, buffer.shape))}); reorder() its loops outermost"
        )
    return found


def _body_of(nest: Sequence[For], producer: Stmt) -> Stmt:
    for _ in nest:
        assert isinstance(producer, For)
        producer = producer.body
    return producer


def _check_used_only_in(allocation: Allocate, producer: Stmt, loop: For) -> None:
    buffer = allocation.buffer
    uses = [a for a in accesses_of(allocation.body) if a.buffer is buffer]
    makes = [a for a in accesses_of(producer) if a.buffer is buffer]
    here = [a for a in accesses_of(loop.body) if a.buffer is buffer]
    if any(isinstance(a.node, Store) for a in here) or len(uses) != len(makes) + len(here):
        raise ScheduleError(
            f"buffer {buffer.name} is used outside of loop {loop.var.name!r} too, or stored in it; name a loop round "
            f"all "
            "of its uses, which only reads it"
        )
    if any(isinstance(a.node, Load) or a.combine is not None for a in makes):
        raise ScheduleError(f"buffer {buffer.name} is computed from itself; decompose_reduction() is for reductions")


def _after(allocation: Allocate, producer: Stmt) -> Stmt:
    """The statements that follow the producer while the buffer lives."""
    body = allocation.body
    while not isinstance(body, Seq):
        assert isinstance(body, Allocate)
        body = body.body
    return seq(*body.stmts[body.stmts.index(producer) + 1 :])


def _check_inputs_stay(producer: Stmt, after: Stmt, buffer: Buffer) -> None:
    """What the producer reads is the same wherever it runs after its old place, and it stores nothing else."""
    outside = [a for a in accesses_of(producer) if a.buffer is not buffer]
    also = next((a for a in outside if isinstance(a.node, Store)), None)
    if also is not None:
        raise ScheduleError(f"computing {buffer.name} also does {also}; distribute() takes the two apart")
    if any(isinstance(stmt, Check) for stmt in walk_stmts(producer)):
        raise ScheduleError(f"computing {buffer.name} checks its operands, which must happen whether it is used or not")
    read = {a.buffer for a in outside}
    for store in stores(after):
        if store.buffer in read:
            raise ScheduleError(
                f"{buffer.name} is computed from {store.buffer.name}, which is stored to after that; stage() keeps a "
                f"copy"
            )


# Reductions


def decompose_reduction(root: Stmt, block: Allocate, loops: Sequence[For]) -> tuple[Stmt, Buffer]:
    """Move loops from around a block of one local element into each of its statements, innermost:

    for i: { t[]; t = init; for k: t += v(i, k); use(t) }
        =>  { t[n]; for i: t[i] = init;  for k: for i: t[i] += v(i, k);  for i: use(t[i]) }

    `loops` are the innermost loops round the block, of constant extents, whose iterations are independent. A condition
    between them and the block (of predicate()) goes to each statement; in the reduction it only keeps loads from
    leaving their buffers: elements that it excludes hold garbage, which nobody reads. Gives the new root and t.
    """
    element = block.buffer
    cond = _check_block(root, block, loops)
    wide = Buffer(element.name, tuple(loop.extent for loop in loops), element.dtype, "local")
    at = tuple(loop.var for loop in loops)
    known = with_ranges(analyzer_at(root, loops[0]), loops)
    stmts = block.body.stmts if isinstance(block.body, Seq) else (block.body,)
    parts: list[Stmt] = []
    for stmt in stmts:
        new = rewrite._Widen(element, wide, at).stmt(stmt)
        if cond is not None:
            new = _conditional(new, cond, wide, known)
        parts.append(rewrite._sink(loops, new))
    new_block = Allocate(wide, seq(*parts))
    root = replaced(root, loops[0], new_block)
    check_concurrent(root, new_block)
    return root, wide


def _check_block(root: Stmt, block: Allocate, loops: Sequence[For]) -> Value | None:
    """The condition between the loops and the block. Raises ScheduleError where the loops cannot move inside."""
    name = block.buffer.name
    if block.buffer.shape or not loops:
        raise ScheduleError(f"{name} is no single element of a reduction with loops round it")
    for outer, inner in pairwise(loops):
        if outer.body is not inner:
            raise ScheduleError(
                f"loops {outer.var.name!r} and {inner.var.name!r} do not stand directly inside each other; name the "
                f"loops "
                f"round {name} from outside inwards, and reorder() them next to it"
            )
    inner_body = loops[-1].body
    cond = inner_body.cond if isinstance(inner_body, IfThenElse) and inner_body.other is None else None
    holder = inner_body.then if isinstance(inner_body, IfThenElse) and cond is not None else inner_body
    if holder is not block:
        raise ScheduleError(
            f"the body of loop {loops[-1].var.name!r} is {describe(holder)}, not the reduction into {name}; reorder() "
            f"the "
            "loop next to it"
        )
    if cond is not None and any(True for _ in loads(IfThenElse(cond, Seq(())))):
        raise ScheduleError(f"the condition round the reduction into {name} depends on data; only indices may decide")
    for loop in loops:
        if not loop.extent.is_const:
            raise ScheduleError(
                f"loop {loop.var.name!r} has {loop.extent} iterations, and {name} would have as many elements; "
                f"split() off "
                "a constant number"
            )
        dependence = carried_by(loop)
        if dependence is not None:
            raise ScheduleError(f"the iterations of loop {loop.var.name!r} are not independent: {dependence}")
    moved = {loop.var for loop in loops}
    for stmt in walk_stmts(block.body):
        if isinstance(stmt, For) and moved & set(stmt.extent.free_vars()):
            raise ScheduleError(
                f"loop {stmt.var.name!r} inside of the reduction into {name} has the extent {stmt.extent}, which "
                f"changes "
                "with a loop that would go inside of it; predicate() makes extents constant"
            )
        if not isinstance(stmt, For | Seq | Store):
            if isinstance(stmt, IfThenElse) and stmt.other is None:
                continue
            raise ScheduleError(f"the reduction into {name} holds {describe(stmt)}; only loops and stores can be moved")
    return cond


def _conditional(stmt: Stmt, cond: Value, wide: Buffer, known: Analyzer) -> Stmt:
    """A statement under a condition. A store into the wide element itself needs none where its loads are safe."""
    if isinstance(stmt, For):
        return replace(stmt, body=_conditional(stmt.body, cond, wide, with_ranges(known, [stmt])))
    if isinstance(stmt, Store) and stmt.buffer is wide:
        return replace(stmt, value=_SafeLoads(cond, wide, known).value(stmt.value))
    return IfThenElse(cond, stmt)


class _SafeLoads(ProgramRewriter):
    """Loads that might leave their buffer when the condition does not hold become conditional."""

    def __init__(self, cond: Value, wide: Buffer, known: Analyzer) -> None:
        super().__init__()
        self._cond, self._wide, self._known = cond, wide, known

    def _value(self, value: Value) -> Value:
        if isinstance(value, Select):
            return Select(self._cond, value, zero_of(value.dtype))  # its own condition may guard what is loaded
        if not isinstance(value, Load) or value.buffer is self._wide:
            return super()._value(value)
        is_safe = inside(value.buffer, value.indices, self._known) is None
        return value if is_safe else Select(self._cond, value, zero_of(value.dtype))


def zero_of(dtype: str) -> Literal:
    return Literal(False if dtype == "bool" else 0, dtype)


def split_reduction(root: Stmt, loop: For, lanes: int, accumulators: int) -> Stmt:
    """Combine in vector lanes, and the lanes at the end:

    for k in n: t[] += v(k)  =>  p[lanes * accumulators] = 0; for ko: for ki: p[ki] += v(ko, ki); for ki: t[] += p[ki]

    The loop's body is one combining store into an element that the loop does not move.
    """
    store = loop.body
    if lanes < 1 or accumulators < 1 or lanes * accumulators > 256:
        raise ScheduleError(
            f"{accumulators} vectors of {lanes} partial results of loop {loop.var.name!r}; at most 256 in all"
        )
    if not isinstance(store, Store) or store.combine is None:
        raise ScheduleError(f"the body of loop {loop.var.name!r} is {describe(loop.body)}, not one combining store")
    if any(loop.var in index.free_vars() for index in store.indices):
        raise ScheduleError(
            f"loop {loop.var.name!r} combines into {store.buffer.name} at an index that moves with it; vectorize() it "
            f"instead"
        )
    if any(load.buffer is store.buffer for load in loads(store)):
        raise ScheduleError(
            f"loop {loop.var.name!r} reads {store.buffer.name}, into which it combines: a running result"
        )
    if loop.kind != "serial":
        raise ScheduleError(f"loop {loop.var.name!r} is {loop.kind} already; split_reduction() takes a serial one")
    new: Stmt = rewrite.split_reduction(loop, lanes, accumulators, identity(store.combine, store.buffer.dtype))
    known = analyzer_at(root, loop)
    if not known.can_prove_lt(0, loop.extent) and inside(store.buffer, store.indices, known) is not None:
        new = IfThenElse(rewrite.less(0, loop.extent), new)  # without iterations the element need not exist
    return replaced(root, loop, new)
