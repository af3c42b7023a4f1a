"""PyTorch tensors and element types as those of relaxlite."""

from __future__ import annotations

import numpy as np
import torch

from relaxlite import dtypes
from relaxlite.errors import ImportModelError

FROM_TORCH: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in (*dtypes.INTEGERS, *dtypes.FLOATS, "bool") if hasattr(torch, name)
}
COMPLEX_PARTS: dict[torch.dtype, str] = {torch.complex64: "float32", torch.complex128: "float64"}
_BITS = {torch.bfloat16: torch.int16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the relaxlite dtype; of a complex type, that of its parts. ImportModelError for any other type."""
    name = FROM_TORCH.get(dtype) or COMPLEX_PARTS.get(dtype)
    if name is None:
        raise ImportModelError(f"tensors of {dtype} are not supported; convert them with .to() before the export")
    return name


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array that shares its memory where the tensor is dense; complex ones as pairs (..., 2)."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.dtype in COMPLEX_PARTS:
        tensor = torch.view_as_real(tensor)
    tensor = tensor.contiguous()
    name = dtype_name(tensor.dtype)
    if tensor.dtype in _BITS:
        return tensor.view(_BITS[tensor.dtype]).numpy().view(dtypes.to_numpy(name))
    return tensor.numpy()
