"""Loops, conds and calls of TensorFlow 2 as straight lines of ops, where it is known before the run how they go.

A `While` is one node of the flat graph, with one stream id. For the engine it is as many ops as its turns have, which all run on that
stream; how many turns there are must follow from constants and shapes, as it does for a recurrent layer, `tf.map_fn` and
`for _ in tf.range(n)`. Of an `If` the branch that is taken runs, or both where only the run knows which. What is unrolled is captured,
fused and grouped like everything else.
"""

from __future__ import annotations

from msplit.engines.cuda.control.bodies import CALLS, CONDS, FUNCTIONAL, LOOPS, Bodies, Body
from msplit.engines.cuda.control.lists import LISTS

__all__ = ["CALLS", "CONDS", "FUNCTIONAL", "LISTS", "LOOPS", "Bodies", "Body"]
