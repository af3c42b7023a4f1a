"""relaxlite generate: continue a text with a language model and stream the result."""

from __future__ import annotations

import argparse
import sys

from relaxlite.cli.language import argument_text, check_stdin, generation_options, open_language_model
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.llm.generation import Result
from relaxlite.llm.tokenizer import lone_surrogate


def execute(args: argparse.Namespace) -> None:
    prompts = [argument_text(prompt) for prompt in args.prompt] or [_stdin_prompt()]
    if args.chat and len(prompts) > 1:
        raise InvalidArgumentError("--chat takes one prompt")
    llm = open_language_model(args)
    if args.chat and not llm.description.chat_template:
        raise InvalidArgumentError(f"{llm.description.name} has no chat template; leave out --chat")
    options = generation_options(args)
    if len(prompts) > 1:
        results = llm.generate(prompts, **options)
        for k, result in enumerate(results):
            print(f"{'' if k == 0 else chr(10)}[{k}] {prompts[k]}{result.text}")
    else:
        if args.chat:
            pieces = llm.chat([{"role": "user", "content": prompts[0]}], stream=True, **options)
        else:
            pieces = llm.generate(prompts[0], stream=True, **options)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        results = pieces.results()
    if args.stats:
        for result in results:
            print(stats_text(result), file=sys.stderr)


def _stdin_prompt() -> str:
    check_stdin("generate")
    text = sys.stdin.read()
    if not text:
        raise RelaxliteError("standard input is empty: there is no prompt")
    if lone_surrogate(text):
        raise RelaxliteError("standard input is no valid text in UTF-8, or what else the locale says")
    return text


def stats_text(result: Result) -> str:
    """Return a line with token counts, speeds and the reason of the end of a reply."""
    usage, speed = result.usage, result.speed
    reused = f" ({usage.reused_tokens} from the cache)" if usage.reused_tokens else ""
    accepted_drafts = (
        f" ({usage.accepted_tokens} of {usage.drafted_tokens} guesses were right)" if usage.drafted_tokens else ""
    )
    forgotten = f" (the oldest {usage.forgotten_tokens} tokens are forgotten)" if usage.forgotten_tokens else ""
    return (
        f"prompt: {usage.prompt_tokens} tokens{reused}, {speed.prefill_tokens_per_s:.1f} tokens/s, first token after "
        f"{speed.first_token_s:.2f} s; reply: {usage.new_tokens} tokens, {speed.decode_tokens_per_s:.1f} tokens/s"
        f"{accepted_drafts}{forgotten}; ended by: {result.finish_reason}"
    )
