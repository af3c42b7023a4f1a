"""python -m bench.llm: see the package."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

import bench.llm
from bench.llm import report as reports
from bench.llm.cases import GROUPS, Case, cases_of
from bench.llm.goals import LLAMA, OURS
from bench.llm.measure import Measured, ModelResult, Options, compile_artifact, measure
from bench.llm.models import NAMES, SMALL, Model, find_model
from bench.llm.worker import PEERS, peer_class
from bench.options import names_of
from relaxlite import config
from relaxlite.config import usable_cores
from relaxlite.errors import InvalidArgumentError, RelaxliteError

MODELS = ("smollm2", "llama-1.1b")
PROCESSES, TURN, LIMIT = 5, 1.0, 1800.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.llm", description=bench.llm.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", action="append", metavar="NAME", help=f"{', '.join(NAMES)}, or a GGUF file; may be given again")
    add("--only", type=names_of(GROUPS), metavar="GROUP,...", help=", ".join(GROUPS))
    add("--peers", type=names_of(list(PEERS)), metavar="PEER,...", help=", ".join(PEERS))
    add("--processes", type=int, metavar="N", help=f"of every peer (default {PROCESSES}; 1 when quick)")
    add("--turn", type=float, metavar="SECONDS", help=f"of one case in one process (default {TURN:g}; 0 when quick)")
    add("--threads", type=int, default=min(2, usable_cores()), help="default 2")
    add("--quick", action="store_true", help="one or two short cases of each group")
    add("--artifact", type=Path, metavar="FILE", help="what `relaxlite compile` has made of the one model")
    add("--compile-options", default="", metavar="TEXT", help="for `relaxlite compile`: '--cache-dtype float16'")
    add(
        "--llama-python",
        default=os.environ.get("LLAMA_PYTHON", sys.executable),
        metavar="FILE",
        help="the Python that has llama-cpp-python (default: LLAMA_PYTHON of the environment, or this one)",
    )
    add("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of one process (default %(default)g)")
    add("--output", type=Path, default=Path("bench-results"), metavar="DIR", help="for llm.json and others")
    add("--markdown", type=Path, metavar="FILE", help="where to write the tables instead of DIR/llm.md")
    args = parser.parse_args(argv)
    args.model = args.model or list(MODELS)
    if args.artifact and len(args.model) > 1:
        parser.error("--artifact is of one model: name it with --model")
    if args.processes is not None and args.processes < 1:
        parser.error(f"--processes must be at least 1, got {args.processes}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    options = Options(
        threads=args.threads,
        processes=args.processes or (1 if args.quick else PROCESSES),
        turn=args.turn if args.turn is not None else 0.0 if args.quick else TURN,
        limit=args.limit,
        is_quick=args.quick,
        pythons=dict.fromkeys(LLAMA, args.llama_python),
        compile_options=shlex.split(args.compile_options),
    )
    settings = {"threads": options.threads, "processes": options.processes, "turn": options.turn, "quick": args.quick}
    if options.compile_options:
        settings["compile options"] = args.compile_options
    report = reports.Report(settings)
    cases = cases_of(args.only or GROUPS, quick=args.quick)
    code: Any = 0
    with tqdm(unit="process") as bar:
        for name in args.model:
            try:
                model = find_model(name)
                names = args.peers or [peer for peer in PEERS if peer != "transformers" or model.parameters <= SMALL]
                bar.total = (bar.total or 0) + options.processes * len(names)
                _measure_model(report, model, cases, names, options, args.artifact, bar)
            except InvalidArgumentError as error:
                bar.close()
                print(f"bench.llm: error: {error}", file=sys.stderr)
                return 2
            except RelaxliteError as error:
                report.skipped[name] = str(error).splitlines()[0]
            except (KeyboardInterrupt, SystemExit) as stop:  # half an hour of figures is worth its tables
                report.settings["interrupted"] = f"after {bar.n} processes"
                code = stop.code if isinstance(stop, SystemExit) else 130
                break
    if code and not any(peer.answers for result in report.results for peer in result.peers.values()):
        return int(code)
    files = reports.write(report, args.output, args.markdown)
    print("\n" + report.markdown())
    print("written:", ", ".join(map(str, files)), file=sys.stderr)
    return int(code) or (0 if report.results else 1)


def _measure_model(
    report: reports.Report,
    model: Model,
    cases: Sequence[Case],
    names: Sequence[str],
    options: Options,
    artifact: Path | None,
    bar: tqdm[Any],
) -> None:
    """Adds to the report: of cases that fit into the model's context. Where relaxlite cannot compile it, the others
    are measured."""
    result = ModelResult(model, [case for case in cases if case.length <= model.context], options.threads)
    with _scratch_folder() as folder:
        problems: dict[str, str] = {}
        artifacts = {} if artifact is None else {OURS: artifact}
        for name in names:
            if not peer_class(name).reads_artifact or name in artifacts:
                continue
            bar.set_postfix_str(f"compiling {model.name} for {name}")
            try:
                artifacts[name], seconds = compile_artifact(model, folder, options.compile_options, name)
                result.compile_seconds = result.compile_seconds or seconds
            except RelaxliteError as error:
                problems[name] = str(error)
        if artifacts:
            result.artifact_bytes = next(iter(artifacts.values())).stat().st_size
        report.results.append(result)  # before it is full: see `main` of an interrupt
        measure(result, [name for name in names if name not in problems], artifacts, options, bar)
    result.peers |= {name: Measured(problem=problem) for name, problem in problems.items()}
    tqdm.write(f"{model.name}\n{reports.speed_table(result)}", file=sys.stderr)


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """On the disk of the cache folder: a compiled model may be too large for a /tmp in memory."""
    home = config.user_cache_folder() / "bench"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compiled-", dir=home) as folder:
        yield Path(folder)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers end too, and what was compiled is removed
    sys.exit(main())
