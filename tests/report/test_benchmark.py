"""The report of bench, from results made by hand."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from msplit.benchmark.results import Bench
from msplit.core.statistics import Ratio, Summary
from msplit.report import benchmark
from msplit.report.document import plain
from msplit.report.render import to_markdown, to_terminal
from msplit.run.setup import AblationStep
from msplit.verify.compare import compare
from msplit.verify.results import BenchResult, OutputCheck, Settings, VariantResult
from tests.graphs import flat

ONE, TWO, XLA = "msplit, 1 stream, CUDA graph", "msplit, 2 streams, CUDA graph", "TensorFlow with XLA"


def summary(median: float) -> Summary:
    return Summary(100, median, median, 1.1 * median, 1.2 * median, 0.9 * median, 0.1 * median, 0.01, 0)


def ratio(over: str, clock: str, value: float, low: float, high: float) -> Ratio:
    return Ratio(over, clock, value, low, high, 0.95, 30, 3)


def check(*, right: bool) -> OutputCheck:
    values = {"y": np.ones(4, np.float32)}
    other = values if right else {"y": np.full(4, 1.5, np.float32)}
    return OutputCheck("TensorFlow on the CPU", "tf32", 3, compare(values, other))


FAST = VariantResult(
    TWO,
    "cuda",
    2,
    facts={"streams": 2, "kernels": 25, "waits": 2, "waits_before_reduction": 3, "peak_bytes": 2e6, "layout": "nhwc"},
    checks=(check(right=True),),
    host=summary(30e-6),
    launch=summary(20e-6),
    device=summary(10e-6),
    ratios=(
        ratio(ONE, "host", 1.2, 1.1, 1.3),
        ratio(ONE, "device", 2.0, 1.9, 2.1),
        ratio(XLA, "host", 5, 0, float("inf")),
    ),
)
BASE = VariantResult(ONE, "cuda", 1, checks=(check(right=True),), host=summary(36e-6), device=summary(20e-6))
SKIPPED = VariantResult(XLA, "tensorflow", 1, skipped="XLA does not know the op")
RESULT = BenchResult(
    (SKIPPED, BASE, FAST),
    ONE,
    Settings(),
    {"gpus": [{"name": "NVIDIA H200"}], "cpu": {"model": "CPU", "usable_cores": 1}},
    warnings=(f"{ONE}: times vary by 4.0%; why?", f"{TWO}: times vary by 5.0%; why?", "the clock is coarse"),
    diagnosis=("Kernels already fill the GPU.",),
)
GRAPH = flat("x:Placeholder; y:Relu(x)")


def lines(result: BenchResult) -> list[str]:
    return to_markdown(benchmark.document(GRAPH, Bench(result, "cuda", "asked for", ("a note",)))).splitlines()


def test_every_clock_and_every_comparison_has_its_column() -> None:
    shown = lines(RESULT)
    assert "| machine | NVIDIA H200, CPU, 1 core |" in shown
    assert "|  | median | p90 | p99 | launch | device | spread |" in shown
    assert f"| {TWO} | 30.0 µs | 33.0 µs | 36.0 µs | 20.0 µs | 10.0 µs | 1.0 % |" in shown
    assert f"| {ONE} | 36.0 µs | 39.6 µs | 43.2 µs | - | 20.0 µs | 1.0 % |" in shown
    assert f"| {XLA} | skipped |  |  |  |  |  |" in shown
    assert f"**Times faster than {ONE}**" in shown
    assert "|  | host | device |" in shown
    assert f"| {TWO} | 1.20 (1.10–1.30) | 2.00 (1.90–2.10) |" in shown
    assert f"| {TWO} | 5.00 (too few rounds) |" in shown
    assert "| 2 streams | 2 | 25 | 2 of 3 | 2 MB | 2 MB | nhwc |" in shown


def test_what_is_said_of_several_variants_is_said_once() -> None:
    warned = [line.removeprefix("> **warning:** ") for line in lines(RESULT) if line.startswith("> ")]
    assert warned == [
        f"{ONE} and 1 more: times vary by 4.0%; why?",
        "the clock is coarse",
        f"{XLA}: skipped: XLA does not know the op",
    ]
    assert "Kernels already fill the GPU." in lines(RESULT)
    assert lines(RESULT)[-1].startswith(
        f"{TWO}, the fastest here, keeps the GPU busy 33% of the time. To use it more, first fused"
    )
    assert "A note." in lines(RESULT)


def test_wrong_outputs_are_the_first_thing_told() -> None:
    wrong = replace(FAST, checks=(check(right=False),), host=None, launch=None, device=None, ratios=())
    shown = lines(replace(RESULT, variants=(BASE, wrong), environment={}))
    assert f"| verified | NO: outputs of {TWO} are wrong |" in shown
    assert "| machine | unknown CPU |" in shown
    assert f"| {TWO} | wrong outputs |  |  |  |  |  |" in shown


@pytest.mark.parametrize(
    ("nodes", "said"), [(0, None), (1, "1 node of the model runs in"), (12, "12 nodes of the model run in")]
)
def test_what_runs_on_the_host_is_told_because_only_one_clock_has_it(nodes: int, said: str | None) -> None:
    fast = replace(FAST, facts={**FAST.facts, "host_nodes": nodes} if nodes else FAST.facts)
    found = [line for line in lines(replace(RESULT, variants=(BASE, fast))) if "only the host's clock" in line]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_nothing_to_compare() -> None:
    shown = lines(replace(RESULT, variants=(replace(BASE, checks=(), device=None),), warnings=()))
    assert "| verified | nothing to compare |" in shown
    assert "|  | median | p90 | p99 | spread |" in shown


FUSED = replace(
    FAST,
    label="msplit, 2 streams, fused",
    facts={"fused_groups": 2, "fused_ops": 9, "fused_kernels": 1, "compile_seconds": 0.51, "compiled_from_cache": 1},
    ratios=(ratio(ONE, "device", 4.0, 3.9, 4.1), ratio(TWO, "device", 1.02, 0.9, 1.1)),
)
LAYERS = (
    AblationStep("1 stream", ONE, None),
    AblationStep("2 streams", TWO, ONE),
    AblationStep("fused", FUSED.label, TWO),
)


def test_every_layer_is_told_over_the_one_before_and_over_one_stream() -> None:
    found = Bench(replace(RESULT, variants=(BASE, FAST, FUSED)), "cuda", "asked for", (), layers=LAYERS)
    shown = to_markdown(benchmark.document(GRAPH, found)).splitlines()
    start = shown.index("**What each layer adds**")
    assert shown[start + 4 : start + 7] == [
        "| 1 stream | 20.0 µs | - | - |",
        "| 2 streams | 10.0 µs | 2.00 (1.90–2.10) | 2.00 (1.90–2.10) |",
        "| fused | 10.0 µs | 1.02 (no difference) | 4.00 (3.90–4.10) |",
    ]
    assert "9 ops in 2 groups, 1 different kernel, compiled in 0.5 s (1 from the disk)" in shown[start + 8]
    assert f"**Times faster than {TWO}**" not in shown
    assert [layer["variant"] for layer in benchmark.payload(GRAPH, found)["layers"]] == [ONE, TWO, FUSED.label]


def test_gains_are_told_as_they_were_predicted_and_as_they_were_measured() -> None:
    layers = tuple(replace(layer, predicted_us=us) for layer, us in zip(LAYERS, (24.0, 8.0, 5.0), strict=True))
    found = Bench(replace(RESULT, variants=(BASE, FAST, FUSED)), "cuda", "asked for", (), layers=layers)
    shown = to_markdown(benchmark.document(GRAPH, found)).splitlines()
    start = shown.index("**What each layer adds**")
    assert shown[start + 2] == "|  | over the one before | pred. | over 1 stream | pred. |"
    assert shown[start + 4 : start + 7] == [
        "| 1 stream | - | - | - | - |",
        "| 2 streams | 2.00 (1.90–2.10) | 3.00 | 2.00 (1.90–2.10) | 3.00 |",
        "| fused | 1.02 (no difference) | 1.60 | 4.00 (3.90–4.10) | 4.80 |",
    ]
    told = plain(benchmark.payload(GRAPH, found)["layers"])
    assert [(layer["predicted_us"], layer["predicted_gain"]) for layer in told] == [
        (24.0, None),
        (8.0, 3.0),
        (5.0, 1.6),
    ]
    assert told[2]["predicted_gain_over_one"] == 4.8
    assert [layer["gain"] and layer["gain"]["value"] for layer in told] == [None, 2.0, 1.02]
    assert told[2]["gain_over_one"]["value"] == 4.0
    out = StringIO()
    to_terminal(benchmark.document(GRAPH, found), Console(file=out, width=80, highlight=False))
    assert max(len(line) for line in out.getvalue().splitlines()) <= 80


@pytest.mark.parametrize(
    ("low", "high", "builds", "said"),
    [
        (0.0, float("inf"), 1, "9.73 (too few rounds)"),  # no interval at all
        (0.6, 30.0, 1, "9.73 (too few rounds)"),  # one so wide that it says nothing
        (0.6, 150.0, 2, "9.73 (too few builds)"),
        (9.1, 10.4, 1, "9.73 (9.10–10.40)"),
    ],
)
def test_what_can_not_be_told_is_not_called_no_difference(low: float, high: float, builds: int, said: str) -> None:
    over_one = replace(ratio(ONE, "device", 9.73, low, high), builds=builds)
    variant = replace(FUSED, ratios=(over_one, ratio(TWO, "device", 1.89, 0.0, float("inf"))))
    found = Bench(replace(RESULT, variants=(BASE, FAST, variant)), "cuda", "asked for", (), layers=LAYERS)
    document = benchmark.document(GRAPH, found)
    assert f"| fused | 10.0 µs | 1.89 (too few rounds) | {said} |" in to_markdown(document).splitlines()
    out = StringIO()
    to_terminal(document, Console(file=out, width=80, highlight=False))
    (line,) = [line for line in out.getvalue().splitlines() if line.strip().startswith("fused  ")]
    assert said in line
    assert len(line) <= 80


def test_one_layer_alone_is_no_table() -> None:
    found = Bench(replace(RESULT, variants=(BASE,)), "cuda", "asked for", (), layers=LAYERS[:1])
    assert "**What each layer adds**" not in to_markdown(benchmark.document(GRAPH, found))
