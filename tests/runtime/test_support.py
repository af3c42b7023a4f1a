"""Running a saved model without LLVM: in fresh processes, in all the ways that a model can be run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import driver
from relaxlite.codegen.llvm import compile_support
from relaxlite.errors import ArtifactError
from relaxlite.llm.compiling import build_checkpoint
from relaxlite.llm.model import LanguageModel
from relaxlite.runtime import artifact, linker, scratch, support, threadpool
from relaxlite.runtime.executable import ExecutableData
from relaxlite.target import Target
from tests.support.paths import ROOT
from tests.support.tiny_llm import checkpoint

pytestmark = pytest.mark.skipif(not linker.is_supported(), reason="LLVM links everywhere but on x86-64 Linux")


def module(width: int = 64) -> rl.IRModule:
    """A parallel product, then relu: 1 where x is 1."""
    bb = rl.BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    types = {"x": rl.TensorType.of((n, m), "float32"), "y": rl.TensorType.of((m, width), "float32")}
    with bb.function("main", **types) as (x, y):
        bb.result(bb.emit(rl.ops.relu(bb.emit(rl.ops.matmul(x, y)))))
    return bb.module()


@pytest.fixture(scope="module")
def data() -> ExecutableData:
    found = driver.build(module())
    assert any(b"relaxlite_parallel_for" in code for code in found.objects)
    return found


@pytest.fixture(scope="module")
def saved(data: ExecutableData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("support") / "m.rlx"
    artifact.save(data, path)
    return path


HEAD = """
import os, sys, threading
import numpy as np
import relaxlite as rl
x, y = np.ones((200, 300), np.float32), np.ones((300, 64), np.float32)
def loaded(): return any(name.partition('.')[0] == 'llvmlite' for name in sys.modules)
def workers(): return sum(thread.name.startswith('relaxlite-worker') for thread in threading.enumerate())
def check(exe): assert (exe(x, y) == 300).all()
"""


def python(code: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_runs_on_all_threads(saved: Path) -> None:
    python(f"exe = rl.load({str(saved)!r}, threads=2); check(exe); assert workers() == 1 and not loaded()")


@pytest.mark.parametrize("variable", ["RELAXLITE_INTERPRET", "RELAXLITE_CHECK_MEMORY", "RELAXLITE_POISON_MEMORY"])
def test_a_model_runs_under_each_knob(saved: Path, variable: str) -> None:
    python(f"exe = rl.load({str(saved)!r}, threads=2); check(exe); assert not loaded()", **{variable: "1"})


def test_a_model_is_profiled(saved: Path) -> None:
    code = "exe = rl.load({!r}, threads=2); print(exe.profile([x, y], runs=2)); assert not loaded()"
    assert "matmul" in python(code.format(str(saved)))


def test_a_forked_child_runs_the_model_too(saved: Path) -> None:
    python(
        f"exe = rl.load({str(saved)!r}, threads=2); check(exe); pid = os.fork()\n"
        "if not pid: check(exe); os._exit(7 if workers() == 1 and not loaded() else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7; check(exe)",
        PYTHONWARNINGS="ignore",
    )


def test_a_process_ends_while_workers_are_in_the_code(saved: Path) -> None:
    python(f"for _ in range(3): check(rl.load({str(saved)!r}, threads=3))\nassert workers() == 2 and not loaded()")


def test_a_language_model_makes_text(tmp_path: Path) -> None:
    path = tmp_path / "tiny.rlx"
    LanguageModel.of(build_checkpoint(checkpoint(), max_context=48)).save(path)
    out = python(
        f"llm = rl.llm.load({str(path)!r}, threads=2)\n"
        "print(len(llm.generate('abc', max_new_tokens=3, stop_tokens=()).tokens)); assert not loaded()"
    )
    assert out == "3\n"


def test_several_models_and_the_compiler_share_one_pool(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.rlx"
    rl.compile(module(32)).save(other)
    python(
        f"a, b = rl.load({str(saved)!r}, threads=2), rl.load({str(other)!r})\n"
        "from relaxlite.runtime import threadpool; before = threadpool.symbols()\n"
        "check(a); check(lambda x, y: b(x, y[:, :32])); assert not loaded()\n"
        "from tests.runtime.test_support import module\n"
        "c = rl.compile(module()); assert loaded(); check(c); check(a)\n"
        "assert threadpool.symbols() == before and workers() == 1"
    )


def test_a_process_that_compiles_takes_the_same_code(saved: Path) -> None:
    python(
        "from tests.runtime.test_support import module\n"
        "from relaxlite.runtime import jit\n"
        "def fail(*_, **__): raise AssertionError\n"
        "made = rl.driver.build(module()); jit.link_text = jit.link_objects = fail\n"
        "check(rl.Executable(made))"
    )


# Which code is taken


def test_keys_follow_the_text() -> None:
    ours = threadpool.support_code("futex", "x86_64")
    assert ours.key == threadpool.support_code("futex", "x86_64").key
    assert ours.key != replace(ours, ir=ours.ir + "\n").key
    assert ours.key != threadpool.support_code("condvar", "x86_64").key


def test_it_is_made_for_targets_that_link_it(data: ExecutableData) -> None:
    names = {key.partition(".")[0] for key in data.support}
    assert names == {"threadpool_futex", "scratch", "array_reader"}
    any_linux = Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
    assert compile_support(any_linux) == data.support
    assert compile_support(Target.parse("llvm -mtriple=aarch64-unknown-linux-gnu")) == {}
    assert compile_support(Target.parse("llvm -mtriple=x86_64-pc-windows-msvc -mcpu=x86-64")) == {}


def test_code_of_another_version_is_not_taken(data: ExecutableData, tmp_path: Path) -> None:
    path = tmp_path / "other.rlx"
    others = {f"{key[:-1]}_": b"of another version" for key in data.support}
    artifact.save(replace(data, support=others), path)
    python(f"exe = rl.load({str(path)!r}, threads=2); assert loaded(); check(exe)")


def test_damaged_code_is_refused(data: ExecutableData, tmp_path: Path) -> None:
    path = tmp_path / "damaged.rlx"
    artifact.save(replace(data, support={key: code[:500] for key, code in data.support.items()}), path)
    out = python(
        f"try: rl.load({str(path)!r})\nexcept rl.errors.ArtifactError as error: print(error)\nassert not loaded()"
    )
    assert "the runtime's own code (threadpool_futex) in the executable is damaged: " in out and "truncated" in out


def test_damaged_code_hurts_nobody_else(data: ExecutableData) -> None:
    code = replace(scratch.support_code("linux"), name="a_test", ir="define i32 @f() { ret i32 5 }", exports=("f",))
    support.register_objects({code.key: b"\x7fELF damaged"})
    with pytest.raises(ArtifactError, match=r"the runtime's own code \(a_test\).* is damaged: .*truncated"):
        support.link(code, {})
    assert support.link(code, {})["f"]


def test_results_are_those_of_llvms_linker(data: ExecutableData, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((70, 300), (300, 64)))
    ours = rl.Executable(data)(x, y)
    monkeypatch.setattr(linker, "is_supported", lambda: False)
    np.testing.assert_array_equal(rl.Executable(data)(x, y), ours)
