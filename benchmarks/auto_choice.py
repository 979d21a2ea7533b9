"""What the rule `auto` takes now, of all kernels on up to 8 streams, beside what was measured in an earlier run with `--rules auto`.

    python benchmarks/auto_choice.py GRAPHS benchmarks/h200/auto.json.gz

needs no GPU, but PyTorch: kernels are those of its CPU build, without what only a GPU's contests would choose. GRAPHS is made by
`benchmarks/models.py`. Times are µs by the device's clock, predicted now / measured then; streams then were those that `auto` took then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
import table

from msplit import api
from msplit.analysis.colocation import groups
from msplit.decide.kernels import job_of
from msplit.engines.cuda.search.kernel_modes import Ways, ways

LAYERS = {"1 stream": "plain", "streams": "plain", "fused": "fused", "fused and grouped": "fused and grouped"}
"""Layer of the report -> way to make kernels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    arguments = parser.parse_args()
    rows = [["model", "batch", *LAYERS, "auto takes", "predicted"]]
    for run in table.runs([str(arguments.file)]):
        found = simulated(arguments.graphs, table.name_of(run), int(run["batch"]), arguments.streams)
        rows.append(row(run, found))
    print("| " + " | ".join(rows[0]) + " |")
    print("| --- " + "| ---: " * (len(rows[0]) - 1) + "|")
    for cells in rows[1:]:
        print("| " + " | ".join(cells) + " |")


def simulated(graphs: Path, name: str, batch: int, streams: int) -> Ways:
    """Every way to make the kernels of a model, each on its best streams, with static costs."""
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), name, batch))
    found = ways(
        job_of(flat, api.price(flat, batch=batch)[1], batch=batch), groups(flat, handles=False).of, streams=streams
    )
    assert found is not None
    return found


def row(run: dict[str, Any], found: Ways) -> list[str]:
    """One model."""
    own = {variant["label"]: variant for variant in run["result"]["variants"] if variant["host"] is not None}
    cells = [table.name_of(run), str(run["batch"])]
    for layer, kernels in LAYERS.items():
        took = table.micros(own.get(table.label_of(run, layer)), "device")
        way = found.ways.get(kernels) or (found.ways.get("grouped") if kernels.endswith("grouped") else None)
        if way is None or not took:
            cells.append("-" if not took else f"- / {took:.0f}")
            continue
        said = way.one.makespan_us if layer == "1 stream" else way.best.makespan_us
        cells.append(f"{said:.0f} / {took:.0f}")
    taken = found.favourite
    where = f"on {taken.best.streams} stream{'s' * (taken.best.streams != 1)}"
    return [*cells, f"{taken.arm.name} ones {where}", f"{taken.best.makespan_us:.0f}"]


if __name__ == "__main__":
    main()
