"""Damaged, cut off and invalid files: an error that says what and where, nothing else."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit import formats
from msplit.errors import GraphError, LoadError, MsplitError
from msplit.opset import schema
from tests.formats.models import SAMPLES, graph, read


def test_cut_off_file_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    whole = graph("first NoOp\nsecond NoOp ^first").SerializeToString()
    path = tmp_path / "m.pb"
    path.write_bytes(whole[:-3])
    with pytest.raises(
        LoadError, match=f"cut off: it has {len(whole) - 3} bytes and says that it has at least {len(whole)}"
    ):
        formats.read(path)


def test_damaged_file_is_a_load_error(tmp_path: Path) -> None:
    path = tmp_path / "m.pb"
    # A whole field whose inside is cut off, and a name that is not UTF-8.
    for data in (b"\x0a\x08\x0a\x01a\x12\x01b\x1a\x05" + b"\x0a\x00", b"\x0a\x08\x0a\x02\xff\xfe\x12\x02Op"):
        path.write_bytes(data)
        with pytest.raises(LoadError, match="damaged"):
            formats.read(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('node {\n  name: "a"\n  oops: 1\n}', r":3: the text is not valid(.|\n)*oops"),
        ('node { name: "a" op: "NoOp"', "cut off"),
        ('node { name: "a" op: "NoOp" }\nnode { name: "b" op: "No', "cut off|not valid"),
        ("versions { producer: 21 }", "no nodes"),
        (
            "node { attr { key: 'x' value { " + "func { attr { key: 'x' value { " * 2000,
            "nested too deeply|not valid|cut off",
        ),
    ],
)
def test_bad_text_says_the_line(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "m.pbtxt"
    path.write_text(text)
    with pytest.raises(LoadError, match=what):
        formats.read(path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'node { name: "\xff" }')
    with pytest.raises(LoadError, match="not UTF-8 at byte 14"):
        formats.read(tmp_path / "m")


def test_text_with_inf_and_nan(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(
        'node { name: "a" op: "Op" attr { key: "x" value { list { f: inf f: -inf f: nan } } } }'
    )
    value = formats.read(tmp_path / "m").graph.attrs[0]["x"]
    np.testing.assert_array_equal(value, [np.inf, -np.inf, np.nan])


def test_large_text_warns_that_it_is_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msplit.formats.wire._SLOW_TEXT_BYTES", 10)
    (tmp_path / "m").write_text('node { name: "a" op: "NoOp" }')
    formats.read(tmp_path / "m")
    assert "takes a while" in caplog.text


def test_graph_without_nodes_is_an_error(tmp_path: Path) -> None:
    graph_def = schema.graph_pb2.GraphDef()
    graph_def.versions.producer = 21
    with pytest.raises(LoadError, match="no nodes"):
        read(tmp_path, graph_def)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a Relu b\nb Relu a", "cycle"),
        ("a Relu gone", "'gone' names no node"),
        ("a NoOp\na NoOp", "2 nodes have this name"),
    ],
)
def test_invalid_graph_names_the_file_and_the_defect(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(GraphError, match=what) as caught:
        read(tmp_path, graph(text))
    assert caught.value.where == str(tmp_path / "model.pb")


SEEDS = [p.read_bytes() for p in (SAMPLES / "cond_v1.pb", SAMPLES / "two_signatures" / "saved_model.pb")]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_bytes_raise_anything_but_our_own_errors(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    if data.draw(st.booleans()):
        content = data.draw(st.binary(max_size=200))
    else:
        changed = bytearray(data.draw(st.sampled_from(SEEDS)))
        for _ in range(data.draw(st.integers(1, 5))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        content = bytes(changed[: data.draw(st.integers(1, len(changed)))])
    path = tmp_path_factory.getbasetemp() / "saved_model.pb"
    path.write_bytes(content)
    with contextlib.suppress(MsplitError):
        model = formats.read(path)
        for attrs in model.graph.attrs:
            for value in attrs.values():
                if hasattr(value, "load"):
                    value.load()
        for name in model.graph.functions:
            assert len(model.graph.functions[name].body)
        formats.graph_hash(model)
