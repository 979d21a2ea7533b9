"""Bugs that were there, and others like them, planted anew: none is passed by what is verified before a model is ready.

A lowering's bug is in what every variant runs, and in the graph op by op: only TensorFlow tells (``effort="full"``). What a rewrite or a
plan does wrong is seen with ``effort="fast"``, too, where the graph op by op tells.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir import lowering as registry
from msplit.engines.cuda.runtime import executables, host, stream_program
from msplit.errors import MsplitError
from tests.campaign import sampled
from tests.engines.cuda.cases import graph_of
from tests.verify.mutants import (
    BOTH,
    FULL,
    MODELS,
    PLANTED,
    attention,
    boxes,
    dense,
    gelu,
    gradients,
    guarded,
    lookup,
    lowered,
    noisy,
    pairs,
    plain,
    prepared,
    ragged,
    rewritten,
    scattered,
    training,
    whole,
    words,
    wrapped,
)

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def graphs():
    return {build: graph_of(build, outputs=outputs) for build, (outputs, _) in MODELS.items()}


@sampled(2 * len(MODELS), build=MODELS, effort=BOTH, batch=[1, 9])
def test_what_is_right_is_not_refused(graphs, build, effort, batch):
    with prepared(graphs[build], effort, batch, **MODELS[build][1]) as runner:
        assert {"full": "TensorFlow on the CPU", "fast": "the graph op by op"}[effort] in [
            check.against for check in runner.checks
        ]


def row(array, at, by):
    array = np.array(array)
    array[at] = array[by]
    return array


def gather_mutant(at, by, rows=None):
    """A lookup that takes another row for one of them."""

    def wrong(right, node, table, ids, *axis):
        if rows is not None and len(table) != rows:
            return right
        wanted = torch.as_tensor(ids) == at % len(table)
        return torch.where(wanted.reshape(*wanted.shape, *(1,) * (right.ndim - wanted.ndim)), table[by], right)

    return lowered("GatherV2", wrong)


def tail(y, *_):
    y = y.clone()
    y[-1] = y[-2] if len(y) > 1 else y[-1] * 0
    return y


def no_waits(monkeypatch):
    arrange = executables.arrange

    def without(program, plan, **how):
        found = arrange(program, plan, **how)
        waiting = [number for number, one in enumerate(found.instructions) if one.waits]
        if not waiting:
            return found
        PLANTED.append("wait")
        instructions = list(found.instructions)
        instructions[waiting[0]] = replace(instructions[waiting[0]], waits=())
        return replace(found, instructions=tuple(instructions))

    monkeypatch.setattr(executables, "arrange", without)


def stale(monkeypatch):
    """What the first step gave is left in a half of what later ones give."""
    right, kept = registry.table()["Relu"], {}

    def planted(node, x):
        PLANTED.append("Relu")
        y = right.function(node, x).clone()
        y[: len(y) // 2] = kept.setdefault(node.name, y.clone())[: len(y) // 2]
        return y

    monkeypatch.setitem(registry._TABLE, "Relu", replace(right, function=planted))


def known_by_its_array(monkeypatch):
    """An input is not taken again where the array is the same."""
    right, held = executables._own, {}

    def own(name, value):
        PLANTED.append(name)
        _, kept = held.setdefault((name, id(value)), (value, right(name, value).clone()))
        return kept.clone()

    monkeypatch.setattr(executables, "_own", own)


def known_by(kind, call):
    """What the host made, or all that it gives in the end, is taken again where an input is the same."""

    def plant(monkeypatch):
        right, made = getattr(host.HostPart, call), {}

        def planted(part, feeds, *arguments):
            PLANTED.append("host")
            key = part, *feeds[kind].reshape(-1).tolist()
            return made[key] if key in made else made.setdefault(key, right(part, feeds, *arguments))

        monkeypatch.setattr(host.HostPart, call, planted)

    return plant


def ahead(given):
    """What the host part made of announced inputs: `given` chooses it, of the executable, the inputs and what was announced and made."""

    def plant(monkeypatch):
        def planted(self, feeds):
            PLANTED.append("ahead")
            return given(self, feeds, *(self._ahead or (None, None)))

        monkeypatch.setattr(host.WithHost, "_given", planted)

    return plant


def kept_ahead(self, feeds, announced, made):
    """It is not let go once it was used."""
    return made if announced is feeds else self._run(feeds)


def once_ahead(self, feeds, announced, made):
    """It is kept until it is used, or others are announced."""
    if announced is feeds:
        self._ahead = None
    return made if announced is feeds else self._run(feeds)


def ahead_of_any(self, feeds, announced, made):
    """Others may be announced."""
    self._ahead = None
    return made or self._run(feeds)


def first_ahead(monkeypatch):
    """What was announced first is used, where other inputs are announced afterwards."""

    def step(self, feeds, then, *, on_device=False):
        PLANTED.append("ahead")
        earlier = self._prefetched
        outputs = right(self, feeds, then, on_device=on_device)
        if earlier[0] is not None and earlier[0] is self._prefetched[0]:
            self._prefetched = earlier
        return outputs

    right = executables.SimulatedExecutable.step_prefetching
    monkeypatch.setattr(executables.SimulatedExecutable, "step_prefetching", step)


def sent(keep=False, any_of=False):
    """Inputs that were sent ahead are kept, or taken for any others."""

    def plant(monkeypatch):
        def run(self, feeds, tap):
            announced, values = self._prefetched
            PLANTED.extend(["ahead"] * (announced is not None))
            if announced is feeds or (any_of and announced is not None):
                feeds = values
            outputs = right(self, feeds, tap)
            self._prefetched = (announced, values) if keep else (None, {})
            return outputs

        right = executables.SimulatedExecutable._run
        monkeypatch.setattr(executables.SimulatedExecutable, "_run", run)

    return plant


def number_ahead(monkeypatch):
    """A step that was announced draws the numbers of the step before."""

    def step(self, feeds, then, *, on_device=False):
        given = self._numbered(feeds)

        def numbered():
            following = then()
            PLANTED.append("ahead")
            self._prefetched = (following, {**following, host.STEPS: given[host.STEPS]})
            return self._prefetched[1]

        return self.device.step_prefetching(given, numbered, on_device=on_device)

    def numbered(self, feeds):
        number = np.asarray(next(self._steps), np.int64)
        (own, given), self._prefetched = self._prefetched, (None, {})
        return given if own is feeds else {**feeds, host.STEPS: number}

    monkeypatch.setattr(host.Counting, "step_prefetching", step)
    monkeypatch.setattr(host.Counting, "_numbered", numbered)


def on_device(monkeypatch):
    """Outputs that are left on the device are those of the step before."""

    def step(self, feeds):
        kept = self.__dict__.setdefault("_kept", [])
        kept.append(right(self, feeds))
        PLANTED.append("on device")
        return kept[max(len(kept) - 2, 0)]

    right = executables.SimulatedExecutable.step_on_device
    monkeypatch.setattr(executables.SimulatedExecutable, "step_on_device", step)


def forgotten_views(monkeypatch):
    """Memory is let go while steps still read it through a view."""
    right = stream_program.lifetimes

    def lifetimes(program, views):
        PLANTED.append("view")
        groups, readers = right(program, views)
        nodes = {owner: program.steps[owner].op.node for owner in groups}
        groups = {owner: [key for key in keys if key[0] == nodes[owner]] for owner, keys in groups.items()}
        reads = [{key[0] for key in step.inputs} for step in program.steps]
        return groups, {
            owner: [one for one in found if owner not in nodes or nodes[owner] in reads[one]]
            for owner, found in readers.items()
        }

    monkeypatch.setattr(stream_program, "lifetimes", lifetimes)


def swap(graph, op):
    op.inputs[0], op.inputs[1] = op.inputs[1], op.inputs[0]


def with_attr(name, value):
    return lambda graph, op: op.attrs.update({name: value})


def without_bias(graph, op):
    op.inputs[2] = graph.constant(np.zeros_like(graph.constants[op.inputs[2]]))


def max_of_weights(right, node, data, segments):
    return torch.full_like(right, float(right.max())) if data.ndim < 2 or data.shape[1] == 1 else right


def saturated(right, node, a, b):
    return right if a.is_floating_point() else (a.long() + b.long()).clamp(max=2**31 - 1).int()


def later_of_ties(right, node, data, *_):
    """Of windows of two."""
    pairs, d = data.reshape(-1, 2), right.reshape(-1, 2)
    return torch.where(pairs[:, :1] == pairs[:, 1:], d.flip(1), d).reshape(right.shape)


def scaled(constant, known, factor):
    return np.asarray(constant * np.float32(factor)) if constant == np.float32(known) else constant


def clipped_cast(right, node, x):
    return x.clamp(-(2**31), 2**31 - 1).int() if x.dtype == torch.int64 and right.dtype == torch.int32 else right


def small_cast(right, node, x):
    return x.clamp(0, 255).to(right.dtype) if right.dtype == torch.uint8 else right


def unsigned_shift(right, node, x, by):
    return ((x.long() & 0xFFFFFFFF) >> by.long()).to(x.dtype)


def saturated_product(right, node, x, axis):
    return x.long().prod(1).clamp(-(2**31), 2**31 - 1).int()


def mean_of(rounding, dtype):
    return lambda right, node, x, axis: x.sum(1, dtype=dtype).div(4, rounding_mode=rounding).int()


def turned_unless_full(right, node, x, lengths):
    return torch.where((lengths == x.shape[1]).reshape(-1, 1, 1), x, right)


def above(graph, op):
    op.attrs["boundaries"] = tuple(
        float(np.nextafter(np.float32(one), np.float32(np.inf))) for one in op.attrs["boundaries"]
    )


def halved(graph, op):
    op.attrs["boundaries"] = tuple(float(np.float16(one)) for one in op.attrs["boundaries"])


def double_mask(right, node, condition, x, y):
    return x + torch.where(condition, torch.zeros_like(y), y)


def below_is_first(right, node, data, at, count):
    return torch.zeros_like(right).index_add(0, at.long().clamp(min=0), data)


def loses_last(rows):
    """A scatter of so many rows that loses the last."""
    return lambda y, *_: torch.cat([y[:-1], y[-1:] * 0]) if len(y) == rows else y


def without_last_column(y, node, data, at, updates):
    return torch.cat([y[:, :-1], data[:, -1:]], 1)


def not_narrowed(right, node, x):
    return x if right.dtype == torch.int32 and x.dtype == torch.int64 else right


def overlapping(right, node, corners, scores, size, threshold, *given):
    """Leaves boxes out that overlap by the threshold itself, too."""
    function = registry.table()["NonMaxSuppressionV2"].function
    return function(
        replace(node, op="NonMaxSuppressionV2"), corners, scores, size, torch.nextafter(threshold, -threshold)
    )


F = torch.nn.functional
MUTANTS = {
    # The bugs that were there.
    "rows in another order": (lookup, lowered("_StitchPadded", lambda y, *_: y.flip(0)), BOTH),
    "weights in another order": (lookup, rewritten("GatherV2", lambda at: at[::-1] if at.size == 20 else at, slot=1), BOTH),
    "selu at 0": (gradients, lowered("SeluGrad", lambda d, node, g, y: torch.where(y == 0, g * 1.7580993, d)), FULL),
    "root at 0": (gradients, lowered("SqrtGrad", lambda d, node, y, g: g * 0.5 / y), FULL),
    "relu of NaN": (gradients, lowered("ReluGrad", lambda d, node, g, x: torch.where(x.isnan(), g, d)), FULL),
    "gelu with exact constants": (gelu, lowered("Tanh", lambda y, node, x: torch.tanh(x * (1 + 2e-8))), FULL),
    "masks that add up": (attention, lowered("SelectV2", double_mask), FULL),
    "masks that add up, by a pass": (attention, rewritten("SelectV2", lambda graph, op: setattr(op, "op", "_Adds")), BOTH),
    "a wait that is missing": (dense, no_waits, BOTH),
    # Lookups.
    "the last row": (dense, gather_mutant(-1, -2), FULL),
    "the first row": (dense, gather_mutant(0, 1), FULL),
    "the first row of part 2": (lookup, gather_mutant(0, 1, rows=5), FULL),
    "the last row of part 1": (lookup, gather_mutant(5, 4, rows=6), FULL),
    "weights of part 2 by a pass": (lookup, rewritten("GatherV2", lambda t: row(t, 0, 1) if t.shape == (5, 3) else t, slot=0), BOTH),
    "empty rows are not 0": (lookup, lowered("Select", lambda y, node, c, a, b: b + 1e-3 * c if b.is_floating_point() else y), FULL),
    "-1 is the last row": (lookup, lowered("GreaterEqual", lambda y, *_: torch.ones_like(y)), FULL),
    "a mean by the longest row": (lookup, lowered("SegmentSum", max_of_weights), FULL),
    "repeated ids count once": (
        ragged,
        lowered("UnsortedSegmentSum", lambda y, node, data, at, count: y.index_copy(0, torch.as_tensor(at), data)),
        FULL,
    ),
    "ragged rows have at most 3": (ragged, lowered("Max", lambda y, *_: y.clamp(-1e9, 3 * 0.9)), FULL),
    # Ids that are limited, and buckets.
    "a limit too low by a pass": (guarded, rewritten("Minimum", lambda bound: np.asarray(bound - 1), slot=1), BOTH),
    "a limit too high in front": (guarded, lowered("Maximum", lambda y, node, x, low: torch.clamp(x, min=1)), FULL),
    "the first row of the last part": (guarded, gather_mutant(0, 1, rows=42), FULL),
    "remainders of what is below 0": (guarded, lowered("FloorMod", lambda y, node, x, by: torch.fmod(x, by).abs()), FULL),
    "integers beyond 32 bits are clipped": (guarded, lowered("Cast", clipped_cast), FULL),
    "at a boundary": (guarded, rewritten("Bucketize", above), BOTH),
    "boundaries in half precision": (guarded, rewritten("Bucketize", halved), BOTH),
    "a negative segment is the first": (scattered, lowered("UnsortedSegmentSum", below_is_first), FULL),
    "a scatter loses its last row": (scattered, lowered("ScatterNd", loses_last(11)), FULL),
    "a scatter loses its last column": (scattered, lowered("TensorScatterAdd", without_last_column), FULL),
    "ids of 64 bits are not cast": (wrapped, lowered("Cast", not_narrowed), FULL),
    "boxes that overlap by the threshold": (boxes, lowered("NonMaxSuppressionV3", overlapping), FULL),
    # Inputs that are kept.
    "an array that is the same": (dense, known_by_its_array, BOTH),
    "strings that the numbers tell": (words, known_by("x", "run"), BOTH),
    "numbers that the strings tell": (words, known_by("words", "finish"), BOTH),
    "what the host made ahead is kept": (words, ahead(kept_ahead), BOTH),
    "what the host made ahead waits for its step": (words, ahead(once_ahead), BOTH),
    "what the host made ahead is for others": (words, ahead(ahead_of_any), BOTH),
    "inputs that were sent ahead are kept": (dense, sent(keep=True), BOTH),
    "inputs that were sent ahead are others'": (dense, sent(any_of=True), BOTH),
    "inputs that were sent ahead first": (dense, first_ahead, BOTH),
    "inputs that were sent ahead to a training step are kept": (training, sent(keep=True), BOTH),
    "inputs that were sent ahead to a training step are others'": (noisy, sent(any_of=True), BOTH),
    "a number that was sent ahead": (noisy, number_ahead, BOTH),
    "outputs on the device": (dense, on_device, BOTH),
    "memory that a view reads": (attention, forgotten_views, BOTH),
    # Norms, activations, ends of ranges.
    "another epsilon by a pass": (dense, rewritten("_LayerNorm", with_attr("epsilon", 1e-3)), BOTH),
    "no epsilon": (plain, lowered("Rsqrt", lambda y, node, x: (x - 1e-5).rsqrt()), FULL),
    "another epsilon": (plain, lowered("Rsqrt", lambda y, node, x: (x + 1e-5).rsqrt()), FULL),
    "no maximum is subtracted": (plain, lowered("Softmax", lambda y, node, x: x.exp() / x.exp().sum(-1, keepdim=True)), FULL),
    "log of 0": (plain, lowered("Log", lambda y, node, x: x.clamp_min(1e-30).log()), FULL),
    "1 / -0": (plain, lowered("Reciprocal", lambda y, node, x: 1 / (x + 0.0)), FULL),
    "the last of ties": (plain, lowered("ArgMax", lambda y, node, x, axis: x.shape[1] - 1 - x.flip(1).argmax(1)), FULL),
    "the last of ties in front": (plain, lowered("TopKV2", lambda y, node, x, k: (y[0], 5 - x.flip(1).topk(2)[1].int())), FULL),
    "sums saturate": (plain, lowered("AddV2", saturated), FULL),
    "one more than the length": (plain, lowered("Less", lambda y, node, a, b: torch.le(a, b)), FULL),
    "not at the bound": (plain, lowered("GreaterEqual", lambda y, node, a, b: torch.gt(a, b)), FULL),
    "halves are rounded away from 0": (plain, lowered("Round", lambda y, node, x: (x.abs() + 0.5).floor() * x.sign()), FULL),
    "a cast to bytes clips": (whole, lowered("Cast", small_cast), FULL),
    "a shift brings in zeros": (whole, lowered("RightShift", unsigned_shift), FULL),
    "means of integers are rounded down": (whole, lowered("Mean", mean_of("floor", torch.int64)), FULL),
    "means of integers are of 32 bits": (whole, lowered("Mean", mean_of("trunc", torch.int32)), FULL),
    "products of integers saturate": (whole, lowered("Prod", saturated_product), FULL),
    "quotients are rounded down": (whole, lowered("TruncateDiv", lambda y, node, x, by: x.div(by, rounding_mode="floor")), FULL),
    "integers of 64 bits through floats": (whole, lowered("Mul", lambda y, node, x, by: (x.double() * by.double()).long()), FULL),
    "a row of full length is not turned": (whole, lowered("ReverseSequence", turned_unless_full), FULL),
    "any but the last": (whole, lowered("Any", lambda y, node, x, axis: x[:, :-1].any(1)), FULL),
    "the mask's value is not that large": (attention, lowered("SelectV2", lambda y, node, c, a, b: torch.where(c, a, b * 0 - 30)), FULL),
    "logits beside masked ones": (attention, rewritten("Mul", lambda c: scaled(c, 0.25, 1.01), slot=1), BOTH),
    "outside of one-hot is its last": (dense, lowered("OneHot", lambda y, node, at, *_: F.one_hot(at.long().clamp(0, 5), 6).float()), FULL),
    "another bound by a pass": (dense, rewritten("Minimum", lambda bound: np.asarray(bound + np.float32(0.01)), slot=1), BOTH),
    "the gradient of a distance of 0": (pairs, lowered("SqrtGrad", lambda y, node, root, by: by * 0.5 / root), FULL),
    # Products and batches.
    "no bias by a pass": (dense, rewritten("_FusedMatMul", without_bias), BOTH),
    "weights off by one": (dense, rewritten("_FusedMatMul", lambda w: np.roll(w, 1, 1), slot=1), BOTH),
    "the last column of weights": (dense, rewritten("_FusedMatMul", lambda w: row(w.T, -1, -2).T.copy(), slot=1), BOTH),
    "the last row of the batch": (dense, lowered("Softmax", tail), FULL),
    "what the step before left": (dense, stale, FULL),
    "the end of a sum": (dense, lowered("_FusedMatMul", lambda y, node, x, w, *b: y - x[:, -1:] @ w[-1:]), FULL),
    # Gradients and training.
    "the gradient of ties": (gradients, lowered("MaxPoolGrad", later_of_ties), FULL),
    "gradients of equal maxima": (gradients, lowered("Equal", lambda y, *_: y & (y.cumsum(1) == 1)), FULL),
    "elu at 0": (gradients, lowered("EluGrad", lambda d, node, g, y: torch.where(y == 0, d * 0, d)), FULL),
    "selu at 0 in training": (training, lowered("SeluGrad", lambda d, node, g, y: torch.where(y == 0, g * 1.7580993, d)), FULL),
}  # fmt: skip


def adds(node, condition, x, y):
    return x + torch.where(condition, torch.zeros_like(y), y)


@pytest.mark.parametrize(("name", "effort"), [(name, effort) for name, one in MUTANTS.items() for effort in one[2]])
def test_a_bug_is_refused(graphs, monkeypatch, name, effort):
    build, plant, _ = MUTANTS[name]
    monkeypatch.setitem(registry.table(), "_Adds", replace(registry.table()["SelectV2"], function=adds))
    plant(monkeypatch)
    PLANTED.clear()
    with pytest.raises((MsplitError, AssertionError, KeyError)):
        prepared(graphs[build], effort, streams=4 if plant is no_waits else 1, **MODELS[build][1]).close()
    assert PLANTED
