"""relaxlite cache: what compiled kernels are kept on disk; removes them."""

from __future__ import annotations

import argparse

from relaxlite import config
from relaxlite.cli.sizes import bytes_text
from relaxlite.codegen.kernel_cache import KernelCache, cache_folder


def execute(args: argparse.Namespace) -> None:
    limit = config.get("kernel_cache_mb") * 1_000_000
    cache = KernelCache(cache_folder(), limit)
    if args.action == "clear":
        found = cache.clear()
        print(f"removed {found.entries} kernels, {bytes_text(found.bytes)}, from {cache.folder}")
        return
    found = cache.size()
    print(f"folder   {cache.folder}")
    print(f"kernels  {found.entries}")
    print(f"size     {bytes_text(found.bytes)}")
    print(f"limit    {bytes_text(limit) if limit else 'switched off'}")
