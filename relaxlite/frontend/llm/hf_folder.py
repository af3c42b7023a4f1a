"""Importer of Hugging Face folders: config.json, safetensors (also in shards), tokenizer.json."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures import Hyperparameters, find_architecture
from relaxlite.frontend.llm.architectures.base import Architecture
from relaxlite.frontend.llm.architectures.weight_names import HUGGING_FACE_LAYER, HUGGING_FACE_WHOLE, layer_names
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight, check_weights, deinterleave_rotary, split_fused
from relaxlite.frontend.llm.config import DecoderConfig
from relaxlite.frontend.llm.hf_generation import generation_defaults
from relaxlite.frontend.llm.hf_json import describe_foreign_file, read_json
from relaxlite.frontend.llm.hf_quantized import DTYPES, drop_zero_biases, read_quantization
from relaxlite.frontend.llm.hf_tokenizer import read_tokenizer

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OTHER_FORMATS = ("pytorch_model*.bin", "*.pth", "*.pt", "tf_model.h5", "flax_model.msgpack", "*.gguf")
_KEYS = {"num_local_experts": "num_experts"}  # alternative keys of config.json -> the usual key
_SKIPPED_PREFIXES = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.", "visual.",
    "model.visual.", "mtp.", "model.mtp_", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
    "model.vision_embedder.",
)  # fmt: skip
_IGNORED = (
    "rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
    ".attention.bias",
)  # buffers in old checkpoints that follow from config.json


def read_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the checkpoint in a folder; weights stay memory-mapped.

    Raises ImportModelError if config.json is missing, for an unknown architecture or number format, and for weights
    that are missing or of another shape than expected.
    """
    folder = Path(path)
    raw = read_json(folder / "config.json", needed=True)
    source = str(folder)
    config, architecture = describe(raw, source)
    quantization = read_quantization(_text_config(raw), source)
    tensors = _tensors(folder, () if quantization is None else quantization.method.kinds)
    if quantization is not None:
        tensors = quantization.assemble(tensors, source)
    mtp_prefixes = _mtp_prefixes(_text_config(raw), architecture, config)
    decoder_tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp_prefixes)}
    weights = _renamed(decoder_tensors, architecture, config, source)
    if config.is_tied and "head" in weights:
        if _is_same_matrix(weights["head"], weights.get("embed")):
            del weights["head"]
        else:
            config = replace(config, is_tied=False)  # as in transformers since version 5
    weights = split_fused(config, weights, architecture.fused, source)
    if quantization is not None:
        weights = drop_zero_biases(weights, config)
    check_weights(config, weights, source)
    if architecture.is_interleaved_in_folders:
        weights = deinterleave_rotary(weights, config)
    provenance = {"source": folder.resolve().name, **_model_card(folder)}
    if quantization is not None:
        provenance["quantized"] = quantization.method.name
    generation = read_json(folder / "generation_config.json")
    defaults = generation_defaults(generation, str(folder / "generation_config.json"))
    return Checkpoint(config, weights, read_tokenizer(folder, raw, generation), provenance, defaults)


def describe(raw: Mapping[str, Any], source: str) -> tuple[DecoderConfig, Architecture]:
    """Return configuration and architecture of a config.json. Raises ImportModelError for an unknown architecture."""
    raw = _text_config(raw)
    read_quantization(raw, source)  # an unknown quantization is reported before an unknown architecture
    architecture = find_architecture(str(raw.get("model_type", "")), source)
    own_keys = {usual: own for own, usual in _KEYS.items() if own in raw and raw.get(usual) is None}
    own_keys |= {
        usual: own for own, usual in architecture.keys.items() if own in raw
    }  # an own key takes precedence over the usual one
    usual_keys = {own: usual for usual, own in own_keys.items()}
    settings = {usual_keys.get(key, key): value for key, value in raw.items() if key not in own_keys}
    raw = {**architecture.defaults, **settings}
    if raw.get("hidden_act") == "swish":
        raw["hidden_act"] = "silu"  # a synonym
    return architecture.describe(Hyperparameters(source, raw, False, own_keys=own_keys)), architecture


def _text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in a config.json, also of a multimodal model."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return dict(raw)
    result = {**raw, **text}
    if raw.get("tie_word_embeddings") is True:  # text_config may say otherwise; a head among the weights decides
        result["tie_word_embeddings"] = True
    return result


def _tensors(folder: Path, kinds: tuple[str, ...]) -> dict[str, Weight]:
    """Read the tensors of all shards by name, those of the types `kinds` besides floats."""
    single_file = {
        "": "model.safetensors"
    }  # takes precedence over an index, which another version may have left behind
    index = {} if (folder / single_file[""]).is_file() else read_json(folder / "model.safetensors.index.json")
    shards = index.get("weight_map") or single_file
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ImportModelError(f"{folder}: weight_map of model.safetensors.index.json names no files")
    names = sorted(set(shards.values()))
    weights: dict[str, Weight] = {}
    for name in names:
        if not (folder / name).is_file():
            if shards is not single_file:
                raise ImportModelError(f"{folder}: {name}, one of {len(names)} files of weights, is missing")
            raise ImportModelError(f"{folder}: {name} is missing{_format_hint(folder)}")
        weights |= read_safetensors(folder / name, kinds)
    return weights


def _format_hint(folder: Path) -> str:
    """Return the end of an error message: which weights in other formats the folder has, and what to do."""
    files = sorted(file.name for pattern in _OTHER_FORMATS for file in folder.glob(pattern))
    if not files:
        return "; weights in other formats are not read"
    return (
        f"; {files[0]} is of another format, which is not read: load the folder with transformers, and save it with "
        "`save_pretrained`, or take a GGUF file"
    )


def read_safetensors(path: Path, kinds: tuple[str, ...] = ()) -> dict[str, Weight]:
    """Map the tensors of a safetensors file, by name (github.com/huggingface/safetensors, "Format").

    `kinds`: types to read besides floats. Raises ImportModelError for a damaged file and for other types.
    """
    dtypes_of = {kind: dtypes.to_numpy(name) for kind, name in _FLOATS.items()} | {kind: DTYPES[kind] for kind in kinds}
    try:
        with path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        size = int.from_bytes(data[:8].tobytes(), "little")
        if data.size < 8 or size > data.size - 8:
            raise ValueError("its header goes beyond its end")
        header = json.loads(data[8 : 8 + size].tobytes(), object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        result = {
            name: _weight(entry, data[8 + size :], dtypes_of, name, path)
            for name, entry in header.items()
            if not name.endswith(_IGNORED) and not name.startswith(_SKIPPED_PREFIXES)
        }
        _check_offsets(header, data.size - 8 - size)
        return result
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"a damaged or truncated safetensors file: {error}"
        raise ImportModelError(f"{path}: {describe_foreign_file(path) or problem}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict of JSON pairs. Raises ValueError if a key occurs twice."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"its header has {name!r} twice")
        result[name] = value
    return result


def _check_offsets(header: Mapping[str, Any], size: int) -> None:
    """Raise ValueError unless tensors are contiguous and fill the file, as the format requires.

    A damaged header could otherwise give a tensor the bytes of another one.
    """
    end = 0
    for begin, stop, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if begin != end:
            raise ValueError(f"tensor {name!r} begins at byte {begin}, the one before it ends at {end}")
        end = stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")


def _weight(
    entry: Mapping[str, Any],
    data: np.ndarray[Any, Any],
    dtypes_of: Mapping[str, np.dtype[Any]],
    name: str,
    path: Path,
) -> Weight:
    """Make a weight of an entry of the header. `data`: the bytes behind the header."""
    begin, end = entry["data_offsets"]
    shape, kind = tuple(entry["shape"]), entry["dtype"]
    if kind not in dtypes_of:
        known = ", ".join(dtypes_of)
        raise ImportModelError(
            f"{path}: tensor {name!r} is of type {kind}, which is not read; known are {known}. If the checkpoint is "
            "quantized, take the float one, or a GGUF file"
        )
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"tensor {name!r} lies at {begin} to {end} of {data.size} bytes")
    return Weight(data[begin:end].view(dtypes_of[kind]).reshape(shape), shape)


def _mtp_prefixes(raw: Mapping[str, Any], architecture: Architecture, config: DecoderConfig) -> tuple[str, ...]:
    """Return the prefixes of names in the layers for multi-token prediction, which are not imported."""
    count = raw.get("num_nextn_predict_layers")
    count = min(count, config.layers) if isinstance(count, int) and count > 0 else 0
    return tuple(f"{architecture.prefix}{config.layers + k}." for k in range(count))


def _renamed(
    tensors: Mapping[str, Weight], architecture: Architecture, config: DecoderConfig, source: str
) -> dict[str, Weight]:
    """Rename tensors to the names of this package; tensors that are no weights of the decoder keep their names."""
    layer = architecture.hugging_face or HUGGING_FACE_LAYER
    names = {theirs: ours for ours, theirs in (architecture.hugging_face_whole or HUGGING_FACE_WHOLE).items()}
    names |= {
        f"{architecture.prefix}{k}.{theirs}": f"layers.{k}.{ours}" for k, ours, theirs in layer_names(layer, config)
    }
    result = {}
    for theirs, weight in tensors.items():
        name = theirs.removeprefix("language_model.").removeprefix("transformer.")
        if name.startswith("model.language_model."):  # transformers since 4.52, for multimodal models
            name = "model." + name.removeprefix("model.language_model.")
        ours = names.get(name, names.get(f"model.{name}", name))  # a model saved without its head has no prefix
        if ours.endswith("norm"):
            weight = _add_offset(weight, architecture.norm_offset)
        elif ours.endswith("shared_router") and weight.shape[:1] == (1,):
            weight = weight.slice_at(0)
        elif ours.rpartition(".")[2] in architecture.transposed and len(weight.shape) == 2:
            weight = weight.transposed
        result[ours] = weight
    return result if architecture.from_folder is None else architecture.from_folder(result, config, source)


def _is_same_matrix(head: Weight, embed: Weight | None) -> bool:
    """Return whether a float head equals the embedding (and is redundant); true for any head without embedding."""
    if embed is None or head.block_format is not None or embed.block_format is not None:
        return embed is None
    return head.shape == embed.shape and np.array_equal(head.data, embed.data)


def _add_offset(weight: Weight, offset: float) -> Weight:
    """Add a number to all elements of a weight, in float32."""
    return Weight(weight.data.astype(np.float32) + np.float32(offset), weight.shape) if offset else weight


def _model_card(folder: Path) -> dict[str, str]:
    """Return the licence that the head of README.md names."""
    card = folder / "README.md"
    if not card.exists():
        return {}
    for line in card.read_text("utf-8", errors="replace").splitlines()[:40]:
        if line.startswith("license:"):
            return {"license": line.partition(":")[2].strip()}
    return {}
