"""Writes msplit/opset/data/tensorflow_protos.binpb from the installed TensorFlow: its messages, for where TensorFlow is not installed.

    python scripts/make_protos.py

Run it when the range of supported TensorFlow versions moves, and commit what changes. The file is a serialized
google.protobuf.FileDescriptorSet: the files that `msplit.opset.schema` names, and those that they import, in an order in which
each comes after what it imports.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from msplit.opset import schema

DATA = Path(__file__).parent.parent / "msplit" / "opset" / "data"
NOTICE = """\
tensorflow_protos.binpb holds descriptors of messages, compiled from .proto files of TensorFlow {version}
(https://github.com/tensorflow/tensorflow) and, for google/protobuf/*, of Protocol Buffers.

Copyright The TensorFlow Authors. Licensed under the Apache License, Version 2.0; a copy is in the file LICENSE of msplit
and at http://www.apache.org/licenses/LICENSE-2.0. Nothing was changed but the form: comments are not in it.

google/protobuf/*: Copyright 2008 Google Inc., under the BSD-3-Clause licence of Protocol Buffers.
"""


def collect() -> bytes:
    """The FileDescriptorSet."""
    found = descriptor_pb2.FileDescriptorSet()
    done: set[str] = set()

    def add(file: Any) -> None:
        if file.name in done:
            return
        done.add(file.name)
        for needed in file.dependencies:
            add(needed)
        file.CopyToProto(found.file.add())

    for module in schema.MODULES.values():
        add(importlib.import_module(module).DESCRIPTOR)
    return found.SerializeToString(deterministic=True)


def main() -> None:
    """Writes the descriptors and what must be said of them."""
    (DATA / "tensorflow_protos.binpb").write_bytes(collect())
    (DATA / "tensorflow_protos.NOTICE").write_text(NOTICE.format(version=metadata.version("tensorflow")), "utf-8")


if __name__ == "__main__":
    main()
