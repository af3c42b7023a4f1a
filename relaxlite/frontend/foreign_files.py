"""Recognition of file formats that are mistaken for models, by their first bytes, for error messages."""

from __future__ import annotations

SIGNATURE_BYTES = 512  # of a file that `describe_foreign` needs

_SIGNATURES = (  # (offset, bytes, description and hint)
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
    """Return a description of a file by its first bytes, with a hint; None for an unknown format."""
    for offset, magic, description in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic:
            return description
    text = head[:SIGNATURE_BYTES].lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page: the download gave a page about the file, or an error, and not the file"
    return None
