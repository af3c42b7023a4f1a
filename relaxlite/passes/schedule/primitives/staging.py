"""Primitives on buffers and reductions: stage, compute_at, decompose_reduction, split_reduction."""

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
    MemoryScope,
    Select,
    Seq,
    Stmt,
    Store,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads, stores, walk_stmts
from relaxlite.ir.symbolic import SymVar, as_int, product
from relaxlite.passes.loops import transforms as rewrite
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.schedule.primitives.dependence import accesses_of, carried_by
from relaxlite.passes.schedule.primitives.loops import check_concurrent
from relaxlite.passes.schedule.primitives.region import Redirect, box_of, copy_loops, guarded, inside, overwrites
from relaxlite.passes.schedule.primitives.tree import analyzer_at, describe, path_to, replaced, with_ranges

MAX_LOCAL_BYTES = 1 << 16  # maximum size of a local buffer made by compute_at


def stage(
    root: Stmt, buffer: Buffer, loop: For, *, scope: MemoryScope = "local", order: Sequence[int] | None = None
) -> tuple[Stmt, Buffer]:
    """Stage the part of a buffer that each iteration of a loop accesses in a copy:

    for i: body(b)  =>  for i: { c[...]; c = part of b; body(c); part of b = c }

    The copy-in is omitted if the body stores every element before it loads any, the copy-out if the body only loads.
    `order` permutes the dimensions of the copy: order=(1, 0) transposes. A "local" copy has a constant size; a "global"
    copy is scratch memory. Returns the new root and the copy.
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
    """Compute an allocated buffer inside of the loop that reads it, in each iteration the part that is read:

    t[...]; for j in n: t[j] = f(j); ... for i: use(t[part(i)])
        =>  ... for i: { c[...]; for j in part(i): c[j] = f(j); use(c) }

    The producer is a nest over the dimensions of the buffer without other stores, and only the loop reads the buffer.
    Returns the new root and the buffer that replaces t.
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
    """The only statement that stores the buffer, which precedes the statement with the loop."""
    body = allocation.body
    while isinstance(body, Allocate):  # nested allocations
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
    """The outer loops of the producer, in the order of the buffer's dimensions."""
    nest = perfect_nest(producer)
    loops = {loop.var: loop for loop in nest.loops}
    indices = next((s.indices for s in stores(producer) if s.buffer is buffer), ())
    dimension_loops = [loops[v] for v in indices if isinstance(v, SymVar) and v in loops]
    is_same = all(s.indices == indices for s in stores(producer) if s.buffer is buffer)
    is_over = len(dimension_loops) == len(buffer.shape) == len({loop.var for loop in dimension_loops}) and is_same
    sizes = is_over and all(
        Analyzer().can_prove_equal(loop.extent, dim) for loop, dim in zip(dimension_loops, buffer.shape, strict=True)
    )
    if not sizes or set(nest.loops[: len(dimension_loops)]) != set(dimension_loops):
        raise ScheduleError(
            f"buffer {buffer.name} is not computed element by element in a nest over its dimensions "
            f"({', '.join(map(str, buffer.shape))}); reorder() its loops outermost"
        )
    return dimension_loops


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
    """The statements after the producer in the scope of the buffer."""
    body = allocation.body
    while not isinstance(body, Seq):
        assert isinstance(body, Allocate)
        body = body.body
    return seq(*body.stmts[body.stmts.index(producer) + 1 :])


def _check_inputs_stay(producer: Stmt, after: Stmt, buffer: Buffer) -> None:
    """Check that the producer can move: its operands are not overwritten later, and it has no other effects."""
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
    """Distribute loops over the statements of a reduction block with one local element, as their innermost loops:

    for i: { t[]; t = init; for k: t += v(i, k); use(t) }
        =>  { t[n]; for i: t[i] = init;  for k: for i: t[i] += v(i, k);  for i: use(t[i]) }

    `loops` are the innermost loops around the block, with constant extents and independent iterations. A condition
    between the loops and the block (from predicate()) is distributed, too; in the reduction it only guards loads that
    could be out of bounds, and masked elements of t hold unspecified values, which are not read. Returns the new root
    and t.
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
    """The condition between the loops and the block, if any. Raises ScheduleError if the loops cannot be
    distributed."""
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
    """Put a statement under a condition. In stores into the widened element, only loads that may be out of bounds are
    guarded."""
    if isinstance(stmt, For):
        return replace(stmt, body=_conditional(stmt.body, cond, wide, with_ranges(known, [stmt])))
    if isinstance(stmt, Store) and stmt.buffer is wide:
        return replace(stmt, value=_SafeLoads(cond, wide, known).value(stmt.value))
    return IfThenElse(cond, stmt)


class _SafeLoads(ProgramRewriter):
    """Guards the loads that may be out of bounds if the condition does not hold."""

    def __init__(self, cond: Value, wide: Buffer, known: Analyzer) -> None:
        super().__init__()
        self._cond, self._wide, self._known = cond, wide, known

    def _value(self, value: Value) -> Value:
        if isinstance(value, Select):
            return Select(self._cond, value, zero_of(value.dtype))  # its own condition may guard loads
        if not isinstance(value, Load) or value.buffer is self._wide:
            return super()._value(value)
        is_safe = inside(value.buffer, value.indices, self._known) is None
        return value if is_safe else Select(self._cond, value, zero_of(value.dtype))


def zero_of(dtype: str) -> Literal:
    """The literal 0, or False for bool."""
    return Literal(False if dtype == "bool" else 0, dtype)


def split_reduction(root: Stmt, loop: For, lanes: int, accumulators: int) -> Stmt:
    """Vectorize a reduction with partial results in vector lanes, combined after the loop:

    for k in n: t[] += v(k)  =>  p[lanes * accumulators] = 0; for ko: for ki: p[ki] += v(ko, ki); for ki: t[] += p[ki]

    The body of the loop is one combining store at indices that do not depend on the loop.
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
        new = IfThenElse(rewrite.less(0, loop.extent), new)  # an empty loop may have an element out of bounds
    return replaced(root, loop, new)
