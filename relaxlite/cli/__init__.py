"""The command line: `relaxlite compile | run | inspect | opt | fetch | bench | demo`.

Exit codes: 0 success; 1 a model, file or input is at fault (one line on stderr says what); 2 wrong usage;
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from relaxlite.cli import bench, compile_, demo, fetch, inspect, opt, run
from relaxlite.errors import RelaxliteError
from relaxlite.version import __version__

COMMANDS = (compile_, run, inspect, opt, fetch, bench, demo)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relaxlite", description="Compile and run models with dynamic shapes.")
    parser.add_argument("--version", action="version", version=f"relaxlite {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in COMMANDS:
        summary = (module.__doc__ or "").strip()
        command = commands.add_parser(
            module.NAME,
            help=summary.splitlines()[0],
            description=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("-v", "--verbose", action="store_true", help="show the time of each pass, and tracebacks")
        command.set_defaults(execute=module.execute)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.execute(args) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has had enough
        sys.stderr.close()
        return 0
    except (RelaxliteError, OSError) as error:
        if args.verbose:
            traceback.print_exc()
        print(f"relaxlite {args.command}: {error}", file=sys.stderr)
        return 1
