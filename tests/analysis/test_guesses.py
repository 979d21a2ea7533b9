"""Which kernels are guessed, and what the user could tell."""

from __future__ import annotations

from msplit.analysis.guesses import guesses
from msplit.cost import estimate, infer
from tests.shapes.small import Builder


def test_an_input_of_open_shape_is_named_where_a_guess_depends_on_it() -> None:
    b = Builder()
    open_, batch = b.input("open", (None, None), "float32"), b.input("batch", (None, 8), "float32")
    b.add("MatMul", open_, b.weight(8, 8), T="float32")
    b.add("MatMul", batch, b.weight(8, 8), T="float32")
    flat = b.flat()
    shapes = infer(flat, batch=4)
    found = guesses(flat, estimate(flat, shapes), shapes)
    assert (len(found.nodes), found.kernels, found.share, found.inputs) == (1, 2, 0.5, ("open",))
    assert found.mend == "--shape open=… may settle it."
    shapes = infer(flat, batch=4, shapes={"open": (4, 8)})
    assert guesses(flat, estimate(flat, shapes), shapes).share == 0


def test_where_shapes_depend_on_values_no_option_is_proposed() -> None:
    b = Builder()
    where = b.add("Where", b.input("x", (None, 8), "bool"), T="bool")
    b.add("Cast", where, SrcT="int64", DstT="float32")
    flat = b.flat()
    shapes = infer(flat, batch=4)
    found = guesses(flat, estimate(flat, shapes), shapes)
    assert list(found.ops) == ["Where", "Cast"]
    assert found.inputs == ()
    assert "No option settles it" in found.mend
