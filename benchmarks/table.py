"""Makes tables of what `visit.py` wrote, and the page of results of the raw data that are in this folder.

    python benchmarks/table.py --write                        benchmarks/README.md, and the small table in the README above it
    python benchmarks/table.py streams FILE.json[.gz] …       TensorFlow, one stream, several
    python benchmarks/table.py kernels FILE.json[.gz] …       larger kernels: one stream, streams, fused, grouped
    python benchmarks/table.py auto FILE.json[.gz] …          the same predicted and measured, and what the rule auto takes (--rules auto)
    python benchmarks/table.py foreign FILE.json[.gz] …       predicted / measured, what auto takes beside the best row (--rules auto)
    python benchmarks/table.py precision FILE.json[.gz] …     half precision beside float32, and how far its outputs are from it
    python benchmarks/table.py schedulers FILE.json[.gz] …    ways to choose streams, side by side, and what tuning did

Of several runs of a model at a batch the last counts. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

HEADLINE = {
    ("mmoe", 128): "MMoE, 16 experts, 128",
    ("lstm", 1): "unrolled LSTM 10 × 100, 1",
    ("inception_v3", 1): "Inception-v3, 1",
    ("squeezenet", 128): "SqueezeNet, 128",
}
"""Models and batches of the README's table, with what they are called there."""

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


def content(path: str | Path) -> dict[str, Any]:
    """What a file of results holds."""
    raw = Path(path).read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(raw) if str(path).endswith(".gz") else raw)
    return found


def runs(paths: list[str] | list[Path]) -> list[dict[str, Any]]:
    """The runs of all files, one per model and batch."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for run in content(path)["runs"]:
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


COLUMNS = ("tensorflow", "torchsched", "opara", "nimble", "longest-first", "ios", "list", "rules", "auto", "tuned")
"""Ways to choose streams."""


def schedules(paths: list[str] | list[Path]) -> list[dict[str, Any]]:
    """What `schedulers.py` measured in all files, one row per model and batch."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for row in content(path)["rows"]:
            found[row["model"], row["batch"]] = row
    order = list(dict.fromkeys(name for name, _ in found))
    return sorted(found.values(), key=lambda row: (order.index(row["model"]), row["batch"]))


def column(row: dict[str, Any], name: str) -> dict[str, Any] | None:
    """What stands in a column of the table: of several widths or grains the fastest."""
    results = {entry["name"]: entry for entry in row["results"]}
    if name in ("list", "rules"):
        of = [entry for label, entry in results.items() if label.startswith(f"{name}-")]
        return max(of, key=lambda entry: entry["gain"], default=None)
    return results.get(row["auto"] if name == "auto" else name)


def gains_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Gain of each way over one stream, and what the tuned plan needs."""
    more = ["tuned, µs", "streams", "waits", "memory", "needed", "bound, µs", "reached"]
    lines = [["model", "batch", "one, µs", *COLUMNS, *more]]
    for row in rows:
        cells = [row["model"], str(row["batch"]), f"{row['one_us']:.0f}"]
        found = {name: column(row, name) for name in COLUMNS}
        top = max(entry["gain"] for entry in found.values() if entry)
        for entry in found.values():
            text = f"{entry['gain']:.2f}" if entry else "-"
            cells.append(f"**{text}**" if entry and entry["gain"] >= top * 0.995 else text)
        own = found["tuned"]
        assert own is not None
        cells += [f"{own['us']:.1f}", str(own["streams"]), str(own["waits"]), f"{own['memory']:.2f}"]
        cells.append(f"{own['needed']:.2f}" if own.get("needed") else "-")
        cells += [f"{row['bounds']['lower_us']:.1f}", f"{row['bounds']['lower_us'] / own['us']:.2f}"]
        lines.append(cells)
    return lines


def details_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Time in µs / streams / waits / memory over one stream's / share of the lower bound that is reached."""
    lines = [["model", "batch", *COLUMNS]]
    for row in rows:
        cells = [row["model"], str(row["batch"])]
        for name in COLUMNS:
            entry = column(row, name)
            if entry is None:
                cells.append("-")
                continue
            reached = row["bounds"]["lower_us"] / entry["us"]
            plan = f"{entry['us']:.0f} / {entry['streams']} / {entry['waits']} / {entry['memory']:.1f}"
            cells.append(f"{plan} / {reached:.2f}")
        lines.append(cells)
    return lines


def tuning_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """What `bench --tune` did."""
    lines = [["model", "batch", "best candidate", "changes tried", "kept", "seconds", "ended because"]]
    for row in rows:
        did = row["tuning"]
        cells = [did["candidate"], did["tried"], len(did["kept"]), f"{did['seconds']:.0f}", did["stopped"]]
        lines.append([row["model"], str(row["batch"]), *map(str, cells)])
    return lines


def schedules_text(paths: list[str] | list[Path]) -> str:
    """All tables of ways to choose streams."""
    rows = schedules(paths)
    skipped: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row["skipped"].items():
            skipped.setdefault(f"{name}: {why}", []).append(f"{row['model']} {row['batch']}")
    return "\n\n".join(
        [
            markdown(gains_table(rows)),
            "Time in µs / streams / waits / memory over one stream's / share of the lower bound that is reached:",
            markdown(details_table(rows)),
            "What tuning did:",
            markdown(tuning_table(rows)),
            "\n".join(f"- Not tried: {what} ({', '.join(where)})." for what, where in skipped.items()),
        ]
    )


def precision_table(paths: list[Path]) -> list[list[str]]:
    """What half precision gains and costs: `gpu_suite.py --precision bf16`, one row per run."""
    heads = ["model", "batch", "in", "TensorFlow", "its mixed precision", "msplit, float32", "half", "times faster"]
    rows = [[*heads, "distance", "of TensorFlow's"]]
    for run in (run for path in paths for run in content(path)["runs"]):
        own = variants(run)
        half = [one for label, one in own.items() if label.endswith(HALVES) and "eager" not in label]
        best = min(half, key=lambda one: micros(one, "device") or micros(one) or 1e99)
        wide = next((one for label, one in own.items() if label.endswith(", float32")), None)
        mixed = own.get("TensorFlow, mixed precision")
        clock = "device" if best.get("device") else "host"
        rows.append(
            [
                name_of(run),
                str(run["batch"]),
                best["label"].rpartition(", ")[2],
                *map(clocks, (own.get("TensorFlow"), mixed, wide, best)),
                times_faster(micros(wide, clock), micros(best, clock)),
                distance(best) or distance(wide, of_half=True) or "-",
                distance(mixed) or "-",
            ]
        )
    return rows


HALVES = (", bf16", ", fp16")


def distance(variant: dict[str, Any] | None, *, of_half: bool = False) -> str:
    """How far outputs are from what they were held against in half precision: a float32 reference or, with `of_half`, a row in it."""
    for check in variant["checks"] if variant is not None else ():
        if check["precision"] in ("bf16", "fp16") and (check["against"].endswith(HALVES) == of_half):
            return f"{max(one['distance'] for one in check['outputs']):.2g}"
    return ""


def by_hand_table(found: dict[str, Any]) -> list[list[str]]:
    """PyTorch's own CUDA graphs of the same models."""
    return [["model", "median µs, by the device's clock"]] + [
        [name, "; ".join(f"{label} {statistics.median(times) * 1e6:.0f}" for label, times in ways.items())]
        for name, ways in found["seconds"].items()
    ]


def headline(found: list[dict[str, Any]]) -> list[list[str]]:
    """The small table of the README."""
    heads = ["model, batch", "TensorFlow", "with XLA", "msplit, 1 stream", "several streams", "and larger kernels"]
    rows = [[*heads, "faster than TensorFlow"]]
    by_name = {(name_of(run), run["batch"]): run for run in found}
    for key, title in HEADLINE.items():
        own = variants(by_name[key])
        plain = {label: own[label] for label in own if label.endswith("streams")}
        larger = [own[label] for label in own if label.endswith((", fused", "grouped"))]
        fastest = min(plain, key=lambda label: micros(plain[label]) or 1e99)
        fused = min((micros(variant) or 1e99 for variant in larger), default=None)
        best = min(filter(None, [micros(plain[fastest]), fused]))
        rows.append(
            [
                title,
                *(short(micros(own.get(label))) for label in ("TensorFlow", "TensorFlow with XLA", "1 stream")),
                f"{short(micros(plain[fastest]))} ({fastest.split()[0]})",
                short(fused),
                times(own["TensorFlow"], best),
            ]
        )
    return rows


def times(slow: dict[str, Any], fast: float) -> str:
    """How many times faster."""
    found = (micros(slow) or 0) / fast
    return f"{found:.0f}x" if found >= 10 else f"{found:.1f}x"


def short(time: float | None) -> str:
    """A time in the unit that suits it."""
    if time is None:
        return "-"
    return f"{time:.0f} µs" if time < 10_000 else f"{time / 1000:.3g} ms"


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is its head."""
    head, *body = rows
    rule = "| --- " + "| ---: " * (len(head) - 1) + "|"
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in body)])


def page() -> str:
    """`benchmarks/README.md`: `results.md` with a table in place of each line ``<!-- table: KIND FILE … -->``."""

    def made(match: re.Match[str]) -> str:
        kind, *files = match[1].split()
        return KINDS[kind]([HERE / file for file in files])

    text = (HERE / "results.md").read_text("utf-8")
    return re.sub(r"^<!-- table: (.*?) -->$", made, text, flags=re.MULTILINE)


def readme(text: str) -> str:
    """The README with the table made anew."""
    made = markdown(headline(runs([HERE / "h200" / "suite.json.gz"])))
    between = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- /results -->)", re.DOTALL)
    return between.sub(lambda _: made + "\n", text)


KINDS = {
    "streams": lambda paths: markdown(streams_table(runs(paths))),
    "kernels": lambda paths: markdown(kernels_table(runs(paths))),
    "auto": lambda paths: markdown(auto_table(runs(paths))),
    "foreign": lambda paths: markdown(foreign_table(runs(paths))),
    "schedulers": schedules_text,
    "precision": lambda paths: markdown(precision_table([Path(path) for path in paths])),
    "by_hand": lambda paths: markdown(by_hand_table(content(paths[0]))),
}
"""The tables by name, each of files."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=list(KINDS))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--write", action="store_true", help="the page of results and the README's table")
    arguments = parser.parse_args()
    if arguments.write:
        (HERE / "README.md").write_text(page(), "utf-8")
        target = HERE.parent / "README.md"
        target.write_text(readme(target.read_text("utf-8")), "utf-8")
    elif arguments.kind and arguments.files:
        print(KINDS[arguments.kind](arguments.files))
    else:
        parser.error("--write, or a table and files")


if __name__ == "__main__":
    main()
