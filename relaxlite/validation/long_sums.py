"""How many terms the sums of an op have: the more they are, the further rounding may move what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relaxlite.ir.expr import Call
from relaxlite.ir.op import Op
from relaxlite.ir.ops.contraction import Einsum

Array: TypeAlias = "np.ndarray[Any, Any]"


def terms_of_sums(call: Call, args: list[Any], result: Any) -> int:
    """Of an op that may add up its terms in any order, at most; 0 for other ops. `args` and `result` are arrays."""
    rule = _RULES.get(call.callee.name) if isinstance(call.callee, Op) else None
    return 0 if rule is None or not args[0].size else int(rule(call.attrs, args, result))


def _of_filters(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    channels = result.shape[1 if attrs["layout"] == "first" else -1]
    return args[1].size // max(channels, 1)


def _of_transposed_filters(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    filters = args[1]  # (c, oc / groups, kernel...)
    return filters.size // max(filters.shape[1] * attrs["groups"], 1)


def _of_attention(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    """Of a score and of a softmax's."""
    keys, axes = args[1], attrs["k_axes"]
    length, width = (keys.transpose(axes) if axes else keys).shape[-2:]
    return length + width


def _along(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    return args[0].shape[attrs["axis"]]


def _from(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    return math.prod(args[0].shape[attrs["axis"] :])


def _over_kernel(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    return math.prod(attrs["kernel"])


_RULES: Mapping[str, Callable[[Mapping[str, Any], list[Any], Any], int]] = {
    "conv": _of_filters,
    "conv_transpose": _of_transposed_filters,
    "einsum": lambda attrs, args, result: Einsum().terms(attrs["equation"], [x.shape for x in args]),
    "attention": _of_attention,
    "softmax": _along,
    "log_softmax": _along,
    "lp_normalize": _along,
    "cumsum": _along,
    "layer_norm": _from,
    "rms_norm": _from,
    "instance_norm": lambda attrs, args, result: math.prod(args[0].shape[2:]),
    "group_norm": lambda attrs, args, result: math.prod(args[0].shape[1:]) // attrs["groups"],
    "mean_variance_normalize": lambda attrs, args, result: math.prod(args[0].shape[axis] for axis in attrs["axes"]),
    "lrn": lambda attrs, args, result: attrs["size"],
    "avg_pool": _over_kernel,
    "lp_pool": _over_kernel,
    "dft": lambda attrs, args, result: max(x.shape[attrs["axis"]] for x in (args[0], result)),
    "stft": lambda attrs, args, result: args[1].size,
}
