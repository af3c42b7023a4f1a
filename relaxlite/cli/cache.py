"""relaxlite cache: show or clear the disk caches of kernels, scheduled programs and models."""

from __future__ import annotations

import argparse

from relaxlite import config, model_cache
from relaxlite.cli.sizes import bytes_text
from relaxlite.codegen.kernel_cache import KernelCache, cache_folder
from relaxlite.model_cache import CachedModel


def execute(args: argparse.Namespace) -> None:
    limit = config.get("kernel_cache_mb") * 1_000_000
    cache = KernelCache(cache_folder(), limit)
    if args.action == "clear":
        kernels, models = cache.clear(), model_cache.clear()
        print(f"removed {kernels.entries} entries, {bytes_text(kernels.bytes)}, from {cache.folder}")
        print(f"removed {_count_text(models)}, from {model_cache.folder()}")
        return
    usage = cache.size()
    print(f"folder   {cache.folder}")
    print(f"entries  {usage.entries} (compiled kernels, scheduled programs)")
    print(f"size     {bytes_text(usage.bytes)}")
    print(f"limit    {bytes_text(limit) if limit else 'switched off'}")
    models = model_cache.cached_models()
    print(f"\nfolder   {model_cache.folder()}")
    print(f"models   {_count_text(models)}")
    model_limit = config.get("model_cache_mb") * 1_000_000
    print(f"limit    {bytes_text(model_limit) if model_limit else 'switched off'}")
    for model in models:
        print(f"{bytes_text(model.bytes):>17}  {model.name}")


def _count_text(models: list[CachedModel]) -> str:
    plural = "" if len(models) == 1 else "s"
    return f"{len(models)} compiled model{plural}, {bytes_text(sum(model.bytes for model in models))}"
