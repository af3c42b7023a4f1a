"""Chat templates: Jinja2 in a sandbox, with the extensions that transformers offers to templates.

Jinja2 is imported by this module only.
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
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """Parses {% generation %}, which marks replies for training, as a plain block."""

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
    """Render a chat as text, up to where the reply begins.

    `continue_final_message`: up to the end of the last message, which the reply continues. `options`: variables of the
    template, such as `tools`. Raises InvalidArgumentError for messages that are malformed or that the template refuses,
    and for an invalid template.
    """
    chat = _join_text_parts(template, _check_messages(messages))
    if continue_final_message and options.get("add_generation_prompt"):
        raise InvalidArgumentError(
            "either add_generation_prompt or continue_final_message: a new reply, or the last one"
        )
    defaults = {"tools": None, "documents": None, "add_generation_prompt": not continue_final_message}
    try:
        text = _compile_template(template).render({**defaults, **special_tokens, **options, "messages": chat})
    except _RefusedError as error:
        raise InvalidArgumentError(f"the chat template refuses these messages: {error}") from error
    except jinja2.UndefinedError as error:
        message_number = next((k for k, m in enumerate(chat) if "content" not in m and "tool_calls" not in m), None)
        problem = (
            "the chat template is wrong"
            if message_number is None
            else f'message {message_number} has no "content", and needs it'
        )
        raise InvalidArgumentError(f"{problem}: {error}") from error
    except jinja2.TemplateError as error:
        place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidArgumentError(f"the chat template is wrong{place}: {error}") from error
    except Exception as error:  # a template calls methods of Python objects, which may raise anything
        raise InvalidArgumentError(f"the chat template fails: {type(error).__name__}: {error}") from error
    return _cut_after_message(chat[-1], text) if continue_final_message else text


def _check_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as dicts. Raises InvalidArgumentError for malformed ones."""
    message_list = (
        list(messages) if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping) else []
    )
    if not message_list:
        raise InvalidArgumentError(
            'a chat is a list of messages such as {"role": "user", "content": "Hello"}, at least one'
        )
    result = []
    for k, message in enumerate(map(_to_builtins, message_list)):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidArgumentError(f'message {k} is {message!r}; it needs a "role" and a "content"')
        content = message.get("content")
        if isinstance(content, str) and (problem := lone_surrogate(content)):
            raise InvalidArgumentError(f"message {k}: the text is not valid Unicode: {problem}")
        result.append(_with_reasoning({key: value for key, value in message.items() if value is not None}))
    return result


def _to_builtins(value: Any) -> Any:
    """Convert messages that are objects (those of OpenAI's client) to mappings and lists, recursively."""
    if callable(dump := getattr(value, "model_dump", None)):
        return _to_builtins(dump())
    if isinstance(value, Mapping):
        return {key: _to_builtins(inner) for key, inner in value.items()}
    return [_to_builtins(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Set both usual keys of a message's reasoning, as callers and templates use different ones."""
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    return message if reasoning is None else {**dict.fromkeys(_REASONING_KEYS[:2], reasoning), **message}


def _join_text_parts(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join contents that are lists of parts, {"type": "text", "text": ...}, for templates that accept texts only.

    Many of these would print the list as Python does.
    """
    if not any(isinstance(message.get("content"), list) for message in messages) or _accepts_parts(template):
        return messages
    return [
        {**message, "content": "\n".join(_text_of(part, k) for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for k, message in enumerate(messages)
    ]


def _text_of(part: Any, number: int) -> str:
    """Return the text of a part of a message. Raises InvalidArgumentError for other parts."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if isinstance(text, str):
        return text
    raise InvalidArgumentError(
        f"message {number} has the part {part!r}; the chat template knows texts only, such as "
        '{"type": "text", "text": "Hello"}'
    )


@lru_cache(maxsize=16)
def _accepts_parts(template: str) -> bool:
    """Return whether a template renders contents that are lists of parts."""
    message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
    try:
        text = _compile_template(template).render(
            messages=[message], tools=None, documents=None, add_generation_prompt=True
        )
    except Exception:  # templates may raise any exception
        return False
    return _PROBE in text and "'type'" not in text


def _cut_after_message(message: Mapping[str, Any], text: str) -> str:
    """Cut a rendered chat after its last message, as transformers does; templates may strip spaces around it."""
    content = message.get("content")
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if "text" in part), None)
    if not isinstance(content, str) or content.strip() not in text:
        raise InvalidArgumentError(
            "continue_final_message: the chat template does not write the text of the last message as it is"
        )
    begin = text.rindex(content.strip())
    trailing = content.lstrip()
    return text[: begin + len(trailing if text[begin : begin + len(trailing)] == trailing else content.strip())]


class _RefusedError(jinja2.TemplateError):
    pass


@lru_cache(maxsize=16)
def _compile_template(template: str) -> jinja2.Template:
    """Compile a template in the sandbox."""
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
    """Serialize to JSON; Jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
