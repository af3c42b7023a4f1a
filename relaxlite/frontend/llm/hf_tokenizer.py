"""Importer of the tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import TokenizerData
from relaxlite.frontend.llm.hf_json import read_json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT = "default"  # name of the chat template that is used if none is named


def read_tokenizer(folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TokenizerData | None:
    """Read the tokenizer of a folder; None without a tokenizer.json.

    `raw`: config.json, `generation`: generation_config.json, both of which name special tokens. Raises ImportModelError
    for malformed files.
    """
    try:
        return _read_tokenizer(folder, raw, generation)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise ImportModelError(f"{folder}: the tokenizer is malformed ({type(error).__name__}: {error})") from error


def _read_tokenizer(folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> TokenizerData | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    result, settings = read_json(path), read_json(folder / "tokenizer_config.json")
    text = path.read_text("utf-8-sig")
    tokens = result.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(isinstance(token, Mapping) for token in tokens):
        raise ImportModelError(f"{path}: added_tokens must be a list of objects, one for each token")
    added = _configured_tokens(result, settings)
    if added:
        result["added_tokens"] = [*(result.get("added_tokens") or ()), *added]
    has_dropped_ends = settings.get("add_eos_token") is not True and _drop_end_tokens(result)
    if added or has_dropped_ends:
        text = json.dumps(result, ensure_ascii=False)
    special = _special_tokens(settings, read_json(folder / "special_tokens_map.json"))
    token_ids = {token.get("content"): token.get("id") for token in result.get("added_tokens") or ()}
    bos = token_ids.get(special.get("bos_token"), raw.get("bos_token_id"))
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    stops = [*(eos if isinstance(eos, list) else [eos]), token_ids.get(special.get("eos_token"))]
    for name, token in (("bos_token_id", bos), *(("eos_token_id", token) for token in stops)):
        if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
            raise ImportModelError(f"{folder}: {name} is {token!r}; it must be the number of a token")
    adds_bos = settings.get("add_bos_token")
    if adds_bos is None:
        adds_bos = _first_special_token(result.get("post_processor")) == special.get("bos_token", "")
    templates = _chat_templates(folder, settings)
    return TokenizerData(
        text,
        templates.pop(DEFAULT, None),
        bos,
        tuple(dict.fromkeys(token for token in stops if token is not None)),
        bool(adds_bos) and bos is not None,
        special,
        templates,
    )


def _configured_tokens(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the tokens that tokenizer_config.json adds to those of tokenizer.json."""
    decoder = settings.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return []
    known = {token.get("content") for token in tokenizer.get("added_tokens") or ()}
    taken_ids = {token.get("id") for token in tokenizer.get("added_tokens") or ()}
    result = []
    for token_id, token in decoder.items():
        if not isinstance(token, Mapping) or not str(token_id).isdecimal():
            continue
        if token.get("content") in known or int(token_id) in taken_ids or not token.get("content"):
            continue
        flags = {flag: bool(token.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(token.get("normalized", not flags["special"]))
        result.append({"id": int(token_id), "content": token["content"], **flags, "normalized": normalized})
    return sorted(result, key=lambda token: token["id"])


def _drop_end_tokens(tokenizer: Mapping[str, Any]) -> bool:
    """Remove the special tokens that a post-processor appends to a text (Command R), as a prompt has to be continued.

    Modify `tokenizer` in place; return whether there were any.
    """
    changed = False
    for step in _processor_steps(tokenizer.get("post_processor")):
        pieces = step.get("single") or []
        while len(pieces) > 1 and "SpecialToken" in pieces[-1]:
            pieces.pop()
            changed = True
    return changed


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that chat templates name: `bos_token` and the like, and `extra_special_tokens`.

    The first of the files that defines a name counts.
    """
    result: dict[str, str] = {}
    for settings in sources:
        extra = settings.get("extra_special_tokens")
        own = extra.items() if isinstance(extra, Mapping) else ()
        for name, token in [*((name, settings.get(name)) for name in _SPECIAL), *own]:
            if token and (isinstance(token, str) or (isinstance(token, Mapping) and token.get("content"))):
                result.setdefault(name, _token_text(token))
    return result


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name, from files of their own or from tokenizer_config.json."""
    result: dict[str, Any] = {}
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
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


def _first_special_token(processor: Any) -> str | None:
    """Return the special token that a post-processor of tokenizer.json prepends to a text."""
    for step in _processor_steps(processor):
        pieces = step.get("single") or ()
        if pieces and "SpecialToken" in pieces[0]:
            return str(pieces[0]["SpecialToken"]["id"])
    return None


def _processor_steps(processor: Any) -> Iterable[Any]:
    """Return the steps of a post-processor, which may be a sequence."""
    return processor.get("processors", [processor]) if isinstance(processor, Mapping) else ()


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)
