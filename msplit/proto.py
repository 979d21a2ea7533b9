"""TensorFlow's protobuf classes, without importing TensorFlow.

`import tensorflow` takes seconds and half a gigabyte; its generated protobuf modules take 30 ms. They are reached by standing
empty packages in for `tensorflow` and its parents while the modules load. Afterwards the stand-ins are taken away, so a later
real `import tensorflow` in the same process works and finds the same classes. Where that fails (another layout of
the package), the real import is the fallback.

    from msplit import proto
    graph = proto.graph_pb2.GraphDef()
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

from msplit.errors import LoadError

_MODULES = {
    "attr_value_pb2": "tensorflow.core.framework.attr_value_pb2",
    "function_pb2": "tensorflow.core.framework.function_pb2",
    "graph_pb2": "tensorflow.core.framework.graph_pb2",
    "node_def_pb2": "tensorflow.core.framework.node_def_pb2",
    "op_def_pb2": "tensorflow.core.framework.op_def_pb2",
    "tensor_pb2": "tensorflow.core.framework.tensor_pb2",
    "tensor_shape_pb2": "tensorflow.core.framework.tensor_shape_pb2",
    "types_pb2": "tensorflow.core.framework.types_pb2",
    "variable_pb2": "tensorflow.core.framework.variable_pb2",
    "versions_pb2": "tensorflow.core.framework.versions_pb2",
    "fingerprint_pb2": "tensorflow.core.protobuf.fingerprint_pb2",
    "meta_graph_pb2": "tensorflow.core.protobuf.meta_graph_pb2",
    "saved_model_pb2": "tensorflow.core.protobuf.saved_model_pb2",
    "saved_object_graph_pb2": "tensorflow.core.protobuf.saved_object_graph_pb2",
    "tensor_bundle_pb2": "tensorflow.core.protobuf.tensor_bundle_pb2",
}
_PARENTS = ("tensorflow", "tensorflow.core", "tensorflow.core.framework", "tensorflow.core.protobuf")


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


def _load(module: str) -> Any:
    if module in sys.modules:
        return sys.modules[module]
    if "tensorflow" in sys.modules:
        return importlib.import_module(module)
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise LoadError("TensorFlow is not installed, and its file formats come with it", fix="pip install tensorflow")
    try:
        return _import_with_stand_ins(module, spec.submodule_search_locations[0])
    except ImportError:
        return importlib.import_module(module)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = _load(_MODULES[name])
    return module
