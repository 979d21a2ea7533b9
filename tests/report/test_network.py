"""What a cluster costs, as it is shown."""

from __future__ import annotations

from msplit.core.statistics import summarize
from msplit.report import network, render
from msplit.report.document import Document
from msplit.verify.results import VariantResult


def sent(number: int, size: int) -> dict[str, object]:
    """What goes from one task to the first."""
    return {
        "source": f"worker {number}",
        "target": "worker 0",
        "tensors": 2,
        "bytes": size,
        "largest": f"tower_{number}/\x1b[31mRelu",
        "largest_bytes": size - 1,
    }


def facts(pairs: int) -> dict[str, object]:
    found = [sent(number, 1000 * (20 - number)) for number in range(1, pairs + 1)]
    return {
        "network": found,
        "network_bytes": sum(one["bytes"] for one in found),
        "network_tensors": 2 * pairs,
        "client_bytes": 512,
    }


def shown(*variants: VariantResult) -> str:
    table = network.table(variants)
    assert table is not None
    return render.to_markdown(Document("bench", [], [table]))


LOCAL = VariantResult("here", "tensorflow", 1, host=summarize([0.002] * 5))


def test_the_time_is_that_beside_one_process() -> None:
    assert network.table([LOCAL]) is None
    slower = VariantResult("there", "tensorflow", 2, facts(1), host=summarize([0.005] * 5))
    faster = VariantResult("far", "tensorflow", 2, facts(0), host=summarize([0.001] * 5))
    failed = VariantResult("wrong", "tensorflow", 2, facts(1))
    text = shown(LOCAL, slower, faster, failed)
    assert "+3 ms" in text
    assert "-1 ms" in text
    assert "worker 1 to worker 0" in text
    assert "wrong" not in text
    assert "\x1b" not in text


def test_there_is_an_end_to_what_is_listed() -> None:
    text = shown(LOCAL, VariantResult("there", "tensorflow", 12, facts(11), host=summarize([0.005] * 5)))
    assert "worker 8 to worker 0" in text
    assert "worker 9 to worker 0" not in text
    assert "and 3 more pairs" in text


def test_the_sentence_of_a_training() -> None:
    assert network.sentence({}) == ""
    said = network.sentence(facts(1))
    assert said.startswith("A step sends 2 tensors, 19 KB between tasks of the cluster (worker 1 to worker 0 19 KB)")
    assert network.sentence(facts(0)) == "A step sends 0 tensors, 0 B between tasks of the cluster."
