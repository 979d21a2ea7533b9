"""Rewrites that need no measurement: fewer kernels for the same result.

They turn products and convolutions, with what follows them, into the fused ops that TensorFlow's own optimizer makes
(`_FusedConv2D`, `_FusedMatMul`), so that one lowering serves for both. Each rewrite is one file and one function on a `Source`
whose shapes are known; none of them touches a value that is fetched, or that something outside of its pattern reads.
"""

from __future__ import annotations

from msplit.engines.cuda.program import Source
from msplit.engines.cuda.rewrites.affine import fold_affine
from msplit.engines.cuda.rewrites.dense import flatten_products
from msplit.engines.cuda.rewrites.epilogue import fuse_epilogues
from msplit.engines.cuda.rewrites.identities import drop_identities


def rewrite(source: Source) -> None:
    """Applies every rewrite. The order matters: products become matrices, scales and offsets become a bias, a bias an epilogue."""
    for step in (drop_identities, flatten_products, fold_affine, drop_identities, fuse_epilogues, drop_identities):
        step(source)
        source.prune()
        source.sort()
