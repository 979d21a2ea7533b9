import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from msplit.core.graph import TensorValue
from msplit.errors import LoadError, MsplitError
from msplit.inputs.make import make_inputs

from .graphs import const, flat_of, placeholder

TABLE = np.zeros((7, 4), np.float32)
SMALL = np.zeros((5, 4), np.float32)


def lookup(*between, ids="int32", table=TABLE, feed=None):
    """A gather of ids that go through some ops first."""
    nodes = [
        placeholder("ids", ids, (None,)),
        ("table", "Const", [], const(table)),
        ("axis", "Const", [], const(np.int32(0))),
    ]
    last = "ids"
    for number, (op, extra, attrs) in enumerate(between):
        sources = [last]
        for at, value in extra.items():
            nodes.append((f"c{number}_{at}", "Const", [], const(value)))
            sources.insert(at, f"c{number}_{at}")
        nodes.append((f"n{number}", op, sources, attrs))
        last = f"n{number}"
    nodes.append(
        ("rows", "GatherV2", ["table", last, "axis"], {"Tparams": "float32", "Tindices": "int32", "Taxis": "int32"})
    )
    return flat_of(nodes, [("ids", ids, (None,))], ["rows"])


@pytest.mark.parametrize(
    "between",
    [
        (),
        (("Identity", {}, {"T": "int32"}),),
        (("Cast", {}, {"SrcT": "int64", "DstT": "int32"}), ("ExpandDims", {1: np.int32(1)}, {"T": "int32"})),
        (("Reshape", {1: np.int32([-1])}, {"T": "int32"}), ("Unique", {}, {"T": "int32"})),
        (("Split", {0: np.int32(0)}, {"T": "int32", "num_split": 1}),),
        (("ConcatV2", {1: np.int32(0)}, {"T": "int32", "N": 1}),),
        # What tf.sparse.from_dense and masks make of dense ids.
        (("GatherNd", {1: np.int32([[0]])}, {"Tparams": "int32", "Tindices": "int32"}),),
        (("SelectV2", {0: np.bool_([True]), 2: np.int32([0])}, {"T": "int32"}),),
    ],
)
def test_ids_reach_all_rows_and_no_further(between):
    ids = make_inputs(lookup(*between), {"ids": (500,)})["ids"]
    assert set(ids.tolist()) == set(range(7))


def test_values_of_a_sparse_tensor_whose_empty_rows_are_filled():
    row = [placeholder("ids", "int32", (None,)), ("table", "Const", [], const(TABLE))]
    row += [(name, "Const", [], const(np.int64(value))) for name, value in (("at", [[0, 0]]), ("shape", [1, 1]))]
    row += [
        ("zero", "Const", [], const(np.int32(0))),
        ("fill", "SparseFillEmptyRows", ["at", "ids", "shape", "zero"], {"T": "int32"}),
        ("rows", "ResourceGather", ["table", "fill:1"], {"dtype": "float32", "Tindices": "int32"}),
    ]
    assert set(make_inputs(flat_of(row, [("ids", "int32", (None,))]), {"ids": (500,)})["ids"].tolist()) == set(range(7))


def test_an_offset_on_the_way_is_taken_off():
    flat = lookup(("AddV2", {1: np.int32([0, 4])}, {"T": "int32"}))
    assert set(make_inputs(flat, {"ids": (500,)})["ids"].tolist()) == {0, 1, 2}


def test_a_float_that_becomes_an_id_is_whole_and_in_range():
    ids = make_inputs(lookup(("Cast", {}, {"SrcT": "float32", "DstT": "int32"}), ids="float32"), {"ids": (300,)})["ids"]
    assert ids.dtype == np.float32
    assert set(ids.tolist()) == set(range(7))


def test_the_smallest_table_counts():
    flat = flat_of(
        [
            placeholder("ids", "int64", (None,)),
            ("large", "Const", [], const(TABLE)),
            ("small", "VarHandleOp", [], {"dtype": "float32", "shape": (5, 4)}),
            ("axis", "Const", [], const(np.int32(0))),
            ("a", "GatherV2", ["large", "ids", "axis"], {"Tparams": "float32", "Tindices": "int64"}),
            ("b", "ResourceGather", ["small", "ids"], {"dtype": "float32", "Tindices": "int64"}),
        ],
        [("ids", "int64", (None,))],
    )
    assert set(make_inputs(flat, {}, batch=400)["ids"].tolist()) == set(range(5))


def test_a_table_read_from_a_variable_is_found():
    flat = flat_of(
        [
            placeholder("ids", "int32", (None,)),
            ("v", "VariableV2", [], {"dtype": "float32", "shape": (6, 2)}),
            ("v/read", "Identity", ["v"], {"T": "float32"}),
            ("axis", "Const", [], const(np.int32(0))),
            ("a", "GatherV2", ["v/read", "ids", "axis"], {"Tparams": "float32", "Tindices": "int32"}),
        ],
        [("ids", "int32", (None,))],
    )
    assert set(make_inputs(flat, {}, batch=300)["ids"].tolist()) == set(range(6))


def test_ids_along_another_axis():
    flat = flat_of(
        [
            placeholder("ids", "int32", (None,)),
            ("table", "Const", [], const(TABLE)),
            ("axis", "Const", [], const(np.int32(-1))),
            ("a", "GatherV2", ["table", "ids", "axis"], {"Tparams": "float32", "Tindices": "int32"}),
        ],
        [("ids", "int32", (None,))],
    )
    assert set(make_inputs(flat, {}, batch=300)["ids"].tolist()) == set(range(4))


def test_ids_into_a_tensor_of_unknown_size_are_zero():
    flat = flat_of(
        [
            placeholder("ids", "int32", (None,)),
            placeholder("x", "float32", (None, 3)),
            ("axis", "Const", [], const(np.int32(0))),
            ("a", "GatherV2", ["x", "ids", "axis"], {"Tparams": "float32", "Tindices": "int32"}),
        ],
        [("ids", "int32", (None,)), ("x", "float32", (None, 3))],
    )
    assert not make_inputs(flat, {}, batch=50)["ids"].any()


def test_one_hot_depth_bounds_ids():
    flat = flat_of(
        [
            placeholder("ids", "int32", (None,)),
            ("depth", "Const", [], const(np.int32(3))),
            ("on", "Const", [], const(np.float32(1))),
            ("off", "Const", [], const(np.float32(0))),
            ("a", "OneHot", ["ids", "depth", "on", "off"], {"T": "float32", "TI": "int32"}),
        ],
        [("ids", "int32", (None,))],
    )
    assert set(make_inputs(flat, {}, batch=200)["ids"].tolist()) == {0, 1, 2}


def test_segment_ids_do_not_decrease():
    flat = flat_of(
        [
            placeholder("ids", "int32", (None,)),
            placeholder("segments", "int32", (None,)),
            ("table", "Const", [], const(TABLE)),
            ("a", "SparseSegmentSum", ["table", "ids", "segments"], {"T": "float32"}),
        ],
        [("ids", "int32", (None,)), ("segments", "int32", (None,))],
    )
    feeds = make_inputs(flat, {}, batch=100)
    assert (np.diff(feeds["segments"]) >= 0).all()
    assert feeds["ids"].max() == 6


def kinds():
    nodes = [
        placeholder("f", "float32", (None, 3)),
        placeholder("h", "bfloat16", (None,)),
        placeholder("i", "int64", (None,)),
        placeholder("b", "bool", (None,)),
        placeholder("s", "string", (None,)),
        placeholder("c", "complex64", ()),
    ]
    return flat_of(nodes, [(n[0], n[3]["dtype"], n[3]["shape"]) for n in nodes])


def test_types_and_shapes_are_those_of_the_model():
    feeds = make_inputs(kinds(), {"i": (2,)}, batch=40)
    assert feeds["f"].shape == (40, 3)
    assert feeds["f"].dtype == np.float32
    assert 0.7 < feeds["f"].std() < 1.3
    assert feeds["h"].dtype.name == "bfloat16"
    assert feeds["i"].shape == (2,)
    assert set(make_inputs(kinds(), {}, batch=40)["i"].tolist()) == {0, 1}
    assert set(feeds["b"].tolist()) == {True, False}
    assert all(isinstance(item, bytes) and item.startswith(b"token_") for item in feeds["s"])
    assert feeds["c"].shape == ()
    assert feeds["c"].imag != 0


def test_a_batch_that_no_memory_holds_is_told():
    flat = flat_of([placeholder("x", "float32", (None, 3))], [("x", "float32", (None, 3))], ["x"])
    told = r"input 'x' of shape \[9000000000000000000, ?3\] does not fit into any memory\n  fix: use a smaller --batch"
    with pytest.raises(LoadError, match=told):
        make_inputs(flat, {}, batch=9 * 10**18)


def test_seeds_make_values():
    a, b, c = (make_inputs(kinds(), {}, batch=5, seed=seed) for seed in (1, 1, 2))
    for name in a:
        assert (a[name] == b[name]).all()
    assert (a["f"] != c["f"]).any()


def test_values_of_one_input_do_not_hang_on_the_others():
    alone = flat_of([placeholder("f", "float32", (None, 3))], [("f", "float32", (None, 3))])
    np.testing.assert_array_equal(make_inputs(alone, {}, batch=4)["f"], make_inputs(kinds(), {}, batch=4)["f"])


def test_numbers_in_strings():
    flat = flat_of(
        [placeholder("s", "string", (None,)), ("n", "StringToNumber", ["s"], {"out_type": "float32"})],
        [("s", "string", (None,))],
    )
    assert all(item.isdigit() for item in make_inputs(flat, {}, batch=9)["s"])


def test_strings_of_some_formats_can_not_be_made_up():
    flat = flat_of(
        [placeholder("s", "string", (None,)), ("p", "DecodeGif", ["s"], {})],
        [("s", "string", (None,))],
    )
    with pytest.raises(LoadError, match=r"DecodeGif(.|\n)*--input s=FILE"):
        make_inputs(flat, {})


def test_a_resource_has_no_value():
    flat = flat_of([placeholder("r", "resource", ())], [("r", "resource", ())])
    with pytest.raises(LoadError, match="no value outside"):
        make_inputs(flat, {})


def saved(tmp_path, array, name="v.npy"):
    np.save(tmp_path / name, array)
    return tmp_path / name


def test_given_files_are_taken(tmp_path):
    f = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = {"f": saved(tmp_path, f), "s": saved(tmp_path, np.array(["ä", "b"]), "s.npy")}
    feeds = make_inputs(kinds(), {}, batch=2, given=given)
    np.testing.assert_array_equal(feeds["f"], f)
    assert feeds["s"].tolist() == ["ä", "b"]


def test_a_bfloat16_file_keeps_its_type(tmp_path):
    import ml_dtypes

    h = np.array([1.5, 2.5], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(make_inputs(kinds(), {}, batch=2, given={"h": saved(tmp_path, h)})["h"], h)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("f", np.zeros((2, 3)), "input 'f' is float32, the file float64"),
        ("f", np.zeros((2, 4), np.float32), r"shape \[\?, 3\], the file \[2, 4\]"),
        ("f", np.zeros(3, np.float32), r"shape \[\?, 3\], the file \[3\]"),
        ("f", np.zeros((5, 3), np.float32), "run with --batch 5"),
        ("s", np.zeros(2), "made of strings"),
        ("ff", np.zeros((2, 3), np.float32), "did you mean 'f'"),
    ],
)
def test_files_that_do_not_fit_are_told(tmp_path, name, array, message):
    with pytest.raises(LoadError, match=message):
        make_inputs(kinds(), {}, batch=2, given={name: saved(tmp_path, array)})


def test_files_that_are_no_arrays_are_told(tmp_path):
    (tmp_path / "junk.npy").write_bytes(b"hello")
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "several.npz", a=np.zeros(1))
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("junk.npy", "objects.npy", "several.npz", "empty.npy", "missing.npy"):
        with pytest.raises(LoadError):
            make_inputs(kinds(), {}, batch=2, given={"f": tmp_path / name})


def test_a_scalar_that_keeps_its_default_is_told_how_to_feed(tmp_path):
    np.save(tmp_path / "true.npy", np.array(True))
    nodes = [
        placeholder("x", "float32", (None,)),
        ("no", "Const", [], const(np.array(False))),
        ("training", "PlaceholderWithDefault", ["no"], {"dtype": "bool", "shape": ()}),
    ]
    with pytest.raises(LoadError) as error:
        make_inputs(flat_of(nodes, [("x", "float32", (None,))]), {}, given={"training": tmp_path / "true.npy"})
    assert "--part inputs=x,training" in str(error.value.fix)


def test_a_shape_of_an_unknown_input_is_told():
    with pytest.raises(MsplitError, match="no input"):
        make_inputs(kinds(), {"zzz": (1,)})


@pytest.mark.parametrize(
    "names", [("t", "t_1", "t_2"), ("t/indices", "t/values", "t/dense_shape"), ("t/0", "t/1", "t/2")]
)
def test_parts_of_a_sparse_input_fit_together(names):
    indices, values, dense = names
    specs = [(indices, "int64", (None, 2)), (values, "float32", (None,)), (dense, "int64", (2,))]
    flat = flat_of([placeholder(*spec) for spec in specs], specs)
    feeds = make_inputs(flat, {}, batch=5)
    assert len(feeds[indices]) == len(feeds[values]) == 10
    assert feeds[dense][0] == 5
    assert (feeds[indices] < feeds[dense]).all()
    assert sorted(map(tuple, feeds[indices].tolist())) == list(map(tuple, feeds[indices].tolist()))
    assert set(feeds[indices][:, 0].tolist()) == set(range(5))


def ragged(*, is_ragged):
    cut = {"T": "int64", "Index": "int32"}
    nodes = [
        placeholder("w", "int64", (None,)),
        placeholder("w_1", "int64", (None,)),
        ("c", "Const", [], const(np.int32([1]))),
        ("ends", "StridedSlice", ["w_1", "c", "c", "c"], cut),
        ("starts", "StridedSlice", ["w_1", "c", "c", "c"], cut),
        ("lengths", "Sub" if is_ragged else "Mul", ["ends", "starts"], {"T": "int64"}),
    ]
    return flat_of(nodes, [("w", "int64", (None,)), ("w_1", "int64", (None,))])


def test_row_splits_fit_their_values():
    feeds = make_inputs(ragged(is_ragged=True), {}, batch=4)
    assert len(feeds["w_1"]) == 5
    assert feeds["w_1"][0] == 0
    assert feeds["w_1"][-1] == len(feeds["w"])
    assert (np.diff(feeds["w_1"]) >= 0).all()


def test_two_inputs_that_are_no_ragged_one_are_left_alone():
    feeds = make_inputs(ragged(is_ragged=False), {}, batch=4)
    assert len(feeds["w_1"]) == len(feeds["w"]) == 4


def claiming(dtype, value, count=10**12):
    """Attributes of a constant of one value over and over, which takes a few bytes in a file."""
    kind = object if dtype == "string" else dtype
    return {
        "dtype": dtype,
        "value": TensorValue(dtype, (count,), lambda: np.broadcast_to(np.array(value, kind), count)),
    }


def added():
    nodes = [
        placeholder("x", "int32", (None,)),
        ("huge", "Const", [], claiming("int32", 1)),
        ("sum", "AddV2", ["x", "huge"], {"T": "int32"}),
        ("table", "Const", [], const(TABLE)),
        ("axis", "Const", [], const(np.int32(0))),
        ("y", "GatherV2", ["table", "sum", "axis"], {"Tparams": "float32", "Tindices": "int32", "Taxis": "int32"}),
    ]
    return flat_of(nodes, [("x", "int32", (None,))], ["y"])


def dense_shape():
    nodes = [
        placeholder("x", "int64", (None, 2)),
        placeholder("values", "float32", (None,)),
        ("huge", "Const", [], claiming("int64", 3, 10**5)),
        ("default", "Const", [], const(np.float32(0))),
        ("y", "SparseToDense", ["x", "huge", "values", "default"], {"T": "float32", "Tindices": "int64"}),
    ]
    return flat_of(nodes, [("x", "int64", (None, 2)), ("values", "float32", (None,))], ["y"])


def keys():
    attrs = {"sparse_types": (), "Tdense": (), "ragged_value_types": (), "num_sparse": 0}
    nodes = [
        placeholder("x", "string", (None,)),
        ("none", "Const", [], claiming("string", b"", 0)),
        ("huge", "Const", [], claiming("string", b"a")),
        ("y", "ParseExampleV2", ["x", "none", "none", "huge", "none"], attrs),
    ]
    return flat_of(nodes, [("x", "string", (None,))], ["y"])


@pytest.mark.parametrize("model", [added, dense_shape, keys])
@pytest.mark.timeout(60)
def test_a_constant_that_claims_more_than_any_memory_holds_is_not_walked(model):
    assert len(make_inputs(model(), {}, batch=2)["x"]) == 2


@pytest.mark.timeout(60)
def test_ids_that_grow_along_ever_more_ways_take_time_linear_in_the_graph():
    nodes = [placeholder("x", "int64", (None,)), ("axis", "Const", [], const(np.int32(0)))]
    last = "x"
    for step in range(40):
        nodes += [
            (f"c{step}", "Const", [], const(np.int64(1 << 40 - step))),
            (f"more{step}", "AddV2", [last, f"c{step}"], {"T": "int64"}),
            (f"both{step}", "ConcatV2", [last, f"more{step}", "axis"], {"T": "int64", "N": 2}),
        ]
        last = f"both{step}"
    nodes += [("table", "Const", [], const(TABLE)), ("y", "GatherV2", ["table", last, "axis"], {"Taxis": "int32"})]
    assert make_inputs(flat_of(nodes, [("x", "int64", (None,))], ["y"]), {}, batch=3)["x"].tolist() == [0, 0, 0]


DATA = """
import numpy as np

calls = []

def batches(batch, seed=0):
    calls.append((batch, seed))
    return [{"ids": np.full(batch, seed + 1, np.int32)}, {"ids": np.zeros(batch, np.int32)}]

def alone(batch):
    yield np.arange(batch, dtype=np.int32) % 7

def dataset(batch):
    import tensorflow as tf
    return tf.data.Dataset.from_tensor_slices({"ids": np.arange(9, dtype=np.int32) % 7}).batch(batch)

nothing = lambda: []
number = lambda: 3
text = lambda: ["ids"]
wide = lambda batch: [{"ids": np.zeros(batch, np.int64)}]
short = lambda batch: [{"ids": np.zeros(batch - 1, np.int32)}]
other = lambda batch: [{"label": np.zeros(batch, np.int32)}]

def fails():
    raise ValueError("no \\x1b data")

def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def my_data(tmp_path, monkeypatch):
    """A module of a user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"own_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(DATA)
    yield name
    sys.modules.pop(name, None)


def fed(source, **how):
    return make_inputs(lookup(), {}, given={"": Path(source)}, **how)["ids"]


def test_the_first_batch_of_a_function_is_fed(my_data):
    assert fed(f"{my_data}:batches", batch=4, seed=2).tolist() == [3] * 4
    first = fed(f"{my_data}:batches", batch=4, seed=2)
    first[:] = 6  # whose values they are
    assert fed(f"{my_data}:batches", batch=4, seed=2).tolist() == [3] * 4
    assert sys.modules[my_data].calls == [(4, 2)]  # it may take long
    assert fed(f"{my_data}:batches", batch=2).tolist() == [1] * 2
    assert fed(f"{my_data}:alone", batch=8).tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    np.save("ids.npy", np.int32([5, 5]))
    one = {"": Path(f"{my_data}:batches"), "ids": Path("ids.npy")}
    assert make_inputs(lookup(), {}, given=one, batch=2)["ids"].tolist() == [5, 5]  # a file for an input comes first


@pytest.mark.tf
def test_the_first_batch_of_a_data_set_is_fed(my_data):
    assert fed(f"{my_data}:dataset", batch=3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("nothing", "gives no batch", "an iterable of mappings"),
        ("number", "raised TypeError", "--debug shows where"),
        ("text", "'ids'|made of strings|is int32", ""),
        ("wide", "input 'ids' is int32, the function int64", "give it as array.astype"),
        ("short", "has a batch of 3 in this function, the run has 4", "--batch 3"),
        ("other", "the model has no input 'label'", "its inputs are: ids"),
        ("fails", r"raised ValueError: no \\x1b data", "--debug shows where"),
        ("leaves", "raised SystemExit", "--debug shows where"),
        ("none", "has no function 'none'", "give a function"),
    ],
)
def test_a_function_whose_batch_can_not_be_fed(my_data, name, what, fix):
    with pytest.raises(LoadError, match=what) as caught:
        fed(f"{my_data}:{name}", batch=4)
    assert fix in str(caught.value)


def test_a_file_that_is_called_like_a_function_comes_first(my_data):
    np.save("x.npy", np.int32([1, 2]))
    (Path("x.npy")).rename(f"{my_data}:batches")
    assert fed(f"{my_data}:batches", batch=2).tolist() == [1, 2]
