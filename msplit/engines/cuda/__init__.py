"""The cuda engine: runs a plan on real CUDA streams and captures it as one CUDA graph. PyTorch is its kernel library.

A model passes through its folders in this order: `frontend` makes ops of nodes, `passes` make fewer and larger ones of them, `ops` has
the function on PyTorch tensors that runs each op, `autotune` chooses among several kernels by measuring, and `runtime` issues all of it
on streams while CUDA records. Recorded once, a step is one call: of a model of 200 small kernels, 200 launches of some µs become one.

The rest of msplit sees `engine`, `options` and `coverage` only. docs/architecture.md follows a model from the command to the captured
graph.
"""
