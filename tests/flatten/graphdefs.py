"""GraphDefs with functions from text, read as a user's file is read.

Nodes are one a line or separated by ";": ``name:Op(inputs)@device[key=value, ...]``. A value is a type, a number, ``true``,
``@function`` or text; several joined by ``|`` are a list.
"""

import re
from pathlib import Path

from msplit.formats import read
from msplit.formats.model import Model
from msplit.formats.tensors import _DTYPES
from msplit.opset import schema

TYPES = {name: number for number, name in _DTYPES.items()}
NODE = re.compile(
    r"(?P<name>[^:\s(]+):(?P<op>[\w>]+)(\((?P<inputs>[^)]*)\))?(@(?P<device>[\w:/]+))?(\[(?P<attrs>[^\]]*)\])?"
)


def function(name, args="", results="", body="", control="", stateful=False):
    """A FunctionDef: args ``a:float32``, results ``r:float32=node:output_arg:0``, control results ``node``, each list by commas."""
    result = schema.function_pb2.FunctionDef()
    result.signature.name = name
    result.signature.is_stateful = stateful
    for item in _items(args):
        arg, dtype = item.split(":")
        result.signature.input_arg.add(name=arg, type=TYPES[dtype])
    for item in _items(results):
        declared, tensor = item.split("=")
        arg, dtype = declared.split(":")
        result.signature.output_arg.add(name=arg, type=TYPES[dtype])
        result.ret[arg] = tensor
    for item in _items(control):
        result.control_ret[item] = item
        result.signature.control_output.append(item)
    _fill(result.node_def, body)
    return result


def graph_def(body, *functions):
    """A GraphDef."""
    result = schema.graph_pb2.GraphDef()
    result.versions.producer = 1395
    _fill(result.node, body)
    result.library.function.extend(functions)
    return result


def model(tmp_path: Path, body, *functions, **options) -> Model:
    """The model that the text describes, written and read."""
    path = tmp_path / "model.pb"
    path.write_bytes(graph_def(body, *functions).SerializeToString())
    return read(path, **options)


def _items(text):
    return [item.strip() for item in text.split(",") if item.strip()]


def _fill(nodes, text):
    for line in re.split(r"[;\n]", text):
        if not line.strip():
            continue
        match = NODE.fullmatch(line.strip())
        assert match, line
        node = nodes.add(
            name=match["name"], op=match["op"], input=_items(match["inputs"] or ""), device=match["device"] or ""
        )
        for item in _items(match["attrs"] or ""):
            key, value = item.split("=")
            _set(node.attr[key], value)


def _set(attr, value):
    if "|" in value:
        parts = value.split("|")
        if parts[0] in TYPES:
            attr.list.type.extend(TYPES[part] for part in parts)
        else:
            attr.list.s.extend(part.encode() for part in parts)
    elif value in TYPES:
        attr.type = TYPES[value]
    elif value.startswith("@"):
        attr.func.name = value[1:]
    elif value in ("true", "false"):
        attr.b = value == "true"
    elif re.fullmatch(r"-?\d+", value):
        attr.i = int(value)
    elif value.startswith("loc:"):
        attr.list.s.append(value.encode())
    else:
        attr.s = value.encode()
