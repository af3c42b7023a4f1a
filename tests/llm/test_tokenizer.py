"""Tokenizers of GGUF files: how they part text, which pairs they merge, what ends a reply."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxlite import config
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.gguf_format import read_file
from relaxlite.frontend.llm.gguf_tokenizer import read_tokenizer
from relaxlite.frontend.llm.pre_tokenizers import PRE_TOKENIZERS

library = pytest.importorskip("tokenizers")

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
BYTES = [chr(b) if b in PRINTABLE else chr(256 + OTHERS.index(b)) for b in range(256)]  # as GPT-2 spells them
NASTY = [
    "", " ", "   a", "\n\n\n", " \n \n", "\t\tx", "Hello  world   x ", "don't WON'T I'll we'Ve",
    "1234567890 3.14 1,000",
    "def f(x):\n    return x**2  # ok\n\n\n\tif x:\r\n", "naïve café Ünïcödé ß", "日本語、中文。한국어",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea",
    "a\u200bb\ufeffc\u00a0d", "x" * 50,
    " " * 37 + "x" + " " * 40, "\n" * 40, "e\u0301 é", "مرحبا بالعالم", "हिन्दी", "\x00\x01\x7f", "\U0001d49c\U0001d4c1",
    "http://a.b/c?d=e&f=%20#g", "$$$ ... !!! ???", "<0x0A> <0xFF>", "s's S'S 'tis", "a\r\nb\rc", "\U0010ffff\ue000",
]  # fmt: skip


def byte_level(pre: str | None, **more: Any) -> dict[str, Any]:
    found = {"model": "gpt2", "pre": pre, "tokens": [*BYTES, "ab", "abc"], "merges": ["a b", "ab c"], **more}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def made(raw: dict[str, Any]) -> Any:
    found = read_tokenizer(raw, "file.gguf")
    assert found is not None
    return library.Tokenizer.from_str(found.json)


def pieces(pre: str, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in made(byte_level(pre)).pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("gpt-2", "I'll pay 1234 now  !", ["I", "'ll", " pay", " 1234", " now", " ", " !"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "I'LL pay 12345\n\n x", ["I", "'LL", " pay", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "(x) 123", ["(x", ")", " ", "1", "2", "3"]),
        ("qwen35", "กู 12 x̌.", ["กู", " ", "1", "2", " x̌", "."]),  # marks belong to their letters
        ("tekken", "camelCase HTTPServer 12/\n", ["camel", "Case", " HTTPServer", " ", "1", "2", "/\n"]),
        ("gpt-4o", "camelCase don't 1234", ["camel", "Case", " don't", " ", "123", "4"]),
        ("deepseek-v3", "日本 1234 .foo", ["日本", " ", "123", "4", " .", "foo"]),
        ("deepseek-coder", "x = 12\n", ["x", " = ", "1", "2", "\n"]),
        ("falcon", "a=b 1234", ["a", "=", "b", " ", "123", "4"]),
        ("bloom", "Hi, you.", ["Hi", ",", " you", "."]),
        ("viking", "ab12", ["ab", "1", "2"]),
        ("seed-coder", "x = 12;\n y", ["x", " =", " ", "1", "2", ";", "\n", " y"]),
    ],
)
def test_text_is_parted_as_published(pre: str, text: str, wanted: list[str]) -> None:
    assert pieces(pre, text) == wanted


@pytest.mark.parametrize(
    ("pre", "published"),
    [
        ("gpt-2", lambda p: p.ByteLevel(add_prefix_space=False)),
        ("smollm", lambda p: p.Sequence([p.Digits(individual_digits=True), p.ByteLevel(add_prefix_space=False)])),
    ],
)
def test_patterns_do_what_the_librarys_own_steps_do(pre: str, published: Any) -> None:
    ours, theirs = made(byte_level(pre)).pre_tokenizer, published(library.pre_tokenizers)
    for text in NASTY:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_text_comes_back(pre: str) -> None:
    tokenizer = made(byte_level(pre))
    for text in NASTY:
        if not PRE_TOKENIZERS[pre].normalizes_nfc:
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_words_that_are_tokens_stay_whole_where_the_model_wants_that() -> None:
    tokens = [*BYTES, "ab", "abc"]
    for pre, wanted in (("llama-bpe", ["abc"]), ("qwen2", ["ab", "c"])):
        assert made(byte_level(pre, tokens=tokens, merges=["a b"])).encode("abc").tokens == wanted


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "command-r", "mpt", "olmo"])
def test_characters_are_composed_where_the_model_was_trained_so(pre: str) -> None:
    """As the NFC of their tokenizer.json files; llama.cpp leaves it out."""
    assert made(byte_level(pre)).encode("e\u0301").ids == made(byte_level(pre)).encode("é").ids


# SentencePiece


SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]


def sentence_piece(
    words: list[str], scores: list[float], *, prefix: bool, defined: tuple[str, ...] = ()
) -> dict[str, Any]:
    tokens = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *words, *defined]
    types = [2, 3, 3, 3, *[6] * 256, *[1] * len(words), *[4] * len(defined)]
    found = {
        "model": "llama", "tokens": tokens, "token_type": types, "add_space_prefix": prefix, "unknown_token_id": 0,
        "scores": [*[0.0] * 260, *scores, *[0.0] * len(defined)], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def merged(text: str, score: dict[str, float]) -> list[str]:
    """As SentencePiece defines it: the best pair of neighbours that make a token, the leftmost of equals, again and
    again; what is no token then is spelled in bytes."""
    parts = list(text)
    while True:
        pairs = [(-score[a + b], k) for k, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not pairs:
            break
        _, k = min(pairs)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
    spelled = [[part] if part in score else [f"<0x{b:02X}>" for b in part.encode()] for part in parts]
    return [token for tokens in spelled for token in tokens]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_merged_by_score(seed: int, prefix: bool) -> None:
    rng = random.Random(seed)
    words = ["▁", "a", "b", "c", "é"]
    while len(words) < 40:
        words = list(dict.fromkeys([*words, rng.choice(words) + rng.choice(words)]))
    scores = [float(np.float32(-rng.random())) for _ in words]
    tokenizer = made(sentence_piece(words, scores, prefix=prefix))
    score = dict(zip(words, scores, strict=True))
    for _ in range(200):
        text = "".join(rng.choice(" aabbccé\nß😀") for _ in range(rng.randrange(1, 14)))
        wanted = merged(("▁" if prefix else "") + text.replace(" ", "▁"), score)
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found.tokens == wanted, text
        assert tokenizer.decode(found.ids, skip_special_tokens=False) == text


def test_tokens_that_users_defined_are_found_first_and_the_longest_of_them() -> None:
    raw = sentence_piece(["▁", "a", "▁a"], [-1.0, -2.0, -0.5], prefix=False, defined=("  ", "   ", "\n\n"))
    tokenizer = made(raw)
    assert tokenizer.encode("a   a\n\n\n a").tokens == ["a", "▁▁▁", "a", "\n\n", "<0x0A>", "▁a"]
    assert tokenizer.encode("a<turn> a").tokens == ["a", "<turn>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("a   a\n\n a").ids) == "a   a\n\n a"


# Gemma 4


def gemma4(words: list[str], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """All merges of two words to a third, in their order, but for those `without`."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", '<|"|>']
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *words]
    pairs = [(word[:at], word[at:]) for word in words for at in range(1, len(word))]
    found = {
        "model": "gemma4", "tokens": tokens, "token_type": [3] * 6 + [4] + [6] * 256 + [1] * len(words),
        "scores": [-1000.0] * len(tokens), "add_space_prefix": False, "bos_token_id": 2, "eos_token_id": 1,
        "merges": [f"{a} {b}" for a, b in pairs if a in words and b in words and a + b not in without],
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


LINES = ["▁", "a", "b", "\n", "\n\n", "\n\n\n", "ab", "▁a", "▁▁", "aa", "▁ab", "a▁", "b▁a"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" ab", ["▁ab"]),
        ("aab", ["a", "ab"]),  # the first of the merges
        ("a\n\n\n\nb", ["a", "\n\n", "\n\n", "b"]),
        ("a  b\n a", ["a", "▁▁", "b", "\n", "▁a"]),
        ('<|turn>ab<|"|>é<turn|>', ["<|turn>", "ab", '<|"|>', "<0xC3>", "<0xA9>", "<turn|>"]),
    ],
)
def test_lines_of_gemma4_are_merged_in_the_order_of_the_file(text: str, wanted: list[str]) -> None:
    tokenizer = made(gemma4(LINES))
    found = tokenizer.encode(text, add_special_tokens=False)
    assert found.tokens == wanted and tokenizer.decode(found.ids, skip_special_tokens=False) == text


def test_gemma4_begins_texts_whatever_a_file_says() -> None:
    found = read_tokenizer({**gemma4(LINES), "tokenizer.ggml.add_bos_token": False}, "x")
    assert found is not None and found.adds_bos and (found.bos, found.stop) == (2, (1, 5))


def test_newlines_of_gemma4_that_no_merge_gives_are_refused() -> None:
    """llama.cpp would take them all the same."""
    with pytest.raises(ImportModelError, match=r"x: no merge gives the token '\\n\\n\\n' of newlines"):
        read_tokenizer(gemma4(LINES, without=("\n\n\n",)), "x")


# What begins and ends texts


def test_tokens_with_a_meaning() -> None:
    more = {
        "tokens": [*BYTES, "<s>", "<|im_end|>", "<|eot_id|>", "<|end|>"], "token_type": [*[1] * 256, 3, 3, 3, 1],
        "merges": ["a b"], "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    more["tokens"].append("ab")
    more["token_type"].append(1)
    found = read_tokenizer(byte_level("gpt-2", **more), "f")
    assert found is not None
    assert (found.bos, found.stop, found.adds_bos) == (256, (257, 258, 259), False)
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert library.Tokenizer.from_str(found.json).encode("x<|im_end|>y").ids == [120, 257, 121]
    for pre, said, wanted in (("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)):
        found = read_tokenizer(byte_level(pre, add_bos_token=said, **more), "f")
        assert found is not None and found.adds_bos is wanted
    assert read_tokenizer(sentence_piece(["a"], [0.0], prefix=True), "f").adds_bos  # type: ignore[union-attr]
    assert read_tokenizer({}, "f") is None
    assert read_tokenizer({"tokenizer.ggml.model": "none"}, "f") is None


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_tokens_that_end_replies_do_so_whatever_type_a_file_gives_them(kind: int) -> None:
    raw = sentence_piece(["▁", "a", "▁a"], [-1.0, -2.0, -0.5], prefix=True)
    raw["tokenizer.ggml.tokens"][3], raw["tokenizer.ggml.token_type"][3] = "<end_of_turn>", kind
    found = read_tokenizer(raw, "f")
    assert found is not None and found.stop == (2, 3)
    tokenizer = library.Tokenizer.from_str(found.json)
    ids = tokenizer.encode("a<end_of_turn>").ids
    assert ids[-1] == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_that_does_not_say_how_text_is_parted_is_told(pre: str | None) -> None:
    raw = byte_level(pre)
    if pre is None:
        raw.pop("tokenizer.ggml.pre", None)
    with pytest.warns(
        RuntimeWarning, match=r"f: tokenizer\.ggml\.pre does not say how text is parted into words"
    ) as told:
        read_tokenizer(raw, "f")
    assert len(told) == 1


@pytest.mark.parametrize(
    ("architecture", "token", "wanted"),
    [
        ("qwen2", "<|im_start|>", ["don", "'T", " ", "1", "2"]),
        ("llama", "<|start_header_id|>", ["don", "'T", " ", "12"]),
        ("starcoder2", "x", ["don", "'", "T", " ", "1", "2"]),
    ],
)
def test_files_of_qwen_and_llama_3_without_a_pre_tokenizer_get_theirs(
    architecture: str, token: str, wanted: list[str]
) -> None:
    raw = byte_level(None, tokens=[*BYTES, "<|begin_of_text|>", token, "ab"], merges=["a b"])
    tokenizer = made(raw | {"general.architecture": architecture})
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("don'T 12")] == [
        piece.replace(" ", "Ġ") for piece in wanted
    ]


def test_the_end_of_a_channel_is_not_that_of_a_reply() -> None:
    """GPT-OSS thinks in one channel and answers in the next."""
    more = {"token_type": [*[1] * 256, *[3] * 4, 1], "merges": ["a b"], "bos_token_id": 256, "eos_token_id": 257}
    tokens = [*BYTES, "<|startoftext|>", "<|return|>", "<|call|>", "<|end|>", "ab"]
    found = read_tokenizer(byte_level("gpt-4o", tokens=tokens, **more), "f")
    assert found is not None and found.stop == (257, 258)


def test_a_file_that_names_no_tokens_has_the_usual_ones() -> None:
    raw = sentence_piece(["a"], [0.0], prefix=True)
    bare = {key: value for key, value in raw.items() if not key.endswith("_token_id")}
    found = read_tokenizer(bare, "f")
    assert found is not None and (found.bos, found.stop, found.adds_bos) == (1, (2,), True)
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    bare["tokenizer.ggml.tokens"] = ["<unk>", "<bos>", "<end>", *raw["tokenizer.ggml.tokens"][3:]]  # called otherwise
    found = read_tokenizer(bare, "f")
    assert found is not None and (found.bos, found.stop) == (None, ())


def test_the_unknown_token_is_one_token_in_a_text() -> None:
    tokenizer = made(sentence_piece(["▁", "a"], [-1.0, -2.0], prefix=False))
    assert tokenizer.encode("a<unk>a").tokens == ["a", "<unk>", "a"]


def test_marks_of_phi3_take_the_spaces_behind_them() -> None:
    raw = {**sentence_piece(["▁", "a", "\n"], [-1.0, -2.0, -3.0], prefix=False), "general.architecture": "phi3"}
    turn, start, letter, line = 3, 1, 261, 262
    assert made(raw).encode("<turn>\na<s>\n").ids == [turn, letter, start, line]
    assert made({**raw, "general.architecture": "llama"}).encode("<turn>\na").ids == [turn, line, letter]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (byte_level("gpt-9"), "the pre-tokenizer 'gpt-9' is not known; known are default, gpt-2"),
        (byte_level("gpt-2", model="bert"), "the tokenizer model 'bert' is not known; known are 'gpt2', 'llama'"),
        (byte_level("gpt-2", tokens=[]), r"tokenizer\.ggml\.tokens is missing, or no list of str"),
        (byte_level("gpt-2", merges=None), r"tokenizer\.ggml\.merges is missing, or no list of str"),
        (byte_level("gpt-2", merges=["a z"]), "the merge 'a z' is not one of two tokens to a third"),
        (byte_level("gpt-2", merges=["ab"]), "the merge 'ab' is not one of two tokens"),
        (byte_level("gpt-2", token_type=[1, 1]), r"there are 258 tokens, and tokenizer\.ggml\.token_type has 2 values"),
        (byte_level("gpt-2", eos_token_id=258), "eos_token_id is 258; there are 258 tokens"),
        ({**sentence_piece(["a"], [0.0], prefix=True), "tokenizer.ggml.scores": [1.0]}, "scores has 1 values"),
    ],
)
def test_what_makes_no_tokenizer_is_refused(raw: dict[str, Any], problem: str) -> None:
    with pytest.raises(ImportModelError, match=f"file.gguf: .*{problem}"):
        read_tokenizer(raw, "file.gguf")


# Real models, where they are there


REAL = {  # text: as transformers 5 encodes it
    "smollm2-135m-instruct": [19556, 905, 28, 216, 33, 34, 35, 216, 1792],
    "gemma3-270m": [9259, 1902, 236764, 236743, 236770, 236778, 236800, 138, 236781],
}


@pytest.mark.models
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str) -> None:
    paths = sorted(Path(config.model_folder() / name).glob("*.gguf"))
    if not paths:
        pytest.skip(f"{name} is not in the cache folder")
    found = read_tokenizer(read_file(paths[0]).metadata, name)
    assert found is not None
    json.loads(found.json)
    tokenizer = library.Tokenizer.from_str(found.json)
    assert tokenizer.encode("Hello world, 123  x", add_special_tokens=False).ids == REAL[name]
    for text in NASTY:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
