"""The load benchmark: many requests from another process, every answer checked, latency over throughput.

From top to bottom: `run` (what is measured, in turns), `arms` (what answers), `remote` (an arm in a process of its own), `bridge` (hands
requests to an arm and answers back), `generator` (the process that sends), `process`, `results`, `prepared` (inputs, and what their answers
should be), `table` (the memory that the processes share).
"""
