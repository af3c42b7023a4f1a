"""Merge the stages of one kernel: the loop nests of several programs, one after another over shared buffers.

1. Injective intermediates are inlined: a load of one becomes the value that was stored there. One that is written in
   parts (concat) splits the nest that reads it into as many, where that reads part by part.
2. A row program that reads a costly intermediate in several stages keeps the row in a local one (rows.keep_row).
3. What follows a reduction element by element moves into its spatial loops; its result becomes one local element:

    for i, j:                          for i, j:
        local e[]; e[] = 0                 local e[]; e[] = 0
        for k: e[] += a*b                  for k: e[] += a*b
        t[i, j] = e[]              =>      out[i, j] = f(e[])
    for i, j:
        out[i, j] = f(t[i, j])

   in another order of the same elements too, where they still lie side by side, and what follows a row program into
   the loop that writes its result.
4. Nests that write several outputs become one nest that stores them one after another.
5. Where that leaves several reductions, or a reduction that is read along its rows, the stages become a row program if
   they share their rows (merge_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.op_costs import stmt_flops
from relaxlite.ir.ops.shape import reshape_index
from relaxlite.ir.program import Allocate, Buffer, Check, For, LetIndex, Load, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads, stores, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, substitute, sym
from relaxlite.passes.fuse.merge_rows import rows_from
from relaxlite.passes.loops.access import coefficient
from relaxlite.passes.loops.pattern import (
    ConcatPart,
    Nest,
    concat_parts,
    injective_store,
    perfect_nest,
    plain_store,
    reduction_of,
)
from relaxlite.passes.loops.row_program import (
    RowProgram,
    fuse_producer,
    match_row_program,
    replace_result_store,
    stage_row,
)

CHEAP_READS = 3  # cost of a value that may be computed again in each stage of a row program rather than kept
CHEAP_OUTPUT = 4  # FLOPs of an output that are computed again where the next one needs it, rather than read back
_ANALYZER = Analyzer()


class CannotMerge(Exception):
    """Why stages do not become one kernel; the message is for a person."""


def merge_stages(
    stages: Sequence[Stmt], intermediates: Sequence[Buffer], outputs: Sequence[Buffer]
) -> tuple[list[Stmt], tuple[Buffer, ...]]:
    """The stages of one kernel that writes the outputs and no intermediate, and these outputs, of which a single one
    may get another shape with the elements in the same order. Raises CannotMerge."""
    try:
        return _merged(stages, intermediates, outputs)
    except CannotMerge:
        inlined = _inline_in_place(list(stages), intermediates)
        checks = [s for s in inlined if isinstance(s, Check)]
        rows = rows_from([s for s in inlined if not isinstance(s, Check)], intermediates)
        if rows is None or any(_read(check) & {*intermediates, *outputs} for check in checks):
            raise
        return [*checks, rows.nest], tuple(outputs)


def _merged(
    stages: Sequence[Stmt], intermediates: Sequence[Buffer], outputs: Sequence[Buffer]
) -> tuple[list[Stmt], tuple[Buffer, ...]]:
    merged = _inline(_keep_rows(list(stages), intermediates), intermediates)
    checks = [s for s in merged if isinstance(s, Check)]
    late = next((b.name for check in checks for b in outputs if b in _read(check)), None)
    if late is not None:
        raise CannotMerge(f"{late} is checked before all loops")
    merged = _merge_around_anchor([s for s in merged if not isinstance(s, Check)], outputs)
    if len(outputs) > 1 and len(merged) > 1:
        merged = [_one_nest(merged)]
    left = {b.name for s in merged for b in _written(s) & set(intermediates)}
    if left:
        raise CannotMerge(f"{', '.join(sorted(left))} would have to be stored")
    own = {inner.buffer for s in merged for inner in walk_stmts(s) if isinstance(inner, Allocate)}
    written = {b for s in merged for b in _written(s)} - own
    if len(outputs) == 1 and outputs[0] not in written:  # a reshaped epilogue: `_in_place_of`
        return [*checks, *merged], tuple(written)
    return [*checks, *merged], tuple(outputs)


def _written(stage: Stmt) -> set[Buffer]:
    return {store.buffer for store in stores(stage)}


def _read(stage: Stmt) -> set[Buffer]:
    return {load.buffer for load in loads(stage)}


def _keep_rows(stages: list[Stmt], intermediates: Sequence[Buffer]) -> list[Stmt]:
    """Row programs that compute each element of a costly intermediate once."""
    writers = [s for b in intermediates for s in stages if b in _written(s)]
    cost = sum(stmt_flops(s) + len(set(loads(s))) - 1 for s in writers)
    done: list[Stmt] = []
    for stage in stages:
        rows = match_row_program(stage)
        for buffer in intermediates if rows is not None else ():
            readings = sum(any(x.buffer is buffer for x in loads(s)) for s in rows.stages) if rows is not None else 0
            if rows is not None and (readings - 1) * cost > CHEAP_READS:
                rows = stage_row(rows, buffer) or rows
        done.append(stage if rows is None else rows.nest)
    return done


# Inlining


def _inline(stages: list[Stmt], intermediates: Sequence[Buffer]) -> list[Stmt]:
    """Inline every intermediate that injective stages compute, the last first: then all that a stage reads of one
    element is one shared value, where each inlined reader of it would bring a copy, and copies of its copies."""
    for buffer in reversed(intermediates):
        writers = [s for s in stages if buffer in _written(s)]
        others = [s for s in stages if s not in writers]
        if len(writers) == 1 and injective_store(perfect_nest(writers[0])) is not None:
            inliner = _Inline(buffer, writers[0])
            stages = [inliner.stmt(s) for s in others]
        elif len(writers) > 1:
            parts = concat_parts(writers)
            if parts is None:
                raise CannotMerge(f"{buffer.name} is written by several stages")
            stages = [new for s in others for new in ([s] if buffer not in _read(s) else _by_parts(s, buffer, parts))]
    return stages


def _inline_in_place(stages: list[Stmt], intermediates: Sequence[Buffer]) -> list[Stmt]:
    """Inline the intermediates that one stage reads, once for each element."""
    for buffer in reversed(intermediates):
        writers, readers = ([s for s in stages if buffer in result(s)] for result in (_written, _read))
        if len(writers) != 1 or len(readers) != 1 or injective_store(perfect_nest(writers[0])) is None:
            continue
        rows = match_row_program(readers[0])
        read = [s for s in (readers if rows is None else rows.stages) if buffer in _read(s)]
        around = [s for s in walk_stmts(readers[0]) if isinstance(s, For)]
        loops = around if rows is None else [*rows.spatial, rows.final]
        if len(read) == 1 and product(loop.extent for loop in loops) is product(buffer.shape):
            inliner = _Inline(buffer, writers[0])
            stages = [inliner.stmt(s) for s in stages if s is not writers[0]]
    return stages


class _Inline(ProgramRewriter):
    """Replaces loads of a buffer by the value its producer stores; the producer's data-dependent indices and checks are
    bound round the consuming store."""

    def __init__(self, buffer: Buffer, producer: Stmt) -> None:
        super().__init__()
        self._buffer = buffer
        self._nest = perfect_nest(producer)
        self._values: dict[object, Value] = {}
        self._wrappers: list[Callable[[Stmt], Stmt]] = []

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer is not self._buffer:
            return super()._value(value)
        if value.indices not in self._values:
            self._values[value.indices] = self._produce(value)
        return self._values[value.indices]

    def _produce(self, load: Load) -> Value:
        at = dict(zip(self._nest.vars, load.indices, strict=True))
        body = Substitute(at, fresh=True).stmt(self._nest.body)
        while not isinstance(body, Store):
            if isinstance(body, LetIndex):
                self._wrappers.append(partial(LetIndex, body.var, body.value))
                body = body.body
            else:
                assert isinstance(body, Seq)
                self._wrappers.append(partial(seq, *body.stmts[:-1]))
                body = body.stmts[-1]
        return body.value

    def stmt(self, stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Store | LetIndex | Check):
            return super().stmt(stmt)
        outer, self._wrappers, self._values, self._done = self._wrappers, [], {}, {}
        new = super().stmt(stmt)
        for wrap in reversed(self._wrappers):
            new = wrap(new)
        self._wrappers = outer
        return new


def _by_parts(stage: Stmt, buffer: Buffer, parts: Sequence[ConcatPart]) -> list[Stmt]:
    """A nest that reads a buffer written in parts, as one nest for each part, with the part's value in place of loads:

    for j in a: t[j] = x[j]              for j in a: out[j] = f(x[j])
    for j in b: t[j + a] = y[j]    =>    for j in b: out[j + a] = f(y[j])
    for j in a + b: out[j] = f(t[j])
    """
    nest, axis = perfect_nest(stage), parts[0].axis
    found = {load.indices[axis] for load in loads(stage) if load.buffer is buffer}
    along = next((loop for loop in nest.loops if found == {loop.var}), None)
    if along is None or plain_store(nest) is None:
        raise CannotMerge(f"{buffer.name} is joined of parts and not read part by part")
    if not _ANALYZER.can_prove_equal(along.extent, buffer.shape[axis]):
        raise CannotMerge(f"{buffer.name} is joined of parts of which only some are read")
    result = []
    for part in parts:
        loop = replace(part.nest.loops[axis], var=SymVar(along.var.name))
        body = Substitute({along.var: loop.var + part.offset}).stmt(nest.body)
        at_loop = Buffer(buffer.name, part.nest.shape, buffer.dtype)
        body = _MoveLoads(buffer, at_loop, axis, part.offset).stmt(body)
        for outer in reversed(nest.loops):
            body = replace(loop, body=body) if outer is along else replace(outer, body=body)
        store = replace(part.store, buffer=at_loop, indices=part.nest.vars)
        producer = _ReplacementOf(part.store, store).stmt(part.nest.stmt)
        result.append(Substitute(fresh=True).stmt(_Inline(at_loop, producer).stmt(body)))
    return result


class _MoveLoads(ProgramRewriter):
    """Loads of one buffer become loads of another, `offset` less along an axis."""

    def __init__(self, old: Buffer, new: Buffer, axis: int, offset: SymExpr) -> None:
        super().__init__()
        self._old, self._new, self._axis, self._offset = old, new, axis, offset

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer is not self._old:
            return super()._value(value)
        k = self._axis
        return Load(self._new, (*value.indices[:k], value.indices[k] - self._offset, *value.indices[k + 1 :]))


class _ReplacementOf(ProgramRewriter):
    """One store in place of another."""

    def __init__(self, old: Store, new: Store) -> None:
        super().__init__()
        self._old, self._new = old, new

    def stmt(self, stmt: Stmt) -> Stmt:
        return self._new if stmt is self._old else super().stmt(stmt)


# Reductions and row programs, and what stands round them


def _merge_around_anchor(stages: list[Stmt], outputs: Sequence[Buffer]) -> list[Stmt]:
    """The reduction or row program among the stages takes in those that follow it, and a row program those outputs
    before it that it reads."""
    for k, anchor in enumerate(stages):
        rows, reduction = match_row_program(anchor), reduction_of(anchor)
        if rows is None and reduction is None:
            continue
        before, after = stages[:k], stages[k + 1 :]
        if not before and not after:
            return stages
        if rows is not None:
            for stage in reversed(before):
                rows = _with_output_before(rows, stage)
            return [_rows_with_epilogue(rows, after, outputs)]
        assert reduction is not None
        if before:
            raise CannotMerge(f"{_name_of(before[0])} is stored in loops of its own before the reduction")
        assert isinstance(reduction.final, Store)
        final = _finals(reduction.final, reduction.spatial, after, outputs)
        block: Stmt = replace(reduction, final=final).block
        for loop in reversed(reduction.spatial):
            block = replace(loop, body=block)
        return [block]
    return stages


def _rows_with_epilogue(rows: RowProgram, after: Sequence[Stmt], outputs: Sequence[Buffer]) -> Stmt:
    return (
        replace_result_store(rows, _finals(rows.result, (*rows.spatial, rows.final), after, outputs))
        if after
        else rows.nest
    )


def _with_output_before(rows: RowProgram, stage: Stmt) -> RowProgram:
    """A nest that computes an output which the row program reads becomes a stage that writes it row by row."""
    nest = perfect_nest(stage)
    store = injective_store(nest)
    result = None if store is None else fuse_producer(rows, nest.loops, store)
    if result is None:
        raise CannotMerge(f"{_name_of(stage)} is not computed row by row where the row program reads it")
    return result


def _finals(result: Store, loops: Sequence[For], after: Sequence[Stmt], outputs: Sequence[Buffer]) -> Stmt:
    """The statements that take the place of the store of a result: that itself where it is an output, and each nest
    that follows, at the same element. A nest reads the value that the one before has computed."""
    done: list[Stmt] = [result] if result.buffer in outputs else []
    known = {result.buffer: _element_value(result, result.buffer in outputs)}
    places = {result.buffer: result.indices}
    for stage in after:
        nest = perfect_nest(stage)
        read = next((x for x in loads(stage) if x.buffer in known), None)
        if read is None or injective_store(nest) is None:
            raise CannotMerge(f"{_name_of(stage)} is not computed element by element from {result.buffer.name}")
        at = element_of(nest, read, places[read.buffer])
        if at is None:
            raise CannotMerge(f"{_name_of(stage)} does not read each element of {read.buffer.name} once")
        body = Substitute(at).stmt(nest.body)
        for load in loads(body):
            if load.buffer in known and not _is_element(load, places[load.buffer]):
                raise CannotMerge(f"{_name_of(stage)} reads {load.buffer.name} at other indices than it writes")
        body = _Replace(known).stmt(body)
        last = plain_store(Nest((), body))
        assert last is not None
        if last.indices != result.indices:
            if len(outputs) > 1:
                raise CannotMerge(f"{_name_of(stage)} has another shape than {result.buffer.name}")
            stored = _in_place_of(result, last)
            body, last = _ReplacementOf(last, stored).stmt(body), stored
        done.append(body)
        known[last.buffer], places[last.buffer] = _element_value(last, is_stored=True), last.indices
    return seq(*done)


def _in_place_of(result: Store, store: Store) -> Store:
    """A store of the same elements in another shape as one in the shape of the result, whose loops it shares."""
    shape = result.buffer.shape
    if not _equal(_position(store.buffer.shape, store.indices), _position(shape, result.indices)):
        raise CannotMerge(f"{store.buffer.name} would not be stored side by side")
    return replace(store, buffer=replace(store.buffer, shape=shape), indices=result.indices)


def _element_value(store: Store, is_stored: bool) -> Value:
    """What a later statement uses for the stored element: the value, or the element where computing it costs more."""
    cheap = not is_stored or stmt_flops(store) <= CHEAP_OUTPUT
    return store.value if cheap else Load(store.buffer, store.indices)


def element_of(nest: Nest, read: Load, place: Sequence[SymExpr]) -> dict[SymVar, SymExpr] | None:
    """The loop variables of a nest at which it reads the element at `place`, where it reads each element of the buffer
    once: in order, transposed or reshaped. None: it reads them otherwise.

    The position that is read is a sum of variables times strides. Sorted by these, the loops count in a mixed radix
    through all elements; its digits at the position of `place` are what the variables are there.
    """
    shape = read.buffer.shape
    if read.indices == nest.vars and all(map(_equal, nest.shape, shape)):
        return dict(zip(nest.vars, place, strict=True))
    position = flat_offset(shape, read.indices)
    strides = {loop: coefficient(position, loop.var) for loop in nest.loops if as_int(loop.extent) != 1}
    at: dict[SymVar, SymExpr] = {loop.var: sym(0) for loop in nest.loops if loop not in strides}
    order: list[For] = []
    width, rest = sym(1), substitute(position, at)
    while len(order) < len(strides):
        loop = next((x for x, s in strides.items() if x not in order and s is not None and _equal(s, width)), None)
        if loop is None:
            return None
        order.insert(0, loop)
        rest = rest - loop.var * width
        width = width * loop.extent
    if not _equal(width, product(shape)) or not _equal(rest, sym(0)):
        return None
    digits = reshape_index(tuple(loop.extent for loop in order), shape, place)
    at.update({loop.var: digit for loop, digit in zip(order, digits, strict=True)})
    return at


def _equal(a: SymExpr, b: SymExpr) -> bool:
    return a is b or _ANALYZER.can_prove_equal(a, b)


def _is_element(load: Load, place: Sequence[SymExpr]) -> bool:
    """Whether the load reads the element at a place."""
    shape = load.buffer.shape
    if all(a is b or as_int(d) == 1 for a, b, d in zip(load.indices, place, shape, strict=True)):
        return True
    return _equal(_position(shape, load.indices), _position(shape, place))


def _position(shape: Sequence[SymExpr], indices: Sequence[SymExpr]) -> SymExpr:
    """Where the element lies; an index into a dimension of one is 0."""
    return flat_offset(shape, [sym(0) if as_int(d) == 1 else i for d, i in zip(shape, indices, strict=True)])


class _Replace(ProgramRewriter):
    """Replaces every load of a buffer by one value."""

    def __init__(self, by: dict[Buffer, Value]) -> None:
        super().__init__()
        self._by = by

    def _value(self, value: Value) -> Value:
        return self._by.get(value.buffer, value) if isinstance(value, Load) else super()._value(value)


# Several outputs of one nest


def _one_nest(stages: Sequence[Stmt]) -> Stmt:
    """Nests over the same elements as one nest; a later one may read what an earlier one stores."""
    first = perfect_nest(stages[0])
    bodies: list[Stmt] = []
    written: dict[Buffer, tuple[SymExpr, ...]] = {}
    for stage in stages:
        nest = perfect_nest(stage)
        store = injective_store(nest)
        if store is None or not _same_extents(nest.loops, first.loops):
            raise CannotMerge(f"{_name_of(stage)} and {_name_of(stages[0])} have other loops")
        body = Substitute(dict(zip(nest.vars, first.vars, strict=True))).stmt(nest.body)
        for load in loads(body):
            if written.get(load.buffer, load.indices) != load.indices:
                raise CannotMerge(f"{_name_of(stage)} reads {load.buffer.name} at other indices than it is written")
        written[store.buffer] = first.vars
        bodies.append(body)
    body = seq(*bodies)
    for loop in reversed(first.loops):
        body = replace(loop, body=body)
    return body


def _same_extents(a: Sequence[For], b: Sequence[For]) -> bool:
    return len(a) == len(b) and all(
        _ANALYZER.can_prove_equal(x.extent, y.extent) for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def _name_of(stage: Stmt) -> str:
    return ", ".join(dict.fromkeys(store.buffer.name for store in stores(stage) if store.buffer.scope == "global"))
