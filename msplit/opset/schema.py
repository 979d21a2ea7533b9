"""Declarations of TensorFlow's ops, and its protobuf classes, both without importing TensorFlow.

Declarations of TensorFlow's ops: inputs, outputs and kernels, from a table made of TensorFlow itself (scripts/make_op_table.py).

Knowing this must not cost an `import tensorflow`. The table is read once, on the first question (3 ms); an op is decoded when it
is asked for. Ops that are not in the table are custom ops or functions: every question about them is answered with None.

TensorFlow's protobuf classes, without importing TensorFlow, and without needing it.

`import tensorflow` takes seconds and half a gigabyte; its generated protobuf modules take 30 ms. They are reached by standing
empty packages in for `tensorflow` and its parents while the modules load. Afterwards the stand-ins are taken away, so a later
real `import tensorflow` in the same process works and finds the same classes: what was read is handed to it without a copy.

Where TensorFlow is not installed, or its modules do not load, the classes are made from descriptors that ship with msplit
(scripts/make_protos.py), in a pool of their own: they clash with nobody's.

    from msplit.opset import schema
    graph = schema.graph_pb2.GraphDef()
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

Attrs = Mapping[str, Any]

MAX_TENSORS = 1_000_000
"""Most tensors that one argument is believed to stand for: a damaged file must not fill the memory."""


@dataclass(frozen=True)
class ArgInfo:
    """An argument of an op. One argument may stand for several tensors.

    Attributes:
        name: Its name in the op's signature.
        dtype: Its type as in ``"float32"``, "" where an attribute says it.
        type_attr: Attribute that holds its type, or "".
        number_attr: Attribute that holds how many tensors it stands for, or "".
        type_list_attr: Attribute that holds the types of its tensors, or "".
        is_ref: Whether it is a reference to a variable.
    """

    name: str
    dtype: str = ""
    type_attr: str = ""
    number_attr: str = ""
    type_list_attr: str = ""
    is_ref: bool = False

    def count(self, attrs: Attrs) -> int | None:
        """Number of tensors that it stands for; None where the attributes do not say."""
        if self.type_list_attr:
            listed = attrs.get(self.type_list_attr)
            return len(listed) if isinstance(listed, tuple | list) else None
        number = attrs.get(self.number_attr) if self.number_attr else 1
        return number if isinstance(number, int) and 0 <= number <= MAX_TENSORS else None

    def dtypes(self, attrs: Attrs, most: int = MAX_TENSORS) -> tuple[str | None, ...] | None:
        """Types of its tensors, of the first `most` at least, on a node with these attributes (defaults filled in).

        A reference's type ends in ``"_ref"``. A type that the attributes do not say is None; None as the whole answer means that
        they do not say how many tensors there are.
        """
        if self.type_list_attr:
            listed = attrs.get(self.type_list_attr)
            return tuple(map(_as_dtype, listed)) if isinstance(listed, tuple | list) else None
        count = self.count(attrs)
        if count is None:
            return None
        return (self.dtype_of(0, attrs),) * min(count, most)

    def dtype_of(self, index: int, attrs: Attrs) -> str | None:
        """Type of one of its tensors, of which the attributes say that it is there; None where they do not say the type."""
        if self.type_list_attr:
            return _as_dtype(attrs[self.type_list_attr][index])
        dtype = self.dtype or _as_dtype(attrs.get(self.type_attr))
        return f"{dtype}_ref" if dtype is not None and self.is_ref else dtype


@dataclass(frozen=True)
class KernelDef:
    """A way to run an op on a GPU device.

    Attributes:
        types: Types it takes, by type attribute; an attribute that is not here may be any type.
        host_memory: Arguments, inputs and outputs alike, that it keeps in host memory.
    """

    types: Mapping[str, frozenset[str]] = field(default_factory=dict)
    host_memory: frozenset[str] = frozenset()

    def takes(self, attrs: Attrs) -> bool:
        """True if it runs a node with these attributes (defaults filled in). What they do not say is no hindrance."""
        for name, allowed in self.types.items():
            value = attrs.get(name)
            asked = value if isinstance(value, tuple | list) else () if value is None else (value,)
            if not allowed.issuperset(asked):
                return False
        return True


class _Filled(Mapping[str, Any]):
    """Attributes, and behind them the defaults of those that are not there."""

    __slots__ = ("_attrs", "_defaults")

    def __init__(self, attrs: Attrs, defaults: Attrs) -> None:
        self._attrs, self._defaults = attrs, defaults

    def __getitem__(self, key: str) -> Any:
        return self._attrs[key] if key in self._attrs else self._defaults[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._attrs.get(key) if key in self._attrs else self._defaults.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._defaults, **dict.fromkeys(self._attrs)})

    def __len__(self) -> int:
        return len(self._defaults.keys() | self._attrs.keys())


@dataclass(frozen=True)
class OpInfo:
    """An op.

    Attributes:
        name: Its name.
        inputs: In order.
        outputs: In order.
        stateful: Whether TensorFlow calls it stateful: it reads or writes a resource, is random, or talks to the outside.
        gpu: What a GPU device runs for it, in the order the runtime looks; empty where it runs on the host only. XLA's devices do
            not count.
        defaults: Default values of its attributes, as the plain values that `msplit.core.graph.Graph` holds. Types of exported graphs are
            often left out where they are the default.
    """

    name: str
    inputs: tuple[ArgInfo, ...] = ()
    outputs: tuple[ArgInfo, ...] = ()
    stateful: bool = False
    gpu: tuple[KernelDef, ...] = ()
    defaults: Attrs = field(default_factory=dict)

    def filled(self, attrs: Attrs) -> Attrs:
        """The attributes of a node with the defaults of those it leaves out.

        Only what somebody asks for is decoded: a node may carry a list of a million sizes that says nothing about its types.
        """
        return _Filled(attrs, self.defaults) if self.defaults else attrs


def version() -> str:
    """Version of the TensorFlow that the table was made of."""
    return str(_table()["tensorflow"])


@cache
def lookup(op: str) -> OpInfo | None:
    """The declaration of an op, or None for one that is not TensorFlow's own."""
    row = _table()["ops"].get(op)
    if row is None:
        return None
    empty: tuple[Any, ...] = ((), (), 0, {}, ())
    entries: list[Any] = row
    inputs, outputs, stateful, defaults, kernels = [*entries, *empty[len(entries) :]]
    return OpInfo(
        name=op,
        inputs=tuple(map(_argument, inputs)),
        outputs=tuple(map(_argument, outputs)),
        stateful=bool(stateful),
        gpu=tuple(
            KernelDef({name: _types(bits) for name, bits in kernel[0].items()}, frozenset(*kernel[1:]))
            for kernel in kernels
        ),
        defaults={name: _hashable(value) for name, value in defaults.items()},
    )


def input_dtypes(op: str, attrs: Attrs) -> tuple[str | None, ...] | None:
    """Type of every input tensor of a node; None where that can not be told (see `ArgInfo.dtypes`)."""
    info = lookup(op)
    return _dtypes(info.inputs, info.filled(attrs)) if info else None


def output_dtypes(op: str, attrs: Attrs, most: int = MAX_TENSORS) -> tuple[str | None, ...] | None:
    """Type of every output tensor of a node, of the first `most` at least; None where that can not be told (see `ArgInfo.dtypes`)."""
    info = lookup(op)
    return _dtypes(info.outputs, info.filled(attrs), most) if info else None


def input_count(op: str, attrs: Attrs) -> int | None:
    """Number of input tensors of a node; None for an unknown op or where its attributes do not say."""
    info = lookup(op)
    return _count(info.inputs, info.filled(attrs)) if info else None


def output_count(op: str, attrs: Attrs) -> int | None:
    """Number of output tensors of a node; None for an unknown op or where its attributes do not say."""
    info = lookup(op)
    return _count(info.outputs, info.filled(attrs)) if info else None


def output_dtype(op: str, attrs: Attrs, port: int) -> str | None:
    """Type of one output tensor of a node; None where that can not be told or there is no such port.

    Takes no longer for one of a thousand outputs than for one of two.
    """
    info = lookup(op)
    if info is None or port < 0:
        return None
    filled = info.filled(attrs)
    found: str | None = None
    first = 0  # port of the argument
    for arg in info.outputs:
        count = arg.count(filled)
        if count is None:
            return None
        if first <= port < first + count:
            found = arg.dtype_of(port - first, filled)
        first += count
    return found


def output_ports(op: str, attrs: Attrs, arg_name: str) -> tuple[int, int | None] | None:
    """First port of an output argument and how many it has, None for any number that the attributes do not say.

    Function bodies write ``node:arg_name:index`` where a graph has ``node:port``.

    Returns:
        The ports, or None for an unknown op, no such argument, or one behind another of unknown size.
    """
    info = lookup(op)
    if info is None:
        return None
    filled = info.filled(attrs)
    port = 0
    for arg in info.outputs:
        count = arg.count(filled)
        if arg.name == arg_name:
            return port, count
        if count is None:
            return None
        port += count
    return None


def gpu_kernel(op: str, attrs: Attrs) -> KernelDef | None:
    """The kernel that a GPU device would run for a node, None where there is nothing: the node is then the host's."""
    info = lookup(op)
    if info is None or not info.gpu:
        return None
    filled = info.filled(attrs)
    return next((kernel for kernel in info.gpu if kernel.takes(filled)), None)


def host_slots(args: tuple[ArgInfo, ...], attrs: Attrs, kernel: KernelDef) -> tuple[bool, ...] | None:
    """Per tensor of some arguments, whether a kernel keeps it in host memory; None where their number can not be told."""
    result: list[bool] = []
    for arg in args:
        count = arg.count(attrs)
        if count is None:
            return None
        result += [arg.name in kernel.host_memory] * count
    return tuple(result)


@cache
def lowered() -> frozenset[str]:
    """Ops that the cuda engine has a lowering for; `scripts/make_ops_doc.py` writes them down."""
    return frozenset(json.loads((Path(__file__).parent / "data" / "lowered.json").read_bytes())["ops"])


def _dtypes(args: tuple[ArgInfo, ...], attrs: Attrs, most: int = MAX_TENSORS) -> tuple[str | None, ...] | None:
    result: list[str | None] = []
    for arg in args:
        dtypes = arg.dtypes(attrs, most)
        if dtypes is None:
            return None
        result += dtypes
    return tuple(result)


def _count(args: tuple[ArgInfo, ...], attrs: Attrs) -> int | None:
    total = 0
    for arg in args:
        count = arg.count(attrs)
        if count is None:
            return None
        total += count
    return total


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "ops.json").read_bytes())
    return table


@cache
def _types(bits: int) -> frozenset[str]:
    return frozenset(name for value, name in _table()["dtypes"].items() if bits >> int(value) & 1)


@cache
def _argument(text: str) -> ArgInfo:
    """Decodes ``"name:T"``, ``"name:N*T"``, ``"name:[Ts]"``, ``"name:=int32"``, each with "&" at the end for a reference."""
    name, spec = text.split(":", 1)
    is_ref = spec.endswith("&")
    spec = spec.removesuffix("&")
    if spec.startswith("["):
        return ArgInfo(name, type_list_attr=spec[1:-1], is_ref=is_ref)
    number, _, spec = spec.rpartition("*")
    if spec.startswith("="):
        return ArgInfo(name, dtype=spec[1:], number_attr=number, is_ref=is_ref)
    return ArgInfo(name, type_attr=spec, number_attr=number, is_ref=is_ref)


def _as_dtype(value: Any) -> str | None:
    """A type that an attribute names; None where a damaged file has something else there."""
    return value if isinstance(value, str) else None


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


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
"""Names that this module offers -> TensorFlow's generated module."""

_LOADING = threading.RLock()
"""Held while a module is loaded: another thread would find a part of it in `sys.modules`."""

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
    """True if TensorFlow's own modules are used. One answer for the life of the process: messages of two kinds do not mix."""
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
    """Content of a generated module: its messages, its enums, and their values."""
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
    with _LOADING:
        if name not in globals():
            globals()[name] = (_of_tensorflow if _tensorflows() else _of_msplit)(MODULES[name])
        return globals()[name]
