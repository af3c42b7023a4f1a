"""Logits of a token are the same to the last bit whatever tokens and sequences are in its step: in floats, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import dtypes
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight
from relaxlite.frontend.llm.config import Experts, Rope
from relaxlite.frontend.llm.step import build_step
from relaxlite.ir import ops
from relaxlite.ir.attributes import BATCH_INVARIANT
from relaxlite.ir.expr import Attrs, Constant
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.target import Target
from tests.frontend.llm.test_gguf import packed
from tests.support import tiers
from tests.support.tiny_llm import VOCAB, checkpoint

NATIVE, AVX2, SSE = "llvm", "llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64-v2"
SHAPE = {
    "hidden": 256, "layers": 1, "heads": 4, "kv_heads": 2, "head_width": 64, "intermediate": 768, "is_tied": False,
    "rope": Rope(1e4, 64),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 50).tolist()
FLOATS = ("float32", "float16", "bfloat16")


def runnable(target: str) -> str:
    if not Target.parse(target).runs_here:
        pytest.skip(f"this processor does not run code for {target}")
    return target


def converted(weight: Weight, kind: str) -> Weight:
    """A matrix in another type, or in blocks of small random weights."""
    if len(weight.shape) != 2:
        return weight
    if kind in FLOATS:
        return Weight(weight.data.astype(dtypes.to_numpy(kind)), weight.shape)
    return Weight(packed(weight.data, kind), weight.shape, kind)


def differing(made: Checkpoint, target: str, precision: str) -> list[tuple[int, int]]:
    """(begin, tokens) of steps whose logits are not those of a step for each token, alone."""
    compiled = rl.compile(build_step(made), runnable(target), precision=precision)
    engine = CompiledEngine(compiled)
    sequence = engine.new()
    alone = np.concatenate([engine.forward([(sequence, [token])])[0] for token in TOKENS])
    assert np.isfinite(alone).all() and np.ptp(alone, axis=0).min() > 0
    found = []
    for begin, counts in ((0, (2, 3, 4, 5, 6, 7, 8, 9, 17, 50)), (20, (2, 7, 13))):
        for count in counts:
            engine.drop(sequence, engine.length(sequence) - begin)
            given = TOKENS[begin : begin + count]
            (logits,) = engine.forward([(sequence, given)], wanted=[count])
            if not np.array_equal(logits, alone[begin : begin + count]):
                found.append((begin, count))
    others = [engine.new() for _ in range(3)]
    batch = [(other, TOKENS[: 5 + 9 * k]) for k, other in enumerate(others)]
    for (_, given), logits in zip(batch, engine.forward(batch, wanted=[len(g) for _, g in batch]), strict=True):
        if not np.array_equal(logits, alone[: len(given)]):
            found.append((-1, len(given)))
    return found


@pytest.mark.each_value("kind", "target", "is_tied")
@pytest.mark.parametrize(
    ("kind", "target", "is_tied"),
    [
        ("float32", NATIVE, True), ("float16", NATIVE, False), ("bfloat16", NATIVE, True), ("float32", AVX2, False),
        ("float16", AVX2, True), ("bfloat16", SSE, False),
    ],
)  # fmt: skip
def test_a_batch_changed_last_bits_of_float_weights(kind: str, target: str, is_tied: bool) -> None:
    plain = checkpoint(**{**SHAPE, "is_tied": is_tied})
    made = replace(plain, weights={name: converted(weight, kind) for name, weight in plain.weights.items()})
    assert differing(made, target, "auto") == []


@pytest.mark.parametrize(
    ("kind", "target"),
    tiers.few_rows([("Q6_K", NATIVE), ("Q8_0", AVX2), ("Q4_1", NATIVE), ("Q4_K", AVX2), ("MXFP4", SSE)]),
)
def test_a_batch_changed_last_bits_of_blocks_multiplied_in_float(kind: str, target: str) -> None:
    plain = checkpoint(**SHAPE)
    made = replace(plain, weights={name: converted(weight, kind) for name, weight in plain.weights.items()})
    assert differing(made, target, "float32") == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "target"), tiers.few_rows([("Q8_0", AVX2), ("Q4_0", NATIVE)]))
def test_a_batch_changed_last_bits_of_experts(kind: str, target: str) -> None:
    """Whose routers are of floats, one of a single column, and who are given the rows that chose them."""
    plain = checkpoint(**SHAPE, experts=Experts(5, 2, 96, True, 160, True))
    weights = {name: w if "router" in name else converted(w, kind) for name, w in plain.weights.items()}
    assert differing(replace(plain, weights=weights), target, "auto") == []


@pytest.mark.each_value
@pytest.mark.parametrize("target", [NATIVE, AVX2, SSE])
@pytest.mark.parametrize("depth", [64, 200, 300])
def test_rows_beside_others_changed_last_bits_of_a_single_column(depth: int, target: str) -> None:
    """As a gate of a mixture's shared expert is: its results lie along the rows, whose tiles are of several widths."""
    bb = rl.BlockBuilder()
    rng = np.random.default_rng(0)
    w = Constant.of(rng.standard_normal((depth, 1)).astype(np.float32))
    with bb.function("main", x=rl.TensorType.of((bb.symbol("n"), depth), "float32")) as (given,):
        bb.result(bb.emit(ops.matmul(given, w)))
    x = rng.standard_normal((150, depth)).astype(np.float32)
    run = rl.compile(bb.module(Attrs({BATCH_INVARIANT: True})), runnable(target))
    alone = np.concatenate([run(x[k : k + 1]) for k in range(len(x))])
    for count in (0, 3, 16, 17, 63, 64, 65, 150):
        np.testing.assert_array_equal(run(x[:count]), alone[:count])


@pytest.mark.parametrize("target", [NATIVE, AVX2, SSE])
def test_a_module_may_ask_for_it(target: str) -> None:
    """Sums of more terms than one register adds up, scales of columns, and two products that become one program."""
    rng = np.random.default_rng(0)
    w, gate = (rng.standard_normal((2500, 70)).astype(np.float16) for _ in range(2))
    scale = rng.uniform(0.5, 1, 70).astype(np.float32)

    bb = rl.BlockBuilder()
    with bb.function("main", x=rl.TensorType.of((bb.symbol("n"), 2500), "float32")) as (given,):
        wide = bb.emit(ops.multiply(bb.emit(ops.cast(Constant.of(w), dtype="float32")), Constant.of(scale)))
        gates = bb.emit(ops.matmul(given, bb.emit(ops.cast(Constant.of(gate), dtype="float32"))))
        bb.result(bb.emit(ops.multiply(bb.emit(ops.matmul(given, wide)), bb.emit(ops.sigmoid(gates)))))
    x = rng.standard_normal((33, 2500)).astype(np.float32)
    run = rl.compile(bb.module(Attrs({BATCH_INVARIANT: True})), runnable(target))
    alone = np.concatenate([run(x[k : k + 1]) for k in range(len(x))])
    wanted = x @ (w * scale) / (1 + np.exp(-np.clip(x @ gate.astype(np.float32), -60, 60)))
    np.testing.assert_allclose(alone, wanted, rtol=1e-4, atol=1e-2)
    for count in (0, 2, 5, 6, 9, 16, 33):
        np.testing.assert_array_equal(run(x[:count]), alone[:count])
