"""Groups of pointwise ops as one kernel each."""

from __future__ import annotations

from msplit.engines.cuda.program import Source


def fuse_pointwise(source: Source) -> None:
    """Changes a source, whose shapes are known, in place."""
    del source
