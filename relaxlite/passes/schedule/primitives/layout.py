"""The layout primitive `pack`: change the dimensions of a buffer so that a kernel reads contiguous elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeAlias

from relaxlite.errors import ScheduleError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Allocate, Binary, Buffer, For, Literal, Load, Select, Stmt, Store, TensorProgram, Value
from relaxlite.ir.program import loops as loop_nest
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, sym
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.schedule.primitives.tree import find_allocation

Term: TypeAlias = "int | tuple[int, str, int]"  # an axis; or (axis, "//" or "%", factor), its quotient or remainder


def pack(program: TensorProgram, name: str, dims: Sequence[Term]) -> tuple[TensorProgram, TensorProgram | None]:
    """Change the dimensions of a buffer to axes of the old buffer or parts of them:

    pack(p, "B", ((1, "//", 64), 0, (1, "%", 64)))    B[k, j]  =>  B[j // 64, k, j % 64]

    Every axis occurs once, whole or as quotient and remainder by one factor; if the factor does not divide the size,
    the axis is padded. Packing a parameter changes the signature: the second result is then the program that packs an
    array (input: old layout, output: new layout, padded with zeros); None for an allocated buffer. Raises ScheduleError
    for invalid dimensions.
    """
    buffer = next((b for b in program.params if b.name == name), None)
    is_param = buffer is not None
    if buffer is None:
        buffer = find_allocation(program.body, name).buffer
    _check_terms(buffer, dims)
    packed = replace(buffer, shape=tuple(_size(buffer, term) for term in dims))
    rewriter = _Packed(buffer, packed, dims)
    params = tuple(packed if b is buffer else b for b in program.params)
    new = replace(program, params=params, body=rewriter.stmt(program.body))
    return new, _packing(program, buffer, packed, dims) if is_param else None


def _check_terms(buffer: Buffer, dims: Sequence[Term]) -> None:
    parts: dict[int, list[tuple[str, int]]] = {}
    for term in dims:
        axis, kind, factor = (term, "", 1) if isinstance(term, int) else term
        if not 0 <= axis < len(buffer.shape) or kind not in ("", "//", "%") or factor < 1:
            raise ScheduleError(
                f"{term!r} is no part of buffer {buffer.name} of {len(buffer.shape)} dimensions; write an axis, or "
                f"(axis, "
                "'//', factor) and (axis, '%', factor)"
            )
        parts.setdefault(axis, []).append((kind, factor))
    for axis in range(len(buffer.shape)):
        terms = sorted(parts.get(axis, []))
        is_whole = terms == [("", 1)]
        is_split = [kind for kind, _ in terms] == ["%", "//"] and terms[0][1] == terms[1][1]
        if not is_whole and not is_split:
            raise ScheduleError(
                f"axis {axis} of buffer {buffer.name} must occur once, or as '//' and '%' of one factor: elements "
                f"would "
                "share a place otherwise, or have none"
            )


def _size(buffer: Buffer, term: Term) -> SymExpr:
    if isinstance(term, int):
        return buffer.shape[term]
    axis, kind, factor = term
    return ceildiv(buffer.shape[axis], factor) if kind == "//" else sym(factor)


def _part(indices: Sequence[SymExpr], term: Term) -> SymExpr:
    if isinstance(term, int):
        return indices[term]
    axis, kind, factor = term
    return indices[axis] // factor if kind == "//" else indices[axis] % factor


class _Packed(ProgramRewriter):
    """Redirects accesses from the old to the new buffer, with divisions simplified by the ranges of enclosing loops."""

    def __init__(self, old: Buffer, new: Buffer, dims: Sequence[Term]) -> None:
        super().__init__()
        self._old, self._new, self._dims = old, new, dims
        self._known = Analyzer()

    def _moved(self, indices: Sequence[SymExpr]) -> tuple[SymExpr, ...]:
        return tuple(self._known.simplify(_part(indices, term)) for term in self._dims)

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._old:
            return Load(self._new, self._moved(value.indices))
        return super()._value(value)

    def stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Allocate) and stmt.buffer is self._old:
            return Allocate(self._new, self.stmt(stmt.body))
        if isinstance(stmt, For):
            outer, self._known = self._known, self._known.with_range(stmt.var, 0, stmt.extent)
            self._done = {}  # values shared between loops are simplified per loop
            new = super().stmt(stmt)
            self._known, self._done = outer, {}
            return new
        new = super().stmt(stmt)
        if isinstance(new, Store) and new.buffer is self._old:
            return replace(new, buffer=self._new, indices=self._moved(new.indices))
        return new


def _packing(program: TensorProgram, old: Buffer, new: Buffer, dims: Sequence[Term]) -> TensorProgram:
    zero = Literal(False if old.dtype == "bool" else 0, old.dtype)

    def element(*at: SymVar) -> Stmt:
        indices = [sym(0)] * len(old.shape)
        for term, var in zip(dims, at, strict=True):
            axis = term if isinstance(term, int) else term[0]
            indices[axis] = indices[axis] + (var * term[2] if not isinstance(term, int) and term[1] == "//" else var)
        conds: list[Value] = [less(indices[a], old.shape[a]) for a in _padded_axes(old, dims)]
        value: Value = Load(old, tuple(indices))
        if conds:
            value = Select(reduce(lambda a, b: Binary("and", a, b), conds), value, zero)
        return Store(new, at, value)

    symbols = tuple(s for s in program.symbols if any(s in dim.free_vars() for dim in old.shape))
    return TensorProgram((old, new), symbols, loop_nest("ijklmn", new.shape, element))


def _padded_axes(old: Buffer, dims: Sequence[Term]) -> list[int]:
    """The axes that may need padding."""
    split = [term for term in dims if not isinstance(term, int) and term[1] == "%"]
    return [axis for axis, _, factor in split if as_int(old.shape[axis] % factor) != 0]
