"""TensorFlow's protobuf classes, without importing TensorFlow, and without needing it.

`import tensorflow` takes seconds and half a gigabyte; its generated protobuf modules take 30 ms. They are reached by standing
empty packages in for `tensorflow` and its parents while the modules load. Afterwards the stand-ins are taken away, so a later
real `import tensorflow` in the same process works and finds the same classes: what was read is handed to it without a copy.

Where TensorFlow is not installed, or its modules do not load, the classes are made from descriptors that ship with msplit
(scripts/make_protos.py), in a pool of their own: they clash with nobody's.

    from msplit.opset import proto
    graph = proto.graph_pb2.GraphDef()
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from functools import cache
from importlib import resources
from typing import Any

_FOLDERS = {
    "framework": "attr_value function graph node_def op_def tensor tensor_shape types variable versions",
    "example": "example feature",
    "protobuf": "fingerprint meta_graph saved_model saved_object_graph saver tensor_bundle",
}
MODULES = {
    f"{name}_pb2": f"tensorflow.core.{folder}.{name}_pb2"
    for folder, names in _FOLDERS.items()
    for name in names.split()
}
"""What this module offers -> TensorFlow's generated module."""

_PARENTS = ("tensorflow", "tensorflow.core", *(f"tensorflow.core.{folder}" for folder in _FOLDERS))


def _import_with_stand_ins(module: str, root: str) -> Any:
    stood_in = []
    for name in _PARENTS:
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = ["/".join([root, *name.split(".")[1:]])]
            # A spec keeps `importlib.util.find_spec` of this name working for whoever asks meanwhile.
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = package
            stood_in.append(name)
    try:
        return importlib.import_module(module)
    finally:
        for name in stood_in:
            del sys.modules[name]


@cache
def _tensorflows() -> bool:
    """Whether TensorFlow's own modules are used. One answer for the life of the process: messages of two kinds do not mix."""
    try:
        _of_tensorflow(MODULES["saved_model_pb2"])
    except Exception:  # noqa: BLE001  a half-installed package, or one for another protobuf, fails in many ways: none matters
        return False
    return True


def _of_tensorflow(module: str) -> Any:
    if module in sys.modules:
        return sys.modules[module]
    if "tensorflow" in sys.modules:
        return importlib.import_module(module)
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("TensorFlow is not installed")
    return _import_with_stand_ins(module, spec.submodule_search_locations[0])


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    data = resources.files("msplit").joinpath("opset/data/tensorflow_protos.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool


def _of_msplit(module: str) -> Any:
    """What a generated module holds: its messages, its enums, and their values."""
    from google.protobuf import message_factory
    from google.protobuf.internal import enum_type_wrapper

    file = _pool().FindFileByName(module.replace(".", "/").removesuffix("_pb2") + ".proto")
    found = types.SimpleNamespace(DESCRIPTOR=file)
    for name, message in file.message_types_by_name.items():
        setattr(found, name, message_factory.GetMessageClass(message))
    for name, enum in file.enum_types_by_name.items():
        setattr(found, name, enum_type_wrapper.EnumTypeWrapper(enum))
        vars(found).update({value.name: value.number for value in enum.values})
    return found


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = (_of_tensorflow if _tensorflows() else _of_msplit)(MODULES[name])
    return module
