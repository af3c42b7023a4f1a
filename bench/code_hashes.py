"""Hashes of the LLVM IR of models for several processors: shows that a change left all generated code as it was.

    python -m bench.code_hashes --out before.json          at the old commit
    python -m bench.code_hashes --against before.json      at the new one: lists what differs, exit status 1 if anything

MODEL: names of `relaxlite fetch`, ONNX or GGUF files (default: MODELS). Nothing is compiled to machine code, so any
processor's IR is made on any machine. Names of values, labels and globals do not count, their order does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from relaxlite import driver, models
from relaxlite.codegen.llvm import emit_program
from relaxlite.errors import RelaxliteError
from relaxlite.frontend.onnx import from_onnx
from relaxlite.ir.program import TensorProgram
from relaxlite.llm import compiling
from relaxlite.loading import is_checkpoint
from relaxlite.target import Target

MODELS = (
    "minilm-l6-onnx",
    "ppocrv4-rec",
    "ppocrv4-det",
    "open-nsfw-resnet50",
    "nudenet-yolov8n",
    "silero-vad-v6",
    "slanet-table",
    "smart-turn-qdq",
    "moonshine-tiny-decoder",
    "minimind2-small-int8",
    "magika",
    "smollm2-135m-instruct",
)
PROCESSORS = ("icelake-server", "sapphirerapids", "znver3", "znver4", "znver5")

_NAME = re.compile(r"(?:[%@](?!llvm\.)[\w.$-]+|^[\w.$-]+:)", re.MULTILINE)
_COMMENT = re.compile(r"\s*;[^\n]*")

Hashes = dict[str, dict[str, str]]  # by "model processor": hashes of programs by name


class _Captured(Exception):
    """Ends a compilation where code generation would begin."""

    def __init__(self, programs: Mapping[str, TensorProgram]) -> None:
        super().__init__()
        self.programs = programs


def _capture(programs: Mapping[str, TensorProgram], target: Target) -> Any:
    raise _Captured(programs)


def code_hash(text: str) -> str:
    """A hash of LLVM IR that does not depend on names or comments."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = match[0].strip("%:")
        return numbers.setdefault(name, f"%{len(numbers)}")

    return hashlib.sha256(_NAME.sub(number, _COMMENT.sub("", text)).encode()).hexdigest()[:16]


def hashes_of(path: str, cpu: str) -> dict[str, str]:
    """Hashes by program name of what one model compiles to on one processor."""
    target = Target.parse(f"llvm -mtriple=x86_64-unknown-linux-gnu -mcpu={cpu}")
    driver.compile_programs = _capture  # type: ignore[assignment]
    try:
        if is_checkpoint(path):
            compiling.build(path, target)
        else:
            driver.build(from_onnx(path), target)
    except _Captured as captured:
        return {name: code_hash(emit_program(name, p, target)) for name, p in captured.programs.items()}
    raise AssertionError("a compilation ended before code generation")


def _one(job: tuple[str, str, str]) -> tuple[str, dict[str, str]]:
    name, path, cpu = job
    return f"{name} {cpu}", hashes_of(path, cpu)


def measure(names: Sequence[str], processors: Sequence[str], workers: int) -> Hashes:
    """Hashes of all these models; one that cannot be fetched is named on stderr and left out."""
    jobs: list[tuple[str, str, str]] = []
    for name in names:
        try:
            path = name if Path(name).exists() else str(models.fetch(name, progress=False))
        except RelaxliteError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        jobs += [(name, path, cpu) for cpu in processors]
    with ProcessPoolExecutor(workers, max_tasks_per_child=1) as pool:
        return dict(pool.map(_one, jobs))


def differences(before: Hashes, after: Hashes) -> list[str]:
    """A line for each model and processor whose programs are not the same; how programs are called does not count."""
    lines = []
    for case in before.keys() | after.keys():
        old, new = before.get(case), after.get(case)
        if old is None or new is None:
            lines.append(f"{case}: only {'after' if old is None else 'before'}")
            continue
        gone, come = Counter(old.values()) - Counter(new.values()), Counter(new.values()) - Counter(old.values())
        if gone or come:
            which = [name for name, value in new.items() if value in come]
            lines.append(f"{case}: {gone.total()} of {len(old)} programs differ: {', '.join(which[:6])}")
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=MODELS)
    parser.add_argument("--processors", nargs="+", default=PROCESSORS, metavar="CPU")
    parser.add_argument("--out", metavar="FILE", help="write the hashes here")
    parser.add_argument("--against", metavar="FILE", help="compare with these")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args()
    found = measure(options.model, options.processors, options.workers)
    print(f"{sum(map(len, found.values()))} programs of {len(found)} models and processors")
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1, sort_keys=True))
    if options.against:
        before = {k: v for k, v in json.loads(Path(options.against).read_text()).items() if k in found}
        lines = differences(before, found)
        print("\n".join(lines) or "all code is the same")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
