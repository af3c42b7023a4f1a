"""Classical models as their converters write them, against onnxruntime: every estimator of scikit-learn, and boosters.

    python -m tests.support.classical_models [NAME...]

prints a line for each estimator: "agrees", "cannot be converted" (by its own converter, or onnxruntime refuses it), or
what is wrong, and the share of converted ones that agree. It needs scikit-learn and skl2onnx; LightGBM, XGBoost and
CatBoost are swept where they are installed, with onnxmltools.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

import relaxlite as rl

SIZES = (7, 0, 1, 2, 64)
FEATURES, CLASSES = 6, 3
Case = tuple[str, Callable[[], tuple[Any, dict[str, np.ndarray]]]]  # name, make() -> (model, inputs of 64 rows)


# Data


def table(rows: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features, real targets, classes) of random rows."""
    rng = np.random.default_rng(5)
    x = np.abs(rng.standard_normal((rows, FEATURES))).astype(np.float32) + np.float32(0.01)
    y = x[:, 0] * 2 + x[:, 1] * x[:, 2] + rng.standard_normal(rows) * 0.1 + 0.5
    return x, y.astype(np.float32), np.digitize(y, np.quantile(y, [0.3, 0.7]))


def rows_of(inputs: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(x[:size]) for name, x in inputs.items()}


# Estimators of scikit-learn

BINARY = ("FixedThresholdClassifier", "GaussianProcessClassifier", "TunedThresholdClassifierCV", "ClassifierChain")
OF_CLASSES = (
    "GenericUnivariateSelect", "NeighborhoodComponentsAnalysis", "RFE", "RFECV", "SelectFdr", "SelectFpr",
    "SelectFromModel", "SelectFwe", "SelectKBest", "SelectPercentile", "SequentialFeatureSelector", "TargetEncoder",
)  # fmt: skip
SEVERAL_TARGETS = (
    "CCA", "ClassifierChain", "MultiOutputClassifier", "MultiOutputRegressor", "MultiTaskElasticNet",
    "MultiTaskElasticNetCV", "MultiTaskLasso", "MultiTaskLassoCV", "PLSCanonical", "PLSSVD", "RegressorChain",
)  # fmt: skip
OF_LABELS = ("LabelBinarizer", "LabelEncoder")  # transformers of classes
OF_CODES = ("OneHotEncoder", "OrdinalEncoder")  # transformers of integers


def arguments_of(name: str) -> dict[str, Any]:
    """Arguments that an estimator needs, or with which it can be converted."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.preprocessing import MinMaxScaler, StandardScaler
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    classifier, regressor = LogisticRegression(), Ridge()
    pairs = [("a", classifier), ("b", DecisionTreeClassifier(max_depth=4))]
    real_pairs = [("a", regressor), ("b", DecisionTreeRegressor(max_depth=4))]
    scalers = [("a", StandardScaler()), ("b", MinMaxScaler())]
    search = {"estimator": regressor, "cv": 2}
    given: dict[str, dict[str, Any]] = {
        "StackingClassifier": {"estimators": pairs},
        "VotingClassifier": {"estimators": pairs, "flatten_transform": False},
        "StackingRegressor": {"estimators": real_pairs}, "VotingRegressor": {"estimators": real_pairs},
        "ColumnTransformer": {"transformers": [("a", StandardScaler(), [0, 2]), ("b", MinMaxScaler(), [1, 3])]},
        "FeatureUnion": {"transformer_list": scalers}, "Pipeline": {"steps": [*scalers, ("c", classifier)]},
        "SelectFromModel": {"estimator": DecisionTreeClassifier(max_depth=4)},
        "GaussianRandomProjection": {"n_components": 3}, "SparseRandomProjection": {"n_components": 3},
        "KBinsDiscretizer": {"encode": "ordinal"}, "LocalOutlierFactor": {"novelty": True},
        "RandomTreesEmbedding": {"sparse_output": False}, "GridSearchCV": {"param_grid": {"alpha": [0.1, 1]}, **search},
        "RandomizedSearchCV": {"param_distributions": {"alpha": [0.1, 1]}, "n_iter": 2, **search},
        "RadiusNeighborsClassifier": {"radius": 4.0}, "RadiusNeighborsRegressor": {"radius": 4.0},
    }  # fmt: skip
    for each in ("RFE", "RFECV", "SequentialFeatureSelector", *META_CLASSIFIERS):
        given[each] = {"estimator": classifier}
    for each in ("MultiOutputRegressor", "RegressorChain"):
        given[each] = {"estimator": regressor}
    return given.get(name, {})


META_CLASSIFIERS = (
    "ClassifierChain", "FixedThresholdClassifier", "MultiOutputClassifier", "OneVsOneClassifier", "OneVsRestClassifier",
    "OutputCodeClassifier", "SelfTrainingClassifier", "TunedThresholdClassifierCV",
)  # fmt: skip


def scikit_learn_cases() -> Iterator[Case]:
    """Every classifier, regressor, transformer, clusterer and detector of outliers."""
    from sklearn.utils import all_estimators

    for name, kind in sorted(dict(all_estimators()).items()):
        if any(hasattr(kind, method) for method in ("predict", "transform")):
            yield name, lambda name=name, kind=kind: convert_estimator(name, kind)


def make_estimator(name: str, kind: Any) -> Any:
    estimator = kind(**arguments_of(name))
    for option, value in {"n_estimators": 10, "random_state": 0, "max_iter": 200}.items():
        if option in estimator.get_params(deep=False):
            estimator.set_params(**{option: value})
    return estimator


def training_data(name: str, estimator: Any) -> tuple[np.ndarray, np.ndarray]:
    """(features, targets) as an estimator takes them."""
    from sklearn.base import is_classifier

    x, y, classes = table()
    target = (classes > 1).astype(np.int64) if name in BINARY else classes
    if not is_classifier(estimator) and name not in OF_CLASSES:
        target = y
    if name in SEVERAL_TARGETS:
        target = np.stack([target, target[::-1]], axis=1)
    if name in OF_CODES:
        x = (x * 4).astype(np.int64)
    return (x[:, :1] if name == "IsotonicRegression" else x), target


def convert_estimator(name: str, kind: Any) -> tuple[Any, dict[str, np.ndarray]]:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import Int64TensorType
    from sklearn.base import is_classifier

    estimator = make_estimator(name, kind)
    x, target = training_data(name, estimator)
    if name in OF_LABELS:
        classes = table()[2]
        return to_onnx(estimator.fit(classes), initial_types=[("x", Int64TensorType([None]))]), {"x": classes[:64]}
    estimator.fit(x, target)
    versions = {"": 18, "ai.onnx.ml": 3}
    try:
        options = {id(estimator): {"zipmap": False}} if is_classifier(estimator) else None
        model = to_onnx(estimator, x[:1], options=options, target_opset=versions)
    except NameError:  # the estimator has no option zipmap
        model = to_onnx(estimator, x[:1], target_opset=versions)
    return model, {model.graph.input[0].name: x[:64]}


# Pipelines with strings


def text_pipeline_cases() -> Iterator[Case]:
    """Strings in, labels out, with and without maps of probabilities."""
    for zipmap in (True, False):
        yield f"strings and labels, zipmap {zipmap}", lambda zipmap=zipmap: convert_text_pipeline(zipmap)
    yield "unknown strings to ordinals", convert_ordinals


def string_table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, _, classes = table()
    words = np.array(["red", "green", "blue", "black"], dtype=object)[np.digitize(x[:, 1:3], [0.3, 0.7, 1.2])]
    return x, words, np.array(["low", "middle", "high"], dtype=object)[classes].astype(str)


def convert_text_pipeline(zipmap: bool) -> tuple[Any, dict[str, np.ndarray]]:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    x, words, labels = string_table()
    columns = ColumnTransformer(
        [("n", StandardScaler(), [0, 1]), ("c", OneHotEncoder(handle_unknown="ignore"), [2, 3])]
    )
    pipeline = make_pipeline(columns, LogisticRegression(max_iter=500))
    pipeline.fit(np.concatenate([x[:, :2].astype(object), words], axis=1), labels)
    types = [("numbers", FloatTensorType([None, 2])), ("words", StringTensorType([None, 2]))]
    model = to_onnx(pipeline, initial_types=types, options={id(pipeline): {"zipmap": zipmap}})
    words[3, 0] = "violet"
    return model, {"numbers": x[:64, :2], "words": words[:64]}


def convert_ordinals() -> tuple[Any, dict[str, np.ndarray]]:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.preprocessing import OrdinalEncoder

    _, words, _ = string_table()
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1).fit(words)
    words[3, 0] = "violet"
    return to_onnx(encoder, initial_types=[("words", StringTensorType([None, 2]))]), {"words": words[:64]}


# Boosters


def booster_cases() -> Iterator[Case]:
    """Regressors and classifiers of two and three classes of the boosting libraries that are installed."""
    for library, make in (("lightgbm", lightgbm_model), ("xgboost", xgboost_model), ("catboost", catboost_model)):
        if find_spec(library) is not None and (library == "catboost" or find_spec("onnxmltools") is not None):
            for task in ("regressor", "binary", "classes", "regressor with NaN"):
                yield f"{library} {task}", lambda make=make, task=task: convert_booster(make, task)


def convert_booster(make: Callable[..., Any], task: str) -> tuple[Any, dict[str, np.ndarray]]:
    x, y, classes = table()
    if task.endswith("NaN"):
        x[np.random.default_rng(3).random(x.shape) < 0.1] = np.nan
    target = {"binary": (classes > 1).astype(np.int64), "classes": classes}.get(task, y)
    model = make(x, target, is_classifier=task in ("binary", "classes"))
    return model, {model.graph.input[0].name: x[:64]}


def lightgbm_model(x: np.ndarray, y: np.ndarray, is_classifier: bool) -> Any:
    import lightgbm
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    kind = lightgbm.LGBMClassifier if is_classifier else lightgbm.LGBMRegressor
    types = [("x", FloatTensorType([None, FEATURES]))]
    return convert_lightgbm(kind(n_estimators=20, verbose=-1).fit(x, y), initial_types=types, zipmap=False)


def xgboost_model(x: np.ndarray, y: np.ndarray, is_classifier: bool) -> Any:
    import xgboost
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    kind = xgboost.XGBClassifier if is_classifier else xgboost.XGBRegressor
    return convert_xgboost(kind(n_estimators=20).fit(x, y), initial_types=[("x", FloatTensorType([None, FEATURES]))])


def catboost_model(x: np.ndarray, y: np.ndarray, is_classifier: bool) -> Any:
    import tempfile
    from pathlib import Path

    import catboost
    import onnx

    kind = catboost.CatBoostClassifier if is_classifier else catboost.CatBoostRegressor
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        options = {"iterations": 20, "verbose": False, "allow_writing_files": False}
        kind(**options).fit(x, y).save_model(str(path), format="onnx")
        return onnx.load(path)


# Comparison


def check(model: Any, inputs: Mapping[str, np.ndarray]) -> str:
    """ "agrees", "cannot be converted: why" where onnxruntime refuses the model, or what is wrong."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        session.run(None, rows_of(inputs, 7))
    except Exception as error:
        return f"cannot be converted: onnxruntime: {_first_line(error)}"
    exe = rl.compile(rl.from_onnx(model))
    for size in SIZES:
        try:
            expected = session.run(None, rows_of(inputs, size))
        except Exception:
            continue  # of a size that onnxruntime cannot run, often 0
        results = exe.run(rows_of(inputs, size))
        for output, wanted in zip(session.get_outputs(), expected, strict=True):
            problem = difference(results[output.name], wanted)
            if problem:
                return f"{size} rows, {output.name}: {problem}"
    return "agrees"


def difference(got: Any, wanted: Any) -> str:
    """What differs between two results; empty if nothing does."""
    if isinstance(wanted, list) and isinstance(wanted[0] if wanted else None, np.ndarray):
        return next((text for a, b in zip(got, wanted, strict=True) if (text := difference(a, b))), "")
    if isinstance(wanted, list):
        if len(got) != len(wanted) or any(a.keys() != b.keys() for a, b in zip(got, wanted, strict=True)):
            return f"got {got[:1]}, onnxruntime {wanted[:1]}"
        got, wanted = (np.array([[m[key] for key in sorted(m)] for m in maps]) for maps in (got, wanted))
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"got {got.dtype}{list(got.shape)}, onnxruntime {wanted.dtype}{list(wanted.shape)}"
    if wanted.dtype.kind == "f":
        close = np.isclose(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        return "" if close.all() else f"{(~close).sum()} of {close.size} differ, by {np.abs(got - wanted).max():.2g}"
    return "" if (got == wanted).all() else f"{(got != wanted).sum()} of {got.size} differ"


def outcome(make: Callable[[], tuple[Any, dict[str, np.ndarray]]]) -> str:
    """Convert one model and check it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs = make()
    except Exception as error:
        return f"cannot be converted: {_first_line(error)}"
    try:
        return check(model, inputs)
    except Exception as error:
        return f"fails: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def cases() -> Iterator[Case]:
    yield from scikit_learn_cases()
    yield from text_pipeline_cases()
    yield from booster_cases()


def main(names: list[str]) -> int:
    good = bad = 0
    for name, make in cases():
        if names and not any(part in name for part in names):
            continue
        result = outcome(make)
        good, bad = good + (result == "agrees"), bad + (not result.startswith(("agrees", "cannot")))
        print(f"{name}: {result}", flush=True)
    print(f"{good} of {good + bad} converted models agree")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
