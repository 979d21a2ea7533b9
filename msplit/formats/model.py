"""Models as they are read, and the record of how their ids were assigned.

The content of a model file once it is read.

The record of an assignment: what `msplit assign` made the ids of a model with, so that later commands need not be told.

It lies where TensorFlow never looks: in ``assets.extra/msplit.json`` of a SavedModel, the folder that TensorFlow keeps for others and
does not load, and in ``MODEL.msplit.json`` beside a model of one file. `docs/schemas/assignment.json` describes it.

A record names the model that it was written with by a hash of its file. Whatever came between the two, a kill or another program, the worst
that is left is a record that nobody goes by, which is said. A record may come from anybody: it is bounded, and every mistake in it is
a reason to do without it, never an error of the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from msplit.core.arguments import MAX_STREAMS
from msplit.core.graph import Graph
from msplit.errors import MsplitError
from msplit.formats.files import JsonValue, Sha256

STREAM_ID = "_stream_id"
"""The attribute that holds a node's stream id."""

SCHEMA_VERSION = 1
KIND = "assignment"
MAX_BYTES = 256 << 20
"""Longest record: one that lists a million nodes that were set by hand."""

ENDING = ".msplit.json"
IN_SAVED_MODEL = ("assets.extra", "msplit.json")

_FIX = "run `msplit assign` again, or remove the file"

Nodes = Mapping[str, tuple[str, ...]]
"""Function, "" for the top-level graph -> names of nodes in it."""


@dataclass(frozen=True)
class ReadOptions:
    """Options that `reader.read` was given for a file that leaves something open; None where nothing was."""

    tags: tuple[str, ...] | None = None
    signature: str | None = None
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RecordedRules:
    """A rule set with all that it was read from.

    Attributes:
        source: The file, or the name of a shipped rule set, as messages call it.
        files: Texts of the stream files that it names, by the names that it has for them.
    """

    source: str
    text: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """SHA-256 of the texts, hexadecimal."""
        return hashlib.sha256(json.dumps([self.text, sorted(self.files.items())]).encode()).hexdigest()


@dataclass(frozen=True)
class RecordedProfile:
    """The profile that priced the nodes: its file, as it was given, and what `cost.profile.hash_of` gives for it."""

    path: str
    hash: Sha256


@dataclass(frozen=True)
class AssignmentRecord:
    """The record of an assignment: the rules and options that the ids of a model were made with.

    Attributes:
        msplit: Version of msplit.
        rules: None where no rules made the ids.
        streams: Ids are 0..streams-1.
        wrap: Whether ids out of range were taken modulo `streams`.
        batch: Size of unknown leading dimensions of inputs; None for 1.
        shapes: Whole shapes by input name.
        gpu: Data sheet that priced the nodes.
        profile: Profile in its place.
        loaded: How the file was read.
        by_hand: Nodes whose ids were there before and were kept: all other ids are msplit's.
        inside: Ids of nodes inside of modules that JAX wrote, for which the model's file has no place, by function and node.
        model_hash: SHA-256 of the model's file with the ids, hexadecimal; of a SavedModel, of its main file.
    """

    msplit: str
    rules: RecordedRules | None
    streams: Annotated[int, 1, MAX_STREAMS]
    wrap: bool = False
    batch: Annotated[int, 1] | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    gpu: str = ""
    profile: RecordedProfile | None = None
    loaded: ReadOptions = field(default_factory=ReadOptions)
    by_hand: Nodes = field(default_factory=dict)
    inside: Mapping[str, Mapping[str, Annotated[int, 0, MAX_STREAMS - 1]]] = field(default_factory=dict)
    model_hash: Sha256 = ""


def place(model: Path) -> Path:
    """Path of the record of a model: in the folder of a SavedModel, beside any other file (a link is followed)."""
    target = Path(os.path.realpath(model))
    return target.joinpath(*IN_SAVED_MODEL) if target.is_dir() else target.with_name(target.name + ENDING)


def hash_of(data: Any) -> str:
    """The hash that a record knows a model's file by."""
    return hashlib.sha256(data).hexdigest()


def dumps(record: AssignmentRecord) -> bytes:
    """The file. The same record gives the same bytes."""
    rules, profile = record.rules, record.profile
    data = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "msplit": record.msplit,
        "model_hash": record.model_hash,
        **vars(record),
        "rules": rules
        and {
            "source": rules.source,
            "hash": rules.hash,
            "text": rules.text,
            "files": dict(sorted(rules.files.items())),
        },
        "shapes": dict(sorted(record.shapes.items())),
        "profile": profile and vars(profile),
        "loaded": vars(record.loaded),
        "by_hand": dict(sorted(record.by_hand.items())),
    }
    if not record.inside:
        del data["inside"]
    return (json.dumps(data, indent=1) + "\n").encode()


def load(path: Path) -> AssignmentRecord:
    """Reads a record.

    Raises:
        MsplitError: It can not be read, or is no record; the message says what is wrong with it.
    """
    where = str(path)
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise MsplitError(
            f"can not be read: {getattr(error, 'strerror', None) or error}", where=where, fix=_FIX
        ) from None
    if not regular:
        raise MsplitError("is not a regular file", where=where, fix=_FIX)  # a pipe would be waited for
    top = JsonValue.read(path, MAX_BYTES, what="record of the assignment", fix=_FIX).of_version(KIND, SCHEMA_VERSION)
    return top.without("rules").to(AssignmentRecord, optional=("inside",), rules=top.at("rules").or_none(_rules))


def _rules(value: JsonValue) -> RecordedRules:
    hashed = value.at("hash")
    rules = value.without("hash").to(RecordedRules)
    if hashed.to(str) != rules.hash:
        raise hashed.wrong("is not that of the rules beside it")
    return rules


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
        """True if it is protobuf's text format."""
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


EXPORTED: dict[Path, Path] = {}
"""Folder that Keras has exported to -> the file that was exported."""


def source_of(path: Path) -> Path:
    """The file that a model was read from: of what was exported to be read, the `.keras` file."""
    return EXPORTED.get(path, path)


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
    choice: ReadOptions = field(default_factory=ReadOptions)
    record: AssignmentRecord | None = None
    record_problem: str | None = None

    @property
    def source(self) -> Path:
        """The file that the user named: of a `.keras` file that was exported to be read, that one."""
        return source_of(self.path)

    @property
    def meta(self) -> Any:
        """The MetaGraphDef around the graph, None for a bare GraphDef."""
        return meta_graphs(self.format, self.proto)[self.meta_graph]

    @property
    def method(self) -> str:
        """Method of TensorFlow Serving that the chosen signature was exported for, "" where the file does not say."""
        return "" if self.signature is None else str(self.meta.signature_def[self.signature].method_name)

    @property
    def is_saved_model(self) -> bool:
        """True if the path is a SavedModel's folder."""
        return self.format.binary is Format.SAVED_MODEL


def meta_graphs(kind: Format, message: Any) -> Sequence[Any]:
    """The MetaGraphDefs of a message: those of a SavedModel, else the message itself; None in place of one for a bare GraphDef."""
    if kind.binary is Format.SAVED_MODEL:
        found: Sequence[Any] = message.meta_graphs
        return found
    return (None if kind.binary is Format.GRAPH_DEF else message,)
