"""Text to tokens and back, by the `tokenizers` library, which is imported here alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.runtime.memory import trim_heap

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_REPLACEMENT = "\ufffd"  # what bytes become that are no UTF-8 (yet)
_LONGEST = 4  # bytes of a character in UTF-8, each of which may be a token
_END = 4 * _LONGEST  # tokens: what follows them reads alike, whatever bytes that make no characters are before them


class Tokenizer:
    """`json` is the library's own format; `bos` starts each text where `adds_bos`.

    It is read with the first text: who gives and takes tokens needs neither the time nor the memory (30 MB for 49,152
    tokens). ArtifactError says then that it cannot be read.
    """

    def __init__(self, json: str | bytes, *, bos: int | None = None, adds_bos: bool = False) -> None:
        self._json = json
        self.start = [bos] if adds_bos and bos is not None else []
        """The tokens that begin each text, where the model wants any."""

    @cached_property
    def _library(self) -> Library:
        from tokenizers import Tokenizer as Library

        try:
            result = Library.from_buffer(self._json.encode() if isinstance(self._json, str) else self._json)
        except Exception as error:  # the library raises Exception itself
            raise ArtifactError(f"the tokenizer cannot be read: {error}") from error
        result.no_truncation()  # a file may say how a training cut its texts, or filled them up
        result.no_padding()
        trim_heap()
        return result

    def check(self) -> None:
        """Read it now. ArtifactError: it cannot be."""
        _ = self._library

    @property
    def size(self) -> int:
        return self._library.get_vocab_size(with_added_tokens=True)

    def is_same(self, other: Tokenizer) -> bool:
        """Whether tokens mean the same to another tokenizer."""
        return self._json == other._json or self._library.get_vocab() == other._library.get_vocab()

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(token.content for token in self._library.get_added_tokens_decoder().values() if token.special)

    def is_silent(self, token: int) -> bool:
        """Whether texts are the same without a token: a special one, or one that the vocabulary lacks."""
        name = self._library.id_to_token(token)
        return name is None or name in self._special

    def encode(self, text: str, *, marks: bool = True) -> list[int]:
        """Tokens of a text. `marks`: with those that the model wants around every text; a chat template writes its own.

        InvalidArgumentError for text that UTF-8 does not have (single surrogates).
        """
        try:
            tokens = self._library.encode(text, add_special_tokens=marks).ids
        except (UnicodeEncodeError, TypeError) as error:  # TypeError: as versions of the library before 0.22 and since
            if not isinstance(text, str):
                raise InvalidArgumentError(f"a text must be a string, got {type(text).__name__}") from error
            raise InvalidArgumentError(f"the text is not valid Unicode: {lone_surrogate(text)}") from error
        return [*self.start, *tokens] if marks and tokens[: len(self.start)] != self.start else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones; bytes that are no UTF-8 become U+FFFD."""
        return self._library.decode(list(tokens), skip_special_tokens=True)


def lone_surrogate(text: str) -> str:
    """What UTF-8 does not have in a text; "" if there is nothing."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"a surrogate stands alone at {error.start}, {text[error.start]!r}"
    return ""


class TextStream:
    """Text of tokens that come one by one.

    What a token reads as may depend on its neighbours (spaces, characters of several tokens), so the text behind it is
    the difference between two windows: the tokens that were shown last, and these with what came since. An unfinished
    character waits for its other bytes. `before`: the tokens that the text goes on from; where they end within a
    character, the text begins with it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown, self._waiting = _at_characters(tokenizer, before)
        # of those that wait; at first how a character reads that `before` ends within
        self._said = self._text(self._waiting)

    def push(self, token: int) -> str:
        """The text that a token completes; "" while a character is unfinished."""
        if self._tokenizer.is_silent(token):
            return ""
        self._waiting.append(token)
        text = self._text(self._waiting)
        if not text.endswith(_REPLACEMENT):
            return self._say(text, is_whole=bool(text))
        ends = len(text) - len(text.rstrip(_REPLACEMENT))  # bytes, of which the last may become a character
        new = self._say(text[: len(text) - min(ends, _LONGEST - 1)], is_whole=False)
        if len(self._waiting) > 2 * _END:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """What still waits, finished or not."""
        return self._say(self._text(self._waiting), is_whole=True)

    def _shorten(self, text: str) -> None:
        """Forget tokens in the midst of those that wait, which read as `text`: as many tokens have made no character,
        the first of them never will. These stay, as they spoil the bytes beside them in the decoder of SentencePiece,
        and so do the last, of which some may begin one."""
        unsaid = text[len(self._said) :]
        waiting = [*self._waiting[:_LONGEST], *self._waiting[-_END:]]
        short = self._text(waiting)
        if len(short) < len(text) and short.endswith(unsaid):
            self._waiting, self._said = waiting, short[: len(short) - len(unsaid)]

    def _text(self, waiting: list[int]) -> str:
        """Of tokens that wait."""
        before = self._tokenizer.decode(self._shown)
        whole = self._tokenizer.decode([*self._shown, *waiting])
        if not whole.startswith(before) and not before.endswith(_REPLACEMENT):
            return self._tokenizer.decode(waiting)  # bytes that are no text yet spoil those beside them
        return whole[_common(before, whole) :]

    def _say(self, text: str, *, is_whole: bool) -> str:
        """What of a text is new. `is_whole`: it is all of the tokens that wait."""
        new = text[_common(self._said, text) :]
        if is_whole:
            self._shown, self._waiting, self._said = self._waiting, [], ""
        elif new:
            self._said = text
        return new


def _common(one: str, other: str) -> int:
    """How many letters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    shorter = min(len(one), len(other))
    return next((k for k in range(shorter) if one[k] != other[k]), shorter)


def _at_characters(tokenizer: Tokenizer, before: Sequence[int]) -> tuple[list[int], list[int]]:
    """Some of the last tokens that are whole characters, and those of an unfinished one behind them."""
    for unfinished in range(min(_LONGEST, len(before) + 1)):
        end = len(before) - unfinished
        for count in range(_LONGEST, 2 * _LONGEST):
            shown = list(before[max(0, end - count) : end])
            if _REPLACEMENT not in tokenizer.decode(shown):
                return shown, list(before[end:])
    return list(before[-_LONGEST:]), []


class StopFilter:
    """Text up to the first of some strings, of which no part is ever shown."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""  # the end of the text so far, where a stop string may have begun
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What may be shown; `found` is set once a stop string was seen, and nothing is shown from then on."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            at, _, self.found = min(places)
            self._held = ""
            return text[:at]
        held = max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many letters at the end of a text `stop` may begin with."""
    for at in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[at:]):
            return len(text) - at
    return 0
