"""Our messages are those of the packages that have them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from msplit.serving.server import messages

SERVING = (
    "predict",
    "classification",
    "regression",
    "inference",
    "get_model_metadata",
    "get_model_status",
    "model_management",
)


def described(message: Any) -> dict[str, Any]:
    """All fields of a message, and of those in it, by name: number, type, whether they are repeated, default and values of enums."""
    found: dict[str, Any] = {}
    left = [message]
    while left:
        one = left.pop()
        if one.full_name in found:
            continue
        found[one.full_name] = {
            field.name: (
                field.number,
                field.type,
                field.is_repeated,
                field.containing_oneof.name if field.containing_oneof else None,
                field.message_type.full_name if field.message_type else None,
                tuple((value.name, value.number) for value in field.enum_type.values) if field.enum_type else None,
            )
            for field in one.fields
        }
        left += [field.message_type for field in one.fields if field.message_type]
    return found


@pytest.mark.tf
def test_they_are_tensorflow_servings_field_by_field() -> None:
    pytest.importorskip("tensorflow_serving")
    from importlib import import_module

    theirs = {}
    for name in (*(f"apis.{one}" for one in SERVING), "config.model_server_config"):
        theirs.update(import_module(f"tensorflow_serving.{name}_pb2").DESCRIPTOR.message_types_by_name)
    common = theirs.keys() & messages.NAMES.keys()
    assert len(common) == 17
    for name in sorted(common):
        assert described(getattr(messages, name).DESCRIPTOR) == described(theirs[name])


@pytest.mark.tf
def test_they_stand_beside_tensorflows_in_one_process() -> None:
    pytest.importorskip("tensorflow_serving")
    import numpy as np
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2

    theirs = predict_pb2.PredictRequest()
    theirs.model_spec.name = "m"
    theirs.inputs["x"].CopyFrom(tf.make_tensor_proto(np.arange(6.0).reshape(2, 3)))
    ours = messages.PredictRequest.FromString(theirs.SerializeToString())
    assert type(ours) is not type(theirs)
    assert [dim.size for dim in ours.inputs["x"].tensor_shape.dim] == [2, 3]
    assert predict_pb2.PredictRequest.FromString(ours.SerializeToString()) == theirs


def test_they_need_neither_tensorflow_nor_its_serving_package() -> None:
    code = """
import sys
from msplit.serving.server import messages
for name in messages.NAMES:
    getattr(messages, name)()
found = [name for name in sys.modules if name.partition(".")[0] in ("tensorflow", "tensorflow_serving", "torch")]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_no_others() -> None:
    with pytest.raises(AttributeError, match="SessionRunRequest"):
        _ = messages.SessionRunRequest
