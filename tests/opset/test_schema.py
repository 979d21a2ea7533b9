"""The op table against TensorFlow itself and against what is known of single ops."""

import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.opset import schema


def test_unknown_op_gives_none_everywhere():
    assert schema.lookup("TFRA>CuckooHashTableOfTensors") is None
    assert schema.output_count("NoSuchOp", {}) is None
    assert schema.output_dtype("NoSuchOp", {}, 0) is None
    assert schema.output_ports("NoSuchOp", {}, "y") is None
    assert schema.gpu_kernel("NoSuchOp", {}) is None


def test_outputs_follow_type_number_and_type_list_attributes():
    assert schema.output_dtypes("MatMul", {"T": "float16"}) == ("float16",)
    assert schema.output_dtypes("Split", {"T": "float32", "num_split": 3}) == ("float32",) * 3
    assert schema.output_count("Split", {"T": "float32"}) is None
    assert schema.output_dtypes("IdentityN", {"T": ("float32", "string")}) == ("float32", "string")
    assert schema.output_dtypes("Shape", {"T": "float32"}) == ("int32",), "the default of out_type"
    assert schema.output_dtypes("VariableV2", {"dtype": "float32"}) == ("float32_ref",)
    assert schema.input_dtypes("Assign", {"T": "float32"}) == ("float32_ref", "float32")
    assert schema.output_dtype("MatMul", {"T": "float16"}, 1) is None
    assert schema.output_dtypes("NoOp", {}) == ()


def test_ports_of_named_outputs():
    attrs = {"T": "float32"}
    assert schema.output_ports("FusedBatchNormV3", attrs, "batch_mean") == (1, 1)
    assert schema.output_ports("Split", {"num_split": 3}, "output") == (0, 3)
    assert schema.output_ports("Split", {}, "output") == (0, None), "any number"
    assert schema.output_ports("MatMul", attrs, "product") == (0, 1)
    assert schema.output_ports("MatMul", attrs, "nothing") is None
    parse = {"Nsparse": 2, "Ndense": 1, "sparse_types": ("int64", "int64"), "Tdense": ("float32",)}
    assert schema.output_ports("ParseExample", parse, "sparse_shapes") == (4, 2)
    assert schema.output_ports("ParseExample", parse, "dense_values") == (6, 1)


def test_gpu_kernels_follow_types():
    assert schema.gpu_kernel("MatMul", {"T": "float32"}) == schema.lookup("MatMul").gpu[0]
    assert schema.gpu_kernel("MatMul", {"T": "int32"}) is None
    assert schema.gpu_kernel("AddV2", {"T": "float32"}).host_memory == frozenset()
    assert schema.gpu_kernel("AddV2", {"T": "int32"}).host_memory == {"x", "y", "z"}
    assert schema.gpu_kernel("Shape", {"T": "float32"}).host_memory == {"output"}
    assert schema.gpu_kernel("IdentityN", {"T": ("float32", "int64")}) is not None


@pytest.mark.parametrize(
    "op", ["HashTableV2", "LookupTableFindV2", "StringToHashBucketFast", "ParseExampleV2", "IteratorGetNext"]
)
def test_ops_of_the_host_have_no_gpu_kernel(op):
    assert schema.lookup(op).gpu == ()


def test_kernels_of_the_default_device_count():
    assert schema.gpu_kernel("ReadVariableOp", {"dtype": "float32"}) is not None
    assert schema.gpu_kernel("StatelessWhile", {}) is not None


def test_stateful_and_defaults():
    assert schema.lookup("RandomUniform").stateful
    assert not schema.lookup("MatMul").stateful
    assert schema.lookup("Conv2D").defaults["dilations"] == (1, 1, 1, 1)


def test_every_op_decodes():
    for op in schema._table()["ops"]:
        info = schema.lookup(op)
        assert info is not None
        assert all(arg.dtype or arg.type_attr or arg.type_list_attr for arg in (*info.inputs, *info.outputs))


@pytest.mark.parametrize("count", [-1, 2**40, 2**70, "many", None])
def test_number_of_tensors_that_can_not_be_is_no_statement(count):
    assert schema.output_dtypes("Split", {"T": "float32", "num_split": count}) is None
    assert schema.output_count("Split", {"T": "float32", "num_split": count}) is None


@pytest.mark.parametrize("value", [3, 2.5, b"x", ("float32",), None])
def test_a_type_that_is_no_name_is_no_statement(value):
    assert schema.output_dtypes("VariableV2", {"dtype": value}) == (None,)
    assert schema.output_dtypes("IdentityN", {"T": (value, "int32")}) == (None, "int32")
    assert schema.output_dtype("Split", {"T": value, "num_split": 2}, 1) is None


@given(st.data())
def test_the_type_of_one_output_is_that_among_all(data):
    """For any op of the table, with attributes that say much, little, or nonsense."""
    info = schema.lookup(data.draw(st.sampled_from(sorted(schema._table()["ops"]))))
    names = {name for arg in info.outputs for name in (arg.type_attr, arg.number_attr, arg.type_list_attr) if name}
    types = st.sampled_from(["float32", "string", "resource", 7, None])
    values = types | st.integers(-1, 4) | st.lists(types, max_size=4).map(tuple)
    attrs = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(sorted(names), values)))
    listed = schema.output_dtypes(info.name, attrs)
    for port in range(-1, 14):
        there = listed is not None and 0 <= port < len(listed)
        assert schema.output_dtype(info.name, attrs, port) == (listed[port] if there else None)


def test_the_type_of_one_output_needs_no_list_of_all(monkeypatch):
    """A damaged node may have thousands of outputs, each asked for: found by the campaign of a test run."""
    looked: list[object] = []
    real = schema._as_dtype
    monkeypatch.setattr(schema, "_as_dtype", lambda value: looked.append(value) or real(value))
    types = ("float32",) * 2999 + ("string",)
    assert schema.output_dtype("IdentityN", {"T": types}, 2999) == "string"
    assert looked == ["string"]


def test_many_tensors_are_counted_without_being_listed():
    attrs = {"T": "float32", "num_split": 1_000_000}
    assert schema.output_count("Split", attrs) == 1_000_000
    assert schema.output_dtypes("Split", attrs, 3) == ("float32",) * 3
    assert schema.output_ports("Split", attrs, "output") == (0, 1_000_000)
    assert schema.input_count("ConcatV2", {"N": 3}) == 4


def test_a_module_is_loaded_by_one_thread(monkeypatch):
    """TensorFlow's is in `sys.modules` before all of its messages are, so that another one would find a part of it."""
    loaded, both, found = [], threading.Barrier(2), []

    def load(module):
        loaded.append(module)
        time.sleep(0.05)
        return module

    monkeypatch.setattr(schema, "_tensorflows", lambda: False)
    monkeypatch.setattr(schema, "_of_msplit", load)
    monkeypatch.delitem(vars(schema), "saver_pb2", raising=False)

    def ask():
        both.wait()
        found.append(schema.saver_pb2)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    del schema.saver_pb2
    assert loaded == ["tensorflow.core.protobuf.saver_pb2"]
    assert found == loaded * 2


def test_first_question_is_quick():
    code = (
        "import json, dataclasses, pathlib, time\nt = time.process_time()\n"
        "from msplit.opset import schema as optable\noptable.lookup('MatMul')\nprint(time.process_time() - t)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert min(times) < 0.1, "0.03 s of a processor"


@pytest.mark.tf
def test_table_agrees_with_the_installed_tensorflow():
    """Where the version is the one the table is made of, every op TensorFlow has is there with the same signature."""
    import tensorflow as tf
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    data = pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    ops = {op.name: op for op in op_def_pb2.OpList.FromString(data).op}
    if tf.__version__ == schema.version():
        assert set(ops) == set(schema._table()["ops"])
    for name in sorted(set(ops) & set(schema._table()["ops"])):
        op, info = ops[name], schema.lookup(name)
        known = [arg.name for arg in info.outputs]
        assert [arg.name for arg in op.output_arg][: len(known)] == known, name
        for theirs, ours in zip(op.output_arg, info.outputs, strict=False):
            assert theirs.is_ref == ours.is_ref
            assert theirs.number_attr == ours.number_attr
            assert theirs.type_list_attr == ours.type_list_attr
            assert theirs.type_attr == ours.type_attr
            assert not theirs.type or tf.dtypes.as_dtype(theirs.type).name == ours.dtype
