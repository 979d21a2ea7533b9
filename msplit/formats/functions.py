"""The function library of a graph, each function decoded when somebody asks for it.

Inside a function body a data input reads ``parameter`` or ``node:output_argument:index``; which port that is follows from the
signature of the node's op.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from msplit.core.graph import Argument, BrokenInput, Function, Graph, numbered
from msplit.formats import stablehlo
from msplit.formats.decode import AttrTable, NodeAttrs, connect, interned, to_graph
from msplit.formats.model import STREAM_ID
from msplit.formats.stablehlo_ops import ELEMENTS
from msplit.formats.stablehlo_windows import WINDOWS
from msplit.formats.tensors import dtype_name, dtype_number
from msplit.opset import schema

_MOST_INLINED, _DEEPEST = 100_000, 100
"""Most nodes of a function whose gradient is made, with all that it calls, and most calls inside of each other."""

GRADIENT = "gradients"
"""Name of the node of an expanded gradient that gives its results."""

Expand = Callable[[Any, Any, Sequence[int]], Any]
"""Makes the GraphDef of a gradient, with placeholders `argument_0` and so on, or None.

It is given a FunctionDef, the library that it needs, and the types of the results.
"""

_GRADIENT_OF, _TO = "gradient of ", " to "


def gradient_of(name: str, types: Iterable[str]) -> str:
    """The name under which a `Library` has the gradient of a function, as a `SymbolicGradient` node with results of some types has it."""
    return f"{_GRADIENT_OF}{name}{_TO}{' '.join(types)}"


class Library(Mapping[str, Function]):
    """The functions of a FunctionDefLibrary by name. Of several of one name the first counts; `duplicates` holds the names.

    Where there is something that expands gradients, that of each function is there, too, under the name that `gradient_of` gives it,
    but not among the names.
    """

    def __init__(self, library: Any, expand: Expand | None = None) -> None:
        self._library, self._expand = library, expand
        self._gradients: dict[str, Function | None] = {}
        self._modules: dict[str, Mapping[str, Any]] = {}
        self._looks_inside = True
        self._given_gradients = {given.function_name: given.gradient_func for given in library.gradient}
        self._encoded: dict[str, Any] = {}
        self._decoded: dict[str, Function] = {}
        duplicates = []
        for function in library.function:
            if self._encoded.setdefault(function.signature.name, function) is not function:
                duplicates.append(function.signature.name)
        self.duplicates = tuple(duplicates)

    def __getitem__(self, name: str) -> Function:
        function = self._decoded.get(name)
        if function is None and name in self._modules:
            self._decoded.update(stablehlo.functions_of(name, self._modules[name], self, {**ELEMENTS, **WINDOWS}))
            function = self._decoded[name]
        if function is None and name not in self._encoded:
            function = self._gradient(name)
        if function is None:
            function = self._decoded[name] = _decode(self._encoded[name], self)
        return function

    def __contains__(self, name: object) -> bool:
        known = name in self._encoded or name in self._modules or name in self._decoded
        return known or (isinstance(name, str) and self._gradient(name) is not None)

    @property
    def has_modules(self) -> bool:
        """True if a module was looked into."""
        return bool(self._modules)

    def module(self, attrs: Mapping[str, Any]) -> str | None:
        """Name of the function that the module of an `XlaCallModule` node becomes, one for equal modules; None where it stays a node."""
        if not self._looks_inside or stablehlo.left_whole(attrs):
            return None
        what = repr([attrs.get(key) for key in ("module", "platforms", "Tin", "Tout")])
        name = f"module_{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        while any(one.startswith(name) for one in self._encoded):  # a file may call its functions anything
            name += "_"
        self._modules.setdefault(name, attrs)
        return name

    def read_modules(self, graph: Graph) -> None:
        """Reads all modules of a graph and of the library, so that the functions that they are read as are there."""
        for body in (graph, *(self[name].body for name in self._encoded)):
            for number in np.flatnonzero(body.with_ops({stablehlo.CALL_MODULE})).tolist():
                name = self.module(body.attrs[number])
                if name is not None:
                    self[name]

    def set_ids(self, graph: Graph, ids: Mapping[str, Mapping[str, int]]) -> str | None:
        """Gives nodes inside of modules of a graph, and of the library, ids that were kept elsewhere. Returns why it can not, or None.

        Args:
            graph: The graph around the library, which nobody has looked into yet.
            ids: By function, as `module` names it, and node.
        """
        self.read_modules(graph)
        for name, of_nodes in ids.items():
            if name not in self._modules:
                without = "" if stablehlo.installed() else " without jaxlib"
                return f"it has ids for a module that is not there, or is not looked into{without}"
            if not of_nodes.keys() <= self[name].body.index.keys():
                return "it has ids for nodes that a module is not read as any more"
        for name, of_nodes in ids.items():
            body, attrs = self[name].body, list(self[name].body.attrs)
            for node, stream in of_nodes.items():
                attrs[body.index[node]] = {**attrs[body.index[node]], STREAM_ID: stream}
            self._decoded[name] = replace(self[name], body=replace(body, attrs=attrs))
        return None

    def whole(self) -> Library:
        """The same functions, with modules that stay nodes."""
        library = Library(self._library, self._expand)
        library._looks_inside = False
        return library

    @property
    def encoded(self) -> Container[str]:
        """Names of the functions of the file."""
        return self._encoded

    def _gradient(self, name: str) -> Function | None:
        """The gradient of a function by the name that `gradient_of` gives it; None for another name, and where TensorFlow has none."""
        if name not in self._gradients and name.startswith(_GRADIENT_OF):
            of, _, types = name.removeprefix(_GRADIENT_OF).rpartition(_TO)
            self._gradients[name] = self._expanded(name, of, types.split())
        return self._gradients.get(name)

    def _inlined(self, name: str, sizes: dict[str, int], depth: int) -> int:
        """Nodes of a function with all that it calls, more than `_MOST_INLINED` where it calls itself or far down; kept in `sizes`."""
        if name not in sizes:
            sizes[name] = _MOST_INLINED + 1  # until it is known: who finds this is inside of it
            encoded, called = self._encoded[name], [self._given_gradients.get(name, "")]
            if depth < _DEEPEST and not encoded.signature.attr:
                called += [inner for _, inner in self[name].body.calls()]
                inner_sizes = (self._inlined(inner, sizes, depth + 1) for inner in called if inner in self._encoded)
                sizes[name] = len(encoded.node_def) + sum(inner_sizes)
        return sizes[name]

    def _expanded(self, name: str, of: str, types: Sequence[str]) -> Function | None:
        sizes: dict[str, int] = {}
        if self._expand is None or of not in self._encoded or self._inlined(of, sizes, 0) > _MOST_INLINED:
            return None
        library = type(self._library)(function=[self._encoded[function] for function in sizes])
        library.gradient.extend(given for given in self._library.gradient if given.function_name in sizes)
        graph_def = self._expand(self._encoded[of], library, [dtype_number(dtype) for dtype in types])
        if graph_def is None:
            return None
        body = to_graph(graph_def, self)
        signature = self._encoded[of].signature
        names = [f"argument_{number}" for number in range(len(signature.input_arg) + len(signature.output_arg))]
        parameters = [Argument(one, body.attrs[body.index[one]]["dtype"], body.index[one]) for one in names]
        results = [Argument(GRADIENT, dtype, body.index[GRADIENT], port) for port, dtype in enumerate(types)]
        return Function(name, body, tuple(parameters), tuple(results))

    def __iter__(self) -> Iterator[str]:
        return iter([*self._encoded, *(name for name in self._decoded if name in self._modules)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def output_arguments(self, name: str) -> tuple[str, ...]:
        """Names of the results of a function, without decoding its body."""
        return tuple(arg.name for arg in self._encoded[name].signature.output_arg)


def holds_modules(functions: Mapping[str, Function]) -> bool:
    """True if modules of `XlaCallModule` nodes were looked into: TensorFlow runs each as a whole, and knows no node inside of it."""
    return isinstance(functions, Library) and functions.has_modules


def with_whole_modules(graph: Graph) -> Graph:
    """A graph whose modules stay nodes."""
    library = graph.functions
    return (
        replace(graph, functions=library.whole()) if isinstance(library, Library) and holds_modules(library) else graph
    )


def modules_of(functions: Mapping[str, Function]) -> tuple[str, ...]:
    """Functions that modules were read as: the model's file does not hold them, nor their ids."""
    return tuple(name for name in functions if name not in functions.encoded) if isinstance(functions, Library) else ()


def _decode(encoded: Any, library: Library) -> Function:
    signature = encoded.signature
    nodes = encoded.node_def
    parameters = tuple(Argument(arg.name, _dtype(arg), i) for i, arg in enumerate(signature.input_arg))
    count = len(parameters)
    names = [*(parameter.name for parameter in parameters), *(node.name for node in nodes)]
    index = numbered(names)
    ports = _Ports(nodes, count, library)

    def resolve(text: str) -> tuple[int, int] | str:
        name, _, rest = text.partition(":")
        node = index.get(name)
        if node is None:
            return "names no node"
        if node < count:
            # Part of a parameter that is a list of tensors.
            return (node, int(rest)) if _is_index(rest) else "has a port that is not a number"
        argument, _, position = rest.partition(":")
        if not argument or argument.isdecimal():
            return "does not say which output of the node it takes"
        if position and not _is_index(position):
            return "has a port that is not a number"
        port = ports.of(node, argument, int(position or 0))
        return port if isinstance(port, str) else (node, port)

    # Only parameters may be named without an output, and they are found without `resolve`.
    edges, broken = connect(nodes, {name: node for name, node in index.items() if node < count}, resolve, count, index)
    results = []
    broken_results: list[BrokenInput] = []
    for arg in signature.output_arg:
        source = encoded.ret.get(arg.name, "")
        found: tuple[int, int] | str = (index[source], 0) if index.get(source, count) < count else resolve(source)
        if isinstance(found, str):
            broken_results.append(BrokenInput(-1, f"{arg.name} = {source}", f"is a result that {found}"))
        else:
            results.append(Argument(arg.name, _dtype(arg), *found))
    control_results = []
    for key in sorted(encoded.control_ret):
        node = index.get(encoded.control_ret[key])
        if node is None:
            broken_results.append(
                BrokenInput(-1, f"{key} = {encoded.control_ret[key]}", "is a result that names no node")
            )
        else:
            control_results.append(node)
    body = Graph(
        names=names,
        ops=interned(["_Arg"] * count + [node.op for node in nodes]),
        devices=interned([""] * count + [node.device for node in nodes]),
        attrs=AttrTable(nodes, [_parameter_attrs(arg, i, encoded) for i, arg in enumerate(signature.input_arg)]),
        edges=edges,
        functions=library,
        broken_inputs=broken + tuple(broken_results),
    )
    return Function(
        name=signature.name,
        body=body,
        parameters=parameters,
        results=tuple(results),
        control_results=tuple(control_results),
    )


def _dtype(arg: Any) -> str:
    return dtype_name(arg.type) if arg.type else ""


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _parameter_attrs(arg: Any, position: int, encoded: Any) -> Mapping[str, Any]:
    """Attributes of the node that stands in for a parameter, as TensorFlow gives them to an _Arg node."""
    attrs: dict[str, Any] = {"index": position}
    if arg.type:
        attrs["T"] = dtype_name(arg.type)
    if position in encoded.arg_attr:
        attrs.update(NodeAttrs(encoded.arg_attr[position].attr))
    return attrs


class _Ports:
    """Ports of the outputs that a body names.

    The table of ops knows those of TensorFlow's own ops, and the library knows those of its functions. Of a custom op nothing is
    known; its output arguments get ports in the order in which the body mentions them, far enough apart to stay different.
    """

    _APART = 1 << 16

    def __init__(self, nodes: Any, first: int, library: Library) -> None:
        self._nodes = nodes
        self._first = first
        self._library = library
        self._mentioned: dict[int, dict[str, int]] = {}
        self._known: dict[tuple[int, str], tuple[int, int | None] | None] = {}
        self._results: dict[str, dict[str, int]] = {}

    def of(self, node: int, argument: str, position: int) -> int | str:
        """Port of a tensor of an output argument, or what is wrong."""
        encoded = self._nodes[node - self._first]
        op = encoded.op
        if op in self._library:
            if op not in self._results:
                self._results[op] = numbered(self._library.output_arguments(op))
            first = self._results[op].get(argument)
            return "names an output that its node has not" if first is None else first + position
        if schema.lookup(op) is not None:
            # Kept, because the attributes that say it may be long lists, and a thousand inputs may name one output.
            if (node, argument) not in self._known:
                self._known[node, argument] = schema.output_ports(op, NodeAttrs(encoded.attr), argument)
            ports = self._known[node, argument]
            if ports is None or (ports[1] is not None and position >= ports[1]):
                return "names an output that its node has not"
            return ports[0] + position
        order = self._mentioned.setdefault(node, {})
        return order.setdefault(argument, len(order)) * self._APART + position
