"""Fits the constants of static costs to measured kernels and steps, and tells how far they are off where they were not fitted.

    python benchmarks/fit_costs.py GRAPHS FILE.json.gz … [--table]

needs no GPU: FILE is what `benchmarks/cost_model.py` measured (profiles of kernels alone, steps on one stream). GRAPHS is made by
`benchmarks/models.py`. Models of `foreign` are fitted by halves of their families: what one half says is tried on the other, both ways.
`--table` only prints what the constants as they are come to.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import foreign
import models

from msplit import api
from msplit.cost import formulas, gpus, profile
from msplit.schedule.machine import Machine

estimate = importlib.import_module("msplit.cost.estimate")

CONSTANTS = (
    "ACCESS", "HALVING", "WINDOW_STEP", "ROW_SETUP", "ROW_STEP", "TILE_SETUP", "TILE_STEP", "JOINING", "GATHERING", "REACHED", "NARROW",
    "COLUMN_STEP", "COLUMN_HALVING", "BROADCAST", "REORDERING",
)  # fmt: skip
PRIOR = 0.7
"""A constant is believed to be within this much of what it was, as a logarithm."""

SPREAD, KIND_SPREAD = 0.1, 0.6
"""Of steps and of kinds of kernels: what is off by so much counts one."""


@dataclass
class Model:
    """What was measured of a model, and what is needed to price it.

    Attributes:
        name: Its name.
        flat, shapes: The model.
        step_us: A step on one stream.
        kinds: Op of a kernel -> (nodes that such kernels cover, with their part; time of all of them alone).
    """

    name: str
    flat: Any
    shapes: Any
    step_us: float
    kinds: dict[str, tuple[list[tuple[int, float]], float]]


def read(graphs: Path, row: dict[str, Any]) -> Model:
    """A model of a file."""
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), row["model"], row["batch"]))
    found = profile.parse(json.dumps(row["profile"]), row["model"])
    shapes, _ = api.price(flat, batch=row["batch"])
    steps = [step for step in found.steps if step.kernel >= 0]
    parts: dict[str, int] = defaultdict(int)
    for step in steps:
        for name in step.nodes:
            parts[name] += 1
    nodes: dict[str, list[tuple[int, float]]] = defaultdict(list)
    times: dict[str, float] = defaultdict(float)
    for step in steps:
        kernel = found.kernels[step.kernel]
        nodes[kernel.op] += [(flat.graph.index[name], 1 / parts[name]) for name in step.nodes]
        times[kernel.op] += kernel.time_us
    step_us = next(one["measured_us"] for one in row["tried"] if one["streams"] == 1)
    return Model(row["model"], flat, shapes, step_us, {op: (nodes[op], times[op]) for op in times})


def use(values: dict[str, float]) -> None:
    """Makes the constants what they are said to be."""
    for name, value in values.items():
        for module in (gpus, formulas, estimate):
            if hasattr(module, name):
                setattr(module, name, value)


def predicted(model: Model) -> Any:
    """Static costs."""
    return estimate.estimate(model.flat, model.shapes)


def residuals(model: Model) -> np.ndarray[Any, Any]:
    """How far steps and kinds of kernels are off, as logarithms, each over its spread."""
    costs = predicted(model)
    whole = sum(time for _, time in model.kinds.values())
    found = [np.log(ratio(model, costs)) / SPREAD]
    for nodes, time in model.kinds.values():
        said = _said(costs, nodes)
        found.append(np.sqrt(time / whole) * np.log(max(said, 0.05 * time) / time) / KIND_SPREAD)
    return np.asarray(found)


def ratio(model: Model, costs: Any) -> float:
    """Predicted over measured step."""
    return float((costs.time_us.sum() + Machine.step_us) / model.step_us)


def _said(costs: Any, nodes: list[tuple[int, float]]) -> float:
    return float(sum(costs.own_us[node] * part for node, part in nodes))


def fit(chosen: list[Model], start: dict[str, float], rounds: int = 4) -> dict[str, float]:
    """Gauss-Newton on the logarithms of the constants, with a prior."""
    begin = np.log([start[name] for name in CONSTANTS])
    at = begin.copy()

    def of(point: Any) -> Any:
        use(dict(zip(CONSTANTS, np.exp(point).tolist(), strict=True)))
        return np.concatenate([*(residuals(model) for model in chosen), (point - begin) / PRIOR])

    for _ in range(rounds):
        base = of(at)
        slopes = np.stack([(of(at + 0.05 * axis) - base) / 0.05 for axis in np.eye(len(at))], axis=1)
        step = np.linalg.lstsq(slopes, -base, rcond=None)[0]
        for scale in (1.0, 0.5, 0.25):
            if np.square(of(at + scale * step)).sum() < np.square(base).sum():
                at = at + scale * step
                break
    return dict(zip(CONSTANTS, np.exp(at).tolist(), strict=True))


def errors(chosen: list[Model]) -> dict[str, float]:
    """Predicted over measured step, per model."""
    return {model.name: ratio(model, predicted(model)) for model in chosen if model.name in foreign.MODELS}


def words(ratios: dict[str, float]) -> str:
    """A line of them."""
    off = np.abs(np.asarray(list(ratios.values())) - 1)
    listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))
    return f"median {np.median(off):.0%}, worst {off.max():.0%}: {listed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    rows = [row for file in arguments.files for row in json.loads(gzip.decompress(file.read_bytes()))["models"]]
    known = [read(arguments.graphs, row) for row in rows]
    print("as they are:", words(errors(known)))
    if arguments.table:
        return
    start = {name: float(getattr(gpus, name)) for name in CONSTANTS}
    ours = [model for model in known if model.name not in foreign.MODELS]
    tested: dict[str, float] = {}
    for half in (0, 1):
        inside = [model for model in known if model.name in foreign.MODELS and foreign.MODELS[model.name].half == half]
        outside = [model for model in known if model.name in foreign.MODELS and foreign.MODELS[model.name].half != half]
        found = fit([*ours, *inside], start)
        tested |= errors(outside)
        print(f"fitted to half {half}:", words(errors(inside)))
        print("  the other half:", words(errors(outside)))
        print("  " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
    print("not fitted to, both ways:", words(tested))
    found = fit(known, start)
    print("fitted to all:", words(errors(known)))
    for model in ours:
        print(f"  {model.name} {ratio(model, predicted(model)):.2f}")
    print("\n".join(f"{name} = {value:.3g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
