"""Loading of language models by path: compiled files are loaded, checkpoints are compiled and cached on disk."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from functools import partial
from typing import Any

from relaxlite.cli.opening import checkpoint_options, compile_cached, is_checkpoint, is_compiled
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.llm.loading import load as load_any
from relaxlite.llm.model import LOOKUP, LanguageModel, load
from relaxlite.llm.tokenizer import lone_surrogate
from relaxlite.model_cache import LANGUAGE_MODEL
from relaxlite.runtime import threadpool
from relaxlite.runtime.executable import ExecutableData

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def open_language_model(args: argparse.Namespace) -> LanguageModel:
    """Load the language model `args.model`; set the number of threads to `args.threads`.

    Raises RelaxliteError for other files, InvalidArgumentError for options that a compiled file does not take.
    """
    if args.threads is not None:
        threadpool.set_num_threads(args.threads)  # before a compilation, which may take long
    if is_checkpoint(args.model):
        return LanguageModel.of(compile_cached(args, LANGUAGE_MODEL, partial(_compile, args)))
    if not is_compiled(args.model):
        if os.path.isfile(args.model) and not os.path.getsize(args.model):
            raise RelaxliteError(f"{args.model!r} is empty")
        raise RelaxliteError(
            f"{args.model!r} is no language model: give a file made by `relaxlite compile`, a GGUF file or a folder "
            "with config.json"
        )
    if problem := checkpoint_options(args, "target", "precision"):
        raise InvalidArgumentError(f"{problem}, and {args.model!r} is compiled already")
    return load(args.model)


def check_stdin(command: str) -> None:
    """Raise InvalidArgumentError if there is no standard input; set its encoding, with undecodable bytes kept."""
    if sys.stdin is None:
        raise InvalidArgumentError(f"there is no standard input; `relaxlite {command}` reads what it is not given")
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"  # as in the C locale
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="surrogateescape")


def argument_text(argument: str) -> str:
    """Decode a command-line argument as UTF-8 if the locale, such as C, could not decode it.

    Python gives undecodable bytes of arguments as lone surrogates.
    """
    if not lone_surrogate(argument):
        return argument
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


def _compile(args: argparse.Namespace) -> ExecutableData:
    from relaxlite.cli.compiling_llm import compile_checkpoint

    return compile_checkpoint(args)


def _draft(name: str) -> LanguageModel | str | None:
    return name if name == LOOKUP else None if name == "none" else load_any(name)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments for `LanguageModel.generate` and `chat`; None: the model's default."""
    return {
        "max_new_tokens": args.max_tokens,
        "stop": tuple(map(argument_text, args.stop)),
        "overflow": args.overflow,
        "draft": _draft(args.draft),
        **{name: getattr(args, name) for name in _SAMPLING},
    }
