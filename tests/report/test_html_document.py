"""Pages of tables and curves: whole, and nothing that a model says is part of them."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.escape import visible
from msplit.report.document import Document, Table
from msplit.report.html.document import Plot, page
from tests.campaign import examples
from tests.report.test_html_page import EVIL, Reader, data_of

amounts = st.floats(1e-6, 1e9)
points = st.dictionaries(st.integers(1, 10**6).map(float), st.tuples(amounts, amounts, amounts), max_size=4)


@given(st.text(), st.dictionaries(st.text(), points, max_size=6), st.booleans())
@settings(max_examples=examples(60, 300), deadline=None)
def test_every_point_is_in_the_data_once_under_the_name_of_its_line(title: str, lines: dict, ticks: bool):
    columns = Plot(title, "batch", "µs", lines, ticks=ticks).columns()
    json.dumps(columns, allow_nan=False, ensure_ascii=False).encode("utf-8")
    wanted = [(visible(name), x, *ends) for name, found in lines.items() for x, ends in found.items()]
    assert [tuple(point.values()) for point in columns["points"]] == wanted
    assert columns["ticks"] == (sorted({x for _, x, *_ in wanted}) if ticks else [])


def test_names_that_are_html_stay_text_wherever_they_come():
    table = Table(EVIL, (EVIL, f">{EVIL}"), [(EVIL, (EVIL, EVIL))], EVIL)
    found = Document(EVIL, [(EVIL, EVIL), ("WRONG", EVIL)], [table], notes=[EVIL], warnings=[EVIL])
    text = page(found, [Plot(EVIL, EVIL, EVIL, {EVIL: {1.0: (1.0, 1.0, 1.0)}})], EVIL)
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 4
    assert not {"img", "link", "iframe", "object", "b"} & {tag for tag, _ in reader.tags}
    assert not [attributes for _, attributes in reader.tags if "src" in attributes or "onerror" in attributes]
    assert reader.text.count("<img src=x onerror=alert(2)>") >= 12
    (plot,) = data_of(text)["plots"]
    assert plot["names"] == [plot["points"][0]["line"]] == [visible(EVIL)]


def test_a_document_without_curves_still_has_a_page():
    reader = Reader(page(Document("a"), [], ""))
    assert ("noscript", {}) in reader.tags
