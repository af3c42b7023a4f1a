"""Primitives on loops: split, fuse, reorder, distribute, predicate, specialize, and the kinds of loops.

Each takes the enclosing statement (`root`, the body of a program) and returns a new one with the same results, up to
the order of floating point reductions. A transformation that cannot be proven legal raises ScheduleError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from relaxlite.errors import ScheduleError
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Compare,
    For,
    GpuAxis,
    IfThenElse,
    IndexValue,
    Load,
    LoopKind,
    Seq,
    Stmt,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, walk_stmts, walk_values
from relaxlite.ir.symbolic import SymVar, as_int, ceildiv, smin, sym
from relaxlite.passes.loops import transforms as rewrite
from relaxlite.passes.schedule.primitives.dependence import blocks_distribution, blocks_reordering, carried_by
from relaxlite.passes.schedule.primitives.tree import (
    analyzer_at,
    describe,
    path_to,
    perfect_nest_of,
    replaced,
    simplified,
)

TAILS = ("cut", "mask", "even", "none")
MAX_LANES = 256  # of a vectorized loop, as in the code generator
MAX_COPIES = 64  # of an unrolled body


def split(root: Stmt, loop: For, factor: int, *, tail: str = "cut") -> tuple[Stmt, tuple[SymVar, ...]]:
    """Split a loop: for i in n  =>  for io in n // factor: for ii in factor, and a tail if factor does not divide n.

    tail="cut": the tail is a separate loop, `it`, after the main loop. "mask": the last block is full, and a condition
    masks iterations beyond n. "even": blocks of at most `factor` iterations whose lengths differ by at most one, so
    that 16 by 6 is 6 + 5 + 5 (`specialize` makes the lengths constants). "none": n must be provably a multiple of the
    factor, else ScheduleError. Returns the new root and the variables (outer, inner[, tail]).
    """
    if factor < 1:
        raise ScheduleError(f"loop {loop.var.name!r} cannot be split by {factor}; a factor is at least 1")
    if tail not in TAILS:
        raise ScheduleError(f"unknown tail {tail!r} of a split; there are {', '.join(TAILS)}")
    _check_kind(loop, "split", ("serial", "parallel", *get_args(GpuAxis)))
    if tail == "even":
        return _split_evenly(root, loop, factor)
    if tail == "mask":
        root, loop = predicate(root, loop, factor)
    left = loop.extent % factor
    known = analyzer_at(root, loop)
    is_whole = as_int(left) == 0 or known.can_prove_divisible(loop.extent, factor)
    if tail == "none" and not is_whole:
        raise ScheduleError(
            f"loop {loop.var.name!r} of {loop.extent} iterations is not known to be a multiple of {factor}; "
            f"tail='cut' or "
            "tail='mask' takes care of what is left"
        )
    outer, inner = SymVar(f"{loop.var.name}o"), SymVar(f"{loop.var.name}i", upper=factor - 1)
    body = Substitute({loop.var: outer * factor + inner}).stmt(loop.body)
    main = simplified(For(outer, loop.extent // factor, For(inner, sym(factor), body), loop.kind), known)
    if is_whole:
        return replaced(root, loop, main), (outer, inner)
    rest = SymVar(f"{loop.var.name}t", upper=max(factor - 1, 0))
    start = loop.extent // factor * factor
    last = For(rest, left, Substitute({loop.var: start + rest}, fresh=True).stmt(loop.body), loop.kind)
    return replaced(root, loop, seq(main, simplified(last, known))), (outer, inner, rest)


def _split_evenly(root: Stmt, loop: For, max_size: int) -> tuple[Stmt, tuple[SymVar, ...]]:
    outer, inner = SymVar(f"{loop.var.name}o"), SymVar(f"{loop.var.name}i", upper=max_size - 1)
    count = ceildiv(loop.extent, max_size)
    parts = count if as_int(count) != 0 else sym(1)  # an empty loop must not divide by 0
    start, end = (block * (loop.extent // parts) + smin(block, loop.extent % parts) for block in (outer, outer + 1))
    body = Substitute({loop.var: start + inner}).stmt(loop.body)
    return replaced(root, loop, For(outer, count, For(inner, end - start, body), loop.kind)), (outer, inner)


def specialize(root: Stmt, loop: For, sizes: Sequence[int]) -> tuple[Stmt, tuple[For, ...]]:
    """Specialize a loop for some constant extents, selected at run time:

    for i in n: body  =>  if n == 6: for i in 6: body;  elif n == 5: for i in 5: body;  else: for i in n: body

    Returns the new root and the loops of constant extents.
    """
    if loop.extent.is_const or not sizes or len(set(sizes)) != len(sizes) or min(sizes) < 0:
        raise ScheduleError(
            f"loop {loop.var.name!r} of {loop.extent} iterations cannot be specialized for "
            f"{', '.join(map(str, sizes))}; name different sizes, none below 0, of a loop whose extent is not known"
        )
    dispatch: Stmt = loop
    loops: list[For] = []
    for size in reversed(sizes):
        var = SymVar(loop.var.name, upper=max(size - 1, 0))
        specialized = For(var, sym(size), Substitute({loop.var: var}, fresh=True).stmt(loop.body), loop.kind)
        matches = Compare("eq", IndexValue(loop.extent), IndexValue(sym(size)))
        dispatch = IfThenElse(matches, specialized, dispatch)
        loops.insert(0, specialized)
    return replaced(root, loop, dispatch), tuple(loops)


def predicate(root: Stmt, loop: For, multiple: int) -> tuple[Stmt, For]:
    """Round the extent of a loop up to a multiple and guard the body:

    for i in n: body  =>  for i in ceil(n / multiple) * multiple: if i < n: body

    The condition is placed inside of the perfect nest below the loop. Returns the new root and loop.
    """
    if multiple < 1:
        raise ScheduleError(f"loop {loop.var.name!r} cannot be rounded up to a multiple of {multiple}")
    if analyzer_at(root, loop).can_prove_divisible(loop.extent, multiple):
        return root, loop
    new = For(loop.var, ceildiv(loop.extent, multiple) * multiple, _guarded(loop, loop.body), loop.kind)
    return replaced(root, loop, new), new


def _guarded(loop: For, body: Stmt) -> Stmt:
    if isinstance(body, For) and loop.var not in body.extent.free_vars():
        return replace(body, body=_guarded(loop, body.body))
    cond: Value = rewrite.less(loop.var, loop.extent)
    if isinstance(body, IfThenElse) and body.other is None and not _reads(body.cond):
        return IfThenElse(Binary("and", cond, body.cond), body.then)
    return IfThenElse(cond, body)


def _reads(cond: Value) -> bool:
    return any(isinstance(value, Load) for value in walk_values(cond))


def fuse(root: Stmt, outer: For, inner: For) -> tuple[Stmt, SymVar]:
    """Fuse two perfectly nested loops: for i in n: for j in m: body(i, j)  =>  for ij in n*m: body(ij // m, ij % m)."""
    if outer.body is not inner:
        raise ScheduleError(
            f"loop {inner.var.name!r} is not the whole body of loop {outer.var.name!r}, which is "
            f"{describe(outer.body)}; "
            "distribute() takes the statements of a loop apart, reorder() brings loops next to each other"
        )
    if outer.var in inner.extent.free_vars():
        raise ScheduleError(
            f"loops {outer.var.name!r} and {inner.var.name!r} cannot be fused: the extent {inner.extent} of the inner "
            f"one "
            f"changes with {outer.var.name!r}; split() and predicate() make extents constant"
        )
    if outer.kind != inner.kind or outer.kind not in ("serial", "parallel"):
        raise ScheduleError(
            f"loops {outer.var.name!r} ({outer.kind}) and {inner.var.name!r} ({inner.kind}) cannot be fused; fuse "
            f"serial "
            "loops first and change the kind of the result"
        )
    fused = rewrite.fuse(outer, inner)
    return replaced(root, outer, fused), fused.var


def reorder(root: Stmt, loops: Sequence[For]) -> Stmt:
    """Reorder loops of a perfect nest to the given order, outermost first.

    Other loops of the nest keep their positions.
    """
    names = [loop.var.name for loop in loops]
    if len(set(names)) != len(names) or not loops:
        raise ScheduleError(f"reorder takes loops of different names, got {', '.join(names) or 'none'}")
    outer = min(loops, key=lambda loop: len(path_to(root, loop)))
    nest = perfect_nest_of(outer, names)
    places = [k for k, loop in enumerate(nest) if loop.var.name in names]
    order = list(nest)
    for place, loop in zip(places, loops, strict=True):
        order[place] = loop
    for k, loop in enumerate(order):
        later = {x.var for x in order[k:]}
        moved = [v.name for v in loop.extent.free_vars() if v in later]
        if moved:
            raise ScheduleError(
                f"loop {loop.var.name!r} cannot stand outside of loop {moved[0]!r}: its extent {loop.extent} depends "
                f"on it"
            )
    dependence = blocks_reordering(nest, [loop.var for loop in order])
    if dependence is not None:
        raise ScheduleError(
            f"loops {', '.join(names)} cannot be brought into this order: {dependence}, and would be touched in the "
            f"other "
            "order; keep the loop that moves both accesses outside"
        )
    new = rewrite.nest(order, nest[-1].body)
    root = replaced(root, outer, new)
    check_concurrent(root, new)
    return root


def distribute(root: Stmt, loop: For) -> tuple[Stmt, tuple[For, ...]]:
    """Distribute a loop over its statements: for i: { a(i); b(i) }  =>  for i: a(i); for i: b(i).

    Returns the new root and the loops.
    """
    if not isinstance(loop.body, Seq):
        hint = "; decompose_reduction() widens an allocated element" * isinstance(loop.body, Allocate)
        raise ScheduleError(f"loop {loop.var.name!r} has one statement, {describe(loop.body)}, to distribute{hint}")
    stmts = loop.body.stmts
    for k, earlier in enumerate(stmts):
        for later in stmts[k + 1 :]:
            dependence = blocks_distribution(loop, earlier, later)
            if dependence is not None:
                raise ScheduleError(
                    f"the statements of loop {loop.var.name!r} cannot be taken apart: {dependence}, and a later "
                    f"iteration's "
                    "would come first; stage() gives a loop its own copy"
                )
    parts = [replace(loop, body=stmts[0])]
    parts += [_with_fresh_variables(replace(loop, body=stmt)) for stmt in stmts[1:]]
    return replaced(root, loop, seq(*parts)), tuple(parts)


def _with_fresh_variables(loop: For) -> For:
    new = Substitute(fresh=True).stmt(loop)
    assert isinstance(new, For)
    return new


# Loop kinds


def unroll(root: Stmt, loop: For) -> Stmt:
    """Unroll a loop completely. The extent is a constant of at most `MAX_COPIES`."""
    extent = as_int(loop.extent)
    if extent is None or extent > MAX_COPIES:
        raise ScheduleError(
            f"loop {loop.var.name!r} of {loop.extent} iterations cannot be unrolled; split() off a constant number of "
            f"at "
            f"most {MAX_COPIES}"
        )
    return _with_kind(root, loop, "unrolled")


def vectorize(root: Stmt, loop: For) -> Stmt:
    """Vectorize a loop, one lane per iteration.

    Iterations are independent or combine into one element. The extent is a constant of at most `MAX_LANES`.
    """
    extent = as_int(loop.extent)
    if extent is None or extent > MAX_LANES:
        raise ScheduleError(
            f"loop {loop.var.name!r} of {loop.extent} iterations cannot be vectorized; split() it by the number of "
            f"lanes, "
            f"at most {MAX_LANES}"
        )
    _check_independent(loop, "vectorized", combining=True)
    return _with_kind(root, loop, "vectorized")


def parallelize(root: Stmt, loop: For) -> Stmt:
    """Distribute the iterations of a loop over threads; iterations are independent."""
    _check_independent(loop, "run in parallel")
    return _with_kind(root, loop, "parallel")


def bind(root: Stmt, loop: For, axis: str) -> Stmt:
    """Bind a loop to an axis of a GPU's blocks or threads; iterations are independent. CPUs cannot run such loops."""
    if axis not in get_args(GpuAxis):
        raise ScheduleError(f"unknown axis {axis!r}; there are {', '.join(get_args(GpuAxis))}")
    nested = [*path_to(root, loop), *walk_stmts(loop.body)]
    if any(isinstance(stmt, For) and stmt.kind == axis for stmt in nested):
        raise ScheduleError(
            f"loop {loop.var.name!r} cannot be bound to {axis}: a loop around or inside of it is already"
        )
    _check_independent(loop, f"bound to {axis}")
    return _with_kind(root, loop, axis)  # type: ignore[arg-type]


def _with_kind(root: Stmt, loop: For, kind: LoopKind) -> Stmt:
    _check_kind(loop, f"made {kind}", ("serial",))
    return replaced(root, loop, replace(loop, kind=kind))


def _check_kind(loop: For, action: str, kinds: Sequence[str]) -> None:
    if loop.kind not in kinds:
        raise ScheduleError(f"loop {loop.var.name!r} is {loop.kind} already and cannot be {action}")


def _check_independent(loop: For, action: str, *, combining: bool = False) -> None:
    dependence = carried_by(loop, combining=combining)
    if dependence is None:
        return
    hint = "split off a loop whose iterations touch different elements"
    stores = (dependence.first, dependence.second)
    if all(access.combine is not None for access in stores):
        hint = "decompose_reduction() and reorder() bring a loop over results outside"
    raise ScheduleError(f"loop {loop.var.name!r} cannot be {action}: {dependence}; {hint}")


def check_concurrent(root: Stmt, changed: Stmt) -> None:
    """Raise ScheduleError if a change made iterations of a concurrent loop depend on each other.

    Checked are the parallel, vectorized and GPU loops around and inside of the changed statement.
    """
    around = [stmt for stmt in path_to(root, changed) if isinstance(stmt, For)]
    for loop in dict.fromkeys([*around, *(s for s in walk_stmts(changed) if isinstance(s, For))]):
        if loop.kind in ("serial", "unrolled"):
            continue
        dependence = carried_by(loop, combining=loop.kind == "vectorized")
        if dependence is not None:
            raise ScheduleError(
                f"loop {loop.var.name!r} is {loop.kind} and could not stay so: {dependence}; change its kind last"
            )
