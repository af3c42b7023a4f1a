"""Programs that copy contiguous memory, recognised from their loops: slices, gathers of one place, concatenations.

    for i: for j: out[i, j] = x[i + n, j]          elements n*m to n*m + size of x, one after the other

A nest copies a contiguous range where the place that it reads differs from the one that it writes by the same number of
elements throughout. Dimensions of one element do not count. Checks must be known to hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import (
    Binary,
    Binder,
    Buffer,
    Check,
    Compare,
    For,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Value,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, product, substitute, sym
from relaxlite.passes.loops.pattern import top_stages
from relaxlite.records import dataclass

_ANALYZER = Analyzer()
_Known = Mapping[SymVar, SymExpr]


@dataclass(frozen=True, slots=True)
class Range:
    """`count` elements of `source` from `start` on, copied to the output from `to` on; all in elements."""

    source: Buffer
    start: SymExpr
    to: SymExpr
    count: SymExpr


Ranges: TypeAlias = tuple[Range, ...] | str | None


def copied_range(program: TensorProgram, ranges: Ranges) -> Range | str | None:
    """The one range that the program copies to all of its output, which lies inside the source whatever the sizes; why
    it is none; None for a program that does something else than to copy one. `ranges`: what it copies in all."""
    if ranges is None or isinstance(ranges, str):
        return ranges
    (found, *others), (out,) = ranges, program.outputs
    if others or found.count is not product(out.shape) or found.to is not sym(0):
        return None
    end = found.start + found.count
    if not _ANALYZER.can_prove_le(0, found.start) or not _ANALYZER.can_prove_le(end, product(found.source.shape)):
        return f"it is not proven that elements {found.start} to {end} lie inside of '{found.source.name}'"
    return found


def joined_inputs(program: TensorProgram, ranges: Ranges) -> tuple[Buffer, ...] | None:
    """The inputs, two or more and each once, that the output is: one after another, all of each. None: it is not."""
    if ranges is None or isinstance(ranges, str) or len({r.source for r in ranges}) != len(ranges) or len(ranges) < 2:
        return None
    end = sym(0)
    for part in ranges:
        if part.start is not sym(0) or part.to is not end or part.count is not product(part.source.shape):
            return None
        end = end + part.count
    return tuple(part.source for part in ranges) if end is product(program.outputs[0].shape) else None


def copied_ranges(program: TensorProgram) -> Ranges:
    """The ranges that the stages of a program of one output copy, one each; why one does not; None if one does more
    than to copy."""
    if program.num_outputs != 1:
        return None
    stages = top_stages(program)
    checks = [stage for stage in stages if isinstance(stage, Check)]
    found = [_range(stage, program) for stage in stages if not isinstance(stage, Check)]
    if not found or None in found:
        return None
    problems = [f"it may fail: {check.message}" for check in checks if not _is_true(check.cond, {})]
    problems += [item for item in found if isinstance(item, str)]
    return problems[0] if problems else tuple(item for item in found if isinstance(item, Range))


def _range(stage: Stmt, program: TensorProgram) -> Range | str | None:
    binders, store = _binders(stage)
    if store is None or not isinstance(store.value, Load) or store.value.buffer not in program.inputs:
        return None
    if store.buffer is not program.outputs[0] or store.combine is not None:
        return None
    known: dict[SymVar, SymExpr] = {}
    variables: set[SymVar] = set()
    for binder in binders:
        if isinstance(binder, For):
            _, most = _ANALYZER.interval(binder.extent)
            if most is not None and most <= 1:
                known[binder.var] = sym(0)
            else:
                variables.add(binder.var)
        elif isinstance(binder, Check):
            if not _is_true(binder.cond, known):
                return f"it may fail: {binder.message}"
        else:
            value = _index(binder.value, known)
            if value is None:
                return "it reads at places that data decides"
            known[binder.var] = value
    source, out = store.value.buffer, store.buffer
    to = flat_offset(out.shape, (substitute(index, known) for index in store.indices))
    start = flat_offset(source.shape, (substitute(index, known) for index in store.value.indices))
    if variables & set((start - to).free_vars()):
        return "what it reads is not contiguous"
    at_zero = {var: sym(0) for var in variables}
    count = product(tuple(binder.extent for binder in binders if isinstance(binder, For)))
    return Range(source, substitute(start, at_zero), substitute(to, at_zero), count)


def _binders(stage: Stmt) -> tuple[list[For | LetIndex | Check], Store | None]:
    """What stands round the one store of a stage, from the outside; None in its place: the stage has another form."""
    found: list[For | LetIndex | Check] = []
    while not isinstance(stage, Store):
        if isinstance(stage, Binder):
            found.append(stage)
            stage = stage.body
        elif isinstance(stage, Seq) and all(isinstance(s, Check) for s in stage.stmts[:-1]):
            found += [s for s in stage.stmts[:-1] if isinstance(s, Check)]
            stage = stage.stmts[-1]
        else:
            return found, None
    return found, stage


def _index(value: Value, known: _Known) -> SymExpr | None:
    """The integer as an expression of the program's symbols; None where it is not known."""
    if isinstance(value, Literal) and isinstance(value.value, int):
        return sym(int(value.value))
    if isinstance(value, IndexValue):
        return substitute(value.index, known)
    if isinstance(value, Binary) and value.op in ("add", "sub", "mul"):
        a, b = _index(value.a, known), _index(value.b, known)
        if a is None or b is None:
            return None
        return a + b if value.op == "add" else a - b if value.op == "sub" else a * b
    if isinstance(value, Select):
        if _is_true(value.cond, known):
            return _index(value.then, known)
        return _index(value.other, known) if _is_false(value.cond, known) else None
    return None


def _is_true(cond: Value, known: _Known) -> bool:
    if isinstance(cond, Binary) and cond.op in ("and", "or"):
        both = _is_true(cond.a, known), _is_true(cond.b, known)
        return all(both) if cond.op == "and" else any(both)
    return _compare(cond, known, negated=False)


def _is_false(cond: Value, known: _Known) -> bool:
    return _compare(cond, known, negated=True)


_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _compare(cond: Value, known: _Known, *, negated: bool) -> bool:
    """Whether a comparison of integers surely holds, or surely does not."""
    if not isinstance(cond, Compare) or cond.op not in _NEGATED:
        return False
    a, b = _index(cond.a, known), _index(cond.b, known)
    if a is None or b is None:
        return False
    op = _NEGATED[cond.op] if negated else cond.op
    if op in ("gt", "ge"):
        a, b = b, a
    return _ANALYZER.can_prove_le(a, b) if op in ("le", "ge") else _ANALYZER.can_prove_lt(a, b)
