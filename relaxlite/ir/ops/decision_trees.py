"""Ensembles of decision trees: random forests and boosted trees.

Nodes of all trees are packed in one table, four words each, in float32 or float64 size:

    feature * 2 + missing | bits of the threshold | child if false | child if true

The test of a node is x[feature] <= threshold; a NaN goes where `missing` says. Both children of a leaf are the leaf
itself, and the place of its threshold holds its weight (one per leaf) or its number (a row of weights per leaf). A walk
may so run past a leaf, and walks of several trees advance together without a branch: the latencies of their loads
overlap. Trees of one group start at `roots[group]` and end after `steps[group]` steps of `LEVELS_PER_STEP` levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.intrinsics import BITCASTS
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.ops.scalars import Scalar, identity, index, literal
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Cast,
    Check,
    For,
    IfThenElse,
    Intrinsic,
    LetIndex,
    Load,
    Stmt,
    Store,
    Value,
    loops,
    reduce,
    seq,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, smax, smin, sym
from relaxlite.ir.types import TensorType, Type

GROUP = 8  # trees that are walked together
LEVELS_PER_STEP = 2  # levels between two tests whether all walks have ended
NODE_WORDS = 4
WORDS: Mapping[str, str] = {"float32": "int32", "float64": "int64"}  # of a node, by the dtype of its threshold

_MAX_PARTS = 16  # parts of the trees that run in parallel when rows are few
_FEW_ROWS = 128  # from this number of rows on, tasks differ in rows only
_MIN_BLOCK, _MAX_BLOCK, _BLOCKS = 16, 512, 32  # rows of a task; the trees of a group stay in cache from row to row

FEATURE, THRESHOLD, IF_FALSE = 0, 1, 2


@register
class TreeEnsemble(Op):
    """Sums, minima or maxima of leaf weights over trees: (n, num_targets), of the dtype of x.

    x (n, features) float32 or float64; nodes (m, 4) int32 or int64 (the module's docstring); roots int32 (groups, 8);
    steps int32 (groups,). Without `weights`, a leaf has one weight, for the target of its tree: targets int32
    (groups, 8). With weights (leaves, num_targets), a leaf has one weight per target, and `targets` is not read. A
    target without a tree gives the identity of `aggregate`. missing: the branch of NaN, if all nodes agree.
    """

    name = "tree_ensemble"
    operands = ("x", "nodes", "roots", "steps", "targets", "weights?")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "num_targets": Attr("int"),
        "num_features": Attr("int"),  # that nodes test
        "aggregate": Attr("str", "add", ("add", "min", "max")),
        "missing": Attr("str", "mixed", ("false", "true", "mixed")),
    }

    def infer(self, *operands: Expr, num_targets: int, num_features: int, aggregate: str, missing: str) -> Type:
        types = [self.tensor(x, name.rstrip("?")) for x, name in zip(operands, self.operands, strict=False)]
        listing = ", ".join(map(str, types))
        x, nodes, roots, steps, targets, *weights = types
        if [t.rank for t in types] != [2, 2, 2, 1, 2, *[2] * len(weights)]:
            self.fail(f"x, nodes, roots, steps, targets and weights must have ranks 2, 2, 2, 1, 2, 2, got {listing}")
        if nodes.dtype != WORDS.get(x.dtype) or {t.dtype for t in (roots, steps, targets)} != {"int32"}:
            self.fail(f"x must be float32 or float64 and nodes integers of its size, got {listing}")
        if any(t.dtype != x.dtype for t in weights):
            self.fail(f"weights must have the dtype of x, got {listing}")
        if as_int((roots.shape or ())[1]) != GROUP or as_int((nodes.shape or ())[1]) != NODE_WORDS:
            self.fail(f"nodes have {NODE_WORDS} words and groups {GROUP} trees, got {listing}")
        rows, features = x.shape or ()
        if PROVER.can_prove_lt(features, sym(num_features)):
            self.fail(f"the trees test {num_features} features, x has {features}: {listing}")
        return TensorType.of((rows, num_targets), x.dtype)

    def lower(
        self, x: Buffer, nodes: Buffer, roots: Buffer, steps: Buffer, targets: Buffer, weights: Buffer | None = None,
        *, out: Buffer, num_targets: int, num_features: int, aggregate: str, missing: str,
    ) -> Stmt:  # fmt: skip
        rows, groups = x.shape[0], roots.shape[0]
        parts = smax(sym(1), smin(smin(groups, sym(_MAX_PARTS)), sym(_FEW_ROWS) // smax(rows, sym(1))))
        block = smin(sym(_MAX_BLOCK), smax(sym(_MIN_BLOCK), ceildiv(rows, _BLOCKS)))
        blocks = ceildiv(rows, block)
        partial = Buffer("partial", (parts, rows, sym(num_targets)), x.dtype)
        start = identity(aggregate, x.dtype)
        walk = _Walk(x, nodes, missing)

        def add_leaf(part: SymExpr, row: SymExpr, group: SymExpr, k: int, leaf: SymExpr) -> Stmt:
            if weights is None:
                target = SymVar("target", upper=num_targets - 1)
                weight = walk.threshold(leaf)
                add = Store(partial, (part, row, target), weight, aggregate)
                return LetIndex(target, targets[group, sym(k)], add)
            number = _place("number", weights.shape[0])
            add_row = loops(
                "c", (num_targets,), lambda c: Store(partial, (part, row, c), weights[number, c], aggregate)
            )
            return LetIndex(number, nodes[leaf, sym(THRESHOLD)], add_row)

        def task(t: SymExpr) -> Stmt:
            part, begin = SymVar("part"), SymVar("begin")
            first = part * groups // parts
            count = (part + 1) * groups // parts - first
            here = smin(block, rows - begin)
            clear = loops("rc", (here, num_targets), lambda r, c: Store(partial, (part, begin + r, c), start))

            def visit(g: SymExpr, r: SymExpr) -> Stmt:
                group, row = _place("group", groups), SymVar("row")
                body = walk.group(row, group, roots, steps, lambda k, leaf: add_leaf(part, row, group, k, leaf))
                return LetIndex(group, index(first + g).value, LetIndex(row, index(begin + r).value, body))

            body = seq(clear, loops("gr", (count, here), visit))
            return LetIndex(part, index(t % parts).value, LetIndex(begin, index(t // parts * block).value, body))

        t = SymVar("t")
        enough = Check((index(x.shape[1]) >= num_features).value, f"{self.name}: x has fewer features than the trees")
        total = reduce(out, (parts,), aggregate, start, lambda n, c, p: partial[p, n, c])
        return seq(enough, Allocate(partial, seq(For(t, parts * blocks, task(t), "parallel"), total)))

    def reference(
        self, x: Any, nodes: Any, roots: Any, steps: Any, targets: Any, weights: Any = None, *,
        num_targets: int, num_features: int, aggregate: str, missing: str,
    ) -> Any:  # fmt: skip
        ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum}[aggregate]
        out = np.full((len(x), num_targets), identity(aggregate, x.dtype.name).value, x.dtype)
        thresholds, every = np.ascontiguousarray(nodes[:, THRESHOLD]).view(x.dtype), np.arange(len(x))
        for group, tree in np.ndindex(roots.shape):
            at = np.full(len(x), roots[group, tree])
            for _ in range(int(steps[group]) * LEVELS_PER_STEP):
                value = x[every, nodes[at, FEATURE] >> 1]
                is_true = (value <= thresholds[at]) | (np.isnan(value) & (nodes[at, FEATURE] & 1 != 0))
                at = nodes[at, IF_FALSE + is_true]
            if weights is None:
                target = targets[group, tree]
                out[:, target] = ufunc(out[:, target], thresholds[at])
            else:
                out = ufunc(out, weights[nodes[at, THRESHOLD]])
        return out

    def samples(self) -> Iterable[Sample]:
        for dtype in WORDS:
            yield _sample(dtype, {"num_targets": 1}, with_weights=False)
            yield _sample(dtype, {"num_targets": 3, "aggregate": "max"}, with_weights=True)


def _place(name: str, size: SymExpr) -> SymVar:
    """Return a variable for an index that comes from the tables of the trees, along an axis of this size."""
    known = as_int(size)
    return SymVar(name, upper=None if known is None else max(0, known - 1))


class _Walk:
    """Builds the walks of the trees of a group for one row."""

    def __init__(self, x: Buffer, nodes: Buffer, missing: str) -> None:
        self.x, self.nodes, self.missing = x, nodes, missing

    def threshold(self, node: SymExpr) -> Value:
        """Return the threshold of a node, or the weight of a leaf."""
        words = self.nodes.dtype
        return Intrinsic(BITCASTS[words, self.x.dtype], (self.nodes[node, sym(THRESHOLD)],), self.x.dtype)

    def group(self, row: SymExpr, group: SymExpr, roots: Buffer, steps: Buffer, at_leaf: Any) -> Stmt:
        """Walk from the roots of a group to leaves, then build at_leaf(tree, leaf) for each tree."""
        at = Buffer("at", (sym(GROUP),), self.nodes.dtype, "local")
        moving = Buffer("moving", (), self.nodes.dtype, "local")
        zero, one = (literal(v, moving.dtype) for v in (0, 1))
        enter = [Store(at, (sym(k),), Scalar(roots[group, sym(k)]).cast(at.dtype).value) for k in range(GROUP)]
        levels = [
            self.advance(at, k, row, moving if level == LEVELS_PER_STEP - 1 else None)
            for level in range(LEVELS_PER_STEP)
            for k in range(GROUP)
        ]
        step = IfThenElse(Scalar(moving[()]).differs(0).value, seq(Store(moving, (), zero), *levels))
        count = SymVar("count", lower=0)
        walk = LetIndex(count, steps[group], loops("s", (count,), lambda s: step))
        leaves = [self.at_leaf(at, k, at_leaf) for k in range(GROUP)]
        return Allocate(at, Allocate(moving, seq(*enter, Store(moving, (), one), walk, *leaves)))

    def at_leaf(self, at: Buffer, k: int, build: Any) -> Stmt:
        leaf = _place("leaf", self.nodes.shape[0])
        return LetIndex(leaf, at[sym(k)], build(k, leaf))

    def advance(self, at: Buffer, k: int, row: SymExpr, moving: Buffer | None) -> Stmt:
        """Advance the walk of tree k by one level; `moving` collects whether a walk is not at a leaf."""
        node = _place("node", self.nodes.shape[0])
        word, side = SymVar("word"), SymVar("side", upper=1)
        value = Scalar(self.x[row, word // 2])
        threshold = Scalar(self.threshold(node))
        child = Load(self.nodes, (node, side + IF_FALSE))
        stores: list[Stmt] = [Store(at, (sym(k),), child)]
        if moving is not None:
            moved = Scalar(child).differs(index(node, at.dtype)).cast(moving.dtype)
            stores.insert(0, Store(moving, (), moved.value, "or"))
        take = LetIndex(side, self.test(value, threshold, index(word)), seq(*stores))
        return LetIndex(node, at[sym(k)], LetIndex(word, self.nodes[node, sym(FEATURE)], take))

    def test(self, value: Scalar, threshold: Scalar, word: Scalar) -> Value:
        """Return 1 if the test of a node is true, else 0."""
        if self.missing == "true":
            return (1 - (value > threshold).cast("int32")).value
        is_true = value <= threshold
        if self.missing == "mixed":
            is_true = is_true | (value.differs(value) & (word.binary("and", 1)).differs(0))
        return Cast(is_true.value, "int32")


_SAMPLE_TREES, _SAMPLE_NODES, _SAMPLE_FEATURES, _SAMPLE_LEAVES = 2 * GROUP, 15, 4, 5


def _sample(dtype: str, attrs: Mapping[str, Any], *, with_weights: bool) -> Sample:
    """Two groups of perfect trees of three levels; leaves share rows of weights."""
    count = attrs["num_targets"]
    grid = (2, GROUP)
    shapes = (("n", _SAMPLE_FEATURES), (_SAMPLE_TREES * _SAMPLE_NODES, NODE_WORDS), grid, (2,), grid)
    draws = {
        0: _draw_rows,
        1: lambda shape, rng: _draw_nodes(rng, dtype, with_weights),
        2: lambda shape, rng: np.arange(0, _SAMPLE_TREES * _SAMPLE_NODES, _SAMPLE_NODES).reshape(shape),
        3: lambda shape, rng: np.full(shape, 2),
        4: lambda shape, rng: rng.integers(0, count, shape),
    }
    kinds = (dtype, WORDS[dtype], "int32", "int32", "int32", dtype)
    more = ((_SAMPLE_LEAVES, count),) if with_weights else ()
    attrs = {"num_features": _SAMPLE_FEATURES, **attrs}
    return Sample((*shapes, *more), attrs, kinds[: 5 + len(more)], draws)


def _draw_rows(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    x = rng.standard_normal(shape)
    x[rng.random(shape) < 0.2] = np.nan
    return x


def _draw_nodes(rng: np.random.Generator, dtype: str, with_weights: bool) -> Any:
    numbers = np.arange(_SAMPLE_TREES * _SAMPLE_NODES)
    first = numbers - numbers % _SAMPLE_NODES
    place = numbers - first
    is_leaf = place >= _SAMPLE_NODES // 2
    nodes = np.zeros((len(numbers), NODE_WORDS), WORDS[dtype])
    nodes[:, FEATURE] = np.where(is_leaf, 0, rng.integers(0, _SAMPLE_FEATURES * 2, len(numbers)))
    nodes[:, THRESHOLD] = rng.standard_normal(len(numbers)).astype(dtype).view(WORDS[dtype])
    if with_weights:
        nodes[is_leaf, THRESHOLD] = rng.integers(0, _SAMPLE_LEAVES, int(is_leaf.sum()))
    for side in (0, 1):
        nodes[:, IF_FALSE + side] = np.where(is_leaf, numbers, first + place * 2 + 1 + side)
    return nodes
