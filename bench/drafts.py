"""How much faster replies are with guesses that a step checks along with its token (relaxlite/llm/drafts.py).

    python -m bench.drafts [--model FILE] [--rounds 5] [--tokens 256] [--threads 2] [--output FILE]

SmolLM2-135M-Instruct (or another model with a chat template) answers a few requests, each with and without guesses, in
turns; the tokens have to be the same. Speeds are those of the reply, behind its first token: medians of the rounds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import relaxlite as rl
from relaxlite import models

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"


def requests() -> dict[str, tuple[str, dict[str, Any]]]:
    """What is asked for, and how tokens are chosen."""
    text = (ROOT / "README.md").read_text()[:1500]
    code = (ROOT / "relaxlite/llm/sampling.py").read_text()[:2500]
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
    return {
        "a story, sampled": ("Write a short story about a fox and a lighthouse.", sampled),
        "an explanation": ("Explain how photosynthesis works.", {}),
        "a summary, sampled": (f"Summarize:\n\n{text}", sampled),
        "a text again": (f"Repeat the following text word by word:\n\n{text}", {}),
        "code, changed": (f"Rewrite this Python code with type hints removed:\n\n{code}", {}),
    }


def measure(model: str | Path, rounds: int, tokens: int, threads: int) -> str:
    """A table in Markdown."""
    llm = rl.llm.load(model, threads=threads)
    lines = [
        "| reply | new tokens | guessed | right | tokens/s | with guesses |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (question, options) in requests().items():
        found: dict[str | None, list[Any]] = {None: [], "lookup": []}
        for _ in range(rounds):
            for draft, results in found.items():
                llm.forget()
                chat = [{"role": "user", "content": question}]
                results.append(llm.chat(chat, max_new_tokens=tokens, draft=draft, **options))
        plain, guessed = found[None], found["lookup"]
        if len({result.tokens for result in plain + guessed}) > 1:
            raise SystemExit(f"{name}: the replies differ")
        before, after = (median(r.speed.decode_tokens_per_s for r in results) for results in (plain, guessed))
        usage = guessed[0].usage
        lines.append(
            f"| {name} | {usage.new_tokens} | {usage.drafted_tokens} | {usage.accepted_tokens} | {before:.0f} | "
            f"{after:.0f} ({after / before:.2f}x) |"
        )
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file, a folder or a compiled model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="where the table goes too")
    args = parser.parse_args()
    table = measure(args.model or models.fetch(MODEL), args.rounds, args.tokens, args.threads)
    print(table)
    if args.output is not None:
        args.output.write_text(table + "\n")


if __name__ == "__main__":
    main()
