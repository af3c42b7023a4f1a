"""Language models as files: what is compiled comes back, without the compiler; damaged descriptions are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import (
    ArtifactError,
    CacheFullError,
    ExecutionError,
    ImportModelError,
    InvalidArgumentError,
)
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import Experts
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.llm.compiling import build_checkpoint, make_attachments
from relaxlite.llm.description import Description
from relaxlite.llm.drafts import ROW_COST
from relaxlite.llm.model import LanguageModel
from relaxlite.runtime import artifact
from relaxlite.runtime.executable import ExecutableData
from relaxlite.version import STEP_VERSION, __version__
from tests.support.dense_llm import build_dense
from tests.support.paths import ROOT
from tests.support.tiny_llm import checkpoint, save_folder


@pytest.fixture(scope="module")
def data() -> ExecutableData:
    return build_checkpoint(checkpoint(), max_context=48)


@pytest.fixture(scope="module")
def saved(data: ExecutableData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "tiny.rlx"
    LanguageModel.of(data).save(path)
    return path


def test_a_loaded_model_says_what_the_compiled_one_does(data: ExecutableData, saved: Path) -> None:
    before, after = LanguageModel.of(data), rl.llm.load(saved)
    assert after.description == before.description and after.context == 48
    assert after.description.provenance == {"source": "tiny", "license": "apache-2.0"}
    assert repr(after) == "LanguageModel('tiny', llama, vocab 258, context 48)"
    whole = rl.compile(build_dense(checkpoint()))  # the oracle: all of a text at once
    prompts = ["a", "The capital", "é"]
    options = {"max_new_tokens": 9, "stop_tokens": (), "logits": True}
    first, second = before.generate(prompts, **options), after.generate(prompts, **options)
    assert [r.tokens for r in first] == [r.tokens for r in second]
    for prompt, result in zip(prompts, second, strict=True):
        tokens = [*prompt.encode(), *result.tokens]
        logits = whole(np.array([tokens]))[0, len(prompt.encode()) - 1 : -1]
        np.testing.assert_allclose(result.logits, logits, atol=1e-4 * np.abs(logits).max())
        assert result.tokens == tuple(logits.argmax(axis=1))


def test_weights_of_a_compiled_model_are_in_memory_once(data: ExecutableData, saved: Path, tmp_path: Path) -> None:
    llm = LanguageModel.of(data)
    assert llm.data is llm.engine._run.data  # type: ignore[attr-defined]
    artifact.save(data, tmp_path / "before.rlx")
    assert (tmp_path / "before.rlx").read_bytes() == saved.read_bytes()


def test_a_checkpoint_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RELAXLITE_VERIFY_PASSES", "0")  # who asks for that sees each compilation
    save_folder(tmp_path / "tiny")
    wanted = rl.llm.compile(tmp_path / "tiny").generate("abc", max_new_tokens=9).text
    code = (
        "import sys, relaxlite as rl\n"
        f"llm = rl.llm.load({str(tmp_path / 'tiny')!r}, threads=1)\n"
        "print(repr(llm.generate('abc', max_new_tokens=9).text), 'llvmlite' in sys.modules)"
    )
    said = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout for _ in range(2)
    ]
    assert said == [f"{wanted!r} True\n", f"{wanted!r} False\n"]
    for _ in range(2):
        assert rl.llm.load(tmp_path / "tiny", max_context=30, precision="float32").context == 30
    assert len(list((tmp_path / "cache" / "compiled").iterdir())) == 2


def test_options_of_a_checkpoint_are_refused_for_what_is_compiled(saved: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"max_context, quantize: of a checkpoint, and '.*tiny\.rlx' is none"
    ):
        rl.llm.load(saved, max_context=30, quantize="q4_0")
    with pytest.raises(ArtifactError, match="there is no such file"):
        rl.llm.load("none.gguf")
    for load in (rl.load, rl.llm.load):
        for path in (None, 5):
            with pytest.raises(InvalidArgumentError, match=f"by the path of its file, got {path}"):
                load(path)  # type: ignore[arg-type]
        with pytest.raises(ArtifactError, match="too long"):
            load("x" * 5000)


def test_loading_needs_neither_compiler_nor_transformers(saved: Path) -> None:
    code = (
        "import sys, relaxlite as rl\n"
        f"llm = rl.llm.load({str(saved)!r})\n"
        "print(len(llm.generate('abc', max_new_tokens=3, stop_tokens=()).tokens))\n"
        "print(len(llm.chat([{'role': 'user', 'content': 'x'}], max_new_tokens=2).text) >= 0)\n"
        "bad = [m for m in sys.modules if m.startswith(('relaxlite.ir', 'relaxlite.passes', 'relaxlite.codegen',"
        " 'relaxlite.frontend', 'relaxlite.driver', 'torch', 'transformers', 'onnx', 'sympy', 'gguf'))]\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3\nTrue\n"), done.stderr


def test_a_greedy_reply_loads_neither_openssl_nor_other_number_types(saved: Path) -> None:
    """OpenSSL, which hashlib and NumPy's random numbers bring along, and ml_dtypes took 9 MB of memory."""
    code = (
        "import sys, relaxlite as rl\n"
        f"llm = rl.llm.load({str(saved)!r})\n"
        "print(len(llm.generate([1, 2, 3], max_new_tokens=3, stop_tokens=(), temperature=0).tokens))\n"
        "print(sorted({'_hashlib', 'ml_dtypes', 'numpy.random', 'jinja2'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "3\n[]\n", done.stderr


def test_the_cache_bounds_the_context(saved: Path) -> None:
    small = rl.llm.load(saved, cache_bytes=1 << 16)
    assert small.context == 48  # which is less than a page
    assert len(small.generate("a", max_new_tokens=47, stop_tokens=()).tokens) == 47
    large = LanguageModel.of(build_checkpoint(checkpoint(context=200)), cache_bytes=1 << 15)
    assert large.context == 128
    with pytest.raises(InvalidArgumentError, match="context of 128; at most 127 do, or give the cache more bytes: the"):
        large.generate("a", max_new_tokens=150)
    with pytest.raises(InvalidArgumentError, match="does not hold one page of 64 tokens"):
        rl.llm.load(saved, cache_bytes=100)


def test_other_artifacts_are_no_language_models(data: ExecutableData, tmp_path: Path) -> None:
    artifact.save(replace(data, attachments={}), tmp_path / "m.rlx")
    with pytest.raises(ArtifactError, match="no language model: it has no language_model and no tokenizer"):
        rl.llm.load(tmp_path / "m.rlx")


@pytest.mark.parametrize("version", [None, 0, STEP_VERSION + 1, "1"])
def test_a_step_that_is_called_otherwise_is_refused(data: ExecutableData, tmp_path: Path, version: object) -> None:
    provenance = {**data.metadata.provenance, "step_version": version}
    if version is None:  # written before steps had versions
        del provenance["step_version"]
    metadata = replace(data.metadata, producer="0.0.7", provenance=provenance)
    artifact.save(replace(data, metadata=metadata), tmp_path / "m.rlx")
    with pytest.raises(ArtifactError) as caught:
        rl.llm.load(tmp_path / "m.rlx")
    assert str(caught.value) == (
        f"cannot load {tmp_path / 'm.rlx'}: its step of a language model has version {version or 0}, written by "
        f"relaxlite 0.0.7; relaxlite {__version__} calls version {STEP_VERSION}; compile the model again"
    )


@pytest.mark.exhaustive
def test_weights_are_quantized_first_where_that_is_asked_for(tmp_path: Path) -> None:
    seen: list[str] = []
    options = {"max_new_tokens": 9, "stop_tokens": (), "logits": True}
    LanguageModel.of(build_checkpoint(checkpoint(), quantize="q4_0", progress=seen.append)).save(tmp_path / "m.rlx")
    found = rl.llm.load(tmp_path / "m.rlx")
    kept = "Q4_0; 2 matrices kept"  # rows of 48 are no whole blocks
    assert found.description.provenance == {"source": "tiny", "license": "apache-2.0", "quantized": kept}
    assert found.data is not None and found.data.metadata.provenance["quantized"] == kept
    assert seen[0] == "embed" and len(seen) == 1 + 2 * 6
    wanted = LanguageModel.of(build_checkpoint(quantize_checkpoint(checkpoint(), "q4_0"))).generate("abc", **options)
    result = found.generate("abc", **options)
    np.testing.assert_array_equal(result.logits, wanted.logits)
    whole = LanguageModel.of(build_checkpoint(checkpoint())).generate("abc", **options)
    assert np.abs(result.logits - whole.logits).max() > 1e-3 * np.abs(whole.logits).max()


@pytest.mark.parametrize(
    ("kind", "target", "options", "dtype"),
    [
        ("q4_0", "x86-64-v4", {}, "float16"),
        pytest.param("q4_0", "x86-64-v4", {"precision": "int8"}, "float16", marks=pytest.mark.exhaustive),
        pytest.param("q4_0", "x86-64-v4", {"precision": "float32"}, "float32", marks=pytest.mark.exhaustive),
        pytest.param("q4_0", "x86-64-v4", {"cache_dtype": "float32"}, "float32", marks=pytest.mark.exhaustive),
        pytest.param(
            "q4_0", "x86-64-v2", {}, "float32", marks=pytest.mark.exhaustive
        ),  # it has no instruction for halves
        (None, "x86-64-v4", {}, "float32"),
    ],
)
def test_keys_and_values_are_halves_where_products_round_more(
    kind: str | None, target: str, options: dict[str, Any], dtype: str
) -> None:
    made = build_checkpoint(checkpoint(), f"llvm -mcpu={target}", quantize=kind, **options)
    pools = {spec.dtype for spec in made.signature.inputs if spec.name.startswith(("keys", "values"))}
    assert pools == {dtype}


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ImportModelError, match=r"tiny: the weights are quantized already \(Q4_0, Q8_0\); quantize the"):
        build_checkpoint(quantize_checkpoint(checkpoint(), "q4_0"), quantize="q8_0")
    with pytest.raises(InvalidArgumentError, match="cannot quantize to 'int4'; known are q4_0, q4_1, q5_0, q5_1, q8_0"):
        build_checkpoint(checkpoint(), quantize="int4")


def test_weights_that_are_no_numbers_are_found_when_text_is_made() -> None:
    made = checkpoint()
    values = made.weights["norm"].data.copy()
    values[3] = np.nan
    weights = {**made.weights, "norm": Weight(values, values.shape)}
    llm = LanguageModel.of(build_checkpoint(replace(made, weights=weights)))
    with pytest.raises(
        ExecutionError, match="sequence 0, position 3: the model computed logits that are no numbers, 258"
    ):
        llm.generate(["abc", "d"])
    assert llm.engine.cache.used_pages == 0  # type: ignore[attr-defined]


def test_a_full_cache_makes_requests_wait_or_refuses_them_and_others_go_on() -> None:
    data = build_checkpoint(checkpoint(context=128))
    options = {"max_new_tokens": 90, "stop_tokens": ()}
    prompts = ["ab", "cdefg", "h" * 30, "ijk"]  # two pages each, in the end
    wanted = [r.tokens for r in LanguageModel.of(data).generate(prompts, **options)]
    page = LanguageModel.of(data).engine.cache.layout.page_bytes  # type: ignore[attr-defined]
    llm = LanguageModel.of(data, cache_bytes=3 * page)
    assert [r.tokens for r in llm.generate(prompts, **options)] == wanted
    stream = llm.generate("ab", stream=True, **options)
    pieces = [next(stream)]
    while llm.engine.cache.used_pages < 2:  # type: ignore[attr-defined]
        pieces.append(next(stream))
    with pytest.raises(CacheFullError, match="is full: 1 more pages of 64 tokens are needed, 0 of 3 are free"):
        llm.generate("cdefg", **options)
    assert tuple(stream.result().tokens) == wanted[0] and stream.result().text.startswith("".join(pieces))
    assert llm.generate("cdefg", **options).tokens == wanted[1]
    assert llm.engine.cache.used_pages == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("language_model", {"vocab": None}),
        ("language_model", {"vocab": 0}),
        ("language_model", {"context": "64"}),
        ("language_model", {"context": True}),
        ("language_model", {"adds_bos": 1}),
        ("language_model", {"stop": [258]}),
        ("language_model", {"stop": 5}),
        ("language_model", {"stop": ["x"]}),
        ("language_model", {"special_tokens": []}),
        ("language_model", {"surprise": 1}),
        ("language_model", b"[]"),
        ("language_model", b"\xff"),
        ("language_model", b"{}"),
    ],
)
def test_damaged_descriptions_are_refused(
    data: ExecutableData, tmp_path: Path, name: str, change: dict[str, object] | bytes
) -> None:
    attachments = dict(data.attachments)
    if isinstance(change, dict):
        change = json.dumps({**json.loads(attachments[name]), **change}).encode()
    artifact.save(replace(data, attachments={**attachments, name: change}), tmp_path / "m.rlx")
    with pytest.raises(ArtifactError, match=r"cannot load .*m\.rlx: its description"):
        rl.llm.load(tmp_path / "m.rlx")


@pytest.mark.parametrize("content", [b"{}", b"\xff"])
def test_a_tokenizer_that_cannot_be_read_is_named_when_text_needs_it(
    data: ExecutableData, tmp_path: Path, content: bytes
) -> None:
    """Tokens do not; who changes a byte of the file is found when it is opened, as before."""
    artifact.save(replace(data, attachments={**data.attachments, "tokenizer": content}), tmp_path / "m.rlx")
    llm = rl.llm.load(tmp_path / "m.rlx")
    assert len(llm.engine.forward([(llm.engine.new(), [1, 2])])[0]) == 1
    with pytest.raises(ArtifactError, match="the tokenizer cannot be read"):
        llm.generate("text")


def test_a_checkpoint_with_a_tokenizer_that_cannot_be_read_is_not_compiled() -> None:
    given = checkpoint()
    assert given.tokenizer is not None
    with pytest.raises(ImportModelError, match="the tokenizer cannot be read"):
        build_checkpoint(replace(given, tokenizer=replace(given.tokenizer, json="{}")))


def test_descriptions_come_back() -> None:
    found = Description.from_json(make_attachments(checkpoint())["language_model"])
    assert found.context == 64 and found.stop == (257,) and found.special_tokens == {"bos_token": "<|start|>"}
    assert found.row_cost == ROW_COST


def test_a_row_costs_more_where_it_has_experts_of_its_own() -> None:
    costs = []
    for experts in (Experts(8, 8, 48, True), Experts(8, 4, 48, True), Experts(8, 1, 48, True)):
        said = make_attachments(checkpoint(experts=experts))["language_model"]
        costs.append(Description.from_json(said).row_cost)
    assert costs[0] == ROW_COST < costs[1] and ROW_COST < costs[2] < 1


@pytest.mark.parametrize("cost", [0.0, -0.5, float("nan"), "0.25", None, True])
def test_a_description_whose_rows_cost_no_number_is_refused(cost: Any) -> None:
    said = json.loads(make_attachments(checkpoint())["language_model"])
    with pytest.raises(ArtifactError, match="description of the language model is malformed: row_cost is"):
        Description.from_json(json.dumps({**said, "row_cost": cost}).encode())
    del said["row_cost"]  # as files before it
    assert Description.from_json(json.dumps(said).encode()).row_cost == ROW_COST


def test_checkpoints_without_a_tokenizer_and_contexts_beyond_the_models_are_refused() -> None:
    with pytest.raises(ImportModelError, match=r"tiny: there is no tokenizer; .* tokenizer\.json"):
        build_checkpoint(replace(checkpoint(), tokenizer=None))
    for wrong in (0, 65):
        with pytest.raises(
            InvalidArgumentError, match=f"max_context must be from 1 to the model's own 64, got {wrong}"
        ):
            build_checkpoint(checkpoint(), max_context=wrong)


def test_a_context_may_be_a_number_of_numpy() -> None:
    (said,) = {make_attachments(checkpoint(), context)["language_model"] for context in (32, np.int64(32))}  # type: ignore[arg-type]
    assert Description.from_json(said).context == 32


def test_a_token_to_stop_at_beyond_the_vocabulary_is_left_out() -> None:
    """As a configuration says that leaves it to its architecture's default: no reply can meet it."""
    tiny = checkpoint()
    assert tiny.tokenizer is not None
    said = make_attachments(replace(tiny, tokenizer=replace(tiny.tokenizer, stop=(128001, *tiny.tokenizer.stop))))
    assert Description.from_json(said["language_model"]).stop == tiny.tokenizer.stop
