"""The weight generator, strip and fill: no TensorFlow needed."""

import hashlib
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit import samples
from msplit.opset import schema
from msplit.samples.layers import ATTRIBUTE, WeightRecipe, generate, kernel

DT = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


def constant(graph, name, shape, recipe=None, dtype="float32"):
    node = graph.node.add(name=name, op="Const")
    node.attr["dtype"].type = DT[dtype]
    tensor = node.attr["value"].tensor
    tensor.dtype = DT[dtype]
    for size in shape:
        tensor.tensor_shape.dim.add().size = size
    if recipe is None:
        tensor.tensor_content = np.ones(shape, dtype).tobytes()
    else:
        node.attr[ATTRIBUTE].s = recipe.encode()
    return node


def values(graph, name):
    node = next(node for node in graph.node if node.name == name)
    return np.frombuffer(node.attr["value"].tensor.tensor_content, np.float32)


def test_values_never_change_between_machines_and_versions():
    made = generate(kernel("expert_0/dense_0/kernel", 7, (64, 48)), (64, 48))
    assert (
        hashlib.sha256(made.tobytes()).hexdigest() == "f30a9a5f78cee758dae402dec9809bf71687d50abbb2f2635479db1afdf93526"
    )


@given(shapes, st.sampled_from(["float32", "float64", "float16"]), st.integers(0, 5), st.booleans())
def test_values_have_shape_type_and_range(shape, dtype, seed, centred):
    made = generate(WeightRecipe("k", seed, -0.5, 1.5, centred), shape, dtype)
    assert made.shape == shape
    assert made.dtype == dtype
    # Centring moves a column by at most half the range.
    slack = 1.0 if centred else 0.0
    assert made.min() >= -0.5 - slack
    assert made.max() <= 1.5 + slack


@given(shapes, st.integers(-5, 5), st.integers(1, 100))
def test_integers_stay_inside_their_range(shape, low, count):
    made = generate(WeightRecipe("k", 0, low, low + count), shape, np.int64)
    assert made.min() >= low
    assert made.max() < low + count


@given(shapes)
def test_a_centred_kernel_does_not_see_the_mean_of_its_input(shape):
    made = generate(kernel("k", 0, shape), shape).reshape(-1, shape[-1])
    np.testing.assert_allclose(made.mean(axis=0), 0, atol=1e-6)


def test_a_kernel_keeps_the_variance_of_its_input():
    made = generate(kernel("k", 0, (400, 300)), (400, 300))
    assert made.var() * 400 == pytest.approx(1, rel=0.02)


def test_key_and_seed_both_decide_the_values():
    made = [generate(WeightRecipe(key, seed, 0, 1), (50,)) for key, seed in (("a", 0), ("a", 1), ("b", 0))]
    assert len({values.tobytes() for values in made}) == 3


def test_a_recipe_reads_back():
    recipe = WeightRecipe("scope/käse", 3, -0.1, math.pi, True)
    assert WeightRecipe.decode(recipe.encode()) == recipe


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"nonsense", b'{"key": "a", "unknown": 1}', b"\xff"])
def test_a_broken_recipe_is_an_error_that_names_the_attribute(data):
    with pytest.raises(ValueError, match=ATTRIBUTE):
        WeightRecipe.decode(data)


def test_strip_drops_large_generated_values_only_and_fill_restores_them():
    graph = schema.graph_pb2.GraphDef()
    graph.versions.producer = 12
    constant(graph, "large", (32, 40), WeightRecipe("large", 0, -1, 1))
    constant(graph, "small", (32,), WeightRecipe("small", 0, -1, 1))
    constant(graph, "foreign", (32, 40))
    graph.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    filled = samples.fill(graph)
    stripped = samples.strip(filled)
    assert len(values(filled, "large")) == 32 * 40
    assert len(values(stripped, "large")) == 0
    assert len(values(stripped, "small")) == 32
    assert len(values(stripped, "foreign")) == 32 * 40
    assert stripped.versions.producer == 12
    assert samples.fill(stripped) == filled
    assert samples.strip(stripped) == stripped
    assert samples.fill(filled) == filled


def test_strip_and_fill_leave_their_argument_alone():
    graph = schema.graph_pb2.GraphDef()
    constant(graph, "large", (32, 40), WeightRecipe("large", 0, -1, 1))
    before = graph.SerializeToString(deterministic=True)
    filled = samples.fill(graph)
    assert graph.SerializeToString(deterministic=True) == before
    whole = filled.SerializeToString(deterministic=True)
    samples.strip(filled)
    assert filled.SerializeToString(deterministic=True) == whole


def test_a_renamed_weight_keeps_its_values():
    graph = schema.graph_pb2.GraphDef()
    constant(graph, "w", (32, 40), WeightRecipe("w", 0, -1, 1))
    renamed = samples.fill(graph)
    renamed.node[0].name = "imported/w"
    assert (values(samples.fill(samples.strip(renamed)), "imported/w") == values(samples.fill(graph), "w")).all()


@pytest.mark.parametrize("dtype", DT)
def test_every_type_with_a_generator_is_filled(dtype):
    graph = schema.graph_pb2.GraphDef()
    constant(graph, "w", (10, 3), WeightRecipe("w", 0, 0, 50), dtype)
    tensor = samples.fill(graph).node[0].attr["value"].tensor
    assert len(tensor.tensor_content) == 30 * np.dtype(dtype).itemsize


def test_a_type_without_a_generator_is_an_error_that_names_the_node():
    graph = schema.graph_pb2.GraphDef()
    constant(graph, "flags", (10,), WeightRecipe("flags", 0, 0, 1)).attr["value"].tensor.dtype = 10
    with pytest.raises(ValueError, match="'flags'"):
        samples.fill(graph)


def test_filling_needs_no_tensorflow():
    code = (
        "import sys; from msplit import samples; from msplit.opset import schema; g = schema.graph_pb2.GraphDef();"
        "samples.fill(samples.strip(g));"
        "sys.exit('tensorflow' in sys.modules and hasattr(sys.modules['tensorflow'], 'constant') or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'mmoee'.*bert, .*towers"):
        samples.build("mmoee")


def test_an_integer_input_without_a_limit_is_an_error():
    sample = samples.Sample("odd", None, (samples.SampleInput("ids", "int32", (None,)),), ())
    with pytest.raises(ValueError, match="'ids'"):
        samples.make_inputs(sample)
