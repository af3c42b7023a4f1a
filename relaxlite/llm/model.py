"""`LanguageModel`: text in, text out. No compiler is imported here."""

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
from relaxlite.llm.drafts import Drafter, DraftModel, Lookup
from relaxlite.llm.engine import Engine
from relaxlite.llm.generation import Request, Stream, run
from relaxlite.llm.sampling import Sampler, Sampling
from relaxlite.llm.tokenizer import Tokenizer
from relaxlite.llm.turns import Turn
from relaxlite.records import dataclass
from relaxlite.runtime import artifact
from relaxlite.runtime.executable import ExecutableData
from relaxlite.runtime.module import Executable

if TYPE_CHECKING:
    from relaxlite.llm.templates import Message

Prompt: TypeAlias = "str | Sequence[int]"

MAX_NEW_TOKENS = 256  # where the caller says nothing
FOR_TOOLS = "tool_use"  # the name of the chat template that is meant where tools are given
LOOKUP = "lookup"  # guesses that need no other model
OVERFLOW = ("error", "slide")  # what happens where a reply does not fit into the context
_OWN_OPTIONS = {"messages", "template", "self", "special_tokens"}
_NO_PROMPTS = (bytes, Mapping, Set)  # though they can be iterated over


@dataclass(slots=True)
class _Kept:
    """The sequence of the last turn of a chat."""

    sequence: int
    tokens: list[int]


class LanguageModel:
    """A compiled language model with its tokenizer. Streams may run interleaved; threads take turns.

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
        """`capacity`: the tokens that fit into the engine's memory, where that is bounded."""
        self.engine, self.tokenizer, self.description, self.data = engine, tokenizer, description, data
        self.context = engine.context if capacity is None else min(engine.context, capacity)
        """How many tokens a sequence holds, prompt and reply together."""
        self._kept: _Kept | None = None
        self._turn = Turn()
        self._drafts: WeakSet[LanguageModel] = WeakSet()  # whose vocabularies were compared, which takes a while

    @staticmethod
    def of(
        data: ExecutableData, *, threads: int | None = None, cache_bytes: int = CACHE_BYTES, is_checked: bool = False
    ) -> LanguageModel:
        """From a compiled model. `cache_bytes` bounds the cache of keys and values, which grows as it is needed;
        `is_checked` as of an Executable.

        ArtifactError: it is no language model, or damaged.
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
        # The executable's data, not what it was made of: it may have copied the weights
        return LanguageModel(engine, tokenizer, description, data=executable.data, capacity=capacity)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which `load` reads. Raises ArtifactError."""
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
        """What goes on from a prompt (text, or tokens): a Result; for a list of prompts, run as one batch, a list.

        max_new_tokens  default: 256, or what the context leaves
        temperature, top_k, top_p, min_p, repetition_penalty, suppress_tokens
                        see `Sampling`. Default: what the checkpoint says, else the likeliest token (temperature 0)
        seed            of prompt k is seed + k, whatever stands beside it; None: another each time
        stop            texts that end it, themselves not shown; `stop_tokens`: in place of the model's own
        overflow        "error": InvalidArgumentError where max_new_tokens do not fit into the context; "slide": where
                        it is full, its older half is forgotten (`Usage.forgotten_tokens` counts), and it goes on
        draft           where guesses come from of how the text goes on, which a step checks along with its token: they
                        make it faster where they are right, and do not change it. "lookup": what followed the same
                        tokens before; another LanguageModel of the same vocabulary, a smaller one, never the model
                        itself; None: no guesses
        logprobs, logits  keep them in the result
        stream          return a Stream of pieces of text instead

        Raises InvalidArgumentError for an empty prompt, one that does not fit into the context, and bad parameters.
        """
        is_list, prompts = _prompts(prompt)
        return self._run(
            [self._encode(text) for text in prompts],
            is_list,
            stream=stream,
            keeps=False,
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
        """The reply to a chat, a list of {"role": ..., "content": ...}: a Result, or a Stream as in `generate`.

        The last chat stays in the cache: what the next one has in common with it is not computed again.
        `template` takes the place of the model's own, `template_options` are its variables (`tools`, ...);
        {"continue_final_message": True} has the reply go on with the last message.
        InvalidArgumentError: the model has no template, or it refuses the messages; and as in `generate`.
        """
        options = template_options or {}
        if (
            not isinstance(options, Mapping)
            or _OWN_OPTIONS & options.keys()
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
            keeps=True,
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
        """The tokens of a chat, up to where the reply begins. `template`: text, or the name of one of the model's;
        without it the one for tools, if `tools` are given and there is one, or the usual one."""
        from relaxlite.llm.templates import render_chat  # with Jinja2, which no plain text needs

        named = self.description.other_templates
        if template is None and options.get("tools") is not None:
            template = named.get(FOR_TOOLS)
        template = named.get(template or "", template) or self.description.chat_template
        if not template:
            raise InvalidArgumentError(
                f"{self.description.name} has no chat template: give one (`template=`), or use `generate`"
            )
        text = render_chat(template, messages, self.description.special_tokens, **options)
        return self.tokenizer.encode(text, marks=False)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return [int(token) for token in prompt]

    def _sampling(self, **given: Any) -> Sampling:
        """Of what is not None, else of the checkpoint's defaults."""
        chosen = {name: value for name, value in given.items() if value is not None}
        return Sampling(**{**_defaults(self.description), **chosen})

    def _run(
        self,
        prompts: list[list[int]],
        is_list: bool,
        *,
        stream: bool,
        keeps: bool,
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
        ends = self._stop_tokens(stop_tokens)
        texts = _stop_strings(stop)
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
                ends,
                texts,
                wants_logprobs=logprobs,
                wants_logits=logits,
                window=self.context if slides else None,
            )
            for k, (tokens, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        pieces = Stream(self._events(requests, draft, keeps=keeps), requests, is_list)
        if stream:
            return pieces
        return pieces.results() if is_list else pieces.result()

    def _events(self, requests: list[Request], draft: LanguageModel | str | None, *, keeps: bool) -> Any:
        """The pieces of requests. Sequences are opened when the first piece is asked for."""

        def begin(request: Request) -> None:
            if keeps:
                self._take_kept(request)
            if not request.sequence:
                request.sequence = self.engine.new()
            request.drafter = self._drafter(draft)

        yield from run(self.engine, self.tokenizer, requests, begin, self._keep if keeps else self._remove, self.forget)

    def _check_draft(self, draft: LanguageModel | str | None) -> None:
        if draft is None or (isinstance(draft, str) and draft == LOOKUP):
            return
        if not isinstance(draft, LanguageModel):
            raise InvalidArgumentError(f"draft must be {LOOKUP!r}, a LanguageModel or None, got {draft!r}")
        if draft is self:
            raise InvalidArgumentError(
                "draft: a model does not guess for itself, which takes room in its cache and no time off; give a "
                f"smaller one, {LOOKUP!r} or None"
            )
        if draft in self._drafts:
            return
        if not self.tokenizer.is_same(draft.tokenizer) or draft.engine.vocab != self.engine.vocab:
            raise InvalidArgumentError(
                f"draft: {draft.description.name} has another vocabulary ({draft.engine.vocab} tokens) than "
                f"{self.description.name} ({self.engine.vocab}), so that its guesses would mean something else"
            )
        self._drafts.add(draft)

    def _drafter(self, draft: LanguageModel | str | None) -> Drafter | None:
        row_cost = self.description.row_cost
        if isinstance(draft, LanguageModel):
            return DraftModel(draft.engine, draft.weight_bytes / max(self.weight_bytes, 1), row_cost)
        return None if draft is None else Lookup(row_cost)

    @property
    def weight_bytes(self) -> int:
        """Of all constants of the compiled model."""
        return sum(constant.nbytes for constant in self.data.constants) if self.data is not None else 0

    def _stop_tokens(self, given: Iterable[int] | None) -> frozenset[int]:
        if given is None:
            return frozenset(self.description.stop)
        if not hasattr(given, "__iter__"):
            raise InvalidArgumentError(f"stop_tokens must be numbers of tokens, got {given!r}")
        tokens = tuple(given)
        for token in tokens:
            if not _is_token(token) or not 0 <= token < self.engine.vocab:
                raise InvalidArgumentError(f"stop_tokens: {token!r} is not in the vocabulary of {self.engine.vocab}")
        return frozenset(map(int, tokens))

    def _limit(self, tokens: list[int], number: int | None, max_new_tokens: int | None, *, slides: bool) -> int:
        """How many tokens may follow a prompt."""
        what = "the prompt" if number is None else f"prompt {number}"
        if not tokens:
            raise InvalidArgumentError(f"{what} is empty")
        bad = next((token for token in tokens if not 0 <= token < self.engine.vocab), None)
        if bad is not None:
            raise InvalidArgumentError(f"{what}: token {bad} is not in the vocabulary of {self.engine.vocab}")
        room = self.context - len(tokens)
        if room < 1:
            raise InvalidArgumentError(
                f"{what} has {len(tokens)} tokens, and the context holds {self.context}, of which the reply needs at "
                f"least one; shorten it{self._bound()}"
            )
        if max_new_tokens is None:
            return MAX_NEW_TOKENS if slides else min(MAX_NEW_TOKENS, room)
        if not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise InvalidArgumentError(f"max_new_tokens must be a whole number from 1, got {max_new_tokens!r}")
        if max_new_tokens > room and not slides:
            raise InvalidArgumentError(
                f"{what} has {len(tokens)} tokens, and max_new_tokens={max_new_tokens} more do not fit into the "
                f"context of {self.context}; at most {room} do{self._bound()}; overflow='slide' forgets the oldest"
            )
        return int(max_new_tokens)

    def _bound(self) -> str:
        """What to do where it is the cache that bounds the context."""
        most = self.engine.context
        return f", or give the cache more bytes: the model itself takes {most}" if self.context < most else ""

    # sequences

    # A sequence belongs to a request or to what is kept of the last chat. It changes hands under the lock, by one
    # statement that calls nothing, so that neither another thread nor an interruption comes between.

    def _take_kept(self, request: Request) -> None:
        """Go on with the sequence of the last chat, if there is one, as far as it is the beginning of this one.

        Who uses the kept sequence takes it away, so that interleaved streams do not share it.
        """
        with self._turn.lock:
            kept = self._kept
            if kept is None:
                return
            request.sequence, self._kept = kept.sequence, None
        common = 0
        for a, b in zip(kept.tokens, request.prompt[:-1], strict=False):  # the last one is needed again: for its logits
            if a != b:
                break
            common += 1
        if len(kept.tokens) > common:
            self.engine.drop(kept.sequence, len(kept.tokens) - common)
            held = self.engine.held(kept.sequence)
            self.engine.drop(kept.sequence, common - held)
            common = held
        request.reused = common

    def _keep(self, request: Request, is_sound: bool) -> None:
        if not is_sound or request.forgotten:  # what is left does not begin as the next chat will
            self._remove(request, is_sound)
            return
        written = [*request.prompt, *request.tokens][: self.engine.length(request.sequence)]
        kept = _Kept(request.sequence, written)
        with self._turn.lock:
            before, self._kept, request.sequence = self._kept, kept, 0
        if before is not None:
            self.engine.remove(before.sequence)

    def _remove(self, request: Request, is_sound: bool) -> None:
        self.engine.remove(request.sequence)
        request.sequence = 0

    def forget(self) -> bool:
        """Give the memory of the last chat back; says whether there was any."""
        with self._turn.lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            self.engine.remove(kept.sequence)
        return kept is not None

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
    """A language model from a file that `relaxlite compile` or `LanguageModel.save` wrote.

    `cache_bytes` bounds the cache of keys and values. ArtifactError says what is wrong with the file; `verify` checks
    every byte of the weights.
    """
    data = artifact.load(path, verify=verify)
    try:
        return LanguageModel.of(data, threads=threads, cache_bytes=cache_bytes, is_checked=True)
    except ArtifactError as error:
        raise ArtifactError(f"cannot load {os.fspath(path)}: {error}") from error


def _prompts(prompt: Any) -> tuple[bool, list[Prompt]]:
    """Whether there are several, and they."""
    if isinstance(prompt, str):
        return False, [prompt]
    if not hasattr(prompt, "__iter__") or isinstance(prompt, _NO_PROMPTS) or _ndim(prompt) == 0:
        raise InvalidArgumentError(f"a prompt is text or a list of tokens, got {type(prompt).__name__}")
    items: list[Any] = [list(item) if hasattr(item, "__next__") else item for item in prompt]
    if items and all(map(_is_token, items)):
        return False, [items]
    if not items:
        raise InvalidArgumentError("there is no prompt: the list is empty")
    for k, item in enumerate(items):
        is_tokens = hasattr(item, "__iter__") and not isinstance(item, _NO_PROMPTS) and _ndim(item) > 0
        if not isinstance(item, str) and not (is_tokens and all(map(_is_token, item))):
            raise InvalidArgumentError(f"prompt {k} is {item!r}; a prompt is text or a list of tokens")
    return True, items


def _ndim(value: Any) -> int:
    """Of an array; 1 of what is none."""
    return int(getattr(value, "ndim", 1))


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    texts: tuple[Any, ...] = (stop,) if isinstance(stop, str) or not hasattr(stop, "__iter__") else tuple(stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(f"stop must be texts of at least one character, got {text!r}")
    return texts


def _defaults(description: Description) -> dict[str, Any]:
    """What the checkpoint says about sampling: all of it where it says that tokens are sampled."""
    said = dict(description.generation)
    names = {field.name for field in fields(Sampling)}
    values = {name: value for name, value in said.items() if name in names and value is not None}
    if not said.get("do_sample"):
        values.pop("temperature", None)
    elif "temperature" not in values:
        values["temperature"] = 1.0
    return values
