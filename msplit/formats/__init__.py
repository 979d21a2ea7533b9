"""Reads and writes GraphDef, MetaGraphDef and SavedModel."""

from __future__ import annotations

from msplit.formats.model import Endpoint, Format, Model
from msplit.formats.read import read
from msplit.formats.sniff import sniff

__all__ = ["Endpoint", "Format", "Model", "read", "sniff"]
