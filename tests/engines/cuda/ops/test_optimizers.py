"""Updates by optimizers, several steps of them, against TensorFlow's kernels."""

import ml_dtypes
import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS
from tests.engines.cuda.interpreted import run_interpreted
from tests.engines.cuda.ops.harness import DEVICE, run_lowering

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = map(np.dtype, (np.float32, np.float64, np.float16, ml_dtypes.bfloat16))

NUMBERS = {
    "lr": 0.4, "alpha": 0.4, "beta1_power": 0.9, "beta2_power": 0.99, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3, "rho": 0.9,
    "momentum": 0.8, "l1": 0.02, "l2": 0.03, "l2_shrinkage": 0.01, "lr_power": -0.5, "logbase": 1.0, "sign_decay": 0.7, "beta": 0.9,
    "global_step": 3,
}  # fmt: skip

NARROW = {"ApplyAdagradDA", "ApplyProximalAdagrad", "ApplyProximalGradientDescent"}
"""TensorFlow has them for float32 and float64 alone."""

VARIANTS = [
    *((op, {}, {}) for op in sorted(OPTIMIZERS)),
    *((op, {"use_nesterov": True}, {}) for op in ("ApplyMomentum", "ApplyKerasMomentum", "ApplyAdam")),
    *((op, {"update_slots": False}, {}) for op in ("ApplyAdagrad", "ApplyAdagradV2")),
    *((op, {"multiply_linear_by_lr": True}, {}) for op in ("ApplyFtrl", "ApplyFtrlV2")),
    *(
        (op, {"multiply_linear_by_lr": on}, {"lr_power": -0.6})
        for op in ("ApplyFtrl", "ApplyFtrlV2")
        for on in (False, True)
    ),
    *((op, {}, {"l1": 0.0}) for op in (*sorted(NARROW), "ApplyFtrl")),
    ("ApplyFtrlV2", {}, {"lr_power": 0.0}),
    ("ApplyAdam", {}, {"beta1": 0.0, "epsilon": 0.0}),
]


def arguments(op):
    import tensorflow as tf  # registers the ops
    from tensorflow.python.framework import op_def_registry

    assert tf.__version__
    return [arg.name for arg in op_def_registry.get(f"Resource{op}").input_arg]


class Steps:
    """Random variables, numbers and gradients for an optimizer."""

    def __init__(self, op, dtype=FLOAT32, given=None, size=67):
        self.op, self.optimizer, self.generator, self.size, self.dtype = (
            op,
            OPTIMIZERS[op],
            np.random.default_rng(0),
            size,
            dtype,
        )
        slots = [np.abs(self.draw()) + dtype.type(0.1) for _ in range(self.optimizer.variables - 1)]
        if op == "ApplyCenteredRMSProp":  # the mean square is not less than the square of the mean
            slots[0], slots[1] = slots[0] * dtype.type(0.1), slots[1] + dtype.type(1)
        self.state = [self.draw(), *slots]
        names = [
            name
            for slot, name in enumerate(arguments(op))
            if slot >= len(self.state) and slot != self.optimizer.gradient
        ]
        values = NUMBERS | (given or {})
        self.numbers = [np.asarray(values[name], np.int64 if name == "global_step" else dtype) for name in names]

    def draw(self):
        return self.generator.standard_normal(self.size).astype(self.dtype)

    def inputs(self, state, gradient):
        """A node's inputs in their order."""
        found = [*state, *self.numbers]
        found.insert(self.optimizer.gradient, gradient)
        return found


def lowered(op, attrs, state, inputs):
    """Runs the lowering in place."""
    tensors = [*state, *(to_torch(np.asarray(value), DEVICE) for value in inputs[len(state) :])]
    before = [one.data_ptr() for one in state]
    results = table()[op].function(Node("node", op, attrs), *tensors)
    assert [one.data_ptr() for one in results] == before
    assert [one.data_ptr() for one in state] == before


def close(found, wanted, label):
    """Equal to the bit where TensorFlow rounds to a narrow type, and within 1e-6 of the root mean square otherwise. On a GPU bfloat16 may
    be a unit in the last place off: its 1/√ is not that of a CPU to the last bit, and a tie is then rounded the other way."""
    assert found.dtype == wanted.dtype
    left, right = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(right)
    np.testing.assert_array_equal(left[~finite], right[~finite], label)
    tolerance = {4: 1e-6, 8: 1e-14}.get(found.dtype.itemsize, 0.0) * np.sqrt(np.mean(right[finite] ** 2))
    if DEVICE != "cpu" and found.dtype == BFLOAT16:
        tolerance = 2.0**-8 * np.abs(right[finite]).max()
    np.testing.assert_allclose(left[finite], right[finite], 0.0, tolerance, err_msg=label)


def follow(op, attrs, steps, gradients):
    """Runs TensorFlow's kernel on resources and the lowering side by side."""
    import tensorflow as tf

    theirs = [tf.Variable(value) for value in steps.state]
    ours = [to_torch(value.copy(), DEVICE) for value in steps.state]
    for number, gradient in enumerate(gradients):
        inputs = steps.inputs(steps.state, gradient)
        given = steps.inputs([one.handle for one in theirs], gradient)
        getattr(tf.raw_ops, f"Resource{op}")(**dict(zip(arguments(op), given, strict=True)), **attrs)
        lowered(op, attrs, ours, inputs)
        for slot, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
            close(to_numpy(found), wanted.numpy(), f"{op} {attrs}, step {number}, variable {slot}")


@pytest.mark.tf
@pytest.mark.parametrize(("op", "attrs", "given"), VARIANTS)
def test_steps_are_those_of_tensorflow(op, attrs, given):
    steps = Steps(op, given=given)
    follow(op, attrs, steps, [steps.draw() for _ in range(4)])


@pytest.mark.tf
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("op", sorted(OPTIMIZERS))
def test_of_every_type_that_tensorflow_has(op, dtype):
    if dtype.itemsize == 2 and (op in NARROW or (op == "ApplyAdaMax" and dtype == BFLOAT16)):
        pytest.skip("TensorFlow has no such kernel")
    steps = Steps(op, dtype)
    follow(op, {}, steps, [steps.draw() for _ in range(2)])


@pytest.mark.tf
@pytest.mark.parametrize("op", sorted(OPTIMIZERS))
def test_what_is_no_number_arrives_where_tensorflow_has_it(op):
    steps = Steps(op)
    gradients = [steps.draw() for _ in range(3)]
    for gradient, place in zip(gradients[:2], (0, 20), strict=True):
        gradient[place : place + 4] = np.nan, np.inf, -np.inf, 0.0
        gradient[-4:] = 0.0, np.nan, -np.inf, np.inf  # TensorFlow has another loop for the last ones
    steps.state[0][5:7] = np.nan, np.inf
    if op not in ("ApplyFtrl", "ApplyFtrlV2", "ApplyAdagradDA"):
        for slot in steps.state[1:]:
            slot[8:11] = slot[60:63] = slot[-7:-4] = np.nan, np.inf, 0.0
    with np.errstate(all="ignore"):
        follow(op, {}, steps, gradients)


@pytest.mark.tf
@pytest.mark.parametrize("op", ["ApplyAdam", "ApplyMomentum", "ApplyFtrl", "ApplyRMSProp", "ApplyAdagradDA"])
def test_references_are_updated_likewise(op):
    import tensorflow as tf

    steps = Steps(op)
    v1, gradient = tf.compat.v1, steps.draw()
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.Variable(value, use_resource=False) for value in steps.state]
        given = steps.inputs([one._ref() for one in variables], tf.constant(gradient))
        update = getattr(tf.raw_ops, op)(**dict(zip(arguments(op), given, strict=True)))
        session.run(v1.global_variables_initializer())
        session.run([update] * 2)
        session.run(update)
        wanted = session.run(variables)
    ours = [to_torch(value.copy(), DEVICE) for value in steps.state]
    for _ in range(2):
        lowered(op, {}, ours, steps.inputs(steps.state, gradient))
    for found, value in zip(ours, wanted, strict=True):
        close(to_numpy(found), value, op)


def inputs_of(op, count, generator, dtype=torch.float32):
    """Variables slot by slot, numbers and gradients for `_ApplyFlat`."""
    shapes = [(5, 3), (7,), (), (0,), (64,)][:count]
    optimizer = OPTIMIZERS[op]
    state = [
        torch.rand(shape, generator=generator, dtype=dtype) + 1 for _ in range(optimizer.variables) for shape in shapes
    ]
    numbers = {"ApplyGradientDescent": 1, "ApplyMomentum": 2, "ApplyAdam": 6, "ApplyAddSign": 4}[op]
    numbers = [torch.tensor(0.3 + 0.1 * place, dtype=dtype) for place in range(numbers)]
    return state, numbers, [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("op", ["ApplyGradientDescent", "ApplyMomentum", "ApplyAdam", "ApplyAddSign"])
def test_many_variables_are_updated_as_each_of_them(op):
    state, numbers, gradients = inputs_of(op, 5, torch.Generator().manual_seed(0))
    each = [one.clone() for one in state]
    for place, gradient in enumerate(gradients):
        variables = each[place::5]
        ordered = [*variables, *numbers]
        ordered.insert(OPTIMIZERS[op].gradient, gradient)
        table()[op].function(Node("one", op, {}), *ordered)
    results = table()["_ApplyFlat"].function(
        Node("all", "_ApplyFlat", {"op": op, "count": 5}), *state, *numbers, *gradients
    )
    assert all(result is one for result, one in zip(results, state, strict=True))
    assert all(one.equal(other) for one, other in zip(state, each, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("op", ["ApplyGradientDescent", "ApplyAdam"])
def test_a_gradient_of_each_rank_is_as_their_mean(op, dtype):
    made = inputs_of(op, 5, torch.Generator().manual_seed(0), dtype)
    state, numbers, gradients = ([one.to(DEVICE) for one in each] for each in made)
    edges = [0.0, -0.0, -0.0, np.nan, np.inf, -np.inf, -np.inf, 6e-8, 1e-45, 1e-45, 65504.0, 65504.0]
    gradients[4][: len(edges)] = torch.tensor(edges, dtype=dtype)
    others = [one.reshape(-1).roll(1).reshape(one.shape) for one in gradients]
    ways = []
    for given in (
        [*gradients, *others],
        [(one + other) / 2 for one, other in zip(gradients, others, strict=True)],
        gradients * 2,
    ):
        copies, ranks = [one.clone() for one in state], len(given) // 5
        node = Node("all", "_ApplyFlat", {"op": op, "count": 5, **({"ranks": ranks} if ranks > 1 else {})})
        table()["_ApplyFlat"].function(node, *copies, *numbers, *given)
        ways.append(copies)
    table()["_ApplyFlat"].function(Node("all", "_ApplyFlat", {"op": op, "count": 5}), *state, *numbers, *gradients)
    for found, right in (ways[:2], (ways[2], state)):  # of one memory the mean is what lies there
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_gradient_or_number_in_the_memory_of_a_variable_is_read_before_it_changes():
    first, second, rate = torch.ones(3), torch.full((3,), 2.0), torch.tensor(0.5)
    node = Node("all", "_ApplyFlat", {"op": "ApplyGradientDescent", "count": 3})
    table()["_ApplyFlat"].function(node, first, second, rate, rate, second, first.flip(0).flip(0), rate)
    assert first.tolist() == [0, 0, 0]
    assert second.tolist() == [1.5, 1.5, 1.5]
    first, second = torch.ones(3), torch.full((3,), 2.0)
    node = Node("all", "_ApplyFlat", {"op": "ApplyGradientDescent", "count": 2})
    table()["_ApplyFlat"].function(node, first, second, torch.tensor(1.0), second, first)
    assert first.tolist() == [-1, -1, -1]
    assert second.tolist() == [1, 1, 1]


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(Unsupported, match=r"keeps its shape .* has \(3,\) and is given \(1,\)"):
        run_lowering("ApplyGradientDescent", [np.ones(3, np.float32), np.float32(1), np.ones(1, np.float32)])


# Runs in a process of its own: Triton decides at import whether it interprets its kernels, on the CPU, or compiles them.
SCRIPT = """
import torch
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels import optimizers as kernel
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS

COUNTS = dict(zip(sorted(kernel.OPTIONS), (3, 1, 2, 6, 6, 4, 4, 5, 1, 2, 2, 4), strict=True))
draw = torch.Generator().manual_seed(0)
kernel._PROGRAMS = 1
EDGES = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e-45, 3e38, -3e38, 1e-39])
CASES = [(op, on, torch.float32) for op, (option, _) in kernel.OPTIONS.items() for on in ((False, True) if option else (False,))]
for op, on, dtype in [*CASES, ("ApplyFtrl", None, torch.float32), ("ApplyAdam", True, torch.float64)]:
    for shapes in ([(4,), (1500,), (0,), (8, 4)], [(3, 5), ()]):
        optimizer = OPTIMIZERS[op]
        slots = range(optimizer.variables)
        state = [[torch.rand(shape, generator=draw, dtype=dtype) + (slot > 0) for shape in shapes] for slot in slots]
        if op == "ApplyCenteredRMSProp":
            state[1] = [one * 0.1 for one in state[1]]
        gradients = [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]
        gradients[0].view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 0.0])
        numbers = [torch.tensor(0.3 + 0.1 * place, dtype=dtype) for place in range(COUNTS[op])]
        if "Ftrl" in op:
            numbers[-1] = torch.tensor(-0.3 if on is None else -0.5, dtype=dtype)
        wanted, twice, mean = ([[one.clone() for one in slot] for slot in state] for _ in range(3))
        attrs = {kernel.OPTIONS[op][0]: bool(on)}
        for variables, gradient in zip(zip(*wanted), gradients):
            for old, new in zip(variables, optimizer.step(attrs, variables, numbers, gradient), strict=True):
                old.copy_(new)
        kernel.update(op, attrs, state, numbers, [gradients])
        for found, right in zip(sum(state, []), sum(wanted, [])):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14, equal_nan=True)
        for one in gradients:
            one.view(-1)[:len(EDGES)] = EDGES[:one.numel()].to(dtype)
        others = [one.flip(0) if one.dim() else one * 3 for one in gradients]
        kernel.update(op, attrs, twice, numbers, [gradients, others])
        kernel.update(op, attrs, mean, numbers, [[(one + other) / 2 for one, other in zip(gradients, others)]])
        for found, right in zip(sum(twice, []), sum(mean, [])):
            kind = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
            assert torch.equal(found.nan_to_num(7).view(kind), right.nan_to_num(7).view(kind)), op
"""


@pytest.mark.needs_triton
def test_the_kernel_computes_the_same():
    run_interpreted(SCRIPT)


EDGES = np.array([0, -0.0, 1, -1, 0.5, 1e-30, np.inf, -np.inf, np.nan, 3e38, 1e20, 2.5], np.float32)


@pytest.mark.tf
@pytest.mark.parametrize(("op", "attrs", "given"), VARIANTS, ids=str)
def test_special_values_of_slots_and_gradients(op, attrs, given):
    import tensorflow as tf

    slots, gradients = (
        np.append(grid.reshape(-1), [EDGES[2]] * 48) for grid in np.meshgrid(EDGES, EDGES, indexing="ij")
    )
    steps = Steps(op, given=given)
    state = [np.full_like(slots, 0.5), *(slots for _ in steps.state[1:])] if steps.state[1:] else [slots]
    inputs = steps.inputs(state, gradients)
    theirs, ours = [tf.Variable(value) for value in state], [to_torch(value.copy(), DEVICE) for value in state]
    handles = [variable.handle for variable in theirs]
    getattr(tf.raw_ops, f"Resource{op}")(
        **dict(zip(arguments(op), [*handles, *inputs[len(state) :]], strict=True)), **attrs
    )
    lowered(op, attrs, ours, [*ours, *inputs[len(state) :]])
    for number, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(to_numpy(found), wanted.numpy(), 1e-4, 1e-4, err_msg=f"{op}, variable {number}")
