"""python -m bench.cpu: see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

import bench.cpu
from bench.cpu import report as reports
from bench.cpu.cases import GROUPS, SWEEP_PEERS, Options, Workload, minilm_case, sweep_cases
from bench.cpu.measure import Team, measure, sweep
from bench.cpu.worker import PEERS
from bench.options import names_of
from relaxlite import models
from relaxlite.config import usable_cores
from relaxlite.errors import FetchError

SWEEP_SHAPES = 64


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu", description=bench.cpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=names_of([*GROUPS, "sweep"]), metavar="GROUP,...", help=", ".join([*GROUPS, "sweep"])
    )
    parser.add_argument("--peers", type=names_of(list(PEERS)), metavar="PEER,...", help=", ".join(PEERS))
    parser.add_argument("--match", default="", metavar="TEXT", help="only models whose name contains this")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of every peer (default 5; 2 when quick)")
    parser.add_argument("--turn", type=float, metavar="SECONDS", help="of one turn (default 0.3; 0.1 for kernels)")
    parser.add_argument("--threads", type=int, default=min(2, usable_cores()), help="default 2")
    parser.add_argument("--quick", action="store_true", help="one or two sizes of each group, short turns")
    parser.add_argument(
        "--output", type=Path, default=Path("bench-results"), metavar="DIR", help="for cpu.json and others"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where to write the tables instead of DIR/cpu.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rounds = args.rounds or (2 if args.quick else 5)
    chosen = args.peers or list(PEERS)
    groups = args.only or [*GROUPS, "sweep"]
    settings = {"threads": args.threads, "rounds": rounds, "quick": args.quick, "groups": " ".join(groups)}
    with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder, Team(chosen) as team, tqdm(unit="case") as bar:
        options = Options(args.threads, args.quick, Path(folder))
        report = reports.Report(settings, team.versions, team.absent)
        for group in groups:
            try:
                for workload in _workloads(group, options, args.match):
                    turn = args.turn or (0.02 if args.quick else 0.1 if workload.is_kernel else 0.3)
                    report.results += measure(workload, team, rounds=rounds, turn_seconds=turn, bar=bar)
                    _show(report.results[-len(workload.cases) :])
                if group == "sweep":
                    _sweep(report, options, chosen, team, rounds, bar)
            except FetchError as error:
                report.skipped[group] = str(error).splitlines()[0]
        files = reports.write(report, args.output, args.markdown)
    print("\n" + report.markdown())
    print("written:", ", ".join(map(str, files)), file=sys.stderr)
    return 0


def _workloads(group: str, options: Options, match: str) -> Iterator[Workload]:
    for workload in GROUPS[group](options) if group in GROUPS else ():
        if match in workload.name:
            yield workload


def _show(results: Sequence[reports.Result]) -> None:
    tqdm.write(reports.group_table(results), file=sys.stderr)


def _sweep(
    report: reports.Report, options: Options, chosen: Sequence[str], team: Team, rounds: int, bar: tqdm[None]
) -> None:
    """Every peer finds caches of its own, empty in the first round, whatever was measured before."""
    path = models.fetch("minilm-l6-onnx", progress=False)
    cases = sweep_cases(4 if options.quick else SWEEP_SHAPES)
    cache = options.folder / "caches"
    one = (minilm_case(1, 16),)
    workload = Workload("sweep", "minilm-l6", path, one, SWEEP_PEERS, options.threads, "bert", cache=cache)
    names = [name for name in SWEEP_PEERS if name in chosen and team.worker(name, options.threads) is not None]
    bar.set_postfix_str(f"{len(cases)} new shapes")
    report.sweep = sweep(workload, cases, names, rounds=min(rounds, 3), bar=bar)
    report.sweep_shapes = len(cases)


if __name__ == "__main__":
    sys.exit(main())
