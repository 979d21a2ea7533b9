"""Models that JAX wrote, which `tools/jax_models.py` makes: held against TensorFlow running the module itself."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.assignment import model
from msplit.errors import EngineError, LoadError
from msplit.formats import stablehlo
from msplit.opset.schema import saved_model_pb2
from tests import forked

MODELS = sorted((Path(__file__).parent / "jax_models").iterdir())
pytest.importorskip("jaxlib")


_forked = forked.always(forked.parsing)


@pytest.fixture
def changed(tmp_path):
    """Writes a model with other attributes of its module."""

    def write(change):
        message = saved_model_pb2.SavedModel.FromString((MODELS[-1] / "saved_model.pb").read_bytes())
        for function in message.meta_graphs[0].graph_def.library.function:
            for node in function.node_def:
                if node.op == stablehlo.CALL_MODULE:
                    change(node.attr)
        (tmp_path / "saved_model.pb").write_bytes(message.SerializeToString())
        return tmp_path

    return write


@pytest.mark.tf
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_the_engine_gives_what_tensorflow_gives_for_the_module(path):
    """For random inputs, special floats, and integers on both sides of every range."""
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    run, random = loaded.signatures["serving_default"], np.random.default_rng(0)
    step = msplit.prepare(path, batch=4, engine="cuda", device="cpu", effort="fast")
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 3e9, -3e9, 2.5, -0.5, 2147483520.0, 1e-40], np.float32)
    for trial in range(3):
        feeds = {}
        for name, spec in run.structured_input_signature[1].items():
            shape = [4 if size is None else size for size in spec.shape]
            numbers = random.integers(-40, 60, shape) if spec.dtype.is_integer else random.normal(size=shape)
            if trial == 2 and not spec.dtype.is_integer and path.name == "jax_edges":
                numbers = random.choice(odd, shape)
            feeds[name] = numbers.astype(spec.dtype.as_numpy_dtype)
        expected = run(**{name: tf.constant(value) for name, value in feeds.items()})
        found = step(**feeds)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{name}, {feeds}")


def test_names_and_origins_are_those_of_jax():
    flat = msplit.load(next(path for path in MODELS if path.name == "flax_towers"))
    products = [name for name, op in zip(flat.graph.names, flat.graph.ops, strict=True) if op == "MatMul"]
    assert len(products) == 4
    assert any(name.endswith("Towers/user_hidden/MatMul") for name in products), products
    assert not any(op.startswith("stablehlo") or op == stablehlo.CALL_MODULE for op in flat.graph.ops)


def test_a_module_that_is_none_is_one_clear_error(changed):
    for data in (b"", b"ML\xefR", b"\xff" * 100):

        def change(attrs, data=data):
            attrs["module"].s = data

        with pytest.raises(LoadError, match="StableHLO"):
            msplit.load(changed(change))


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        ("import os; os.abort()", "it is damaged, and jaxlib crashes on it"),
        ("import time; time.sleep(60)", "jaxlib was not done with it in 0 s"),
        ("import sys; sys.exit('no\\x1b[31m module')", "no"),
    ],
)
def test_a_module_that_jaxlib_crashes_or_hangs_on_is_one_clear_error(happens, said, monkeypatch):
    """Some damaged modules do both, which would have ended msplit, too."""
    monkeypatch.setattr(stablehlo, "subprocess", subprocess)  # a new one, as users have it
    assert len(msplit.load(MODELS[0]))
    monkeypatch.setattr(stablehlo, "_PARSE", happens)
    monkeypatch.setattr(stablehlo, "_LONGEST", 0.4 if "sleep" in happens else 60.0)
    with pytest.raises(LoadError, match=f"can not be read: {said}") as refused:
        msplit.load(MODELS[0])
    assert refused.value.where == str(MODELS[0])
    assert "\x1b" not in str(refused.value)


def test_a_module_of_other_arguments_is_refused(changed):
    with pytest.raises(LoadError, match="other arguments"):
        msplit.load(changed(lambda attrs: attrs["Tout"].list.type.__setitem__(0, 3)))


def test_an_old_convention_and_a_lacking_jaxlib_leave_the_node_whole(changed, monkeypatch):
    def old(attrs):
        attrs["version"].i = 4

    assert stablehlo.CALL_MODULE in msplit.load(changed(old)).graph.ops
    assert "version 4, and 5 to 10 are read" in msplit.analyze(changed(old)).guesses.mend
    monkeypatch.setattr(stablehlo, "installed", lambda: False)
    assert stablehlo.CALL_MODULE in msplit.load(MODELS[0]).graph.ops
    assert "pip install 'jaxlib" in msplit.analyze(MODELS[0]).guesses.mend
    with pytest.raises(EngineError, match=r"no lowering for(.|\n)*XlaCallModule(.|\n)*pip install 'jaxlib"):
        msplit.prepare(MODELS[0], engine="cuda", device="cpu", effort="fast")


@pytest.mark.tf
def test_a_wrong_translation_does_not_verify(monkeypatch):
    """The reference is TensorFlow's run of the module, not of what msplit makes of it."""
    from msplit.formats import stablehlo_ops

    monkeypatch.setitem(stablehlo_ops.UNARY, "tanh", "Sin")
    found = msplit.bench(
        next(one for one in MODELS if one.name == "equinox_gru"), engine="cuda", device="cpu", batch=2, streams=(1,)
    )
    assert found.result.failed


def test_a_module_and_its_loops_are_functions_to_look_inside():
    gru = next(path for path in MODELS if path.name == "equinox_gru")
    (module,) = (name for name in msplit.load(gru).graph.functions if name.startswith("module_"))
    inside = msplit.load(gru, function=module)
    (loop,) = (number for number, op in enumerate(inside.graph.ops) if op == "StatelessWhile")
    body = msplit.load(gru, function=inside.graph.attrs[loop]["body"].name)
    assert "Tanh" in body.graph.ops
    with pytest.raises(LoadError, match=module):
        msplit.load(gru, function="x")


def ids_of(flat):
    return {
        flat.graph.names[node]: flat.graph.attrs[node]["_stream_id"] for node in flat.graph.nodes_with("_stream_id")
    }


def test_ids_inside_of_a_module_are_kept_beside_the_model_and_read_back(tmp_path):
    """TensorFlow's file has no place for them; a record that does not fit the model, or a module, gives none."""
    towers, out = next(path for path in MODELS if path.name == "flax_towers"), tmp_path / "out"
    assigned = msplit.assign(msplit.load(towers), "auto", streams=3)
    report, _ = msplit.save(assigned.flat, assigned, out)
    record = out / "assets.extra" / "msplit.json"
    (ids,) = json.loads(record.read_text())["inside"].values()
    assert set(ids.values()) == {0, 1, 2}
    assert str(record) in report.notes[-1]
    again = msplit.load(out)
    kept = {again.graph.names[node].rpartition("XlaCallModule/")[2] for node in again.graph.nodes_with("_stream_id")}
    assert kept >= ids.keys()
    assert len(again.graph.nodes_with("_stream_id")) == report.set
    assert ids_of(msplit.load(out, record=False)) == ids_of(again)
    assert not msplit.check(out).findings
    # Ids alone, without rules: those that were there count as set by hand.
    plain = tmp_path / "plain"
    msplit.save(again, assigned.outcome.ids, plain)
    assert ids_of(msplit.load(plain)) == ids_of(again)
    assert msplit.load(plain).model.record.by_hand
    # What strips them takes these, too.
    assert model.strip(out, tmp_path / "none").removed == report.set
    assert not msplit.load(tmp_path / "none").graph.nodes_with("_stream_id")
    # A node that the module has no more, or another module.
    text = record.read_text()
    for old, new in ((next(iter(ids)), "gone"), ('"module_', '"other_')):
        record.write_text(text.replace(old, new))
        found = msplit.load(out)
        assert "it has ids for" in found.model.record_problem
        assert found.model.record is None


@pytest.mark.tf
def test_a_cut_keeps_a_module_whole(tmp_path):
    import tensorflow as tf

    gru = next(path for path in MODELS if path.name == "equinox_gru")
    names = [tensor.name for tensor in msplit.load(gru).outputs]
    msplit.cut(gru, tmp_path / "out", outputs=names[:1])
    value = tf.random.normal((2, 5, 4))
    before, after = (
        tf.saved_model.load(path).signatures["serving_default"](xs=value) for path in (gru, tmp_path / "out")
    )
    np.testing.assert_array_equal(before[names[0]], after[names[0]])


@pytest.mark.tf
def test_tensorflow_is_refused_on_several_streams():
    with pytest.raises(EngineError, match="the module that JAX wrote as a whole"):
        msplit.bench(
            next(one for one in MODELS if one.name == "flax_towers"), engine="tensorflow", batch=2, streams=(2,)
        )
