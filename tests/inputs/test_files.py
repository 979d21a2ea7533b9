"""Values of inputs from files of every form, and files that are damaged or lie."""

import base64
import gzip
import io
import json
import os
import struct
import time
import zipfile

import numpy as np
import pytest

from msplit.errors import LoadError
from msplit.formats.bundle import masked_crc
from msplit.inputs.examples import decode, encode
from msplit.inputs.files import loads, names_in, read_value
from msplit.inputs.make import make_inputs
from msplit.inputs.reference import Reference, save_reference
from msplit.opset import schema

from .graphs import flat_of, placeholder
from .test_make import kinds

WORDS = [b"one", b"two\0\0", "drei ä".encode(), b""]


def words_of(path, *, batch=None):
    return read_value("s", path, "string", batch).tolist()


def model(*specs):
    return flat_of([placeholder(*spec) for spec in specs], list(specs))


def record(data):
    head = struct.pack("<Q", len(data))
    return b"".join(part + masked_crc(part).to_bytes(4, "little") for part in (head, data))


@pytest.mark.tf
def test_records_that_tensorflow_wrote_come_with_the_zeros_at_their_end(tmp_path):
    import tensorflow as tf

    for name, options in (("plain", ""), ("packed", "GZIP")):
        with tf.io.TFRecordWriter(str(tmp_path / name), options) as writer:
            for word in WORDS:
                writer.write(word)
        assert words_of(tmp_path / name) == WORDS
        assert words_of(tmp_path / name, batch=2) == WORDS[:2]
    assert b"".join(map(record, WORDS)) == (tmp_path / "plain").read_bytes()
    feeds = make_inputs(model(("s", "string", (None,))), {}, batch=3, given={"s": tmp_path / "plain"})
    assert feeds["s"].tolist() == WORDS[:3]
    one = make_inputs(model(("s", "string", ())), {}, given={"s": tmp_path / "plain"})
    assert one["s"].item() == WORDS[0]
    with pytest.raises(LoadError, match=r"batch of 4 in this file(.|\n)*--batch 4"):
        make_inputs(model(("s", "string", (None,))), {}, batch=5, given={"s": tmp_path / "plain"})


@pytest.mark.parametrize("damage", ["cut", "bit", "length", "empty gzip", "not gzip"])
def test_damaged_records_are_told(tmp_path, damage):
    data = bytearray(b"".join(map(record, WORDS)))
    path = tmp_path / "records"
    if damage == "cut":
        path.write_bytes(data[:-2])
    elif damage == "bit":
        data[14] ^= 1
        path.write_bytes(data)
    elif damage == "length":
        path.write_bytes(data + struct.pack("<QI", 1 << 60, 0))
    else:
        path.write_bytes(gzip.compress(b"") if damage == "empty gzip" else b"\x1f\x8b nothing of the kind")
    with pytest.raises(LoadError, match="record") as error:
        words_of(path)
    assert str(path) in str(error.value)
    assert error.value.fix


def test_an_archive_gives_arrays_by_name(tmp_path):
    path = tmp_path / "all.npz"
    f, i = np.ones((2, 3), np.float32), np.array([1, 0])
    np.savez(path, f=f, i=i, other=np.array(["x", "y"]))
    feeds = make_inputs(kinds(), {}, batch=2, given={"f": path, "i": path, "s": f"{path}[other]"})
    np.testing.assert_array_equal(feeds["f"], f)
    np.testing.assert_array_equal(feeds["i"], i)
    assert feeds["s"].tolist() == ["x", "y"]
    with pytest.raises(LoadError, match="no value for input 's', but f, i, other"):
        make_inputs(kinds(), {}, batch=2, given={"s": path})
    assert names_in(path) == ["f", "i", "other"]
    np.savez(tmp_path / "some.npz", f=f, i=i)
    whole = make_inputs(kinds(), {}, batch=2, given={"": tmp_path / "some.npz"})
    np.testing.assert_array_equal(whole["f"], f)
    with pytest.raises(LoadError, match="no input 'other'"):
        make_inputs(kinds(), {}, batch=2, given={"": path})


def test_strings_that_end_in_zeros_are_kept(tmp_path):
    save_reference(tmp_path / "reference.npz", Reference({"s": np.array(WORDS, object)}, {}, "here"))
    assert words_of(tmp_path / "reference.npz") == WORDS
    assert names_in(tmp_path / "reference.npz") == ["s"]
    np.save(tmp_path / "void.npy", np.array([b"a\0", b"b\0"], "V2"))
    feeds = make_inputs(kinds(), {}, batch=2, given={"s": tmp_path / "void.npy"})
    assert feeds["s"].tolist() == [b"a\0", b"b\0"]


def test_nothing_is_unpickled(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([b"a", b"b"], object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", s=np.array([b"a", b"b"], object))
    for name in ("objects.npy", "objects.npz"):
        with pytest.raises(LoadError, match=r"can run code(.|\n)*astype"):
            make_inputs(kinds(), {}, batch=2, given={"s": tmp_path / name})


def claiming(count):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    return file.getvalue() + b"\0" * 64


def test_a_header_that_claims_more_than_there_is_costs_nothing(tmp_path):
    (tmp_path / "large.npy").write_bytes(claiming(10**12))
    with zipfile.ZipFile(tmp_path / "large.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("f.npy", claiming(10**12))
    for name in ("large.npy", "large.npz"):
        with pytest.raises(LoadError, match=r"claims 1,000,000,000,000 elements of 4 bytes, and there are 64 bytes"):
            read_value("f", tmp_path / name, "float32", None)


def test_headers_that_are_no_headers_are_told(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(3, np.float32))
    np.savez(tmp_path / "x.npz", f=np.ones(3, np.float32))
    header = (tmp_path / "x.npy").read_bytes().replace(b"}", b" ")
    archive = bytearray((tmp_path / "x.npz").read_bytes())
    archive[archive.rindex(b"PK\x01\x02") + 6] = 128  # the version that it takes to read it
    for name, data in (("x.npy", header), ("x.npz", archive)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(LoadError) as error:
            read_value("f", tmp_path / name, "float32", None)
        assert error.value.fix


def test_an_archive_that_lies_about_its_size_is_told(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("f.npy", claiming(16))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(data)
    with pytest.raises(LoadError, match="which can not be"):
        read_value("f", path, "float32", None)


@pytest.mark.parametrize(
    "message",
    [
        {"instances": [{"f": [1, 2, 3], "i": 4}, {"f": [4, 5, 6], "i": 5}]},
        {"inputs": {"f": [[1, 2, 3], [4, 5, 6]], "i": [4, 5]}},
        {"signature_name": "serving_default", "inputs": {"f": [[1, 2, 3], [4, 5, 6]], "i": [4, 5]}},
        {"f": [[1, 2, 3], [4, 5, 6]], "i": [4, 5]},
        [{"f": [1, 2, 3], "i": 4}, {"f": [4, 5, 6], "i": 5}],
    ],
)
def test_rows_and_columns_of_json(tmp_path, message):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(message))
    feeds = make_inputs(kinds(), {}, batch=2, given={"": path})
    assert feeds["f"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert feeds["f"].dtype == np.float32
    assert feeds["i"].tolist() == [4, 5]


def test_strings_of_json(tmp_path):
    path = tmp_path / "request.json"
    listed = [{"b64": base64.b64encode(WORDS[1]).decode()}, "drei ä", {"age": [22, 24], "name": "x", "rate": 0.5}]
    for message in ({"instances": listed}, {"inputs": listed}, listed, {"instances": [{"s": each} for each in listed]}):
        path.write_text(json.dumps(message))
        found = words_of(path)
        assert found[:2] == [WORDS[1], WORDS[2]]
        assert decode(found[2]) == {"age": [22, 24], "name": [b"x"], "rate": [0.5]}
    path.write_text(json.dumps({"context": {"day": "mon"}, "examples": [{"age": -1}, {"age": [1, 2]}]}))
    assert list(map(decode, words_of(path))) == [{"day": [b"mon"], "age": [-1]}, {"day": [b"mon"], "age": [1, 2]}]
    path.write_text(json.dumps([{"age": [True, 3], "tags": []}, {"b64": "YWI"}, {"b64": " YW\nI= "}]))
    row, *texts = words_of(path)
    assert texts == [b"ab", b"ab"], "what fills base64 up may be left out, and blanks stand in it"
    assert decode(row) == {"age": [1, 3], "tags": []}
    features = schema.example_pb2.Example.FromString(row).features.feature
    assert features["tags"].WhichOneof("kind") is None, "an empty list is of any type"


@pytest.mark.parametrize(
    ("text", "name", "what"),
    [
        ("{", "f", "is no JSON"),
        ("[" * 100_000, "f", "is no JSON"),
        ('{"instances": 3}', "f", "is no list"),
        ('{"examples": [1]}', "f", "'examples' are no objects"),
        ('{"examples": [{"age": 1}], "context": "day"}', "f", "'examples' are no objects"),
        ('{"instances": [{"f": 1}, {"i": 1}]}', "f", "instance 1 has other inputs than the first: f, i"),
        ('{"inputs": {"f": [[1, 2], [3]]}}', "f", "rows of different lengths"),
        ('{"inputs": {"s": [["a"], ["b", "c"]]}}', "s", "rows of different lengths"),
        ('{"inputs": {"s": [["a", "b"], ["c"], ["d", "e", "f"]]}}', "s", "rows of different lengths"),
        ('{"inputs": {"f": ["x"]}}', "f", "is float32, the file has strings"),
        ('{"inputs": {"i": [1.5]}}', "i", "is int64, the file has numbers with a fraction"),
        ('{"inputs": {"i": [true]}}', "i", "is int64, the file has true and false"),
        ('{"inputs": {"b": [1]}}', "b", "is bool"),
        ('{"inputs": {"i": [9223372036854775808]}}', "i", "larger numbers"),
        ('{"inputs": {"s": [1]}}', "s", "is made of strings, the file has 1"),
        ('{"inputs": {"s": [{"b64": "%"}]}}', "s", "input 's'"),
        ('{"inputs": {"s": [{"b64": "YWI=="}]}}', "s", "input 's'"),
        ('{"inputs": {"s": [{"b64": "Y"}]}}', "s", "input 's'"),
        ('{"inputs": {"s": [{"age": [1, "x"]}]}}', "s", "a feature is a list of strings or of numbers"),
        ('{"inputs": {"g": 1}}', "f", "no value for input 'f', but g"),
        ("hello", "f", "of no format that inputs are read from"),
    ],
)
def test_json_that_does_not_fit_is_told(tmp_path, text, name, what):
    path = tmp_path / "request.json"
    path.write_text(text)
    dtype = {end.name: end.dtype for end in kinds().model.inputs}[name]
    with pytest.raises(LoadError, match=what) as error:
        read_value(name, path, dtype, None)
    assert error.value.fix


def test_a_key_that_is_there_twice_is_found_among_many_in_time():
    text = "{" + ",".join(f'"{number}": 1' for number in range(50_000)) + ', "49999": 1}'
    start = time.process_time()
    with pytest.raises(ValueError, match="key '49999' is there twice"):
        loads(text)
    assert time.process_time() - start < 5


def test_special_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        with pytest.raises(LoadError, match="can not be read"):
            read_value("f", path, "float32", None)


def test_one_value_without_a_name_needs_one_input(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.ones((2, 3), np.float32))
    alone = model(("f", "float32", (None, 3)))
    assert make_inputs(alone, {}, batch=2, given={"": path})["f"].tolist() == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(LoadError, match=r"without a name, and the model has 6 inputs(.|\n)*--input f="):
        make_inputs(kinds(), {}, batch=2, given={"": path})


@pytest.mark.tf
def test_examples_are_those_of_tensorflow():
    import tensorflow as tf

    features = {"a": [b"x", b"\0\0"], "f": [1.5, -2.0], "i": [-1, 1 << 40, 0], "ä": [3]}
    message = tf.train.Example.FromString(encode(features))
    assert {key: list(value.int64_list.value) for key, value in message.features.feature.items()}["i"] == features["i"]
    assert list(message.features.feature["a"].bytes_list.value) == features["a"]
    assert list(message.features.feature["f"].float_list.value) == features["f"]
    assert decode(message.SerializeToString()) == features
    for damaged in (b"\xff", encode(features)[:-1], b"\x08\x01"):
        with pytest.raises(ValueError, match=r"Example|varint|wire|protobuf|field"):
            decode(damaged)
