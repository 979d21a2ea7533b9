"""Processor time of what the host runs of models that are fed strings: msplit's beside TensorFlow's session, for several numbers of rows.

    python hatch_build.py && PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/strings.py

Each is given a turn of at least 0.2 s of processor time (user and system, all threads), by turns; the median of nine turns is told, the
least and the most behind it.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import msplit
from msplit.engines.cuda.frontend.functionalize import raise_control
from msplit.engines.cuda.frontend.partition import divide
from msplit.engines.cuda.runtime.host_stage import HostOptions, HostStage, stage_of
from msplit.engines.host import hashing
from msplit.shapes import infer
from tests.string_models import MODELS, strings

ROWS = (1, 200, 1000)
TURNS, TURN_S = 9, 0.2


def eight_strings(path: Path) -> dict[str, np.ndarray]:
    """A two-tower with eight string features: four vocabularies of 100,000 words, four hashes."""
    import keras
    from keras import layers

    words = [f"word_{number}" for number in range(100_000)]
    inputs = [keras.Input((), dtype="string", name=f"feature_{number}") for number in range(8)]
    ids = [layers.StringLookup(vocabulary=words)(one) for one in inputs[:4]]
    ids += [layers.Hashing(100_000)(one) for one in inputs[4:]]
    rows = [layers.Embedding(100_001, 4)(one) for one in ids]
    towers = [layers.Dense(8)(layers.Concatenate()(half)) for half in (rows[::2], rows[1::2])]
    keras.Model(inputs, layers.Dot(1)(towers)).export(str(path), verbose=False)
    rng = np.random.default_rng(0)
    return {
        f"feature_{number}": strings(*(f"word_{rng.integers(110_000)}".encode() for _ in range(64)))
        for number in range(8)
    }


def both_of(path: Path) -> HostStage:
    """What runs in front, both ways."""
    whole = msplit.load(path)
    raised = raise_control(whole)
    partition = divide(raised, functools.cache(lambda: infer(whole)))
    names = raised.flat.graph.names
    wanted = {f"{names[node]}:{port}": (node, port) for node, port in partition.frontier}
    found = stage_of(whole, wanted, HostOptions(), raised.origin, freezes=True)
    assert found is not None
    assert found.program is not None, found.missing
    assert found.session is not None
    return found


def spent(step: Callable[[], object]) -> float:
    """Seconds of processor time of a step."""
    count, begin = 0, sum(os.times()[:2])
    while (seconds := sum(os.times()[:2]) - begin) < TURN_S:
        for _ in range(10):
            step()
        count += 10
    return seconds / count


def told(seconds: list[float]) -> str:
    """Median, least and most in microseconds."""
    return "{:,.0f} ({:,.0f} to {:,.0f})".format(*(of(seconds) * 1e6 for of in (statistics.median, min, max)))


def main() -> None:
    print(f"compiled: {hashing.native() is not None}")
    print("| model | rows | TensorFlow µs | msplit µs | ratio |\n| --- | ---: | ---: | ---: | ---: |")
    chosen = sys.argv[1:]
    for name, make in {"eight_strings": eight_strings, **MODELS}.items():
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            feeds = make(Path(folder) / "model")
            stage = both_of(Path(folder) / "model")
            for rows in ROWS:
                few = {key: np.resize(value, (rows, *value.shape[1:])) for key, value in feeds.items()}
                theirs, ours = [], []
                for _ in range(TURNS):
                    theirs.append(spent(functools.partial(stage.session.step, few)))
                    ours.append(spent(functools.partial(stage.program.step, few)))
                ratio = statistics.median(ours) / statistics.median(theirs)
                print(f"| {name} | {rows:,} | {told(theirs)} | {told(ours)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
