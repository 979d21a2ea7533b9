"""Write an assignment in other forms, for other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msplit import formats
from msplit.assignment.assignment import Assigned
from msplit.errors import MsplitError, WriteError
from msplit.flatten.flat import FlatGraph
from msplit.formats.atomic import check_target
from msplit.rules import streamfile

EMITS = ("stream-file", "placement", "json", "yaml", "plan")


def check_places(flat: FlatGraph, paths: Sequence[Path], *, force: bool = False) -> None:
    """Refuses a set of places for outputs of a graph before the first of them is written.

    Raises:
        WriteError: Two of them are one place, one is the input or lies in its folder, something is there already and `force` is not
            given, or there is no folder that can be written to.
    """
    source = Path(os.path.realpath(flat.model.path))
    taken: dict[Path, Path] = {}
    for path in paths:
        target = Path(os.path.realpath(path))
        if target == source or source in target.parents:
            what = "is the input" if target == source else "lies in the folder of the input"
            raise WriteError(f"{what}; the input is never modified", where=str(path), fix="choose another name")
        if target in taken:
            raise WriteError("two outputs have this name", where=str(path), fix="choose another name for one of them")
        taken[target] = path
        check_target(path, force=force)


def emit(assigned: Assigned, kind: str, path: Path, *, force: bool = False) -> None:
    """Writes an assignment in another form.

    Args:
        assigned: The assignment.
        kind: ``stream-file`` (NVIDIA's TF_STREAM_FROM_FILE format), ``placement`` (node -> ``/device:GPU:k`` for stock TensorFlow's
            logical devices, JSON), ``json`` or ``yaml`` (ids with the rule that decided each), ``plan`` (order and waits, JSON;
            where the rule `auto` chose kernels, too, also their order and the nodes that share one).
        path: Where to.
        force: Replace what is there.

    Raises:
        WriteError: It can not be written.
    """
    formats.write_bytes_atomic(path, _emitted(assigned, kind).encode(), force=force)


def devices(assigned: Assigned) -> dict[int, str]:
    """Node -> its device for stock TensorFlow: the logical device of its stream, or the host's."""
    host, ids = assigned.flat.host, assigned.ids
    return {node: "/device:CPU:0" if host[node] else f"/device:GPU:{ids[node]}" for node in range(len(assigned.flat))}


def _emitted(assigned: Assigned, kind: str) -> str:
    flat, ids = assigned.flat, assigned.ids
    names = flat.graph.names
    gpu = np.flatnonzero(~flat.host).tolist()
    if kind == "stream-file":
        return streamfile.emit([names[node] for node in gpu], [int(ids[node]) for node in gpu])
    if kind == "placement":
        named = {names[node]: device for node, device in devices(assigned).items()}
        return json.dumps({"schema_version": 1, "devices": named}, indent=1, sort_keys=True) + "\n"
    if kind == "plan":
        if assigned.kernels is not None:
            from msplit.assignment.plans import plan_data

            return json.dumps(plan_data(flat, assigned.kernels.planned), indent=1) + "\n"
        from msplit.schedule import planfile

        return json.dumps(planfile.dump(assigned.plan, flat), indent=1) + "\n"
    if kind in ("json", "yaml"):
        listing = {"schema_version": 1, "streams": assigned.outcome.streams, "nodes": _listing(assigned, gpu)}
        if kind == "json":
            return json.dumps(listing, indent=1) + "\n"
        import yaml

        text: str = yaml.safe_dump(listing, sort_keys=False, allow_unicode=True, width=140)
        return text
    raise MsplitError(f"nothing to emit is called {kind!r}", fix=f"one of: {', '.join(EMITS)}")


def _listing(assigned: Assigned, nodes: Sequence[int]) -> list[dict[str, Any]]:
    listing = []
    for node in nodes:
        rule, why = assigned.outcome.assignment.why(node) or ("default", "no rule claimed it")
        listing.append(
            {"name": assigned.flat.graph.names[node], "stream": int(assigned.ids[node]), "rule": rule, "why": why}
        )
    return listing
