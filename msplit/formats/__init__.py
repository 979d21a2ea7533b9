"""Reads and writes GraphDef, MetaGraphDef and SavedModel."""

from __future__ import annotations

from msplit.formats.atomic import write_bytes_atomic
from msplit.formats.digest import graph_hash, structure_hash
from msplit.formats.model import Endpoint, Format, Model
from msplit.formats.reader import read
from msplit.formats.restore import VARIABLE_OPS, variables
from msplit.formats.sniffer import sniff
from msplit.formats.writer import STREAM_ID, WriteReport, write

__all__ = [
    "STREAM_ID",
    "VARIABLE_OPS",
    "Endpoint",
    "Format",
    "Model",
    "WriteReport",
    "graph_hash",
    "read",
    "sniff",
    "structure_hash",
    "variables",
    "write",
    "write_bytes_atomic",
]
