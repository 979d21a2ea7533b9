"""Frozen graphs: small sizes of the benchmark models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msplit import samples


def write_binary(path: Path, message: Any) -> None:
    """Write a protobuf message, equal messages as equal bytes."""
    path.write_bytes(message.SerializeToString(deterministic=True))


def mmoe_small(path: Path) -> None:
    """Write a mixture of 4 experts."""
    sample = samples.build("mmoe", experts=4, features=64, units=(64, 48, 32), tower_units=(16,))
    write_binary(path, sample.graph_def)


def towers_small(path: Path) -> None:
    """Write six embedding towers."""
    sample = samples.build("towers", towers=6, rows=500, width=16, units=(32, 8))
    write_binary(path, sample.graph_def)


def lstm_small(path: Path) -> None:
    """Write an LSTM of 3 layers and 8 steps."""
    write_binary(path, samples.build("lstm", layers=3, steps=8, hidden=32).graph_def)


def mmoe_small_text(path: Path) -> None:
    """Write a still smaller mixture in text format."""
    from google.protobuf import text_format

    sample = samples.build("mmoe", experts=4, features=16, units=(16, 16, 8), tower_units=(8,))
    path.write_text(text_format.MessageToString(sample.graph_def), encoding="utf-8")
