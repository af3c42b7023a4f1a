"""Rows in groups, each with a matrix of its own: compiled once, run with groups of all heights, against NumPy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import RelaxliteError, TypeInferenceError
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import Experts
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.step import build_step
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.ops.grouped_products import make_spans
from relaxlite.ir.types import TensorType
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.llm.compiling import build_step_module
from relaxlite.passes.products import blocks_int16 as schedule_halves
from tests.passes.products.test_blocks import LOW_BITS, NARROW, OLD, PORTABLE, WIDE, exact_case, here
from tests.passes.products.test_blocks_int16 import has_halves, lowered
from tests.passes.products.test_winograd_products import ZEN4
from tests.support import tiers
from tests.support.block_weights import BlockWeight
from tests.support.emulated_tiles import emulated_tiles
from tests.support.llm_models import small_checkpoint

GROUPS = 5
COUNTS = (
    (0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 1, 1, 0, 1), (2, 0, 1, 3, 0), (15, 16, 17, 0, 1), (0, 0, 0, 0, 300),
    (22, 27, 31, 33, 5), (1, 129, 0, 128, 2), (12, 60, 13, 130, 40),
)  # fmt: skip
KINDS = ("4 bits", "4 bits, offsets", "5 bits", "6 bits in blocks of 16", "8 bits", "4 bits, a table")


def members(name: str, columns: int, low_bits: int) -> tuple[list[BlockWeight], np.ndarray[Any, Any]]:
    """Matrices, and 300 rows whose products with each of them have no rounding."""
    weight, x = exact_case(name, columns, low_bits)

    def turned(by: int) -> BlockWeight:
        offsets = None if weight.offsets is None else np.roll(weight.offsets, by, axis=1)
        codes, scales = (np.roll(part, by, axis=1) for part in (weight.codes, weight.scales))
        return replace(weight, codes=codes, scales=scales, offsets=offsets)

    return [turned(by) for by in range(GROUPS)], x


def grouped(bb: BlockBuilder, x: Expr, spans: Expr, weights: list[BlockWeight], *, coarse: bool = False) -> Var:
    stacks = [np.stack([w.value for w in each]) for each in zip(*(w.operands for w in weights), strict=True)]
    first = weights[0]
    attrs = {"bits": first.bits, "zero": first.zero, "table": first.table, "coarse": coarse}
    return bb.emit(ops.grouped_matmul(x, spans, *stacks, **attrs))


def products(weights: list[BlockWeight], *, adds: bool = False) -> IRModule:
    bb = BlockBuilder()
    p, (depth, columns) = bb.symbol("p"), weights[0].codes.shape
    types = {"x": TensorType.of((p, depth), "float32"), "spans": TensorType.of((GROUPS + 1, 3), "int64")}
    if adds:
        types["more"] = TensorType.of((p, columns), "float32")
    with bb.function("main", **types) as (x, spans, *more):
        found = grouped(bb, x, spans, weights)
        bb.result(bb.emit(ops.add(found, *more)) if more else found)
    return bb.module()


def wanted_of(x: np.ndarray[Any, Any], counts: tuple[int, ...], weights: list[BlockWeight]) -> np.ndarray[Any, Any]:
    ends = np.cumsum(counts)
    rows = np.split(x.astype(np.float64), ends[:-1])
    return np.concatenate([part @ weight.values for part, weight in zip(rows, weights, strict=True)])


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["int8", "int12"])
@pytest.mark.parametrize("target", ["llvm", PORTABLE, WIDE, OLD, NARROW])
@pytest.mark.parametrize("name", KINDS)
def test_each_row_is_multiplied_by_the_matrix_of_its_group(name: str, target: str, precision: str) -> None:
    for columns in (33, 160):
        weights, x = members(name, columns, LOW_BITS[precision])
        exe = rl.compile(products(weights), here(target), precision=precision)
        for counts in COUNTS:
            given = x[: sum(counts)]
            found = exe(given, make_spans(counts))
            np.testing.assert_array_equal(found, wanted_of(given, counts, weights), err_msg=f"{columns}, {counts}")


def test_groups_of_a_zen_4_share_a_pass_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ZEN4.runs_here:
        pytest.skip("needs the instructions of a Zen 4")
    monkeypatch.setattr(schedule_halves, "MIN_COLUMNS", 1)
    for name in KINDS:
        weights, x = members(name, 80, LOW_BITS["int12"])
        assert has_halves(lowered(products(weights)))
        exe = rl.compile(products(weights), ZEN4, precision="int12")
        for counts in COUNTS:
            given = x[: sum(counts)]
            np.testing.assert_array_equal(exe(given, make_spans(counts)), wanted_of(given, counts, weights))


@pytest.mark.parametrize("name", KINDS)
def test_groups_by_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Those that leave 6 rows and more have a tile whose first rows another computes, too."""
    weights, x = members(name, 80, LOW_BITS["int12"])
    with emulated_tiles(monkeypatch, tmp_path) as (target, tiles):
        exe = rl.compile(products(weights, adds=True), target, precision="int12")
        for counts in COUNTS:
            given, more = x[: sum(counts)], np.full((sum(counts), 80), 0.5, np.float32)
            found = exe(given, make_spans(counts), more)
            np.testing.assert_array_equal(found, wanted_of(given, counts, weights) + 0.5, err_msg=f"{counts}")
    assert tiles.counts.keys() & {"dot", "dot_unsigned"}


def test_without_rounding_products_are_those_of_floats() -> None:
    weights, _ = members("5 bits", 40, 0)
    exe = rl.compile(products(weights), precision="float32")
    for counts in COUNTS:
        given = np.random.default_rng(0).standard_normal((sum(counts), 192)).astype(np.float32)
        found = exe(given, make_spans(counts))
        np.testing.assert_allclose(found, wanted_of(given, counts, weights), rtol=1e-3, atol=1e-2)


def test_rows_come_sorted_by_group_and_go_back() -> None:
    bb = BlockBuilder()
    m = bb.symbol("m")
    types = {"numbers": TensorType.of((m, 3), "int64"), "x": TensorType.of((m, 20), "float32")}
    with bb.function("main", **types, weights=TensorType.of((m, 3), "float32")) as (numbers, x, weights):
        flat = bb.emit(ops.reshape(numbers, (m * 3,)))
        made = bb.emit(ops.group_rows(flat, groups=GROUPS))
        order, places, spans = (bb.emit(TupleGetItem(made, k)) for k in range(3))
        tokens = bb.emit(ops.floor_divide(order, np.int64(3)))
        sums = bb.emit(ops.sum_rows(bb.emit(ops.gather(x, tokens, axis=0)), places, weights))
        bb.result(Tuple((sums, order, spans)))
    exe, rng = rl.compile(bb.module()), np.random.default_rng(0)
    for count in (0, 1, 2, 7, 200):
        given, rows = rng.integers(0, GROUPS, (count, 3)), rng.standard_normal((count, 20)).astype(np.float32)
        shares = rng.random((count, 3)).astype(np.float32)
        found, sorted_rows, where = exe(given, rows, shares)
        np.testing.assert_allclose(found, rows * shares.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(sorted_rows, np.argsort(given.reshape(-1), kind="stable"))
        np.testing.assert_array_equal(where, make_spans(np.bincount(given.reshape(-1), minlength=GROUPS)))


_GROUPS, _NUMBER = "the number of groups is out of range in the spans", "a number is out of range in the spans"
_FIRST, _COUNT = "a first row is out of range in the spans", "a count of rows is out of range in the spans"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, 0, 6), _GROUPS), ((0, 0, -1), _GROUPS), ((1, 0, 5), _NUMBER), ((1, 0, -1), _NUMBER),
        ((1, 1, -1), _FIRST), ((1, 1, 7), _FIRST), ((1, 2, 7), _COUNT), ((2, 1, 3), _COUNT),
        ((2, 2, (1 << 63) - 1), _COUNT), ((1, 2, -3), _COUNT),
    ],
)  # fmt: skip
def test_spans_that_are_none_are_refused(change: tuple[int, int, int], message: str) -> None:
    weights, x = members("4 bits", 33, 4)
    exe = rl.compile(products(weights))
    spans = make_spans((2, 0, 4, 0, 0))
    spans[change[:2]] = change[2]
    with pytest.raises(RelaxliteError, match=message):
        exe(x[:6], spans)


def test_what_does_not_fit_is_refused() -> None:
    weights, _ = members("4 bits", 33, 4)
    words, scales = (np.stack([w.operands[k].value for w in weights]) for k in range(2))
    bb = BlockBuilder()
    types = {"x": TensorType.of((bb.symbol("p"), 192), "float32"), "spans": TensorType.of((6, 3), "int64")}
    with bb.function("main", **types) as (x, spans):
        cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("must be of rank 3, for one number of matrices", (x, spans, words[0], scales[0]), {}),
            ("must be of rank 3, for one number of matrices", (x, spans, words, scales[:4]), {}),
            ("the spans of 4 matrices must be int64 (5, 3), got", (x, spans, words[:4], scales[:4]), {}),
            ("x must be float32 (p, 96) for matrices of 96 rows", (x, spans, words[:, :12], scales[:, :3]), {}),
            ("zero must be a code, from 0 to 15", (x, spans, words, scales), {"zero": 16}),
        ]
        for message, operands, attrs in cases:
            with pytest.raises(TypeInferenceError, match=re.escape(message)):
                ops.grouped_matmul(*operands, **{"bits": 4, "zero": 8, **attrs})
        with pytest.raises(TypeInferenceError, match="numbers must be an int64 vector"):
            ops.group_rows(spans, groups=5)
        bb.result(x)
    bb = BlockBuilder()
    with bb.function("main", numbers=TensorType.of((bb.symbol("p"),), "int64")) as (numbers,):
        bb.result(bb.emit(ops.group_rows(numbers, groups=5)))
    exe = rl.compile(bb.module())
    for wrong in (5, -1, 1 << 40):
        with pytest.raises(RelaxliteError, match="a number is out of range for 5 groups"):
            exe(np.array([0, wrong, 1]))


# Mixtures of experts


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["experts", "gpt_oss", "experts, some layers, one shared"])
def test_experts_together_give_what_they_give_one_by_one(name: str) -> None:
    experts = small_checkpoint(name).config.experts
    assert experts is not None
    experts = replace(experts, intermediate=64, shared=None if experts.shared is None else 64)
    checkpoint = quantize_checkpoint(small_checkpoint(name, hidden=64, experts=experts), "q5_1")
    tokens, found = np.arange(90) % 23, []
    for groups_rows in (False, True):
        module = build_step(checkpoint, groups_rows=groups_rows)
        assert ("grouped_matmul" in str(module)) == groups_rows
        engine = CompiledEngine(rl.compile(module, precision="int16"))
        sequence = engine.new()
        parts = [engine.forward([(sequence, tokens[:41])], wanted=[41]), engine.forward([(sequence, tokens[41:])])]
        found.append(np.concatenate([part[0] for part in parts]))
    scale = abs(found[0]).max()
    np.testing.assert_allclose(found[1], found[0], atol=2e-3 * scale)


def test_numbers_that_are_none_stay_with_their_token() -> None:
    """What chooses experts gives places of experts then, too."""
    experts = small_checkpoint("experts").config.experts
    assert experts is not None
    plain = small_checkpoint("experts", hidden=64, experts=replace(experts, intermediate=64))
    checkpoint = quantize_checkpoint(plain, "q5_1")
    embed = plain.weights["embed"].to_float32().copy()
    embed[5] = np.nan
    weights = {**checkpoint.weights, "embed": Weight(embed, embed.shape)}
    engine = CompiledEngine(rl.compile(build_step(replace(checkpoint, weights=weights), groups_rows=True)))
    found = engine.forward([(engine.new(), [1, 2, 5]), (engine.new(), [1, 2, 3])])
    assert np.isnan(found[0]).all() and not np.isnan(found[1]).any()


@pytest.mark.exhaustive
def test_experts_that_all_sigmoids_turn_down_add_nothing() -> None:
    """Shares of nothing are 0, not NaN."""
    experts = small_checkpoint("experts in groups").config.experts
    assert experts is not None
    experts = replace(experts, is_normed=True, has_bias=True, shared=None)
    checkpoint = small_checkpoint("experts in groups", experts=experts)
    down = {f"layers.{k}.router_bias": Weight(np.full(8, -200, np.float32), (8,)) for k in range(2)}
    found = []
    for changed in (1.0, 7.0):  # whatever experts would give
        of_experts = {name: w for name, w in checkpoint.weights.items() if ".experts." in name}
        other = {name: Weight(w.data * np.float32(changed), w.shape) for name, w in of_experts.items()}
        engine = CompiledEngine(
            rl.compile(build_step(replace(checkpoint, weights={**checkpoint.weights, **down, **other})))
        )
        found.append(engine.forward([(engine.new(), [1, 2, 3])])[0])
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("count", "chosen", "chunk"), tiers.few_rows([(4, 4, 128), (8, 2, 256), (32, 8, 256), (128, 8, 512)])
)
def test_steps_of_long_prompts_have_enough_tokens_for_each_expert(count: int, chosen: int, chunk: int) -> None:
    experts = Experts(count, chosen, 16, True)
    module = build_step(small_checkpoint("experts", experts=experts, layers=1))
    assert module.attrs["chunk"] == chunk
    assert CompiledEngine(rl.compile(module))._chunk == chunk


def test_experts_of_several_kinds_stay_apart() -> None:
    experts = small_checkpoint("experts").config.experts
    assert experts is not None
    plain = small_checkpoint("experts", hidden=64, experts=replace(experts, intermediate=64))
    weights = dict(quantize_checkpoint(plain, "q4_0").weights)
    weights["layers.1.experts.3.up"] = quantize_checkpoint(plain, "q5_1").weights["layers.1.experts.3.up"]
    module = build_step_module(replace(plain, weights=weights), groups_rows=True)
    calls = str(module).count("grouped_matmul(")
    assert calls == 3  # of layer 0
