"""`LanguageModel`: text in, text out, without a compiler."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.llm.compiled_engine import CACHE_BYTES, CompiledEngine
from relaxlite.llm.description import DESCRIPTION, TOKENIZER, Description
from relaxlite.llm.drafts import Drafter, DraftModel, PromptLookup
from relaxlite.llm.engine import Engine
from relaxlite.llm.fork_safe_lock import ForkSafeLock
from relaxlite.llm.generation import Request, Stream, run
from relaxlite.llm.sampling import Sampler, Sampling
from relaxlite.llm.tokenizer import Tokenizer
from relaxlite.records import dataclass
from relaxlite.runtime import artifact
from relaxlite.runtime.executable import ExecutableData
from relaxlite.runtime.module import Executable

if TYPE_CHECKING:
    from relaxlite.llm.templates import Message

Prompt: TypeAlias = "str | Sequence[int]"

MAX_NEW_TOKENS = 256  # default of max_new_tokens
TOOL_TEMPLATE = "tool_use"  # name of the chat template for tools
LOOKUP = "lookup"  # draft tokens by prompt lookup
OVERFLOW = ("error", "slide")  # options for a reply that does not fit into the context
_RESERVED_OPTIONS = {"messages", "template", "self", "special_tokens"}
_NOT_PROMPTS = (bytes, Mapping, Set)  # iterable, but no prompts


@dataclass(slots=True)
class _ChatSequence:
    """The cached sequence of the last turn of a chat."""

    sequence: int
    tokens: list[int]


class LanguageModel:
    """A compiled language model with its tokenizer. Streams may be interleaved; concurrent calls are serialized.

    llm = relaxlite.llm.load("model.rlx")
    print(llm.generate("The capital of France is", max_new_tokens=8))
    for piece in llm.chat([{"role": "user", "content": "Hello"}], stream=True): print(piece, end="")
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        description: Description,
        *,
        data: ExecutableData | None = None,
        capacity: int | None = None,
    ) -> None:
        """Use an engine. `capacity`: the number of tokens that fit into its cache, if that is bounded."""
        self.engine, self.tokenizer, self.description, self.data = engine, tokenizer, description, data
        self.context = engine.context if capacity is None else min(engine.context, capacity)
        """The maximum number of tokens of a sequence, prompt and reply together."""
        self._chat_sequence: _ChatSequence | None = None
        self._turn = ForkSafeLock()
        self._checked_drafts: WeakSet[LanguageModel] = WeakSet()  # whose vocabularies were compared, which is slow

    @staticmethod
    def of(
        data: ExecutableData, *, threads: int | None = None, cache_bytes: int = CACHE_BYTES, is_checked: bool = False
    ) -> LanguageModel:
        """Make a language model of a compiled model.

        `cache_bytes` bounds the KV cache, which grows on demand; `is_checked`: as of `Executable`. Raises ArtifactError
        if the model is damaged or is no language model.
        """
        missing = [name for name in (DESCRIPTION, TOKENIZER) if name not in data.attachments]
        if missing:
            raise ArtifactError(
                f"it is no language model: it has no {' and no '.join(missing)}; `relaxlite run` runs other models"
            )
        description = Description.from_json(data.attachments[DESCRIPTION])
        tokenizer = Tokenizer(data.attachments[TOKENIZER], bos=description.bos, adds_bos=description.adds_bos)
        if not isinstance(cache_bytes, Real) or isinstance(cache_bytes, bool) or cache_bytes % 1 != 0:
            raise InvalidArgumentError(f"cache_bytes must be a whole number of bytes, got {cache_bytes!r}")
        executable = Executable(data, threads=threads, is_checked=is_checked)
        engine = CompiledEngine(executable, max_bytes=int(cache_bytes))
        capacity = engine.cache.max_pages * engine.cache.layout.page
        # The executable's data, not `data`: it may have copied the weights.
        return LanguageModel(engine, tokenizer, description, data=executable.data, capacity=capacity)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which `load` reads. Raises ArtifactError if that is not possible."""
        if self.data is None:
            raise ArtifactError(f"cannot save to {os.fspath(path)}: this model was not compiled from a checkpoint")
        artifact.save(self.data, path)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        suppress_tokens: Iterable[int] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Iterable[int] | None = None,
        overflow: str = "error",
        draft: LanguageModel | str | None = LOOKUP,
        logprobs: bool = False,
        logits: bool = False,
        stream: bool = False,
    ) -> Any:
        """Continue a prompt (text, or tokens): return a Result; for a list of prompts, run as one batch, a list.

          max_new_tokens  default: 256, or the room that the context has
          temperature, top_k, top_p, min_p, repetition_penalty, suppress_tokens
                          see `Sampling`; default: the checkpoint's, else greedy decoding (temperature 0)
          seed            prompt k has seed + k, whatever the batch is; None: a new one for each call
          stop            texts that end the reply, not shown themselves; `stop_tokens`: in place of the model's own
          overflow        "error": InvalidArgumentError if max_new_tokens do not fit into the context; "slide": the
                          older half of a full context is dropped, as `Usage.forgotten_tokens` counts
          draft           source of draft tokens for speculative decoding, which is faster where they are right and
                          does not change the text. "lookup": what followed the same tokens before; a smaller model
                          of the same vocabulary, never the model itself; None: no draft tokens
          logprobs, logits  return them in the Result
          stream          return a Stream of pieces of text instead

        Raises InvalidArgumentError for an empty prompt, one that does not fit into the context, and invalid parameters.
        """
        is_list, prompts = _prompts(prompt)
        return self._run(
            [self._encode(text) for text in prompts],
            is_list,
            stream=stream,
            keeps_sequence=False,
            max_new_tokens=max_new_tokens,
            sampling=self._sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                suppress_tokens=suppress_tokens,
            ),
            seed=seed,
            stop=stop,
            stop_tokens=stop_tokens,
            overflow=overflow,
            draft=draft,
            logprobs=logprobs,
            logits=logits,
        )

    def chat(
        self,
        messages: Iterable[Message],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        suppress_tokens: Iterable[int] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        overflow: str = "error",
        draft: LanguageModel | str | None = LOOKUP,
        logprobs: bool = False,
        logits: bool = False,
        stream: bool = False,
        template: str | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> Any:
        """Reply to a chat, a list of {"role": ..., "content": ...}: return a Result, or a Stream as in `generate`.

        The last chat stays in the cache; the next one reuses what they have in common. `template` replaces the model's
        own chat template, `template_options` are variables of it (`tools`, ...); with {"continue_final_message": True}
        the reply continues the last message. Raises InvalidArgumentError if the model has no template, or it refuses
        the messages; and as in `generate`.
        """
        options = template_options or {}
        if (
            not isinstance(options, Mapping)
            or _RESERVED_OPTIONS & options.keys()
            or not all(isinstance(name, str) for name in options)
        ):
            raise InvalidArgumentError(
                f"template_options are other variables of the template than its messages, by name, got {options!r}"
            )
        tokens = self.encode_chat(messages, template=template, **options)
        return self._run(
            [tokens],
            False,
            stream=stream,
            keeps_sequence=True,
            max_new_tokens=max_new_tokens,
            sampling=self._sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                suppress_tokens=suppress_tokens,
            ),
            seed=seed,
            stop=stop,
            stop_tokens=None,
            overflow=overflow,
            draft=draft,
            logprobs=logprobs,
            logits=logits,
        )

    def encode_chat(self, messages: Iterable[Message], *, template: str | None = None, **options: Any) -> list[int]:
        """Return the tokens of a chat, up to where the reply begins.

        `template`: text, or the name of one of the model's templates; by default the one for tools if `tools` are given
        and there is one, else the usual one.
        """
        from relaxlite.llm.templates import render_chat  # imports Jinja2, which plain text does not need

        named = self.description.other_templates
        if template is None and options.get("tools") is not None:
            template = named.get(TOOL_TEMPLATE)
        template = named.get(template or "", template) or self.description.chat_template
        if not template:
            raise InvalidArgumentError(
                f"{self.description.name} has no chat template: give one (`template=`), or use `generate`"
            )
        text = render_chat(template, messages, self.description.special_tokens, **options)
        return self.tokenizer.encode(text, marks=False)

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return [int(token) for token in prompt]

    def _sampling(self, **options: Any) -> Sampling:
        """Make the sampling options: those that are not None, else the checkpoint's defaults."""
        explicit = {name: value for name, value in options.items() if value is not None}
        return Sampling(**{**_default_sampling(self.description), **explicit})

    def _run(
        self,
        prompts: list[list[int]],
        is_list: bool,
        *,
        stream: bool,
        keeps_sequence: bool,
        max_new_tokens: int | None,
        sampling: Sampling,
        seed: int | None,
        stop: str | Sequence[str],
        stop_tokens: Iterable[int] | None,
        overflow: str,
        draft: LanguageModel | str | None,
        logprobs: bool,
        logits: bool,
    ) -> Any:
        """Check options, and make and run requests."""
        end_tokens = self._stop_tokens(stop_tokens)
        stop_texts = _stop_strings(stop)
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool) or seed < 0):
            raise InvalidArgumentError(f"seed must be a whole number from 0, got {seed!r}")
        if overflow not in OVERFLOW:
            raise InvalidArgumentError(f"overflow must be {' or '.join(map(repr, OVERFLOW))}, got {overflow!r}")
        self._check_draft(draft)
        slides = overflow == "slide"
        limits = [
            self._limit(tokens, k if is_list else None, max_new_tokens, slides=slides)
            for k, tokens in enumerate(prompts)
        ]
        requests = [
            Request(
                tokens,
                limit,
                Sampler(sampling, None if seed is None else int(seed) + k),
                end_tokens,
                stop_texts,
                wants_logprobs=logprobs,
                wants_logits=logits,
                window=self.context if slides else None,
            )
            for k, (tokens, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        pieces = Stream(self._events(requests, draft, keeps_sequence=keeps_sequence), requests, is_list)
        if stream:
            return pieces
        return pieces.results() if is_list else pieces.result()

    def _events(self, requests: list[Request], draft: LanguageModel | str | None, *, keeps_sequence: bool) -> Any:
        """Yield the pieces of requests. Sequences are created when the first piece is requested."""

        def begin(request: Request) -> None:
            if keeps_sequence:
                self._take_chat_sequence(request)
            if not request.sequence:
                request.sequence = self.engine.new()
            request.drafter = self._drafter(draft)

        yield from run(
            self.engine,
            self.tokenizer,
            requests,
            begin,
            self._store_chat_sequence if keeps_sequence else self._remove,
            self.forget,
        )

    def _check_draft(self, draft: LanguageModel | str | None) -> None:
        """Raise InvalidArgumentError for an invalid source of draft tokens."""
        if draft is None or (isinstance(draft, str) and draft == LOOKUP):
            return
        if not isinstance(draft, LanguageModel):
            raise InvalidArgumentError(f"draft must be {LOOKUP!r}, a LanguageModel or None, got {draft!r}")
        if draft is self:
            raise InvalidArgumentError(
                "draft: a model does not guess for itself, which takes room in its cache and no time off; give a "
                f"smaller one, {LOOKUP!r} or None"
            )
        if draft in self._checked_drafts:
            return
        if not self.tokenizer.is_same(draft.tokenizer) or draft.engine.vocab != self.engine.vocab:
            raise InvalidArgumentError(
                f"draft: {draft.description.name} has another vocabulary ({draft.engine.vocab} tokens) than "
                f"{self.description.name} ({self.engine.vocab}), so that its guesses would mean something else"
            )
        self._checked_drafts.add(draft)

    def _drafter(self, draft: LanguageModel | str | None) -> Drafter | None:
        """Make the drafter of a request."""
        row_cost = self.description.row_cost
        if isinstance(draft, LanguageModel):
            return DraftModel(draft.engine, draft.weight_bytes / max(self.weight_bytes, 1), row_cost)
        return None if draft is None else PromptLookup(row_cost)

    @property
    def weight_bytes(self) -> int:
        """The size of all constants of the compiled model in bytes."""
        return sum(constant.nbytes for constant in self.data.constants) if self.data is not None else 0

    def _stop_tokens(self, stop_tokens: Iterable[int] | None) -> frozenset[int]:
        """Return the tokens that end a reply."""
        if stop_tokens is None:
            return frozenset(self.description.stop)
        if not hasattr(stop_tokens, "__iter__"):
            raise InvalidArgumentError(f"stop_tokens must be numbers of tokens, got {stop_tokens!r}")
        tokens = tuple(stop_tokens)
        for token in tokens:
            if not _is_token(token) or not 0 <= token < self.engine.vocab:
                raise InvalidArgumentError(f"stop_tokens: {token!r} is not in the vocabulary of {self.engine.vocab}")
        return frozenset(map(int, tokens))

    def _limit(self, tokens: list[int], number: int | None, max_new_tokens: int | None, *, slides: bool) -> int:
        """Return the maximum number of new tokens behind a prompt."""
        label = "the prompt" if number is None else f"prompt {number}"
        if not tokens:
            raise InvalidArgumentError(f"{label} is empty")
        invalid = next((token for token in tokens if not 0 <= token < self.engine.vocab), None)
        if invalid is not None:
            raise InvalidArgumentError(f"{label}: token {invalid} is not in the vocabulary of {self.engine.vocab}")
        room = self.context - len(tokens)
        if room < 1:
            raise InvalidArgumentError(
                f"{label} has {len(tokens)} tokens, and the context holds {self.context}, of which the reply needs at "
                f"least one; shorten it{self._bound()}"
            )
        if max_new_tokens is None:
            return MAX_NEW_TOKENS if slides else min(MAX_NEW_TOKENS, room)
        if not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise InvalidArgumentError(f"max_new_tokens must be a whole number from 1, got {max_new_tokens!r}")
        if max_new_tokens > room and not slides:
            raise InvalidArgumentError(
                f"{label} has {len(tokens)} tokens, and max_new_tokens={max_new_tokens} more do not fit into the "
                f"context of {self.context}; at most {room} do{self._bound()}; overflow='slide' forgets the oldest"
            )
        return int(max_new_tokens)

    def _bound(self) -> str:
        """Return the hint of an error message if the cache bounds the context."""
        model_context = self.engine.context
        return (
            f", or give the cache more bytes: the model itself takes {model_context}"
            if self.context < model_context
            else ""
        )

    # sequences

    # A sequence is owned by a request or by `_chat_sequence`. Ownership changes under the lock in one statement without
    # calls, so that neither another thread nor an interruption can come between.

    def _take_chat_sequence(self, request: Request) -> None:
        """Continue the sequence of the last chat, as far as it is a prefix of the prompt.

        The request owns the sequence from then on, so that interleaved streams do not share it.
        """
        with self._turn.lock:
            stored = self._chat_sequence
            if stored is None:
                return
            request.sequence, self._chat_sequence = stored.sequence, None
        common = 0
        for a, b in zip(
            stored.tokens, request.prompt[:-1], strict=False
        ):  # the last token is appended again, for its logits
            if a != b:
                break
            common += 1
        if len(stored.tokens) > common:
            self.engine.drop(stored.sequence, len(stored.tokens) - common)
            cached = self.engine.cached_length(stored.sequence)
            self.engine.drop(stored.sequence, common - cached)
            common = cached
        request.reused = common

    def _store_chat_sequence(self, request: Request, is_sound: bool) -> None:
        """Store the sequence of a request for the next chat."""
        if not is_sound or request.forgotten:  # a sequence that slid is no prefix of the next chat
            self._remove(request, is_sound)
            return
        written = [*request.prompt, *request.tokens][: self.engine.length(request.sequence)]
        stored = _ChatSequence(request.sequence, written)
        with self._turn.lock:
            previous, self._chat_sequence, request.sequence = self._chat_sequence, stored, 0
        if previous is not None:
            self.engine.remove(previous.sequence)

    def _remove(self, request: Request, is_sound: bool) -> None:
        """Remove the sequence of a request."""
        self.engine.remove(request.sequence)
        request.sequence = 0

    def forget(self) -> bool:
        """Free the memory of the last chat; return whether there was any."""
        with self._turn.lock:
            stored, self._chat_sequence = self._chat_sequence, None
        if stored is not None:
            self.engine.remove(stored.sequence)
        return stored is not None

    def __repr__(self) -> str:
        d = self.description
        return f"LanguageModel({d.name!r}, {d.architecture}, vocab {d.vocab}, context {self.context})"


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    cache_bytes: int = CACHE_BYTES,
    verify: bool = False,
) -> LanguageModel:
    """Load a language model that `relaxlite compile` or `LanguageModel.save` wrote.

    `cache_bytes` bounds the KV cache; `verify` checks every byte of the weights. Raises ArtifactError.
    """
    data = artifact.load(path, verify=verify)
    try:
        return LanguageModel.of(data, threads=threads, cache_bytes=cache_bytes, is_checked=True)
    except ArtifactError as error:
        raise ArtifactError(f"cannot load {os.fspath(path)}: {error}") from error


def _prompts(prompt: Any) -> tuple[bool, list[Prompt]]:
    """Return whether a prompt is a list of prompts, and all prompts."""
    if isinstance(prompt, str):
        return False, [prompt]
    if not hasattr(prompt, "__iter__") or isinstance(prompt, _NOT_PROMPTS) or _ndim(prompt) == 0:
        raise InvalidArgumentError(f"a prompt is text or a list of tokens, got {type(prompt).__name__}")
    items: list[Any] = [list(item) if hasattr(item, "__next__") else item for item in prompt]
    if items and all(map(_is_token, items)):
        return False, [items]
    if not items:
        raise InvalidArgumentError("there is no prompt: the list is empty")
    for k, item in enumerate(items):
        is_tokens = hasattr(item, "__iter__") and not isinstance(item, _NOT_PROMPTS) and _ndim(item) > 0
        if not isinstance(item, str) and not (is_tokens and all(map(_is_token, item))):
            raise InvalidArgumentError(f"prompt {k} is {item!r}; a prompt is text or a list of tokens")
    return True, items


def _ndim(value: Any) -> int:
    """Return the rank of an array, 1 for other objects."""
    return int(getattr(value, "ndim", 1))


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the texts that end a reply, checked."""
    texts: tuple[Any, ...] = (stop,) if isinstance(stop, str) or not hasattr(stop, "__iter__") else tuple(stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(f"stop must be texts of at least one character, got {text!r}")
    return texts


def _default_sampling(description: Description) -> dict[str, Any]:
    """Return the checkpoint's sampling options; without a temperature unless it enables sampling."""
    generation = dict(description.generation)
    names = {field.name for field in fields(Sampling)}
    values = {name: value for name, value in generation.items() if name in names and value is not None}
    if not generation.get("do_sample"):
        values.pop("temperature", None)
    elif "temperature" not in values:
        values["temperature"] = 1.0
    return values
