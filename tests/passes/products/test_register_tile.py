"""Register tiles: the split of rows and columns, the code of tiles for several processors, and their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from relaxlite.codegen.llvm import emit_assembly
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import For, TensorProgram
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import SymVar, as_int, evaluate, sym
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products.register_tile import RowSplit, column_pieces
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from tests.support import ir_text, tiers
from tests.support.native_kernel import NativeKernel

M, N = SymVar("m"), SymVar("n")
LEVELS = {"avx512f": "x86-64-v4", "avx2": "x86-64-v3", "sse4.2": "x86-64-v2"}


# Splits


@pytest.mark.parametrize("most", [1, 2, 5, 6, 8])
def test_blocks_of_rows_cover_all_rows_and_differ_by_at_most_one(most: int) -> None:
    split = RowSplit(M, most)
    block = SymVar("b")
    for rows in range(80):
        count = evaluate(split.count, {M: rows})
        assert count == -(-rows // most)
        starts = [evaluate(split.start(block), {M: rows, block: b}) for b in range(count)]
        heights = [evaluate(split.height(block), {M: rows, block: b}) for b in range(count)]
        assert starts == [sum(heights[:b]) for b in range(count)] and sum(heights) == rows
        assert max(heights, default=0) - min(heights, default=0) <= 1
        assert set(heights) <= set(split.heights)


@pytest.mark.parametrize("together", [1, 2, 8])
def test_blocks_of_whole_units_come_in_groups_of_equal_number(together: int) -> None:
    split, block = RowSplit(M, 20, least=10, unit=4, together=together), SymVar("b")
    for rows in (*range(10, 500, 1 if tiers.is_exhaustive() else 7), 1_000, 12_345, 99_999):
        groups, in_group = (evaluate(each, {M: rows}) for each in (split.groups, split.in_group))
        count = evaluate(split.count, {M: rows})
        assert count == (groups * in_group if together > 1 else -(-rows // 20)) and in_group <= together
        assert count < -(-rows // 20) + together
        heights = [evaluate(split.height(block), {M: rows, block: b}) for b in range(count)]
        assert rows <= sum(heights) < rows + 4 and all(height % 4 == 0 for height in heights)
        assert 0 < max(heights) <= 20 and max(heights) - min(heights) <= 4
        assert set(heights) <= set(split.heights)


@pytest.mark.parametrize(
    ("extent", "heights"),
    [
        (M, (6, 5, 4, 3, 2, 1)),
        (sym(16), (6, 5)),
        (sym(12), (6,)),
        (sym(7), (4, 3)),
        (sym(1), (1,)),
        (sym(1000), (6, 5)),
        (SymVar("few", lower=1, upper=2), (2, 1)),
        (SymVar("many", lower=100), (6, 5)),
        (M * 64, (6, 5, 4, 3, 2, 1)),
    ],
)
def test_only_heights_that_can_occur_get_code(extent: Any, heights: tuple[int, ...]) -> None:
    assert RowSplit(extent, 6).heights == heights


@pytest.mark.parametrize("extent", [0, 1, 15, 16, 17, 63, 64, 65, 80, 100, 128, 1000])
@pytest.mark.parametrize("known", [True, False])
def test_pieces_of_columns_cover_all_columns(extent: int, known: bool) -> None:
    covered: list[int] = []
    for piece in column_pieces(sym(extent) if known else N, 16, 4):
        start, count = evaluate(piece.start, {N: extent}), evaluate(piece.count, {N: extent})
        columns = range(start, start + count * piece.vectors * 16)
        assert piece.masked or not columns or columns[-1] < extent
        covered += [c for c in columns if c < extent]
    assert covered == list(range(extent))


# Numbers


def product(columns: int, depth: int, epilogue: str, *, weights: bool = True, rng: Any = None) -> IRModule:
    """x[m, depth] @ w[depth, columns]; then nothing, + bias + y, or gelu(. + bias)."""
    rng = np.random.default_rng(0) if rng is None else rng
    bb = BlockBuilder()
    m = bb.symbol("m")
    types = {"x": (m, depth), "y": (m, columns)}
    if not weights:
        types["w"] = (depth, columns)
    with bb.function("main", **{k: TensorType.of(v, "float32") for k, v in types.items()}) as (x, y, *given):
        w: Any = given[0] if given else Constant.of(rng.standard_normal((depth, columns), np.float32))
        z: Var = bb.emit(ops.matmul(x, w))
        if epilogue != "none":
            z = bb.emit(ops.add(z, Constant.of(rng.standard_normal(columns, np.float32))))
            z = bb.emit(ops.gelu(z)) if epilogue == "gelu" else bb.emit(ops.add(z, y))
        bb.result(z)
    return bb.module()


def lowered(module: IRModule, target: Target, until: str = "pack_constants") -> IRModule:
    """With ordinary products, on all targets."""
    passes = [step for step in default_pipeline() if step.name != "inner_products"]
    names = [step.name for step in passes]
    return run_passes(module, passes[: names.index(until) + 1], PassContext(target))


def only_program(module: IRModule) -> TensorProgram:
    (program,) = module.programs().values()
    return program


def constants_of(module: IRModule) -> list[np.ndarray[Any, Any]]:
    (call,) = (b.value for b in module["main"].body.bindings())  # type: ignore[union-attr]
    return [arg.value if isinstance(arg, Constant) else arg.name for arg in call.args]


def erf(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


@pytest.mark.each_value
@pytest.mark.parametrize("feature", LEVELS)
@pytest.mark.parametrize("epilogue", ["none", "add", "gelu"])
@pytest.mark.parametrize("columns", [1, 13, 48, 64, 80, 100, 130])
def test_numbers_of_every_height_and_width(columns: int, epilogue: str, feature: str) -> None:
    if not Target.host().has(feature):
        pytest.skip(f"this processor has no {feature}")
    rng = np.random.default_rng(columns)
    depth = 12 if columns % 2 else 7
    weights, bias = rng.standard_normal((depth, columns), np.float32), rng.standard_normal(columns, np.float32)
    target = Target.parse(f"llvm -mcpu={LEVELS[feature]}")
    module = lowered(product(columns, depth, epilogue, rng=np.random.default_rng(columns)), target)
    kernel = NativeKernel(only_program(module), target)
    for rows in (*range(15), 31, 40):
        x, y = rng.standard_normal((rows, depth), np.float32), rng.standard_normal((rows, columns), np.float32)
        args = [{"x": x, "y": y}[a] if isinstance(a, str) else a for a in constants_of(module)]
        out = np.full((rows, columns), np.nan, np.float32)
        assert kernel([*args, out], [rows] * len(only_program(module).symbols)) == 0
        want = x.astype(np.float64) @ weights
        if epilogue == "add":
            want = want + bias + y
        if epilogue == "gelu":
            want = want + bias
            want = 0.5 * want * (1 + erf(want / np.sqrt(2)))
        np.testing.assert_allclose(out, want, atol=2e-5)


def test_a_sum_that_starts_elsewhere_is_started_once() -> None:
    """Low tiles keep several sums per element; only neutral ones may be started more than once."""
    text = """
    n = symbol("n")
    @program(symbols=(n,), outputs=1)
    def p(x: f32[n, 64], out: f32[64]):
        for j in serial(64):
            with allocate((), "float32", "local") as acc:
                acc[()] = float32({start})
                for r in serial(8):
                    acc[()] += x[r, j]
                out[j] = acc[()]
    """
    for start, copies in ((0.0, 2), (3.0, 1)):
        made = schedule_program(ir_text.program(text.format(start=start)), Target.parse("llvm -mcpu=x86-64-v4"))
        x, out = np.random.default_rng(0).standard_normal((8, 64), np.float32), np.zeros(64, np.float32)
        unrolled = {as_int(s.extent) for s in walk_stmts(made.body) if isinstance(s, For) and s.var.name == "s"}
        assert (max(unrolled) if unrolled else 1) == copies  # type: ignore[type-var]
        if Target.host().has("avx512f"):
            assert NativeKernel(made)([x, out], [8]) == 0
            np.testing.assert_allclose(out, x.sum(axis=0) + start, atol=1e-5)


# Code


def vector_stack_references(text: str) -> list[str]:
    """Lines of assembly that move vectors from or to the stack."""
    x86 = [line for line in re.findall(r"^\s*v?\w+\s.*%[xyz]mm.*$", text, re.MULTILINE) if "(%rsp" in line]
    arm = [line for line in re.findall(r"^\s*(?:ld|st)\w+\s+q.*$", text, re.MULTILINE) if "[sp" in line]
    return x86 + arm


def inner_loops(text: str) -> list[str]:
    """The basic blocks of x86 assembly that jump back to their own start."""
    blocks = re.split(r"^(\.LBB\w+):.*$", text, flags=re.MULTILINE)
    found = []
    for label, body in zip(blocks[1::2], blocks[2::2], strict=True):
        if jump := re.search(rf"^\s*j\w+\s+{re.escape(label)}$", body, re.MULTILINE):
            found.append(body[: jump.start()])
    return found


TARGETS = (
    "-mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu",
    "-mcpu=sapphirerapids -mtriple=x86_64-unknown-linux-gnu",
    "-mcpu=haswell -mtriple=x86_64-unknown-linux-gnu",
    "-mcpu=x86-64-v2 -mtriple=x86_64-unknown-linux-gnu",
    "-mcpu=generic -mtriple=aarch64-unknown-linux-gnu",
    "-mcpu=neoverse-v1 -mtriple=aarch64-unknown-linux-gnu",
)


@pytest.mark.parametrize("text", TARGETS)
@pytest.mark.parametrize("columns", [384, 100])
def test_sums_stay_in_registers(columns: int, text: str) -> None:
    target = Target.parse(f"llvm {text}")
    program = only_program(lowered(product(columns, 384, "none"), target))
    assert vector_stack_references(emit_assembly({"p": program}, target)) == []


@pytest.mark.parametrize("text", TARGETS[:4])
@pytest.mark.parametrize("depth", [64, 5000])
def test_an_epilogue_takes_no_register_from_the_sums(depth: int, text: str) -> None:
    """Its constants belong in registers as well, but not in those of the loop that matters."""
    target = Target.parse(f"llvm {text}")
    code = emit_assembly({"p": only_program(lowered(product(128, depth, "gelu"), target))}, target)
    sums = [b for b in inner_loops(code) if "broadcast" in b or "shufps" in b]
    assert len(sums) >= 6  # one for each height
    assert [vector_stack_references(body) for body in sums] == [[]] * len(sums)


@pytest.mark.usefixtures("in_bfloat16")
def test_an_epilogue_takes_no_register_from_sums_of_dot_products() -> None:
    target = Target.parse(f"llvm {TARGETS[0]}")
    context = PassContext(target, precision="bf16")
    programs = run_passes(product(128, 384, "gelu"), default_pipeline(), context).programs()
    (program,) = (p for name, p in programs.items() if "matmul" in name)
    loops = inner_loops(emit_assembly({"p": program}, target))
    sums = [body for body in loops if "vdpbf16ps" in body]
    assert len(sums) >= 6
    assert [vector_stack_references(body) for body in sums] == [[]] * len(sums)


def test_a_very_long_sum_is_made_of_shorter_ones() -> None:
    """Its error is that of a short one: against a sum of twenty thousand terms one after the other."""
    rng = np.random.default_rng(0)
    columns, depth = 64, 20_000
    weights = rng.random((depth, columns), np.float32)
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((m, depth), "float32")) as (x,):
        bb.result(bb.emit(ops.matmul(x, Constant.of(weights))))
    module = lowered(bb.module(), Target.host())
    kernel, (_, packed) = NativeKernel(only_program(module)), constants_of(module)
    x, out = rng.random((6, depth), np.float32), np.zeros((6, columns), np.float32)
    assert kernel([x, packed, out], [6]) == 0
    want = x.astype(np.float64) @ weights
    one_by_one = np.stack([np.cumsum(x[r][:, None] * weights, axis=0, dtype=np.float32)[-1] for r in range(6)])
    assert np.square(out - want).mean() < np.square(one_by_one - want).mean() / 4


def count(program: TensorProgram, is_counted: Callable[[Any], bool]) -> int:
    return sum(1 for s in walk_stmts(program.body) if is_counted(s))


@pytest.mark.parametrize("epilogue", ["none", "add", "gelu"])
def test_a_long_epilogue_has_its_code_once(epilogue: str) -> None:
    program = only_program(lowered(product(128, 64, epilogue), Target.parse(f"llvm {TARGETS[0]}")))
    writes = count(program, lambda s: getattr(s, "buffer", None) is program.outputs[0])
    assert writes == (1 if epilogue == "gelu" else 6)


def test_one_parallel_loop_holds_all_tiles() -> None:
    program = only_program(lowered(product(100, 64, "none"), Target.parse(f"llvm {TARGETS[0]}")))
    found: Iterable[For] = [s for s in walk_stmts(program.body) if isinstance(s, For) and s.kind == "parallel"]
    (tiles,) = found
    (m,) = program.symbols
    assert [evaluate(tiles.extent, {m: rows}) for rows in (0, 1, 6, 7, 60)] == [0, 2, 2, 4, 20]
