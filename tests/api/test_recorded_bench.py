"""`bench` is sized and priced as the record of the assignment says, and what tuning writes has a record, too."""

from pathlib import Path

import numpy as np
import pytest

from msplit import api, formats
from msplit.assignment.model import resolve
from msplit.cost.profile import Workload
from msplit.run.tuning import write
from tests.cli.runner import SAMPLES, fine

MMOE = SAMPLES / "mmoe_small.pb"
QUICK = (
    "--engine",
    "tensorflow",
    "--measure",
    "duration=0.1",
    "--measure",
    "builds=1",
    "--measure",
    "warmup=0",
    "--format",
    "json",
)


@pytest.fixture(scope="module")
def assigned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Assigned for a batch of 128 and an A100."""
    out = tmp_path_factory.mktemp("assigned") / "o.pb"
    fine("assign", MMOE, "--batch", "128", "--costs", "gpu=a100", "--streams", "6", "-o", out)
    return out


@pytest.mark.tf
@pytest.mark.parametrize(
    ("given", "rows", "said"),
    [
        ((), 128, "run with batch 128, gpu a100 (recorded with the model)"),
        (("--batch", "4"), 4, "run with batch 4 (given); gpu a100 (recorded with the model)"),
        (("--batch", "4", "--costs", "gpu=h200"), 4, None),
        (("--costs", "record=no"), 1, None),
    ],
)
def test_what_is_not_given_is_as_recorded(given: tuple[str, ...], rows: int, said: str | None, assigned: Path) -> None:
    found = fine("bench", assigned, "--streams", "2", *given, *QUICK).json
    assert [one["shape"][0] for one in found["inputs"].values()] == [rows]
    assert [note for note in found["notes"] if note.startswith("run with ")] == ([] if said is None else [said])


@pytest.mark.tf
def test_a_file_of_outputs_says_its_own_batch(assigned: Path, tmp_path: Path) -> None:
    reference = tmp_path / "r.npz"
    fine("bench", assigned, "--streams", "2", "--batch", "5", "--measure", f"save-reference={reference}", *QUICK)
    found = fine("bench", assigned, "--streams", "2", "--reference", reference, *QUICK).json
    assert [one["shape"][0] for one in found["inputs"].values()] == [5]
    assert "run with gpu a100 (recorded with the model)" in found["notes"]


def test_what_tuning_writes_has_a_record(assigned: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.run.test_tuning import tuned_of

    job, tuned = tuned_of("towers_small.pb")
    write(job.flat, tuned, output=tmp_path / "o.pb", workload=Workload(2, gpu="a100"))
    record = api.load(tmp_path / "o.pb").model.record
    assert record is not None
    assert (record.rules, record.streams, record.batch, record.gpu) == (None, tuned.streams, 2, "a100")
    assert resolve(api.load(tmp_path / "o.pb")).words() == "batch 2, gpu a100 (recorded with the model)"
    fine("check", tmp_path / "o.pb")
    # Ids of an assignment before it are not set by hand: none is left.
    before = api.load(assigned)
    ids = np.full(len(before), -1, np.int32)
    ids[before.graph.index["expert_1/dense_0/MatMul"]] = 1
    api.save(before, ids, tmp_path / "few.pb", record=record)
    present = api.load(tmp_path / "few.pb").graph.nodes_with(formats.STREAM_ID)
    assert [before.graph.names[node] for node in present] == ["expert_1/dense_0/MatMul"]
