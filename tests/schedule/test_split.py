"""Whether a split pays: it does for large tables and for heavy branches, and is said to lose where copies cost more than is gained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.schedule.split import judge_split, splits
from msplit.schedule.split_problem import BlockMemory, GpuLink, SplitProblem
from tests.campaign import examples
from tests.schedule.problems import FREE, Builder, problems


def towers(
    count: int, length: int, time: float, *, sent: float = 1e4, gpus: int = 2, share: float = 1.0, **more
) -> SplitProblem:
    """Towers that fill the GPU and join once."""
    b = Builder()
    tops = []
    for _ in range(count):
        node = None
        for _ in range(length):
            node = b.kernel(node, time=time, share=share)
        tops.append(node)
    b.kernel(*tops, time=2.0)
    problem = b.problem()
    return SplitProblem(problem, gpus, GpuLink(), 1e12, np.full(len(problem), sent), np.zeros(len(problem)), **more)


def test_heavy_towers_pay_and_the_gain_is_told():
    split = towers(8, 10, 20.0)
    judged = judge_split(split, "h200", streams=4)
    assert judged.kind == "pays"
    assert judged.helps
    # Half of the work, and at least a copy and a join beside it.
    assert 1.6 < judged.gain < 2
    assert f"{judged.gain:.2f}x predicted" in judged.words
    assert len(set(judged.best.gpu.tolist())) == 2


def test_small_towers_lose_and_the_words_say_why_and_what_instead():
    judged = judge_split(towers(8, 3, 1.5, share=0.05), "h200", streams=4)
    assert judged.kind == "loses"
    assert not judged.helps
    assert judged.gain < 1
    assert "2 GPUs do not pay" in judged.words
    assert "18 µs each" in judged.words
    assert "28 µs until the next GPU starts" in judged.words
    assert "a copy of the model on each gives up to 2x" in judged.words


def test_what_crosses_decides():
    near = towers(2, 1, 300.0, sent=1e4)
    far = replace(near, sent=np.full(len(near.blocks), 1e9))
    assert judge_split(near, "h200").kind == "pays"
    assert judge_split(far, "h200").kind == "loses"
    assert judge_split(replace(far, link=GpuLink(bytes_per_us=1e9)), "h200").kind == "pays"


def of_tables(*sizes: float, memory: float, gpus: int = 2) -> SplitProblem:
    """A lookup of each table, joined once."""
    split = towers(len(sizes), 1, 5.0, gpus=gpus)
    tables = tuple(BlockMemory(f"t{number}", size, (number,), 5.0) for number, size in enumerate(sizes))
    return replace(split, memory=memory, weights=tables, tables=tables)


def test_tables_that_do_not_fit_on_one_gpu_are_needed_on_two():
    judged = judge_split(of_tables(40e9, 35e9, 30e9, memory=70e9), "h100")
    assert judged.kind == "needed"
    assert judged.one_us is None
    assert max(judged.best.weights) <= 70e9
    assert sum(judged.best.weights) == pytest.approx(105e9)
    assert "105.0 GB, do not fit on one H100 (70.0 GB for weights)" in judged.words
    assert judged.words.endswith("One GPU runs it with lookup tables in the host's memory (--table-memory).")
    other = of_tables(40e9, 35e9, 30e9, memory=70e9)
    assert "--table-memory" not in judge_split(replace(other, tables=other.tables[:1], memory=60e9), "h100").words


def test_what_fits_only_packed_by_size_is_packed_by_size():
    # By time all are alike, so that the first two would take what the third needs.
    split = of_tables(20e9, 30e9, 50e9, memory=50e9)
    assert judge_split(split, "h100").kind == "needed"


def test_tables_that_fit_nowhere_are_refused_with_what_would_hold_them():
    judged = judge_split(of_tables(50e9, 50e9, 50e9, memory=60e9), "h100")
    assert (judged.kind, judged.best) == ("too large", None)
    assert "use 3 or more" in judged.words
    judged = judge_split(of_tables(500e9, 1e9, memory=60e9), "h100")
    assert "'t0' alone takes 500.0 GB: divide it by rows" in judged.words


@settings(max_examples=examples(40, 100))
@given(
    problem=problems(contracted=False), seed=st.integers(0, 2**31), gpus=st.integers(1, 4), streams=st.integers(1, 3)
)
def test_no_split_breaks_the_bounds_or_the_memory(problem, seed, gpus, streams):
    random = np.random.default_rng(seed)
    count = len(problem)
    weights = tuple(
        BlockMemory(
            f"w{number}", float(random.integers(1, 100)), tuple(np.unique(random.integers(0, count, 2)).tolist())
        )
        for number in range(3 if count else 0)
    )
    memory = float(random.integers(50, 300))
    split = SplitProblem(problem, gpus, GpuLink(), memory, random.random(count) * 1e6, np.zeros(count), weights)
    for found in splits(split, streams):
        kernels = ~problem.joints
        assert found.gpu[kernels].max(initial=0) < gpus
        assert (found.lane[kernels] // streams == found.gpu[kernels]).all()
        assert max(found.weights) <= memory
        assert found.makespan_us >= problem.rank.max(initial=0) * (1 - 1e-9)


def test_what_only_waits_has_no_weights_on_the_first_gpu():
    """A weight that is read on the second GPU, and by a joint, was counted on the first, too, and did not fit there."""
    split = of_tables(30e9, 40e9, memory=50e9)
    joint = len(split.blocks) - 1
    split = replace(split, blocks=replace(split.blocks, kernels=np.r_[split.blocks.kernels[:-1], 0]))
    weights = tuple(replace(one, blocks=(*one.blocks, joint)) for one in split.weights)
    for found in splits(replace(split, weights=weights, tables=()), 2):
        assert sum(found.weights) == pytest.approx(70e9)
        assert max(found.weights) <= 50e9


def test_what_must_share_a_stream_does():
    b = Builder()
    for _ in range(6):
        b.kernel(time=100.0, share=1.0)
    problem = b.problem(machine=FREE, tie=[0, 1, 0, 1, 0, 1], contracted=False)
    split = SplitProblem(problem, 2, GpuLink(), 1e12, np.zeros(6), np.zeros(6))
    for found in splits(split, 2):
        assert len(set(found.lane[::2].tolist())) == len(set(found.lane[1::2].tolist())) == 1
    assert splits(split, 2)[0].several
