"""What a peer does, and relaxlite. Imports nothing beyond Python and NumPy at the top, see worker.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
Tokens: TypeAlias = "Sequence[int]"


class Unsupported(Exception):
    """The peer has no way to run this model."""


class Peer(ABC):
    """A model and some sequences in its cache. Likeliest tokens are chosen as fast as the library lets one."""

    reads_artifact: ClassVar[bool] = False  # the compiled model, instead of the GGUF file
    compile_options: ClassVar[tuple[str, ...]] = ()  # of it, for `relaxlite compile`
    fallback: ClassVar[str] = ""  # another way to run, for machines where a signal ends the process of the usual one

    def __init__(self, threads: int, *, is_fallback: bool = False) -> None:
        self.threads, self.is_fallback = threads, is_fallback

    @abstractmethod
    def version(self) -> str:
        """Imports the library; ImportError says that it is not installed."""

    @abstractmethod
    def open(self, path: str, sequences: int, length: int) -> None:
        """Load, with room for so many sequences of so many tokens; what is timed as loading."""

    @abstractmethod
    def make_room(self, sequences: int, length: int) -> None:
        """In place of the room that there was; sequences are lost."""

    @abstractmethod
    def start(self, prompts: Sequence[Tokens]) -> list[int]:
        """Forget all sequences, and begin one with each prompt; the likeliest next token of each."""

    @abstractmethod
    def step(self, tokens: Tokens) -> list[int]:
        """One more token for each sequence; the likeliest next ones."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Every sequence back to its first tokens."""

    @abstractmethod
    def logits(self) -> Array:
        """float32 [vocab] of the last sequence that `start` or `step` computed."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Settings; "cache_dtype" at least."""


class Relaxlite(Peer):
    """The engine of a compiled model."""

    reads_artifact = True

    def version(self) -> str:
        from relaxlite import __version__, llm

        self.load = llm.load
        return __version__

    def open(self, path: str, sequences: int, length: int) -> None:
        self.model = self.load(path, threads=self.threads)
        self.engine: Any = self.model.engine
        self.sequences: list[int] = []
        self.last: list[Array] = []

    def make_room(self, sequences: int, length: int) -> None:
        """The cache grows as it is needed."""

    def start(self, prompts: Sequence[Tokens]) -> list[int]:
        for sequence in self.sequences:
            self.engine.remove(sequence)
        self.sequences = [self.engine.new() for _ in prompts]
        return self._forward(prompts)

    def step(self, tokens: Tokens) -> list[int]:
        return self._forward([(token,) for token in tokens])

    def _forward(self, tokens: Sequence[Tokens]) -> list[int]:
        self.last = self.engine.forward(list(zip(self.sequences, tokens, strict=True)))
        return [int(row.argmax()) for row in self.last]

    def rewind(self, length: int) -> None:
        for sequence in self.sequences:
            self.engine.drop(sequence, self.engine.length(sequence) - length)

    def logits(self) -> Array:
        return np.asarray(self.last[-1], np.float32).reshape(-1)

    def facts(self) -> dict[str, Any]:
        return {"cache_dtype": self.engine.cache.layout.dtype}


class RelaxliteInt8(Relaxlite):
    """Activations rounded as coarsely as llama.cpp does."""

    compile_options = ("--precision", "int8")
