"""Models that JAX wrote, which `tools/jax_models.py` makes: held against TensorFlow running the module itself."""

from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.errors import LoadError
from msplit.formats import stablehlo
from msplit.opset.schema import saved_model_pb2

MODELS = sorted((Path(__file__).parent / "jax_models").iterdir())
pytest.importorskip("jaxlib")


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


def test_a_module_of_other_arguments_is_refused(changed):
    with pytest.raises(LoadError, match="other arguments"):
        msplit.load(changed(lambda attrs: attrs["Tout"].list.type.__setitem__(0, 3)))


def test_an_old_convention_and_a_lacking_jaxlib_leave_the_node_whole(changed, monkeypatch):
    def old(attrs):
        attrs["version"].i = 4

    assert stablehlo.CALL_MODULE in msplit.load(changed(old)).graph.ops
    monkeypatch.setattr(stablehlo, "installed", lambda: False)
    assert stablehlo.CALL_MODULE in msplit.load(MODELS[0]).graph.ops
    assert "pip install" in stablehlo.left_whole({"version": 10})


@pytest.mark.tf
def test_a_wrong_translation_does_not_verify(monkeypatch):
    """The reference is TensorFlow's run of the module, not of what msplit makes of it."""
    from msplit.formats import stablehlo_ops

    monkeypatch.setitem(stablehlo_ops.UNARY, "tanh", "Sin")
    found = msplit.bench(
        next(one for one in MODELS if one.name == "equinox_gru"), engine="cuda", device="cpu", batch=2, streams=(1,)
    )
    assert found.result.failed
