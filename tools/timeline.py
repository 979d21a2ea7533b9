"""Draws `docs/timeline.svg`: one step of Inception-v3 on one stream and on four, as `msplit assign --trace` simulates it.

    python tools/timeline.py

A box is a kernel. Its colour is its stream in the run on four, in both halves of the picture. A test compares the file with what this
would write.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "timeline.svg"
MODEL = ROOT / "sample_graphs" / "inception_v3_stripped.pb"
STREAMS = 4

LEFT, WIDTH, RIGHT = 86, 820, 24  # of the labels, of the time axis, of the margin
LANE, BOX = 34, 26  # heights: of a stream, of a kernel in it
TICK_US = 100

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #4a5160 }
.title { font-size: 17px; font-weight: 600; fill: #1b1f27 }
.page { fill: #ffffff }
.lane { fill: #f1f3f7 }
.tick { stroke: #c9d0dc }
.s0 { fill: #8593a5 } .s1 { fill: #2f7ec7 } .s2 { fill: #e8a317 } .s3 { fill: #1f9e76 }
@media (prefers-color-scheme: dark) {
text { fill: #b4bccb }
.title { fill: #f0f3f8 }
.page { fill: #14171d }
.lane { fill: #1f242e }
.tick { stroke: #3a4252 }
}"""


class Kernel(NamedTuple):
    """A kernel of the simulated step: its node, its stream, and when it began and how long it took, in µs."""

    name: str
    stream: int
    start_us: float
    duration_us: float


def simulated(streams: int) -> list[Kernel]:
    """The kernels of a step on so many streams, and what the step takes to start and end as the last of them."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        command = [
            *(sys.executable, "-m", "msplit", "--quiet", "assign", MODEL, "--batch", "1", "--rules", "vision"),
            *("--streams", str(streams), "--trace", trace),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    first = min(event["tid"] for event in slices)
    return [Kernel(event["name"], event["tid"] - first, event["ts"], event["dur"]) for event in slices]


def total_us(kernels: list[Kernel]) -> float:
    """The time of the whole step."""
    return max(kernel.start_us + kernel.duration_us for kernel in kernels)


def svg() -> str:
    """The picture, as text."""
    many = simulated(STREAMS)
    one = simulated(1)
    color = {kernel.name: kernel.stream for kernel in many}
    scale = WIDTH / total_us(one)
    width = LEFT + WIDTH + RIGHT
    body: list[str] = []
    y = 40
    for title, kernels, lanes in (("One stream", one, 1), ("Four streams", many, STREAMS)):
        body.append(f'<text class="title" x="{LEFT}" y="{y}">{title}: {total_us(kernels):.0f} µs</text>')
        y += 14
        for lane in range(lanes):
            body.append(f'<rect class="lane" x="{LEFT}" y="{y + lane * LANE}" width="{WIDTH}" height="{BOX}"/>')
            body.append(f'<text x="{LEFT - 10}" y="{y + lane * LANE + 18}" text-anchor="end">stream {lane}</text>')
        for kernel in kernels:
            x, across = LEFT + kernel.start_us * scale, max(kernel.duration_us * scale - 0.8, 0.4)
            top = y + (kernel.stream if lanes > 1 else 0) * LANE
            body.append(
                f'<rect class="s{color.get(kernel.name, 0)}" x="{x:.1f}" y="{top}" width="{across:.1f}" height="{BOX}">'
                f"<title>{escape(kernel.name)}, {kernel.duration_us:.1f} µs</title></rect>"
            )
        y += lanes * LANE + 34
    y -= 26
    ticks = range(0, int(total_us(one)) + 1, TICK_US)
    axis = [f'<path class="tick" d="M{LEFT + tick * scale:.1f},46 V{y}"/>' for tick in ticks]
    body += [f'<text x="{LEFT + tick * scale:.1f}" y="{y + 18}" text-anchor="middle">{tick}</text>' for tick in ticks]
    middle = LEFT + WIDTH / 2
    body.append(f'<text x="{middle}" y="{y + 42}" text-anchor="middle">time since the step began, in µs</text>')
    height = y + 56
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>One step of Inception-v3 on one stream and on four: a box is a kernel, a colour is a stream</title>",
            f"<style>{STYLE}\n</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            *axis,
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(svg(), "utf-8")
