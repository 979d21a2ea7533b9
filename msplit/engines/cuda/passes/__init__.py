"""Rewrites that need no measurement: fewer kernels for the same result.

They turn products and convolutions, with what follows them, into the fused ops that TensorFlow's own optimizer makes
(`_FusedConv2D`, `_FusedMatMul`), so that one lowering serves for both. Each rewrite is one file and one function on a `OpGraph`
whose shapes are known; none of them touches a value that is fetched, or that something outside of its pattern reads.
"""

from __future__ import annotations

from msplit.engines.cuda.ir.graph import OpGraph
from msplit.engines.cuda.passes.cse import drop_duplicates
from msplit.engines.cuda.passes.eliminate_identity import drop_identities
from msplit.engines.cuda.passes.flatten_matmul import flatten_products
from msplit.engines.cuda.passes.fold_affine import fold_affine
from msplit.engines.cuda.passes.fold_dilation import absorb_dilation
from msplit.engines.cuda.passes.fold_padding import absorb_padding
from msplit.engines.cuda.passes.fuse_epilogue import fuse_epilogues
from msplit.engines.cuda.passes.layer_norm import fuse_layer_norms
from msplit.engines.cuda.passes.reassociate_bias import move_biases
from msplit.engines.cuda.passes.softmax import fuse_softmaxes

ORDER = (
    drop_identities,
    flatten_products,  # products become matrices
    absorb_dilation,
    absorb_padding,
    move_biases,
    fold_affine,  # scales and offsets become weights and a bias
    drop_identities,
    drop_duplicates,  # not before convolutions and products have taken along what only one of them reads
    fuse_layer_norms,
    fuse_softmaxes,
    fuse_epilogues,  # bias, sum and activation ride on the product
    drop_identities,
)


def rewrite(graph: OpGraph) -> None:
    """Applies every rewrite, each on what the ones before it left."""
    for step in ORDER:
        step(graph)
        graph.prune()
        graph.sort()
    for op in graph.ops.values():
        # One kernel each from here on. What rides on an op of a loop is the same flat node, and adds no kernel of it.
        op.source_nodes = list(dict.fromkeys(op.source_nodes))
