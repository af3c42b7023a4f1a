"""Chat templates: what they may use, and what they refuse."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from relaxlite.errors import InvalidArgumentError
from relaxlite.llm.templates import render_chat

CHAT = [
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "?"},
]
TEMPLATES = {
    "ChatML": (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks and indents": (
        "{{ bos_token }}\n  {%- for m in messages %}\n    {% if m.role == 'user' %}\n[INST] {{ m.content }} [/INST]\n"
        "    {% else %}\n{{ m.content | trim }}{{ eos_token }}\n    {% endif %}\n  {% endfor %}\n"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "JSON": (
        "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ {'b': 'ä', 'a': 1} | tojson(sort_keys=True) }}"
    ),
    "marked replies": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "options": "{% if tools is none %}no tools{% endif %}{% if documents %}papers{% endif %}{{ namespace(x=1).x }}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(name: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    wanted, _ = utilities.render_jinja_template(
        conversations=[CHAT], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL
    )
    assert [render_chat(TEMPLATES[name], CHAT, SPECIAL)] == wanted


def test_a_chat_ends_where_the_reply_begins() -> None:
    text = render_chat(TEMPLATES["ChatML"], CHAT[:1], {})
    assert text == "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    assert not render_chat(TEMPLATES["ChatML"], CHAT[:1], {}, add_generation_prompt=False).endswith("assistant\n")


def test_the_date_and_options_can_be_used() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", CHAT, {}) == str(datetime.now().year)
    assert render_chat("{{ tools | length }}", CHAT, {}, tools=[1, 2]) == "2"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_the_name_that_a_template_knows(key: str) -> None:
    names = ("reasoning_content", "thinking", "reasoning")
    chat = [*CHAT, {"role": "assistant", "content": "Yes", **dict.fromkeys(names), key: "Hm"}]
    for known in ("reasoning_content", "thinking"):
        assert render_chat(f"{{{{ messages[-1].{known} }}}}", chat, {}) == "Hm"
    assert render_chat("{{ messages[0].thinking is defined }}", chat, {}) == "False"


def test_messages_may_come_one_by_one() -> None:
    template = TEMPLATES["ChatML"]
    assert render_chat(template, (message for message in CHAT), {}) == render_chat(template, CHAT, {})


def test_what_a_message_has_none_of_is_left_out() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "unit": None}}}
    chat = [*CHAT[:1], {"role": "assistant", "content": None, "tool_calls": [call]}, {**CHAT[1], "tool_calls": None}]
    template = "{% for m in messages %}{{ m | tojson }}{{ m.content }}{{ '!' if 'tool_calls' in m }}#{% endfor %}"
    found = render_chat(template, chat, {}).split("#")
    assert found == [
        '{"role": "user", "content": "Hi <b>"}Hi <b>',
        f'{{"role": "assistant", "tool_calls": [{json.dumps(call)}]}}!',
        '{"role": "assistant", "content": "Yes"}Yes',
        "",
    ]


class Reply:
    """As OpenAI's client has them, by pydantic."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self._fields


def test_messages_may_be_objects_of_a_client() -> None:
    call = Reply(type="function", function=Reply(name="weather", arguments="{}"))
    chat = [CHAT[0], Reply(role="assistant", content=None, refusal=None, tool_calls=(call,))]
    assert json.loads(render_chat("{{ messages[1] | tojson }}", chat, {})) == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    }


LAST = [*CHAT, {"role": "assistant", "content": " Sure: "}]


@pytest.mark.parametrize("name", ["ChatML", "blocks and indents"])
def test_a_reply_may_go_on_with_the_last_message(name: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    wanted, _ = utilities.render_jinja_template(
        conversations=[LAST], chat_template=TEMPLATES[name], continue_final_message=True, **SPECIAL
    )
    found = render_chat(TEMPLATES[name], LAST, SPECIAL, continue_final_message=True)
    assert [found] == wanted and found.rstrip().endswith("Sure:")


def test_a_reply_cannot_go_on_with_what_the_template_does_not_write() -> None:
    with pytest.raises(InvalidArgumentError, match="does not write the text of the last message"):
        render_chat("{{ messages | length }}", LAST, {}, continue_final_message=True)
    with pytest.raises(InvalidArgumentError, match="either add_generation_prompt or continue_final_message"):
        render_chat(TEMPLATES["ChatML"], LAST, {}, continue_final_message=True, add_generation_prompt=True)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}", "user:one\ntwo"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "one\ntwo"),
        ("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", "<one><two>"),
    ],
)
def test_contents_of_several_parts_are_texts_for_templates_that_know_texts_only(template: str, wanted: str) -> None:
    assert render_chat(template, PARTS, {}) == wanted
    other = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    if "p.text" not in template:
        with pytest.raises(InvalidArgumentError, match=r"message 0 has the part .*image_url.* knows texts only"):
            render_chat(template, other, {})


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "refuses these messages: roles must alternate"),
        ("a\n{% for %}", CHAT, "the chat template is wrong, line 2: "),
        ("{{ messages.x.y }}", CHAT, "the chat template is wrong: "),
        ("{{ 'a' + 1 }}", CHAT, "the chat template fails: TypeError"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "the chat template is wrong: access to attribute '__class__'"),
        ("{{ '{}'.format() }}", CHAT, "the chat template fails: IndexError: "),
        ("{{ 'a'.encode('none') }}", CHAT, "the chat template fails: LookupError: unknown encoding: none"),
        ("{{ cycler() }}", CHAT, "the chat template fails: RuntimeError: "),
        ("{{ messages.append(1) }}", CHAT, "the chat template is wrong: "),
        ("x", [], "a chat is a list of messages such as"),
        ("x", "Hello", "a chat is a list of messages such as"),
        ("x", {"role": "user"}, "a chat is a list of messages such as"),
        ("x", [{"content": "a"}], """message 0 is {'content': 'a'}; it needs a "role" and a "content\""""),
        ("x", ["a"], "message 0 is 'a'"),
        ("x", 5, "a chat is a list of messages such as"),
        (TEMPLATES["ChatML"], [*CHAT, {"role": "user"}], 'message 3 has no "content", and needs it'),
        (
            "x",
            [*CHAT, {"role": "user", "content": "ab\udcff"}],
            "message 3: the text is not valid Unicode: a surrogate",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", CHAT, "the chat template fails: RecursionError"),
    ],
)
def test_what_is_wrong_is_said(template: str, messages: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        render_chat(template, messages, {})
    assert message in str(caught.value)
