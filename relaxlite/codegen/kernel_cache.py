"""Compiled kernels on disk, and what passes made of programs, so that the next process need not make them again.

    FOLDER/ab/cdef...    one entry: MAGIC, 16 bytes of blake2b over key and content, content
    FOLDER/size          about how many bytes the entries have: what was found when they were last counted and what
                         has been written since

Keys are 64 hexadecimal digits that say everything that the content depends on, so that an entry is never replaced by
another: two processes that write one entry write the same bytes. An entry comes into being in one step (a temporary
file that is renamed), one that is damaged counts as missing. When the entries are more than the limit, those that were
not used for the longest time go.
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
_ROOM = 0.8  # of the limit is left full when entries are removed, so that it is not done at every compilation

PACKAGE = Path(__file__).resolve().parents[1]

_warned: set[Path | None] = set()


@dataclass(frozen=True, slots=True)
class CacheSize:
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Entries below `folder`, in all about `limit` bytes at most. Any number of processes and threads may use it."""

    folder: Path
    limit: int

    def get(self, key: str) -> bytes | None:
        """The content of an entry; None when there is none that is whole."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + _DIGEST_BYTES
        content = data[start:]
        if data[:start] != MAGIC + _digest(key, content):
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read serves too
            os.utime(path)
        return content

    def put(self, entries: Mapping[str, bytes]) -> None:
        """Keep contents by key, if that can be done: a folder that cannot be written is warned of, once."""
        written = 0
        try:
            for key, content in entries.items():
                written += self._write(self._path(key), MAGIC + _digest(key, content) + content)
            if written:
                self._count(written)
        except OSError as error:
            _warn_once(self.folder, f"in {self.folder} ({error.strerror or error})")

    def size(self) -> CacheSize:
        """Counted now."""
        sizes = [size for _, size, _ in self._entries()]
        return CacheSize(len(sizes), sum(sizes))

    def clear(self) -> CacheSize:
        """Remove every entry, and nothing else that may lie in the folder; says what that was."""
        result = list(self._entries())
        for _, _, path in result:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._remove_abandoned(age=0)
        with contextlib.suppress(OSError):  # there is none, or the folder may only be read
            (self.folder / "size").unlink()
        for shard in self._shards():
            with contextlib.suppress(OSError):  # another process has just put an entry there
                shard.rmdir()
        return CacheSize(len(result), sum(size for _, size, _ in result))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]

    def _write(self, path: Path, data: bytes) -> int:
        """Write a file in one step; how many bytes it has."""
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # code from here is run: it is the user's own
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except PermissionError:
            if not path.exists():  # else, on Windows, another process is reading the same entry, or writing it
                raise
        finally:
            temporary.unlink(missing_ok=True)
        return len(data)

    def _count(self, written: int) -> None:
        """Add to the known size; where it exceeds the limit, count, and remove what was not used for longest."""
        file = self.folder / "size"
        try:
            total = int(file.read_text()) + written
        except (OSError, ValueError):
            total = self.limit + 1  # not known: count
        if total > self.limit:
            total = self._evict()
        self._write(file, str(total).encode())

    def _evict(self) -> int:
        """Remove the entries that were not used for longest until there is room; the size of the others."""
        result = sorted(self._entries())
        total = sum(size for _, size, _ in result)
        if total > self.limit:
            for _, size, path in result:
                if total <= self.limit * _ROOM:
                    break
                with contextlib.suppress(OSError):  # another process has been faster, or has it open (Windows)
                    path.unlink()
                total -= size
        self._remove_abandoned(age=_ABANDONED_SECONDS)
        return total

    def _shards(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (item for item in self.folder.iterdir() if re.fullmatch("[0-9a-f]{2}", item.name))

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """When an entry was last used, its bytes, where it is."""
        for shard in self._shards():
            with contextlib.suppress(OSError), os.scandir(shard) as items:
                for item in items:
                    if re.fullmatch("[0-9a-f]{62}", item.name):
                        with contextlib.suppress(OSError):  # removed meanwhile
                            status = item.stat()
                            yield status.st_mtime, status.st_size, Path(item.path)

    def _remove_abandoned(self, *, age: float) -> None:
        """Temporary files of processes that were killed while they wrote."""
        for folder in (self.folder, *self._shards()):
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    if path.name.endswith(_TEMPORARY) and (folder != self.folder or path.name.startswith("size.")):
                        with contextlib.suppress(OSError):  # finished, or removed by another process
                            if time.time() - path.stat().st_mtime >= age:
                                path.unlink()


@cache
def sources_key(pattern: str) -> str:
    """A hash of the sources of this package that a pattern names, "passes/**/*.py"."""
    texts = [path.read_bytes() for path in sorted(PACKAGE.glob(pattern))]
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()


def open_cache() -> KernelCache | None:
    """The cache that the knobs `kernel_cache` and `kernel_cache_mb` describe; None when it is switched off, or has no
    folder."""
    limit = config.get("kernel_cache_mb") * 1_000_000
    try:
        return KernelCache(cache_folder(), limit) if limit else None
    except NoFolderError as error:
        _warn_once(None, f"({str(error).partition(';')[0]})")
        return None


def cache_folder() -> Path:
    """The folder of compiled kernels: RELAXLITE_KERNEL_CACHE, or this platform's cache folder. NoFolderError: neither
    is known."""
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
