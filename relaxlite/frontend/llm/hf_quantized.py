"""Hugging Face folders whose weights a library quantized, as `quantization_config` of config.json says.

The tensors of a module (`q_proj.qweight`, `q_proj.scales`, ...) become its one weight, `q_proj.weight`, before anything
is renamed, some rows at a time and only when somebody reads them. A row of METHODS is a library: what it may write, and
who reads it (integer_codes.py, small_floats.py). What it would do to activations (rounding of W8A8, static or dynamic)
is not done; modules that it left alone are floats as in any folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Weight, expected_weights
from relaxlite.frontend.llm.config import DecoderConfig
from relaxlite.frontend.llm.integer_codes import (
    gptq_layout,
    read_awq,
    read_gptq,
    read_int8,
    read_packed,
    read_scaled_bytes,
)
from relaxlite.frontend.llm.quantized_module import FLOATS, Module
from relaxlite.frontend.llm.small_floats import E4M3, E5M2, read_4bit, read_fp8, read_packed_floats
from relaxlite.records import dataclass

_INTEGERS = {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
DTYPES = {kind: np.dtype(name) for kind, name in _INTEGERS.items()} | {
    "F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": np.dtype("uint8")
}  # fmt: skip
"""Of the kinds of tensors in safetensors files that no float checkpoint has."""


def _nothing(settings: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Method:
    """A library, `name` in config.json. `kinds`: of its tensors, beside floats. `parts`: the tensors of a module that
    become its weight, `spare`: those that say how activations or a cache are rounded. `read`: the weight of a module,
    where architectures do not know better (`of_architectures`). `problem`: what cannot be read of its settings."""

    name: str
    kinds: tuple[str, ...]
    parts: tuple[str, ...] = ()
    read: Callable[[Module], Weight] | None = None
    spare: tuple[str, ...] = ()
    problem: Callable[[Mapping[str, Any]], str | None] = _nothing
    of_architectures: tuple[str, ...] = ()


def _problem_of_gptq(settings: Mapping[str, Any]) -> str | None:
    layout = gptq_layout(settings)
    known = layout in ("gptq", "gptq_v2")
    return None if known else f"the layout {layout!r} is not read, only 'gptq' and 'gptq_v2' are"


def _problem_of_awq(settings: Mapping[str, Any]) -> str | None:
    said = (settings.get(key) for key in ("version", "format", "checkpoint_format"))
    version = str(next((name for name in said if name), "gemm")).lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        return f"version {version!r} with {bits} bits is not read, only 'gemm' with 4 bits is"
    return None


_COMPRESSED = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip


def _problem_of_compressed(settings: Mapping[str, Any]) -> str | None:
    formats = [settings.get("format"), *(group.get("format") for group in _mappings(settings.get("config_groups")))]
    sparse = settings.get("sparsity_config")
    formats += [sparse.get("format")] if isinstance(sparse, Mapping) else []
    unknown = [name for name in formats if name is not None and name not in _COMPRESSED]
    if unknown:
        return f"the format {unknown[0]!r} is not read, only {', '.join(_COMPRESSED)} are"
    turned = settings.get("transform_config")
    if isinstance(turned, Mapping) and turned.get("config_groups"):
        return "those that rotate activations (transform_config) are not read"
    return None


def _mappings(groups: Any) -> list[Mapping[str, Any]]:
    values = groups.values() if isinstance(groups, Mapping) else ()
    return [value for value in values if isinstance(value, Mapping)]


def _compressed(module: Module) -> Weight:
    packed, weight = module.parts.get("weight_packed"), module.parts.get("weight")
    if packed is not None and packed.dtype == np.int32:
        return read_packed(module)
    if weight is not None and weight.dtype == np.int8:
        return read_scaled_bytes(module)
    zeros = module.parts.get("weight_zero_point")
    if zeros is not None and zeros.astype(np.float32).any():
        raise module.error("weight_zero_point must be 0 where weights are floats")
    if packed is not None:
        return read_packed_floats(module)
    groups = module.settings.get("config_groups")
    schemes = [group.get("weights") for group in _mappings(groups)]
    blocks = [scheme.get("block_structure") for scheme in schemes if isinstance(scheme, Mapping)]
    block = next((block for block in blocks if block is not None), None)
    return read_fp8(replace(module, settings={"weight_block_size": block}))


def _bitsandbytes(module: Module) -> Weight:
    weight = module.parts.get("weight")
    return read_int8(module) if weight is not None and weight.dtype == np.int8 else read_4bit(module)


_ACTIVATIONS = (
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)
_CACHE = ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point")
_FLOATS_OF_8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
_IN_4_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_FP8_PARTS = ("weight", "weight_scale", "weight_scale_inv")
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("gptq", ("I32",), ("qweight", "qzeros", "scales", "g_idx"), read_gptq, problem=_problem_of_gptq),
        Method("awq", ("I32",), ("qweight", "qzeros", "scales"), read_awq, problem=_problem_of_awq),
        Method(
            "compressed-tensors",
            ("I8", "U8", "I32", "I64", *_FLOATS_OF_8),
            (
                "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
                "weight_global_scale",
            ),
            _compressed,
            (*_ACTIVATIONS, *_CACHE),
            _problem_of_compressed,
        ),
        Method("fp8", _FLOATS_OF_8, _FP8_PARTS, read_fp8, (*_ACTIVATIONS, *_CACHE)),
        Method("fbgemm_fp8", _FLOATS_OF_8, _FP8_PARTS, read_fp8, ("input_scale_ub", *_ACTIVATIONS)),
        Method(
            "bitsandbytes",
            ("I8", "U8"),
            ("weight", *(f"weight.{part}" for part in (*_IN_4_BITS, *_STATES)), "SCB", "weight_format"),
            _bitsandbytes,
        ),
        Method("mxfp4", ("U8",), of_architectures=("gpt_oss",)),
    )
}  # fmt: skip


_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What quantized a checkpoint, with its settings."""

    method: Method
    settings: Mapping[str, Any] = field(default_factory=dict)

    def assembled(self, tensors: Mapping[str, Weight], source: str) -> dict[str, Weight]:
        """The tensors with one weight for each module that was quantized. ImportModelError: its tensors do not fit, or
        one of integers belongs to nothing."""
        if self.method.read is None:
            return dict(tensors)
        weights: dict[str, Weight] = {}
        modules: dict[str, dict[str, Weight]] = {}
        for name, weight in tensors.items():
            part = next((part for part in self.method.parts if name.endswith(f".{part}")), None)
            if part is not None:
                modules.setdefault(name.removesuffix(f".{part}"), {})[part] = weight
            elif not name.endswith(tuple(f".{spare}" for spare in self.method.spare)):
                weights[name] = weight
        for name, parts in modules.items():
            if parts.keys() == {"weight"} and _is_float(parts["weight"]):
                weights[f"{name}.weight"] = parts["weight"]
                continue
            arrays = {part: weight.data for part, weight in parts.items()}
            module = Module(source, name, self.method.name, self.settings, arrays)
            if f"{name}.weight" in weights:
                raise module.error("there is a weight that is not quantized, too")
            weights[f"{name}.weight"] = self.method.read(module)
        for name, weight in weights.items():
            if isinstance(weight.stored, np.ndarray) and not _is_float(weight):
                raise ImportModelError(
                    f"{source}: tensor {name!r} is of type {weight.data.dtype}, and {self.method.name} is not known to "
                    "write one; take the float checkpoint, or a GGUF file"
                )
        return weights


def quantization_of(raw: Mapping[str, Any], source: str) -> Quantization | None:
    """What a config.json says that quantized the weights; None: nothing did. ImportModelError: it is not read."""
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if not settings:
        return None
    given = settings if isinstance(settings, Mapping) else {}
    name = given.get("quant_method", None if given else settings)
    if name == "auto-round":  # which packs as others do
        name = _AUTO_ROUND.get(str(given.get("packing_format")), name)
    method = METHODS.get(name) if isinstance(name, str) else None
    architectures = method.of_architectures if method is not None else ()
    if method is None or (architectures and raw.get("model_type") not in architectures):
        known = ", ".join(name for name, of in METHODS.items() if not of.of_architectures)
        raise ImportModelError(
            f"{source}: weights quantized by {name!r} are not read, those of {known} are; take the float checkpoint, "
            "or a GGUF file"
        )
    problem = method.problem(given)
    if problem is not None:
        raise ImportModelError(
            f"{source}: of weights quantized by {name} {problem}; take the float checkpoint, or a GGUF file"
        )
    return Quantization(method, given)


def without_empty_biases(weights: Mapping[str, Weight], config: DecoderConfig) -> dict[str, Weight]:
    """Without biases of zeros that the architecture has not: some releases of AutoGPTQ write one for each module."""
    expected = expected_weights(config)
    return {
        name: weight
        for name, weight in weights.items()
        if name in expected or not name.endswith("_bias") or len(weight.shape) != 1 or weight.data.any()
    }


def _is_float(weight: Weight) -> bool:
    return weight.data.dtype.name in FLOATS
