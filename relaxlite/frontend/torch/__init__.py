"""Import of PyTorch models into IRModules.

    module = from_torch(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    module = from_torch("model.pt2")

`exporting` makes the exported program, `functional` retraces it where operators write into tensors, `importer` converts
its nodes. Converters are in the `convert_*` modules: one function for each operator. PyTorch is imported in this folder
only.
"""

from __future__ import annotations

from relaxlite.errors import ImportModelError

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportModelError('PyTorch is not installed; install it by pip install "relaxlite[torch]"') from _error

from relaxlite.frontend.torch import (  # noqa: F401  (each registers its converters)
    convert_activations,
    convert_attention,
    convert_bags,
    convert_bits,
    convert_complex,
    convert_control,
    convert_creation,
    convert_data_dependent,
    convert_eigenvalues,
    convert_elementwise,
    convert_experts,
    convert_factorizations,
    convert_indexing,
    convert_linalg,
    convert_losses,
    convert_moves,
    convert_nn,
    convert_norm,
    convert_pooling,
    convert_quantization,
    convert_random,
    convert_reductions,
    convert_resize,
    convert_rnn,
    convert_scatter,
    convert_shapes,
    convert_signal,
    convert_sorting,
    convert_special,
    convert_vision,
)
from relaxlite.frontend.torch.exporting import from_torch
from relaxlite.frontend.torch.registry import mark_builtin_converters, torch_op

mark_builtin_converters()

__all__ = ["from_torch", "torch_op"]
