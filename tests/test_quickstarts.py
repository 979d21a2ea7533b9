"""docs/quickstarts: each page is short, and all that it shows runs, block by block, in a folder with the sample graphs."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.runner import ROOT, SAMPLES, msplit

PAGES = sorted((ROOT / "docs" / "quickstarts").glob("*.md"))
BLOCK = re.compile(r"^```(sh|python)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_in_a_shell(text: str) -> str:
    """What a block prints that starts a server, which listens on a port of the test's own."""
    port = str(free_port())
    text = text.replace("msplit serve", "msplit serve --port 0").replace("8501", port)
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", f"{text}wait\n"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_one_for_each_kind_of_user() -> None:
    assert {page.stem for page in PAGES} == {"serve", "python", "annotate", "train"}
    index = (ROOT / "README.md").read_text()
    assert all(f"](docs/quickstarts/{page.name})" in index for page in PAGES)


@pytest.mark.tf
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_quickstart_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sample_graphs").symlink_to(SAMPLES)
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    for language, text in blocks:
        assert len(text.splitlines()) <= 10
        if language == "python":
            with ThreadPoolExecutor(1) as thread:  # a browser's tests leave an event loop running in theirs
                thread.submit(exec, compile(text, page.name, "exec"), {"__name__": "example"}).result()
            expected = re.findall(r"^ *print\(.*\) +# (.+)$", text, re.MULTILINE)
            assert capsys.readouterr().out.splitlines() == expected
        elif "msplit serve" in text:
            assert re.search(
                r'"predictions": .*\nmsplit_requests_total\{.*model="ranker"', run_in_a_shell(text), re.DOTALL
            )
        else:
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                if program == "mkdir":
                    subprocess.run([program, *arguments], check=True)
                    continue
                assert program == "msplit"
                done = msplit(*arguments)
                assert done.code == 0, done.err
