"""What a call costs beside the kernels' work: models of 1, 10 and 60 tiny kernels, in microseconds per call.

    python -m bench.overhead [--repeats N]

Each model is a chain of softmax operators on x: float32[n, 4], at n = 1, which nothing fuses. It runs through its
native host function, through the interpreter of bytecode, and in onnxruntime on one thread, in turn. Every figure is
the best of many short repetitions. "per kernel" is the slope from 1 to 60 kernels, the softmax of four numbers
included; "per call" is what is left of one call without its kernels.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto, helper

import relaxlite as rl
from relaxlite import config

COUNTS = (1, 10, 60)
Runner = Callable[[], object]


def chain(count: int) -> onnx.ModelProto:
    """`count` softmax operators in a row."""
    names = ["x", *(f"t{k}" for k in range(1, count)), "y"]
    nodes = [helper.make_node("Softmax", [a], [b], axis=-1) for a, b in pairwise(names)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "chain", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def runners(count: int) -> dict[str, Runner]:
    """One call of each way to run the chain."""
    proto, x = chain(count), np.ones((1, 4), np.float32)
    native = rl.compile(rl.from_onnx(proto))
    with config.override(interpret=True):
        interpreted = rl.Executable(native.data)
    found: dict[str, Runner] = {"native": lambda: native(x), "interpreter": lambda: interpreted(x)}
    session = onnxruntime_session(proto)
    if session is not None:
        found["onnxruntime"] = lambda: session.run(None, {"x": x})
    return found


def onnxruntime_session(proto: onnx.ModelProto):  # type: ignore[no-untyped-def]
    try:
        import onnxruntime as ort
    except ImportError:
        return None
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(found: dict[str, Runner], repeats: int) -> dict[str, float]:
    """The best time of each, in microseconds. They take turns, so that a disturbance hits all of them, and each turn
    is so short that the system seldom interrupts it."""
    best = {name: min(timeit.repeat(run, number=1, repeat=20)) * 1e6 for name, run in found.items()}
    for _ in range(repeats):
        for name, run in found.items():
            calls = max(1, round(300 / best[name]))
            best[name] = min(best[name], timeit.timeit(run, number=calls) / calls * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    times = {count: measure(runners(count), repeats) for count in COUNTS}
    names = list(times[COUNTS[0]])
    print(
        f"{'us':<12}" + "".join(f"{f'{count} kernels':>12}" for count in COUNTS) + f"{'per kernel':>12}{'per call':>12}"
    )
    for name in names:
        first, last = times[COUNTS[0]][name], times[COUNTS[-1]][name]
        slope = (last - first) / (COUNTS[-1] - COUNTS[0])
        figures = [*(times[count][name] for count in COUNTS), slope, first - slope]
        print(f"{name:<12}" + "".join(f"{figure:>12.3f}" for figure in figures))


if __name__ == "__main__":
    main()
