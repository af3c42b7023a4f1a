"""What is measured of a language model. Imports nothing beyond Python, see worker.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GROUPS = ("prompt", "generate", "batch")


@dataclass(frozen=True, slots=True)
class Case:
    """`context`: tokens of each sequence's prompt. `new`: tokens generated for each; 0 where the prompt is timed."""

    group: str
    context: int
    new: int = 0
    sequences: int = 1

    @property
    def label(self) -> str:
        if self.group == "prompt":
            return f"prompt {self.context}"
        if self.group == "generate":
            return f"generate {self.new} after {self.context}"
        return f"batch of {self.sequences}, {self.new} after {self.context}"

    @property
    def tokens(self) -> int:
        """How many a timed run computes, of all sequences."""
        return self.sequences * (self.new or self.context)

    @property
    def length(self) -> int:
        """How many a sequence has in the end."""
        return self.context + self.new


def cases_of(groups: Sequence[str], *, quick: bool = False) -> list[Case]:
    """Single sequences first: peak memory is read before there are several."""
    prompts, contexts, batches = ((32,), (16,), (1, 4)) if quick else ((32, 128, 512), (16, 512), (1, 4, 8))
    new, before = (8, 16) if quick else (64, 128)
    found = {
        "prompt": [Case("prompt", count) for count in prompts],
        "generate": [Case("generate", count, new) for count in contexts],
        "batch": [Case("batch", before, new, count) for count in batches],
    }
    return [case for group in GROUPS if group in groups for case in found[group]]
