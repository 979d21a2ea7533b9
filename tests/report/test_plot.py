"""Plots: well-formed whatever they are of."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.report.plot import Series, svg

amounts = st.floats(1e-6, 1e9)
points = st.dictionaries(st.integers(1, 10**6).map(float), st.tuples(amounts, amounts, amounts), min_size=1, max_size=4)


@given(st.lists(st.builds(Series, st.text(), points), min_size=1, max_size=12), st.text())
def test_every_plot_is_well_formed_and_inside_its_frame(series: list[Series], title: str) -> None:
    root = ElementTree.fromstring(svg(title, "batch", "µs", series))
    _, _, width, height = map(float, root.get("viewBox").split())
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == sum(len(one.points) for one in series)
    for element in circles:
        assert 0 <= float(element.get("cx")) <= width
        assert 0 <= float(element.get("cy")) <= height


def test_names_can_not_leave_their_place() -> None:
    text = svg("<script>alert(1)</script>", "x", "y", [Series('"/><image href="http://x"/>', {1.0: (1.0, 1.0, 1.0)})])
    assert "<script" not in text
    assert "<image" not in text


def test_nothing_is_nothing_to_plot() -> None:
    with pytest.raises(ValueError, match="nothing"):
        svg("t", "x", "y", [Series("a", {})])
