"""How busy a GPU is as the driver tells, and NVIDIA's switches of TensorFlow, on a real one."""

from __future__ import annotations

import pytest

from msplit.benchmark.benchmark import bench
from msplit.benchmark.diagnose import advice, busy
from msplit.verify.results import Settings
from tests.cli.runner import SAMPLES, process

pytestmark = pytest.mark.gpu

QUICK = Settings(duration=0.3, builds=1)


def test_bench_says_how_busy_the_gpu_is() -> None:
    request = {"engine": "cuda", "streams": (1, 4), "batch": 128, "compare_tensorflow": False, "settings": QUICK}
    found = bench(SAMPLES / "mmoe_small.pb", **request)
    variants = [one for one in found.result.variants if one.host is not None]
    loads = busy(variants, found.limits)
    assert [one.label for one in loads] == [one.label for one in variants]
    assert all(one.works is not None and 0 < one.works <= 1 for one in loads)
    assert all(one.driver is not None and 0 <= one.driver <= 1 for one in loads)
    assert any(one.filled is not None for one in loads)
    assert len(advice(loads, variants)) == 1


@pytest.mark.tf
@pytest.mark.alone
def test_each_switch_of_tensorflow_runs_and_gives_the_same() -> None:
    pytest.importorskip("tensorflow.python")  # there may be its protos alone
    tensorflow = pytest.importorskip("tensorflow")
    if not tensorflow.config.list_physical_devices("GPU"):
        pytest.skip("this TensorFlow sees no GPU")
    # In a process of its own: what TensorFlow makes of its GPUs is decided once in each. It starts seven times.
    done = process(
        *("bench", SAMPLES / "mmoe_small.pb", "--engine", "tensorflow", "--streams", "1,2", "--batch", 128),
        *(
            "--format",
            "json",
            "--measure",
            "duration=0.3",
            "--measure",
            "builds=1",
            "--tensorflow",
            "merge-streams",
            "--tensorflow",
            "private-threads=2",
        ),
        *("--tensorflow", "device-priorities=-1,0", "--tensorflow", "device-memory=2048,4096"),
        seconds=300,
    )
    assert done.code == 0, done.err
    assert [one["skipped"] for one in done.json["result"]["variants"]] == [None] * 6
    assert not done.json["result"]["failed"]
