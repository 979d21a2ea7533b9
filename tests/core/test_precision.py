"""How exactly a model is computed."""

from __future__ import annotations

import pytest

from msplit.core.precision import Precision
from msplit.errors import MsplitError


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
