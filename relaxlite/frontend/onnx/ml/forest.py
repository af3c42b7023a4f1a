"""Decision trees as arrays, and their packed form for the op `tree_ensemble`.

The op has one test, x[feature] <= threshold. Other tests become that one: `<` compares with the float before the
threshold, `>` and `>=` exchange the children, `==` takes two nodes and set membership two per member.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.ir.expr import Array
from relaxlite.ir.ops.decision_trees import FEATURE, GROUP, IF_FALSE, LEVELS_PER_STEP, NODE_WORDS, THRESHOLD, WORDS
from relaxlite.records import dataclass

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER, LEAF = range(8)  # tests; the first seven are numbered as in ONNX's TreeEnsemble


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees as NumPy arrays over nodes. Both children of a leaf are the leaf itself."""

    feature: Any  # int64
    threshold: Any  # float32 or float64
    test: Any  # LEQ, LT, ...
    if_true: Any  # int64, positions of nodes
    if_false: Any
    missing: Any  # bool: whether NaN passes the test
    roots: Any  # int64 (trees,)
    members: Mapping[int, Any] = field(default_factory=dict)  # of MEMBER tests, by node

    @property
    def is_leaf(self) -> Any:
        return self.test == LEAF

    def with_nodes(self, **columns: Any) -> Forest:
        """Return the trees with more nodes at the end; columns: the arrays of the new nodes, by field."""
        joined = {name: np.concatenate([getattr(self, name), more]) for name, more in columns.items()}
        changed: Any = {name: values.astype(getattr(self, name).dtype) for name, values in joined.items()}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class LeafWeights:
    """Weights of leaves as a list of (node, target, weight)."""

    node: Any  # int64 (k,)
    target: Any  # int64 (k,)
    weight: Any  # (k,)


@dataclass(frozen=True, slots=True)
class PackedForest:
    """Operands of the op `tree_ensemble` after x, and its attributes."""

    operands: tuple[Array, ...]
    num_features: int
    missing: str


def pack_forest(forest: Forest, leaves: LeafWeights, num_targets: int, fill: float) -> PackedForest:
    """Pack trees; `fill` is the weight of absent leaves, the identity of the aggregation.

    Raises ImportModelError for cycles and for weights that name no leaf or target.
    """
    _check_leaves(forest, leaves, num_targets)
    forest, leaves = _in_walk_order(forest, leaves)
    single = _single_weights(forest, leaves, fill)
    numbers, weights = (np.zeros(len(forest.test), np.int64), None)
    if single is None:
        numbers, weights = _weight_rows(forest, leaves, num_targets, fill)
    values, targets = single or (np.zeros(len(forest.test)), np.zeros(len(forest.roots), np.int64))
    forest = _as_one_test(forest)
    numbers, values = (_lengthened(x, len(forest.test)) for x in (numbers, values))
    steps = -(-_depths(forest) // LEVELS_PER_STEP)
    nodes = _node_table(forest, values if single is not None else None, numbers)
    fillers = -len(forest.roots) % GROUP
    nodes = np.concatenate([nodes, _filler_leaf(nodes, fill, None if weights is None else len(weights))])
    if weights is not None:
        weights = np.concatenate([weights, np.full((1, num_targets), fill, weights.dtype)])
    order = np.argsort(steps, kind="stable")
    pad = np.full(fillers, len(nodes) - 1, np.int64)
    roots = np.concatenate([forest.roots[order], pad]).astype(np.int32).reshape(-1, GROUP)
    of_trees = np.concatenate([targets[order], np.zeros(fillers, np.int64)]).astype(np.int32).reshape(-1, GROUP)
    of_groups = np.concatenate([steps[order], np.zeros(fillers, np.int64)]).reshape(-1, GROUP).max(axis=1)
    operands = (nodes, roots, of_groups.astype(np.int32), of_trees, *(() if weights is None else (weights,)))
    inner = ~forest.is_leaf
    num_features = int(forest.feature[inner].max()) + 1 if inner.any() else 0
    passing = set(forest.missing[inner].tolist())
    return PackedForest(operands, num_features, "mixed" if len(passing) > 1 else str(passing == {True}).lower())


def _check_leaves(forest: Forest, leaves: LeafWeights, num_targets: int) -> None:
    if not len(forest.roots):
        raise ImportModelError("the ensemble has no trees")
    wrong = (leaves.target < 0) | (leaves.target >= num_targets)
    if wrong.any():
        raise ImportModelError(f"a leaf names target {leaves.target[wrong][0]} of {num_targets}")
    if forest.feature.min() < 0:
        raise ImportModelError("a node tests a feature with a negative number")


# The order of nodes


def _in_walk_order(forest: Forest, leaves: LeafWeights) -> tuple[Forest, LeafWeights]:
    """Order nodes so that the child with more descendants, the likelier one, follows its parent in memory."""
    levels = _levels(forest)
    size = np.ones(len(forest.test), np.int64)
    for parents in reversed(levels):
        size[parents] += size[forest.if_true[parents]] + size[forest.if_false[parents]]
    place = np.full(len(forest.test), -1, np.int64)
    place[forest.roots] = np.cumsum(size[forest.roots]) - size[forest.roots]
    for parents in levels:
        left, right = forest.if_true[parents], forest.if_false[parents]
        first = np.where(size[left] >= size[right], left, right)
        place[first] = place[parents] + 1
        place[left + right - first] = place[parents] + 1 + size[first]
    total = int(size[forest.roots].sum())
    used = place >= 0
    if int(used.sum()) != total:  # a node with two parents: any order is right
        return forest, leaves
    old = np.empty(total, np.int64)
    old[place[used]] = np.flatnonzero(used)
    moved = Forest(
        forest.feature[old],
        forest.threshold[old],
        forest.test[old],
        place[forest.if_true[old]],
        place[forest.if_false[old]],
        forest.missing[old],
        place[forest.roots],
        {int(place[node]): values for node, values in forest.members.items() if place[node] >= 0},
    )
    kept = place[leaves.node] >= 0
    return moved, LeafWeights(place[leaves.node[kept]], leaves.target[kept], leaves.weight[kept])


def _levels(forest: Forest) -> list[Any]:
    """The inner nodes of each level, over all trees. Raises ImportModelError for a cycle."""
    levels, inner, last = [], ~forest.is_leaf, np.zeros(len(forest.test), np.int64)
    level = forest.roots[inner[forest.roots]]
    while len(level):
        levels.append(level)
        if len(levels) > len(forest.test):
            raise ImportModelError("the nodes of a tree form a cycle: a node is its own descendant")
        children = np.concatenate([forest.if_true[level], forest.if_false[level]])
        children = children[inner[children]]
        numbers = np.arange(len(children))
        last[children] = numbers
        level = children[last[children] == numbers]  # each once
    return levels


def _depths(forest: Forest) -> Any:
    """The number of inner nodes on the longest way through each tree."""
    height = np.zeros(len(forest.test), np.int64)
    for parents in reversed(_levels(forest)):
        height[parents] = 1 + np.maximum(height[forest.if_true[parents]], height[forest.if_false[parents]])
    return height[forest.roots]


# Weights


def _trees_of_nodes(forest: Forest) -> Any:
    tree = np.full(len(forest.test), -1, np.int64)
    tree[forest.roots] = np.arange(len(forest.roots))
    for parents in _levels(forest):
        tree[forest.if_true[parents]] = tree[parents]
        tree[forest.if_false[parents]] = tree[parents]
    return tree


def _single_weights(forest: Forest, leaves: LeafWeights, fill: float) -> tuple[Any, Any] | None:
    """The weight of each leaf and the target of each tree, if leaves have one weight and trees one target."""
    is_of_leaf = forest.is_leaf[leaves.node]
    node, target, weight = leaves.node[is_of_leaf], leaves.target[is_of_leaf], leaves.weight[is_of_leaf]
    if np.bincount(node, minlength=1).max() > 1:
        return None
    tree = _trees_of_nodes(forest)[node]
    targets = np.zeros(len(forest.roots), np.int64)
    targets[tree] = target
    if (targets[tree] != target).any():
        return None
    values = np.full(len(forest.test), fill, forest.threshold.dtype)
    values[node] = weight
    return values, targets


def _weight_rows(forest: Forest, leaves: LeafWeights, num_targets: int, fill: float) -> tuple[Any, Any]:
    """The number of each leaf, and its weights (leaves, num_targets)."""
    numbers = np.cumsum(forest.is_leaf) - 1
    weights = np.full((int(forest.is_leaf.sum()), num_targets), fill, forest.threshold.dtype)
    is_of_leaf = forest.is_leaf[leaves.node]
    at = (numbers[leaves.node[is_of_leaf]], leaves.target[is_of_leaf])
    if fill == 0:
        np.add.at(weights, at, leaves.weight[is_of_leaf])
    else:
        (np.minimum if fill > 0 else np.maximum).at(weights, at, leaves.weight[is_of_leaf])
    return numbers, weights


# Tests


def _as_one_test(forest: Forest) -> Forest:
    """Express all tests by x <= threshold."""
    forest = _without_members(forest)
    forest = _exchanged(forest, forest.test == NEQ, EQ, flips_missing=False)
    forest = _exchanged(forest, forest.test == GTE, LT, flips_missing=True)
    forest = _exchanged(forest, forest.test == GT, LEQ, flips_missing=True)
    forest = _without_equality(forest)
    before = np.where(forest.test == LT, _float_before(forest.threshold), forest.threshold)
    return replace(forest, threshold=before, test=np.where(forest.is_leaf, LEAF, LEQ))


def _float_before(x: Any) -> Any:
    """The greatest float less than x; NaN, which no number is <=, for -inf."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # NaN in leaves, and the least float
        return np.where(x == -np.inf, np.nan, np.nextafter(x, np.array(-np.inf, x.dtype))).astype(x.dtype)


def _exchanged(forest: Forest, where: Any, test: int, *, flips_missing: bool) -> Forest:
    """Replace tests by their opposite with exchanged children. NaN fails a test and its opposite, except for `!=`."""
    missing = ~forest.missing if flips_missing else np.zeros_like(forest.missing)
    return replace(
        forest,
        test=np.where(where, test, forest.test),
        if_true=np.where(where, forest.if_false, forest.if_true),
        if_false=np.where(where, forest.if_true, forest.if_false),
        missing=np.where(where, missing, forest.missing),
    )


def _without_equality(forest: Forest) -> Forest:
    """x == t is x <= t and not x < t: a second node behind the first."""
    nodes = np.flatnonzero(forest.test == EQ)
    test, if_true = forest.test.copy(), forest.if_true.copy()
    test[nodes], if_true[nodes] = LEQ, len(forest.test) + np.arange(len(nodes))
    return replace(forest, test=test, if_true=if_true).with_nodes(
        feature=forest.feature[nodes],
        threshold=forest.threshold[nodes],
        test=np.full(len(nodes), LT),
        if_true=forest.if_false[nodes],
        if_false=forest.if_true[nodes],
        missing=np.zeros(len(nodes), bool),
    )


def _without_members(forest: Forest) -> Forest:
    """Membership in a set is equality with the first member, or else with the next."""
    for node, members in forest.members.items():
        forest = _chained(forest, node, members)
    return forest


def _chained(forest: Forest, node: int, members: Any) -> Forest:
    if not len(members):
        raise ImportModelError("a BRANCH_MEMBER node has no members")
    count, more = len(forest.test), len(members) - 1
    chain, other = count + np.arange(more), forest.if_false[node]
    test, threshold, if_false = forest.test.copy(), forest.threshold.copy(), forest.if_false.copy()
    test[node], threshold[node], if_false[node] = EQ, members[0], chain[0] if more else other
    return replace(forest, test=test, threshold=threshold, if_false=if_false).with_nodes(
        feature=np.full(more, forest.feature[node]),
        threshold=members[1:],
        test=np.full(more, EQ),
        if_true=np.full(more, forest.if_true[node]),
        if_false=np.append(chain[1:], other)[:more],
        missing=np.zeros(more, bool),
    )


# The table


def _lengthened(x: Any, size: int) -> Any:
    return np.concatenate([x, np.zeros(size - len(x), x.dtype)])


def _node_table(forest: Forest, values: Any, numbers: Any) -> Any:
    """Nodes in the layout of ir/ops/decision_trees.py; leaves hold `values`, or without them `numbers`."""
    dtype, leaf = forest.threshold.dtype, forest.is_leaf
    words = np.dtype(WORDS[dtype.name])
    nodes = np.zeros((len(leaf), NODE_WORDS), words)
    nodes[:, FEATURE] = np.where(leaf, 0, forest.feature * 2 + forest.missing)
    thresholds = forest.threshold if values is None else np.where(leaf, values, forest.threshold)
    nodes[:, THRESHOLD] = np.ascontiguousarray(thresholds.astype(dtype)).view(words)
    if values is None:
        nodes[leaf, THRESHOLD] = numbers[leaf]
    nodes[:, IF_FALSE], nodes[:, IF_FALSE + 1] = forest.if_false, forest.if_true
    return nodes


def _filler_leaf(nodes: Any, fill: float, number: int | None) -> Any:
    """The leaf of absent trees, with weight `fill` or this row of weights."""
    leaf = np.full((1, NODE_WORDS), len(nodes), nodes.dtype)
    dtype = next(name for name, words in WORDS.items() if words == nodes.dtype.name)
    leaf[0, FEATURE] = 0
    leaf[0, THRESHOLD] = np.array(fill, dtype).view(nodes.dtype) if number is None else number
    return leaf
