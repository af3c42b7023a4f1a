"""relaxlite eval: how well a language model predicts a text, and how far it is from another one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from relaxlite.cli.compiling import make_context
from relaxlite.driver import build
from relaxlite.errors import ImportModelError, InvalidArgumentError, RelaxliteError
from relaxlite.frontend.llm.checkpoint import Checkpoint
from relaxlite.frontend.llm.dense import build_dense
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.llm.engine import Engine, RecomputingEngine
from relaxlite.llm.evaluate import Evaluation, count_predictions, evaluate
from relaxlite.runtime import threadpool
from relaxlite.runtime.module import Executable


def execute(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    if args.threads is not None:
        threadpool.set_num_threads(args.threads)
    text = _read_text(args.text)
    checkpoint = read_checkpoint(args.model)
    tokens = _tokens(checkpoint, text, args.model)
    reference = None if args.against is None else read_checkpoint(args.against)
    if reference is not None and _tokens(reference, text, args.against) != tokens:
        raise InvalidArgumentError(f"{args.model!r} and {args.against!r} part the text into different tokens")
    if args.tokens is not None:
        tokens = tokens[: args.tokens]
    if args.quantize is not None:
        checkpoint = quantize_checkpoint(checkpoint, args.quantize)
    prefix = _prefix(checkpoint)
    contexts = [one.config.context for one in (checkpoint, reference) if one is not None]
    window = args.window if args.window is not None else min(512, *contexts)
    against = None if reference is None else _engine(args, reference)
    total = count_predictions(len(tokens), len(prefix))
    with tqdm(total=total, desc="eval", unit="token", disable=None, leave=False) as bar:
        found = evaluate(
            _engine(args, checkpoint), tokens, window=window, stride=args.stride, prefix=prefix, against=against,
            progress=bar.update,
        )  # fmt: skip
    if args.json:
        print(json.dumps({"model": args.model, "against": args.against, "quantize": args.quantize, **asdict(found)}))
    else:
        _show(args, found)
    print(f"{found.tokens} tokens in {time.perf_counter() - start:.1f} s", file=sys.stderr)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")  # line ends are part of the text
    except UnicodeDecodeError as error:
        raise RelaxliteError(f"{path}: no text in UTF-8 ({error.reason} at byte {error.start})") from error


def _tokens(checkpoint: Checkpoint, text: str, path: str) -> list[int]:
    """Of the text alone; what begins every window is `_prefix`."""
    if checkpoint.tokenizer is None:
        raise ImportModelError(f"{path}: there is no tokenizer; a folder needs tokenizer.json beside config.json")
    tokens: list[int] = Tokenizer.from_str(checkpoint.tokenizer.json).encode(text, add_special_tokens=False).ids
    return tokens


def _prefix(checkpoint: Checkpoint) -> list[int]:
    tokenizer = checkpoint.tokenizer
    return [tokenizer.bos] if tokenizer is not None and tokenizer.adds_bos and tokenizer.bos is not None else []


def _engine(args: argparse.Namespace, checkpoint: Checkpoint) -> Engine:
    """Windows are computed as a whole, so an engine without a cache does no more work than one with it."""
    context = make_context(args)
    exe = Executable(build(build_dense(checkpoint), context.target, context=context))
    return RecomputingEngine(lambda tokens: np.asarray(exe(tokens)), checkpoint.config.vocab, checkpoint.config.context)


def _show(args: argparse.Namespace, found: Evaluation) -> None:
    print(f"perplexity        {found.perplexity:.4f}  (loss {found.loss:.5f} +- {found.loss_error:.5f} nats per token)")
    print(f"next token right  {found.accuracy:.2%}")
    if found.comparison is not None:
        c = found.comparison
        print(f"against {args.against}")
        print(f"  its perplexity  {c.perplexity:.4f}  (ratio {found.perplexity / c.perplexity:.5f})")
        print(f"  KL divergence   {c.kl_divergence:.6f} +- {c.kl_divergence_error:.6f} nats")
        print(f"  same top token  {c.top1_agreement:.2%}")
    print(f"{found.tokens} tokens, windows of {found.window}, {found.stride} apart")
