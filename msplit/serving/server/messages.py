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

OPEN_METHODS = (
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"),
    *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
)
"""Methods of the Open Inference Protocol and of Triton's model repository; messages are called after them."""
_PACKAGES = {
    "tensorflow": "TensorProto SignatureDef",
    "tensorflow.serving": (
        "PredictRequest PredictResponse GetModelMetadataRequest GetModelMetadataResponse SignatureDefMap GetModelStatusRequest "
        "GetModelStatusResponse ModelVersionStatus ModelServerConfig ReloadConfigRequest ReloadConfigResponse BatchingParameters "
        "ClassificationRequest ClassificationResponse RegressionRequest RegressionResponse MultiInferenceRequest MultiInferenceResponse "
        "SSLConfig"
    ),
    "grpc.health.v1": "HealthCheckRequest HealthCheckResponse",
    "inference": " ".join(["InferTensorContents", *(f"{method}Request {method}Response" for method in OPEN_METHODS)]),
}
NAMES = {name: f"{package}.{name}" for package, names in _PACKAGES.items() for name in names.split()}
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
