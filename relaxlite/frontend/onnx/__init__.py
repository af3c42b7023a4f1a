"""Import of ONNX models into IRModules.

    module = from_onnx("model.onnx")
    module = from_onnx("model.onnx", dynamic_shapes={"images": {0: "batch", 2: 224}}, bounds={"batch": "1..64"})

`loading` reads the file, `validation` checks the graph, `importer` converts its nodes in topological order. Converters
are in the `convert_*` modules: one function for each op and range of opset versions.
"""

from __future__ import annotations

from relaxlite.frontend.onnx import (  # noqa: F401  (each registers its converters)
    convert_attention,
    convert_blocks,
    convert_casts,
    convert_contrib,
    convert_data_dependent,
    convert_elementwise,
    convert_grouped_attention,
    convert_if,
    convert_indexing,
    convert_linalg,
    convert_loops,
    convert_nn,
    convert_norm,
    convert_quantization,
    convert_random,
    convert_reductions,
    convert_resize,
    convert_rnn,
    convert_sequence,
    convert_shapes,
    convert_signal,
    convert_text,
    convert_training,
    convert_vision,
    ml,
)
from relaxlite.frontend.onnx.importer import from_onnx
from relaxlite.frontend.onnx.registry import mark_builtin_converters, onnx_op

mark_builtin_converters()

__all__ = ["from_onnx", "onnx_op"]
