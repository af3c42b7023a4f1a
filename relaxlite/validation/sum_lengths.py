"""Number of terms that an op sums: more terms allow a larger rounding error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relaxlite.ir.expr import Call
from relaxlite.ir.op import Op
from relaxlite.ir.ops.contraction import Einsum

Array: TypeAlias = "np.ndarray[Any, Any]"


def num_summed_terms(call: Call, args: list[Any], result: Any) -> int:
    """Upper bound of the terms of one sum of an op with an unspecified order of summation; 0 for other ops.

    `args` and `result` are arrays.
    """
    rule = _RULES.get(call.callee.name) if isinstance(call.callee, Op) else None
    return 0 if rule is None or not args[0].size else int(rule(call.attrs, args, result))


def _conv_terms(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    channels = result.shape[1 if attrs["layout"] == "first" else -1]
    return args[1].size // max(channels, 1)


def _conv_transpose_terms(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    filters = args[1]  # (c, oc / groups, kernel...)
    return filters.size // max(filters.shape[1] * attrs["groups"], 1)


def _attention_terms(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    """Terms of a score plus terms of a softmax."""
    keys, axes = args[1], attrs["k_axes"]
    length, width = (keys.transpose(axes) if axes else keys).shape[-2:]
    return length + width


def _axis_terms(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    return args[0].shape[attrs["axis"]]


def _trailing_terms(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    return math.prod(args[0].shape[attrs["axis"] :])


def _pool_terms(attrs: Mapping[str, Any], args: list[Any], result: Array) -> int:
    return math.prod(attrs["kernel"])


_RULES: Mapping[str, Callable[[Mapping[str, Any], list[Any], Any], int]] = {
    "conv": _conv_terms,
    "conv_transpose": _conv_transpose_terms,
    "einsum": lambda attrs, args, result: Einsum().terms(attrs["equation"], [x.shape for x in args]),
    "attention": _attention_terms,
    "softmax": _axis_terms,
    "log_softmax": _axis_terms,
    "lp_normalize": _axis_terms,
    "cumsum": _axis_terms,
    "layer_norm": _trailing_terms,
    "rms_norm": _trailing_terms,
    "instance_norm": lambda attrs, args, result: math.prod(args[0].shape[2:]),
    "group_norm": lambda attrs, args, result: math.prod(args[0].shape[1:]) // attrs["groups"],
    "mean_variance_normalize": lambda attrs, args, result: math.prod(args[0].shape[axis] for axis in attrs["axes"]),
    "lrn": lambda attrs, args, result: attrs["size"],
    "adaptive_avg_pool": lambda attrs, args, result: math.prod(args[0].shape[args[0].ndim - len(args[1]) :]),
    "avg_pool": _pool_terms,
    "lp_pool": _pool_terms,
    "dft": lambda attrs, args, result: max(x.shape[attrs["axis"]] for x in (args[0], result)),
    "stft": lambda attrs, args, result: args[1].size,
}
