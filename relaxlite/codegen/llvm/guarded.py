"""Unscheduled programs for guarded kernels: reference semantics as machine code, with every access bounds-checked.

Loops are serial, no library is called, fresh memory is poisoned. An access outside of a buffer is status -3, where the
interpreter (codegen/python_source.py) raises OutOfBoundsError.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite.ir.program import (
    CallLibrary,
    Check,
    For,
    LibraryFound,
    Literal,
    Prefetch,
    Seq,
    Stmt,
    TensorProgram,
    Value,
)
from relaxlite.ir.program_visitor import ProgramRewriter


class _Unschedule(ProgramRewriter):
    """Makes loops serial, drops prefetches, and takes the fallback of each library call."""

    def _value(self, value: Value) -> Value:
        return Literal(False, "bool") if isinstance(value, LibraryFound) else super()._value(value)

    def stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, For) and stmt.kind != "serial":
            stmt = replace(stmt, kind="serial")
        if isinstance(stmt, Prefetch):
            return Seq(())
        if isinstance(stmt, CallLibrary):
            return Check(Literal(False, "bool"), f"no libraries are called here: {stmt.symbol} of {stmt.library}")
        return super().stmt(stmt)


def unschedule(program: TensorProgram) -> TensorProgram:
    """Remove loop kinds, prefetches and library calls from a program, for `emit_kernel(is_guarded=True)`."""
    return replace(program, body=_Unschedule().stmt(program.body))
