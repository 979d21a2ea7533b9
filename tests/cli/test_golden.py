"""What users see at 80 columns, word for word.

After a change that is meant: MSPLIT_GOLDEN=1 python -m pytest tests/cli/test_golden.py, and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.runner import ROOT, fine

GOLDEN = Path(__file__).parent / "golden"
pytestmark = pytest.mark.whole_search  # what users see

MODELS = ("mmoe_small.pb", "training.meta", "feature_columns", "keras_inception")
CASES = {
    **{f"analyze-{model}": ("analyze", f"sample_graphs/{model}") for model in MODELS},
    **{f"assign-{model}": ("assign", f"sample_graphs/{model}", "--dry-run") for model in MODELS},
    "analyze-all": ("analyze", "sample_graphs/training.meta", "--show", "all"),
    "analyze-markdown": ("analyze", "sample_graphs/towers_small.pb", "--format", "md"),
    "analyze-engine": ("analyze", "sample_graphs/custom_op.pb", "--show", "branches", "--engine", "cuda"),
    "assign-annotated": ("assign", "sample_graphs/annotated.pb", "--rules", "auto", "--streams", "3", "--dry-run"),
    "assign-compare": ("assign", "sample_graphs/mmoe_small.pb", "--compare", "--no-measure", "--streams", "4"),
    "assign-diff": ("assign", "sample_graphs/towers_small.pb", "--rules", "recsys", "--diff"),
    "assign-explain": ("assign", "sample_graphs/keras_inception", "--explain", "{node}"),
    "assign-markdown": ("assign", "sample_graphs/mmoe_small.pb", "--dry-run", "--format", "md"),
    "diff": ("diff", "sample_graphs/mmoe_small.pb", "sample_graphs/mmoe_small.pbtxt"),
    "diff-markdown": ("diff", "sample_graphs/mmoe_small.pb", "sample_graphs/annotated.pb", "--format", "md"),
    "rules": ("rules",),
}
NODE = "StatefulPartitionedCall_1/StatefulPartitionedCall/functional_2_1/stem_conv_1/convolution"


@pytest.mark.parametrize("case", CASES)
def test_output(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if "--engine" in CASES[case]:
        pytest.importorskip("torch", reason="the cuda engine's kernel library is not installed")
    done = fine(*(argument.format(node=NODE) for argument in CASES[case]))
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("MSPLIT_GOLDEN"):
        path.write_text(done.out)
    assert done.out == path.read_text()
    if "--format" not in CASES[case] and case not in ("analyze-all", "assign-diff", "assign-explain"):
        assert max(map(len, done.out.splitlines())) <= 80


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)
