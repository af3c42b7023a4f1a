"""Merge the stages of one kernel: the loop nests of several programs, one after another over shared buffers.

1. Injective intermediates are inlined: a load becomes the value that was stored there. An intermediate that is written
   in parts (concatenation) splits a nest that reads it part by part into one nest per part.
2. A row program that reads a costly intermediate in several stages stages the row in a local buffer (`stage_row`).
3. Elementwise consumers of a reduction move into its spatial loops as an epilogue; the result becomes a local element:

    for i, j:                          for i, j:
        local e[]; e[] = 0                 local e[]; e[] = 0
        for k: e[] += a*b                  for k: e[] += a*b
        t[i, j] = e[]              =>      out[i, j] = f(e[])
    for i, j:
        out[i, j] = f(t[i, j])

   also in another order of the same elements, where they stay contiguous. Consumers of a row program move into the loop
   that writes its result.
4. Nests that write several outputs become one nest that stores them one after another.
5. Where several reductions remain, or a reduction that is read along its rows, the stages become a row program if they
   share their rows (merge_rows.py).
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
from relaxlite.passes.fuse.merge_rows import merge_into_row_program
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

MAX_RECOMPUTE_COST = 3  # of a value that each stage of a row program recomputes; more is staged in a local row
MAX_RECOMPUTE_FLOPS = 4  # of an output that the next output recomputes; more is loaded back
_ANALYZER = Analyzer()


class CannotMerge(Exception):
    """Stages do not merge into one kernel; the message is the reason for the user."""


def merge_stages(
    stages: Sequence[Stmt], intermediates: Sequence[Buffer], outputs: Sequence[Buffer]
) -> tuple[list[Stmt], tuple[Buffer, ...]]:
    """Merge stages into one kernel that writes the outputs and no intermediate.

    Returns its stages and outputs; a single output may have another shape with the elements in the same order. Raises
    CannotMerge.
    """
    try:
        return _merge(stages, intermediates, outputs)
    except CannotMerge:
        inlined = _inline_in_place(list(stages), intermediates)
        checks = [s for s in inlined if isinstance(s, Check)]
        rows = merge_into_row_program([s for s in inlined if not isinstance(s, Check)], intermediates)
        if rows is None or any(_read(check) & {*intermediates, *outputs} for check in checks):
            raise
        return [*checks, rows.nest], tuple(outputs)


def _merge(
    stages: Sequence[Stmt], intermediates: Sequence[Buffer], outputs: Sequence[Buffer]
) -> tuple[list[Stmt], tuple[Buffer, ...]]:
    merged = _inline(_stage_rows(list(stages), intermediates), intermediates)
    checks = [s for s in merged if isinstance(s, Check)]
    checked_output = next((b.name for check in checks for b in outputs if b in _read(check)), None)
    if checked_output is not None:
        raise CannotMerge(f"{checked_output} is checked before all loops")
    merged = _merge_around_anchor([s for s in merged if not isinstance(s, Check)], outputs)
    if len(outputs) > 1 and len(merged) > 1:
        merged = [_one_nest(merged)]
    stored_intermediates = {b.name for s in merged for b in _written(s) & set(intermediates)}
    if stored_intermediates:
        raise CannotMerge(f"{', '.join(sorted(stored_intermediates))} would have to be stored")
    allocated = {inner.buffer for s in merged for inner in walk_stmts(s) if isinstance(inner, Allocate)}
    written = {b for s in merged for b in _written(s)} - allocated
    if len(outputs) == 1 and outputs[0] not in written:  # a reshaped epilogue: `_reshaped_store`
        return [*checks, *merged], tuple(written)
    return [*checks, *merged], tuple(outputs)


def _written(stage: Stmt) -> set[Buffer]:
    return {store.buffer for store in stores(stage)}


def _read(stage: Stmt) -> set[Buffer]:
    return {load.buffer for load in loads(stage)}


def _stage_rows(stages: list[Stmt], intermediates: Sequence[Buffer]) -> list[Stmt]:
    """Stage costly intermediates of row programs in local rows, so that each element is computed once."""
    writers = [s for b in intermediates for s in stages if b in _written(s)]
    cost = sum(stmt_flops(s) + len(set(loads(s))) - 1 for s in writers)
    result: list[Stmt] = []
    for stage in stages:
        rows = match_row_program(stage)
        for buffer in intermediates if rows is not None else ():
            num_readers = sum(any(x.buffer is buffer for x in loads(s)) for s in rows.stages) if rows is not None else 0
            if rows is not None and (num_readers - 1) * cost > MAX_RECOMPUTE_COST:
                rows = stage_row(rows, buffer) or rows
        result.append(stage if rows is None else rows.nest)
    return result


# Inlining


def _inline(stages: list[Stmt], intermediates: Sequence[Buffer]) -> list[Stmt]:
    """Inline every intermediate that injective stages compute, the last first.

    In this order all loads of one element share one value; the reverse order would duplicate values.
    """
    for buffer in reversed(intermediates):
        writers = [s for s in stages if buffer in _written(s)]
        rest = [s for s in stages if s not in writers]
        if len(writers) == 1 and injective_store(perfect_nest(writers[0])) is not None:
            inliner = _Inline(buffer, writers[0])
            stages = [inliner.stmt(s) for s in rest]
        elif len(writers) > 1:
            parts = concat_parts(writers)
            if parts is None:
                raise CannotMerge(f"{buffer.name} is written by several stages")
            stages = [new for s in rest for new in ([s] if buffer not in _read(s) else _by_parts(s, buffer, parts))]
    return stages


def _inline_in_place(stages: list[Stmt], intermediates: Sequence[Buffer]) -> list[Stmt]:
    """Inline the intermediates that one stage reads once per element."""
    for buffer in reversed(intermediates):
        writers, readers = ([s for s in stages if buffer in result(s)] for result in (_written, _read))
        if len(writers) != 1 or len(readers) != 1 or injective_store(perfect_nest(writers[0])) is None:
            continue
        rows = match_row_program(readers[0])
        reading_stages = [s for s in (readers if rows is None else rows.stages) if buffer in _read(s)]
        enclosing_loops = [s for s in walk_stmts(readers[0]) if isinstance(s, For)]
        loops = enclosing_loops if rows is None else [*rows.spatial, rows.final]
        if len(reading_stages) == 1 and product(loop.extent for loop in loops) is product(buffer.shape):
            inliner = _Inline(buffer, writers[0])
            stages = [inliner.stmt(s) for s in stages if s is not writers[0]]
    return stages


class _Inline(ProgramRewriter):
    """Replace loads of a buffer by the value that its producer stores.

    Data-dependent indices and checks of the producer enclose the consuming store.
    """

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
        substitution = dict(zip(self._nest.vars, load.indices, strict=True))
        body = Substitute(substitution, fresh=True).stmt(self._nest.body)
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
    """Split a nest that reads a buffer written in parts into one nest per part, without loads of the buffer:

    for j in a: t[j] = x[j]              for j in a: out[j] = f(x[j])
    for j in b: t[j + a] = y[j]    =>    for j in b: out[j + a] = f(y[j])
    for j in a + b: out[j] = f(t[j])
    """
    nest, axis = perfect_nest(stage), parts[0].axis
    indices = {load.indices[axis] for load in loads(stage) if load.buffer is buffer}
    along = next((loop for loop in nest.loops if indices == {loop.var}), None)
    if along is None or plain_store(nest) is None:
        raise CannotMerge(f"{buffer.name} is joined of parts and not read part by part")
    if not _ANALYZER.can_prove_equal(along.extent, buffer.shape[axis]):
        raise CannotMerge(f"{buffer.name} is joined of parts of which only some are read")
    result = []
    for part in parts:
        loop = replace(part.nest.loops[axis], var=SymVar(along.var.name))
        body = Substitute({along.var: loop.var + part.offset}).stmt(nest.body)
        at_loop = Buffer(buffer.name, part.nest.shape, buffer.dtype)
        body = _ShiftLoads(buffer, at_loop, axis, part.offset).stmt(body)
        for outer in reversed(nest.loops):
            body = replace(loop, body=body) if outer is along else replace(outer, body=body)
        store = replace(part.store, buffer=at_loop, indices=part.nest.vars)
        producer = _ReplacementOf(part.store, store).stmt(part.nest.stmt)
        result.append(Substitute(fresh=True).stmt(_Inline(at_loop, producer).stmt(body)))
    return result


class _ShiftLoads(ProgramRewriter):
    """Replace loads of a buffer by loads of another buffer at indices `offset` lower along an axis."""

    def __init__(self, old: Buffer, new: Buffer, axis: int, offset: SymExpr) -> None:
        super().__init__()
        self._old, self._new, self._axis, self._offset = old, new, axis, offset

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer is not self._old:
            return super()._value(value)
        k = self._axis
        return Load(self._new, (*value.indices[:k], value.indices[k] - self._offset, *value.indices[k + 1 :]))


class _ReplacementOf(ProgramRewriter):
    """Replace one store by another."""

    def __init__(self, old: Store, new: Store) -> None:
        super().__init__()
        self._old, self._new = old, new

    def stmt(self, stmt: Stmt) -> Stmt:
        return self._new if stmt is self._old else super().stmt(stmt)


# Reductions and row programs with their producers and consumers


def _merge_around_anchor(stages: list[Stmt], outputs: Sequence[Buffer]) -> list[Stmt]:
    """Fuse the stages around a reduction or row program into it.

    A row program also takes in the producers of outputs that it reads.
    """
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
        final = _epilogue_stmts(reduction.final, reduction.spatial, after, outputs)
        block: Stmt = replace(reduction, final=final).block
        for loop in reversed(reduction.spatial):
            block = replace(loop, body=block)
        return [block]
    return stages


def _rows_with_epilogue(rows: RowProgram, after: Sequence[Stmt], outputs: Sequence[Buffer]) -> Stmt:
    return (
        replace_result_store(rows, _epilogue_stmts(rows.result, (*rows.spatial, rows.final), after, outputs))
        if after
        else rows.nest
    )


def _with_output_before(rows: RowProgram, stage: Stmt) -> RowProgram:
    """Fuse a nest that computes an output read by the row program: it becomes a stage of the row program."""
    nest = perfect_nest(stage)
    store = injective_store(nest)
    result = None if store is None else fuse_producer(rows, nest.loops, store)
    if result is None:
        raise CannotMerge(f"{_name_of(stage)} is not computed row by row where the row program reads it")
    return result


def _epilogue_stmts(result: Store, loops: Sequence[For], after: Sequence[Stmt], outputs: Sequence[Buffer]) -> Stmt:
    """Statements that replace the store of a result.

    First the store itself if the result is an output, then the body of each following nest at the same element, with
    forwarded values.
    """
    stmts: list[Stmt] = [result] if result.buffer in outputs else []
    values = {result.buffer: _forwarded_value(result, result.buffer in outputs)}
    indices_of = {result.buffer: result.indices}
    for stage in after:
        nest = perfect_nest(stage)
        read = next((x for x in loads(stage) if x.buffer in values), None)
        if read is None or injective_store(nest) is None:
            raise CannotMerge(f"{_name_of(stage)} is not computed element by element from {result.buffer.name}")
        substitution = solve_loop_vars(nest, read, indices_of[read.buffer])
        if substitution is None:
            raise CannotMerge(f"{_name_of(stage)} does not read each element of {read.buffer.name} once")
        body = Substitute(substitution).stmt(nest.body)
        for load in loads(body):
            if load.buffer in values and not _reads_element(load, indices_of[load.buffer]):
                raise CannotMerge(f"{_name_of(stage)} reads {load.buffer.name} at other indices than it writes")
        body = _ReplaceBufferLoads(values).stmt(body)
        store = plain_store(Nest((), body))
        assert store is not None
        if store.indices != result.indices:
            if len(outputs) > 1:
                raise CannotMerge(f"{_name_of(stage)} has another shape than {result.buffer.name}")
            stored = _reshaped_store(result, store)
            body, store = _ReplacementOf(store, stored).stmt(body), stored
        stmts.append(body)
        values[store.buffer], indices_of[store.buffer] = _forwarded_value(store, is_stored=True), store.indices
    return seq(*stmts)


def _reshaped_store(result: Store, store: Store) -> Store:
    """A store of the same elements in another shape as one in the shape of the result, whose loops it shares."""
    shape = result.buffer.shape
    if not _equal(_flat_position(store.buffer.shape, store.indices), _flat_position(shape, result.indices)):
        raise CannotMerge(f"{store.buffer.name} would not be stored side by side")
    return replace(store, buffer=replace(store.buffer, shape=shape), indices=result.indices)


def _forwarded_value(store: Store, is_stored: bool) -> Value:
    """Value that later statements use for a stored element: the stored expression, or a load if that is cheaper."""
    is_recomputed = not is_stored or stmt_flops(store) <= MAX_RECOMPUTE_FLOPS
    return store.value if is_recomputed else Load(store.buffer, store.indices)


def solve_loop_vars(nest: Nest, read: Load, place: Sequence[SymExpr]) -> dict[SymVar, SymExpr] | None:
    """Solve for the loop variables of a nest at which it reads the element at the indices `place`.

    None unless the nest reads each element of the buffer once: in order, transposed or reshaped. The flat position of
    the load is a sum of variables times strides. Sorted by stride, the loops count all elements in a mixed radix; the
    digits of the flat position of `place` are the loop variables.
    """
    shape = read.buffer.shape
    if read.indices == nest.vars and all(map(_equal, nest.shape, shape)):
        return dict(zip(nest.vars, place, strict=True))
    position = flat_offset(shape, read.indices)
    strides = {loop: coefficient(position, loop.var) for loop in nest.loops if as_int(loop.extent) != 1}
    solution: dict[SymVar, SymExpr] = {loop.var: sym(0) for loop in nest.loops if loop not in strides}
    order: list[For] = []
    width, rest = sym(1), substitute(position, solution)
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
    solution.update({loop.var: digit for loop, digit in zip(order, digits, strict=True)})
    return solution


def _equal(a: SymExpr, b: SymExpr) -> bool:
    return a is b or _ANALYZER.can_prove_equal(a, b)


def _reads_element(load: Load, indices: Sequence[SymExpr]) -> bool:
    """Whether the load reads the element at these indices."""
    shape = load.buffer.shape
    if all(a is b or as_int(d) == 1 for a, b, d in zip(load.indices, indices, shape, strict=True)):
        return True
    return _equal(_flat_position(shape, load.indices), _flat_position(shape, indices))


def _flat_position(shape: Sequence[SymExpr], indices: Sequence[SymExpr]) -> SymExpr:
    """Flat position of an element; indices into dimensions of size 1 count as 0."""
    return flat_offset(shape, [sym(0) if as_int(d) == 1 else i for d, i in zip(shape, indices, strict=True)])


class _ReplaceBufferLoads(ProgramRewriter):
    """Replace every load of a buffer by one value."""

    def __init__(self, by: dict[Buffer, Value]) -> None:
        super().__init__()
        self._by = by

    def _value(self, value: Value) -> Value:
        return self._by.get(value.buffer, value) if isinstance(value, Load) else super()._value(value)


# Several outputs of one nest


def _one_nest(stages: Sequence[Stmt]) -> Stmt:
    """Merge nests over the same elements into one nest; a later nest may read what an earlier one stores."""
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
    """Names of the global buffers that a stage writes, for messages."""
    return ", ".join(dict.fromkeys(store.buffer.name for store in stores(stage) if store.buffer.scope == "global"))
