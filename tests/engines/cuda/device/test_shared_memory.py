"""Tables that are files, mapped for a device; memory that processes share on a device is tested with pools."""

from __future__ import annotations

import gc
import math
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from msplit.engines.cuda.device.shared_memory import FileTable


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_table_is_mapped_from_its_file_and_may_become_memory(data: st.DataObject, tmp_path: Path) -> None:
    kind = np.dtype(data.draw(st.sampled_from(["float32", "float16", "int64", "int8", "complex128"])))
    before = data.draw(st.integers(0, 3 * mmap.PAGESIZE // 4)) * data.draw(st.sampled_from([1, 4, 16]))
    shape = data.draw(st.sampled_from([(1,), (1, 1), (3, 4), (17, 8), (257, 32), (5, 2, 3), (0, 4)]))
    size, behind = math.prod(shape) * kind.itemsize, data.draw(st.sampled_from([0, 1, 5000]))
    written = np.random.default_rng(before).integers(0, 256, before + size + behind, np.uint8).tobytes()
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    path.write_bytes(written or b" ")
    mapped = np.memmap(path, np.uint8, "r")
    array = mapped[before : before + size].view(kind).reshape(shape)
    wanted = array.tobytes()
    assert isinstance(FileTable.of(np.memmap(path, np.uint8, "c")[: before + size]), str)
    assert isinstance(FileTable.of(np.memmap(path, np.uint8, "r+")[: before + size]), str)
    assert isinstance(FileTable.of(array.copy()), str)
    found = FileTable.of(array)
    fits = before % max(math.gcd(16, kind.itemsize * math.prod(shape[1:])), kind.itemsize) == 0
    assert isinstance(found, FileTable) == bool(fits and size)
    if isinstance(found, FileTable):
        assert isinstance(FileTable.of(found.rows), FileTable), "a pool maps what was mapped to be compiled"
        path.unlink()  # the file stays as long as it is mapped
        del array, mapped
        gc.collect()
        assert found.rows.tobytes() == wanted
        place = found.rows.ctypes.data
        copy = found.memory()
        copy[:] = found.pages
        found.take(copy)
        assert found.rows.ctypes.data == place
        assert found.rows.tobytes() == wanted
        found.rows[:] = 0
        assert not any(found.rows.tobytes())
        path.write_bytes(written)


def test_what_is_mapped_is_let_go(tmp_path: Path) -> None:
    def maps() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    (tmp_path / "file").write_bytes(bytes(1 << 16))
    mapped = np.memmap(tmp_path / "file", np.float32, "r")
    found = FileTable.of(mapped[1024:])
    assert isinstance(found, FileTable)
    rows = found.rows[3:4]
    assert maps() == 2
    del found, mapped
    gc.collect()
    assert maps() == 1
    assert rows[0] == 0
    del rows
    gc.collect()
    assert maps() == 0


def test_a_table_across_two_gigabytes(tmp_path: Path) -> None:
    """A file with holes: nothing of it is on the disk but what is written."""
    path, width = tmp_path / "file", 1 << 20
    count = (1 << 31) // (4 * width) + 2
    with path.open("wb") as file:
        file.truncate(4096 + 4 * width * count)
        for row in range(count - 3, count):
            file.seek(4096 + 4 * width * row)
            file.write(np.full(3, row, np.float32).tobytes())
    table = np.memmap(path, np.uint8, "r")[4096:].view(np.float32).reshape(count, width)
    found = FileTable.of(table)
    assert isinstance(found, FileTable)
    np.testing.assert_array_equal(found.rows[-4:, 2], [0, count - 3, count - 2, count - 1])
