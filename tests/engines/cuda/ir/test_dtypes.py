import ml_dtypes
import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import as_words, dtype_name, numpy_dtype, to_numpy, to_torch, torch_dtype
from msplit.engines.cuda.ir.node import Unsupported

NAMES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e5m2",
    "float8_e4m3fn",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_arrays_survive_the_round_trip(name, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(numpy_dtype(name))
    tensor = to_torch(array)
    assert tensor.dtype == torch_dtype(name)
    assert tuple(tensor.shape) == shape
    back = to_numpy(tensor)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert dtype_name(tensor.dtype) == name


def test_bfloat16_keeps_its_bits():
    array = np.array([1.5, -0.0, np.inf, 3.14]).astype(ml_dtypes.bfloat16)
    assert to_torch(array).tolist() == [1.5, -0.0, float("inf"), 3.140625]


def test_odd_memory_is_read_right():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    for array in (base.T, base[::-1, ::2], base.astype(">f4")):
        np.testing.assert_array_equal(to_numpy(to_torch(array)), np.asarray(array, np.float32))


def test_read_only_arrays_are_copied():
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = to_torch(array)
    tensor += 1
    assert array.tolist() == [0.0, 1.0, 2.0]


def test_views_of_tensors_are_read_right():
    tensor = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).t()
    np.testing.assert_array_equal(to_numpy(tensor).astype(np.float32), [[0, 3], [1, 4], [2, 5]])
    complex_tensor = torch.tensor([1 + 2j]).conj()
    assert to_numpy(complex_tensor)[0] == 1 - 2j


@pytest.mark.parametrize("array", [np.array([b"x"], object), np.array(["x"]), np.array([b"x"])], ids=str)
def test_strings_are_refused(array):
    with pytest.raises(Unsupported, match="strings"):
        to_torch(array)


def test_unknown_dtypes_are_refused_by_name():
    with pytest.raises(Unsupported, match="qint8"):
        torch_dtype("qint8")


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128]
)
def test_words_are_the_bits_of_a_tensor_without_a_copy(dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    words = as_words(tensor)
    assert words.data_ptr() == tensor.data_ptr()
    assert words.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    assert words.numel() * words.element_size() == tensor.numel() * tensor.element_size()
    assert torch.equal(words.view(dtype), tensor)
