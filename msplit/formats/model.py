"""What a file holds once it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from msplit.core.graph import Graph
from msplit.formats.record import AssignmentRecord, Choice


class Format(StrEnum):
    """The kinds of file that msplit reads and writes back."""

    GRAPH_DEF = "graphdef"
    GRAPH_DEF_TEXT = "graphdef-text"
    META_GRAPH = "metagraph"
    META_GRAPH_TEXT = "metagraph-text"
    SAVED_MODEL = "savedmodel"
    SAVED_MODEL_TEXT = "savedmodel-text"

    @property
    def is_text(self) -> bool:
        """Whether it is protobuf's text format."""
        return self.endswith("-text")

    @property
    def binary(self) -> Format:
        """The binary format of the same message."""
        return Format(self.removesuffix("-text"))


@dataclass(frozen=True)
class Endpoint:
    """An input or an output of the model.

    Attributes:
        name: What the user calls it: the signature's key, or the node's name in a bare GraphDef.
        node: Node in the top-level graph.
        dtype: Name as in ``"float32"``, "" where the file does not say.
        shape: Sizes with None for unknown ones; None for unknown rank.
    """

    name: str
    node: str
    port: int
    dtype: str
    shape: tuple[int | None, ...] | None

    @property
    def tensor(self) -> str:
        """TensorFlow's name of the tensor, as in ``"dense/MatMul:0"``."""
        return f"{self.node}:{self.port}"


@dataclass(frozen=True, eq=False)
class Model:
    """A model file.

    Attributes:
        path: The file, or the SavedModel's folder.
        proto: The whole message as read; never modified.
        graph_def: The GraphDef inside it (the same object, not a copy).
        graph: The same as plain data: every node of the file, functions in `graph.functions`.
        inputs: What is fed.
        outputs: What is fetched. A train step is an output too (port 0 of its op, dtype "").
        targets: Nodes that must run though they give no tensor (train ops).
        left_out: Where the outputs are guessed, tensors that nothing consumes and that are no outputs all the same: inside of loops and
            conds, handles, leftovers of training. None where the file, its signature or the user names the outputs.
        init_ops: Nodes that initialize variables and tables before the first run, in order.
        tags: Tags of the chosen MetaGraphDef of a SavedModel.
        signature: Name of the chosen signature, None where the file has none.
        signatures: Names of all signatures.
        versions: ``producer`` and ``min_consumer`` of the GraphDef, where it says them.
        meta_graph: Index of the chosen MetaGraphDef.
        commented: Whether the file is text with comments, which a message does not hold.
        choice: What was asked for of what the file leaves open.
        record: What the ids were made with, where `msplit assign` has left its record with the model.
        record_problem: Why a record that is there is not gone by, as a sentence; None where there is nothing to say.
    """

    path: Path
    format: Format
    proto: Any = field(repr=False)
    graph_def: Any = field(repr=False)
    graph: Graph = field(repr=False)
    inputs: tuple[Endpoint, ...] = ()
    outputs: tuple[Endpoint, ...] = ()
    targets: tuple[str, ...] = ()
    left_out: tuple[str, ...] | None = None
    init_ops: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    signature: str | None = None
    signatures: tuple[str, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    meta_graph: int = 0
    commented: bool = False
    choice: Choice = field(default_factory=Choice)
    record: AssignmentRecord | None = None
    record_problem: str | None = None

    @property
    def meta(self) -> Any:
        """The MetaGraphDef around the graph, None for a bare GraphDef."""
        return meta_graphs(self.format, self.proto)[self.meta_graph]

    @property
    def is_saved_model(self) -> bool:
        """Whether the path is a SavedModel's folder."""
        return self.format.binary is Format.SAVED_MODEL


def meta_graphs(kind: Format, message: Any) -> Sequence[Any]:
    """The MetaGraphDefs of a message: those of a SavedModel, else the message itself; None in place of one for a bare GraphDef."""
    if kind.binary is Format.SAVED_MODEL:
        found: Sequence[Any] = message.meta_graphs
        return found
    return (None if kind.binary is Format.GRAPH_DEF else message,)
