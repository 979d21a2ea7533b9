"""What a reader of the report sees first: labels that can be read, the way that suits the graph, where in it one is, no name cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from msplit.report.html.page import page as build_page
from msplit.report.html.page import render
from tests.browser.conftest import Opened, axe_core
from tests.browser.test_report import TOWERS
from tests.graphs import parse

Open = Callable[..., Opened]

CHAIN = "x:Placeholder; " + "; ".join(
    f"model/block_{i}/conv:MatMul({f'model/block_{i - 1}/conv' if i else 'x'})@{5 + i}us[_stream_id={i % 2}]"
    for i in range(60)
)
BRANCHES = "x:Placeholder; " + "; ".join(
    f"model/branch_{i}/a:MatMul(x)@{5 + i}us[_stream_id={i % 16}]" for i in range(60)
)
BRANCHES += f"; model/join:ConcatV2({','.join(f'model/branch_{i}/a' for i in range(60))})@3us"
GRAPHS = {"small": TOWERS, "wide": BRANCHES, "deep": CHAIN}

FIRST_IN_VIEW = """() => {
  const { cy, across } = msplitReport.graph, along = across ? "x" : "y";
  const least = cy.nodes().min((node) => node.position(along)).value;
  return cy.nodes().some((node) => {
    const { x1, y1, x2, y2 } = node.renderedBoundingBox();
    return node.position(along) < least + 1 && x1 > 0 && y1 > 0 && x2 < cy.width() && y2 < cy.height();
  });
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, text in GRAPHS.items():
        flat, costs = parse(text)
        found[name] = tmp_path_factory.mktemp("report") / f"{name}.html"
        found[name].write_text(render(build_page(flat, costs, candidates=name == "small")), "utf-8")
    return found


def smallest_label(found: Opened) -> float:
    """The size of the smallest label of the graph on the screen, px."""
    return float(
        found.page.evaluate(
            "Math.min(...msplitReport.graph.cy.nodes().map((node) => parseFloat(node.style('font-size')))) * msplitReport.graph.cy.zoom()"
        )
    )


@pytest.mark.parametrize("width", [1400, 800, 400])
@pytest.mark.parametrize("name", GRAPHS)
def test_labels_can_be_read_at_first_and_the_graph_begins_in_view(
    pages: dict[str, Path], opened: Open, name: str, width: int
):
    found = opened(pages[name], width=width)
    assert smallest_label(found) >= 11 - 1e-9
    assert found.page.evaluate(FIRST_IN_VIEW)
    assert found.noise == []


@pytest.mark.parametrize(("name", "across"), [("small", True), ("wide", True), ("deep", False)])
def test_a_wide_graph_goes_from_left_to_right_and_a_deep_one_down(
    pages: dict[str, Path], opened: Open, name: str, across: bool
):
    found = opened(pages[name])
    assert found.page.evaluate("msplitReport.graph.across") is across
    axis = "x" if across else "y"
    steps = found.page.evaluate(
        f"msplitReport.graph.cy.edges().map((edge) => edge.target().position('{axis}') - edge.source().position('{axis}'))"
    )
    assert len(steps) >= 4
    assert min(steps) > 0


def test_the_map_shows_where_one_is_and_leads_elsewhere(pages: dict[str, Path], opened: Open):
    found = opened(pages["deep"])
    found.wait("!document.getElementById('map').hidden")
    frame, canvas = (found.page.locator(place).bounding_box() for place in ("#map", "#canvas"))
    assert canvas["x"] < frame["x"]
    assert frame["y"] + frame["height"] < canvas["y"] + canvas["height"]
    painted = """() => {
      const map = document.getElementById("map"), { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
      return data.some((value, at) => at % 4 === 3 && value > 0);
    }"""
    assert found.page.evaluate(painted)
    found.to_graph()
    frame = found.page.locator("#map").bounding_box()
    found.page.mouse.click(frame["x"] + frame["width"] / 2, frame["y"] + frame["height"] - 6)
    last = "msplitReport.graph.cy.nodes().max((node) => node.position('y')).ele.renderedPosition('y') < msplitReport.graph.cy.height()"
    found.wait(last)
    assert smallest_label(found) >= 11 - 1e-9
    found.page.click("#fit")
    found.wait("document.getElementById('map').hidden")


def test_a_graph_that_is_seen_whole_needs_no_map(pages: dict[str, Path], opened: Open):
    found = opened(pages["small"])
    found.page.wait_for_timeout(100)
    assert found.page.locator("#map").is_hidden()


def test_a_box_that_is_opened_can_be_read(pages: dict[str, Path], opened: Open):
    found = opened(pages["small"], width=400)
    found.page.evaluate(
        "msplitReport.graph.open(msplitReport.model.top.find((element) => msplitReport.model.isBox(element)))"
    )
    assert smallest_label(found) >= 11 - 1e-9


def test_names_are_shown_without_their_common_scope_which_is_told_once(pages: dict[str, Path], opened: Open):
    found = opened(pages["wide"])
    assert found.text("#scope").endswith("model/")
    labels = found.page.evaluate("msplitReport.graph.cy.nodes().map((node) => node.data('label'))")
    assert "branch_7/a" in {label.split("\n")[0] for label in labels}
    assert found.search("model/branch_7/a") == ["branch_7/a"]
    found.page.press("#search", "Enter")
    assert found.text("#selected-name") == "branch_7/a"
    assert "model/branch_7/a" in found.text("#panel")
    assert "\njoin ConcatV2" in found.text("#panel")
    found.page.locator("#panel button.node", has_text="join").first.click()
    assert found.text("#selected-name") == "join"


def test_without_a_common_scope_nothing_is_said_of_one(pages: dict[str, Path], opened: Open):
    assert opened(pages["small"]).page.locator("#scope").is_hidden()


def test_long_names_stand_on_two_lines_that_differ(opened: Open, tmp_path: Path):
    long = "; ".join(f"input_layer/feature_{i}_bucketized_embedding/lookup_{i}:MatMul(x)@5us" for i in range(12))
    flat, costs = parse(f"x:Placeholder; {long}; top:Relu(x)@2us")
    path = tmp_path / "long.html"
    path.write_text(render(build_page(flat, costs, ruleset="auto", streams=2, candidates=False)), "utf-8")
    found = opened(path)
    labels = found.page.evaluate("msplitReport.graph.cy.nodes().map((node) => node.data('label'))")
    assert f"lookup_{7}" in {label.split("\n")[1] for label in labels if label.count("\n") == 2}
    inside = """() => msplitReport.graph.cy.nodes().every((node) => {
      const box = node.boundingBox({ includeLabels: true });
      return box.w < 230 && box.h < 80;
    })"""
    assert found.page.evaluate(inside)


@pytest.mark.parametrize("name", ["small", "wide"])
def test_no_heading_is_hidden_on_a_narrow_screen(pages: dict[str, Path], opened: Open, name: str):
    found = opened(pages[name], width=400)
    assert found.hidden_headings() == []
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for section in found.page.locator("nav a").all():
        section.click()
        title = section.get_attribute("href").removeprefix("#") + "-title"
        found.page.wait_for_timeout(30)
        seen = """(id) => {
          const title = document.getElementById(id), box = title.getBoundingClientRect();
          return title.contains(document.elementFromPoint(box.left + 4, box.top + box.height / 2));
        }"""
        assert found.page.evaluate(seen, title), title
        found.page.evaluate("scrollTo(0, 0)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_a_narrow_screen_with_the_map(pages: dict[str, Path], opened: Open, scheme: str):
    axe = axe_core()
    found = opened(pages["wide"], scheme, width=400, bypass_csp=True)
    found.wait("!document.getElementById('map').hidden")
    found.page.add_script_tag(path=axe)
    run = "async () => (await axe.run(document)).violations.map((one) => [one.id, one.nodes.map((node) => node.html)])"
    assert found.page.evaluate(run) == []
