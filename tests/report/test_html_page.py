from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.checks.run import Reported
from msplit.checks.subject import Finding, Severity
from msplit.escape import visible
from msplit.report.html import document
from msplit.report.html.page import Page, render
from msplit.report.html.page import page as build_page
from msplit.schedule.choose import Proposal
from msplit.schedule.judge import bounds, predict
from tests.graphs import parse

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{data}}\u2028-->"
NO_BLOCKS = np.empty(0, np.int32)
FORK = "x:Placeholder; a:MatMul(x)@10us; b:MatMul(a)@20us; c:MatMul(a)@18us; d:AddV2(b,c)@6us"


def page_of(text: str, lanes: list[int] | None = None, names: list[str] | None = None, **more: Any) -> Page:
    flat, costs = parse(text, **({"names": names} if names else {}))
    prediction = predict(flat, costs, np.asarray(lanes or [0] * len(flat), np.int32))
    return Page(flat, costs, prediction, bounds(flat, costs), "as they are in the model", **more)


VENDOR = [*document.REPORT.vendor, *document.PLOTS.vendor]


class Reader(HTMLParser):
    """Collects tags, attributes and the text of scripts, as a browser would cut them up."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.scripts[-1][1] == "":
            self.scripts[-1] = (self.scripts[-1][0], data)
        else:
            self.text += data


def data_of(text: str) -> dict[str, Any]:
    packed = next(body for attributes, body in Reader(text).scripts if attributes.get("id") == "data")
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_names_that_are_html_stay_text_wherever_they_come():
    text = render(
        page_of(
            FORK,
            names=[f"{EVIL}{i}" for i in range(5)],
            candidates=[
                Proposal(EVIL, NO_BLOCKS, NO_BLOCKS, 5.0, 0, 1, 5.0),
                Proposal("two", NO_BLOCKS, NO_BLOCKS, 3.0, 1, 2, 3.0, EVIL),
            ],
            findings=[Reported(EVIL, Severity.ERROR, Finding(EVIL, EVIL, (f"{EVIL}0",)))],
            findings_note=EVIL,
            warnings=[EVIL],
        )
    )
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 4
    assert not [tag for tag, attributes in reader.tags if tag == "img" or "onerror" in attributes]
    nodes = [attributes["data-node"] for _, attributes in reader.tags if "data-node" in attributes]
    assert nodes == [visible(f"{EVIL}0")]
    assert reader.text.count("<img src=x onerror=alert(2)>") >= 5
    assert data_of(text)["nodes"]["name"] == [visible(f"{EVIL}{i}") for i in range(5)]


def test_the_page_names_nothing_outside_of_itself():
    reader = Reader(render(page_of(FORK)))
    for tag, attributes in reader.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#"), attributes
    style = re.search(r"<style>(.*?)</style>", render(page_of(FORK)), re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_only_the_scripts_that_ship_may_run():
    reader = Reader(render(page_of(FORK)))
    policy = next(
        a["content"] for tag, a in reader.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    runs = [body for attributes, body in reader.scripts if attributes.get("type") is None]
    hashes = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in runs]
    assert policy is not None
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-inline" not in re.search(r"script-src ([^;]*);", policy)[1]  # type: ignore[index]


def test_no_shipped_file_can_end_its_own_script():
    for folder, names in (("vendor", VENDOR), ("assets", [*document.REPORT.scripts, *document.PLOTS.scripts])):
        for name in names:
            assert "</script" not in document.asset(folder, name).lower(), name
            assert "<!--" not in document.asset(folder, name), name


def test_vendored_files_are_what_their_table_says_and_not_too_large():
    folder = resources.files("msplit.report.html").joinpath("vendor")
    table = folder.joinpath("README.md").read_text("utf-8")
    total = 0
    for name in VENDOR:
        content = folder.joinpath(name).read_bytes()
        total += len(content)
        assert f"| {name} |" in table
        assert hashlib.sha256(content).hexdigest() in table
    assert total < 1_500_000
    for kit in (document.REPORT, document.PLOTS):
        for name in kit.licences:
            assert re.search("Permission (is hereby granted|to use, copy, modify)", document.asset("vendor", name)), (
                name
            )
            assert f"{name})" in table or f"{name}," in table
    assert "Cytoscape Consortium" in render(page_of(FORK))


def test_the_same_page_is_the_same_bytes_in_every_process():
    code = (
        "import hashlib; from tests.report.test_html_page import FORK, page_of; from msplit.report.html import render;"
        "print(hashlib.sha256(render(page_of(FORK, [0, 0, 0, 1, 0])).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_lone_surrogate_in_a_name_does_not_stop_the_report():
    text = render(page_of(FORK, names=["\ud800", "a", "b", "c", "d"]))
    assert data_of(text)["nodes"]["name"][0] == "\\ud800"
    text.encode("utf-8", "strict")


def test_infinite_costs_do_not_break_the_data():
    flat, costs = parse(FORK)
    costs.flops[1], costs.bytes[1] = np.inf, np.nan
    prediction = predict(flat, costs, np.zeros(len(flat), np.int32))
    data_of(render(Page(flat, costs, prediction, bounds(*parse(FORK)), "x")))


def test_every_stream_colour_is_there_and_can_carry_black_or_white_text():
    style = document.asset("assets", "style.css")
    for number in range(16):
        found = re.findall(rf"--s{number}: (#[0-9a-f]{{6}})", style)
        assert found
        for colour in found:
            assert max(contrast(colour, "#000000"), contrast(colour, "#ffffff")) >= 4.5


@pytest.mark.parametrize(("background", "theme"), [("#ffffff", 0), ("#14171c", -1)])
def test_text_colours_are_readable_on_their_background(background: str, theme: int):
    style = document.asset("assets", "style.css")
    assert background in style
    for name in ("fg", "dim", "accent", "bad", "warn"):
        assert contrast(re.findall(rf"--{name}: (#[0-9a-f]{{6}})", style)[theme], background) >= 4.5, name
    for number in range(8):
        assert contrast(re.findall(rf"--p{number}: (#[0-9a-f]{{6}})", style)[theme], background) >= 3, number


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_model_without_ids_gets_those_of_the_rules_that_fit_it_and_every_candidate():
    flat, costs = parse(FORK)
    page = build_page(flat, costs)
    assert page.assignment is not None
    assert "which fit this model" in page.origin
    assert page.findings is None
    assert "has none yet" in page.findings_note
    assert page.candidates is not None
    assert page.chosen in page.candidates


def test_a_model_with_ids_keeps_them_and_is_checked():
    flat, costs = parse(FORK.replace("@18us", "@18us[_stream_id=1]"))
    page = build_page(flat, costs, candidates=False)
    assert page.origin == "as they are in the model"
    assert page.prediction.lanes.tolist() == [0, 1]
    assert page.candidates is None
    assert page.findings is not None
    assert "checks run" in page.findings_note
    assert "--no-candidates" in render(page)


def test_a_graph_without_kernels_still_has_a_page():
    flat, costs = parse("x:Placeholder; y:Identity(x)")
    text = render(build_page(flat, costs))
    assert "No node launches a kernel." in Reader(text).text
