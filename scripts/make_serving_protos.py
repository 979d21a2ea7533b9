"""Writes msplit/serving/server/data/messages.binpb: the messages that `msplit serve` speaks.

    pip install grpcio-tools && python scripts/make_serving_protos.py

Run it when tensorflow-serving-api moves, or after changing a .proto file there, and commit what changes. The file is a serialized
google.protobuf.FileDescriptorSet: TensorFlow Serving's files as its own package has them, and the .proto files beside it, compiled. What
msplit/opset/data/tensorflow_protos.binpb has already is left out.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parent.parent / "msplit"
DATA = ROOT / "serving" / "server" / "data"
HAVE = ROOT / "opset" / "data" / "tensorflow_protos.binpb"
SERVING = (
    "apis.predict",
    "apis.classification",
    "apis.regression",
    "apis.inference",
    "apis.get_model_metadata",
    "apis.get_model_status",
    "apis.model_management",
    "config.model_server_config",
)
NOTICE = """\
messages.binpb holds descriptors of messages, compiled from .proto files of TensorFlow Serving {version}
(https://github.com/tensorflow/serving), of TensorFlow, of Protocol Buffers (google/protobuf/*), and from the .proto files beside it, which
have the names and numbers of the Open Inference Protocol, of gRPC's health checks, and of TensorFlow Serving's batching parameters and
SSLConfig.

Copyright The TensorFlow Authors. Licensed under the Apache License, Version 2.0; a copy is in the file LICENSE of msplit
and at http://www.apache.org/licenses/LICENSE-2.0. Nothing was changed but the form: comments are not in it.

google/protobuf/*: Copyright 2008 Google Inc., under the BSD-3-Clause licence of Protocol Buffers.
"""


def collect() -> bytes:
    """The FileDescriptorSet, each file after those that it imports."""
    found = descriptor_pb2.FileDescriptorSet()
    done = {file.name for file in descriptor_pb2.FileDescriptorSet.FromString(HAVE.read_bytes()).file}

    def add(file: Any) -> None:
        if file.name in done:
            return
        done.add(file.name)
        for needed in file.dependencies:
            add(needed)
        file.CopyToProto(found.file.add())

    for module in SERVING:
        add(importlib.import_module(f"tensorflow_serving.{module}_pb2").DESCRIPTOR)
    found.file.extend(file for file in compiled().file if file.name not in done)
    return found.SerializeToString(deterministic=True)


def compiled() -> Any:
    """The .proto files of this folder."""
    names = sorted(path.name for path in DATA.glob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:  # in a process of its own: it brings another protobuf than TensorFlow's
        options = [f"-I{DATA}", "--include_imports", f"--descriptor_set_out={out.name}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *names], check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes())


def main() -> None:
    """Writes the descriptors and what must be said of them."""
    (DATA / "messages.binpb").write_bytes(collect())
    version = metadata.version("tensorflow-serving-api")
    (DATA / "messages.NOTICE").write_text(NOTICE.format(version=version), "utf-8")


if __name__ == "__main__":
    main()
