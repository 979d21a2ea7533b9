"""Runs one op through TensorFlow's own kernel and through its lowering, and compares them.

    check("MatMul", [a, b], {"transpose_b": True})

Attributes that follow from the inputs (``T``, ``N``, ...) are filled in. Inputs come in the order of the node's inputs,
flat (the values of ConcatV2 one by one). Which of them are static is read from the table of lowerings.

Every check runs the lowering several times, where that makes a difference: with attributes as given (defaults absent)
and with every default written out, on inputs that are contiguous and on inputs that lie transposed in memory, and on
`meta` tensors. Each run must keep its inputs as they were.

The lowering runs on the CPU, or on the device that the environment variable MSPLIT_TEST_DEVICE names: with ``cuda`` the
same tests hold the GPU's kernels against TensorFlow's, which stay on the CPU (see conftest).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.lowering import Lowering, table
from msplit.engines.cuda.ir.node import Node
from msplit.opset import schema
from tests.kept import kept

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
"""NumPy's dtype for bfloat16 arrays: ``array.astype(BFLOAT16)``."""

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
"""The dtypes of most float kernels of TensorFlow on the CPU."""

BOTH = (False, True)
"""Both memory layouts, as `Node.nchw` names them."""

DEVICE = os.environ.get("MSPLIT_TEST_DEVICE", "cpu")
"""Where the lowerings run."""

if DEVICE != "cpu":
    # TensorFlow's CPU kernels are IEEE: what is compared must not be TF32.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False

# Relative tolerance by dtype: several units in the last place, for sums in another order. See `tolerances`.
_RTOL = {"float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2, "complex64": 2e-5, "complex128": 1e-10}

# Field of AttrValue (and of its list) by kind of attribute.
_FIELDS = {"int": "i", "float": "f", "string": "s", "bool": "b", "type": "type", "shape": "shape", "tensor": "tensor"}


def values(
    shape: Sequence[int], dtype: Any = np.float32, *, seed: int = 0, low: float = -2.0, high: float = 2.0
) -> np.ndarray:
    """Reproducible values of the dtype in [low, high), from zero on if it is unsigned; for bool both."""
    generator = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        start = max(int(low), 0) if dtype.kind == "u" else int(low)
        return generator.integers(start, max(int(high), start + 1), shape).astype(dtype)
    real = generator.uniform(low, high, shape)
    return (real + 1j * generator.uniform(low, high, shape) if dtype.kind == "c" else real).astype(dtype)


def ints(*numbers: int) -> np.ndarray:
    """A vector of int32, as shapes and axes mostly are."""
    return np.array(numbers, np.int32)


@kept
def run_tensorflow(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None) -> tuple[np.ndarray, ...]:
    """Every output of TensorFlow's CPU kernel for one node, internal ops such as ``_FusedMatMul`` included.

    Args:
        inputs: Arrays (or what `np.asarray` takes), flat.
        attrs: Attributes as a `Node` holds them; those that follow from the inputs may be absent.

    Raises:
        tf.errors.OpError: The kernel refuses the inputs, or there is none on the CPU.
    """
    import tensorflow as tf

    arrays = [np.asarray(array) for array in inputs]
    definition = _op_def(op)
    plain = {**_inferred(op, arrays, attrs or {}), **(attrs or {})}
    if not definition.is_stateful:
        return _run_eagerly(definition, arrays, plain)
    graph_def = tf.compat.v1.GraphDef()
    for index, array in enumerate(arrays):
        node = graph_def.node.add(name=f"input{index}", op="Placeholder")
        node.attr["dtype"].type = _enum(array.dtype)
    node = graph_def.node.add(name="node", op=op, input=[f"input{index}" for index in range(len(arrays))])
    kinds = {attr.name: attr.type for attr in definition.attr}
    for name, value in plain.items():
        _set_attr(node.attr[name], kinds[name], value)

    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    fetches = graph.get_operation_by_name("node").outputs
    feed = {f"input{index}:0": array for index, array in enumerate(arrays)}
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        return tuple(np.asarray(result) for result in session.run(list(fetches), feed))


def _run_eagerly(definition: Any, arrays: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """The same kernel of an op without state, without a graph and a session, which take longer than it."""
    import tensorflow as tf
    from tensorflow.python.eager import context, execute

    whole = {**_defaults(definition.name), **attrs}
    count = schema.output_count(definition.name, whole)
    encoded: list[Any] = []
    for attr in definition.attr:
        if attr.name in whole:
            encoded += [attr.name, _eager(attr.type, whole[attr.name])]
    with tf.device("CPU"):
        inputs = [tf.constant(array) for array in arrays]
        outputs = execute.execute(definition.name, count, inputs, tuple(encoded), context.context())
    return tuple(one.numpy() for one in outputs)


def _eager(kind: str, value: Any) -> Any:
    """An attribute as eager execution takes it."""
    if kind.startswith("list("):
        return [_eager(kind[len("list(") : -1], item) for item in value]
    return None if kind == "shape" and value is None else list(value) if kind == "shape" else _proto_one(kind, value)


def run_lowering(
    op: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    nchw: bool = False,
    device: str = DEVICE,
    transposed: bool = False,
    defaults: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Every output of the op's lowering, as tensors on the device.

    Args:
        nchw: The node's `Node.nchw`.
        device: ``"cpu"``, ``"meta"`` or ``"cuda"``; `DEVICE` by default.
        transposed: Lay the inputs out in memory with their axes reversed (same shapes and values).
        defaults: Write out the default of every absent attribute, as most GraphDefs do.

    Raises:
        AssertionError: The op has no lowering, or the lowering wrote to an input.
    """
    lowering = table().get(op)
    assert lowering is not None, f"{op} has no lowering"
    arrays = [np.asarray(array) for array in inputs]
    plain = {**_inferred(op, arrays, attrs or {}), **(attrs or {})}
    if defaults:
        plain = {**_defaults(op), **plain}
    # A float attribute of a file is a float32, whatever a test wrote down.
    kinds = {attr.name: attr.type for attr in _op_def(op).attr}
    plain = {name: float(np.float32(value)) if kinds[name] == "float" else value for name, value in plain.items()}
    static = _static_positions(lowering, len(arrays))
    arguments: list[Any] = []
    for index, array in enumerate(arrays):
        if index in static:
            arguments.append(array.copy())
            continue
        tensor = to_torch(array.copy())
        if transposed and tensor.dim() > 1:
            reverse = tuple(reversed(range(tensor.dim())))
            tensor = tensor.permute(reverse).contiguous().permute(reverse)
        arguments.append(tensor.to(device))
    result = lowering.function(Node("node", op, plain, nchw), *arguments)
    if device != "meta":
        for index, (array, argument) in enumerate(zip(arrays, arguments, strict=True)):
            after = argument if index in static else to_numpy(argument)
            assert array.tobytes() == np.asarray(after).tobytes(), f"the lowering of {op} wrote to its input {index}"
    outputs = result if isinstance(result, tuple | list) else (result,)
    for index, output in enumerate(outputs):
        assert isinstance(output, torch.Tensor), f"{op}: output {index} is a {type(output).__name__}, not a tensor"
        if len(static) < len(arrays):
            place = "cpu" if lowering.shape_only else device
            assert output.device.type == place, f"{op}: output {index} is on {output.device}, not on {place}"
    return tuple(outputs)


def check(
    op: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    expected: Sequence[np.ndarray] | None = None,
    outputs: Sequence[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    nchw: Sequence[bool] = (False,),
    meta: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compares the op's lowering with TensorFlow's CPU kernel: dtypes, shapes and values.

    Args:
        inputs: Arrays in the order of the node's inputs, static ones included.
        attrs: Attributes as a `Node` holds them: type names, tuples for lists, shapes as tuples. Leave out what has a
            default and what follows from the inputs.
        expected: Outputs to compare with instead of TensorFlow's, where its CPU kernel is lacking (NCHW, for example).
        outputs: Positions of the outputs to compare; all by default.
        rtol: Relative tolerance of floats; by dtype when None.
        atol: Absolute tolerance of floats; when None, `rtol` times the largest magnitude expected or one, the smaller.
        exact: Floats must be equal to the bit, signs of zeros aside.
        nchw: Values of `Node.nchw` to run with.
        meta: Whether to compare shapes and dtypes on `meta` tensors; None: unless the lowering is dynamic.

    Returns:
        The lowering's outputs, from the last plain run.

    Raises:
        AssertionError: They differ; the message holds the tolerance that would have passed.
    """
    arrays = [np.asarray(array) for array in inputs]
    wanted = tuple(expected) if expected is not None else run_tensorflow(op, arrays, attrs)
    lowering = table().get(op)
    assert lowering is not None, f"{op} has no lowering"
    positions = range(len(wanted)) if outputs is None else outputs
    with_meta = not lowering.dynamic_with(attrs or {}) if meta is None else meta
    static = _static_positions(lowering, len(arrays))
    plain: tuple[torch.Tensor, ...] = ()
    for layout in nchw:
        plain = run_lowering(op, arrays, attrs, nchw=layout)
        variants = {"": plain}
        if _defaults(op).keys() - (attrs or {}).keys() - _inferred(op, arrays, attrs or {}).keys():
            variants[" with defaults written out"] = run_lowering(op, arrays, attrs, nchw=layout, defaults=True)
        if any(array.ndim > 1 and index not in static for index, array in enumerate(arrays)):
            variants[" with transposed inputs"] = run_lowering(op, arrays, attrs, nchw=layout, transposed=True)
        for words, got in variants.items():
            label = f"{op}{words}{' (nchw)' if layout else ''}"
            assert len(got) == len(wanted), f"{label}: {len(got)} outputs, TensorFlow has {len(wanted)}"
            for index in positions:
                compare(to_numpy(got[index]), wanted[index], rtol, atol, exact, label=f"{label}, output {index}")
        if with_meta:
            for index, (real, found) in enumerate(zip(plain, _on_meta(op, arrays, attrs or {}, layout), strict=True)):
                want = tuple(real.shape), real.dtype
                assert found == want, f"{op} on meta, output {index}: {found}, with data {want}"
    return plain


_Shapes = list[tuple[tuple[int, ...], torch.dtype]]
_SHAPES: dict[tuple[Any, ...], _Shapes] = {}


class _RememberedShapes(TorchDispatchMode):
    """PyTorch's operators on `meta` tensors, each asked once for what it makes of such inputs: it answers in Python, in 100 microseconds,
    and three of four questions were asked before. Operators that give views, or write, are called."""

    made: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # noqa: RUF012  for all tests

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _makes_one(function):
            return function(*args, **kwargs)
        question = (function, _described(args), *((name, _described(value)) for name, value in kwargs.items()))
        if (known := self.made.get(question)) is None:
            made = function(*args, **kwargs)
            if made.device.type != "meta":
                return made
            self.made[question] = tuple(made.shape), made.stride(), made.dtype
            return made
        shape, stride, dtype = known
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@functools.cache
def _makes_one(function: Any) -> bool:
    """Whether an operator gives one tensor, which is new, and writes nothing."""
    schema = function._schema
    kinds = [str(one.type) for one in schema.returns]
    return kinds == ["Tensor"] and not any(one.alias_info for one in (*schema.arguments, *schema.returns))


def _described(value: Any) -> Any:
    """All of an argument that shapes may depend on; 1 is not True."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _on_meta(op: str, arrays: Sequence[np.ndarray], attrs: Mapping[str, Any], nchw: bool) -> _Shapes:
    """Shapes and dtypes of the lowering's outputs on `meta`. They follow from those of the inputs, and from static values."""
    lowering = table()[op]
    static = _static_positions(lowering, len(arrays))
    given = [(each.dtype, each.shape, each.tobytes() if index in static else b"") for index, each in enumerate(arrays)]
    question = (op, lowering, repr(sorted(attrs.items())), nchw, *given)
    if question not in _SHAPES:
        with _RememberedShapes():
            outputs = run_lowering(op, arrays, attrs, nchw=nchw, device="meta")
        _SHAPES[question] = [(tuple(output.shape), output.dtype) for output in outputs]
    return _SHAPES[question]


def check_both_formats(
    op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], *, data: Sequence[int] = (0,), **options: Any
) -> None:
    """`check` for a node of NHWC data in both memory layouts, and for the same in NCHW, which few CPU kernels of TensorFlow have.

    Args:
        op: An op whose first output is laid out by data_format.
        data: Positions of the inputs that are laid out by data_format; the sizes of Conv2DBackpropInput among them.
    """
    arrays = [np.asarray(array) for array in inputs]
    first, *rest = run_tensorflow(op, arrays, attrs)
    check(op, arrays, attrs, expected=(first, *rest), nchw=BOTH, **options)
    turned = dict(attrs) | {"data_format": "NCHW"}
    for name in {"strides", "dilations", "ksize"} & set(attrs):
        turned[name] = tuple(attrs[name][axis] for axis in (0, 3, 1, 2))
    if pads := attrs.get("explicit_paddings"):
        turned["explicit_paddings"] = tuple(pads[2 * axis + end] for axis in (0, 3, 1, 2) for end in (0, 1))
    for position in data:
        arrays[position] = _to_nchw(arrays[position])
    check(op, arrays, turned, expected=(_to_nchw(first), *rest), **options)


def _to_nchw(array: np.ndarray) -> np.ndarray:
    """NHWC data, or its sizes."""
    return array[[0, 3, 1, 2]] if array.ndim == 1 else np.ascontiguousarray(array.transpose(0, 3, 1, 2))


def compare(
    got: np.ndarray,
    want: np.ndarray,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    *,
    label: str = "",
) -> None:
    """Asserts equal dtypes and shapes, and values within the tolerances. NaN equals NaN, inf equals inf."""
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, TensorFlow has {want.dtype}"
    assert got.shape == want.shape, f"{label}: shape {got.shape}, TensorFlow has {want.shape}"
    name = want.dtype.name
    if name not in _RTOL:
        different = np.flatnonzero(got.reshape(-1) != want.reshape(-1))
        assert not different.size, f"{label}: {different.size} of {want.size} differ, {_first(got, want, different)}"
        return
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    left, right = got.astype(wide), want.astype(wide)
    with np.errstate(invalid="ignore"):
        gap = np.abs(left - right)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    gap = np.where(same, 0.0, np.where(np.isfinite(gap), gap, np.inf))
    size = np.where(np.isfinite(right), np.abs(right), 0.0)
    relative, absolute = (0.0, 0.0) if exact else tolerances(name, rtol, atol, float(size.max(initial=0.0)))
    bad = np.flatnonzero(gap.reshape(-1) > (absolute + relative * size).reshape(-1))
    if bad.size:
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.where(gap > 0, gap / size, 0.0).max()
        raise AssertionError(
            f"{label}: {bad.size} of {want.size} differ by more than rtol={relative:g}, atol={absolute:g}; "
            f"rtol={needed:.3g} with atol=0, or atol={gap.max():.3g} with rtol=0 would have passed; "
            f"{_first(got, want, bad)}"
        )


def tolerances(name: str, rtol: float | None, atol: float | None, largest: float) -> tuple[float, float]:
    """Relative and absolute tolerance of floats of the named dtype, given the largest magnitude that is expected."""
    relative = _RTOL[name] if rtol is None else rtol
    return relative, relative * min(largest, 1.0) if atol is None else atol


def _first(got: np.ndarray, want: np.ndarray, bad: np.ndarray) -> str:
    """The first differing element, in words."""
    place = tuple(int(i) for i in np.unravel_index(int(bad[0]), want.shape)) if want.shape else ()
    return f"first at {place}: {got[place]!r}, TensorFlow has {want[place]!r}"


def _static_positions(lowering: Lowering, count: int) -> set[int]:
    return {position + count if position < 0 else position for position in lowering.static}


def _op_def(op: str) -> Any:
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    assert definition is not None, f"TensorFlow has no op {op}"
    return definition


def _inferred(op: str, arrays: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that follow from the inputs: element types, and lengths where one list of inputs leaves no doubt."""
    definition = _op_def(op)
    known: dict[str, Any] = {**_defaults(op, "int"), **attrs}
    lists = [arg for arg in definition.input_arg if arg.number_attr or arg.type_list_attr]
    singles = len(definition.input_arg) - len(lists)
    result: dict[str, Any] = {}
    position = 0
    for arg in definition.input_arg:
        length = 1
        if arg.number_attr:
            if arg.number_attr not in known:
                sharing = sum(other.number_attr == arg.number_attr for other in lists)
                assert sharing == len(lists), f"give {op} its attribute {arg.number_attr}: it does not follow"
                known[arg.number_attr] = result[arg.number_attr] = (len(arrays) - singles) // sharing
            length = known[arg.number_attr]
        elif arg.type_list_attr:
            if arg.type_list_attr not in known:
                assert len(lists) == 1, f"give {op} its attribute {arg.type_list_attr}: it does not follow"
                count = len(arrays) - singles
                names = tuple(_named(array.dtype) for array in arrays[position : position + count])
                known[arg.type_list_attr] = result[arg.type_list_attr] = names
            length = len(known[arg.type_list_attr])
        if arg.type_attr and length and arg.type_attr not in known:
            known[arg.type_attr] = result[arg.type_attr] = _named(arrays[position].dtype)
        position += length
    assert position == len(arrays), f"{op} takes {position} inputs, {len(arrays)} were given"
    return result


@functools.cache
def _named(dtype: np.dtype) -> str:
    """The name of a dtype, which NumPy puts together anew each time."""
    return dtype.name


@functools.cache
def _defaults(op: str, kind: str | None = None) -> Mapping[str, Any]:
    """The default of every attribute that has one, or of those of one kind."""
    return {
        attr.name: _plain(attr.default_value, attr.type)
        for attr in _op_def(op).attr
        if attr.HasField("default_value") and attr.type != "func" and kind in (None, attr.type)
    }


def _plain(value: Any, kind: str) -> Any:
    """An AttrValue as a `Node` holds it."""
    if kind.startswith("list("):
        inner = kind[len("list(") : -1]
        return tuple(_plain_one(item, inner) for item in getattr(value.list, _FIELDS[inner]))
    return _plain_one(getattr(value, _FIELDS[kind]), kind)


def _plain_one(item: Any, kind: str) -> Any:
    import tensorflow as tf

    if kind == "string":
        return item.decode()
    if kind == "type":
        return tf.dtypes.as_dtype(item).name
    if kind == "shape":
        return None if item.unknown_rank else tuple(None if dim.size < 0 else dim.size for dim in item.dim)
    return item


def _set_attr(target: Any, kind: str, value: Any) -> None:
    """Writes a plain value to an AttrValue of the given kind."""
    if kind.startswith("list("):
        inner = kind[len("list(") : -1]
        target.list.SetInParent()
        for item in value:
            if inner == "shape":
                _set_shape(target.list.shape.add(), item)
            else:
                getattr(target.list, _FIELDS[inner]).append(_proto_one(inner, item))
    elif kind == "shape":
        _set_shape(target.shape, value)
    else:
        setattr(target, _FIELDS[kind], _proto_one(kind, value))


def _proto_one(kind: str, item: Any) -> Any:
    if kind == "string":
        return item.encode()
    return _enum(item) if kind == "type" else item


def _set_shape(target: Any, shape: Sequence[int | None] | None) -> None:
    target.SetInParent()
    if shape is None:
        target.unknown_rank = True
        return
    for size in shape:
        target.dim.add(size=-1 if size is None else size)


def _enum(dtype: Any) -> int:
    import tensorflow as tf

    return int(tf.dtypes.as_dtype(dtype).as_datatype_enum)
