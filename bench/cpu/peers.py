"""How each library opens a model and runs it, as fast as its documentation says.

A peer is created in a process of its own with a thread count. `ImportError` from `version` says that it is not
installed, `Unsupported` from `open` or `prepare` that it has no form of this workload.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import numpy_helper

import relaxlite as rl
from bench.cpu.cases import Case, Workload
from relaxlite.runtime.replay import Recorder

Arrays = Mapping[str, np.ndarray]


class Unsupported(Exception):
    """The peer has no way to run this."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """`run` does the work once; `arrays` gives the outputs of what it returned. Seconds are multiplied by `scale`."""

    run: Callable[[], Any]
    arrays: Callable[[Any], Sequence[np.ndarray]]
    scale: float = 1.0


class Peer(ABC):
    title: ClassVar[str]

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @abstractmethod
    def version(self) -> str:
        """Of what is installed. Raises ImportError, or Unsupported where the library lacks what this peer shows."""

    @abstractmethod
    def open(self, workload: Workload) -> None:
        """Load and compile, forgetting what was open before; what is timed as loading."""

    @abstractmethod
    def prepare(self, case: Case) -> Prepared: ...


class Relaxlite(Peer):
    """The whole call from Python, outputs in new memory."""

    title = "relaxlite"
    options: ClassVar[Mapping[str, Any]] = {}  # of compile

    def version(self) -> str:
        return rl.__version__

    def open(self, workload: Workload) -> None:
        if workload.cache is not None:
            self.exe = rl.load(workload.model, threads=self.threads, **self.options)
        else:
            self.exe = rl.compile(rl.from_onnx(workload.model), threads=self.threads, **self.options)

    def prepare(self, case: Case) -> Prepared:
        inputs = case.arrays()
        return Prepared(lambda: self.exe.run(inputs), lambda result: list(result.values()))


class RelaxliteCompile(Relaxlite):
    """With kernels that are kept, but not whole models. The compiler is imported before, as other libraries are."""

    title = "relaxlite, compiled anew"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        for module in ("relaxlite.driver", "relaxlite.frontend.onnx"):
            importlib.import_module(module)

    def open(self, workload: Workload) -> None:
        super().open(replace(workload, cache=None))


class RelaxliteBf16(Relaxlite):
    title = "relaxlite, precision=bf16"
    options = {"precision": "bf16"}

    def version(self) -> str:
        if "precision" not in inspect.signature(rl.compile).parameters:
            raise Unsupported("this version of relaxlite compiles for float32 only")
        return rl.__version__


class RelaxliteKernels(Relaxlite):
    """The kernels of a call alone: recorded once, with their buffers and sizes, then called again and again."""

    title = "relaxlite, kernels"

    def open(self, workload: Workload) -> None:
        super().open(workload)
        self.recorder = Recorder(self.exe.data)

    def prepare(self, case: Case) -> Prepared:
        replay = self.recorder.record(case.arrays())
        return Prepared(replay.run, lambda _: replay.outputs)


class OnnxRuntime(Peer):
    title = "onnxruntime"

    def version(self) -> str:
        import onnxruntime

        return str(onnxruntime.__version__)

    def open(self, workload: Workload) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 4
        options.add_session_config_entry(
            "session.qdq_matmulnbits_accuracy_level", "1"
        )  # float32, as all others compute
        self.runtime, self.is_kernel, model = onnxruntime, workload.is_kernel, workload.model
        if workload.cache is not None:  # its documentation's "offline mode"
            kept = workload.cache / "onnxruntime.onnx"
            if kept.exists():
                model, options.graph_optimization_level = kept, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            else:
                kept.parent.mkdir(parents=True, exist_ok=True)
                options.optimized_model_filepath = str(kept)
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def prepare(self, case: Case) -> Prepared:
        inputs = case.arrays()
        if not self.is_kernel:
            return Prepared(lambda: self.session.run(None, inputs), lambda result: result)
        binding, outputs = self.session.io_binding(), []
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for info, array in zip(self.session.get_outputs(), self.session.run(None, inputs), strict=True):
            value = self.runtime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
            binding.bind_ortvalue_output(info.name, value)
            outputs.append(value)
        run = self.session.run_with_iobinding
        return Prepared(lambda: run(binding), lambda _: [value.numpy() for value in outputs])


class OpenVino(Peer):
    title = "OpenVINO, float32"
    settings: ClassVar[Mapping[str, str]] = {"INFERENCE_PRECISION_HINT": "f32"}

    def version(self) -> str:
        import openvino

        return str(openvino.__version__)

    def open(self, workload: Workload) -> None:
        import openvino

        core = openvino.Core()
        config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(self.threads), **self.settings}
        if workload.cache is not None:
            config["CACHE_DIR"] = str(workload.cache / type(self).__name__)  # one each: settings are not all told apart
        self.request = core.compile_model(workload.model, "CPU", config).create_infer_request()

    def prepare(self, case: Case) -> Prepared:
        inputs = case.arrays()

        def run() -> Any:
            return self.request.infer(inputs, share_inputs=True, share_outputs=True)

        return Prepared(run, lambda result: [np.array(value) for value in result.values()])


class OpenVinoDefault(OpenVino):
    """On processors that have it, OpenVINO computes in bfloat16 unless told otherwise."""

    title = "OpenVINO, default"
    settings = {}


class Tvm(Peer):
    """Relax with its default CPU pipeline, not tuned."""

    title = "Apache TVM"

    def version(self) -> str:
        os.environ["TVM_NUM_THREADS"] = str(self.threads)
        import tvm

        return str(tvm.__version__)

    def open(self, workload: Workload) -> None:
        import tvm
        from tvm import relax
        from tvm.relax.frontend.onnx import from_onnx

        self.tvm = tvm
        module = from_onnx(onnx.load(workload.model), keep_params_in_input=False)
        target = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
        compiled = tvm.compile(module, target=target)
        self.vm = relax.VirtualMachine(compiled, tvm.cpu())

    def prepare(self, case: Case) -> Prepared:
        values = [self.tvm.runtime.tensor(array) for array in case.arrays().values()]
        run = self.vm["main"]

        def arrays(result: Any) -> list[np.ndarray]:
            parts = result if not hasattr(result, "numpy") else [result]
            return [part.numpy() for part in parts]

        return Prepared(lambda: run(*values), arrays)


class OpenBlas(Peer):
    """The one in NumPy's wheels."""

    title = "OpenBLAS (NumPy)"

    def version(self) -> str:
        with contextlib.suppress(KeyError, TypeError):
            blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
            if "openblas" in blas["name"]:
                return f"{blas['version']} in numpy {np.__version__}"
        raise Unsupported("NumPy is built with another BLAS")

    def open(self, workload: Workload) -> None:
        if workload.form != "linear":
            raise Unsupported("a BLAS has matrix products only")
        self.weights = list(weights_of(workload).values())

    def prepare(self, case: Case) -> Prepared:
        (x,) = case.arrays().values()
        outputs = [np.empty((x.shape[0], w.shape[1]), np.float32) for w in self.weights]
        pairs = list(zip(self.weights, outputs, strict=True))

        def run() -> None:
            for w, y in pairs:
                np.matmul(x, w, out=y)

        return Prepared(run, lambda _: outputs)


def weights_of(workload: Workload) -> dict[str, np.ndarray]:
    """The initializers of the ONNX file, in its order."""
    tensors = onnx.load(workload.model).graph.initializer
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}
