"""Loads and stores. The dependence of an address on the lane selects the instructions:

    uniform              a scalar access
    contiguous           a vector access, masked where lanes are inactive
    stride 2, reversed   vector loads and a shuffle; stride 2 also under a mask
    other strides        one scalar access per lane, which is faster than gather and scatter (docs/measurements/cpus.md,
                         strided_access); gather and scatter under a mask
    anything else        gather and scatter

A masked load never touches memory for an inactive lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from relaxlite.codegen.llvm import scalars
from relaxlite.codegen.llvm.context import Access, KernelContext, LoadKey
from relaxlite.codegen.llvm.emitter import TRUE, Emitter, Val, bits_of, int_const, mangle
from relaxlite.codegen.llvm.indices import split_lane
from relaxlite.codegen.llvm.math_double import gather
from relaxlite.codegen.llvm.types import from_memory, to_memory
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import Buffer
from relaxlite.ir.symbolic import SymExpr, as_int, product


def classify_access(k: KernelContext, buffer: Buffer, indices: tuple[SymExpr, ...]) -> Access:
    """Classify an access by the dependence of its address on the lane; memoized per values of unrolled variables."""
    flat = k.offsets.get((buffer, indices))
    if flat is None:
        flat = k.offsets[buffer, indices] = flat_offset(buffer.shape, indices)
    fixed = k.ix.constants
    key = (buffer, flat, k.lane, k.lanes, tuple([fixed[v] for v in flat.free_vars() if v in fixed]))
    access = k.accesses.get(key)
    if access is None:
        access = k.accesses[key] = _classify(k, buffer, k.ix.resolve(flat))
    return access


def _classify(k: KernelContext, buffer: Buffer, offset: SymExpr) -> Access:
    if buffer in k.per_lane:
        assert k.lane is not None
        offset = offset * k.lanes + k.lane
    varying = {v: k.ix.variables[v].value.lanes > 0 for v in offset.free_vars()}
    if not any(varying.values()):
        return Access(buffer, "uniform", offset, offset)
    assert k.lane is not None
    parts = split_lane(offset, k.lane, varying)
    if parts is None:
        return Access(buffer, "scattered", offset, offset)
    base, stride = parts
    if as_int(stride) == 1:
        return Access(buffer, "contiguous", offset, base, stride)
    return Access(buffer, "uniform" if as_int(stride) == 0 else "strided", offset, base, stride)


def load(k: KernelContext, access: Access) -> Val:
    """Load an element per lane, or a scalar for a uniform access, in register form; forwards known values."""
    key = _key(k, access)
    if key not in k.loads and access.kind == "strided":
        _transpose_on_load(k, access)
    if key not in k.loads:
        _remember(k, access, from_memory(k.e, _load_raw(k, access), access.buffer.dtype))
    return k.loads[key]


def _remember(k: KernelContext, access: Access, value: Val) -> None:
    """Record the value in memory, for forwarding to later loads until a store may overlap."""
    key, base = _key(k, access), as_int(access.base)
    k.loads[key] = value
    if access.kind == "contiguous" and base is not None:
        k.vector_offsets[key] = base


def _key(k: KernelContext, access: Access) -> LoadKey:
    """Key of an access in `KernelContext.loads`."""
    mask = None if access.kind == "uniform" and k.some_active else k.mask
    lanes = 0 if access.kind == "uniform" else k.lanes
    return access.buffer, access.offset, lanes, mask.text if mask is not None else ""


def _transpose_on_load(k: KernelContext, access: Access) -> None:
    """Transpose a square tile in registers, where a column of it is loaded and all its rows are in registers."""
    lanes, base = k.lanes, as_int(access.base)
    is_column = access.stride is not None and as_int(access.stride) == lanes and k.mask is None
    if not is_column or base is None or access.buffer.shape != (lanes, lanes):
        return
    vectors = {key: value for key, value in k.loads.items() if key in k.vector_offsets}
    rows = {
        k.vector_offsets[key]: v for key, v in vectors.items() if key[0] is access.buffer and key[2:] == (lanes, "")
    }
    if any(row * lanes not in rows for row in range(lanes)):
        return
    columns = _transpose(k.e, [rows[row * lanes] for row in range(lanes)])
    for column, value in enumerate(columns):
        k.loads[access.buffer, access.offset + (column - base), lanes, ""] = value


def _transpose(e: Emitter, rows: list[Val]) -> list[Val]:
    """Transpose a square of vectors by log2(lanes) steps of shuffles, which exchange off-diagonal blocks, largest
    first."""
    lanes = len(rows)
    rows, width = list(rows), lanes // 2
    while width:
        for row in range(lanes):
            if row & width:
                continue
            a, b = rows[row], rows[row + width]
            rows[row] = _shuffle(a, b, (lanes + c - width if c & width else c for c in range(lanes)), e)
            rows[row + width] = _shuffle(a, b, (lanes + c if c & width else c + width for c in range(lanes)), e)
        width //= 2
    return rows


def _load_raw(k: KernelContext, access: Access) -> Val:
    e = k.e
    if access.kind == "uniform":
        if k.some_active:
            return _load_scalar(k, access)
        assert k.mask is not None
        zero = e.number(0, Val("", access.elem))
        return e.if_value(e.any_lane(k.mask), lambda: _load_scalar(k, access), lambda: zero, access.buffer.name)
    if access.kind == "contiguous":
        return _load_vector(k, access)
    if access.kind == "strided" and (k.mask is None or _has_stride_2(access)):
        return _load_strided(k, access)
    mask = k.mask if k.mask is not None else e.splat(TRUE, k.lanes)
    return gather(e, _lane_pointers(k, access), access.elem, access.align, mask)


def _load_scalar(k: KernelContext, access: Access) -> Val:
    pointer = k.ix.pointer(access.buffer, access.base)
    return k.e.op(f"load {access.elem}, {pointer}, align {access.align}", access.elem, 0, access.buffer.name)


def _prefetch_at_distance(k: KernelContext, pointer: Val, count: int) -> None:
    """Prefetch the cache line `count` bytes behind an address into L2; prefetches of invalid addresses do not fault."""
    prefetch(k, k.e.op(f"getelementptr i8, {pointer}, i64 {count}", "ptr", 0, "ahead"))


def prefetch(k: KernelContext, address: Val, cache: int = 2) -> None:
    """Emit a prefetch of the cache line at an address into cache level `cache`."""
    for_reading, locality, data = (int_const(number, "i32") for number in (0, 4 - cache, 1))
    k.e.call_void("llvm.prefetch.p0", [address, for_reading, locality, data])


def _load_vector(k: KernelContext, access: Access) -> Val:
    e, lanes = k.e, k.lanes
    pointer = k.ix.pointer(access.buffer, access.base)
    if access.buffer in k.prefetch_distances:
        _prefetch_at_distance(k, pointer, k.prefetch_distances[access.buffer])
    if k.mask is None or _is_in_bounds(k, access):
        ty = f"<{lanes} x {access.elem}>"
        kind = "load volatile" if access.buffer in k.ordered_buffers else "load"  # LLVM does not reorder volatile loads
        return e.op(f"{kind} {ty}, {pointer}, align {access.align}", access.elem, lanes, access.buffer.name)
    return _load_masked(k, access, pointer, k.mask)


def _load_masked(k: KernelContext, access: Access, pointer: Val, mask: Val) -> Val:
    e, lanes = k.e, k.lanes
    zero = e.splat(e.number(0, Val("", access.elem)), lanes)
    name = f"llvm.masked.load.{mangle(access.elem, lanes)}.p0"
    arguments = [pointer, int_const(access.align, "i32"), mask, zero]
    return e.call(name, arguments, access.elem, lanes, access.buffer.name)


def _has_stride_2(access: Access) -> bool:
    return access.stride is not None and as_int(access.stride) == 2


def _load_strided(k: KernelContext, access: Access) -> Val:
    e, lanes = k.e, k.lanes
    if access.stride is not None and as_int(access.stride) == -1:
        reverse = _load_at(k, access, access.base - (lanes - 1))
        return _shuffle(reverse, reverse, range(lanes - 1, -1, -1), e)
    if _has_stride_2(access):  # two vectors, the second ending with the last element, so nothing beyond is read
        offsets = access.base, access.base + (lanes - 1)
        first, second = (_load_at(k, access, at, _even_mask(k, is_last)) for is_last, at in enumerate(offsets))
        return _shuffle(first, second, (2 * c if 2 * c < lanes else 2 * c + 1 for c in range(lanes)), e)
    result = Val("poison", access.elem, lanes)
    for lane in range(lanes):
        pointer = _lane_pointer(k, access, lane)
        element = e.op(f"load {access.elem}, {pointer}, align {access.align}", access.elem, 0, access.buffer.name)
        result = e.op(f"insertelement {result}, {element}, i64 {lane}", access.elem, lanes)
    return result


def _even_mask(k: KernelContext, is_last: int) -> Val | None:
    """Mask of the first or last of the two vectors of a stride-2 load; None without a mask."""
    if k.mask is None:
        return None
    last = k.lanes - 1
    lanes = ((j + is_last * last) // 2 if (j + is_last * last) % 2 == 0 else k.lanes for j in range(k.lanes))
    return _shuffle(k.mask, k.e.splat(int_const(0, "i1"), k.lanes), lanes, k.e)


def _load_at(k: KernelContext, access: Access, offset: SymExpr, mask: Val | None = None) -> Val:
    pointer = k.ix.pointer(access.buffer, offset)
    if mask is not None:
        return _load_masked(k, access, pointer, mask)
    ty = f"<{k.lanes} x {access.elem}>"
    return k.e.op(f"load {ty}, {pointer}, align {access.align}", access.elem, k.lanes, access.buffer.name)


def _shuffle(a: Val, b: Val, chosen: Iterable[int], e: Emitter) -> Val:
    """Shuffle: select lanes of a (0 ... lanes-1) and b (lanes ... 2*lanes-1)."""
    mask = ", ".join(f"i32 {c}" for c in chosen)
    return e.op(f"shufflevector {a}, {b}, <{a.lanes} x i32> <{mask}>", a.elem, a.lanes)


def _lane_pointer(k: KernelContext, access: Access, lane: int) -> Val:
    """Address of one lane's element of a strided access."""
    assert access.stride is not None
    if access.stride.is_const:
        return k.ix.pointer(access.buffer, access.base + access.stride * lane)
    base, distance = k.ix.pointer(access.buffer, access.base), k.ix.value(access.stride * lane)
    return k.e.op(f"getelementptr {access.elem}, {base}, {distance}", "ptr", 0, f"{access.buffer.name}_lane")


def _is_in_bounds(k: KernelContext, access: Access) -> bool:
    """Whether all lanes, active or not, lie inside a local buffer, so that unmasked access is safe."""
    size = as_int(product(access.buffer.shape))
    if access.buffer.scope != "local" or size is None:
        return False
    if access.buffer in k.per_lane:
        size *= k.lanes
    lower, upper = k.ix.bounds(access.offset)
    return lower is not None and upper is not None and lower >= 0 and upper < size


def _lane_pointers(k: KernelContext, access: Access) -> Val:
    base = k.ix.bases[access.buffer].pointer
    offsets = k.ix.value(access.offset)
    return k.e.op(f"getelementptr {access.elem}, {base}, {offsets}", "ptr", k.lanes, f"{access.buffer.name}_lanes")


def store(k: KernelContext, access: Access, value: Val, *, nontemporal: bool = False, is_rounded: bool = False) -> None:
    """Store a value in register form, and invalidate known loads that may overlap.

    A vector stored without conversion is forwarded to later loads: store-to-load forwarding of the CPU is slower, above
    all from masked stores. `is_rounded`: a 16-bit float is already rounded.
    """
    raw = to_memory(k.e, value, access.buffer.dtype, is_rounded=is_rounded)
    if access.kind == "uniform":
        _store_uniform(k, access, raw)
    elif access.kind == "contiguous":
        _store_vector(k, access, k.e.splat(raw, k.lanes), nontemporal=nontemporal)
    else:
        _scatter(k, access, k.e.splat(raw, k.lanes))
    forget_overlapping(k, access.buffer, as_int(access.base) if access.kind == "contiguous" else None)
    if access.kind == "contiguous" and raw is value:
        _remember(k, access, k.e.splat(value, k.lanes))


def forget_overlapping(k: KernelContext, buffer: Buffer, place: int | None = None) -> None:
    """Invalidate known loads that a store to `buffer` may overlap.

    Local buffers do not alias; any two others may (results in place). `place`: the first element of the only vector of
    the local buffer that is written.
    """
    if buffer.scope == "local":
        stale = [key for key in k.loads if key[0] is buffer and not _is_disjoint(k, key, place)]
    else:
        stale = [key for key in k.loads if key[0].scope != "local"]
    for key in stale:
        del k.loads[key]


def _is_disjoint(k: KernelContext, key: LoadKey, place: int | None) -> bool:
    """Whether a known vector is disjoint from a vector that begins at element `place`."""
    known = k.vector_offsets.get(key)
    return place is not None and known is not None and (place + k.lanes <= known or known + key[2] <= place)


def _store_uniform(k: KernelContext, access: Access, raw: Val) -> None:
    """Store to one element: the value of the last active lane."""
    if raw.lanes and k.mask is not None:
        _scatter(k, access, raw)
    else:
        scalar, pointer = k.e.extract(raw, k.lanes - 1), k.ix.pointer(access.buffer, access.base)
        k.e.line(f"store {scalar}, {pointer}, align {access.align}")


def _store_vector(k: KernelContext, access: Access, raw: Val, *, nontemporal: bool = False) -> None:
    e = k.e
    pointer = k.ix.pointer(access.buffer, access.base)
    if nontemporal and k.mask is None and _fills_register(k, raw):
        _store_nontemporal(k, access, raw, pointer)
        return
    if k.mask is not None and not _is_in_bounds(k, access):
        mask = k.mask
        if raw.elem in ("i8", "i16", "i32") and e.target.has("avx512f") and mask.text not in k.ix.dynamic_masks:
            mask = _opaque(e, mask)
        name = f"llvm.masked.store.{mangle(access.elem, k.lanes)}.p0"
        e.call_void(name, [raw, pointer, int_const(access.align, "i32"), mask])
        return
    if k.mask is not None:
        old = e.op(f"load {raw.ty}, {pointer}, align {access.align}", raw.elem, raw.lanes, access.buffer.name)
        raw = e.select(k.mask, raw, old)
    e.line(f"store {raw}, {pointer}, align {access.align}")


def _opaque(e: Emitter, mask: Val) -> Val:
    """Hide a constant mask from LLVM by empty inline assembly.

    Works around a miscompilation up to LLVM 22.1: a truncated vector, stored under a constant mask of one lane, writes
    that lane in its width before truncation (https://github.com/llvm/llvm-project/issues/179489).
    """

    def hidden(part: Val) -> Val:
        bits, integer = f"i{part.lanes}", "i64" if part.lanes > 32 else "i32"
        narrow = e.op(f"bitcast {part} to {bits}", bits)
        operand = narrow if bits == integer else e.op(f"zext {narrow} to {integer}", integer)
        result = e.op(f'call {integer} asm "", "=r,0"({operand})', integer)
        bits_after = result if bits == integer else e.op(f"trunc {result} to {bits}", bits)
        return e.op(f"bitcast {bits_after} to <{part.lanes} x i1>", "i1", part.lanes, "mask")

    return e.by_subvectors([mask], mask.lanes if mask.lanes <= 64 else math.gcd(mask.lanes, 64), hidden)


def _fills_register(k: KernelContext, raw: Val) -> bool:
    """Whether a vector fills exactly one register, as nontemporal stores require."""
    return raw.lanes * bits_of(raw.elem) in (128, 256, 512) and raw.lanes * bits_of(raw.elem) <= k.e.target.vector_bits


def _store_nontemporal(k: KernelContext, access: Access, raw: Val, pointer: Val) -> None:
    """Emit a nontemporal store where the address is aligned at run time, else a plain store."""
    e, size = k.e, raw.lanes * bits_of(raw.elem) // 8
    address = e.op(f"ptrtoint {pointer} to i64", "i64", 0, "address")
    is_aligned = e.icmp("eq", e.binary("and", address, int_const(size - 1)), int_const(0), "is_aligned")
    around, through, done = e.fresh("around"), e.fresh("through"), e.fresh("stored")
    e.branch_if(is_aligned, around, through)
    e.start(around)
    e.line(f"store {raw}, {pointer}, align {size}, !nontemporal {e.module.nontemporal_node()}")
    e.branch(done)
    e.start(through)
    e.line(f"store {raw}, {pointer}, align {access.align}")
    e.branch(done)
    e.start(done)
    k.needs_fence = True


def _scatter(k: KernelContext, access: Access, raw: Val) -> None:
    """Scatter in the order of lanes: of two lanes with the same element, the later one wins."""
    e, lanes = k.e, k.lanes
    if access.kind == "strided" and k.mask is None:
        for lane in range(lanes):
            pointer, element = _lane_pointer(k, access, lane), e.extract(raw, lane)
            e.line(f"store {element}, {pointer}, align {access.align}")
        return
    mask = k.mask if k.mask is not None else e.splat(TRUE, lanes)
    is_uniform = access.kind == "uniform"
    pointers = k.ix.pointer(access.buffer, access.base) if is_uniform else _lane_pointers(k, access)
    name = f"llvm.masked.scatter.{mangle(access.elem, lanes)}.{mangle('ptr', lanes)}"
    e.call_void(name, [raw, e.splat(pointers, lanes), int_const(access.align, "i32"), mask])


def lane_is_active(k: KernelContext, lane: int) -> Val:
    """Bit of a lane in the mask; TRUE without a mask."""
    return TRUE if k.mask is None else k.e.extract(k.mask, lane)


def combine_at(k: KernelContext, pointer: Val, access: Access, combine: str, value: Val) -> None:
    """Emit a read-modify-write: combine `value` into the element at an address."""
    dtype = access.buffer.dtype
    raw = k.e.op(f"load {access.elem}, {pointer}, align {access.align}", access.elem, 0, access.buffer.name)
    total = scalars.combine(k.e, combine, dtype, from_memory(k.e, raw, dtype), value)
    k.e.line(f"store {to_memory(k.e, total, dtype)}, {pointer}, align {access.align}")
