"""Fetching models: what lands in the cache, and what a person reads when it cannot.

No test here needs a network but the one marked `models`: packages are made on the spot, and brought either by a
replaced download step or by the real pip, pointed at a folder.
"""

from __future__ import annotations

import hashlib
import io
import random
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from relaxlite import config, models
from relaxlite.errors import FetchError, InvalidArgumentError, RelaxliteError
from relaxlite.models import ModelEntry, PackedFile

MODEL = random.Random(0).randbytes(200_000)  # does not compress
LABELS = b"cat\ndog\n"


def packed(path: str, content: bytes) -> PackedFile:
    return PackedFile(path, len(content), hashlib.sha256(content).hexdigest())


PYPI = ModelEntry(
    name="toy",
    description="a toy",
    licence="MIT",
    registry="pypi",
    package="toy-package",
    version="1.0",
    model=packed("toy_package/data/toy.onnx", MODEL),
    companions=(packed("toy_package/labels.txt", LABELS),),
)
NPM = replace(
    PYPI, registry="npm", package="@toy/package", model=replace(PYPI.model, path="data/toy.onnx"), companions=()
)


def wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts."""
    info = "toy_package-1.0.dist-info"
    about = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\nRequires-Python: >=9\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "toy_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as box:
        for name, content in {**members, **about}.items():
            box.writestr(name, content)
    return path


def tarball(folder: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    path = folder / "toy-package-1.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def whole_package() -> dict[str, bytes]:
    return {PYPI.model.path: MODEL, PYPI.companions[0].path: LABELS, "toy_package/__init__.py": b""}


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, fresh and empty, with the toy model as the only known one."""
    folder = tmp_path / "cache" / "models"
    monkeypatch.setenv("RELAXLITE_CACHE", str(folder))
    use_entry(monkeypatch, PYPI)
    return folder


def use_entry(monkeypatch: pytest.MonkeyPatch, entry: ModelEntry) -> None:
    monkeypatch.setattr(models, "_registry", lambda: {entry.name: entry})


def use_archive(monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]) -> list[str]:
    """Replace the download by `make(staging folder)`; returns the list that each call's model name goes into."""
    calls: list[str] = []

    def download(entry: ModelEntry, staging: Path, home: Path, *, progress: bool) -> Path:
        calls.append(entry.name)
        return make(staging)

    monkeypatch.setattr(models, "_download", download)
    return calls


# What lands in the cache


def test_a_wheel_gives_the_model_with_its_companions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_archive(monkeypatch, lambda staging: wheel(staging, whole_package()))
    path = models.fetch("toy")
    assert path == cache / "toy" / "toy.onnx"
    assert path.read_bytes() == MODEL
    assert files_below(cache) == ["toy", "toy/labels.txt", "toy/toy.onnx"]


def test_a_tarball_gives_the_model_below_its_top_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry(monkeypatch, NPM)
    use_archive(monkeypatch, lambda staging: tarball(staging, {"package/a": b"", "package/data/toy.onnx": MODEL}))
    assert models.fetch("toy").read_bytes() == MODEL
    assert files_below(cache) == ["toy", "toy/toy.onnx"]


def test_a_second_fetch_downloads_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_archive(monkeypatch, lambda staging: wheel(staging, whole_package()))
    assert models.fetch("toy") == models.fetch("toy")
    assert calls == ["toy"]


@pytest.mark.parametrize("name", ["toy.onnx", "labels.txt"])
def test_a_file_that_was_cut_short_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = use_archive(monkeypatch, lambda staging: wheel(staging, whole_package()))
    path = models.fetch("toy")
    (path.parent / name).write_bytes(b"half")
    assert models.fetch("toy").read_bytes() == MODEL
    assert (path.parent / name).read_bytes() != b"half"
    assert calls == ["toy", "toy"]


def test_a_file_placed_by_hand_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_archive(monkeypatch, lambda staging: wheel(staging, whole_package()))
    (cache / "toy").mkdir(parents=True)
    (cache / "toy" / "toy.onnx").write_bytes(MODEL)
    (cache / "toy" / "labels.txt").write_bytes(LABELS)
    assert models.fetch("toy") == cache / "toy" / "toy.onnx"
    assert calls == []


def test_the_folder_argument_goes_before_the_environment(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_archive(monkeypatch, lambda staging: wheel(staging, whole_package()))
    assert models.fetch("toy", tmp_path / "mine") == tmp_path / "mine" / "toy" / "toy.onnx"
    assert not cache.exists()


def test_the_default_cache_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RELAXLITE_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.model_folder() == tmp_path / "relaxlite" / "models"


# Archives that are wrong


def test_a_wrong_checksum_names_both_digests_and_keeps_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = bytes(len(MODEL))
    use_archive(monkeypatch, lambda staging: wheel(staging, {**whole_package(), PYPI.model.path: other}))
    with pytest.raises(FetchError) as caught:
        models.fetch("toy")
    assert PYPI.model.sha256 in str(caught.value)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert PYPI.model.path in str(caught.value)
    assert files_below(cache) == []


def test_a_wrong_companion_keeps_the_model_out_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_archive(monkeypatch, lambda staging: wheel(staging, {**whole_package(), PYPI.companions[0].path: b"bird"}))
    with pytest.raises(FetchError, match=r"labels\.txt in toy-package==1\.0 is not the file"):
        models.fetch("toy")
    assert files_below(cache) == []


def test_a_missing_inner_file_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_archive(monkeypatch, lambda staging: wheel(staging, {PYPI.companions[0].path: LABELS}))
    with pytest.raises(FetchError, match=r"toy: toy_package-.*\.whl does not hold toy_package/data/toy\.onnx"):
        models.fetch("toy")
    assert files_below(cache) == []


@pytest.mark.parametrize("evil", ["../../../evil", "package/../../../evil", "/evil", "package/data/../../../evil"])
def test_members_that_point_outside_are_never_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: str
) -> None:
    use_entry(monkeypatch, NPM)
    use_archive(monkeypatch, lambda staging: tarball(staging, {evil: b"evil", "package/data/toy.onnx": MODEL}))
    assert models.fetch("toy").read_bytes() == MODEL
    assert not [path for path in tmp_path.rglob("*") if PurePosixPath(path).name == "evil"]
    assert not Path("/evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_place_of_the_model_is_not_followed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(MODEL)
    link = tarfile.TarInfo("package/data/toy.onnx")
    link.type, link.linkname = kind, str(secret)
    use_entry(monkeypatch, NPM)
    use_archive(monkeypatch, lambda staging: tarball(staging, {link.name: link}))
    with pytest.raises(FetchError, match=r"does not hold data/toy\.onnx"):
        models.fetch("toy")


@pytest.mark.parametrize("make", [wheel, tarball])
def test_a_truncated_archive_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Path]
) -> None:
    def truncated(staging: Path) -> Path:
        archive = make(staging, {f"package/{NPM.model.path}": MODEL})
        archive.write_bytes(archive.read_bytes()[: len(MODEL) // 2])
        return archive

    use_entry(monkeypatch, NPM)
    use_archive(monkeypatch, truncated)
    with pytest.raises(FetchError, match=r"toy: the archive toy.* is damaged.*try again"):
        models.fetch("toy")
    assert files_below(cache) == []


def test_an_interrupted_download_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(staging: Path) -> Path:
        (staging / "toy.part").write_bytes(MODEL[:1000])
        raise KeyboardInterrupt

    use_archive(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.fetch("toy")
    assert files_below(cache) == []


# The real pip, without a network


@pytest.fixture
def pip_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip looks for packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize("total", [None, 1000])
def test_pip_brings_a_wheel_under_a_progress_bar(
    pip_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], total: int | None
) -> None:
    wheel(pip_folder, whole_package())
    use_entry(monkeypatch, replace(PYPI, download_bytes=total, platform="manylinux_2_28_x86_64"))
    assert models.fetch("toy").read_bytes() == MODEL
    assert "fetching toy" in capsys.readouterr().err


def test_progress_can_be_silenced(pip_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wheel(pip_folder, whole_package())
    models.fetch("toy", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_package_that_pip_cannot_find_says_what_was_tried_and_what_helps(pip_folder: Path, cache: Path) -> None:
    with pytest.raises(FetchError) as caught:
        models.fetch("toy", progress=False)
    text = str(caught.value)
    assert text.startswith("toy: the Python package registry could not be reached, or does not offer toy-package==1.0")
    assert "tried: " in text and "-m pip download" in text
    assert "No matching distribution found for toy-package==1.0" in text
    assert f"toy_package/data/toy.onnx -> {cache / 'toy' / 'toy.onnx'}" in text
    assert files_below(cache) == []


def test_a_download_that_stalls_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(models, "_pip_command", lambda entry: [sys.executable, "-c", "import time; time.sleep(60)"])
    started = time.monotonic()
    with pytest.raises(FetchError, match="could not be reached"):
        models.fetch("toy", progress=False)
    assert time.monotonic() - started < 20
    assert files_below(cache) == []


def test_a_full_disk_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; sys.exit('ERROR: Exception:\\nOSError: [Errno 28] No space left on device')"
    monkeypatch.setattr(models, "_pip_command", lambda entry: [sys.executable, "-c", failing])
    with pytest.raises(FetchError, match=r"cannot write the model cache: .*No space left.*\n  hint: set RELAX"):
        models.fetch("toy", progress=False)
    assert files_below(cache) == []


def test_what_a_tool_says_last_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; sys.exit('ERROR: Exception:\\n' + 'an error\\n' * 9 + 'the reason')"
    monkeypatch.setattr(models, "_pip_command", lambda entry: [sys.executable, "-c", failing])
    with pytest.raises(FetchError, match=r"\n  \| ERROR: Exception:\n(.*\n)*  \| the reason\n"):
        models.fetch("toy", progress=False)


def test_a_python_without_pip_is_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip = [sys.executable, "-c", "import sys; sys.exit('No module named pip')"]
    monkeypatch.setattr(models, "_pip_command", lambda entry: without_pip)
    with pytest.raises(FetchError, match=r"has no pip\n  hint: `python -m ensurepip`"):
        models.fetch("toy", progress=False)


def test_a_missing_npm_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_entry(monkeypatch, NPM)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match=r"no `npm` is on the PATH\n  hint: install Node\.js"):
        models.fetch("toy")
    assert files_below(cache) == []


def test_fetches_of_one_model_at_the_same_time_all_succeed(pip_folder: Path, cache: Path) -> None:
    wheel(pip_folder, whole_package())
    found: list[bytes] = []
    fetches = [
        threading.Thread(target=lambda: found.append(models.fetch("toy", progress=False).read_bytes()))
        for _ in range(3)
    ]
    for one in fetches:
        one.start()
    for one in fetches:
        one.join()
    assert found == [MODEL] * 3
    assert files_below(cache) == ["toy", "toy/labels.txt", "toy/toy.onnx"]


def test_a_cache_that_cannot_be_written_says_how_to_choose_another(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FetchError, match=r"cannot write the model cache.*\n.*set RELAXLITE_CACHE"):
        models.fetch("toy", tmp_path / "file" / "models")


# The registry


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        models.fetch("magica")
    assert isinstance(caught.value, RelaxliteError)
    assert str(caught.value).startswith("unknown model 'magica'; did you mean 'magika'?")
    assert all(entry.name in str(caught.value) for entry in models.known_models())


def test_a_name_like_no_other_gets_no_hint() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^unknown model '../../etc'\n"):
        models.fetch("../../etc")


def test_every_entry_is_whole() -> None:
    entries = models.known_models()
    assert len({entry.name for entry in entries}) == len(entries) >= 11
    for entry in entries:
        files = (entry.model, *entry.companions)
        assert entry.registry in models.REGISTRY_TITLES
        assert entry.description and entry.licence and entry.version
        assert len({file.name for file in files}) == len(files)
        for file in files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.bytes > 0
            assert not PurePosixPath(file.path).is_absolute() and ".." not in PurePosixPath(file.path).parts


@pytest.mark.models
def test_magika_comes_from_its_real_package(model_path: Callable[[str], Path]) -> None:
    path = model_path("magika")
    entry = next(entry for entry in models.known_models() if entry.name == "magika")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.model.sha256
    assert (path.parent / "config.min.json").is_file()
