"""Bugs of many kinds, as somebody would plant them who has not seen what is verified: at edges of axes, of types and of definitions."""

import pytest

torch = pytest.importorskip("torch")

from msplit.errors import MsplitError  # noqa: E402
from tests.engines.cuda.cases import graph_of  # noqa: E402
from tests.verify.mutants import PLANTED, lowered, prepared, values  # noqa: E402

pytestmark = pytest.mark.tf

F = torch.nn.functional


def vision(tf, v1):
    """Windows over images of odd sizes, and what moves pixels."""
    x = v1.placeholder(tf.float32, [None, 7, 5, 3], "x")
    tf.identity(tf.nn.conv2d(x, values(3, 3, 3, 4), 2, "SAME"), "conv")
    tf.identity(tf.nn.max_pool2d(x, 2, 2, "SAME"), "largest")
    tf.identity(tf.nn.avg_pool2d(x, 3, 2, "SAME"), "mean")
    tf.identity(tf.nn.depthwise_conv2d(x, values(3, 3, 3, 1), [1, 1, 1, 1], "SAME"), "depth")
    tf.identity(v1.nn.fused_batch_norm(x, [1.0, 2.0, 3.0], [0.0, 1.0, 2.0], epsilon=1e-3)[0], "normed")
    tf.pad(x, [[0, 0], [1, 1], [2, 0], [0, 0]], "REFLECT", name="padded")
    tf.identity(x[:, ::2, -3:-1], "slice")
    tf.image.resize(x, [10, 9], name="resized")


def whole(tf, v1):
    """Sums and positions along axes, and integers."""
    x, n = v1.placeholder(tf.float32, [None, 6], "x"), v1.placeholder(tf.int32, [None, 4], "n")
    m = v1.placeholder(tf.int64, [None], "m")
    tf.cumsum(x, 1, exclusive=True, reverse=True, name="before")
    tf.reduce_sum(x, [-1], keepdims=True, name="sum")
    tf.math.reduce_logsumexp(x, 1, name="logsumexp")
    tf.math.floordiv(n, -3, name="quotient")
    tf.math.abs(n, name="size")
    tf.math.sign(x, name="sign")
    tf.cast(1e6 * x, tf.int32, name="integer")
    tf.reverse(x, [1], name="turned")
    tf.roll(x, 2, 1, name="rolled")
    tf.math.divide_no_nan(x, tf.nn.relu(x), name="ratio")
    tf.nn.log_softmax(100 * x, name="logs")
    tf.math.xlogy(tf.nn.relu(x), tf.abs(x), name="entropy")
    tf.clip_by_norm(x, 1.0, axes=[1], name="clipped")
    tf.identity(tf.math.segment_mean(x, tf.sort(tf.math.floormod(m, 5) * 2)), "means")
    tf.identity(tf.cast(x, tf.float64) * 1.1 - 1, "wide")
    tf.linalg.band_part(x[:, :, None] * x[:, None, :], 1, 0, name="band")
    tf.gather(x, [5, 0, -0], axis=-1, name="columns")
    tf.math.square(n, name="squares")
    tf.nn.leaky_relu(x, 0.2, name="leaky")
    tf.nn.softplus(40 * x, name="soft")
    tf.cast(tf.cast(x, tf.bool), tf.float32, name="truth")
    tf.identity(tf.reduce_min(x[:, :3], 1), "least")


OUTPUTS = {
    vision: ["conv", "largest", "mean", "depth", "normed", "padded", "slice", "resized/ResizeBilinear"],
    whole: [
        *(
            "before",
            "sum",
            "logsumexp",
            "quotient",
            "size",
            "sign",
            "integer",
            "turned",
            "rolled",
            "ratio",
            "logs",
            "entropy",
        ),
        *("clipped", "means", "wide", "band", "columns", "squares", "leaky", "soft", "truth", "least"),
    ],
}


@pytest.fixture(scope="module")
def graphs():
    return {build: graph_of(build, outputs=outputs) for build, outputs in OUTPUTS.items()}


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("build", OUTPUTS, ids=lambda build: build.__name__)
def test_what_is_right_is_not_refused(graphs, build, batch):
    prepared(graphs[build], "full", batch, capture=False).close()


def with_last(axis, change):
    """An op that does something else at the end of an axis."""

    def wrong(y, *_):
        y = y.clone()
        last = y.select(axis, -1)
        last.copy_(change(last))
        return y

    return wrong


def first_of(wrong):
    return lambda y, *rest: (wrong(y[0], *rest), *y[1:]) if isinstance(y, tuple) else wrong(y, *rest)


def shifted(by, axis):
    return lambda y, *_: y.roll(by, axis)


def stale_rows():
    """What the step before gave stays in the last row, where there are as many."""
    kept = {}

    def wrong(y, node, *_):
        before = kept.get(node.name)
        kept[node.name] = y.clone()
        if before is None or before.shape != y.shape:
            return y
        y = y.clone()
        y[-1] = before[-1]
        return y

    return wrong


def repeated_edge(y, node, x, *_):
    return F.pad(x.permute(0, 3, 1, 2), (2, 0, 1, 1), mode="replicate").permute(0, 2, 3, 1)


def without_last(y, node, x, axis):
    return y - x[:, -1:] if x.shape[1:] == (6,) and y.shape[1:] == (1,) else y


MUTANTS = {
    "the last column of a convolution": (vision, "Conv2D", with_last(2, lambda v: v * 0)),
    "the last row of a convolution": (vision, "Conv2D", with_last(1, lambda v: v + 1e-3)),
    "a convolution's last image": (vision, "Conv2D", with_last(0, lambda v: v * 1.001)),
    "a pool pads with 0": (vision, "MaxPool", lambda y, *_: y.clamp(min=0)),
    "a pool's last column": (vision, "MaxPool", with_last(2, lambda v: v.roll(1, 1))),
    "a mean counts what is padded": (vision, "AvgPool", with_last(1, lambda v: v * 2 / 3)),
    "the other side is padded": (vision, "DepthwiseConv2dNative", shifted(1, 2)),
    "a norm's epsilon": (vision, "FusedBatchNormV3", first_of(lambda y, node, x, s, b, *_: (y - b) * (1 - 5e-4) + b)),
    "a border repeats its edge": (vision, "MirrorPad", repeated_edge),
    "a slice begins one late": (vision, "StridedSlice", lambda y, node, x, *_: x[:, ::2, -2:].contiguous() if x.ndim == 4 else y),
    "pixels are half a pixel off": (vision, "ResizeBilinear", shifted(1, 1)),
    "a sum includes its own": (whole, "Cumsum", lambda y, node, x, axis: y + x),
    "a sum leaves its last out": (whole, "Sum", without_last),
    "logs of sums overflow": (whole, "Exp", lambda y, node, x: (x + 1e-4).exp()),
    "quotients are cut off": (whole, "FloorDiv", lambda y, node, x, by: x.div(by, rounding_mode="trunc")),
    "sizes saturate": (whole, "Abs", lambda y, node, x: y.clamp(min=0) if not x.is_floating_point() else y + 1e-4),
    "the sign of -0": (whole, "Sign", lambda y, node, x: torch.where(x == 0, torch.ones_like(y), y)),
    "integers are rounded": (whole, "Cast", lambda y, node, x: x.round().int() if y.dtype == torch.int32 and x.is_floating_point() else y),
    "nothing is turned around in the last row": (whole, "ReverseV2", lambda y, node, x, *_: torch.cat([y[:-1], x[-1:]])),
    "columns roll the other way": (whole, "Roll", lambda y, node, x, *_: x.roll(-2, 1)),
    "x / 0 is x": (whole, "DivNoNan", lambda y, node, a, b: torch.where(b == 0, a, y)),
    "logs of 0": (whole, "LogSoftmax", lambda y, node, x: F.softmax(x, -1).clamp_min(1e-38).log()),
    "0 log 0": (whole, "Xlogy", lambda y, node, a, b: a * b.log()),
    "means of empty segments": (whole, "SegmentMean", lambda y, node, x, at: torch.where((y == 0).all(1, keepdim=True), y + 1, y)),
    "float64 through float32": (whole, "Mul", lambda y, node, a, b: y.float().double() if y.dtype == torch.float64 else y),
    "a band that is one too wide": (whole, "MatrixBandPart", lambda y, node, x, *_: torch.tril(x).triu(-2)),
    "a gather at the last column": (whole, "GatherV2", lambda y, *_: torch.cat([y[:, 1:2], y[:, 1:]], 1)),
    "squares saturate": (whole, "Square", lambda y, node, x: y if x.is_floating_point() else x.long().square().clamp(max=2**31 - 1).int()),
    "another slope below 0": (whole, "LeakyRelu", lambda y, node, x: F.leaky_relu(x, 0.2003)),
    "softplus of large values": (whole, "Softplus", lambda y, node, x: x.clamp(max=30).exp().log1p()),
    "-0 is true": (whole, "Cast", lambda y, node, x: (x != 0) | x.signbit() if y.dtype == torch.bool else y),
    "a minimum that leaves its last out": (whole, "Min", lambda y, node, x, *_: x[:, :-1].amin(1)),
    "the last row is the step's before": (whole, "Softplus", stale_rows()),
    "the last of a batch": (whole, "LeakyRelu", lambda y, *_: y if len(y) == 1 else torch.cat([y[:-1], y[-2:-1]])),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_is_refused(graphs, monkeypatch, name):
    build, op, wrong = MUTANTS[name]
    lowered(op, wrong)(monkeypatch)
    PLANTED.clear()
    with pytest.raises((MsplitError, AssertionError, KeyError)):
        prepared(graphs[build], "full", capture=False).close()
    assert PLANTED
