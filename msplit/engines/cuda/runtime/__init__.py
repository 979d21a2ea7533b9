"""Runs a compiled model: streams, memory, copies, capture and replay."""
