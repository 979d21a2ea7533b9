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
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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


def left_whole(attrs: Mapping[str, Any]) -> str:
    """Reason why the module of a node stays one node; "" where `functions_of` reads it."""
    if attrs.get("version") not in VERSIONS or attrs.get("dim_args_spec"):
        return f"its calling convention is version {attrs.get('version')}, and {VERSIONS[0]} to {VERSIONS[-1]} are read"
    if attrs.get("has_token_input_output"):
        return "it takes and gives tokens, for effects in order"
    return "" if installed() else f"jaxlib reads it: {INSTALL_JAXLIB}"


@dataclass(frozen=True)
class Value:
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
    sizes: Value | None = None

    @property
    def fixed(self) -> bool:
        """True if nothing of it is left to the run: it can be written into another function."""
        return self.array is not None and (self.sizes is None or self.sizes.array is not None)


@dataclass(eq=False)
class Body:
    """A function while it is written. `module` has what all functions of a module share."""

    module: _Module
    name: str
    names: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    attrs: list[Mapping[str, Any]] = field(default_factory=list)
    edges: list[tuple[int, int, int, int]] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)
    constants: dict[int, tuple[Value, Value]] = field(default_factory=dict)
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

    def parameter(self, dtype: str, shape: Shape) -> Value:
        """Adds a parameter: all of them come before other nodes."""
        number = len(self.ops)
        attrs = {"index": number, "T": dtype, "_output_shapes": (shape,)}
        return Value(dtype, shape, (self.node(f"arg{number}", "_Arg", attrs), 0))

    def add(self, op: str, inputs: Sequence[Value | Sequence[Value]], shape: Shape, **attrs: Any) -> Value:
        """Adds a node. Type attributes follow from its inputs; a list among these is one argument. Returns its first output."""
        known = schema.lookup(op)
        for one, given in zip(known.inputs if known else (), inputs, strict=True):
            several = [given] if isinstance(given, Value) else given
            if one.number_attr:
                attrs[one.number_attr] = len(several)
            if one.type_list_attr:
                attrs[one.type_list_attr] = tuple(value.dtype for value in several)
            elif one.type_attr:
                attrs[one.type_attr] = several[0].dtype
        flat = [one for given in inputs for one in ([given] if isinstance(given, Value) else given)]
        sources = [self.place(one) for one in flat]
        node = self.node(f"{self.scope}/{op}" if self.scope else op, op, attrs)
        self.edges += [(*source, node, slot) for slot, source in enumerate(sources)]
        dtype = schema.output_dtype(op, attrs, 0) or str(attrs.get("dtype", ""))
        return Value(dtype, shape, (node, 0))

    def place(self, value: Value) -> tuple[int, int]:
        """The node and port of a whole tensor."""
        return self.whole(value).source or (0, 0)

    def narrow(self, value: Value) -> Value:
        """A tensor before it is broadcast, as a node."""
        if value.source is None and value.array is not None:
            key = id(value.array)
            if key not in self.constants:
                array = value.array
                held = TensorValue(value.dtype, array.shape, partial(np.asarray, array))
                node = self.node(
                    f"{self.scope}/Const" if self.scope else "Const", "Const", {"dtype": value.dtype, "value": held}
                )
                self.constants[key] = (value, Value(value.dtype, array.shape, (node, 0), array))
            return self.constants[key][1]
        return replace(value, sizes=None) if value.sizes else value

    def whole(self, value: Value) -> Value:
        """A tensor in its full shape, as a node."""
        narrow = self.narrow(value)
        return narrow if value.sizes is None else self.add("BroadcastTo", [narrow, value.sizes], value.shape)

    def each(self, op: str, *values: Value, shape: Shape | None = None, **attrs: Any) -> Value:
        """Adds a function of elements of tensors of one shape, or scalars. What is broadcast to the shape of another one stays narrow."""
        wide = next((value for value in values if value.shape), values[0])
        shape = wide.shape if shape is None else shape
        if all(value.sizes or not value.shape for value in values) and wide.sizes:
            found = self.add(op, [self.narrow(value) for value in values], (), **attrs)
            return replace(found, shape=shape, sizes=wide.sizes)
        return self.add(op, [self.narrow(value) for value in values], shape, **attrs)

    def like(self, number: Any, value: Value) -> Value:
        """A scalar of the type of another tensor."""
        return constant(np.asarray(number, numpy_type(value.dtype)))

    def done(self, results: Sequence[Value]) -> Function:
        """The function, once all of it is written."""
        sources = [self.place(value) for value in results]
        columns = np.array(self.edges, np.int32).reshape(-1, 4).T
        body = Graph(self.names, self.ops, [""] * len(self.ops), self.attrs, Edges.of(*columns), self.module.functions)
        given = [node for node, op in enumerate(self.ops) if op == "_Arg"]
        parameters = tuple(Argument(self.names[node], self.attrs[node]["T"], node) for node in given)
        named = [Argument(f"output_{n}", v.dtype, *s) for n, (v, s) in enumerate(zip(results, sources, strict=True))]
        return Function(self.name, body, parameters, tuple(named))


def constant(array: NDArray[Any]) -> Value:
    """A constant, which becomes a node where it is used."""
    return Value("bfloat16" if array.dtype == bfloat16 else array.dtype.name, array.shape, None, array)


def numpy_type(dtype: str) -> Any:
    """NumPy's type of a name."""
    return bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def ints(*numbers: int) -> Value:
    """Sizes or positions as a tensor."""
    return constant(np.array(numbers, np.int32))


@dataclass(eq=False)
class _Module:
    """A module while it is read.

    Attributes:
        functions: Functions that are written, and all others of the model.
        name: Name of the function that it becomes; those of its regions begin with it.
        made: Functions that were written, by name.
        readers: What reads an operation, by its name.
        symbols: Its own functions.
        depth: Calls and regions inside of each other, where it is read.
        count: Nodes so far.
    """

    functions: Mapping[str, Function]
    name: str
    made: dict[str, Function] = field(default_factory=dict)
    readers: Mapping[str, Any] = field(default_factory=dict)
    symbols: dict[str, Any] = field(default_factory=dict)
    depth: int = 0
    count: int = 0

    def error(self, what: str) -> LoadError:
        """An error about it."""
        return LoadError(
            f"the StableHLO of an {CALL_MODULE} node {what}",
            fix="export it with another version of JAX, or install the newest jaxlib",
        )


def functions_of(
    name: str, attrs: Mapping[str, Any], functions: Mapping[str, Function], readers: Mapping[str, Any]
) -> dict[str, Function]:
    """The functions that the module of a node becomes: one by the name that is given, and those of its loops and branches.

    Args:
        name: Name of the first.
        attrs: Attributes of the `XlaCallModule` node, one that is not `left_whole`.
        functions: The library that the functions are part of.
        readers: What reads an operation, by its name.

    Raises:
        LoadError: jaxlib can not read it, or it is no module that a node runs.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    made = _Module(functions, name, readers={**readers, **CONTROL})
    data = attrs.get("module")
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        context.attach_diagnostic_handler(lambda problem: True)  # MLIR would print it, as the module words it
        try:
            artifact = _parsed(made, data if isinstance(data, bytes) else str(data).encode())
            module = stablehlo.deserialize_portable_artifact(context, artifact)
            made.symbols = {word(op, "sym_name"): op for op in module.body.operations if "sym_name" in op.attributes}
            main = made.symbols.get("main")
            if main is None:
                raise made.error("has no main function")
            body, block = Body(made, name), main.regions[0].blocks[0]
            platforms = tuple(map(_text, attrs.get("platforms") or ()))
            types = [typed(argument.type) for argument in block.arguments]
            given = [] if len(platforms) < 2 or not types else [constant(np.asarray(_platform(platforms), np.int32))]
            given += [body.parameter(*one) for one in types[len(given) :]]
            results = _run(body, block, dict(zip(block.arguments, given, strict=True)))
        except (ir.MLIRError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
            raise made.error(f"can not be read: {' '.join(str(problem).split())[:200]}") from None
        taken = [value.dtype for value in given if value.source is not None]
        if taken != list(attrs.get("Tin") or ()) or [value.dtype for value in results] != list(attrs.get("Tout") or ()):
            raise made.error("has other arguments and results than the node")
        made.made[name] = body.done(results)
    return made.made


_LONGEST = 60.0
"""Seconds that jaxlib may take to parse a module."""

_PARSE = """
import sys
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
with ir.Context() as context:
    stablehlo.register_dialect(context)
    try:
        module = stablehlo.deserialize_portable_artifact(context, sys.stdin.buffer.read())
        module.operation.verify()
    except Exception as problem:
        sys.exit(str(problem))
    sys.stdout.buffer.write(stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version()))
"""
"""What the process of `_parsed` does."""


def _parsed(made: _Module, data: bytes) -> bytes:
    """A module as jaxlib writes it, parsed in a process of its own: damaged bytes can crash jaxlib's parser, or keep it busy."""
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _PARSE], input=data, capture_output=True, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        raise made.error(f"can not be read: jaxlib was not done with it in {_LONGEST:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or "it is no module"
        raise ValueError(said if done.returncode > 0 else "it is damaged, and jaxlib crashes on it")
    return done.stdout


def _platform(platforms: Sequence[str]) -> int:
    """Number of the platform whose code is read: the CPU's where it is there, for which TensorFlow computes the reference."""
    return platforms.index("CPU") if "CPU" in platforms else 0


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def typed(kind: Any) -> tuple[str, Shape]:
    """Type and shape of a tensor."""
    element = str(getattr(kind, "element_type", kind))
    bits = re.fullmatch(r"(f|i|ui)(2|4|8|16|32|64)", element)  # NumPy reads "i4" as one of four bytes
    name = (
        {"f": "float", "i": "int", "ui": "uint"}[bits[1]] + bits[2]
        if bits and element not in _PLAIN
        else _PLAIN.get(element, element)
    )
    if not hasattr(kind, "element_type"):
        return element, ()
    return name, tuple(None if kind.is_dynamic_dim(axis) else kind.get_dim_size(axis) for axis in range(kind.rank))


Scope = dict[Any, Value]
"""Values of a module -> tensors."""


def _run(body: Body, block: Any, scope: Scope) -> list[Value]:
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
        step = Step(body, op, scope, [scope[value] for value in op.operands])
        try:
            made = module.readers.get(name.removeprefix("stablehlo."), _opaque)(step)
            values = _opaque(step) if made is None else [made] if isinstance(made, Value) else made
            scope.update(zip(op.results, values, strict=True))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
            raise module.error(f"has an operation {name} that can not be read: {problem}") from problem
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
class Step:
    """An operation that is read: the function that it is written to, its scope and its operands."""

    body: Body
    op: Any
    scope: Scope
    args: Sequence[Value]

    @property
    def type(self) -> tuple[str, Shape]:
        """Type and shape of its first result."""
        return typed(self.op.results[0].type)

    @property
    def shape(self) -> Shape:
        """Shape of its first result."""
        return self.type[1]

    def numbers(self, key: str, default: Sequence[int] = ()) -> list[int]:
        """An attribute that is a list of numbers or a matrix of them, row by row."""
        if key not in self.op.attributes:
            return list(default)
        found = self.op.attributes[key]
        return [int(one) for one in (np.array(found).reshape(-1) if hasattr(found, "get_splat_value") else found)]

    def number(self, key: str, default: int = 0) -> int:
        """An attribute that is a number."""
        return int(self.op.attributes[key].value) if key in self.op.attributes else default

    def text(self, key: str) -> str:
        """An attribute as text: a name, or the last word of an enumeration."""
        return word(self.op, key)


def word(op: Any, key: str) -> str:
    """An attribute as text: a name, or the last word of an enumeration; "" where it is not there."""
    return str(op.attributes[key]).strip('"').rstrip(">").rpartition(" ")[2] if key in op.attributes else ""


def _opaque(step: Step) -> list[Value]:
    """One node of an op of the operation's own name, which no engine has."""
    name = step.op.operation.name
    if name in ("stablehlo.custom_call", "stablehlo.composite"):
        name = f"{name}.{_NOT_IN_NAMES.sub('_', step.text('call_target_name') or step.text('name'))}"
    types = [typed(result.type) for result in step.op.results]
    hints = tuple(shape for _, shape in types)
    free = [value for region in step.op.regions for value in _captured(region)]
    inputs = [*step.args, *(step.scope[value] for value in free)]
    first = step.body.node(
        f"{step.body.scope}/{name}".strip("/"), name, {"dtype": types[0][0] if types else "", "_output_shapes": hints}
    )
    step.body.edges += [(*step.body.place(one), first, slot) for slot, one in enumerate(inputs)]
    return [Value(dtype, shape, (first, port)) for port, (dtype, shape) in enumerate(types)]


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


def known(size: int | None) -> int:
    """A size as TensorFlow's shapes have it, -1 for one that only the run knows."""
    return -1 if size is None else size


def position(number: int) -> Value:
    """A position."""
    return constant(np.asarray(number, np.int32))


def is_float(dtype: str) -> bool:
    """True for a type of floats."""
    return "float" in dtype


def padded(
    body: Body, x: Value, value: Value, low: Sequence[int], high: Sequence[int], inside: Sequence[int], shape: Shape
) -> Value:
    """A tensor with a value before, behind and between its elements; a negative number takes elements away."""
    if not any(low) and not any(high) and not any(inside):
        return x
    if any(inside) or min(*low, *high) < 0:
        return body.add("XlaPad", [x, value, ints(*low), ints(*high), ints(*inside)], shape)
    pairs = constant(np.array(list(zip(low, high, strict=True)), np.int32))
    return body.add("PadV2", [x, pairs, value], shape)


def transposed(body: Body, x: Value, order: Sequence[int]) -> Value:
    """A tensor with its axes in another order."""
    if list(order) == list(range(len(order))):
        return x
    return body.add("Transpose", [x, ints(*order)], tuple(x.shape[axis] for axis in order))


def top_k(step: Step, count: int) -> list[Value]:
    """The largest of each row, falling, and where they were."""
    x = step.args[0]
    values = step.body.add("TopKV2", [x, position(count)], step.shape, sorted=True)
    return [values, Value("int32", step.shape, ((values.source or (0, 0))[0], 1))]


CUSTOM = {
    "mhlo.erf": "Erf", "mhlo.tan": "Tan", "mhlo.acos": "Acos", "mhlo.asin": "Asin", "mhlo.atan": "Atan", "mhlo.sinh": "Sinh",
    "mhlo.cosh": "Cosh",
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


def _custom_call(step: Step) -> Any:
    target = step.text("call_target_name")
    if target.startswith(PASSED):
        return list(step.args) if len(step.op.results) == len(step.args) else [] if not len(step.op.results) else None
    if target in CUSTOM and len(step.args) == 1:
        return step.body.each(CUSTOM[target], step.args[0])
    if target in ("mhlo.topk", "stablehlo.dynamic_top_k"):
        said = str(step.op.attributes["mhlo.attributes"]) if "mhlo.attributes" in step.op.attributes else ""
        found = re.search(r"\bk = (\d+)", said)
        count = int(found[1]) if found else step.shape[-1] if step.shape else None
        if count is not None and "largest = false" not in said and typed(step.op.results[1].type)[0] == "int32":
            return top_k(step, count)
    return None


# Calls, loops and branches.


def _call(step: Step) -> Any:
    """A call of another function of the module, whose operations stand in its place; a composite is what it is made of."""
    key = "callee" if "callee" in step.op.attributes else "decomposition"
    called = step.body.module.symbols.get(step.op.attributes[key].value)
    if called is None:
        raise step.body.module.error("calls a function that it has not")
    block = called.regions[0].blocks[0]
    return _run(step.body, block, dict(zip(block.arguments, step.args, strict=True)))


def _composite(step: Step) -> Any:
    if step.text("name") == "chlo.top_k":
        count = step.shape[-1]
        if count is not None and typed(step.op.results[1].type)[0] == "int32":
            return top_k(step, count)
    return _call(step)


def _region(
    step: Step, region: Any, what: str, types: Sequence[tuple[str, Shape]], free: Sequence[Any]
) -> tuple[Body, list[Value], list[Value]]:
    """A region as a function of its arguments and of what it reads from outside: its body, results, and the latter.

    Constants from outside are constants inside.
    """
    module = step.body.module
    body = Body(module, f"{module.name}/{what}_{len(module.made)}_{module.count}")
    block = region.blocks[0]
    given = [body.parameter(*one) for one in types]
    outside = [step.scope[value] for value in free]
    passed = [body.parameter(value.dtype, value.shape) for value in outside if not value.fixed]
    inner = iter(passed)
    scope = {value: one if one.fixed else next(inner) for value, one in zip(free, outside, strict=True)}
    scope |= dict(zip(block.arguments, given, strict=True))
    return body, _run(body, block, scope), passed


def _written(body: Body, results: Sequence[Value]) -> FunctionRef:
    body.module.made[body.name] = body.done(results)
    return FunctionRef(body.name)


def _while(step: Step) -> Any:
    regions = step.op.regions
    free = list(dict.fromkeys(value for region in regions for value in _captured(region)))
    types = [typed(result.type) for result in step.op.results]
    cond, test, _ = _region(step, regions[0], "cond", types, free)
    body, results, passed = _region(step, regions[1], "body", types, free)
    given = [*step.args, *(value for value in (step.scope[one] for one in free) if not value.fixed)]
    refs = {"cond": _written(cond, test), "body": _written(body, [*results, *passed])}
    made = step.body.add("StatelessWhile", [given], (), **refs, output_shapes=(), parallel_iterations=10)
    return _outputs(made, types)


def _outputs(first: Value, types: Sequence[tuple[str, Shape]]) -> list[Value]:
    node = (first.source or (0, 0))[0]
    return [Value(dtype, shape, (node, port)) for port, (dtype, shape) in enumerate(types)]


def _case(step: Step) -> Any:
    """One of several branches, the last where the number is none of them. Where the number is known, that branch alone."""
    chosen, regions = step.args[0], list(step.op.regions)
    truth = step.op.operation.name == "stablehlo.if"
    if chosen.array is not None:
        number = (0 if chosen.array else 1) if truth else int(chosen.array)
        region = regions[number if 0 <= number < len(regions) else -1]
        return _run(step.body, region.blocks[0], dict(step.scope))
    free = list(dict.fromkeys(value for region in regions for value in _captured(region)))
    types = [typed(result.type) for result in step.op.results]
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


CONTROL: Mapping[str, Callable[[Step], Any]] = {
    "custom_call": _custom_call,
    "func.call": _call,
    "composite": _composite,
    "while": _while,
    "case": _case,
    "if": _case,
}
