"""Traits of TensorFlow's ops, and the ops among them that change variables.

Traits of TensorFlow's ops: one row per op, or per family of ops that are alike.

`data/traits.txt` says what each trait means and, in parentheses, which others go with it. `data/op_traits.txt` has the traits of each op;
what no row names has none. A word with a number is a field of `Traits`. A new op is a row there, a lowering and a test.

    ops_with("comparison")          every comparison
    traits("Sigmoid").flops         4

Ops that change variables: TensorFlow has most of them twice, on references and on resources.

What TensorFlow's ops do with half precision: the lists of its own mixed precision.

They are those that Grappler has for CUDA (``auto_mixed_precision_lists.h`` of TensorFlow 2.21, cuDNN 8 and newer; a test holds them
against the header that TensorFlow installs), without ops that the cuda engine has not, and with those that its passes make. What is in
no list stays in float32, and so does whatever reads it next unless it is a product.

In which inputs ops are linear: scaled there, they give results that are scaled alike. Gradients are made of such ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_DATA = Path(__file__).with_name("data")


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of an op.

    Attributes:
        words: Its traits.
        flops: Operations per element of the output (or of the largest input, where there is no output).
        table: Input slot of the table that it looks up in.
        ids: Input slot of what indexes that table, or a range.
        bound: Input slot of the constant that bounds those, where no table does.
        segments: Input slot of segment ids, which must not decrease.
        weights: Input slot of constant weights, of which branches have one each.
        axis: Input slot of the axis that it writes its inputs along, from the back where negative.
        neutral: A second operand that changes no bit of the first one: x - 0 is x for both zeros, x + 0 is not.
        values_in: Input slot of the values that it passes on.
        values_out: Output port where they go out.
        scalars: Input slots that take nothing but one value.
        writes: Input slots of the variables that it changes.
        scaled: Input slots of which exactly one may be scaled: the result is scaled then.
        scaled_together: Input slots that are scaled together, but for those that are zero; none stands for all of one type.
    """

    words: frozenset[str] = frozenset()
    flops: int = 1
    table: int | None = None
    ids: int | None = None
    bound: int | None = None
    segments: int | None = None
    weights: int | None = None
    neutral: int | None = None
    axis: int | None = None
    values_in: int = 0
    values_out: int = 0
    scalars: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    scaled: tuple[int, ...] = ()
    scaled_together: tuple[int, ...] | None = None


def _entries(file: str) -> Iterator[tuple[str, str]]:
    """(what stands before the colon, what behind it) of each entry; one goes on in lines that begin with a space."""
    text = (_DATA / file).read_text(encoding="utf-8")
    joined = "\n".join(line for line in text.splitlines() if line and not line.startswith("#")).replace("\n ", "")
    for entry in joined.splitlines():
        head, colon, tail = entry.partition(": ")
        if not colon:
            raise ValueError(f"{file}: no colon in: {entry}")
        yield head, tail


def _implications() -> dict[str, frozenset[str]]:
    """Per trait, that and all traits that go with it. One stands behind those that it implies, or before: order does not matter."""
    direct = {}
    for head, _ in _entries("traits.txt"):
        word, _, others = head.partition(" (")
        direct[word] = others.removesuffix(")").split(", ") if others else []
    found = {}
    for word in direct:
        waiting, seen = [word], {word}
        while waiting:
            following = [other for other in direct[waiting.pop()] if other not in seen]
            seen.update(following)
            waiting += following
        found[word] = frozenset(seen)
    return found


_IMPLIED = _implications()
_LISTS = ("scalars", "writes", "scaled", "scaled_together")
"""Fields that hold several slots."""


def _read() -> dict[str, Traits]:
    table: dict[str, Traits] = {}
    for ops, described in _entries("op_traits.txt"):
        words: set[str] = set()
        fields: dict[str, int | tuple[int, ...]] = {}
        for item in described.split(", "):
            if item in _IMPLIED:
                words |= _IMPLIED[item]
            else:
                name, *numbers = item.split()
                fields[name] = tuple(map(int, numbers)) if name in _LISTS else int(*numbers)
        row = Traits(frozenset(words), **fields)  # type: ignore[arg-type]
        for op in ops.split():
            if op in table:
                raise ValueError(f"{op} has two rows")
            table[op] = row
    return table


TABLE = _read()
_NONE = Traits()


def traits(op: str) -> Traits:
    """The traits of an op; the defaults for one without a row."""
    return TABLE.get(op, _NONE)


def _collect() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {word: set() for word in _IMPLIED}
    for op, row in TABLE.items():
        for word in row.words:
            found[word].add(op)
    return {word: frozenset(ops) for word, ops in found.items()}


_WITH = _collect()


def ops_with(*words: str) -> frozenset[str]:
    """Every op that has all of these traits.

    Raises:
        KeyError: There is no such trait.
    """
    first, *others = (_WITH[word] for word in words)
    return first.intersection(*others)


ADD = ops_with("add")
BATCH_MATMULS = ops_with("batch matmul")
BATCH_NORMS = ops_with("batch norm")
BIASES = ops_with("bias")
CALLS = ops_with("call")
CASE = ops_with("case")
CONDS = ops_with("if") | ops_with("case")
CONSTANTS = ops_with("constant")
CONV2D = ops_with("conv2d")
CONVOLUTIONS = ops_with("convolution")
DRAWN_ON_DEVICE = ops_with("draws on device")
DRAWS = ops_with("draws")
ENTER = ops_with("enter")
EPILOGUE_STEPS = ops_with("epilogue step")
EXIT = ops_with("exit")
FREE_OF_EFFECTS = (
    ops_with("no effect") | ops_with("reads state") | ops_with("repeatable") | ops_with("handle") | ops_with("variable")
)
"""Stateful ops that nobody misses when nobody uses what they give."""
GATHERS = ops_with("gather")
EXCHANGES = ops_with("exchange")
IF = ops_with("if")
IMAGE_CONVOLUTIONS = ops_with("image convolution")
JOINS = ops_with("join")
LOOPS = ops_with("while")
MATMULS = ops_with("matmul")
MERGE = ops_with("merge")
NEXT = ops_with("next")
PARSERS = ops_with("parses examples")
PADS = ops_with("pad")
PLACEHOLDERS = ops_with("placeholder")
RESHAPES = ops_with("reshape")
SELECT = ops_with("select")
SPARSE_SEGMENTS = ops_with("sparse segment")
SWITCH = ops_with("switch") | ops_with("switch n")
VARIABLES = ops_with("variable")
VIEWS = ops_with("view")


_NAMES = {"AssignVariableOp": "Assign", "AssignAddVariableOp": "AssignAdd", "AssignSubVariableOp": "AssignSub"}


ITERATORS, BEGINS = frozenset(("Iterator", "IteratorV2")), "MakeIterator"
"""Iterators that have no data until a program begins them, and the op that does so."""


def written(op: str) -> tuple[int, ...]:
    """Input slots of the variables that an op, or an op on values, changes; none for one that is not known to change any."""
    return traits(op).writes or traits(f"Resource{op}").writes


def on_values(op: str) -> str:
    """The name under which an op that changes variables is known once values stand in the place of handles: that of the op on references.

    ``ResourceApplyAdam`` is ``ApplyAdam``, ``AssignAddVariableOp`` is ``AssignAdd``. The first outputs are the changed variables; what a
    resource op gives of its own follows behind them.
    """
    return _NAMES.get(op) or op.removeprefix("Resource")


def own_outputs(op: str) -> int:
    """From which output of the op on values on those of the op itself begin: an op on references gives the reference first."""
    return 0 if on_values(op) == op and op not in _NO_REFERENCE else len(written(op))


_NO_REFERENCE = frozenset({"CountUpTo", "RngReadAndSkip", "RngSkip"})
"""Ops whose names do not tell that they give no reference."""


class Half(StrEnum):
    """Behaviour of an op in half precision. TensorFlow's names for it are allow, infer, deny and clear."""

    GAINS = "gains"
    """Products and convolutions: faster, and safe, since sums are in float32. They are always in half precision."""

    TAKES = "takes"
    """Safe, unless what it reads was made by an op that is not. In half precision only between two products."""

    LOSES = "loses"
    """Overflows, or loses too much: stays in float32, and so does what reads it up to the next product."""

    CARRIES = "carries"
    """Does not round: takes the type of its neighbours."""


HALF = {op: half for half in Half for op in ops_with(f"half {half}")}
"""Op -> its behaviour in half precision; what is not here is left in float32."""

WIDENING = ops_with("widens")
CONVERTING = WIDENING | MATMULS | BATCH_MATMULS | {"_Columns"}
"""Ops that can give another type than the one they compute in, in one kernel."""

MASKING = ops_with("hides large numbers")

LINEAR_IN_ONE = {op: row.scaled for op, row in TABLE.items() if row.scaled}
"""Op -> the inputs of which exactly one may be scaled."""

LINEAR_TOGETHER = {op: row.scaled_together for op, row in TABLE.items() if row.scaled_together is not None}
"""Op -> the inputs that are scaled together, but for those that are zero; none stands for all of one type."""
