"""Trees from the attributes of ONNX nodes, of the older two ops and of TreeEnsemble (opset 5)."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite.frontend.onnx.ml.forest import EQ, GT, GTE, LEAF, LEQ, LT, MEMBER, NEQ, Forest, LeafWeights
from relaxlite.frontend.onnx.node import Node

_TESTS = {
    "BRANCH_LEQ": LEQ, "BRANCH_LT": LT, "BRANCH_GTE": GTE, "BRANCH_GT": GT, "BRANCH_EQ": EQ, "BRANCH_NEQ": NEQ,
    "LEAF": LEAF,
}  # fmt: skip


def values_of(n: Node, name: str) -> Any:
    """Return a list of floats that is an attribute, or a tensor `<name>_as_tensor`; float32 (0,) if it is absent."""
    tensor, floats = n.tensor(f"{name}_as_tensor"), np.array(n.floats(name, []), np.float32)
    return floats if tensor is None else tensor.value.reshape(-1)


def integers(n: Node, name: str) -> Any:
    return np.array(n.ints(name), np.int64)


def _check_sizes(n: Node, size: int, what: str, **arrays: Any) -> None:
    for name, array in arrays.items():
        if len(array) != size:
            n.fail(f"attribute '{name}' has {len(array)} elements where {what} has {size}")


def read_forest(n: Node, prefix: str) -> tuple[Forest, LeafWeights]:
    """Read the trees of TreeEnsembleRegressor or TreeEnsembleClassifier; `prefix` is "target" or "class".

    Thresholds and weights are in one dtype, float64 if one of them is.
    """
    n.ignore("nodes_hitrates", "nodes_hitrates_as_tensor")
    tree, node = integers(n, "nodes_treeids"), integers(n, "nodes_nodeids")
    thresholds, weights = values_of(n, "nodes_values"), values_of(n, f"{prefix}_weights")
    dtype = np.result_type(thresholds, weights)
    features = integers(n, "nodes_featureids")
    true_ids, false_ids = integers(n, "nodes_truenodeids"), integers(n, "nodes_falsenodeids")
    test = _tests(n)
    missing = np.array(n.ints("nodes_missing_value_tracks_true", ()) or np.zeros(len(node)), bool)
    _check_sizes(
        n, len(node), "nodes_nodeids", nodes_treeids=tree, nodes_values=thresholds, nodes_featureids=features,
        nodes_truenodeids=true_ids, nodes_falsenodeids=false_ids, nodes_modes=test,
        nodes_missing_value_tracks_true=missing,
    )  # fmt: skip
    places = _Places(n, tree, node)
    own, leaf = np.arange(len(node)), test == LEAF
    if_true, if_false = (
        np.where(leaf, own, places.find(tree, np.where(leaf, node, ids), name))
        for ids, name in ((true_ids, "nodes_truenodeids"), (false_ids, "nodes_falsenodeids"))
    )
    feature, roots = np.where(leaf, 0, features), _roots(tree, [if_true, if_false])
    forest = Forest(feature, thresholds.astype(dtype), test, if_true, if_false, missing, roots)
    return forest, _read_weights(n, prefix, places, weights.astype(dtype))


def _tests(n: Node) -> Any:
    names = n.texts("nodes_modes")
    unknown = set(names) - set(_TESTS)
    if unknown:
        n.fail(f"attribute 'nodes_modes' has {min(unknown)!r}; known are {', '.join(_TESTS)}")
    return np.fromiter(map(_TESTS.__getitem__, names), np.int64, len(names))


def _read_weights(n: Node, prefix: str, places: _Places, weights: Any) -> LeafWeights:
    trees, nodes, targets = (integers(n, f"{prefix}_{kind}") for kind in ("treeids", "nodeids", "ids"))
    names = {f"{prefix}_treeids": trees, f"{prefix}_nodeids": nodes, f"{prefix}_ids": targets}
    _check_sizes(n, len(weights), f"{prefix}_weights", **names)
    return LeafWeights(places.find(trees, nodes, f"{prefix}_nodeids"), targets, weights)


def _roots(tree: Any, children: list[Any]) -> Any:
    """The first node of each tree that no other node leads to, or else the first node of the tree."""
    own = np.arange(len(tree))
    has_parent = np.zeros(len(tree), bool)
    for child in children:
        has_parent[child[child != own]] = True
    order = np.lexsort((own, has_parent, tree))
    trees = tree[order]
    return order[np.flatnonzero(np.append(True, trees[1:] != trees[:-1])[: len(trees)])]


class _Places:
    """Positions of nodes by tree and number."""

    def __init__(self, n: Node, tree: Any, node: Any) -> None:
        if len(node) and (tree.min() < 0 or node.min() < 0):
            n.fail("attributes 'nodes_treeids' and 'nodes_nodeids' must not be negative")
        self.n, self.stride = n, int(node.max()) + 1 if len(node) else 1
        keys = tree * self.stride + node
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]
        if (self.keys[1:] == self.keys[:-1]).any():
            n.fail("attribute 'nodes_nodeids' has a node twice in one tree")

    def find(self, tree: Any, node: Any, name: str) -> Any:
        keys = tree * self.stride + node
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        wrong = (self.keys[at] != keys) | (node < 0) | (node >= self.stride)
        if wrong.any():
            self.n.fail(
                f"attribute '{name}' names node {node[wrong][0]} of tree {tree[wrong][0]}, which does not exist"
            )
        return self.order[at]


# TreeEnsemble of opset 5


def read_ensemble(n: Node) -> tuple[Forest, LeafWeights]:
    """Read the trees of TreeEnsemble: inner nodes and leaves have their own numbers; leaves follow as nodes."""
    n.ignore("nodes_hitrates")
    splits, tests, weights = (n.tensor(name) for name in ("nodes_splits", "nodes_modes", "leaf_weights"))
    if splits is None or tests is None or weights is None:
        n.fail("attributes 'nodes_splits', 'nodes_modes' and 'leaf_weights' are needed")
    test, features = tests.value.astype(np.int64), integers(n, "nodes_featureids")
    count, num_leaves = len(features), weights.value.size
    dtype = splits.value.dtype if splits.value.dtype == np.float64 else np.dtype(np.float32)
    children = [_children(n, side, count, num_leaves) for side in ("true", "false")]
    missing = np.array(n.ints("nodes_missing_value_tracks_true", ()) or np.zeros(count), bool)
    _check_sizes(
        n, count, "nodes_featureids", nodes_splits=splits.value, nodes_modes=test,
        nodes_missing_value_tracks_true=missing,
    )  # fmt: skip
    if test.size and (test.min() < LEQ or test.max() > MEMBER):
        n.fail(f"attribute 'nodes_modes' must be between {LEQ} and {MEMBER}")
    targets = integers(n, "leaf_targetids")
    _check_sizes(n, num_leaves, "leaf_weights", leaf_targetids=targets)
    leaves = count + np.arange(num_leaves)
    zeros = np.zeros(num_leaves, np.int64)
    forest = Forest(
        np.concatenate([features, zeros]),
        np.concatenate([splits.value.reshape(-1).astype(dtype), zeros.astype(dtype)]),
        np.concatenate([test, np.full(num_leaves, LEAF)]),
        np.concatenate([children[0], leaves]),
        np.concatenate([children[1], leaves]),
        np.concatenate([missing, zeros.astype(bool)]),
        _ensemble_roots(n, count, children),
        _members(n, test, dtype),
    )
    return forest, LeafWeights(leaves, targets, weights.value.reshape(-1).astype(dtype))


def _children(n: Node, side: str, count: int, num_leaves: int) -> Any:
    ids, are_leaves = integers(n, f"nodes_{side}nodeids"), integers(n, f"nodes_{side}leafs") != 0
    _check_sizes(n, count, "nodes_featureids", **{f"nodes_{side}nodeids": ids, f"nodes_{side}leafs": are_leaves})
    wrong = (ids < 0) | (ids >= np.where(are_leaves, num_leaves, count))
    if wrong.any():
        n.fail(f"attribute 'nodes_{side}nodeids' names node or leaf {ids[wrong][0]}, which does not exist")
    return np.where(are_leaves, ids + count, ids)


def _ensemble_roots(n: Node, count: int, children: list[Any]) -> Any:
    """The roots; a tree that is one leaf is written as a node whose two children are that leaf."""
    roots = integers(n, "tree_roots")
    if len(roots) and (roots.min() < 0 or roots.max() >= count):
        n.fail("attribute 'tree_roots' names a node that does not exist")
    is_leaf = (children[0][roots] == children[1][roots]) & (children[0][roots] >= count)
    return np.where(is_leaf, children[0][roots], roots)


def _members(n: Node, test: Any, dtype: Any) -> dict[int, Any]:
    """The sets of BRANCH_MEMBER nodes, in `membership_values` each ended by NaN."""
    nodes, tensor = np.flatnonzero(test == MEMBER), n.tensor("membership_values")
    values = np.empty(0, dtype) if tensor is None else tensor.value.reshape(-1).astype(dtype)
    ends = np.flatnonzero(np.isnan(values))
    if len(ends) != len(nodes):
        n.fail(f"attribute 'membership_values' has {len(ends)} sets that end with NaN, the nodes need {len(nodes)}")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    return {int(node): values[a:b] for node, a, b in zip(nodes, starts, ends, strict=True)}
