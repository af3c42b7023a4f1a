"""The tokenizer inside of a GGUF file as one of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import TokenizerData

_CONTROL, _USER_DEFINED, _UNKNOWN, _BYTE = 3, 4, 2, 6  # token types
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# How text is parted before pairs are merged, by tokenizer.ggml.pre: (regular expression, digits one by one)
_PRE: Mapping[str, tuple[str, bool]] = {
    **dict.fromkeys(("default", "gpt-2"), (_GPT2, False)),
    "smollm": (_GPT2, True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (_LLAMA3, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2, False)),
}
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|eom_id|>", "<|end|>")


def read_tokenizer(raw: Mapping[str, Any], source: str) -> TokenizerData | None:
    """From the fields of a GGUF file; None where it holds no tokenizer. ImportModelError for an unknown kind."""
    model = raw.get("tokenizer.ggml.model")
    if model is None:
        return None
    tokens: list[str] = list(raw["tokenizer.ggml.tokens"])
    types: list[int] = list(raw.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    if model == "gpt2":
        made = _byte_level(raw, tokens, source)
    elif model == "llama":
        made = _sentence_piece(raw, tokens, types)
    else:
        raise ImportModelError(f"{source}: the tokenizer model {model!r} is not known; known are 'gpt2', 'llama'")
    _add_special(made, tokens, types)
    bos, eos = raw.get("tokenizer.ggml.bos_token_id"), raw.get("tokenizer.ggml.eos_token_id")
    ends = [eos, raw.get("tokenizer.ggml.eot_token_id"), *(tokens.index(t) for t in _END_OF_TURN if t in tokens)]
    names = {"bos_token": bos, "eos_token": eos, "unk_token": raw.get("tokenizer.ggml.unknown_token_id")}
    return TokenizerData(
        made.to_str(),
        raw.get("tokenizer.chat_template"),
        bos,
        tuple(dict.fromkeys(int(t) for t in ends if t is not None)),
        bool(raw.get("tokenizer.ggml.add_bos_token", model == "llama")),
        {name: tokens[number] for name, number in names.items() if number is not None},
    )


def _byte_level(raw: Mapping[str, Any], tokens: Sequence[str], source: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    kind = str(raw.get("tokenizer.ggml.pre", "default"))
    if kind not in _PRE:
        raise ImportModelError(f"{source}: the pre-tokenizer {kind!r} is not known; known are {', '.join(_PRE)}")
    merges = [tuple(merge.split(" ", 1)) for merge in raw["tokenizer.ggml.merges"]]
    whole = kind.startswith(("llama", "smaug"))  # a word that is a token is one, whatever the merges
    model = models.BPE(vocab={t: k for k, t in enumerate(tokens)}, merges=merges, ignore_merges=whole)
    made = Tokenizer(model)
    pattern, by_digit = _PRE[kind]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if by_digit else []
    steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece(raw: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Any:
    """Byte-pair encoding whose merges follow from the scores: any two tokens that make a token, better ones first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    places = {t: k for k, t in enumerate(tokens)}
    scores = raw["tokenizer.ggml.scores"]
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, place in places.items():
        if types[place] not in (1, _USER_DEFINED) or len(token) < 2:
            continue
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(places[a], places[b], a, b) for a, b in parts if a in places and b in places]
        ranked += [(-scores[place], *pair) for pair in sorted(known)]
    ranked.sort(key=lambda item: item[0])  # stable: equal scores stay in order of their tokens
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab=places,
        merges=[(a, b) for *_, a, b in ranked],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    made = Tokenizer(model)
    prefix = bool(raw.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return made


def _add_special(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens and those that users defined are never parted."""
    from tokenizers import AddedToken

    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in defined])
