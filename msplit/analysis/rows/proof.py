"""The proof for a model: inputs, outputs, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msplit.analysis.rows.states import (
    FIXED,
    Array,
    LinearSizes,
    ListState,
    MixedRows,
    PerRow,
    RowDependence,
    RowState,
    UniqueValues,
)
from msplit.analysis.rows.walk import RowPass, Setting, writer
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.shapes.infer import inferred, stated_shapes


@dataclass(frozen=True)
class Rows:
    """The inputs and outputs of a model that carry rows, and the outputs with rows that depend on each other.

    Row r of what carries k entries per row is its entries k * r to k * r + k - 1 along the first axis.

    Attributes:
        inputs: By name, how many entries of the first axis belong to one row: all that carry rows have to be fed equally many. 0 for an
            input that is the same for all rows, such as a scalar: requests may share a step only where it is equal.
        outputs: The same of outputs whose rows are independent. One with 0 depends on no row.
        refusals: By the name of each other output, what stands in the way.
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    refusals: Mapping[str, RowDependence]

    @property
    def independent(self) -> bool:
        """True if there are rows at all, and they are independent in every output."""
        return not self.refusals and any(self.inputs.values()) and any(self.outputs.values())

    def check(self, outputs: Iterable[str] | None = None) -> None:
        """Makes sure that rows are independent in some outputs, or in all.

        Raises:
            MsplitError: They are not, or no input carries any; names the ops that mix rows.
        """
        if not any(self.inputs.values()):
            raise MsplitError(
                "no input of the model carries rows: the first dimension of each is fixed",
                fix="run it at its own batch, one request a step",
            )
        asked = self.refusals if outputs is None else [name for name in outputs if name in self.refusals]
        if asked:
            listed = [f"output {name!r}: {self.refusals[name]}" for name in asked]
            more = [f"and {len(listed) - 5} more"] if len(listed) > 5 else []
            raise MsplitError(
                "rows of a batch depend on each other, so that batches can not be padded or joined",
                details=[*listed[:5], *more],
                fix="run each request at its own batch, or ask for other outputs",
            )


def independent_rows(
    flat: FlatGraph,
    *,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
) -> Rows:
    """Proves for each output of a model that its rows depend on the same rows of the inputs alone.

    An input carries rows if the file leaves the size of its first dimension open. Nothing is run, and no library is needed. Checks that
    only fail (such as Assert) do not count: they fail for a batch as soon as they do for a row.

    Args:
        flat: The model.
        batch: Number of rows at which shapes are looked at; 2 where neither it nor shapes say another. The proof holds for all.
        shapes: Whole shapes of inputs at that batch, by name, as `msplit.shapes.infer` takes them. Their first dimensions may be
            multiples of the batch.

    Raises:
        MsplitError: An input that does not exist, or a shape that contradicts the graph's or is no multiple of the batch.
    """
    found, inputs = walked(flat, batch, shapes or {})
    changes = writer(flat.graph, found.setting, {tensor.node for tensor in flat.outputs})
    outputs: dict[str, int] = {}
    refusals: dict[str, RowDependence] = {}
    for tensor in flat.outputs:
        verdict = changes or _verdict(flat, tensor.node, found.state(tensor.node, tensor.port))
        if isinstance(verdict, RowDependence):
            refusals[tensor.name] = verdict
        else:
            outputs[tensor.name] = verdict
    return Rows(inputs, outputs, refusals)


def walked(
    flat: FlatGraph, batch: int | None, shapes: Mapping[str, tuple[int | None, ...]]
) -> tuple[RowPass, dict[str, int]]:
    """The states of all tensors, and of each input how many entries belong to a row; see `independent_rows`."""
    result, _ = inferred(flat, batch=batch if batch is not None or shapes else 2, shapes=shapes)
    fed = {tensor.name: result.shape(tensor.node, tensor.port) for tensor in flat.inputs}
    stated = stated_shapes(flat)
    open_ones = {name for name, shape in stated.items() if (shape is None or shape[:1] == (None,)) and fed[name] != ()}
    firsts = {name: shape[0] for name in open_ones if (shape := fed[name]) and shape[0] is not None}
    rows = batch if batch is not None else min(firsts.values(), default=2)
    inputs = {name: _per_row(name, firsts.get(name), rows) if name in open_ones else 0 for name in fed}
    given: dict[tuple[int, int], RowState] = {}
    for tensor in flat.inputs:
        count = inputs[tensor.name]
        free = None in (stated[tensor.name] or ()) and tensor.name not in shapes
        refusal = RowDependence(
            flat.graph.names[tensor.node], flat.graph.ops[tensor.node], "has another size open than its first"
        )
        given[tensor.node, tensor.port] = PerRow(0, 1, count) if count else MixedRows(refusal) if free else FIXED
    setting = Setting(rows, flat.graph.functions)
    back = flat.back_edges
    goes_back = {
        merge: (source, port)
        for source, port, merge in zip(back.src.tolist(), back.port.tolist(), back.dst.tolist(), strict=True)
    }
    found = RowPass(setting, flat.graph, result, given, goes_back)
    found.run()
    return found, inputs


def _per_row(name: str, first: int | None, batch: int) -> int:
    """Entries of an input's first dimension per row."""
    if first is None:
        return 1
    if batch < 1 or first < 1 or first % batch:
        raise MsplitError(
            f"input {name!r} has {first} entries along its first dimension, which is no multiple of the {batch} rows of a batch",
            fix="give shapes in which the first dimension of each input is the batch, or a multiple of it",
        )
    return first // batch


def _verdict(flat: FlatGraph, node: int, state: RowState) -> int | RowDependence:
    """Entries per row of an output, or why it is none whose rows are apart."""
    name, op = flat.graph.names[node], flat.graph.ops[node]
    if state is FIXED:
        return 0
    if isinstance(state, MixedRows):
        return state.refusal
    if isinstance(state, LinearSizes):
        return RowDependence(name, op, "gives the number of rows")
    if isinstance(state, UniqueValues):
        return RowDependence(name, op, "gives the different values of all rows")
    if isinstance(state, ListState | Array) or not isinstance(state, PerRow):
        return RowDependence(name, op, "gives a list and no tensor")
    if state.tells:
        return RowDependence(name, op, "gives the place of a row in the batch")
    if state.group:
        return RowDependence(name, op, "gives as many entries as were chosen, and not some for each row")
    if state.axis != 0:
        return RowDependence(name, op, f"gives rows along axis {state.axis}, not along the first")
    if state.outer != 1 or state.inner is None:
        return RowDependence(name, op, "gives rows of which each lies in several places")
    return state.inner
