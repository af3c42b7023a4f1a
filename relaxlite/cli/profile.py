"""relaxlite profile: measure the time of each kernel of a model, compared with the machine's roofline."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from relaxlite.cli.inputs import make_inputs
from relaxlite.cli.opening import open_model
from relaxlite.runtime.roofline import MachineLimits, load_limits


def execute(args: argparse.Namespace) -> None:
    exe = open_model(args)
    _, shapes = args.shapes
    inputs = make_inputs(
        exe.inputs, files=args.input, shapes=shapes, ranges=args.range, seed=args.seed, shape_option="--shapes"
    )
    limits = _limits(args)
    profile = exe.profile(inputs, runs=args.runs, limits=limits)
    print(profile, end="")
    if args.html:
        profile.html(args.html)
        print(f"-> {args.html}")
    if args.trace:
        profile.chrome_trace(args.trace)
        print(f"-> {args.trace}")
    if args.json:
        Path(args.json).write_text(json.dumps(profile.to_json(), indent=1))
        print(f"-> {args.json}")


def _limits(args: argparse.Namespace) -> MachineLimits:
    """Return the machine's limits, measured now if they have not been; measuring imports the compiler."""
    known = None if args.measure else load_limits()
    if known is not None:
        return known
    from relaxlite.machine import limits

    print("measuring what this machine can do, once", file=sys.stderr)
    return limits(fresh=args.measure)
