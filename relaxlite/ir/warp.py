"""Warp instructions: what the 32 threads of a warp execute together, as calls of the library "warp".

    copy_async(to, from, bytes)   copies 16 bytes from global to shared memory; beyond the first `bytes` come zeros
    commit()                      makes one group of the copies since the last commit
    wait(n)                       waits until at most n groups are unfinished
    load_matrix(to, from)         loads four 8x8 matrices of 16-bit elements from shared memory; lane 8*q + r has the
                                  address of row r of matrix q
    load_matrix_t(to, from)       the same, each matrix transposed
    mma_f16(c, a, b)              c += a @ b of fragments; also mma_bf16, mma_s8, mma_tf32

A fragment is a part of a matrix in the registers of a warp: some 32-bit words for each lane. `mma` multiplies 16 rows
of a by 8 columns of b. Word w of lane l holds, with g = l // 4, q = l % 4 and E elements in a word:

    a   row g + 8*(w % 2), columns E*q + 4*E*(w // 2) ...      4 words
    b   rows E*q + 4*E*w ..., column g                         2 words
    c   row g + 8*(w // 2), column 2*q + w % 2                 4 words of float32 or int32

The layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16" and following.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.gpus import WARP
from relaxlite.ir.program import AddressOf, Buffer, CallLibrary, IndexValue, Value
from relaxlite.ir.program import Literal as LiteralValue
from relaxlite.ir.symbolic import IntLike, SymExpr, sym, syms
from relaxlite.records import dataclass

LIBRARY = "warp"
COPY_BYTES = 16
"""Bytes that `copy_async` writes, and that a lane's row of `load_matrix` has."""

OperandKind: TypeAlias = Literal["fragment", "shared", "global", "literal", "index"]


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand: an address in memory of a scope (a fragment: of `words` words in local memory), or a number."""

    kind: OperandKind
    words: int = 0
    dtype: DType = "int32"
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Mma:
    """A matrix product of fragments: `kind` is PTX's name of the elements, `width` the columns of a."""

    kind: str
    dtype: DType
    total: DType
    width: int
    shape: str

    @property
    def ptx(self) -> str:
        total = "s32" if self.total == "int32" else "f32"
        return f"mma.sync.aligned.{self.shape}.row.col.{total}.{self.kind}.{self.kind}.{total}"


@dataclass(frozen=True, slots=True)
class WarpInstruction:
    """A row of the table."""

    operands: tuple[Operand, ...]
    ptx: str
    needs_warp: bool = True
    """Whether all lanes of a warp must execute it together."""
    mma: Mma | None = None


MMA: Mapping[str, Mma] = {
    "mma_f16": Mma("f16", "float16", "float32", 16, "m16n8k16"),
    "mma_bf16": Mma("bf16", "bfloat16", "float32", 16, "m16n8k16"),
    "mma_tf32": Mma("tf32", "float32", "float32", 8, "m16n8k8"),
    "mma_s8": Mma("s8", "int8", "int32", 32, "m16n8k32"),
}
_SHARED, _TO_SHARED, _GLOBAL = Operand("shared"), Operand("shared", is_written=True), Operand("global")
_MATRICES = (Operand("fragment", 4, is_written=True), _SHARED)
INSTRUCTIONS: Mapping[str, WarpInstruction] = {
    "copy_async": WarpInstruction((_TO_SHARED, _GLOBAL, Operand("index")), "cp.async.cg.shared.global", False),
    "commit": WarpInstruction((), "cp.async.commit_group", False),
    "wait": WarpInstruction((Operand("literal"),), "cp.async.wait_group", False),
    "load_matrix": WarpInstruction(_MATRICES, "ldmatrix.sync.aligned.m8n8.x4.shared.b16"),
    "load_matrix_t": WarpInstruction(_MATRICES, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"),
    **{
        name: WarpInstruction(
            (Operand("fragment", 4, mma.total, is_written=True), Operand("fragment", 4), Operand("fragment", 2)),
            mma.ptx,
            mma=mma,
        )
        for name, mma in MMA.items()
    },
}


def at(buffer: Buffer, *indices: IntLike, written: bool = False) -> AddressOf:
    """Address of an element, as an operand."""
    return AddressOf(buffer, syms(indices), written)


def warp_call(name: str, *operands: AddressOf | SymExpr | int) -> CallLibrary:
    """Call of a warp instruction. Numbers become literals or index values, as the table says."""
    kinds = [operand.kind for operand in INSTRUCTIONS[name].operands]
    args = tuple(_argument(kind, value) for kind, value in zip(kinds, operands, strict=True))
    return CallLibrary(LIBRARY, name, args)


def _argument(kind: OperandKind, value: AddressOf | SymExpr | int) -> Value:
    if isinstance(value, AddressOf):
        return value
    return LiteralValue(int(value), "int32") if kind == "literal" else IndexValue(sym(value), "int32")


def call_problem(call: CallLibrary) -> str | None:
    """Check the operands of a warp instruction: an error message, or None."""
    row = INSTRUCTIONS.get(call.symbol)
    if row is None:
        return f"unknown warp instruction {call.symbol!r}; there are {', '.join(INSTRUCTIONS)}"
    if len(call.args) != len(row.operands):
        return f"{call.symbol} takes {len(row.operands)} operands, got {len(call.args)}"
    problems = map(_operand_problem, row.operands, call.args)
    return next((f"{call.symbol}: {problem}" for problem in problems if problem is not None), None)


def _operand_problem(operand: Operand, arg: Value) -> str | None:
    if operand.kind == "literal":
        return None if isinstance(arg, LiteralValue) else "a count must be a literal"
    if operand.kind == "index":
        is_number = isinstance(arg, IndexValue | LiteralValue)
        return None if is_number else f"a size must be an index, got a {type(arg).__name__}"
    scope = "local" if operand.kind == "fragment" else operand.kind
    if not isinstance(arg, AddressOf) or arg.buffer.scope != scope:
        return f"a {operand.kind} operand must be an address in {scope} memory"
    if operand.is_written and not arg.is_written:
        return f"the address in {arg.buffer.name} is written"
    if operand.kind == "fragment" and arg.buffer.dtype != operand.dtype:
        return f"the fragment {arg.buffer.name} is of {operand.dtype}, got {arg.buffer.dtype}"
    return None


# NumPy meaning. Lanes are in axes (warps, 32), words of a fragment in the last axis.

Array: TypeAlias = "np.ndarray[Any, Any]"
_GROUP, _PLACE = np.arange(WARP) // 4, np.arange(WARP) % 4


def _positions(rows: list[Array], columns: list[Array]) -> tuple[Array, Array]:
    """Row and column of each element of a fragment: arrays (32, elements)."""
    return np.stack(rows, 1), np.stack(columns, 1)


def _operand_positions(elements: int, words: int, *, is_a: bool) -> tuple[Array, Array]:
    """Positions of a's or b's elements, `elements` in a word."""
    outer, inner = [], []
    for word, element in np.ndindex(words, elements):
        half = word // 2 if is_a else word
        outer.append(_GROUP + 8 * (word % 2) if is_a else _GROUP)
        inner.append(elements * _PLACE + 4 * elements * half + element)
    return _positions(outer, inner) if is_a else _positions(inner, outer)


_TOTAL_POSITIONS = _positions([_GROUP + 8 * (w // 2) for w in range(4)], [2 * _PLACE + w % 2 for w in range(4)])


def multiply(mma: Mma, a: Array, b: Array, c: Array) -> Array:
    """c + a @ b of fragments: int32 words a (w, 32, 4) and b (w, 32, 2), totals c (w, 32, 4). TF32 keeps float32."""
    elements = 4 // dtypes.itemsize(mma.dtype)
    full = np.dtype(np.int64 if mma.total == "int32" else np.float32)
    left = np.empty((len(a), 16, mma.width), full)
    right = np.empty((len(b), mma.width, 8), full)
    for matrix, words, is_a in ((left, a, True), (right, b, False)):
        rows, columns = _operand_positions(elements, words.shape[-1], is_a=is_a)
        matrix[:, rows, columns] = np.ascontiguousarray(words).view(dtypes.to_numpy(mma.dtype)).astype(full)
    product = (left @ right)[:, _TOTAL_POSITIONS[0], _TOTAL_POSITIONS[1]]
    result: Array = (c.astype(full) + product).astype(dtypes.to_numpy(mma.total))
    return result


def load_matrices(rows: Array, *, is_transposed: bool) -> Array:
    """Words (w, 32, 4) of rows (w, 32, 8) of 16-bit elements: lane 8*q + r has row r of matrix q."""
    matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 4, 8, 8)
    if is_transposed:
        matrices = matrices.swapaxes(2, 3)
    pairs = np.ascontiguousarray(matrices).view(np.int32)  # (w, matrix, row, 4)
    result: Array = np.ascontiguousarray(pairs[:, :, _GROUP, _PLACE].swapaxes(1, 2))
    return result
