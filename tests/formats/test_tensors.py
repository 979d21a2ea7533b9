"""Nodes from plain values are what the reader makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.errors import LoadError
from msplit.formats.tensors import add_node, dtype_name, dtype_number, itemsize, numpy_dtype
from msplit.opset import schema
from tests.formats.models import read


def attrs(tmp_path: Path, name: str, op: str, **given: Any) -> Any:
    """The attributes of a node as they are read back."""
    graph_def = schema.graph_pb2.GraphDef()
    add_node(graph_def, name, op, **given)
    graph = read(tmp_path, graph_def).graph
    return graph.attrs[graph.index[name]]


def test_attributes_come_back(tmp_path: Path) -> None:
    found = attrs(
        tmp_path, "x", "Placeholder", dtype="float32", shape=(None, 3), axis=2, flag=True, types=["int64", "bool"]
    )
    assert found["dtype"] == "float32"
    assert found["shape"] == (None, 3)
    assert found["axis"] == 2
    assert found["flag"] is True
    assert found["types"] == ("int64", "bool")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 1.5), ("bfloat16", [1, 2]), ("int64", [[1], [2]]), ("string", ["a", b"\xff"]), ("string", "model")],
)
def test_constants_come_back(dtype: str, value: Any, tmp_path: Path) -> None:
    found = attrs(tmp_path, "c", "Const", dtype=dtype, value=(dtype, value))["value"]
    encoded = np.vectorize(lambda one: one.encode() if isinstance(one, str) else one, otypes=[object])
    expected = np.asarray(encoded(np.asarray(value, object)) if dtype == "string" else value, numpy_dtype(dtype))
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    np.testing.assert_array_equal(found.load(), expected)


@pytest.mark.parametrize("number", [1, 7, 14, 20, 33])
def test_types_have_numbers(number: int) -> None:
    assert dtype_number(dtype_name(number)) == number


def test_a_type_that_is_none_is_refused() -> None:
    """A model may hold any text in the place of a type; the next thing that was made of it ended in an internal error."""
    with pytest.raises(LoadError, match=r"type '\[click\]', which TensorFlow does not know"):
        dtype_number("[click]")


@pytest.mark.parametrize("name", ["ab,bc->ac", "f4,f4", "3f4", "(", "(2,)f4", "S5", "nonsense", "", "int4x"])
def test_what_is_no_type_of_tensorflow_is_refused_though_numpy_reads_it(name):
    """An attribute may hold any text: NumPy takes some for records, and ends in a ValueError of its own for others."""
    assert itemsize(name) == 0
    with pytest.raises(LoadError, match="type"):
        numpy_dtype(name)
