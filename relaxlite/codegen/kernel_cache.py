"""On-disk cache of compiled kernels and of pass results for programs, shared between processes.

    FOLDER/ab/cdef...    one entry: MAGIC, 16 bytes of blake2b over key and content, content
    FOLDER/size          approximate size of all entries in bytes: the last count plus all writes since

A key is a hash of everything that the content depends on (64 hexadecimal digits), so entries never change: two
processes that write one entry write the same bytes. Writes are atomic (a temporary file is renamed); a damaged entry
counts as missing. Eviction is least recently used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from relaxlite import config
from relaxlite.errors import NoFolderError
from relaxlite.records import dataclass

MAGIC = b"RLK1"
_DIGEST_BYTES = 16
_TEMPORARY = ".tmp"
_ABANDONED_SECONDS = 3600.0  # a temporary file this old belongs to no running process
_FILL_AFTER_EVICTION = 0.8  # of the limit, so that not every compilation evicts

PACKAGE = Path(__file__).resolve().parents[1]

_warned: set[Path | None] = set()


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Number of entries of a cache, and their size in bytes."""

    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Cache in `folder` of about `limit` bytes at most. Safe for any number of processes and threads."""

    folder: Path
    limit: int

    def get(self, key: str) -> bytes | None:
        """Content of an entry; None where it is missing or damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + _DIGEST_BYTES
        content = data[start:]
        if data[:start] != MAGIC + _digest(key, content):
            return None
        with contextlib.suppress(OSError):  # a read-only folder is fine
            os.utime(path)
        return content

    def put(self, entries: Mapping[str, bytes]) -> None:
        """Store contents by key. A folder that cannot be written causes one RuntimeWarning, no error."""
        written = 0
        try:
            for key, content in entries.items():
                written += self._write(self._path(key), MAGIC + _digest(key, content) + content)
            if written:
                self._count(written)
        except OSError as error:
            _warn_once(self.folder, f"in {self.folder} ({error.strerror or error})")

    def size(self) -> CacheSize:
        """Count entries and bytes on disk."""
        sizes = [size for _, size, _ in self._entries()]
        return CacheSize(len(sizes), sum(sizes))

    def clear(self) -> CacheSize:
        """Remove all entries, and no other file of the folder; returns what was removed."""
        entries = list(self._entries())
        for _, _, path in entries:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._remove_abandoned(age=0)
        with contextlib.suppress(OSError):  # the file is missing, or the folder is read-only
            (self.folder / "size").unlink()
        for shard in self._shards():
            with contextlib.suppress(OSError):  # another process has just stored an entry in it
                shard.rmdir()
        return CacheSize(len(entries), sum(size for _, size, _ in entries))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]

    def _write(self, path: Path, data: bytes) -> int:
        """Write a file atomically; returns its size in bytes."""
        if not self.folder.is_dir():
            self.folder.mkdir(
                mode=0o700, parents=True, exist_ok=True
            )  # private to the user, as code from here is executed
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except PermissionError:
            if not path.exists():  # else, on Windows, another process has the same entry open
                raise
        finally:
            temporary.unlink(missing_ok=True)
        return len(data)

    def _count(self, written: int) -> None:
        """Add `written` bytes to the size file; above the limit, recount and evict."""
        file = self.folder / "size"
        try:
            total = int(file.read_text()) + written
        except (OSError, ValueError):
            total = self.limit + 1  # unknown: recount
        if total > self.limit:
            total = self._evict()
        self._write(file, str(total).encode())

    def _evict(self) -> int:
        """Remove the least recently used entries down to _FILL_AFTER_EVICTION; returns the remaining size in bytes."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total > self.limit:
            for _, size, path in entries:
                if total <= self.limit * _FILL_AFTER_EVICTION:
                    break
                with contextlib.suppress(OSError):  # another process has removed the file, or has it open (Windows)
                    path.unlink()
                total -= size
        self._remove_abandoned(age=_ABANDONED_SECONDS)
        return total

    def _shards(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (item for item in self.folder.iterdir() if re.fullmatch("[0-9a-f]{2}", item.name))

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, size in bytes, path) of each entry."""
        for shard in self._shards():
            with contextlib.suppress(OSError), os.scandir(shard) as items:
                for item in items:
                    if re.fullmatch("[0-9a-f]{62}", item.name):
                        with contextlib.suppress(OSError):  # another process has removed the file
                            status = item.stat()
                            yield status.st_mtime, status.st_size, Path(item.path)

    def _remove_abandoned(self, *, age: float) -> None:
        """Remove temporary files of processes that were killed during a write, from `age` seconds on."""
        for folder in (self.folder, *self._shards()):
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    if path.name.endswith(_TEMPORARY) and (folder != self.folder or path.name.startswith("size.")):
                        with contextlib.suppress(OSError):  # renamed or removed by another process
                            if time.time() - path.stat().st_mtime >= age:
                                path.unlink()


@cache
def sources_key(pattern: str) -> str:
    """Hash of the source files of this package that match a glob pattern, such as "passes/**/*.py"."""
    texts = [path.read_bytes() for path in sorted(PACKAGE.glob(pattern))]
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()


def open_cache() -> KernelCache | None:
    """Open the cache that the knobs `kernel_cache` and `kernel_cache_mb` configure; None where it is off or has no
    folder."""
    limit = config.get("kernel_cache_mb") * 1_000_000
    try:
        return KernelCache(cache_folder(), limit) if limit else None
    except NoFolderError as error:
        _warn_once(None, f"({str(error).partition(';')[0]})")
        return None


def cache_folder() -> Path:
    """Folder of compiled kernels: RELAXLITE_KERNEL_CACHE, or this platform's cache folder; NoFolderError without
    either."""
    return config.cache_folder("kernel_cache", "kernels")


def _warn_once(folder: Path | None, why: str) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    warnings.warn(
        f"compiled kernels cannot be kept {why}, so each process compiles them again; set RELAXLITE_KERNEL_CACHE to a "
        "folder that can be written, or RELAXLITE_KERNEL_CACHE_MB to 0",
        RuntimeWarning,
        stacklevel=3,
    )


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=key.encode()[:64]).digest()
