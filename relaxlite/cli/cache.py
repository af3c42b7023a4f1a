"""relaxlite cache: what is kept on disk of compiled kernels and language models; removes it."""

from __future__ import annotations

import argparse

from relaxlite import config
from relaxlite.cli import compiled_models
from relaxlite.cli.compiled_models import Kept
from relaxlite.cli.sizes import bytes_text
from relaxlite.codegen.kernel_cache import KernelCache, cache_folder


def execute(args: argparse.Namespace) -> None:
    limit = config.get("kernel_cache_mb") * 1_000_000
    cache = KernelCache(cache_folder(), limit)
    if args.action == "clear":
        kernels, models = cache.clear(), compiled_models.clear()
        print(f"removed {kernels.entries} kernels, {bytes_text(kernels.bytes)}, from {cache.folder}")
        print(f"removed {_all(models)}, from {compiled_models.folder()}")
        return
    found = cache.size()
    print(f"folder   {cache.folder}")
    print(f"kernels  {found.entries}")
    print(f"size     {bytes_text(found.bytes)}")
    print(f"limit    {bytes_text(limit) if limit else 'switched off'}")
    models = compiled_models.kept()
    print(f"\nfolder   {compiled_models.folder()}")
    print(f"models   {_all(models)}")
    for model in models:
        print(f"{bytes_text(model.bytes):>17}  {model.name}")


def _all(models: list[Kept]) -> str:
    plural = "" if len(models) == 1 else "s"
    return f"{len(models)} compiled language model{plural}, {bytes_text(sum(model.bytes for model in models))}"
