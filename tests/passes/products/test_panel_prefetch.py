"""Tiles that ask for panels of weights before they read them, and the statement that asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaxlite import dtypes
from relaxlite.codegen.interpreter import run_program
from relaxlite.codegen.llvm import emit_assembly
from relaxlite.errors import CodegenError, VerifyError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import print_module
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Prefetch,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    seq,
)
from relaxlite.ir.program_visitor import loads, walk_stmts
from relaxlite.ir.symbolic import SymVar, as_int, evaluate, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.verifier import verify
from relaxlite.passes.products.pack_constants import pack_program
from relaxlite.passes.products.panel_prefetch import (
    FIXED_POINT_ONE,
    BothPanels,
    NextPanel,
    PanelPrefetch,
    prefetcher_of,
    width_that_fits,
)
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from tests.passes.products.test_register_tile import constants_of, lowered, only_program, product
from tests.support.native_kernel import NativeKernel

WIDE = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu -l2-bytes=1048576")
INTEL = Target.parse("llvm -mcpu=icelake-server -mtriple=x86_64-unknown-linux-gnu -l2-bytes=1048576")
ARM = Target.parse("llvm -mcpu=neoverse-n1 -mtriple=aarch64-unknown-linux-gnu")
X, Y = Buffer("x", (sym(4), sym(64)), "float32"), Buffer("y", (sym(4), sym(64)), "float32")
I, J = SymVar("i"), SymVar("j")  # noqa: E741
NEXT, BOTH = PanelPrefetch(0, for_next=True), PanelPrefetch(8, for_next=True)
ASKED = seq(Prefetch(X, (I + 9, sym(70))), Prefetch(X, (I + 2, sym(0)), 1))
COPY = For(I, sym(4), seq(ASKED, For(J, sym(64), Store(Y, (I, J), Load(X, (I, J))))))


def prefetches(stmt: Stmt) -> list[Prefetch]:
    return [s for s in walk_stmts(stmt) if isinstance(s, Prefetch)]


# Which lines are asked for


@pytest.mark.parametrize("lines", [1, 2, 3, 4, 6])
def test_the_last_row_blocks_ask_for_every_line_of_the_next_panel_once(lines: int) -> None:
    weights = Buffer("w", (sym(10), sym(1000)), "float32")
    update = For(I, sym(10), Store(Buffer("e", (), "float32", "local"), (), Load(weights, (I, J)), "add"))
    found = prefetcher_of(NEXT, update, J, sym(0), lines * 16)
    assert isinstance(found, NextPanel) and found.lines == lines
    block = SymVar("block", lower=0)
    for blocks in range(1, 12):
        asked: list[int] = []
        asking = []
        for number in range(blocks):
            known, stmt = {block: number}, found.bound(sym(blocks), block, Seq(()))
            while isinstance(stmt, LetIndex):
                assert isinstance(stmt.value, IndexValue)
                known[stmt.var], stmt = evaluate(stmt.value.index, known), stmt.body
            for symbol in (found.is_on, found.begin, found.end):
                assert 0 <= known[symbol] <= (as_int(symbol.upper) if symbol.upper is not None else 1)
            if known[found.is_on]:
                asking.append(number)
                asked += range(known[found.begin], known[found.end] + 1)
                assert known[found.end] - known[found.begin] < max(1, -(-lines // 2))  # what one step can ask for
        assert asked == (list(range(lines)) if blocks > 1 else [])
        assert asking == list(range(blocks))[-len(asking) :] if asking else blocks == 1


@pytest.mark.parametrize(
    ("depth", "columns"),
    [
        (384, 64),
        (1280, 64),
        (1281, 48),
        (1536, 48),
        (2048, 48),
        (2049, None),
    ],  # of 1 MiB, two panels of 2048 x 48 take 3/4
)
def test_panels_are_narrower_where_two_do_not_fit_the_cache(depth: int, columns: int | None) -> None:
    program = schedule_program(only_program(lowered(product(640, depth, "none"), WIDE, "estimate_costs")), WIDE)
    widths = dict(program.attrs["panels"])  # type: ignore[arg-type]
    assert set(widths.values()) == {columns or 64}
    assert bool(prefetches(program.body)) is (columns is not None)


def test_sums_that_are_not_along_rows_of_one_matrix_ask_for_nothing() -> None:
    element = Buffer("e", (), "float32", "local")
    square = Buffer("w", (sym(8), sym(8)), "float32")
    for value in (Load(square, (J, I)), Load(square, (I, J + 1)), Load(Buffer("v", (sym(8),), "float32"), (J,))):
        update = For(I, sym(8), Store(element, (), value, "add"))
        assert prefetcher_of(NEXT, update, J, sym(0), 8) is None and prefetcher_of(BOTH, update, J, sym(0), 8) is None
        assert width_that_fits(update, J, [8], 1 << 20) is None
    nested = For(SymVar("h"), sym(3), For(I, sym(8), Store(element, (), Load(square, (I, J)), "add")))
    assert prefetcher_of(NEXT, nested, J, sym(0), 8) is None


def test_requests_follow_the_weights_into_their_panels() -> None:
    program = only_program(lowered(product(640, 96, "none"), WIDE))
    found = prefetches(program.body)
    assert found and {request.buffer.shape for request in found} == {(sym(10), sym(96), sym(64))}
    assert "prefetcht1" in emit_assembly({"matmul": program}, WIDE)


@pytest.mark.each_value
@pytest.mark.parametrize("lines", [1, 3, 4])
@pytest.mark.parametrize("depth", [1, 10, 384])
def test_all_row_blocks_ask_for_a_share_of_the_next_panel(lines: int, depth: int) -> None:
    weights = Buffer("w", (sym(depth), sym(1000)), "float32")
    update = For(I, sym(depth), Store(Buffer("e", (), "float32", "local"), (), Load(weights, (I, J)), "add"))
    found = prefetcher_of(BOTH, update, J, sym(0), lines * 16)
    assert isinstance(found, BothPanels)
    step, block = SymVar("k"), SymVar("block", lower=0)
    tile = Buffer("e", (sym(6),), "float32", "local")
    steps = For(step, sym(depth), Store(tile, (sym(0),), Literal(0.0, "float32"), "add"))
    *own, following = prefetches(found.beside(Allocate(tile, Seq((Seq(()), steps))), update))
    assert len(own) == lines and following.cache == 2 and all(request.cache == 1 for request in own)
    for blocks in (0, 1, 2, 3, 4, 5, 7, 30, 200, 70_000):
        asked: list[tuple[int, int]] = []
        for number in range(min(blocks, 40)):
            known, stmt = {block: number}, found.bound(sym(blocks), block, Seq(()))
            while isinstance(stmt, LetIndex):
                assert isinstance(stmt.value, IndexValue)
                known[stmt.var], stmt = evaluate(stmt.value.index, known), stmt.body
            assert 0 <= known[found.rate] <= FIXED_POINT_ONE
            for k in range(depth):
                known[step] = k
                row, column = (evaluate(index, known) for index in following.indices)
                assert column % 16 == 0 and lines * 16 <= column < lines * 32
                asked.append((row, column))
                of_own = [tuple(evaluate(index, known) for index in request.indices) for request in own]
                assert of_own == [(k + 8, 16 * line) for line in range(lines)]
        assert asked == sorted(asked)  # from the panel's start to its end
        wanted = [(row, (lines + line) * 16) for row in range(depth) for line in range(lines)]
        if lines < blocks <= 40:
            assert set(wanted[:-1]) <= set(asked) <= set(wanted)
        if blocks == 1:
            assert set(asked) == {(0, lines * 16)}


@pytest.mark.parametrize(("depth", "asks"), [(96, True), (2048, True), (2049, False)])
def test_intel_asks_for_its_own_panel_and_for_the_next_where_two_fit_the_cache(depth: int, asks: bool) -> None:
    program = only_program(lowered(product(640, depth, "none"), INTEL))
    found = prefetches(program.body)
    assert {request.cache for request in found} == ({1, 2} if asks else {1})
    assert {request.buffer for request in found} == {b for b in program.inputs if b.name.endswith("_packed")}
    assert "prefetcht0" in emit_assembly({"matmul": program}, INTEL)


def test_weights_that_are_not_constant_are_not_asked_for() -> None:
    module = product(640, 96, "none", weights=False)
    for target in (WIDE, INTEL):
        assert not prefetches(only_program(lowered(module, target)).body)


def attention(dtype: str, target: Target) -> TensorProgram:
    bb = BlockBuilder()
    b, m, n, pages, s = (bb.symbol(name, lower=1) for name in ("b", "m", "n", "pages", "s"))
    types = {
        "q": TensorType.of((n, 6, 32), "float32"), "keys": TensorType.of((2, pages, 32, 64), dtype),
        "values": TensorType.of((2, pages, 64, 32), dtype), "table": TensorType.of((s, m), "int32"),
        "blocks": TensorType.of((b, 6), "int64"),
    }  # fmt: skip
    if dtype == "int8":
        types |= {name: TensorType.of((2, pages, 64, 1), "float32") for name in ("key_scales", "value_scales")}
    with bb.function("main", **types) as operands:
        bb.result(bb.emit(ops.paged_attention(*operands)))
    return only_program(lowered(bb.module(), target))


@pytest.mark.parametrize(("target", "ahead"), [(INTEL, 4096), (WIDE, 8192), (ARM, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_attention_over_pages_asks_for_keys_and_values(dtype: str, target: Target, ahead: int) -> None:
    program = attention(dtype, target)
    asked: dict[str, set[int | None]] = {}
    for step in walk_stmts(program.body):
        if isinstance(step, Seq) and any(isinstance(s, Prefetch) for s in step.stmts):
            for request in prefetches(step):
                assert request.cache == 2
                rows = {as_int(request.indices[2] - x.indices[2]) for x in loads(step) if x.buffer is request.buffer}
                asked.setdefault(request.buffer.name, set()).update(rows)
    size = dtypes.itemsize(dtype)
    wanted = {"keys": {ahead // (64 * size)}, "values": {ahead // (32 * size)}}
    assert asked == (wanted if ahead else {})


def test_requests_for_loose_panels_go_and_those_for_other_operands_stay() -> None:
    program = schedule_program(only_program(lowered(product(640, 96, "none"), INTEL, "estimate_costs")), INTEL)
    x = program.params[0]
    assert {request.buffer for request in prefetches(program.body)} == {program.params[1]}
    both = replace(program, body=seq(Prefetch(x, (sym(0), sym(0)), 1), program.body))
    assert {request.buffer for request in prefetches(pack_program(both, {}).body)} == {x}


def test_parts_of_a_long_sum_ask_too() -> None:
    large = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu -l2-bytes=16777216")
    program = only_program(lowered(product(640, 5000, "gelu"), large))  # verified
    assert prefetches(program.body)


@pytest.mark.parametrize("columns", [64, 100, 640])
def test_numbers_are_what_they_were(columns: int) -> None:
    target = Target.host()
    rng = np.random.default_rng(columns)
    module = lowered(product(columns, 96, "none", rng=np.random.default_rng(columns)), target)
    weights = rng.standard_normal((96, columns), np.float32)
    program = only_program(module)
    kernel = NativeKernel(program, target)
    for rows in (0, 1, 5, 6, 7, 12, 13, 16, 17, 24, 25, 64, 77):
        x, out = rng.standard_normal((rows, 96), np.float32), np.full((rows, columns), np.nan, np.float32)
        args = [x if isinstance(a, str) else a for a in constants_of(module)]
        assert kernel([*args, out], [rows] * len(program.symbols)) == 0
        np.testing.assert_allclose(out, x.astype(np.float64) @ weights, rtol=1e-5, atol=1e-4)


# The statement


def test_a_prefetch_is_text_that_parses_back_and_changes_nothing() -> None:
    program = TensorProgram((X, Y), (), COPY)
    module = IRModule({"copy": program})
    verify(module)
    text = print_module(module)
    assert "prefetch(x[i + 9, 70])" in text and "prefetch(x[i + 2, 0], 1)" in text
    assert print_module(parse_module(text)) == text
    x = np.arange(256, dtype=np.float32).reshape(4, 64)
    np.testing.assert_array_equal(run_program(program, [x])[0], x)
    out = np.zeros_like(x)
    assert NativeKernel(program)([x, out]) == 0  # 5 rows past the end of the buffer
    np.testing.assert_array_equal(out, x)


def test_a_prefetch_of_what_is_not_there_is_refused() -> None:
    for request, message in (
        (Prefetch(Buffer("z", (sym(4),), "float32"), (sym(0),)), "buffer z is not known here"),
        (Prefetch(X, (sym(0),)), "x has 2 dimensions, got 1 indices"),
        (Prefetch(X, (SymVar("far"), sym(0))), "symbol far"),
    ):
        with pytest.raises(VerifyError, match=message):
            verify(IRModule({"copy": TensorProgram((X, Y), (), replace(COPY, body=seq(request, COPY.body)))}))
    vector = For(J, sym(16), seq(Prefetch(X, (sym(0), J)), Store(Y, (sym(0), J), Load(X, (sym(0), J)))), "vectorized")
    with pytest.raises(CodegenError, match="a prefetch of x inside of a vectorized loop; move it out"):
        NativeKernel(TensorProgram((X, Y), (), vector))
