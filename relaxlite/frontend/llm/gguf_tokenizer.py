"""The tokenizer inside of a GGUF file as one of the `tokenizers` library, in that library's JSON.

Its parts (how text is normalized, parted, decoded) are made with the library; vocabulary and merges are written into
its JSON directly, as handing it half a million merges and asking for them again takes several times as long.
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
from relaxlite.frontend.llm.pre_tokenizers import PRE_TOKENIZERS, usual_name

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # token types
# Tokens that end a reply, under whatever name a file calls its own end, and whatever type it gives them.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "<|endoftext|>",
    "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<｜end▁of▁sentence｜>", "<EOT>", "_<EOT>",  # noqa: RUF001
    "[EOT]", "[EOS]", "<eos>", "<end_of_utterance>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>",
    "<|tool_response>",
)  # fmt: skip
_CHANNELS = ("<|return|>", "<|call|>")  # where both are, <|end|> ends only a part of a reply (GPT-OSS)
# Where a file does not say its bos, eos and unknown token: as llama.cpp has it, if they are called like that.
_USUAL = {
    "llama": {"bos": (1, "<s>"), "eos": (2, "</s>"), "unknown": (0, "<unk>")},
    "gpt2": {"bos": (11, "<|endoftext|>"), "eos": (11, "<|endoftext|>")},
}
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # behind them, where others of Phi-3 take spaces away


def read_tokenizer(raw: Mapping[str, Any], source: str) -> TokenizerData | None:
    """From the fields of a GGUF file; None where it holds no tokenizer. ImportModelError for an unknown kind, and for
    fields that contradict each other."""
    model = raw.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    fields = _Fields(raw, source)
    if model not in _MODELS:
        raise fields.error(f"the tokenizer model {model!r} is not known; known are {', '.join(map(repr, _MODELS))}")
    parts = _MODELS[model](fields)
    parts["added_tokens"] = _added(fields, parts["normalizer"])
    bos, eos = fields.token("bos"), fields.token("eos")
    ends = [eos, fields.token("eot"), fields.token("eom")]
    ends += [fields.places[token] for token in fields.ends]
    names = {"bos_token": bos, "eos_token": eos, "unk_token": fields.token("unknown")}
    template = raw.get("tokenizer.chat_template")
    adds_bos = model != "gpt2" or fields.pre_tokenizer.adds_bos
    says_bos = None if model == "gemma4" else raw.get("tokenizer.ggml.add_bos_token")  # as llama.cpp has it
    return TokenizerData(
        json.dumps(parts, ensure_ascii=False),
        template if isinstance(template, str) and template else None,
        bos,
        tuple(dict.fromkeys(place for place in ends if place is not None)),
        (adds_bos if says_bos is None else bool(says_bos)) and bos is not None,
        {name: fields.tokens[place] for name, place in names.items() if place is not None},
    )


class _Fields:
    """The fields of a tokenizer, checked."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw, self._source = raw, source
        self.tokens: list[str] = self.list("tokens", str)
        self.types: list[int] = [_NORMAL] * len(self.tokens)
        if raw.get("tokenizer.ggml.token_type") is not None:
            self.types = self.list("token_type", int, len(self.tokens))
        self.places = {token: place for place, token in enumerate(self.tokens)}
        in_parts = all(token in self.places for token in _CHANNELS)
        self.ends = [token for token in _ENDS if token in self.places and not (in_parts and token == "<|end|>")]
        for token in self.ends:
            self.types[self.places[token]] = _CONTROL

    def error(self, text: str) -> ImportModelError:
        return ImportModelError(f"{self._source}: {text}")

    def list(self, name: str, kind: type, count: int | None = None) -> list[Any]:
        result = self._raw.get(f"tokenizer.ggml.{name}")
        if not isinstance(result, list) or not result or not all(isinstance(value, kind) for value in result):
            raise self.error(f"tokenizer.ggml.{name} is missing, or no list of {kind.__name__}")
        if count is not None and len(result) != count:
            raise self.error(f"there are {count} tokens, and tokenizer.ggml.{name} has {len(result)} values")
        return result

    def token(self, name: str) -> int | None:
        """The token with a meaning: bos, eos, ..."""
        result = self._raw.get(f"tokenizer.ggml.{name}_token_id")
        if result is None:
            place, text = _USUAL.get(self._raw.get("tokenizer.ggml.model", ""), {}).get(name, (0, None))
            return place if self.places.get(text or "") == place else None
        if not isinstance(result, int) or not 0 <= result < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{name}_token_id is {result}; there are {len(self.tokens)} tokens")
        return result

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._raw.get(f"tokenizer.ggml.{name}", default))

    @property
    def has_prefix(self) -> bool:
        """Whether a space comes before a text."""
        return self._raw.get("tokenizer.ggml.model") != "gemma4" and self.flag("add_space_prefix", True)

    def merges(self) -> Sequence[str]:
        result = self.list("merges", str)
        for merge in result:
            left, _, right = merge.partition(" ")
            if left not in self.places or right not in self.places or left + right not in self.places:
                raise self.error(f"the merge {merge!r} is not one of two tokens to a third")
        return result

    @property
    def architecture(self) -> Any:
        return self._raw.get("general.architecture")

    @cached_property
    def pre_tokenizer(self) -> Any:
        kind = self._raw.get("tokenizer.ggml.pre", "default")
        if kind == "default":
            kind = usual_name(self.architecture, self.places) or kind
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
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.pre_tokenizer
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre.keeps_words))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    return _filled(tokenizer, fields.places, fields.merges())


def _sentence_piece(fields: _Fields) -> dict[str, Any]:
    """Byte-pair encoding whose merges follow from the scores: any two tokens that make a token, better ones first."""
    return _of_characters(fields, _merges_by_score(fields))


def _gemma4(fields: _Fields) -> dict[str, Any]:
    """Merges of characters within lines, and of newlines. llama.cpp takes a run of these that is a token without asking
    the merges, which must give the same."""
    from tokenizers import Regex, pre_tokenizers

    merges = fields.merges()
    merged = {merge.replace(" ", "") for merge in merges if merge.startswith("\n")}
    wrong = next((t for t in fields.tokens if len(t) > 1 and not t.strip("\n") and t not in merged), None)
    if wrong is not None:
        raise fields.error(f"no merge gives the token {wrong!r} of newlines")
    lines = pre_tokenizers.Split(Regex("\n+"), "isolated")
    return _of_characters(fields, merges, lines)


def _of_characters(fields: _Fields, merges: Sequence[str], pre_tokenizer: Any = None) -> dict[str, Any]:
    """Byte-pair encoding of characters, with "▁" for spaces, and bytes of those that are no tokens."""
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
    parts = _filled(tokenizer, fields.places, merges)
    parts["model"]["unk_token"] = unknown
    return parts


def _merges_by_score(fields: _Fields) -> list[str]:
    """Every "left right" that joins two tokens to a third: best third first, then in the order of their tokens.

    In sorted order a token comes behind all tokens that it begins with: those are kept on a stack. Tokens with a space
    join nothing, as texts have none once they are normalized.
    """
    scores = np.asarray(fields.list("scores", float, len(fields.tokens)))
    places, types = fields.places, fields.types
    merges: list[str] = []
    joined: list[int] = []
    stack: list[str] = []
    for token in sorted(token for token in places if token and " " not in token):
        while stack and not token.startswith(stack[-1]):
            stack.pop()
        place = places[token]
        if stack and types[place] in (_NORMAL, _USER_DEFINED):
            firsts = [a for a in stack if token[len(a) :] in places]
            if len(firsts) > 1:
                firsts.sort(key=places.__getitem__)
            merges += [f"{a} {token[len(a) :]}" for a in firsts]
            joined += [place] * len(firsts)
        stack.append(token)
    thirds = np.asarray(joined, np.int64)
    return [merges[k] for k in np.lexsort((thirds, -scores[thirds])).tolist()]


def _filled(made: Any, places: Mapping[str, int], merges: Sequence[str]) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(made.to_str())
    parts["model"] |= {"vocab": places, "merges": merges}
    return parts


def _added(fields: _Fields, normalizer: Any) -> list[dict[str, Any]]:
    """Control tokens and those that users defined are never parted. The latter are looked for in the text whose spaces
    are replaced, as SentencePiece does; where a prefix is added too, they would get it as well, so not there."""
    takes_spaces = fields.architecture == "phi3" and _BYTE in fields.types  # as its tokenizer.json says
    in_normalized = normalizer is not None and not fields.has_prefix  # never so of byte level
    return [
        {
            "id": place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": takes_spaces and fields.types[place] == _CONTROL and token not in _KEEP_SPACES,
            "normalized": in_normalized and fields.types[place] == _USER_DEFINED,
            "special": fields.types[place] in (_CONTROL, _UNKNOWN),
        }
        for token, place in fields.places.items()
        if fields.types[place] in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
    ]


_MODELS: Mapping[str, Callable[[_Fields], dict[str, Any]]] = {
    "gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _gemma4,
}  # fmt: skip
