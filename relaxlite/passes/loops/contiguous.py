"""Recognition of programs that copy contiguous ranges: slices, gathers at one index, concatenations.

    for i: for j: out[i, j] = x[i + n, j]          elements n*m to n*m + size of x, one after the other

A nest copies a contiguous range if the flat offset of its load minus the flat offset of its store is the same in all
iterations. Loops of one iteration do not count. Checks must be provable.
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
class CopiedRange:
    """A copy of `count` elements of `source` from offset `start` to offset `to` of the output; all in elements."""

    source: Buffer
    start: SymExpr
    to: SymExpr
    count: SymExpr


CopiedRanges: TypeAlias = tuple[CopiedRange, ...] | str | None


def copied_range(program: TensorProgram, ranges: CopiedRanges) -> CopiedRange | str | None:
    """The single range that a program copies to its whole output, proven to lie inside of the source for all sizes.

    `ranges`: result of `copied_ranges`. Returns a reason (str) if a copy cannot be proven, None if the program is not
    the copy of one range.
    """
    if ranges is None or isinstance(ranges, str):
        return ranges
    (copied, *further), (out,) = ranges, program.outputs
    if further or copied.count is not product(out.shape) or copied.to is not sym(0):
        return None
    end = copied.start + copied.count
    if not _ANALYZER.can_prove_le(0, copied.start) or not _ANALYZER.can_prove_le(end, product(copied.source.shape)):
        return f"it is not proven that elements {copied.start} to {end} lie inside of '{copied.source.name}'"
    return copied


def concatenated_inputs(program: TensorProgram, ranges: CopiedRanges) -> tuple[Buffer, ...] | None:
    """The inputs whose concatenation is the output; None if the program is no concatenation.

    The two or more inputs are distinct and copied completely, in the order of the result.
    """
    if ranges is None or isinstance(ranges, str) or len({r.source for r in ranges}) != len(ranges) or len(ranges) < 2:
        return None
    end = sym(0)
    for part in ranges:
        if part.start is not sym(0) or part.to is not end or part.count is not product(part.source.shape):
            return None
        end = end + part.count
    return tuple(part.source for part in ranges) if end is product(program.outputs[0].shape) else None


def copied_ranges(program: TensorProgram) -> CopiedRanges:
    """The range that each stage of a program with one output copies.

    Returns a reason (str) if a range cannot be proven, None if a stage does more than copy.
    """
    if program.num_outputs != 1:
        return None
    stages = top_stages(program)
    checks = [stage for stage in stages if isinstance(stage, Check)]
    stage_ranges = [_range(stage, program) for stage in stages if not isinstance(stage, Check)]
    if not stage_ranges or None in stage_ranges:
        return None
    problems = [f"it may fail: {check.message}" for check in checks if not _is_true(check.cond, {})]
    problems += [result for result in stage_ranges if isinstance(result, str)]
    return problems[0] if problems else tuple(result for result in stage_ranges if isinstance(result, CopiedRange))


def _range(stage: Stmt, program: TensorProgram) -> CopiedRange | str | None:
    binders, store = _binders(stage)
    if store is None or not isinstance(store.value, Load) or store.value.buffer not in program.inputs:
        return None
    if store.buffer is not program.outputs[0] or store.combine is not None:
        return None
    known: dict[SymVar, SymExpr] = {}
    variables: set[SymVar] = set()
    for binder in binders:
        if isinstance(binder, For):
            _, max_extent = _ANALYZER.interval(binder.extent)
            if max_extent is not None and max_extent <= 1:
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
    return CopiedRange(source, substitute(start, at_zero), substitute(to, at_zero), count)


def _binders(stage: Stmt) -> tuple[list[For | LetIndex | Check], Store | None]:
    """The binders around the only store of a stage, outermost first, and the store; None for the store in stages of
    another form."""
    binders: list[For | LetIndex | Check] = []
    while not isinstance(stage, Store):
        if isinstance(stage, Binder):
            binders.append(stage)
            stage = stage.body
        elif isinstance(stage, Seq) and all(isinstance(s, Check) for s in stage.stmts[:-1]):
            binders += [s for s in stage.stmts[:-1] if isinstance(s, Check)]
            stage = stage.stmts[-1]
        else:
            return binders, None
    return binders, stage


def _index(value: Value, known: _Known) -> SymExpr | None:
    """An integer value as an expression of the program's symbols; None if it depends on data."""
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
        operands = _is_true(cond.a, known), _is_true(cond.b, known)
        return all(operands) if cond.op == "and" else any(operands)
    return _compare(cond, known, negated=False)


def _is_false(cond: Value, known: _Known) -> bool:
    return _compare(cond, known, negated=True)


_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _compare(cond: Value, known: _Known, *, negated: bool) -> bool:
    """Whether a comparison of integers provably holds, or with `negated` provably does not hold."""
    if not isinstance(cond, Compare) or cond.op not in _NEGATED:
        return False
    a, b = _index(cond.a, known), _index(cond.b, known)
    if a is None or b is None:
        return False
    op = _NEGATED[cond.op] if negated else cond.op
    if op in ("gt", "ge"):
        a, b = b, a
    return _ANALYZER.can_prove_le(a, b) if op in ("le", "ge") else _ANALYZER.can_prove_lt(a, b)
