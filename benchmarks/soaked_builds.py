"""Builds that the soak of a server serves: a model with several sets of weights, requests, and the answers of each set to them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import msplit
from msplit.formats.build import MANIFEST, WEIGHTS
from msplit.opset import schema
from msplit.serving.loadtest.corpus import of_build, of_ports

BUILDS, DISTINCT = 3, 16
"""Sets of weights, and prepared requests of each kind."""
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
TYPES = {np.dtype(np.float32): 1, np.dtype(np.int32): 3}
WIDTH, IDS, DENSE = 64, 8, 16
"""Numbers of a row of each table of the large model, its tables, and its other inputs."""


def large(path: Path, mib: int) -> Path:
    """Writes a model of tables of so many MiB in all: rows looked up by ids, beside other inputs, and two layers on top."""
    graph, rng = schema.graph_pb2.GraphDef(), np.random.default_rng(0)
    rows = mib * (1 << 20) // (4 * WIDTH * IDS)

    def node(name: str, op: str, inputs: Sequence[str] = (), **attributes: Any) -> str:
        made = graph.node.add(name=name, op=op, input=inputs)
        for key, value in attributes.items():
            if isinstance(value, np.ndarray):
                tensor = made.attr[key].tensor
                tensor.dtype, tensor.tensor_content = TYPES[value.dtype], value.tobytes()
                for size in value.shape:
                    tensor.tensor_shape.dim.add(size=size)
            elif isinstance(value, tuple):
                for size in value:
                    made.attr[key].shape.dim.add(size=size)
            else:
                made.attr[key].type = value
        return name

    def constant(name: str, value: np.ndarray) -> str:
        return node(name, "Const", value=value, dtype=TYPES[value.dtype])

    parts = [node("dense", "Placeholder", dtype=1, shape=(-1, DENSE))]
    axis = constant("axis", np.array(0, np.int32))
    for number in range(IDS):
        ids = node(f"id_{number}", "Placeholder", dtype=9, shape=(-1,))
        few = rng.standard_normal((997, WIDTH), np.float32)
        table = constant(f"table_{number}", np.resize(few, (rows, WIDTH)))
        types = {"Tparams": 1, "Tindices": 9, "Taxis": 3}
        parts.append(node(f"rows_{number}", "GatherV2", (table, ids, axis), **types))
    last = constant("last", np.array(1, np.int32))
    hidden = node("all", "ConcatV2", (*parts, last), T=1, Tidx=3)
    sizes = (WIDTH * IDS + DENSE, 128, 8)
    for number, (width, units) in enumerate(pairwise(sizes)):
        weights = rng.standard_normal((width, units), np.float32) / np.float32(np.sqrt(width))
        hidden = node(f"product_{number}", "MatMul", (hidden, constant(f"weights_{number}", weights)), T=1)
        hidden = node(("hidden", "score")[number], ("Relu", "Sigmoid")[number], (hidden,), T=1)
    next(one for one in graph.node if one.name == "all").attr["N"].i = len(parts)
    path.write_bytes(graph.SerializeToString())
    return path


def versions(args: argparse.Namespace) -> list[Path]:
    """Builds of the model, which differ in their weights."""
    found = []
    model = large(args.out / f"large-{args.table_mib}.pb", args.table_mib) if args.table_mib else args.model
    for number in range(BUILDS):
        made = args.out / f"{model.stem}-{args.device}-{number}.build"
        if not made.is_dir():
            rng = np.random.default_rng(number)
            own = schema.graph_pb2.GraphDef.FromString(model.read_bytes())
            for node in own.node:
                tensor = node.attr["value"].tensor if node.op == "Const" else None
                if tensor is not None and tensor.dtype == 1 and len(tensor.tensor_content) > 64:
                    values = np.frombuffer(tensor.tensor_content, np.float32)
                    by = np.resize(rng.uniform(0.5, 1.5, 4099).astype(np.float32), values.shape)
                    tensor.tensor_content = (values * by).tobytes()
            path = args.out / f"{model.stem}-{number}.pb"
            path.write_bytes(own.SerializeToString())
            known = importlib.util.find_spec("tensorflow") is not None and not args.table_mib
            fast = {} if known and args.device == "cuda" else {"effort": "fast"}
            msplit.build(
                path, made, engine="cuda", device=args.device, batches=args.batches, streams=args.streams, **fast
            )
            path.unlink()
        found.append(made)
    return found


def prepared(args: argparse.Namespace, builds: Sequence[Path]) -> dict[str, Any]:
    """Requests by kind, and the answers of each build to them."""
    rows = {"one row": 1, "many rows": 3 * max(args.batches) + 1, "KServe": 3, "HTTP": 2}
    feeds: dict[str, Any] = {}
    answers = []
    for build in builds:
        with msplit.pool(build, device=args.device, groups=1) as pool:
            feeds = feeds or {
                kind: of_ports(of_build(build), pool.inputs, count, DISTINCT, 7) for kind, count in rows.items()
            }
            answers.append({kind: [pool.step(one) for one in each] for kind, each in feeds.items()})
    for kind in feeds:
        for number in range(DISTINCT):
            every = [one[kind][number] for one in answers]
            if any(same(a, b) for i, a in enumerate(every) for b in every[:i]):
                raise SystemExit(f"{kind}: two builds give the same answer, so that a wrong one could not be told")
    return {"feeds": feeds, "answers": answers}


def same(found: Any, expected: Any) -> bool:
    """True where an answer is the expected one, but for what other steps make of it."""
    return found.keys() == expected.keys() and all(
        found[name].shape == value.shape and np.allclose(found[name], value, **CLOSE)
        for name, value in expected.items()
    )


def copied(build: Path, to: Path) -> None:
    """Copies a build whose files nobody changes."""
    shutil.copytree(build, to, copy_function=os.link)


def spoilt(build: Path, other: Path, to: Path) -> Path:
    """A build with the weights of another, as whole as any, whose answers are not those that it was verified with."""
    copied(build, to)
    (to / WEIGHTS).unlink()
    os.link(other / WEIGHTS, to / WEIGHTS)
    said = json.loads((to / MANIFEST).read_text())
    said["files"][WEIGHTS] = json.loads((other / MANIFEST).read_text())["files"][WEIGHTS]
    (to / MANIFEST).unlink()
    (to / MANIFEST).write_text(json.dumps(said, indent=1, sort_keys=True))
    return to
