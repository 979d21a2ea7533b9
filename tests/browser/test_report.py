"""The HTML report in a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from msplit.checks.run import Reported
from msplit.checks.subject import Finding, Severity
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.report.html.page import Page, render
from msplit.report.html.page import page as build_page
from msplit.rules import load
from msplit.rules.base import RuleContext
from msplit.schedule.judge import bounds, predict
from tests.browser.conftest import Opened, axe_core
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
    found.page.keyboard.down("Control")
    for _ in range(10):
        found.page.mouse.wheel(0, 400)
    found.wait(f"{zoom} < {before}")
    found.page.keyboard.up("Control")
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
    finding = Reported("MS007", Severity.ERROR, Finding("split", "mend it", ("tower_1/c",)))
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
    lines = [line for label in labels if label for line in label.split("\n")[:-1]]
    assert all(len(line) <= 26 and " " not in line for line in lines)
    name = "net/module_3001/branch_2/op_3"
    assert found.search(name) == [name.removeprefix("net/")]
    begin = time.monotonic()
    found.page.press("#search", "Enter")
    assert found.text("#selected-name") == name.removeprefix("net/")
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
    assert RuleContext(flat, costs, load("default").streams).streams >= 2
    path = tmp_path / "report.html"
    path.write_text(render(build_page(flat, costs, ruleset="default")), "utf-8")
    found = opened(path)
    assert "from the rules default (shipped)" in found.text("#summary")
    found.search("tower_3/a")
    found.page.press("#search", "Enter")
    assert "branch" in found.text("#panel")


@pytest.mark.parametrize("place", ["#canvas", "#lanes canvas"])
def test_the_wheel_scrolls_the_page_unless_a_key_is_held(towers: Path, opened: Open, place: str):
    found = opened(towers)
    state = "[msplitReport.graph.cy.zoom(), msplitReport.timeline.to - msplitReport.timeline.from].join()"
    centre = f"document.querySelector('{place}').scrollIntoView({{ block: 'center' }})"
    found.page.evaluate(centre)
    found.page.wait_for_timeout(400)
    at = found.page.evaluate("scrollY")
    frame = found.page.locator(place).bounding_box()
    found.page.mouse.move(frame["x"] + 200, frame["y"] + min(frame["height"] - 5, 60))
    before = found.page.evaluate(state)
    found.page.mouse.wheel(0, -60)
    found.wait(f"scrollY < {at} - 30")
    assert found.page.evaluate(state) == before
    found.page.evaluate(centre)
    found.page.wait_for_timeout(400)
    found.page.keyboard.down("Control")
    found.page.mouse.wheel(0, -60)
    found.wait(f"{state} !== '{before}'")
    found.page.keyboard.up("Control")
    assert found.page.evaluate("scrollY") == at


def wide(tmp_path: Path) -> Path:
    flat, costs = parse("x:Placeholder; " + "; ".join(f"branch_{i}/a:MatMul(x)@{5 + i}us" for i in range(60)))
    path = tmp_path / "wide.html"
    path.write_text(render(build_page(flat, costs, ruleset="auto", streams=16)), "utf-8")
    return path


def test_fit_shows_all_of_a_large_graph(opened: Open, tmp_path: Path):
    found = opened(wide(tmp_path))
    inside = """() => {
      const box = msplitReport.graph.cy.elements().renderedBoundingBox(), frame = document.getElementById("canvas").getBoundingClientRect();
      return box.x1 >= 0 && box.y1 >= 0 && box.x2 <= frame.width && box.y2 <= frame.height;
    }"""
    assert not found.page.evaluate(inside)
    found.page.click("#zoom-in")
    found.page.click("#zoom-in")
    found.page.click("#fit")
    assert found.page.evaluate(inside)


@pytest.mark.parametrize("at", [0.02, 0.98])
def test_the_tooltip_is_seen_whole_wherever_the_pointer_is(opened: Open, tmp_path: Path, at: float):
    name = "a_name_of_a_scope/" * 8 + "MatMul"
    flat, costs = parse(f"x:Placeholder; {name}:MatMul(x)@50us")
    path = tmp_path / "one.html"
    path.write_text(render(build_page(flat, costs, ruleset="default", candidates=False)), "utf-8")
    found = opened(path)
    place = found.page.evaluate(
        """(at) => {
          const { timeline } = msplitReport;
          timeline.canvas.scrollIntoView({ block: at > 0.5 ? "end" : "start" });
          const frame = timeline.canvas.getBoundingClientRect();
          return { x: frame.left + timeline.x(50 * at), y: frame.top + 26 + 12 };
        }""",
        at,
    )
    found.page.mouse.move(place["x"], place["y"])
    assert found.text("#tip").startswith(name)
    seen = """() => {
      const box = document.getElementById("tip").getBoundingClientRect();
      return box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight;
    }"""
    assert found.page.evaluate(seen)
    found.page.mouse.move(5, 5)


def test_candidates_are_compared_on_the_timeline_with_their_commands(towers: Path, opened: Open):
    found = opened(towers)
    assert found.page.locator("#compared").is_hidden()
    assert "msplit assign test.pb --rules auto --streams 4 -o OUT" in found.text("#own-command")
    found.page.locator("#candidates button.node", has_text="one").first.click()
    assert found.page.locator("#compared").is_visible()
    assert found.text("#beside-about").startswith("Candidate one, simulated")
    assert "candidates: [one]" in found.text("#beside-command")
    assert "\nmsplit assign test.pb --rules one.yaml -o OUT" in found.text("#beside-command")
    spans = "[msplitReport.timeline, msplitReport.compared()].map((line) => [line.from, line.to, line.extent].join())"
    one, two = found.page.evaluate(spans)
    assert one == two
    found.page.click("#time-in")
    zoomed, other = found.page.evaluate(spans)
    assert zoomed == other != one
    assert found.page.evaluate("msplitReport.compared().run.lanes.length") == 1
    found.page.select_option("#beside", "0")
    assert found.page.locator("#compared").is_hidden()
    assert found.noise == []


def test_the_critical_path_is_shown_in_the_graph_and_on_the_timeline(towers: Path, opened: Open):
    found = opened(towers)
    marked = "msplitReport.graph.cy.nodes('.critical').map((node) => node.data('label').split('\\n')[0]).sort().join()"
    assert found.page.evaluate(marked) == ""
    found.page.click("#critical")
    assert found.page.get_attribute("#critical", "aria-pressed") == "true"
    assert found.page.evaluate(marked) == "top,tower_3"
    assert found.page.evaluate("msplitReport.timeline.critical.size") == 5
    found.search("tower_3/b")
    found.page.press("#search", "Enter")
    assert "on the critical path" in found.text("#panel")
    found.page.click("#critical")
    assert found.page.evaluate(marked) == ""


def test_the_legend_tells_every_kind_of_mark(towers: Path, opened: Open):
    legend = opened(towers).text("#legend")
    for word in (
        "stream 0",
        "stream 3",
        "from one stream to another",
        "several kernels",
        "selected",
        "critical path",
        "a wait",
        "needs what",
    ):
        assert word in legend


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(towers: Path, opened: Open, scheme: str):
    axe = axe_core()
    found = opened(towers, scheme, bypass_csp=True)
    found.page.evaluate("msplitReport.compare(1)")
    found.page.click("#critical")
    found.page.add_script_tag(path=axe)
    run = "async () => (await axe.run(document)).violations.map((one) => [one.id, one.nodes.map((node) => node.html)])"
    assert found.page.evaluate(run) == []
    found.search("tower")
    assert found.page.evaluate(run) == []
    found.search("nothing has this name")
    assert found.page.evaluate(run) == []
