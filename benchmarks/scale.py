"""Time and memory over the size of the graph, beside TensorFlow's own import of the same file.

python benchmarks/scale.py FOLDER                        all sizes; writes the graphs and scale.json into FOLDER and prints the table
python benchmarks/scale.py FOLDER --sizes 10000,30000    only these numbers of nodes
python benchmarks/scale.py FOLDER --table                prints the table of FOLDER/scale.json again

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

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
RULES = {"recommender": "recsys", "vision": "vision"}
PARTS = ("rules", "auto", "check", "tensorflow")
FLOAT, INT = 1, 3


class Nodes:
    """Adds nodes to a GraphDef."""

    def __init__(self) -> None:
        from msplit import proto

        self.graph_def = proto.graph_pb2.GraphDef()
        self.graph_def.versions.producer = 1882

    def __len__(self) -> int:
        return len(self.graph_def.node)

    def add(self, name: str, op: str, *inputs: str, **types: int) -> Any:
        node = self.graph_def.node.add(name=name, op=op, input=inputs)
        for key, value in types.items():
            node.attr[key].type = value
        return node

    def const(self, name: str, shape: tuple[int, ...], value: float = 0.01) -> str:
        """A float constant whose elements are all equal."""
        node = self.add(name, "Const", dtype=FLOAT)
        tensor = node.attr["value"].tensor
        tensor.dtype = FLOAT
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)
        tensor.float_val.append(value)
        return name

    def number(self, name: str, value: int) -> str:
        node = self.add(name, "Const", dtype=INT)
        node.attr["value"].tensor.dtype = INT
        node.attr["value"].tensor.tensor_shape.SetInParent()
        node.attr["value"].tensor.int_val.append(value)
        return name

    def placeholder(self, name: str, dtype: int, *shape: int) -> str:
        node = self.add(name, "Placeholder", dtype=dtype)
        node.attr["shape"].shape.SetInParent()
        for size in shape:
            node.attr["shape"].shape.dim.add(size=size)
        return name

    def dense(self, name: str, source: str, width: int, units: int) -> str:
        weights = self.const(f"{name}/kernel", (width, units))
        product = self.add(f"{name}/MatMul", "MatMul", source, weights, T=FLOAT).name
        bias = self.const(f"{name}/bias", (units,))
        self.add(f"{name}/BiasAdd", "BiasAdd", product, bias, T=FLOAT)
        self.add(f"{name}/Relu", "Relu", f"{name}/BiasAdd", T=FLOAT)
        return f"{name}/Relu"

    def concat(self, name: str, parts: list[str], axis: int) -> str:
        place = self.number(f"{name}/axis", axis)
        node = self.add(name, "ConcatV2", *parts, place, T=FLOAT, Tidx=INT)
        node.attr["N"].i = len(parts)
        return name


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


MAKERS: dict[str, Callable[[int], Any]] = {"recommender": recommender, "vision": vision}


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
        step("check", lambda: checks.check(flat, checks.Settings(streams=4)))
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
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(MAKERS))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="processes of a row")
    parser.add_argument("--append", action="store_true", help="keep the rows that are there")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--step", nargs=3, metavar=("KIND", "WHAT", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        kind, what, model = options.step
        print(json.dumps(steps(kind, what, Path(model))))
        return 0
    path = options.folder / "scale.json"
    if not options.table:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {"machine": _machine(), "commit": commit.stdout.strip(), "rows": []}
        if options.append and path.exists():
            record["rows"] = json.loads(path.read_text())["rows"]
        for kind in options.kinds:
            for size in options.sizes:
                record["rows"].append(measure(options.folder, kind, size, options.parts))
                path.write_text(json.dumps(record, indent=1))
    record = json.loads(path.read_text())
    print(table(record))
    print(f"\nMachine: {record['machine']}. Commit {record['commit']}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
