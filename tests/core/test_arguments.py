"""What the library's functions are given: whatever it is, what is wrong with it is one error of msplit's.

How exactly a model is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.core.arguments import Precision, listed, number, path, whole
from msplit.cost.profile import Workload
from msplit.errors import MsplitError
from msplit.run.request import RunRequest
from msplit.serving.pool.settings import PoolSettings

STRANGE: list[Any] = [5, None, 1.5, "a", ["a"], {"a": 1}, True, object(), float("nan"), -1, b"x", [None], (), [[1]]]
STRANGE += [np.array([1, 2]), {}]
NUMBERS = ("streams", "batch", "seed", "devices", "split", "tune", "groups", "max_batch", "batches", "max_delay_us")
NUMBERS += ("priorities", "max_queue", "max_memory", "host_threads", "latency_us")


@pytest.mark.parametrize(("make", "kinds"), [(RunRequest.of, (RunRequest, Workload)), (PoolSettings, (PoolSettings,))])
def test_settings_of_other_kinds_are_refused(make: Any, kinds: tuple[Any, ...]) -> None:
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        for value in STRANGE if field.name in NUMBERS else ():
            with contextlib.suppress(MsplitError):
                make(**{field.name: value})


def test_a_number_is_no_list() -> None:
    for make in (lambda: RunRequest.of(streams=4), lambda: PoolSettings(batches=4), lambda: RunRequest.of(devices=0)):  # type: ignore[arg-type]
        with pytest.raises(MsplitError, match="is no list"):
            make()
    with pytest.raises(MsplitError, match="is no list"):
        listed("x", np.array(4))  # it has `__iter__`, and can not be gone through
    assert listed("x", np.array([1, 2])) == (1, 2)
    assert RunRequest.of(streams=[1, 2]).streams == (1, 2)


def test_what_is_no_path_is_refused() -> None:
    for call in (msplit.load, msplit.open, msplit.pool, path):
        for value in (5, None, ["a"], b"a"):
            with pytest.raises(MsplitError, match=r"is no path of a model|is no model"):
                call(value)


def test_what_is_no_number_is_refused() -> None:
    for value in (one for one in STRANGE if type(one) is not int):
        with pytest.raises(MsplitError):
            whole("x", value, -9)
    for value in ("1", None, [], float("inf"), True):
        with pytest.raises(MsplitError):
            number("x", value)
    assert whole("x", np.int64(3)) == 3


def test_each_is_what_it_is_made_of():
    for one in Precision:
        assert Precision.read(str(one)) is one
    assert [one.half for one in Precision] == ["bfloat16", "float16", "", ""]
    assert [one.wide for one in Precision] == ["tf32", "tf32", "tf32", "ieee"]


def test_the_coarsest_of_two_decides():
    assert Precision.coarsest(Precision.IEEE, Precision.TF32) is Precision.TF32
    assert Precision.coarsest(Precision.FP16, Precision.BF16, Precision.IEEE) is Precision.BF16


def test_a_cpu_has_no_tf32():
    assert [one.on(gpu=False) for one in Precision] == ["bf16", "fp16", "ieee", "ieee"]
    assert [one.on(gpu=True) for one in Precision] == list(Precision)


@pytest.mark.parametrize("name", ["half", "", None, 16])
def test_another_name_is_refused(name):
    with pytest.raises(MsplitError, match="there is no precision") as caught:
        Precision.read(name)
    assert "bf16, fp16, tf32, ieee" in str(caught.value.fix)
