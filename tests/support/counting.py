"""Runs a tensor program element by element and counts what it does: the oracle of symbolic costs (passes/cost.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.python_source import poisoned
from relaxlite.ir import scalar_functions
from relaxlite.ir.op_costs import flops_of
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Load,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.symbolic import SymVar, evaluate


class Counter:
    """One run of a program. Afterwards: operations that ran, and which elements of each parameter were touched."""

    def __init__(self, program: TensorProgram, arrays: Sequence[Any], symbols: Mapping[SymVar, int]) -> None:
        self.program = program
        self.arrays: dict[Buffer, Any] = dict(zip(program.inputs, arrays, strict=True))
        self.symbols = dict(symbols)
        for buffer in program.outputs:
            self._allocate(buffer)
        self.flops = 0
        self.read: dict[Buffer, set[tuple[int, ...]]] = {b: set() for b in program.inputs}
        self.written: dict[Buffer, set[tuple[int, ...]]] = {b: set() for b in program.params}
        with np.errstate(all="ignore"):
            self.run(program.body)

    @property
    def bytes_read(self) -> int:
        return sum(len(found) * dtypes.itemsize(b.dtype) for b, found in self.read.items())

    @property
    def bytes_written(self) -> int:
        return sum(len(found) * dtypes.itemsize(b.dtype) for b, found in self.written.items())

    def _allocate(self, buffer: Buffer) -> None:
        self.arrays[buffer] = poisoned(tuple(evaluate(d, self.symbols) for d in buffer.shape), buffer.dtype)

    def _at(self, access: Load | Store) -> tuple[int, ...]:
        place = tuple(evaluate(index, self.symbols) for index in access.indices)
        assert all(0 <= i < n for i, n in zip(place, self.arrays[access.buffer].shape, strict=True))
        return place

    def run(self, stmt: Stmt) -> None:
        self.known: dict[int, Any] = {}  # what this statement has computed: shared parts count once
        if isinstance(stmt, Seq):
            for part in stmt.stmts:
                self.run(part)
        elif isinstance(stmt, For):
            for value in range(evaluate(stmt.extent, self.symbols)):
                self.symbols[stmt.var] = value
                self.run(stmt.body)
        elif isinstance(stmt, Store):
            self._store(stmt)
        elif isinstance(stmt, LetIndex):
            self.symbols[stmt.var] = int(self.value(stmt.value))
            self.run(stmt.body)
        elif isinstance(stmt, IfThenElse):
            taken = stmt.then if self.value(stmt.cond) else stmt.other
            if taken is not None:
                self.run(taken)
        elif isinstance(stmt, Allocate):
            self._allocate(stmt.buffer)
            self.run(stmt.body)
        elif isinstance(stmt, Check):
            assert self.value(stmt.cond), stmt.message

    def _store(self, store: Store) -> None:
        value, place, array = self.value(store.value), self._at(store), self.arrays[store.buffer]
        if store.combine is not None:
            value = scalar_functions.apply_combine(store.combine, array[place], value)
            self._count(store.combine, store.buffer.dtype)
        array[place] = value
        if store.buffer in self.written:
            self.written[store.buffer].add(place)

    def _count(self, op: str, dtype: str) -> None:
        self.flops += 0 if dtype == "bool" else flops_of(op)

    def value(self, value: Value) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = self._value(value)
        return self.known[id(value)]

    def _value(self, value: Value) -> Any:
        if isinstance(value, Literal):
            return np.asarray(value.value, dtypes.to_numpy(value.dtype))
        if isinstance(value, IndexValue):
            return np.asarray(evaluate(value.index, self.symbols), dtypes.to_numpy(value.dtype))
        if isinstance(value, Load):
            place = self._at(value)
            if value.buffer in self.read:
                self.read[value.buffer].add(place)
            return np.asarray(self.arrays[value.buffer][place])
        if isinstance(value, Select):
            return self.value(value.then if self.value(value.cond) else value.other)
        if isinstance(value, Unary):
            self._count(value.op, value.x.dtype)
            return scalar_functions.apply_unary(value.op, self.value(value.x))
        if isinstance(value, Binary):
            self._count(value.op, value.dtype)
            return scalar_functions.apply_binary(value.op, self.value(value.a), self.value(value.b))
        if isinstance(value, Compare):
            return scalar_functions.apply_compare(value.op, self.value(value.a), self.value(value.b))
        if isinstance(value, Cast):
            return scalar_functions.cast(self.value(value.x), value.dtype)
        assert isinstance(value, Intrinsic)
        self._count(value.name, value.dtype)
        return scalar_functions.apply_intrinsic(value.name, tuple(map(self.value, value.args)))
