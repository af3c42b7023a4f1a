"""Hugging Face folders as they also come: fine-tuned, edited by hand, saved by other versions, with files left over."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import TokenizerData
from relaxlite.frontend.llm.hf_folder import describe
from relaxlite.frontend.llm.hf_generation import generation_defaults
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.llm.tokenizer import Tokenizer
from relaxlite.model_cache import _files_of
from tests.frontend.llm.test_hf import CONFIG, PUBLISHED, SHAPES, weights, write, write_safetensors
from tests.support.tiny_llm import scripted, tokenizer_json

WINDOW = {"use_sliding_window": True, "sliding_window": 24}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def tokenizer_of(folder: Path) -> TokenizerData:
    found = read_checkpoint(folder).tokenizer
    assert found is not None
    return found


# tokens


@pytest.mark.parametrize(
    "more",
    [
        {"truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 300}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 2,
                "pad_type_id": 0, "pad_token": "</s>",
            }
        },
    ],
)  # fmt: skip
def test_a_tokenizer_saved_as_it_was_trained_with_neither_cuts_texts_nor_fills_them_up(more: dict[str, Any]) -> None:
    text = "the king said to the queen that " * 5
    found = Tokenizer(json.dumps({**json.loads(tokenizer_json()), **more})).encode(text)
    assert found == Tokenizer(tokenizer_json()).encode(text)
    assert 16 < len(found) < 300


def test_tokens_that_only_tokenizer_config_adds_are_known_and_end_replies(tmp_path: Path) -> None:
    made = json.loads(tokenizer_json())
    place = max([*made["model"]["vocab"].values(), *(token["id"] for token in made["added_tokens"])]) + 1
    marks = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    said = {
        "added_tokens_decoder": {
            str(place): {"content": "<|im_end|>", **marks},
            **{str(token["id"]): token for token in made["added_tokens"]},
        },
        "eos_token": "<|im_end|>",
    }
    config = {**CONFIG, "vocab_size": place + 1}
    stored = weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = np.zeros((place + 1, 32), np.float32)
    found = tokenizer_of(write(tmp_path, stored, config=config, tokenizer=made, tokenizer_config=said))
    assert place in found.stop
    assert Tokenizer(found.json).encode("<|im_end|>") == [place]
    again = tokenizer_of(write(tmp_path, stored, config=config, tokenizer=made, tokenizer_config={}))
    assert json.loads(again.json) == made


def test_templates_may_name_every_special_token(tmp_path: Path) -> None:
    said = {"pad_token": "<pad>", "extra_special_tokens": {"boi_token": {"content": "<image>"}}, "bos_token": "<s>"}
    others = {"eos_token": {"content": "</s>"}, "bos_token": "<other>"}
    write(tmp_path, tokenizer={"added_tokens": []}, tokenizer_config=said, special_tokens_map=others)
    assert tokenizer_of(tmp_path).special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "boi_token": "<image>"
    }  # fmt: skip


@pytest.mark.parametrize("value", ["2", [1, "2"], 2.0, True])
def test_a_token_that_is_no_number_is_named(value: Any, tmp_path: Path) -> None:
    write(tmp_path, tokenizer={"added_tokens": []}, generation_config={"eos_token_id": value})
    wrong = value[-1] if isinstance(value, list) else value
    with pytest.raises(ImportModelError, match=f"eos_token_id is {wrong!r}; it must be the number of a token"):
        read_checkpoint(tmp_path)


# chat templates


def test_templates_by_name_come_from_all_files(tmp_path: Path) -> None:
    said = {"chat_template": [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]}
    write(tmp_path, tokenizer={"added_tokens": []}, tokenizer_config=said)
    (tmp_path / "additional_chat_templates").mkdir()
    file = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    file.write_text("C")
    found = tokenizer_of(tmp_path)
    assert (found.chat_template, found.other_templates) == ("A", {"rag": "B", "tool_use": "C"})
    assert file in _files_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    assert tokenizer_of(tmp_path).chat_template == "D"


def test_tools_choose_the_template_for_tools() -> None:
    for_tools = "tools {{(tools or [])|length}}"
    llm = scripted(lambda tokens: b"", chat_template="plain", other_templates={"tool_use": for_tools})
    chat = [{"role": "user", "content": "Hi"}]

    def text(**options: Any) -> str:
        return llm.tokenizer.decode(llm.encode_chat(chat, **options))

    assert text() == "plain"
    assert text(tools=[{}, {}]) == "tools 2"
    assert text(template="tool_use") == "tools 0"
    assert text(template="own {{tools|length}}", tools=[{}]) == "own 1"


# weights


def test_integers_of_parts_that_see_pictures_are_left_out(tmp_path: Path) -> None:
    stored = {**weights(), "vision_tower.embeddings.position_ids": np.arange(4, dtype=np.int32)}
    assert len(read_checkpoint(write(tmp_path, stored)).weights) == len(SHAPES)


def test_an_index_beside_one_whole_file_is_a_leftover(tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    assert len(read_checkpoint(write(tmp_path, **{"model.safetensors.index": index})).weights) == len(SHAPES)


def test_a_model_saved_without_its_head_has_no_prefix(tmp_path: Path) -> None:
    stored = {name.removeprefix("model."): value for name, value in weights().items() if name != "lm_head.weight"}
    write(tmp_path, stored, config={**CONFIG, "tie_word_embeddings": True})
    assert len(read_checkpoint(tmp_path).weights) == len(SHAPES) - 1
    write(tmp_path, stored)
    with pytest.raises(
        ImportModelError, match=r"weight head is missing; .* config.json says so by tie_word_embeddings"
    ):
        read_checkpoint(tmp_path)


def test_a_head_that_is_not_the_embedding_counts_though_config_calls_them_tied(tmp_path: Path) -> None:
    made = weights()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    write_safetensors(tmp_path / "model.safetensors", made)
    found = read_checkpoint(tmp_path)
    assert not found.config.is_tied and "head" in found.weights


def _second_as_first(header: dict[str, Any]) -> str:
    names = [name for name in header if name != "__metadata__"]
    one, other = next(
        (a, b) for a in names for b in names if a != b and header[a]["shape"] == header[b]["shape"]
    )  # fmt: skip
    header[one]["data_offsets"] = header[other]["data_offsets"]
    return json.dumps(header)


def _named_twice(header: dict[str, Any]) -> str:
    name = next(iter(header))
    return json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"


@pytest.mark.parametrize(
    ("edit", "tail", "problem"),
    [
        (_second_as_first, b"", "the one before it ends at"),
        (_named_twice, b"", "its header has '.*' twice"),
        (json.dumps, b"1234", "its tensors end at byte .* of "),
    ],
)
def test_a_header_that_gives_tensors_each_others_numbers_is_damage(
    edit: Any, tail: bytes, problem: str, tmp_path: Path
) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = edit(json.loads(data[8 : 8 + size])).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :] + tail)
    with pytest.raises(ImportModelError, match=rf"model.safetensors: .*damaged or truncated.*{problem}"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is of another format, .* save it with `save_pretrained`"),
        ("pytorch_model-00001-of-00002.bin", "pytorch_model-00001-of-00002.bin is of another format"),
        ("notes.txt", "weights in other formats are not read"),
    ],
)
def test_weights_of_another_format_are_named(file: str, hint: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    with pytest.raises(ImportModelError, match=f"model.safetensors is missing; {hint}"):
        read_checkpoint(tmp_path)


def test_tensors_of_other_types_name_their_file(tmp_path: Path) -> None:
    write_safetensors(write(tmp_path) / "model.safetensors", {"x": np.zeros(3, np.int32)})
    with pytest.raises(ImportModelError, match=r"model\.safetensors: tensor 'x' is of type I32.*take the float one"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("config.json", "[" * 100_000, "config.json: cannot be read: maximum recursion depth"),
        ("tokenizer.json", '{"added_tokens": [5]}', "tokenizer.json: added_tokens must be a list of objects"),
    ],
)
def test_json_that_is_otherwise_than_expected_names_its_file(
    file: str, text: str, problem: str, tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ImportModelError, match=problem):
        read_checkpoint(tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ImportModelError, match=r"it holds an adapter \(LoRA\); merge it into its model"):
        read_checkpoint(tmp_path)


# config.json


@pytest.mark.parametrize(
    ("name", "changes", "local"),
    [
        ("Qwen2.5-0.5B-Instruct", {}, ()),  # 24 layers, and 28 before the first local one
        ("Qwen2.5-0.5B-Instruct", {"num_hidden_layers": 30}, (28, 29)),
        ("Qwen3-0.6B", {"num_hidden_layers": 29}, (28,)),
        ("Qwen3-0.6B", {"max_window_layers": 26}, (26, 27)),
    ],
)
def test_windows_begin_where_transformers_lets_them(name: str, changes: dict[str, Any], local: tuple[int, ...]) -> None:
    raw = {key: value for key, value in PUBLISHED[name][0].items() if key != "max_window_layers"}
    config, _ = describe({**raw, **WINDOW, **changes}, "here")
    assert config.window == 24
    assert tuple(np.flatnonzero(config.is_local)) == local


def test_a_window_without_a_size_is_that_of_transformers() -> None:
    raw = {**PUBLISHED["Qwen2.5-0.5B-Instruct"][0], "use_sliding_window": True, "max_window_layers": 0}
    assert describe({**raw, "sliding_window": None}, "here")[0].window is None
    del raw["sliding_window"]
    assert describe(raw, "here")[0].window == 4096


def test_a_byte_order_mark_before_config_is_no_damage(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_act": "swish"}), "utf-8-sig")
    assert len(read_checkpoint(tmp_path).weights) == len(SHAPES)


def test_rope_scaling_added_to_rope_parameters_counts() -> None:
    """As cards of Qwen's models say to, of files that transformers 5 wrote."""
    raw = dict(PUBLISHED["Qwen2.5-0.5B-Instruct"][0])
    expected, _ = describe({**raw, "rope_scaling": {"type": "yarn", **YARN}}, "here")
    theta = raw.pop("rope_theta")
    raw["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    found, _ = describe({**raw, "rope_scaling": {"type": "yarn", **YARN}}, "here")
    assert found == expected
    assert found.rope.scaling is not None and found.rope.scaling.kind == "yarn"
    sections = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
    with pytest.raises(ImportModelError, match="rope_scaling beside rope_parameters for several kinds of layers"):
        describe({**raw, "rope_parameters": sections, "rope_scaling": {"type": "yarn", **YARN}}, "here")


@pytest.mark.parametrize(("context", "expected"), [(32768, 131072), (131072, 131072), (16384, 131072)])
def test_yarn_lengthens_a_context_that_is_the_original_one(context: int, expected: int) -> None:
    raw = {**PUBLISHED["Qwen2.5-0.5B-Instruct"][0], "max_position_embeddings": context}
    assert describe({**raw, "rope_scaling": {"rope_type": "yarn", **YARN}}, "here")[0].context == expected


# generation_config.json


def test_defaults_that_cannot_be_are_told_and_left_out() -> None:
    with pytest.warns(RuntimeWarning, match="here: top_p = 0.0, top_k = 2.5 cannot be, and is left out"):
        assert generation_defaults({"top_p": 0.0, "top_k": 2.5, "temperature": 0.6}, "here") == {"temperature": 0.6}
    with pytest.warns(RuntimeWarning, match="here: stop_strings, num_beams is not supported, and left out"):
        assert generation_defaults({"stop_strings": ["x"], "num_beams": 4, "min_length": 0}, "here") == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = {"top_k": 50.0, "num_beams": 1, "max_new_tokens": 99, "typical_p": 1.0, "bad_words_ids": None}
        assert generation_defaults({**said, "do_sample": False}, "here") == {"top_k": 50, "do_sample": False}
        assert generation_defaults({"top_k": -1}, "here") == {"top_k": 0}
        assert generation_defaults({"suppress_tokens": [7, 3]}, "here") == {"suppress_tokens": [7, 3]}
    with pytest.warns(RuntimeWarning, match=r"here: suppress_tokens = \['a'\] cannot be, and is left out"):
        assert generation_defaults({"suppress_tokens": ["a"]}, "here") == {}
