"""Builds: what is opened is what was built, on other versions too; what is damaged or another's is refused with one message."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msplit
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats import build as files
from msplit.inputs.reference import load_reference
from msplit.run import build as builds
from msplit.run.build import load
from msplit.run.request import RunRequest

torch = pytest.importorskip("torch")
stored = pytest.importorskip("msplit.engines.cuda.stored.builds")

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
REQUEST = {"streams": (4,), "engine": "cuda", "device": "cpu"}
OTHER = {"pytorch": "1.0", "device": "cpu"}


@functools.cache
def sample_graph(name: str) -> FlatGraph:
    """A sample, read once."""
    return msplit.load(SAMPLES / name)


def built(sample: str, path: Path, **more: Any) -> msplit.Build:
    """A build on simulated streams."""
    return msplit.build(sample_graph(sample), path, **REQUEST, **more)


QUICKLY = {"effort": "fast"}
"""How much is verified and tried where it is about the files of a build."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of several batches. Nobody changes it."""
    path = tmp_path_factory.mktemp("builds") / "mmoe"
    built("mmoe_small.pb", path, batches=[1, 4])
    return path


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    """One of one's own."""
    return Path(shutil.copytree(kept, tmp_path / "mmoe"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_build_for_a_gpu_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the cuda engine can not run here"):
        msplit.build(sample_graph("mmoe_small.pb"), tmp_path / "build")


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "gru_while", "while_v1.pb", "keras_inception", "two_signatures"])
def test_what_is_opened_is_what_was_prepared(sample: str, tmp_path: Path) -> None:
    built(sample, tmp_path / "build")
    with msplit.prepare(sample_graph(sample), **REQUEST) as prepared, msplit.open(tmp_path / "build") as opened:
        assert (opened.label, opened.inputs, opened.outputs) == (prepared.label, prepared.inputs, prepared.outputs)
        weights = {"weight_bytes": prepared.facts["weight_bytes"]}  # a build's begin at multiples of 512 bytes
        assert {**opened.facts, **weights} == prepared.facts
        feeds = {name: np.array(value) for name, value in prepared.buffers.items()}
        expected, got = prepared.step(feeds), opened.step(feeds)
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value)
        assert [check.passed for check in opened.checks] == [True]


def test_its_program_and_plan_are_the_same_to_the_last_step(tmp_path: Path) -> None:
    from msplit.engines.cuda.compile import compile_job
    from msplit.engines.cuda.runtime import plan_binding
    from msplit.run.prepare import make_ready

    flat = sample_graph("keras_inception")
    ready = make_ready(flat, RunRequest.of(**REQUEST))
    job = ready.chosen.job
    compiled = compile_job(job)
    plan = compiled.plan(job)
    built("keras_inception", tmp_path / "build")
    (restored,) = load(tmp_path / "build").restored.values()
    assert restored.compiled.kernels() == compiled.kernels()
    assert restored.compiled.program.fed == compiled.program.fed
    assert plan_binding.store(restored.compiled.program, restored.plan) == plan_binding.store(compiled.program, plan)
    np.testing.assert_array_equal(restored.plan.wait_on, plan.wait_on)
    ready.runner.close()


def test_a_build_for_other_versions_is_compiled_anew_with_the_same_streams(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with msplit.open(kept) as runner:
        feeds = {name: np.array(value) for name, value in runner.buffers.items()}
        expected, streams = runner.step(feeds), runner.facts["streams"]
    monkeypatch.setattr(stored.Builds, "made_for", OTHER)
    with pytest.raises(msplit.MsplitError, match=r"for another machine: .*pytorch .*, here 1\.0"):
        msplit.open(kept, strict=True)
    with msplit.open(kept) as runner:
        assert any("here 1.0" in note and "compiled anew" in note for note in runner.notes)
        assert runner.facts["streams"] == streams
        for name, value in runner.step(feeds).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def test_another_driver_is_told_and_changes_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = stored.Builds("cpu").made_for
    monkeypatch.setattr(stored.Builds, "made_for", {**here, "driver": "13.9"})
    with msplit.open(kept, strict=True) as runner:
        assert any("driver none, here 13.9" in note and "anew" not in note for note in runner.notes)


def test_it_is_verified_and_says_so_where_it_is_not(copy: Path) -> None:
    with msplit.open(copy) as runner:
        assert len(runner.checks) == 2
    with msplit.open(copy, verify=False) as runner:
        assert runner.checks == ()
        assert "outputs were not verified when the build was opened" in runner.notes
    change(copy, "weights.bin", lambda data: bytes(len(data) // 2) + data[len(data) // 2 :])
    with pytest.raises(msplit.MsplitError, match="other outputs than"):
        msplit.open(copy)


def change(folder: Path, name: str, how: Any) -> None:
    """Changes a file, and what the manifest says of it, as somebody would who means it."""
    data = how((folder / name).read_bytes())
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_build_is_no_model(kept: Path) -> None:
    with pytest.raises(msplit.MsplitError, match="this is a build, not a model"):
        msplit.load(kept)


# Several batches


def test_a_smaller_batch_is_filled_up_and_cut(kept: Path) -> None:
    with msplit.open(kept) as runner:
        feeds = {name: np.array(value) for name, value in runner.buffers.items()}
        whole = runner.step(feeds)
        for rows in (1, 2, 3):
            few = runner.step({name: value[:rows] for name, value in feeds.items()})
            for name, value in few.items():
                assert len(value) == rows
                np.testing.assert_allclose(value, whole[name][:rows], rtol=1e-5, atol=1e-6)
            on_device = runner.step(
                {name: torch.from_numpy(value[:rows]) for name, value in feeds.items()}, on_device=True
            )
            for name, tensor in on_device.items():
                np.testing.assert_allclose(tensor.numpy(), few[name], rtol=1e-6, atol=1e-7)
        for rows in (0, 5, 9):
            more = runner.step({name: np.resize(value, (rows, *value.shape[1:])) for name, value in feeds.items()})
            for name, value in more.items():
                wanted = np.resize(whole[name], (rows, *whole[name].shape[1:]))
                np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
                assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype)
        assert runner.facts["batches"] == (1, 4)


def test_the_next_step_may_be_of_any_batch(kept: Path) -> None:
    """What has room for the inputs of the same batch is sent them ahead."""
    with msplit.open(kept) as runner:
        whole = {name: np.array(value) for name, value in runner.buffers.items()}
        feeds = [{name: value[-rows:] for name, value in whole.items()} for rows in (4, 4, 1, 1, 3, 3, 4, 0)]
        wanted = [runner.step(one) for one in feeds[:-1]]
        sent = []
        for bucket in runner.executable._buckets.values():  # type: ignore[attr-defined]
            run = bucket._run  # type: ignore[attr-defined]
            bucket._run = lambda fed, tap, bucket=bucket, run=run: (
                sent.append(bucket._prefetched[0] is fed) or run(fed, tap)
            )  # type: ignore[attr-defined]
        found = [runner.step(one, then=then) for one, then in itertools.pairwise(feeds)]
        for outputs, expected in zip(found, wanted, strict=True):
            for name, value in expected.items():
                np.testing.assert_array_equal(outputs[name], value)
        assert sent == [False, True, False, True, False, False, False]


def test_batches_share_weights(kept: Path, tmp_path: Path) -> None:
    one = built("mmoe_small.pb", tmp_path / "one")
    assert files.read(kept).files["weights.bin"][0] == one.weight_bytes


def test_answers_in_tf32_are_held_to_how_close_they_came_when_it_was_built(kept: Path) -> None:
    """TF32's own tolerance, 20 %, is for kernels that nobody knows: weights of another model passed it."""
    manifest = files.read(kept)
    for bucket in manifest.rungs:
        reference = load_reference(kept / bucket.reference)
        assert reference.needed.keys() >= reference.outputs.keys()
        assert max(reference.needed.values()) < 1e-4
    reference = builds.whole_reference(reference, bucket, manifest.computed)
    on_gpu = replace(manifest, precision="tf32", made_for={**manifest.made_for, "device": "cuda"})

    def answer(by: float) -> Any:
        return lambda feeds: {name: value * np.float32(1 + by) for name, value in reference.outputs.items()}

    assert builds.verify_step(answer(1e-3), reference, on_gpu).passed
    assert builds.verify_step(answer(0.1), replace(reference, needed={}), on_gpu).passed
    with pytest.raises(msplit.MsplitError, match="other outputs than"):
        builds.verify_step(answer(0.1), reference, on_gpu)


@pytest.mark.tf
def test_where_rows_are_not_independent_only_the_batches_that_were_built_run(tmp_path: Path) -> None:
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], "x")
        tf.identity(tf.nn.relu(x) - tf.reduce_mean(x, axis=0), "y")
    (tmp_path / "centred.pb").write_bytes(graph.as_graph_def().SerializeToString())
    found = msplit.build(tmp_path / "centred.pb", tmp_path / "build", **REQUEST, batches=[2, 4])
    assert found.manifest.rows is None
    with msplit.open(tmp_path / "build") as runner:
        feeds = {name: np.array(value) for name, value in runner.buffers.items()}
        runner.step(feeds)
        with pytest.raises(msplit.MsplitError, match=r"a batch of 3 is none of those that were built \(2, 4\).*Mean"):
            runner.step({name: value[:3] for name, value in feeds.items()})


def test_a_model_with_shapes_of_its_own_has_no_batches(tmp_path: Path) -> None:
    with pytest.raises(msplit.MsplitError, match="same shapes at every batch"):
        built("lstm_small.pb", tmp_path / "build", batches=[2, 4])
    assert not (tmp_path / "build").exists()


# Writing


def test_nothing_is_replaced_without_force(copy: Path) -> None:
    before = (copy / "manifest.json").read_bytes()
    with pytest.raises(msplit.MsplitError, match="is there already"):
        built("mmoe_small.pb", copy, **QUICKLY)
    assert (copy / "manifest.json").read_bytes() == before
    built("towers_small.pb", copy, force=True, **QUICKLY)
    with msplit.open(copy) as runner:
        assert set(runner.inputs) == set(msplit.prepare(sample_graph("towers_small.pb"), **REQUEST, **QUICKLY).inputs)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_build_is_never_replaced(force: bool, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for name in ("mine", "file"):
        with pytest.raises(msplit.MsplitError, match=r"is no build|is there already"):
            built("mmoe_small.pb", tmp_path / name, force=force, **QUICKLY)
    assert (tmp_path / "mine" / "letters.txt").read_text() == (tmp_path / "file").read_text() == "dear"


def test_it_is_written_whole_or_not_at_all(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_pieces", stopped)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for target, force in ((copy, True), (copy.parent / "new", False)):
        with pytest.raises(KeyboardInterrupt):
            built("mmoe_small.pb", target, force=force, **QUICKLY)
    assert {path: path.read_bytes() for path in copy.parent.rglob("*") if path.is_file()} == before


def test_large_inputs_are_kept_as_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "LARGEST_REFERENCE", 1024)
    built("mmoe_small.pb", tmp_path / "build", batches=[64])
    with np.load(tmp_path / "build" / "1.npz") as found:
        assert all(value.nbytes <= 1024 for name, value in found.items() if name.startswith("input/"))
    with msplit.open(tmp_path / "build") as runner:
        assert [check.passed for check in runner.checks] == [True]
        assert {shape[0] for _, shape in runner.inputs.values()} == {64}


# Trust


def test_a_build_that_others_may_write_to_is_refused(copy: Path) -> None:
    for place in (copy, *(copy / name for name in ("kernels", "manifest.json", "1.json", "weights.bin"))):
        before = place.stat().st_mode
        os.chmod(place, before | 0o002)
        with pytest.raises(msplit.MsplitError, match=r"it is a program|part of a program"):
            msplit.open(copy)
        os.chmod(place, before)
    msplit.open(copy).close()


def test_what_it_writes_is_not_writable_for_others(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        built("mmoe_small.pb", tmp_path / "build", **QUICKLY)
    finally:
        os.umask(before)
    assert all(not path.stat().st_mode & 0o022 for path in [tmp_path / "build", *(tmp_path / "build").rglob("*")])


def test_a_link_in_a_build_is_not_followed(copy: Path) -> None:
    (copy / "1.json").rename(copy.parent / "elsewhere.json")
    (copy / "1.json").symlink_to(copy.parent / "elsewhere.json")
    with pytest.raises(msplit.MsplitError, match="no regular file"):
        msplit.open(copy)


@pytest.mark.parametrize("name", ["weights.bin", "1.json", "2.npz", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "changed", "gone", "empty"])
def test_damage_gives_one_message(name: str, how: str, copy: Path) -> None:
    data = (copy / name).read_bytes()
    if how == "gone":
        (copy / name).unlink()
    else:
        middle = len(data) // 2
        other = b"\0" if data[middle] else b"\1"  # no JSON has a zero byte
        made = {"cut": data[:middle], "changed": data[:middle] + other + data[middle + 1 :], "empty": b""}
        (copy / name).write_bytes(made[how])
    with pytest.raises(msplit.MsplitError):
        msplit.open(copy)


@pytest.mark.parametrize("dtype", [None, "", "resource", "float33", []])
def test_a_weight_without_a_type_gives_one_message(dtype: Any, copy: Path) -> None:
    def without_type(data: bytes) -> bytes:
        found = json.loads(data)
        found["constants"][0][2][0] = dtype
        return json.dumps(found).encode()

    change(copy, "1.json", without_type)
    with pytest.raises(msplit.MsplitError, match="build"):
        msplit.open(copy)


@pytest.mark.parametrize("ends", [[], [{}], [{}, {}, {}]])
def test_a_build_whose_rows_are_not_those_of_inputs_and_outputs_gives_one_message(
    ends: Any, kept: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(kept, tmp_path / "build"))
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "rows": ends}))
    with pytest.raises(msplit.MsplitError, match=r"rows.* is not a list of 2"):
        msplit.open(copy)


OTHERS = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.text(max_size=3), st.floats(), st.just([]), st.just({}))
"""Made once: Hypothesis finds out anew for each strategy of texts what letters there are."""


def mutated(draw: Any, value: Any) -> Any:
    """A JSON value with something in it changed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: mutated(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutated(draw, value[place]), *value[place + 1 :]]
    return draw(OTHERS)


def test_a_constant_of_no_type_is_told_as_damage(kept: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kept, tmp_path / "build"))
    program = json.loads((folder / "1.json").read_text())
    bound = next(value for step in program["steps"] for value in step["bound"].values())
    bound[0] = None
    change(folder, "1.json", lambda _: json.dumps(program).encode())
    with pytest.raises(msplit.MsplitError, match="the build is damaged"):
        msplit.open(folder)


def test_builds_of_0_1_are_refused_in_words_that_say_what_to_do(kept: Path, tmp_path: Path) -> None:
    """They had another schema version; one that says nonsense of itself is refused as well."""
    folder = Path(shutil.copytree(kept, tmp_path / "build"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"schema_version": 1, "made_for": {**manifest["made_for"], "msplit": "0.1.0"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    what = r"the build was made by msplit 0\.1\.0, and msplit 1\.\d+\.\d+ can not open it"
    for strict in (False, True):
        with pytest.raises(msplit.MsplitError, match=what) as caught:
            msplit.open(folder, strict=strict)
        assert caught.value.fix == "build it anew: msplit build MODEL -o DIR --force"
    for made in ({"msplit": "9" * 99}, {}, None, "0.1.0"):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "made_for": made}))
        with pytest.raises(msplit.MsplitError, match=r"can not open it|not one of version 2"):
            msplit.open(folder)


@pytest.mark.parametrize("shape", [[2**33, 64], [2**33], [4, 2**33], [0, 64], []])
def test_a_size_that_no_reference_has_is_told_before_memory_is_taken(
    shape: list[int], kept: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(kept, tmp_path / "build"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["rungs"][-1]["inputs"]["x"] = shape
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(msplit.MsplitError, match="the build is damaged"):
        msplit.open(folder)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["manifest.json", "1.json"])
def test_whatever_a_build_says_one_message_comes(
    name: str, data: st.DataObject, kept: Path, tmp_path_factory: Any
) -> None:
    folder = Path(shutil.copytree(kept, tmp_path_factory.mktemp("fuzz") / "build"))
    value = json.loads((folder / name).read_text())
    changed = mutated(data.draw, value)
    if name == "manifest.json":
        (folder / name).write_text(json.dumps(changed))
    else:
        change(folder, name, lambda _: json.dumps(changed).encode())
    try:
        msplit.open(folder).close()
    except msplit.MsplitError:
        pass
    finally:
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize(
    "made", [lambda flat, path: msplit.build(flat, path, **REQUEST), lambda flat, path: msplit.pool(flat, **REQUEST)]
)
def test_a_step_that_trains_is_neither_built_nor_shared(made: Callable[..., Any], tmp_path: Path) -> None:
    flat = msplit.load(SAMPLES / "training_resource.meta")
    with pytest.raises(EngineError, match=r"changes variables \(in .* and \d+ more\).*not be built or shared"):
        made(flat, tmp_path / "build")
    assert not any(tmp_path.iterdir())
