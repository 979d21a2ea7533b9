"""What looks like attention and is not is left alone, and whatever stands between two products gives the same result."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.verify import Stage
from msplit.engines.cuda.passes.pipeline import Context, run_passes
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import normal, run_source

B, H, L, D = 3, 2, 4, 8
SHAPE = (B, H, L, L)

LOST = np.ones(SHAPE, bool)
LOST[1, 0, 2] = False  # a query for which no key counts

BELOW = np.tril(np.ones((L, L), np.float32))


def softmax(tf, x):
    return tf.nn.softmax(x)


ALONE = {
    "a softmax over queries": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(x, -2), v),
    "a softmax over heads": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(x, 1), v),
    "no softmax": lambda tf, x, v, c: tf.matmul(tf.nn.sigmoid(x), v),
    "a logarithm": lambda tf, x, v, c: tf.matmul(tf.nn.log_softmax(x), v),
    "scores that are wanted": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(tf.identity(x, name="other")), v),
    "weights that are wanted": lambda tf, x, v, c: tf.matmul(tf.identity(tf.nn.softmax(x), name="other"), v),
    "scores that are read again": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(x), v) + tf.reduce_sum(x),
    "scores that are bent": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(tf.tanh(x)), v),
    "scores taken from something": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(1.0 - x), v),
    "scores times something": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(x * v[:, :, :, :L]), v),
    "weights that are dropped": lambda tf, x, v, c: tf.matmul(softmax(tf, x) * tf.cast(v[..., :L] > 0, x.dtype), v),
    "weights transposed": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(x), v, transpose_a=True),
    "values of other queries": lambda tf, x, v, c: tf.einsum("bhls,bhse->be", tf.nn.softmax(x), v),
    "a mask that makes scores larger": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(x + v[None, ..., :L]), v),
    "a number that counts": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(tf.where(c, x, -3.0)), v),
    "a number that counts later": lambda tf, x, v, c: tf.matmul(
        tf.nn.softmax(tf.where(c, x, -2e4) + 1e4 * v[..., :L]), v
    ),
    "numbers that are several": lambda tf, x, v, c: tf.matmul(
        tf.nn.softmax(tf.where(c, x, normal(L, L) * 1e9 - 3e10)), v
    ),
    "a query without keys": lambda tf, x, v, c: tf.matmul(tf.nn.softmax(tf.where(LOST, x, -np.inf)), v),
    "zeros behind what was lowered": lambda tf, x, v, c: tf.matmul(
        tf.where(c, tf.nn.softmax(tf.where(c, x - 1e9, -1e9)), 0.0), v
    ),
    "zeros elsewhere": lambda tf, x, v, c: tf.matmul(tf.where(c, tf.nn.softmax(x), 0.0), v),
    "zeros for what counts": lambda tf, x, v, c: tf.matmul(tf.where(c, 0.0, tf.nn.softmax(tf.where(c, x, -1e9))), v),
    "float64": lambda tf, x, v, c: (lambda w: tf.matmul(tf.nn.softmax(tf.matmul(w, w, transpose_b=True)), w))(
        tf.cast(v, tf.float64)
    ),
}


@pytest.mark.tf
@pytest.mark.parametrize("what", ALONE)
def test_what_is_no_attention_is_left_alone(what):
    def build(tf, v1):
        q, k, v = (v1.placeholder(tf.float32, [None, H, L, D], name=name) for name in "qkv")
        c = v1.placeholder(tf.bool, [None, H, L, L], name="c")
        x = tf.matmul(q, k, transpose_b=True)
        tf.identity(ALONE[what](tf, x, v, c), name="out")
        tf.logical_not(c, name="not")

    outputs = ["out", "not", *(["other"] if "wanted" in what else [])]
    flat = graph_of(build, outputs=outputs)
    given = {**{name: normal(B, H, L, D) for name in "qkv"}, "c": normal(*SHAPE) > 0}
    assert "_Attention" not in kernels(program_of(flat, given))
    if what != "a query without keys":  # which gives no numbers
        assert_equals_tensorflow(flat, given, streams=[1])


def one_of(*shapes):
    return st.sampled_from(shapes)


@st.composite
def between(draw):
    """Two products, and ops between them that scale, mask, lay anew or bend; with its feeds."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    graph = OpGraph({}, {}, {}, {}, numbers=1000)
    feeds = {}
    number = iter(range(1, 500))

    def add(op, inputs, **attrs):
        node = next(number)
        graph.ops[node] = Op(node, f"{op}_{node}", op, {"T": "float32", **attrs}, inputs, [node])
        return node, 0

    def fed(array):
        name = f"x{len(feeds)}"
        graph.feeds[name] = (next(number), 0)
        feeds[name] = array
        return graph.feeds[name]

    def constant(array):
        key = (500 + len(graph.constants), 0)
        graph.constants[key] = np.asarray(array)
        return key

    def value(array):
        return fed(array) if draw(st.booleans()) else constant(array)

    def near(shape):
        """A shape that broadcasts against another, or makes it larger now and then."""
        found = [size if draw(st.booleans()) else 1 for size in shape][draw(st.integers(0, len(shape) - 1)) :]
        return (2, *shape) if draw(st.integers(0, 15)) == 0 else tuple(found)

    def floats(shape):
        return rng.standard_normal(shape).astype(np.float32)

    def truths(shape):
        return rng.random(shape) < draw(st.sampled_from([0.3, 0.8]))

    def number_of(array):
        return constant(np.full(draw(one_of((), (1,), (1, 1))), array, np.float32))

    batch = draw(one_of((), (3,), (3, 2), (1, 2), (2, 3, 2)))
    rows, columns, inner, depth = (draw(one_of(3, 4, 2, *sizes)) for sizes in ((1,), (), (), ()))
    turned = draw(st.booleans())
    left = fed(floats((*batch, rows, inner)))
    right = fed(floats((*batch, columns, inner) if turned else (*batch, inner, columns)))
    key, shape = add("BatchMatMulV2", [left, right], adj_x=False, adj_y=turned), (*batch, rows, columns)
    condition, then = None, True
    steps = [draw(st.sampled_from(STEPS)) for _ in range(draw(st.integers(0, 4)))]
    steps += ["softmax", *(draw(st.sampled_from(AFTER)) for _ in range(draw(st.integers(0, 2))))]
    for step in steps:
        if step == "lay anew":
            step = draw(one_of("transpose", "join", "cut"))
        if step == "scale":
            key = add(draw(one_of("Mul", "RealDiv")), [key, number_of(draw(one_of(0.5, 2.0, 0.3, -1.0)))])
        elif step == "add":
            bias = near(shape)
            least = draw(one_of(0.0, -1e4, -1e9))
            added = np.where(truths(bias), 0, least).astype(np.float32) if least else floats(bias)
            key = add("AddV2", [key, value(added)]) if least else add(draw(one_of("AddV2", "Sub")), [key, value(added)])
            shape = np.broadcast_shapes(shape, bias)
        elif step == "from":
            key = add("Sub", [number_of(1.0), key])
        elif step == "choose":
            kept = near(shape)
            condition = fed(truths(kept)) if draw(st.integers(0, 3)) else constant(truths(kept))
            pair = [key, number_of(draw(one_of(-1e9, -1e30, -1e4, -5.0)))]
            then = draw(st.booleans())
            key = add("SelectV2", [condition, *(pair if then else pair[::-1])])
            shape = np.broadcast_shapes(shape, kept)
        elif step == "ones and zeros":
            ones = truths(shape[-2:]).astype(np.float32)
            ones[:, 0] = 1
            key = add("Sub", [add("Mul", [key, constant(ones)]), constant((1 - ones) * np.float32(1e4))])
        elif step == "transpose" and len(shape) > 1:
            order = draw(st.permutations(range(len(shape))))
            key, shape = add("Transpose", [key, constant(np.asarray(order))]), tuple(shape[axis] for axis in order)
        elif step == "join" and len(shape) > 2:
            at = draw(st.integers(0, len(shape) - 2))
            shape = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
            key = add("Reshape", [key, constant(np.asarray(shape))])
        elif step == "cut":
            at = draw(st.integers(0, len(shape) - 1))
            part = 2 if shape[at] % 2 == 0 else 1
            shape = (*shape[:at], part, shape[at] // part, *shape[at + 1 :])
            key = add("Reshape", [key, constant(np.asarray(shape))])
        elif step == "bend":
            key = add("Relu", [key])
        elif step == "want":
            graph.fetches[f"wanted_{len(graph.fetches)}"] = key
        elif step == "softmax":
            key = add("Softmax", [key])
        elif step == "zeros" and condition is not None and _fits(kept, shape):
            pair = [key, number_of(0.0)]
            key = add("SelectV2", [condition, *(pair if then != (draw(st.integers(0, 7)) == 0) else pair[::-1])])
    if len(shape) < 2:
        shape = (1, *shape)
        key = add("Reshape", [key, constant(np.asarray(shape))])
    values = fed(floats((*(shape[:-2] if draw(st.booleans()) else ()), shape[-1], depth)))
    last = add("BatchMatMulV2", [key, values], adj_x=False, adj_y=False)
    graph.fetches["out"] = last
    graph.prune()
    return graph, {name: feeds[name] for name in graph.feeds}


def _fits(shape, wider):
    try:
        return np.broadcast_shapes(shape, wider) == wider
    except ValueError:
        return False


STEPS = [*["scale", "add", "choose", "lay anew"] * 4, *["ones and zeros", "from", "bend", "want"]]
AFTER = [*["zeros", "lay anew"] * 3, "scale"]


@settings(max_examples=examples(40, 3000), deadline=None)
@given(between())
def test_whatever_stands_between_two_products_gives_the_same(drawn):
    graph, feeds = drawn
    results = []
    for simplify in (False, True):
        made = graph.copy()
        context = Context(feeds, CPU, 1000, simplify=simplify)
        run_passes(made, context, Stage.IMPORTED, Stage.SPECIALIZED)
        run_passes(made, context, Stage.LAID_OUT)
        results.append(run_source(made, feeds)[0])
    found = compare(results[1], results[0], tolerance=1e-2)  # -10000 leaves three digits of a score
    assert found.passed, found.describe()
