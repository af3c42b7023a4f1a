"""The function that only fills the cache: what it rounds, which tokens it takes, and that nobody else is affected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import cli, dtypes
from relaxlite.errors import CacheFullError, InvalidArgumentError
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight
from relaxlite.frontend.llm.config import Experts, Rope
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.step import FILL, build_step
from relaxlite.ir.expr import Call, Function, Let
from relaxlite.ir.op import Op
from relaxlite.llm import compiled_engine
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.llm.compiling import build_checkpoint
from relaxlite.llm.engine import EXACT_TOKENS
from relaxlite.llm.evaluate import evaluate
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.integer_products import integer_products
from relaxlite.runtime.module import Executable
from relaxlite.target import Target
from tests.support.tiny_llm import VOCAB, checkpoint

WITH_DOTS = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu")
WITH_PAIRS = Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
PORTABLE = Target.parse("llvm -mcpu=x86-64 -mtriple=x86_64-unknown-linux-gnu")
FILLS = Target.host().has_dp4a or Target.host().has_maddubs
needs_dots = pytest.mark.skipif(not FILLS, reason="this processor has no products of bytes")


def small(kind: str = "q4_0") -> Checkpoint:
    sizes: dict[str, Any] = {"hidden": 64, "head_width": 16, "intermediate": 96, "rope": Rope(1e4, 16), "context": 256}
    return quantize_checkpoint(checkpoint(**sizes), kind)


def rounding(target: Target, kind: str, precision: str) -> dict[str, set[tuple[int, int]]]:
    """(bits beyond eight, quads that are mixed) of the products of each function."""
    context = PassContext(target)
    context.precision = precision
    module = integer_products(build_step(small(kind), has_fill=True), context)
    found: dict[str, set[tuple[int, int]]] = {}
    for name, function in module.functions().items():
        assert isinstance(function, Function)
        calls = [b.value for b in function.body.bindings() if isinstance(b, Let) and isinstance(b.value, Call)]
        products = [c.attrs for c in calls if isinstance(c.callee, Op) and c.callee.name == "matmul_blocks"]
        found[name] = {(int(p["low_bits"]), int(p["rotation"])) for p in products}  # type: ignore[call-overload]
    return found


@pytest.mark.parametrize(
    ("target", "kind", "precision", "main", "fill"),
    [
        (WITH_DOTS, "q4_0", "auto", {(4, 1)}, {(0, 8), (4, 1)}),
        (WITH_DOTS, "q4_1", "bf16", {(4, 1)}, {(0, 8), (4, 1)}),
        (WITH_DOTS, "q5_1", "auto", {(4, 1)}, {(0, 8), (4, 1)}),
        (WITH_DOTS, "q8_0", "auto", {(4, 1)}, {(4, 1)}),  # its codes, mixed, would be no bytes
        (WITH_DOTS, "q4_0", "int8", {(0, 1)}, {(0, 8), (0, 1)}),
        (WITH_DOTS, "q4_0", "int12", {(4, 1)}, {(4, 1)}),  # who asks for so many bits gets them
        (WITH_DOTS, "q4_0", "int16", {(8, 1)}, {(8, 1)}),
        (WITH_DOTS, "q4_0", "float32", set(), set()),
        (WITH_PAIRS, "q4_0", "auto", {(4, 1)}, {(0, 4), (4, 1)}),  # of 8 quads no pairs could be summed
        (WITH_PAIRS, "q5_0", "auto", {(4, 1)}, {(0, 4), (4, 1)}),
        (WITH_PAIRS, "q8_0", "auto", set(), set()),
        (PORTABLE, "q4_0", "int8", {(0, 1)}, {(0, 1)}),
        (PORTABLE, "q4_0", "auto", set(), set()),
    ],
)  # fmt: skip
def test_only_what_fills_the_cache_is_rounded_to_eight_bits(
    target: Target, kind: str, precision: str, main: set[tuple[int, int]], fill: set[tuple[int, int]]
) -> None:
    assert rounding(target, kind, precision) == {"main": main, FILL: fill}


@pytest.mark.parametrize(
    ("target", "kind", "precision", "has_fill"),
    [
        ("llvm -mcpu=znver4", "q4_0", None, True),
        ("llvm -mcpu=znver4", "q8_0", None, False),
        ("llvm -mcpu=znver4", "q4_0", "int12", False),
        pytest.param("llvm -mcpu=x86-64-v3", "q4_0", None, True, marks=pytest.mark.exhaustive),
        pytest.param("llvm -mcpu=x86-64", "q4_0", None, False, marks=pytest.mark.exhaustive),
    ],
)
def test_models_have_it_where_it_is_faster(target: str, kind: str, precision: str | None, has_fill: bool) -> None:
    data = build_checkpoint(small(kind), target, precision=precision)
    assert list(data.entries) == (["main", FILL] if has_fill else ["main"])
    if has_fill:
        fill, main = data.entries[FILL].signature, data.signature
        assert [s.name for s in fill.inputs] == [s.name for s in main.inputs if s.name != "wanted"]
        assert fill.outputs == () and fill.donated == main.donated and data.entries[FILL].host.object_code


def in_floats(dtype: str = "bfloat16", hidden: int = 128, **more: Any) -> Checkpoint:
    """Of matrices that are worth words, where a processor has these."""
    sizes = {"hidden": hidden, "head_width": 32, "intermediate": 192, "rope": Rope(1e4, 32), "context": 256}
    found = checkpoint(**sizes, **more)
    rounded = {n: Weight(w.data.astype(dtypes.to_numpy(dtype)), w.shape) for n, w in found.weights.items()}
    return replace(found, weights=rounded)


@pytest.mark.parametrize(
    ("flags", "dtype", "hidden", "precision", "has_fill"),
    [
        ("-mcpu=znver4", "bfloat16", 128, None, True),
        pytest.param("-mcpu=znver4", "float16", 128, "int8", True, marks=pytest.mark.exhaustive),
        pytest.param("-mcpu=znver5", "float32", 128, None, True, marks=pytest.mark.exhaustive),
        ("-mcpu=znver4", "bfloat16", 48, None, False),  # too narrow to gain by it
        ("-mcpu=znver4", "bfloat16", 128, "float32", False),
        ("-mcpu=znver4", "bfloat16", 128, "int12", False),
        ("-mcpu=znver4", "bfloat16", 128, "bf16", False),  # main rounds as much
        ("-mcpu=znver3", "bfloat16", 128, None, False),
        pytest.param("-mcpu=sapphirerapids", "bfloat16", 128, None, False, marks=pytest.mark.exhaustive),
    ],
)
def test_models_of_floats_have_it_where_products_of_words_are_faster(
    flags: str, dtype: str, hidden: int, precision: str | None, has_fill: bool
) -> None:
    data = build_checkpoint(in_floats(dtype, hidden), f"llvm {flags}", precision=precision)
    assert list(data.entries) == (["main", FILL] if has_fill else ["main"])


def test_a_small_matrix_of_floats_is_no_reason_to_have_it() -> None:
    """As the router of a mixture is, beside weights whose products would be the same."""
    floats = in_floats()
    most = quantize_checkpoint(floats, "q8_0")
    mixed = replace(most, weights={**most.weights, "layers.0.q": floats.weights["layers.0.q"]})
    assert list(build_checkpoint(mixed, "llvm -mcpu=znver4").entries) == ["main"]


@pytest.mark.skipif(not WITH_DOTS.runs_here, reason="needs the instructions of a Zen 4")
@pytest.mark.parametrize(
    ("dtype", "more"),
    [("bfloat16", {}), ("float16", {}), ("float32", {}), ("bfloat16", {"experts": Experts(5, 2, 96, True, 160, True)})],
    ids=["bfloat16", "float16", "float32", "experts"],
)
def test_a_prompt_of_a_model_of_floats(dtype: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the exact logits, which it gives where they are asked for, and the same in any batch and chunks."""
    monkeypatch.setattr(compiled_engine, "MIN_FILL", 4)
    given, target = in_floats(dtype, **more), "llvm -mcpu=znver4 -l2-bytes=1024"
    data, alone = build_checkpoint(given, target), build_checkpoint(given, target, precision="float32")
    engine, exact = (CompiledEngine(Executable(each)) for each in (data, alone))
    for count in (EXACT_TOKENS + 3, EXACT_TOKENS + 4, 40, 100, 200):
        (found,), (wanted,) = logits_of(engine, tokens(count)), logits_of(exact, tokens(count))
        distance = np.abs(found - wanted).max() / np.abs(wanted).max()
        assert distance < 1e-3 and (distance > 0) == (count - EXACT_TOKENS >= 4)
        (found,), (wanted,) = (logits_of(e, tokens(count), wanted=count) for e in (engine, exact))
        np.testing.assert_array_equal(found, wanted)
    prompts = [tokens(count, seed=1) for count in (5, 70, 33, 1, 150, 12, 8, 96)]
    single = [logits_of(engine, prompt)[0] for prompt in prompts]
    for other in (engine, CompiledEngine(Executable(data), chunk=7)):
        for found, wanted in zip(logits_of(other, *prompts), single, strict=True):
            np.testing.assert_array_equal(found, wanted)
    bytes_of = [sum(c.nbytes for c in each.constants) for each in (data, alone)]
    assert bytes_of[0] == pytest.approx(bytes_of[1], rel=0.05)


@pytest.fixture(scope="module")
def executable() -> Executable:
    return rl.compile(build_step(small(), has_fill=True))


@pytest.fixture(scope="module")
def exact() -> CompiledEngine:
    return CompiledEngine(rl.compile(build_step(small())))


@pytest.fixture
def engine(executable: Executable, monkeypatch: pytest.MonkeyPatch) -> CompiledEngine:
    monkeypatch.setattr(compiled_engine, "MIN_FILL", 4)
    return CompiledEngine(executable)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, count)).integers(0, VOCAB, count).tolist()


def logits_of(engine: CompiledEngine, *prompts: list[int], wanted: int = 1) -> list[np.ndarray]:
    sequences = [engine.new() for _ in prompts]
    found = engine.forward(list(zip(sequences, prompts, strict=True)), wanted=[wanted] * len(prompts))
    for sequence in sequences:
        engine.remove(sequence)
    return found


@pytest.mark.parametrize("count", [EXACT_TOKENS + 3, EXACT_TOKENS + 4, 40, 100, 200])
def test_logits_behind_a_filled_prompt_are_near_those_of_an_exact_one(
    engine: CompiledEngine, exact: CompiledEngine, count: int
) -> None:
    (found,), (wanted,) = logits_of(engine, tokens(count)), logits_of(exact, tokens(count))
    distance = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert distance < 2e-2
    is_filled = count - EXACT_TOKENS >= 4 and FILLS
    assert (distance > 0) == is_filled


@needs_dots
def test_prompts_that_are_not_long_are_computed_like_replies(executable: Executable, exact: CompiledEngine) -> None:
    usual, most = CompiledEngine(executable), compiled_engine.MIN_FILL + EXACT_TOKENS - 1
    for count, is_same in ((most, True), (most + 1, False)):
        assert np.array_equal(logits_of(usual, tokens(count)), logits_of(exact, tokens(count))) == is_same


def test_what_is_filled_depends_on_the_sequence_alone(engine: CompiledEngine, executable: Executable) -> None:
    """Not on the batch, nor on chunks: the rows of products with weights in blocks are the same in any number."""
    prompts = [tokens(count, seed=1) for count in (5, 70, 33, 1, 150, 12, 8, 96)]
    alone = [logits_of(engine, prompt)[0] for prompt in prompts]
    for other in (engine, CompiledEngine(executable, chunk=7)):
        for found, wanted in zip(logits_of(other, *prompts), alone, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def test_all_logits_that_are_asked_for_are_exact(engine: CompiledEngine, exact: CompiledEngine) -> None:
    (found,), (wanted,) = (logits_of(e, tokens(90), wanted=90) for e in (engine, exact))
    np.testing.assert_array_equal(found, wanted)


def test_a_sequence_goes_on_behind_what_is_filled(engine: CompiledEngine, exact: CompiledEngine) -> None:
    """Fork, drop, and more tokens, one at a time and many."""
    found, wanted = [], []
    for e, into in ((engine, found), (exact, wanted)):
        first = e.new()
        e.forward([(first, tokens(60))])
        fork = e.fork(first, 45)
        e.drop(first, 7)
        into += e.forward([(first, [3]), (fork, tokens(30, seed=2))])
        into += e.forward([(first, tokens(50, seed=3)), (fork, [5])], wanted=[2, 1])
        e.fill(first, tokens(20, seed=4))
        assert (e.length(first), e.length(fork)) == (124, 76)
        into += e.forward([(first, [1])])
        e.remove(first)
        e.remove(fork)
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.abs(ours - theirs).max() < 2e-2 * np.abs(theirs).max()
    assert engine.cache.used_pages == 0


def test_a_full_cache_leaves_sequences_as_they_were(executable: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_engine, "MIN_FILL", 4)
    engine = CompiledEngine(executable)
    engine = CompiledEngine(executable, max_bytes=engine.cache.layout.page_bytes * 2)
    sequence = engine.new()
    engine.fill(sequence, tokens(100))
    for attempt in (lambda: engine.fill(sequence, tokens(90)), lambda: engine.forward([(sequence, tokens(90))])):
        with pytest.raises(CacheFullError):
            attempt()
        assert engine.length(sequence) == 100
    with pytest.raises(InvalidArgumentError, match=f"token {VOCAB} is not in the vocabulary"):
        engine.fill(sequence, [VOCAB])


def test_an_evaluation_reads_its_context_as_a_reply_would(engine: CompiledEngine, exact: CompiledEngine) -> None:
    text = tokens(200, seed=5)
    found = evaluate(engine, text, against=exact, window=128)
    assert found.comparison is not None and found.tokens == 199
    assert (found.comparison.kl_divergence > 0) == FILLS
    assert found.comparison.kl_divergence < 1e-3 and found.comparison.top1_agreement > 0.95
    same = evaluate(exact, text, against=exact, window=64, stride=16)
    assert same.comparison is not None and same.comparison.kl_divergence == 0


def test_a_saved_model_has_both_functions_over_the_same_weights(
    executable: Executable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executable.save(tmp_path / "m.rlx")
    loaded = rl.load(tmp_path / "m.rlx")
    fill = loaded.entry(FILL)
    assert fill._vm is loaded._vm and [s.name for s in fill.inputs][:5] == [s.name for s in loaded.inputs][:5]
    (found,), (wanted,) = (logits_of(CompiledEngine(e), tokens(120)) for e in (loaded, executable))
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(InvalidArgumentError, match="the model has no function 'verify'; it has main, fill"):
        loaded.entry("verify")
    assert "inputs of fill:" in loaded.disassemble()
    cli.main(["inspect", str(tmp_path / "m.rlx")])
    assert "\n          fill: native, " in capsys.readouterr().out
