"""How busy a GPU is, which GPUs a process sees, and what to do first. The driver is played by a program of its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.benchmark.diagnose import Limits, advice, busy
from msplit.benchmark.timing import bench
from msplit.cli import doctor
from msplit.core.statistics import summarize
from msplit.engines.environment import utilization, visible
from msplit.report import bench_sections as report
from msplit.schedule.judge import StepBounds
from msplit.verify.results import Settings, VariantResult
from tests.benchmark.test_timing import Fake, fresh, variant

UUIDS = ["GPU-a1", "GPU-b2", "GPU-b3", "GPU-c4"]


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, [0, 1, 2, 3]), ("", []), ("-1", []), ("2", [2]), ("2,0", [2, 0]), ("0,9,1", [0]), ("GPU-a", [0]), ("GPU-b", []),
        ("GPU-b3, 0", [2, 0]), ("NoDevFiles", []), ("1,1", [1]), ("0,GPU-zz,1", [0]), ("MIG-1", []),
    ],
)  # fmt: skip
def test_what_a_process_may_see(setting: str | None, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible(UUIDS) == seen


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: str, code: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("rows", "code", "setting", "found"),
    [
        ("GPU-a, 37\nGPU-b, 99", 0, None, 37.0), ("GPU-a, 37\nGPU-b, 99", 0, "1", 99.0), ("GPU-a, [N/A]", 0, None, None),
        ("GPU-a, 37", 0, "", None), ("", 9, None, None), ("GPU-a", 0, None, None),
    ],
)  # fmt: skip
def test_the_driver_is_asked_while_steps_run(
    rows: str, code: int, setting: str | None, found: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, rows, code)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    steps = []
    assert utilization(lambda: steps.append(0), 0.01) == found
    assert steps


def row(label: str, host: float, device: float | None, streams: int = 1, told: float | None = None) -> VariantResult:
    clock = None if device is None else summarize([device] * 20)
    about = {"engine": "cuda", "streams": streams, "facts": {"kernels": 10}, "utilization_percent": told}
    return VariantResult(label, host=summarize([host] * 20), device=clock, **about)


def limits(sm_time_us: float) -> Limits:
    steps = StepBounds(1.0, 1.0, 1.0, sm_time_us, sm_time_us, 10.0, 1.0, "SM time", 10, 10)
    return Limits(static=None, steps=steps, source="measured")  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(
            st.floats(1e-6, 1), st.none() | st.floats(1e-6, 1), st.integers(1, 32), st.none() | st.floats(0, 100)
        ),
        max_size=5,
    ),
    st.none() | st.floats(0.1, 1e6),
)
def test_shares_are_shares_and_more_gpus_never_come_first(
    rows: list[tuple[float, float | None, int, float | None]], sm_time: float | None
) -> None:
    variants = [row(f"row {n}", host, device, streams, told) for n, (host, device, streams, told) in enumerate(rows)]
    found = busy(variants, None if sm_time is None else limits(sm_time))
    for one in found:
        assert all(share is None or 0 <= share <= 1 for share in (one.works, one.driver, one.filled))
        assert one.works is not None or one.driver is not None
    said = advice(found, variants)
    assert len(said) == bool(found)
    assert all("more GPUs are what is left" in line or line.endswith("more GPUs come last.") for line in said)
    assert len(report.utilization_table(found).rows) == len(report.utilization_payload(found)) == len(found)


@pytest.mark.parametrize(
    ("variants", "sm_time", "said"),
    [
        ([row("one stream", 100e-6, 20e-6)], 4.0, ["busy 20%", "fill 20%", "first fused and grouped", "then more streams", "in flight"]),
        ([row("16 streams, fused and grouped", 100e-6, 95e-6, 16)], 20.0, ["busy 95%", "first more requests in flight"]),
        ([row("one stream", 100e-6, 95e-6)], 90.0, ["this GPU is full, and more GPUs are what is left"]),
        ([row("TensorFlow", 1e-3, None, told=12.0)], None, ["TensorFlow, the fastest here, keeps the GPU busy 12%"]),
        ([row("slow", 9e-3, None, told=99.0), row("fast", 1e-3, None, told=1.0)], None, ["fast, the fastest here, keeps the GPU busy 1%"]),
    ],
)  # fmt: skip
def test_what_to_do_first(variants: list[VariantResult], sm_time: float | None, said: list[str]) -> None:
    (line,) = advice(busy(variants, None if sm_time is None else limits(sm_time)), variants)
    positions = [line.find(part) for part in said]
    assert -1 not in positions, line
    assert positions == sorted(positions)


def test_a_cpu_is_not_asked_about() -> None:
    assert busy([row("one stream", 1e-3, None)], None) == ()
    assert advice((), []) == []


def test_doctor_shows_which_gpus_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "\n".join(f"NVIDIA H200, 570.1, 143771, 143000, {n}, {uuid}" for n, uuid in enumerate(UUIDS))
    driver(tmp_path, monkeypatch, rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-c4")
    found = doctor._gpus()
    assert [one.subject for one in found[:4]] == ["hidden gpu", "gpu", "hidden gpu", "gpu"]
    assert "leaves 2 of 4" in found[4].text
    assert found[5].subject == "mps"
    assert found[6].text.startswith("fused and grouped kernels first, then more streams, then more requests in flight")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = doctor._gpus()
    assert [(one.subject, one.status) for one in hidden if one.status != doctor.OK] == [("gpu", doctor.MISSING)]
    assert any(
        one.subject == "bench --engine cuda" and one.status == doctor.MISSING
        for one in doctor.runnable(hidden, ["bench"])
    )


@pytest.mark.parametrize(("where", "told"), [("GPU", 42.0), ("CPU", None)])
def test_bench_asks_the_driver_about_what_runs_on_a_gpu(
    where: str, told: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, "GPU-a, 42")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = Settings(duration=0.001, warmup=0, min_rounds=1, builds=1)
    found = bench([variant("one", Fake(where=where))], fresh=fresh, settings=settings)
    assert found.variants[0].utilization_percent == told
    assert found.variants[0].to_dict()["utilization_percent"] == told
