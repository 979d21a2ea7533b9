"""Recurrent cells and layers that are one op."""

from __future__ import annotations

from msplit.shapes.registry import Node, Outputs, Shape, merge_dim, shape_function


@shape_function("LSTMBlockCell")
def lstm_cell(node: Node) -> Outputs:
    """Inputs x [batch, in] and state [batch, cells]; seven outputs like the state."""
    return (_state(node.shape(0), node.shape(1)),) * 7


@shape_function("LSTMBlockCellGrad")
def lstm_cell_gradient(node: Node) -> Outputs:
    """Gradients of the state, the four gates, and the three peephole vectors."""
    state = _state(node.shape(0), node.shape(1)) or (None, None)
    cells = state[1]
    return (state, (state[0], None if cells is None else 4 * cells), (cells,), (cells,), (cells,))


@shape_function("BlockLSTM", "BlockLSTMV2")
def lstm(node: Node) -> Outputs:
    """Inputs x [time, batch, in] and state [batch, cells]; seven outputs [time, batch, cells]."""
    x = node.shape(1) or (None,) * 3
    state = _state(x[1:], node.shape(2)) or (None, None)
    return ((x[0], *state),) * 7


@shape_function("GRUBlockCell")
def gru_cell(node: Node) -> Outputs:
    """Four outputs like the state."""
    return (_state(node.shape(0), node.shape(1)),) * 4


@shape_function("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3")
def cudnn(node: Node) -> Outputs:
    """Inputs x [time, batch, in] and state [layers * directions, batch, units]; scratch outputs have unknown sizes."""
    x, hidden = node.shape(0) or (None,) * 3, node.shape(1) or (None,) * 3
    units = hidden[2]
    both = node.attr("direction", "unidirectional") == "bidirectional"
    width = None if units is None else units * (2 if both else 1)
    cell: Shape = hidden if node.attr("rnn_mode", "lstm") == "lstm" else (None,)
    scratch: Outputs = ((None,),) if node.op == "CudnnRNN" else ((None,), (None,))
    return ((x[0], x[1], width), hidden, cell, *scratch)


def _state(x: Shape, state: Shape) -> Shape:
    if state is None:
        return None if x is None else (x[0], None)
    return (merge_dim(state[0], x[0] if x else None), state[1])
