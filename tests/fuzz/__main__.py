"""python -m tests.fuzz: see tests/fuzz/__init__.py."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

from tests.fuzz.runner import Progress, Tally, prepare, run_many, write_failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random modules against the interpreter.")
    parser.add_argument("--seed", type=int, help="the first seed (default: from the clock)")
    parser.add_argument("--count", type=int, help="how many modules (default: 1000 without --minutes)")
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one per core)"
    )
    parser.add_argument("--folder", type=Path, default=Path("fuzz-failures"), help="where failures are kept")
    parser.add_argument("--no-shrink", action="store_true", help="keep failures as they were found")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="run kept cases again")
    parser.add_argument("--print", action="store_true", help="show the module of --seed, and run nothing")
    args = parser.parse_args()
    if args.replay:
        return replay(args.replay)
    if args.print:
        from tests.fuzz.case import random_case

        print(random_case(args.seed or 0))
        return 0
    return fuzz(args)


def fuzz(args: argparse.Namespace) -> int:
    first = args.seed if args.seed is not None else int(time.time()) * 1000
    count = args.count if args.count or args.minutes else 1000
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    tally = Tally(count, deadline)

    def found(seed: int, kind: str, text: str) -> None:
        print(f"\nseed {seed}: {kind}\n  {text[:600]}", flush=True)
        try:
            print(f"  kept in {keep(args, seed, kind, text)}", flush=True)
        except Exception as error:
            print(f"  cannot be kept: {type(error).__name__}: {error}")

    print(f"seeds from {first}, {args.jobs} processes", flush=True)
    run_many(itertools.count(first), args.jobs, tally, found, Progress())
    print(f"\n{tally.line()}; seeds {first} to {first + tally.done - 1}, {time.monotonic() - tally.started:.0f} s")
    for kind, seeds in sorted(tally.kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):6d}  {kind}  seeds {', '.join(map(str, seeds[:6]))}")
    return 1 if tally.kinds else 0


def keep(args: argparse.Namespace, seed: int, kind: str, text: str) -> Path:
    """The failure as a file: at once as it is, then in place of it its least form."""
    from tests.fuzz.case import random_case

    case = random_case(seed)
    path = write_failure(args.folder, seed, kind, text, str(case))
    if args.no_shrink or kind in ("process died", "hangs"):
        return path
    prepare()
    from tests.fuzz.shrink import shrunk

    small, problem = shrunk(case, kind)
    return write_failure(args.folder, seed, kind, problem.text if problem else text, str(small))


def replay(paths: list[Path]) -> int:
    from tests.fuzz.case import check, parse_case

    prepare()
    failed = 0
    for path in paths:
        problem = check(parse_case(path.read_text()))
        failed += problem is not None
        print(f"{path}: {'as it should be' if problem is None else problem.kind + chr(10) + problem.text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
