"""relaxlite as a backend of the ONNX standard's interface, `onnx.backend.base.Backend`.

    rep = backend.prepare(onnx.load("model.onnx"))
    (y,) = rep.run([x])

The standard's test suite, `onnx.backend.test.BackendTest`, runs on this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

from relaxlite import driver
from relaxlite.errors import InputError, InvalidArgumentError
from relaxlite.frontend.onnx.importer import from_onnx
from relaxlite.frontend.onnx.symbols import DynamicShapes, declared_dims


class RelaxliteRep(BackendRep):
    """A compiled model, or one whose inputs declare no ranks, which is compiled for the ranks of its arguments."""

    def __init__(self, model: onnx.ModelProto, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, dict(options)
        initialized = {t.name for t in model.graph.initializer}
        self._names = [i.name for i in model.graph.input if i.name not in initialized]
        self._unranked = [i.name for i in model.graph.input if i.name in self._names and _is_unranked(i)]
        self._executables: dict[tuple[int, ...], Any] = {}
        if not self._unranked:
            self._executables[()] = self._compile(None)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model on arrays in the model's order, or by name; returns all outputs in the model's order.

        Raises InputError where the arguments do not match, ExecutionError where the model fails.
        """
        if kwargs:
            raise InvalidArgumentError(f"run has no option {', '.join(kwargs)}")
        values = self._by_name(inputs)
        return tuple(self._executable(values).run(values).values())

    def _by_name(self, inputs: Any) -> Mapping[str, Any]:
        if isinstance(inputs, Mapping):
            return inputs
        values = inputs if isinstance(inputs, Sequence) else [inputs]
        if len(values) != len(self._names):
            raise InputError(f"got {len(values)} inputs; the model takes {len(self._names)}: {', '.join(self._names)}")
        return dict(zip(self._names, values, strict=True))

    def _executable(self, values: Mapping[str, Any]) -> Any:
        """Return the executable for the ranks of these arguments."""
        ranks = tuple(_rank(values[name]) for name in self._unranked if name in values)
        if ranks not in self._executables:
            self._executables[ranks] = self._compile(
                {name: (None,) * rank for name, rank in zip(self._unranked, ranks, strict=True)}
            )
        return self._executables[ranks]

    def _compile(self, dynamic_shapes: DynamicShapes | None) -> Any:
        return driver.compile(from_onnx(self._model, dynamic_shapes=dynamic_shapes), **self._options)


def _is_unranked(info: onnx.ValueInfoProto) -> bool:
    return declared_dims(info) is None


def _rank(value: Any) -> int:
    """Return the rank of an array, of the elements of a sequence, or 0 of an empty sequence."""
    if isinstance(value, list | tuple):
        return np.ndim(value[0]) if value else 0
    return np.ndim(value)


class RelaxliteBackend(Backend):
    """Compiles models for the processor it runs on; "CPU" is its only device."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> RelaxliteRep:
        """Compile a model; `kwargs` are options of `relaxlite.compile`.

        Raises ImportModelError for a model that relaxlite does not take, InvalidArgumentError for another device.
        """
        if not cls.supports_device(device):
            raise InvalidArgumentError(f"device {device!r} is not supported: relaxlite compiles for 'CPU'")
        return RelaxliteRep(model, kwargs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node on arrays; `opset_version` is that of the node's domain, by default the newest."""
        version = kwargs.pop("opset_version", None) or _newest_opset(node.domain)
        arrays = [np.asarray(x) for x in inputs]
        names = [name for name in node.input if name]
        types = [onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for x in arrays]
        ins = [onnx.helper.make_tensor_value_info(n, t, x.shape) for n, t, x in zip(names, types, arrays, strict=True)]
        outs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "node", ins, outs)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(node.domain, version)])
        return cls.prepare(model, device, **kwargs).run(arrays)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.partition(":")[0].upper() == "CPU"


def _newest_opset(domain: str) -> int:
    versions = [s.since_version for s in onnx.defs.get_all_schemas() if s.domain == domain]
    return onnx.defs.onnx_opset_version() if not domain else max(versions, default=1)


is_compatible = RelaxliteBackend.is_compatible
prepare = RelaxliteBackend.prepare
run_model = RelaxliteBackend.run_model
run_node = RelaxliteBackend.run_node
supports_device = RelaxliteBackend.supports_device
