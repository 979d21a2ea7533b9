"""A plan: an assignment made executable."""

from __future__ import annotations

from dataclasses import dataclass

from msplit.graph import Ints


@dataclass(frozen=True, eq=False)
class Plan:
    """The order of each stream and what waits for what.

    Only nodes that launch something on the device are in a plan; the others (constants, identities folded away, host nodes) have stream -1.

    Attributes:
        stream: Per node of the flat graph its stream 0..streams-1, or -1 if it is not in the plan.
        order: The nodes of the plan in record order: topological, and restricted to one stream it is that stream's order.
        wait_node: Per wait the node that waits.
        wait_on: Per wait the node whose event it waits for; it is on another stream.
        streams: Number of streams.
        edges: Cross-stream dependencies before reduction: one per (producer, consumer) pair on different streams.
    """

    stream: Ints
    order: Ints
    wait_node: Ints
    wait_on: Ints
    streams: int
    edges: int
