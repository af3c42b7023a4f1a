"""Files that are given as models and are none: the error says what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

import relaxlite as rl
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.gguf_format import read_file
from relaxlite.frontend.llm.hf_folder import read_safetensors
from relaxlite.frontend.llm.read import read_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FOREIGN = [
    pytest.param(POINTER, "a Git LFS pointer, not the file that it stands for", id="pointer"),
    pytest.param(b"\n<!DOCTYPE html>\n<html lang=en>404</html>", "a web page", id="page"),
    pytest.param(b"\x20\x00\x00\x00ORTM" + bytes(40), "a model in onnxruntime's own format", id="ort"),
    pytest.param(b"\x1c\x00\x00\x00TFL3" + bytes(40), "a TensorFlow Lite model", id="tflite"),
    pytest.param(b"PK\x03\x04" + bytes(40), "a zip archive, as PyTorch's checkpoints are", id="zip"),
    pytest.param(b"\x1f\x8b\x08" + bytes(40), "a gzip archive", id="gzip"),
]


@pytest.mark.parametrize(("content", "message"), FOREIGN)
def test_another_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(content)
    for read in (rl.from_onnx, read_file, read_safetensors):
        with pytest.raises(ImportModelError) as caught:
            read(path)
        assert message in str(caught.value) and str(path) in str(caught.value)
    with pytest.raises(ImportModelError, match=f"the given bytes: {message}"):
        rl.from_onnx(content)


def test_a_pointer_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(POINTER)
    with pytest.raises(ImportModelError, match=r"config\.json: cannot be read: a Git LFS pointer"):
        read_checkpoint(tmp_path)


def test_a_language_model_given_as_a_graph_is_named() -> None:
    with pytest.raises(ImportModelError, match="a GGUF file: relaxlite"):
        rl.from_onnx(b"GGUF\x03\x00\x00\x00" + bytes(64))


def test_a_header_that_only_begins_like_an_archive_is_read(tmp_path: Path) -> None:
    size = int.from_bytes(b"\x1f\x8b", "little")  # of the header: gzip's magic number
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(size)
    path.write_bytes(size.to_bytes(8, "little") + header + bytes(8))
    assert list(read_safetensors(path)) == ["a"]
