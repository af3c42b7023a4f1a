"""Compiled kernels on disk: what is found again, damage, limits, several processes; and LLVM's failures named."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import config
from relaxlite.cli import main
from relaxlite.codegen import kernel_cache
from relaxlite.codegen.kernel_cache import KernelCache
from relaxlite.codegen.llvm import compile as compile_module
from relaxlite.codegen.llvm import compile_programs, isolated, machine_code
from relaxlite.errors import CodegenError
from relaxlite.ir import program as program_ir
from relaxlite.ir.encoding import fingerprint
from relaxlite.ir.intrinsics import DOT_PRODUCTS
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Check,
    Compare,
    For,
    IndexValue,
    Literal,
    Load,
    Select,
    Seq,
    Store,
    TensorProgram,
    Unary,
    compute,
)
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.target import Target
from tests.support.native_kernel import NativeKernel
from tests.support.paths import ROOT

HOST = Target.host()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty cache for each test."""
    path = tmp_path / "kernels"
    with config.override(kernel_cache=str(path), kernel_cache_mb=1000):
        yield path


def scaled(factor: float, *, name: str = "x", size: str = "n", **facts: Any) -> TensorProgram:
    n = SymVar(size, **facts)
    x, out = Buffer.of(name, (n,), "float32"), Buffer.of(f"{name}_out", (n,), "float32")
    return TensorProgram((x, out), (n,), compute(out, lambda i: Binary("mul", x[i], Literal(factor, "float32"))))


def num_compiled(*programs: TensorProgram, target: Target = HOST) -> int:
    """How many objects LLVM makes."""
    return compile_programs({f"k{number}": program for number, program in enumerate(programs)}, target).num_compiled


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "size")


# What is found again


def test_a_program_is_compiled_once(folder: Path) -> None:
    first = compile_programs({"a": scaled(2), "b": scaled(3)}, HOST)
    assert (first.num_compiled, len(first.objects), len(files(folder))) == (2, 2, 2)
    again = compile_programs({"b": scaled(3), "a": scaled(2)}, HOST)
    assert again.num_compiled == 0
    assert again.objects == first.objects[::-1]
    assert {name: again.kernels[name] for name in first.kernels} == first.kernels


def test_kernels_from_the_cache_compute_the_same() -> None:
    n = SymVar("n")
    x, out = Buffer.of("x", (n,), "float32"), Buffer.of("out", (n,), "float32")
    positive = Check(Compare("gt", IndexValue(n), Literal(2, "int64")), "n must exceed 2")
    body = Seq((positive, compute(out, lambda i: Unary("exp", x[i]))))
    program = TensorProgram((x, out), (n,), body)
    for compiled in (1, 0):
        assert num_compiled(program) == compiled
        kernel = NativeKernel(program)
        assert kernel.info.checks == ("n must exceed 2",)
        for size in (3, 17, 64):
            values, result = np.linspace(-1, 1, size, dtype=np.float32), np.zeros(size, np.float32)
            assert kernel([values, result], [size]) == 0
            np.testing.assert_allclose(result, np.exp(values), rtol=1e-6)
        assert kernel([values, result], [2]) == 1


def test_names_do_not_matter_and_equal_programs_share_an_object() -> None:
    code = compile_programs({"a": scaled(2), "b": scaled(2, name="weight", size="batch"), "c": scaled(3)}, HOST)
    assert (code.num_compiled, len(code.objects)) == (2, 2)
    assert code.kernels["a"].symbol == code.kernels["b"].symbol != code.kernels["c"].symbol
    assert [info.name for info in code.kernels.values()] == ["a", "b", "c"]


def test_whole_models_share_layers() -> None:
    def module(scale: float) -> rl.IRModule:
        bb = rl.BlockBuilder()
        n = bb.symbol("n")
        with bb.function("main", x=rl.TensorType.of((n, 8), "float32")) as (x,):
            y = bb.emit(rl.ops.softmax(x, axis=-1))
            bb.result(rl.ops.multiply(y, np.float32(scale)))
        return bb.module()

    x = np.linspace(0, 1, 24, dtype=np.float32).reshape(3, 8)
    first = rl.compile(module(2))
    again = rl.compile(module(2))
    assert first.data.metadata.info["kernels_compiled"] == first.data.metadata.info["kernels"]
    assert again.data.metadata.info["kernels_compiled"] == 0
    np.testing.assert_array_equal(first(x), again(x))


# What is another kernel


@pytest.mark.parametrize(
    "other",
    [
        scaled(2.0000002),
        scaled(-2),
        scaled(2, divisor=16),
        scaled(2, lower=1),
        scaled(2, upper=100),
        dataclasses.replace(scaled(2), attrs=program_ir.NO_ATTRS.__class__({"checked": True})),
    ],
    ids=["value", "sign", "divisor", "lower", "upper", "attribute"],
)
def test_another_program_is_another_kernel(other: TensorProgram) -> None:
    assert num_compiled(scaled(2)) == 1
    assert num_compiled(other) == 1
    assert num_compiled(scaled(2), other) == 0


def test_every_field_of_every_node_counts() -> None:
    """Two programs that differ in one place, for each kind of place."""
    n, m, i = SymVar("n"), SymVar("m"), SymVar("i")
    x, y = Buffer.of("x", (n,), "float32"), Buffer.of("y", (n,), "float32")
    z, local = Buffer.of("z", (n,), "int32"), Buffer.of("t", (4,), "float32", "local")
    wide = Buffer.of("t", (4,), "float32")
    one, two = Literal(1.0, "float32"), Literal(2.0, "float32")
    store = Store(y, (i,), x[i])
    bodies = [
        For(i, n, store),
        For(i, m, store),
        For(i, n + 1, store),
        For(i, n, store, "parallel"),
        For(i, n, Store(y, (i,), y[i])),
        For(i, n, Store(x, (i,), x[i])),
        For(i, n, Store(y, (i + 1,), x[i])),
        For(i, n, Store(y, (i,), x[i + 1])),
        For(i, n, Store(y, (i,), x[i], "add")),
        For(i, n, Store(y, (i,), x[i], "max")),
        For(i, n, Store(y, (i,), Unary("exp", x[i]))),
        For(i, n, Store(y, (i,), Unary("log", x[i]))),
        For(i, n, Store(y, (i,), Binary("sub", x[i], one))),
        For(i, n, Store(y, (i,), Binary("sub", one, x[i]))),
        For(i, n, Store(y, (i,), Select(Compare("lt", x[i], one), one, two))),
        For(i, n, Store(y, (i,), Select(Compare("lt", x[i], one), two, one))),
        For(i, n, Store(z, (i,), Literal(1, "int32"))),
        For(i, n, Store(z, (i,), IndexValue(i, "int32"))),
        Seq((Check(Compare("lt", one, two), "a"), For(i, n, store))),
        Seq((Check(Compare("lt", one, two), "b"), For(i, n, store))),
        Allocate(local, For(i, n, store)),
        Allocate(wide, For(i, n, store)),
    ]
    programs = [TensorProgram((x, y, z), (n, m), body) for body in bodies]
    programs.append(TensorProgram((x, y, z), (m, n), bodies[0]))
    programs.append(TensorProgram((x, y, z), (n, m), bodies[0], num_outputs=2))
    programs.append(TensorProgram((y, x, z), (n, m), bodies[0]))
    assert len({fingerprint(program) for program in programs}) == len(programs)


def test_a_node_of_unknown_content_has_no_fingerprint() -> None:
    """What could be anything is not taken for equal."""
    out = Buffer.of("out", (1,), "int32")
    program = TensorProgram((out,), (), Store(out, (sym(0),), Literal(object(), "int32")))  # type: ignore[arg-type]
    with pytest.raises(CodegenError, match="program 'odd': a tensor program holds a object, whose identity"):
        compile_programs({"odd": program}, HOST)


def test_values_may_nest_deeply_and_share_parts() -> None:
    x = Buffer.of("x", (1,), "float32")
    value: program_ir.Value = Load(x, (sym(0),))
    for _ in range(5000):
        value = Binary("add", value, value)
    assert len(fingerprint(TensorProgram((x,), (), Store(x, (sym(0),), value)))) == 64


@pytest.mark.parametrize(
    "target",
    [
        Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu"),
        Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu -mattr=-fma"),
        Target.parse("llvm -mcpu=x86-64-v4 -mtriple=x86_64-unknown-linux-gnu"),
        Target.parse("llvm -mcpu=generic -mtriple=aarch64-unknown-linux-gnu"),
    ],
    ids=str,
)
def test_another_target_is_another_kernel(target: Target) -> None:
    first = Target.parse("llvm -mcpu=x86-64 -mtriple=x86_64-unknown-linux-gnu")
    assert num_compiled(scaled(2), target=first) == 1
    assert num_compiled(scaled(2), target=target) == 1
    assert num_compiled(scaled(2), target=target) == 0


def _forget_sources() -> None:
    compile_module.generator_key.cache_clear()
    kernel_cache.sources_key.cache_clear()


def test_another_llvm_or_code_generator_is_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_compiled(scaled(2)) == 1
    compile_module.generator_key.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(machine_code, "llvm_version", lambda: "99.0.0")
        assert num_compiled(scaled(2)) == 1
    sources = tmp_path / "package"
    (sources / "codegen" / "llvm").mkdir(parents=True)
    for text in ("VALUE = 1", "VALUE = 2"):
        (sources / "codegen" / "llvm" / "emitter.py").write_text(text)
        _forget_sources()
        with monkeypatch.context() as patch:
            patch.setattr(kernel_cache, "PACKAGE", sources)
            assert num_compiled(scaled(2)) == 1
    _forget_sources()
    assert num_compiled(scaled(2)) == 0


def test_the_sources_that_count_are_there() -> None:
    names = {
        p.relative_to(ROOT / "relaxlite").as_posix()
        for q in compile_module._SOURCES
        for p in (ROOT / "relaxlite").glob(q)
    }
    assert {"codegen/llvm/emitter.py", "codegen/kernel_cache.py", "ir/simplify.py", "dtypes.py", "target.py"} <= names


# Damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data + b"\0",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: b"X" + data[1:],
    ],
    ids=["truncated", "empty", "only the head", "longer", "one bit", "another magic"],
)
def test_a_damaged_entry_is_made_again(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    good = compile_programs({"k": scaled(2)}, HOST)
    (file,) = files(folder)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    again = compile_programs({"k": scaled(2)}, HOST)
    assert (again.num_compiled, again.objects) == (1, good.objects)
    assert file.read_bytes() == content
    assert num_compiled(scaled(2)) == 0


def test_the_entry_of_another_kernel_is_not_taken(folder: Path) -> None:
    compile_programs({"a": scaled(2)}, HOST)
    (first,) = files(folder)
    compile_programs({"b": scaled(3)}, HOST)
    (second,) = set(files(folder)) - {first}
    second.write_bytes(first.read_bytes())
    assert num_compiled(scaled(3)) == 1


# Limits and switches


def test_what_was_not_used_for_longest_goes(folder: Path) -> None:
    cache = KernelCache(folder, limit=10_000)
    keys = [f"{number:064x}" for number in range(0, 1 << 12, 1 << 8)]  # 16
    for age, key in enumerate(keys[:9]):
        cache.put({key: bytes(1000)})
        os.utime(cache._path(key), (1000 + age, 1000 + age))
    assert cache.size().entries == 9
    assert cache.get(keys[0]) == bytes(1000), "which is used again now"
    cache.put({keys[9]: bytes(1000)})
    size = cache.size()
    assert size.bytes <= 8_000 and size.entries == 7
    assert [number for number in range(10) if cache.get(keys[number])] == [0, 4, 5, 6, 7, 8, 9]
    for key in keys[10:]:
        cache.put({key: bytes(1000)})
    assert cache.size().bytes <= 10_000 and cache.get(keys[-1]) == bytes(1000)


def test_the_size_is_counted_again_where_it_is_not_known(folder: Path) -> None:
    cache = KernelCache(folder, limit=3_500)
    cache.put({f"{number:064x}": bytes(1000) for number in range(2)})
    for text in ("nonsense", "", None):
        (folder / "size").unlink() if text is None else (folder / "size").write_text(text)
        cache.put({f"{5:064x}": bytes(1000)})
        assert int((folder / "size").read_text()) == cache.size().bytes == 3 * 1020


def test_the_cache_can_be_switched_off(folder: Path) -> None:
    with config.override(kernel_cache_mb=0):
        assert [num_compiled(scaled(2)), num_compiled(scaled(2))] == [1, 1]
        assert kernel_cache.open_cache() is None
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        config.override(kernel_cache=str(tmp_path / "file" / "kernels")),
        pytest.warns(RuntimeWarning, match=r"compiled kernels cannot be kept in .*kernels \(.*RELAXLITE_KERNEL_CACHE"),
    ):
        assert num_compiled(scaled(2)) == 1
    with config.override(kernel_cache=str(tmp_path / "file" / "kernels")), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert num_compiled(scaled(2)) == 1


def test_a_folder_that_may_only_be_read_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_compiled(scaled(2)) == 1

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("replace", "utime", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    assert num_compiled(scaled(2)) == 0
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert num_compiled(scaled(3)) == 1
    assert len(files(folder)) == 1, "nor is a temporary file left"


def test_tests_do_not_use_the_cache_of_who_runs_them() -> None:
    variable = config.KNOBS["kernel_cache"].variable
    assert os.environ[variable] and Path(os.environ[variable]) != config.user_cache_folder() / "kernels"


# Several processes

WRITER = """
import sys
from tests.codegen.test_kernel_cache import HOST, scaled
from relaxlite.codegen.llvm import compile_programs
sys.stdin.readline()
for number in range(12):
    print(len(compile_programs({"k": scaled(number + 0.5)}, HOST).objects[0]))
"""


def test_two_processes_write_the_same_kernels_at_once(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RELAXLITE_KERNEL_CACHE": str(folder)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    results = [writer.communicate() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert len(files(folder)) == 12
    assert num_compiled(*(scaled(number + 0.5) for number in range(12))) == 0


def test_a_temporary_file_of_a_killed_process_goes(folder: Path) -> None:
    cache = KernelCache(folder, limit=1500)
    cache.put({"a" * 64: bytes(1000)})
    old, new = (folder / "aa" / f"{name}.tmp" for name in ("old", "new"))
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    cache.put({"b" * 64: bytes(1000)})
    assert not old.exists() and new.exists()


# On the command line


def test_show_and_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert re.search(r"entries  0 \(.*\)\nsize     0 bytes\nlimit    1.0 GB", capsys.readouterr().out)
    compile_programs({"a": scaled(2), "b": scaled(3)}, HOST)
    folder.joinpath("notes.txt").write_text("mine")
    assert main(["cache", "show"]) == 0
    out = capsys.readouterr().out
    assert f"folder   {folder}\nentries  2 (compiled kernels, scheduled programs)\n" in out and "kB" in out
    assert main(["cache", "clear"]) == 0
    assert (
        f"removed 2 entries, {out.split('size')[1].split(chr(10))[0].strip()}, from {folder}" in capsys.readouterr().out
    )
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with config.override(kernel_cache_mb=0):
        assert main(["cache"]) == 0
    assert "limit    switched off" in capsys.readouterr().out
    assert main(["cache", "burn"]) == 2


# LLVM's failures

BAD = "define i32 @f() {\n  ret i64 0\n}\n"
# Verifies, but no instruction of the target does it: LLVM ends its process.
LETHAL = """
declare <16 x float> @llvm.x86.avx512.mask.scalef.ps.512(<16 x float>, <16 x float>, <16 x float>, i16, i32)
define <16 x float> @f(<16 x float> %x) {
  %y = call <16 x float> @llvm.x86.avx512.mask.scalef.ps.512(
    <16 x float> %x, <16 x float> %x, <16 x float> %x, i16 -1, i32 4)
  ret <16 x float> %y
}
"""
OLD = Target.parse("llvm -mcpu=x86-64 -mtriple=x86_64-unknown-linux-gnu")


@pytest.fixture
def sabotaged(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """`sabotaged({program name: LLVM IR})`: what the code generator emits instead."""
    emit = compile_module.emit_kernel

    def change(texts: dict[str, str]) -> None:
        def emitted(name: str, *args: Any) -> Any:
            kernel = emit(name, *args)
            return dataclasses.replace(kernel, text=texts[name]) if name in texts else kernel

        monkeypatch.setattr(compile_module, "emit_kernel", emitted)

    return change


def test_a_program_that_cannot_be_expressed_is_named_and_kept(tmp_path: Path) -> None:
    out = Buffer.of("out", (1,), "int32")
    program = TensorProgram((out,), (), Store(out, (sym(0),), Unary("exp", Literal(1, "int32"))))
    with (
        config.override(dump_dir=str(tmp_path)),
        pytest.raises(
            CodegenError,
            match=r"program 'bad': .*exp of an integer[^\n]*\n  hint: the program is in .*relaxlite-bad.py",
        ),
    ):
        compile_programs({"bad": program}, HOST)
    assert 'def bad(out: Buffer((1,), "int32")):' in (tmp_path / "relaxlite-bad.py").read_text()


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_kernel_that_llvm_rejects_is_named(
    sabotaged: Callable[[dict[str, str]], None], tmp_path: Path, isolate: bool, threads: int
) -> None:
    sabotaged({"b/2": BAD})
    programs = {"a": scaled(2), "b/2": scaled(3), "c": scaled(4)}
    with (
        config.override(isolate_codegen=isolate, compile_threads=threads, dump_dir=str(tmp_path / "dumps")),
        pytest.raises(
            CodegenError, match=r"program 'b/2': LLVM (cannot read|rejects) the code: [^$]*hint: its LLVM IR is in"
        ),
    ):
        compile_programs(programs, HOST)
    assert (tmp_path / "dumps" / "relaxlite-b_2.ll").read_text() == BAD


def test_a_kernel_that_ends_the_process_is_named_in_isolation(
    sabotaged: Callable[[dict[str, str]], None], tmp_path: Path
) -> None:
    sabotaged({"b": LETHAL})
    with (
        config.override(isolate_codegen=True, dump_dir=str(tmp_path)),
        pytest.raises(
            CodegenError, match=r"program 'b': LLVM ended the process that compiled it \(SIGABRT\): LLVM ERROR: "
        ),
    ):
        compile_programs({"a": scaled(2), "b": scaled(3)}, OLD)
    assert (tmp_path / "relaxlite-b.ll").read_text() == LETHAL


def test_a_child_that_is_killed_is_reported() -> None:
    with isolated.Compilers(HOST) as to_object:
        text = "define i32 @f() {\n  ret i32 0\n}\n"
        assert to_object(text) == machine_code.to_object(text, HOST)
        assert isinstance(to_object.__self__, isolated.Compilers)  # type: ignore[attr-defined]
        (child,) = to_object.__self__._children  # type: ignore[attr-defined]
        child._process.kill()
        with pytest.raises(CodegenError, match=r"LLVM ended the process that compiled it \(SIGKILL\): no message"):
            to_object(text)
    assert child._process.poll() is not None


def test_isolation_makes_the_same_code() -> None:
    programs = {f"k{number}": scaled(number) for number in range(5)}
    with config.override(kernel_cache_mb=0):
        plain = compile_programs(programs, HOST)
        with config.override(isolate_codegen=True, compile_threads=2):
            assert compile_programs(programs, HOST).objects == plain.objects


def test_any_number_of_threads_makes_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {f"k{number}": scaled(number) for number in range(12)}
    with config.override(kernel_cache_mb=0):
        results = []
        for threads in (1, 2, 5):
            with config.override(compile_threads=threads):
                results.append(compile_programs(programs, HOST).objects)
        monkeypatch.setattr(machine_code, "_unlocked", lambda name: getattr(machine_code.ffi.lib, name))
        results.append(compile_programs(programs, HOST).objects)
    assert all(objects == results[0] for objects in results)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("-mcpu=x86-64", marks=pytest.mark.exhaustive),
        "-mcpu=x86-64-v4",
        pytest.param("-mcpu=x86-64-v4 -mattr=-avx512f", marks=pytest.mark.exhaustive),
        pytest.param("-mcpu=znver4 -mattr=-avx2", marks=pytest.mark.exhaustive),
        pytest.param("-mcpu=sapphirerapids -mattr=-avx512vl", marks=pytest.mark.exhaustive),
        "-mcpu=x86-64-v3 -mattr=+avx512f,+avxvnni",
        "-mcpu=alderlake -mattr=+avxvnni",
        pytest.param("-mcpu=cascadelake -mattr=-avx512bw", marks=pytest.mark.exhaustive),
        "-mcpu=x86-64 -mattr=+avx512vl,+avx512vnni",
    ],
)
def test_code_uses_only_what_the_processor_has(options: str) -> None:
    """In a child each, since LLVM would end this process. Target intrinsics are in mathematics and dot products."""
    target = Target.parse(f"llvm {options} -mtriple=x86_64-unknown-linux-gnu")
    programs = {f"{name}{lanes}": dot_product(name, lanes) for name in DOT_PRODUCTS for lanes in (4, 8, 16, 32)}
    for op in ("exp", "tanh", "erf", "log", "sin"):
        for lanes in (4, 8, 16, 32):
            i = SymVar("i")
            x, out = Buffer.of("x", (lanes,), "float32"), Buffer.of("out", (lanes,), "float32")
            body = For(i, sym(lanes), Store(out, (i,), Unary(op, x[i])), "vectorized")
            programs[f"{op}{lanes}"] = TensorProgram((x, out), (), body)
    with config.override(isolate_codegen=True):
        assert compile_programs(programs, target).num_compiled == len(programs)


def dot_product(name: str, lanes: int) -> TensorProgram:
    """c[i] += the dot product of a[i, :] and b[:]"""
    dot, i = DOT_PRODUCTS[name], SymVar("i")
    a, b = Buffer.of("a", (lanes, dot.length), dot.a), Buffer.of("b", (dot.length,), dot.b)
    c = Buffer.of("c", (lanes,), dot.total)
    parts = (c[i], *(a[i, k] for k in range(dot.length)), *(b[k] for k in range(dot.length)))
    return TensorProgram(
        (a, b, c), (), For(i, sym(lanes), Store(c, (i,), program_ir.Intrinsic(name, parts, dot.total)), "vectorized")
    )


def test_the_child_reads_messages_of_any_size(tmp_path: Path) -> None:
    target = json.loads(json.dumps(dataclasses.asdict(HOST)))
    assert Target(**{**target, "features": tuple(target["features"])}) == HOST
    lines = "\n".join(f"define i32 @f{number}() {{\n  ret i32 {number}\n}}" for number in range(3000))
    with isolated.Compilers(HOST) as to_object:
        assert len(to_object(lines)) > 1 << 17
