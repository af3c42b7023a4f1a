"""An ONNX model becomes one file, which a small runtime loads and runs at every shape.

x: float32[batch, steps, 8] where 1 <= steps <= 512
y: float32[batch, 3]
(1, 1, 8) -> (1, 3), largest difference from NumPy below 1e-5: True
(2, 7, 8) -> (2, 3), largest difference from NumPy below 1e-5: True
(5, 512, 8) -> (5, 3), largest difference from NumPy below 1e-5: True
argument 'x': dimension 1 of shape (1, 513, 8): steps = 513 exceeds its upper bound 512
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import relaxlite as rl

rng = np.random.default_rng(0)
weight = rng.standard_normal((8, 3)).astype(np.float32)
bias = rng.standard_normal(3).astype(np.float32)


def onnx_model() -> onnx.ModelProto:
    """softmax(mean over steps of tanh(x @ weight + bias)): "batch" and "steps" are symbols."""
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["xw"]),
        helper.make_node("Add", ["xw", "bias"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["hidden"]),
        helper.make_node("ReduceMean", ["hidden"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Softmax", ["mean"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", "steps", 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def expected(x: np.ndarray) -> np.ndarray:
    mean = np.tanh(x @ weight + bias).mean(axis=1)
    e = np.exp(mean - mean.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


with tempfile.TemporaryDirectory() as folder:
    # Once, where the model is built. `relaxlite compile` does the same.
    module = rl.from_onnx(onnx_model(), bounds={"steps": "1..512"})
    rl.compile(module).save(Path(folder) / "classifier.rlx")

    # As often as needed, where it runs: no compiler, no onnx.
    exe = rl.load(Path(folder) / "classifier.rlx")

print(exe.inputs)
print(exe.outputs)
for batch, steps in [(1, 1), (2, 7), (5, 512)]:
    x = rng.standard_normal((batch, steps, 8)).astype(np.float32)
    y = exe(x)
    print(f"{x.shape} -> {y.shape}, largest difference from NumPy below 1e-5: {np.abs(y - expected(x)).max() < 1e-5}")
try:
    exe(np.zeros((1, 513, 8), np.float32))
except rl.RelaxliteError as error:
    print(error)
