"""Programs as bytes, and what passes made of them in an earlier compilation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import relaxlite as rl
from relaxlite import config
from relaxlite.codegen import kernel_cache
from relaxlite.errors import PassError
from relaxlite.ir import ops
from relaxlite.ir.encoding import decode, encode, fingerprint
from relaxlite.ir.equality import structural_equal
from relaxlite.ir.expr import Attrs, AttrValue, Constant
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Binary,
    Buffer,
    CallLibrary,
    Check,
    Compare,
    For,
    IndexValue,
    LetIndex,
    LibraryFound,
    Literal,
    Load,
    Prefetch,
    Store,
    TensorProgram,
    Value,
    seq,
)
from relaxlite.ir.program_cache import ProgramCache
from relaxlite.ir.program_printer import print_program
from relaxlite.ir.program_visitor import Substitute
from relaxlite.ir.symbolic import SymVar, smax, smin, sym
from relaxlite.passes import cost
from relaxlite.passes.context import PassContext
from relaxlite.passes.schedule.cpu import programs as schedule_cpu
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from tests.support import random_programs, tiers

HOST = Target.host()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty cache for each test."""
    path = tmp_path / "kernels"
    with config.override(kernel_cache=str(path), kernel_cache_mb=1000):
        yield path


def assert_survives(program: TensorProgram) -> None:
    data = encode(program, symbols=program.symbols)
    (again,) = decode(data, symbols=program.symbols)
    assert again.symbols == program.symbols and again.attrs == program.attrs
    assert structural_equal(again, program) and fingerprint(again) == fingerprint(program)
    assert print_program("p", again) == print_program("p", program)  # names too
    assert encode(again, symbols=again.symbols) == data
    (other,) = decode(encode(program))
    assert structural_equal(other, program) and not set(other.symbols) & set(program.symbols)


# Bytes


@settings(max_examples=tiers.examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(random_programs.maps() | random_programs.reductions() | random_programs.products() | random_programs.rows())
def test_random_programs_survive_as_bytes(program: TensorProgram) -> None:
    assert_survives(program)
    assert_survives(schedule_program(program, HOST))


def test_every_kind_of_node_survives_as_bytes() -> None:
    n, m, i, at = SymVar("n", lower=1, divisor=4), SymVar("m", upper=9), SymVar("i"), SymVar("at", lower=None)
    x, out = Buffer.of("x", (n, m), "float32"), Buffer.of("out", (n // 3 + m % 2 + 1,), "float32")
    local = Buffer.of("t", (4,), "float32", "local")
    address = AddressOf(out, (sym(0),), is_written=True)
    half = Literal(np.float16(0.1), "float16")
    body = seq(
        Check(Compare("lt", half, Literal(float("nan"), "float16")), "a text"),
        Check(LibraryFound("lib", "f", is_required=True), "no lib"),
        CallLibrary("lib", "f", (address, IndexValue(smin(n, m, 7)), Literal(2**70, "int64")), "status", n * m * m - 2),
        Prefetch(x, (i * n, sym(3)), 1),
        LetIndex(at, Literal(True, "bool"), Store(out, (smax(at, 0),), x[0, 0], "maxnum", nontemporal=True)),
        Allocate(
            local, For(i, n, Store(local, (i,), Binary("add", x[i, m - 1], Literal(-0.0, "float32"))), "parallel")
        ),
    )
    attrs: dict[str, AttrValue] = {
        "a": (1, 1.0, True, None, ("b", (2,))),
        "nan": float("nan"),
        "empty": (),
        "numpy": (np.float64(0.5), np.int32(3)),
    }
    program = TensorProgram((x, out), (n, m), body, attrs=Attrs(attrs))
    (again,) = decode(encode(program))
    assert print_program("p", again) == print_program("p", program) and fingerprint(again) == fingerprint(program)
    assert encode(again) == encode(program)
    assert [type(value) for value in again.attrs["numpy"]] == [np.float64, np.int32]
    kinds = [type(value) for value in again.attrs["a"][:4]]
    assert kinds == [int, float, bool, type(None)] and np.isnan(again.attrs["nan"])
    cond = again.body.stmts[0].cond
    assert type(cond.a.value) is np.float16 and np.isnan(cond.b.value)
    call = again.body.stmts[2]
    assert call.args[0].is_written and call.args[2].value == 2**70
    facts = [(s.name, s.lower, s.upper, s.divisor) for s in again.symbols]
    assert facts == [("n", 1, None, 4), ("m", 0, 9, 1)] and again.body.stmts[4].var.lower is None


def test_deep_values_and_shared_parts_survive_as_bytes() -> None:
    x = Buffer.of("x", (1,), "float32")
    value: Value = Load(x, (sym(0),))
    for _ in range(5000):
        value = Binary("add", value, value)
    data = encode(TensorProgram((x,), (), Store(x, (sym(0),), value)))
    assert len(data) < 500_000
    (again,) = decode(data)
    assert again.body.value.a is again.body.value.b


def test_what_has_no_bytes_is_refused() -> None:
    out = Buffer.of("out", (1,), "int32")
    with pytest.raises(TypeError, match="a tensor program holds a object"):
        encode(TensorProgram((out,), (), Store(out, (sym(0),), Literal(object(), "int32"))))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an attribute of a program holds a object"):
        encode(TensorProgram((out,), (), seq(), attrs=Attrs({"a": object()})))  # type: ignore[dict-item]


def test_rewriting_keeps_that_an_address_is_written() -> None:
    out, other = Buffer.of("out", (4,), "float32"), Buffer.of("other", (4,), "float32")
    call = CallLibrary("lib", "f", (AddressOf(out, (sym(0),), is_written=True),))
    moved = Substitute({}, {out: other}).stmt(call)
    assert isinstance(moved, CallLibrary) and isinstance(moved.args[0], AddressOf)
    assert moved.args[0].buffer is other and moved.args[0].is_written


# What is kept


def softmax_module(rows: str = "n") -> rl.IRModule:
    bb = rl.BlockBuilder()
    n = bb.symbol(rows)
    weight = Constant.of(np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32))
    with bb.function("main", x=rl.TensorType.of((n, 48), "float32")) as (x,):
        bb.result(bb.emit(ops.softmax(bb.emit(ops.matmul(x, weight)), axis=-1)))
    return bb.module()


def refuse(*args: Any) -> Any:
    raise AssertionError("nothing is to be made anew")


def results(exe: rl.Executable) -> list[np.ndarray]:
    return [exe(np.random.default_rng(n).normal(size=(n, 48)).astype(np.float32)) for n in (0, 1, 5, 33, 128)]


def test_a_second_compilation_schedules_and_estimates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = rl.compile(softmax_module())
    with monkeypatch.context() as patch:
        patch.setattr(schedule_cpu, "schedule_program", refuse)
        patch.setattr(cost, "cost_of", refuse)
        again = rl.compile(softmax_module())
        with pytest.raises(PassError, match="nothing is to be made anew"):
            rl.compile(softmax_module(), "llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
        with pytest.raises(PassError, match="nothing is to be made anew"):  # names are seen in notes and errors
            rl.compile(softmax_module("m"))
    assert again.data.metadata.info["kernels_compiled"] == 0
    assert again.data.kernels == first.data.kernels  # costs too
    for a, b in zip(results(first), results(again), strict=True):
        np.testing.assert_array_equal(a, b)
    with config.override(kernel_cache_mb=0):
        alone = rl.compile(softmax_module())
    for a, b in zip(results(first), results(alone), strict=True):
        np.testing.assert_array_equal(a, b)


def test_changed_passes_make_programs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def key_with(text: str) -> str:
        (tmp_path / "package" / "passes").mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / "passes" / "some.py").write_text(text)
        kernel_cache.sources_key.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(kernel_cache, "PACKAGE", tmp_path / "package")
            found = kernel_cache.sources_key("passes/**/*.py")
        kernel_cache.sources_key.cache_clear()
        return found

    out = Buffer.of("out", (SymVar("n"),), "int32")
    program = TensorProgram((out,), (SymVar("n"),), seq())

    def make() -> tuple[str]:
        made.append("")
        return (f"result {len(made)}",)

    for text, options, expected in (("1", "", 1), ("1", "", 1), ("2", "", 2), ("2", "wide", 3), ("1", "", 1)):
        kept = ProgramCache(kernel_cache.open_cache(), key_with(text))
        assert kept.get_or_compute("step", program, options, make) == (f"result {expected}",)
        assert kept.get_or_compute("step", program, options, make) == (
            f"result {expected}",
        )  # also before it is written
        kept.write()
    assert kept.get_or_compute("another step", program, "", make) == ("result 4",)
    assert ProgramCache().get_or_compute("step", program, "", make) == ProgramCache().get_or_compute(
        "step", program, "", lambda: ("result 5",)
    )


def test_a_damaged_entry_is_made_anew(folder: Path) -> None:
    first = rl.compile(softmax_module())
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    again = rl.compile(softmax_module())
    assert again.data.kernels == first.data.kernels
    for a, b in zip(results(first), results(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_context_may_serve_several_compilations() -> None:
    context = PassContext(HOST)
    for _ in range(2):
        exe = rl.compile(softmax_module(), context=context)
        np.testing.assert_allclose(results(exe)[3].sum(axis=1), np.ones(33), rtol=1e-5)
