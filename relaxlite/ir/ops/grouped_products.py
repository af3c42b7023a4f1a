"""Grouped GEMM for mixtures of experts: each group of rows (tokens) is multiplied by the matrix of its expert.

`group_rows` sorts rows by group. Its `spans` int64 (groups + 1, 3) locate the groups: spans[0, 0] is the number of
nonempty groups, and spans[1 + b] the number, first row and row count of the b-th of them. Nonempty groups are
contiguous, in ascending order of their numbers, and cover all rows.

Weights are blocked as in ops/block_quantized.py, with a leading dimension over the matrices in every operand. One call
computes the products of all groups (Gale et al., "MegaBlocks", arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.block_codes import Array, Coding
from relaxlite.ir.ops.block_quantized import (
    CODING_ATTRS,
    WEIGHT_OPERANDS,
    BlockedWeightOp,
    IntegerProduct,
    StackedMatrix,
    dequantize_array,
    dequantize_element,
    draw_words,
    matmul_array,
)
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.ops.indexing import DynamicIndex, with_checked_indices
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.rounded_blocks import LOW_BITS, ROTATIONS, bytes_per_block
from relaxlite.ir.ops.scalars import Scalar, index, literal
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Check,
    For,
    IfThenElse,
    LetIndex,
    Load,
    Stmt,
    Store,
    loops,
    seq,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.ir.types import TensorType, TupleType, Type

_ROUNDED = 5e-2  # tolerance where the target rounds activations to 12 bits
_ONE, _ZERO = literal(1, "int64"), literal(0, "int64")


@register
class GroupRows(Op):
    """Stable sort of rows by group number, `numbers` int64 (p,) from 0 to `groups` - 1: (order, places, spans).

    order int64 (p,) is the argsort of `numbers`, places int64 (p,) its inverse, spans int64 (groups + 1, 3) the table
    of nonempty groups (see grouped_products.py), filled up with zeros. A number out of range raises at run time.
    """

    name = "group_rows"
    operands = ("numbers",)
    attrs: ClassVar[Mapping[str, Attr]] = {"groups": Attr("int")}

    def infer(self, numbers: Expr, *, groups: int) -> Type:
        ty = self.tensor(numbers, "numbers")
        if ty.dtype != "int64" or ty.rank != 1 or groups < 1:
            self.fail(f"numbers must be an int64 vector, and there must be groups, got {ty} and {groups} groups")
        assert ty.shape is not None
        return TupleType((ty, ty, TensorType.of((groups + 1, 3), "int64")))

    def lower(self, numbers: Buffer, *, out: tuple[Buffer, Buffer, Buffer], groups: int) -> Stmt:
        order, places, spans = out
        place = Buffer.of("place", (groups,), "int64", "local")  # per group: its row count, then its next row
        rows, num_groups = Buffer.of("rows", (), "int64", "local"), Buffer.of("found", (), "int64", "local")

        def with_group(i: SymExpr, make: Callable[[SymExpr], Stmt]) -> Stmt:
            group = SymVar("group", lower=None)
            inside = (index(group) >= 0) & (index(group) < groups)
            check = Check(inside.value, f"group_rows: a number is out of range for {groups} groups")
            return LetIndex(group, numbers[(i,)], seq(check, make(group)))

        def emit_span(e: SymExpr) -> Stmt:
            b = SymVar("b", upper=groups - 1)
            fields = (index(e, "int64").value, rows[()], place[(e,)])
            row = seq(*(Store(spans, (b + 1, sym(k)), field) for k, field in enumerate(fields)))
            append_span = seq(LetIndex(b, num_groups[()], row), Store(num_groups, (), _ONE, "add"))
            count, first = SymVar("count"), SymVar("first")
            update = seq(
                IfThenElse((index(count) > 0).value, append_span),
                Store(place, (e,), index(first, "int64").value),
                Store(rows, (), index(first + count, "int64").value),
            )
            return LetIndex(count, place[(e,)], LetIndex(first, rows[()], update))

        def place_row(i: SymExpr, group: SymExpr) -> Stmt:
            at = SymVar("at")
            update = seq(
                Store(order, (at,), index(i, "int64").value),
                Store(places, (i,), index(at, "int64").value),
                Store(place, (group,), _ONE, "add"),
            )
            return LetIndex(at, place[(group,)], update)

        body = seq(
            loops("e", place.shape, lambda e: Store(place, (e,), _ZERO)),
            loops("bk", spans.shape, lambda b, k: Store(spans, (b, k), _ZERO)),
            Store(rows, (), _ZERO),
            Store(num_groups, (), _ZERO),
            loops("i", numbers.shape, lambda i: with_group(i, lambda group: Store(place, (group,), _ONE, "add"))),
            loops("e", place.shape, emit_span),
            Store(spans, (sym(0), sym(0)), num_groups[()]),
            loops("i", numbers.shape, lambda i: with_group(i, lambda group: place_row(i, group))),
        )
        for buffer in (num_groups, rows, place):
            body = Allocate(buffer, body)
        return body

    def reference(self, numbers: Any, *, groups: int) -> Any:
        order = np.argsort(numbers, kind="stable").astype(np.int64)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return order, places, make_spans(np.bincount(numbers, minlength=groups))

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
            return rng.integers(0, 5, shape)

        yield Sample((("p",),), {"groups": 5}, ("int64",), {0: draw})
        yield Sample((("p",),), {"groups": 9}, ("int64",), {0: draw})


@register
class SumRows(Op):
    """Weighted sums of gathered rows: out[i] = sum over j < k of weights[i, j] * x[places[i * k + j]], in order of j.

    x float32 (p, n), places int64 (m * k,), weights float32 (m, k), out float32 (m, n). Combines the outputs of the k
    experts of a token.
    """

    name = "sum_rows"
    operands = ("x", "places", "weights")

    def infer(self, x: Expr, places: Expr, weights: Expr) -> Type:
        types = [self.tensor(v, name) for v, name in zip((x, places, weights), self.operands, strict=True)]
        shapes = [t.shape or () for t in types]
        if [t.dtype for t in types] != ["float32", "int64", "float32"] or [len(s) for s in shapes] != [2, 1, 2]:
            self.fail(
                f"x, places and weights must be float32, int64 and float32, of rank 2, 1 and 2, got {_join(types)}"
            )
        rows, rows_per_sum = shapes[2]
        if as_int(rows_per_sum) is None or PROVER.can_prove_ne(shapes[1][0], rows * rows_per_sum):
            self.fail(f"there must be a place for each of the weights, a known number in each row, got {_join(types)}")
        return TensorType.of((rows, shapes[0][1]), "float32")

    def lower(self, x: Buffer, places: Buffer, weights: Buffer, *, out: Buffer) -> Stmt:
        rows, rows_per_sum = weights.shape

        def add(i: SymExpr, j: SymExpr) -> Stmt:
            position = DynamicIndex.along(self, x, 0, places[(i * rows_per_sum + j,)])
            weight = Buffer("weight", (), "float32", "local")

            def row(p: SymExpr) -> Stmt:
                return loops(
                    "c", (x.shape[1],),
                    lambda c: Store(out, (i, c), (Scalar(x[p, c]) * Scalar(weight[()])).value, "add"),
                )  # fmt: skip

            result = with_checked_indices([position], row)
            return Allocate(weight, seq(Store(weight, (), weights[i, j]), result))

        def sum_row(i: SymExpr) -> Stmt:
            clear = loops("c", (x.shape[1],), lambda c: Store(out, (i, c), literal(0.0, "float32")))
            return seq(clear, loops("j", (rows_per_sum,), lambda j: add(i, j)))

        pairs = ((places.shape[0], rows * rows_per_sum),)
        return seq(
            *equality_checks("sum_rows: places and weights differ in number", *pairs), loops("i", (rows,), sum_row)
        )

    def reference(self, x: Any, places: Any, weights: Any) -> Any:
        rows = x[places].reshape(*weights.shape, x.shape[1])
        return (rows * weights[..., None]).sum(axis=1, dtype=np.float32)

    def samples(self) -> Iterable[Sample]:
        make = {1: lambda shape, rng: rng.integers(0, 5, shape)}
        kinds = ("float32", "int64", "float32")
        yield Sample(((5, "n"), ("m*3",), ("m", 3)), {}, kinds, make)


def make_spans(counts: Sequence[int] | Array) -> Array:
    """Build the `spans` of groups with these row counts."""
    spans = np.zeros((len(counts) + 1, 3), np.int64)
    firsts = np.cumsum(counts) - counts
    nonempty = [(e, first, count) for e, (first, count) in enumerate(zip(firsts, counts, strict=True)) if count]
    spans[0, 0] = len(nonempty)
    spans[1 : 1 + len(nonempty)] = np.array(nonempty, np.int64).reshape(-1, 3)
    return spans


def _over_groups(op: Op, spans: Buffer, rows: SymExpr, make: Callable[[SymExpr, SymExpr, SymExpr], Stmt]) -> Stmt:
    """Loop over the nonempty groups: make(number, first row, row count), after range checks.

    The caller guarantees that groups are disjoint and cover all rows; no analysis can prove that.
    """
    groups = (as_int(spans.shape[0]) or 1) - 1
    num_spans, b = SymVar("found", lower=None, upper=groups), SymVar("b", upper=max(groups - 1, 0))
    unchecked = [SymVar(name, lower=None) for name in ("given_number", "given_first", "given_count")]
    number, first, count = unchecked
    checked = [SymVar("number", upper=max(groups - 1, 0)), SymVar("first"), SymVar("count")]
    conditions = {
        "a number": (index(number) >= 0) & (index(number) < groups),
        "a first row": (index(first) >= 0) & (index(first) <= rows),
        "a count of rows": (index(count) >= 0) & (index(count) <= rows - first),
    }
    checks = (Check(cond.value, f"{op.name}: {what} is out of range in the spans") for what, cond in conditions.items())
    body = make(*checked)
    for var, value in zip(reversed(checked), reversed(unchecked), strict=True):
        body = LetIndex(var, index(value).value, body)  # the same value, but with proven bounds
    body = seq(*checks, body)
    for k, var in reversed(list(enumerate(unchecked))):
        body = LetIndex(var, spans[b + 1, sym(k)], body)
    count_in_range = (index(num_spans) >= 0) & (index(num_spans) <= groups)
    check = Check(count_in_range.value, f"{op.name}: the number of groups is out of range in the spans")
    return LetIndex(num_spans, spans[sym(0), sym(0)], seq(check, For(b, num_spans, body)))


class _Grouped(BlockedWeightOp):
    """Base of the grouped products: type checks."""

    def of_members(self, spans: Expr, words: Expr, scales: Sequence[Expr], coding: Coding) -> tuple[int, int, SymExpr]:
        """Check spans and stacked weights and return (rows, rows per block, columns) of each matrix."""
        types = [self.tensor(x, "words") for x in (words, *scales)]
        ty, groups = self.tensor(spans, "spans"), {t.shape[0] if t.shape and t.rank == 3 else None for t in types}
        if None in groups or len(groups) > 1:
            self.fail(
                f"words, scales and what follows must be of rank 3, for one number of matrices, got {_join(types)}"
            )
        (count,) = groups
        assert count is not None
        if as_int(count) is None or ty != TensorType.of((count + 1, 3), "int64"):
            self.fail(f"the spans of {count} matrices must be int64 ({count + 1}, 3), got {ty}")
        members = [TensorType.of((t.shape or ())[1:], t.dtype) for t in types]
        return self.weight_extents_of_types(members[0], members[1:], coding)


def _join(types: Iterable[Type]) -> str:
    """Format types for an error message."""
    return ", ".join(map(str, types))


@register
class GroupedMatmul(_Grouped):
    """Grouped GEMM: out[i] = x[i] @ weight[group of row i], x float32 (p, k) sorted by group, out float32 (p, n).

    Weights are blocked: words int32 (groups, k * bits / 32, n), scales (groups, k / block, n) and so on. `spans` come
    from `group_rows`; `coarse` is explained at `dequantize_blocks`.
    """

    name = "grouped_matmul"
    operands = ("x", "spans", *WEIGHT_OPERANDS)
    attrs: ClassVar[Mapping[str, Attr]] = {**CODING_ATTRS, "coarse": Attr("bool", False)}

    def infer(self, x: Expr, spans: Expr, words: Expr, *scales: Expr, coarse: bool, **coding: Any) -> Type:
        rows, _, columns = self.of_members(spans, words, scales, Coding(**coding))
        ty = self.tensor(x, "x")
        if ty.dtype != "float32" or ty.rank != 2 or ty.shape is None or PROVER.can_prove_ne(ty.shape[1], rows):
            self.fail(f"x must be float32 (p, {rows}) for matrices of {rows} rows, got {ty}")
        return TensorType.of((ty.shape[0], columns), "float32")

    def lower(
        self, x: Buffer, spans: Buffer, words: Buffer, *scales: Buffer, out: Buffer, coarse: bool, **coding: Any
    ) -> Stmt:
        weight, depth = Coding(**coding), x.shape[1]

        def product(number: SymExpr, first: SymExpr, count: SymExpr) -> Stmt:
            matrix, matrix_scales = StackedMatrix(words, number), [StackedMatrix(b, number) for b in scales]

            def element(i: SymExpr, j: SymExpr) -> Stmt:
                total = Buffer("e", (), "float32", "local")

                def add(k: SymExpr) -> Stmt:
                    return Store(
                        total,
                        (),
                        (Scalar(x[first + i, k]) * dequantize_element(matrix, matrix_scales, k, j, weight)).value,
                        "add",
                    )

                init = Store(total, (), literal(0.0, "float32"))
                store = Store(out, (first + i, j), Load(total, ()))
                return Allocate(total, seq(init, loops("k", (depth,), add), store))

            return loops("ij", (count, out.shape[1]), element)

        return seq(*_column_checks(self, words, scales), _over_groups(self, spans, out.shape[0], product))

    def reference(self, x: Any, spans: Any, words: Any, *scales: Any, coarse: bool, **coding: Any) -> Any:
        def product(number: int, rows: slice) -> Array:
            return np.asarray(x[rows] @ dequantize_array(words[number], [a[number] for a in scales], Coding(**coding)))

        return _reference_over_groups(x.shape[0], words.shape[2], spans, product)

    def samples(self) -> Iterable[Sample]:
        kinds = ("float32", "int64", "int32", "float32", "float32")
        make = {1: lambda shape, rng: make_spans((2, 0, 3, 1)), 2: draw_words}
        yield Sample(((6, 64), (5, 3), (4, 8, "n"), (4, 2, "n")), {"bits": 4, "zero": 8}, kinds[:4], make, _ROUNDED)
        shapes = ((6, 32), (5, 3), (4, 5, "n"), (4, 1, "n"), (4, 1, "n"))
        yield Sample(shapes, {"bits": 5}, kinds, make, _ROUNDED)


@register
class GroupedMatmulBlocks(_Grouped):
    """Grouped GEMM in integers: `grouped_matmul` of activations x, x_scales, x_sums from `quantize_blocks`.

    `low_bits` and `rotation` must be those of `quantize_blocks`; see `matmul_blocks` for the arithmetic.
    """

    name = "grouped_matmul_blocks"
    operands = ("x", "x_scales", "x_sums", "spans", *WEIGHT_OPERANDS)
    attrs: ClassVar[Mapping[str, Attr]] = {
        **CODING_ATTRS, "low_bits": Attr("int", 0, LOW_BITS), "rotation": Attr("int", 1, ROTATIONS),
    }  # fmt: skip

    def infer(
        self, x: Expr, x_scales: Expr, x_sums: Expr, spans: Expr, words: Expr, *scales: Expr, low_bits: int,
        rotation: int, **coding: Any,
    ) -> Type:  # fmt: skip
        rows, block, columns = self.of_members(spans, words, scales, Coding(**coding))
        types = [self.tensor(v, name) for v, name in zip((x, x_scales, x_sums), self.operands, strict=False)]
        count = self.check_activations(types, rows, block, Coding(**coding), low_bits, rotation)
        return TensorType.of((count, columns), "float32")

    def lower(
        self, x: Buffer, x_scales: Buffer, x_sums: Buffer, spans: Buffer, words: Buffer, *scales: Buffer, out: Buffer,
        low_bits: int, rotation: int, **coding: Any,
    ) -> Stmt:  # fmt: skip
        pairs = ((b.shape[-1], x.shape[1]) for b in (x_scales, x_sums))
        checks = equality_checks("grouped_matmul_blocks: x and its scales have different rows", *pairs)

        def product(number: SymExpr, first: SymExpr, count: SymExpr) -> Stmt:
            matrix, matrix_scales = StackedMatrix(words, number), [StackedMatrix(b, number) for b in scales]
            sums = IntegerProduct((x, x_scales, x_sums), matrix, matrix_scales, Coding(**coding), low_bits, rotation)
            extents = (count, out.shape[1])
            return loops("ij", extents, lambda i, j: sums.store(out, (first + i, j), first + i, j))

        products = _over_groups(self, spans, out.shape[0], product)
        return seq(*checks, *_column_checks(self, words, scales), products)

    def reference(
        self, x: Any, x_scales: Any, x_sums: Any, spans: Any, words: Any, *scales: Any, low_bits: int, rotation: int,
        **coding: Any,
    ) -> Any:  # fmt: skip
        def product(number: int, rows: slice) -> Array:
            rounded = (x[:, rows], x_scales[:, rows], x_sums[..., rows])
            matrix_scales = [a[number] for a in scales]
            return matmul_array(rounded, words[number], matrix_scales, Coding(**coding), low_bits, rotation)

        return _reference_over_groups(x.shape[1], words.shape[2], spans, product)

    def samples(self) -> Iterable[Sample]:
        kinds = ("int8", "float32", "int32", "int64", "int32", "float32", "float32")
        for bits, block, zero, low_bits, rotation in ((4, 32, 8, 4, 1), (5, 32, 0, 0, 1), (4, 32, 8, 0, 8)):
            rows = (2, 6) if rotation == 1 else (2, 2, 6)
            activations = ((2, 6, bytes_per_block(block, low_bits)), (2, 6), rows)
            weight: tuple[tuple[int | str, ...], ...] = ((4, 2 * block * bits // 32, "n"), (4, 2, "n"))
            attrs: dict[str, Any] = {"bits": bits, "zero": zero, "low_bits": low_bits, "rotation": rotation}
            rounded = draw_quantized_rows(6, 2 * block, block, low_bits, rotation)
            make: dict[int, Any] = {k: lambda shape, rng, a=a: a for k, a in enumerate(rounded)}
            make |= {3: lambda shape, rng: make_spans((2, 0, 3, 1)), 4: draw_words}
            shapes = (*activations, (5, 3), *weight, *([] if zero else [(4, 2, "n")]))
            yield Sample(shapes, attrs, kinds[: 6 if zero else 7], make, 1e-4)


def draw_quantized_rows(m: int, depth: int, block: int, low_bits: int, rotation: int) -> Any:
    """Draw rows (m, depth) and quantize them by `quantize_blocks`."""
    x = np.random.default_rng(0).standard_normal((m, depth)).astype(np.float32)
    return get_op("quantize_blocks").reference(x, block=block, low_bits=low_bits, rotation=rotation)


def _column_checks(op: Op, words: Buffer, scales: Sequence[Buffer]) -> tuple[Stmt, ...]:
    pairs = ((b.shape[2], words.shape[2]) for b in scales)
    return equality_checks(f"{op.name}: codes and scales have different columns", *pairs)


def _reference_over_groups(rows: int, columns: int, spans: Array, product: Callable[[int, slice], Array]) -> Array:
    out = np.zeros((rows, columns), np.float32)
    for number, first, count in spans[1 : 1 + spans[0, 0]].tolist():
        out[first : first + count] = product(number, slice(first, first + count))
    return out
