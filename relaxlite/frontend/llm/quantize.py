"""Quantization of float weights into blocks, bit-identical to llama.cpp's quantize_row_*_ref (ggml-quants.c).

Q4_0, Q5_0: a signed scale from the value of largest magnitude, which becomes a code exactly. Q4_1, Q5_1: scale and
offset from minimum and maximum. Q8_0: a scale from the largest magnitude, rounded half away from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ImportModelError, InvalidArgumentError
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight
from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS

Array: TypeAlias = "np.ndarray[Any, Any]"

EMBEDDING_FORMAT = "Q8_0"
"""The format of token embeddings, per-layer embeddings and the head, where fewer bits cost much accuracy."""
_IN_MORE_BITS = ("embed", "head", "layer_embed", "layer_project")
_FLOATS = (".router", "positions")  # routers and position embeddings stay floats
_ROWS_BYTES = 64 << 20  # float32 rows of a chunk


def quantize_checkpoint(
    checkpoint: Checkpoint, kind: str, *, progress: Callable[[str], None] = lambda name: None
) -> Checkpoint:
    """Quantize every float matrix to `kind` (a key of QUANTIZERS, in any case), embeddings to EMBEDDING_FORMAT.

    Vectors stay as they are, and so do blocked matrices (some checkpoints are quantized except for embeddings),
    matrices whose rows are no whole number of blocks, routers and position embeddings. `progress` is called with the
    name of each matrix. Raises InvalidArgumentError for an unknown kind; ImportModelError if all matrices are blocked
    already, if no matrix can be quantized, or for values that are not finite or too large for a scale in float16.
    """
    kind = str(kind).upper()  # arguments of other types are unknown kinds, too
    if kind not in QUANTIZERS:
        known = ", ".join(name.lower() for name in QUANTIZERS)
        raise InvalidArgumentError(f"cannot quantize to {kind.lower()!r}; known are {known}")
    source = checkpoint.provenance.get("source", "the checkpoint")
    weights = dict(checkpoint.weights)
    matrices = [name for name, weight in weights.items() if len(weight.shape) == 2 and not name.endswith(_FLOATS)]
    floats = [name for name in matrices if weights[name].block_format is None]
    formats = sorted({str(weights[name].block_format) for name in matrices} - {"None"})
    chosen = [name for name in floats if weights[name].shape[1] % BLOCK_FORMATS[kind].size == 0]
    if formats and not chosen:
        raise ImportModelError(
            f"{source}: the weights are quantized already ({', '.join(formats)}); quantize the float checkpoint "
            "instead, or take this one as it is"
        )
    if not chosen:
        raise ImportModelError(f"{source}: no weight has rows of whole blocks of {BLOCK_FORMATS[kind].size}")
    for name in chosen:
        progress(name)
        weights[name] = quantize(weights[name], EMBEDDING_FORMAT if name in _IN_MORE_BITS else kind, name)
    note = f"; {len(floats) - len(chosen)} matrices kept" if len(chosen) < len(floats) else ""
    note += f"; {len(matrices) - len(floats)} in {', '.join(formats)} before" if formats else ""
    return replace(checkpoint, weights=weights, provenance={**checkpoint.provenance, "quantized": f"{kind}{note}"})


def quantize(weight: Weight, kind: str, name: str = "weight") -> Weight:
    """Quantize a float matrix [n, k], k a multiple of 32. Raises ImportModelError as `quantize_checkpoint` does."""
    block = BLOCK_FORMATS[kind]
    n, k = weight.shape
    packed = np.empty((n, k // block.size * block.nbytes), np.uint8)
    step = max(1, _ROWS_BYTES // (4 * k))
    for at in range(0, n, step):
        rows = weight.floats(slice(at, at + step)).astype(np.float32)
        if not np.isfinite(rows).all():
            raise ImportModelError(f"weight {name} has values that are not finite; it cannot be quantized")
        with np.errstate(over="ignore"):
            result = QUANTIZERS[kind](rows.reshape(-1, block.size))
        packed[at : at + step] = result.reshape(len(rows), -1)
        _, *numbers = block.decode(result)
        if any(number is not None and np.isinf(number.values).any() for number in numbers):
            raise ImportModelError(f"weight {name} has values too large for blocks of float16: up to {abs(rows).max()}")
    return Weight(packed, weight.shape, kind)


def _half_bytes(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint8)


def _inverse(scale: Array) -> Array:
    """Return 1 / scale, or 0 if the inverse is infinite: for a scale of 0, or one that is 0 in float16."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _codes(values: Array, max_code: int) -> Array:
    """Truncate values, which are positive and include the 0.5 for rounding, to codes."""
    return np.clip(np.trunc(values), 0, max_code).astype(np.uint8)


def _packed(codes: Array, *head: Array, has_fifth_bit: bool) -> Array:
    """Pack blocks: numbers of the `head` as float16, fifth bits, then nibbles, low ones for the first 16 codes."""
    low = codes & 15
    nibbles = low[:, :16] | low[:, 16:] << 4
    fifth = [np.packbits(codes >> 4, axis=1, bitorder="little")] if has_fifth_bit else []
    return np.concatenate([*map(_half_bytes, head), *fifth, nibbles], axis=1)


def _by_peak(bits: int) -> Callable[[Array], Array]:
    """Make the quantizer with a signed scale from the value of largest magnitude (Q4_0, Q5_0)."""
    zero = 1 << (bits - 1)  # the code of 0

    def quantize_blocks(blocks: Array) -> Array:
        peak = np.take_along_axis(blocks, abs(blocks).argmax(axis=1, keepdims=True), axis=1)
        peak = np.where(peak == 0, np.float32(0), peak)  # not -0, as in the reference
        scale = peak / np.float32(-zero)
        codes = _codes(blocks * _inverse(scale) + np.float32(zero + 0.5), 2 * zero - 1)
        return _packed(codes, scale, has_fifth_bit=bits == 5)

    return quantize_blocks


def _by_range(bits: int) -> Callable[[Array], Array]:
    """Make the quantizer with scale and offset from minimum and maximum (Q4_1, Q5_1)."""
    max_code = (1 << bits) - 1

    def quantize_blocks(blocks: Array) -> Array:
        minimum = np.take_along_axis(blocks, blocks.argmin(axis=1, keepdims=True), axis=1)  # the first of 0 and -0
        scale = (blocks.max(axis=1, keepdims=True) - minimum) / np.float32(max_code)
        codes = _codes((blocks - minimum) * _inverse(scale) + np.float32(0.5), max_code)
        return _packed(codes, scale, minimum, has_fifth_bit=bits == 5)

    return quantize_blocks


def _q8_0(blocks: Array) -> Array:
    scale = abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    whole = np.floor(abs(scaled))
    rounded = whole + np.floor(2 * (abs(scaled) - whole))  # halves away from zero
    codes = np.copysign(rounded, scaled).astype(np.int8).view(np.uint8)
    return np.concatenate([_half_bytes(scale), codes], axis=1)


QUANTIZERS: Mapping[str, Callable[[Array], Array]] = {
    "Q4_0": _by_peak(4),
    "Q4_1": _by_range(4),
    "Q5_0": _by_peak(5),
    "Q5_1": _by_range(5),
    "Q8_0": _q8_0,
}
"""Blocks float32 [count, 32] to bytes [count, nbytes]."""
