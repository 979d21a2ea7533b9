"""Time and memory over the size of the graph, beside TensorFlow's own import of the same file.

python benchmarks/scale.py FOLDER                        all sizes; writes the graphs and scale.json into FOLDER and prints the table
python benchmarks/scale.py FOLDER --sizes 10000,30000    only these numbers of nodes
python benchmarks/scale.py FOLDER --table                prints the table of FOLDER/scale.json again
python benchmarks/scale.py FOLDER --shapes --sizes 25000,100000    the commands on shapes that ask most of them (shapes.py)

Every row is made by fresh processes: one that loads, analyzes, assigns by rules and saves; one that assigns with `auto`; one that checks
what was saved; one in which TensorFlow imports the file. Times are processor times (user and system) of these steps and, in brackets,
wall times; memory is the process's peak, imports included. The graphs are generated: their weights say that all values are equal, which
takes no space in the file, so that what is measured is the graph.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapes import FLOAT, INT, SHAPES, Nodes

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
RULES = {"recommender": "recsys", "vision": "vision"}
PARTS = ("rules", "auto", "check", "tensorflow")


def recommender(count: int) -> Any:
    """Embedding columns in groups of 50, each group with a tower of two layers, all joined at the end."""
    nodes, towers = Nodes(), []
    while len(nodes) < count - 20:
        group = f"group_{len(towers)}"
        columns = []
        for number in range(min(50, max(1, (count - 20 - len(nodes)) // 9))):
            name = f"{group}/column_{number}"
            table = nodes.const(f"{name}/table", (1000, 16))
            ids = nodes.placeholder(f"{name}/ids", INT, -1)
            axis = nodes.number(f"{name}/axis", 0)
            rows = nodes.add(f"{name}/lookup", "GatherV2", table, ids, axis, Tparams=FLOAT, Tindices=INT, Taxis=INT)
            scaled = nodes.add(f"{name}/scaled", "Mul", rows.name, nodes.const(f"{name}/scale", (16,)), T=FLOAT)
            moved = nodes.add(f"{name}/moved", "AddV2", scaled.name, nodes.const(f"{name}/offset", (16,)), T=FLOAT)
            columns.append(nodes.add(f"{name}/Relu", "Relu", moved.name, T=FLOAT).name)
        joined = nodes.concat(f"{group}/concat", columns, 1)
        towers.append(
            nodes.dense(f"{group}/dense_1", nodes.dense(f"{group}/dense_0", joined, 16 * len(columns), 64), 64, 8)
        )
    nodes.dense("head", nodes.concat("towers", towers, 1), 8 * len(towers), 1)
    return nodes.graph_def


def vision(count: int) -> Any:
    """Inception blocks of four branches, one after the other."""
    nodes = Nodes()
    source, channels = nodes.placeholder("image", FLOAT, -1, 17, 17, 64), 64

    def convolved(name: str, source: str, width: int, inside: int, outside: int) -> str:
        weights = nodes.const(f"{name}/filter", (width, width, inside, outside))
        node = nodes.add(f"{name}/Conv2D", "Conv2D", source, weights, T=FLOAT)
        node.attr["strides"].list.i.extend([1, 1, 1, 1])
        node.attr["padding"].s = b"SAME"
        parts = [nodes.const(f"{name}/{part}", (outside,), 1.0) for part in ("scale", "offset", "mean", "variance")]
        norm = nodes.add(f"{name}/norm", "FusedBatchNormV3", node.name, *parts, T=FLOAT, U=FLOAT)
        norm.attr["is_training"].b = False
        return str(nodes.add(f"{name}/Relu", "Relu", norm.name, T=FLOAT).name)

    block = 0
    while len(nodes) < count - 60 or not block:
        name = f"block_{block}"
        pooled = nodes.add(f"{name}/branch_3/pool", "AvgPool", source, T=FLOAT)
        pooled.attr["ksize"].list.i.extend([1, 3, 3, 1])
        pooled.attr["strides"].list.i.extend([1, 1, 1, 1])
        pooled.attr["padding"].s = b"SAME"
        one = convolved(f"{name}/branch_0/1x1", source, 1, channels, 16)
        three = convolved(f"{name}/branch_1/3x3", convolved(f"{name}/branch_1/1x1", source, 1, channels, 16), 3, 16, 16)
        five = convolved(f"{name}/branch_2/1x1", source, 1, channels, 16)
        five = convolved(f"{name}/branch_2/b", convolved(f"{name}/branch_2/a", five, 3, 16, 16), 3, 16, 16)
        last = convolved(f"{name}/branch_3/1x1", pooled.name, 1, channels, 16)
        source = nodes.concat(f"{name}/concat", [one, three, five, last], 3)
        block += 1
    nodes.add("output", "Identity", source, T=FLOAT)
    return nodes.graph_def


MODELS: dict[str, Callable[[int], Any]] = {"recommender": recommender, "vision": vision}
MAKERS = MODELS | SHAPES

COMMANDS: dict[str, tuple[str, ...]] = {
    "analyze": ("analyze", "MODEL"),
    "assign": ("assign", "MODEL", "--rules", "default", "-o", "OUT", "--force"),
    "auto": ("assign", "MODEL", "--rules", "auto", "--dry-run"),
    "check": ("check", "OUT", "--rules", "default"),
    "report": ("report", "OUT", "-o", "OUT.html", "--force"),
    "diff": ("diff", "MODEL", "OUT"),
}
"""What `--shapes` runs, in this order, each in a process of its own."""

LIMIT = 60
"""Seconds of processor time after which such a command is ended."""


def steps(kind: str, what: str, model: Path) -> dict[str, Any]:
    """What one fresh process does: times of its steps in seconds, and its peak memory in MB after each."""
    found: dict[str, Any] = {}

    def step(name: str, run: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        result = run()
        found[name] = [time.process_time() - cpu, time.perf_counter() - wall, _peak_mb()]
        return result

    if what == "tensorflow":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import tensorflow as tf

        def imported() -> None:
            graph_def = tf.compat.v1.GraphDef()
            graph_def.ParseFromString(model.read_bytes())
            with tf.Graph().as_default():
                tf.import_graph_def(graph_def, name="")

        step("tensorflow", imported)
        return found
    from msplit import api, checks, rules

    out = model.with_suffix(".out.pb")
    if what == "check":
        flat = step("load", lambda: api.load(out))
        step("check", lambda: checks.check(flat, checks.CheckSettings(streams=4)))
        return found
    flat = step("load", lambda: api.load(model))
    found["nodes"] = len(flat)
    if what == "auto":
        step("auto", lambda: api.assign(flat, "auto"))
        return found
    found_out = step("analyze", lambda: api.analyze(flat))
    ruleset = rules.load(RULES[kind], streams=4)
    assigned = step("assign", lambda: api.assign(flat, ruleset, priced=(found_out.shapes, found_out.costs)))
    step("save", lambda: api.save(flat, assigned.ids, out, costs=assigned.costs, force=True))
    return found


def _peak_mb() -> float:
    """The most memory that this process held so far. `getrusage` would count what its parent held when it began."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path, kind: str, size: int, parts: list[str]) -> dict[str, Any]:
    """One row of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / f"{kind}_{size}.pb"
    if not model.exists():
        model.write_bytes(MAKERS[kind](size).SerializeToString())
    row: dict[str, Any] = {"kind": kind, "size": size, "bytes": model.stat().st_size}
    for what in parts:
        command = [sys.executable, __file__, str(folder), "--step", kind, what, str(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        row[what] = json.loads(done.stdout)
        print(f"{kind} {size:,} {what}: {done.stdout.strip()}", file=sys.stderr, flush=True)
    model.with_suffix(".out.pb").unlink(missing_ok=True)
    return row


def commands(folder: Path, kind: str, size: int) -> dict[str, Any]:
    """Processor time of each of `COMMANDS` on one shape, start of Python included; None where it took more than `LIMIT`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / f"{kind}_{size}.pb"
    if not model.exists():
        model.write_bytes(MAKERS[kind](size).SerializeToString())
    out = folder / f"{kind}_{size}.out.pb"
    places = {"MODEL": str(model), "OUT": str(out), "OUT.html": f"{out}.html"}
    row: dict[str, Any] = {"kind": kind, "size": size}
    for name, words in COMMANDS.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "msplit", *(places.get(word, word) for word in words)]
        done = subprocess.run(
            ["bash", "-c", f'ulimit -t {LIMIT}; exec "$@"', "bash", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode not in (0, 1) and spent < LIMIT:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        row[name] = spent if done.returncode in (0, 1) else None
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def shapes_table(record: dict[str, Any]) -> str:
    """Per shape and command the seconds at the largest size and, in brackets, growth: how much more per node than at the smallest."""
    rows = {(row["kind"], row["size"]): row for row in record["rows"]}
    small, large = min(size for _, size in rows), max(size for _, size in rows)
    lines = ["| graph | " + " | ".join(COMMANDS) + " |", "| --- " + "| ---: " * len(COMMANDS) + "|"]
    for kind in dict.fromkeys(kind for kind, _ in rows):
        cells = []
        for name in COMMANDS:
            few, many = rows[kind, small][name], rows[kind, large][name]
            grown = "" if few is None or many is None else f" ({many / few / (large / small):.2f})"
            cells.append(f"over {LIMIT}" if many is None else f"{many:.1f}{grown}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""

    def cell(entry: list[float] | None) -> str:
        return f"{entry[0]:.2f} ({entry[1]:.2f})" if entry else "-"

    def peak(entry: list[float] | None) -> str:
        return f"{entry[2]:,.0f}" if entry else "-"

    lines = [
        "| graph | nodes | load | analyze | assign, rules | load + analyze + assign | peak MB | assign, auto | peak MB | check | save "
        "| TensorFlow imports | peak MB |",
        "| --- " + "| ---: " * 12 + "|",
    ]
    for row in record["rows"]:
        made = row.get("rules", {})  # without, what other parts measured is shown
        nodes = made.get("nodes") or next(iter(row[part]["nodes"] for part in PARTS if part in row))
        auto, check, tensorflow = (row.get(name, {}).get(name) for name in ("auto", "check", "tensorflow"))
        whole = [sum(made[name][place] for name in ("load", "analyze", "assign")) for place in (0, 1)] if made else None
        lines.append(
            f"| {row['kind']} | {nodes:,} | {cell(made.get('load'))} | {cell(made.get('analyze'))} | {cell(made.get('assign'))} "
            f"| {cell(whole)} "
            f"| {peak(made.get('assign'))} | {cell(auto)} | {peak(auto)} | {cell(check)} | {cell(made.get('save'))} "
            f"| {cell(tensorflow)} | {peak(tensorflow)} |"
        )
    lines += ["", "Growth: processor time and memory of load + analyze + assign per node (µs, KB).", ""]
    lines += [
        "| graph | " + " | ".join(f"{size:,}" for size in dict.fromkeys(row["size"] for row in record["rows"])) + " |"
    ]
    lines += ["| --- " + "| ---: " * len({row["size"] for row in record["rows"]}) + "|"]
    for kind in dict.fromkeys(row["kind"] for row in record["rows"]):
        cells = []
        for row in record["rows"]:
            if row["kind"] == kind and "rules" in row:
                made = row["rules"]
                total = sum(made[name][0] for name in ("load", "analyze", "assign"))
                cells.append(f"{total / made['nodes'] * 1e6:.0f}, {made['assign'][2] / made['nodes'] * 1024:.1f}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=list(SIZES))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=None)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="processes of a row")
    parser.add_argument("--append", action="store_true", help="keep the rows that are there")
    parser.add_argument(
        "--shapes", action="store_true", help="the commands on the shapes of shapes.py, in place of models"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--step", nargs=3, metavar=("KIND", "WHAT", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        kind, what, model = options.step
        print(json.dumps(steps(kind, what, Path(model))))
        return 0
    if options.shapes:
        rows = [commands(options.folder, kind, size) for kind in options.kinds or SHAPES for size in options.sizes]
        print(shapes_table({"rows": rows}))
        print(f"\nMachine: {_machine()}.")
        return 0
    path = options.folder / "scale.json"
    if not options.table:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {"machine": _machine(), "commit": commit.stdout.strip(), "rows": []}
        if options.append and path.exists():
            record["rows"] = json.loads(path.read_text())["rows"]
        for kind in options.kinds or MODELS:
            for size in options.sizes:
                record["rows"].append(measure(options.folder, kind, size, options.parts))
                path.write_text(json.dumps(record, indent=1))
    record = json.loads(path.read_text())
    print(table(record))
    print(f"\nMachine: {record['machine']}. Commit {record['commit']}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
