"""Products with weights in blocks, compiled once and run at many sizes, against exact arithmetic in NumPy."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import erf
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.llvm import emit_assembly, emit_program
from relaxlite.cpus import PrefetchPlan
from relaxlite.errors import LibraryError, RelaxliteError, ValidationError
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.ir import first_difference, module_constants, ops, parse_module, print_module, verify
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.block_codes import hadamard_transform
from relaxlite.ir.program import Allocate, Binary, Intrinsic, Literal, Load, Prefetch, TensorProgram, Value
from relaxlite.ir.program_visitor import ProgramRewriter, all_values, walk_stmts
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions, map_programs, program_calls
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.runtime import libraries
from relaxlite.target import Target
from tests.passes.products.test_register_tile import inner_loops
from tests.support import tiers
from tests.support.block_weights import BlockWeight, block_weight
from tests.support.dense_llm import build_dense
from tests.support.llm_models import VOCAB, small_checkpoint
from tests.support.paths import ROOT

HOST = Target.host()
ROWS = (0, 1, 2, 3, 17, 127, 128, 129, 300)
LOW_BITS = {"int8": 0, "int12": 4, "int16": 8}
# What runs wherever AVX2 does, without an instruction for products of bytes, and with one of 256 bits.
PORTABLE = "llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu"
NARROW = "llvm -mcpu=x86-64-v3 -mattr=+avxvnni -mtriple=x86_64-unknown-linux-gnu"
WITH_DOTS = "llvm -mcpu=icelake-server -mtriple=x86_64-unknown-linux-gnu"
WIDE = "llvm -mcpu=skylake-avx512 -mtriple=x86_64-unknown-linux-gnu"  # 512 bits without such an instruction
OLD = "llvm -mcpu=x86-64-v2 -mtriple=x86_64-unknown-linux-gnu"  # of 128 bits
BARE = "llvm -mcpu=x86-64 -mattr=+avx,+avx2,+avxvnni -mtriple=x86_64-unknown-linux-gnu"  # not a word about SSSE3
OLDEST = "llvm -mcpu=x86-64 -mtriple=x86_64-unknown-linux-gnu"

Array: TypeAlias = "np.ndarray[Any, Any]"


def here(text: str) -> str:
    """The target, where this machine can run what is compiled for it."""
    if not Target.parse(text).runs_here:
        pytest.skip("this processor lacks the instructions")
    return text


def product(weight: BlockWeight, *, x: TensorType | None = None, coarse: bool = False) -> IRModule:
    """x @ weight"""
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=x or TensorType.of((m, len(weight.codes)), "float32")) as (given,):
        bb.result(bb.emit(ops.matmul(given, weight.emit(bb, coarse=coarse))))
    return bb.module()


def some_rows(count: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, count, width)).standard_normal((count, width)).astype(np.float32)


# Results


# bits, rows of a block, zero point (None: offsets), dtype of the scales, columns
WEIGHTS: dict[str, tuple[int, int, int | None, str, tuple[int, ...]]] = {
    "4 bits": (4, 32, 8, "float16", (1, 80)),
    "4 bits, offsets": (4, 32, None, "float32", (31, 96)),
    "4 bits in blocks of 8": (4, 8, 3, "float32", (33,)),
    "5 bits": (5, 32, 16, "float16", (32,)),
    "5 bits, offsets": (5, 64, None, "float16", (31, 80)),
    "6 bits in blocks of 16": (6, 16, 32, "float32", (33, 96)),
    "8 bits": (8, 32, 128, "float16", (1, 32, 80)),
    "8 bits, offsets": (8, 16, None, "float16", (33,)),
    "2 bits in blocks of 16, offsets": (2, 16, None, "float16", (31, 80)),
    "3 bits in blocks of 16": (3, 16, 4, "float16", (48,)),
    "3 bits, a table": (3, 32, 9, "float32", (33,)),
    "4 bits, a table": (4, 32, 128, "float16", (31, 80)),
    "4 bits, a table of few bits": (4, 32, 12, "float32", (33,)),
    "4 bits, a table, offsets": (4, 16, None, "float16", (48,)),
    "4 bits, a table around 64": (4, 32, 64, "float16", (48,)),
}
TABLES = {
    "3 bits, a table": (2, 10, 18, 9, 0, 8, 16, 9),
    "4 bits, a table": (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241),
    "4 bits, a table of few bits": (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0),
    "4 bits, a table around 64": (128, 0, 64, 1, 127, 2, 3, 60, 61, 62, 63, 65, 66, 67, 68, 100),
    "4 bits, a table, offsets": (255, 0, 1, 2, 3, 4, 5, 6, 7, 8, 250, 251, 252, 253, 254, 128),
}
CASES = [(name, columns, "llvm") for name, (*_, widths) in WEIGHTS.items() for columns in widths]
CASES += [
    (name, widths[-1], target) for target in (PORTABLE, WIDE, OLD, NARROW) for name, (*_, widths) in WEIGHTS.items()
]


def weight_of(name: str, columns: int) -> BlockWeight:
    bits, block, zero, dtype, _ = WEIGHTS[name]
    return block_weight(192, columns, bits=bits, block=block, zero=zero, dtype=dtype, table=TABLES.get(name, ()))


def exact_case(name: str, columns: int, low_bits: int) -> tuple[BlockWeight, Array]:
    """A weight and activations whose product has no rounding: activations are integers or their 16th or 256th parts
    with 127 among each block's, so that they are what they are rounded to, and scales are powers of two. The sums of
    all blocks fit into the 24 bits of a float."""
    weight, rng = weight_of(name, columns), np.random.default_rng(columns)
    block, unit = weight.block, 1 << low_bits
    x = rng.integers(-127, 128, (300, 192)).astype(np.float32) / unit
    peaks = np.arange(0, 192, block) + rng.integers(0, block, 192 // block)
    x[:, peaks] = rng.choice([-127, 127], (300, len(peaks)))
    codes = weight.codes.copy()
    if weight.table:
        small = np.argsort(abs(np.array(weight.table) - weight.zero))[:3]
        codes[peaks] = rng.choice(small, (len(peaks), columns))
    else:
        codes[peaks] = weight.zero + rng.integers(-3, 4, (len(peaks), columns)) if weight.zero else 3
    scales = rng.choice([0.5, 0.25], weight.scales.shape).astype(weight.scales.dtype)
    offsets = None if weight.offsets is None else -(scales * 2)
    return replace(weight, codes=codes.astype(np.uint8), scales=scales, offsets=offsets), x


@pytest.mark.each_value("name", "target", "precision")
@pytest.mark.parametrize("precision", LOW_BITS)
@pytest.mark.parametrize(("name", "columns", "target"), CASES)
def test_sums_of_integers_are_exact_at_every_size(name: str, columns: int, precision: str, target: str) -> None:
    weight, x = exact_case(name, columns, LOW_BITS[precision])
    wanted = x.astype(np.float64) @ weight.values
    smallest = 0.25 / (1 << LOW_BITS[precision])
    assert (abs(x).astype(np.float64) @ abs(weight.values)).max() < smallest * (1 << 24)
    exe = rl.compile(product(weight), here(target), precision=precision)
    for m in ROWS:
        np.testing.assert_array_equal(exe(x[:m]), wanted[:m], err_msg=f"{m} rows")


MIXED = {
    "4 bits": 96, "4 bits, offsets": 33, "5 bits": 80, "5 bits, offsets": 31, "6 bits in blocks of 16": 96,
    "4 bits, a table of few bits": 33,
}  # fmt: skip
"""Columns of weights whose quads may be mixed: 8 at a time where bytes are multiplied, of 6 bits 4, else 4 and none."""


def mixed_case(name: str, columns: int, rotation: int = 8) -> tuple[BlockWeight, Array]:
    """The same for products whose quads are mixed, some at a time: activations which, mixed, are so many times integers
    with 127 among each block's."""
    weight, rng = weight_of(name, columns), np.random.default_rng(columns)
    block = weight.block
    numbers = rng.integers(-127, 128, (300, 192))
    peaks = np.arange(0, 192, block) + rng.integers(0, block, 192 // block)
    numbers[:, peaks] = rng.choice([-127, 127], (300, len(peaks)))
    quads = numbers.reshape(300, 192 // (4 * rotation), rotation, 4)
    x = (
        np.stack(hadamard_transform([quads[:, :, q] for q in range(rotation)]), axis=2)
        .reshape(300, 192)
        .astype(np.float32)
    )
    scales = rng.choice([0.5, 0.25], weight.scales.shape).astype(np.float16)
    return replace(weight, scales=scales, offsets=None if weight.offsets is None else -(scales * 2)), x


@pytest.mark.each_value("name", "target")
@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for target in ("llvm", PORTABLE, WIDE, OLD, NARROW) for name in MIXED],
)
def test_sums_of_mixed_quads_are_exact_at_every_size(name: str, target: str) -> None:
    has_bytes, has_six = Target.parse(target).has_dp4a, WEIGHTS[name][0] == 6
    if has_six and not has_bytes:
        pytest.skip("products in pairs have no room for these bytes")
    weight, x = mixed_case(name, MIXED[name], 8 if has_bytes and not has_six else 4)
    wanted = x.astype(np.float64) @ weight.values
    exe = rl.compile(product(weight, coarse=True), here(target), precision="int8")
    for m in ROWS:
        np.testing.assert_array_equal(exe(x[:m]), wanted[:m], err_msg=f"{m} rows")


def rounded(x: Array, block: int, low_bits: int) -> Array:
    """What x is rounded to, as float64: integers of each block, times its scale."""
    blocks = x.reshape(len(x), -1, block)
    top = abs(blocks).max(axis=2, keepdims=True)
    greatest = 127 << low_bits
    scaled = blocks * (np.float32(127) / np.where(top > 0, top, 1))
    high = np.rint(scaled)
    if low_bits:
        unit = float(1 << low_bits)
        high = high * unit + np.minimum(np.rint((scaled - high) * unit), 127)
    return np.asarray((high.astype(np.float64) * (top.astype(np.float64) / greatest)).reshape(x.shape))


@pytest.mark.each_value
@pytest.mark.parametrize("target", ["llvm", PORTABLE, OLD], ids=["host", "avx2", "ssse3"])
@pytest.mark.parametrize("precision", LOW_BITS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_round_alike_among_any_number_of_others(name: str, precision: str, target: str) -> None:
    weight, x = weight_of(name, 80), some_rows(300, 192)
    x[5, 32:64] = 0
    x[6:8] *= np.float32([[1e-30], [1e30]])
    exe = rl.compile(product(weight), here(target), precision=precision)
    alone = np.concatenate([exe(x[i : i + 1]) for i in range(300)])
    for m in ROWS:
        np.testing.assert_array_equal(exe(x[:m]), alone[:m], err_msg=f"{m} rows")
    taken = rounded(x, weight.block, LOW_BITS[precision])
    size = abs(taken) @ abs(weight.values) + 1e-60
    assert (abs(alone - taken @ weight.values) / size).max() <= 192 * 2.0**-23
    plain = x.astype(np.float64) @ weight.values
    assert (abs(alone - plain) / size).max() <= {"int8": 2e-2, "int12": 2e-3, "int16": 1e-4}[precision]


# What stands around products


Layer: TypeAlias = "Callable[[BlockBuilder, list[Var], list[BlockWeight]], Expr]"


def products(bb: BlockBuilder, x: Expr, weights: list[BlockWeight]) -> list[Var]:
    return [bb.emit(ops.matmul(x, weight.emit(bb))) for weight in weights]


def biased(bb: BlockBuilder, given: list[Var], weights: list[BlockWeight]) -> Expr:
    (y,) = products(bb, given[0], weights[:1])
    return bb.emit(ops.gelu(bb.emit(ops.add(y, np.linspace(-1, 1, COLUMNS, dtype=np.float32)))))


def residual(bb: BlockBuilder, given: list[Var], weights: list[BlockWeight]) -> Expr:
    (y,) = products(bb, given[0], weights[:1])
    return bb.emit(ops.add(given[1], y))


def gated(bb: BlockBuilder, given: list[Var], weights: list[BlockWeight]) -> Expr:
    gate, up = products(bb, given[0], weights[:2])
    return bb.emit(ops.multiply(bb.emit(ops.multiply(gate, bb.emit(ops.sigmoid(gate)))), up))


def joined(bb: BlockBuilder, given: list[Var], weights: list[BlockWeight]) -> Expr:
    return Tuple(tuple(products(bb, given[0], weights)))


COLUMNS, DEPTH = 80, 96
LAYERS: dict[str, Layer] = {"bias and gelu": biased, "residual": residual, "gate": gated, "joined": joined}


def layer(make: Layer) -> tuple[IRModule, list[BlockWeight]]:
    """Of products of one x, with weights of three kinds."""
    weights = [
        block_weight(DEPTH, COLUMNS, bits=bits, zero=zero, seed=seed)
        for seed, (bits, zero) in enumerate(((4, 8), (4, 8), (8, 128)))
    ]
    bb = BlockBuilder()
    m = bb.symbol("m")
    types = {"x": TensorType.of((m, DEPTH), "float32"), "r": TensorType.of((m, COLUMNS), "float32")}
    with bb.function("main", **types) as given:
        bb.result(make(bb, list(given), weights))
    return bb.module(), weights


def in_numpy(name: str, x: Array, r: Array, weights: list[BlockWeight]) -> list[Array]:
    first, second, third = (x.astype(np.float64) @ w.values for w in weights)
    if name == "joined":
        return [first, second, third]
    if name == "residual":
        return [r + first]
    if name == "gate":
        return [first / (1 + np.exp(-first)) * second]
    y = first + np.linspace(-1, 1, COLUMNS)
    return [y * (1 + np.vectorize(erf)(y / np.sqrt(2))) / 2]


@pytest.mark.parametrize("name", LAYERS)
def test_what_follows_products_sees_the_same_rows(name: str) -> None:
    module, weights = layer(LAYERS[name])
    exe = rl.compile(module, precision="int16")
    x, r = some_rows(300, DEPTH), some_rows(300, COLUMNS)

    def run(begin: int, end: int) -> list[Array]:
        found = exe(x[begin:end], r[begin:end])
        return list(found) if isinstance(found, tuple) else [found]

    alone = [np.concatenate(parts) for parts in zip(*(run(i, i + 1) for i in range(300)), strict=True)]
    for found, wanted in zip(alone, in_numpy(name, x, r, weights), strict=True):
        assert abs(found - wanted).max() <= 1e-4 * abs(wanted).max()
    for m in ROWS:
        for found, rows in zip(run(0, m), alone, strict=True):
            np.testing.assert_array_equal(found, rows[:m], err_msg=f"{m} rows")


@pytest.mark.parametrize("dims", [("b", "m"), (2, "m"), ("b", 1, "m"), (3, 5), ()])
def test_rows_may_have_any_leading_dimensions(dims: tuple[int | str, ...]) -> None:
    weight = block_weight(64, 33)
    bb = BlockBuilder()
    shape = tuple(bb.symbol(d) if isinstance(d, str) else d for d in dims)
    with bb.function("main", x=TensorType.of((*shape, 64), "float32")) as (x,):
        bb.result(bb.emit(ops.matmul(x, weight.emit(bb))))
    exe = rl.compile(bb.module(), precision="int16")
    for sizes in ({"b": 3, "m": 7}, {"b": 1, "m": 1}, {"b": 0, "m": 4}, {"b": 5, "m": 0}):
        given = np.random.default_rng(1).standard_normal([sizes.get(str(d), d) for d in dims] + [64]).astype(np.float32)
        wanted = given @ weight.values
        found = exe(given)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * abs(wanted).max(initial=1))


def test_weights_may_be_arguments_of_any_width() -> None:
    bb = BlockBuilder()
    m, n = bb.symbol("m"), bb.symbol("n")
    types = {
        "x": TensorType.of((m, 64), "float32"), "words": TensorType.of((8, n), "int32"),
        "scales": TensorType.of((2, n), "float16"), "offsets": TensorType.of((2, n), "float16"),
    }  # fmt: skip
    with bb.function("main", **types) as (x, *operands):
        weight = bb.emit(get_op("dequantize_blocks")(*operands, bits=4, zero=0))
        bb.result(bb.emit(ops.matmul(x, weight)))
    exe = rl.compile(bb.module(), precision="int16")
    for columns in (1, 31, 32, 80, 129):
        weight = block_weight(64, columns, zero=None)
        given = [c.value for c in weight.operands]
        alone = np.concatenate([exe(row[None], *given) for row in some_rows(129, 64)])
        wanted = some_rows(129, 64) @ weight.values
        assert abs(alone - wanted).max() <= 1e-4 * abs(wanted).max()
        for m in (0, 2, 17, 129):
            np.testing.assert_array_equal(exe(some_rows(129, 64)[:m], *given), alone[:m])


@pytest.mark.parametrize("precision", LOW_BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float, precision: str) -> None:
    exe, x = rl.compile(product(block_weight(DEPTH, COLUMNS)), precision=precision), some_rows(129, DEPTH)
    clean = exe(x)
    for m in (1, 2, 17, 129):
        for column in (0, 5, 31, 95):
            given = x[:m].copy()
            given[m // 2, column] = bad
            found = exe(given)
            assert np.isnan(found[m // 2]).all() if np.isnan(bad) else not np.isfinite(found[m // 2]).any()
            np.testing.assert_array_equal(np.delete(found, m // 2, 0), np.delete(clean[:m], m // 2, 0))


# What the compiler makes of them


def lowered(module: IRModule, target: str = WITH_DOTS, precision: str = "auto") -> tuple[IRModule, PassContext]:
    context = PassContext(Target.parse(target), precision=precision, verify=True)
    return run_passes(module, default_pipeline(), context), context


def is_of(name: str, op: str) -> bool:
    """Whether this is the name of a program of the op: "fused_matmul_blocks_add"."""
    return re.search(rf"(^|_){op}(_|$)", name) is not None


def programs_with(module: IRModule, op: str) -> dict[str, TensorProgram]:
    return {name: p for name, p in module.programs().items() if is_of(name, op)}


def calls_of(module: IRModule, op: str) -> int:
    return sum(is_of(call.callee.name, op) for call in program_calls(module))


def reasons(context: PassContext) -> list[tuple[bool, str]]:
    return [(d.taken, d.reason) for d in context.decisions if d.step == "integer_products"]


@pytest.mark.parametrize(("precision", "bits"), [("auto", 12), ("int16", 16), ("int12", 12), ("int8", 8), ("bf16", 12)])
def test_products_take_dot_instructions_over_panels(precision: str, bits: int) -> None:
    target = f"llvm -mcpu={'sapphirerapids' if precision == 'bf16' else 'icelake-server'} -mtriple=x86_64-linux-gnu"
    module, context = lowered(product(block_weight(DEPTH, COLUMNS)), target, precision)
    (program,) = programs_with(module, "matmul_blocks").values()
    dots = [v for v in all_values(program.body) if isinstance(v, Intrinsic) and v.name == "dot4_words"]
    assert dots
    words, scales = program.params[3:5]
    assert [tuple(map(int, b.shape)) for b in (words, scales)] == [(5, 12, 16), (5, 3, 16)]  # 80 columns by 16
    text = emit_program("p", program, Target.parse(target))
    assert "@llvm.x86.avx512.vpdpbusd.512" in text
    reason = f"activations are rounded to {bits} bits in blocks, and sums of a block are exact"
    assert reasons(context) == [(True, reason)]


@pytest.mark.parametrize(
    ("cpu", "name", "precision", "products"),
    [
        ("sapphirerapids", "4 bits", "int8", ["tdpbssd"]),
        ("sapphirerapids", "4 bits", "int12", ["tdpbssd"]),  # both bytes in one product of 64
        ("sapphirerapids", "4 bits", "int16", ["tdpbssd"] * 2),
        ("sapphirerapids", "4 bits in blocks of 8", "int12", ["tdpbssd"] * 2),  # 12 << 4 is no signed byte
        ("sapphirerapids", "8 bits", "int12", ["tdpbssd"] * 2),
        ("sapphirerapids", "8 bits, offsets", "int8", ["tdpbsud"]),
        ("sapphirerapids", "4 bits, a table", "int12", ["tdpbssd"] * 2),
        ("sapphirerapids", "4 bits, a table of few bits", "int8", ["tdpbssd"]),
        ("sapphirerapids", "4 bits, a table, offsets", "int8", ["tdpbsud"]),
        ("icelake-server", "4 bits", "int8", []),
    ],
)
def test_many_rows_are_products_of_tiles(cpu: str, name: str, precision: str, products: list[str]) -> None:
    target = f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu"
    target += " -mattr=+amx-tile,+amx-int8" if products else ""
    module, _ = lowered(product(weight_of(name, 32)), target, precision)
    (program,) = programs_with(module, "matmul_blocks").values()
    text = emit_program("p", program, Target.parse(target))
    found = re.findall(r"call void @llvm\.x86\.(tdp\w+)", text)
    assert set(found) == set(products)
    sums = {s.buffer.name for s in walk_stmts(program.body) if isinstance(s, Allocate) if "products" in s.buffer.name}
    assert len(sums) == len(products)
    assert ("@llvm.x86.ldtilecfg" in text) == ("@llvm.x86.tilerelease" in text) == bool(products)


@pytest.mark.parametrize(
    ("name", "is_exact"), [("4 bits", True), ("4 bits in blocks of 8", False), ("6 bits in blocks of 16", False)]
)
def test_tiles_start_where_integers_are_floats_if_scales_have_few_bits(name: str, is_exact: bool) -> None:
    """Where scales are float32, subtracting the origin times the scale would round."""
    target = "llvm -mcpu=sapphirerapids -mtriple=x86_64-unknown-linux-gnu -mattr=+amx-tile,+amx-int8"
    module, _ = lowered(product(weight_of(name, 32)), target, "int8")
    (program,) = programs_with(module, "matmul_blocks").values()
    made = [s.buffer for s in walk_stmts(program.body) if isinstance(s, Allocate) and s.buffer.name == "products0"]
    assert {buffer.dtype for buffer in made} == {"float32" if is_exact else "int32"}


@pytest.mark.parametrize(
    ("cpu", "name", "precision", "sums", "is_exact"),
    [
        ("icelake-server", "4 bits", "int8", 4, True),
        ("icelake-server", "4 bits", "int12", 2, True),
        ("icelake-server", "4 bits", "int16", 2, False),  # sums of 2**23 and more
        ("icelake-server", "5 bits", "int12", 2, True),
        ("icelake-server", "5 bits, offsets", "int8", 8, True),
        ("icelake-server", "5 bits, offsets", "int12", 4, False),  # in blocks of 64: sums beyond 2**22
        ("icelake-server", "8 bits", "int8", 4, True),
        ("icelake-server", "8 bits", "int12", 2, False),
        ("icelake-server", "4 bits, offsets", "int8", 4, False),  # scales in float32
        ("icelake-server", "6 bits in blocks of 16", "int12", 2, False),
        ("icelake-server", "6 bits in blocks of 16", "int8", 0, False),  # four dot products a block
        ("skylake-avx512", "4 bits", "int8", 0, False),  # no such instruction
        ("znver4", "4 bits", "int8", 0, False),
    ],
)
def test_rows_go_in_step_on_intels_wide_vectors(cpu: str, name: str, precision: str, sums: int, is_exact: bool) -> None:
    """The scheduler's places hold so many rows' dot products that do not wait for each other."""
    module, _ = lowered(product(weight_of(name, 32)), f"llvm -mcpu={cpu} -mtriple=x86_64-linux-gnu", precision)
    (program,) = programs_with(module, "matmul_blocks").values()
    made = {s.buffer.name: s.buffer for s in walk_stmts(program.body) if isinstance(s, Allocate)}
    assert ("starts" in made) == bool(sums)
    if sums:
        assert {int(buffer.shape[0]) for key, buffer in made.items() if key.startswith("sums")} == {sums}
    names = {v.name for v in all_values(program.body) if isinstance(v, Intrinsic)}
    assert ("float_of_bits" in names) == is_exact


def test_where_the_system_refuses_tiles_kernels_go_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HOST.has("amx-int8"):
        pytest.skip("this processor has no tiles")
    module, x = product(weight_of("4 bits", 80)), some_rows(129, 192)
    with_tiles = rl.compile(module)
    assert not with_tiles.missing_libraries

    def refuse() -> None:
        raise LibraryError("the system does not let this process use AMX tiles")

    monkeypatch.setattr(libraries, "_request_amx_permission", refuse)
    without = rl.compile(module)
    assert without.missing_libraries == ("the system does not let this process use AMX tiles",)
    np.testing.assert_array_equal(without(x), with_tiles(x))


def prefetches(program: TensorProgram) -> Counter[str]:
    """How many there are of each buffer in the text."""
    return Counter(s.buffer.name for s in walk_stmts(program.body) if isinstance(s, Prefetch))


@pytest.mark.parametrize(
    ("cpu", "panels", "many"),
    [("icelake-server", 4, 2), ("sapphirerapids", 4, 6), ("znver5", 1, 2), ("znver4", 0, 2), ("znver3", 4, 2)],
)
def test_weights_are_asked_for_ahead_where_that_helps(cpu: str, panels: int, many: int) -> None:
    """One row asks for its panels, four words and a vector of scales of each, more rows for two, or one of bytes and
    one of halves; tiles, and where those are refused, for six. Where vectors are half a line, two words are asked for
    at a time."""
    target = Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu -cores=2")
    module, _ = lowered(product(block_weight(DEPTH, 512)), str(target))
    (program,) = programs_with(module, "matmul_blocks").values()
    words, scales = program.params[3:5]
    lines = 4 * target.vector_bits // 512
    assert prefetches(program) == Counter({words.name: lines * (panels + many), scales.name: panels + many})
    text = emit_program("p", program, target)
    assert "@llvm.prefetch" in text
    assert ("load volatile" in text) == (not panels)  # in order where no row asks ahead


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_row_loads_its_weights_in_the_order_in_which_the_program_reads_them(bits: int, has_offsets: bool) -> None:
    """LLVM turned the order round as suited its registers, and a Zen 4, which looks out for streams, then read weights
    of 5 bits with offsets at 21 GB/s instead of 35."""
    target = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu")
    zero = None if has_offsets else 1 << (bits - 1)
    module, _ = lowered(product(block_weight(DEPTH, 16, bits=bits, zero=zero)), str(target))  # of one panel
    (program,) = programs_with(module, "matmul_blocks").values()
    text = emit_assembly({"p": program}, target)
    (row,) = [body for body in inner_loops(text) if body.count("vpdpbusd") == 16 and "vfmadd231ps" in body]
    loads = [int(at or 0) // 64 for at in re.findall(r"vmovdqu64\t(-?\d*)\(.*\), %zmm", row)]
    first = min(loads)
    order = {5: [0, 4, 1, 2, 3], 6: [0, 4, 1, 2, 5, 3], 8: [0, 2, 4, 6, 1, 3, 5, 7]}.get(bits, list(range(bits)))
    assert [at - first for at in loads] == order  # first quads need upper bits, too; of bytes every other quad is a sum


@pytest.mark.parametrize(("bits", "zero", "panels"), [(4, 8, 2), (8, 128, 2), (4, None, 2), (5, None, 2)])
def test_a_zen_4_reads_two_panels_side_by_side(bits: int, zero: int | None, panels: int) -> None:
    target = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu -cores=2")
    module, _ = lowered(product(block_weight(DEPTH, 512, bits=bits, zero=zero)), str(target))
    (program,) = programs_with(module, "matmul_blocks").values()
    assert f"alone={panels}, " in str(program.attrs["schedule"])


def test_so_many_panels_that_the_processor_follows_all_of_their_arrays() -> None:
    streams = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu").cpu_facts.block_prefetch_plan
    assert [streams.interleaved_panels(arrays) for arrays in (0, 1, 2, 3, 4, 5, 7)] == [2, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("cpu", ["znver5", "x86-64-v2"])
def test_panels_are_read_one_after_the_other_by_amds_wide_vectors_and_short_ones(cpu: str) -> None:
    parsed = Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu")
    assert parsed.cpu_facts.block_prefetch_plan == PrefetchPlan(
        1, parsed.cpu_facts.weight_prefetch_bytes, parsed.cpu_facts.weight_prefetch_bytes
    )


def test_a_row_reads_panels_far_apart_side_by_side() -> None:
    """Tile after tile goes on in each of its panels where the one before ended."""
    target = Target.parse("llvm -mcpu=icelake-server -mtriple=x86_64-unknown-linux-gnu -cores=2")
    module, _ = lowered(product(block_weight(DEPTH, 8 * 64 + 40)), str(target))
    (program,) = programs_with(module, "matmul_blocks").values()
    found = {v.indices[0] for v in all_values(program.body) if isinstance(v, Load) and v.buffer is program.params[3]}
    # 35 panels: one row takes 11 times three and the last two, more rows 17 times two and the last one
    assert {str(panel) for panel in found if "jo" in str(panel)} == {"jo + u*11 + (l // 16)", "jo + u*17 + (l // 16)"}


def pairs_of(weight: BlockWeight, precision: str, cores: int = 2) -> tuple[list[Intrinsic], set[str], TensorProgram]:
    """The dot products, and the buffers, of a product for AVX2 alone."""
    target = f"llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu -cores={cores}"
    module, _ = lowered(product(weight, coarse=True), target, precision)
    (program,) = programs_with(module, "matmul_blocks").values()
    values = list(all_values(program.body))
    dots = [v for v in values if isinstance(v, Intrinsic) and v.name == "dot4_words"]
    buffers = {v.buffer.name for v in values if isinstance(v, Load)}
    return dots, buffers, program


def test_pairs_have_signed_codes_and_unsigned_bytes_of_rows() -> None:
    """Two such products add up in 16 bits: 255 * 32 each."""
    dots, buffers, _ = pairs_of(block_weight(DEPTH, COLUMNS), "auto")
    bounds = {tuple(bound.value for bound in dot.args[3:] if isinstance(bound, Literal)) for dot in dots}
    assert bounds == {(62, 128), (255, 32), (1, 32)}  # few rows, more of them, and the sum of codes
    assert "unsigned" in buffers


@pytest.mark.parametrize(("dtype", "is_part"), [("float16", True), ("float32", False)])
def test_zero_points_are_part_of_the_multiply_add_only_where_that_is_exact(dtype: str, is_part: bool) -> None:
    _, _, program = pairs_of(block_weight(DEPTH, COLUMNS, dtype=dtype), "auto")
    found = {v.name for v in all_values(program.body) if isinstance(v, Intrinsic)}
    assert ("fma" in found) == is_part


def test_zero_points_stay_integers_where_multiply_add_rounds_twice() -> None:
    """Without an instruction for it; test_rows_round_alike_among_any_number_of_others runs that."""
    module, _ = lowered(product(block_weight(DEPTH, COLUMNS)), OLD, "int8")
    (program,) = programs_with(module, "matmul_blocks").values()
    assert "fma" not in {v.name for v in all_values(program.body) if isinstance(v, Intrinsic)}


def test_sums_that_no_float_holds_are_rounded_alike_for_many_rows() -> None:
    """Of 256 codes less 16 and numbers of 12 bits, moved to start at 0: up to 17 million."""
    rng = np.random.default_rng(0)
    x = rng.choice(np.float32([1, 2031 / 2032]), (16, 512))
    x[:, ::256] = 1
    weight = block_weight(512, 64, bits=5, block=256, zero=16)
    weight = replace(weight, codes=rng.integers(0, 2, weight.codes.shape).astype(np.uint8))
    exe = rl.compile(product(weight), here(PORTABLE), precision="int12")
    np.testing.assert_array_equal(exe(x), np.concatenate([exe(x[i : i + 1]) for i in range(16)]))


@pytest.mark.parametrize(
    ("bits", "zero", "precision"),
    [(4, None, "int8"), (8, 128, "int8"), (8, 128, "int12")],  # no zero point; products too great for pairs
)
def test_rows_are_not_moved_where_that_is_of_no_use(bits: int, zero: int | None, precision: str) -> None:
    weight = block_weight(DEPTH, COLUMNS, bits=bits, zero=zero)
    module, _ = lowered(product(weight), "llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu", precision)
    (program,) = programs_with(module, "matmul_blocks").values()
    assert "unsigned" not in {v.buffer.name for v in all_values(program.body) if isinstance(v, Load)}


@pytest.mark.parametrize(
    ("columns", "cores", "panels"), [(2048, 2, 8), (576, 2, 6), (192, 2, 6), (576, 16, 5), (8, 2, 8)]
)
def test_threads_get_equal_shares_of_panels_in_turn(columns: int, cores: int, panels: int) -> None:
    _, _, program = pairs_of(block_weight(DEPTH, columns), "auto", cores)
    widths = {
        int(s.buffer.shape[1]) for s in walk_stmts(program.body) if isinstance(s, Allocate) and "tile" in s.buffer.name
    }
    assert 8 * min(panels, -(-columns // 8)) in widths


@pytest.mark.parametrize(("columns", "panels"), [(2048, 4), (576, 3), (192, 3), (64, 2), (16, 1)])
def test_threads_get_equal_shares_of_a_row(columns: int, panels: int) -> None:
    target = Target.parse("llvm -mcpu=icelake-server -mtriple=x86_64-unknown-linux-gnu -cores=2")
    module, _ = lowered(product(block_weight(DEPTH, columns)), str(target))
    (program,) = programs_with(module, "matmul_blocks").values()
    assert f"alone={panels}, " in str(program.attrs["schedule"])


def test_weights_that_are_arguments_are_not_asked_for_ahead() -> None:
    """Their rows lie as wide apart as they are: what a tile reads next is not what stands next."""
    bb = BlockBuilder()
    m = bb.symbol("m")
    types = {"x": TensorType.of((m, 64), "float32"), "words": TensorType.of((8, 40), "int32")}
    with bb.function("main", **types) as (x, words):
        weight = bb.emit(get_op("dequantize_blocks")(words, np.ones((2, 40), np.float32), bits=4, zero=8))
        bb.result(bb.emit(ops.matmul(x, weight)))
    (program,) = programs_with(lowered(bb.module())[0], "matmul_blocks").values()
    assert set(prefetches(program)) == {program.params[4].name}


@pytest.mark.parametrize(("target", "precision"), [(WITH_DOTS, "float32"), (PORTABLE, "float32"), (OLDEST, "auto")])
def test_activations_stay_floats_where_nothing_asks_for_integers(target: str, precision: str) -> None:
    module, context = lowered(product(block_weight(DEPTH, COLUMNS)), target, precision)
    assert not programs_with(module, "quantize_blocks") and not programs_with(module, "matmul_blocks")
    assert reasons(context) == []
    if Target.parse(target).runs_here:
        weight, x = block_weight(DEPTH, COLUMNS), some_rows(17, DEPTH)
        found = rl.compile(product(weight), target, precision=precision)(x)
        np.testing.assert_allclose(found, x @ weight.values, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "bits", "rounds"),
    [
        (WITH_DOTS, 8, True),
        (BARE, 8, True),
        (OLD, 4, True),
        (PORTABLE, 6, True),
        (PORTABLE, 8, False),
        (WIDE, 8, False),
    ],
)
def test_activations_are_rounded_where_that_is_faster(target: str, bits: int, rounds: bool) -> None:
    weight = block_weight(DEPTH, COLUMNS, bits=bits, zero=1 << (bits - 1))
    module, context = lowered(product(weight), target, "auto")
    assert bool(programs_with(module, "quantize_blocks")) == rounds
    if not rounds:
        assert reasons(context) == [(False, "this processor multiplies codes of 8 bits faster as floats")]


@pytest.mark.parametrize("dims", [("m",), ("b", "m")])
def test_products_of_one_operand_share_its_rounding(dims: tuple[str, ...]) -> None:
    bb = BlockBuilder()
    shape = tuple(map(bb.symbol, dims))
    with bb.function("main", x=TensorType.of((*shape, DEPTH), "float32")) as (x,):
        bb.result(Tuple(tuple(products(bb, x, [block_weight(DEPTH, 40, seed=k) for k in range(3)]))))
    assert calls_of(lowered(bb.module())[0], "quantize_blocks") == 1
    assert calls_of(lowered(bb.module())[0], "matmul_blocks") == 1


def test_blocks_of_other_lengths_have_a_rounding_of_their_own() -> None:
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((m, DEPTH), "float32")) as (x,):
        bb.result(Tuple(tuple(products(bb, x, [block_weight(DEPTH, 40, block=b) for b in (16, 32)]))))
    assert calls_of(lowered(bb.module())[0], "quantize_blocks") == 2


def test_a_weight_on_the_left_is_left_alone() -> None:
    weight = block_weight(DEPTH, COLUMNS)
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((COLUMNS, m), "float32")) as (x,):
        bb.result(bb.emit(ops.matmul(weight.emit(bb), x)))
    module, context = lowered(bb.module())
    assert not programs_with(module, "quantize_blocks") and reasons(context) == []
    x = some_rows(COLUMNS, 5)
    np.testing.assert_allclose(rl.compile(bb.module())(x), weight.values @ x, rtol=1e-5, atol=1e-4)


def test_a_product_of_halves_is_left_alone() -> None:
    """The weight is rounded to float16 for it: that is another matrix."""
    weight = block_weight(DEPTH, COLUMNS)
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((m, DEPTH), "float16")) as (x,):
        bb.result(bb.emit(ops.matmul(x, bb.emit(ops.cast(weight.emit(bb), dtype="float16")))))
    module, context = lowered(bb.module())
    assert not programs_with(module, "quantize_blocks") and reasons(context) == []
    x = some_rows(17, DEPTH).astype(np.float16)
    wanted = x.astype(np.float64) @ weight.values
    assert abs(rl.compile(bb.module())(x) - wanted).max() <= 2e-3 * abs(wanted).max()


@pytest.mark.parametrize("precision", tiers.few(["int8", "float32", "int12", "int16"]))
def test_every_stage_is_legal_and_its_text_a_fixed_point(precision: str) -> None:
    """What a stage has not changed need not be read again; the last module is read as a whole."""
    stages: list[tuple[str, str, IRModule]] = []
    context = PassContext(Target.parse(WITH_DOTS), precision=precision)
    context.observers.append(lambda step, _, after, __: stages.append((step.name, step.stage, after)))
    run_passes(layer(gated)[0], default_pipeline(), context)
    assert len(stages) == len(default_pipeline())
    seen = set[int]()
    for name, stage, module in stages:
        verify(module, stage)
        check_text(IRModule({k: d for k, d in module.items() if id(d) not in seen}, module.attrs), name)
        seen |= {id(d) for d in module.values()}
    check_text(stages[-1][2], "all of the last")


def check_text(module: IRModule, name: str) -> None:
    text = print_module(module)
    parsed = parse_module(text, module_constants(module))
    assert print_module(parsed) == text, name
    assert first_difference(parsed, module) is None, name


# Proof by running


@pytest.mark.parametrize("precision", tiers.few(["int12", "float32", "int8", "int16"]))
def test_every_pass_keeps_what_a_quantized_model_computes(precision: str) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "intermediate": 32, "layers": 1}
    checkpoint = quantize_checkpoint(small_checkpoint("llama", **sizes), "q4_0")
    module = build_dense(checkpoint)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 2))
    context = PassContext(HOST, precision=precision, verify=False)
    rl.compile(module, context=context, validate=[(tokens[:1, :1],), (tokens,)])
    assert len(reasons(context)) == (0 if precision == "float32" else 8)


class WrongZero(Rewriter):
    """Centers codes at another zero point than theirs."""

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or value.callee.name != "matmul_blocks":
            return None
        return value.callee(*value.args, **{**value.attrs, "zero": 7})


class WrongShift(ProgramRewriter):
    """Takes the low halves of words for the high ones."""

    def value(self, value: Value) -> Value:
        value = super().value(value)
        is_shift = isinstance(value, Binary) and value.op == "shift_right"
        return replace(value, b=Literal(0, "int32")) if is_shift else value  # type: ignore[type-var]


class WrongBytes(ProgramRewriter):
    """Takes the bytes with a sign for those without."""

    def value(self, value: Value) -> Value:
        value = super().value(value)
        if not isinstance(value, Intrinsic) or value.name != "dot4_words":
            return value
        total, a, b, *bounds = value.args
        return replace(value, args=(total, b, a, *bounds))


WRONG: dict[str, tuple[str, Callable[[IRModule], IRModule]]] = {
    "zero point": ("integer_products", lambda m: map_functions(m, lambda f: WrongZero().function(f))),
    "shift": ("legalize", lambda m: map_programs(m, lambda p: replace(p, body=WrongShift().stmt(p.body)))),
    "bytes": ("schedule", lambda m: map_programs(m, lambda p: replace(p, body=WrongBytes().stmt(p.body)))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pass_behind_the_rounding_is_found(name: str, tmp_path: Path) -> None:
    after, change = WRONG[name]
    passes: list[Pass] = []
    for step in default_pipeline():
        passes.append(step)
        if step.name == after:
            passes.append(Pass("broken", lambda module, _: change(module), step.stage))
    context = PassContext(HOST, precision="int16", verify=False, dump_dir=tmp_path)
    with pytest.raises(ValidationError, match=r"^pass broken changes what the module computes, at "):
        rl.compile(product(block_weight(32, 5)), passes=passes, context=context, validate=[(some_rows(3, 32),)])


_CHILD = """
import sys
from relaxlite import driver
from relaxlite.target import Target
from tests.passes.products.test_blocks import LAYERS, layer
for make in LAYERS.values():
    for precision in ("auto", "int8", "int16"):
        data = driver.build(layer(make)[0], Target.parse(sys.argv[1]), precision=precision)
        assert any("matmul_blocks" in name for name in data.kernels) or precision == "auto"
        print(data.objects[0][:4].hex())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("cpu", ["generic", "neoverse-v1"])
def test_code_for_another_architecture(cpu: str) -> None:
    """In a process of its own, because an error of LLVM's ends it."""
    text = f"llvm -mcpu={cpu} -mtriple=aarch64-unknown-linux-gnu"
    found = subprocess.run([sys.executable, "-c", _CHILD, text], capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["7f454c46"] * 12


def test_rows_whose_length_only_run_time_knows_are_left_alone() -> None:
    weight, bb = block_weight(DEPTH, COLUMNS), BlockBuilder()
    m, k = bb.symbol("m"), bb.symbol("k")
    module = product(weight, x=TensorType.of((m, k), "float32"))
    made, context = lowered(module)
    assert not programs_with(made, "quantize_blocks")
    assert reasons(context) == [(False, "only run time knows that rows of k elements are 96")]
    exe, x = rl.compile(module), some_rows(17, DEPTH)
    np.testing.assert_allclose(exe(x), x @ weight.values, rtol=1e-5, atol=1e-4)
    with pytest.raises(RelaxliteError, match="96"):
        exe(x[:, :95])


@pytest.mark.parametrize(("block", "taken"), [(256, True), (512, False)])
def test_blocks_whose_sums_may_not_fit_are_left_alone(block: int, taken: bool) -> None:
    """Per column, of 8 bits: at its ends a block of 512 rows sums to 512 * 255 * 127 * 256, beyond 32 bits."""
    weight = block_weight(block, 33, bits=8, block=block, zero=None)
    weight = replace(weight, codes=np.full_like(weight.codes, 255))
    x = np.full((3, block), 2, np.float32)
    _, context = lowered(product(weight))
    assert [found for found, _ in reasons(context)] == [taken]
    if not taken:
        assert reasons(context)[0][1] == "the sums of blocks of 512 rows may not fit into 32 bits; at most 256 do"
    wanted = x.astype(np.float64) @ weight.values
    np.testing.assert_allclose(rl.compile(product(weight), precision="int16")(x), wanted, rtol=1e-5)
