"""Writes `tests/gpu/RESULTS.md`, what the tests that need a GPU came to, from pytest's JUnit files; committed after each visit.

    python -m pytest tests/gpu -m "gpu and not alone" --junitxml OUT/gpu.xml     on the GPU machine, in one or more runs
    python tools/gpu_results.py --machine "one NVIDIA H100 …" OUT/*.xml          here; writes the page anew

Per file: passed, failed, skipped. Below it each failure, and each reason for which tests were skipped, with its count. Of a test that ran
more than once the last of the files counts; what failed in an earlier one is listed, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests" / "gpu" / "RESULTS.md"


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """What came of a test (passed, failed or skipped), and the first line of why."""
    for tag, word in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return word, (found.get("message") or "").strip().splitlines()[0][:200] if found.get("message") else ""
    return "passed", ""


def page(files: list[Path], machine: str, commit: str, note: str) -> str:
    """The page, as Markdown."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failed, mended, skipped = [], Counter[str](), Counter[str]()
    seconds, when = 0.0, ""
    results: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for file in files:
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            seconds += float(suite.get("time", 0))
            when = max(when, suite.get("timestamp", "")[:10])
            for case in suite.iter("testcase"):
                place = (case.get("classname") or "").replace(".", "/") + ".py"
                results[place, case.get("name") or ""].append(outcome(case))
    for (place, name), runs in results.items():
        word, why = runs[-1]
        counts[place][word] += 1
        if word == "failed":
            failed.append(f"`{place}::{name}`: {why}")
        elif word == "skipped":
            skipped[why] += 1
        earlier = [reason for result, reason in runs[:-1] if result == "failed"]
        if earlier and word != "failed":
            mended[f"`{place}`: {earlier[0]}"] += 1
    total = sum(counts.values(), Counter())
    lines = [
        "# What the tests that need a GPU came to",
        "",
        "Written by `tools/gpu_results.py` from the last visit to a GPU machine.",
        "",
        f"- machine: {machine}",
        f"- commit: {commit}, {when}",
        f"- **{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped** in {seconds:.0f} s of pytest",
        *([f"- {note}"] if note else []),
        "",
        "| file | passed | failed | skipped |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {place} | {n['passed']} | {n['failed']} | {n['skipped']} |" for place, n in sorted(counts.items())),
        "",
        "## Failed",
        "",
        *([f"- {line}".replace("|", "\\|") for line in failed] or ["None."]),
        "",
        *(["## Failed at first, and passed when run again", ""] if mended else []),
        *(f"- {count}: {line}".replace("|", "\\|") for line, count in sorted(mended.items())),
        *([""] if mended else []),
        "## Skipped",
        "",
        *([f"- {count}: {why}" for why, count in sorted(skipped.items())] or ["None."]),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page. Returns the exit code: 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--machine", required=True, help="cards, driver, PyTorch, and whether TensorFlow was there")
    parser.add_argument("--note", default="", help="what else is to be known, such as what was not run")
    parser.add_argument("--commit", help="what was tested (default: the commit that is checked out)")
    asked = parser.parse_args()
    commit = (
        asked.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    text = page(asked.files, asked.machine, commit, asked.note)
    TARGET.write_text(text, "utf-8")
    print(text)
    return int("## Failed\n\nNone." not in text)


if __name__ == "__main__":
    sys.exit(main())
