"""Models whose every name is an attack, and commands that print them: nothing of it may reach who reads the output.

A name may stand wherever a model, a file of msplit's or the command line has room for one: nodes, ops, functions, frames, variables,
attributes, devices, keys of signatures, tags, patterns of rules, nodes of plans, files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import yaml
from markdown_it import MarkdownIt  # comes with rich

from msplit.cli import main
from msplit.opset import schema
from tests.fuzz.case import Result
from tests.hostile import COMMAND, HIDDEN, NAMES

FLOAT, INT32 = 1, 3
COMMANDS = 12
"""How many commands a case runs."""


@dataclass(frozen=True)
class Attack:
    """A model with hostile names, and what is asked of it.

    Attributes:
        name: Says how to make it again.
        model: File of the model, by the bytes of its name.
        files: Content of all files, by their names.
        commands: Arguments of commands; a name of `files` in braces stands for its path.
    """

    name: str
    model: bytes
    files: dict[bytes, bytes]
    commands: tuple[tuple[str, ...], ...]


OUTPUTS = {"MatMul": "product", "Relu": "activations", "AddV2": "z"}
"""Output arguments of ops that do not call it `output`: how functions name tensors."""


class Graph:
    """A small graph of everything that reports speak of, with names from a source of randomness.

    TensorFlow refuses most hostile names of nodes, but not within functions; so most of a graph is in a function that it calls.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.message = schema.graph_pb2.GraphDef()
        self.message.versions.producer = 1087
        self.names: list[str] = []
        self.function: Any = None

    def evil(self) -> str:
        """A hostile text that protobuf can hold."""
        return self.random.choice(NAMES).replace("\ud800", "\ufffe")

    def name(self, fair: str) -> str:
        """A name for a node: in functions mostly hostile, elsewhere rarely, for then all that can be said is an error."""
        evil = self.evil()
        if self.function is not None:
            evil = re.sub(r"[\^:\s]", "", evil) or "x"
        elif self.random.random() < 0.98:
            return fair
        shown = self.random.choice([fair, evil, f"{evil}/{fair}", f"{fair}/{evil}"])
        return shown if shown not in self.names else f"{shown}{len(self.names)}"

    def node(self, fair: str, op: str, inputs: Sequence[str] = (), **attrs: Any) -> str:
        """Adds a node and gives what refers to its output."""
        name = self.name(fair)
        node = (self.message.node if self.function is None else self.function.node_def).add(
            name=name, op=op, input=inputs
        )
        for key, value in attrs.items():
            if isinstance(value, tuple):
                for size in value:
                    node.attr[key].shape.dim.add(size=size)
                node.attr[key].shape.SetInParent()
            elif isinstance(value, str):
                node.attr[key].s = value.encode()
            else:
                node.attr[key].type = value
        random = self.random
        if random.random() < 0.3:
            node.attr["_stream_id"].i = random.choice([0, 1, 2, 3, 3, 9])
        if self.names and random.random() < (0.1 if self.function is not None else 0.03):
            group = random.choice(self.names) if random.random() < 0.9 else self.evil()
            node.attr["_class"].list.s.append(f"loc:@{group}".encode())
        if random.random() < 0.1:
            node.attr[self.evil()].s = self.evil().encode()
        if random.random() < 0.03:
            node.attr["T"].s = self.evil().encode()
        if random.random() < 0.1:
            node.device = self.evil()
        if op == "Const":
            tensor = node.attr["value"].tensor
            tensor.dtype = node.attr["dtype"].type
            tensor.tensor_shape.CopyFrom(node.attr["shape"].shape)
            tensor.float_val.append(0.5)
            del node.attr["shape"]
        self.names.append(name)
        return name if self.function is None else f"{name}:{OUTPUTS.get(op, 'output')}:0"

    def towers(self, ids: str) -> str:
        """Two towers, each with an embedding table."""
        join = []
        for number in range(2):
            table = self.node(f"t{number}/table", "Const", dtype=FLOAT, shape=(100, 16))
            axis = self.node(f"t{number}/axis", "Const", dtype=INT32, shape=())
            found = self.node(
                f"t{number}/lookup", "GatherV2", [table, ids, axis], Tparams=FLOAT, Tindices=INT32, Taxis=INT32
            )
            weights = self.node(f"t{number}/weights", "Const", dtype=FLOAT, shape=(16, 16))
            dense = self.node(f"t{number}/dense", "MatMul", [found, weights], T=FLOAT)
            join.append(self.node(f"t{number}/relu", "Relu", [dense], T=FLOAT))
        return self.node("join", "AddV2", join, T=FLOAT)

    def build(self) -> None:
        """The towers, as they are or in a function, and by chance a variable, a loop, an op that nobody knows."""
        random = self.random
        ids = self.node("ids", "Placeholder", dtype=INT32, shape=(4,))
        if random.random() < 0.2:
            out = self.towers(ids)
        else:
            name, argument = (
                random.choice(["f", self.evil()]),
                random.choice(["a", re.sub(r"[\^:\s]", "", self.evil())]),
            )
            self.function = self.message.library.function.add()
            self.function.signature.name = name
            self.function.signature.input_arg.add(name=argument, type=INT32)
            self.function.signature.output_arg.add(name="r", type=FLOAT)
            self.function.ret["r"] = self.towers(argument)
            self.function = None
            out = self.node("call", "PartitionedCall", [ids])
            call = self.message.node[-1]
            call.attr["f"].func.name = name if random.random() < 0.95 else self.evil()
            call.attr["Tin"].list.type.append(INT32)
            call.attr["Tout"].list.type.append(FLOAT)
        if random.random() < 0.3:
            self.node("table", "VarHandleOp", shared_name=self.evil(), container=self.evil(), dtype=FLOAT, shape=(4, 4))
        if random.random() < 0.3:
            enter = self.node("loop/enter", "Enter", [out], T=FLOAT, frame_name=self.evil())
            merge = self.node("loop/merge", "Merge", [enter, enter], T=FLOAT)
            self.node("loop/exit", "Exit", [merge], T=FLOAT)
        if random.random() < 0.3:
            self.node("custom", self.evil(), [out])
        if random.random() < 0.05:
            self.message.node[-1].input.append(self.evil())


def make(seed: int) -> Attack:
    """A model with hostile names and commands that speak of it."""
    random = Random(f"names:{seed}")
    graph = Graph(random)
    graph.build()
    kind = random.choice(["graph", "graph", "text", "saved"])
    model = random.choice(
        [b"model", b"model", b"::error::m", b"\xff\xfe", "m\u202e[red]".encode(), b"a\n::error::b", b"@u ![x](y)"]
    )
    files: dict[bytes, bytes] = {}
    if kind == "saved":
        files[model + b"/saved_model.pb"] = _saved(graph)
    elif kind == "text":
        from google.protobuf import text_format

        files[model] = text_format.MessageToString(graph.message, as_utf8=True).encode()
    else:
        files[model] = graph.message.SerializeToString()
    # What Python reads from JSON and YAML may hold halves of surrogate pairs, too.
    texts = [*graph.names, *NAMES]
    broken = random.random() < 0.2
    pattern = random.choice(["({}", "[{}"] if broken else ["{}", ".*{}.*"])
    quoted = [name if broken else re.escape(name) for name in random.choices(texts, k=3)]
    rules = {
        "version": 1,
        "streams": 3,
        "rules": [
            {"regex": {"patterns": {1: [pattern.format(text) for text in quoted], 2: "t1/.*"}}},
            "branch",
            "propagate",
        ],
    }
    if random.random() < 0.3:
        rules[random.choice(texts)] = random.choice(texts)
    files[b"rules.yaml"] = yaml.safe_dump(rules).encode()
    order = [[name, random.choice([0, 1, 1])] for name in random.sample([*texts, *graph.names], k=6)]
    plan = {"schema_version": 1, "kind": "plan", "graph_hash": random.choice(texts), "streams": 2, "order": order}
    files[b"plan.json"] = json.dumps({**plan, "waits": [[random.choice(texts), random.choice(texts)]]}).encode()
    files[b"streams.txt"] = "".join(f"1:{text}\n" for text in random.sample(texts, k=3)).encode("utf-8", "replace")
    return Attack(f"names:{seed}", model, files, tuple(_commands(random, [*texts, *graph.names * 3])))


def _saved(graph: Graph) -> bytes:
    meta = schema.meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph.message)
    meta.meta_info_def.tags.append(graph.random.choice(["serve", "serve", graph.evil()]))
    for _ in range(graph.random.choice([0, 1, 1, 2])):
        one = meta.signature_def[graph.random.choice(["serving_default", graph.evil()])]
        for side, name in ((one.inputs, graph.names[0]), (one.outputs, graph.random.choice(graph.names))):
            info = side[graph.random.choice(["x", graph.evil()])]
            info.name = f"{name}:0"
            info.dtype = FLOAT
    saved = schema.saved_model_pb2.SavedModel(saved_model_schema_version=1)
    saved.meta_graphs.add().CopyFrom(meta)
    return bytes(saved.SerializeToString())


def _commands(random: Random, texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Commands in random order, each with options that print or say names."""

    def evil() -> str:
        return random.choice(texts).replace("\x00", "").replace("\ud800", "") or "x"

    def style(*more: str) -> str:
        return random.choice(["table", "table", "md", "json", *more])

    model = "{model}"
    written = ["--emit", "yaml", "{out.yaml}", "--emit", "json", "{out.json}", "--emit", "plan", "{out.plan}"]
    written += [
        "--emit",
        "stream-file",
        "{out.streams}",
        "--emit",
        "placement",
        "{out.placement}",
        "--trace",
        "{out.trace}",
    ]
    all_of_them: list[Callable[[], tuple[str, ...]]] = [
        lambda: ("analyze", model, "--format", style()),
        lambda: ("analyze", model, "--show", "all", "--engine", "cuda", "--format", style()),
        lambda: (
            "analyze",
            model,
            "--part",
            f"{random.choice(['function', 'signature', 'tag', 'outputs', 'inputs'])}={evil()}",
        ),
        lambda: ("analyze", model, "--shape", f"{evil()}=4", "--verbose"),
        lambda: ("assign", model, "-o", "{out}", *written, "--force", "--wrap", "--format", style()),
        lambda: ("assign", model, "--dry-run", "--diff", "--wrap", "--format", style()),
        lambda: ("assign", model, "--explain", evil(), "--wrap", "--format", style()),
        lambda: ("assign", model, "--rules", random.choice(["{rules.yaml}", evil()]), "--dry-run", "--wrap"),
        lambda: ("assign", model, "--compare", "--no-measure", "--streams", "4", "--format", style()),
        lambda: ("assign", model, "--costs", f"profile={random.choice(['{plan.json}', evil()])}", "--dry-run"),
        lambda: ("check", model, "--format", style("github", "junit", "sarif")),
        lambda: ("check", model, "--rules", "{rules.yaml}", "--format", style("github", "junit", "sarif"), "--verbose"),
        lambda: ("check", model, "--plan", "{plan.json}", "--format", style("github", "junit", "sarif")),
        lambda: ("check", model, "--rules", "default", "--streams", "2", "--format", style("github", "junit", "sarif")),
        lambda: ("check", model, random.choice(["--select", "--explain", "--config", "--against"]), evil()),
        lambda: ("diff", model, "{out}", "--all", "--rules", "default", "--format", style()),
        lambda: ("diff", model, model, "--format", style()),
        lambda: ("report", model, "-o", "{out.html}", "--force", *random.choice([(), ("--rules", "auto")])),
        lambda: ("show", model, "--format", style()),
        lambda: ("show", model, "--all", "--format", style()),
        lambda: ("replicate", model, "--times", "2", "--combine", "stack", "--force", "-o", "{out.copies}"),
        lambda: (
            "replicate",
            model,
            *random.choice([("--weights", evil()), ("--devices", evil()), ("--part", f"outputs={evil()}")]),
            "-o",
            "{out.none}",
        ),
        lambda: ("rules", evil()),
        lambda: (evil(), evil()),
        lambda: ("sample", evil(), "--size", evil()),
        lambda: ("analyze", evil()),
        lambda: ("analyze", model, f"--{evil()}"),
        lambda: ("assign", model, "--dry-run", "--streams", evil()),
        lambda: ("show", model, "--all", "--format", style()),
        lambda: ("analyze", model, "--costs", f"gpu={random.choice(['{rules.yaml}', evil(), evil() + '.yaml'])}"),
        lambda: ("bench", model, "--baseline", random.choice(["{plan.json}", evil()]), "--fail-if-slower", evil()),
    ]
    writes, *others = all_of_them[4], *random.sample(all_of_them, COMMANDS - 1)
    return [one() for one in (writes, *others)]


def run(attack: Attack, folder: Path) -> Result:
    """Runs the commands and looks at everything that they print and write."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in attack.files.items():
        place = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(content)

    def placed(argument: str) -> str:
        found = re.fullmatch(r"((?:gpu|profile)=)?\{([\w.]+)\}", argument)
        if found is None:
            return argument
        key, name = found[1] or "", found[2]
        return key + os.path.join(str(folder), os.fsdecode(attack.model) if name == "model" else name)

    result, codes = Result(), []
    before = os.getcwd()
    os.chdir(folder)
    try:
        for command in attack.commands:
            arguments = [placed(argument) for argument in command]
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main.run(arguments)
            codes.append(code)
            wrong = judged(command, code, out.getvalue(), err.getvalue())
            if wrong and not result.problem:
                result.problem = f"{wrong}\n  of {arguments!r}"
        wrong = _written(folder)
        result.problem = result.problem or wrong
    except Exception as escaped:
        result.problem = f"{type(escaped).__name__} escaped: {escaped}"
    finally:
        os.chdir(before)
    result.codes = tuple(codes)
    return result


def judged(command: Sequence[str], code: int, out: str, err: str) -> str:
    """What is wrong with what a command said, "" if nothing is."""
    style = command[command.index("--format") + 1] if "--format" in command else "table"
    if "internal error" in err or "Traceback" in err or code not in (0, 1, 2):
        return f"ended with {code}: {err[-2000:]}"
    for text, where in ((out, "stdout"), (err, "stderr")):
        if found := HIDDEN.search(text):
            return f"{where} has {found[0]!r}: {text[max(found.start() - 200, 0) : found.end() + 100]!r}"
        commands = where == "stdout" and style == "github"
        if found := COMMAND.search("" if commands else text):
            return f"{where} commands: {text[max(found.start() - 200, 0) : found.end() + 100]!r}"
        if found := re.search(r"^\s*FORGED", text, re.MULTILINE):
            return f"{where} has a line that a name made: {text[max(found.start() - 200, 0) : found.end() + 100]!r}"
    if code == 2 or "--explain" in command:
        return ""
    try:
        return _read(style, out)
    except Exception as problem:
        return f"{style} can not be read: {problem}: {out[:2000]!r}"


def _read(style: str, out: str) -> str:
    if style in ("json", "sarif"):
        json.loads(out)
    elif style == "junit":
        ElementTree.fromstring(out)
    elif style == "github":
        wrong = [
            line
            for line in out.splitlines()
            if not re.match(r"::(error|warning|notice) title=[\w ]+(,\w+=[^:,]*)*::", line)
        ]
        return f"lines that are no annotations: {wrong[:3]}" if wrong else ""
    elif style == "md":
        return _read_markdown(out)
    return ""


def _read_markdown(out: str) -> str:
    for block in MarkdownIt("commonmark").enable("table").parse(out):
        if block.type == "code_block" and re.fullmatch(r"(msplit [^\n]*\n(    [^\n]*\n)*)+", block.content):
            continue  # the command to run next
        if block.type in ("html_block", "fence", "code_block", "hr", "lheading_open"):
            return f"Markdown has a {block.type}: {block.content[:300]!r}"
        for token in block.children or ():
            if token.type in ("image", "link_open") or (token.type == "html_inline" and token.content != "<br>"):
                return f"Markdown has a {token.type}: {block.content[:300]!r}"
            if token.type == "text" and re.search(r"@\w|://|#\d|www\.", token.content, re.IGNORECASE):
                return f"Markdown means something: {block.content[:300]!r}"
    return ""


def _written(folder: Path) -> str:
    """What is wrong with the files that were written, "" if nothing is."""
    for path in folder.iterdir():
        if path.suffix in (".json", ".plan", ".placement", ".trace") and path.name.startswith("out"):
            json.loads(path.read_text("utf-8"))
    html, listed = folder / "out.html", folder / "out.yaml"
    if html.exists():
        page = re.sub("<script>.*?</script>", "", html.read_text("utf-8"), flags=re.DOTALL)
        if found := HIDDEN.search(page):
            return f"the report has {found[0]!r}: {page[max(found.start() - 200, 0) : found.end() + 100]!r}"
    if listed.exists():
        names = [node["name"] for node in yaml.safe_load(listed.read_text("utf-8"))["nodes"]]
        same = [node["name"] for node in json.loads((folder / "out.json").read_text("utf-8"))["nodes"]]
        if names != same:
            return f"YAML has other names than JSON: {set(names) ^ set(same)}"
    return ""
