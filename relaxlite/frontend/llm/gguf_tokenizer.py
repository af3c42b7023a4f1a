"""Conversion of the tokenizer in a GGUF file to the JSON format of the `tokenizers` library.

Normalizer, pre-tokenizer and decoder are made by the library; vocabulary and merges are written to the JSON directly,
as passing half a million merges through the library takes several times as long.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import TokenizerData
from relaxlite.frontend.llm.pre_tokenizers import PRE_TOKENIZERS, default_pre_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # token types
# Tokens that end a reply, whatever end token a file names, and whatever type it gives them.
_END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "<|endoftext|>",
    "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<｜end▁of▁sentence｜>", "<EOT>", "_<EOT>",  # noqa: RUF001
    "[EOT]", "[EOS]", "<eos>", "<end_of_utterance>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>",
    "<|tool_response>",
)  # fmt: skip
_CHANNELS = ("<|return|>", "<|call|>")  # with both of these, <|end|> ends only a channel of a reply (GPT-OSS)
# Default bos, eos and unknown tokens of llama.cpp, used only if the vocabulary has these texts at these ids.
_DEFAULT_TOKENS = {
    "llama": {"bos": (1, "<s>"), "eos": (2, "</s>"), "unknown": (0, "<unk>")},
    "gpt2": {"bos": (11, "<|endoftext|>"), "eos": (11, "<|endoftext|>")},
}
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other control tokens strip the spaces behind them


def read_tokenizer(raw: Mapping[str, Any], source: str) -> TokenizerData | None:
    """Read the tokenizer from the fields of a GGUF file; None if the file has none.

    Raises ImportModelError for an unknown kind, and for fields that contradict each other.
    """
    model = raw.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    fields = _Fields(raw, source)
    if model not in _MODELS:
        raise fields.error(f"the tokenizer model {model!r} is not known; known are {', '.join(map(repr, _MODELS))}")
    parts = _MODELS[model](fields)
    parts["added_tokens"] = _added_tokens(fields, parts["normalizer"])
    bos, eos = fields.token("bos"), fields.token("eos")
    ends = [eos, fields.token("eot"), fields.token("eom")]
    ends += [fields.token_ids[token] for token in fields.ends]
    names = {"bos_token": bos, "eos_token": eos, "unk_token": fields.token("unknown")}
    template = raw.get("tokenizer.chat_template")
    adds_bos = model != "gpt2" or fields.pre_tokenizer.adds_bos
    add_bos_token = None if model == "gemma4" else raw.get("tokenizer.ggml.add_bos_token")  # as in llama.cpp
    return TokenizerData(
        json.dumps(parts, ensure_ascii=False),
        template if isinstance(template, str) and template else None,
        bos,
        tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        (adds_bos if add_bos_token is None else bool(add_bos_token)) and bos is not None,
        {name: fields.tokens[token_id] for name, token_id in names.items() if token_id is not None},
    )


class _Fields:
    """The tokenizer fields of a GGUF file, checked."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw, self._source = raw, source
        self.tokens: list[str] = self.list("tokens", str)
        self.types: list[int] = [_NORMAL] * len(self.tokens)
        if raw.get("tokenizer.ggml.token_type") is not None:
            self.types = self.list("token_type", int, len(self.tokens))
        self.token_ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        has_channels = all(token in self.token_ids for token in _CHANNELS)
        self.ends = [
            token for token in _END_TOKENS if token in self.token_ids and not (has_channels and token == "<|end|>")
        ]
        for token in self.ends:
            self.types[self.token_ids[token]] = _CONTROL

    def error(self, text: str) -> ImportModelError:
        return ImportModelError(f"{self._source}: {text}")

    def list(self, name: str, kind: type, count: int | None = None) -> list[Any]:
        """Return a list field of values of type `kind`; `count` is the length that it must have."""
        result = self._raw.get(f"tokenizer.ggml.{name}")
        if not isinstance(result, list) or not result or not all(isinstance(value, kind) for value in result):
            raise self.error(f"tokenizer.ggml.{name} is missing, or no list of {kind.__name__}")
        if count is not None and len(result) != count:
            raise self.error(f"there are {count} tokens, and tokenizer.ggml.{name} has {len(result)} values")
        return result

    def token(self, name: str) -> int | None:
        """Return the id of the special token `name` (bos, eos, ...), None if there is none."""
        result = self._raw.get(f"tokenizer.ggml.{name}_token_id")
        if result is None:
            token_id, text = _DEFAULT_TOKENS.get(self._raw.get("tokenizer.ggml.model", ""), {}).get(name, (0, None))
            return token_id if self.token_ids.get(text or "") == token_id else None
        if not isinstance(result, int) or not 0 <= result < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{name}_token_id is {result}; there are {len(self.tokens)} tokens")
        return result

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._raw.get(f"tokenizer.ggml.{name}", default))

    @property
    def has_prefix(self) -> bool:
        """Whether a space is prepended to a text."""
        return self._raw.get("tokenizer.ggml.model") != "gemma4" and self.flag("add_space_prefix", True)

    def merges(self) -> Sequence[str]:
        """Return the merges, each of two tokens into a third."""
        result = self.list("merges", str)
        for merge in result:
            left, _, right = merge.partition(" ")
            if left not in self.token_ids or right not in self.token_ids or left + right not in self.token_ids:
                raise self.error(f"the merge {merge!r} is not one of two tokens to a third")
        return result

    @property
    def architecture(self) -> Any:
        return self._raw.get("general.architecture")

    @cached_property
    def pre_tokenizer(self) -> Any:
        """The pre-tokenizer; GPT-2's with a warning if neither the file nor its architecture names one."""
        kind = self._raw.get("tokenizer.ggml.pre", "default")
        if kind == "default":
            kind = default_pre_tokenizer(self.architecture, self.token_ids) or kind
        if kind == "default":
            warnings.warn(
                f"{self._source}: tokenizer.ggml.pre does not say how text is parted into words; it is parted as for "
                "GPT-2, which gives wrong tokens if the model was trained otherwise: convert it again",
                RuntimeWarning,
                stacklevel=2,
            )
        if kind not in PRE_TOKENIZERS:
            raise self.error(
                f"the pre-tokenizer {kind!r} is not known; known are {', '.join(PRE_TOKENIZERS)} "
                "(a Hugging Face folder of the model brings its own)"
            )
        return PRE_TOKENIZERS[kind]


def _byte_level(fields: _Fields) -> dict[str, Any]:
    """Build a byte-level BPE tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre_tokenizer = fields.pre_tokenizer
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre_tokenizer.ignores_merges))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if pre_tokenizer.normalizes_nfc:
        tokenizer.normalizer = normalizers.NFC()
    return _with_vocabulary(tokenizer, fields.token_ids, fields.merges())


def _sentence_piece(fields: _Fields) -> dict[str, Any]:
    """Build BPE of characters with merges that follow from scores: any two tokens whose concatenation is a token."""
    return _character_bpe(fields, _merges_by_score(fields))


def _gemma4(fields: _Fields) -> dict[str, Any]:
    """Build BPE of characters, where merges stay within lines or join newlines.

    llama.cpp takes a run of newlines that is a token without the merges; the merges must give the same.
    """
    from tokenizers import Regex, pre_tokenizers

    merges = fields.merges()
    merged = {merge.replace(" ", "") for merge in merges if merge.startswith("\n")}
    unmerged = next((t for t in fields.tokens if len(t) > 1 and not t.strip("\n") and t not in merged), None)
    if unmerged is not None:
        raise fields.error(f"no merge gives the token {unmerged!r} of newlines")
    lines = pre_tokenizers.Split(Regex("\n+"), "isolated")
    return _character_bpe(fields, merges, lines)


def _character_bpe(fields: _Fields, merges: Sequence[str], pre_tokenizer: Any = None) -> dict[str, Any]:
    """Build BPE of characters, with "▁" for spaces, and byte tokens for characters that are no tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = next((t for t, kind in zip(fields.tokens, fields.types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, byte_fallback=_BYTE in fields.types))
    prefix = fields.has_prefix
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    parts = _with_vocabulary(tokenizer, fields.token_ids, merges)
    parts["model"]["unk_token"] = unknown
    return parts


def _merges_by_score(fields: _Fields) -> list[str]:
    """List every merge "left right" whose result is a token, the result of highest score first.

    Equal scores are ordered by the ids of the tokens. Tokens are visited in sorted order, with all tokens that are
    prefixes of the current one on a stack. Tokens with a space take part in no merge, as normalized texts have no
    spaces.
    """
    scores = np.asarray(fields.list("scores", float, len(fields.tokens)))
    token_ids, types = fields.token_ids, fields.types
    merges: list[str] = []
    results: list[int] = []
    stack: list[str] = []
    for token in sorted(token for token in token_ids if token and " " not in token):
        while stack and not token.startswith(stack[-1]):
            stack.pop()
        token_id = token_ids[token]
        if stack and types[token_id] in (_NORMAL, _USER_DEFINED):
            lefts = [a for a in stack if token[len(a) :] in token_ids]
            if len(lefts) > 1:
                lefts.sort(key=token_ids.__getitem__)
            merges += [f"{a} {token[len(a) :]}" for a in lefts]
            results += [token_id] * len(lefts)
        stack.append(token)
    result_ids = np.asarray(results, np.int64)
    return [merges[k] for k in np.lexsort((result_ids, -scores[result_ids])).tolist()]


def _with_vocabulary(tokenizer: Any, token_ids: Mapping[str, int], merges: Sequence[str]) -> dict[str, Any]:
    """Return the JSON of a tokenizer with vocabulary and merges filled in."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    parts["model"] |= {"vocab": token_ids, "merges": merges}
    return parts


def _added_tokens(fields: _Fields, normalizer: Any) -> list[dict[str, Any]]:
    """List control and user-defined tokens, which are never split.

    User-defined tokens are matched in normalized text, as SentencePiece does; but not where a prefix is added, which
    they would get as well.
    """
    takes_spaces = fields.architecture == "phi3" and _BYTE in fields.types  # as in its tokenizer.json
    in_normalized = normalizer is not None and not fields.has_prefix  # never in byte-level BPE
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": takes_spaces and fields.types[token_id] == _CONTROL and token not in _KEEPS_SPACES,
            "normalized": in_normalized and fields.types[token_id] == _USER_DEFINED,
            "special": fields.types[token_id] in (_CONTROL, _UNKNOWN),
        }
        for token, token_id in fields.token_ids.items()
        if fields.types[token_id] in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
    ]


_MODELS: Mapping[str, Callable[[_Fields], dict[str, Any]]] = {
    "gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _gemma4,
}  # fmt: skip
