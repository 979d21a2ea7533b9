"""Reads and writes GraphDef, MetaGraphDef and SavedModel."""

from __future__ import annotations

from msplit.formats.atomic import write_bytes_atomic
from msplit.formats.bundle import differs, saved_as, stamp, variables
from msplit.formats.guess import left_out_text
from msplit.formats.model import STREAM_ID, Endpoint, Format, Model
from msplit.formats.reader import read, sniff, to_train
from msplit.formats.summary import Contents, contents, graph_hash, structure_hash
from msplit.formats.writer import WriteReport, write

__all__ = [
    "STREAM_ID",
    "Contents",
    "Endpoint",
    "Format",
    "Model",
    "WriteReport",
    "contents",
    "differs",
    "graph_hash",
    "left_out_text",
    "read",
    "saved_as",
    "sniff",
    "stamp",
    "structure_hash",
    "to_train",
    "variables",
    "write",
    "write_bytes_atomic",
]
