"""Reader of the StableHLO module of an `XlaCallModule` node, which is how JAX (jax2tf), Orbax and Keras on JAX save a model.

The module becomes functions of ordinary TensorFlow ops, so that flattening, analysis and engines need not know of it. The file keeps the
module, and TensorFlow runs that as the reference: a wrong translation does not verify. jaxlib parses the bytecode; nothing runs it.

An operation that has no counterpart here stays one node whose op is its name, as in ``stablehlo.fft``: it is shown and priced as a custom
op is, and an engine refuses it by that name. StableHLO's semantics: https://openxla.org/stablehlo/spec. Where TensorFlow's differ (shifts,
integer division, indices out of range, floats beyond an integer's range) more than one op is written.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from msplit.core.graph import Argument, Edges, Function, FunctionRef, Graph, TensorValue
from msplit.errors import INSTALL_JAXLIB, LoadError
from msplit.opset import schema

CALL_MODULE = "XlaCallModule"
VERSIONS = range(5, 11)
"""Versions of the calling convention that are read: from 5 on, modules tell sizes of dimensions themselves."""

_MOST_OPS, _DEEPEST = 1_000_000, 100
"""Most nodes of a module with its calls inlined, and most calls and regions inside of each other."""

_ENDS_LOCATION = re.compile(r'loc\("([^"]*)"')
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\-/]+")
_PLAIN = {"bf16": "bfloat16", "f16": "float16", "i1": "bool", "complex<f32>": "complex64", "complex<f64>": "complex128"}
_WRAPPERS = re.compile(r"p?jit\(.*\)")

Shape = tuple[int | None, ...]


def installed() -> bool:
    """True if there is a jaxlib to read modules with."""
    return importlib.util.find_spec("jaxlib") is not None


def readable(attrs: Mapping[str, Any]) -> str:
    """Reason why the module of a node stays one node; "" where `functions_of` reads it."""
    if attrs.get("version") not in VERSIONS or attrs.get("dim_args_spec"):
        return f"its calling convention is version {attrs.get('version')}; export it with a JAX of 2023-06 or later"
    if attrs.get("has_token_input_output"):
        return "it takes and gives tokens, for effects in order"
    return "" if installed() else f"jaxlib reads it: {INSTALL_JAXLIB}"


@dataclass(frozen=True)
class _Value:
    """A tensor of a function that is written.

    Attributes:
        source: Node and port; None for a constant that is no node yet.
        shape: Sizes of the whole tensor, None for those that only the run knows.
        array: Elements, where they are known. Of a tensor that is broadcast, those before.
        sizes: Where it is still to be broadcast: the shape to broadcast `source` to, as a tensor. Most consumers broadcast themselves.
    """

    dtype: str
    shape: Shape
    source: tuple[int, int] | None = None
    array: NDArray[Any] | None = field(default=None, compare=False)
    sizes: _Value | None = None

    @property
    def fixed(self) -> bool:
        """True if nothing of it is left to the run: it can be written into another function."""
        return self.array is not None and (self.sizes is None or self.sizes.array is not None)


@dataclass(eq=False)
class _Body:
    """A function while it is written. `module` has what all functions of a module share."""

    module: _Module
    name: str
    names: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    attrs: list[Mapping[str, Any]] = field(default_factory=list)
    edges: list[tuple[int, int, int, int]] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)
    constants: dict[int, tuple[_Value, _Value]] = field(default_factory=dict)
    scope: str = ""

    def node(self, name: str, op: str, attrs: Mapping[str, Any]) -> int:
        """Adds a node without inputs."""
        self.module.count += 1
        if self.module.count > _MOST_OPS:
            raise self.module.error(f"is larger than {_MOST_OPS:,} ops with its calls inlined")
        name = name or op
        number = self.taken.get(name, 0)
        self.taken[name] = number + 1
        self.names.append(f"{name}_{number}" if number else name)
        self.ops.append(op)
        self.attrs.append(attrs)
        return len(self.ops) - 1

    def parameter(self, dtype: str, shape: Shape) -> _Value:
        """Adds a parameter: all of them come before other nodes."""
        number = len(self.ops)
        attrs = {"index": number, "T": dtype, "_output_shapes": (shape,)}
        return _Value(dtype, shape, (self.node(f"arg{number}", "_Arg", attrs), 0))

    def add(self, op: str, inputs: Sequence[_Value | Sequence[_Value]], shape: Shape, **attrs: Any) -> _Value:
        """Adds a node. Type attributes follow from its inputs; a list among these is one argument. Returns its first output."""
        known = schema.lookup(op)
        for one, given in zip(known.inputs if known else (), inputs, strict=True):
            several = [given] if isinstance(given, _Value) else given
            if one.number_attr:
                attrs[one.number_attr] = len(several)
            if one.type_list_attr:
                attrs[one.type_list_attr] = tuple(value.dtype for value in several)
            elif one.type_attr:
                attrs[one.type_attr] = several[0].dtype
        flat = [one for given in inputs for one in ([given] if isinstance(given, _Value) else given)]
        sources = [self.place(one) for one in flat]
        node = self.node(f"{self.scope}/{op}" if self.scope else op, op, attrs)
        self.edges += [(*source, node, slot) for slot, source in enumerate(sources)]
        dtype = schema.output_dtype(op, attrs, 0) or str(attrs.get("dtype", ""))
        return _Value(dtype, shape, (node, 0))

    def place(self, value: _Value) -> tuple[int, int]:
        """The node and port of a whole tensor."""
        return self.whole(value).source or (0, 0)

    def narrow(self, value: _Value) -> _Value:
        """A tensor before it is broadcast, as a node."""
        if value.source is None and value.array is not None:
            key = id(value.array)
            if key not in self.constants:
                array = value.array
                held = TensorValue(value.dtype, array.shape, partial(np.asarray, array))
                node = self.node(
                    f"{self.scope}/Const" if self.scope else "Const", "Const", {"dtype": value.dtype, "value": held}
                )
                self.constants[key] = (value, _Value(value.dtype, array.shape, (node, 0), array))
            return self.constants[key][1]
        return replace(value, sizes=None) if value.sizes else value

    def whole(self, value: _Value) -> _Value:
        """A tensor in its full shape, as a node."""
        narrow = self.narrow(value)
        return narrow if value.sizes is None else self.add("BroadcastTo", [narrow, value.sizes], value.shape)

    def each(self, op: str, *values: _Value, shape: Shape | None = None, **attrs: Any) -> _Value:
        """Adds a function of elements of tensors of one shape, or scalars. What is broadcast to the shape of another one stays narrow."""
        wide = next((value for value in values if value.shape), values[0])
        shape = wide.shape if shape is None else shape
        if all(value.sizes or not value.shape for value in values) and wide.sizes:
            found = self.add(op, [self.narrow(value) for value in values], (), **attrs)
            return replace(found, shape=shape, sizes=wide.sizes)
        return self.add(op, [self.narrow(value) for value in values], shape, **attrs)

    def like(self, number: Any, value: _Value) -> _Value:
        """A scalar of the type of another tensor."""
        return constant(np.asarray(number, numpy_type(value.dtype)))

    def done(self, results: Sequence[_Value]) -> Function:
        """The function, once all of it is written."""
        sources = [self.place(value) for value in results]
        columns = np.array(self.edges, np.int32).reshape(-1, 4).T
        body = Graph(self.names, self.ops, [""] * len(self.ops), self.attrs, Edges.of(*columns), self.module.functions)
        given = [node for node, op in enumerate(self.ops) if op == "_Arg"]
        parameters = tuple(Argument(self.names[node], self.attrs[node]["T"], node) for node in given)
        named = [Argument(f"output_{n}", v.dtype, *s) for n, (v, s) in enumerate(zip(results, sources, strict=True))]
        return Function(self.name, body, parameters, tuple(named))


def constant(array: NDArray[Any]) -> _Value:
    """A constant, which becomes a node where it is used."""
    return _Value("bfloat16" if array.dtype == bfloat16 else array.dtype.name, array.shape, None, array)


def numpy_type(dtype: str) -> Any:
    """NumPy's type of a name."""
    return bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def ints(*numbers: int) -> _Value:
    """Sizes or positions as a tensor."""
    return constant(np.array(numbers, np.int32))


@dataclass(eq=False)
class _Module:
    """A module while it is read.

    Attributes:
        functions: Functions that are written, and all others of the model.
        name: Name of the function that it becomes; those of its regions begin with it.
        made: Functions that were written, by name.
        symbols: Its own functions.
        depth: Calls and regions inside of each other, where it is read.
        count: Nodes so far.
    """

    functions: Mapping[str, Function]
    name: str
    made: dict[str, Function] = field(default_factory=dict)
    symbols: dict[str, Any] = field(default_factory=dict)
    depth: int = 0
    count: int = 0

    def error(self, what: str) -> LoadError:
        """An error about it."""
        return LoadError(
            f"the StableHLO of an {CALL_MODULE} node {what}",
            fix="export it with another version of JAX, or install the newest jaxlib",
        )


def functions_of(name: str, attrs: Mapping[str, Any], functions: Mapping[str, Function]) -> dict[str, Function]:
    """The functions that the module of a node becomes: one by the name that is given, and those of its loops and branches.

    Args:
        name: Name of the first.
        attrs: Attributes of the `XlaCallModule` node, one that is `readable`.
        functions: The library that the functions are part of.

    Raises:
        LoadError: jaxlib can not read it, or it is no module that a node runs.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    made = _Module(functions, name)
    data = attrs.get("module")
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        try:
            module = stablehlo.deserialize_portable_artifact(
                context, data if isinstance(data, bytes) else str(data).encode()
            )
        except (ir.MLIRError, ValueError, RuntimeError) as problem:
            raise made.error(f"can not be read: {str(problem).splitlines()[0][:200]}") from None
        if module is None:
            raise made.error("can not be read")
        made.symbols = {
            op.attributes["sym_name"].value: op for op in module.body.operations if "sym_name" in op.attributes
        }
        main = made.symbols.get("main")
        if main is None:
            raise made.error("has no main function")
        body, block = _Body(made, name), main.regions[0].blocks[0]
        platforms = tuple(map(_text, attrs.get("platforms") or ()))
        types = [_type(argument.type) for argument in block.arguments]
        given = [] if len(platforms) < 2 or not types else [constant(np.asarray(_platform(platforms), np.int32))]
        given += [body.parameter(*one) for one in types[len(given) :]]
        results = _run(body, block, dict(zip(block.arguments, given, strict=True)))
        if [value.dtype for value in results] != list(attrs.get("Tout") or ()) or len(given) - (
            len(platforms) > 1
        ) != len(attrs.get("Tin") or ()):
            raise made.error("has other arguments and results than the node")
        made.made[name] = body.done(results)
    return made.made


def _platform(platforms: Sequence[str]) -> int:
    """Number of the platform whose code is read: the CPU's where it is there, for which TensorFlow computes the reference."""
    return platforms.index("CPU") if "CPU" in platforms else 0


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _type(kind: Any) -> tuple[str, Shape]:
    """Type and shape of a tensor."""
    element = str(getattr(kind, "element_type", kind))
    bits = re.fullmatch(r"(f|i|ui)(8|16|32|64)", element)
    name = (
        {"f": "float", "i": "int", "ui": "uint"}[bits[1]] + bits[2]
        if bits and element not in _PLAIN
        else _PLAIN.get(element, element)
    )
    if not hasattr(kind, "element_type"):
        return element, ()
    return name, tuple(None if kind.is_dynamic_dim(axis) else kind.get_dim_size(axis) for axis in range(kind.rank))


Scope = dict[Any, _Value]
"""Values of a module -> tensors."""


def _run(body: _Body, block: Any, scope: Scope) -> list[_Value]:
    """Writes the operations of a block. Returns what it returns."""
    module = body.module
    module.depth += 1
    if module.depth > _DEEPEST:
        raise module.error(f"has more than {_DEEPEST} calls or regions inside of each other, or one that calls itself")
    outer = body.scope
    for op in block.operations:
        name = op.operation.name
        if name in ("func.return", "stablehlo.return"):
            body.scope, module.depth = outer, module.depth - 1
            return [scope[value] for value in op.operands]
        body.scope = _scope(outer, str(op.location))
        step = _Step(body, op, scope, [scope[value] for value in op.operands])
        made = READERS.get(name.removeprefix("stablehlo."), _opaque)(step)
        values = _opaque(step) if made is None else [made] if isinstance(made, _Value) else made
        scope.update(zip(op.results, values, strict=True))
    raise module.error("has a block without an end")


def _scope(outer: str, location: str) -> str:
    """Name for the nodes of an operation: the place where JAX says that it was traced, behind that of the call around it."""
    found = _ENDS_LOCATION.search(location)
    parts = [part for part in (found[1] if found and "." not in found[1].rpartition("/")[2] else "").split("/") if part]
    kept = [_NOT_IN_NAMES.sub("_", part).strip("_-") for part in parts[:-1] if not _WRAPPERS.fullmatch(part)]
    inner = "/".join(part for part in kept if part)
    return (
        outer
        if not inner or outer == inner or outer.startswith(f"{inner}/")
        else inner
        if inner.startswith(f"{outer}/")
        else f"{outer}/{inner}".strip("/")
    )


@dataclass(frozen=True, eq=False)
class _Step:
    """An operation that is read: the function that it is written to, its scope and its operands."""

    body: _Body
    op: Any
    scope: Scope
    args: Sequence[_Value]

    @property
    def type(self) -> tuple[str, Shape]:
        """Type and shape of its first result."""
        return _type(self.op.results[0].type)

    @property
    def shape(self) -> Shape:
        """Shape of its first result."""
        return self.type[1]

    def numbers(self, key: str, default: Sequence[int] = ()) -> list[int]:
        """An attribute that is a list of numbers or a matrix of them, row by row."""
        found = self.op.attributes[key] if key in self.op.attributes else None
        if found is None:
            return list(default)
        return [int(one) for one in (np.array(found).reshape(-1) if hasattr(found, "get_splat_value") else found)]

    def number(self, key: str, default: int = 0) -> int:
        """An attribute that is a number."""
        return int(self.op.attributes[key].value) if key in self.op.attributes else default

    def text(self, key: str) -> str:
        """An attribute as text: a name, or the last word of an enumeration."""
        return _word(self.op, key)


def _word(op: Any, key: str) -> str:
    return str(op.attributes[key]).strip('"').rstrip(">").rpartition(" ")[2] if key in op.attributes else ""


Made = _Value | Sequence[_Value] | None
Reader = Callable[[_Step], Made]


def _opaque(step: _Step) -> list[_Value]:
    """One node of an op of the operation's own name, which no engine has."""
    name = step.op.operation.name
    if name in ("stablehlo.custom_call", "stablehlo.composite"):
        name = f"{name}.{_NOT_IN_NAMES.sub('_', step.text('call_target_name') or step.text('name'))}"
    types = [_type(result.type) for result in step.op.results]
    hints = tuple(shape for _, shape in types)
    free = [value for region in step.op.regions for value in _captured(region)]
    inputs = [*step.args, *(step.scope[value] for value in free)]
    first = step.body.node(
        f"{step.body.scope}/{name}".strip("/"), name, {"dtype": types[0][0] if types else "", "_output_shapes": hints}
    )
    step.body.edges += [(*step.body.place(one), first, slot) for slot, one in enumerate(inputs)]
    return [_Value(dtype, shape, (first, port)) for port, (dtype, shape) in enumerate(types)]


def _captured(region: Any) -> list[Any]:
    """Values from outside that a region reads, in the order in which it does."""
    found: dict[Any, None] = {}
    inside: set[Any] = set()
    waiting = [region]
    while waiting:
        for block in waiting.pop().blocks:
            inside.update(block.arguments)
            for op in block.operations:
                inside.update(op.results)
                found.update(dict.fromkeys(op.operands))
                waiting += list(op.regions)
    return [value for value in found if value not in inside]


# Functions of elements.

UNARY = {
    "abs": "Abs", "ceil": "Ceil", "cosine": "Cos", "exponential": "Exp", "exponential_minus_one": "Expm1", "floor": "Floor",
    "imag": "Imag", "is_finite": "IsFinite", "log": "Log", "log_plus_one": "Log1p", "logistic": "Sigmoid", "negate": "Neg", "real": "Real",
    "round_nearest_even": "Rint", "rsqrt": "Rsqrt", "sign": "Sign", "sine": "Sin", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
BINARY = {
    "add": ("AddV2", "LogicalOr"), "subtract": ("Sub", ""), "multiply": ("Mul", "LogicalAnd"), "maximum": ("Maximum", "LogicalOr"),
    "minimum": ("Minimum", "LogicalAnd"), "power": ("Pow", ""), "atan2": ("Atan2", ""), "complex": ("Complex", ""),
    "and": ("BitwiseAnd", "LogicalAnd"), "or": ("BitwiseOr", "LogicalOr"), "xor": ("BitwiseXor", "NotEqual"),
}  # fmt: skip
"""By operation: the op of numbers, and of truth values."""
COMPARE = {"EQ": "Equal", "NE": "NotEqual", "LT": "Less", "LE": "LessEqual", "GT": "Greater", "GE": "GreaterEqual"}
CUSTOM = {
    "mhlo.erf": "Erf", "mhlo.tan": "Tan", "mhlo.acos": "Acos", "mhlo.asin": "Asin", "mhlo.atan": "Atan", "mhlo.sinh": "Sinh", "mhlo.cosh": "Cosh",
    "mhlo.asinh": "Asinh", "mhlo.acosh": "Acosh", "mhlo.atanh": "Atanh", "mhlo.erf_inv": "Erfinv",
}  # fmt: skip
PASSED = (
    "Sharding",
    "xla.sdy.",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
    "shape_assertion",
)
"""Custom calls that say where values are or what is so, and compute nothing."""


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _unary(step: _Step) -> Made:
    value, name = step.args[0], step.op.operation.name.removeprefix("stablehlo.")
    if name == "sign" and _is_float(value.dtype):  # NaN and -0 stay
        signed = step.body.each("Sign", value)
        return step.body.each("SelectV2", step.body.each("IsNan", value), value, signed)
    return step.body.each(UNARY[name], value)


def _binary(step: _Step) -> Made:
    x, y = step.args
    name = step.op.operation.name.removeprefix("stablehlo.")
    op = BINARY[name][x.dtype == "bool"]
    if name == "power" and not _is_float(x.dtype) and not (y.array is not None and np.all(y.array >= 0)):
        return None  # a negative power of an integer is 0 or 1 here, and an error in TensorFlow
    if name == "maximum" and _is_float(x.dtype):
        for one, other in ((x, y), (y, x)):
            if other.array is not None and not other.array.shape and other.array == 0 and one.array is None:
                return step.body.each("Relu", one)
    return step.body.each(op, x, y) if op else None


def _not(step: _Step) -> Made:
    return step.body.each("LogicalNot" if step.args[0].dtype == "bool" else "Invert", step.args[0])


def _divide(step: _Step) -> Made:
    """A quotient; of integers, cut towards 0. By 0 it is -1, and the rest is the number, as XLA has them; of the least by -1, itself and 0."""
    (x, y), body = step.args, step.body
    rest = step.op.operation.name.endswith("remainder")
    if _is_float(x.dtype) or "complex" in x.dtype:
        return body.each("TruncateMod" if rest else "RealDiv", x, y) if _is_float(x.dtype) or not rest else None
    op, zero, one = "TruncateMod" if rest else "TruncateDiv", body.like(0, x), body.like(1, x)
    if y.array is not None and np.all(y.array > 0):
        return body.each(op, x, y)
    nought = body.each("Equal", y, zero)
    odd = nought
    if not x.dtype.startswith("u"):
        minus = body.each("Equal", y, body.like(-1, x))
        odd = body.each("LogicalOr", nought, minus)
    plain = body.each(op, x, body.each("SelectV2", odd, one, y))
    ones = body.like(np.iinfo(numpy_type(x.dtype)).max if x.dtype.startswith("u") else -1, x)
    if not x.dtype.startswith("u"):
        plain = body.each("SelectV2", minus, zero if rest else body.each("Neg", x), plain)
    return body.each("SelectV2", nought, x if rest else ones, plain)


def _shift(step: _Step) -> Made:
    """A shift. By more than there are bits it gives 0, or the sign where it is arithmetic; TensorFlow leaves that open."""
    (x, y), body = step.args, step.body
    name = step.op.operation.name
    bits, signed = numpy_type(x.dtype).itemsize * 8, not x.dtype.startswith("u")
    arithmetic = name.endswith("arithmetic")
    if x.dtype == "bool" or (arithmetic and not signed):
        return None
    kind = f"uint{bits}" if name.endswith("logical") and signed else x.dtype
    inside = body.each(
        "LogicalAnd", body.each("GreaterEqual", y, body.like(0, y)), body.each("Less", y, body.like(bits, y))
    )
    amount = body.each("SelectV2", inside, y, body.like(bits - 1 if arithmetic else 0, y))
    if kind != x.dtype:
        x, amount = (body.each("Bitcast", one, type=kind) for one in (x, amount))
    found = body.each("LeftShift" if name.endswith("left") else "RightShift", x, amount)
    if kind != step.type[0]:
        found = body.each("Bitcast", found, type=step.type[0])
    return found if arithmetic else body.each("SelectV2", inside, found, body.like(0, found))


def _compare(step: _Step) -> Made:
    x, y = step.args
    way, kind = step.text("comparison_direction"), step.text("compare_type")
    if kind == "TOTALORDER" or ("complex" in x.dtype and way not in ("EQ", "NE")):
        return None
    if x.dtype == "bool" and way not in ("EQ", "NE"):
        x, y = (step.body.each("Cast", one, DstT="int32") for one in (x, y))
    return step.body.each(COMPARE[way], x, y)


def _select(step: _Step) -> Made:
    return step.body.each("SelectV2", *step.args, shape=step.shape)


def _clamp(step: _Step) -> Made:
    low, value, high = step.args
    return step.body.each("Minimum", step.body.each("Maximum", value, low), high, shape=step.shape)


def _convert(step: _Step) -> Made:
    """Another type. A float beyond an integer's range becomes its end, and NaN 0, as XLA has it; TensorFlow leaves that open."""
    (x,), body, (dtype, _) = step.args, step.body, step.type
    if x.dtype == dtype:
        return x
    if x.array is not None and not (_is_float(x.dtype) and not _is_float(dtype)):
        return replace(x, dtype=dtype, source=None, array=x.array.astype(numpy_type(dtype)))
    if dtype == "bool":
        return body.each("NotEqual", x, body.like(0, x))
    if not _is_float(x.dtype) or _is_float(dtype) or "complex" in dtype:
        return body.each("Cast", x, DstT=dtype)
    if x.dtype in ("float16", "bfloat16"):
        x = body.each("Cast", x, DstT="float32")
    ends = np.iinfo(numpy_type(dtype))
    low, high = body.like(ends.min, x), body.like(ends.max, x)  # the upper end may be rounded up, out of range
    inside = body.each("LogicalAnd", body.each("GreaterEqual", x, low), body.each("Less", x, high))
    found = body.each("Cast", body.each("SelectV2", inside, x, body.like(0, x)), DstT=dtype)
    found = body.each("SelectV2", body.each("GreaterEqual", x, high), constant(np.asarray(ends.max, dtype)), found)
    return body.each("SelectV2", body.each("Less", x, low), constant(np.asarray(ends.min, dtype)), found)


# Shapes.


def _constant(step: _Step) -> Made:
    found, (dtype, shape) = step.op.attributes["value"], step.type
    size = numpy_type(dtype) if re.fullmatch(r"(u?int|float|complex)\d+|bool|bfloat16", dtype) else None
    if size is None:
        return None
    if "complex" in dtype and not hasattr(found, "__array__"):
        return None
    if getattr(found, "is_splat", False) and shape and "complex" not in dtype:
        scalar = np.asarray(found.get_splat_value().value, size)
        return replace(constant(scalar), shape=shape, sizes=ints(*map(int, map(_known, shape))))
    if dtype in ("bfloat16", "float16") and not shape:
        return constant(np.asarray(found.get_splat_value().value, size))
    raw = np.array(found)
    array = raw.view(size) if raw.dtype.itemsize == np.dtype(size).itemsize and raw.dtype != size else raw.astype(size)
    return constant(array.reshape(tuple(map(_known, shape))))


def _known(size: int | None) -> int:
    return -1 if size is None else size


def _broadcast(step: _Step) -> Made:
    """Broadcasting, which waits: most ops broadcast themselves. The operand gets axes of size 1 up to its first one."""
    x, body, shape = step.args[0], step.body, step.shape
    dims = step.numbers("broadcast_dimensions")
    sizes = step.args[1] if len(step.args) > 1 else ints(*map(_known, shape))
    if None not in shape and shape == x.shape and dims == list(range(len(shape))):
        return x
    if x.sizes is not None and x.source is None and x.array is not None and not x.array.shape:
        return replace(x, shape=shape, sizes=sizes)
    if sorted(dims) != dims:
        return None
    if x.array is not None and not x.shape:
        return replace(x, shape=shape, sizes=sizes)
    made = body.whole(x)
    for axis in range(dims[0], len(shape)) if dims else ():
        if axis not in dims:
            at = axis - dims[0]
            made = body.add("ExpandDims", [made, ints_scalar(at)], (*made.shape[:at], 1, *made.shape[at:]))
    if None not in made.shape and made.shape == shape:
        return made
    return replace(made, shape=shape, sizes=sizes)


def ints_scalar(number: int) -> _Value:
    """A position."""
    return constant(np.asarray(number, np.int32))


def _reshape(step: _Step) -> Made:
    x, shape = step.args[0], step.shape
    if len(step.args) > 1:
        return step.body.add("Reshape", [x, step.args[1]], shape)
    if x.array is not None and x.fixed and not x.array.shape and x.shape:
        return replace(x, shape=shape, sizes=ints(*map(_known, shape)))
    if x.array is not None and x.sizes is None:
        return constant(x.array.reshape(tuple(map(_known, shape))))
    sizes = ints(*map(_known, shape))
    return x if x.shape == shape and None not in shape else step.body.add("Reshape", [x, sizes], shape)


def _dimension_size(step: _Step) -> Made:
    (x,), axis, body = step.args, step.number("dimension"), step.body
    size = x.shape[axis]
    if size is not None:
        return ints_scalar(size)
    sizes = x.sizes or body.add("Shape", [x], (len(x.shape),), out_type="int32")
    found = body.add("StridedSlice", [sizes, ints(axis), ints(axis + 1), ints(1)], (), shrink_axis_mask=1)
    return found if found.dtype == "int32" else body.each("Cast", found, DstT="int32")


def _iota(step: _Step) -> Made:
    body, (dtype, shape) = step.body, step.type
    axis = step.number("iota_dimension")
    sizes = step.args[0] if step.args else ints(*map(_known, shape))
    size = shape[axis]
    if dtype == "bool" or "complex" in dtype:
        return None
    if size is not None and size <= 1 << 20:
        made = constant(np.arange(size).astype(numpy_type(dtype)))
    else:
        end = body.add("StridedSlice", [sizes, ints(axis), ints(axis + 1), ints(1)], (), shrink_axis_mask=1)
        made = body.add("Range", [body.like(0, end), end, body.like(1, end)], (size,))
        made = made if made.dtype == dtype else body.each("Cast", made, DstT=dtype)
    if len(shape) == 1:
        return made
    column = (size, *[1] * (len(shape) - axis - 1))
    if made.array is not None:
        made = constant(made.array.reshape(tuple(map(_known, column))))
    elif len(column) > 1:
        made = body.add("Reshape", [made, ints(-1, *[1] * (len(column) - 1))], column)
    return replace(made, shape=shape, sizes=sizes)


def _concatenate(step: _Step) -> Made:
    args, axis = list(step.args), step.number("dimension")
    if len(args) == 1:
        return args[0]
    return step.body.add("ConcatV2", [args, ints_scalar(axis)], step.shape)


def _slice(step: _Step) -> Made:
    begin, end, strides = (step.numbers(key) for key in ("start_indices", "limit_indices", "strides"))
    return step.body.add("StridedSlice", [step.args[0], ints(*begin), ints(*end), ints(*strides)], step.shape)


def _real_slice(step: _Step) -> Made:
    return step.body.add("StridedSlice", list(step.args), step.shape)


def _dynamic_slice(step: _Step) -> Made:
    x, *starts = step.args
    sizes = ints(*step.numbers("slice_sizes"))
    return step.body.add("XlaDynamicSlice", [x, _packed(step.body, starts), sizes], step.shape) if starts else x


def _dynamic_update_slice(step: _Step) -> Made:
    x, update, *starts = step.args
    return (
        step.body.add("XlaDynamicUpdateSlice", [x, update, _packed(step.body, starts)], step.shape)
        if starts
        else update
    )


def _packed(body: _Body, scalars: Sequence[_Value]) -> _Value:
    if all(one.array is not None for one in scalars):
        return constant(np.array([one.array for one in scalars], numpy_type(scalars[0].dtype)))
    return body.add("Pack", [list(scalars)], (len(scalars),), axis=0)


def _pad(step: _Step) -> Made:
    x, value = step.args
    low, high, inside = (step.numbers(key) for key in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    return _padded(step.body, x, value, low, high, inside, step.shape)


def _padded(
    body: _Body, x: _Value, value: _Value, low: Sequence[int], high: Sequence[int], inside: Sequence[int], shape: Shape
) -> _Value:
    if not any(low) and not any(high) and not any(inside):
        return x
    if any(inside) or min(*low, *high) < 0:
        return body.add("XlaPad", [x, value, ints(*low), ints(*high), ints(*inside)], shape)
    pairs = constant(np.array(list(zip(low, high, strict=True)), np.int32))
    return body.add("PadV2", [x, pairs, value], shape)


def _transpose(step: _Step) -> Made:
    order = step.numbers("permutation")
    return _transposed(step.body, step.args[0], order)


def _transposed(body: _Body, x: _Value, order: Sequence[int]) -> _Value:
    if list(order) == list(range(len(order))):
        return x
    return body.add("Transpose", [x, ints(*order)], tuple(x.shape[axis] for axis in order))


def _reverse(step: _Step) -> Made:
    return step.body.add("ReverseV2", [step.args[0], ints(*step.numbers("dimensions"))], step.shape)


def _passed(step: _Step) -> Made:
    return list(step.args)


# Products, convolutions and windows.


def _dot(step: _Step) -> Made:
    """A product. Axes of the result: those of batches, those left of the first operand, those left of the second."""
    from jaxlib.mlir.dialects import stablehlo

    body, (dtype, shape) = step.body, step.type
    dims = stablehlo.DotDimensionNumbers(step.op.attributes["dot_dimension_numbers"])
    batch = [list(dims.lhs_batching_dimensions), list(dims.rhs_batching_dimensions)]
    summed = [list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions)]
    if dtype == "bool":
        return None
    x, y = (one if one.dtype == dtype else body.each("Cast", one, DstT=dtype) for one in step.args)
    ranks, count = (len(x.shape), len(y.shape)), len(batch[0])
    leads = batch == [list(range(count))] * 2 and len(summed[0]) == 1
    if leads and ranks == (count + 2, count + 2):
        turned = summed[0][0] == count, summed[1][0] == count + 1
        if not count:
            return body.add("MatMul", [x, y], shape, transpose_a=turned[0], transpose_b=turned[1])
        return body.add("BatchMatMulV2", [x, y], shape, adj_x=turned[0], adj_y=turned[1])
    if sum(ranks) > 26:
        return None
    letters = "abcdefghijklmnopqrstuvwxyz"
    left, right = list(letters[: ranks[0]]), list(letters[ranks[0] : sum(ranks)])
    for mine, its in ((batch[0], batch[1]), (summed[0], summed[1])):
        for a, b in zip(mine, its, strict=True):
            right[b] = left[a]
    gone = {left[axis] for axis in summed[0]}
    result = [left[axis] for axis in batch[0]] + [
        one for axis, one in enumerate(left) if axis not in batch[0] and one not in gone
    ]
    result += [one for one in right if one not in left]
    return body.add("Einsum", [[x, y]], shape, equation=f"{''.join(left)},{''.join(right)}->{''.join(result)}")


def _convolution(step: _Step) -> Made:
    """A convolution over one or two axes, with the channels last; its operands are turned, and the result back."""
    from jaxlib.mlir.dialects import stablehlo

    x, kernel, *_ = step.args
    body, (dtype, shape) = step.body, step.type
    dims = stablehlo.ConvDimensionNumbers(step.op.attributes["dimension_numbers"])
    axes = list(dims.input_spatial_dimensions)
    count = len(axes)
    strides, spread, dilation = (
        step.numbers(key, [1] * count) for key in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    padding = step.numbers("padding", [0] * 2 * count)
    groups = step.number("feature_group_count", 1)
    plain = (
        not any(step.numbers("window_reversal")) and step.number("batch_group_count", 1) == 1 and not len(step.args) > 2
    )
    if count not in (1, 2) or not plain or not _is_float(dtype):
        return None
    x, kernel = (one if one.dtype == dtype else body.each("Cast", one, DstT=dtype) for one in (x, kernel))
    x = _transposed(body, x, [dims.input_batch_dimension, *axes, dims.input_feature_dimension])
    kernel = _transposed(
        body,
        kernel,
        [*dims.kernel_spatial_dimensions, dims.kernel_input_feature_dimension, dims.kernel_output_feature_dimension],
    )
    turned = [dims.output_batch_dimension, *dims.output_spatial_dimensions, dims.output_feature_dimension]
    if count == 1:
        x = body.add("ExpandDims", [x, ints_scalar(1)], (x.shape[0], 1, *x.shape[1:]))
        kernel = body.add("ExpandDims", [kernel, ints_scalar(0)], (1, *kernel.shape))
        strides, spread, dilation, padding = [1, *strides], [1, *spread], [1, *dilation], [0, 0, *padding]
    low, high = padding[::2], padding[1::2]
    result: Shape = tuple(shape[axis] for axis in turned)
    result = result if count == 2 else (result[0], 1, *result[1:])
    if any(one != 1 for one in spread) or min(padding) < 0:
        wider = [
            None if size is None else (size - 1) * by + 1 + a + b
            for size, by, a, b in zip(x.shape[1:3], spread, low, high, strict=True)
        ]
        inside = [0, *(by - 1 for by in spread), 0]
        x = _padded(body, x, body.like(0, x), [0, *low, 0], [0, *high, 0], inside, (x.shape[0], *wider, x.shape[3]))
        low, high = [0, 0], [0, 0]
    edges = (0, 0, *(edge for pair in zip(low, high, strict=True) for edge in pair), 0, 0)
    attrs: dict[str, Any] = {"strides": (1, *strides, 1), "dilations": (1, *dilation, 1), "data_format": "NHWC"}
    attrs |= {"padding": "EXPLICIT", "explicit_paddings": edges} if any(edges) else {"padding": "VALID"}
    channels = x.shape[3]
    if groups > 1 and groups == channels and kernel.shape[2] == 1 and strides[0] == strides[1]:
        size = (*kernel.shape[:2], channels, (kernel.shape[3] or 0) // groups)
        kernel = body.add("Reshape", [kernel, ints(*map(_known, size))], size)
        made = body.add("DepthwiseConv2dNative", [x, kernel], result, **attrs)
    else:
        made = body.add("Conv2D", [x, kernel], result, **attrs)
    if count == 1:
        made = body.add("Squeeze", [made], (made.shape[0], *made.shape[2:]), squeeze_dims=(1,))
    return _transposed(body, made, [turned.index(axis) for axis in range(count + 2)])


REDUCED = {"add": "Sum", "multiply": "Prod", "maximum": "Max", "minimum": "Min", "and": "All", "or": "Any"}


def _kind(region: Any) -> str:
    """The operation that a region is, which takes its two arguments; "" for another one."""
    block = region.blocks[0]
    operations = list(block.operations)
    if len(operations) != 2 or len(block.arguments) != 2:
        return ""
    op, end = operations
    same = set(op.operands) == set(block.arguments) and list(end.operands) == list(op.results)
    return str(op.operation.name.removeprefix("stablehlo.")) if same else ""


def _identity(kind: str, start: _Value) -> bool:
    """True if a start of a reduction changes nothing."""
    if start.array is None or start.array.size != 1:
        return False
    number, dtype = start.array.reshape(()), start.dtype
    if kind in ("maximum", "minimum") and dtype != "bool":
        info = None if _is_float(dtype) else np.iinfo(numpy_type(dtype))
        low, high = (-np.inf, np.inf) if info is None else (info.min, info.max)
        return bool(number == (low if kind == "maximum" else high))
    return bool(number == {"add": 0, "or": 0, "maximum": 0, "multiply": 1, "and": 1, "minimum": 1}.get(kind, np.nan))


def _reduce(step: _Step) -> Made:
    """A reduction over axes; with two operands, the place of the largest or least of a row."""
    axes, body = step.numbers("dimensions"), step.body
    if len(step.args) == 4:
        return _arg_extreme(step, axes)
    kind = _kind(step.op.regions[0])
    if len(step.args) != 2 or kind not in REDUCED:
        return None
    x, start = step.args
    op = REDUCED[kind]
    if x.dtype == "bool":
        op = {"maximum": "Any", "add": "Any", "minimum": "All", "multiply": "All"}.get(kind, op)
    elif kind in ("and", "or"):
        return None
    made = body.add(op, [x, ints(*axes)], step.shape, keep_dims=False)
    if _identity(kind, start):
        return made
    return body.each(BINARY[kind][x.dtype == "bool"], made, start, shape=step.shape)


def _arg_extreme(step: _Step, axes: Sequence[int]) -> Made:
    """The largest or least of an axis, and its first place; NaN comes before all else, as JAX has it."""
    body = step.body
    x, places, start, first = step.args
    block = step.op.regions[0].blocks[0]
    said = [one.operation.name.removeprefix("stablehlo.") for one in block.operations][:-1]
    ways = [way for one in block.operations if (way := _word(one, "comparison_direction"))]
    owner = step.op.operands[1].owner
    counts = (
        getattr(owner, "name", "") in ("stablehlo.iota", "stablehlo.dynamic_iota")
        and int(owner.attributes["iota_dimension"].value) == axes[0]
    )
    wanted = ["compare", "compare", "or", "compare", "compare", "and", "or", "select", "select"]
    largest = ways[:1] == ["GT"]
    ends = _identity("maximum" if largest else "minimum", start) and first.array is not None and not first.array.any()
    if (
        len(axes) != 1
        or said != wanted
        or ways[1:] != ["NE", "EQ", "LT"]
        or ways[0] not in ("GT", "LT")
        or not counts
        or not ends
    ):
        return None
    if not _same_extreme(block):
        return None
    value = body.add("Max" if largest else "Min", [x, ints(*axes)], step.shape, keep_dims=False)
    at = ints_scalar(axes[0])
    place = body.add("ArgMax" if largest else "ArgMin", [x, at], step.shape, output_type="int64")
    if _is_float(x.dtype):
        nan = body.each("IsNan", x)
        odd = body.add("ArgMax", [body.each("Cast", nan, DstT="float32"), at], step.shape, output_type="int64")
        place = body.each("SelectV2", body.add("Any", [nan, ints(*axes)], step.shape, keep_dims=False), odd, place)
    return [value, body.each("Cast", place, DstT=places.dtype) if places.dtype != "int64" else place]


def _same_extreme(block: Any) -> bool:
    """True if the operations of a region are wired as JAX wires those of `argmax` and `argmin`."""
    a, i, b, j = (block.arguments[n] for n in (0, 1, 2, 3))
    ops = list(block.operations)
    beyond, odd, either, level, before, tie, take, value, place, end = ops
    r = [one.results[0] for one in ops[:-1]]
    wired = [
        (beyond, [a, b]), (odd, [a, a]), (either, [r[0], r[1]]), (level, [a, b]), (before, [i, j]), (tie, [r[3], r[4]]),
        (take, [r[2], r[5]]), (value, [r[2], a, b]), (place, [r[6], i, j]), (end, [r[7], r[8]]),
    ]  # fmt: skip
    return all(list(one.operands) == operands for one, operands in wired)


def _reduce_window(step: _Step) -> Made:
    """Pooling over windows of an image, and cumulative sums, which JAX writes as windows as long as the axis."""
    if len(step.args) != 2:
        return None
    (x, start), body, shape = step.args, step.body, step.shape
    kind, rank = _kind(step.op.regions[0]), len(x.shape)
    ones = [1] * rank
    window, strides = step.numbers("window_dimensions"), step.numbers("window_strides", ones)
    dilated = step.numbers("base_dilations", ones) != ones or step.numbers("window_dilations", ones) != ones
    padding = step.numbers("padding", [0] * 2 * rank)
    low, high = padding[::2], padding[1::2]
    if dilated or not _identity(kind, start):
        return None
    (moved, *more) = [axis for axis in range(rank) if window[axis] != 1] or [0]
    size = x.shape[moved]
    if (
        not more
        and kind == "add"
        and strides == ones
        and size is not None
        and window[moved] == size
        and (low[moved], high[moved]) in ((size - 1, 0), (0, size - 1))
    ):
        return body.add("Cumsum", [x, ints_scalar(moved)], shape, reverse=bool(high[moved]) and size > 1)
    # A reversed sum would be (0, size - 1); both are the same for one element.
    outside = [axis for axis in (0, rank - 1) if window[axis] != 1 or strides[axis] != 1 or low[axis] or high[axis]]
    if kind not in ("maximum", "add") or rank not in (3, 4) or outside or not _is_float(x.dtype) or min(padding) < 0:
        return None
    x = _padded(
        body,
        x,
        start if not start.shape else body.like(0, x),
        low,
        high,
        [0] * rank,
        (x.shape[0], *[None] * (rank - 2), x.shape[-1]),
    )
    if rank == 3:
        x = body.add("ExpandDims", [x, ints_scalar(1)], (x.shape[0], 1, *x.shape[1:]))
        window, strides = [1, 1, *window[1:]], [1, 1, *strides[1:]]
    result = shape if rank == 4 else (shape[0], 1, *shape[1:])
    attrs: dict[str, Any] = {
        "ksize": tuple(window),
        "strides": tuple(strides),
        "padding": "VALID",
        "data_format": "NHWC",
    }
    made = body.add("MaxPool" if kind == "maximum" else "AvgPool", [x], result, **attrs)
    if kind == "add":
        made = body.each("Mul", made, body.like(int(np.prod(window)), made))
    return made if rank == 4 else body.add("Squeeze", [made], shape, squeeze_dims=(1,))


def _gather(step: _Step) -> Made:
    """Rows of a table, elements along an axis, or slices at positions along the first axes. Positions out of range are moved into it."""
    from jaxlib.mlir.dialects import stablehlo

    x, at = step.args[:2]
    body, shape = step.body, step.shape
    dims = stablehlo.GatherDimensionNumbers(step.op.attributes["dimension_numbers"])
    sizes = (
        step.numbers("slice_sizes")
        if len(step.args) < 3
        else [
            -1 if v is None else int(v)
            for v in (step.args[2].array if step.args[2].array is not None else [None] * len(x.shape))
        ]
    )
    offset, gone, axes = list(dims.offset_dims), list(dims.collapsed_slice_dims), list(dims.start_index_map)
    batch = [list(dims.operand_batching_dims), list(dims.start_indices_batching_dims)]
    rank, inner = len(x.shape), len(at.shape)
    vector = dims.index_vector_dim
    kept = [axis for axis in range(rank) if axis not in gone and axis not in batch[0]]
    full = all(sizes[axis] == x.shape[axis] or (x.shape[axis] is None and sizes[axis] < 0) for axis in kept)
    if (
        sorted(gone) != sorted(axes)
        or not full
        or any(sizes[axis] != 1 for axis in axes)
        or vector not in (inner - 1, inner)
        or not axes
    ):
        return None
    last = at.shape[-1] if vector == inner - 1 else 1
    if last != len(axes) or at.dtype not in ("int32", "int64") or any(x.shape[axis] is None for axis in axes):
        return None
    ends = [(x.shape[axis] or 1) - 1 for axis in axes]
    if min(ends) < 0:
        return None
    top = constant(np.array(ends if len(ends) > 1 else ends[0], numpy_type(at.dtype)))
    lead = list(range(len(batch[0])))
    places = body.whole(at)
    places = body.each("Minimum", body.each("Maximum", places, body.like(0, at)), replace(top, shape=()))
    trailing = list(range(len(shape) - len(offset), len(shape)))
    if len(axes) > 1:
        if axes != list(range(len(axes))) or batch[0] or vector == inner or offset != trailing:
            return None
        return body.add("GatherNd", [x, places], shape)
    if batch != [lead, lead]:
        return None
    if vector == inner - 1:
        places = body.add("Squeeze", [places], at.shape[:-1], squeeze_dims=(inner - 1,))
    count, axis = len(places.shape) - len(lead), axes[0]
    # GatherV2 puts the axes of positions where the axis was; the module names places for those of slices.
    made_axes = [
        *lead,
        *(("slice", a) for a in kept if a < axis),
        *(("at", n) for n in range(count)),
        *(("slice", a) for a in kept if a > axis),
    ]
    slices, others = iter(("slice", a) for a in kept), iter([*lead, *(("at", n) for n in range(count))])
    wanted = [next(slices) if number in offset else next(others) for number in range(len(shape))]
    unknown: Shape = (None,) * len(shape)
    made = body.add("GatherV2", [x, places, ints_scalar(axis)], unknown, batch_dims=len(lead))
    return replace(_transposed(body, made, [made_axes.index(one) for one in wanted]), shape=shape)


def _sort(step: _Step) -> Made:
    """Sorting along an axis, rising, of what has no NaN and -0 behind: numbers that are integers."""
    dims = step.number("dimension", len(step.shape) - 1)
    kind = step.op.regions[0].blocks[0]
    ops = list(kind.operations)
    simple = (
        len(ops) == 2
        and list(ops[0].operands) == [kind.arguments[0], kind.arguments[1]]
        and list(ops[1].operands) == list(ops[0].results)
    )
    if not simple or len(step.args) > 2 or dims != len(step.shape) - 1 or _is_float(step.args[0].dtype):
        return None
    if _word(ops[0], "comparison_direction") != "LT":
        return None
    if len(step.args) == 1:
        return step.body.add("XlaSort", [step.args[0]], step.shape)
    keys = step.body.add("XlaKeyValueSort", list(step.args), step.shape)
    return [keys, _Value(step.args[1].dtype, step.args[1].shape, ((keys.source or (0, 0))[0], 1))]


def _top_k(step: _Step, count: int) -> Made:
    x = step.args[0]
    values = step.body.add("TopKV2", [x, ints_scalar(count)], step.shape, sorted=True)
    return [values, _Value("int32", step.shape, ((values.source or (0, 0))[0], 1))]


def _custom_call(step: _Step) -> Made:
    target = step.text("call_target_name")
    if target.startswith(PASSED):
        return list(step.args) if len(step.op.results) == len(step.args) else [] if not len(step.op.results) else None
    if target in CUSTOM and len(step.args) == 1:
        return step.body.each(CUSTOM[target], step.args[0])
    if target in ("mhlo.topk", "stablehlo.dynamic_top_k"):
        said = str(step.op.attributes["mhlo.attributes"]) if "mhlo.attributes" in step.op.attributes else ""
        found = re.search(r"\bk = (\d+)", said)
        count = int(found[1]) if found else step.shape[-1] if step.shape else None
        if count is not None and "largest = false" not in said and _type(step.op.results[1].type)[0] == "int32":
            return _top_k(step, count)
    return None


# Calls, loops and branches.


def _call(step: _Step) -> Made:
    """A call of another function of the module, whose operations stand in its place; a composite is what it is made of."""
    key = "callee" if "callee" in step.op.attributes else "decomposition"
    called = step.body.module.symbols.get(step.op.attributes[key].value)
    if called is None:
        raise step.body.module.error("calls a function that it has not")
    block = called.regions[0].blocks[0]
    return _run(step.body, block, dict(zip(block.arguments, step.args, strict=True)))


def _composite(step: _Step) -> Made:
    if step.text("name") == "chlo.top_k":
        count = step.shape[-1]
        if count is not None and _type(step.op.results[1].type)[0] == "int32":
            return _top_k(step, count)
    return _call(step)


def _region(
    step: _Step, region: Any, what: str, types: Sequence[tuple[str, Shape]], free: Sequence[Any]
) -> tuple[_Body, list[_Value], list[_Value]]:
    """A region as a function of its arguments and of what it reads from outside: its body, results, and the latter.

    Constants from outside are constants inside.
    """
    module = step.body.module
    body = _Body(module, f"{module.name}/{what}_{len(module.made)}_{module.count}")
    block = region.blocks[0]
    given = [body.parameter(*one) for one in types]
    outside = [step.scope[value] for value in free]
    passed = [body.parameter(value.dtype, value.shape) for value in outside if not value.fixed]
    inner = iter(passed)
    scope = {value: one if one.fixed else next(inner) for value, one in zip(free, outside, strict=True)}
    scope |= dict(zip(block.arguments, given, strict=True))
    return body, _run(body, block, scope), passed


def _written(body: _Body, results: Sequence[_Value]) -> FunctionRef:
    body.module.made[body.name] = body.done(results)
    return FunctionRef(body.name)


def _while(step: _Step) -> Made:
    regions = step.op.regions
    free = list(dict.fromkeys(value for region in regions for value in _captured(region)))
    types = [_type(result.type) for result in step.op.results]
    cond, test, _ = _region(step, regions[0], "cond", types, free)
    body, results, passed = _region(step, regions[1], "body", types, free)
    given = [*step.args, *(value for value in (step.scope[one] for one in free) if not value.fixed)]
    refs = {"cond": _written(cond, test), "body": _written(body, [*results, *passed])}
    made = step.body.add("StatelessWhile", [given], (), **refs, output_shapes=(), parallel_iterations=10)
    return _outputs(made, types)


def _outputs(first: _Value, types: Sequence[tuple[str, Shape]]) -> list[_Value]:
    node = (first.source or (0, 0))[0]
    return [_Value(dtype, shape, (node, port)) for port, (dtype, shape) in enumerate(types)]


def _case(step: _Step) -> Made:
    """One of several branches, the last where the number is none of them. Where the number is known, that branch alone."""
    chosen, regions = step.args[0], list(step.op.regions)
    truth = step.op.operation.name == "stablehlo.if"
    if chosen.array is not None:
        number = (0 if chosen.array else 1) if truth else int(chosen.array)
        region = regions[number if 0 <= number < len(regions) else -1]
        return _run(step.body, region.blocks[0], dict(step.scope))
    free = list(dict.fromkeys(value for region in regions for value in _captured(region)))
    types = [_type(result.type) for result in step.op.results]
    given = [value for value in (step.scope[one] for one in free) if not value.fixed]
    refs = []
    for region in regions:
        body, results, _ = _region(step, region, "branch", [], free)
        refs.append(_written(body, results))
    tout = {"Tout": tuple(dtype for dtype, _ in types), "output_shapes": ()}
    if truth:
        made = step.body.add("StatelessIf", [chosen, given], (), then_branch=refs[0], else_branch=refs[1], **tout)
    else:
        made = step.body.add("StatelessCase", [chosen, given], (), branches=tuple(refs), **tout)
    return _outputs(made, types)


READERS: Mapping[str, Reader] = {
    **dict.fromkeys(UNARY, _unary), **dict.fromkeys(BINARY, _binary), "not": _not, "divide": _divide, "remainder": _divide,
    **dict.fromkeys(("shift_left", "shift_right_arithmetic", "shift_right_logical"), _shift), "compare": _compare, "select": _select,
    "clamp": _clamp, "convert": _convert, "constant": _constant, "broadcast_in_dim": _broadcast, "dynamic_broadcast_in_dim": _broadcast,
    "reshape": _reshape, "dynamic_reshape": _reshape, "get_dimension_size": _dimension_size, "iota": _iota, "dynamic_iota": _iota,
    "concatenate": _concatenate, "slice": _slice, "real_dynamic_slice": _real_slice, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice, "pad": _pad, "transpose": _transpose, "reverse": _reverse, "optimization_barrier": _passed,
    "dot_general": _dot, "convolution": _convolution, "reduce": _reduce, "reduce_window": _reduce_window, "gather": _gather,
    "dynamic_gather": _gather, "sort": _sort, "custom_call": _custom_call, "func.call": _call, "composite": _composite, "while": _while,
    "case": _case, "if": _case,
}  # fmt: skip
"""By operation. A reader that gives None leaves the operation as it is."""
