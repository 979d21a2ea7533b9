"""Groups of pointwise ops as one kernel each."""

from __future__ import annotations

from msplit.engines.cuda.passes.pointwise_fusion.fuse import Fused, copy_of, fuse

__all__ = ["Fused", "copy_of", "fuse"]
