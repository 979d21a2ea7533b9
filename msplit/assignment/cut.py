"""Cuts a part out of a model: what leads from some tensors to others, as a model of its own.

It is written from the flat graph, so that tensors inside of called functions can be named; functions of loops and conds stay functions.
What is fed becomes a placeholder of the same name. Variables keep their values, tables what fills them, nodes all that they say.

Or writes all of a model with the length of each row as one more input, which hides what lies beyond the end of a row.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.rows.lengths import LARGEST, LAST, LOWEST, MEAN, LengthMask, LengthProof
from msplit.assignment.model import load, opened
from msplit.assignment.replicas import Ensemble, add_functions, free_name, initializers, lasting_nodes
from msplit.assignment.replicate import beside, describe, save_values, saved_model, values_of
from msplit.core.arguments import listed, spelled
from msplit.core.graph import CONTROL, Edges, no_collection
from msplit.engines.tensorflow.placed import file_nodes
from msplit.errors import LoadError, MsplitError
from msplit.flatten import control_flow
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph, original
from msplit.formats import atomic, writer
from msplit.formats.endpoints import has_outputs, named, split_tensor
from msplit.formats.functions import holds_modules, with_whole_modules
from msplit.formats.model import Endpoint, Format, Model, meta_graphs
from msplit.formats.reader import SAVED_MODEL_FILES
from msplit.formats.tensors import add_copy, add_node, dtype_number, numpy_dtype
from msplit.opset.traits import FREE_OF_EFFECTS, PLACEHOLDERS, VARIABLES, ops_with, traits
from msplit.progress import phase
from msplit.shapes import Shapes, infer
from msplit.shapes.infer import stated_shapes

_CUSTOM_HANDLES, _JOINTS = ops_with("handle") - VARIABLES, ops_with("no result")


@dataclass(frozen=True)
class Cut:
    """Report of a part that was written.

    Attributes:
        inputs: Tensor of each input by name.
        outputs: Tensor of each output by name.
        nodes: Nodes of the part.
        variables: Variables whose values are written with it.
        notes: What a user should know.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    nodes: int
    variables: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of a flat graph: `needed` is the mask of its nodes, for some of which, `replaced`, placeholders stand.

    `edges` are those of the whole graph, those that close loops included, without those into `replaced`.
    """

    inputs: Sequence[Endpoint]
    outputs: Sequence[Endpoint]
    replaced: Collection[int]
    edges: Edges
    needed: NDArray[np.bool_]


def cut(
    model: FlatGraph | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    force: bool = False,
) -> Cut:
    """Writes the part of a model between some tensors, in the format it came in. For values of variables it needs TensorFlow.

    Args:
        model: From `load`, or where the model is. It is not modified.
        out: File or folder to write.
        inputs: Tensors that are fed: names of the model's ends, or ``node`` or ``node:1`` of the flat graph, of which the part behind a
            slash is enough where it is one node's. None: the inputs of the model that the outputs need.
        outputs: Tensors that are fetched, likewise. None: the outputs of the model.
        force: Replace what is there.

    Raises:
        LoadError: A name is not in the graph, or the values of variables can not be read.
        MsplitError: The outputs need an input that is not named, or a tensor is inside of a loop or a cond.
        WriteError: It can not be written. What was there before is unharmed.
    """
    flat, out = opened(model), Path(out)
    if holds_modules(flat.model.graph.functions):  # TensorFlow runs each as a whole
        flat = flatten(replace(flat.model, graph=with_whole_modules(flat.model.graph)))
    source, bare = flat.model, flat.model.format.binary is Format.GRAPH_DEF
    writer.check_place(source, out, force=force)
    with phase("cutting"), no_collection():
        part = _part(flat, inputs, outputs)
        made = _written(flat, part)
    values = {} if bare else values_of(source, made, ())
    ends = replace(source, inputs=tuple(part.inputs), outputs=tuple(part.outputs), signature=None)
    message = made.graph_def if bare else saved_model(ends, made)
    with phase("writing"):
        if source.format.binary is Format.META_GRAPH:
            _write_meta_graph(source, message.meta_graphs[0], values, out, force=force)
        else:
            writer.write_message(source, message, out, force=force, beside=beside(source, values))
    tensors = {end.name: end.tensor for end in made.outputs.values()}
    return Cut(out, made.inputs, tensors, made.copied, len(values), tuple(_notes(flat, part, made)))


def _part(flat: FlatGraph, inputs: Sequence[str] | None, outputs: Sequence[str] | None) -> _Part:
    """Finds what leads from the inputs to the outputs."""
    graph, index = flat.graph, flat.graph.index
    fetched, fed = _named(flat, "outputs", outputs), _named(flat, "inputs", inputs)
    if not fetched:
        raise MsplitError("the model has no output", where=str(flat.model.source), fix=f"give {spelled('outputs')}")
    wanted = [(index[end.node], end.port) for end in fetched]
    given = {(index[end.node], end.port) for end in fed if graph.ops[index[end.node]] not in PLACEHOLDERS}
    edges, replaced = _edges(flat, given, wanted)
    needed = _needed(flat, edges, [node for node, _ in wanted], {index[end.node] for end in fed})
    if inputs is None:
        fed = [end for end in fed if needed[index[end.node]]]
    needed[[index[end.node] for end in fed]] = True
    # Sizes that the file leaves open stay open.
    known = infer(flat, shapes={name: shape for name, shape in stated_shapes(flat).items() if shape is not None})
    fed, fetched = ([_described(flat, known, end) for end in ends] for ends in (fed, fetched))
    part = _Part(fed, fetched, replaced, edges, needed)
    _refuse(flat, part)
    return part


def _edges(flat: FlatGraph, given: set[tuple[int, int]], wanted: list[tuple[int, int]]) -> tuple[Edges, set[int]]:
    """Edges of a graph without those that only lead to what is fed, and the nodes of which all that is needed is fed."""
    graph, edges = flat.graph, flat.all_edges
    sources = np.zeros(len(graph), np.bool_)
    sources[[node for node, _ in given]] = True
    leaving = np.flatnonzero(sources[edges.src])
    pairs = zip(edges.src[leaving].tolist(), edges.port[leaving].tolist(), strict=True)
    stays = np.ones(len(edges), np.bool_)
    stays[leaving] = [port != CONTROL and (node, port) not in given for node, port in pairs]
    runs = replace(graph, edges=edges.where(stays)).ancestors([one[0] for one in wanted if one not in given])
    replaced = {node for node, _ in given if not runs[node]}
    return control_flow.without_inputs(edges, [*replaced], len(graph)), replaced


def _needed(flat: FlatGraph, edges: Edges, wanted: list[int], fed: set[int]) -> NDArray[np.bool_]:
    """Mask of the nodes that outputs need: by data, and what else has effects, as far as that needs no input which is not fed.

    A function of TensorFlow 2 has its results wait for everything that it reads, which is not what computes them.
    """
    graph = replace(flat.graph, edges=edges)
    whole = graph.ancestors(wanted)
    ends = whole & graph.with_ops(PLACEHOLDERS) & (np.diff(graph.in_start) == 0)
    ends[[*fed]] = False
    acts = flat.stateful & ~graph.with_ops(FREE_OF_EFFECTS) & ~graph.descendants(np.flatnonzero(ends).tolist())
    data = edges.where(edges.port != CONTROL)
    # In loops and conds, what waits for what is part of them.
    needed = graph.ancestors(np.flatnonzero(whole & (acts | (flat.region >= 0))).tolist())
    needed |= replace(graph, edges=data).ancestors(wanted)
    if missing := [graph.names[node] for node in np.flatnonzero(needed & ends).tolist()]:
        what = f"the outputs need {', '.join(map(repr, missing[:5]))}, which {spelled('inputs')} does not name"
        fix = f"name it with {spelled('inputs')}, too, or tensors between it and the outputs"
        raise MsplitError(what, where=str(flat.model.source), fix=fix)
    return needed | (whole & graph.with_ops(_JOINTS) & ~np.isin(np.arange(len(graph)), data.dst))


def _named(flat: FlatGraph, option: str, names: Sequence[str] | None) -> list[Endpoint]:
    """The ends of some names, each once; a name that a single node has at its end, behind a slash, is short for that node's."""
    graph, where = flat.graph, str(flat.model.source)
    ends = (
        (flat.inputs, flat.outputs) if option == "outputs" else (flat.outputs, flat.inputs)
    )  # the last one's names count
    known = [Endpoint(end.name, graph.names[end.node], end.port, "", None) for end in (*ends[0], *ends[1])]
    if names is None:
        return known[len(ends[0]) :]
    own, found, inside = {end.name for end in known}, dict[str, Endpoint](), control_flow.inside(graph)
    for name in listed(option, names):
        full = name if name in own else _full_name(flat, option, name)
        (end,) = named([full], known, graph, spelled(option), where)
        index = graph.index[end.node]
        around = inside(index)
        if around or not has_outputs(graph, index):
            what = f"is inside of {around}, which stays whole" if around else "gives no tensor"
            fix = "name what goes into it or comes out of it"
            raise LoadError(f"{spelled(option)} names {name!r}, which {what}", where=where, fix=fix)
        twice = next((one.name for one in found.values() if one.tensor == end.tensor and one.name != name), None)
        if twice is not None and option == "inputs":
            raise LoadError(f"{spelled(option)} names one tensor twice: {twice!r} and {name!r}", where=where)
        found[name] = replace(end, name=name)
    return list(found.values())


def _full_name(flat: FlatGraph, option: str, name: str) -> str:
    """The name of a tensor in the graph that ends as a name does, behind a slash; the name itself where there is none."""
    node = split_tensor(name)[0]
    if name in flat.graph.index or node in flat.graph.index:
        return name
    longer = [one for one in flat.graph.names if one.endswith(f"/{node}")]
    if len(longer) > 1:
        what = f"{spelled(option)} names {name!r}, which is short for several nodes: {', '.join(longer[:5])}"
        raise LoadError(what, where=str(flat.model.source), fix="give more of the name")
    return longer[0] + name[len(node) :] if longer else name


def _described(flat: FlatGraph, found: Shapes, end: Endpoint) -> Endpoint:
    """An end with its type and shape."""
    node = flat.graph.index[end.node]
    dtype = (found.dtype(node, end.port) or flat.dtype(node, end.port)).removesuffix("_ref")
    if not dtype:
        what, fix = f"the type of {end.name!r} is not known: it comes of a custom op", "name a tensor beside it"
        raise MsplitError(what, where=str(flat.model.source), fix=fix)
    return replace(end, dtype=dtype, shape=found.shape(node, end.port))


def _refuse(flat: FlatGraph, part: _Part) -> None:
    """Refuses a part with a variable whose value is not in the checkpoint."""
    graph, where = flat.graph, str(flat.model.source)
    inside = graph.with_ops(_CUSTOM_HANDLES) | (graph.with_ops(VARIABLES) & (flat.origin_function >= 0))
    if flat.model.meta is not None and (lost := np.flatnonzero(inside & part.needed).tolist()):
        what = f"{graph.names[lost[0]]!r} ({graph.ops[lost[0]]}) is a variable of a custom op or of a function"
        fix = f"name what is read from it with {spelled('inputs')}"
        raise MsplitError(f"{what}, whose value the checkpoint does not have", where=where, fix=fix)


def _written(flat: FlatGraph, part: _Part) -> Ensemble:
    """The graph of a part, with what fills its tables."""
    graph, source = flat.graph, flat.model
    kept = [node for node in np.flatnonzero(part.needed).tolist() if node not in part.replaced]
    top = np.zeros(len(source.graph), np.bool_)  # what is there of the file's own graph
    top[[int(flat.origin_node[node]) for node in kept if flat.origin_function[node] < 0]] = True
    init = initializers(source, source.graph, top)
    filling = np.flatnonzero(source.graph.ancestors(init) & ~top).tolist()
    nodes, names = file_nodes(flat, copy.deepcopy(source.graph_def))
    taken = {*(names[node] for node in np.flatnonzero(part.needed)), *(source.graph.names[node] for node in filling)}

    def new(name: str) -> str:
        taken.add(free := free_name(name, taken))
        return free

    made = type(source.graph_def)(versions=source.graph_def.versions)
    tensors = _placeholders(made, flat, part, names, new)
    for node in kept:
        _add(made, flat, node, nodes[node], taken)
        made.node[-1].name = names[node]
        made.node[-1].input.extend(_inputs(part, names, node, tensors))
    made.node.extend(source.graph_def.node[node] for node in filling)
    add_functions(made, source.graph_def.library)
    init_op = new("init") if init else ""
    if init:
        add_node(made, init_op, "NoOp", [f"^{source.graph.names[node]}" for node in init])
    outputs = {}
    for end in part.outputs:
        at = graph.index[end.node], end.port
        outputs[end.name] = replace(end, node=names[at[0]])
        if at in tensors:  # a session of TensorFlow fetches nothing that is fed
            outputs[end.name] = replace(end, node=new(f"{tensors[at]}_through"), port=0)
            add_node(made, outputs[end.name].node, "Identity", [tensors[at]], T=end.dtype)
    inputs = {end.name: f"{tensors[graph.index[end.node], end.port]}:0" for end in part.inputs}
    variables = {names[node]: (0, graph.names[node]) for node in kept if graph.ops[node] in VARIABLES}
    return Ensemble(made, inputs, outputs, variables, init_op, 0, len(made.node))


def _placeholders(
    made: Any, flat: FlatGraph, part: _Part, names: Sequence[str], new: Callable[[str], str]
) -> Mapping[tuple[int, int], str]:
    """Adds the placeholders of inputs that are none in the model."""
    tensors = {}
    for end in part.inputs:
        node = flat.graph.index[end.node]
        own, placeholder = node in part.replaced and not end.port, flat.graph.ops[node] in PLACEHOLDERS
        name = tensors[node, end.port] = names[node] if own or placeholder else new(f"{names[node]}_{end.port}")
        if not placeholder:
            shape: dict[str, Any] = {} if end.shape is None else {"shape": end.shape}
            add_node(made, name, "Placeholder", dtype=end.dtype, **shape)
    return tensors


def _add(made: Any, flat: FlatGraph, number: int, origin: Any, taken: Collection[str]) -> None:
    """Adds a flat node as the file has it, without its inputs."""
    graph, attrs = flat.graph, flat.graph.attrs[number]
    function, place = int(flat.origin_function[number]), int(flat.origin_node[number])
    if original(flat, function, place)[2] != graph.ops[number] and not isinstance(
        attrs, dict
    ):  # as what inlining adds has
        what = f"{graph.names[number]!r} ({graph.ops[number]}) is part of a gradient that TensorFlow makes when it runs"
        raise MsplitError(what, where=str(flat.model.source), fix="name tensors in front of it")
    node = add_copy(made.node, origin)
    node.device = graph.devices[number]
    del node.input[:]
    for key in [key for key in node.attr if node.attr[key].WhichOneof("value") == "placeholder"]:
        node.attr[key].type = dtype_number(str(attrs[key]))  # a type that the call gives its function
    if "_class" in node.attr:
        together = [text for text in map(str, attrs["_class"]) if text.removeprefix("loc:@") in taken]
        del node.attr["_class"]
        if together:
            node.attr["_class"].list.s.extend(map(str.encode, together))


def _inputs(part: _Part, names: Sequence[str], node: int, tensors: Mapping[tuple[int, int], str]) -> Iterator[str]:
    """Inputs of a node as a file has them."""
    edges = part.edges
    first, end = np.searchsorted(edges.dst, (node, node + 1)).tolist()
    for source, port in zip(edges.src[first:end].tolist(), edges.port[first:end].tolist(), strict=True):
        if port != CONTROL:
            yield tensors.get((source, port)) or f"{names[source]}{f':{port}' if port else ''}"
        elif source in part.replaced:
            yield f"^{next(name for (fed, _), name in tensors.items() if fed == source)}"
        elif part.needed[source]:
            yield f"^{names[source]}"


def _write_meta_graph(model: Model, meta: Any, values: Mapping[str, Any], out: Path, *, force: bool) -> None:
    """Writes a MetaGraphDef behind its checkpoint, which comes beside it."""
    if values:
        endings = (".data-00000-of-00001", ".index")
        atomic.write_group_atomic(out.with_name(out.stem), endings, lambda at: save_values(at, values), force=force)
    writer.write_message(model, meta, out, force=force)


def _notes(flat: FlatGraph, part: _Part, made: Ensemble) -> Iterable[str]:
    graph, bare = flat.graph, flat.model.format.binary is Format.GRAPH_DEF
    read = replace(graph, edges=part.edges).ancestors(graph.index[end.node] for end in part.outputs)
    if unused := [end.name for end in part.inputs if not read[graph.index[end.node]]]:
        yield f"No output needs {', '.join(unused[:8])}."
    writes = [graph.names[node] for node in flat.targets if not part.needed[node] and traits(graph.ops[node]).writes]
    if writes:
        yield f"Left out, as no output needs it: {', '.join(writes[:8])}. The variables that it changes stay as they are."
    if bare and (made.variables or any(part.needed[node] for node in lasting_nodes(graph))):
        yield "A GraphDef holds no values of variables and nothing that fills tables: give a SavedModel to keep them."
    used = np.isin([graph.index[end.node] for end in part.outputs], part.edges.src[part.needed[part.edges.dst]])
    if bare and used.any():
        names = ",".join(end.tensor.removesuffix(":0") for end in made.outputs.values())
        yield f"A GraphDef does not name its outputs: give other commands --part outputs={names}."


def with_lengths(flat: FlatGraph, proof: LengthProof, folder: Path) -> tuple[FlatGraph, str]:
    """Writes a model into a folder with the length of each row as one more input, by which what `proof` tells is hidden, and reads it.

    Returns:
        The model, and the name of that input.
    """
    path, bare = folder / flat.model.path.name, flat.model.format.binary is Format.GRAPH_DEF
    cut(flat, path, inputs=[tensor.name for tensor in flat.inputs])
    outputs = [tensor.name for tensor in flat.outputs] if bare else None
    model = load(path, record=False, outputs=outputs).model
    message = copy.deepcopy(model.proto)
    meta = meta_graphs(model.format, message)[model.meta_graph]
    graph_def = message if meta is None else meta.graph_def
    nodes, known = {node.name: node for node in graph_def.node}, infer(flat)
    name = free_name("lengths", {*nodes, *(tensor.name for tensor in flat.inputs)})
    add_node(graph_def, name, "Placeholder", dtype="int32", shape=(None,))
    fed = next(tensor for tensor in flat.inputs if tensor.name == proof.inputs[0])
    first = f"{flat.graph.names[fed.node]}:{fed.port}", flat.dtype(fed.node, fed.port)
    masks = _Masks(graph_def, free_name(f"{name}_of_rows", {one.split("/")[0] for one in nodes}), name, first)
    for (number, slot), mask in proof.masks.items():
        node, source = nodes[flat.graph.names[number]], flat.graph.inputs(number)[slot]
        dtype = known.dtype(*source) or flat.dtype(*source)
        node.input[slot] = masks.hidden(node.input[slot], mask, dtype)
        if mask.fill == MEAN:
            masks.divide(node, mask, dtype)
    if meta is not None:
        end = Endpoint(name, name, 0, "int32", (None,))
        describe(meta.signature_def[str(model.signature)].inputs[name], end, end.tensor)
    where = path / SAVED_MODEL_FILES[model.format.is_text] if model.is_saved_model else path
    atomic.write_bytes_atomic(where, message.SerializeToString(deterministic=True), force=True)
    # One that no output reads is an input, too.
    inputs = [*(tensor.name for tensor in flat.inputs), name] if bare else None
    return load(path, record=False, inputs=inputs, outputs=outputs), name


class _Masks:
    """Writes masks into a graph. What several of them need is written once."""

    def __init__(self, graph_def: Any, scope: str, lengths: str, fed: tuple[str, str]) -> None:
        self._graph_def, self._scope, self._made = graph_def, scope, dict[tuple[Any, ...], str]()
        number, (first, dtype) = partial(self._constant, "int32"), fed
        ends = [number(size) for size in ([1], [2], [1])]
        shape = self._add("Shape", first, T=dtype)
        longest = self._add("StridedSlice", shape, *ends, T="int32", Index="int32", shrink_axis_mask=1)
        self._places = self._add("Range", number(0), longest, number(1))
        self._lengths = self._add("Maximum", lengths, number(1), T="int32")

    def _add(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Adds a node where there is none like it yet. Its name."""
        key = (op, inputs, repr(attrs))
        if key not in self._made:
            self._made[key] = f"{self._scope}/{op}_{len(self._made)}"
            add_node(self._graph_def, self._made[key], op, inputs, **attrs)
        return self._made[key]

    def _constant(self, dtype: str, value: Any) -> str:
        return self._add("Const", dtype=dtype, value=(dtype, value))

    def _shaped(self, tensor: str, shape: list[int]) -> str:
        return self._add("Reshape", tensor, self._constant("int32", shape), T="int32")

    def hidden(self, tensor: str, mask: LengthMask, dtype: str) -> str:
        """A tensor without positions beyond the end of each row."""
        rows, lengths = mask.rows, self._lengths
        if (rows.outer, rows.inner) != (1, 1):
            times = self._constant("int32", [rows.outer, 1, rows.inner])
            lengths = self._add("Tile", self._shaped(lengths, [1, -1, 1]), times, T="int32")
        places, lengths = (
            self._shaped(one, [-1 if place == axis else 1 for place in range(mask.rank)])
            for one, axis in ((self._places, mask.axis), (lengths, rows.axis))
        )
        kept = self._add("Less", places, lengths, T="int32")
        if mask.fill == LAST:
            last = self._add("Sub", lengths, self._constant("int32", 1), T="int32")
            kept = self._add("Equal", places, last, T="int32")
        hidden = self._add("SelectV2", kept, tensor, self._constant(dtype, _fill(mask.fill, dtype)), T=dtype)
        if mask.fill == LAST:
            hidden = self._add("Max", hidden, self._constant("int32", [mask.axis]), T=dtype, keep_dims=True)
        return hidden

    def divide(self, mean: Any, mask: LengthMask, dtype: str) -> None:
        """Makes of a mean a sum, divided by the sum of as many ones as there are, which is as exact as TensorFlow's."""
        ones, names = self.hidden(self._add("OnesLike", mean.input[0], T=dtype), mask, dtype), list[str]()
        for source in (mean.input[0], ones):
            names.append(f"{self._scope}/Mean_{len(self._graph_def.node)}")
            part = add_copy(self._graph_def.node, mean)
            part.name, part.op, part.input[0] = names[-1], "Sum", source
        mean.op = "RealDiv"
        mean.input[:2] = names
        for attr in ("Tidx", "keep_dims"):
            mean.attr.pop(attr, None)


def _fill(fill: str, dtype: str) -> Any:
    """What positions beyond the end become."""
    if fill not in (LOWEST, LARGEST, LAST):
        return int(fill == "1")
    kind, sign = numpy_dtype(dtype), 1 if fill == LARGEST else -1
    return (np.iinfo(kind).min if sign < 0 else np.iinfo(kind).max) if kind.kind in "iu" else sign * np.inf
