"""The reader of checkpoints, on tables made by hand; what TensorFlow writes is in test_restore.py."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.errors import LoadError, MsplitError
from msplit.formats.bundle import Checkpoint, masked_crc
from msplit.opset import schema

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def block(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """A block, each key with the prefix that it shares with the one before left out."""
    out, before = b"", b""
    for key, value in pairs:
        shared = 0
        while shared < min(len(key), len(before)) and key[shared] == before[shared]:
            shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    return out + b"\0\0\0\0" + b"\1\0\0\0"


def summed(data: bytes) -> bytes:
    return data + masked_crc(data).to_bytes(4, "little")


def table(blocks: list[bytes], *, compression: int = 0) -> bytes:
    out, handles = b"", []
    for part in blocks:
        handles.append((b"\xff" * (len(handles) + 1), varint(len(out)) + varint(len(part))))
        out += summed(part + bytes([compression]))
    index = block(handles)
    footer = b"\0\0" + varint(len(out)) + varint(len(index))
    out += summed(index + b"\0")
    return out + footer.ljust(40, b"\0") + MAGIC


def entry(dtype: int, shape: list[int], offset: int, data: bytes, **fields: Any) -> bytes:
    """The entry of a tensor; `data` is what its checksum is of, unless a size says that it is stored otherwise."""
    fields = {"size": len(data), "crc32c": masked_crc(data), **fields}
    message = schema.tensor_bundle_pb2.BundleEntryProto(dtype=dtype, offset=offset, **fields)
    for dim in shape:
        message.shape.dim.add(size=dim)
    return message.SerializeToString()


def header(**fields: Any) -> tuple[bytes, bytes]:
    return b"", schema.tensor_bundle_pb2.BundleHeaderProto(**{"num_shards": 1, **fields}).SerializeToString()


LENGTHS = summed(b"\1\0\0\0\2\0\0\0")[-4:]
WORDS = b"\1\2" + LENGTHS + b"abc"
"""The strings a and bc as they are stored, and below what their checksum is of."""
WORDS_SUMMED = b"\1\0\0\0\2\0\0\0" + LENGTHS + b"abc"


def write(folder: Path, index: bytes, *shards: bytes) -> Path:
    (folder / "v.index").write_bytes(index)
    for number, data in enumerate(shards):
        (folder / f"v.data-{number:05d}-of-{len(shards):05d}").write_bytes(data)
    return folder / "v"


def test_tensors_of_several_blocks_and_shards(tmp_path: Path) -> None:
    first = np.arange(6, dtype=np.float32)
    index = table(
        [
            block(
                [
                    header(num_shards=2),
                    (b"dense/bias", entry(1, [2, 3], 1, first.tobytes())),
                    (b"dense/kernel", entry(10, [], 0, b"\1")),
                ]
            ),
            block(
                [
                    (b"word", entry(7, [2], 0, WORDS_SUMMED, size=len(WORDS), shard_id=1)),
                    (b"\0some\0\1slice", entry(1, [], 1, b"\1\2" + LENGTHS[:2])),
                ]
            ),
        ]
    )
    checkpoint = Checkpoint(write(tmp_path, index, b"\1" + first.tobytes(), WORDS))
    assert "dense/bias" in checkpoint
    assert "dense" not in checkpoint
    bias = checkpoint.tensor("dense/bias")
    np.testing.assert_array_equal(bias, first.reshape(2, 3))
    assert bias.flags.aligned  # though its bytes are not, in the file
    assert checkpoint.tensor("dense/kernel") == np.True_
    np.testing.assert_array_equal(checkpoint.tensor("word"), np.array([b"a", b"bc"], dtype=object))
    with pytest.raises(KeyError):
        checkpoint.tensor("dense")


def test_empty_tensor_of_an_empty_shard(tmp_path: Path) -> None:
    index = table([block([header(), (b"none", entry(1, [0, 4], 0, b""))])])
    assert Checkpoint(write(tmp_path, index, b"")).tensor("none").shape == (0, 4)


def test_a_damaged_tensor_behind_an_empty_one_is_refused(tmp_path: Path) -> None:
    """Both begin at the same place of the shard, and each has a checksum of its own."""
    index = table([block([header(), (b"a", entry(1, [0], 0, b"")), (b"b", entry(1, [2], 0, b"\0" * 8))])])
    with pytest.raises(LoadError, match="'b' does not fit its checksum"):
        Checkpoint(write(tmp_path, index, b"\0" * 7 + b"\1")).verify()


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "data", "what"),
    [
        (1, [2], 8, b"\0" * 7, "cut off: 'x' is not all there"),
        (1, [3], 8, b"\0" * 8, "size of 'x' does not fit"),
        (1, [2], 8, b"\0" * 7 + b"\1", "'x' does not fit its checksum"),
        (7, [2], 3, b"\xff\xff\xff", "'x' is no list of strings"),
        (7, [1], 14, b"\xff" * 9 + b"\x7f" + LENGTHS, "'x' is no list of strings"),
        (7, [2], 9, WORDS[:-1] + b"d", "'x' does not fit its checksum"),
        (7, [2], 9, b"\2\1" + WORDS[2:], "'x' does not fit its checksum"),
        (7, [2], 9, WORDS.replace(LENGTHS, b"crc!"), "'x' does not fit its checksum"),
    ],
)
def test_damaged_shards(tmp_path: Path, dtype: int, shape: list[int], size: int, data: bytes, what: str) -> None:
    as_written = WORDS_SUMMED if dtype == 7 else b"\0" * 8
    index = table([block([header(), (b"x", entry(dtype, shape, 0, as_written, size=size))])])
    with pytest.raises(LoadError, match=f"v.data-00000-of-00001: .*{what}") as error:
        Checkpoint(write(tmp_path, index, data)).tensor("x")
    assert error.value.fix


def test_strings_that_their_lengths_do_not_fit(tmp_path: Path) -> None:
    index = table([block([header(), (b"x", entry(7, [2], 0, WORDS_SUMMED[:-1], size=8))])])
    with pytest.raises(LoadError, match="strings"):
        Checkpoint(write(tmp_path, index, WORDS[:-1])).tensor("x")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no checkpoint"):
        Checkpoint(tmp_path / "v")
    index = table([block([header(), (b"x", entry(1, [], 0, b"\0" * 4))])])
    with pytest.raises(LoadError, match=r"data-00000-of-00001: can not be read: No such file"):
        Checkpoint(write(tmp_path, index)).tensor("x")
    (tmp_path / "w.index").mkdir()
    with pytest.raises(LoadError, match="can not be read: Is a directory"):
        Checkpoint(tmp_path / "w")


@pytest.mark.parametrize(
    "index",
    [
        table([block([header(), (b"x", b"\xff")])]),
        table([b"\0"]),
        table([block([header()])]).replace(b"\x08\x01", b"\x08\x02", 1),  # the number of shards, with a wrong checksum
        table([b"\x05\x01\x01ab" + b"\0\0\0\0" + b"\1\0\0\0"]),
        table([b"\0\x01\x7fab" + b"\0\0\0\0" + b"\1\0\0\0"]),
        b"\0\0\xff\x7f\xff\x7f".ljust(40, b"\0") + MAGIC,
        b"\xff" * 40 + MAGIC,
    ],
)
def test_damaged_indexes(tmp_path: Path, index: bytes) -> None:
    with pytest.raises(LoadError, match="index of the checkpoint is damaged"):
        Checkpoint(write(tmp_path, index))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_index_raises_anything_but_our_own_errors(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    changed = bytearray((SAMPLES / "gru_while" / "variables" / "variables.index").read_bytes())
    # The last eight bytes stay: without them TensorFlow's own reader is asked.
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 9))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.getbasetemp()
    try:
        checkpoint = Checkpoint(write(folder, bytes(changed), b"\0" * 100))
        for key in checkpoint._entries or ():
            checkpoint.tensor(key)
    except MsplitError as error:
        assert error.what  # noqa: PT017


@pytest.mark.tf
@pytest.mark.parametrize("how", ["compressed", "not a table"])
def test_what_it_does_not_know_is_left_to_tensorflow(tmp_path: Path, how: str) -> None:
    index = {
        "compressed": table([block([header(), (b"x", entry(1, [], 0, b"\0" * 4))])], compression=1),
        "not a table": b"nothing like it",
    }[how]
    # TensorFlow can not read these either; that it was asked shows in its words.
    with pytest.raises(LoadError, match="the checkpoint can not be read"):
        Checkpoint(write(tmp_path, index, b"\0" * 4))


@pytest.mark.tf
def test_what_tensorflow_reads_and_finds_damaged_is_told_as_our_own(tmp_path: Path) -> None:
    one = b"\x3f\x80\0\0"
    index = table([block([header(endianness=1), (b"x", entry(1, [], 0, one)), (b"y", entry(1, [], 4, one))])])
    checkpoint = Checkpoint(write(tmp_path, index, one + one[:-1] + b"\1"))
    assert checkpoint.tensor("x") == 1
    with pytest.raises(LoadError, match=r"'y' of the checkpoint can not be read: (.|\n)*[Cc]hecksum") as error:
        checkpoint.tensor("y")
    assert error.value.fix


def test_whole_models_need_no_tensorflow() -> None:
    code = (
        "import sys; from msplit import formats; "
        f"v = formats.variables(formats.read({str(SAMPLES / 'gru_while')!r})); "
        "assert len(v) > 5 and 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
