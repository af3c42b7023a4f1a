"""The border between the runtime's tensors and everybody else's: NumPy, DLPack, the array interface, Python lists."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxlite import dtypes
from relaxlite.errors import InputError
from relaxlite.runtime.memory import ArenaPool, allocate
from relaxlite.runtime.tensor import Heap, Tensor, export_array, import_tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def take(value: object, dtype: str) -> Tensor:
    return import_tensor(value, dtype, "argument 'x'")


@pytest.mark.parametrize("dtype", dtypes.ALL)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3)])
def test_dense_arrays_cross_without_a_copy(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtypes.to_numpy(dtype))
    tensor = take(array, dtype)
    assert tensor.ptr == array.ctypes.data
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    back = tensor.numpy()
    assert back.dtype == array.dtype and back.shape == shape
    np.testing.assert_array_equal(back, array)
    assert array.size == 0 or np.shares_memory(back, array)


def test_the_view_keeps_the_memory_alive() -> None:
    view = take(np.arange(1000), "int64").numpy()
    np.testing.assert_array_equal(view, np.arange(1000))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_only_arrays_stay_read_only(dtype: str) -> None:
    array = np.ones(3, dtypes.to_numpy(dtype))
    array.flags.writeable = False
    tensor = take(array, dtype)
    assert tensor.ptr == array.ctypes.data
    assert not tensor.numpy().flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12.0)[::2],
        np.arange(12.0)[::-1],
        np.broadcast_to(np.arange(3.0), (4, 3)),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    ],
)
def test_arrays_that_are_not_dense_are_copied(array: np.ndarray) -> None:
    back = take(array, "float64").numpy()
    assert back.flags.c_contiguous
    np.testing.assert_array_equal(back, array)


def test_misaligned_and_byte_swapped_arrays_are_copied() -> None:
    misaligned = np.frombuffer(b"\0" + np.arange(3, dtype=np.float32).tobytes(), np.float32, offset=1)
    assert not misaligned.flags.aligned
    np.testing.assert_array_equal(take(misaligned, "float32").numpy(), [0, 1, 2])
    assert take(misaligned, "float32").ptr % 4 == 0
    np.testing.assert_array_equal(take(np.array([1, 2], ">i4"), "int32").numpy(), [1, 2])


def test_zero_rank_stays_zero_rank() -> None:
    assert take(np.arange(2.0)[::2][0], "float64").shape == ()
    assert take(3, "int64").shape == ()


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.ones(2), "float32", "got float64, expects float32; convert it with .astype('float32')"),
        (np.ones(2, np.int32), "int64", "got int32, expects int64; convert it with .astype('int64')"),
        (np.ones(2, ">f8"), "float32", "got float64, expects float32"),
        (np.float64(1.5), "float32", "got float64, expects float32"),
        (np.ones(2, np.float32), "bfloat16", "convert it with .astype(ml_dtypes.bfloat16)"),
        (np.array(["a"]), "int8", "got str32, expects int8"),
        (np.ones(2, complex), "float32", "got complex128, expects float32"),
        (np.array([object()]), "float32", "got object, expects float32"),
        ([1.5], "int64", "got Python values that NumPy reads as float64, expects int64"),
        ([1], "bool", "got Python values that NumPy reads as int64, expects bool"),
        ([True], "float32", "got Python values that NumPy reads as bool, expects float32"),
        ([300], "uint8", "the value 300 does not fit uint8"),
        ([1, -1], "uint64", "the value -1 does not fit uint64"),
        ([2**24 + 1], "float32", "the value 16777217 does not fit float32"),
        ([1e300], "float32", "the value 1e+300 does not fit float32"),
        ([[1, 2], [3]], "int64", "list is not a tensor"),
        ([2**70], "int64", "expects an array, got list"),
        (None, "int64", "expects an array, got NoneType"),
        (object(), "int64", "expects an array, got object"),
        ("text", "int64", "got str128, expects int64"),
    ],
)
def test_other_types_are_errors(value: object, dtype: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        take(value, dtype)
    assert str(caught.value).startswith("argument 'x': ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2, 3], "int64"),
        ([1, 2, 3], "int8"),
        ([1, 2, 3], "float32"),
        ([1, 2, 3], "bfloat16"),
        ([0.1, float("nan"), float("inf")], "float32"),
        ([0.5, 2], "bfloat16"),
        ([True, False], "bool"),
        ([], "int64"),
        ([[], []], "float16"),
        (((1, 2), (3, 4)), "uint8"),
        (2.5, "float16"),
        (True, "bool"),
    ],
)
def test_python_numbers_take_the_dtype_of_the_model(value: Any, dtype: str) -> None:
    tensor = take(value, dtype)
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.numpy(), np.asarray(value).astype(dtypes.to_numpy(dtype)))


class Foreign:
    """Another library's tensor: DLPack and nothing else."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_dlpack_crosses_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = take(Foreign(array), "float32")
    assert tensor.ptr == array.ctypes.data
    np.testing.assert_array_equal(take(Foreign(array.T), "float32").numpy(), array.T)


def test_dlpack_dtype_is_checked() -> None:
    with pytest.raises(InputError, match="got float64, expects float32"):
        take(Foreign(np.ones(3)), "float32")


@pytest.mark.parametrize(("device", "name"), [((2, 1), "CUDA:1"), ((10, 0), "ROCm:0"), ((99, 0), "type 99:0")])
def test_other_devices_are_errors(device: tuple[int, int], name: str) -> None:
    with pytest.raises(InputError, match=f"argument 'x': the tensor is on device {name}; copy it to the CPU first"):
        take(Foreign(np.ones(3), device), "float64")


def test_a_producer_that_refuses_is_reported() -> None:
    class Stubborn(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise RuntimeError("requires grad: use detach()")

    with pytest.raises(InputError, match=r"Stubborn cannot be read through DLPack: requires grad: use detach\(\)"):
        take(Stubborn(np.ones(3)), "float64")


class BFloat16Producer:
    """DLPack as PyTorch makes it for bfloat16: NumPy itself cannot, so a uint16 capsule is relabelled."""

    def __init__(self, array: np.ndarray) -> None:
        self.bits = array.view(np.uint16)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.bits.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        address = get(ctypes.py_object(capsule), b"dltensor")
        (ctypes.c_uint8 * 2).from_address(address + 20)[0] = 4
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_dlpack_bfloat16_crosses_without_a_copy() -> None:
    array = np.array([1.5, -2.0, 3.0], BFLOAT16)
    tensor = take(BFloat16Producer(array), "bfloat16")
    assert tensor.ptr == array.ctypes.data
    assert tensor.numpy().dtype == BFLOAT16
    np.testing.assert_array_equal(tensor.numpy(), array)
    with pytest.raises(InputError, match="got bfloat16, expects float32"):
        take(BFloat16Producer(array), "float32")


def test_the_array_interface_and_the_runtimes_own_tensors_are_read() -> None:
    class Interface:
        def __init__(self, array: np.ndarray) -> None:
            self.__array_interface__ = array.__array_interface__
            self.array = array

    array = np.arange(4)
    assert take(Interface(array), "int64").ptr == array.ctypes.data
    assert take(take(array, "int64"), "int64").ptr == array.ctypes.data


def test_outputs_own_their_memory_and_support_dlpack() -> None:
    memory = allocate(24, "x")
    tensor = Tensor(memory.ptr, (2, 3), "float32", memory)
    given: set[int] = set()
    first, second = export_array(tensor, given), export_array(tensor, given)
    assert first.ctypes.data == memory.ptr
    assert not np.shares_memory(first, second)
    first[:] = 7
    assert np.shares_memory(np.from_dlpack(first), first)
    assert first.flags.writeable and first.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_never_alias_arenas_inputs_or_constants(dtype: str) -> None:
    array = np.zeros(4, dtypes.to_numpy(dtype))
    out = export_array(take(array, dtype), set())
    assert not np.shares_memory(out, array) and out.dtype == array.dtype
    arena = ArenaPool().take(64, "arena")
    out = export_array(Tensor(arena.ptr, (4,), dtype, arena), set())
    assert not np.shares_memory(out, arena.raw)


def test_heap_slots_start_at_zero_and_are_shared_with_kernels() -> None:
    heap = Heap(4)
    assert list(heap.values) == [0, 0, 0, 0]
    heap.values[2] = -5
    np.testing.assert_array_equal(heap.numpy(), [0, 0, -5, 0])
    assert ctypes.c_int64.from_address(heap.ptr + 16).value == -5
