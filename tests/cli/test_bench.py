"""What `bench` prints, writes and ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import SAMPLES, fine, msplit, process
from tests.report.perfetto import complaints
from tests.report.test_schemas import validate


@pytest.mark.tf
def test_bench_of_a_graph_without_ids_and_of_one_with(tmp_path: Path) -> None:
    short = (
        "--measure",
        "duration=0.1",
        "--measure",
        "builds=1",
        "--measure",
        "warmup=0",
        "--engine",
        "tensorflow",
        "--format",
        "json",
    )
    done = fine("bench", SAMPLES / "mmoe_small.pb", "--streams", "1,2", *short)
    found = done.json
    assert (found["schema_version"], found["command"], found["engine"]) == (1, "bench", "tensorflow")
    assert [variant["streams"] for variant in found["result"]["variants"]] == [1, 2]
    assert not found["result"]["failed"]
    assert any("rule set auto" in note for note in found["notes"])
    reference = tmp_path / "reference.npz"
    more = ("--measure", f"save-reference={reference}", "--streams", "2")
    done = fine("bench", SAMPLES / "annotated.pb", *more, *short)
    assert any("as it is annotated, on 3 streams" in note for note in done.json["notes"])
    assert any("folded onto 2" in note for note in done.json["notes"])
    assert reference.exists()
    checked = fine("bench", SAMPLES / "annotated.pb", "--reference", reference, "--streams", "3", *short)
    sources = [check["against"] for variant in checked.json["result"]["variants"] for check in variant["checks"]]
    assert any("TensorFlow on the CPU" in source for source in sources)


@pytest.mark.tf
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "0,1", "--engine", "tensorflow"), "--gpus is for the cuda engine; asked for"),
        (("--gpus", "0,0"), "name each once"),
    ],
)
def test_gpus_that_can_not_be_used_are_refused(options: tuple[str, ...], said: str) -> None:
    done = msplit("bench", SAMPLES / "mmoe_small.pb", *options)
    assert done.code == 2
    assert said in done.err


@pytest.mark.tf
def test_wrong_outputs_are_told_with_the_tolerance_that_would_pass_and_exit_code_1(tmp_path: Path) -> None:
    import numpy as np

    from msplit.inputs.reference import Reference, load_reference, save_reference

    short = (
        "--measure",
        "duration=0.1",
        "--measure",
        "builds=1",
        "--measure",
        "warmup=0",
        "--streams",
        "2",
        "--engine",
        "tensorflow",
    )
    path = tmp_path / "reference.npz"
    fine("bench", SAMPLES / "mmoe_small.pb", "--measure", f"save-reference={path}", *short)
    right = load_reference(path)
    wrong: dict[str, Any] = {name: np.asarray(value) + 0.25 for name, value in right.outputs.items()}
    save_reference(path, Reference(right.feeds, wrong, right.source), force=True)
    done = msplit("bench", SAMPLES / "mmoe_small.pb", "--reference", path, *short, "--format", "json")
    assert done.code == 1
    assert done.json["result"]["failed"]
    assert "error: outputs differ" in done.err
    assert "would pass" in done.err
    text = msplit("bench", SAMPLES / "mmoe_small.pb", "--reference", path, *short)
    assert text.code == 1
    assert "NO: outputs of " in text.out


@pytest.mark.tf
def test_bench_writes_a_trace_of_what_it_measured(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    short = (
        "--measure",
        "duration=0.1",
        "--measure",
        "builds=1",
        "--measure",
        "warmup=0",
        "--engine",
        "tensorflow",
        "--streams",
        "2",
    )
    done = fine("bench", SAMPLES / "mmoe_small.pb", *short, "--trace", target, columns=400)
    assert f"Written: {target}, one measured step of 2 variants" in done.out
    found = json.loads(target.read_bytes())
    assert complaints(found) == []
    assert {event["pid"] for event in found["traceEvents"]} == {1, 2}
    assert "Longest waits and gaps of a step" in done.out
    told = fine("bench", SAMPLES / "mmoe_small.pb", *short, "--trace", target, "--force", "--format", "json").json
    validate("bench", told)
    assert {pause["variant"] for pause in told["pauses"]} == {one["label"] for one in told["result"]["variants"]}
    again = msplit("bench", SAMPLES / "mmoe_small.pb", *short, "--trace", target)
    assert (again.code, again.out) == (2, "")
    assert "is there already" in again.err


def test_the_cuda_engine_without_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    run = (
        process if torch.cuda.is_available() else msplit
    )  # a device that is there can only be hidden from a process that starts
    done = run("bench", SAMPLES / "mmoe_small.pb", "--engine", "cuda", CUDA_VISIBLE_DEVICES="")
    assert (done.code, done.out) == (2, "")
    assert "error: the cuda engine can not run here: " in done.err
    assert "fix: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.tf
def test_with_little_effort_bench_says_what_it_left_out(tmp_path: Path) -> None:
    short = (
        "--measure",
        "duration=0.1",
        "--measure",
        "builds=1",
        "--measure",
        "warmup=0",
        "--streams",
        "2",
        "--cuda",
        "effort=fast",
    )
    done = fine("bench", SAMPLES / "mmoe_small.pb", "--engine", "tensorflow", *short)
    assert "Effort fast is for the cuda engine: TensorFlow runs as it does otherwise." in " ".join(done.out.split())
    refused = msplit("tune", SAMPLES / "mmoe_small.pb", "--cuda", "effort=fast")
    assert refused.code == 2
    assert "msplit tune excludes --cuda effort=fast: to tune is to measure" in refused.err
