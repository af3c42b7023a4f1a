"""Overflow-checked symbolic integers, for programs with the attribute `checked`: overflow of int64 is status -1.

These programs compute the sizes of tensors from a caller's shapes. Index arithmetic of all other programs stays inside
those tensors, so it cannot overflow.
"""

from __future__ import annotations

from relaxlite.codegen.llvm.context import OVERFLOWED, KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const
from relaxlite.codegen.llvm.indices import divide_floor
from relaxlite.ir.symbolic import Extremum, FloorDiv, FloorMod, Max, Min, SymExpr, SymVar


def emit_index(k: KernelContext, expr: SymExpr) -> Val:
    """Emit a symbolic expression as i64, a vector where it varies over lanes; with overflow checks in checked
    programs."""
    if not k.is_checked:
        return k.ix.value(expr)
    flags: list[Val] = []
    value = _sum(k, k.ix.resolve(expr), flags)
    if flags:
        overflowed = flags[0]
        for flag in flags[1:]:
            overflowed = k.e.binary("or", overflowed, flag)
        k.fail_if(overflowed, OVERFLOWED)
    return value


def _sum(k: KernelContext, expr: SymExpr, flags: list[Val]) -> Val:
    total = None
    for monomial, coef in expr.terms:
        term = _atom(k, monomial[0], flags)
        for atom in monomial[1:]:
            term = _overflowing(k.e, "smul", term, _atom(k, atom, flags), flags)
        if coef != 1:
            term = _overflowing(k.e, "smul", term, int_const(coef), flags)
        total = term if total is None else _overflowing(k.e, "sadd", total, term, flags)
    if total is None:
        return int_const(expr.const)
    return _overflowing(k.e, "sadd", total, int_const(expr.const), flags) if expr.const else total


def _overflowing(e: Emitter, name: str, a: Val, b: Val, flags: list[Val]) -> Val:
    full = f"llvm.{name}.with.overflow.i64"
    e.module.declare(full, "{ i64, i1 }", ["i64", "i64"])
    pair = e.op(f"call {{ i64, i1 }} @{full}({a}, {b})", "{ i64, i1 }")
    flags.append(e.op(f"extractvalue {pair}, 1", "i1", 0, "overflow"))
    return e.op(f"extractvalue {pair}, 0", "i64", 0, "x")


def _atom(k: KernelContext, atom: SymExpr, flags: list[Val]) -> Val:
    if isinstance(atom, SymVar):
        return k.ix.variables[atom].value
    assert isinstance(atom, FloorDiv | FloorMod | Min | Max)
    a, b = _sum(k, atom.a, flags), _sum(k, atom.b, flags)
    if isinstance(atom, Extremum):
        return k.e.intrinsic("smin" if isinstance(atom, Min) else "smax", a, b)
    return divide_floor(k.e, a, b, is_div=isinstance(atom, FloorDiv), is_positive=False)
