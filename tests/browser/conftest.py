"""A page of a report in headless Chromium. Skipped, with the reason, where there is no Chromium or no playwright."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync"),
]


@dataclass
class Opened:
    """A report in the browser.

    Attributes:
        page: Playwright's page.
        noise: What it wrote to the console, and errors that nobody caught.
        requests: What it asked for, the file itself first.
    """

    page: Any
    noise: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def search(self, text: str) -> list[str]:
        """Types into the search box and returns the names that it offers."""
        self.page.fill("#search", text)
        return [str(option).split("\n")[0] for option in self.page.locator("#results [role=option]").all_inner_texts()]

    def wait(self, condition: str) -> None:
        """Waits for a condition in JavaScript. (Playwright's own way needs `eval` in the page, which the page forbids.)"""
        end = time.monotonic() + 10
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not so: {condition}"
            self.page.wait_for_timeout(20)

    def to_graph(self) -> None:
        """Scrolls to the graph. It ignores the wheel while the page scrolls and shortly after."""
        self.page.evaluate("document.getElementById('graph').scrollIntoView()")
        self.page.wait_for_timeout(400)

    def hidden_headings(self) -> list[str]:
        """Headings of sections and tables that are not wholly between the left and the right edge of what they are in, and of the page."""
        return self.page.evaluate(  # type: ignore[no-any-return]
            """() => [...document.querySelectorAll("h1, h2, h3, caption, th")].filter((heading) => {
              if (!heading.checkVisibility()) return false;
              const box = heading.getBoundingClientRect(), frame = (heading.closest(".scroll") ?? document.body).getBoundingClientRect();
              return box.left < 0 || box.right > innerWidth || box.right > frame.right + 1 || heading.scrollWidth > heading.clientWidth + 1;
            }).map((heading) => heading.textContent)"""
        )

    def position(self, name: str) -> dict[str, float]:
        """Where the box of a node is on the screen."""
        self.to_graph()
        return self.page.evaluate(  # type: ignore[no-any-return]
            """(name) => {
              const { model, graph } = msplitReport;
              const element = graph.standing(model.nodes.home[model.index.get(name)]);
              const at = graph.cy.getElementById(`${element}`).renderedPosition();
              const frame = document.getElementById("canvas").getBoundingClientRect();
              return { x: frame.left + at.x, y: frame.top + at.y };
            }""",
            name,
        )


def axe_core() -> str:
    """Where axe-core's script is; without it the test is skipped. `.ci/browser` brings it from npm where npm is."""
    path = os.environ.get("MSPLIT_AXE") or str(Path(sys.prefix) / "axe" / "node_modules" / "axe-core" / "axe.min.js")
    if not Path(path).exists():
        pytest.skip("no axe-core: npm install axe-core, and set MSPLIT_AXE to its axe.min.js")
    return path


# Playwright's synchronous driver keeps an event loop running in this thread until it stops: were it to last for the whole session, no later
# test of the same worker could call asyncio.run.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = os.environ.get("MSPLIT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: install it (Debian: apt-get install chromium) or set MSPLIT_CHROMIUM")
    # Ubuntu's chromium is a note that points to a snap.
    starts = subprocess.run([path, "--version", "--no-sandbox"], capture_output=True, text=True, timeout=60)
    if starts.returncode:
        pytest.skip(f"{path} does not start: {(starts.stderr or starts.stdout).strip()[:200]}")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (dependency group browser)"
    )
    with playwright.sync_playwright() as driver:
        # Every launch gets a new profile folder of its own.
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a report's file: ``opened(path, scheme="dark", width=400)``."""
    contexts = []

    def start(path: Path, scheme: str = "light", width: int = 1400, **options: Any) -> Opened:
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 1000}, **options)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.noise.append(f"{message.type}: {message.text}"))
        found.page.on("pageerror", lambda error: found.noise.append(f"error: {error}"))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(path.as_uri())
        found.page.wait_for_selector("html[data-ready]", timeout=60_000)
        return found

    yield start
    for context in contexts:
        context.close()
