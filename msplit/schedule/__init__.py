"""From independent work to a plan: who runs on which stream, in which order, and who waits for whom.

Example: a forks into b and c, and d joins them. Streams ``a=0 b=0 c=1 d=0`` need two waits: c for a, and d for c. b needs none, nor d for
b: a stream runs in order. `algorithms` put work on streams, `simulate` predicts what a GPU would take, `search` takes the best of them,
and `plan` makes orders and the fewest waits of the result and proves them.
"""
