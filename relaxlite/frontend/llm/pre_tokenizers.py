"""Pre-tokenizers of GGUF files by the names of `tokenizer.ggml.pre`: regular expressions that split text before BPE.

Each entry is a sequence of regular expressions (Oniguruma); each one isolates its matches within the pieces that the
previous ones left. They are those of the models' published tokenizer.json files, under the names of llama.cpp
(llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from relaxlite.records import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(endings: str, digits: str) -> str:
    """Build the pattern for words that change from upper to lower case at most once."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{_UPPER}*{_LOWER}+{endings}|{head}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001  (its own signs)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer.

    `ignores_merges`: a piece that is a token is not split, whatever the merges are. `adds_bos`: the default for
    prepending the BOS token. `normalizes_nfc`: text is normalized to NFC first.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizes_nfc: bool = False


def _named(
    names: str, *patterns: str, ignores_merges: bool = False, normalizes_nfc: bool = False
) -> dict[str, PreTokenizer]:
    """Make one pre-tokenizer under several names, separated by spaces."""
    return dict.fromkeys(
        names.split(), PreTokenizer(patterns, ignores_merges, adds_bos=ignores_merges, normalizes_nfc=normalizes_nfc)
    )


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named("default gpt-2 phi-2 jais trillion roberta-bpe exaone4 mellum gigachat a.x-4.0", _GPT2),
    **_named("mpt olmo", _GPT2, normalizes_nfc=True),
    **_named("smollm starcoder refact codeshell exaone minerva-7b", r"\p{N}", _GPT2),
    **_named("command-r", r"\p{N}", _GPT2, normalizes_nfc=True),
    **_named("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0", _LLAMA3, ignores_merges=True),
    **_named("smaug-bpe dbrx glm4 chatglm-bpe", _LLAMA3),
    **_named("deepseek-r1-qwen stablelm2 hunyuan megrez kormo", _QWEN2),
    **_named("qwen2", _QWEN2, normalizes_nfc=True),
    **_named("qwen35", _QWEN35, normalizes_nfc=True),
    **_named("tekken", _by_case("", r"\p{N}"), ignores_merges=True),
    **_named("gpt-4o llama4 kanana2", _by_case(f"{_ENDINGS}?", r"\p{N}{1,3}")),
    **_named("seed-coder", _SEED_CODER),
    **_named("deepseek-v3 hunyuan-dense", *_DEEPSEEK3),
    **_named("deepseek-coder", *_DEEPSEEK_CODER),
    **_named("falcon", *_FALCON),
    **_named("bloom poro-chat gpt3-finnish", _BLOOM),
    **_named("viking", _BLOOM, r"\p{N}"),
}

_BY_ARCHITECTURE = {
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe"), "qwen2"),
    **dict.fromkeys(("gpt2", "phi2"), "gpt-2"),
    **{"gptneox": "mpt", "starcoder2": "starcoder", "command-r": "command-r"},  # MPT uses GPT-NeoX's
}


def default_pre_tokenizer(architecture: str, tokens: Container[str]) -> str | None:
    """Infer the pre-tokenizer of a file without `tokenizer.ggml.pre`, as written before April 2024.

    Return None where architecture and vocabulary leave a choice.
    """
    if architecture == "llama" and "<|begin_of_text|>" in tokens and "<|start_header_id|>" in tokens:
        return "llama-bpe"
    return _BY_ARCHITECTURE.get(architecture)
