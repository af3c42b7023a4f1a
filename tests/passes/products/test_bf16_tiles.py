"""Products in bfloat16 by AMX tiles: the sums of rounded operands at every number of rows, and where tiles are used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.llvm import emit_program
from relaxlite.errors import LibraryError
from relaxlite.ir import first_difference, module_constants, ops, parse_module, print_module
from relaxlite.ir.expr import Constant, Expr, Tuple
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import CallLibrary, IfThenElse, Prefetch, TensorProgram
from relaxlite.ir.program_visitor import stores, walk_stmts
from relaxlite.ir.symbolic import evaluate, sym
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products.pack_constants import pack_program
from relaxlite.runtime import libraries
from relaxlite.target import Target

Array = np.ndarray
HAS_DOTS = Target.host().has("avx512bf16")
needs_dots = pytest.mark.skipif(not HAS_DOTS, reason="this processor has no bfloat16 dot products")
needs_tiles = pytest.mark.skipif(not Target.host().has("amx-bf16"), reason="this processor has no bfloat16 tiles")
WITH_TILES = "llvm -mcpu=sapphirerapids -mtriple=x86_64-unknown-linux-gnu"
WITH_DOTS = f"{WITH_TILES} -mattr=-amx-tile"
ROWS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 127, 128, 129, 300)
rng = np.random.default_rng(5)


def weight(k: int, n: int) -> Array:
    return (rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)


def model(make: Callable[[rl.BlockBuilder, Expr], Expr], *dims: int | str) -> IRModule:
    bb = rl.BlockBuilder()
    shape = tuple(bb.symbol(d) if isinstance(d, str) else d for d in dims)
    with bb.function("main", x=rl.TensorType.of(shape, "float32")) as (x,):
        bb.result(bb.emit(make(bb, x)))
    return bb.module()


def rounded(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def product(k: int, n: int) -> tuple[IRModule, Array]:
    w = weight(k, n)
    return model(lambda bb, x: ops.matmul(x, Constant.of(w)), "m", k), w


def lowered(module: IRModule, target: str = WITH_TILES) -> tuple[IRModule, TensorProgram]:
    made = run_passes(module, default_pipeline(), PassContext(Target.parse(target), precision="bf16", verify=True))
    (program,) = [p for name, p in made.programs().items() if "matmul" in name]
    return made, program


def tile_calls(program: TensorProgram) -> set[str]:
    return {s.symbol for s in walk_stmts(program.body) if isinstance(s, CallLibrary) and s.library == "amx"}


@needs_dots
@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("k", "n"), [(32, 64), (96, 80), (384, 200), (1536, 384), (64, 1000), (33, 64), (32, 5)])
def test_products_are_those_of_rounded_operands_at_every_number_of_rows(k: int, n: int) -> None:
    module, w = product(k, n)
    exe = rl.compile(module, precision="bf16")
    for m in ROWS:
        x = rng.standard_normal((m, k)).astype(np.float32)
        operands = (rounded(x), rounded(w)) if k % 2 == 0 else (x, w)  # odd depths stay float32
        np.testing.assert_allclose(exe(x), operands[0] @ operands[1], rtol=1e-4, atol=1e-5)


def test_the_weights_of_the_next_columns_are_asked_for_once() -> None:
    module, _ = product(384, 256)
    program = lowered(module)[1]
    asked = [s for s in walk_stmts(program.body) if isinstance(s, Prefetch)]
    (weights,) = {request.buffer for request in asked}
    symbols = {v for request in asked for index in request.indices for v in index.free_vars()}
    turn, step = (next(v for v in symbols if v.name == name) for name in ("ii", "s"))
    found = set()
    for values in itertools.product(range(4), range(12)):
        known = dict.fromkeys(symbols, 0) | dict(zip((turn, step), values, strict=True))
        lines = [tuple(evaluate(index, known) for index in request.indices) for request in asked]
        flat = [evaluate(flat_offset(weights.shape, tuple(map(sym, line))), {}) * 2 for line in lines]
        assert all(offset % 64 == 0 for offset in flat) and found.isdisjoint(flat)
        found.update(flat)
    assert len(found) == 384 // 2 * 2  # each pair of rows has two lines of 32 columns


@needs_dots
@pytest.mark.usefixtures("in_bfloat16")
def test_rows_that_are_computed_twice_are_stored_once() -> None:
    """What follows may overwrite what it reads: x + x @ w is computed in place of x + 0."""
    w = weight(96, 96)

    def residual(bb: rl.BlockBuilder, x: Expr) -> Expr:
        y = bb.emit(ops.add(x, Constant.of(np.zeros(96, np.float32))))
        for _ in range(3):
            y = bb.emit(ops.add(y, bb.emit(ops.relu(bb.emit(ops.matmul(y, Constant.of(w)))))))
        return y

    exe = rl.compile(model(residual, "m", 96), precision="bf16")
    for m in ROWS:
        x = rng.standard_normal((m, 96)).astype(np.float32)
        want = x.astype(np.float64)
        for _ in range(3):
            want = want + np.maximum(rounded(want.astype(np.float32)) @ rounded(w), 0)
        np.testing.assert_allclose(exe(x), want, rtol=2e-2, atol=2e-2)  # a rounding that tips over moves later ones


@needs_dots
@pytest.mark.parametrize("dims", [("b", "s", 64), ("b", 7, 64), (3, "s", 64)])
def test_rows_may_have_any_leading_dimensions(dims: tuple[int | str, ...]) -> None:
    weights = [weight(64, 64) for _ in range(3)]

    def joined(bb: rl.BlockBuilder, x: Expr) -> Expr:
        return Tuple(tuple(bb.emit(ops.matmul(x, Constant.of(w))) for w in weights))

    exe = rl.compile(model(joined, *dims), precision="bf16")
    for sizes in ((0, 3), (1, 1), (2, 7), (3, 5), (3, 11), (9, 16)):
        shape = tuple(size if isinstance(d, str) else d for d, size in zip(dims, (*sizes, 64), strict=True))
        x = rng.standard_normal(shape).astype(np.float32)
        for found, w in zip(exe(x), weights, strict=True):
            np.testing.assert_allclose(found, rounded(x) @ rounded(w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "k", "n", "uses"),
    [
        (WITH_TILES, 384, 384, True),
        (WITH_TILES, 64, 80, True),
        (WITH_DOTS, 384, 384, False),
        (WITH_TILES, 48, 384, True),  # in steps of 24
        (WITH_TILES, 34, 384, False),  # no whole number of steps
        (WITH_TILES, 384, 16, False),  # panels of one vector
    ],
)
def test_tiles_are_used_where_there_are_any_and_they_fit(target: str, k: int, n: int, uses: bool) -> None:
    _, program = lowered(product(k, n)[0], target)
    assert ("dot_bf16" in tile_calls(program)) == uses
    assert ("@llvm.x86.tdpbf16ps" in emit_program("p", program, Target.parse(target))) == uses


def test_the_text_of_scheduled_tiles_is_a_fixed_point() -> None:
    made, _ = lowered(product(384, 384)[0])
    text = print_module(made)
    parsed = parse_module(text, module_constants(made))
    assert print_module(parsed) == text and first_difference(parsed, made) is None


def test_weights_that_stay_loose_go_without_tiles() -> None:
    """A routine takes panels as they are packed; where calls pass other weights, it is not called."""
    passes = default_pipeline()
    scheduled = [p.name for p in passes].index("schedule") + 1
    context = PassContext(Target.parse(WITH_TILES), precision="bf16")
    made = run_passes(product(384, 128)[0], passes[:scheduled], context)
    (program,) = [p for name, p in made.programs().items() if "matmul" in name]
    assert "dot_bf16" in tile_calls(program)
    guarded = replace(program, body=IfThenElse(less(sym(0), program.symbols[0]), program.body))
    for each in (program, guarded):
        loose = pack_program(each, {})
        assert not tile_calls(loose)
        assert any(store.buffer is loose.params[-1] for store in stores(loose.body))


@needs_tiles
def test_where_the_system_refuses_tiles_kernels_go_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module, w = product(384, 96)
    x = rng.standard_normal((50, 384)).astype(np.float32)

    def refuse() -> None:
        raise LibraryError("the system does not let this process use AMX tiles")

    with_tiles = rl.compile(module, precision="bf16")
    assert not with_tiles.missing_libraries
    monkeypatch.setattr(libraries, "_request_amx_permission", refuse)
    without = rl.compile(module, precision="bf16")
    assert without.missing_libraries == ("the system does not let this process use AMX tiles",)
    for exe in (with_tiles, without):
        np.testing.assert_allclose(exe(x), rounded(x) @ rounded(w), rtol=1e-4, atol=1e-5)
