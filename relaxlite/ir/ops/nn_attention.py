"""Scaled dot-product attention as one program with online softmax: the score matrix is never materialized.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867); Dao et al., "FlashAttention"
(arXiv 2205.14135). Loops over blocks of queries and, inside, blocks of keys:

    S[j, i] = sum over d of k[j, d] * scale*q[i, d] + bias[i, j]    a transposed block of scores: queries contiguous
    new[i] = max(row_max[i], max over j of S[j, i]);  rescale[i] = exp(row_max[i] - new[i])
    P[j, i] = exp(S[j, i] - new[i]);  total[i] = total[i]*rescale[i] + sum over j of P[j, i]
    O[e, i] = O[e, i]*rescale[i] + sum over j of v[j, e] * P[j, i]

and out[i, e] = O[e, i] / total[i]. Vector lanes are queries: both products are register tiles of broadcast elements of
k and v times vectors of queries, without reductions across lanes. For bfloat16 dot products of pairs, q, v and the
weights P are packed to pairs first; k has pairs in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr
from relaxlite.ir.intrinsics import DOT2_PACKED_BF16, NARROW, PACK_BF16
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import PROVER, Shape, broadcast_shapes, format_shape
from relaxlite.ir.ops.linalg import accumulator, emit_op, equality_checks, to_accumulator_dtype
from relaxlite.ir.ops.nn_norm import softmax_exp
from relaxlite.ir.ops.scalars import Scalar, identity, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, For, Intrinsic, Load, Select, Stmt, Store, Value, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smin, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

QUERY_BLOCKS = (64, 16)  # queries per block, which reads keys and values once; the smaller size is for the remainder
MAX_SINGLE_QUERIES = 4  # up to this remainder, queries are computed one by one, vectorized along keys and widths
KEY_BLOCK = 48  # keys per block: the scores stay in the L1 cache
SINGLE_QUERY_KEY_BLOCK = 256  # keys per block of a single query
MAX_WIDTH = 512  # widest q, k and v: blocks have to stay in the private caches of a core

Axes: TypeAlias = tuple[int, ...]


def fits_blocks(q: Shape, v: Shape) -> bool:
    """Whether q and v of these (transposed) shapes have constant widths, small enough for the blocked program."""
    return all((as_int(width) or MAX_WIDTH + 1) <= MAX_WIDTH for width in (q[-1], v[-1]))


@register
class Attention(Op):
    """Scaled dot-product attention: softmax(scale * q @ k^T + bias) @ v, q (..., m, d), k (..., n, d), v (..., n, e).

    q_axes, k_axes, v_axes and out_axes (None: identity) transpose operands and result (..., m, e) at no cost. Leading
    dimensions broadcast, and bias to (..., m, n). With grouped-query attention, `group` consecutive matrices of q along
    the third last dimension share one matrix of k and v. A bool mask, broadcast like the bias, replaces scores by
    `masked` where it equals `masked_where`, before the bias is added. Without keys (n = 0) the result is 0; with
    `zero_nan`, NaN weights become 0.

    Half-precision floats compute in float32, which may also be the dtype of bias and of the result: `dtype` is that or
    None, the dtype of q. With `rounds`, weights may be rounded to bfloat16, so that blocks use dot products of pairs.
    """

    name = "attention"
    operands = ("q", "k", "v", "bias_or_mask?", "mask?")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "scale": Attr("float", 1.0), "q_axes": Attr("ints", None), "k_axes": Attr("ints", None),
        "v_axes": Attr("ints", None), "out_axes": Attr("ints", None), "group": Attr("int", 1),
        "masked": Attr("float", 0.0), "masked_where": Attr("bool", False),
        "zero_nan": Attr("bool", False), "rounds": Attr("bool", False), "dtype": Attr("dtype", None),
    }  # fmt: skip

    def infer(self, q: Expr, k: Expr, v: Expr, *added: Expr, **attrs: Any) -> Type:
        types = [self.tensor(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        dtype = types[0].dtype
        if len({t.dtype for t in types}) > 1 or not dtypes.is_float(dtype):
            self.fail(f"q, k and v must have one float dtype, got {', '.join(t.dtype for t in types)}")
        if len({len(t.shape or ()) for t in types}) > 1 or len(types[0].shape or ()) < 2:
            self.fail(f"q, k and v must have one rank of at least 2, got {', '.join(map(str, types))}")
        qs, ks, vs = self._views([t.shape or () for t in types], attrs)
        if PROVER.can_prove_ne(qs[-1], ks[-1]) or PROVER.can_prove_ne(ks[-2], vs[-2]):
            shapes = ", ".join(map(format_shape, (qs, ks, vs)))
            self.fail(f"q, k and v must be (..., m, d), (..., n, d) and (..., n, e) once transposed, got {shapes}")
        batch = broadcast_shapes(broadcast_shapes(qs[:-2], ks[:-2]), vs[:-2])
        if len({self.tensor(x).dtype == "bool" for x in added}) < len(added):
            self.fail(f"there may be one bias and one mask, got {', '.join(str(x.ty) for x in added)}")
        scores = (*batch, qs[-2], ks[-2])
        for x in added:
            added_type = self.tensor(x)
            name = "mask" if added_type.dtype == "bool" else "bias"
            if added_type.dtype not in ("bool", dtype, accumulator(dtype)) or len(added_type.shape or ()) > len(scores):
                shape = format_shape(scores)
                self.fail(f"{name} must broadcast to the scores {shape} of {dtype}, got {added_type}")
            for dim, full in zip(reversed(added_type.shape or ()), reversed(scores), strict=False):
                if as_int(dim) != 1 and not PROVER.can_prove_equal(dim, full):
                    self.fail(f"{name} {added_type} is not known to broadcast to the scores {format_shape(scores)}")
        result_dtype = attrs["dtype"] or dtype
        if result_dtype not in (dtype, accumulator(dtype)):
            self.fail(f"the result of {dtype} is of that or of {accumulator(dtype)}, got dtype {result_dtype}")
        out = (*batch, qs[-2], vs[-1])
        return TensorType.of(tuple(out[a] for a in _order(attrs["out_axes"], len(out))), result_dtype)

    def _views(self, shapes: list[Shape], attrs: Mapping[str, Any]) -> list[Shape]:
        """Shapes of the transposed q, k and v, with matrices of k and v repeated `group` times; fails on a mismatch."""
        rank, group = len(shapes[0]), attrs["group"]
        for name in ("q_axes", "k_axes", "v_axes", "out_axes"):
            if sorted(_order(attrs[name], rank)) != list(range(rank)):
                self.fail(f"{name} {attrs[name]} is no permutation of the {rank} dimensions")
        orders = [_order(attrs[name], rank) for name in ("q_axes", "k_axes", "v_axes")]
        qs, ks, vs = (tuple(shape[a] for a in order) for shape, order in zip(shapes, orders, strict=True))
        if group < 1 or (group > 1 and rank < 3):
            self.fail(f"group {group} of operands of rank {rank}: it has to be positive, and 1 for matrices")
        repeated = [s if group == 1 else (*s[:-3], s[-3] * group, *s[-2:]) for s in (ks, vs)]
        if group > 1 and not all(PROVER.can_prove_equal(qs[-3], s[-3]) for s in repeated):
            self.fail(f"q has {qs[-3]} matrices, which are not {group} times those of k, {ks[-3]}, and v, {vs[-3]}")
        return [qs, *repeated]

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        shapes = [self.tensor(x).shape or () for x in call.args[:3]]
        qs, _, vs = self._views(shapes, call.attrs)
        if fits_blocks(qs, vs):
            return None
        rank, wide = len(qs), accumulator(self.tensor(call.args[0]).dtype)
        group: Any = call.attrs["group"]

        def operand(k: int, axes: str) -> Expr:
            transposed_operand = emit_op(bb, "transpose", call.args[k], axes=_order(call.attrs[axes], rank))  # type: ignore[arg-type]
            return emit_op(
                bb,
                "cast",
                transposed_operand if k == 0 else _repeat_matrices(bb, transposed_operand, group),
                dtype=wide,
            )

        keys = emit_op(bb, "transpose", operand(1, "k_axes"), axes=(*range(rank - 2), rank - 1, rank - 2))
        scores = emit_op(bb, "matmul", operand(0, "q_axes"), keys)
        scores = emit_op(bb, "multiply", scores, np.asarray(call.attrs["scale"], dtypes.to_numpy(wide)))
        for x in sorted(call.args[3:], key=lambda x: self.tensor(x).dtype != "bool"):
            if self.tensor(x).dtype == "bool":
                masked = np.asarray(call.attrs["masked"], dtypes.to_numpy(wide))
                branches = (masked, scores) if call.attrs["masked_where"] else (scores, masked)
                scores = emit_op(bb, "where", x, *branches)
            else:
                scores = emit_op(bb, "add", scores, emit_op(bb, "cast", x, dtype=wide))
        weights = emit_op(bb, "softmax", scores, axis=-1)
        if call.attrs["zero_nan"]:
            weights = emit_op(bb, "where", emit_op(bb, "isnan", weights), np.zeros((), dtypes.to_numpy(wide)), weights)
        result = emit_op(bb, "matmul", weights, operand(2, "v_axes"))
        transposed = emit_op(bb, "transpose", result, axes=_order(call.attrs["out_axes"], rank))  # type: ignore[arg-type]
        return get_op("cast")(transposed, dtype=call.attrs["dtype"] or self.tensor(call.args[0]).dtype)

    def lower(self, q: Buffer, k: Buffer, v: Buffer, *added: Buffer, out: Buffer, scale: float, **attrs: Any) -> Stmt:
        rank = len(q.shape)
        bias = next((x for x in added if x.dtype != "bool"), None)
        mask = next((_Mask(x, attrs["masked"], attrs["masked_where"]) for x in added if x.dtype == "bool"), None)
        views = (
            _View(q, _order(attrs["q_axes"], rank)),
            _View(k, _order(attrs["k_axes"], rank), attrs["group"]),
            _View(v, _order(attrs["v_axes"], rank), attrs["group"]),
        )
        back = _order(attrs["out_axes"], rank)
        result = _View(out, tuple(back.index(a) for a in range(rank)))
        batch = result.shape[:-2]
        checks = equality_checks(
            "attention: the shapes of q, k, v and the result differ",
            *((a, b) for view in views for a, b in zip(view.shape[:-2], batch, strict=True) if as_int(a) != 1),
            (views[0].shape[-1], views[1].shape[-1]),
            (views[1].shape[-2], views[2].shape[-2]),
        )
        is_paired = attrs["rounds"] and q.dtype == "bfloat16" and (as_int(views[0].shape[-1]) or 1) % 2 == 0
        problem = _Problem(*views, result, bias, mask, attrs["zero_nan"], scale, accumulator(out.dtype), is_paired)
        large, small = QUERY_BLOCKS
        start, remainder = problem.rows // large * large, problem.rows % large
        is_few = smin(
            MAX_SINGLE_QUERIES + 1 - smin(remainder, sym(MAX_SINGLE_QUERIES + 1)), sym(1)
        )  # whether at most FEW are left: 1 or 0
        block_ranges = (
            (sym(0), problem.rows // large, large),
            (start, (1 - is_few) * ((remainder + small - 1) // small), small),
            (start, is_few * remainder, 1),
        )
        stages = [
            _over_blocks(problem, batch, *block_range) for block_range in block_ranges if as_int(block_range[1]) != 0
        ]
        return seq(*checks, *stages)

    def reference(self, q: Any, k: Any, v: Any, *added: Any, **attrs: Any) -> Any:
        axes, group = attrs, attrs.get("group", 1)
        views = [np.transpose(x, _order(axes[f"{n}_axes"], x.ndim)) for n, x in (("q", q), ("k", k), ("v", v))]
        qs, ks, vs = map(to_accumulator_dtype, views)
        if group > 1:
            ks, vs = (np.repeat(x, group, axis=-3) for x in (ks, vs))
        scores = np.matmul(qs, np.swapaxes(ks, -1, -2)) * qs.dtype.type(attrs["scale"])
        for x in sorted(added, key=lambda x: x.dtype != np.bool_):
            if x.dtype == np.bool_:
                scores = np.where(x == attrs["masked_where"], scores.dtype.type(attrs["masked"]), scores)
            else:
                scores = scores + to_accumulator_dtype(x)
        weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-np.inf))
        weights = weights / np.sum(weights, axis=-1, keepdims=True)
        if attrs.get("zero_nan"):
            weights = np.where(np.isnan(weights), weights.dtype.type(0), weights)
        array = np.matmul(weights, vs)
        dtype = dtypes.to_numpy(axes["dtype"]) if axes.get("dtype") else q.dtype
        return np.ascontiguousarray(np.transpose(array, _order(axes["out_axes"], q.ndim))).astype(dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("m", 5), ("n", 5), ("n", 3)), {"scale": 0.3})
        heads = {"q_axes": (0, 2, 1, 3), "k_axes": (0, 2, 1, 3), "v_axes": (0, 2, 1, 3), "out_axes": (0, 2, 1, 3)}
        shapes = (("b", "n", 2, 32), ("b", "n", 2, 32), ("b", "n", 2, 32), ("b", 1, 1, "n"))
        yield Sample(shapes, {"scale": 0.2, **heads})
        yield Sample((("b", "m", 8), ("b", 8, "n"), (1, "n", 20), ("m", "n")), {"k_axes": (0, 2, 1)})
        yield Sample((("m", "d"), ("n", "d"), ("n", "e")))
        yield Sample((("m", 16), ("n", 16), ("n", 16)), dtypes=("float16",) * 3, tolerance=5e-3)
        yield Sample(
            (("b", "m", 6, 8), ("b", 2, "n", 8), ("b", 2, "n", 4), ("m", "n")),
            {"scale": 0.3, "group": 3, "q_axes": (0, 2, 1, 3), "out_axes": (0, 2, 1, 3)},
        )
        yield Sample(((4, "m", "d"), (2, "n", "d"), (2, "n", "e")), {"group": 2})
        masked = ("float32",) * 4 + ("bool",)
        yield Sample((("b", "m", 8), ("b", "n", 8), ("b", "n", 8), ("b", 1, "n"), ("m", "n")), {"masked": -1e9}, masked)
        attrs = {"masked": -3.0, "masked_where": True}
        yield Sample((("m", "d"), ("n", "d"), ("n", "e"), (1, "n")), attrs, (*masked[:3], "bool"))
        bf16_kinds = ("bfloat16",) * 3
        yield Sample((("m", 16), ("n", 16), ("n", 7)), {"rounds": True, "scale": 0.3}, bf16_kinds, tolerance=2e-2)
        yield Sample(
            (("b", "m", 4, 8), ("b", "n", 4, 8), ("b", "n", 4, 20), ("b", 1, 1, "n"), ("m", "n")),
            {"rounds": True, "scale": 0.2, "masked": -1e9, **heads},
            (*bf16_kinds, "float32", "bool"),
            tolerance=2e-2,
        )
        yield Sample((("m", 16), ("n", 16), ("n", 7)), {"rounds": True, "dtype": "float32"}, bf16_kinds, tolerance=2e-2)
        attrs = {"masked": float("-inf"), "zero_nan": True}
        yield Sample((("m", 8), ("n", 8), ("n", 8), ("m", "n")), attrs, (*masked[:3], "bool"))


def _order(axes: Axes | None, rank: int) -> Axes:
    """Normalize axes to a permutation of nonnegative integers; None is the identity."""
    return tuple(range(rank)) if axes is None else tuple(a % rank for a in axes)


def _repeat_matrices(bb: BlockBuilder, x: Expr, group: int) -> Expr:
    """Repeat each matrix of x (..., h, n, d) `group` times."""
    if group == 1:
        return x
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    *batch, heads, length, width = x.ty.shape
    wide = emit_op(bb, "expand_dims", x, axes=(len(batch) + 1,))
    wide = emit_op(bb, "broadcast_to", wide, shape_value((*batch, heads, group, length, width)))
    return emit_op(bb, "reshape", wide, shape_value((*batch, heads * group, length, width)))


@dataclass(frozen=True, slots=True)
class _View:
    """Transposed view of a buffer: dimension p is axes[p] of the buffer; matrices are repeated `group` times."""

    buffer: Buffer
    axes: Axes
    group: int = 1

    @property
    def shape(self) -> Shape:
        dims = [self.buffer.shape[a] for a in self.axes]
        if self.group > 1:
            dims[-3] = dims[-3] * self.group
        return tuple(dims)

    def at(self, *indices: SymExpr) -> Shape:
        """Buffer indices of an element of the view; dimensions of size 1 broadcast."""
        view_indices = list(indices)
        if self.group > 1:
            view_indices[-3] = view_indices[-3] // self.group
        broadcast_indices = [
            sym(0) if as_int(self.buffer.shape[a]) == 1 else i for a, i in zip(self.axes, view_indices, strict=True)
        ]
        return tuple(broadcast_indices[self.axes.index(d)] for d in range(len(broadcast_indices)))


@dataclass(frozen=True, slots=True)
class _Mask:
    """Bool mask that replaces scores by a constant."""

    buffer: Buffer
    value: float  # replaces scores where the mask equals `where`
    where: bool


@dataclass(frozen=True, slots=True)
class _Problem:
    """Operands, result and attributes of attention."""

    q: _View
    k: _View
    v: _View
    out: _View
    bias: Buffer | None
    mask: _Mask | None
    zero_nan: bool
    scale: float
    dtype: str  # dtype of the computation
    is_paired: bool  # blocks use dot products of bfloat16 pairs

    @property
    def rows(self) -> SymExpr:
        return self.q.shape[-2]


def _over_blocks(problem: _Problem, batch: Shape, start: SymExpr, count: SymExpr, size: int) -> Stmt:
    """Loop over `count` blocks of `size` queries from `start` on, in every matrix; the last one may be partial."""
    may_be_partial = size == QUERY_BLOCKS[-1]  # the last block may be partial

    def block(*at: SymVar) -> Stmt:
        first = start + at[-1] * size
        queries = smin(sym(size), problem.rows - first) if may_be_partial else sym(size)
        return _Block(problem, at[:-1], first, queries, size).stmt()

    return loops("bhgfe", (*batch, count), block)


class _Block:
    """Statements for a block of `count` <= `size` queries from `start` on, in the matrices at `batch`."""

    def __init__(self, problem: _Problem, batch: Shape, start: SymExpr, count: SymExpr, size: int) -> None:
        self.problem, self.batch, self.start, self.count, self.size = problem, batch, start, count, sym(size)
        self.keys = problem.k.shape[-2]
        self.width, self.depth = problem.q.shape[-1], problem.v.shape[-1]
        self.is_paired = problem.is_paired and size > 1
        self.max_keys = SINGLE_QUERY_KEY_BLOCK if size == 1 else KEY_BLOCK
        self.queries = self._local("queries", self.width)
        if self.is_paired:
            pairs = sym(self.max_keys // 2)
            self.queries = Buffer("queries", (self.width // 2, self.size), "int32", "local")
            self.values = Buffer("values", (pairs, self.depth), "int32", "local")
            self.weights = Buffer("weights", (pairs, self.size), "int32", "local")
        self.scores = self._local("scores", sym(self.max_keys))
        self.sums = self._local("sums", self.depth)
        self.stages_bias = size > 1 and problem.bias is not None and self._has_rows(problem.bias)  # along its rows
        self.row_max, self.rescale, self.total = (self._local(name) for name in ("top", "shrink", "total"))

    def _local(self, name: str, *rows: SymExpr) -> Buffer:
        return Buffer(name, (*rows, self.size), self.problem.dtype, "local")

    def stmt(self) -> Stmt:
        lowest = float(np.finfo(dtypes.to_numpy(self.problem.dtype)).min)  # -inf - -inf would be NaN
        init_values = [(self.queries, 0), (self.sums, 0.0), (self.total, 0.0), (self.row_max, lowest)]
        if self.stages_bias:
            init_values.append((self.scores, 0.0))  # columns beyond the last query
        init = [self._fill(buffer, value) for buffer, value in init_values]
        blocks = (self.keys + self.max_keys - 1) // self.max_keys
        over_keys = loops("j", (blocks,), lambda j: self._softmax_step(j * self.max_keys))
        body = seq(*init, self._load_queries(), over_keys, self._finish())
        paired = (self.values, self.weights) if self.is_paired else ()
        for buffer in (self.queries, self.scores, self.sums, self.row_max, self.rescale, self.total, *paired):
            body = Allocate(buffer, body)
        return body

    def _fill(self, buffer: Buffer, value: float) -> Stmt:
        return _nest("ij", buffer.shape, lambda *at: Store(buffer, at, literal(value, buffer.dtype)))

    def _load_queries(self) -> Stmt:
        """Load queries[d, i] = scale * q[start + i, d], or unscaled bfloat16 pairs; unused columns stay 0."""
        if self.is_paired:
            q = self.problem.q
            return self._over_queries(
                self.width // 2, lambda i, d: Store(self.queries, (d, i), self._load_pair(q, self.start + i, d))
            )

        def element(i: SymExpr, d: SymExpr) -> Stmt:
            q = self._read(self.problem.q, self.start + i, d)
            return Store(self.queries, (d, i), (q * self.problem.scale).value)

        return self._over_queries(self.width, element)

    def _over_queries(self, width: SymExpr, make: Callable[[SymExpr, SymExpr], Stmt]) -> Stmt:
        """Loop make(query, element of its row); the bound of `i` proves that blocks are disjoint (parallel)."""
        if as_int(self.size) == 1:
            return loops("d", (width,), lambda d: make(sym(0), d))
        i = SymVar("i", upper=(as_int(self.size) or 1) - 1)
        return For(i, self.count, loops("d", (width,), lambda d: make(i, d)))

    def _read(self, view: _View, row: SymExpr, column: SymExpr) -> Scalar:
        return Scalar(view.buffer[view.at(*self.batch, row, column)]).cast(self.problem.dtype)

    def _load_pair(self, view: _View, row: SymExpr, number: SymExpr) -> Value:
        return _pack_pair(*(view.buffer[view.at(*self.batch, row, number * 2 + n)] for n in range(2)))

    def _softmax_step(self, start: SymExpr) -> Stmt:
        """One step of the online softmax: the block of keys from `start` on."""
        count = smin(sym(self.max_keys), self.keys - start)
        scores, row_max, rescale, total = self.scores, self.row_max, self.rescale, self.total

        def score(j: SymExpr, i: SymExpr, d: SymExpr) -> Scalar:
            if self.is_paired:
                return _dot2(self._load_pair(self.problem.k, start + j, d), self.queries[d, i])
            return self._read(self.problem.k, start + j, d) * Scalar(self.queries[d, i])

        def store_score(j: SymExpr, i: SymExpr, dot: Scalar) -> Stmt:
            masked = self._masked(dot * self.problem.scale if self.is_paired else dot, i, start + j)
            bias = Scalar(scores[j, i]) if self.stages_bias else self._bias(i, start + j)
            return Store(scores, (j, i), (masked + bias).value)

        def update_max(i: SymExpr, block_max: Scalar) -> Stmt:
            old = Scalar(row_max[(i,)])
            new = old.maximum(block_max)
            return seq(Store(rescale, (i,), softmax_exp(old - new).value), Store(row_max, (i,), new.value))

        def compute_weight(j: SymExpr, i: SymExpr) -> Stmt:
            return Store(scores, (j, i), softmax_exp(Scalar(scores[j, i]) - Scalar(row_max[(i,)])).value)

        def accumulate(old: Value, i: SymExpr, block_sum: Scalar) -> Value:
            return (Scalar(old) * Scalar(rescale[(i,)]) + block_sum).value

        def value(e: SymExpr, i: SymExpr, j: SymExpr) -> Scalar:
            if self.is_paired:
                return _dot2(self.values[j, e], self.weights[j, i])
            return self._read(self.problem.v, start + j, e) * Scalar(scores[j, i])

        pairs = (count + 1) // 2

        def pair_of_keys(number: SymExpr, element: Callable[[SymExpr], Value]) -> Value:
            """Pack the values of two keys; 0 beyond the last key."""
            first, second = number * 2, number * 2 + 1
            second_value = element(second)
            return _pack_pair(
                element(first), Select((index(second) < count).value, second_value, literal(0.0, second_value.dtype))
            )

        def pair_values(j: SymExpr, e: SymExpr) -> Stmt:
            v = self.problem.v
            value_pair = pair_of_keys(j, lambda key: v.buffer[v.at(*self.batch, start + key, e)])
            return Store(self.values, (j, e), value_pair)

        def pair_weights(j: SymExpr, i: SymExpr) -> Stmt:
            return Store(self.weights, (j, i), pair_of_keys(j, lambda key: scores[key, i]))

        def load_bias(i: SymExpr, j: SymExpr) -> Stmt:
            return Store(scores, (j, i), self._bias(i, start + j).value)

        return seq(
            *([self._over_queries(count, load_bias)] if self.stages_bias else []),
            self._fold("add", (count, self.size), self.queries.shape[0], score, store_score),
            self._fold("maxnum", (self.size,), count, lambda i, j: Scalar(scores[j, i]), update_max),
            _nest("ji", (count, self.size), compute_weight),
            self._fold(
                "add", (self.size,), count, lambda i, j: Scalar(scores[j, i]),
                lambda i, block_sum: Store(total, (i,), accumulate(total[(i,)], i, block_sum)),
            ),
            *([_nest("je", (pairs, self.depth), pair_values)] if self.is_paired else []),
            *([_nest("ji", (pairs, self.size), pair_weights)] if self.is_paired else []),
            self._fold(
                "add", (self.depth, self.size), pairs if self.is_paired else count, value,
                lambda e, i, block_sum: Store(self.sums, (e, i), accumulate(self.sums[e, i], i, block_sum)),
            ),
        )  # fmt: skip

    def _bias(self, i: SymExpr, j: SymExpr) -> Scalar:
        """Load the bias of query start + i and key j; 0 for columns beyond the last query."""
        bias = self.problem.bias
        if bias is None:
            return Scalar(literal(0.0, self.problem.dtype))
        result = self._load_broadcast(bias, i, j).cast(self.problem.dtype)
        return select(index(i) < self.count, result, 0.0) if self._may_exceed(bias) and not self.stages_bias else result

    def _masked(self, score: Scalar, i: SymExpr, j: SymExpr) -> Scalar:
        """Apply the mask to the score of query start + i and key j."""
        mask = self.problem.mask
        if mask is None:
            return score
        mask_value = self._load_broadcast(mask.buffer, i, j)
        replacement = literal(mask.value, self.problem.dtype)
        branches = (Scalar(replacement), score) if mask.where else (score, Scalar(replacement))
        masked_score = select(mask_value, *branches)
        return select(index(i) < self.count, masked_score, 0.0) if self._may_exceed(mask.buffer) else masked_score

    def _load_broadcast(self, buffer: Buffer, i: SymExpr, j: SymExpr) -> Scalar:
        """Load the element for query start + i and key j of a tensor that broadcasts to the scores."""
        at = (*self.batch, self.start + i, j)[len(self.batch) + 2 - len(buffer.shape) :]
        where = tuple(sym(0) if as_int(dim) == 1 else index for dim, index in zip(buffer.shape, at, strict=True))
        return Scalar(buffer[where])

    def _may_exceed(self, buffer: Buffer) -> bool:
        """Whether a load could exceed the tensor: it has a row per query, and the block may be partial."""
        return self._has_rows(buffer) and self.count is not self.size

    def _has_rows(self, buffer: Buffer) -> bool:
        return len(buffer.shape) > 1 and as_int(buffer.shape[-2]) != 1

    def _fold(
        self,
        combine: str,
        extents: tuple[SymExpr, ...],
        reduced: SymExpr,
        value: Callable[..., Scalar],
        finish: Callable[..., Stmt],
    ) -> Stmt:
        """Loops over `extents` of finish(combine over `reduced` of value)."""
        dtype = self.problem.dtype
        return _nest("sl", extents, lambda *i: fold(dtype, combine, reduced, partial(value, *i), partial(finish, *i)))

    def _finish(self) -> Stmt:
        """Store out = sums / total; 0 without keys."""
        has_keys = index(self.keys) > 0

        def scale(i: SymExpr) -> Stmt:
            total = Scalar(self.total[(i,)])
            is_valid = (has_keys & (total > 0.0)) if self.problem.zero_nan else has_keys
            return Store(self.total, (i,), select(is_valid, 1.0 / total, 0.0).value)

        def element(i: SymExpr, e: SymExpr) -> Stmt:
            out = self.problem.out
            factor = Scalar(self.total[(i,)])
            value = Scalar(self.sums[e, i]) * factor
            if self.problem.zero_nan:  # sums may be NaN because scores are
                value = select(factor > 0.0, value, 0.0)
            return Store(out.buffer, out.at(*self.batch, self.start + i, e), value.cast(out.buffer.dtype).value)

        return seq(_nest("i", (self.size,), scale), self._over_queries(self.depth, element))


def _pack_pair(first: Value, second: Value) -> Value:
    """Pack two numbers as bfloat16 in an int32."""
    narrow = (x if x.dtype == "bfloat16" else Intrinsic(NARROW, (x,), "bfloat16") for x in (first, second))
    return Intrinsic(PACK_BF16, tuple(narrow), "int32")


def _dot2(a: Value, b: Value) -> Scalar:
    return Scalar(Intrinsic(DOT2_PACKED_BF16, (literal(0.0, "float32"), a, b), "float32"))


def fold(
    dtype: DType,
    combine: str,
    reduced: SymExpr,
    value: Callable[[SymExpr], Scalar],
    finish: Callable[[Scalar], Stmt],
) -> Stmt:
    """Reduce value over a loop of `reduced` iterations in a local of this dtype, and pass the result to `finish`."""
    total = Buffer("acc", (), dtype, "local")
    inner = loops("r", (reduced,), lambda r: Store(total, (), value(r).value, combine))
    return Allocate(total, seq(Store(total, (), identity(combine, dtype)), inner, finish(Scalar(Load(total, ())))))


def _nest(names: str, extents: Iterable[SymExpr], make: Callable[..., Stmt]) -> Stmt:
    """`loops` without loops of one iteration, which would separate a vector from the loop that it is along."""
    dims = tuple(extents)

    def body(*at: SymVar) -> Stmt:
        remaining = iter(at)
        return make(*(sym(0) if as_int(d) == 1 else next(remaining) for d in dims))

    looped = [k for k, d in enumerate(dims) if as_int(d) != 1]
    return loops("".join(names[k] for k in looped), [dims[k] for k in looped], body)
