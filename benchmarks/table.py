"""Makes the table of `h200.md` from what `gpu_suite.py` wrote: python benchmarks/table.py FILE.json[.gz] …"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any


def runs(paths: list[str]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        raw = Path(path).read_bytes()
        for run in json.loads(gzip.decompress(raw) if path.endswith(".gz") else raw)["runs"]:
            name = Path(run["model"]).stem
            found.setdefault((name, run["batch"]), run)
    return list(found.values())


def row(run: dict[str, Any]) -> list[str]:
    cells: dict[str, str] = {}
    host: dict[str, float] = {}
    device: dict[str, float] = {}
    for variant in run["result"]["variants"]:
        label = variant["label"].replace("msplit, ", "").replace(", CUDA graph", "")
        if variant["host"] is None:
            cells[label] = "-"
            continue
        host[label] = variant["host"]["median"] * 1e6
        clocks = [variant[clock]["median"] * 1e6 for clock in ("host", "launch", "device") if variant.get(clock)]
        if variant["device"]:
            device[label] = variant["device"]["median"] * 1e6
        cells[label] = " / ".join(f"{value:.0f}" for value in clocks)
    streams = {label: value for label, value in host.items() if label.endswith("streams")}
    best = min(streams, key=streams.__getitem__)
    over = lambda label: f"{host[label] / host[best]:.1f}" if label in host else "-"  # noqa: E731
    name = Path(run["model"]).stem.removesuffix(f"_{run['batch']}")
    order = [
        "TensorFlow",
        "TensorFlow with XLA",
        "1 stream, eager",
        "1 stream",
        "2 streams",
        "4 streams",
        "8 streams",
        "16 streams",
    ]
    gain = device["1 stream"] / min(device[label] for label in streams)
    return [
        name,
        str(run["batch"]),
        *(cells.get(label, "-") for label in order),
        f"{gain:.2f}",
        over("TensorFlow"),
        over("TensorFlow with XLA"),
    ]


def main() -> None:
    heads = ["model", "batch", "TensorFlow", "with XLA", "1 stream, eager", "1 stream", "2", "4", "8", "16 streams"]
    heads += ["streams gain", "over TensorFlow", "over XLA"]
    print("| " + " | ".join(heads) + " |")
    print("| --- " + "| ---: " * (len(heads) - 1) + "|")
    for run in runs(sys.argv[1:]):
        print("| " + " | ".join(row(run)) + " |")


if __name__ == "__main__":
    main()
