"""The load benchmark: many requests from another process, every answer checked, latency over throughput.

From top to bottom: `run` (what is measured, in turns), `targets` (what answers, here or in processes of its own), `clients` (processes that
ask a server), `dispatcher` (hands requests to a target and answers back), `generator` (the process that sends, and the
memory that the processes share), `results`, `corpus` (inputs, and what their answers should be).
"""
