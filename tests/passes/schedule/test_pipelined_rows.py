"""Rows that overlap (passes/schedule/cpu/pipelined_rows.py): the same numbers as row by row, for any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.attributes import IN_PLACE
from relaxlite.ir.expr import Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import print_module
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.schedule.cpu.pipelined_rows import BLOCKS_PER_CORE, MAX_ROWS, MIN_ROWS
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from tests.passes.fuse.test_merge_rows import FUSED, INTEL, ZEN, build, fused, requests_in
from tests.support.native_kernel import NativeKernel

CORES = 2
HOST = replace(Target.host(), cores=CORES)
FEWEST = CORES * BLOCKS_PER_CORE * MIN_ROWS
COUNTS = (0, 1, FEWEST - 1, FEWEST, FEWEST + 1, 2 * FEWEST + 3, CORES * BLOCKS_PER_CORE * (MAX_ROWS + 1) + 5)
overlaps = pytest.mark.skipif(HOST.cpu_facts.prefetches_next_row, reason="rows do not overlap on this processor")


def softmax(emit: Any, x: Var) -> Expr:
    return emit(ops.softmax(x, axis=-1))


def scheduled(make: Callable[..., Expr], shape: tuple[int | str, ...], target: Target = HOST) -> Any:
    (made,) = fused(build((shape,), make)).values()
    return schedule_program(made, target)


@pytest.mark.each_value
@overlaps
@pytest.mark.parametrize("size", ["m", 144, 200, 1024])
@pytest.mark.parametrize("name", [name for name in FUSED if "softmax" in name])
@pytest.mark.parametrize(
    "target", [HOST, replace(Target.parse("llvm -mcpu=x86-64-v3"), cores=CORES)], ids=["host", "v3"]
)
def test_every_number_of_rows_gives_what_the_ops_do(target: Target, name: str, size: int | str) -> None:
    if target is not HOST and not HOST.has("avx2"):
        pytest.skip("needs an x86 CPU with AVX2")
    shapes, make = FUSED[name]
    shapes = tuple(tuple(size if d == "m" else d for d in shape) for shape in shapes)
    given = build(shapes, make)
    (made,) = fused(given).values()
    assert "block_rows" in print_module(IRModule({"kernel": schedule_program(made, target)}))
    exe, oracle = rl.compile(given, target), Interpreter(decompose(given))
    rng = np.random.default_rng(0)
    for m in (1, 16, 65, 129, 1024, 1040, 4096, 4097) if size == "m" else (size,):
        for n in COUNTS if m in (129, 144) else (1, FEWEST, FEWEST + 5):
            values = {"n": n, "m": m}
            args = [
                rng.standard_normal([values[d] if isinstance(d, str) else d for d in shape]).astype(np.float32)
                for shape in shapes
            ]
            np.testing.assert_allclose(exe(*args), oracle.run("main", *args), rtol=2e-5, atol=2e-5)


@overlaps
@pytest.mark.parametrize("shape", [("a", 3, "b", 160), (1, "a", 1, 5, 160), (7, "a", 160)])
def test_rows_of_several_dimensions(shape: tuple[int | str, ...]) -> None:
    given = build((shape,), softmax)
    exe, oracle = rl.compile(given, HOST), Interpreter(given)
    for a, b in ((1, 1), (5, 7), (40, 3), (3, 50), (0, 4)):
        x = np.random.default_rng(a).standard_normal([{"a": a, "b": b}.get(d, d) for d in shape]).astype(np.float32)
        np.testing.assert_allclose(exe(x), oracle.run("main", x), rtol=2e-5, atol=1e-6)


@overlaps
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_wrong_with_a_row_stays_there(value: float) -> None:
    exe = rl.compile(build((("n", "m"),), softmax), HOST)
    for m in (130, 1024):
        x = np.zeros((100, m), np.float32)
        x[::7] = value
        got = exe(x)
        assert np.isnan(got[::7]).all() or value == -np.inf
        rest = np.arange(100) % 7 != 0
        np.testing.assert_allclose(got[rest], 1 / m, rtol=1e-6)


@overlaps
@pytest.mark.parametrize("size", ["m", 1024])
@pytest.mark.parametrize("l3_bytes", [4096, 1 << 25])
@pytest.mark.parametrize("apart", [0, 1, 16, 1024])
def test_wherever_the_result_lies(apart: int, l3_bytes: int, size: int | str) -> None:
    """Past the caches and in them; addresses of x and of the result that end alike, or do not; nothing beside it."""
    program = scheduled(softmax, ("n", size), replace(HOST, l3_bytes=l3_bytes))
    kernel = NativeKernel(program, target=HOST)
    n, m = 77, 1024
    memory = np.zeros(2 * n * m + 4096, np.float32)
    start = (-memory.ctypes.data % 4096) // 4
    x, out = (memory[at : at + n * m].reshape(n, m) for at in (start, start + n * m + apart))
    x[:] = np.random.default_rng(0).standard_normal((n, m))
    wanted = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    assert kernel([x, out], [{"n": n, "m": m}[s.name] for s in program.symbols]) == 0
    np.testing.assert_allclose(out, wanted, rtol=2e-5)
    assert not memory[start + n * m : start + n * m + apart].any() and not memory[start + 2 * n * m + apart :].any()


@overlaps
@pytest.mark.parametrize("size", ["m", 1024])
def test_the_result_may_take_the_place_of_x(size: int | str) -> None:
    program = scheduled(softmax, ("n", size))
    assert program.attrs.get(IN_PLACE)
    kernel = NativeKernel(program, target=HOST)
    for n in COUNTS[1:]:
        x = np.random.default_rng(n).standard_normal((n, 1024)).astype(np.float32)
        wanted = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        assert kernel([x, x], [{"n": n, "m": 1024}[s.name] for s in program.symbols]) == 0
        np.testing.assert_allclose(x, wanted, rtol=2e-5)


def test_rows_overlap_where_that_was_measured_to_gain() -> None:
    def has_blocks(make: Callable[..., Expr], shape: tuple[int | str, ...], target: Target) -> bool:
        return "block_rows" in print_module(IRModule({"kernel": scheduled(make, shape, target)}))

    def layer_norm(emit: Any, x: Var) -> Expr:
        return emit(ops.layer_norm(x, axis=-1))

    zen = replace(ZEN, cores=CORES)
    assert has_blocks(softmax, ("n", 1024), zen) and has_blocks(softmax, (FEWEST, 1024), zen)
    assert not has_blocks(softmax, (FEWEST - 1, 1024), zen)  # too few rows
    assert not has_blocks(softmax, ("n", 128), zen)  # in registers from stage to stage
    assert not has_blocks(softmax, ("n", 4097), zen)  # on no stack
    assert not has_blocks(layer_norm, ("n", 1024), zen)  # which waits for nothing but memory
    assert not has_blocks(softmax, ("n", 1024), INTEL)  # asks for the next row instead
    asked = requests_in(softmax, (("n", 1024),), zen)
    assert {request.cache for request in asked} == {2}


@overlaps
def test_a_further_output_is_right_where_the_result_takes_the_place_of_an_operand() -> None:
    def sum_and_softmax(emit: Any, x: Var, y: Var) -> tuple[Expr, Expr]:
        total = emit(ops.add(x, y))
        return total, emit(ops.softmax(total, axis=-1))

    (made,) = fused(build((("n", 1024), ("n", 1024)), sum_and_softmax)).values()
    program = schedule_program(made, HOST)
    pairs = program.attrs.get(IN_PLACE)
    kernel = NativeKernel(program, target=HOST)
    for n in COUNTS[1:]:
        rng = np.random.default_rng(n)
        x, y = (rng.standard_normal((n, 1024)).astype(np.float32) for _ in range(2))
        total = x + y
        wanted = np.exp(total) / np.exp(total).sum(axis=1, keepdims=True)
        assert pairs
        for given, taken in ((None, None), *pairs):
            buffers = [x.copy(), y.copy(), np.zeros_like(x), np.zeros_like(x)]
            if given is not None:
                buffers[taken] = buffers[given]
            assert kernel(buffers, [n for _ in program.symbols]) == 0
            np.testing.assert_array_equal(buffers[2], total)
            np.testing.assert_allclose(buffers[3], wanted, rtol=2e-5)
