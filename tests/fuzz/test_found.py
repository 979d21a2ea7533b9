"""What the campaign found, made small. What filled memory in the inference of shapes is in tests/cost/test_hostile.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msplit.cli import main
from msplit.opset import schema
from tests.fuzz.case import Case, run

RULES = "version: 1\nstreams: 4\nrules:\n"


def graph(*nodes: tuple[str, str, list[str], dict[str, Callable[[Any], None]]]) -> bytes:
    """A GraphDef of (name, op, inputs, attributes); an attribute is a function that fills in an AttrValue."""
    message = schema.graph_pb2.GraphDef()
    for name, op, inputs, attrs in nodes:
        node = message.node.add(name=name, op=op, input=inputs)
        for key, fill in attrs.items():
            fill(node.attr[key])
    body = message.library.function.add()
    body.signature.name = "f"
    body.node_def.add(name="n", op="NoOp")
    return bytes(message.SerializeToString())


def number(value: int) -> Callable[[Any], None]:
    return lambda attr: setattr(attr, "i", value)


def text(value: bytes) -> Callable[[Any], None]:
    return lambda attr: setattr(attr, "s", value)


def function(name: str) -> Callable[[Any], None]:
    return lambda attr: setattr(attr.func, "name", name)


def numbers(*values: int) -> Callable[[Any], None]:
    return lambda attr: attr.list.i.extend(values)


def kind(number: int) -> Callable[[Any], None]:
    return lambda attr: setattr(attr, "type", number)


def tensor(dtype: int, shape: tuple[int, ...] | None) -> Callable[[Any], None]:
    """A constant of zeros; without a shape it says that it has none."""

    def fill(attr: Any) -> None:
        attr.tensor.dtype = dtype
        attr.tensor.tensor_shape.unknown_rank = shape is None
        for size in shape or ():
            attr.tensor.tensor_shape.dim.add(size=size)

    return fill


def sizes(*of: int) -> Callable[[Any], None]:
    return lambda attr: [attr.shape.dim.add(size=size) for size in of]


def small() -> bytes:
    return graph(("x", "Placeholder", [], {}), ("y", "Relu", ["x"], {}), ("z", "Tanh", ["y"], {}))


MODELS = {
    "type of a reference is a number": graph(("v", "VariableV2", [], {"dtype": number(3)}), ("y", "Relu", ["v"], {})),
    "type of a variable is ten thousand numbers": graph(
        ("v", "VariableV2", [], {"dtype": numbers(*range(10_000))}), ("y", "Relu", ["v"], {})
    ),
    "types of a list are numbers": graph(
        ("v", "VariableV2", [], {}), ("y", "IdentityN", ["v", "v"], {"T": numbers(1, 2)}), ("z", "Relu", ["y"], {})
    ),
    "type is a function": graph(("x", "Placeholder", [], {}), ("y", "Relu", ["x"], {"T": function("f")})),
    "shape of an input is text": graph(("x", "Placeholder", [], {"shape": text(b"1,2")}), ("y", "Relu", ["x"], {})),
    "shape of an input is a number": graph(("x", "Placeholder", [], {"shape": number(3)}), ("y", "Relu", ["x"], {})),
    "shape of an input is a list": graph(("x", "Placeholder", [], {"shape": numbers(3)}), ("y", "Relu", ["x"], {})),
    "shape is a function": graph(("v", "VariableV2", [], {"shape": function("f")}), ("y", "Identity", ["v"], {})),
    "hint is a list of functions": graph(
        ("x", "Placeholder", [], {"_output_shapes": lambda attr: attr.list.func.add(name="f")}),
        ("y", "Relu", ["x"], {}),
    ),
    "shape of a variable is a list of texts": graph(
        ("v", "VariableV2", [], {"shape": lambda attr: attr.list.s.append(b"x")}), ("y", "Identity", ["v"], {})
    ),
    "a constant of more elements than can be written": graph(
        ("c", "Const", [], {"value": lambda attr: [attr.tensor.tensor_shape.dim.add(size=2**62) for _ in range(5000)]}),
        ("y", "Relu", ["c"], {}),
    ),
    "axis of a lookup that does not say its shape": graph(
        ("t", "Const", [], {"dtype": kind(1), "value": tensor(1, (4, 3))}),
        ("ids", "Placeholder", [], {"dtype": kind(3)}),
        ("axis", "Const", [], {"dtype": kind(3), "value": tensor(3, None)}),
        ("y", "GatherV2", ["t", "ids", "axis"], {"Tparams": kind(1), "Tindices": kind(3), "Taxis": kind(3)}),
    ),
    "a cond with one branch": graph(
        (
            "p",
            "Const",
            [],
            {
                "dtype": kind(10),
                "value": lambda attr: (
                    setattr(attr.tensor, "dtype", 10),
                    attr.tensor.bool_val.append(True),
                    attr.tensor.tensor_shape.SetInParent(),
                ),
            },
        ),
        ("x", "Placeholder", [], {"dtype": kind(1)}),
        ("y", "If", ["p", "x"], {"then_branch": function("f")}),
    ),
    "a choice by two numbers": graph(
        ("p", "Const", [], {"dtype": kind(3), "value": tensor(3, (2,))}),
        ("x", "Placeholder", [], {"dtype": kind(1)}),
        ("y", "Case", ["p", "x"], {"branches": lambda attr: [attr.list.func.add(name="f") for _ in range(2)]}),
    ),
    **{
        f"a constant of {what} in a graph with a list": graph(
            ("c", "Const", [], {"dtype": kind(1), "value": tensor(number, shape)}),
            ("n", "Const", [], {"dtype": kind(3), "value": tensor(3, ())}),
            ("l", "TensorListReserve", ["c", "n"], {"element_dtype": kind(1), "shape_type": kind(3)}),
            ("y", "TensorListLength", ["l"], {}),
        )
        for what, number, shape in (
            ("a reference", 101, (2,)),
            ("no shape", 3, None),
            ("a resource", 20, ()),
            ("a type that nobody knows", 99, (2,)),
            ("more bytes than there are", 1, (2**62, 2)),
        )
    },
    "an input of more bytes than there are, in a graph with a list": graph(
        ("c", "Placeholder", [], {"dtype": kind(1), "shape": sizes(2**62)}),
        ("n", "Const", [], {"dtype": kind(3), "value": tensor(3, ())}),
        ("l", "TensorListReserve", ["n", "n"], {"element_dtype": kind(1), "shape_type": kind(3)}),
        ("y", "TensorListSetItem", ["l", "n", "c"], {"element_dtype": kind(1)}),
    ),
    "a million outputs that nobody reads": graph(
        ("x", "Placeholder", [], {}), *((f"y{k}", "Unpack", ["x"], {"num": number(10**6)}) for k in range(50))
    ),
}


def seconds(case: Case, folder: Path) -> float:
    """Processor time of a case: the least of three runs, since what else runs on a core slows it down."""
    results = [run(case, folder) for _ in range(3)]
    assert [result.problem for result in results] == [""] * 3
    return min(result.seconds for result in results)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    result = run(Case(name, MODELS[name]), tmp_path / "case")
    assert result.problem == ""
    assert result.codes[0] == 0


@pytest.mark.parametrize("name", MODELS)
def test_what_assign_writes_can_be_checked_where_the_engine_is_there(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")  # the limit of memory above leaves no room for it
    (tmp_path / "model").write_bytes(MODELS[name])
    assert main.run(["assign", str(tmp_path / "model"), "-o", str(tmp_path / "out")]) == 0
    assert main.run(["check", str(tmp_path / "out")]) in (0, 1)


def test_a_thousand_inputs_that_name_one_output_of_a_node_with_a_million_sizes(tmp_path: Path) -> None:
    message = schema.graph_pb2.GraphDef()
    function = message.library.function.add()
    function.signature.name = "f"
    node = function.node_def.add(name="n", op="Unpack")
    for _ in range(300):
        shape = node.attr["_output_shapes"].list.shape.add()
        for _ in range(300):
            shape.dim.add(size=1)
    node.attr["num"].i = 2
    function.node_def.add(name="m", op="AddN", input=["n:output:1"] * 1000)
    message.node.add(name="x", op="NoOp")
    assert seconds(Case("sizes", message.SerializeToString()), tmp_path / "case") < 0.5


def test_a_thousand_inputs_that_name_outputs_of_a_call_that_has_ten_thousand(tmp_path: Path) -> None:
    message = schema.graph_pb2.GraphDef()
    for name in ("f", "g"):
        message.library.function.add().signature.name = name
    for number in range(10_000):
        message.library.function[1].signature.output_arg.add(name=f"r{number}", type=1)
    message.library.function[0].node_def.add(name="n", op="g")
    message.library.function[0].node_def.add(name="m", op="AddN", input=["n:r9999:0"] * 1000)
    message.node.add(name="x", op="NoOp")
    assert seconds(Case("results", message.SerializeToString()), tmp_path / "case") < 0.5


FILES: dict[str, tuple[str, bytes]] = {
    "five thousand rules": ("rules.yaml", (RULES + "  - branch\n" * 5000).encode()),
    "a stream id of a megabyte": ("streams.txt", b"9" * 1_000_000 + b":a"),
    "patterns that make large automata": ("streams.txt", b"1:" + b"a{0,1000}" * 20),
    "fifty thousand blank lines": ("streams.txt", b"1:y\n" + b"\n" * 50_000),
    "a long line in brackets": ("settings.toml", b"[tool.msplit]\nrules = '''\n[" + b" " * 50_000 + b"\n'''\n"),
    "a long line of words": ("settings.toml", b"[tool.msplit]\nrules = '''\n" + b"a " * 50_000 + b"\n'''\n"),
    "a long value": ("settings.yaml", b"fail_on: " + b"x" * 100_000),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    file, content = FILES[name]
    files = {file: content}
    rules: tuple[str, ...] = ()
    check: tuple[str, ...] = ("--config", file)
    if "settings" not in file:
        files.setdefault("rules.yaml", f"{RULES}  - regex: {{file: {file}}}\n".encode())
        rules = check = ("--rules", "rules.yaml")
    result = run(Case(name, small(), files=files, assign=rules, check=check), tmp_path / "case")
    assert result.problem == ""
    assert result.codes[0] == 0


def test_rules_from_a_device_that_never_ends(tmp_path: Path) -> None:
    result = run(
        Case("endless", small(), assign=("--rules", "/dev/zero"), check=("--config", "/dev/zero")), tmp_path / "case"
    )
    assert result.problem == ""
    assert result.codes == (0, 2, 2)


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "NaN", "1e999", "true"])
def test_numbers_of_a_profile_that_no_float_holds(value: str) -> None:
    from msplit.errors import MsplitError
    from msplit.formats.files import JsonValue

    with pytest.raises(MsplitError, match="is not"):
        JsonValue(json.loads(value), "profile", "profile.json", "write it again", "clock").number()
