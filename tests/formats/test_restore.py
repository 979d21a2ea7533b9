import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from msplit import formats
from msplit.errors import LoadError
from msplit.formats.bundle import Checkpoint
from msplit.formats.model import Model
from msplit.formats.tensors import stacked
from msplit.opset.traits import VARIABLES

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
SAVED = sorted(p for p in SAMPLES.iterdir() if p.is_dir())


def read(path: Path) -> Model:
    return formats.read(path, tags=["serve"] if path.name == "two_tags" else None)


@pytest.mark.tf
@pytest.mark.parametrize("path", SAVED, ids=lambda p: p.name)
def test_checkpoint_gives_what_tensorflow_reads(path: Path) -> None:
    import tensorflow as tf

    prefix = path / "variables" / "variables"
    ours, theirs = Checkpoint(prefix), tf.train.load_checkpoint(str(prefix))
    keys = theirs.get_variable_to_dtype_map()
    assert keys
    for key in keys:
        assert key in ours
        # A scalar string comes as bytes, of which NumPy would strip the zeros at the end.
        value = theirs.get_tensor(key)
        expected = np.array(value, dtype=object) if isinstance(value, bytes) else value
        np.testing.assert_array_equal(ours.tensor(key), expected)


@pytest.mark.tf
@pytest.mark.parametrize("name", ["tf1_saved_model", "keras_lookup"])
def test_every_flipped_bit_that_tensorflow_refuses_is_refused(tmp_path: Path, name: str) -> None:
    """In the tensors, numbers and strings, whole and in slices, and in the index: each byte of a sample of them."""
    import tensorflow as tf

    def all_of(read: Any) -> list[Any]:
        return [read(key) for key in keys]

    source = SAMPLES / name / "variables" / "variables"
    keys = sorted(tf.train.load_checkpoint(str(source)).get_variable_to_dtype_map())
    rng, refused = np.random.default_rng(0), 0
    for ending in (".data-00000-of-00001", ".index"):
        for other in (".data-00000-of-00001", ".index"):
            shutil.copy(f"{source}{other}", f"{tmp_path / 'v'}{other}")
        place = Path(f"{tmp_path / 'v'}{ending}")
        data = place.read_bytes()
        for at in rng.choice(len(data), 60, replace=False):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.integers(8)
            place.write_bytes(changed)
            try:
                all_of(tf.train.load_checkpoint(str(tmp_path / "v")).get_tensor)
                continue  # such as unused bytes of the index's footer
            except (tf.errors.OpError, RuntimeError):
                refused += 1
            with pytest.raises(LoadError) as error:
                all_of(Checkpoint(tmp_path / "v").tensor)
            assert str(tmp_path / "v") in str(error.value)
            assert error.value.fix
    assert refused >= 100


@pytest.mark.tf
@pytest.mark.parametrize("name", ["gru_while", "keras_lookup", "keras_inception", "two_signatures"])
def test_variables_are_those_that_the_signature_of_a_loaded_model_captures(name: str) -> None:
    """Independent of the saver: TensorFlow loads the model, and its function says which variable comes in where."""
    import tensorflow as tf

    model = formats.read(SAMPLES / name)
    values = formats.variables(model)
    loaded = tf.saved_model.load(str(SAMPLES / name))
    function = loaded.signatures["serving_default"]
    captured = [tensor for tensor in function.captured_inputs if tensor.dtype == tf.resource]
    node = model.graph.index[model.outputs[0].node]
    handles = [p for p, _ in model.graph.inputs(node) if model.graph.ops[p] in VARIABLES]
    read_back = []
    for handle in captured:
        if (variable := next((v for v in function.variables if v.handle is handle), None)) is not None:
            read_back.append(variable.numpy())
    assert len(handles) == len(read_back) > 0
    for handle, value in zip(handles, read_back, strict=True):
        np.testing.assert_array_equal(values[model.graph.names[handle]], value)


@pytest.mark.tf
def test_partitioned_variables_get_their_slices() -> None:
    import tensorflow as tf

    values = formats.variables(formats.read(SAMPLES / "tf1_saved_model"))
    whole = tf.train.load_checkpoint(str(SAMPLES / "tf1_saved_model" / "variables" / "variables")).get_tensor(
        "items/embedding"
    )
    parts = [values[f"items/embedding/part_{i}"] for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_only_the_variables_asked_for() -> None:
    model = formats.read(SAMPLES / "gru_while")
    assert list(formats.variables(model, ["score/bias_1"])) == ["score/bias_1"]
    assert formats.variables(model, []) == {}
    for name in ("gone", "score/bias"):  # no such node; a node that no saver restores
        with pytest.raises(LoadError, match=f"no value for variable '{name}'"):
            formats.variables(model, [name])


@pytest.mark.tf
def test_meta_graph_with_its_checkpoint_beside_it(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        ref = v1.get_variable("ref", initializer=np.arange(3.0, dtype=np.float32), use_resource=False)
        handle = v1.get_variable("handle", initializer=np.arange(4), use_resource=True)
        tf.add(tf.reduce_sum(ref), 1.0, name="out")
        session.run(v1.global_variables_initializer())
        v1.train.Saver([ref, handle]).save(session, str(tmp_path / "model"))
    model = formats.read(tmp_path / "model.meta")
    values = formats.variables(model)
    np.testing.assert_array_equal(values["ref"], [0, 1, 2])
    np.testing.assert_array_equal(values["handle"], [0, 1, 2, 3])
    shutil.copyfile(tmp_path / "model.meta", tmp_path / "alone.meta")
    alone = formats.read(tmp_path / "alone.meta")
    with pytest.raises(LoadError, match=r"without the values of its variables(.|\n)*alone.index"):
        formats.variables(alone)
    for prefix in (tmp_path / "model", tmp_path / "model.index"):
        np.testing.assert_array_equal(formats.variables(alone, checkpoint=prefix)["ref"], [0, 1, 2])


def test_graph_def_has_no_variables() -> None:
    with pytest.raises(LoadError, match="without the values"):
        formats.variables(formats.read(SAMPLES / "cond_v1.pb"))


def edited(tmp_path: Path, edit: Any) -> Model:
    """A copy of the TensorFlow 1 sample with its graph changed."""
    shutil.copytree(SAMPLES / "feature_columns", tmp_path / "m")
    model = formats.read(SAMPLES / "feature_columns")
    saved = type(model.proto)()
    saved.CopyFrom(model.proto)
    edit(saved.meta_graphs[0])
    (tmp_path / "m" / "saved_model.pb").write_bytes(saved.SerializeToString())
    return formats.read(tmp_path / "m")


def node_named(meta: Any, name: str) -> Any:
    return next(node for node in meta.graph_def.node if node.name == name)


def test_model_without_a_saver_goes_by_names(tmp_path: Path) -> None:
    def edit(meta: Any) -> None:
        kept = [node for node in meta.graph_def.node if not node.name.startswith("save/")]
        del meta.graph_def.node[:]
        meta.graph_def.node.extend(kept)
        meta.ClearField("saver_def")
        node_named(meta, "score/bias").attr.pop("shared_name")

    expected = formats.variables(formats.read(SAMPLES / "feature_columns"))
    values = formats.variables(edited(tmp_path, edit))
    assert values.keys() == expected.keys()
    for name in values:
        np.testing.assert_array_equal(values[name], expected[name])


def test_saver_that_is_not_understood_gives_way_to_names(tmp_path: Path) -> None:
    def edit(meta: Any) -> None:
        # Names that are computed and not constant.
        text_format.Merge('name: "late" op: "Acme"', meta.graph_def.node.add())
        node_named(meta, "save/RestoreV2").input[1] = "late"
        meta.saver_def.restore_op_name = "gone"

    assert len(formats.variables(edited(tmp_path, edit))) == 9


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of TensorFlow with variables in parts: rows, the last ones first; columns; rows of half, which its reader refuses."""
    import tensorflow as tf

    random, prefix = np.random.default_rng(0), tmp_path_factory.mktemp("parts") / "v"
    cuts = {"rows": [0, 1, 70, 134, 150], "columns": [0, 130, 131, 260], "half": [*range(13)]}
    shapes = {"rows": (150, 3), "columns": (4, 260), "half": (12, 2)}
    known = {one: random.standard_normal(shapes[one]).astype("e" if one == "half" else "f") for one in cuts}
    saved = []
    for name, array in known.items():
        for start, end in [*itertools.pairwise(cuts[name])][::-1]:
            at, spec = (
                (np.s_[:, start:end], f"-:{start},{end - start}")
                if name == "columns"
                else (np.s_[start:end], f"{start},{end - start}:-")
            )
            saved.append((name, f"{' '.join(map(str, array.shape))} {spec}", array[at]))
    names, specs, values = zip(*saved, strict=True)
    tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=names, shape_and_slices=specs, tensors=values)
    np.savez(prefix.with_suffix(".npz"), *values, names=names, specs=specs, **known)
    return prefix


@pytest.mark.tf
def test_slices_are_read_where_they_lie(in_parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, known = Checkpoint(in_parts), np.load(f"{in_parts}.npz")
    np.testing.assert_array_equal(checkpoint.tensor("columns"), known["columns"])
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "_whole", None)
        for number, (name, spec) in enumerate(zip(known["names"], known["specs"], strict=True)):
            found = checkpoint.tensor(str(name), str(spec))
            np.testing.assert_array_equal(found, known[f"arr_{number}"])
            assert found.base is checkpoint._shard(0), "it is a view of the mapped file"
    for name, part, at in [
        ("rows", "150 3 69,2:-", np.s_[69:71]),
        ("rows", "150 3 149,1:1,2", np.s_[149:150, 1:3]),
        ("rows", "150 3 0,0:-", np.s_[0:0]),
        ("columns", "4 260 -:1,200", np.s_[:, 1:201]),
        ("half", "12 2 -:-", np.s_[:]),
        ("rows", "", np.s_[:]),
        ("half", "", np.s_[:]),
    ]:
        for saved in (checkpoint, Checkpoint(in_parts)):
            np.testing.assert_array_equal(saved.tensor(name, part), known[name][at])


@pytest.mark.tf
@pytest.mark.parametrize(
    "part",
    ["nonsense", "150 3 0,1:0,1:0,1", "150 3 a,b:-", "150 3 -1,2:-", "150 3 149,2:-", "151 3 0,1:-", "150 3 1:-"],
)
def test_a_slice_that_makes_no_sense(in_parts: Path, part: str) -> None:
    with pytest.raises(LoadError, match=r"of shape \[150, 3\], has no slice"):
        Checkpoint(in_parts).tensor("rows", part)


@given(data=st.data())
def test_arrays_one_below_the_other(data: st.DataObject) -> None:
    width, dtype = data.draw(st.integers(0, 3)), data.draw(st.sampled_from(["f4", "i1", "f8"]))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    count = sum(sizes) * width * np.dtype(dtype).itemsize
    file = np.frombuffer(np.random.default_rng(0).bytes(count + 8), np.uint8)  # may not be written to
    file = file[:]
    ends = np.cumsum([0, *sizes]) * width * np.dtype(dtype).itemsize
    parts = [
        file[one : one + size * width * np.dtype(dtype).itemsize].view(dtype).reshape(size, width)
        for one, size in zip(ends, sizes, strict=False)
    ]
    order = data.draw(st.permutations(parts))
    found = stacked(order)
    assert found is not None
    np.testing.assert_array_equal(found, np.concatenate(order))
    assert stacked([*order, np.zeros((1, width + 1), dtype)]) is None
    assert stacked([np.zeros((), dtype), *order]) is None


def test_restored_tensor_that_goes_nowhere_is_passed_over(tmp_path: Path) -> None:
    def edit(meta: Any) -> None:
        identity = meta.graph_def.node.add(name="dead_end", op="Identity", input=["save/RestoreV2"])
        identity.attr["T"].type = 1
        other = meta.graph_def.node.add(name="other", op="Relu", input=["save/RestoreV2"])
        other.attr["T"].type = 1

    assert len(formats.variables(edited(tmp_path, edit))) == 9


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((200, 8), np.float32), ""),
        (np.zeros((200, 8), np.float64), "is float32, there float64"),
        (np.zeros((201, 8), np.float32), "is [200, 8], there [201, 8]"),
        (np.zeros(8, np.float32), "is [200, 8], there [8]"),
    ],
)
def test_a_value_of_another_type_or_shape_is_told(value: Any, said: str, tmp_path: Path) -> None:
    from tests.formats.models import graph

    shape = 'attr { key: "shape" value { shape { dim { size: 200 } dim { size: 8 } } } }'
    text = f'v VarHandleOp | attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} {shape}'
    (tmp_path / "v.pb").write_bytes(graph(text).SerializeToString())
    found = formats.differs(formats.read(tmp_path / "v.pb"), "v", value)
    assert found == (f"variable 'v' {said}" if said else "")
