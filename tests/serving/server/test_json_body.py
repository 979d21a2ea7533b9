"""Bodies of HTTP requests: whatever JSON comes, it is read or refused; and answers are written as TensorFlow Serving writes them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.serving.ports import Port
from msplit.serving.server import json_body
from msplit.serving.server.refusal import Refusal
from tests.campaign import examples

PORTS = {
    "f": Port("float32", (None, 2)),
    "i": Port("int8", (None,)),
    "s": Port("object", (None,)),
    "b": Port("bool", (None,)),
}
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.integers(-(1 << 80), 1 << 80)
)
KEYS = st.one_of(st.sampled_from([*PORTS, "f:0", "b64", "name", "shape", "datatype", "data"]), st.text(max_size=2))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
KINDS = st.sampled_from(["FP32", "INT8", "BYTES", "BOOL", "FP16", "X", 1])
TENSORS = st.fixed_dictionaries({"name": st.sampled_from([*PORTS]), "shape": VALUES, "datatype": KINDS, "data": VALUES})
BODIES = st.one_of(
    VALUES,
    st.fixed_dictionaries({"instances": st.one_of(st.lists(VALUES, max_size=3), VALUES)}),
    st.fixed_dictionaries({"inputs": st.dictionaries(st.sampled_from([*PORTS]), VALUES, max_size=3)}),
    st.fixed_dictionaries(
        {"inputs": st.lists(TENSORS, max_size=2), "outputs": VALUES, "parameters": VALUES, "id": VALUES}
    ),
)


@given(body=BODIES, only=st.sampled_from([*PORTS]))
@settings(max_examples=examples(50, 5000))
def test_whatever_comes_is_read_or_refused(body: Any, only: str) -> None:
    data = json.dumps(body).encode()
    for ports in (PORTS, {only: PORTS[only]}):
        with contextlib.suppress(Refusal):
            for name, array in json_body.feeds(json_body.read(data), ports).items():
                assert array.dtype.name == PORTS[name].dtype
    with contextlib.suppress(Refusal):
        json_body.read_open(data)[1](PORTS)


def test_numbers_are_written_as_short_as_they_are_told_apart() -> None:
    values = np.array([0.1, 1 / 3, 1e-45, np.nan, -np.inf], np.float32)
    found = json.loads(json_body.answer({"y": values}, rows=True))["predictions"]
    assert found[:3] == [0.1, 0.33333334, 1e-45]
    np.testing.assert_array_equal(np.array(found, np.float32), values)
    assert json_body.answer({"y": np.array([0.1])}, rows=False) == b'{"outputs": [0.1]}'


def test_text_and_bytes() -> None:
    strings = np.array([b"a", b"\xff"], object)
    assert json_body.answer({"y": strings}, rows=True) == b'{"predictions": ["a", {"b64": "/w=="}]}'
    assert (
        json_body.answer({"y_bytes": strings}, rows=True) == b'{"predictions": [{"b64": "YQ=="}, {"b64": "/w=="}]}'
    )


def test_rows_that_are_none_are_no_rows() -> None:
    with pytest.raises(Refusal, match="ask with 'inputs'"):
        json_body.answer({"y": np.zeros((2, 1)), "loss": np.zeros(())}, rows=True)
