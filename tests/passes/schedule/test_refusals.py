"""What each schedule primitive must refuse: the message, and that going ahead anyway would change the results.

Each case is a program, a step, and the check that forbids it (a function to put out of action). With the check the
step is a ScheduleError; without it the program computes something else, reads outside of a buffer, or depends on the
order in which loops that run side by side take their iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from relaxlite.codegen.interpreter import run_program
from relaxlite.errors import CodegenError, ExecutionError, ScheduleError, VerifyError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import For, TensorProgram
from relaxlite.ir.program_verifier import verify_program
from relaxlite.passes.loops import transforms as rewrite
from relaxlite.passes.schedule.primitives import Schedule, layout, loops, staging
from relaxlite.passes.schedule.primitives import tensorize as tensors
from relaxlite.passes.schedule.primitives.tree import find_loop
from tests.support.ir_text import program
from tests.support.native_kernel import NativeKernel
from tests.support.random_programs import draw_array, scrambled

N, M = 5, 6
HEAD = 'n = symbol("n")\nm = symbol("m")\n@program(symbols=(n, m), outputs=1)\n'


def text(signature: str, body: str) -> TensorProgram:
    return program(f"{HEAD}def p({signature}):\n" + "\n".join(f"    {line}" for line in body.strip("\n").split("\n")))


WAVE = text(
    "x: i32[n, m], out: i32[n + 1, m + 1]",
    """
for c in serial(n + 1):
    for d in serial(m + 1):
        out[c, d] = int32(1)
for i in serial(n):
    for j in serial(m):
        out[i + 1, j] = out[i, j + 1] - x[i, j]
""",
)
CHAIN = text(
    "x: i32[n, m], out: i32[9]",
    """
for i in serial(9):
    out[i] = int32(1)
for i in serial(8):
    out[i + 1] = out[i] * int32(2)
""",
)
PAIR = text(
    "x: i32[n, m], out: i32[n + 1]",
    """
out[0] = int32(4)
for i in serial(n):
    out[i] = x[i, 0]
    out[i + 1] = out[i + 1] * int32(3)
""",
)
TRIANGLE = text(
    "x: i32[n, m], out: i32[n, n]",
    """
for i in serial(n):
    for j in serial(n):
        out[i, j] = int32(0)
for i in serial(n):
    for j in serial(i + 1):
        out[i, j] = x[i, 0]
""",
)
TOTAL = text(
    "x: i32[n, m], out: i32[1]",
    """
out[0] = int32(0)
for i in serial(8):
    out[0] = out[0] * int32(2) + index(i, "int32")
""",
)
SUM = text(
    "x: i32[n, m], out: i32[n]",
    """
for i in serial(n):
    out[i] = int32(0)
    for j in serial(m):
        out[i] += x[i, j]
""",
)
RUNNING = text(
    "x: i32[n, m], out: i32[4, m]",
    """
for i in serial(4):
    with allocate((), "int32", "local") as t:
        t[()] = int32(1)
        for k in serial(m):
            t[()] += x[0, k]
        out[0, 0] = t[()] + index(i, "int32") if index(i) < index(3) else out[0, 0] * int32(2)
        out[i, 1] = out[0, 0]
""",
)
GROWING = text(
    "x: i32[n, m], out: i32[4]",
    """
for i in serial(4):
    with allocate((), "int32", "local") as t:
        t[()] = int32(0)
        for k in serial(i + 1):
            t[()] += x[0, k]
        out[i] = t[()]
""",
)
LATER = text(
    "x: i32[n, m], out: i32[n, m]",
    """
with allocate((n,), "int32") as t:
    for c in serial(n):
        for d in serial(m):
            out[c, d] = x[c, d]
    for p in serial(n):
        t[p] = out[p, 0] + int32(1)
    for i in serial(n):
        for j in serial(m):
            out[i, j] = t[i] - index(j, "int32")
""",
)
TWICE = text(
    "x: i32[n, m], out: i32[n, m]",
    """
with allocate((m,), "int32") as t:
    for p in serial(m):
        t[p] = x[0, p]
    for i in serial(n):
        for j in serial(m):
            out[i, j] = t[j]
    for i in serial(n):
        out[i, 0] = t[m - 1]
""",
)
SHIFTED = text(
    "x: i32[n, m], out: i32[n + 2]",
    """
for i in serial(n + 2):
    out[i] = int32(7)
for i in serial(n):
    for s in serial(2):
        out[i + 2*s] = x[i, 0]
""",
)
PREFIX = text(
    "x: i32[n, m], out: i32[1]",
    """
out[0] = int32(1)
for k in serial(m):
    out[0] += out[0] * x[0, k]
""",
)
WINDOW = text(
    "x: i32[n, m], out: i32[8]",
    """
for i in serial(8):
    out[i] = int32(0)
for k in serial(8):
    out[k] += x[0, 0]
""",
)
CHECKED = text(
    "x: i32[n, m], out: i32[n, m]",
    """
with allocate((m,), "int32") as t:
    for p in serial(m):
        assert index(m) < index(7), "too wide"
        t[p] = x[0, p]
    for i in serial(n):
        for j in serial(m):
            out[i, j] = t[j]
""",
)
EMPTY = text(
    "x: i32[n, m], out: i32[n]",
    """
for i in serial(n):
    out[i] = int32(0)
for i in serial(n - 5):
    out[i] = int32(1)
    out[n - 6] += x[0, 0]
for k in serial(n - 5):
    out[n - 6] += x[0, k]
""",
)
SIGNED = text(
    "x: i8[n, 4], y: i8[n, 4], out: i32[n]",
    """
for i in serial(n):
    out[i] = int32(0)
    for k in serial(4):
        out[i] += int32(x[i, k]) * int32(y[i, k])
""",
)


LANES = text(
    "x: f32[n, 8], y: f32[n, 8], out: f32[n]",
    """
for i in serial(n):
    out[i] = float32(0)
    for k in vectorized(8):
        out[i] += x[i, k] * y[i, k]
""",
)


COLUMNS = text(
    "x: i32[n, m], out: i32[m]",
    """
for j in serial(m):
    with allocate((), "int32", "local") as t:
        t[()] = int32(0)
        for k in serial(n):
            t[()] += x[k, j]
        out[j] = t[()]
""",
)


@dataclass(frozen=True)
class Case:
    given: TensorProgram
    step: Callable[[Schedule], Any]
    message: str
    without: Mapping[tuple[ModuleType, str], Any]  # what takes the place of the check


def nothing(*args: Any, **options: Any) -> None:
    return None


class Divides(Analyzer):
    """Believes that everything is a multiple of everything."""

    def can_prove_divisible(self, a: Any, by: Any) -> bool:
        return True


def masked_columns(s: Schedule) -> None:
    s.split("j", 4, tail="mask")
    s.decompose_reduction("t", "ji")


def masked_copy(s: Schedule) -> None:
    s.split("j", 4, tail="mask")
    s.stage("x", "jo", scope="global")


CARRIED = {(loops, "carried_by"): nothing}
CASES = {
    "reorder": Case(
        WAVE,
        lambda s: s.reorder("j", "i"),
        r"loops j, i cannot be brought into this order: the load of out\[i, j \+ 1\] and the store to out\[i \+ 1, j\]",
        {(loops, "blocks_reordering"): nothing},
    ),
    "split without a rest": Case(
        SUM,
        lambda s: s.split("i", 2, tail="none"),
        "loop 'i' of n iterations is not known to be a multiple of 2",
        {(loops, "analyzer_at"): lambda root, stmt: Divides()},
    ),
    "round up": Case(  # accepted: a condition leaves out what lies beyond
        SUM, lambda s: s.predicate("i", 4), "", {(loops, "_guarded"): lambda loop, body: body}
    ),
    "decompose under a condition": Case(  # accepted: the condition goes to the loads
        COLUMNS, masked_columns, "", {(staging, "inside"): nothing}
    ),
    "stage what is not there": Case(  # accepted: only what exists is copied
        COLUMNS, masked_copy, "", {(staging, "inside"): nothing}
    ),
    "parallelize": Case(WAVE, lambda s: s.parallelize("i"), "loop 'i' cannot be run in parallel: the load", CARRIED),
    "bind": Case(WAVE, lambda s: s.bind("i", "block_x"), "loop 'i' cannot be bound to block_x: the load", CARRIED),
    "parallelize a sum": Case(
        TOTAL, lambda s: s.parallelize("i"), r"'i' cannot be run in parallel: .* out\[0\]", CARRIED
    ),
    "vectorize": Case(CHAIN, lambda s: s.vectorize("i_1"), "loop 'i_1' cannot be vectorized: the load", CARRIED),
    "distribute": Case(
        PAIR,
        lambda s: s.distribute("i"),
        r"of loop 'i' cannot be taken apart: the store to out\[i\] and the (load of|store to) out\[i \+ 1\]",
        {(loops, "blocks_distribution"): nothing},
    ),
    "decompose a reduction": Case(
        RUNNING,
        lambda s: s.decompose_reduction("t", "i"),
        "the iterations of loop 'i' are not independent",
        {(staging, "carried_by"): nothing},
    ),
    "compute elsewhere": Case(
        LATER,
        lambda s: s.compute_at("t", "j"),
        "t is computed from out, which is stored to after that",
        {(staging, "_check_inputs_stay"): nothing},
    ),
    "compute for one of two": Case(
        TWICE,
        lambda s: s.compute_at("t", "i"),
        "buffer t is used outside of loop 'i' too",
        {(staging, "_check_used_only_in"): nothing},
    ),
    "stage without what is there": Case(
        SHIFTED,
        lambda s: s.stage("out", "i_1"),
        "",  # accepted: the copy brings in the element between the two that are stored
        {(staging, "overwrites"): lambda *args: True},
    ),
    "combine a running result": Case(
        PREFIX,
        lambda s: s.split_reduction("k", 4),
        "loop 'k' reads out, into which it combines",
        {(staging, "loads"): lambda stmt: ()},
    ),
    "pack away an axis": Case(
        WAVE,
        lambda s: s.pack("out", (0, (1, "%", 2))),
        "axis 1 of buffer out must occur once",
        {(layout, "_check_terms"): nothing},
    ),
    "multiply signed bytes": Case(
        SIGNED,
        lambda s: s.tensorize("k", "dot4_u8s8"),
        "dot4_u8s8 multiplies uint8 and int8, cast to int32; loop 'k' has int8 as int32 and int8 as int32",
        {(tensors, "_operands"): lambda loop, store, product, name, dot: (product.a.x, product.b.x)},
    ),
}


def results(given: TensorProgram, *, is_scrambled: bool = False) -> Any:
    """What the program computes; a string where it does not get that far."""
    rng, sizes = np.random.default_rng(0), {"n": N, "m": M}
    shapes = [tuple(int(eval(str(d), {}, sizes)) for d in b.shape) for b in given.inputs]
    inputs = [draw_array(shape, b.dtype, rng) for shape, b in zip(shapes, given.inputs, strict=True)]
    values = {symbol: sizes[symbol.name] for symbol in given.symbols}
    try:
        verify_program("p", given)
        return run_program(scrambled(given) if is_scrambled else given, inputs, values)[0]
    except (ExecutionError, VerifyError) as error:
        return str(error)


@pytest.mark.parametrize("name", CASES)
def test_what_the_check_is_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    wanted = results(case.given)
    assert isinstance(wanted, np.ndarray)
    s = Schedule(case.given)
    if case.message:
        with pytest.raises(ScheduleError, match=case.message):
            case.step(s)
        assert not s.steps and not s.program().attrs  # a step that is refused changes nothing
    else:
        case.step(s)
    np.testing.assert_array_equal(results(s.program(), is_scrambled=True), wanted)
    for (module, attribute), stand_in in case.without.items():
        monkeypatch.setattr(module, attribute, stand_in)
    s = Schedule(case.given)
    case.step(s)
    found = [results(s.program()), results(s.program(), is_scrambled=True)]
    assert any(isinstance(x, str) or not np.array_equal(x, wanted) for x in found), s.show()


# What has no meaning at all, and is refused by its form


FORMS: list[tuple[TensorProgram, Callable[[Schedule], Any], str]] = [
    (SUM, lambda s: s.split("q", 2), "there is no loop 'q'; the loops are i, j"),
    (SUM, lambda s: s.split("i", 0), "loop 'i' cannot be split by 0"),
    (SUM, lambda s: s.split("i", 2, tail="round"), "unknown tail 'round' of a split; there are cut, mask, even, none"),
    (SUM, lambda s: s.split("i", 2, tail="none"), "loop 'i' of n iterations is not known to be a multiple of 2; tail="),
    (SUM, lambda s: s.specialize("i", 2, 2), "loop 'i' of n iterations cannot be specialized for 2, 2; name different"),
    (SUM, lambda s: s.predicate("i", 0), "cannot be rounded up to a multiple of 0"),
    (SUM, lambda s: s.unroll("i"), "loop 'i' of n iterations cannot be unrolled; split"),
    (SUM, lambda s: s.vectorize("i"), "loop 'i' of n iterations cannot be vectorized; split"),
    (SUM, lambda s: s.bind("i", "core"), "unknown axis 'core'; there are block_x"),
    (
        SUM,
        lambda s: s.reorder("i", "j"),
        "loop 'j' does not stand directly inside of loop 'i', whose body is 2 statements",
    ),
    (SUM, lambda s: s.reorder("i", "i"), "reorder takes loops of different names, got i, i"),
    (SUM, lambda s: s.fuse("i", "j"), "loop 'j' is not the whole body of loop 'i', which is 2 statements; distribute"),
    (SUM, lambda s: s.distribute("j"), "loop 'j' has one statement, a Store, to distribute"),
    (SUM, lambda s: s.stage("y", "i"), "there is no buffer 'y'; there are x, out"),
    (SUM, lambda s: s.stage("x", "i"), r"a local copy of x in loop 'i' would have the shape \(1, m\); split"),
    (SUM, lambda s: s.stage("x", "i", order=(1, 1)), r"order \(1, 1\) of a copy of x is no permutation"),
    (SUM, lambda s: s.compute_at("t", "i"), "no buffer 't' is allocated in the program; allocated are none"),
    (
        SUM,
        lambda s: s.tensorize("j", "vnni"),
        "unknown intrinsic 'vnni'; there are fma, dot4_words, lookup_bytes, word, dot4_u8s8, dot2_i16, dot2_bf16",
    ),
    (SUM, lambda s: s.tensorize("j", "fma"), "loop 'j' adds no product to out"),
    (SUM, lambda s: s.split_reduction("i", 4), "the body of loop 'i' is 2 statements, not one combining store"),
    (SUM, lambda s: s.split_reduction("j", 400), "1 vectors of 400 partial results of loop 'j'; at most 256"),
    (WINDOW, lambda s: s.split_reduction("k", 4), "loop 'k' combines into out at an index that moves with it"),
    (SUM, lambda s: s.pack("x", (0, (1, "//", 2), (1, "%", 4))), "axis 1 of buffer x must occur once"),
    (SUM, lambda s: s.pack("x", (0, 2)), "2 is no part of buffer x of 2 dimensions"),
    (
        TRIANGLE,
        lambda s: s.reorder("j_1", "i_1"),
        r"'j_1' cannot stand outside of loop 'i_1': its extent i_1 \+ 1 depends",
    ),
    (
        TRIANGLE,
        lambda s: s.fuse("i_1", "j_1"),
        r"cannot be fused: the extent i_1 \+ 1 of the inner one changes with 'i_1'",
    ),
    (
        GROWING,
        lambda s: s.decompose_reduction("t", "i"),
        r"loop 'k' inside of the reduction into t has the extent i \+ 1",
    ),
    (GROWING, lambda s: s.decompose_reduction("t", "k"), "the body of loop 'k' is a Store, not the reduction into t"),
    (
        SIGNED,
        lambda s: s.tensorize("k", "dot2_bf16"),
        "loop 'k' has 4 iterations, and dot2_bf16 adds 2 products; split",
    ),
    (SIGNED, lambda s: s.tensorize("k", "fma"), "fma is of floats; out is int32"),
    (
        LANES,
        lambda s: s.tensorize("k", "fma"),
        "the lanes of loop 'k' add to one element of out, of which fma would keep the last lane's sum; split_reduction",
    ),
]


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_what_has_no_meaning_is_refused(number: int) -> None:
    given, step, message = FORMS[number]
    s = Schedule(given)
    with pytest.raises(ScheduleError, match=message):
        step(s)
    assert s.steps == []


def test_a_loop_changes_its_kind_once() -> None:
    s = Schedule(SUM)
    s.parallelize("i")
    for step in (lambda: s.bind("i", "block_x"), lambda: s.parallelize("i")):
        with pytest.raises(ScheduleError, match="loop 'i' is parallel already and cannot be made"):
            step()
    s = Schedule(WINDOW)
    s.vectorize("k")
    with pytest.raises(ScheduleError, match="loop 'k' is vectorized already and cannot be split"):
        s.split("k", 4)


def test_reordering_keeps_parallel_loops_independent() -> None:
    """Each row depends on the one before, so that columns run in parallel only inside of the loop over rows."""
    rows = text(
        "x: i32[n, m], out: i32[n + 1, m + 1]",
        """
for c in serial(n + 1):
    for d in serial(m + 1):
        out[c, d] = int32(1)
for i in serial(n):
    for j in serial(m):
        out[i + 1, j + 1] = out[i, j] - x[i, j]
""",
    )
    s = Schedule(rows)
    s.reorder("j", "i")
    s = Schedule(rows)
    s.parallelize("j")
    with pytest.raises(ScheduleError, match="loop 'j' is parallel and could not stay so: the load of out"):
        s.reorder("j", "i")


def test_a_gpu_axis_is_no_loop_of_a_cpu() -> None:
    s = Schedule(SUM)
    s.bind("i", "block_x")
    verify_program("p", s.program())
    np.testing.assert_array_equal(results(s.program()), results(SUM))
    with pytest.raises(CodegenError, match="loop i is bound to block_x, an axis of a GPU, which a CPU does not have"):
        NativeKernel(s.program())
    s = Schedule(WAVE)
    s.bind("c", "block_x")
    with pytest.raises(ScheduleError, match="loop 'd' cannot be bound to block_x: a loop around or inside"):
        s.bind("d", "block_x")


def test_a_sum_of_nothing_touches_no_element() -> None:
    """With n = 5 the last loop does not run, and the element that it would add to does not exist."""
    s = Schedule(EMPTY)
    s.split_reduction("k", 2)
    wanted = results(EMPTY)
    assert wanted.shape == (N,)
    np.testing.assert_array_equal(results(s.program()), wanted)


def test_fusing_a_triangle_would_lose_its_bound() -> None:
    outer = find_loop(Schedule(TRIANGLE).program().body, "i_1")
    assert isinstance(outer.body, For)
    fused = rewrite.fuse(outer, outer.body)
    assert "is not bound here" in results(replace(TRIANGLE, body=fused))
