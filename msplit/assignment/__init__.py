"""Decisions about a model that need no run: analysis, assignment, and what they were made with.

`model` loads and saves, `analysis` says what streams can gain at most and why, `assignment` gives every node a stream by rules,
and writes that for other tools. What an assignment was made with (rules, batch, shapes, GPU) comes from options, else
from the record that lies with the model, so that a check weeks later judges by the same; `model.settle` decides which.
"""
