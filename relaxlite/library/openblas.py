"""Library rules for OpenBLAS (the package scipy-openblas32): float32 matrix products.

A rule applies in the range of sizes in which openblas_costs.json records the library as faster than the generated
kernel; `python -m bench.library` measures that file. OpenBLAS runs on one thread, and the calling kernel divides the
work among the compiler's own threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from relaxlite.ir.pattern import is_op, wildcard
from relaxlite.passes.fuse.library_rules import LibraryRule, SizeRange
from relaxlite.records import dataclass
from relaxlite.runtime.libraries import OPENBLAS

COSTS = Path(__file__).with_name("openblas_costs.json")
ROWS, PLAIN, TRANSPOSED = 101, 111, 112  # CBLAS constants: row-major order, and whether an operand is transposed
BLOCK = 512  # rows or columns of a result that one call computes

# Kinds of products: the routine, and which operands it reads as transposed.
KINDS = ("gemv_t", "gemv_n", "gemv_a", "gemm_nn", "gemm_nt")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Batch dimensions of a product.

    Where only the first operand has one, its matrices are contiguous: one matrix of more rows.
    """

    names: tuple[str, ...] = ()
    both: bool = True

    @property
    def rows(self) -> str:
        return "m" if self.both else " * ".join((*self.names, "m"))

    def matrix(self) -> str:
        """Indices of matrix number i."""
        indices = []
        for number in range(len(self.names)):
            stride = " * ".join(self.names[number + 1 :])
            index = f"i // ({stride})" if stride else "i"
            indices.append(f"({index}) % {self.names[number]}" if number else index)
        return "".join(f"{index}, " for index in indices)

    def row(self, number: str) -> str:
        """Indices of a row of the first operand, or of the result."""
        if self.both:
            return self.matrix() + number
        return f"({number}) // m, ({number}) % m"

    def loops(self, blocks: str) -> dict[str, str]:
        matrices = {"i": " * ".join(self.names)} if self.names and self.both else {}
        return {**matrices, "j": blocks}


_BATCHES = (_Batch(), _Batch(("p",)), _Batch(("p", "q")), _Batch(("p",), both=False))


@cache
def load_costs() -> Mapping[str, Any]:
    """Contents of openblas_costs.json."""
    result: dict[str, Any] = json.loads(COSTS.read_text("utf-8"))
    return result


@cache
def openblas_rules() -> tuple[LibraryRule, ...]:
    """Rules of all kinds with a range in which the library is faster."""
    ranges = load_costs()["ranges"]
    return tuple(
        replace(
            rule,
            when=_measured_range(rule, ranges[kind]["when"]),
            reason=f"there it measured {ranges[kind]['median_gain']:.1f} times as fast as the generated kernel "
            "(median)",
            figures={"measured sizes": ranges[kind]["sizes"]},
        )
        for kind in KINDS
        if kind in ranges
        for rule in rules_of_kind(kind)
    )


def _measured_range(rule: LibraryRule, when: Mapping[str, tuple[int | None, int | None]]) -> dict[str, SizeRange]:
    """Range of a kind, in terms of the rule's own expressions of rows, depth and columns, in this order."""
    return {text: (low, high) for text, (low, high) in zip(rule.when, (when["m"], when["k"], when["n"]), strict=True)}


def rules_of_kind(kind: str) -> Iterator[LibraryRule]:
    """Rules of one kind of product for all ranks, without a range."""
    for batch in _BATCHES:
        yield _rule(kind, batch)


def _rule(kind: str, batch: _Batch) -> LibraryRule:
    is_transposed = kind in ("gemv_n", "gemm_nt")
    batch_dims, second_batch_dims = batch.names, batch.names if batch.both else ()
    last = len(second_batch_dims)
    a, b = wildcard("a").has_rank(len(batch_dims) + 2), wildcard("b").has_rank(last + 2)
    shape = "".join(f"_{name}" for name in batch_dims) + ("" if batch.both else "_rows")
    second = is_op("transpose")(b).has_attr(axes=(*range(last), last + 1, last)) if is_transposed else b
    names = {"$m": batch.rows, "$first": batch.row("0"), "$row": batch.row(f"{BLOCK} * j"), "$b": ""}
    if batch.both:
        names["$b"] = batch.matrix()

    def expand(text: str) -> str:
        for name, replacement in names.items():
            text = text.replace(name, replacement)
        return text

    return LibraryRule(
        name=f"openblas_{kind}{shape}",
        library=OPENBLAS,
        symbol="cblas_sgemm" if kind.startswith("gemm") else "cblas_sgemv",
        pattern=is_op("matmul")(a, second),
        operands={
            "a": (*batch_dims, "m", "k"),
            "b": (*second_batch_dims, "n", "k") if is_transposed else (*second_batch_dims, "k", "n"),
        },
        arguments=tuple(expand(f"int32 {ROWS};{_ARGUMENTS[kind]}").split(";")),
        loops=batch.loops(expand(_BLOCKS[kind])),
        when={expand(text): limits for text, limits in _MIN[kind].items()},
        variable=("b",),
        work=expand(f"$m * n * k // max(1, {_BLOCKS[kind]}) // 8"),
    )


# Arguments after the order constant. "$m" is the number of rows, "$first" and "$row" are the indices of the first row
# and of the first row of a block, "$b" those of the second operand's matrix.
_OF_N, _OF_M = f"int32 min({BLOCK}, n - {BLOCK} * j)", f"int32 min({BLOCK}, $m - {BLOCK} * j)"
_A, _OUT = "float32* a[$row, 0];int32 k", "float32* out[$row, 0]"
_ARGUMENTS = {
    # y[n] = x[k] @ B[k, n], a block of columns at a time
    "gemv_t": f"int32 {TRANSPOSED};int32 k;{_OF_N};float32 1;float32* b[$b0, {BLOCK} * j];int32 n;"
    f"float32* a[$first, 0];int32 1;float32 0;float32* out[$first, {BLOCK} * j];int32 1",
    # y[n] = B[n, k] @ x[k], a block of rows at a time
    "gemv_n": f"int32 {PLAIN};{_OF_N};int32 k;float32 1;float32* b[$b{BLOCK} * j, 0];int32 k;"
    f"float32* a[$first, 0];int32 1;float32 0;float32* out[$first, {BLOCK} * j];int32 1",
    # y[m] = A[m, k] @ x[k]
    "gemv_a": f"int32 {PLAIN};{_OF_M};int32 k;float32 1;{_A};float32* b[$b0, 0];int32 1;float32 0;{_OUT};int32 1",
    "gemm_nn": f"int32 {PLAIN};int32 {PLAIN};{_OF_M};int32 n;int32 k;float32 1;{_A};"
    f"float32* b[$b0, 0];int32 n;float32 0;{_OUT};int32 n",
    "gemm_nt": f"int32 {PLAIN};int32 {TRANSPOSED};{_OF_M};int32 n;int32 k;float32 1;{_A};"
    f"float32* b[$b0, 0];int32 k;float32 0;{_OUT};int32 n",
}
_BLOCKS = {kind: f"({'n' if kind in ('gemv_t', 'gemv_n') else '$m'} + {BLOCK - 1}) // {BLOCK}" for kind in KINDS}
# Required sizes: the routines do not support empty matrices.
_SIZES: dict[str, SizeRange] = {"$m": (1, None), "k": (1, None), "n": (1, None)}
_MIN: dict[str, dict[str, SizeRange]] = {
    "gemv_t": {**_SIZES, "$m": (1, 1)},
    "gemv_n": {**_SIZES, "$m": (1, 1)},
    "gemv_a": {**_SIZES, "n": (1, 1)},
    "gemm_nn": _SIZES,
    "gemm_nt": _SIZES,
}
