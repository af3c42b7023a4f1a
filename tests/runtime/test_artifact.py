"""Artifacts: what is saved comes back, and a file that is damaged, foreign or of another machine is refused."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import platform
import random
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxlite.errors import ArtifactError
from relaxlite.runtime import artifact
from relaxlite.runtime.artifact import load, save
from relaxlite.runtime.executable import (
    Call,
    Const,
    Entry,
    ExecutableData,
    Goto,
    HostCode,
    If,
    Imm,
    KernelInfo,
    Metadata,
    Reg,
    Ret,
    Signature,
    TargetInfo,
    TensorSpec,
    VMFunction,
    disassemble,
)
from relaxlite.runtime.memory import HUGE_PAGE

_SYSTEM = {"darwin": "apple-darwin", "win32": "pc-windows-msvc"}.get(sys.platform, "unknown-linux-gnu")
HOST = TargetInfo(f"{platform.machine()}-{_SYSTEM}", "some-cpu", ())


def sample(**fields: object) -> ExecutableData:
    code = (
        Call(1, "builtin:alloc_heap", (Imm(4),)),
        Call(-1, "builtin:match_shape", (Reg(0), Reg(1), Imm((("bind", 0, "n", 1, None, 2), ("const", 3))), Imm("x"))),
        Call(2, "kernel:k", (Reg(1), Imm(0), Reg(0), Const(1))),
        If(0, 5),
        Goto(5),
        Ret(0),
    )
    bfloat16 = np.arange(5).astype(ml_dtypes.bfloat16)
    x = TensorSpec("x", "float32", ("n", 3), {"n": (1, None, 2)})
    z = TensorSpec("z", "float32", ("m",), {"m": (0, 9, 1)})
    data = ExecutableData(
        functions={
            "main": VMFunction("main", ("x",), 3, code),
            "fill": VMFunction("fill", ("z",), 1, (Goto(1), Ret(0)), (None, "é")),
        },
        signature=Signature((x,), (TensorSpec("y", "bool", ()),)),
        kernels={"k": KernelInfo("k", "rl_k", ("index out of range",), 2, 1)},
        objects=(bytes(range(256)), b"another"),
        host=HostCode(bytes(range(99)), 4, ""),
        constants=(np.arange(6.0).reshape(2, 3), bfloat16, np.zeros((0, 4), np.int8), np.array(True)),
        target=HOST,
        attachments={"tokenizer": b'{"vocab": []}', "empty": b""},
        support={"pool.0123": bytes(range(50)), "reader.4567": b"code"},
        metadata=Metadata(
            llvm="20.1", provenance={"model": "tiny"}, memory_plan={"peak": 12}, info={"notes": [1, "é"]}
        ),
        extra_entries={"fill": Entry(Signature((z,), (), ("z",)), HostCode(b"code of fill", 2, ""))},
    )
    return dataclasses.replace(data, **fields)  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(sample(), tmp_path / "m.rlx")
    return tmp_path / "m.rlx"


def refused(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"cannot load {path}: ")
    return text.removeprefix(f"cannot load {path}: ")


def test_what_is_saved_comes_back(saved: Path) -> None:
    before, after = sample(), load(saved)
    for field in (
        "functions",
        "signature",
        "kernels",
        "objects",
        "host",
        "target",
        "metadata",
        "attachments",
        "support",
        "others",
    ):
        assert getattr(after, field) == getattr(before, field)
    assert disassemble(after) == disassemble(before)
    for old, new in zip(before.constants, after.constants, strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        np.testing.assert_array_equal(old, new)


def test_weights_are_mapped_aligned_and_read_only(saved: Path) -> None:
    constants = load(saved).constants
    assert constants[0].ctypes.data % 4096 == 0
    assert all(array.ctypes.data % 64 == 0 for array in constants)
    assert not any(array.flags.writeable for array in constants)


def test_weights_that_are_not_dense_are_saved_dense(tmp_path: Path) -> None:
    array = np.arange(12.0).reshape(3, 4).T
    save(sample(constants=(array, array.astype(">f8"))), tmp_path / "m")
    for constant in load(tmp_path / "m").constants:
        np.testing.assert_array_equal(constant, array)
        assert constant.dtype == np.float64 and constant.dtype.isnative


def test_saving_copies_one_weight_at_a_time(tmp_path: Path) -> None:
    views = tuple(np.full((512, 1024), float(k)).T for k in range(8))  # 4 MB each, which are saved dense
    data = sample(constants=views)
    tracemalloc.start()
    try:
        save(data, tmp_path / "m")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * views[0].nbytes
    for view, constant in zip(views, load(tmp_path / "m").constants, strict=True):
        np.testing.assert_array_equal(constant, view)


class Recorder(io.RawIOBase):
    """A file that keeps where each write began, and how long it was."""

    def __init__(self) -> None:
        self.content, self.writes, self.position = bytearray(), [], 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + (self.position if whence == os.SEEK_CUR else 0)
        return self.position

    def write(self, content: Any) -> int:
        piece = bytes(content)
        self.writes.append((self.position, len(piece)))
        self.content[self.position : self.position + len(piece)] = piece
        self.position += len(piece)
        return len(piece)


def test_a_file_is_written_in_pieces_that_huge_pages_take(tmp_path: Path) -> None:
    sizes = [3 << 20, 100, (5 << 20) + 8, 0, (2 << 20) - 64]
    data = sample(constants=tuple(np.arange(size, dtype=np.uint8) for size in sizes))
    recorder = Recorder()
    with io.BufferedWriter(recorder, HUGE_PAGE) as file:
        artifact._write(data, file)
    *whole, rest = recorder.writes[:-1]  # the last is the header with the manifest, over zeros
    assert len(whole) >= sum(sizes) // HUGE_PAGE
    assert whole == [(number * HUGE_PAGE, HUGE_PAGE) for number in range(len(whole))]
    assert rest == (len(whole) * HUGE_PAGE, len(recorder.content) % HUGE_PAGE)
    save(data, tmp_path / "m")
    assert recorder.content == (tmp_path / "m").read_bytes()
    for old, new in zip(data.constants, load(tmp_path / "m").constants, strict=True):
        np.testing.assert_array_equal(old, new)


def test_saving_over_a_mapped_file_leaves_the_old_weights_alone(saved: Path) -> None:
    old = load(saved)
    save(sample(constants=(np.full((2, 3), 9.0), np.zeros(1))), saved)
    np.testing.assert_array_equal(old.constants[0], np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(load(saved).constants[0], np.full((2, 3), 9.0))


def test_a_failing_save_leaves_nothing_behind(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=f"cannot save to .*: {os.strerror(errno.ENOSPC)}"):
        save(sample(), saved)
    assert saved.read_bytes() == content
    assert os.listdir(saved.parent) == [saved.name]


def test_saving_to_impossible_places_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="it is a folder; name a file in it"):
        save(sample(), tmp_path)
    with pytest.raises(ArtifactError, match="No such file or directory"):
        save(sample(), tmp_path / "none" / "m")
    with pytest.raises(ArtifactError, match="constant c0 has dtype complex128, which relaxlite does not have"):
        save(sample(constants=(np.zeros(1, complex),) * 2), tmp_path / "m")
    with pytest.raises(ArtifactError, match="the metadata is not JSON"):
        save(sample(metadata=Metadata(info={"x": {1, 2}})), tmp_path / "m")
    with pytest.raises(ArtifactError, match="no function 'main'"):
        save(sample(functions={}), tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_missing_folder_empty_and_foreign_files(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == "there is no such file"
    assert refused(tmp_path) == "it is a folder"
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert refused(path) == "it is empty"
    for foreign in (b"x", b"\x7fELF" + bytes(5000), b"\x08\x07onnx" * 50):
        path.write_bytes(foreign)
        assert refused(path) == "it is not a relaxlite model"
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert refused(tmp_path / "pipe") == "it is not a regular file"


def test_a_transfer_as_text_is_noticed(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes().replace(b"\r\n", b"\n"))
    assert refused(saved) == "it is not a relaxlite model"


def test_another_format_version_names_both_versions(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[8] = 8
    content[12:32] = b"9.8.7".ljust(20, b"\0")
    saved.write_bytes(content)
    assert refused(saved).startswith("it has format version 8, written by relaxlite 9.8.7; relaxlite ")
    assert "reads version 7; compile the model again" in refused(saved)


def test_truncation_anywhere_is_an_error(saved: Path) -> None:
    content = saved.read_bytes()
    for size in range(len(content) - 1, 0, -1):
        os.truncate(saved, size)
        assert refused(saved).startswith("it is truncated: ")
    saved.write_bytes(content + b"x")
    assert refused(saved) == f"it is corrupted: {len(content) + 1} bytes, where the header says {len(content)}"


def test_flipped_bytes_are_found_or_lie_between_sections(saved: Path) -> None:
    content, rng = saved.read_bytes(), random.Random(0)
    good = disassemble(load(saved)), [array.tobytes() for array in load(saved).constants]
    found = 0
    for _ in range(1000):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            changed[rng.randrange(len(content))] = rng.randrange(256)
        saved.write_bytes(changed)
        try:
            data = load(saved)
        except ArtifactError:
            found += 1
            continue
        assert (disassemble(data), [array.tobytes() for array in data.constants]) == good
        assert (data.objects, data.support) == (sample().objects, sample().support)
        assert data.attachments == sample().attachments
    assert found > 100


def test_every_flipped_byte_of_a_section_is_found(saved: Path) -> None:
    content = saved.read_bytes()
    weights = np.arange(6.0).tobytes()
    start = content.index(weights)
    for at in range(start, start + len(weights)):
        saved.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert refused(saved) == "it is corrupted: weight 0 does not match its checksum"
    at = content.index(bytes(range(256))) + 100
    saved.write_bytes(content[:at] + b"!" + content[at + 1 :])
    assert refused(saved) == "it is corrupted: the object code does not match its checksum"
    at = content.index(bytes(range(50)) + b"code") + 51
    saved.write_bytes(content[:at] + b"!" + content[at + 1 :])
    assert refused(saved) == "it is corrupted: the runtime's own code does not match its checksum"
    at = content.index(b'["ret"')
    saved.write_bytes(content[:at] + b"!" + content[at + 1 :])
    assert refused(saved) == "it is corrupted: the bytecode does not match its checksum"
    at = content.index(b'{"vocab"')
    saved.write_bytes(content[:at] + b"!" + content[at + 1 :])
    assert refused(saved) == "it is corrupted: the attachment 'tokenizer' does not match its checksum"


def test_large_weights_are_sampled_unless_all_is_asked_for(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "CHECK_LIMIT", 0)
    monkeypatch.setattr(artifact, "SAMPLE_STRIDE", 8192)
    weight = np.arange(20_000, dtype=np.uint16)
    save(sample(constants=(weight, weight[:2])), saved)
    content = bytearray(saved.read_bytes())
    start = content.index(weight.tobytes())
    content[start + 5000] ^= 1  # between the sampled pages
    saved.write_bytes(content)
    load(saved)
    with pytest.raises(ArtifactError, match="weight 0 does not match its checksum"):
        load(saved, verify=True)
    content[start + 8192] ^= 1
    saved.write_bytes(content)
    assert "weight 0 does not match its checksum" in refused(saved)


def test_much_bytecode_is_decoded_when_somebody_asks_for_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "DECODE_LIMIT", 0)
    found = load(saved)
    decoded: list[int] = []
    read = artifact._function_from_json
    monkeypatch.setattr(artifact, "_function_from_json", lambda item: (decoded.append(1), read(item))[1])
    kept = dataclasses.replace(found, constants=found.constants[:1])
    assert decoded == []
    assert found.functions == sample().functions and kept.functions["main"] == sample().functions["main"]
    assert list(found.functions) == ["main", "fill"] and len(decoded) == 2
    save(found, saved)
    assert load(saved).functions == sample().functions


def test_much_bytecode_that_is_malformed_is_refused_when_it_is_needed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(saved, {"kernels": []})
    assert "there is no kernel 'k'" in refused(saved)
    monkeypatch.setattr(artifact, "DECODE_LIMIT", 0)
    found = load(saved)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"function 'main', 2: .*: there is no kernel 'k'"):
            found.functions["main"]
    for options in ({"verify": True}, {"to_run": False}):
        with pytest.raises(ArtifactError, match="there is no kernel 'k'"):
            load(saved, **options)
    save(sample(host=HostCode()), saved)  # where functions are interpreted
    forge(saved, {"kernels": []})
    assert "there is no kernel 'k'" in refused(saved)


def forge(path: Path, change: dict[str, object]) -> None:
    """Rewrite the manifest with valid checksums, as a person with an editor and bad intentions would."""
    content = path.read_bytes()
    fields = list(artifact._HEADER.unpack_from(content))
    manifest_size = fields[4]
    manifest = {**json.loads(content[64 : 64 + manifest_size]), **change}
    encoded = json.dumps(manifest, separators=(",", ":")).encode()
    payload = content[artifact._align(64 + manifest_size, 4096) :]
    start = artifact._align(64 + len(encoded), 4096)
    fields[3:] = [start + len(payload), len(encoded), zlib.crc32(encoded)]
    header = artifact._HEADER.pack(*fields)
    header = (header + artifact._CRC.pack(zlib.crc32(header))).ljust(64, b"\0")
    path.write_bytes((header + encoded).ljust(start, b"\0") + payload)


@pytest.mark.parametrize(
    "change",
    [
        {"entries": None},
        {"entries": []},
        {"entries": [["main", {"inputs": [], "outputs": [], "donated": []}, 99, 4, ""]]},
        {"entries": [["main", {"inputs": [{}], "outputs": [], "donated": []}, 0, 0, ""]]},
        {"entries": [["other", {"inputs": [], "outputs": [], "donated": []}, 0, 0, ""]]},
        {"entries": [["main", {"inputs": [], "outputs": [], "donated": []}, 1 << 40, 0, ""]]},
        {"target": {"nonsense": 1, "features": []}},
        {"kernels": [1]},
        {"kernels": []},
        {"metadata": {"what": 1}},
        {"constants": []},
        {"constants": [["float99", [6]]] * 4},
        {"constants": [["float64", [7]]] * 4},
        {"attachments": None},
        {"attachments": ["tokenizer"]},
        {"attachments": ["tokenizer", "tokenizer"]},
        {"attachments": ["a", "b", "c", "d", "e", "f", "g"]},
        {"support": None},
        {"support": [["pool.0123", 50]]},
        {"support": [["pool.0123", 53], ["reader.4567", 2]]},
        {"support": [[["pool"], 50], ["reader.4567", 4]]},
        {"sections": []},
        {"sections": [[-4096, 10, 0, 0]] * 9},
        {"sections": [[1 << 62, 10, 0, 0]] * 9},
        {"sections": [["a", 10, 0, 0]] * 9},
    ],
)
def test_forged_manifests_are_refused(saved: Path, change: dict[str, object]) -> None:
    forge(saved, {})
    load(saved)
    forge(saved, change)
    assert refused(saved)


def test_other_processors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"
    save(sample(target=TargetInfo("riscv64-unknown-linux-gnu", "rv", ())), path)
    assert refused(path) == f"it was compiled for riscv64, and this machine is {platform.machine().lower()}"
    features = ("-sse4a", "+avx1024", "quantum")
    save(sample(target=dataclasses.replace(HOST, features=features)), path)
    assert "it was compiled for some-cpu, and this CPU (" in refused(path)
    assert "lacks avx1024, quantum; compile the model again" in refused(path)


def test_other_systems_are_refused(tmp_path: Path) -> None:
    names = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
    other = "pc-windows-msvc" if sys.platform == "linux" else "unknown-linux-gnu"
    save(sample(target=TargetInfo(f"{platform.machine()}-{other}", "some-cpu", ())), tmp_path / "m")
    wanted = "Windows" if sys.platform == "linux" else "Linux"
    assert refused(tmp_path / "m") == f"it was compiled for {wanted}, and this machine runs {names[sys.platform]}"


def test_what_is_for_another_machine_can_be_looked_at(tmp_path: Path) -> None:
    foreign = TargetInfo("riscv64-unknown-linux-gnu", "rv", ("v",))
    save(sample(target=foreign), tmp_path / "m")
    data = load(tmp_path / "m", to_run=False)
    assert data.target == foreign and disassemble(data) == disassemble(sample())


def test_an_artifact_without_kernels_runs_anywhere(tmp_path: Path) -> None:
    main = VMFunction("main", ("x",), 1, (Ret(0),))
    x = TensorSpec("x", "float32", ())
    data = ExecutableData(
        {"main": main}, Signature((x,), (x,)), target=TargetInfo("riscv64-unknown-linux", "rv", ("v",))
    )
    save(data, tmp_path / "m")
    assert load(tmp_path / "m").functions == {"main": main}
