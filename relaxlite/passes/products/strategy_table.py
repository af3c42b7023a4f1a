"""The table of strategies: how contractions are computed, the best first. A new strategy is a row here.

Rows of one form and encoding stand by falling `min_rows`. What a row requires is said of a target's instructions and of
the facts in its row of cpus.py, so that no row names a processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from relaxlite.ir.ops.block_quantized import MAX_BLOCK_ROWS
from relaxlite.passes.products.blocks import ManyRows
from relaxlite.passes.products.blocks_amx import ROWS as AMX_ROWS
from relaxlite.passes.products.blocks_amx import by_amx
from relaxlite.passes.products.blocks_int16 import MIN_ROWS as INT16_ROWS
from relaxlite.passes.products.blocks_int16 import by_int16_pairs
from relaxlite.passes.products.blocks_interleaved import InterleavedRows
from relaxlite.passes.products.blocks_maddubs import MIN_ROWS as MADDUBS_ROWS
from relaxlite.passes.products.blocks_maddubs import by_maddubs
from relaxlite.passes.products.contraction import Contraction
from relaxlite.passes.products.int16_products import Int16Products, int16_problem
from relaxlite.passes.products.strategy import Precision, Requirement, Strategy
from relaxlite.passes.products.winograd_products import MIN_ROWS as WINOGRAD_ROWS
from relaxlite.passes.products.winograd_products import FloatProducts, winograd_problem
from relaxlite.target import Target


def _needs(what: str, holds: Callable[[Target], bool]) -> Requirement:
    return Requirement(f"needs {what}, which {{cpu}} has not", holds)


AMX_INT8 = _needs("AMX tiles of bytes (amx-int8)", lambda target: target.has("amx-int8"))
AMX_BF16 = _needs("AMX tiles of bfloat16 (amx-bf16)", lambda target: target.has("amx-bf16"))
NO_AMX_BF16 = Requirement("is slower than the AMX tiles of {cpu}", lambda target: not target.has("amx-bf16"))
DP4A = _needs("dot products of four bytes (VNNI)", lambda target: target.has_dp4a)
NO_DP4A = Requirement("is slower than the dot products of four bytes of {cpu}", lambda target: not target.has_dp4a)
MADDUBS = _needs("sums of pairs of bytes (SSSE3)", lambda target: target.has_maddubs)
BYTES = _needs("sums of products of bytes (VNNI or SSSE3)", lambda target: target.has_dp4a or target.has_maddubs)
BF16_DOTS = _needs("bfloat16 dot products (avx512bf16)", lambda target: target.has("avx512bf16"))
FREE_ADDITIONS = _needs("adders beside its multipliers", lambda target: target.cpu_facts.adds_beside_fmas)
TWO_LOADS = _needs("two loads in the time of an FMA", lambda target: target.cpu_facts.loads_per_fma > 1)
ROW_INTERLEAVING = Requirement(
    "gains nothing on {cpu}, as far as is known", lambda target: target.cpu_facts.interleaves_rows
)

MADDUBS_BITS: Final = 7
"""Of codes whose products maddubs sums in pairs without overflow (codegen/llvm/maddubs.py)."""

_MATMUL: Final = frozenset({"matmul"})
_BLOCKED: Final = frozenset({("blocked", "blocked")})
_ROUNDED: Final = frozenset({("float32", "blocked")})
_FLOATS: Final = frozenset({("float32", "float32")})
_DEQUANTIZED: Final = frozenset({("float32", "dequantized")})


def _short_blocks(contraction: Contraction, target: Target) -> str | None:
    block = contraction.w.block
    if block > MAX_BLOCK_ROWS:
        return f"the sums of blocks of {block} rows may not fit into 32 bits; at most {MAX_BLOCK_ROWS} do"
    return None


def _fast_bits(contraction: Contraction, target: Target) -> str | None:
    bits = contraction.w.bits
    is_fast = target.has_dp4a or bits <= MADDUBS_BITS
    return None if is_fast else f"this processor multiplies codes of {bits} bits faster as floats"


def _allowed(*names: str, is_relaxed: bool = False) -> frozenset[Precision]:
    return frozenset(Precision(name, is_relaxed) for name in names)


WINDOW_NHWC = Strategy(
    "window_nhwc", "vectors of channels, one window each", frozenset({"window"}), evidence="bench.cpu conv"
)
WINDOW_NCHW = Strategy(
    "window_nchw", "vectors of positions, one window each", frozenset({"window"}), evidence="bench.cpu conv"
)
ROUNDED_BLOCKS = Strategy(
    "rounded_blocks", "integers in blocks of weights and of activations", _MATMUL, _ROUNDED, (BYTES,),
    rounds="activations to 12 bits in blocks", precisions=_allowed("auto", "bf16"), evidence="bench.llm prompt",
    fits=lambda contraction, target: _short_blocks(contraction, target) or _fast_bits(contraction, target),
)  # fmt: skip
REQUESTED_BLOCKS = replace(
    ROUNDED_BLOCKS, name="requested_blocks", requires=(), rounds="activations to the bits of the precision in blocks",
    precisions=_allowed("int8", "int12", "int16"), fits=_short_blocks,
)  # fmt: skip
ROTATED_BLOCKS = replace(
    ROUNDED_BLOCKS, name="rotated_blocks", rounds="activations to 8 bits in blocks, after a rotation",
    precisions=_allowed("auto", "bf16", "int8", is_relaxed=True), fits=_fast_bits,
)  # fmt: skip
BLOCKED_AMX = Strategy(
    "blocked_amx", "AMX tiles of 16 x 16 sums of bytes, codes unpacked once for all rows", _MATMUL, _BLOCKED,
    (AMX_INT8,), min_rows=AMX_ROWS, evidence="bench.llm prompt", many_rows=by_amx,
)  # fmt: skip
BLOCKED_MADDUBS = Strategy(
    "blocked_maddubs", "maddubs of signed codes by unsigned activations", _MATMUL, _BLOCKED, (MADDUBS, NO_DP4A),
    min_rows=MADDUBS_ROWS, evidence="bench.llm prompt", many_rows=by_maddubs,
)  # fmt: skip
BLOCKED_INT16_WINOGRAD = Strategy(
    "blocked_int16_winograd", "int16 pairs by Winograd's inner product, exact in integers", _MATMUL, _BLOCKED,
    (DP4A, FREE_ADDITIONS, TWO_LOADS), min_rows=INT16_ROWS, evidence="bench.llm prompt", many_rows=by_int16_pairs,
)  # fmt: skip
BLOCKED_INTERLEAVED = Strategy(
    "blocked_interleaved", "dp4a groups of several rows in turn", _MATMUL, _BLOCKED, (DP4A, ROW_INTERLEAVING),
    min_rows=2, evidence="bench.llm prompt", tile=InterleavedRows,
)  # fmt: skip
BLOCKED_DP4A = Strategy(
    "blocked_dp4a", "dp4a groups, row by row", _MATMUL, _BLOCKED, min_rows=2, evidence="bench.llm prompt", tile=ManyRows
)
BLOCKED_GEMV = Strategy(
    "blocked_gemv", "dp4a groups of one row, panels interleaved", _MATMUL, _BLOCKED, evidence="bench.llm generate"
)
CONVOLUTION = Strategy(
    "convolution", "FMA of a register tile: positions x vectors of output channels", frozenset({"convolution"}),
    evidence="bench.cpu conv",
)  # fmt: skip
WINOGRAD_INT16 = Strategy(
    "winograd_int16", "int16 pairs by Winograd's inner product", _MATMUL, _FLOATS, (FREE_ADDITIONS, NO_AMX_BF16),
    rounds="both operands to 14 bits", precisions=_allowed("bf16"), evidence="bench.cpu matmul", fits=int16_problem,
    prepares=Int16Products,
)  # fmt: skip
WINOGRAD_INT16_KEPT = replace(
    WINOGRAD_INT16, name="winograd_int16_kept", summary=f"{WINOGRAD_INT16.summary}, weights kept as they are stored",
    operands=_FLOATS | _DEQUANTIZED, precisions=_allowed("auto", "int8", is_relaxed=True),
)  # fmt: skip
WINOGRAD_FLOAT32 = Strategy(
    "winograd_float32", "FMA by Winograd's inner product", _MATMUL, _FLOATS | _DEQUANTIZED, (FREE_ADDITIONS,),
    min_rows=WINOGRAD_ROWS, evidence="bench.cpu matmul", fits=winograd_problem, prepares=FloatProducts,
)  # fmt: skip
DOTS_AMX_BF16 = Strategy(
    "bf16_amx", "AMX tiles of 16 x 16 sums of bfloat16", frozenset({"matmul", "convolution"}),
    frozenset({("bfloat16", "bfloat16")}), (AMX_BF16,), min_rows=AMX_ROWS, evidence="bench.cpu matmul",
)  # fmt: skip
DOTS_AMX_INT8 = Strategy(
    "int8_amx", "AMX tiles of 16 x 16 sums of bytes", frozenset({"matmul", "convolution"}),
    frozenset({("uint8", "int8")}), (AMX_INT8,), min_rows=AMX_ROWS, evidence="bench.cpu int8",
)  # fmt: skip
DOT_BF16 = Strategy(
    "bf16_dot", "dot products of two bfloat16", frozenset({"matmul", "convolution"}),
    frozenset({("bfloat16", "bfloat16")}), (BF16_DOTS,), evidence="bench.cpu matmul",
)  # fmt: skip
DOT_INT8 = Strategy(
    "int8_dp4a", "dp4a groups", frozenset({"matmul", "convolution"}), frozenset({("uint8", "int8")}), (DP4A,),
    evidence="bench.cpu int8",
)  # fmt: skip
DOT_INT16 = Strategy(
    "int16_pairs", "int16 pairs", frozenset({"matmul", "convolution"}), frozenset({("int16", "int16")}), (MADDUBS,),
    evidence="bench.cpu int8",
)  # fmt: skip
DEQUANTIZED_FMA = Strategy(
    "dequantized_fma", "FMA of a register tile whose weights become float32 as they are loaded", _MATMUL,
    frozenset((x, w) for x in ("float32", "float16", "bfloat16") for w in ("dequantized", "float16", "bfloat16"))
    | _ROUNDED,
    evidence="bench.llm generate",
)  # fmt: skip
FMA = Strategy(
    "fma", "multiply-adds of a register tile, operands converted first", _MATMUL, evidence="bench.cpu matmul"
)
TRANSPOSED_FMA = Strategy(
    "transposed_fma", "FMA of a register tile behind panels that are transposed as they are loaded",
    frozenset({"transposed"}), evidence="bench.cpu matmul",
)  # fmt: skip

TABLE: tuple[Strategy, ...] = (
    WINDOW_NHWC,
    WINDOW_NCHW,
    ROUNDED_BLOCKS,
    REQUESTED_BLOCKS,
    ROTATED_BLOCKS,
    BLOCKED_AMX,
    BLOCKED_INT16_WINOGRAD,
    BLOCKED_MADDUBS,
    BLOCKED_INTERLEAVED,
    BLOCKED_DP4A,
    BLOCKED_GEMV,
    WINOGRAD_INT16,
    WINOGRAD_INT16_KEPT,
    WINOGRAD_FLOAT32,
    DOTS_AMX_BF16,
    DOTS_AMX_INT8,
    DOT_BF16,
    DOT_INT8,
    DOT_INT16,
    CONVOLUTION,
    DEQUANTIZED_FMA,
    FMA,
    TRANSPOSED_FMA,
)
BY_NAME = {strategy.name: strategy for strategy in TABLE}
DOTS = {"dot2_bf16": DOT_BF16, "dot4_u8s8": DOT_INT8, "dot2_i16": DOT_INT16}
"""By the intrinsic that a strategy's inner loop is made of."""
ALTERNATIVES = tuple(
    strategy.name
    for strategy in TABLE
    if strategy in (FMA, CONVOLUTION, *DOTS.values()) or (strategy.prepares is None and strategy.min_rows > 1)
)
"""Names of those that `relaxlite tune` may prefer: others take what these do, too."""
