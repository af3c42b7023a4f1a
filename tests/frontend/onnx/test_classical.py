"""Operators of ai.onnx.ml against onnxruntime, at several numbers of rows from one compilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import relaxlite as rl
from relaxlite.errors import ImportModelError, InputError
from relaxlite.frontend.onnx import from_onnx
from tests.support import classical_models
from tests.support.onnx_models import graph, node, value
from tests.support.ort_reference import session
from tests.support.tiers import few_rows

ML = "ai.onnx.ml"
SIZES = (7, 1, 2, 64)
FEATURES = 4


def ml_model(nodes: Sequence[onnx.NodeProto], inputs: Sequence[Any], outputs: Sequence[str], version: int = 3) -> Any:
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ML, version)]
    return helper.make_model(graph(nodes, inputs, outputs), opset_imports=imports, ir_version=10)


def rows(count: int, columns: int = FEATURES) -> Any:
    return np.random.default_rng(count + columns).standard_normal((count, columns)).astype(np.float32)


def check(model: Any, make: Any = rows, sizes: Sequence[int] = SIZES, tolerance: float = 1e-5) -> Any:
    """Compare all outputs with onnxruntime's at every size; return the executable."""
    reference, exe = session(model), rl.compile(from_onnx(model))
    for size in sizes:
        inputs = make(size)
        inputs = inputs if isinstance(inputs, Mapping) else {"x": inputs}
        got = exe.run(inputs)
        for name, wanted in zip(got, reference.run(list(got), dict(inputs)), strict=True):
            problem = classical_models.difference(got[name], wanted)
            assert not problem, f"{size} rows, {name}: {problem}"
    return exe


# Trees


def tree_attributes(trees: int, depth: int, mode: str = "BRANCH_LEQ", seed: int = 0) -> dict[str, Any]:
    """Perfect trees with random tests; thresholds are few, so that they are also hit exactly."""
    rng = np.random.default_rng(seed)
    count, inner = 2 ** (depth + 1) - 1, 2**depth - 1
    is_leaf = np.arange(count) >= inner
    left = np.where(is_leaf, 0, np.arange(count) * 2 + 1)
    return {
        "nodes_treeids": np.repeat(np.arange(trees), count).tolist(),
        "nodes_nodeids": np.tile(np.arange(count), trees).tolist(),
        "nodes_featureids": rng.integers(0, FEATURES, trees * count).tolist(),
        "nodes_values": (rng.integers(-2, 3, trees * count) / 2).tolist(),
        "nodes_modes": np.tile(np.where(is_leaf, "LEAF", mode), trees).tolist(),
        "nodes_truenodeids": np.tile(left, trees).tolist(),
        "nodes_falsenodeids": np.tile(np.where(is_leaf, 0, left + 1), trees).tolist(),
        "nodes_missing_value_tracks_true": rng.integers(0, 2, trees * count).tolist(),
    }


def leaf_attributes(
    trees: int, depth: int, targets: Sequence[int], prefix: str, *, low: float = -1.0
) -> dict[str, Any]:
    """A weight per leaf and target."""
    leaves = np.arange(2**depth - 1, 2 ** (depth + 1) - 1)
    places = [(tree, leaf, target) for tree in range(trees) for leaf in leaves for target in targets]
    weights = np.random.default_rng(1).uniform(low, 1, len(places)).astype(np.float32)
    names = (f"{prefix}_treeids", f"{prefix}_nodeids", f"{prefix}_ids")
    columns = (list(map(int, column)) for column in zip(*places, strict=True))
    return {**dict(zip(names, columns, strict=True)), f"{prefix}_weights": weights.tolist()}


def halves(count: int) -> Any:
    """Multiples of a half, which thresholds hit, and some NaN."""
    x = np.round(rows(count) * 2) / 2
    x[rows(count) > 1.5] = np.nan
    return x


@pytest.mark.parametrize("mode", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"])
def test_every_test_of_a_node_goes_where_onnxruntime_goes(mode: str) -> None:
    attributes = {**tree_attributes(5, 3, mode), **leaf_attributes(5, 3, [0], "target")}
    tree = node("TreeEnsembleRegressor", ["x"], domain=ML, n_targets=1, **attributes)
    check(ml_model([tree], [value("x", ["n", FEATURES])], ["y"]), halves)


@pytest.mark.parametrize(
    ("aggregate", "targets", "transform"),
    [("SUM", 1, "PROBIT"), ("AVERAGE", 3, "SOFTMAX"), ("MIN", 1, "NONE"), ("MAX", 3, "SOFTMAX_ZERO")],
)
def test_tree_regressors(aggregate: str, targets: int, transform: str) -> None:
    low = 0.5 if transform == "PROBIT" else -1.0  # of probabilities
    attributes = {**tree_attributes(9, 4), **leaf_attributes(9, 4, range(targets), "target", low=low)}
    if transform == "PROBIT":
        attributes["target_weights"] = [w / 11 for w in attributes["target_weights"]]
    tree = node(
        "TreeEnsembleRegressor", ["x"], domain=ML, n_targets=targets, aggregate_function=aggregate,
        post_transform=transform, base_values=[0.05] * targets, **attributes,
    )  # fmt: skip
    exe = check(ml_model([tree], [value("x", ["n", FEATURES])], ["y"]), halves)
    assert exe(rows(0)).shape == (0, targets)


LABELS: dict[str, dict[str, Any]] = {
    "ints": {"classlabels_int64s": [10, 20, 30]}, "strings": {"classlabels_strings": ["low", "middle", "high"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "classes", "base", "transform", "low"),
    few_rows(
        [
            (3, [0, 1, 2], [0.1, 0.0, -0.1], "SOFTMAX", -1.0),
            (2, [0], [], "LOGISTIC", -1.0),
            (2, [0], [0.05], "NONE", 0.0),
            (2, [0, 1], [], "NONE", -1.0),
            (2, [0, 1], [0.1, 0.2], "NONE", -1.0),
            (2, [1], [0.1], "LOGISTIC", 0.0),
            (2, [0], [0.1, 0.2], "NONE", 0.0),
            (1, [0], [0.1], "NONE", -1.0),
            (3, [1], [], "NONE", -1.0),
        ],
        4,
    ),
)
@pytest.mark.parametrize("kind", LABELS)
def test_tree_classifiers(
    kind: str, labels: int, classes: list[int], base: list[float], transform: str, low: float
) -> None:
    names = {name: values[:labels] for name, values in LABELS[kind].items()}
    attributes = {**tree_attributes(6, 3), **leaf_attributes(6, 3, classes, "class", low=low)}
    extra = {"base_values": base} if base else {}
    if labels == 1 and kind == "strings":
        return  # onnxruntime reads beyond its labels
    tree = node(
        "TreeEnsembleClassifier", ["x"], ["label", "y"], domain=ML, post_transform=transform,
        **names, **attributes, **extra,
    )  # fmt: skip
    outputs = [value("label", ["n"], "string" if kind == "strings" else "int64"), value("y", ["n", None])]
    check(ml_model([tree], [value("x", ["n", FEATURES])], outputs), halves)


def ensemble(**changes: Any) -> onnx.NodeProto:
    """A tree of opset 5: x0 in {1, 2, 3.5}, else x1 <= 0.5; then a tree that is a leaf."""
    attributes: dict[str, Any] = {
        "tree_roots": [0, 2],
        "nodes_featureids": [0, 1, 0],
        "nodes_modes": helper.make_tensor("modes", onnx.TensorProto.UINT8, [3], [6, 0, 0]),
        "nodes_splits": helper.make_tensor("splits", onnx.TensorProto.FLOAT, [3], [0.0, 0.5, 0.0]),
        "membership_values": helper.make_tensor("sets", onnx.TensorProto.FLOAT, [4], [1.0, 2.0, 3.5, float("nan")]),
        "nodes_truenodeids": [0, 1, 3],
        "nodes_trueleafs": [1, 1, 1],
        "nodes_falsenodeids": [1, 2, 3],
        "nodes_falseleafs": [0, 1, 1],
        "leaf_targetids": [0, 1, 0, 1],
        "leaf_weights": helper.make_tensor("weights", onnx.TensorProto.FLOAT, [4], [1.0, 2.0, 4.0, 8.0]),
        "n_targets": 2,
    }
    return node("TreeEnsemble", ["x"], domain=ML, **{**attributes, **changes})


def test_set_membership_and_trees_of_one_leaf() -> None:
    exe = rl.compile(from_onnx(ml_model([ensemble()], [value("x", ["n", FEATURES])], ["y"], version=5)))
    x = np.zeros((5, FEATURES), np.float32)
    x[:, 0], x[:, 1] = [1, 2, 3.5, 3, np.nan], [0, 9, 9, 0.5, 1]
    assert exe(x).tolist() == [[1, 8], [1, 8], [1, 8], [0, 10], [4, 8]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes_falsenodeids": [0, 2, 3]}, "form a cycle"),
        ({"nodes_truenodeids": [7, 1, 3]}, "'nodes_truenodeids' names node or leaf 7"),
        ({"leaf_targetids": [0, 1, 0, 5]}, "names target 5 of 2"),
        ({"nodes_trueleafs": [1, 1]}, "'nodes_trueleafs' has 2 elements where nodes_featureids has 3"),
    ],
)
def test_errors_of_trees_name_the_node_and_the_attribute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportModelError, match=r"ONNX node #0 \(TreeEnsemble\)") as caught:
        from_onnx(ml_model([ensemble(**changes)], [value("x", ["n", FEATURES])], ["y"], version=5))
    assert message in str(caught.value)


def test_forest_of_more_rows_and_trees_than_a_task_has() -> None:
    attributes = {**tree_attributes(70, 6), **leaf_attributes(70, 6, [0], "target")}
    tree = node("TreeEnsembleRegressor", ["x"], domain=ML, n_targets=1, **attributes)
    check(ml_model([tree], [value("x", ["n", FEATURES])], ["y"]), halves, sizes=(1, 130, 1100))


# Linear models and support vector machines


def floats(*shape: int) -> list[float]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32).reshape(-1).tolist()


MACHINE = {"kernel_params": [0.3, 0.2, 2.0], "support_vectors": floats(9, FEATURES)}
SCORED: list[tuple[str, dict[str, Any]]] = [
    ("LinearClassifier", {"coefficients": floats(3, FEATURES), "intercepts": floats(3), "post_transform": "SOFTMAX",
                          "classlabels_ints": [3, 1, 2]}),
    ("LinearClassifier", {"coefficients": floats(FEATURES), "intercepts": [0.1], "post_transform": "LOGISTIC",
                          "classlabels_strings": ["no", "yes"]}),
    ("SVMClassifier", {**MACHINE, "kernel_type": "RBF", "coefficients": floats(2, 9), "rho": floats(3),
                       "vectors_per_class": [4, 3, 2], "classlabels_ints": [0, 1, 2], "prob_a": [-1.0, -2.0, -1.5],
                       "prob_b": [0.1, 0.2, 0.0]}),
    ("SVMClassifier", {**MACHINE, "kernel_type": "POLY", "coefficients": floats(2, 9), "rho": floats(3),
                       "vectors_per_class": [4, 3, 2], "classlabels_strings": ["a", "b", "c"]}),
    ("SVMClassifier", {**MACHINE, "kernel_type": "SIGMOID", "coefficients": floats(1, 9), "rho": [0.2],
                       "vectors_per_class": [5, 4], "classlabels_ints": [5, 7]}),
    ("SVMClassifier", {"kernel_type": "LINEAR", "kernel_params": [0.0, 0.0, 0.0], "rho": [0.2],
                       "coefficients": floats(2, FEATURES),
                       "classlabels_ints": [5, 7]}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes"), SCORED)
def test_classifiers_by_products(op: str, attributes: dict[str, Any]) -> None:
    scored = node(op, ["x"], ["label", "y"], domain=ML, **attributes)
    kind = "string" if "classlabels_strings" in attributes else "int64"
    outputs = [value("label", ["n"], kind), value("y", ["n", None])]
    check(ml_model([scored], [value("x", ["n", FEATURES])], outputs))


VALUES: list[tuple[str, dict[str, Any]]] = [
    ("LinearRegressor", {"coefficients": floats(2, FEATURES), "intercepts": floats(2), "targets": 2}),
    ("SVMRegressor", {**MACHINE, "kernel_type": "RBF", "coefficients": floats(9), "rho": [0.4], "n_supports": 9}),
    ("SVMRegressor", {**MACHINE, "kernel_type": "LINEAR", "coefficients": floats(9), "rho": [0.4], "n_supports": 9,
                      "one_class": 1}),
    ("Scaler", {"offset": floats(FEATURES), "scale": [2.0] * FEATURES}),
    ("Normalizer", {"norm": "MAX"}),
    ("Normalizer", {"norm": "L1"}),
    ("Normalizer", {"norm": "L2"}),
    ("Imputer", {"imputed_value_floats": floats(FEATURES), "replaced_value_float": float("nan")}),
    ("Imputer", {"imputed_value_floats": [7.0], "replaced_value_float": 0.5}),
    ("Binarizer", {"threshold": 0.25}),
    ("FeatureVectorizer", {"inputdimensions": [FEATURES]}),
    ("LabelEncoder", {"keys_floats": [0.5, 1.0, float("nan")], "values_floats": [1.0, 2.0, 3.0], "default_float": 9.0}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes"), VALUES)
def test_regressors_and_transformers(op: str, attributes: dict[str, Any]) -> None:
    draw = halves if op in ("Imputer", "LabelEncoder") else rows
    version = 4 if op == "LabelEncoder" else 1
    exe = check(
        ml_model([node(op, ["x"], domain=ML, **attributes)], [value("x", ["n", FEATURES])], ["y"], version), draw
    )
    assert len(exe(rows(0))) == 0


# Strings


COLORS = ["red", "green", "blue"]


def colors(count: int) -> Any:
    """Words of the table, and one that is not in it."""
    return np.array([*COLORS, "violet"], dtype=object)[np.arange(count * 2).reshape(count, 2) % 4]


def test_strings_in_and_out() -> None:
    nodes = [
        node("OneHotEncoder", ["x"], ["hot"], domain=ML, cats_strings=COLORS),
        node(
            "LabelEncoder", ["x"], ["code"], domain=ML, keys_strings=COLORS, values_int64s=[5, 6, 7], default_int64=-2
        ),
        node("LabelEncoder", ["code"], ["name"], domain=ML, keys_int64s=[5, 6], values_strings=["warm", "cold"]),
        node("CategoryMapper", ["x"], ["mapped"], domain=ML, cats_strings=COLORS, cats_int64s=[1, 2, 3]),
        node("Concat", ["x", "name"], ["both"], axis=1),
        node("Identity", ["x"], ["same"]),
    ]
    outputs = [
        value("hot", None), value("code", None, "int64"), value("name", None, "string"), value("mapped", None, "int64"),
        value("both", None, "string"), value("same", None, "string"),
    ]  # fmt: skip
    model = ml_model(nodes, [value("x", ["n", 2], "string")], outputs, version=2)
    exe = check(model, colors)
    assert str(exe.inputs) == "(x: string[n, 2],)" or "x: string[n, 2]" in repr(exe.inputs)
    assert exe.run({"x": [["red", "blue"]]})["same"].tolist() == [["red", "blue"]]
    assert exe.run({"x": np.empty((0, 2), dtype=object)})["name"].shape == (0, 2)
    with pytest.raises(InputError, match="argument 'x': got float64, expects strings"):
        exe.run({"x": [[1.5, 2.0]]})


@pytest.mark.parametrize("labels", [{"classlabels_int64s": [4, 2]}, {"classlabels_strings": ["b", "a"]}])
def test_maps_out(labels: dict[str, Any], tmp_path: Any) -> None:
    mapping = ml_model([node("ZipMap", ["x"], ["y"], domain=ML, **labels)], [value("x", ["n", 2])], ["y"])
    key = onnx.TensorProto.STRING if "classlabels_strings" in labels else onnx.TensorProto.INT64
    item = helper.make_map_type_proto(key, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, []))
    mapping.graph.output[0].CopyFrom(helper.make_value_info("y", helper.make_sequence_type_proto(item)))
    exe = check(mapping, lambda count: rows(count, 2))
    exe.save(tmp_path / "model.rlx")
    loaded = rl.load(tmp_path / "model.rlx")
    assert "y: map[n, 2]" in repr(loaded.outputs)
    assert loaded(rows(3, 2)) == exe(rows(3, 2))


def test_an_op_that_does_not_take_strings_says_so() -> None:
    model = ml_model([node("Neg", ["x"])], [value("x", ["n"], "string")], [value("y", None, "string")])
    with pytest.raises(ImportModelError, match="Neg of STRING is not supported"):
        from_onnx(model)


# Estimators, as their converters write them


@pytest.mark.exhaustive
def test_estimators_agree_with_onnxruntime() -> None:
    """At least 95 % of the models that converters write and onnxruntime runs."""
    for library in ("sklearn", "skl2onnx"):
        pytest.importorskip(library)
    results = {name: classical_models.outcome(make) for name, make in classical_models.cases()}
    tried = {name: result for name, result in results.items() if not result.startswith("cannot be converted")}
    wrong = {name: result for name, result in tried.items() if result != "agrees"}
    assert len(wrong) <= 0.05 * len(tried), wrong
