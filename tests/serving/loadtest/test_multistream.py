"""NVIDIA's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.errors import MsplitError
from msplit.serving.loadtest.run import Multistream, parse

names = st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1), min_size=1, max_size=4)
number = st.integers(1, 10**6)


def test_the_published_command() -> None:
    asked = parse(
        ["1", "input0", "1", "output", "16", "1000", "4", "./tensorflow/examples/multistream/data/config_proto"]
    )
    config = Path("./tensorflow/examples/multistream/data/config_proto")
    assert asked == Multistream(("input0",), ("output",), 16, 1000, 4, config)


@given(names, names, number, number, number, st.booleans())
def test_what_is_written_is_read(
    inputs: list[str], outputs: list[str], batch: int, iterations: int, threads: int, config: bool
) -> None:
    words = [str(len(inputs)), *inputs, str(len(outputs)), *outputs, *map(str, (batch, iterations, threads))]
    asked = parse([*words, "c"] if config else words)
    assert (asked.inputs, asked.outputs) == (tuple(inputs), tuple(outputs))
    assert (asked.batch, asked.iterations, asked.threads) == (batch, iterations, threads)
    assert asked.config == (Path("c") if config else None)
    with pytest.raises(MsplitError, match="missing"):
        parse(words[:-1])
    with pytest.raises(MsplitError, match="too much"):
        parse([*words, "c", "d"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "the number of inputs is missing"),
        ("x", "'x', not a number"),
        ("0 1 y 1 1 1", "not a number above 0"),
        ("2 x", "the name of an input is missing"),
        ("1 x 1 y 1 -3 4", "iterations is '-3'"),
    ],
)
def test_other_words_are_refused(words: str, said: str) -> None:
    with pytest.raises(MsplitError, match=said):
        parse(words.split())
