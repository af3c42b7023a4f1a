"""Chat templates: Jinja2 in its sandbox, with what templates may use as transformers offers it.

Jinja2 is imported here alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relaxlite.errors import InvalidArgumentError

Message = Mapping[str, Any]  # "role": "system", "user", "assistant", ...; "content": the text


class _Generation(Extension):
    """{% generation %} marks replies for training; here it is as good as what stands in it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def render_chat(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], **options: Any) -> str:
    """The text of a chat, up to where the reply begins. `options` are the template's own, such as `tools`.

    InvalidArgumentError: messages that are none or that the template refuses, or a template that is wrong itself.
    """
    _check(messages)
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens, **options}
    try:
        return _compiled(template).render(messages=[dict(m) for m in messages], **given)
    except _RefusedError as error:
        raise InvalidArgumentError(f"the chat template refuses these messages: {error}") from error
    except jinja2.TemplateError as error:
        place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidArgumentError(f"the chat template is wrong{place}: {error}") from error
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise InvalidArgumentError(f"the chat template fails: {type(error).__name__}: {error}") from error


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not messages:
        raise InvalidArgumentError(
            'a chat is a list of messages such as {"role": "user", "content": "Hello"}, at least one'
        )
    for k, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidArgumentError(f'message {k} is {message!r}; it needs a "role" and a "content"')


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
