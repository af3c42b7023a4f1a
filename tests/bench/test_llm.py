"""The benchmark of language models: that it runs, what it writes, and how it judges. Nothing here depends on a time."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl

pytest.importorskip("gguf")

from bench.llm import __main__ as bench_main
from bench.llm import measure as bench_measure
from bench.llm.cases import Case, cases_of
from bench.llm.goals import better_llama, check_goals, distance, share_of_reads
from bench.llm.measure import Measured, ModelResult, Options, compile_artifact, measure
from bench.llm.models import Model, describe, find_model
from bench.llm.random_gguf import SHAPES, random_gguf
from bench.llm.report import Report
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.frontend.llm.read import read_checkpoint

TINY = SHAPES["llama-tiny"]
PROMPT, GENERATE, BATCH = Case("prompt", 128), Case("generate", 16, 64), Case("batch", 128, 64, 4)
OPTIONS = Options(threads=1, processes=2, turn=0.0, limit=120.0, is_quick=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return describe("llama-tiny", random_gguf("llama-tiny", tmp_path_factory.mktemp("models")))


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The JSON and the Markdown of a quick run on the tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ["--quick", "--model", "llama-tiny", "--threads", "1", "--output", str(tmp_path / "out"), *words]
    assert bench_main.main(options) == code
    data = json.loads((tmp_path / "out" / "llm.json").read_text("utf-8"))
    return data, (tmp_path / "out" / "llm.md").read_text("utf-8")


def test_a_quick_run_writes_json_and_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, markdown = run(tmp_path, monkeypatch, "--peers", "relaxlite", "--processes", "2")
    (found,) = data["models"]
    labels = ["prompt 32", "generate 8 after 16", "batch of 1, 8 after 16", "batch of 4, 8 after 16"]
    assert [case["label"] for case in found["cases"]] == labels
    assert found["artifact_bytes"] > 0 and found["compile_seconds"] > 0
    assert [(read["threads"], read["bytes"]) for read in found["reads"]] == [(1, found["model"]["read_bytes"])]
    peer = found["peers"]["relaxlite"]
    assert peer["problem"] is None and len(peer["processes"]) == 2
    for process in peer["processes"]:
        assert process["problems"] == {} and list(process["seconds"]) == labels
        assert all(len(seconds) >= 3 and min(seconds) > 0 for seconds in process["seconds"].values())
        assert process["first_seconds"] >= process["load_seconds"] > 0
        if sys.platform == "linux":
            memory = process["memory"]
            assert 0 < memory["before"] <= memory["loaded"] <= memory["single"] <= memory["all"]
    for line in (
        "## llama-tiny",
        "| prompt 32 |",
        "| batch of 4, 8 after 16 |",
        "Plain reads, GB/s: ",
        "| relaxlite |",
    ):
        assert line in markdown, line
    assert "| llama-tiny: loads in 1 s |" in markdown and "| llama-tiny: peak memory of weights," in markdown
    assert markdown in capsys.readouterr().out
    left = [path.name for path in (tmp_path / "cache" / "relaxlite" / "bench").iterdir()]
    assert left == ["llama-tiny-q4_0-v1.gguf"], "compiled models are removed"
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(KeyboardInterrupt(), id="Ctrl-C"),
        pytest.param(SystemExit(143), id="SIGTERM", marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupted_run_writes_what_it_has_measured(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], bench_measure._ask

    def two_answers(job: dict[str, Any], options: Options) -> dict[str, Any]:
        asked.append(job["peer"])
        if len(asked) == 3:
            raise stop
        return ask(job, options)

    monkeypatch.setattr(bench_measure, "_ask", two_answers)
    code = getattr(stop, "code", 130)
    data, markdown = run(tmp_path, monkeypatch, "--peers", "relaxlite", "--processes", "3", code=code)
    assert len(data["models"][0]["peers"]["relaxlite"]["processes"]) == 2
    assert data["settings"]["interrupted"] == "after 2 processes" and "interrupted after 2 processes." in markdown


def test_a_run_that_is_interrupted_before_any_measurement_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(job: dict[str, Any], options: Options) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_measure, "_ask", stop)
    with pytest.raises(FileNotFoundError):
        run(tmp_path, monkeypatch, "--peers", "relaxlite", code=130)


@pytest.mark.parametrize(("peer", "library"), [("llama.cpp-flash", "llama_cpp"), ("transformers", "transformers")])
def test_another_library_computes_the_same(
    peer: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_elsewhere = library == "llama_cpp" and "LLAMA_PYTHON" in os.environ
    if not is_elsewhere and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    data, markdown = run(tmp_path, monkeypatch, "--peers", f"relaxlite,{peer}", "--only", "generate,batch")
    (process,) = data["models"][0]["peers"][peer]["processes"]
    assert process["problems"] == {} and len(process["seconds"]) == 3
    rows = [line.split(" | ") for line in markdown.splitlines() if line.endswith((" | yes |", " | no |"))]
    (row,) = [row for row in rows if len(row) == 3 and ":" not in row[0]]
    assert float(row[1]) < 0.05 and row[2] == "yes |"


def test_what_is_no_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main(["--model", "llama-2b", "--output", str(tmp_path / "out")]) == 2
    assert "there is no model 'llama-2b'; there are smollm2, llama-1.1b, llama-tiny" in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match=r"is a folder; llama\.cpp reads a GGUF file"):
        find_model(str(tmp_path))
    with pytest.raises(SystemExit):
        bench_main.parse(["--artifact", "x.rlx", "--model", "smollm2", "--model", "llama-tiny"])
    assert "--artifact is of one model" in capsys.readouterr().err


# The model of random weights


def test_a_random_file_has_the_types_of_llama_cpp_and_weights_of_sensible_size(tiny: Model) -> None:
    checkpoint = read_checkpoint(tiny.path)
    weights, config = checkpoint.weights, checkpoint.config
    assert (config.hidden, config.layers, config.heads, config.kv_heads) == (256, 2, 4, 2) and not config.is_tied
    kinds = {name: weight.block_format for name, weight in weights.items() if len(weight.shape) == 2}
    assert kinds.pop("head") == "Q6_K" and set(kinds.values()) == {"Q4_0"}
    for name, expected in (("embed", 1.0), ("layers.1.q", 1 / 16), ("layers.1.down", 512**-0.5 / 2), ("head", 2 / 16)):
        values = weights[name].to_float32()
        assert values.std() == pytest.approx(expected, rel=0.03), name
        assert abs(values.mean()) < 0.02 * expected, name
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer.bos == 1


def test_a_random_file_is_the_same_each_time_and_written_once(tmp_path: Path, tiny: Model) -> None:
    path = random_gguf("llama-tiny", tmp_path)
    assert path.read_bytes() == tiny.path.read_bytes()
    path.write_bytes(b"kept")
    assert random_gguf("llama-tiny", tmp_path).read_bytes() == b"kept" and len(list(tmp_path.iterdir())) == 1


def test_bytes_of_a_token_are_of_the_experts_that_it_takes(tmp_path: Path) -> None:
    path = random_gguf("mixture-tiny", tmp_path)
    model, weights = describe("mixture-tiny", path), read_checkpoint(path).weights
    experts = sum(weight.nbytes for name, weight in weights.items() if ".experts." in name)
    others = sum(w.nbytes for name, w in weights.items() if ".experts." not in name and len(w.shape) == 2)
    assert model.read_bytes == experts // 2 + others - weights["embed"].nbytes
    assert weights["layers.0.router"].to_float32().std() == pytest.approx(1 / 16, rel=0.1)
    found = rl.llm.compile(path).generate([1, 2, 3], max_new_tokens=4, logits=True)
    assert np.isfinite(found.logits).all()


def test_bytes_of_a_token_leave_an_embedding_out_that_is_not_the_head(tiny: Model) -> None:
    weights = read_checkpoint(tiny.path).weights
    embedding = weights["embed"].nbytes
    norms = sum(weight.nbytes for weight in weights.values() if len(weight.shape) == 1)
    assert embedding == 512 * 256 // 32 * 18
    assert tiny.read_bytes == tiny.weight_bytes - embedding - norms
    assert tiny.cache_values == 2 * 2 * 2 * 64 and tiny.cache_bytes(10, "float16") == 10 * tiny.cache_values * 2
    assert tiny.cache_bytes(1, "int8") == tiny.cache_values * (1 + 4 / 64)


# Processes


def test_a_peer_that_cannot_run_is_listed_and_others_go_on(tiny: Model) -> None:
    result = ModelResult(tiny, [PROMPT], 1)
    options = Options(1, 2, 0.0, 120.0, is_quick=True, pythons={"llama.cpp": "/nowhere/python"})
    with bench_main.tqdm(disable=True) as bar:
        measure(result, ["llama.cpp"], None, options, bar)
    peer = result.peers["llama.cpp"]
    assert peer.is_absent and peer.problem == "cannot run '/nowhere/python': No such file or directory"
    assert f"Absent: llama.cpp ({peer.problem})." in Report({}, [result], machine=Report({}).machine).markdown()
    assert result.reads, "the machine is measured all the same"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_a_signal_ends_is_run_in_the_peers_other_way(tiny: Model, tmp_path: Path) -> None:
    result = ModelResult(tiny, [PROMPT], 1)
    python = script(
        tmp_path,
        'job = json.load(sys.stdin)\nif not job["is_fallback"]: os.kill(os.getpid(), 11)\n'
        f"print(json.dumps({answer(result, 100.0)!r}))",
    )
    options = Options(1, 2, 0.0, 120.0, is_quick=True, pythons={"llama.cpp": python})
    with bench_main.tqdm(disable=True) as bar:
        measure(result, ["llama.cpp"], None, options, bar)
    peer = result.peers["llama.cpp"]
    assert (peer.way, peer.way_problem) == ("without AMX tiles", "its process ended with signal 11")
    assert len(peer.answers) == 2 and better_llama(result, PROMPT) == (
        pytest.approx(100.0),
        "without flash attention and without AMX tiles",
    )
    assert (
        "llama.cpp was measured without AMX tiles: else its process ended with signal 11."
        in Report({}, [result]).markdown()
    )


@pytest.mark.skipif(os.name != "posix", reason="scripts")
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ('sys.exit("no weights")', "its process ended with exit code 1: no weights"),
        ("import time; time.sleep(60)", "its process had not ended after 1 s"),
    ],
)
def test_a_process_that_fails_is_not_run_again(code: str, problem: str, tiny: Model, tmp_path: Path) -> None:
    result = ModelResult(tiny, [PROMPT], 1)
    options = Options(1, 2, 0.0, 1.0, is_quick=True, pythons={"llama.cpp": script(tmp_path, code)})
    with bench_main.tqdm(disable=True) as bar:
        measure(result, ["llama.cpp"], None, options, bar)
    assert result.peers["llama.cpp"].problem == problem and result.peers["llama.cpp"].answers == []
    assert f"- llama.cpp: {problem}" in Report({}, [result]).markdown()


def test_a_model_that_does_not_compile_is_an_error_that_says_why(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(RelaxliteError, match=r"cannot compile llama-tiny-.*--max-context"):
        compile_artifact(tiny, tmp_path, ["--max-context", "9999999"])


def script(folder: Path, code: str) -> str:
    """An interpreter that runs this whatever it is asked to."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


# Judging


def answer(result: ModelResult, speed: float, **changes: Any) -> dict[str, Any]:
    """What a process says that computes so many tokens per second."""
    return {
        "version": "1", "import_seconds": 0.1, "load_seconds": 0.5, "first_seconds": 0.6, "problems": {},
        "seconds": {case.label: [case.tokens / speed] for case in result.cases}, "facts": {"cache_dtype": "float32"},
        "memory": {"before": 1, "loaded": 2, "single": 3, "all": 4},
        "logits": base64.b64encode(np.arange(4, dtype="<f4").tobytes()).decode(), **changes,
    }  # fmt: skip


def judged(tmp_path: Path, name: str, ours: list[float], theirs: float, flash: float, **changes: Any) -> ModelResult:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x")
    model = Model(name, path, "Q4_0", 10**9, 10**9, 900_000_000, 1000, 64, 32000, 2048)
    result = ModelResult(model, [PROMPT, Case("prompt", 512), GENERATE, BATCH], 2)
    for peer, speeds in (("relaxlite", ours), ("llama.cpp", [theirs]), ("llama.cpp-flash", [flash])):
        said = changes if peer == "relaxlite" else {}
        result.peers[peer] = Measured("1", answers=[answer(result, speed, **said) for speed in speeds])
    result.reads = {(2, model.read_bytes): [20e9, 10e9, 30e9]}
    return result


def verdicts(result: ModelResult) -> dict[str, bool | None]:
    return {goal.text.partition(": ")[2]: goal.holds for goal in check_goals([result])}


def test_goals_are_against_the_better_way_of_llama_cpp_and_medians_count(tmp_path: Path) -> None:
    result = judged(tmp_path, "llama-1.1b", [1.0, 22.0, 90.0], 10.0, 11.0)
    assert result.peers["relaxlite"].speed(GENERATE) == pytest.approx(22.0)
    found = better_llama(result, PROMPT)
    assert found is not None and found == (pytest.approx(11.0), "with flash attention")
    assert verdicts(result) == {
        "generation 1.3x llama.cpp": True,
        "prompts of 128, 512 tokens 2.0x llama.cpp": True,
        "generation reads weights at 85% of the plain read bandwidth": True,
        "loads in 1 s": True,
        "peak memory of weights, keys and values, and 10%": True,
    }
    assert (
        verdicts(judged(tmp_path, "llama-1.1b", [21.9], 10.0, 11.0))["prompts of 128, 512 tokens 2.0x llama.cpp"]
        is False
    )
    assert share_of_reads(result, result.peers["relaxlite"], GENERATE) == pytest.approx(22 * 0.9e9 / 20e9)
    assert share_of_reads(result, result.peers["relaxlite"], BATCH) == pytest.approx(22 / 4 * 0.9e9 / 20e9)


def test_a_goal_does_not_hold_for_being_faster_than_a_peer_that_is_not_at_its_best(tmp_path: Path) -> None:
    for ours, holds in ((100.0, None), (1.0, False)):
        result = judged(tmp_path, "smollm2", [ours], 10.0, 10.0)
        result.peers["llama.cpp-flash"].way = "without AMX tiles"
        goals = {goal.text: goal for goal in check_goals([result])}
        goal = goals["smollm2: prompts of 128, 512 tokens 1.5x llama.cpp"]
        assert goal.holds is holds
        assert ("but llama.cpp is not at its best here" in goal.measured) == (holds is None)


def test_loading_and_memory_are_judged_for_every_model(tmp_path: Path) -> None:
    allowed = 1.1 * (1e9 + 4 * 1000 * 512)
    within = {"before": 1, "loaded": 2, "single": int(allowed) - 1, "all": 9e9}
    beyond = within | {"single": int(allowed) + 1}
    for memory, seconds, holds in ((within, 0.99, True), (beyond, 1.01, False)):
        found = verdicts(judged(tmp_path, "other", [1.0], 1.0, 1.0, memory=memory, load_seconds=seconds))
        assert found == {"loads in 1 s": holds, "peak memory of weights, keys and values, and 10%": holds}


def test_what_was_not_measured_is_no_verdict(tmp_path: Path) -> None:
    result = judged(tmp_path, "smollm2", [1.0], 1.0, 1.0)
    result.peers = {"llama.cpp": result.peers["llama.cpp"]}
    assert len(verdicts(result)) == 4 and set(verdicts(result).values()) == {None}
    assert "| smollm2: loads in 1 s | not measured | - |" in Report({}, [result]).markdown()


def test_distances_of_logits_ignore_a_constant() -> None:
    x = np.array([1.0, 2.0, 6.0], np.float32)
    assert distance(x + np.float32(7), x) == pytest.approx(0.0, abs=1e-6)
    assert distance(np.array([1.0, 2.0, np.nan], np.float32), x) == np.inf
    assert distance(-x, x) == pytest.approx(2.0)


def test_cases_of_one_sequence_come_first() -> None:
    cases = cases_of(("batch", "prompt", "generate"))
    assert [case.label for case in cases] == [
        "prompt 32", "prompt 128", "prompt 512", "generate 64 after 16", "generate 64 after 512",
        "batch of 1, 64 after 128", "batch of 4, 64 after 128", "batch of 8, 64 after 128",
    ]  # fmt: skip
    assert [case.tokens for case in cases] == [32, 128, 512, 64, 64, 64, 256, 512]
    assert [case.label for case in cases_of(("prompt",), quick=True)] == ["prompt 32"]
