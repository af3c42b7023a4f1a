"""Attachments of a language model's artifact, besides its code: "language_model" and "tokenizer"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from relaxlite.errors import ArtifactError
from relaxlite.llm.drafts import ROW_COST
from relaxlite.records import dataclass

DESCRIPTION, TOKENIZER = "language_model", "tokenizer"  # names of attachments; both are JSON


@dataclass(frozen=True, slots=True)
class Description:
    """The metadata of a language model in an artifact.

    `context`: the maximum number of tokens of a sequence. `stop`: tokens that end a reply. `special_tokens`: for chat
    templates, by name ("bos_token"). `other_templates`: further chat templates by name ("tool_use"). `generation`:
    defaults of the checkpoint. `provenance`: source, licence. `row_cost`: the time of one more token in a step, in
    steps of one token.
    """

    architecture: str
    vocab: int
    context: int
    bos: int | None = None
    adds_bos: bool = False
    stop: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    other_templates: Mapping[str, str] = field(default_factory=dict)
    row_cost: float = ROW_COST

    @property
    def name(self) -> str:
        """The model's name, source or architecture, whichever is known."""
        return str(self.provenance.get("name") or self.provenance.get("source") or self.architecture)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_json(content: bytes) -> Description:
        """Parse an attachment. Raises ArtifactError for fields that are missing, unknown or of another type."""
        try:
            raw = json.loads(content)
            description = Description(**{**raw, "stop": tuple(raw.get("stop", ()))})
        except (TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"its description of the language model is malformed: {error}") from error
        for name, value in asdict(description).items():
            if not isinstance(value, _KINDS[name]) or isinstance(value, bool) != (name == "adds_bos"):
                raise ArtifactError(f"its description of the language model is malformed: {name} is {value!r}")
        if not description.row_cost > 0:  # or NaN
            raise ArtifactError(
                f"its description of the language model is malformed: row_cost is {description.row_cost}"
            )
        if (
            description.vocab < 1
            or description.context < 1
            or not all(_is_token(token, description.vocab) for token in description.stop)
        ):
            raise ArtifactError(
                f"its description of the language model is malformed: a vocabulary of {description.vocab}, "
                f"a context of {description.context}, stop tokens {description.stop}"
            )
        return description


_KINDS: dict[str, Any] = {
    "architecture": str,
    "vocab": int,
    "context": int,
    "bos": int | None,
    "adds_bos": bool,
    "stop": tuple,
    "special_tokens": dict,
    "chat_template": str | None,
    "generation": dict,
    "provenance": dict,
    "other_templates": dict,
    "row_cost": float,
}


def _is_token(value: object, vocab: int) -> bool:
    return type(value) is int and 0 <= value < vocab
