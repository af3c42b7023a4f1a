"""relaxlite demo: compile a small language model and ask it questions; --pictures: see demo_pictures.py."""

from __future__ import annotations

import argparse
import time
from functools import partial

from relaxlite import models
from relaxlite.cli.compiling_llm import compile_checkpoint
from relaxlite.cli.generate import stats_text
from relaxlite.cli.language import argument_text
from relaxlite.cli.opening import cached_file, compile_cached
from relaxlite.cli.sizes import bytes_text
from relaxlite.llm.model import LanguageModel
from relaxlite.model_cache import LANGUAGE_MODEL

MODEL = "smollm2-135m-instruct"
QUESTIONS = ("What is the capital of France?", "And what is it known for? Answer in one sentence.")
MAX_TOKENS = 64


def execute(args: argparse.Namespace) -> None:
    if args.pictures or args.image or args.save_pictures:
        from relaxlite.cli.demo_pictures import execute as read_pictures

        return read_pictures(args)
    questions = (argument_text(" ".join(args.text)),) if args.text else QUESTIONS
    print(f"1. Fetch {MODEL}, a language model that chats", flush=True)
    path = models.fetch(MODEL)
    print(f"   {path}, {bytes_text(path.stat().st_size)}\n")
    print("2. Compile it, once, for every batch and length, into one file", flush=True)
    start = time.perf_counter()
    defaults = dict.fromkeys(("max_context", "cache_dtype", "quantize", "target", "precision"))
    options = argparse.Namespace(**{**vars(args), **defaults, "model": str(path)})
    data = compile_cached(options, LANGUAGE_MODEL, partial(compile_checkpoint, options))
    seconds = time.perf_counter() - start
    compiled = cached_file(options, LANGUAGE_MODEL)
    where = f"{compiled}, {bytes_text(compiled.stat().st_size)}, " if compiled else ""
    print(f"   {where}{len(data.kernels)} kernels, in {seconds:.1f} s")
    start = time.perf_counter()
    llm = LanguageModel.of(data)
    print(f"   loaded in {time.perf_counter() - start:.2f} s; a context of {llm.context} tokens\n")
    print("3. Ask it")
    _ask(llm, questions)
    print(f'\nTalk with it: relaxlite chat "{compiled or path}"')
    return None


def _ask(llm: LanguageModel, questions: tuple[str, ...]) -> None:
    """Run a conversation with greedy, so deterministic, replies."""
    messages = []
    for question in questions:
        print(f"\n   > {question}\n   ", end="", flush=True)
        messages.append({"role": "user", "content": question})
        stream = llm.chat(messages, max_new_tokens=MAX_TOKENS, temperature=0, stream=True)
        for piece in stream:
            print(piece.replace("\n", "\n   "), end="", flush=True)
        result = stream.result()
        messages.append({"role": "assistant", "content": result.text})
        print(f"\n   ({stats_text(result)})")
