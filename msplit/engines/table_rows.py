"""Lookup tables that do not fit on the GPU: what is counted of them."""

from __future__ import annotations

from collections.abc import Callable

LOOKUPS = (
    "table_rows_looked_up",
    "table_rows_found",
    "table_rows_admitted",
    "table_bus_bytes",
    "table_cache_bytes",
    "host_table_bytes",
)
"""Figures of tables that stay in the host's memory: rows that were looked up, those of them that the cache had, rows that came into it,
bytes that all others and those that came in took over the bus, and memory of the cache and of the tables."""
LookupCounts = Callable[[], tuple[int, ...]]
"""Gives these figures as of now. It waits for nobody, and costs no step anything."""


def no_lookups() -> tuple[int, ...]:
    """Figures of a model that has no such tables."""
    return (0,) * len(LOOKUPS)
