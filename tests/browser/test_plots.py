"""The curves of `load --html` and `bench --plot` in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from msplit.cost.profile import Reached
from msplit.report import load as report
from msplit.report.document import Document, Table
from msplit.report.html.document import Plot, page
from msplit.report.html.page import render
from tests.browser.conftest import Opened, axe_core
from tests.report.test_html_page import EVIL, FORK, page_of
from tests.serving.loadtest.test_report import RESULT, TENSORFLOW

Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def load_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plots") / "load.html"
    path.write_text(report.page(RESULT), "utf-8")
    return path


def texts(found: Opened, axis: str, plot: int = 0) -> list[str]:
    """What stands along an axis of a plot: its ticks, or with "label" its name."""
    return found.page.evaluate(  # type: ignore[no-any-return]
        """([axis, plot]) => [...document.querySelectorAll(".figure")[plot].querySelectorAll(`[aria-label="${axis}"] text`)]
          .map((text) => text.textContent)""",
        [axis, plot],
    )


def numbers(found: Opened, axis: str, plot: int = 0) -> list[float]:
    return [float(text.replace(",", "")) for text in texts(found, f"{axis}-axis tick label", plot)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_curves_follow_the_theme_and_nothing_is_fetched(load_page: Path, opened: Open, scheme: str):
    found = opened(load_page, scheme)
    assert found.noise == []
    assert found.requests == [load_page.as_uri()]
    assert found.page.locator(".figure").count() == 4
    colours = """() => {
      const text = document.querySelector('.figure [aria-label="x-axis tick label"] text');
      const line = document.querySelector('.figure [aria-label="line"] path');
      return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill, getComputedStyle(line).stroke];
    }"""
    assert (
        found.page.evaluate(colours)
        == {
            "light": ["rgb(255, 255, 255)", "rgb(27, 31, 36)", "rgb(11, 107, 184)"],
            "dark": ["rgb(20, 23, 28)", "rgb(230, 233, 237)", "rgb(90, 169, 240)"],
        }[scheme]
    )
    found.page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    found.wait(f"({colours})()[2] === '{'rgb(90, 169, 240)' if scheme == 'light' else 'rgb(11, 107, 184)'}'")


@pytest.mark.parametrize("width", [1400, 800, 400])
def test_axes_have_names_with_units_and_whole_ticks_that_can_be_read(load_page: Path, opened: Open, width: int):
    found = opened(load_page, width=width)
    for plot, quantity in enumerate(("p50", "p99", "p50", "p99")):
        assert texts(found, "x-axis label", plot) == ["answers per second"]
        assert texts(found, "y-axis label", plot) == [f"{quantity} latency, µs"]
        for axis in ("x", "y"):
            ticks = numbers(found, axis, plot)
            assert len(ticks) >= 2
            assert [tick for tick in ticks if tick != int(tick)] == []
    overlaps = """() => [...document.querySelectorAll('.figure [aria-label$="tick label"]')].flatMap((axis) => {
      const boxes = [...axis.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
      return boxes.flatMap((one, at) => boxes.slice(at + 1).filter((other) =>
        one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom));
    }).length"""
    assert found.page.evaluate(overlaps) == 0
    small = """() => [...document.querySelectorAll(".figure text, .figure span")]
      .filter((text) => parseFloat(getComputedStyle(text).fontSize) < 11).map((text) => text.textContent)"""
    assert found.page.evaluate(small) == []
    outside = """() => [...document.querySelectorAll(".figure svg.plot")].flatMap((svg) => {
      const frame = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("text")].filter((text) => {
        const box = text.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1 || box.top < frame.top - 1;
      });
    }).map((text) => text.textContent)"""
    assert found.page.evaluate(outside) == []


def test_what_the_benchmark_costs_stretches_no_axis_and_is_in_a_table(load_page: Path, opened: Open):
    found = opened(load_page)
    legend = found.page.locator(".figure").first.inner_text()
    assert "pool" in legend
    assert TENSORFLOW in legend
    assert "echo" not in legend
    assert max(numbers(found, "x")) <= 131_000  # the pool's most; the echo has twice as much
    assert min(numbers(found, "y")) >= 79
    assert "echo, closed loop" in found.page.locator("caption").all_inner_texts()


def test_a_point_tells_its_figures(load_page: Path, opened: Open):
    found = opened(load_page)
    dot = found.page.locator('.figure [aria-label="dot"] path').first
    dot.scroll_into_view_if_needed()
    dot.hover(force=True)
    tip = found.page.locator('.figure [aria-label="tip"]').first
    for part in ("pool", "answers per second: 12,250", "p50 latency, µs: 79.5 (79 to 80)"):
        assert part in tip.text_content(), part


def test_ticks_of_batches_are_the_batches(opened: Open, tmp_path: Path):
    lines = {"4 streams": {float(batch): (90.0 * batch, 80.0 * batch, 95.0 * batch) for batch in (1, 3, 12, 64)}}
    path = tmp_path / "sweep.html"
    plot = Plot("One step, by batch", "batch, rows", "one step, µs", lines, ticks=True)
    path.write_text(page(Document("bench: x", tables=[Table("", ("a",), [("b",)])]), [plot], "What it shows."), "utf-8")
    found = opened(path)
    assert texts(found, "x-axis tick label") == ["1", "3", "12", "64"]
    assert found.noise == []


@pytest.mark.parametrize("points", [{8.0: (0.5, 0.5, 0.5)}, {8.0: (3.2, 3.1, 3.3), 9.0: (3.25, 3.2, 3.3)}])
def test_one_point_and_a_narrow_range_have_axes_too(opened: Open, tmp_path: Path, points: dict):
    path = tmp_path / "few.html"
    path.write_text(page(Document("x"), [Plot("a", "batch", "µs", {"one": points}, ticks=True)], ""), "utf-8")
    found = opened(path)
    assert found.noise == []
    assert len(numbers(found, "x")) >= 1
    assert len(numbers(found, "y")) >= 1
    assert found.page.locator(".figure [aria-label=dot] path").count() == len(points)


@pytest.mark.parametrize("width", [1400, 400])
def test_no_heading_of_a_table_is_hidden(load_page: Path, opened: Open, width: int):
    found = opened(load_page, width=width)
    assert found.hidden_headings() == []
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(load_page: Path, opened: Open, scheme: str):
    axe = axe_core()
    found = opened(load_page, scheme, bypass_csp=True)
    found.page.add_script_tag(path=axe)
    run = "async () => (await axe.run(document)).violations.map((one) => [one.id, one.nodes.map((node) => node.html)])"
    assert found.page.evaluate(run) == []


@pytest.mark.parametrize("width", [1200, 400])
def test_a_roofline_is_drawn_in_the_report(opened: Open, tmp_path: Path, width: int):
    rates = [
        ("MatMul", 2e14, 4e12, 50.0, 4.95e14, "compute"),
        (EVIL, 1e9, 1e11, 0.01, 6.7e13, "launch"),
        ("Copy", 0.0, 3e12, 0.0, 6.7e13, "memory"),
    ]
    reached = [
        Reached(at, op, 1 + at, 9.0, flops, 1e6, flops, speed, intensity, peak, 1.67e13, bound, 0.3)
        for at, (op, flops, speed, intensity, peak, bound) in enumerate(rates)
    ]
    path = tmp_path / "roofline.html"
    path.write_text(render(page_of(FORK, reached=reached)), "utf-8")
    found = opened(path, width=width)
    assert found.noise == []
    assert found.requests == [path.as_uri()]
    # What computes nothing has a row, and no place on the axis.
    assert found.page.locator('#roof [aria-label="dot"] path').count() == 2
    assert found.page.locator("#roofline tbody tr").count() == 3
    roofs = found.page.locator('#roof [aria-label="text"] text').all_text_contents()
    assert set(roofs) == {"16.7 TB/s", "495 TFLOP/s", "67 TFLOP/s"}
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
