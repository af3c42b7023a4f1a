"""Folders as Hugging Face's transformers writes them: config.json, safetensors (also in shards), tokenizer.json."""

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
from relaxlite.frontend.llm.architectures.base import (
    HUGGING_FACE_LAYER,
    HUGGING_FACE_WHOLE,
    Architecture,
    layer_names,
)
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight, check_weights, in_halves, split_fused
from relaxlite.frontend.llm.config import DecoderConfig
from relaxlite.frontend.llm.hf_generation import generation_defaults
from relaxlite.frontend.llm.hf_json import foreign, read_json
from relaxlite.frontend.llm.hf_quantized import DTYPES, quantization_of, without_empty_biases
from relaxlite.frontend.llm.hf_tokenizer import read_tokenizer

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pth", "*.pt", "tf_model.h5", "flax_model.msgpack", "*.gguf")
_KEYS = {"num_local_experts": "num_experts"}  # the usual key, where a config.json has another
_OTHER_PARTS = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.", "visual.",
    "model.visual.", "mtp.", "model.mtp_", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
    "model.vision_embedder.",
)  # fmt: skip
_IGNORED = (
    "rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
    ".attention.bias",
)  # buffers that old checkpoints hold; they follow from config.json


def read_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a folder; its weights stay mapped.

    ImportModelError: no config.json, an unknown architecture or number format, weights missing or of another shape.
    """
    folder = Path(path)
    raw = read_json(folder / "config.json", needed=True)
    source = str(folder)
    config, architecture = describe(raw, source)
    quantization = quantization_of(_of_text(raw), source)
    tensors = _tensors(folder, () if quantization is None else quantization.method.kinds)
    if quantization is not None:
        tensors = quantization.assembled(tensors, source)
    ahead = _guessing_layers(_of_text(raw), architecture, config)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(ahead)}
    weights = _renamed(kept, architecture, config, source)
    if config.is_tied and "head" in weights:
        if _is_same(weights["head"], weights.get("embed")):
            del weights["head"]
        else:
            config = replace(config, is_tied=False)  # as transformers does since version 5
    weights = split_fused(config, weights, architecture.fused, source)
    if quantization is not None:
        weights = without_empty_biases(weights, config)
    check_weights(config, weights, source)
    if architecture.is_interleaved_in_folders:
        weights = in_halves(weights, config)
    provenance = {"source": folder.resolve().name, **_model_card(folder)}
    if quantization is not None:
        provenance["quantized"] = quantization.method.name
    generation = read_json(folder / "generation_config.json")
    defaults = generation_defaults(generation, str(folder / "generation_config.json"))
    return Checkpoint(config, weights, read_tokenizer(folder, raw, generation), provenance, defaults)


def describe(raw: Mapping[str, Any], source: str) -> tuple[DecoderConfig, Architecture]:
    """The configuration that a config.json stands for. ImportModelError: nothing that we know."""
    raw = _of_text(raw)
    quantization_of(raw, source)  # refused, where it is, before the architecture
    architecture = find_architecture(str(raw.get("model_type", "")), source)
    own_keys = {usual: own for own, usual in _KEYS.items() if own in raw and raw.get(usual) is None}
    own_keys |= {usual: own for own, usual in architecture.keys.items() if own in raw}  # the usual one is a stray then
    usual_keys = {own: usual for usual, own in own_keys.items()}
    said = {usual_keys.get(key, key): value for key, value in raw.items() if key not in own_keys}
    raw = {**architecture.defaults, **said}
    if raw.get("hidden_act") == "swish":
        raw["hidden_act"] = "silu"  # its other name
    return architecture.describe(Hyperparameters(source, raw, False, own_keys=own_keys)), architecture


def _of_text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the language model, also where that sees pictures."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return dict(raw)
    result = {**raw, **text}
    if raw.get("tie_word_embeddings") is True:  # which its text_config may deny; a head that is there tells
        result["tie_word_embeddings"] = True
    return result


def _tensors(folder: Path, kinds: tuple[str, ...]) -> dict[str, Weight]:
    whole = {"": "model.safetensors"}  # before an index, which another version may have left beside it
    index = {} if (folder / whole[""]).is_file() else read_json(folder / "model.safetensors.index.json")
    shards = index.get("weight_map") or whole
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ImportModelError(f"{folder}: weight_map of model.safetensors.index.json names no files")
    names = sorted(set(shards.values()))
    weights: dict[str, Weight] = {}
    for name in names:
        if not (folder / name).is_file():
            if shards is not whole:
                raise ImportModelError(f"{folder}: {name}, one of {len(names)} files of weights, is missing")
            raise ImportModelError(f"{folder}: {name} is missing{_instead(folder)}")
        weights |= read_safetensors(folder / name, kinds)
    return weights


def _instead(folder: Path) -> str:
    others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
    if not others:
        return "; weights in other formats are not read"
    return (
        f"; {others[0]} is of another format, which is not read: load the folder with transformers, and save it with "
        "`save_pretrained`, or take a GGUF file"
    )


def read_safetensors(path: Path, kinds: tuple[str, ...] = ()) -> dict[str, Weight]:
    """The tensors of a file by name, mapped (github.com/huggingface/safetensors, "Format"); floats, and those of
    `kinds`."""
    dtypes_of = {kind: dtypes.to_numpy(name) for kind, name in _FLOATS.items()} | {kind: DTYPES[kind] for kind in kinds}
    try:
        with path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        size = int.from_bytes(data[:8].tobytes(), "little")
        if data.size < 8 or size > data.size - 8:
            raise ValueError("its header goes beyond its end")
        header = json.loads(data[8 : 8 + size].tobytes(), object_pairs_hook=_distinct)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        result = {
            name: _weight(entry, data[8 + size :], dtypes_of, name, path)
            for name, entry in header.items()
            if not name.endswith(_IGNORED) and not name.startswith(_OTHER_PARTS)
        }
        _check_places(header, data.size - 8 - size)
        return result
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"a damaged or truncated safetensors file: {error}"
        raise ImportModelError(f"{path}: {foreign(path) or what}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"its header has {name!r} twice")
        result[name] = value
    return result


def _check_places(header: Mapping[str, Any], size: int) -> None:
    """That tensors lie one after another and fill the file, as the format demands: else a damaged header would give
    a tensor the numbers of another one."""
    end = 0
    for begin, after, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if begin != end:
            raise ValueError(f"tensor {name!r} begins at byte {begin}, the one before it ends at {end}")
        end = after
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")


def _weight(
    entry: Mapping[str, Any],
    data: np.ndarray[Any, Any],
    dtypes_of: Mapping[str, np.dtype[Any]],
    name: str,
    path: Path,
) -> Weight:
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


def _guessing_layers(raw: Mapping[str, Any], architecture: Architecture, config: DecoderConfig) -> tuple[str, ...]:
    """How names begin in layers behind the last one, which guess tokens further ahead: we have other guesses."""
    count = raw.get("num_nextn_predict_layers")
    count = min(count, config.layers) if isinstance(count, int) and count > 0 else 0
    return tuple(f"{architecture.prefix}{config.layers + k}." for k in range(count))


def _renamed(
    tensors: Mapping[str, Weight], architecture: Architecture, config: DecoderConfig, source: str
) -> dict[str, Weight]:
    """By our names; what is no weight of the language model keeps its own."""
    layer = architecture.hugging_face or HUGGING_FACE_LAYER
    names = {theirs: ours for ours, theirs in (architecture.hugging_face_whole or HUGGING_FACE_WHOLE).items()}
    names |= {
        f"{architecture.prefix}{k}.{theirs}": f"layers.{k}.{ours}" for k, ours, theirs in layer_names(layer, config)
    }
    result = {}
    for theirs, weight in tensors.items():
        name = theirs.removeprefix("language_model.").removeprefix("transformer.")
        if name.startswith("model.language_model."):  # as transformers writes models that see pictures since 4.52
            name = "model." + name.removeprefix("model.language_model.")
        ours = names.get(name, names.get(f"model.{name}", name))  # as the model without its head is saved
        if ours.endswith("norm"):
            weight = _offset(weight, architecture.norm_offset)
        elif ours.endswith("shared_router") and weight.shape[:1] == (1,):
            weight = weight.member(0)
        elif ours.rpartition(".")[2] in architecture.transposed and len(weight.shape) == 2:
            weight = weight.transposed
        result[ours] = weight
    return result if architecture.from_folder is None else architecture.from_folder(result, config, source)


def _is_same(head: Weight, embed: Weight | None) -> bool:
    if embed is None or head.block_format is not None or embed.block_format is not None:
        return embed is None
    return head.shape == embed.shape and np.array_equal(head.data, embed.data)


def _offset(weight: Weight, offset: float) -> Weight:
    return Weight(weight.data.astype(np.float32) + np.float32(offset), weight.shape) if offset else weight


def _model_card(folder: Path) -> dict[str, str]:
    """The licence that the README's head names."""
    card = folder / "README.md"
    if not card.exists():
        return {}
    for line in card.read_text("utf-8", errors="replace").splitlines()[:40]:
        if line.startswith("license:"):
            return {"license": line.partition(":")[2].strip()}
    return {}
