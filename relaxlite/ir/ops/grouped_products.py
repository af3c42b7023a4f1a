"""Rows in groups, each group multiplied by one of several matrices: tokens, and the experts that they chose.

`group_rows` sorts rows by group. Its `spans` int64 (groups + 1, 3) say where they are: spans[0, 0] is how many groups
have rows, and spans[1 + b] the number, first row and count of rows of the b-th of these. They follow one another, in
the order of their numbers, and have all rows.

The products are those of ops/block_quantized.py, where each operand of the weight has one more dimension in front, over
the matrices. One call is the products of all groups (Gale et al., "MegaBlocks", arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.block_codes import Array, Coding
from relaxlite.ir.ops.block_quantized import (
    CODED,
    WEIGHT,
    BlocksOp,
    BlockSums,
    Member,
    dequantized,
    multiplied,
    some_words,
    weight_at,
)
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.ops.indexing import Position, at_positions
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.rounded_blocks import LOW_BITS, ROTATIONS, bytes_of_block
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

_ROUNDED = 5e-2  # of products whose activations are rounded to 12 bits, where the target does that
_ONE, _ZERO = literal(1, "int64"), literal(0, "int64")


@register
class GroupRows(Op):
    """The order of rows by the number of their group, `numbers` int64 (p,) from 0 to `groups` - 1; rows of one group
    stay as they stand. (order int64 (p,), places int64 (p,), spans int64 (groups + 1, 3)): row order[k] comes k-th, row
    i at places[i]. Where spans have no group, they are 0."""

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
        place = Buffer.of("place", (groups,), "int64", "local")  # of a group's next row; first how many it has
        rows, result = Buffer.of("rows", (), "int64", "local"), Buffer.of("found", (), "int64", "local")

        def in_group(i: SymExpr, make: Callable[[SymExpr], Stmt]) -> Stmt:
            group = SymVar("group", lower=None)
            inside = (index(group) >= 0) & (index(group) < groups)
            check = Check(inside.value, f"group_rows: a number is out of range for {groups} groups")
            return LetIndex(group, numbers[(i,)], seq(check, make(group)))

        def of_group(e: SymExpr) -> Stmt:
            b = SymVar("b", upper=groups - 1)
            fields = (index(e, "int64").value, rows[()], place[(e,)])
            row = seq(*(Store(spans, (b + 1, sym(k)), field) for k, field in enumerate(fields)))
            kept = seq(LetIndex(b, result[()], row), Store(result, (), _ONE, "add"))
            count, first = SymVar("count"), SymVar("first")
            moved = seq(
                IfThenElse((index(count) > 0).value, kept),
                Store(place, (e,), index(first, "int64").value),
                Store(rows, (), index(first + count, "int64").value),
            )
            return LetIndex(count, place[(e,)], LetIndex(first, rows[()], moved))

        def put(i: SymExpr, group: SymExpr) -> Stmt:
            at = SymVar("at")
            moved = seq(
                Store(order, (at,), index(i, "int64").value),
                Store(places, (i,), index(at, "int64").value),
                Store(place, (group,), _ONE, "add"),
            )
            return LetIndex(at, place[(group,)], moved)

        body = seq(
            loops("e", place.shape, lambda e: Store(place, (e,), _ZERO)),
            loops("bk", spans.shape, lambda b, k: Store(spans, (b, k), _ZERO)),
            Store(rows, (), _ZERO),
            Store(result, (), _ZERO),
            loops("i", numbers.shape, lambda i: in_group(i, lambda group: Store(place, (group,), _ONE, "add"))),
            loops("e", place.shape, of_group),
            Store(spans, (sym(0), sym(0)), result[()]),
            loops("i", numbers.shape, lambda i: in_group(i, lambda group: put(i, group))),
        )
        for buffer in (result, rows, place):
            body = Allocate(buffer, body)
        return body

    def reference(self, numbers: Any, *, groups: int) -> Any:
        order = np.argsort(numbers, kind="stable").astype(np.int64)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return order, places, spans_of(np.bincount(numbers, minlength=groups))

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
            return rng.integers(0, 5, shape)

        yield Sample((("p",),), {"groups": 5}, ("int64",), {0: draw})
        yield Sample((("p",),), {"groups": 9}, ("int64",), {0: draw})


@register
class SumRows(Op):
    """Weighted sums of rows x float32 (p, n), those at `places` int64 (m * k,): out[i] = the sum over j < k of
    weights[i, j] * x[places[i * k + j]], in the order of j; weights float32 (m, k), out (m, n)."""

    name = "sum_rows"
    operands = ("x", "places", "weights")

    def infer(self, x: Expr, places: Expr, weights: Expr) -> Type:
        types = [self.tensor(v, name) for v, name in zip((x, places, weights), self.operands, strict=True)]
        shapes = [t.shape or () for t in types]
        if [t.dtype for t in types] != ["float32", "int64", "float32"] or [len(s) for s in shapes] != [2, 1, 2]:
            self.fail(
                f"x, places and weights must be float32, int64 and float32, of rank 2, 1 and 2, got {_told(types)}"
            )
        rows, each = shapes[2]
        if as_int(each) is None or PROVER.can_prove_ne(shapes[1][0], rows * each):
            self.fail(f"there must be a place for each of the weights, a known number in each row, got {_told(types)}")
        return TensorType.of((rows, shapes[0][1]), "float32")

    def lower(self, x: Buffer, places: Buffer, weights: Buffer, *, out: Buffer) -> Stmt:
        rows, each = weights.shape

        def add(i: SymExpr, j: SymExpr) -> Stmt:
            position = Position.along(self, x, 0, places[(i * each + j,)])
            weight = Buffer("weight", (), "float32", "local")

            def row(p: SymExpr) -> Stmt:
                return loops(
                    "c", (x.shape[1],),
                    lambda c: Store(out, (i, c), (Scalar(x[p, c]) * Scalar(weight[()])).value, "add"),
                )  # fmt: skip

            result = at_positions([position], row)
            return Allocate(weight, seq(Store(weight, (), weights[i, j]), result))

        def of_row(i: SymExpr) -> Stmt:
            clear = loops("c", (x.shape[1],), lambda c: Store(out, (i, c), literal(0.0, "float32")))
            return seq(clear, loops("j", (each,), lambda j: add(i, j)))

        pairs = ((places.shape[0], rows * each),)
        return seq(
            *equality_checks("sum_rows: places and weights differ in number", *pairs), loops("i", (rows,), of_row)
        )

    def reference(self, x: Any, places: Any, weights: Any) -> Any:
        rows = x[places].reshape(*weights.shape, x.shape[1])
        return (rows * weights[..., None]).sum(axis=1, dtype=np.float32)

    def samples(self) -> Iterable[Sample]:
        make = {1: lambda shape, rng: rng.integers(0, 5, shape)}
        kinds = ("float32", "int64", "float32")
        yield Sample(((5, "n"), ("m*3",), ("m", 3)), {}, kinds, make)


def spans_of(counts: Sequence[int] | Array) -> Array:
    """Those of groups that have so many rows."""
    spans = np.zeros((len(counts) + 1, 3), np.int64)
    firsts = np.cumsum(counts) - counts
    result = [(e, first, count) for e, (first, count) in enumerate(zip(firsts, counts, strict=True)) if count]
    spans[0, 0] = len(result)
    spans[1 : 1 + len(result)] = np.array(result, np.int64).reshape(-1, 3)
    return spans


def _over_groups(op: Op, spans: Buffer, rows: SymExpr, make: Callable[[SymExpr, SymExpr, SymExpr], Stmt]) -> Stmt:
    """make(number, first row, count of rows) for all groups that have rows. That no two have the same, and that these
    are all rows, is the caller's promise: no loop can show it."""
    groups = (as_int(spans.shape[0]) or 1) - 1
    result, b = SymVar("found", lower=None, upper=groups), SymVar("b", upper=max(groups - 1, 0))
    given = [SymVar(name, lower=None) for name in ("given_number", "given_first", "given_count")]
    number, first, count = given
    known = [SymVar("number", upper=max(groups - 1, 0)), SymVar("first"), SymVar("count")]
    conditions = {
        "a number": (index(number) >= 0) & (index(number) < groups),
        "a first row": (index(first) >= 0) & (index(first) <= rows),
        "a count of rows": (index(count) >= 0) & (index(count) <= rows - first),
    }
    checks = (Check(cond.value, f"{op.name}: {what} is out of range in the spans") for what, cond in conditions.items())
    body = make(*known)
    for var, value in zip(reversed(known), reversed(given), strict=True):
        body = LetIndex(var, index(value).value, body)  # the same, of which more is known now
    body = seq(*checks, body)
    for k, var in reversed(list(enumerate(given))):
        body = LetIndex(var, spans[b + 1, sym(k)], body)
    are_some = (index(result) >= 0) & (index(result) <= groups)
    check = Check(are_some.value, f"{op.name}: the number of groups is out of range in the spans")
    return LetIndex(result, spans[sym(0), sym(0)], seq(check, For(b, result, body)))


class _Grouped(BlocksOp):
    """What the products share."""

    def of_members(self, spans: Expr, words: Expr, given: Sequence[Expr], coding: Coding) -> tuple[int, int, SymExpr]:
        """(rows, rows of a block, columns) of each matrix."""
        types = [self.tensor(x, "words") for x in (words, *given)]
        at, groups = self.tensor(spans, "spans"), {t.shape[0] if t.shape and t.rank == 3 else None for t in types}
        if None in groups or len(groups) > 1:
            self.fail(
                f"words, scales and what follows must be of rank 3, for one number of matrices, got {_told(types)}"
            )
        (count,) = groups
        assert count is not None
        if as_int(count) is None or at != TensorType.of((count + 1, 3), "int64"):
            self.fail(f"the spans of {count} matrices must be int64 ({count + 1}, 3), got {at}")
        members = [TensorType.of((t.shape or ())[1:], t.dtype) for t in types]
        return self.rows_of_types(members[0], members[1:], coding)


def _told(types: Iterable[Type]) -> str:
    return ", ".join(map(str, types))


@register
class GroupedMatmul(_Grouped):
    """Rows x float32 (p, k) by the matrix of their group: out[i] = x[i] @ weight[number of the group of i], float32
    (p, n); for weights in blocks: words int32 (groups, k * bits / 32, n), scales (groups, k / block, n) and so on.

    `coarse` as of dequantize_blocks. Rows of x stand as `spans` say, which group_rows makes.
    """

    name = "grouped_matmul"
    operands = ("x", "spans", *WEIGHT)
    attrs: ClassVar[Mapping[str, Attr]] = {**CODED, "coarse": Attr("bool", False)}

    def infer(self, x: Expr, spans: Expr, words: Expr, *given: Expr, coarse: bool, **coding: Any) -> Type:
        rows, _, columns = self.of_members(spans, words, given, Coding(**coding))
        ty = self.tensor(x, "x")
        if ty.dtype != "float32" or ty.rank != 2 or ty.shape is None or PROVER.can_prove_ne(ty.shape[1], rows):
            self.fail(f"x must be float32 (p, {rows}) for matrices of {rows} rows, got {ty}")
        return TensorType.of((ty.shape[0], columns), "float32")

    def lower(
        self, x: Buffer, spans: Buffer, words: Buffer, *given: Buffer, out: Buffer, coarse: bool, **coding: Any
    ) -> Stmt:
        weight, depth = Coding(**coding), x.shape[1]

        def product(number: SymExpr, first: SymExpr, count: SymExpr) -> Stmt:
            own, others = Member(words, number), [Member(b, number) for b in given]

            def element(i: SymExpr, j: SymExpr) -> Stmt:
                total = Buffer("e", (), "float32", "local")

                def add(k: SymExpr) -> Stmt:
                    return Store(
                        total, (), (Scalar(x[first + i, k]) * weight_at(own, others, k, j, weight)).value, "add"
                    )

                begin = Store(total, (), literal(0.0, "float32"))
                end = Store(out, (first + i, j), Load(total, ()))
                return Allocate(total, seq(begin, loops("k", (depth,), add), end))

            return loops("ij", (count, out.shape[1]), element)

        return seq(*_same_columns(self, words, given), _over_groups(self, spans, out.shape[0], product))

    def reference(self, x: Any, spans: Any, words: Any, *given: Any, coarse: bool, **coding: Any) -> Any:
        def product(number: int, rows: slice) -> Array:
            return np.asarray(x[rows] @ dequantized(words[number], [a[number] for a in given], Coding(**coding)))

        return _in_groups(x.shape[0], words.shape[2], spans, product)

    def samples(self) -> Iterable[Sample]:
        kinds = ("float32", "int64", "int32", "float32", "float32")
        make = {1: lambda shape, rng: spans_of((2, 0, 3, 1)), 2: some_words}
        yield Sample(((6, 64), (5, 3), (4, 8, "n"), (4, 2, "n")), {"bits": 4, "zero": 8}, kinds[:4], make, _ROUNDED)
        shapes = ((6, 32), (5, 3), (4, 5, "n"), (4, 1, "n"), (4, 1, "n"))
        yield Sample(shapes, {"bits": 5}, kinds, make, _ROUNDED)


@register
class GroupedMatmulBlocks(_Grouped):
    """grouped_matmul in integers: x, x_scales and x_sums as quantize_blocks makes them of all rows, and products,
    `low_bits` and `rotation` as of matmul_blocks."""

    name = "grouped_matmul_blocks"
    operands = ("x", "x_scales", "x_sums", "spans", *WEIGHT)
    attrs: ClassVar[Mapping[str, Attr]] = {
        **CODED, "low_bits": Attr("int", 0, LOW_BITS), "rotation": Attr("int", 1, ROTATIONS),
    }  # fmt: skip

    def infer(
        self, x: Expr, x_scales: Expr, x_sums: Expr, spans: Expr, words: Expr, *given: Expr, low_bits: int,
        rotation: int, **coding: Any,
    ) -> Type:  # fmt: skip
        rows, block, columns = self.of_members(spans, words, given, Coding(**coding))
        types = [self.tensor(v, name) for v, name in zip((x, x_scales, x_sums), self.operands, strict=False)]
        count = self.rounded_rows(types, rows, block, Coding(**coding), low_bits, rotation)
        return TensorType.of((count, columns), "float32")

    def lower(
        self, x: Buffer, x_scales: Buffer, x_sums: Buffer, spans: Buffer, words: Buffer, *given: Buffer, out: Buffer,
        low_bits: int, rotation: int, **coding: Any,
    ) -> Stmt:  # fmt: skip
        pairs = ((b.shape[-1], x.shape[1]) for b in (x_scales, x_sums))
        checks = equality_checks("grouped_matmul_blocks: x and its scales have different rows", *pairs)

        def product(number: SymExpr, first: SymExpr, count: SymExpr) -> Stmt:
            own, others = Member(words, number), [Member(b, number) for b in given]
            sums = BlockSums((x, x_scales, x_sums), own, others, Coding(**coding), low_bits, rotation)
            extents = (count, out.shape[1])
            return loops("ij", extents, lambda i, j: sums.store(out, (first + i, j), first + i, j))

        products = _over_groups(self, spans, out.shape[0], product)
        return seq(*checks, *_same_columns(self, words, given), products)

    def reference(
        self, x: Any, x_scales: Any, x_sums: Any, spans: Any, words: Any, *given: Any, low_bits: int, rotation: int,
        **coding: Any,
    ) -> Any:  # fmt: skip
        def product(number: int, rows: slice) -> Array:
            rounded = (x[:, rows], x_scales[:, rows], x_sums[..., rows])
            others = [a[number] for a in given]
            return multiplied(rounded, words[number], others, Coding(**coding), low_bits, rotation)

        return _in_groups(x.shape[1], words.shape[2], spans, product)

    def samples(self) -> Iterable[Sample]:
        kinds = ("int8", "float32", "int32", "int64", "int32", "float32", "float32")
        for bits, block, zero, low_bits, rotation in ((4, 32, 8, 4, 1), (5, 32, 0, 0, 1), (4, 32, 8, 0, 8)):
            rows = (2, 6) if rotation == 1 else (2, 2, 6)
            given = ((2, 6, bytes_of_block(block, low_bits)), (2, 6), rows)
            weight: tuple[tuple[int | str, ...], ...] = ((4, 2 * block * bits // 32, "n"), (4, 2, "n"))
            attrs: dict[str, Any] = {"bits": bits, "zero": zero, "low_bits": low_bits, "rotation": rotation}
            rounded = quantized_rows(6, 2 * block, block, low_bits, rotation)
            make: dict[int, Any] = {k: lambda shape, rng, a=a: a for k, a in enumerate(rounded)}
            make |= {3: lambda shape, rng: spans_of((2, 0, 3, 1)), 4: some_words}
            shapes = (*given, (5, 3), *weight, *([] if zero else [(4, 2, "n")]))
            yield Sample(shapes, attrs, kinds[: 6 if zero else 7], make, 1e-4)


def quantized_rows(m: int, depth: int, block: int, low_bits: int, rotation: int) -> Any:
    """Some rows (m, depth) as quantize_blocks rounds them."""
    x = np.random.default_rng(0).standard_normal((m, depth)).astype(np.float32)
    return get_op("quantize_blocks").reference(x, block=block, low_bits=low_bits, rotation=rotation)


def _same_columns(op: Op, words: Buffer, given: Sequence[Buffer]) -> tuple[Stmt, ...]:
    pairs = ((b.shape[2], words.shape[2]) for b in given)
    return equality_checks(f"{op.name}: codes and scales have different columns", *pairs)


def _in_groups(rows: int, columns: int, spans: Array, product: Callable[[int, slice], Array]) -> Array:
    out = np.zeros((rows, columns), np.float32)
    for number, first, count in spans[1 : 1 + spans[0, 0]].tolist():
        out[first : first + count] = product(number, slice(first, first + count))
    return out
