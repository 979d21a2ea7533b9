"""The messages of the protocols, without TensorFlow and without TensorFlow Serving's package, which takes 9 s to import.

They are made from descriptors that ship with msplit (scripts/make_serving_protos.py), in a pool of their own: in one process with
TensorFlow's or anybody's they clash with nothing.

    from msplit.serving.server import messages
    request = messages.PredictRequest.FromString(data)
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

_SERVING = "tensorflow.serving."
NAMES = {
    "TensorProto": "tensorflow.TensorProto",
    "SignatureDef": "tensorflow.SignatureDef",
    "PredictRequest": f"{_SERVING}PredictRequest",
    "PredictResponse": f"{_SERVING}PredictResponse",
    "GetModelMetadataRequest": f"{_SERVING}GetModelMetadataRequest",
    "GetModelMetadataResponse": f"{_SERVING}GetModelMetadataResponse",
    "SignatureDefMap": f"{_SERVING}SignatureDefMap",
    "GetModelStatusRequest": f"{_SERVING}GetModelStatusRequest",
    "GetModelStatusResponse": f"{_SERVING}GetModelStatusResponse",
    "ModelVersionStatus": f"{_SERVING}ModelVersionStatus",
    "ModelServerConfig": f"{_SERVING}ModelServerConfig",
    "BatchingParameters": f"{_SERVING}BatchingParameters",
    "HealthCheckRequest": "grpc.health.v1.HealthCheckRequest",
    "HealthCheckResponse": "grpc.health.v1.HealthCheckResponse",
    **{
        name: f"inference.{name}"
        for method in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
        for name in (f"{method}Request", f"{method}Response")
    },
}
"""Names in this module -> full names of messages."""


@cache
def pool() -> Any:
    """The descriptors of all of them."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    found = descriptor_pool.DescriptorPool()
    for data in ("opset/data/tensorflow_protos.binpb", "serving/server/data/messages.binpb"):
        for file in descriptor_pb2.FileDescriptorSet.FromString(
            resources.files("msplit").joinpath(data).read_bytes()
        ).file:
            found.Add(file)
    return found


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from google.protobuf import message_factory

    message = globals()[name] = message_factory.GetMessageClass(pool().FindMessageTypeByName(NAMES[name]))
    return message
