"""What a file is that was given as a model and is none, by its first bytes: people often have one of these instead."""

from __future__ import annotations

ENOUGH_BYTES = 512  # of a file's beginning

_BEGINNINGS = (  # offset, bytes, what begins so
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file that it stands for: `git lfs pull` fetches that"),
    (4, b"ORTM", "a model in onnxruntime's own format: give the ONNX file that it was made of"),
    (4, b"TFL3", "a TensorFlow Lite model: convert it to ONNX, as with tf2onnx"),
    (0, b"PK\x03\x04", "a zip archive, as PyTorch's checkpoints are: export the model to ONNX or to safetensors"),
    (0, b"\x1f\x8b", "a gzip archive: unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (0, b"\x89HDF\r\n", "an HDF5 file, as Keras writes them: export the model to ONNX, as with tf2onnx"),
    (0, b"GGUF", "a GGUF file: relaxlite.llm reads the language models in those"),
    (0, b"\x80\x02\x8a", "a pickle, as old PyTorch checkpoints are: export the model to ONNX or to safetensors"),
)


def describe_foreign(head: bytes) -> str | None:
    """What a file with these first bytes is, and what to do; None where that is not known."""
    for offset, magic, what in _BEGINNINGS:
        if head[offset : offset + len(magic)] == magic:
            return what
    text = head[:ENOUGH_BYTES].lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page: the download gave a page about the file, or an error, and not the file"
    return None
