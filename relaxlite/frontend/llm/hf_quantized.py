"""Importer of quantized Hugging Face folders, according to `quantization_config` of config.json.

The tensors of a module (`q_proj.qweight`, `q_proj.scales`, ...) become one weight, `q_proj.weight`, before weights are
renamed; its rows are decoded lazily, in chunks. METHODS lists the quantization libraries: which tensors they write, and
which function decodes these (integer_codes.py, small_floats.py). Activations are not quantized as the library would do
(W8A8, static or dynamic); modules that were not quantized are floats as in any folder.
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
    read_bitsandbytes_int8,
    read_compressed_int8,
    read_gptq,
    read_packed_integers,
)
from relaxlite.frontend.llm.quantized_module import FLOATS, QuantizedModule
from relaxlite.frontend.llm.small_floats import E4M3, E5M2, read_bitsandbytes_4bit, read_fp8, read_packed_fp4
from relaxlite.records import dataclass

_INTEGERS = {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
DTYPES = {kind: np.dtype(name) for kind, name in _INTEGERS.items()} | {
    "F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": np.dtype("uint8")
}  # fmt: skip
"""NumPy types of the safetensors types that only quantized checkpoints have."""


def _no_problem(settings: Mapping[str, Any]) -> str | None:
    """Accept all settings of a method."""
    return None


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """A quantization library, `name` in config.json.

    `kinds`: types of its tensors besides floats. `parts`: the tensors of a module that make up its weight. `read`:
    decodes them; None for the `of_architectures` that decode weights themselves. `ignored_parts`: tensors for the
    quantization of activations or of the cache, which are dropped. `unsupported`: returns what is not supported of its
    settings, None if all is.
    """

    name: str
    kinds: tuple[str, ...]
    parts: tuple[str, ...] = ()
    read: Callable[[QuantizedModule], Weight] | None = None
    ignored_parts: tuple[str, ...] = ()
    unsupported: Callable[[Mapping[str, Any]], str | None] = _no_problem
    of_architectures: tuple[str, ...] = ()


def _problem_of_gptq(settings: Mapping[str, Any]) -> str | None:
    """Return what is not supported of the settings of GPTQ."""
    layout = gptq_layout(settings)
    known = layout in ("gptq", "gptq_v2")
    return None if known else f"the layout {layout!r} is not read, only 'gptq' and 'gptq_v2' are"


def _problem_of_awq(settings: Mapping[str, Any]) -> str | None:
    """Return what is not supported of the settings of AWQ."""
    names = (settings.get(key) for key in ("version", "format", "checkpoint_format"))
    version = str(next((name for name in names if name), "gemm")).lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        return f"version {version!r} with {bits} bits is not read, only 'gemm' with 4 bits is"
    return None


_COMPRESSED_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip


def _problem_of_compressed(settings: Mapping[str, Any]) -> str | None:
    """Return what is not supported of the settings of compressed-tensors."""
    formats = [settings.get("format"), *(group.get("format") for group in _mappings(settings.get("config_groups")))]
    sparse = settings.get("sparsity_config")
    formats += [sparse.get("format")] if isinstance(sparse, Mapping) else []
    unknown = [name for name in formats if name is not None and name not in _COMPRESSED_FORMATS]
    if unknown:
        return f"the format {unknown[0]!r} is not read, only {', '.join(_COMPRESSED_FORMATS)} are"
    transform = settings.get("transform_config")
    if isinstance(transform, Mapping) and transform.get("config_groups"):
        return "those that rotate activations (transform_config) are not read"
    return None


def _mappings(groups: Any) -> list[Mapping[str, Any]]:
    """Return the mappings among the values of a mapping."""
    values = groups.values() if isinstance(groups, Mapping) else ()
    return [value for value in values if isinstance(value, Mapping)]


def _read_compressed(module: QuantizedModule) -> Weight:
    """Decode the weight of a module of compressed-tensors, by its tensors."""
    packed, weight = module.parts.get("weight_packed"), module.parts.get("weight")
    if packed is not None and packed.dtype == np.int32:
        return read_packed_integers(module)
    if weight is not None and weight.dtype == np.int8:
        return read_compressed_int8(module)
    zeros = module.parts.get("weight_zero_point")
    if zeros is not None and zeros.astype(np.float32).any():
        raise module.error("weight_zero_point must be 0 where weights are floats")
    if packed is not None:
        return read_packed_fp4(module)
    groups = module.settings.get("config_groups")
    schemes = [group.get("weights") for group in _mappings(groups)]
    blocks = [scheme.get("block_structure") for scheme in schemes if isinstance(scheme, Mapping)]
    block = next((block for block in blocks if block is not None), None)
    return read_fp8(replace(module, settings={"weight_block_size": block}))


def _read_bitsandbytes(module: QuantizedModule) -> Weight:
    """Decode the weight of a module of bitsandbytes: LLM.int8 or 4 bits."""
    weight = module.parts.get("weight")
    return (
        read_bitsandbytes_int8(module)
        if weight is not None and weight.dtype == np.int8
        else read_bitsandbytes_4bit(module)
    )


_ACTIVATION_SCALES = (
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point")
_FP8_KINDS = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
_BNB_4BIT_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_BNB_STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_FP8_PARTS = ("weight", "weight_scale", "weight_scale_inv")
METHODS: Mapping[str, QuantizationMethod] = {
    method.name: method
    for method in (
        QuantizationMethod(
            "gptq", ("I32",), ("qweight", "qzeros", "scales", "g_idx"), read_gptq, unsupported=_problem_of_gptq
        ),
        QuantizationMethod("awq", ("I32",), ("qweight", "qzeros", "scales"), read_awq, unsupported=_problem_of_awq),
        QuantizationMethod(
            "compressed-tensors",
            ("I8", "U8", "I32", "I64", *_FP8_KINDS),
            (
                "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
                "weight_global_scale",
            ),
            _read_compressed,
            (*_ACTIVATION_SCALES, *_CACHE_SCALES),
            _problem_of_compressed,
        ),
        QuantizationMethod("fp8", _FP8_KINDS, _FP8_PARTS, read_fp8, (*_ACTIVATION_SCALES, *_CACHE_SCALES)),
        QuantizationMethod("fbgemm_fp8", _FP8_KINDS, _FP8_PARTS, read_fp8, ("input_scale_ub", *_ACTIVATION_SCALES)),
        QuantizationMethod(
            "bitsandbytes",
            ("I8", "U8"),
            ("weight", *(f"weight.{part}" for part in (*_BNB_4BIT_PARTS, *_BNB_STATES)), "SCB", "weight_format"),
            _read_bitsandbytes,
        ),
        QuantizationMethod("mxfp4", ("U8",), of_architectures=("gpt_oss",)),
    )
}  # fmt: skip


_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization method of a checkpoint and its settings."""

    method: QuantizationMethod
    settings: Mapping[str, Any] = field(default_factory=dict)

    def assemble(self, tensors: Mapping[str, Weight], source: str) -> dict[str, Weight]:
        """Replace the tensors of each quantized module by one weight.

        Raises ImportModelError if the tensors of a module do not fit together, or an integer tensor belongs to no
        module.
        """
        if self.method.read is None:
            return dict(tensors)
        weights: dict[str, Weight] = {}
        modules: dict[str, dict[str, Weight]] = {}
        for name, weight in tensors.items():
            part = next((part for part in self.method.parts if name.endswith(f".{part}")), None)
            if part is not None:
                modules.setdefault(name.removesuffix(f".{part}"), {})[part] = weight
            elif not name.endswith(tuple(f".{ignored}" for ignored in self.method.ignored_parts)):
                weights[name] = weight
        for name, parts in modules.items():
            if parts.keys() == {"weight"} and _is_float(parts["weight"]):
                weights[f"{name}.weight"] = parts["weight"]
                continue
            arrays = {part: weight.data for part, weight in parts.items()}
            module = QuantizedModule(source, name, self.method.name, self.settings, arrays)
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


def read_quantization(raw: Mapping[str, Any], source: str) -> Quantization | None:
    """Return the quantization of the weights by a config.json; None if they are not quantized.

    Raises ImportModelError for a method or settings that are not supported.
    """
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if not settings:
        return None
    options = settings if isinstance(settings, Mapping) else {}
    name = options.get("quant_method", None if options else settings)
    if name == "auto-round":  # packs in the layouts of other methods
        name = _AUTO_ROUND.get(str(options.get("packing_format")), name)
    method = METHODS.get(name) if isinstance(name, str) else None
    architectures = method.of_architectures if method is not None else ()
    if method is None or (architectures and raw.get("model_type") not in architectures):
        known = ", ".join(name for name, of in METHODS.items() if not of.of_architectures)
        raise ImportModelError(
            f"{source}: weights quantized by {name!r} are not read, those of {known} are; take the float checkpoint, "
            "or a GGUF file"
        )
    problem = method.unsupported(options)
    if problem is not None:
        raise ImportModelError(
            f"{source}: of weights quantized by {name} {problem}; take the float checkpoint, or a GGUF file"
        )
    return Quantization(method, options)


def drop_zero_biases(weights: Mapping[str, Weight], config: DecoderConfig) -> dict[str, Weight]:
    """Drop zero biases that the architecture does not have: some releases of AutoGPTQ write one for each module."""
    expected = expected_weights(config)
    return {
        name: weight
        for name, weight in weights.items()
        if name in expected or not name.endswith("_bias") or len(weight.shape) != 1 or weight.data.any()
    }


def _is_float(weight: Weight) -> bool:
    return weight.data.dtype.name in FLOATS
