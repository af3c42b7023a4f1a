"""OpenBLAS (the package scipy-openblas32) for products of float32 matrices: which call computes what.

A rule is used in the range of sizes in which the measurements in openblas_costs.json found the library faster than the
kernel of this compiler; `python -m bench.library` makes that file. OpenBLAS runs on one thread, and the kernel that
calls it shares the work out among ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from relaxlite.ir.expr import Constant
from relaxlite.ir.pattern import Match, Pattern, is_op, wildcard
from relaxlite.passes.library_rules import Dims, LibraryRule, Range
from relaxlite.runtime.libraries import OPENBLAS

COSTS = Path(__file__).with_name("openblas_costs.json")
ROWS, PLAIN, TRANSPOSED = 101, 111, 112  # cblas: row-major, and how an operand is read
BLOCK = 512  # rows or columns of a result that one call computes

# Each kind of product: the routine, and which operands it reads transposed.
KINDS = ("gemv_t", "gemv_n", "gemv_a", "gemm_nn", "gemm_nt")


@dataclass(frozen=True, slots=True)
class _Batch:
    """The dimensions before the matrices: `names`, and whether the second operand has them too."""

    names: tuple[str, ...]
    both: bool = True

    @property
    def count(self) -> str:
        return " * ".join(self.names) or "1"

    def at(self) -> str:
        """Indices of matrix number i."""
        places = []
        for number in range(len(self.names)):
            inner = " * ".join(self.names[number + 1 :])
            place = f"i // ({inner})" if inner else "i"
            places.append(f"({place}) % {self.names[number]}" if number else place)
        return "".join(f"{place}, " for place in places)


_BATCHES = (_Batch(()), _Batch(("b",)), _Batch(("b", "h")))


@cache
def measured() -> Mapping[str, Any]:
    """The contents of openblas_costs.json."""
    found: dict[str, Any] = json.loads(COSTS.read_text("utf-8"))
    return found


@cache
def openblas_rules() -> tuple[LibraryRule, ...]:
    """The rules of those kinds for which there is a range in which they win."""
    found = measured()["ranges"]
    return tuple(
        replace(
            rule,
            when={text: (low, high) for text, (low, high) in found[kind]["when"].items()},
            reason=f"measured at least {found[kind]['least_gain']:.2f} times as fast as the generated kernel there",
            figures={"measured sizes": found[kind]["sizes"]},
        )
        for kind in KINDS
        if kind in found
        for rule in rules_of(kind)
    )


def rules_of(kind: str) -> Iterator[LibraryRule]:
    """One kind of product for all ranks, without a range."""
    for batch in _BATCHES:
        yield _rule(kind, batch)


def _rule(kind: str, batch: _Batch) -> LibraryRule:
    lead, at, last = batch.names, batch.at(), len(batch.names)
    b: Pattern
    b_dims: Dims = (*lead, "n", "k") if kind in ("gemv_n", "gemm_nt") else (*lead, "k", "n")
    a, b = wildcard("a").has_rank(last + 2), wildcard("b").has_rank(last + 2)
    if kind in ("gemv_n", "gemm_nt"):
        b = is_op("transpose")(b).has_attr(axes=(*range(last), last + 1, last))
    return LibraryRule(
        name=f"openblas_{kind}" + (f"_{last}" if last else ""),
        library=OPENBLAS,
        symbol="cblas_sgemm" if kind.startswith("gemm") else "cblas_sgemv",
        pattern=is_op("matmul")(a, b),
        operands={"a": (*lead, "m", "k"), "b": b_dims},
        arguments=tuple(f"int32 {ROWS};{_ARGUMENTS[kind]}".replace("@", at).split(";")),
        loops={"i": batch.count, "j": _BLOCKS[kind]} if lead else {"j": _BLOCKS[kind]},
        when=_LEAST[kind],
        check=_is_variable,
        work=f"2 * m * n * k // max(1, {_BLOCKS[kind]}) // 16",
    )


def _is_variable(found: Match) -> str | None:
    if isinstance(found["b"], Constant):
        return "b is constant, and its kernel streams through panels packed when compiling, which is never slower"
    return None


# Arguments after the order of the matrices; "@" stands for the indices of a matrix in its batch.
_OF_N, _OF_M = f"int32 min({BLOCK}, n - {BLOCK} * j)", f"int32 min({BLOCK}, m - {BLOCK} * j)"
_VECTOR = "int32 1;float32 0"
_ARGUMENTS = {
    # y[n] = x[k] @ B[k, n], a block of columns at a time
    "gemv_t": f"int32 {TRANSPOSED};int32 k;{_OF_N};float32 1;float32* b[@0, {BLOCK} * j];int32 n;"
    f"float32* a[@0, 0];{_VECTOR};float32* out[@0, {BLOCK} * j];int32 1",
    # y[n] = B[n, k] @ x[k], a block of rows at a time
    "gemv_n": f"int32 {PLAIN};{_OF_N};int32 k;float32 1;float32* b[@{BLOCK} * j, 0];int32 k;"
    f"float32* a[@0, 0];{_VECTOR};float32* out[@0, {BLOCK} * j];int32 1",
    # y[m] = A[m, k] @ x[k]
    "gemv_a": f"int32 {PLAIN};{_OF_M};int32 k;float32 1;float32* a[@{BLOCK} * j, 0];int32 k;"
    f"float32* b[@0, 0];{_VECTOR};float32* out[@{BLOCK} * j, 0];int32 1",
    "gemm_nn": f"int32 {PLAIN};int32 {PLAIN};{_OF_M};int32 n;int32 k;float32 1;float32* a[@{BLOCK} * j, 0];int32 k;"
    f"float32* b[@0, 0];int32 n;float32 0;float32* out[@{BLOCK} * j, 0];int32 n",
    "gemm_nt": f"int32 {PLAIN};int32 {TRANSPOSED};{_OF_M};int32 n;int32 k;float32 1;"
    f"float32* a[@{BLOCK} * j, 0];int32 k;float32* b[@0, 0];int32 k;float32 0;float32* out[@{BLOCK} * j, 0];int32 n",
}
_BLOCKS = {kind: f"({'n' if kind in ('gemv_t', 'gemv_n') else 'm'} + {BLOCK - 1}) // {BLOCK}" for kind in KINDS}
# What the routines need: none of them takes empty matrices for granted.
_SIZES: dict[str, Range] = {"m": (1, None), "k": (1, None), "n": (1, None)}
_LEAST: dict[str, dict[str, Range]] = {
    "gemv_t": {**_SIZES, "m": (1, 1)},
    "gemv_n": {**_SIZES, "m": (1, 1)},
    "gemv_a": {**_SIZES, "n": (1, 1)},
    "gemm_nn": _SIZES,
    "gemm_nt": _SIZES,
}
