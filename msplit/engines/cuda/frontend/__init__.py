"""A model's nodes as ops: who runs what, and loops, conds and calls as straight lines.

`partition` says what runs on the GPU and what on the host, `importer` makes ops of the former. Loops and conds of TensorFlow 1 become nodes
like TensorFlow 2's first (`functionalize`); `unroll` turns such nodes into what they run.

A `While` is one node of the flat graph, with one stream id. For the engine it is as many ops as its turns have, which all run on that
stream; how many turns there are follows from constants and shapes, as it does for a recurrent layer, `tf.map_fn` and
`for _ in tf.range(n)`, or at least a bound does, as for `dynamic_rnn` with lengths. Of an `If` the branch that is taken runs, or both where
only the run knows which. What is unrolled is captured, fused and grouped like everything else.
"""
