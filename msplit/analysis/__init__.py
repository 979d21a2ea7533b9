"""Independent work in a graph: branches, width, critical path, lookups of embedding tables.

A *branch* is what runs between a fork and the join behind it and reads nothing of its neighbours: in a model of 16 experts, each expert.
The *width* is the most kernels that are all independent of each other; the *critical path* is the longest chain of kernels of which
each waits for the one before. Work over critical path is what no number of streams can gain more than.

`rows` proves that rows of a batch are independent, too: that they may be padded, or joined with those of other requests.
"""
