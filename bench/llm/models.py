"""What is measured on: GGUF files, by name or path, and what follows from their headers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.llm.random_gguf import SHAPES, random_gguf
from relaxlite import models
from relaxlite.errors import InvalidArgumentError
from relaxlite.frontend.llm.config import DecoderConfig
from relaxlite.frontend.llm.read import read_checkpoint

FETCHED = {"smollm2": "smollm2-135m-instruct"}  # and their names in relaxlite's registry
NAMES = (*FETCHED, *SHAPES)
SMALL = 400_000_000  # parameters of which float32 copies are a matter of seconds


@dataclass(frozen=True, slots=True)
class Model:
    """`weight_bytes`: of all tensors. `read_bytes`: of the matrices that each token reads: of a mixture those of the
    experts that it takes, of an embedding table one row, unless the table is the logits' matrix too. `cache_values`:
    keys and values of a token."""

    name: str
    path: Path
    types: str
    parameters: int
    weight_bytes: int
    read_bytes: int
    cache_values: int
    head_width: int
    vocab: int
    context: int

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size

    def cache_bytes(self, tokens: int, dtype: str) -> float:
        """Of keys and values; int8 has a float32 scale for each row of a head."""
        each = np.dtype(dtype).itemsize + (4 / self.head_width if dtype == "int8" else 0.0)
        return tokens * self.cache_values * each

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"path": self.path.name, "file_bytes": self.file_bytes}


def find_model(name: str) -> Model:
    """By a name in NAMES, fetched or written if need be, or by the path of a GGUF file.

    InvalidArgumentError for neither; FetchError, ImportModelError: as what they come from says.
    """
    if name in FETCHED:
        return describe(name, models.fetch(FETCHED[name]))
    if name in SHAPES:
        return describe(name, random_gguf(name))
    path = Path(name)
    if path.is_dir():
        raise InvalidArgumentError(f"{name!r} is a folder; llama.cpp reads a GGUF file, so give the path of one")
    if not path.is_file():
        raise InvalidArgumentError(
            f"there is no model {name!r}; there are {', '.join(NAMES)}, or the path of a GGUF file"
        )
    return describe(path.stem, path.resolve())


def describe(name: str, path: Path) -> Model:
    checkpoint = read_checkpoint(path)
    c, weights = checkpoint.config, checkpoint.weights
    matrices = {key: weight for key, weight in weights.items() if len(weight.shape) == 2}
    read = [weight.nbytes * _share(c, key) for key, weight in matrices.items() if key != "embed" or c.is_tied]
    kinds: dict[str, int] = {}
    for weight in matrices.values():
        kind = weight.block_format or str(weight.data.dtype)
        kinds[kind] = kinds.get(kind, 0) + 1
    return Model(
        name=name,
        path=path,
        types=", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
        read_bytes=round(sum(read)),
        cache_values=2 * c.layers * c.kv_heads * c.head_width,
        head_width=c.head_width,
        vocab=c.vocab,
        context=c.context,
    )


def _share(config: DecoderConfig, name: str) -> float:
    """How much of a weight each token reads, on average."""
    return config.experts.top_k / config.experts.count if config.experts is not None and ".experts." in name else 1.0
