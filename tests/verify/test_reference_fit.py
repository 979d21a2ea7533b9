"""Verification against a saved reference: its batch is taken where none is asked for, and what does not fit is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msplit import api
from msplit.api import bench
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError, LoadError
from msplit.inputs.make import make_inputs
from msplit.inputs.reference import Reference, save_reference
from msplit.run.request import RunRequest
from msplit.run.setup import Comparison
from msplit.run.variants import set_up
from msplit.verify.tensorflow_process import fit
from tests.cli.runner import msplit

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
MMOE = SAMPLES / "mmoe_small.pb"
QUICK = api.Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1)


def reference_of(name: str, batch: int, outputs: bool = False) -> Reference:
    flat = api.load(SAMPLES / name)
    feeds = make_inputs(flat, {}, batch=batch)
    made = {}
    if outputs:
        made = ENGINE.build(Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=EngineOptions("cpu"))).step(
            feeds
        )
    return Reference(feeds, made, "the engine")


@pytest.mark.tf
@pytest.mark.parametrize("engine", ["tensorflow", "cuda"])
def test_op_libraries_are_loaded_before_the_reference_is_computed(engine: str, tmp_path: Path) -> None:
    (tmp_path / "ops.so").write_bytes(b"not a library")
    place = tmp_path / "reference.npz"
    request = RunRequest(engine=engine, device="cpu", op_libraries=(tmp_path / "ops.so",))
    with pytest.raises(EngineError, match="op library"):
        set_up(api.load(MMOE), request, Comparison(save_reference=place))
    assert not place.exists()


@pytest.mark.parametrize("batch", [None, 4])
def test_a_reference_of_a_batch_verifies_with_that_batch_and_without_one(batch: int | None, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flat = api.load(MMOE)
    save_reference(tmp_path / "four.npz", reference_of("mmoe_small.pb", 4, outputs=True))
    request = {
        "engine": "cuda",
        "device": "cpu",
        "streams": (1, 2),
        "settings": QUICK,
        "compare_tensorflow": False,
        "fuse": False,
        "group": False,
    }
    found = bench(flat, **dict(request, reference=tmp_path / "four.npz", batch=batch))
    assert not found.result.failed
    assert found.result.variants[0].checks
    assert all(check.passed for variant in found.result.variants for check in variant.checks)
    assert [note for note in found.notes if "batch" in note] == (
        [] if batch else [f"the batch is 4, as in {tmp_path / 'four.npz'}"]
    )
    _, costs = api.price(flat, batch=4)
    np.testing.assert_array_equal(found.costs.flops, costs.flops)


def test_another_batch_than_asked_for_is_told_with_the_way_out(tmp_path: Path) -> None:
    save_reference(tmp_path / "four.npz", reference_of("mmoe_small.pb", 4))
    arguments = ("bench", MMOE, "--engine", "tensorflow", "--reference", tmp_path / "four.npz")
    done = msplit(*arguments, "--batch", "2")
    assert (done.code, done.out) == (2, "")
    assert (
        f"{tmp_path / 'four.npz'}: the reference has input 'x' of shape [4, 64], --batch 2 asks for [2, 64]" in done.err
    )
    assert "leave --batch out, then the file says it" in done.err
    assert "msplit bench MODEL --batch 2 --measure save-reference=FILE.npz" in done.err
    done = msplit(*arguments, "--shape", "x=3,64")
    assert done.code == 2
    assert "of shape [4, 64], --shape asks for [3, 64]" in done.err


def test_a_reference_of_another_model_is_told() -> None:
    flat, path = api.load(MMOE), Path("r.npz")
    right = reference_of("mmoe_small.pb", 2)

    def why(feeds: dict) -> str:
        with pytest.raises(LoadError, match="the reference is of another model") as error:
            fit(flat, replace(right, feeds=feeds), path, batch=None, shapes={})
        assert (error.value.where, "save-reference=" in error.value.fix) == ("r.npz", True)
        return error.value.what

    assert "its inputs are ids, those of the model x" in why({"ids": right.feeds["x"]})
    assert "its input 'x' is float64, that of the model float32" in why({"x": right.feeds["x"].astype(np.float64)})
    assert "its input 'x' is string" in why({"x": right.feeds["x"].astype(object)})
    assert "is given [2, 7]" in why({"x": right.feeds["x"][:, :7]})


@pytest.mark.parametrize("name", ["mmoe_small.pb", "ragged_sparse", "keras_inception", "feature_columns"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_is_found_in_the_file(name: str, batch: int) -> None:
    flat = api.load(SAMPLES / name)
    found = fit(flat, reference_of(name, batch), Path("r.npz"), batch=None, shapes={})
    made = make_inputs(flat, found[1], batch=found[0] or 1)
    assert {key: value.shape for key, value in made.items()} == {
        key: value.shape for key, value in reference_of(name, batch).feeds.items()
    }
    assert found == (None if batch == 1 else batch, {})


def test_sizes_that_no_batch_explains_are_taken_one_by_one_and_rows_of_sparse_inputs_may_be_any_number() -> None:
    flat = api.load(SAMPLES / "ragged_sparse")
    feeds = dict(make_inputs(flat, {}, batch=3))
    longer = next(name for name, value in feeds.items() if value.shape == (6,))
    feeds[longer] = np.concatenate([feeds[longer], feeds[longer][:1]])
    reference = Reference(feeds, {}, "by hand")
    batch, shapes = fit(flat, reference, Path("r.npz"), batch=None, shapes={})
    assert batch is None
    assert shapes[longer] == (7,)
    assert fit(flat, reference, Path("r.npz"), batch=3, shapes={}) == (3, {})
