"""relaxlite fetch: download models by name and print their paths."""

from __future__ import annotations

import argparse
from pathlib import Path

from relaxlite import models
from relaxlite.cli.sizes import bytes_text


def execute(args: argparse.Namespace) -> None:
    for name in args.name:
        print(models.fetch(name, Path(args.to) if args.to else None), flush=True)
    if not args.name:
        entries = models.known_models()
        width = max(len(entry.name) for entry in entries)
        for entry in entries:
            size = bytes_text(entry.model.bytes)
            print(f"{entry.name:<{width}}  {size:>8}  {entry.registry:<5} {entry.description}")
