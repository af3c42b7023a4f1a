"""Chat templates: Jinja2 in its sandbox, with what templates may use as transformers offers it.

Jinja2 is imported here alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relaxlite.errors import InvalidArgumentError
from relaxlite.llm.tokenizer import lone_surrogate

Message = Mapping[str, Any]  # "role": "system", "user", "assistant", ...; "content": the text
_PROBE = "probe-of-a-text"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """{% generation %} marks replies for training; here it is as good as what stands in it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def render_chat(
    template: str,
    messages: Iterable[Message],
    special_tokens: Mapping[str, str],
    *,
    continue_final_message: bool = False,
    **options: Any,
) -> str:
    """The text of a chat, up to where the reply begins; `continue_final_message`: up to the end of the last message,
    which the reply goes on with. `options` are the template's own, such as `tools`.

    InvalidArgumentError: messages that are none or that the template refuses, or a template that is wrong itself.
    """
    checked = _texts_joined(template, _checked(messages))
    if continue_final_message and options.get("add_generation_prompt"):
        raise InvalidArgumentError(
            "either add_generation_prompt or continue_final_message: a new reply, or the last one"
        )
    given = {"tools": None, "documents": None, "add_generation_prompt": not continue_final_message}
    try:
        text = _compiled(template).render({**given, **special_tokens, **options, "messages": checked})
    except _RefusedError as error:
        raise InvalidArgumentError(f"the chat template refuses these messages: {error}") from error
    except jinja2.UndefinedError as error:
        empty = next((k for k, m in enumerate(checked) if "content" not in m and "tool_calls" not in m), None)
        what = "the chat template is wrong" if empty is None else f'message {empty} has no "content", and needs it'
        raise InvalidArgumentError(f"{what}: {error}") from error
    except jinja2.TemplateError as error:
        place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidArgumentError(f"the chat template is wrong{place}: {error}") from error
    except Exception as error:  # a template calls methods of texts, lists and numbers, which raise what they like
        raise InvalidArgumentError(f"the chat template fails: {type(error).__name__}: {error}") from error
    return _up_to_the_end_of(checked[-1], text) if continue_final_message else text


def _checked(messages: Iterable[Message]) -> list[dict[str, Any]]:
    given = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping) else []
    if not given:
        raise InvalidArgumentError(
            'a chat is a list of messages such as {"role": "user", "content": "Hello"}, at least one'
        )
    result = []
    for k, message in enumerate(map(_plain, given)):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidArgumentError(f'message {k} is {message!r}; it needs a "role" and a "content"')
        content = message.get("content")
        if isinstance(content, str) and (wrong := lone_surrogate(content)):
            raise InvalidArgumentError(f"message {k}: the text is not valid Unicode: {wrong}")
        result.append(_with_thoughts({key: value for key, value in message.items() if value is not None}))
    return result


def _plain(value: Any) -> Any:
    """Messages of OpenAI's client, say, are objects with more of them inside: as the mappings that templates read."""
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Callers and templates name what a reply was thought to be by different keys: it is given under the usual two."""
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    return message if thoughts is None else {**dict.fromkeys(_THOUGHTS[:2], thoughts), **message}


def _texts_joined(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Contents that are lists of parts, {"type": "text", "text": ...}, as one text each, for templates that only know
    texts. Many of these would write the list as Python does."""
    if not any(isinstance(message.get("content"), list) for message in messages) or _knows_parts(template):
        return messages
    return [
        {**message, "content": "\n".join(_text_of(part, k) for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for k, message in enumerate(messages)
    ]


def _text_of(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if isinstance(text, str):
        return text
    raise InvalidArgumentError(
        f"message {number} has the part {part!r}; the chat template knows texts only, such as "
        '{"type": "text", "text": "Hello"}'
    )


@lru_cache(maxsize=16)
def _knows_parts(template: str) -> bool:
    message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
    try:
        text = _compiled(template).render(messages=[message], tools=None, documents=None, add_generation_prompt=True)
    except Exception:  # as where it is rendered
        return False
    return _PROBE in text and "'type'" not in text


def _up_to_the_end_of(message: Mapping[str, Any], text: str) -> str:
    """As transformers cuts it: the template may have removed spaces around the message."""
    content = message.get("content")
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if "text" in part), None)
    if not isinstance(content, str) or content.strip() not in text:
        raise InvalidArgumentError(
            "continue_final_message: the chat template does not write the text of the last message as it is"
        )
    begin = text.rindex(content.strip())
    ended = content.lstrip()
    return text[: begin + len(ended if text[begin : begin + len(ended)] == ended else content.strip())]


class _RefusedError(jinja2.TemplateError):
    pass


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise
    sandbox.globals["strftime_now"] = _now
    return sandbox.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja2's own filter writes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
