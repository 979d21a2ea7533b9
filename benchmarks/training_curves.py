"""Loss curves: does msplit learn what TensorFlow learns? 1,000 steps from several seeds, in IEEE precision and in TF32.

    python benchmarks/training_curves.py GRAPHS --out OUT [--models mmoe,deepfm] [--steps 1000] [--seeds 4]

A seed gives the values to begin with and the data, to TensorFlow (in IEEE precision) and to msplit alike. Where TensorFlow is not, its
losses are read from `--tensorflow FILE`, a curves.json of a machine that has it. Writes OUT/curves.json and OUT/training_curves.svg, and
prints a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import training_models
from training import MODES, ours, sees
from training_models import MODELS, Training, file_name

from msplit import api
from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.verify.results import Variant

WINDOW = 50
"""Steps that are averaged: the loss of one batch tells more of the batch than of the model."""

REFERENCE = "TensorFlow"
ARMS = {"TensorFlow": "#888888", "msplit, IEEE": "#1f77b4", "msplit, TF32": "#d62728"}
WIDTH, HEIGHT, LEFT, BELOW = 460, 300, 46, 34

Losses = dict[str, list[list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("training-results"))
    parser.add_argument("--models", default="mmoe,deepfm")
    parser.add_argument("--batch", type=int, help="in place of each model's own")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", default="16")
    parser.add_argument("--without", default="", help="what to leave out: tensorflow, msplit")
    parser.add_argument("--tensorflow", type=Path, help="TensorFlow's losses of another machine")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(arguments.tensorflow.read_text()) if arguments.tensorflow else {}
    found: dict[str, Losses] = {}
    for name in arguments.models.split(","):
        found[name] = {REFERENCE: known[name][REFERENCE]} if name in known else {}
        for label, variant, training in arms(arguments, name):
            if label not in found[name]:
                batch = arguments.batch or MODELS[name].batch
                print(f"--- {name}, {label}", flush=True)
                found[name][label] = [
                    losses(variant, training, batch, arguments.steps, seed) for seed in range(arguments.seeds)
                ]
        (arguments.out / "curves.json").write_text(json.dumps(found))
    (arguments.out / "training_curves.svg").write_text(picture(found))
    print(table(found))


def arms(arguments: argparse.Namespace, name: str) -> list[tuple[str, Variant, Training]]:
    """What is compared, and how each begins."""
    key = file_name(name)
    training = training_models.read(arguments.graphs / f"{key}.json")
    flat = api.load(arguments.graphs / f"{key}.meta", outputs=list(training_models.FETCHES))
    feeds = training.feeds(arguments.batch or MODELS[name].batch)
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, precision=Precision.IEEE, state=training.state())
    found = []
    if "tensorflow" not in arguments.without and sees(arguments.device):
        found.append((REFERENCE, Variant(REFERENCE, TENSORFLOW, job), training))
    if "msplit" not in arguments.without:
        own = replace(job, options=EngineOptions(arguments.device))
        every = ours(arguments, own, len(feeds[training_models.LABEL]))
        most = next(one for one in every if one.label.endswith(f"streams, {MODES[-1]}"))
        for label, ieee in (("msplit, IEEE", True), ("msplit, TF32", False)):
            found.append(
                (
                    label,
                    replace(most, job=replace(most.job, precision=Precision.IEEE if ieee else Precision.TF32)),
                    training,
                )
            )
    return found


def losses(variant: Variant, training: Training, batch: int, steps: int, seed: int) -> list[float]:
    """The loss of every step."""
    running: Any = variant.engine.build(variant.job)
    try:
        running.load_state(training.state(seed))
        return [
            round(float(running.step(training.feeds(batch, (seed + 1) * 1_000_000 + step))["loss"]), 5)
            for step in range(steps)
        ]
    finally:
        running.close()


def smooth(curves: Sequence[Sequence[float]]) -> np.ndarray:
    """Of each curve the mean of the last steps, [seeds, steps]."""
    window = min(WINDOW, len(curves[0]))
    sums = np.cumsum(np.pad(np.asarray(curves, np.float64), ((0, 0), (1, 0))), axis=1)
    return (sums[:, window:] - sums[:, :-window]) / window


def table(found: dict[str, Losses]) -> str:
    """The last losses, how far msplit's curve is from TensorFlow's at most, and in a last line what that comes to."""
    lines = [
        "| model | arm | first loss | last loss, mean over seeds (least to most) | most from TensorFlow's, same seed | share of spread |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    said = []
    for name, arms in found.items():
        theirs = smooth(arms[REFERENCE]) if REFERENCE in arms else None
        for label, curves in arms.items():
            mine = smooth(curves)
            last = mine[:, -1]
            apart = share = "-"
            if theirs is not None and label != REFERENCE and theirs.shape == mine.shape:
                wide = np.maximum(theirs.max(0) - theirs.min(0), 1e-6)
                apart = f"{float(np.abs(mine - theirs).max()):.5f}"
                share = f"{float((np.abs(mine.mean(0) - theirs.mean(0)) / wide).max()):.3f}"
                said.append(f"{name}, {label}: {share}")
            span = f"{last.mean():.4f} ({last.min():.4f} to {last.max():.4f})"
            lines.append(f"| {name} | {label} | {mine[:, 0].mean():.4f} | {span} | {apart} | {share} |")
    lines.append(
        f"\nMeans apart, share of TensorFlow's spread over seeds, of which 1 is allowed: {'; '.join(said) or 'nothing to compare'}"
    )
    return "\n".join(lines)


def picture(found: dict[str, Losses]) -> str:
    """Curves as SVG, a panel per model: TensorFlow's range over seeds as a band, means as lines."""
    panels = [panel(name, arms, number * WIDTH) for number, (name, arms) in enumerate(found.items())]
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect {size} fill="white"/>\n{"".join(panels)}</svg>\n'
    )


def panel(name: str, arms: Losses, left: float) -> str:
    """The curves of one model."""
    curves = {label: smooth(one) for label, one in arms.items()}
    steps = next(iter(curves.values())).shape[1]
    low, high = min(one.min() for one in curves.values()), max(one.max() for one in curves.values())
    shown = np.unique(np.linspace(0, steps - 1, min(steps, 200)).astype(int))

    def points(values: np.ndarray) -> list[str]:
        x = left + LEFT + shown / max(steps - 1, 1) * (WIDTH - LEFT - 16)
        y = 24 + (high - values[shown]) / max(high - low, 1e-9) * (HEIGHT - 24 - BELOW)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)]

    parts = [f'<text x="{left + LEFT}" y="14" font-weight="bold">{name}: loss over steps</text>\n']
    if REFERENCE in curves:
        theirs = curves[REFERENCE]
        band = " ".join(points(theirs.max(0)) + points(theirs.min(0))[::-1])
        parts.append(f'<polygon points="{band}" fill="#dddddd"/>\n')
    for number, (label, one) in enumerate(curves.items()):
        dashed = "" if label == REFERENCE else f' stroke-dasharray="{4 + 4 * number} 4"'
        line = " ".join(points(one.mean(0)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{ARMS[label]}" stroke-width="1.6"{dashed}/>\n')
        parts.append(f'<text x="{left + WIDTH - 130}" y="{40 + 15 * number}" fill="{ARMS[label]}">{label}</text>\n')
    for share in (0.0, 0.5, 1.0):
        y = 24 + share * (HEIGHT - 24 - BELOW)
        parts.append(f'<text x="{left + 4}" y="{y + 4:.0f}">{high - share * (high - low):.3f}</text>\n')
        x = left + LEFT + share * (WIDTH - LEFT - 16)
        number = round(share * (steps - 1)) + min(WINDOW, steps)
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{number}</text>\n')
    return "".join(parts)


if __name__ == "__main__":
    main()
