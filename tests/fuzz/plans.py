"""Plans that are changed: `check --plan` must refuse each that does not order what the graph asks for, and no other.

What is right is asked of an oracle that shares nothing with msplit: small graphs, every path in them, and what ends before what by the
order of the streams and the waits, all in sets. Every other graph calls functions, the same one at several places, which by the rules
would be on several streams: the plan has to be of the ids in the file that was written.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from msplit.cli import main
from msplit.opset import schema
from tests.fuzz.case import Result
from tests.fuzz.damage import damaged

MUTANTS = 8
"""Changed plans of a case."""

RULES = "version: 1\nstreams: 4\nrules:\n  - manual\n"
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    4,
    2**63,
    1.5,
    float("nan"),
    "",
    "n0",
    "gone",
    "\ud800",
    [],
    {},
    [["n0", 0]],
    [[]],
]

Plan = dict[str, Any]


Body = tuple[tuple[int, ...], ...]
"""Per node of a function the nodes of it that it reads; one that reads none reads the argument, and the last one is what it gives."""


@dataclass(frozen=True)
class Planned:
    """A graph that has ids, or gets them by rules.

    Attributes:
        name: Says how to make it again.
        reads: Per node the nodes that it reads; a kernel each, or a call.
        ids: Their streams, where there is no function.
        bodies: The functions.
        calls: Per node the function that it calls; -1 for a kernel.
        changes: What becomes of its plan, by the names of `CHANGES`.
    """

    name: str
    reads: tuple[tuple[int, ...], ...]
    ids: tuple[int, ...]
    bodies: tuple[Body, ...]
    calls: tuple[int, ...]
    changes: tuple[str, ...]

    @property
    def model(self) -> bytes:
        """The GraphDef. Nodes are `n0`, `n1`, …; `x` is what those read that read nothing."""
        graph = schema.graph_pb2.GraphDef()
        given = graph.node.add(name="x", op="Placeholder")
        given.attr["dtype"].type = 1
        for _ in range(2):
            given.attr["shape"].shape.dim.add(size=64)
        for number, reads in enumerate(self.reads):
            if self.calls[number] >= 0:
                graph.node.add(name=f"n{number}", op=f"f{self.calls[number]}", input=[f"n{n}" for n in reads] or ["x"])
                continue
            node = _kernel(graph.node.add(), f"n{number}", [f"n{other}" for other in reads] or ["x"])
            if not self.bodies:
                node.attr["_stream_id"].i = self.ids[number]
        for number, body in enumerate(self.bodies):
            function = graph.library.function.add()
            function.signature.name = f"f{number}"
            function.signature.input_arg.add(name="a", type=1)
            function.signature.output_arg.add(name="y", type=1)
            function.ret["y"] = _output(body, len(body) - 1)
            for place, reads in enumerate(body):
                _kernel(function.node_def.add(), f"b{place}", [_output(body, other) for other in reads] or ["a"])
        return bytes(graph.SerializeToString())

    def kernels(self, written: bytes) -> dict[str, tuple[list[str], int]]:
        """By the names that msplit gives kernels what each reads, and its id in the model that was written."""
        graph = schema.graph_pb2.GraphDef.FromString(written)
        ids = {node.name: node.attr["_stream_id"].i for node in graph.node}
        inside = {
            f.signature.name: {n.name: n.attr["_stream_id"].i for n in f.node_def} for f in graph.library.function
        }
        gives = [
            f"n{number}" if call < 0 else f"n{number}/b{len(self.bodies[call]) - 1}"
            for number, call in enumerate(self.calls)
        ]
        found: dict[str, tuple[list[str], int]] = {}
        for number, (reads, call) in enumerate(zip(self.reads, self.calls, strict=True)):
            given = [gives[other] for other in reads]
            if call < 0:
                found[gives[number]] = given, ids[f"n{number}"]
            for place, own in enumerate(self.bodies[call] if call >= 0 else ()):
                sources = [f"n{number}/b{other}" for other in own] or given
                found[f"n{number}/b{place}"] = sources, inside[f"f{call}"][f"b{place}"]
        return found


def _kernel(node: Any, name: str, inputs: list[str]) -> Any:
    node.name, node.op = name, "AddN" if len(inputs) > 1 else "Relu"
    node.input.extend(inputs)
    node.attr["T"].type = 1
    if len(inputs) > 1:
        node.attr["N"].i = len(inputs)
    return node


def _output(body: Body, place: int) -> str:
    return f"b{place}:{'sum' if len(body[place]) > 1 else 'activations'}:0"


def make(seed: int) -> Planned:
    """A graph of up to sixteen kernels and calls on up to four streams."""
    random = Random(f"plans:{seed}")
    count, streams = random.randint(2, 16), random.randint(1, 4)
    reads = [
        tuple(sorted(random.sample(range(node), min(node, random.choice([0, 1, 1, 2, 3]))))) for node in range(count)
    ]
    ids = [random.randrange(streams) for _ in range(count)]
    ids[0] = 0
    changes = ["as it was", *random.choices(list(CHANGES), k=MUTANTS)]
    calls, bodies = [-1] * count, []
    for number in range(random.randint(1, 2) if seed % 2 else 0):
        body = [tuple(range(place)[: random.choice([0, 1])]) for place in range(random.randint(0, 3))]
        unread = set(range(len(body))).difference(
            *body
        )  # is no part of what the function gives, unless the last one reads it
        bodies.append((*body, tuple(sorted(unread))))
        for node in range(count):
            if random.random() < 0.4 and len(reads[node]) < 2:
                calls[node] = number
    return Planned(f"plans:{seed}", tuple(reads), tuple(ids), tuple(bodies), tuple(calls), tuple(changes))


def run(case: Planned, folder: Path) -> Result:
    """Has the plan written, changes it in each of the ways, and compares what check says with what the oracle does."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model, rules, out, plan = (folder / name for name in ("model", "rules.yaml", "out", "plan.json"))
    model.write_bytes(case.model)
    rules.write_text(RULES)
    result = Result()
    by = ["--rules", "default", "--streams", "4"] if case.bodies else ["--rules", str(rules)]
    code, said = _command(["assign", str(model), *by, "-o", str(out), "--emit", "plan", str(plan)])
    result.codes = (code,)
    if code:
        result.problem = f"assign ended with {code}: {said}"
        return result
    written, kernels = plan.read_bytes(), case.kernels(out.read_bytes())
    for number, change in enumerate(case.changes):
        random = Random(f"{case.name}:{number}")
        content = _changed(change, written, random)
        plan.write_bytes(content)
        code, said = _command(["check", str(out), "--plan", str(plan), "--select", "MS011"])
        result.codes += (code,)
        wrong = oracle(kernels, content)
        problem = ""
        if code not in (0, 1, 2) or "internal error" in said or "Traceback" in said:
            problem = f"check ended with {code}"
        elif number == 0 and wrong:
            problem = f"assign has written a plan in which {wrong}"
        elif code == 0 and wrong:
            problem = f"check takes a plan in which {wrong}"
        elif code != 0 and not wrong and change in ORDERLY:
            problem = f"check ended with {code}, and nothing is wrong"
        if problem and not result.problem:
            result.problem = f"change {number}, {change}: {problem}: {said[-1000:]}\n  plan: {content!r:.3000}"
    return result


def _command(arguments: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(arguments)
    return code, out.getvalue() + err.getvalue()


def oracle(kernels: dict[str, tuple[list[str], int]], content: bytes) -> str:
    """What is wrong with a plan of kernels, of which each is given with what it reads and its id; "" where nothing is."""
    try:
        return _wrong(kernels, json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as problem:
        return f"something can not be read ({type(problem).__name__})"


def _wrong(kernels: dict[str, tuple[list[str], int]], plan: Plan) -> str:
    names = list(kernels)
    order, stream = [name for name, _ in plan["order"]], dict(plan["order"])
    if sorted(order) != sorted(names):
        return "the nodes are not those of the graph, each once"
    if stream != {name: lane for name, (_, lane) in kernels.items()}:
        return "the streams are not the ids of the model"
    named = {*plan["fork"], *plan["join"], *(name for pair in plan["waits"] for name in pair)}
    if not named <= set(names):
        return f"names are of no node: {sorted(named - set(names))}"
    ended: dict[str, set[str]] = {}  # what is over when a node starts
    latest: dict[int, str] = {}
    for name in order:
        ended[name] = set()
        events = [event for waiter, event in plan["waits"] if waiter == name]
        if any(event not in ended or event == name for event in events):
            return f"{name} waits for what is recorded later"
        before = [latest[stream[name]]] if stream[name] in latest else []
        if not before and not events and stream[name] != 0 and name not in plan["fork"]:
            return f"the stream of {name} does not begin with the step"
        for one in (*before, *events):
            ended[name] |= ended[one] | {one}
        latest[stream[name]] = name
    for name, (reads, _) in kernels.items():
        for other in reads:  # and so, one by one, for every path
            if other not in ended[name]:
                return f"{name} does not wait for {other}"
    last = [*plan["join"], *([latest[0]] if 0 in latest else [])]
    if not set(latest.values()) <= {one for name in last for one in (name, *ended[name])}:
        return "the step ends before a stream"
    return ""


def _late(plan: Plan, random: Random) -> None:
    """The first of two nodes that wait for each other is recorded behind the second."""
    if plan["waits"]:
        waiter, event = random.choice(plan["waits"])
        entries = {name: [name, lane] for name, lane in plan["order"]}
        left = [entry for entry in plan["order"] if entry[0] != waiter]
        left.insert(left.index(entries[event]), entries[waiter])
        plan["order"] = left


def _without(key: str) -> Callable[[Plan, Random], None]:
    def change(plan: Plan, random: Random) -> None:
        if plan[key]:
            del plan[key][random.randrange(len(plan[key]))]

    return change


def _turned(plan: Plan, random: Random) -> None:
    """A wait for another event, or the other way round."""
    if plan["waits"]:
        wait = random.choice(plan["waits"])
        wait[:] = wait[::-1] if random.random() < 0.5 else [wait[0], random.choice(plan["order"])[0]]


def _more(plan: Plan, random: Random) -> None:
    plan["waits"].append([random.choice(plan["order"])[0], random.choice(plan["order"])[0]])


def _swapped(plan: Plan, random: Random) -> None:
    """Two nodes change their streams."""
    one, other = random.choice(plan["order"]), random.choice(plan["order"])
    one[1], other[1] = other[1], one[1]


def _renumbered(plan: Plan, random: Random) -> None:
    """The streams have other numbers: it may order all, but the ids of the model are not these."""
    numbers = random.sample(range(plan["streams"]), plan["streams"])
    for entry in plan["order"]:
        entry[1] = numbers[entry[1]]


def _moved(plan: Plan, random: Random) -> None:
    """A node is recorded at another time."""
    entry = plan["order"].pop(random.randrange(len(plan["order"])))
    plan["order"].insert(random.randint(0, len(plan["order"])), entry)


def _unknown(plan: Plan, random: Random) -> None:
    name = random.choice(["gone", "", "n", "x:0", "n0\n", "^n0", "N0"])
    key = random.choice(["order", "waits", "fork", "join"])
    if key in ("fork", "join"):
        plan[key].append(name)
    elif plan[key]:
        random.choice(plan[key])[0 if key == "order" else random.randrange(2)] = name


def _typed(plan: Plan, random: Random) -> None:
    """Another value somewhere."""
    key = random.choice(list(plan))
    inside = plan[key] if isinstance(plan[key], list) and plan[key] and random.random() < 0.8 else None
    value = random.choice(HOSTILE)
    if inside is None:
        plan[key] = value
    elif isinstance(entry := random.choice(inside), list) and entry and random.random() < 0.8:
        entry[random.randrange(len(entry))] = value
    else:
        inside[random.randrange(len(inside))] = value


CHANGES: dict[str, Callable[[Plan, Random], None] | None] = {
    "as it was": lambda plan, random: None,
    "a wait before its event": _late,
    "a wait less": _without("waits"),
    "another wait": _turned,
    "a wait more": _more,
    "streams swapped": _swapped,
    "streams renumbered": _renumbered,
    "recorded at another time": _moved,
    "a node less": _without("order"),
    "a fork less": _without("fork"),
    "a join less": _without("join"),
    "an unknown node": _unknown,
    "another type": _typed,
    "damaged": None,
}
ORDERLY = frozenset(CHANGES) - {"another type", "damaged"}
"""Changes after which it is a plan in form: if it orders all, it is right."""


def _changed(change: str, written: bytes, random: Random) -> bytes:
    function = CHANGES[change]
    if function is None:
        return damaged(written, random)
    plan = json.loads(written)
    function(plan, random)
    return json.dumps(plan).encode()
