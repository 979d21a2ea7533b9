"""Choices that a process measured are found by the next one, and by nobody for whom they do not hold."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import msplit
from msplit.engines.cuda import compile
from msplit.engines.cuda.autotune import batched_matmul, conv, matmul
from msplit.engines.cuda.autotune import tuner as choices
from msplit.engines.cuda.autotune.tuner import SECONDS, Choices, Family, Tuner, disturbed
from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.kernels import store, toolchain
from msplit.engines.cuda.kernels.tiles import Tile, Tiles
from msplit.engines.cuda.passes.convolution import concat_into
from msplit.errors import MsplitError
from msplit.formats import atomic
from msplit.formats.files import JsonValue
from msplit.inputs.make import make_inputs
from tests.engines.cuda.cases import job

SAMPLES = Path(__file__).parents[4] / "sample_graphs"
NUMBERS: Family[int] = Family("numbers", lambda number: number, JsonValue.whole, 0)
KEY = ("MatMul", (2, 3), torch.float32)


class Gpu(Device):
    """A CPU that says it is a GPU: nothing is measured on it here."""

    is_gpu = True


@pytest.fixture
def device(tmp_path, monkeypatch):
    """Makes a device such as the next process has; what it knows before it reads is nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(store.OFF, raising=False)
    monkeypatch.setattr(store, "made_for", lambda device: "here")
    return lambda: Gpu(torch.device("cpu"))


def never() -> Any:
    raise AssertionError("it was measured before")


def test_the_next_process_measures_nothing(device):
    assert device().owned(Tuner).choose(NUMBERS, KEY, lambda: 7) == 7
    again = device().owned(Tuner)
    assert again.choose(NUMBERS, KEY, never) == 7
    assert again.chosen(NUMBERS) == {KEY: 7}
    assert device().owned(Tuner).known(NUMBERS, (*KEY, 1)) is None


def test_another_family_knows_nothing_of_it(device):
    device().owned(Tuner).choose(NUMBERS, KEY, lambda: 7)
    assert device().owned(Tuner).known(Family("others", int, JsonValue.whole, 0), KEY) is None


def test_what_is_chosen_by_rule_because_time_is_spent_is_not_kept(device):
    hurried = device().owned(Tuner)
    hurried.spent = SECONDS + 1
    assert hurried.choose(NUMBERS, KEY, lambda: 7) == 7
    assert hurried.choose(NUMBERS, KEY, never) == 7
    assert device().owned(Tuner).choose(NUMBERS, KEY, lambda: 8) == 8


def test_a_measurement_that_fails_leaves_nothing(device):
    with pytest.raises(AssertionError, match="before"):
        device().owned(Tuner).choose(NUMBERS, KEY, never)
    assert device().owned(Tuner).known(NUMBERS, KEY) is None


def test_nothing_is_kept_where_the_user_says_so(device, monkeypatch, tmp_path):
    monkeypatch.setenv(store.OFF, "0")
    device().owned(Tuner).choose(NUMBERS, KEY, lambda: 7)
    assert not list(tmp_path.rglob("choices-*"))


def test_nothing_is_kept_of_a_cpu_that_stands_in(device, tmp_path):
    Device(torch.device("cpu")).owned(Tuner).choose(NUMBERS, KEY, lambda: 7)
    assert not list(tmp_path.rglob("choices-*"))


def test_nothing_is_kept_where_others_may_write(device, tmp_path):
    folder = tmp_path / "msplit" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert device().owned(Tuner).choose(NUMBERS, KEY, lambda: 7) == 7
    assert not list(folder.iterdir())


def test_a_full_disk_is_no_error(device, monkeypatch):
    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    tuner = device().owned(Tuner)
    monkeypatch.setattr(atomic.os, "write", full)
    assert tuner.choose(NUMBERS, KEY, lambda: 7) == 7


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_in_its_place_is_left_alone(device, make):
    path = device().owned(Choices).path
    make(path)
    assert device().owned(Tuner).choose(NUMBERS, KEY, lambda: 7) == 7
    assert path.exists()
    assert not path.is_file()


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\xfe\n",
        b"[",
        b'["numbers", "key", -1]\n',
        b'["numbers"]\n{"a": 1}\n7\nnull\n',
        b"[" * 100_000,
        b'\n["numbers", "(\'MatMul\', (2, 3), torch.float32)", "seven"]\n',
    ],
)
def test_lines_that_can_not_be_read_are_measured_again_and_those_around_them_count(device, damaged):
    first = device()
    first.owned(Tuner).choose(NUMBERS, ("before",), lambda: 1)
    path = first.owned(Choices).path
    with path.open("ab") as file:
        file.write(damaged)
    device().owned(Tuner).choose(NUMBERS, ("after",), lambda: 2)
    last = device().owned(Tuner)
    assert last.choose(NUMBERS, ("before",), never) == 1
    assert last.choose(NUMBERS, ("after",), never) == 2
    assert last.choose(NUMBERS, KEY, lambda: 7) == 7


def test_a_file_that_is_too_long_is_not_read_and_gets_no_longer(device, monkeypatch):
    first = device()
    first.owned(Tuner).choose(NUMBERS, KEY, lambda: 7)
    path = first.owned(Choices).path
    size = path.stat().st_size
    monkeypatch.setattr(choices, "LARGEST", 8)
    assert device().owned(Tuner).choose(NUMBERS, KEY, lambda: 8) == 8
    monkeypatch.setattr(choices, "LARGEST", size + 8)
    full = device().owned(Tuner)
    assert full.choose(NUMBERS, KEY, never) == 7
    assert full.choose(NUMBERS, ("one more",), lambda: 9) == 9
    assert path.stat().st_size == size


def _writes(cache: str, number: int) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    store.made_for = lambda device: "here"
    tuner = Gpu(torch.device("cpu")).owned(Tuner)
    for key in range(200):
        tuner.choose(NUMBERS, (number, key), lambda: number * 1000 + key)  # noqa: B023  called at once


def test_processes_that_keep_choices_at_once_lose_none(device, tmp_path):
    processes = [
        multiprocessing.get_context("fork").Process(target=_writes, args=(str(tmp_path), number)) for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    tuner = device().owned(Tuner)
    for number in range(3):
        for key in range(200):
            assert tuner.choose(NUMBERS, (number, key), never) == number * 1000 + key


def test_the_file_is_of_one_gpu_one_driver_one_set_of_versions_and_one_code(monkeypatch, tmp_path):
    gpu = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: gpu)
    device = Gpu(torch.device("cpu"))
    seen = {str(store.made_for(device))}
    assert seen == {str(store.made_for(device))}
    gpu.multi_processor_count = 66
    seen.add(str(store.made_for(device)))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    seen.add(str(store.made_for(device)))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13010, raising=False)
    seen.add(str(store.made_for(device)))
    monkeypatch.setattr(toolchain, "can_compile", lambda: False)
    seen.add(str(store.made_for(device)))
    monkeypatch.setattr(store, "_ENGINE", tmp_path)
    store.code_of_engine.cache_clear()
    seen.add(str(store.made_for(device)))
    store.code_of_engine.cache_clear()
    assert len(seen) == 6 - (toolchain.triton_version() == "" and torch.version.cuda is None)


sizes = st.integers(1, 1 << 16)
tiles = st.builds(Tiles, sizes, sizes, sizes, sizes, sizes, sizes, st.booleans(), across=sizes)
tile = st.builds(Tile, sizes, sizes, sizes, sizes, sizes, sizes)
numbers = st.floats(0, 1e9)
measured = st.dictionaries(st.text(), numbers)


@given(
    st.one_of(
        st.tuples(st.just(conv.FAMILY), st.none() | tiles),
        st.tuples(st.just(batched_matmul.FAMILY), st.tuples(st.text(), measured)),
        st.tuples(st.just(matmul.FAMILY), st.builds(matmul.Choice, st.none() | tile, st.booleans(), measured)),
        st.tuples(
            st.just(concat_into.FAMILY),
            st.none() | st.builds(concat_into.Times, tiles, *[numbers] * 5),
        ),
    )
)
def test_what_is_kept_comes_back_as_it_was(made):
    family, choice = made
    text = json.dumps(family.pack(choice))
    assert family.unpack(JsonValue.parse(text, "file", what="choice", fix="")) == choice


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=8)
)


@given(plain)
def test_what_is_no_choice_is_refused_in_words(value):
    for family in (conv.FAMILY, batched_matmul.FAMILY, matmul.FAMILY, concat_into.FAMILY):
        try:
            choice: Any = family.unpack(JsonValue(value, "choice", "file", "delete it"))
        except (MsplitError, ValueError):
            continue
        packed = json.loads(json.dumps(family.pack(choice)))
        assert not (isinstance(value, float) and math.isnan(value))
        assert packed == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("nchw", [False, True])
def test_a_layout_that_was_measured_is_the_only_one_that_is_traced(device, monkeypatch, nchw):
    traced, timed = [], []

    def seconds(compiled: Any, job: Any) -> float:
        timed.append(compiled.layout)
        return 1.0 if (compiled.layout == "nchw") == nchw else 2.0

    trace = compile.trace
    monkeypatch.setattr(compile.Compiled, "one_stream_seconds", seconds)
    monkeypatch.setattr(compile, "trace", lambda *a, **named: traced.append(named["nchw"]) or trace(*a, **named))
    monkeypatch.setattr(Device, "is_gpu", True)
    monkeypatch.setattr(Device, "is_current", True)
    for process in ("first", "second"):
        monkeypatch.setattr(devices, "_DEVICES", {})
        flat = msplit.load(SAMPLES / "keras_inception")
        wanted = job(flat, make_inputs(flat, {}, batch=2))
        assert ENGINE.compile(wanted).layout == ("nchw" if nchw else "nhwc"), process
    assert timed == ["nhwc", "nchw"]
    assert traced == [False, True, nchw]


def test_who_interrupts_keeps_what_was_measured_before(device):
    def interrupted() -> int:
        raise KeyboardInterrupt

    tuner = device().owned(Tuner)
    assert tuner.choose(NUMBERS, ("first",), lambda: 1) == 1
    with pytest.raises(KeyboardInterrupt):
        tuner.choose(NUMBERS, ("second",), interrupted)
    again = device().owned(Tuner)
    assert again.choose(NUMBERS, ("first",), never) == 1
    assert again.known(NUMBERS, ("second",)) is None


def test_a_layout_that_was_measured_of_plain_kernels_is_not_taken_for_grouped_ones(device, monkeypatch):
    """Convolutions of one input become one in NHWC only, so that grouping may turn the tables where the graph is the same."""
    monkeypatch.setattr(
        compile.Compiled,
        "one_stream_seconds",
        lambda compiled, job: 1.0 if (compiled.layout == "nchw") != job.options.mode.groups else 2.0,
    )
    monkeypatch.setattr(Device, "is_gpu", True)
    monkeypatch.setattr(Device, "is_current", True)
    monkeypatch.setattr(devices, "_DEVICES", {})
    flat = msplit.load(SAMPLES / "keras_inception")
    feeds = make_inputs(flat, {}, batch=2)
    layouts = [ENGINE.compile(job(flat, feeds, group=group)).layout for group in (False, True)]
    assert layouts == ["nchw", "nhwc"]


def test_what_is_measured_while_the_time_runs_out_is_not_kept(device):
    tuner = device().owned(Tuner)

    def slow() -> int:
        tuner.spent = SECONDS + 1
        return 7

    assert tuner.choose(NUMBERS, KEY, slow) == 7
    assert device().owned(Tuner).known(NUMBERS, KEY) is None


def test_what_is_measured_beside_other_work_holds_for_this_process_only(device):
    steps = [0]

    def beside() -> int:
        steps[0] += 1
        return 7

    tuner = device().owned(Tuner)
    with disturbed(lambda: steps[0]):
        assert tuner.choose(NUMBERS, ("noisy",), beside) == 7
        assert tuner.choose(NUMBERS, ("quiet",), lambda: 8) == 8
    assert tuner.choose(NUMBERS, ("after",), beside) == 7
    assert tuner.choose(NUMBERS, ("noisy",), never) == 7
    again = device().owned(Tuner)
    assert [again.known(NUMBERS, (key,)) for key in ("noisy", "quiet", "after")] == [None, (8,), (7,)]
