"""Schedules as data: choices keep programs' meaning, the database finds them again, the search keeps what is faster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite import cli, config, tuner
from relaxlite.cli.compiling import make_context
from relaxlite.errors import ExecutionError, InvalidArgumentError
from relaxlite.ir.equality import structural_hash
from relaxlite.ir.expr import Constant, ShapeValue
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.program_verifier import verify_program
from relaxlite.ir.symbolic import syms
from relaxlite.passes.products.choice import DEFAULT, ScheduleChoice, axes
from relaxlite.passes.products.strategy_table import ALTERNATIVES
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.passes.schedule.tuning import TunedProgram, Tuning, program_key
from relaxlite.target import Target
from tests.support import onnx_models as om
from tests.support import tiers
from tests.support.random_programs import MAX_WORK, SIZES, assert_same_program, products, reductions, work_of

HOST = Target.host()
AVX2 = Target.parse("llvm -mcpu=x86-64-v3")
WEIGHT = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)


def product_module(name: str = "x", columns: int = 96, *, lower: int | None = 0, upper: int | None = None) -> IRModule:
    """relu(x @ w) for x of (n, 40)."""
    bb = rl.BlockBuilder()
    n = bb.symbol("n", lower=lower, upper=upper)
    with bb.function("main", **{name: rl.TensorType.of((n, 40), "float32")}) as (x,):
        bb.result(rl.ops.relu(rl.ops.matmul(x, Constant.of(WEIGHT[:, :columns]))))
    return bb.module()


def sample(n: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(n).standard_normal((n, 40)).astype(np.float32)}


def task_of(module: IRModule, *sizes: int) -> tuner.TuningTask:
    (task,) = tuner.find_tasks(module, [sample(n) for n in sizes], HOST)
    return task


def tuned(choice: ScheduleChoice, name: str = "p") -> TunedProgram:
    return TunedProgram(name, choice, ((1,), (16,)), (1.0, 2.0), (2.0, 2.0), 2)


# Choices


def test_a_choice_becomes_a_dict_and_back() -> None:
    choice = ScheduleChoice(rows=6, outer="rows")
    assert choice.as_dict() == {"rows": 6, "outer": "rows"} and str(choice) == "rows=6, outer=rows"
    assert ScheduleChoice.from_dict(choice.as_dict()) == choice
    assert ScheduleChoice.from_dict({}) == DEFAULT and str(DEFAULT) == "as the rules say"
    assert choice.updated(ScheduleChoice(rows=4, vectors=2)) == ScheduleChoice(rows=4, vectors=2, outer="rows")


@pytest.mark.parametrize("values", [{"rows": 0}, {"rows": "6"}, {"rows": True}, {"outer": "left"}, {"colour": 1}])
def test_a_choice_that_no_rule_knows_is_refused(values: dict[str, object]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(InvalidArgumentError, match=f"a schedule has no {name}={value!r}; there are rows"):
        ScheduleChoice.from_dict(values)


def test_a_strategy_that_no_table_has_is_refused(tmp_path: Path) -> None:
    entry = TunedProgram("p", ScheduleChoice(strategy="blocked_magic"), (), (), (), 1)
    file = tmp_path / "tuning.json"
    Tuning({"llvm": {"key": entry}}).save(file)
    with pytest.raises(InvalidArgumentError, match="there is no strategy 'blocked_magic'; there are window_nhwc"):
        Tuning.load(file)


def test_the_knob_holds_where_passes_run_without_the_driver(tmp_path: Path) -> None:
    """`RELAXLITE_TUNING=... relaxlite inspect --schedules` showed the schedules that the rules choose."""
    file = tmp_path / "tuning.json"
    Tuning({str(HOST): {"key": TunedProgram("p", ScheduleChoice(rows=2), (), (), (), 1)}}).save(file)
    with config.override(tuning=str(file)):
        context = make_context(argparse.Namespace(target=None))
    assert context.tuning == Tuning.load(file)


@pytest.mark.parametrize("registers", [16, 32])
def test_there_are_tens_of_alternatives_and_tiles_fit_the_registers(registers: int) -> None:
    found = [choice for axis in axes(registers, ALTERNATIVES) for choice in axis]
    assert 15 <= len(found) <= 72 and len(set(found)) == len(found) and DEFAULT not in found
    assert all(c.rows * c.vectors < registers for c in found if c.rows and c.vectors)


choices = st.builds(
    ScheduleChoice,
    rows=st.none() | st.integers(1, 14),
    vectors=st.none() | st.integers(1, 6),
    sums=st.none() | st.integers(1, 24),
    outer=st.sampled_from([None, "rows", "columns"]),
    partial_sums=st.none() | st.integers(1, 8),
    strategy=st.sampled_from([None, *ALTERNATIVES]),
)


@settings(max_examples=tiers.examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(products() | reductions(), choices, st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)))
def test_no_choice_changes_what_a_program_computes(
    program: TensorProgram, choice: ScheduleChoice, sizes: tuple[int, int]
) -> None:
    assume(work_of(program, sizes) <= MAX_WORK)
    made = schedule_program(program, AVX2, choice)
    assert made.symbols == program.symbols
    verify_program("scheduled", made)
    assert_same_program(program, made, sizes)


def test_each_field_changes_the_schedule_of_some_program() -> None:
    task = task_of(product_module(), 3)
    usual = structural_hash(schedule_program(task.program, HOST))
    for choice in (
        ScheduleChoice(rows=3),
        ScheduleChoice(vectors=1),
        ScheduleChoice(outer="rows"),
        ScheduleChoice(sums=16),
    ):
        assert structural_hash(schedule_program(task.program, HOST, choice)) != usual, choice
    assert structural_hash(schedule_program(task.program, HOST, ScheduleChoice(outer="columns"))) == usual


def convolution_module() -> IRModule:
    bb = rl.BlockBuilder()
    n, h = bb.symbol("n"), bb.symbol("h", lower=3)
    weights = np.random.default_rng(1).standard_normal((40, 8, 3, 3)).astype(np.float32)
    with bb.function("main", x=rl.TensorType.of((n, 8, h, 9), "float32")) as (x,):
        bb.result(rl.ops.conv(x, Constant.of(weights), ShapeValue(syms((1, 1, 1, 1)))))
    return bb.module()


@pytest.mark.parametrize(
    "choice", [ScheduleChoice(rows=3, vectors=2), ScheduleChoice(vectors=1), ScheduleChoice(outer="columns")], ids=str
)
def test_convolutions_follow_choices_too(choice: ScheduleChoice) -> None:
    module = convolution_module()
    x = np.random.default_rng(0).standard_normal((2, 8, 7, 9)).astype(np.float32)
    tasks = [t for t in tuner.find_tasks(module, [{"x": x}], HOST) if 0 in t.constants or 1 in t.constants]
    (task,) = tasks
    usual = structural_hash(schedule_program(task.program, HOST))
    assert structural_hash(schedule_program(task.program, HOST, choice)) != usual
    tuning = Tuning()
    tuning.add(task.program, HOST, tuned(choice))
    exes = [rl.compile(module, tuning=t) for t in (Tuning(), tuning)]
    for shape in ((0, 8, 7, 9), (1, 8, 3, 9), (2, 8, 7, 9), (1, 8, 33, 9)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(*(exe(x) for exe in exes), rtol=1e-4, atol=1e-4)


# The database


def test_a_program_is_found_by_its_structure_and_its_target() -> None:
    program, same, other = (
        task_of(m, 3).program for m in (product_module(), product_module(), product_module(columns=80))
    )
    assert program is not same and program_key(program) == program_key(same) != program_key(other)
    tuning = Tuning()
    tuning.add(program, HOST, tuned(ScheduleChoice(rows=3)))
    assert tuning.choice(same, HOST) == ScheduleChoice(rows=3)
    assert tuning.choice(other, HOST) == tuning.choice(program, AVX2) == DEFAULT
    tuning.remove(same, HOST)
    assert tuning.choice(program, HOST) == DEFAULT


def test_a_database_is_written_and_read_back(tmp_path: Path) -> None:
    program = task_of(product_module(), 3).program
    tuning, path = Tuning(), tmp_path / "t.json"
    tuning.add(program, HOST, tuned(ScheduleChoice(rows=3, outer="columns")))
    tuning.add(program, AVX2, tuned(ScheduleChoice(vectors=2)))
    tuning.save(path)
    assert Tuning.load(path) == tuning and list(tmp_path.iterdir()) == [path]
    assert Tuning.load(path).to_json() == path.read_text("utf-8") == tuning.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "it does not begin with relaxlite_tuning 1"),
        ('{"relaxlite_tuning": 99, "targets": {}}', "it does not begin with relaxlite_tuning 1"),
        ('{"relaxlite_tuning": 1, "targets": {"t": {"k": {}}}}', "'sizes'.*make a new one with `relaxlite tune`"),
        (
            '{"relaxlite_tuning": 1, "targets": {"t": {"k": {"sizes": [], "program": "p", "choice": {"rows": -1}}}}}',
            "rows=-1",
        ),
    ],
)
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        rl.compile(product_module(), tuning=tmp_path / "t.json")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot read the tuning file 'missing\.json': No such file"):
        Tuning.load("missing.json")


@pytest.mark.parametrize(
    "choice", [ScheduleChoice(rows=3, vectors=1), ScheduleChoice(vectors=1, outer="rows")], ids=str
)
def test_compiling_follows_the_database(choice: ScheduleChoice, tmp_path: Path) -> None:
    module = product_module()
    tuning = Tuning()
    tuning.add(task_of(module, 3).program, HOST, tuned(choice))
    tuning.save(tmp_path / "t.json")
    usual = rl.compile(module)
    by_object, by_file = rl.compile(module, tuning=tuning), rl.compile(module, tuning=str(tmp_path / "t.json"))
    with config.override(tuning=str(tmp_path / "t.json")):
        by_knob = rl.compile(module)
    for exe in (by_object, by_file, by_knob):
        packed = [c.shape for c in exe.data.constants if c.ndim == 3]
        assert packed and packed != [c.shape for c in usual.data.constants if c.ndim == 3], "panels of another width"
        for n in (0, 1, 2, 5, 16, 33):
            np.testing.assert_allclose(exe(sample(n)["x"]), usual(sample(n)["x"]), rtol=1e-5, atol=1e-5)


# The search


def test_tasks_are_programs_with_their_sizes_calls_and_constants() -> None:
    task = task_of(product_module(), 3, 16, 16)
    assert task.sizes == {(3,): 1, (16,): 2} and task.constants == {1} and task.seconds > 0


@pytest.mark.parametrize("n", [0, 1, 5, 64])
def test_a_program_alone_computes_what_it_computes_in_the_model(n: int) -> None:
    task = replace(task_of(product_module(), 3), constants=frozenset())
    exe = rl.compile(tuner.single_program_module(task), passes=tuner._split_pipeline()[1])
    inputs = {"size_0": np.zeros(n, np.bool_), "input_0": sample(n)["x"], "input_1": WEIGHT}
    (got,) = exe.run(inputs).values()
    np.testing.assert_allclose(got, np.maximum(sample(n)["x"] @ WEIGHT, 0), rtol=1e-4, atol=1e-4)


def prefers(monkeypatch: pytest.MonkeyPatch, cost: Callable[[ScheduleChoice], float]) -> list[ScheduleChoice]:
    """Let the choices take so many seconds, and be fewer; gives the list of those that are measured."""
    measured: list[ScheduleChoice] = []
    tiles = tuple(ScheduleChoice(rows=rows, vectors=vectors) for vectors in (1, 2) for rows in (3, 4, 8))
    monkeypatch.setattr(tuner, "axes", lambda registers, strategies: (tiles, (ScheduleChoice(outer="rows"),)))

    def measure(contender: tuner._Contender) -> None:
        measured.append(contender.choice)
        contender.low = [cost(contender.choice)] * len(contender.replays)

    monkeypatch.setattr(tuner._Contender, "measure", measure)
    return measured


def test_the_fastest_of_every_axis_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ScheduleChoice(rows=8, vectors=2, outer="rows")

    def cost(choice: ScheduleChoice) -> float:
        return 1.0 + sum(choice.as_dict().get(name) != value for name, value in wanted.as_dict().items())

    measured = prefers(monkeypatch, cost)
    found = tuner.tune(product_module(), [sample(3), sample(16)], progress=False)
    (entry,) = found.targets[str(HOST)].values()
    assert entry.choice == wanted and entry.sizes == ((3,), (16,))
    assert (entry.seconds, entry.default_seconds, entry.speeds) == ((1.0, 1.0), (4.0, 4.0), (4.0, 4.0))
    assert measured.count(DEFAULT) > measured.count(ScheduleChoice(rows=4, vectors=1)), "the slower half leaves"


def test_what_gains_nothing_is_not_kept_and_replaces_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = product_module()
    known = Tuning()
    known.add(task_of(module, 3).program, HOST, tuned(ScheduleChoice(rows=3)))
    prefers(monkeypatch, lambda choice: 1.0 if choice == DEFAULT else 0.99)
    assert tuner.tune(module, [sample(3)], tuning=known, progress=False).targets[str(HOST)] == {}


def test_other_results_disqualify(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = prefers(monkeypatch, lambda choice: 1.0)
    monkeypatch.setattr(tuner, "_same", lambda outputs, expected: False)
    assert tuner.search(task_of(product_module(), 3), HOST) is None and measured == []


def test_a_program_that_does_not_run_alone_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(task: tuner.TuningTask, target: Target) -> None:
        raise ExecutionError("index 7 is out of range")

    monkeypatch.setattr(tuner, "search", search)
    known = Tuning()
    known.add(task_of(product_module(), 3).program, HOST, tuned(ScheduleChoice(rows=3)))
    before = known.to_json()
    assert tuner.tune(product_module(), [sample(3)], tuning=known).to_json() == before
    assert "does not run on its own and is left as it is: index 7 is out of range" in capsys.readouterr().err


def test_equal_means_equal_but_for_rounding() -> None:
    x = np.array([1.0, np.inf, np.nan, -4.0], np.float32)
    assert tuner._same([x], [x]) and tuner._same([x + np.float32(1e-5)], [x])
    assert not tuner._same([x + np.float32(1e-2)], [x])
    assert not tuner._same([np.array([1.0, np.inf, 0.0, -4.0], np.float32)], [x])
    assert not tuner._same([np.array([1.0, -np.inf, np.nan, -4.0], np.float32)], [x])
    assert not tuner._same([np.array([1, 2])], [np.array([1, 3])]) and tuner._same([np.empty(0)], [np.empty(0)])


def test_measuring_takes_a_low_percentile_at_each_size() -> None:
    bench = tuner._Bench(task_of(product_module(), 3, 16, 16), HOST)
    contender = bench.contender(DEFAULT)
    assert contender is not None and bench.contender(DEFAULT) is None
    contender.times = [[], []]
    contender.measure()
    low = [np.percentile(times, tuner.LOW_PERCENTILE) for times in contender.times]
    assert all(len(t) >= tuner.MIN_RUNS for t in contender.times) and contender.low == low


def test_every_size_counts_as_much_as_a_larger_one() -> None:
    rules, faster_when_large = (tuner._Contender(DEFAULT, [], low=low) for low in ([1.0, 100.0], [4.0, 50.0]))
    assert sum(faster_when_large.low) < sum(rules.low)
    assert faster_when_large.slowness(rules) == pytest.approx(2**0.5) and rules.slowness(rules) == 1.0


def test_tuning_needs_samples_and_this_machine() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one sample"):
        tuner.tune(product_module(), [])
    with pytest.raises(InvalidArgumentError, match="the target must be this machine"):
        tuner.tune(product_module(), [sample(1)], AVX2)


@pytest.mark.parametrize(
    ("lower", "upper", "sizes"), [(0, None, [1, 8, 64]), (4, 64, [4, 16, 64]), (5, 5, [5]), (100, None, [100])]
)
def test_sizes_are_guessed_from_bounds(lower: int, upper: int | None, sizes: list[int]) -> None:
    shapes = tuner.sample_shapes(product_module(lower=lower, upper=upper))
    assert shapes == [{"x": (n, 40)} for n in sizes]


def test_guessed_sizes_are_multiples_of_what_they_must_be() -> None:
    bb = rl.BlockBuilder()
    n, m = bb.symbol("n", divisor=8, upper=100), bb.symbol("m", lower=1, upper=3)
    with bb.function("main", x=rl.TensorType.of((n, m * 2 + 1), "float32")) as (x,):
        bb.match_shape(x, (n, m * 2 + 1))
        bb.result(rl.ops.relu(x))
    shapes = [s["x"] for s in tuner.sample_shapes(bb.module())]
    assert all(a % 8 == 0 and 8 <= a <= 100 and b in (3, 5, 7) for a, b in shapes) and len(shapes) > 1


# The command line


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    proto = om.model([om.node("MatMul", ["x", "w"])], om.values(x=["n", 40]), weights={"w": WEIGHT})
    onnx.save(proto, tmp_path / "m.onnx")
    return "m.onnx"


def test_tune_writes_what_compile_reads(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefers(monkeypatch, lambda choice: 0.5 if choice == ScheduleChoice(rows=3, vectors=2) else 1.0)
    assert cli.main(["tune", model, "--shapes", "x=7x40", "--shapes", "x=64x40", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "rows=3, vectors=2: 2.00x at 7, 2.00x at 64" in shown and shown.splitlines()[-1].startswith(
        "m.tuning.json: tuned in"
    )
    (entries,) = json.loads(Path("m.tuning.json").read_text())["targets"].values()
    (entry,) = entries.values()
    assert entry["choice"] == {"rows": 3, "vectors": 2} and entry["sizes"] == [[7], [64]] and entry["threads"] == 1
    assert cli.main(["compile", model, "--tuning", "m.tuning.json", "-o", "tuned.rlx"]) == 0
    assert cli.main(["compile", model, "-o", "usual.rlx"]) == 0
    exes = [rl.load("tuned.rlx"), rl.load("usual.rlx")]
    if HOST.num_vector_registers == 32:  # with 16, two vectors are as wide as usual
        assert exes[0].data.constants[0].shape != exes[1].data.constants[0].shape
    for n in (1, 7, 64):
        np.testing.assert_allclose(*(exe(sample(n)["x"]) for exe in exes), rtol=1e-5, atol=1e-5)


def test_tune_guesses_sizes_and_says_when_nothing_is_faster(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefers(monkeypatch, lambda choice: 1.0)
    assert cli.main(["tune", model, "--bound", "n=2..8", "-o", "out.json"]) == 0
    assert "the rules' own schedules are as fast" in capsys.readouterr().err
    assert Tuning.load("out.json").targets in ({}, {str(HOST): {}})


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["tune", "m.onnx", "-o", "nowhere/t.json"], 1, "there is no folder 'nowhere'"),
        (["tune", "m.onnx", "--target", "llvm -mcpu=x86-64-v2"], 2, "the target must be this machine"),
        (["tune", "m.onnx", "--shapes", "y=1x40"], 1, "the model has no input 'y'"),
        (["tune", "m.rlx"], 2, "is compiled already"),
        (["run", "m.rlx", "--tuning", "t.json", "--shape", "x=1x40"], 2, "--tuning needs an ONNX file"),
        (["compile", "m.onnx", "--tuning", "missing.json"], 2, "cannot read the tuning file 'missing.json'"),
    ],
)
def test_mistakes_are_answered(
    model: str, words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", model, "-o", "m.rlx"]) == 0
    capsys.readouterr()
    assert cli.main(words) == status
    assert message in capsys.readouterr().err
