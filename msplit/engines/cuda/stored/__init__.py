"""Compiled models as plain data: what a build holds."""
