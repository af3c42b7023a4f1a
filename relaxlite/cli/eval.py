"""relaxlite eval: measure a language model's perplexity on a text, and its KL divergence from another model."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from relaxlite.cli.language import open_language_model
from relaxlite.cli.opening import is_compiled
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.llm.evaluate import Evaluation, count_predictions, evaluate


def execute(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    text = _read_text(args.text)
    reference_args = None if args.against is None else _reference_options(args)
    llm = open_language_model(args)
    tokens = llm.tokenizer.encode(text, marks=False)
    reference = None if reference_args is None else open_language_model(reference_args)
    if reference is not None and reference.tokenizer.encode(text, marks=False) != tokens:
        raise InvalidArgumentError(f"{args.model!r} and {args.against!r} part the text into different tokens")
    if args.tokens is not None:
        tokens = tokens[: args.tokens]
    prefix = llm.tokenizer.start
    contexts = [one.context for one in (llm, reference) if one is not None]
    window = args.window if args.window is not None else min(512, *contexts)
    total = count_predictions(len(tokens), len(prefix))
    with tqdm(total=total, desc="eval", unit="token", disable=None, leave=False) as bar:
        evaluation = evaluate(
            llm.engine, tokens, window=window, stride=args.stride, prefix=prefix,
            against=None if reference is None else reference.engine, progress=bar.update,
        )  # fmt: skip
    if args.json:
        options = {name: getattr(args, name) for name in ("model", "against", "quantize", "cache_dtype", "precision")}
        print(json.dumps({**options, **_without_infinities(asdict(evaluation))}, allow_nan=False))
    else:
        _show(args, evaluation)
    print(f"{evaluation.tokens} tokens in {time.perf_counter() - start:.1f} s", file=sys.stderr)


def _without_infinities(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: _without_infinities(figure) for name, figure in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reference_options(args: argparse.Namespace) -> argparse.Namespace:
    """Return options to open the reference model without those of compilation, which are for the measured model."""
    target = None if is_compiled(args.against) else args.target
    overrides = dict.fromkeys(("quantize", "cache_dtype", "max_context", "precision")) | {"target": target}
    return argparse.Namespace(**{**vars(args), **overrides, "model": args.against})


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_bytes().decode("utf-8")  # line ends are part of the text
    except UnicodeDecodeError as error:
        raise RelaxliteError(f"{path}: no text in UTF-8 ({error.reason} at byte {error.start})") from error
    if not text:
        raise RelaxliteError(f"{path}: it is empty")
    return text


def _show(args: argparse.Namespace, result: Evaluation) -> None:
    print(
        f"perplexity        {result.perplexity:.4f}  (loss {result.loss:.5f} +- {result.loss_error:.5f} nats per token)"
    )
    print(f"next token right  {result.accuracy:.2%}")
    if result.comparison is not None:
        c = result.comparison
        print(f"against {args.against}")
        print(f"  its perplexity  {c.perplexity:.4f}  (ratio {result.perplexity / c.perplexity:.5f})")
        print(f"  KL divergence   {c.kl_divergence:.6f} +- {c.kl_divergence_error:.6f} nats")
        print(f"  same top token  {c.top1_agreement:.2%}")
    print(f"{result.tokens} tokens, windows of {result.window}, {result.stride} apart")
