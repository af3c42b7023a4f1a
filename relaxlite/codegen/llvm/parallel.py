"""Parallel loops: the body is outlined to a function that the runtime's thread pool calls once per chunk.

Chunks are contiguous and of equal size: one per thread, or CHUNKS_PER_THREAD from MANY_THREADS threads on, for load
balancing among threads of unequal speed (docs/measurements/cpus.md, chunks_per_thread). There are fewer where a chunk
would have less than MIN_CHUNK_WORK, down to one, which the caller runs itself. Captured pointers and symbols are passed
in an array of 8-byte slots on the caller's stack; a slot is created at the first use in the body.
"""

from __future__ import annotations

from collections.abc import Callable

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, Lines, Val, int_const
from relaxlite.codegen.llvm.indices import BufferBase, Indices, Variable
from relaxlite.codegen.llvm.loops import branch, count_loop
from relaxlite.codegen.llvm.work import work_of
from relaxlite.ir.program import Buffer, For, Stmt
from relaxlite.ir.symbolic import SymVar

MIN_CHUNK_WORK = 8192  # instructions of a chunk, a few microseconds: less does not pay for waking a thread
MANY_THREADS, CHUNKS_PER_THREAD = 8, 4


class _Captures:
    """Captured values of an outlined body: the values that the caller stores, and the loads in the body."""

    def __init__(self, child: Emitter) -> None:
        self.child = child
        self.values: list[Val] = []
        self.prelude: Lines = child.reserve()

    def take(self, value: Val, hint: str) -> Val:
        """Capture a value of the caller; returns its load in the body."""
        slot = len(self.values)
        self.values.append(value)
        with self.child.place(self.prelude):
            address = self.child.op(f"getelementptr i64, ptr %context, i64 {slot}", "ptr", 0, "slot")
            return self.child.op(f"load {value.elem}, {address}, align 8", value.elem, 0, hint)


class _Variables(dict[SymVar, Variable]):
    """Variables of an outlined body; variables of the caller are captured at their first use."""

    def __init__(self, outer: dict[SymVar, Variable], captures: _Captures) -> None:
        super().__init__()
        self.outer, self.captures = outer, captures

    def __missing__(self, var: SymVar) -> Variable:
        outer = self.outer[var]
        value = outer.value if outer.value.is_const else self.captures.take(outer.value, var.name)
        self[var] = Variable(value, 0, outer.bounds, outer.is_data)
        return self[var]

    def __contains__(self, var: object) -> bool:
        return super().__contains__(var) or var in self.outer


class _Bases(dict[Buffer, BufferBase]):
    """Buffers of an outlined body; buffers of the caller are captured at their first use."""

    def __init__(self, outer: dict[Buffer, BufferBase], captures: _Captures) -> None:
        super().__init__()
        self.outer, self.captures = outer, captures

    def __missing__(self, buffer: Buffer) -> BufferBase:
        outer = self.outer[buffer]
        self[buffer] = BufferBase(self.captures.take(outer.pointer, buffer.name), 0, outer.elem)
        return self[buffer]


def emit_parallel(k: KernelContext, stmt: For, emit_statement: Callable[[KernelContext, Stmt], None]) -> None:
    """Emit a parallel loop: outline its body, and call relaxlite_parallel_for with the captured values."""
    e = k.e
    e.comment(f"for {stmt.var} in range({stmt.extent}), parallel")
    extent = k.ix.value(stmt.extent)
    threads = e.call("relaxlite_num_threads", [], "i64", 0, "threads")
    max_chunks = e.binary("mul", threads, int_const(CHUNKS_PER_THREAD))
    max_chunks = e.select(e.icmp("sge", threads, int_const(MANY_THREADS)), max_chunks, threads, "shares")
    chunks_by_work = k.ix.value(work_of(stmt) // MIN_CHUNK_WORK + 1)
    chunks = e.intrinsic("smin", e.intrinsic("smin", extent, max_chunks), chunks_by_work, hint="chunks")
    name = f"{k.name}.{e.fresh(f'{stmt.var.name}_chunk')}"
    captured = _outline(k, stmt, name, extent, chunks, emit_statement)

    def start() -> None:
        context = k.stack_array("context", "i64", len(captured))
        for slot, value in enumerate(captured):
            address = e.op(f"getelementptr i64, {context}, i64 {slot}", "ptr", 0, "slot")
            e.line(f"store {value}, {address}, align 8")
        status = e.call("relaxlite_parallel_for", [Val(f"@{name}", "ptr"), context, chunks], "i32", 0, "status")
        k.return_if(e.icmp("ne", status, int_const(0, "i32")), status)

    branch(k, e.icmp("sgt", extent, int_const(0)), start)


def _outline(
    k: KernelContext,
    stmt: For,
    name: str,
    extent: Val,
    chunks: Val,
    emit_statement: Callable[[KernelContext, Stmt], None],
) -> list[Val]:
    """Emit the function that runs one chunk; returns the captured values."""
    e = Emitter(k.e.module)
    e.start("entry")
    entry = e.reserve()
    captures = _Captures(e)
    ix = Indices(e)
    ix.variables = _Variables(k.ix.variables, captures)
    ix.bases = _Bases(k.ix.bases, captures)
    ix.constants = dict(k.ix.constants)
    child = KernelContext(
        name,
        e,
        ix,
        k.checks,
        entry,
        is_checked=k.is_checked,
        in_parallel=True,
        prefetch_distances=k.prefetch_distances,
        ordered_buffers=k.ordered_buffers,
    )
    with ix.scope():
        extent, chunks = (captures.take(v, hint) for v, hint in ((extent, "extent"), (chunks, "chunks")))
        chunk = Val("%chunk", "i64")
        start, end = (
            e.binary("udiv", e.binary("mul", c, extent), chunks, hint)
            for c, hint in ((chunk, "start"), (e.binary("add", chunk, int_const(1)), "end"))
        )
        count_loop(child, stmt, start, end, lambda: emit_statement(child, stmt.body))
    child.finish()
    e.module.add_function(f"define internal i32 @{name}(ptr %context, i64 %chunk)", e)
    return captures.values
