"""Programs as machine code that only says what they mean: one element after the other, every access checked.

No loop is vectorized, unrolled or parallel, no library is called, fresh memory is poisoned. An access outside of a
buffer is status -3, as the interpreter of loops (codegen/python_source.py) raises OutOfBoundsError; such code is some
thousand times as fast.
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


class _OneByOne(ProgramRewriter):
    """Loops without their kinds, and what stands beside calls of libraries in their place."""

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


def one_by_one(program: TensorProgram) -> TensorProgram:
    """The program, to be emitted with guards."""
    return replace(program, body=_OneByOne().stmt(program.body))
