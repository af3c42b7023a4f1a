"""The tokenizer of a Hugging Face folder: tokenizer.json, with what tokenizer_config.json and its kin add to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import TokenizerData
from relaxlite.frontend.llm.hf_json import read_json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT = "default"  # the chat template of several that is meant where none is named


def read_tokenizer(folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TokenizerData | None:
    """None without a tokenizer.json. `raw`: config.json, which names tokens, too, as `generation` does.

    ImportModelError: a file is damaged, or what names a token is none.
    """
    try:
        return _read_tokenizer(folder, raw, generation)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise ImportModelError(f"{folder}: the tokenizer is malformed ({type(error).__name__}: {error})") from error


def _read_tokenizer(folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TokenizerData | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    result, said = read_json(path), read_json(folder / "tokenizer_config.json")
    text = path.read_text("utf-8-sig")
    tokens = result.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(isinstance(token, Mapping) for token in tokens):
        raise ImportModelError(f"{path}: added_tokens must be a list of objects, one for each token")
    added = _more_tokens(result, said)
    if added:
        result["added_tokens"] = [*(result.get("added_tokens") or ()), *added]
    was_closed = said.get("add_eos_token") is not True and _leave_open(result)
    if added or was_closed:
        text = json.dumps(result, ensure_ascii=False)
    special = _special_tokens(said, read_json(folder / "special_tokens_map.json"))
    places = {token.get("content"): token.get("id") for token in result.get("added_tokens") or ()}
    bos = places.get(special.get("bos_token"), raw.get("bos_token_id"))
    stop = generation.get("eos_token_id", raw.get("eos_token_id"))
    stops = [*(stop if isinstance(stop, list) else [stop]), places.get(special.get("eos_token"))]
    for name, token in (("bos_token_id", bos), *(("eos_token_id", token) for token in stops)):
        if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
            raise ImportModelError(f"{folder}: {name} is {token!r}; it must be the number of a token")
    adds_bos = said.get("add_bos_token")
    if adds_bos is None:
        adds_bos = _first_of_template(result.get("post_processor")) == special.get("bos_token", "")
    templates = _chat_templates(folder, said)
    return TokenizerData(
        text,
        templates.pop(DEFAULT, None),
        bos,
        tuple(dict.fromkeys(token for token in stops if token is not None)),
        bool(adds_bos) and bos is not None,
        special,
        templates,
    )


def _more_tokens(made: Mapping[str, Any], said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens that tokenizer_config.json adds to those of tokenizer.json."""
    decoder = said.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return []
    known = {token.get("content") for token in made.get("added_tokens") or ()}
    taken = {token.get("id") for token in made.get("added_tokens") or ()}
    result = []
    for number, token in decoder.items():
        if not isinstance(token, Mapping) or not str(number).isdecimal():
            continue
        if token.get("content") in known or int(number) in taken or not token.get("content"):
            continue
        flags = {flag: bool(token.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(token.get("normalized", not flags["special"]))
        result.append({"id": int(number), "content": token["content"], **flags, "normalized": normalized})
    return sorted(result, key=lambda token: token["id"])


def _leave_open(made: Mapping[str, Any]) -> bool:
    """Take the special tokens out that a post-processor puts behind a text (Command R's), as a prompt is to go on.
    Whether there were any."""
    changed = False
    for step in _steps(made.get("post_processor")):
        pieces = step.get("single") or []
        while len(pieces) > 1 and "SpecialToken" in pieces[-1]:
            pieces.pop()
            changed = True
    return changed


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """What chat templates may call tokens by, of the first file that says it: `bos_token` and the like, and the names
    that a checkpoint has for others (Gemma 3's `boi_token`)."""
    result: dict[str, str] = {}
    for said in sources:
        extra = said.get("extra_special_tokens")
        own = extra.items() if isinstance(extra, Mapping) else ()
        for name, token in [*((name, said.get(name)) for name in _SPECIAL), *own]:
            if token and (isinstance(token, str) or (isinstance(token, Mapping) and token.get("content"))):
                result.setdefault(name, _text(token))
    return result


def _chat_templates(folder: Path, said: Mapping[str, Any]) -> dict[str, str]:
    """By name: in files of their own, or in tokenizer_config.json, there perhaps several."""
    result: dict[str, Any] = {}
    template = said.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        result = {str(t.get("name")): t.get("template") for t in template if isinstance(t, Mapping)}
        result.setdefault(DEFAULT, next(iter(result.values()), None))
    else:
        result[DEFAULT] = template
    files = {DEFAULT: folder / "chat_template.jinja"} | {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    result |= {name: _read_text(path) for name, path in files.items() if path.exists()}
    return {name: template for name, template in result.items() if isinstance(template, str) and template}


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (ValueError, OSError) as error:
        raise ImportModelError(f"{path}: cannot be read: {error}") from error


def _first_of_template(processor: Any) -> str | None:
    """The special token that a post-processor of tokenizer.json puts before a text."""
    for step in _steps(processor):
        pieces = step.get("single") or ()
        if pieces and "SpecialToken" in pieces[0]:
            return str(pieces[0]["SpecialToken"]["id"])
    return None


def _steps(processor: Any) -> Iterable[Any]:
    """Of a post-processor, which may be a sequence of some."""
    return processor.get("processors", [processor]) if isinstance(processor, Mapping) else ()


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)
