"""A hash that tells whether two files hold the same graph, whatever streams their nodes are on."""

from __future__ import annotations

import hashlib
from typing import Any

from msplit.formats.model import Model
from msplit.formats.writer import STREAM_ID


def graph_hash(model: Model) -> str:
    """SHA-256 of the graph, as hexadecimal digits.

    It covers every node (name, op, device, inputs, attributes, constants with their values) in the order of the file, every function
    of the library, and what is fed and fetched. It does not cover `_stream_id`, the values of variables (they are in files of their
    own: training on does not change what streams are good for), versions, or debug information. A binary and a text file of
    one graph have the same hash.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        # With its length before it, no two sequences of pieces give the same bytes.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    graph_def = model.graph_def
    add(len(graph_def.node).to_bytes(8, "little"))
    for node in graph_def.node:
        add(_without_id(node))
    for function in sorted(graph_def.library.function, key=lambda function: function.signature.name):
        header = type(function)()
        header.CopyFrom(function)
        del header.node_def[:]
        add(header.SerializeToString(deterministic=True))
        add(len(function.node_def).to_bytes(8, "little"))
        for node in function.node_def:
            add(_without_id(node))
    for ends in (model.inputs, model.outputs):
        add("\n".join(f"{end.name}\t{end.tensor}" for end in ends).encode())
    add("\n".join(model.targets).encode())
    return digest.hexdigest()


def _without_id(node: Any) -> bytes:
    if STREAM_ID in node.attr:
        copy = type(node)()
        copy.CopyFrom(node)
        node = copy
        del node.attr[STREAM_ID]
    data: bytes = node.SerializeToString(deterministic=True)
    return data
