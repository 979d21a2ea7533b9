"""Hostile and damaged models that are assigned and then checked, with nothing said: check has no error to tell of what assign has done,
neither of the model nor of its plan.

The second check builds what the cuda engine would run, where PyTorch is installed. So memory is not limited, unlike in the other kinds.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import time
from dataclasses import replace
from pathlib import Path

from msplit.cli import main
from tests.fuzz import damage, structure
from tests.fuzz.case import Case, Result


def make(seed: int) -> Case:
    """One of the hostile graphs, or one of the damaged files, that `structure` and `damage` make."""
    case = (damage if seed % 4 == 0 else structure).make(seed)
    return replace(case, name=f"checked:{seed}", assign=())


def run(case: Case, folder: Path) -> Result:
    """Assigns and checks. Ids that the file came with go: whoever set them answers for them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model, out, plan = folder / "model", folder / "out", str(folder / "plan.json")
    if case.saved:
        model.mkdir()
    (model / "saved_model.pb" if case.saved else model).write_bytes(case.model)
    result = Result()
    start = time.process_time()
    try:
        for arguments in (
            ["assign", str(model), "-o", str(out), "--emit", "plan", plan, "--no-keep-ids"],
            ["check", str(out), "--plan", plan],
            ["check", str(out), "--select", "MS017"],
        ):
            code, said = _command(arguments)
            result.codes += (code,)
            if code not in (0, 2) or "internal error" in said or (code and result.codes[0] == 0):
                result.problem = f"{arguments[0]} ended with {code}: {said[-2000:]}"
            if code:
                break
    except Exception as escaped:
        result.problem = f"{type(escaped).__name__} escaped: {escaped}"
    result.seconds = time.process_time() - start
    return result


def _command(arguments: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(arguments)
    return code, out.getvalue() + err.getvalue()
