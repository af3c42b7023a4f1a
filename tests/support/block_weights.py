"""Random weights in blocks of few bits, as operands of the ops on them and as what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Var
from relaxlite.ir.op import get_op
from relaxlite.ir.ops.block_codes import pack_codes


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """scales * (codes - zero) + offsets of (rows, columns), a scale and an offset for each `block` rows."""

    codes: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any] | None
    bits: int
    zero: int
    table: tuple[int, ...] = ()  # what codes stand for

    @property
    def block(self) -> int:
        return self.codes.shape[0] // self.scales.shape[0]

    @property
    def operands(self) -> tuple[Constant, ...]:
        parts = (pack_codes(self.codes, self.block, self.bits), self.scales, self.offsets)
        return tuple(Constant.of(p) for p in parts if p is not None)

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """Without any rounding, as float64 (rows, columns)."""
        count, columns = self.scales.shape
        codes = np.array(self.table)[self.codes] if self.table else self.codes
        numbers = codes.astype(np.float64).reshape(count, self.block, columns) - self.zero
        found = numbers * self.scales.astype(np.float64)[:, None]
        if self.offsets is not None:
            found = found + self.offsets.astype(np.float64)[:, None]
        return found.reshape(-1, columns)

    def emit(self, bb: BlockBuilder, *, coarse: bool = False) -> Var:
        attrs = {"bits": self.bits, "zero": self.zero, "table": self.table, "coarse": coarse}
        return bb.emit(get_op("dequantize_blocks")(*self.operands, **attrs))


def block_weight(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    block: int = 32,
    zero: int | None = 8,
    dtype: str = "float16",
    seed: int = 0,
    table: tuple[int, ...] = (),
) -> BlockWeight:
    """Codes of all kinds, the extreme ones among them; `zero` None: offsets."""
    rng = np.random.default_rng((seed, rows, columns, bits))
    codes = rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    codes[0], codes[-1] = 0, (1 << bits) - 1
    scales, offsets = (rng.uniform(0.5, 1.5, (rows // block, columns)).astype(dtype) for _ in range(2))
    return BlockWeight(codes, scales, offsets if zero is None else None, bits, zero or 0, table)
