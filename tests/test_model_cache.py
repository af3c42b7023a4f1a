"""`relaxlite.load` of ONNX files: compiled once, kept, and compiled again whenever something has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import relaxlite as rl
from relaxlite import cli, config, driver, model_cache, models
from relaxlite.codegen import kernel_cache
from relaxlite.errors import ArtifactError, FetchError, ImportModelError, InputError, InvalidArgumentError
from relaxlite.frontend.onnx import registry
from relaxlite.ir.pattern import is_op, wildcard
from relaxlite.runtime import artifact, roofline
from tests.support.onnx_models import model, node, values

X = np.arange(6, dtype=np.float32).reshape(3, 2)
OLD = 1_600_000_000  # seconds since 1970, long before any test


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RELAXLITE_VERIFY_PASSES", "0")  # who asks for that sees each compilation
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "compiled"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One item for each module that was compiled."""
    found: list[Any] = []
    build = driver.build

    def counted(module: Any, *args: Any, **options: Any) -> Any:
        found.append(module)
        return build(module, *args, **options)

    monkeypatch.setattr(driver, "build", counted)
    return found


def write(path: Path | str, factor: float = 2.0, *, age: bool = True, external: str = "") -> Path:
    """A model that multiplies rows of two by a factor, as a file that was written long ago, or just now."""
    proto = model([node("Mul", ["x", "w"])], values(x=["n", 2]), weights={"w": np.full(2, factor, np.float32)})
    target = Path(path)
    options = {"save_as_external_data": True, "location": external, "size_threshold": 0} if external else {}
    if external:
        target.with_name(external).unlink(missing_ok=True)  # onnx appends to it
    onnx.save(proto, target, **options)
    for file in (target, *([target.with_name(external)] if external else [])):
        if age:
            os.utime(file, (OLD, OLD))
    return target


def test_the_next_process_opens_what_was_compiled_without_the_compiler(tmp_path: Path) -> None:
    write("model.onnx")
    code = (
        "import sys, relaxlite as rl\n"
        "exe = rl.load('model.onnx', threads=1)\n"
        "print(exe([[1.5, -2.0]]).tolist(), *sorted({'onnx', 'llvmlite', 'relaxlite.driver'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(rl.__file__).parent.parent)}
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout
        for _ in range(2)
    ]
    assert said == ["[[3.0, -4.0]] llvmlite onnx relaxlite.driver\n", "[[3.0, -4.0]]\n"]


def test_every_size_and_a_path_of_any_form(compilations: list[Any], cache: Path) -> None:
    Path("folder").mkdir()
    write("folder/model.onnx")
    Path("link.onnx").symlink_to("folder/model.onnx")
    for path in ("folder/model.onnx", Path("folder/model.onnx"), Path("folder/model.onnx").resolve(), "link.onnx"):
        exe = rl.load(path)
        for n in (0, 1, 3, 17):
            np.testing.assert_array_equal(exe(np.ones((n, 2), np.float32)), np.full((n, 2), 2, np.float32))
    assert len(compilations) == 1 and [kept.name for kept in model_cache.cached_models()] == ["model"]
    assert cache.stat().st_mode & 0o077 == 0  # code is run from there


@pytest.mark.parametrize("age", [True, False])
def test_a_file_that_is_written_again_is_compiled_again(compilations: list[Any], age: bool) -> None:
    for count, factor in enumerate((2.0, 3.0, 2.0)):
        path = write("model.onnx", factor, age=age)  # of the same size, with the same time where it is old
        for _ in range(2):
            np.testing.assert_array_equal(rl.load(path)(X), X * factor)
        assert len(compilations) == count + 1
    assert len(model_cache.cached_models()) == 1


def test_a_file_just_written_is_known_by_its_content(compilations: list[Any]) -> None:
    path = write("model.onnx", age=False)
    rl.load(path)
    status = path.stat()
    known = model_cache._record(path.resolve(), with_hash=False)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content.replace(np.float32(2).tobytes(), np.float32(5).tobytes()))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    record = model_cache._record

    def coarse(file: Path, *, with_hash: bool) -> list[str]:  # as of a system whose clock stood still
        found = record(file, with_hash=with_hash)
        return [*known[:2], found[2]] if file == path.resolve() else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_cache, "_record", coarse)
        np.testing.assert_array_equal(rl.load(path)(X), X * 5)
    assert len(compilations) == 2


def test_external_data_that_is_written_again(compilations: list[Any]) -> None:
    path = write("model.onnx", external="weights.bin")
    for _ in range(2):
        np.testing.assert_array_equal(rl.load(path)(X), X * 2)
    assert len(compilations) == 1
    Path("weights.bin").write_bytes(np.full(2, 7, np.float32).tobytes())
    os.utime("weights.bin", (OLD, OLD))
    for _ in range(2):
        np.testing.assert_array_equal(rl.load(path)(X), X * 7)
    assert len(compilations) == 2
    Path("weights.bin").unlink()
    with pytest.raises(ImportModelError, match=r"external data file 'weights.bin' of tensor 'w' is missing in folder"):
        rl.load(path)


def test_external_data_just_written_is_not_trusted(compilations: list[Any]) -> None:
    path = write("model.onnx", external="weights.bin", age=False)
    for _ in range(2):
        rl.load(path)
    assert len(compilations) == 2 and not model_cache.cached_models()


def test_a_file_that_changes_while_it_is_compiled_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("model.onnx")
    build = driver.build

    def slow(*args: Any, **options: Any) -> Any:
        data = build(*args, **options)
        write(path, 9.0)
        return data

    monkeypatch.setattr(driver, "build", slow)
    np.testing.assert_array_equal(rl.load(path)(X), X * 2)
    assert not model_cache.cached_models()
    monkeypatch.setattr(driver, "build", build)
    np.testing.assert_array_equal(rl.load(path)(X), X * 9)


def test_each_combination_of_options_is_kept(compilations: list[Any]) -> None:
    path = write("model.onnx")
    for _ in range(2):
        with pytest.raises(InputError, match="n = 3 exceeds its upper bound 2"):
            rl.load(path, bounds={"n": (1, 2)})(X)
        assert rl.load(path, dynamic_shapes={"x": {0: 3}}).inputs[0].shape == (3, 2)
        assert rl.load(path, constant_memory=True, bounds={"n": "1..4"}, libraries="none")(X).shape == (3, 2)
        assert rl.load(path)(X).shape == (3, 2)
    assert len(compilations) == 4 == len(model_cache.cached_models())


def test_a_tuning_file_that_changes(compilations: list[Any]) -> None:
    path, tuning = write("model.onnx"), Path("tuning.json")
    rl.Tuning({}).save(tuning)
    os.utime(tuning, (OLD, OLD))
    for _ in range(2):
        rl.load(path, tuning=tuning)
    assert len(compilations) == 1
    os.utime(tuning, (OLD + 1, OLD + 1))
    for _ in range(2):
        rl.load(path, tuning="tuning.json")
        with config.override(tuning="tuning.json"):
            rl.load(path)
    assert len(compilations) == 3  # a relative path is one of its own
    rl.load(path, tuning=rl.Tuning({}))
    assert len(compilations) == 4 and len(model_cache.cached_models()) == 3


def test_rules_and_converters_of_this_process_are_neither_kept_nor_missed(compilations: list[Any]) -> None:
    path = write("model.onnx")
    rl.load(path)

    def product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        out[...] = 100

    pattern = is_op("multiply")(wildcard("a"), wildcard("b"))
    with rl.register_library("a_hundred", pattern, {"a": ("n", 2), "b": (2,)}, function=product):
        assert rl.load(path)(X)[0, 0] == 100
    assert rl.load(path)(X)[0, 1] == 2 and len(compilations) == 2
    try:
        registry.onnx_op("Doubled", domain="of.mine")(lambda n: n.input(0))
        rl.load(path)
        assert len(compilations) == 3
    finally:
        del registry._converters["of.mine", "Doubled"]
    rl.load(path)
    assert len(compilations) == 3 and len(model_cache.cached_models()) == 1


@pytest.mark.parametrize("damage", ["cut", "byte", "empty", "weights", "no sources"])
def test_a_kept_file_that_is_damaged_is_made_again(compilations: list[Any], damage: str) -> None:
    path = write("model.onnx")
    rl.load(path)
    (kept,) = model_cache.cached_models()
    content = bytearray(kept.path.read_bytes())
    if damage == "no sources":  # of another program, with the same name
        rl.compile(rl.from_onnx(path)).save(kept.path)
    else:
        place = {"byte": 100, "weights": content.rindex(np.float32(2).tobytes())}.get(damage, 0)
        content[place] ^= 1 if place else 0
        size = {"cut": len(content) // 2, "empty": 0}.get(damage, len(content))
        kept.path.write_bytes(content[:size])
    before = len(compilations)
    for _ in range(2):
        np.testing.assert_array_equal(rl.load(path, verify=True)(X), X * 2)
    assert len(compilations) == before + 1


def test_who_wants_to_see_a_compilation_sees_one(compilations: list[Any], tmp_path: Path) -> None:
    path = write("model.onnx")
    for options in ({"dump_dir": str(tmp_path / "dumps")}, {"verify_passes": True}, {"model_cache_mb": 0}):
        with config.override(**options):
            rl.load(path), rl.load(path)
    assert len(compilations) == 6 and not model_cache.cached_models() and list((tmp_path / "dumps").iterdir())


def test_a_folder_that_cannot_be_written_to_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("model.onnx")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path / "file"))
    with pytest.warns(
        RuntimeWarning, match="a compiled model cannot be kept .* set RELAXLITE_CACHE to a folder"
    ) as said:
        for _ in range(2):
            np.testing.assert_array_equal(rl.load(path)(X), X * 2)
    assert len(said) == 1


def test_a_folder_that_cannot_even_be_looked_into_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("model.onnx")
    closed = tmp_path / ("x" * 300)  # as where permission is denied, each look into it is an error, for root too
    for name in ("RELAXLITE_CACHE", "RELAXLITE_KERNEL_CACHE"):
        monkeypatch.setenv(name, str(closed / name))
    with pytest.warns(RuntimeWarning, match="cannot be kept .*too long") as said:
        for _ in range(2):
            np.testing.assert_array_equal(rl.load(path)(X), X * 2)
    assert len(said) == 2  # of compiled kernels, and of a compiled model
    assert cli.main(["cache"]) == 0 and cli.main(["cache", "clear"]) == 0
    assert "removed 0 entries" in capsys.readouterr().out
    with pytest.raises(FetchError, match="too long"):
        models.fetch("magika")


@pytest.mark.parametrize("chosen", ["", "~nobody-of-this-name/x"])
def test_without_a_home_folder_nothing_is_kept_and_that_is_told_once(
    chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere(*_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    path = write("model.onnx")
    for name in ("RELAXLITE_CACHE", "RELAXLITE_KERNEL_CACHE"):
        monkeypatch.setenv(name, chosen)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nowhere)
    monkeypatch.setattr(Path, "home", staticmethod(nowhere))
    for module in (model_cache, kernel_cache):
        monkeypatch.setattr(module, "_warned", set())
    with pytest.warns(RuntimeWarning, match="cannot be kept .*no home folder") as said:
        for _ in range(2):
            np.testing.assert_array_equal(rl.load(path)(X), X * 2)
    assert sorted(str(item.message).partition(" cannot")[0] for item in said) == [
        "a compiled model",
        "compiled kernels",
    ]
    assert roofline.load_limits() is None
    with pytest.raises(FetchError, match=r"no home folder.*set RELAXLITE_CACHE to a folder"):
        models.fetch("magika")
    assert cli.main(["cache"]) == 1
    assert "no home folder" in capsys.readouterr().err


def test_what_was_not_used_for_longest_goes_first(compilations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model(
        [node("MatMul", ["x", "w"])],
        values(x=["n", 512]),
        weights={"w": np.random.default_rng(1).standard_normal((512, 512), np.float32)},
    )
    for name in "abcd":  # of about 1.1 MB each
        onnx.save(proto, f"{name}.onnx")
        os.utime(f"{name}.onnx", (OLD, OLD))
    monkeypatch.setenv("RELAXLITE_MODEL_CACHE_MB", "4")
    for when, name in enumerate("abc"):
        rl.load(f"{name}.onnx")
        (place,) = [kept for kept in model_cache.cached_models() if kept.name == name]
        os.utime(place.path, (OLD + when, OLD + when))
    rl.load("a.onnx")  # now the newest
    rl.load("d.onnx")
    assert [kept.name for kept in model_cache.cached_models()] == ["a", "d"] and len(compilations) == 4
    monkeypatch.setenv("RELAXLITE_MODEL_CACHE_MB", "1")
    monkeypatch.setattr(artifact, "save", lambda *_: pytest.fail("it is written, to be removed at once"))
    with pytest.warns(
        RuntimeWarning, match=r"it has 2 MB, and the limit of all is 1 MB.*RELAXLITE_MODEL_CACHE_MB"
    ) as said:
        for _ in range(2):
            assert rl.load("b.onnx")(np.ones((2, 512), np.float32)).shape == (2, 512)
    assert len(said) == 1 and not model_cache.cached_models()  # not even it


def test_what_a_killed_process_left_is_removed_when_it_is_old(cache: Path) -> None:
    cache.mkdir(parents=True)
    for name in (".model-0123456789abcdef.rlx.01ab.tmp", ".model-0123456789abcdef.rlx.02ab.tmp", ".others.tmp"):
        (cache / name).write_bytes(b"x")
    os.utime(cache / ".model-0123456789abcdef.rlx.01ab.tmp", (OLD, OLD))
    rl.load(write("model.onnx"))
    left = sorted(path.name for path in cache.iterdir() if path.suffix == ".tmp")
    assert left == [".model-0123456789abcdef.rlx.02ab.tmp", ".others.tmp"]


def test_what_is_saved_does_not_tell_where_it_was_made(compilations: list[Any], tmp_path: Path) -> None:
    path = write("model.onnx")
    for _ in range(2):
        rl.load(path).save("saved.rlx")
        assert str(tmp_path).encode() not in Path("saved.rlx").read_bytes()
    assert len(compilations) == 1


def test_a_name_that_is_as_long_as_a_name_may_be(compilations: list[Any]) -> None:
    path = write("m" * 250 + ".onnx")
    for _ in range(2):
        np.testing.assert_array_equal(rl.load(path)(X), X * 2)
    assert len(compilations) == 1


def test_the_command_line_shares_what_is_kept(compilations: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = write("model.onnx")
    assert cli.main(["run", str(path), "--shape", "x=3x2"]) == 0
    assert len(model_cache.cached_models()) == 1
    compilations.clear()
    np.testing.assert_array_equal(rl.load(path)(X), X * 2)
    assert not compilations
    assert cli.main(["run", str(path), "--shape", "x=3x2", "--bound", "n=1..4"]) == 0
    assert len(model_cache.cached_models()) == 2


def test_threads_may_open_one_model_at_once(cache: Path) -> None:
    path = write("model.onnx")
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(rl.load(path)(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        np.testing.assert_array_equal(result, X * 2)
    assert [file.suffix for file in cache.iterdir()] == [".rlx"]


Given = Callable[[], Any]


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        (b"", {}, ImportModelError, "'model.onnx': empty, not an ONNX model"),
        (b"\x08\x07truncated", {}, ImportModelError, "an ONNX model that is truncated or damaged"),
        (b"GGUF\x03", {}, ArtifactError, "is the checkpoint of a language model; use relaxlite.llm.load"),
        (None, {}, ArtifactError, "cannot load model.onnx: there is no such file"),
        (
            "rlx",
            {"precision": "bf16", "bounds": {"n": 3}},
            InvalidArgumentError,
            "bounds, precision: of a model that",
        ),
        ("onnx", {"precision": "fp3"}, InvalidArgumentError, "precision"),
        ("onnx", {"bounds": {"n": "x"}}, InvalidArgumentError, "bounds"),
        ("onnx", {"tuning": "none.json"}, InvalidArgumentError, "none.json"),
    ],
)
def test_what_cannot_be_opened(content: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    path = Path("model.onnx")
    if content == "rlx":
        rl.compile(rl.from_onnx(write(path))).save(path)
    elif content == "onnx":
        write(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        rl.load(path, **options)
    assert not model_cache.cached_models()


def test_a_pipe_is_refused_at_once() -> None:
    os.mkfifo("pipe.onnx")
    with pytest.raises(ArtifactError, match=r"cannot load pipe\.onnx: it is not a regular file"):
        rl.load("pipe.onnx")
    with pytest.raises(ArtifactError, match=r"cannot load pipe\.onnx: it is not a regular file"):
        rl.llm.load("pipe.onnx")


def test_an_onnx_file_of_any_name(compilations: list[Any]) -> None:
    shutil.move(write("model.onnx"), "weights.pb")
    np.testing.assert_array_equal(rl.load("weights.pb")(X), X * 2)
    assert len(compilations) == 1
