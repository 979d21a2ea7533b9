"""The HTML report in a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.report.html import Finding, Page, render
from msplit.report.html.build import page as build_page
from msplit.rules import Context, load
from msplit.schedule.bounds import bounds
from msplit.schedule.predict import predict
from tests.browser.conftest import Opened
from tests.graphs import build, parse

Open = Callable[..., Opened]

TOWERS = "x:Placeholder; c:Const;" + ";".join(
    f"tower_{t}/a:MatMul(x,c)@{10 + t}us; tower_{t}/b:Relu(tower_{t}/a)@2us; tower_{t}/c:MatMul(tower_{t}/b)@7us"
    for t in range(4)
)
TOWERS += "; top/join:ConcatV2(tower_0/c,tower_1/c,tower_2/c,tower_3/c)@3us; top/out:Sigmoid(top/join)@1us; log:StringFormat(x) host"
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flat, costs = parse(TOWERS)
    path = tmp_path_factory.mktemp("report") / "towers.html"
    path.write_text(render(build_page(flat, costs, ruleset="auto", streams=4)), "utf-8")
    return path


def streams_in(found: Opened) -> int:
    return int(found.page.evaluate("msplitReport.model.lanes.length"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_quietly_and_asks_for_nothing(towers: Path, opened: Open, scheme: str, tmp_path: Path):
    found = opened(towers, scheme)
    found.page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert found.noise == []
    assert found.requests == [towers.as_uri()]
    assert found.page.locator("#failure").is_hidden()
    assert streams_in(found) == 4
    background = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_the_graph_shows_the_branches_in_the_colours_of_their_streams(towers: Path, opened: Open):
    found = opened(towers)
    labels = found.page.evaluate("msplitReport.graph.cy.nodes().map((node) => node.data('label'))")
    assert sorted(label.split("\n")[0] for label in labels) == ["top", "tower_0", "tower_1", "tower_2", "tower_3"]
    colours = found.page.evaluate("msplitReport.graph.cy.nodes().map((node) => node.data('colours'))")
    assert len(set(colours)) == 4
    assert found.page.evaluate("msplitReport.graph.cy.edges('.cross').length") == 3


def test_search_finds_a_node_opens_its_branch_and_shows_rule_cost_and_neighbours(towers: Path, opened: Open):
    found = opened(towers)
    assert found.search("tower_2/b") == ["tower_2/b"]
    found.page.press("#search", "Enter")
    assert found.text("#selected-name") == "tower_2/b"
    panel = found.text("#panel")
    for part in (
        "Relu",
        "auto",
        "2 µs",
        "fastest in the simulator",
        "Inputs (1)",
        "tower_2/a",
        "Consumers (1)",
        "tower_2/c",
    ):
        assert part in panel, part
    assert found.page.evaluate("msplitReport.graph.cy.$('.selected').data('label')").startswith("tower_2/b")
    assert found.noise == []


def test_search_knows_ops_and_streams_and_says_when_nothing_fits(towers: Path, opened: Open):
    found = opened(towers)
    assert found.search("op:relu") == [f"tower_{t}/b" for t in range(4)]
    assert "top/join" in [name for stream in range(4) for name in found.search(f"stream:{stream}")]
    assert found.search("nothing like this") == []
    assert "No node has that" in found.text("#results")
    found.page.press("#search", "Escape")
    assert found.page.locator("#results").is_hidden()


def test_a_host_node_and_a_constant_can_be_found_too(towers: Path, opened: Open):
    found = opened(towers)
    for name, what in (("log", "it runs on the CPU"), ("c", "launches no kernel")):
        found.search(name)
        found.page.locator("#results [role=option]").first.click()
        assert found.text("#selected-name") == name
        assert what in found.text("#panel")


def test_a_click_shows_a_box_and_a_double_click_opens_it(towers: Path, opened: Open):
    found = opened(towers)
    at = found.position("tower_1/a")
    found.page.mouse.click(at["x"], at["y"])
    assert found.text("#selected-name") == "tower_1"
    assert "Kernels (3)" in found.text("#panel")
    assert found.page.locator("#open").is_enabled()
    found.page.mouse.dblclick(at["x"], at["y"])
    found.wait("msplitReport.graph.shown === 7")
    at = found.position("tower_1/c")
    found.page.mouse.click(at["x"], at["y"])
    assert found.text("#selected-name") == "tower_1/c"
    found.page.click("#close")
    found.wait("msplitReport.graph.shown === 5")
    assert found.noise == []


def test_a_neighbour_in_the_panel_leads_to_the_neighbour(towers: Path, opened: Open):
    found = opened(towers)
    found.search("top/join")
    found.page.press("#search", "Enter")
    found.page.locator("#panel button.node", has_text="tower_3/c").click()
    assert found.text("#selected-name") == "tower_3/c"


def test_the_graph_zooms_and_fits(towers: Path, opened: Open):
    found = opened(towers)
    zoom = "msplitReport.graph.cy.zoom()"
    before = found.page.evaluate(zoom)
    found.page.click("#zoom-in")
    assert found.page.evaluate(zoom) > before
    found.to_graph()
    frame = found.page.locator("#canvas").bounding_box()
    found.page.mouse.move(frame["x"] + 50, frame["y"] + 50)
    for _ in range(10):
        found.page.mouse.wheel(0, 400)
    found.wait(f"{zoom} < {before}")
    pan = found.page.evaluate("msplitReport.graph.cy.pan().x")
    found.page.mouse.move(frame["x"] + 5, frame["y"] + 5)
    found.page.mouse.down()
    found.page.mouse.move(frame["x"] + 65, frame["y"] + 5, steps=5)
    found.page.mouse.up()
    assert found.page.evaluate("msplitReport.graph.cy.pan().x") == pytest.approx(pan + 60, abs=12)
    found.page.click("#fit")


def test_the_timeline_shows_a_kernel_on_hover_and_selects_it_on_click(towers: Path, opened: Open):
    found = opened(towers)
    found.page.locator("#lanes").scroll_into_view_if_needed()
    at = found.page.evaluate(
        """() => {
          const { model, timeline } = msplitReport, leaf = model.nodes.home[model.index.get("tower_2/a")];
          const frame = timeline.canvas.getBoundingClientRect(), row = model.lanes.indexOf(model.leaves.stream[leaf]);
          return { x: frame.left + timeline.x(model.leaves.start[leaf] + 2), y: frame.top + 26 + row * 30 + 12 };
        }"""
    )
    found.page.mouse.move(at["x"], at["y"])
    assert re.fullmatch(r"tower_2/a: 1[3-9](\.\d)? µs beside others, 12 µs alone, from 0 µs", found.text("#tip"))
    found.page.mouse.click(at["x"], at["y"])
    assert found.text("#selected-name") == "tower_2/a"
    found.page.click("#time-in")
    assert "0 µs to" not in found.text("#time-state")
    found.page.locator("#lanes canvas").press("ArrowLeft")
    found.page.click("#time-fit")
    assert found.text("#time-state").startswith("0 µs to")
    assert found.noise == []


def test_candidates_and_findings_are_tables_and_nodes_in_them_lead_to_the_graph(opened: Open, tmp_path: Path):
    flat, costs = parse(TOWERS)
    prediction = predict(flat, costs, np.zeros(len(flat), np.int32))
    finding = Finding("MS007", "error", "split", "mend it", ("tower_1/c",))
    path = tmp_path / "report.html"
    path.write_text(render(Page(flat, costs, prediction, bounds(flat, costs), "test", findings=[finding])), "utf-8")
    found = opened(path)
    assert "MS007" in found.text("#findings")
    found.page.locator("#findings button.node").click()
    assert found.text("#selected-name") == "tower_1/c"


def test_names_that_are_html_are_shown_as_text(opened: Open, tmp_path: Path):
    flat, costs = parse("a:MatMul@5us; b:Relu(a)@3us", names=[EVIL, "b"])
    path = tmp_path / "report.html"
    path.write_text(render(build_page(flat, costs)), "utf-8")
    found = opened(path)
    dialogs: list[str] = []
    found.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    assert found.search("onerror") == [EVIL]
    found.page.press("#search", "Enter")
    assert found.text("#selected-name") == EVIL
    assert found.page.locator("img").count() == 0
    assert (dialogs, found.noise) == ([], [])
    assert found.requests == [path.as_uri()]


def test_a_graph_without_kernels_says_so(opened: Open, tmp_path: Path):
    flat, costs = parse("x:Placeholder; y:Identity(x)")
    path = tmp_path / "report.html"
    path.write_text(render(build_page(flat, costs)), "utf-8")
    found = opened(path)
    assert found.text("#view-state") == "No node launches a kernel."
    found.search("y")
    found.page.press("#search", "Enter")
    assert found.text("#selected-name") == "y"
    assert found.noise == []


def vision(nodes: int) -> tuple[FlatGraph, Costs, np.ndarray]:
    """Modules of four branches, one after the other, every second one on four streams."""
    names, ops, edges, lanes = ["x"], ["Placeholder"], [], [0]
    last = 0
    module = 0
    while len(names) < nodes:
        ends = []
        for branch in range(4):
            before = last
            for depth in range(2 * branch + 2):
                names.append(f"net/module_{module}/branch_{branch}/op_{depth}")
                ops.append("MatMul")
                lanes.append(branch if module % 2 else 0)
                edges.append((before, 0, len(names) - 1, 0))
                before = len(names) - 1
            ends.append(before)
        names.append(f"net/module_{module}/join")
        ops.append("ConcatV2")
        lanes.append(0)
        edges += [(end, 0, len(names) - 1, slot) for slot, end in enumerate(ends)]
        last = len(names) - 1
        module += 1
    times = [0.0] + [2.0] * (len(names) - 1)
    flat, costs = build(names, ops, edges, times)
    return flat, costs, np.asarray(lanes, np.int32)


def test_a_hundred_thousand_nodes_are_usable(opened: Open, tmp_path: Path):
    flat, costs, lanes = vision(100_000)
    path = tmp_path / "large.html"
    prediction = predict(flat, costs, lanes)
    path.write_text(render(Page(flat, costs, prediction, bounds(flat, costs), "test")), "utf-8")
    assert path.stat().st_size < 10e6
    begin = time.monotonic()
    found = opened(path)
    assert time.monotonic() - begin < 20
    shown = found.page.evaluate("msplitReport.graph.shown")
    assert 20 < shown <= 300
    labels = found.page.evaluate("msplitReport.graph.cy.nodes().map((node) => node.data('label'))")
    assert all(len(line) <= 26 and " " not in line for line, _ in (label.split("\n") for label in labels if label))
    name = "net/module_3001/branch_2/op_3"
    assert found.search(name) == [name]
    begin = time.monotonic()
    found.page.press("#search", "Enter")
    assert found.text("#selected-name") == name
    assert time.monotonic() - begin < 10
    assert shown < found.page.evaluate("msplitReport.graph.shown") <= 1500
    assert found.page.evaluate("msplitReport.graph.cy.$('.selected').data('label')").startswith(
        "module_3001/branch_2/op_3"
    )
    assert found.noise == []


def test_opening_more_and_more_closes_what_was_opened_first(opened: Open, tmp_path: Path):
    flat, costs, lanes = vision(20_000)
    path = tmp_path / "large.html"
    prediction = predict(flat, costs, lanes)
    path.write_text(render(Page(flat, costs, prediction, bounds(flat, costs), "test")), "utf-8")
    found = opened(path)
    most = found.page.evaluate(
        """() => {
          const { model, graph } = msplitReport;
          graph.opened = model.top.filter((element) => model.isBox(element));
          for (const box of [...graph.opened]) graph.opened.push(...[...model.inside.of(box)].filter((inner) => model.isBox(inner)));
          msplitReport.find(10000);
          return graph.shown;
        }"""
    )
    assert most <= 1500
    found.page.click("#close-all")
    assert found.page.evaluate("msplitReport.graph.shown") <= 300


def test_a_shipped_rule_set_explains_itself_in_the_report(opened: Open, tmp_path: Path):
    flat, costs = parse(TOWERS)
    assert Context(flat, costs, load("default").streams).streams >= 2
    path = tmp_path / "report.html"
    path.write_text(render(build_page(flat, costs, ruleset="default")), "utf-8")
    found = opened(path)
    assert "from the rules default (shipped)" in found.text("#summary")
    found.search("tower_3/a")
    found.page.press("#search", "Enter")
    assert "branch" in found.text("#panel")
