"""Holds outputs and variables of an engine against a reference, and says what differs."""
