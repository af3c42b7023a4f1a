"""Model cache: compiled models on disk, so that later processes load them without the compiler.

    CACHE/compiled/NAME-KEY.rlx

NAME is that of the source. KEY is a hash of what is known without reading the source: its path, the options, relaxlite
and its libraries, the processor. Each file records the source files with their status (size, times, inode); if a status
has changed, the file counts as missing and is replaced. Least recently used files are evicted beyond the limit, the
knob `model_cache_mb`.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from relaxlite import config
from relaxlite.errors import ArtifactError, NoFolderError
from relaxlite.records import dataclass
from relaxlite.runtime import artifact, cpu
from relaxlite.runtime.executable import ExecutableData
from relaxlite.version import __version__

KEY_DIGITS = 16
_MAX_NAME = 50  # characters of a name, each of up to 4 bytes; file systems permit 255 bytes
_FILE = re.compile(rf"(.+)-[0-9a-f]{{{KEY_DIGITS}}}\.rlx")
_ABANDONED = re.compile(rf"\.{_FILE.pattern}\.\w+\.tmp")  # of a killed process
_ABANDONED_SECONDS = 3600.0  # older files belong to no running process
_EVICTION_TARGET = 0.8  # share of the limit that eviction leaves

_TIME_RESOLUTION_NS = 2 * 10**9  # coarsest resolution of file times: 2 s in FAT; most: 10 ms
MODEL, LANGUAGE_MODEL = "model", "language model"  # kinds of compiled models: without and with a tokenizer

_FOLDER_FILES = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
)  # files of a Hugging Face folder that are read
_MADE_OF = "made_of"  # key of a cached model's metadata: records of its source files
_CHUNK = 1 << 22

_PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = ("llvmlite", "scipy_openblas32")  # whose versions compiled code depends on
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_KEY_KNOBS = ("libraries", "library_path", "tuning")  # affect compiled code
_BYPASSING_KNOBS = ("dump_dir", "verify_passes")  # need a compilation

FileRecord: TypeAlias = list[str]
"""State of a source file: its path, its status, and a hash of its content if the status may miss changes, else ""."""

_warned: set[Path | None] = set()


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A cached model."""

    name: str
    path: Path
    bytes: int
    used: float  # time of last use, in seconds since 1970


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The cache entry, existing or not, of a source with some options."""

    name: str
    path: Path

    def find(self, *, verify: bool = False) -> ExecutableData | None:
        """Load the cached model; None if it is missing, damaged, or its source files have changed."""
        try:
            data = artifact.load(self.path, verify=verify)
        except ArtifactError:
            return None
        info = dict(data.metadata.info)
        made_of = info.pop(_MADE_OF, ())  # not part of the model, which users may save
        if not made_of or [_record(Path(path), with_hash=bool(digest)) for path, _, digest in made_of] != made_of:
            return None
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(self.path)
        return replace(data, metadata=replace(data.metadata, info=info))

    def make(
        self,
        files: Iterable[Path],
        make: Callable[[], ExecutableData],
        more: Callable[[ExecutableData], Iterable[Path]],
    ) -> ExecutableData:
        """Compile by `make` and cache the result unless a source file has changed meanwhile.

        files: source files. more: returns further source files from the result. A folder that cannot be written to
        gives one warning.
        """
        sources, start = [path.resolve() for path in files], time.time_ns()
        before = [_record(path, with_hash=not _is_settled(path, start)) for path in sources]
        data = make()
        more_sources = [path.resolve() for path in more(data)]
        after = [_record(path, with_hash=bool(digest)) for path, (*_, digest) in zip(sources, before, strict=True)]
        if before == after and all(_is_settled(path, start) for path in more_sources):
            self._save(data, [*after, *(_record(path, with_hash=False) for path in more_sources)])
        return data

    def _save(self, data: ExecutableData, made_of: Sequence[FileRecord]) -> None:
        info = {**data.metadata.info, _MADE_OF: made_of}
        limit, weight_bytes = config.get("model_cache_mb"), sum(array.nbytes for array in data.constants)
        if weight_bytes > limit * 10**6:
            suggestion = "RELAXLITE_MODEL_CACHE_MB to more, or to 0 to keep none"
            _warn_not_cached(
                self.path, f"it has {-(-weight_bytes // 10**6)} MB, and the limit of all is {limit} MB", suggestion
            )
            _evict(self.path)
            return
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the folder holds code that is run
            artifact.save(replace(data, metadata=replace(data.metadata, info=info)), self.path)
        except (ArtifactError, OSError) as error:
            _warn_not_cached(self.path.parent, str(error))
        _evict(self.path)


def load_or_compile(
    source: Path,
    kind: str,
    options: Mapping[str, Any],
    make: Callable[[], ExecutableData],
    *,
    files: Iterable[Path] = (),
    more: Callable[[ExecutableData], Iterable[Path]] = lambda data: (),
    verify: bool = False,
) -> ExecutableData:
    """Return a source, a file or folder, compiled with some options, from the cache or else by `make`.

    kind: MODEL or LANGUAGE_MODEL. files: further source files. more: returns further source files from the result.
    verify: check every byte of a cached model.
    """
    entry = cache_entry(source, kind, options)
    if entry is None:
        return make()
    if (cached := entry.find(verify=verify)) is not None:
        return cached
    tuning = config.get("tuning")
    data = entry.make([*_files_of(source), *files, *([Path(tuning)] if tuning else [])], make, more)
    return entry.find() or data  # reloaded with mapped weights, as in later processes


def cache_entry(source: Path, kind: str, options: Mapping[str, Any]) -> CacheEntry | None:
    """Return the cache entry of a source with options, or None if the cache is disabled or bypassed.

    Returns None also for pipes, and with one warning if the cache folder is not known.
    """
    if not config.get("model_cache_mb") or any(map(config.get, _BYPASSING_KNOBS)):
        return None
    path = source.resolve()
    if not (path.is_file() or path.is_dir()):  # a pipe cannot be read twice
        return None
    try:
        home = folder()
    except NoFolderError as error:
        _warn_not_cached(None, str(error).partition(";")[0])
        return None
    name = (path.name if path.is_dir() else path.stem)[:_MAX_NAME]
    option_texts = sorted((option, repr(value)) for option, value in options.items() if value is not None)
    knobs = [config.get(knob) for knob in _KEY_KNOBS]
    key = repr([str(path), kind, option_texts, knobs, _compiler_identity(), _processor_identity()]).encode(
        errors="surrogateescape"
    )
    return CacheEntry(name, home / f"{name}-{hashlib.sha256(key).hexdigest()[:KEY_DIGITS]}.rlx")


def folder() -> Path:
    """Return the folder of cached models. Raises NoFolderError if it is not known."""
    return config.model_folder() / "compiled"


def cached_models() -> list[CachedModel]:
    """Return all cached models, sorted by file name."""
    models = []
    for path in _folder_entries():
        if match := _FILE.fullmatch(path.name):
            with contextlib.suppress(OSError):  # removed by another process
                status = path.stat()
                models.append(CachedModel(match[1], path, status.st_size, status.st_mtime))
    return models


def _folder_entries() -> list[Path]:
    """Return the folder's sorted entries, [] if it is missing or unreadable."""
    try:
        return sorted(folder().iterdir())
    except OSError:
        return []


def clear() -> list[CachedModel]:
    """Remove all cached models, but no other files in the folder; return the removed models."""
    models = cached_models()
    for model in models:
        model.path.unlink(missing_ok=True)
    _remove_abandoned(age=0)
    with contextlib.suppress(OSError):  # missing, or not empty
        folder().rmdir()
    return models


_ANOTHER_FOLDER = "RELAXLITE_CACHE to a folder that can be written to, or RELAXLITE_MODEL_CACHE_MB to 0"


def _warn_not_cached(subject: Path | None, reason: str, hint: str = _ANOTHER_FOLDER) -> None:
    if subject in _warned:
        return
    _warned.add(subject)
    warnings.warn(
        f"a compiled model cannot be kept ({reason}), so each process compiles it again; set {hint}",
        RuntimeWarning,
        stacklevel=5,
    )


def _remove_abandoned(*, age: float) -> None:
    """Remove temporary files that are at least `age` seconds old."""
    for path in _folder_entries():
        with contextlib.suppress(OSError):  # finished, or removed by another process
            if _ABANDONED.fullmatch(path.name) and time.time() - path.stat().st_mtime >= age:
                path.unlink()


def _evict(newest: Path) -> None:
    """Remove least recently used models beyond the limit; the newest last, if it alone exceeds the limit."""
    _remove_abandoned(age=_ABANDONED_SECONDS)
    limit, models = config.get("model_cache_mb") * 10**6, cached_models()
    total = sum(model.bytes for model in models)
    if total <= limit:
        return
    for model in sorted(models, key=lambda model: (model.path == newest, model.used)):
        if total <= limit * (1 if model.path == newest else _EVICTION_TARGET):
            break
        with contextlib.suppress(OSError):  # removed by another process, or open (Windows)
            model.path.unlink()
        total -= model.bytes


def _files_of(source: Path) -> list[Path]:
    """Return the files that a model is read from: all parts of a split GGUF file, or a folder and files in it."""
    if not source.is_dir():
        part = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", source.name, re.IGNORECASE)  # a model split into files
        return [source] if part is None else sorted(source.parent.glob(f"{glob.escape(part[1])}-?????{part[2]}"))
    return [source, *(file for pattern in _FOLDER_FILES for file in sorted(source.glob(pattern)))]


def _record(path: Path, *, with_hash: bool) -> FileRecord:
    """Return the present record of a file; of a folder, a hash of the list of its entries."""
    try:
        if path.is_dir():
            return [str(path), "folder", hashlib.sha256(repr(sorted(os.listdir(path))).encode()).hexdigest()]
        status = path.stat()
        fields = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
        return [str(path), " ".join(map(str, fields)), _hash(path) if with_hash else ""]
    except OSError:
        return [str(path), "missing", ""]


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _is_settled(path: Path, when: int) -> bool:
    """Whether a file's last write is so long before `when` that later writes have another modification time."""
    try:
        return path.stat().st_mtime_ns < when - _TIME_RESOLUTION_NS
    except OSError:
        return False


@cache
def _compiler_identity() -> list[Any]:
    """Return the version and the files' status of relaxlite and its libraries."""
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    files = [*sorted(_PACKAGE.rglob("*.py")), *(Path(spec.origin) for spec in specs if spec and spec.origin)]
    states = [(path, path.stat()) for path in files]
    return [__version__, [(str(path), state.st_mtime_ns, state.st_size) for path, state in states]]


@cache
def _processor_identity() -> list[Any]:
    """Return what identifies the processor: architecture, number of cores, model and flags."""
    described = cpu.described()
    return [platform.machine(), os.cpu_count(), [described.get(field) for field in _PROCESSOR]]
