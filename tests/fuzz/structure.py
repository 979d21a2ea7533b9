"""Graphs that parse and are hostile in what they say."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from msplit.formats.decode import NodeAttrs
from msplit.opset import schema
from tests.fuzz.case import Case

OPS: list[str] = sorted(json.loads((Path(schema.__file__).parent / "data" / "ops.json").read_bytes())["ops"])
COMMON = [
    "Const", "Placeholder", "Identity", "Relu", "AddV2", "MatMul", "Conv2D", "Reshape", "Pack", "Unpack", "Split", "SplitV", "ConcatV2",
    "StridedSlice", "Tile", "Fill", "Range", "OneHot", "GatherV2", "Shape", "Size", "Prod", "Sum", "Transpose", "Pad", "ExpandDims",
    "Squeeze", "BroadcastTo", "SelectV2", "Cast", "Mul", "FloorDiv", "ConcatOffset", "DynamicPartition", "DynamicStitch", "NoOp",
    "MaxPool", "Einsum", "SpaceToBatchND", "TensorListReserve", "TensorListStack", "TensorArrayV3", "VarHandleOp", "ReadVariableOp",
    "VariableV2", "Assign", "Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond", "SparseSegmentSum", "IteratorGetNext",
]  # fmt: skip
CALLS = [
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "StatelessIf",
    "While",
    "StatelessWhile",
    "Case",
    "RemoteCall",
]
ATTRIBUTES = [
    "T", "dtype", "N", "num", "num_split", "axis", "shape", "strides", "ksize", "padding", "data_format", "dilations", "equation",
    "squeeze_dims", "keep_dims", "begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask", "transpose_a",
    "batch_dims", "block_size", "output_shapes", "_output_shapes", "dense_shapes", "num_partitions", "is_training", "element_shape",
    "num_elements", "k", "Tin", "Tout", "Tidx", "value", "f", "body", "cond", "then_branch", "else_branch", "branches", "_class",
    "_stream_id", "frame_name", "shared_name", "container", "_XlaMustCompile", "parallel_iterations", "explicit_paddings", "out_type",
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 4, 7, -1, -2, 63, 64, 65, 255, 256, 4096, 4097, 2**15, 2**16, 2**20, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1,
           -(2**31), -(2**63)]  # fmt: skip
TYPES = [1, 1, 1, 3, 3, 9, 7, 10, 20, 21, 0, 14, 19, 101, 103, 120, 33, 99, 250]
STRINGS = [b"", b"SAME", b"VALID", b"EXPLICIT", b"NCHW", b"NHWC", b"ab,bc->ac", b"...a->a", b"->", b"loc:@n0", b"loc:@gone", b"\xff\xfe",
           b"x" * 5000, b"[red]", b"{0}", b"%s", b"\x1b[31m", b"a/b:0", b"a" * 300 + b"->" + b"a" * 300]  # fmt: skip
NAMES = [
    "",
    "^",
    "a:0",
    "^a",
    "a b",
    "a/b/c",
    "ä",
    "[bold]x[/]",
    "x" * 2000,
    "-",
    "a\nb",
    "a\x00b",
    "1",
    "a,b:c",
    "$(x)",
    "n0",
    "n1",
    "*",
]


class Maker:
    """Makes a graph out of a source of randomness."""

    def __init__(self, random: Random, clean: bool) -> None:
        self.random = random
        self.clean = clean
        self.counts: dict[str, int] = {}
        self.outputs: dict[str, str] = {}
        self.functions = [f"f{number}" for number in range(random.choice([0, 0, 1, 2, 5]))]

    def number(self) -> int:
        small = self.random.random() < 0.6
        return self.random.randint(-2, 6) if small else self.random.choice(NUMBERS)

    def shape(self, message: Any) -> None:
        kind = self.random.random()
        if kind < 0.1:
            message.unknown_rank = True
        for _ in range(self.random.choice([0, 1, 2, 2, 3, 4, 5, 300]) if kind < 0.97 else 5000):
            message.dim.add(size=self.number())

    def tensor(self, message: Any) -> None:
        random = self.random
        message.dtype = random.choice(TYPES)
        values = [self.number() for _ in range(random.choice([0, 1, 1, 2, 3, 5]))]
        if random.random() < 0.5:
            for size in random.choice([[], [len(values)], [1, len(values)]]):
                message.tensor_shape.dim.add(size=size)
        else:
            self.shape(message.tensor_shape)
        match random.randrange(8):
            case 0:
                message.tensor_content = random.randbytes(random.choice([0, 1, 4, 8, 12, 64]))
            case 1:
                message.string_val.extend(random.choices(STRINGS, k=3))
            case 2:
                message.float_val.extend(float(value) for value in values)
            case 3 | 4:
                message.int64_val.extend(values)
            case _:
                message.int_val.extend(max(-(2**31), min(value, 2**31 - 1)) for value in values)

    def attribute(self, value: Any) -> None:
        random = self.random
        match random.randrange(14):
            case 0 | 1 | 2:
                value.i = self.number()
            case 3:
                value.s = random.choice(STRINGS)
            case 4:
                value.type = random.choice(TYPES)
            case 5:
                self.shape(value.shape)
            case 6:
                self.tensor(value.tensor)
            case 7:
                value.b = random.random() < 0.5
            case 8:
                value.f = random.choice([0.0, -1.0, 1e38, float("nan"), float("inf")])
            case 9:
                value.list.i.extend(self.number() for _ in range(random.choice([0, 1, 2, 4, 5, 2000])))
            case 10:
                value.list.type.extend(random.choices(TYPES, k=random.choice([0, 1, 2, 3, 2000])))
            case 11:
                for _ in range(random.choice([0, 1, 2, 200])):
                    self.shape(value.list.shape.add())
            case 12:
                value.list.s.extend(random.choices(STRINGS, k=random.randrange(4)))
            case _:
                self.function(value)

    def function(self, value: Any) -> None:
        if self.clean and not self.functions:
            value.b = True
            return
        name = self.random.choice(self.functions if self.clean else [*self.functions, "gone"])
        if self.random.random() < 0.1:
            value.list.func.add(name=name)
            value.list.func.add(name=name)
        else:
            value.func.name = name

    def source(self, names: list[str], inside: bool) -> str:
        random = self.random
        name = random.choice(names) if names else "a0"
        if not self.clean and random.random() < 0.15:
            return random.choice(["", "^", ":99", f"{name}:99", f"^{name}:1", f"{name}:-1", f"{name}:999999999999", "gone", f"{name}:0:0:0",
                                  f"{name}:", f" {name}", f"{name}:output:99", f"{name}:2147483647", f"{name}:2147483648"])  # fmt: skip
        if inside and self.clean:
            return self.outputs.get(name) or name
        if inside:
            return random.choice(
                [f"{name}:output:0", f"{name}:y:0", f"{name}:z:0", f"{name}:output:{random.randrange(3)}", name]
            )
        if self.clean:
            count = self.counts.get(name, 1)
            return f"{name}:{random.randrange(count)}" if count > 1 else name
        return name if random.random() < 0.85 else f"{name}:{random.choice([0, 0, 1, 2, 5])}"

    def node(self, node: Any, names: list[str], inside: bool) -> None:
        random = self.random
        kind = random.random() if names or not self.clean else 0.0
        known = COMMON if names or not self.clean else ["Const", "Placeholder", "VariableV2"]
        node.op = random.choice(
            known
            if kind < 0.62
            else OPS
            if kind < 0.8
            else CALLS
            if kind < 0.9
            else [*self.functions, "Acme>Custom", ""][:-1]
        )
        info = schema.lookup(node.op)
        counts: dict[str, int] = {}
        if info is not None:
            for argument in (*info.inputs, *info.outputs):
                if argument.number_attr and random.random() < 0.9:
                    counts.setdefault(argument.number_attr, random.choice([1, 1, 2, 3, 5]))
                if argument.type_attr and random.random() < 0.8:
                    node.attr[argument.type_attr].type = random.choice([1, 1, 1, 3, 3, 9, 7])
                if argument.type_list_attr and random.random() < 0.8:
                    node.attr[argument.type_list_attr].list.type.extend([1] * random.randrange(4))
            total = 0
            for argument in info.inputs:
                listed = argument.type_list_attr
                total += (
                    counts.get(argument.number_attr, 1)
                    if argument.number_attr
                    else len(node.attr[listed].list.type)
                    if listed
                    else 1
                )
        else:
            total = random.randrange(4)
        if not self.clean and random.random() < 0.1:
            total = random.choice([0, 1, 7, 300])
        for name, count in counts.items():
            node.attr[name].i = count if self.clean or random.random() < 0.9 else self.number()
        node.input.extend(self.source(names, inside) for _ in range(total))
        if node.op in ("Const", "HostConst") and random.random() < 0.97:
            self.tensor(node.attr["value"].tensor)
            node.attr["dtype"].type = node.attr["value"].tensor.dtype
        if node.op in ("Placeholder", "VarHandleOp", "VariableV2") and random.random() < 0.8:
            self.shape(node.attr["shape"].shape)
        if node.op in CALLS:
            for name in ("f", "body", "cond", "then_branch", "else_branch"):
                self.function(node.attr[name])
        if random.random() < 0.08 and names:
            node.input.append(f"^{random.choice(names)}")
        for _ in range(random.choice([0, 0, 0, 1, 1, 2, 4])):
            self.attribute(node.attr[random.choice(ATTRIBUTES)])
        if random.random() < 0.05:
            node.device = random.choice(["/device:GPU:0", "/cpu:0", "x" * 1000, "/device:GPU:99999999999", "[/]"])
        if random.random() < 0.05:
            node.attr["_class"].list.s.append(b"loc:@" + random.choice([*names, "gone"]).encode("utf-8", "replace"))
        if random.random() < 0.15:
            node.attr["_stream_id"].i = random.choice([0, 1, 2, 3, 3, self.number()])

    def nodes(self, nodes: Any, count: int, names: list[str], inside: bool) -> None:
        later = [f"n{number}" for number in range(count)]
        for number in range(count):
            node = nodes.add(name=f"n{number}")
            if not self.clean and self.random.random() < 0.05:
                node.name = self.random.choice(NAMES)
            self.node(node, names if self.random.random() < 0.995 or self.clean else later, inside)
            count = schema.output_count(node.op, NodeAttrs(node.attr))
            if self.clean and count == 0:
                continue  # nothing can read it
            names.append(node.name)
            self.counts[node.name] = min(count or 1, 9)
            info = schema.lookup(node.op)
            first = (
                info.outputs[0].name
                if info is not None and info.outputs
                else "r0"
                if node.op in self.functions
                else "out"
            )
            self.outputs[node.name] = f"{node.name}:{first}:0"

    def graph(self, graph_def: Any) -> None:
        random = self.random
        for name in self.functions:
            function = graph_def.library.function.add()
            function.signature.name = name if self.clean or random.random() < 0.95 else "f0"
            names = []
            self.outputs.clear()
            for number in range(random.choice([0, 1, 1, 2])):
                function.signature.input_arg.add(name=f"a{number}", type=random.choice(TYPES[:6]))
                names.append(f"a{number}")
            self.nodes(function.node_def, random.choice([0, 1, 3, 6]), names, True)
            for number in range(random.choice([0, 1, 1, 2])):
                function.signature.output_arg.add(name=f"r{number}", type=1)
                function.ret[f"r{number}"] = self.source(names, True)
            if random.random() < 0.1:
                function.control_ret["c"] = random.choice([*names, "gone"])
        self.nodes(graph_def.node, random.choice([1, 2, 3, 5, 8, 8, 12, 20, 40, 200]), [], False)
        if random.random() < 0.3:
            random.shuffle(shuffled := list(graph_def.node))
            copies = [node.SerializeToString() for node in shuffled]
            del graph_def.node[:]
            for copy in copies:
                graph_def.node.add().ParseFromString(copy)


def make(seed: int) -> Case:
    """A hostile graph as a GraphDef, a MetaGraphDef or a SavedModel."""
    random = Random(f"structure:{seed}")
    maker = Maker(random, clean=random.random() < 0.75)
    kind = random.choice(["graph", "graph", "graph", "meta", "saved"])
    graph_def = schema.graph_pb2.GraphDef()
    maker.graph(graph_def)
    options = ("--rules", random.choice(["default", "recsys", "rnn", "vision", "auto", "auto"])) + (
        ("--wrap",) if random.random() < 0.6 else ()
    )
    name = f"structure:{seed}"
    if kind == "graph":
        return Case(name, graph_def.SerializeToString(), assign=options)
    meta = schema.meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph_def)
    meta.meta_info_def.tags.append("serve")
    nodes = [node.name for node in graph_def.node]
    for signature in random.choice([[], ["serving_default"], ["a", "b"]]):
        one = meta.signature_def[signature]
        for side in (one.inputs, one.outputs):
            for number in range(random.randrange(3)):
                info = side[f"t{number}"]
                info.name = f"{random.choice(nodes)}:{random.choice([0, 0, 1, 99])}"
                info.dtype = random.choice(TYPES[:6])
                maker.shape(info.tensor_shape)
    if kind == "meta":
        return Case(name, meta.SerializeToString(), assign=options)
    saved = schema.saved_model_pb2.SavedModel(saved_model_schema_version=1)
    saved.meta_graphs.add().CopyFrom(meta)
    return Case(name, saved.SerializeToString(), saved=True, assign=options)
