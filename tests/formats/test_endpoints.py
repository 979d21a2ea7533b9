"""What a graph is fed and what it gives, where nothing in the file says so."""

from pathlib import Path
from typing import Any

import pytest

from msplit.errors import LoadError
from msplit.formats.model import Endpoint
from tests.formats.models import FLOAT, PLACEHOLDER, graph, names, read


def test_inputs_are_placeholders_and_outputs_sinks(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        graph(f"""
            x Placeholder | {PLACEHOLDER}
            unused Const
            a Relu x | {FLOAT}
            b Relu a | {FLOAT}
            check NoOp ^b
            c Tanh a | {FLOAT} attr {{ key: "_output_shapes" value {{ list {{ shape {{ dim {{ size: 3 }} }} }} }} }}
        """),
    )
    assert model.inputs == (Endpoint("x", "x", 0, "float32", (None, 4)),)
    assert model.outputs == (Endpoint("c", "c", 0, "float32", (3,)),)
    assert model.targets == ("check",)
    assert model.outputs[0].tensor == "c:0"
    assert model.signatures == ()


def test_graph_without_inputs_has_all_its_sinks(tmp_path: Path) -> None:
    model = read(tmp_path, graph(f"a Const\nb Relu a | {FLOAT}\nc Const\ninit NoOp"))
    assert names(model.outputs) == ["b", "c"]
    assert model.targets == ()


def test_iterators_are_the_origin_where_there_is_no_placeholder(tmp_path: Path) -> None:
    types = 'attr { key: "output_types" value { list { type: DT_FLOAT } } }'
    model = read(tmp_path, graph(f"it IteratorV2\nnext IteratorGetNext it | {types}\na Relu next | {FLOAT}\nc Const"))
    assert names(model.inputs) == []
    assert names(model.outputs) == ["a"]


def test_every_tensor_of_a_sink_is_an_output_but_those_for_gradients(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        graph(f"""
            x Placeholder | {PLACEHOLDER}
            axis Const
            s Split axis x | {FLOAT} attr {{ key: "num_split" value {{ i: 2 }} }}
            n FusedBatchNormV3 x x x x x | {FLOAT}
            odd Acme x
        """),
    )
    assert names(model.outputs) == ["s", "s:1", "n", "odd"]


def test_only_noise_is_better_than_nothing(tmp_path: Path) -> None:
    model = read(tmp_path, graph("a NoOp\nb NoOp ^a"))
    assert model.outputs == ()
    assert model.targets == ("b",)
    model = read(
        tmp_path, graph(f"x Placeholder | {PLACEHOLDER}\np Placeholder | {PLACEHOLDER}\ns Switch x p | {FLOAT}")
    )
    assert names(model.outputs) == ["s", "s:1"]


def test_op_without_outputs_is_a_target(tmp_path: Path) -> None:
    model = read(tmp_path, graph(f"v VarHandleOp\nx Placeholder | {PLACEHOLDER}\ns ResourceApplyGradientDescent v x x"))
    assert model.targets == ("s",)
    assert model.outputs == ()


def test_placeholder_of_a_saver_is_no_input(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        graph(f"""
            x Placeholder | {PLACEHOLDER}
            y Relu x | {FLOAT}
            save/filename/input Const
            save/filename PlaceholderWithDefault save/filename/input | attr {{ key: "dtype" value {{ type: DT_STRING }} }}
            save/Const PlaceholderWithDefault save/filename | attr {{ key: "dtype" value {{ type: DT_STRING }} }}
            names Const
            save/RestoreV2 RestoreV2 save/Const names names | attr {{ key: "dtypes" value {{ list {{ type: DT_FLOAT }} }} }}
            word Placeholder | attr {{ key: "dtype" value {{ type: DT_STRING }} }}
            upper StringUpper word
        """),
    )
    assert names(model.inputs) == ["x", "word"]
    assert names(model.outputs) == ["y", "upper"]


def test_scalars_with_a_default_are_settings_and_no_inputs(tmp_path: Path) -> None:
    def constant(shape: str) -> str:
        return (
            f'attr {{ key: "value" value {{ tensor {{ dtype: DT_FLOAT tensor_shape {{ {shape} }} float_val: 1 }} }} }}'
        )

    text = f"""
        one Const | {constant("")}
        many Const | {constant("dim { size: 2 }")}
        keep_prob PlaceholderWithDefault one | {FLOAT}
        data PlaceholderWithDefault many | {FLOAT}
        y Mul data keep_prob | {FLOAT}
    """
    assert names(read(tmp_path, graph(text)).inputs) == ["data"]
    assert names(read(tmp_path, graph(text), inputs=["keep_prob"]).inputs) == ["keep_prob"]
    alone = f"one Const | {constant('')}\nkeep_prob PlaceholderWithDefault one | {FLOAT}\ny Relu keep_prob | {FLOAT}"
    assert names(read(tmp_path, graph(alone)).inputs) == ["keep_prob"]


def test_placeholders_that_nothing_reads_are_left_over(tmp_path: Path) -> None:
    """Freezing a loop leaves dozens of `unused_control_flow_input` behind."""
    variant = 'attr { key: "dtype" value { type: DT_VARIANT } }'
    rest = f"unused Placeholder | {PLACEHOLDER}\nhandle Placeholder | {variant}"
    model = read(tmp_path, graph(f"x Placeholder | {PLACEHOLDER}\n{rest}\ny Relu x | {FLOAT}"))
    assert names(model.inputs) == ["x"]
    assert names(model.outputs) == ["y"]
    alone = read(tmp_path, graph(f"x Placeholder | {PLACEHOLDER}"))
    assert names(alone.inputs) == names(alone.outputs) == ["x"]


def test_inputs_and_outputs_can_be_named(tmp_path: Path) -> None:
    graph_def = graph(f"""
        x Placeholder | {PLACEHOLDER}
        axis Const
        s Split axis x | {FLOAT} attr {{ key: "num_split" value {{ i: 2 }} }}
        a Relu s:1 | {FLOAT}
        step NoOp ^a
    """)
    model = read(tmp_path, graph_def, inputs=["axis"], outputs=["s:1", "a", "step"])
    assert names(model.inputs) == ["axis"]
    assert [(e.name, e.node, e.port, e.dtype) for e in model.outputs] == [
        ("s:1", "s", 1, "float32"),
        ("a", "a", 0, "float32"),
    ]
    assert model.targets == ("step",)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"outputs": ["nothing_like_it"]}, "--part outputs= names 'nothing_like_it'"),
        ({"outputs": ["dense/Rel"]}, r"did you mean dense/Relu\?"),
        ({"outputs": ["dense/Relu:1"]}, r"has 1 output$"),
        ({"inputs": ["y"]}, "--part inputs= names 'y'"),
        ({"tags": ["serve"]}, "only a SavedModel has tags"),
        ({"signature": "serving_default"}, "no signature 'serving_default'"),
    ],
)
def test_wrong_choices_say_what_there_is(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(LoadError, match=what):
        read(tmp_path, graph(f"x Placeholder | {PLACEHOLDER}\ndense/Relu Relu x | {FLOAT}"), **options)
