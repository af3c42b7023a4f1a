"""Compiled models that are kept on disk, so that the next process opens them and compiles nothing.

    CACHE/compiled/NAME-KEY.rlx

NAME is that of the source. KEY stands for all that is known without reading the source: its path, the options,
relaxlite and the libraries that it finds, the processor. Each file says what it was made of, with what the system said
of that then; where this has changed, the file counts as missing, and what is made instead takes its place. When there
is more than the knob `model_cache_mb` allows, what was not used for longest goes.
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
_MAX_SIGNS = 50  # of a name, of which each may take 4 of the 255 bytes that systems allow
_FILE = re.compile(rf"(.+)-[0-9a-f]{{{KEY_DIGITS}}}\.rlx")
_ABANDONED = re.compile(rf"\.{_FILE.pattern}\.\w+\.tmp")  # of a process that was killed while it wrote
_ABANDONED_SECONDS = 3600.0  # a file this old belongs to no running process
_ROOM = 0.8  # of the limit is left full when files are removed

_COARSE_NS = 2 * 10**9  # file systems may give equal times to writes that are less apart (FAT; most: 10 ms)
MODEL, LANGUAGE_MODEL = "model", "language model"  # what a source compiles to: without a tokenizer, or with one

_FOLDER_FILES = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
)  # what is read of a Hugging Face folder
_MADE_OF = "made_of"  # where a kept model's metadata says what it was made of
_CHUNK = 1 << 22

_PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = ("llvmlite", "scipy_openblas32")  # that compiled code depends on
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_KNOBS = ("libraries", "library_path", "tuning")  # change what is compiled
_WATCHING = ("dump_dir", "verify_passes")  # ask to see a compilation

Record: TypeAlias = list[str]
"""Of a file: its path, what the system says of it, and a hash of its content where that alone does not do."""

_warned: set[Path | None] = set()


@dataclass(frozen=True, slots=True)
class Kept:
    name: str
    path: Path
    bytes: int
    used: float  # when, in seconds since 1970


@dataclass(frozen=True, slots=True)
class Place:
    """Where what a source compiles to with some options is kept, or would be."""

    name: str
    path: Path

    def find(self, *, verify: bool = False) -> ExecutableData | None:
        """What is kept here, unless it is damaged or was made of other files than are there now."""
        try:
            data = artifact.load(self.path, verify=verify)
        except ArtifactError:
            return None
        info = dict(data.metadata.info)
        made_of = info.pop(_MADE_OF, ())  # a file that the user saves does not tell where this one came from
        if not made_of or [_record(Path(path), with_hash=bool(digest)) for path, _, digest in made_of] != made_of:
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read serves too
            os.utime(self.path)
        return replace(data, metadata=replace(data.metadata, info=info))

    def make(
        self,
        files: Iterable[Path],
        make: Callable[[], ExecutableData],
        more: Callable[[ExecutableData], Iterable[Path]],
    ) -> ExecutableData:
        """What `make` makes of `files`, and of `more` that turned out to be read; kept if none of them has changed
        meanwhile and if that can be done: a folder that cannot be written to is warned of, once."""
        known, start = [path.resolve() for path in files], time.time_ns()
        before = [_record(path, with_hash=not _is_settled(path, start)) for path in known]
        data = make()
        others = [path.resolve() for path in more(data)]
        after = [_record(path, with_hash=bool(digest)) for path, (*_, digest) in zip(known, before, strict=True)]
        if before == after and all(_is_settled(path, start) for path in others):
            self._keep(data, [*after, *(_record(path, with_hash=False) for path in others)])
        return data

    def _keep(self, data: ExecutableData, made_of: Sequence[Record]) -> None:
        info = {**data.metadata.info, _MADE_OF: made_of}
        limit, least = config.get("model_cache_mb"), sum(array.nbytes for array in data.constants)
        if least > limit * 10**6:
            more = "RELAXLITE_MODEL_CACHE_MB to more, or to 0 to keep none"
            _warn_once(self.path, f"it has {-(-least // 10**6)} MB, and the limit of all is {limit} MB", more)
            _evict(self.path)
            return
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # code from here is run
            artifact.save(replace(data, metadata=replace(data.metadata, info=info)), self.path)
        except (ArtifactError, OSError) as error:
            _warn_once(self.path.parent, str(error))
        _evict(self.path)


def find_or_make(
    source: Path,
    kind: str,
    options: Mapping[str, Any],
    make: Callable[[], ExecutableData],
    *,
    files: Iterable[Path] = (),
    more: Callable[[ExecutableData], Iterable[Path]] = lambda data: (),
    verify: bool = False,
) -> ExecutableData:
    """What a source, a file or the folder of a checkpoint, compiles to with some options, by `make` unless it is kept.

    `kind`: MODEL or LANGUAGE_MODEL. `files`: what else it is made of, `more`: what turns out to be so. `verify`: check
    every byte of what is kept.
    """
    place = place_of(source, kind, options)
    if place is None:
        return make()
    if (result := place.find(verify=verify)) is not None:
        return result
    tuning = config.get("tuning")
    data = place.make([*_files_of(source), *files, *([Path(tuning)] if tuning else [])], make, more)
    return place.find() or data  # with weights that are mapped, as from now on


def place_of(source: Path, kind: str, options: Mapping[str, Any]) -> Place | None:
    """Where a source, compiled with options, is kept; None where nothing is, or somebody wants to see it compile. A
    folder that is not known is warned of, once."""
    if not config.get("model_cache_mb") or any(map(config.get, _WATCHING)):
        return None
    path = source.resolve()
    if not (path.is_file() or path.is_dir()):  # what is read from a pipe cannot be read again
        return None
    try:
        home = folder()
    except NoFolderError as error:
        _warn_once(None, str(error).partition(";")[0])
        return None
    name = (path.name if path.is_dir() else path.stem)[:_MAX_SIGNS]
    given = sorted((option, repr(value)) for option, value in options.items() if value is not None)
    knobs = [config.get(knob) for knob in _KNOBS]
    key = repr([str(path), kind, given, knobs, _makers(), _processor()]).encode(errors="surrogateescape")
    return Place(name, home / f"{name}-{hashlib.sha256(key).hexdigest()[:KEY_DIGITS]}.rlx")


def folder() -> Path:
    """NoFolderError: it is not known."""
    return config.model_folder() / "compiled"


def kept() -> list[Kept]:
    """All that is kept, by name."""
    result = []
    for path in _listed():
        if match := _FILE.fullmatch(path.name):
            with contextlib.suppress(OSError):  # another process has removed it
                status = path.stat()
                result.append(Kept(match[1], path, status.st_size, status.st_mtime))
    return result


def _listed() -> list[Path]:
    """What lies in the folder, by name: nothing where there is none, or none that may be read."""
    try:
        return sorted(folder().iterdir())
    except OSError:
        return []


def clear() -> list[Kept]:
    """Remove all that is kept, and nothing else that may lie in the folder; says what that was."""
    result = kept()
    for model in result:
        model.path.unlink(missing_ok=True)
    _remove_abandoned(age=0)
    with contextlib.suppress(OSError):  # there is none, or something else is in it
        folder().rmdir()
    return result


_ANOTHER_FOLDER = "RELAXLITE_CACHE to a folder that can be written to, or RELAXLITE_MODEL_CACHE_MB to 0"


def _warn_once(where: Path | None, why: str, hint: str = _ANOTHER_FOLDER) -> None:
    if where in _warned:
        return
    _warned.add(where)
    warnings.warn(
        f"a compiled model cannot be kept ({why}), so each process compiles it again; set {hint}",
        RuntimeWarning,
        stacklevel=5,
    )


def _remove_abandoned(*, age: float) -> None:
    """Files that were not finished, and were begun so many seconds ago."""
    for path in _listed():
        with contextlib.suppress(OSError):  # finished, or removed by another process
            if _ABANDONED.fullmatch(path.name) and time.time() - path.stat().st_mtime >= age:
                path.unlink()


def _evict(newest: Path) -> None:
    """Remove what was not used for longest until the limit is kept; the newest too where it alone exceeds that."""
    _remove_abandoned(age=_ABANDONED_SECONDS)
    limit, result = config.get("model_cache_mb") * 10**6, kept()
    total = sum(model.bytes for model in result)
    if total <= limit:
        return
    for model in sorted(result, key=lambda model: (model.path == newest, model.used)):
        if total <= limit * (1 if model.path == newest else _ROOM):
            break
        with contextlib.suppress(OSError):  # another process has been faster, or has it open (Windows)
            model.path.unlink()
        total -= model.bytes


def _files_of(source: Path) -> list[Path]:
    if not source.is_dir():
        part = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", source.name, re.IGNORECASE)  # of a model in several files
        return [source] if part is None else sorted(source.parent.glob(f"{glob.escape(part[1])}-?????{part[2]}"))
    return [source, *(file for pattern in _FOLDER_FILES for file in sorted(source.glob(pattern)))]


def _record(path: Path, *, with_hash: bool) -> Record:
    """A folder is what it lists."""
    try:
        if path.is_dir():
            return [str(path), "folder", hashlib.sha256(repr(sorted(os.listdir(path))).encode()).hexdigest()]
        status = path.stat()
        said = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
        return [str(path), " ".join(map(str, said)), _hash(path) if with_hash else ""]
    except OSError:
        return [str(path), "missing", ""]


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _is_settled(path: Path, when: int) -> bool:
    """Whether a file was last written to so long before a time that whatever is written later has another time."""
    try:
        return path.stat().st_mtime_ns < when - _COARSE_NS
    except OSError:
        return False


@cache
def _makers() -> list[Any]:
    """What tells this relaxlite, and the libraries that it finds, from others."""
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    files = [*sorted(_PACKAGE.rglob("*.py")), *(Path(spec.origin) for spec in specs if spec and spec.origin)]
    states = [(path, path.stat()) for path in files]
    return [__version__, [(str(path), state.st_mtime_ns, state.st_size) for path, state in states]]


@cache
def _processor() -> list[Any]:
    described = cpu.described()
    return [platform.machine(), os.cpu_count(), [described.get(field) for field in _PROCESSOR]]
