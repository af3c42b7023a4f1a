"""The primitive `tensorize`: replace the innermost multiply-adds of a reduction by an intrinsic of ir/intrinsics.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.errors import ScheduleError
from relaxlite.ir.intrinsics import DOT_PRODUCTS, INTRINSICS, DotProduct
from relaxlite.ir.program import Allocate, Binary, Cast, For, Intrinsic, Load, Stmt, Store, Value
from relaxlite.ir.program_visitor import Substitute, loads
from relaxlite.ir.symbolic import as_int
from relaxlite.passes.schedule.primitives.tree import describe, path_to, replaced


def tensorize(root: Stmt, loop: For, name: str) -> Stmt:
    """Replace the multiply-adds of a loop by an intrinsic.

    "fma": for k: t += a*b  =>  for k: t = fma(a, b, t).
    A dot product of n elements: for k in n: t += wide(a[k]) * wide(b[k])  =>  t = dot(t, a[0].. , b[0]..), where the
    operands have the intrinsic's dtypes and are cast to that of t. Sums of floats are rounded in another order. Raises
    ScheduleError if the loop has another form.
    """
    if name not in INTRINSICS:
        raise ScheduleError(f"unknown intrinsic {name!r}; there are {', '.join(INTRINSICS)}")
    store = loop.body
    if not isinstance(store, Store) or store.combine != "add":
        raise ScheduleError(
            f"the body of loop {loop.var.name!r} is {describe(store)}, not one store that adds; reorder() the loop of "
            f"the "
            "reduction innermost"
        )
    if any(load.buffer is store.buffer for load in loads(store)):
        raise ScheduleError(f"loop {loop.var.name!r} adds to {store.buffer.name} what it reads from it")
    product = store.value
    if not isinstance(product, Binary) or product.op != "mul":
        raise ScheduleError(
            f"loop {loop.var.name!r} adds no product to {store.buffer.name}; {name} is a sum of products"
        )
    for outer in _lanes_around(root, loop, store, name):
        raise ScheduleError(
            f"the lanes of loop {outer.var.name!r} add to one element of {store.buffer.name}, of which {name} would "
            "keep the last lane's sum; split_reduction() gives each lane a partial result"
        )
    total = Load(store.buffer, store.indices)
    if name == "fma":
        if not dtypes.is_float(store.buffer.dtype):
            raise ScheduleError(f"fma is of floats; {store.buffer.name} is {store.buffer.dtype}")
        fused = Intrinsic("fma", (product.a, product.b, total), store.buffer.dtype)
        return replaced(root, loop, replace(loop, body=Store(store.buffer, store.indices, fused)))
    dot = DOT_PRODUCTS[name]
    a, b = _operands(loop, store, product, name, dot)
    factors = [Substitute({loop.var: k}).value(x) for x in (a, b) for k in range(dot.length)]
    value = Intrinsic(name, (total, *factors), dot.total)
    return replaced(root, loop, Store(store.buffer, store.indices, value))


def _lanes_around(root: Stmt, loop: For, store: Store, name: str) -> Iterator[For]:
    """The vectorized loops around the intrinsic whose lanes all combine into the same element."""
    path = path_to(root, loop)
    own = [k for k, stmt in enumerate(path) if isinstance(stmt, Allocate) and stmt.buffer is store.buffer]
    around = path[own[-1] if own else 0 :]
    used = {v for index in store.indices for v in index.free_vars()}
    for stmt in around if name == "fma" else around[:-1]:  # a dot product replaces its loop
        if isinstance(stmt, For) and stmt.kind == "vectorized" and stmt.var not in used:
            yield stmt


def _operands(loop: For, store: Store, product: Binary, name: str, dot: DotProduct) -> tuple[Value, Value]:
    """The narrow operands in the order of the intrinsic. Raises ScheduleError if they do not match it."""
    if as_int(loop.extent) != dot.length:
        raise ScheduleError(
            f"loop {loop.var.name!r} has {loop.extent} iterations, and {name} adds {dot.length} products; split() it"
        )
    if any(loop.var in index.free_vars() for index in store.indices):
        raise ScheduleError(
            f"loop {loop.var.name!r} stores to different elements of {store.buffer.name}; {name} adds to one"
        )
    if store.buffer.dtype != dot.total:
        raise ScheduleError(f"{name} adds to {dot.total}; {store.buffer.name} is {store.buffer.dtype}")
    for a, b in ((product.a, product.b), (product.b, product.a)):
        if isinstance(a, Cast) and isinstance(b, Cast) and (a.x.dtype, b.x.dtype) == (dot.a, dot.b):
            return a.x, b.x
    kinds = " and ".join(
        f"{x.x.dtype} as {x.dtype}" if isinstance(x, Cast) else x.dtype for x in (product.a, product.b)
    )
    raise ScheduleError(
        f"{name} multiplies {dot.a} and {dot.b}, cast to {dot.total}; loop {loop.var.name!r} has {kinds}"
    )
