"""Small flat graphs from text, so that a test shows the graph it is about.

    flat("x:Placeholder; w:Const; y:MatMul(x,w)@10us; z:Relu(y:0,^x)@2us[_stream_id=1] host")

Nodes are separated by ``;`` or line ends. A node is ``name:Op``, then in this order and all optional: its inputs in round brackets
(``node``, ``node:port`` or ``^node`` for a control edge; nodes may be used before they are named), its time ``@10us``, attributes in
square brackets (integers, ``true``/``false``, or text; a list of texts is joined by ``|``) and flags: ``host``, ``stateful``,
``region=NAME``. A node without a time costs nothing if its op launches no kernel (`FREE`), and 1 µs otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, Edges, Graph, TensorValue
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph, Region, Tensor
from msplit.formats.model import Format, Model

FREE = {
    *("Placeholder", "Const", "Identity", "NoOp", "VarHandleOp", "ReadVariableOp", "VariableV2", "KvVarHandleOp"),
    *("Reshape", "ExpandDims", "Squeeze", "IdentityN", "Assert", "Switch", "Merge", "Enter", "Exit", "NextIteration"),
}
NODE = re.compile(
    r"(?P<name>[^:\s(]+):(?P<op>\w+)(\((?P<inputs>[^)]*)\))?(@(?P<time>[\d.]+)us)?(\[(?P<attrs>[^\]]*)\])?(?P<flags>(\s+[\w=/]+)*)"
)


def flat(text: str, **overrides: Any) -> FlatGraph:
    """The graph that the text describes (see the module). `overrides` go to `build`."""
    return parse(text, **overrides)[0]


def parse(text: str, **overrides: Any) -> tuple[FlatGraph, Costs]:
    """The graph that the text describes, and its costs."""
    found = [_match(part) for part in re.split(r"[;\n]", text) if part.strip()]
    names = [match["name"] for match in found]
    index = {name: node for node, name in enumerate(names)}
    edges = []
    attrs: list[dict[str, Any]] = []
    flags = [(match["flags"] or "").split() for match in found]
    times = []
    for node, match in enumerate(found):
        slot = 0
        for item in filter(None, (part.strip() for part in (match["inputs"] or "").split(","))):
            if item.startswith("^"):
                edges.append((index[item[1:]], CONTROL, node, CONTROL))
            else:
                producer, _, port = item.partition(":")
                edges.append((index[producer], int(port or 0), node, slot))
                slot += 1
        attrs.append(_attrs(match["attrs"] or ""))
        free = match["op"] in FREE or "host" in flags[node]
        times.append(float(match["time"]) if match["time"] else (0.0 if free else 1.0))
    regions = list(dict.fromkeys(flag[7:] for entry in flags for flag in entry if flag.startswith("region=")))
    options: dict[str, Any] = {
        "names": names,
        "ops": [match["op"] for match in found],
        "edges": edges,
        "times": times,
        "attrs": attrs,
        "host": ["host" in entry for entry in flags],
        "stateful": ["stateful" in entry for entry in flags],
        "regions": [Region("loop", name) for name in regions],
        "region": [next((regions.index(f[7:]) for f in entry if f.startswith("region=")), -1) for entry in flags],
    }
    return build(**{**options, **overrides})


def build(
    names: Sequence[str],
    ops: Sequence[str],
    edges: Sequence[tuple[int, int, int, int]] | Edges,
    times: Sequence[float] | np.ndarray,
    *,
    attrs: Sequence[Mapping[str, Any]] | None = None,
    host: Sequence[bool] | None = None,
    stateful: Sequence[bool] | None = None,
    regions: Sequence[Region] = (),
    region: Sequence[int] | None = None,
    share: Sequence[float] | float = 0.1,
    bytes_: Sequence[float] | float | None = None,
    outputs: Sequence[int] | None = None,
    targets: Sequence[int] = (),
) -> tuple[FlatGraph, Costs]:
    """A flat graph and its costs from plain sequences. Edges are (producer, port, consumer, slot)."""
    count = len(names)
    if not isinstance(edges, Edges):
        columns = list(zip(*edges, strict=True)) if edges else [(), (), (), ()]
        edges = Edges.of(*columns)
    graph = Graph(names, ops, [""] * count, attrs or [{}] * count, edges)
    fed = [node for node, op in enumerate(ops) if op == "Placeholder"]
    if outputs is None:
        used = np.zeros(count, bool)
        used[edges.src] = True
        outputs = np.flatnonzero(~used).tolist()
    time_us = np.asarray(times, dtype=np.float64)
    moved = time_us * 1000 if bytes_ is None else np.broadcast_to(np.asarray(bytes_, dtype=np.float64), (count,))
    view = FlatGraph(
        model=Model(Path("test.pb"), Format.GRAPH_DEF, None, None, graph),
        graph=graph,
        back_edges=Edges.of([], [], [], []),
        origin_function=np.full(count, -1, np.int32),
        origin_node=np.arange(count, dtype=np.int32),
        function_names=(),
        region=np.asarray(region if region is not None else [-1] * count, np.int32),
        regions=regions,
        host=np.asarray(host if host is not None else [False] * count, bool),
        stateful=np.asarray(stateful if stateful is not None else [False] * count, bool),
        inputs=tuple(Tensor(names[node], node, 0) for node in fed),
        outputs=tuple(Tensor(names[node], node, 0) for node in outputs),
        targets=tuple(targets),
    )
    costs = Costs(
        flops=time_us * 1e6,
        bytes=moved,
        time_us=time_us,
        share=np.broadcast_to(np.asarray(share, dtype=np.float64), (count,)),
        out_bytes=moved / 2,
        known=np.ones(count, bool),
        gpu="h200",
    )
    return view, costs


def table(rows: int, columns: int, dtype: str = "float32") -> TensorValue:
    """The value of a constant that stands for a weight; nobody may decode it."""

    def load() -> np.ndarray:
        raise AssertionError("an analysis must not decode weights")

    return TensorValue(dtype, (rows, columns), load)


def nodes(view: FlatGraph, *names: str) -> np.ndarray:
    """Node numbers by name."""
    return np.asarray([view.graph.index[name] for name in names], dtype=np.int32)


def by_name(view: FlatGraph, ids: np.ndarray) -> dict[str, int]:
    """The ids under their nodes' names."""
    return dict(zip(view.graph.names, ids.tolist(), strict=True))


def _match(part: str) -> re.Match[str]:
    match = NODE.fullmatch(part.strip())
    assert match, f"not a node: {part.strip()!r}"
    return match


def _attrs(text: str) -> dict[str, Any]:
    attrs: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        if re.fullmatch(r"-?\d+", value):
            attrs[key] = int(value)
        elif value in ("true", "false"):
            attrs[key] = value == "true"
        elif match := re.fullmatch(r"(\d+)x(\d+)", value):
            attrs[key] = table(int(match[1]), int(match[2])) if key == "value" else (int(match[1]), int(match[2]))
        elif value.startswith("loc:@"):
            attrs[key] = tuple(value.split("|"))
        else:
            attrs[key] = value
    return attrs
