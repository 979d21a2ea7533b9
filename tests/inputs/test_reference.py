import contextlib
import os
import zipfile

import ml_dtypes
import numpy as np
import pytest

from msplit.errors import LoadError, WriteError
from msplit.inputs.files import read_value
from msplit.inputs.reference import Reference, load_reference, save_reference


def reference():
    strings = np.array([[b"a", b""], [b"\x00b\x00", "ä".encode()]], object)
    return Reference(
        feeds={"x": np.arange(6, dtype=np.float32).reshape(2, 3), "city": strings, "scope/flag": np.array(True)},
        outputs={
            "y": np.array([1, 2], ml_dtypes.bfloat16),
            "n": np.array(7, np.int64),
            "e": np.zeros((0, 3), np.float32),
        },
        source="TensorFlow 2.21 on the CPU",
    )


def test_what_is_saved_comes_back(tmp_path):
    save_reference(tmp_path / "r.npz", reference())
    back = load_reference(tmp_path / "r.npz")
    assert back.source == "TensorFlow 2.21 on the CPU"
    for before, after in ((reference().feeds, back.feeds), (reference().outputs, back.outputs)):
        assert list(before) == list(after)
        for name, value in before.items():
            assert after[name].dtype == value.dtype
            assert after[name].shape == value.shape
            assert after[name].tolist() == value.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["r.npz"]


def test_numpy_alone_can_read_it(tmp_path):
    save_reference(tmp_path / "r.npz", reference())
    with np.load(tmp_path / "r.npz") as archive:
        np.testing.assert_array_equal(archive["input/x"], reference().feeds["x"])


def test_a_file_that_is_none_is_told(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.zeros(1))
    np.savez(tmp_path / "pickle.npz", msplit=np.array([{}], object))
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04 nonsense")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "single.npy", np.zeros(2))
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive, archive.open("input/x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": (10**15,)})
    for name in ("other.npz", "pickle.npz", "junk.npz", "empty.npz", "single.npy", "claims.npz", "missing.npz"):
        with pytest.raises(LoadError, match="save-reference="):
            load_reference(tmp_path / name)


def test_a_truncated_file_is_told(tmp_path):
    save_reference(tmp_path / "r.npz", reference())
    data = (tmp_path / "r.npz").read_bytes()
    for size in range(1, len(data), 97):
        (tmp_path / "cut.npz").write_bytes(data[:size])
        with pytest.raises(LoadError):
            load_reference(tmp_path / "cut.npz")


@pytest.mark.parametrize("bit", range(8))
def test_a_file_with_a_wrong_bit_is_told_or_read(tmp_path, bit):
    save_reference(tmp_path / "r.npz", reference())
    data = (tmp_path / "r.npz").read_bytes()
    for place in range(bit, len(data), 8):
        (tmp_path / "wrong.npz").write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        with contextlib.suppress(LoadError):
            load_reference(tmp_path / "wrong.npz")
        with contextlib.suppress(LoadError):
            read_value("x", tmp_path / "wrong.npz", "float32", None)


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(WriteError, match="folder it goes into does not exist"):
        save_reference(tmp_path / "no" / "r.npz", reference())


def test_an_old_file_survives_a_failure(tmp_path, monkeypatch):
    save_reference(tmp_path / "r.npz", reference())
    before = (tmp_path / "r.npz").read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="is there already"):
        save_reference(tmp_path / "r.npz", reference())
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(WriteError, match="the disk is full"):
        save_reference(tmp_path / "r.npz", reference(), force=True)
    assert (tmp_path / "r.npz").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
