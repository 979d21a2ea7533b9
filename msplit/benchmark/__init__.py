"""Runs variants of one model side by side, checks that they agree, and says honestly what each gains.

A *variant* is one way to run the model and one row of the report: an engine, streams, kernels. "msplit, 4 streams, CUDA graph" is one,
"TensorFlow" another. `run.variants` makes them, `verify.check` builds each and holds its outputs against the reference (TensorFlow's on
the CPU), and `timing` times all in turns: in each round every variant runs a few steps, in a new order, so that a slow moment of the
machine hits all of them. A gain is the ratio of two medians, with a confidence interval from the rounds that both ran in. What gives
wrong outputs is not timed at all.
"""
