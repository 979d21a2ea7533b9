"""One graph for several GPUs: copies between ops on different ones, and constants where they are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.core.graph import Ints
from msplit.engines.cuda.ir.graph import PEER_COPY, Key, Op, OpGraph, gpus_of
from msplit.engines.cuda.ir.interpret import static_slots
from msplit.errors import EngineError

UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class Split:
    """GPUs that the nodes of a flat graph run on.

    Attributes:
        gpu: Per node its GPU, as a number in `devices`.
        devices: Numbers of the GPUs as PyTorch has them. The first takes inputs and gives outputs.
    """

    gpu: Ints
    devices: tuple[int, ...]

    @staticmethod
    def of(ids: Ints, streams: int, devices: tuple[int, ...]) -> Split:
        """Stream ids are divided evenly over the GPUs, in order.

        Raises:
            EngineError: They can not be.
        """
        if streams % len(devices):
            raise EngineError(
                f"{streams} stream{'s' * (streams != 1)} can not be divided evenly over {len(devices)} GPUs",
                fix=f"assign with --streams {len(devices) * max(streams // len(devices), 1)} and the rule `device`",
            )
        return Split((ids // (streams // len(devices))).astype(np.int32), devices)


def split_graph(graph: OpGraph, split: Split) -> bool:
    """Puts a copy on every value that another GPU reads: one for each GPU that does. What is fetched is copied to the first.

    Raises:
        EngineError: The graph trains: variables that are written have one place.
    """
    if graph.state:
        raise EngineError(
            "a graph with variables that change can not be split over GPUs",
            fix="train with one process for each GPU (`msplit train`), or freeze the variables",
        )
    on = _placed(graph, split.gpu)
    copies: dict[tuple[Key, int], Key] = {}
    fed = set(graph.feeds.values())

    def home(key: Key, otherwise: int) -> int:
        return 0 if key in fed else on.get(key[0], otherwise)

    def copied(key: Key, gpu: int, like: Op) -> Key:
        """The value on a GPU; `like` reads it, or made it."""
        if key in graph.constants or home(key, gpu) == gpu:
            return key
        if (key, gpu) not in copies:
            shape, dtype, source = graph.shapes.get(key), graph.dtypes.get(key), graph.ops.get(key[0], like)
            attrs = {"gpu": gpu, "device": split.devices[gpu], "T": dtype or ""}
            copies[key, gpu] = graph.add(PEER_COPY, source, attrs, [key], shape, dtype).out
            on[copies[key, gpu][0]] = gpu
        return copies[key, gpu]

    for number, op in list(graph.ops.items()):
        static = static_slots(op)
        op.inputs = [
            key if slot in static and key in graph.constants else copied(key, on[number], op)
            for slot, key in enumerate(op.inputs)
        ]
    for name, key in graph.fetches.items():
        if key[0] in graph.ops:
            graph.fetches[name] = copied(key, 0, graph.ops[key[0]])
    return bool(copies)


def own_constants(graph: OpGraph) -> bool:
    """Gives each GPU constants of its own: what ops on several read becomes several."""
    on = gpus_of(graph)
    made: dict[tuple[Key, int], Key] = {}
    first: dict[Key, int] = {}
    for number, op in graph.ops.items() if on else ():
        static = static_slots(op)
        for slot, key in enumerate(op.inputs):
            if key not in graph.constants or slot in static or first.setdefault(key, on[number]) == on[number]:
                continue
            if (key, on[number]) not in made:
                copy = made[key, on[number]] = graph.constant(graph.constants[key].view())
                graph.describe(copy, None, graph.dtypes.get(key))
            op.inputs[slot] = made[key, on[number]]
    return bool(made)


def _placed(graph: OpGraph, label: Ints) -> dict[int, int]:
    """Per op its GPU: that of the first node that it does the work of; of one that has no stream, where it is read."""
    found = {
        number: next((int(label[node]) for node in op.source_nodes if node not in graph.streamless), UNKNOWN)
        for number, op in graph.ops.items()
    }
    for number, op in reversed(graph.ops.items()):
        for key in op.inputs:
            if found.get(key[0], 0) == UNKNOWN and found[number] != UNKNOWN:
                found[key[0]] = found[number]
    return {number: max(gpu, 0) for number, gpu in found.items()}
