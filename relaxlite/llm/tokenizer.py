"""Tokenizer: text to tokens and back, by the `tokenizers` library, which is imported by this module only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.runtime.memory import trim_heap

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_REPLACEMENT = "\ufffd"  # what invalid or incomplete UTF-8 is decoded to
_MAX_CHARACTER_BYTES = 4  # bytes of a UTF-8 character, each of which may be a token
# tokens behind which decoding does not depend on invalid bytes before them
_PENDING_TAIL = 4 * _MAX_CHARACTER_BYTES


class Tokenizer:
    """A tokenizer of the `tokenizers` library, given as `json` in its own format.

    `bos` precedes each text if `adds_bos`. The JSON is parsed when the first text is encoded or decoded, as generation
    from tokens to tokens needs neither the time nor the memory; it raises ArtifactError then if it is malformed.
    """

    def __init__(self, json: str | bytes, *, bos: int | None = None, adds_bos: bool = False) -> None:
        self._json = json
        self.start = [bos] if adds_bos and bos is not None else []
        """The tokens that precede each text: BOS or none."""

    @cached_property
    def _library(self) -> Library:
        from tokenizers import Tokenizer as Library

        try:
            result = Library.from_buffer(self._json.encode() if isinstance(self._json, str) else self._json)
        except Exception as error:  # the library raises Exception itself
            raise ArtifactError(f"the tokenizer cannot be read: {error}") from error
        result.no_truncation()  # a file may have the truncation and padding of its training
        result.no_padding()
        trim_heap()
        return result

    def check(self) -> None:
        """Parse the JSON now. Raises ArtifactError if it is malformed."""
        _ = self._library

    @property
    def size(self) -> int:
        """The size of the vocabulary with added tokens."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def is_same(self, other: Tokenizer) -> bool:
        """Return whether another tokenizer has the same vocabulary."""
        return self._json == other._json or self._library.get_vocab() == other._library.get_vocab()

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(token.content for token in self._library.get_added_tokens_decoder().values() if token.special)

    def has_no_text(self, token: int) -> bool:
        """Return whether a token has no text: a special token, or one outside of the vocabulary."""
        name = self._library.id_to_token(token)
        return name is None or name in self._special

    def encode(self, text: str, *, marks: bool = True) -> list[int]:
        """Return the tokens of a text.

        `marks`: add the special tokens around a text that the model expects; chat templates write their own. Raises
        InvalidArgumentError for text that is not valid Unicode (lone surrogates).
        """
        try:
            tokens = self._library.encode(text, add_special_tokens=marks).ids
        except (UnicodeEncodeError, TypeError) as error:  # one in versions of the library before 0.22, the other since
            if not isinstance(text, str):
                raise InvalidArgumentError(f"a text must be a string, got {type(text).__name__}") from error
            raise InvalidArgumentError(f"the text is not valid Unicode: {lone_surrogate(text)}") from error
        return [*self.start, *tokens] if marks and tokens[: len(self.start)] != self.start else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones; invalid UTF-8 becomes U+FFFD."""
        return self._library.decode(list(tokens), skip_special_tokens=True)


def lone_surrogate(text: str) -> str:
    """Describe the first lone surrogate of a text; "" if there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"a surrogate stands alone at {error.start}, {text[error.start]!r}"
    return ""


class TextStream:
    """Incremental decoding of tokens to text.

    The text of a token may depend on its neighbours (spaces, characters of several tokens), so new text is the
    difference between two decodings: of the tokens shown last, and of these with the pending ones. An incomplete
    character waits for its other bytes. `before`: the tokens that the text continues; if they end within a character,
    the text begins with it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown, self._pending = _split_incomplete(tokenizer, before)
        # text of pending tokens that was emitted; at first, the decoding of an incomplete character of `before`
        self._pending_shown = self._text(self._pending)

    def push(self, token: int) -> str:
        """Return the text that a token completes; "" while a character is incomplete."""
        if self._tokenizer.has_no_text(token):
            return ""
        self._pending.append(token)
        text = self._text(self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._emit(text, is_whole=bool(text))
        ends = len(text) - len(text.rstrip(_REPLACEMENT))  # undecodable bytes; the last may become a character
        new = self._emit(text[: len(text) - min(ends, _MAX_CHARACTER_BYTES - 1)], is_whole=False)
        if len(self._pending) > 2 * _PENDING_TAIL:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """Return the pending text, complete or not."""
        return self._emit(self._text(self._pending), is_whole=True)

    def _shorten(self, text: str) -> None:
        """Drop tokens in the middle of the pending ones, whose decoding is `text`.

        The first of so many tokens without a character will never make one. They stay, as they affect the bytes beside
        them in SentencePiece's decoder; so do the last ones, some of which may begin a character.
        """
        unshown = text[len(self._pending_shown) :]
        pending = [*self._pending[:_MAX_CHARACTER_BYTES], *self._pending[-_PENDING_TAIL:]]
        shortened = self._text(pending)
        if len(shortened) < len(text) and shortened.endswith(unshown):
            self._pending, self._pending_shown = pending, shortened[: len(shortened) - len(unshown)]

    def _text(self, pending: list[int]) -> str:
        """Decode pending tokens behind those shown last."""
        shown_text = self._tokenizer.decode(self._shown)
        full_text = self._tokenizer.decode([*self._shown, *pending])
        if not full_text.startswith(shown_text) and not shown_text.endswith(_REPLACEMENT):
            return self._tokenizer.decode(pending)  # incomplete bytes affect the decoding of bytes beside them
        return full_text[_common_prefix(shown_text, full_text) :]

    def _emit(self, text: str, *, is_whole: bool) -> str:
        """Return the new part of `text`. `is_whole`: it is the text of all pending tokens."""
        new = text[_common_prefix(self._pending_shown, text) :]
        if is_whole:
            self._shown, self._pending, self._pending_shown = self._pending, [], ""
        elif new:
            self._pending_shown = text
        return new


def _common_prefix(text: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    if other.startswith(text):
        return len(text)
    shorter = min(len(text), len(other))
    return next((k for k in range(shorter) if text[k] != other[k]), shorter)


def _split_incomplete(tokenizer: Tokenizer, before: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return some of the last tokens that are whole characters, and the tokens of an incomplete one behind them."""
    for incomplete in range(min(_MAX_CHARACTER_BYTES, len(before) + 1)):
        end = len(before) - incomplete
        for count in range(_MAX_CHARACTER_BYTES, 2 * _MAX_CHARACTER_BYTES):
            shown = list(before[max(0, end - count) : end])
            if _REPLACEMENT not in tokenizer.decode(shown):
                return shown, list(before[end:])
    return list(before[-_MAX_CHARACTER_BYTES:]), []


class StopFilter:
    """Passes text up to the first stop string, without showing any part of that."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""  # the end of the text so far, which may be the beginning of a stop string
        self.match: str | None = None

    def push(self, text: str) -> str:
        """Return text to show; after a stop string, set `match` and return "" from then on."""
        if self.match is not None:
            return ""
        text = self._held + text
        matches = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            at, _, self.match = min(matches)
            self._held = ""
            return text[:at]
        held_length = max((_partial_match(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held_length :]
        return text[: len(text) - held_length]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _partial_match(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that `stop` begins with."""
    for at in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[at:]):
            return len(text) - at
    return 0
