"""The table of strategies: which one a product gets on which processor, and the reasons against the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

import relaxlite as rl
from bench.cpu.cases import GROUPS as CPU_GROUPS
from bench.llm.cases import GROUPS as LLM_GROUPS
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import sym
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products import scheduler
from relaxlite.passes.products.choice import ScheduleChoice
from relaxlite.passes.products.contraction import Contraction, Encoding
from relaxlite.passes.products.strategy import Precision, Requirement, Strategy, allowed_of, candidates, chosen
from relaxlite.passes.products.strategy_table import BY_NAME, TABLE
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.passes.schedule.primitives import steps_of
from relaxlite.target import Target
from tests.support.block_weights import BlockWeight, block_weight


def target(cpu: str) -> Target:
    return Target.parse(f"llvm -mcpu={cpu} -mtriple=x86_64-unknown-linux-gnu")


def blocked(rows: int | None = None) -> Contraction:
    twelve, codes = Encoding("blocked", 12), Encoding("blocked", 4)
    return Contraction("matmul", None if rows is None else sym(rows), sym(2048), sym(32), twelve, codes)


def names(contraction: Contraction, cpu: str, preferred: str | None = None) -> list[tuple[str, int]]:
    some = candidates(TABLE, contraction, target(cpu), preferred=preferred)
    return [(strategy.name, strategy.min_rows) for strategy in chosen(some)]


@pytest.mark.parametrize(
    ("cpu", "many"),
    [
        ("icelake-server", [("blocked_interleaved", 2)]),
        ("sapphirerapids", [("blocked_amx", 16), ("blocked_interleaved", 2)]),
        ("znver3", [("blocked_maddubs", 6), ("blocked_dp4a", 2)]),
        ("znver4", [("blocked_int16_winograd", 12), ("blocked_dp4a", 2)]),
        ("x86-64", [("blocked_dp4a", 2)]),
    ],
)
def test_processors_multiply_blocked_weights_by_strategies_of_their_own(cpu: str, many: list[tuple[str, int]]) -> None:
    assert names(blocked(), cpu) == [*many, ("blocked_gemv", 1)]


def test_a_refusal_says_what_is_missing() -> None:
    reasons = {c.strategy.name: c.refusal for c in candidates(TABLE, blocked(rows=8), target("znver4"))}
    assert reasons["blocked_amx"] == "needs AMX tiles of bytes (amx-int8), which znver4 has not"
    assert reasons["blocked_int16_winograd"] == "pays from 12 rows on, and there are at most 8"
    assert reasons["blocked_dp4a"] is None


def test_a_preferred_strategy_takes_many_rows_where_it_is_possible() -> None:
    assert names(blocked(), "sapphirerapids", "blocked_dp4a") == [("blocked_dp4a", 2), ("blocked_gemv", 1)]
    assert names(blocked(), "znver4", "blocked_amx") == names(blocked(), "znver4")


def test_a_slower_strategy_is_refused_for_the_faster_one() -> None:
    reasons = {c.strategy.name: c.refusal for c in candidates(TABLE, blocked(), target("znver4"))}
    assert reasons["blocked_maddubs"] == "is slower than the dot products of four bytes of znver4"


def test_every_strategy_names_a_benchmark_that_there_is() -> None:
    groups = {f"bench.cpu {name}" for name in CPU_GROUPS} | {f"bench.llm {name}" for name in LLM_GROUPS}
    assert {strategy.evidence for strategy in TABLE} <= groups


def test_the_last_strategy_of_every_form_takes_one_row() -> None:
    last: dict[tuple[str, tuple[str, str]], Strategy] = {}
    for strategy in TABLE:
        for form in strategy.forms if strategy.prepares is None else ():  # below, the product is computed as others
            for kinds in strategy.operands or {("any", "any")}:
                before = last.get((form, kinds))
                assert before is None or before.min_rows >= strategy.min_rows, f"{strategy.name} stands too late"
                last[form, kinds] = strategy
    assert all(strategy.min_rows == 1 for strategy in last.values())
    assert len(BY_NAME) == len(TABLE)


def floats(columns: int, depth: int, *, is_constant: bool = True) -> Contraction:
    numbers = Encoding.of_dtype("float32")
    return Contraction("matmul", None, sym(columns), sym(depth), numbers, numbers, is_constant)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision("auto"), {"winograd_float32"}),
        (Precision("auto", is_relaxed=True), {"winograd_int16_kept", "winograd_float32"}),
        (Precision("bf16"), {"winograd_int16", "winograd_float32"}),
        (Precision("float32", is_relaxed=True), {"winograd_float32"}),
    ],
)
def test_a_precision_allows_what_a_strategy_rounds(precision: Precision, expected: set[str]) -> None:
    def prepared(contraction: Contraction, cpu: str) -> set[str]:
        allowed = allowed_of(candidates(TABLE, contraction, target(cpu), precision))
        return {strategy.name for strategy in allowed if strategy.prepares is not None}

    assert prepared(floats(512, 384), "znver4") == expected
    assert not prepared(floats(512, 384), "icelake-server")  # has no adders beside its multipliers
    assert not prepared(floats(512, 384, is_constant=False), "znver4")
    assert prepared(floats(512, 385), "znver4") == {"winograd_float32"}  # an odd depth has no pairs


def test_a_refusal_for_rounding_names_the_precision() -> None:
    options = candidates(TABLE, floats(512, 384), target("znver4"), Precision("float32"))
    reasons = {c.strategy.name: c.refusal for c in options}
    assert reasons["winograd_int16"] == "rounds both operands to 14 bits, which precision float32 does not allow"
    assert reasons["winograd_float32"] is None


@pytest.mark.parametrize(
    ("cpu", "bits", "precision", "expected"),
    [
        ("icelake-server", 8, "auto", "rounded_blocks"),
        ("znver3", 7, "auto", "rounded_blocks"),
        ("znver3", 8, "auto", None),  # sums of two products would exceed 16 bits
        ("znver3", 8, "int16", "requested_blocks"),
        ("x86-64", 4, "auto", None),
        ("x86-64", 4, "int8", "requested_blocks"),
        ("icelake-server", 4, "float32", None),
    ],
)
def test_activations_are_rounded_where_integers_are_faster_or_asked_for(
    cpu: str, bits: int, precision: str, expected: str | None
) -> None:
    contraction = replace(floats(2048, 64), w=Encoding("blocked", bits, 32), is_constant=False)
    allowed = {s.name for s in allowed_of(candidates(TABLE, contraction, target(cpu), Precision(precision)))}
    assert allowed & {"rounded_blocks", "requested_blocks"} == ({expected} if expected else set())
    assert "dequantized_fma" in allowed


def layer(weight: BlockWeight) -> IRModule:
    bb = rl.BlockBuilder()
    with bb.function("main", x=rl.TensorType.of((bb.symbol("m"), weight.codes.shape[0]), "float32")) as (x,):
        bb.result(bb.emit(rl.ops.matmul(x, weight.emit(bb))))
    return bb.module()


def schedules(module: IRModule, cpu: str) -> tuple[str, PassContext]:
    context = PassContext(target(cpu))
    steps = default_pipeline()
    upto = 1 + [step.name for step in steps].index("schedule")
    programs = run_passes(module, steps[:upto], context).programs()
    return "\n".join(line for program in programs.values() for line in steps_of(program)), context


def test_schedules_name_the_strategy_and_decisions_say_why() -> None:
    weight = block_weight(64, 512)
    texts = {cpu: schedules(layer(weight), cpu)[0] for cpu in ("icelake-server", "sapphirerapids", "znver3", "znver4")}
    own = ("blocked_interleaved", "blocked_amx", "blocked_maddubs", "blocked_int16_winograd")
    assert all(f'strategy("{name}"' in text for name, text in zip(own, texts.values(), strict=True)), texts
    decisions = schedules(layer(weight), "znver3")[1].decisions
    taken = [d for d in decisions if d.step == "strategy" and d.taken]
    assert any(d.subject.endswith("by blocked_maddubs") and "from 6 rows on" in d.reason for d in taken)
    assert any("needs AMX tiles" in d.reason for d in decisions if not d.taken)


def test_a_strategy_that_is_made_up_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(BY_NAME["blocked_dp4a"], name="blocked_own", summary="an inner loop of our own")
    refused = replace(
        own, name="blocked_never", requires=(Requirement("needs magic, which {cpu} has not", lambda target: False),)
    )
    monkeypatch.setattr(scheduler, "TABLE", (refused, own, *TABLE))
    monkeypatch.setitem(BY_NAME, "blocked_own", own)
    weight = block_weight(64, 512)
    text, context = schedules(layer(weight), "x86-64-v4")
    assert 'strategy("blocked_own", rows=2)' in text
    assert any("needs magic, which x86-64-v4 has not" in d.reason for d in context.decisions)


def test_a_tuned_strategy_is_taken() -> None:
    weight = block_weight(64, 512)
    steps = default_pipeline()
    upto, zen4 = [step.name for step in steps].index("schedule"), target("znver4")
    programs = run_passes(layer(weight), steps[:upto], PassContext(zen4)).programs().values()
    (program,) = [p for p in programs if "strategy(" in str(steps_of(schedule_program(p, zen4)))]
    text = str(steps_of(schedule_program(program, zen4, ScheduleChoice(strategy="blocked_dp4a"))))
    assert 'strategy("blocked_dp4a", rows=2)' in text and 'strategy("blocked_int16_winograd"' not in text
    assert 'refuse("blocked_int16_winograd", reason="tuning has chosen blocked_dp4a")' in text
