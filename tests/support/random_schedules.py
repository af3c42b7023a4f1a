"""Random steps of schedules on random programs: any primitive, on any loop or buffer, with any argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from relaxlite.errors import ScheduleError
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    For,
    Literal,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    loops,
    seq,
)
from relaxlite.ir.program import reduce as reduce_loops
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import SymVar
from relaxlite.passes.schedule.primitives import Schedule
from tests.support.random_programs import Draw, M, N, make

FACTORS = (1, 2, 3, 4, 8)


def draw_step(draw: Draw, s: Schedule) -> Callable[[], Any]:
    """A call of a primitive, which may be refused; one that has a chance where there is one."""
    program = s.program()
    found = {stmt.var.name: stmt for stmt in walk_stmts(program.body) if isinstance(stmt, For)}
    local = [stmt.buffer.name for stmt in walk_stmts(program.body) if isinstance(stmt, Allocate)]
    buffers = [b.name for b in program.params] + local
    kind = draw(st.sampled_from(KINDS))
    fitting = [name for name, stmt in found.items() if FITS.get(kind, lambda loop: True)(stmt)]
    names = fitting if fitting and draw(st.integers(0, 9)) else list(found)
    if not names:
        return lambda: None
    loop = draw(st.sampled_from(names))
    nest = nest_below(found[loop])
    buffer = draw(st.sampled_from(local if local and kind in ("compute_at", "decompose_reduction") else buffers))
    factor = draw(st.sampled_from(FACTORS))
    steps: dict[str, Callable[[], Any]] = {
        "split": lambda: s.split(loop, factor, tail=draw(st.sampled_from(("cut", "mask", "even", "none")))),
        "fuse": lambda: s.fuse(loop, nest[min(1, len(nest) - 1)]),
        "reorder": lambda: s.reorder(*draw(st.permutations(nest))),
        "distribute": lambda: s.distribute(loop),
        "predicate": lambda: s.predicate(loop, factor),
        "specialize": lambda: s.specialize(loop, *draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))),
        "unroll": lambda: s.unroll(loop),
        "vectorize": lambda: s.vectorize(loop),
        "parallelize": lambda: s.parallelize(loop),
        "stage": lambda: s.stage(
            buffer, loop, scope=draw(st.sampled_from(("local", "global"))), order=order(draw, s, buffer)
        ),
        "compute_at": lambda: s.compute_at(buffer, loop),
        "decompose_reduction": lambda: s.decompose_reduction(buffer, *nest[draw(st.integers(0, len(nest) - 1)) :]),
        "split_reduction": lambda: s.split_reduction(loop, factor, draw(st.integers(1, 3))),
        "pack": lambda: s.pack(buffer, layout(draw, s, buffer)),
        "tensorize": lambda: s.tensorize(loop, draw(st.sampled_from(("fma", "dot4_u8s8", "dot2_bf16")))),
    }
    return steps[kind]


KINDS = (
    *("split", "reorder", "distribute", "stage", "compute_at", "decompose_reduction", "vectorize", "parallelize") * 2,
    *("fuse", "pack", "split_reduction", "tensorize", "predicate", "specialize", "unroll", "unroll"),
)
FITS: dict[str, Callable[[For], bool]] = {
    "distribute": lambda loop: isinstance(loop.body, Seq),
    "reorder": lambda loop: isinstance(loop.body, For),
    "fuse": lambda loop: isinstance(loop.body, For),
    "unroll": lambda loop: loop.extent.is_const,
    "vectorize": lambda loop: loop.extent.is_const,
    "decompose_reduction": lambda loop: loop.extent.is_const,
    "split_reduction": lambda loop: isinstance(loop.body, Store),
    "tensorize": lambda loop: isinstance(loop.body, Store) and loop.body.combine == "add",
}


def attempt(step: Callable[[], Any]) -> bool:
    """Whether the step was accepted."""
    try:
        step()
    except ScheduleError:
        return False
    return True


def rank_of(s: Schedule, name: str) -> int:
    program = s.program()
    buffers = [*program.params, *(x.buffer for x in walk_stmts(program.body) if isinstance(x, Allocate))]
    return next(len(b.shape) for b in buffers if b.name == name)


def nest_below(loop: For) -> list[str]:
    """The loop and those directly inside of each other below it."""
    found = [loop.var.name]
    while isinstance(loop.body, For):
        loop = loop.body
        found.append(loop.var.name)
    return found


def order(draw: Draw, s: Schedule, buffer: str) -> tuple[int, ...] | None:
    return None if draw(st.booleans()) else tuple(draw(st.permutations(range(rank_of(s, buffer)))))


def layout(draw: Draw, s: Schedule, buffer: str) -> tuple[Any, ...]:
    terms: list[Any] = []
    for axis in range(rank_of(s, buffer)):
        factor = draw(st.sampled_from((0, 2, 3, 4)))
        terms += [(axis, "//", factor), (axis, "%", factor)] if factor else [axis]
    return tuple(draw(st.permutations(terms)))


@st.composite
def pipelines(draw: Draw) -> TensorProgram:
    """A stage that fills a scratch buffer, and one that reads it: what compute_at and distribute are for. One input may
    be read at more than a variable: a copy of a loop must have its own there."""
    stretch, offset = draw(st.sampled_from(((1, 0), (1, 0), (2, 1), (1, 3))))
    x, out = Buffer("x", (N, M), "int32"), Buffer("out", (N, M), "int32")
    y = Buffer("y", (N, M * stretch + offset), "int32")
    t = Buffer("t", draw(st.sampled_from(((N, M), (M,), (M, N)))), "int32")
    rank, is_swapped = len(t.shape), t.shape == (M, N)
    shift = draw(st.sampled_from((0, 0, 1)))

    def element(*i: SymVar) -> Stmt:
        at = (i[1], i[0]) if is_swapped else i if rank == 2 else (0, i[0])
        value = Binary("add", x[at], y[at[0], at[1] * stretch + offset])
        return Store(t, i, value)

    def use(i: SymVar, j: SymVar) -> Stmt:
        at = (j, i) if is_swapped else (i, j) if rank == 2 else (j,)
        value = Binary("mul", t[at], x[i, j])
        return Store(out, (i, j), value if not shift else Binary("sub", value, out[i, j]))

    fill = loops("ij", (N, M), lambda i, j: Store(out, (i, j), Literal(3, "int32")))
    parts = [loops("pq", t.shape, element), *([fill] if shift else []), loops("ij", (N, M), use)]
    if draw(st.booleans()):
        total = Buffer("t_sum", (), "int32", "local")
        inner = loops(
            "r",
            (M,),
            lambda r: Store(
                total, (), Binary("mul", x[0, r], t[(r, 0) if is_swapped else (0, r) if rank == 2 else (r,)]), "add"
            ),
        )
        first = Store(total, (), Literal(0, "int32"))
        last = loops("uv", (N, M), lambda i, j: Store(out, (i, j), total[()], "add"))
        parts.append(Allocate(total, seq(first, inner, last)))
    return make([x, y], [out], Allocate(t, seq(*parts)))


@st.composite
def in_place(draw: Draw) -> TensorProgram:
    """Loops that read what other iterations write: most primitives must refuse them."""
    x, out = Buffer("x", (N, M), "int32"), Buffer("out", (N + 2, M + 2), "int32")
    (di, dj), (ei, ej) = (draw(st.tuples(st.integers(-1, 1), st.integers(-1, 1))) for _ in range(2))
    is_double, mixes = draw(st.booleans()), draw(st.sampled_from(("sub", "add", "max")))

    def step(i: SymVar, j: SymVar) -> Stmt:
        first = Store(out, (i + 1, j + 1), Binary(mixes, x[i, j], out[i + 1 + di, j + 1 + dj]))
        second = Store(out, (i + 1 + ei, j + 1 + ej), Binary("sub", out[i + 1, j + 1], x[i, j]))
        return seq(first, second) if is_double else first

    clear = loops("cd", out.shape, lambda i, j: Store(out, (i, j), Literal(1, "int32")))
    return make([x], [out], seq(clear, loops("ij", (N, M), step)))


@st.composite
def dots(draw: Draw) -> TensorProgram:
    """Products of narrow elements in groups, for tensorize."""
    is_bytes = draw(st.booleans())
    count, (left, right), wide = (
        (4, ("uint8", "int8"), "int32") if is_bytes else (2, ("bfloat16", "bfloat16"), "float32")
    )
    a, b = Buffer.of("a", (N, M * count), left), Buffer.of("b", (3, M, 5, count), right)
    out = Buffer.of("out", (N, 3, 5), wide)

    def value(i: SymVar, p: SymVar, j: SymVar, k: SymVar, g: SymVar) -> Any:
        one, two = Cast(a[i, k * count + g], wide), Cast(b[p, k, j, g], wide)
        return Binary("mul", one, two) if draw(st.booleans()) else Binary("mul", two, one)

    body = reduce_loops(out, (M, count), "add", Literal(0, wide), value)
    return make([a, b], [out], body)
