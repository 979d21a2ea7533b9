"""Makes the tables of `h200.md` and `kernels.md` from what `gpu_suite.py` wrote.

    python benchmarks/table.py FILE.json[.gz] …             streams: TensorFlow, one stream, several
    python benchmarks/table.py --kernels FILE.json[.gz] …   larger kernels: one stream, streams, fused, grouped
    python benchmarks/table.py --auto FILE.json[.gz] …      the same predicted and measured, and what the rule auto takes (--rules auto)
    python benchmarks/table.py --foreign FILE.json[.gz] …   predicted / measured, what auto takes beside the best row (--rules auto)

Of several runs of a model at a batch the last counts.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

SHOWN = {
    "TensorFlow": "TensorFlow",
    "TensorFlow with XLA": "with XLA",
    "1 stream, eager": "1 stream, eager",
    "1 stream": "1 stream",
    "2 streams": "2",
    "4 streams": "4",
    "8 streams": "8",
    "16 streams": "16 streams",
}
"""Variants of the first table, with their heads."""


def runs(paths: list[str]) -> list[dict[str, Any]]:
    """The runs of all files, one per model and batch."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        raw = Path(path).read_bytes()
        for run in json.loads(gzip.decompress(raw) if path.endswith(".gz") else raw)["runs"]:
            name = Path(run["model"]).stem
            found[name, run["batch"]] = run
    order = list(dict.fromkeys(name.removesuffix(f"_{batch}") for name, batch in found))
    return sorted(found.values(), key=lambda run: (order.index(name_of(run)), run["batch"]))


def variants(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The variants of a run that gave right results, by short label, and by what else was asked for that they stand for."""
    measured = [variant for variant in run["result"]["variants"] if variant["host"] is not None]
    asked = {wish: variant for variant in measured for wish in variant.get("asked", ())}
    return asked | {
        variant["label"].replace("msplit, ", "").replace(", CUDA graph", ""): variant for variant in measured
    }


def micros(variant: dict[str, Any] | None, clock: str = "host") -> float | None:
    """Median of one clock."""
    return None if variant is None or not variant.get(clock) else variant[clock]["median"] * 1e6


def clocks(variant: dict[str, Any] | None) -> str:
    """Every clock of a variant; of one that has the host's only, its spread, too: ± half the distance between the quartiles."""
    times = [micros(variant, clock) for clock in ("host", "launch", "device")]
    if variant and times[1:] == [None, None]:
        return f"{times[0]:.0f} ±{variant['host']['iqr'] * 5e5:.0f}"
    return " / ".join(f"{time:.0f}" for time in times if time is not None) or "-"


def times_faster(slow: float | None, fast: float | None) -> str:
    return f"{slow / fast:.1f}" if slow and fast else "-"


def name_of(run: dict[str, Any]) -> str:
    return Path(run["model"]).stem.removesuffix(f"_{run['batch']}")


def streams_table(found: list[dict[str, Any]]) -> list[list[str]]:
    """What streams alone give."""
    rows = [
        ["model", "batch", *SHOWN.values(), "streams gain", "over TensorFlow", "over XLA"],
    ]
    for run in found:
        own = variants(run)
        plain = {label: variant for label, variant in own.items() if label.endswith("streams")}
        best = min((micros(variant) or 1e99 for variant in plain.values()), default=None)
        device = min((micros(variant, "device") or 1e99 for variant in plain.values()), default=None)
        one = micros(own.get("1 stream"), "device")
        rows.append(
            [
                name_of(run),
                str(run["batch"]),
                *(clocks(own.get(label)) for label in SHOWN),
                f"{one / device:.2f}" if one and device else "-",
                times_faster(micros(own.get("TensorFlow")), best),
                times_faster(micros(own.get("TensorFlow with XLA")), best),
            ]
        )
    return rows


def kernels_table(found: list[dict[str, Any]]) -> list[list[str]]:
    """What larger kernels add."""
    what = [
        "TensorFlow",
        "with XLA",
        "1 stream",
        "streams",
        "fused",
        "fused and grouped",
        "the same, 1 stream",
        "kernels of the fastest",
    ]
    rows = [["model", "batch", *what, "over streams", "over TensorFlow", "over XLA", "share of the fused bound"]]
    for run in found:
        own = variants(run)
        streams = [label for label in own if label.endswith("streams")]
        plain = min(streams, key=lambda label: micros(own[label]) or 1e99, default=None)
        layers = {
            kind: [label for label in own if label.endswith(f", {kind}") and not label.startswith("auto")]
            for kind in ("fused", "fused and grouped", "grouped")
        }
        many = {kind: next((label for label in labels if "streams" in label), None) for kind, labels in layers.items()}
        one = {
            kind: next((label for label in labels if "streams" not in label), None) for kind, labels in layers.items()
        }
        grouped = many["fused and grouped"] or many["grouped"]
        alone = one["fused and grouped"] or one["grouped"] or one["fused"]
        ours = [label for label in own if not label.startswith("TensorFlow") and "eager" not in label]
        best = min(ours, key=lambda label: micros(own[label]) or 1e99)
        before, after = own.get("1 stream", {}).get("facts", {}), own[best]["facts"]
        share = ((run.get("bounds") or {}).get("reached_of_larger_kernels") or {}).get(own[best]["label"])
        rows.append(
            [
                name_of(run),
                str(run["batch"]),
                *(clocks(own.get(label)) for label in ("TensorFlow", "TensorFlow with XLA", "1 stream")),
                *(clocks(own.get(label)) if label else "-" for label in (plain, many["fused"], grouped, alone)),
                f"{before.get('kernels', '-')} → {after.get('kernels', '-')}",
                times_faster(micros(own.get(plain or "")), micros(own[best])),
                times_faster(micros(own.get("TensorFlow")), micros(own[best])),
                times_faster(micros(own.get("TensorFlow with XLA")), micros(own[best])),
                f"{share:.2f}" if share else "-",
            ]
        )
    return rows


def auto_table(found: list[dict[str, Any]]) -> list[list[str]]:
    """Per model each layer's time, predicted / measured by the device's clock, and which of them `auto` takes."""
    names = ["1 stream", "streams", "fused", "fused and grouped"]
    rows = [["model", "batch", *names, "auto takes", "predicted / measured", "fastest measured"]]
    for run in found:
        own = {variant["label"]: variant for variant in run["result"]["variants"] if variant["host"] is not None}
        cells: dict[str, str] = {}
        measured: dict[str, float] = {}
        for layer in run.get("layers", []):
            took = micros(own.get(layer["variant"]), "device")
            name = "streams" if layer["name"].endswith(" streams") else layer["name"]
            said = layer.get("predicted_us")
            cells[name] = f"{said:.0f} / {took:.0f}" if said and took else "-"
            if took:
                measured[layer["variant"]] = took
        note = next((note for note in run.get("notes", []) if note.startswith("auto chooses among kernels")), "-")
        taken = note.removeprefix("auto chooses among kernels, too: ").split(",")[0]
        best = min(measured, key=measured.__getitem__, default="")
        short = best.replace("msplit, ", "").replace(", CUDA graph", "")
        auto = cells.get("auto") or next(
            (cell for name, cell in cells.items() if note.endswith(f"that is {label_of(run, name)}")), "-"
        )
        fastest = f"{measured[best]:.0f}: {short}" if best else "-"
        rows.append([name_of(run), str(run["batch"]), *(cells.get(name, "-") for name in names), taken, auto, fastest])
    return rows


def label_of(run: dict[str, Any], name: str) -> str:
    """The variant that shows a layer."""
    for layer in run.get("layers", []):
        if layer["name"] == name or (name == "streams" and layer["name"].endswith(" streams")):
            return str(layer["variant"])
    return "no variant"


def foreign_table(found: list[dict[str, Any]]) -> list[list[str]]:
    """Predicted with static costs / measured, µs by the device's clock; what `auto` takes, and the best row."""
    rows = [["model", "batch", "TensorFlow", "1 stream", "streams", "fused", "fused and grouped", "bound reached", "auto takes", "µs",
             "over the best", "memory", "over TensorFlow"]]  # fmt: skip
    for run in found:
        known = variants(run)
        predicted = {layer["variant"]: layer["predicted_us"] for layer in run["layers"]}
        shown = {name: variant for name, variant in known.items() if micros(variant, "device") and "eager" not in name}
        best = min(micros(variant, "device") or 0.0 for variant in shown.values())
        auto = next((variant for name, variant in known.items() if name == "auto" or name.startswith("auto: ")), None)
        layers = [auto_layer(known, kind) for kind in ("1 stream", "streams", "fused", "fused and grouped")]
        cells = []
        for variant in layers:
            said = None if variant is None else predicted.get(variant["label"])
            took = micros(variant, "device")
            cells.append(
                "-" if took is None else f"{'-' if said is None else f'{said:.0f}'} / {took:.0f} ({variant['streams']})"
            )
        reached = [
            share for name, share in (run["bounds"] or {}).get("reached", {}).items() if share and "eager" not in name
        ]
        tensorflow, host = micros(known.get("TensorFlow")), micros(auto)
        took = micros(auto, "device")
        facts = (layers[1] or {}).get("facts", {})
        memory = facts.get("peak_bytes", 0) / max(facts.get("peak_bytes_one_stream", 0), 1)
        rows.append(
            [
                name_of(run),
                str(run["batch"]),
                "-" if tensorflow is None else f"{tensorflow:.0f}",
                *cells,
                f"{max(reached):.2f}" if reached else "-",
                "-"
                if auto is None
                else auto["label"].replace("msplit, ", "").replace(", CUDA graph", "").replace("auto: ", ""),
                "-" if took is None else f"{took:.0f}",
                "-" if took is None else f"{took / best:.2f}",
                f"{memory:.1f}" if memory else "-",
                "-" if tensorflow is None or host is None else f"{tensorflow / host:.1f}",
            ]
        )
    return rows


def auto_layer(known: dict[str, dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The variant of a layer, on the most streams."""
    if kind == "1 stream":
        return known.get("1 stream")
    return known.get("16 streams" if kind == "streams" else f"16 streams, {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--kernels", dest="table", action="store_const", const=kernels_table, default=streams_table)
    parser.add_argument("--auto", dest="table", action="store_const", const=auto_table)
    parser.add_argument("--foreign", dest="table", action="store_const", const=foreign_table)
    arguments = parser.parse_args()
    head, *rows = arguments.table(runs(arguments.files))
    print("| " + " | ".join(head) + " |")
    print("| --- " + "| ---: " * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
