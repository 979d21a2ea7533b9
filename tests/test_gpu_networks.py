"""What a GPU is held against TensorFlow by runs here, too, and notices what is wrong."""

from __future__ import annotations

import functools
import pickle
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import forked
from tests.gpu import networks

pytestmark = pytest.mark.tf

SEED = 3


def test_networks_and_ops_are_run_and_what_is_wrong_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = functools.partial(forked.Popen, server=forked.ENGINE)
    monkeypatch.setattr(networks, "subprocess", SimpleNamespace(Popen=begin))
    case = networks._answered(SEED)
    moved = {name: value + 1 for name, value in case["expected"].items()}
    one = np.array([1.5], np.float32)
    op: dict[str, Any] = {"op": "Neg", "inputs": [one], "attrs": {"T": "float32"}, "defaults": {"T": "float32"}}
    path = tmp_path / "corpus.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ops/0", pickle.dumps([{**op, "wanted": [-one]}, {**op, "wanted": [one]}]))
        archive.writestr("networks/1", pickle.dumps(case))
        archive.writestr("networks/2", pickle.dumps({**case, "expected": moved}))
    how = ("--device", "cpu", "--processes", "1", "--modes", "ops,plain", "--out", str(tmp_path / "out"))
    assert networks.main(["run", str(path), *how]) == 1
    told = capfd.readouterr().out
    assert re.search(r"^in all +18 +9   processes that ended: 0$", told, re.MULTILINE)
    for precision in networks.PRECISIONS:
        assert f"plain      {precision:10} 4              2       1" in told
    assert "networks/2 plain tf32 4: step 0: out_0" in told
    assert "op 1 Neg: attrs" in told


def test_a_process_that_dies_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    rows = tmp_path / "0.jsonl"
    rows.write_text('{"at": "op 0 Neg"}\n{"at": "op 0 Neg", "result": ""}\n{"at": "op 1 Abs"}\n{"at": "op')
    assert networks._began(rows) == "op 1 Abs"
    assert networks._done(rows) == ["op 0 Neg", "op 1 Abs"]
