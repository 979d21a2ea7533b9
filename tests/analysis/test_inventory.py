from dataclasses import replace

from msplit.analysis import inventory
from msplit.analysis.colocation import groups
from msplit.analysis.embedding_columns import columns
from msplit.core.graph import Argument, Function, Graph, TensorValue
from tests.graphs import parse


def test_ops_are_counted_by_side_costliest_first():
    found = inventory.op_counts(
        *parse("a:MatMul@5us; b:MatMul@6us; c:Relu@20us; d:Const; e:Const; f:StringJoin@3us host; g:Identity")
    )
    assert [(c.op, c.gpu, c.host, c.kernels, c.time_us) for c in found] == [
        ("Relu", 1, 0, 1, 20.0),
        ("MatMul", 2, 0, 2, 11.0),
        ("Const", 2, 0, 0, 0.0),
        ("Identity", 1, 0, 0, 0.0),
        ("StringJoin", 0, 1, 0, 0.0),
    ]


def test_parameters_are_constants_with_a_shape_and_variables_largest_first():
    value = TensorValue("int8", (3, 4), lambda: None)
    attrs = [
        {"value": TensorValue("float32", (), lambda: None)},
        {"value": value},
        {"shape": (10, 4), "dtype": "float32_ref"},
        {"shape": (None, 4), "dtype": "half"},
        {"shape": (2, 2), "dtype": "resource"},
        {"shape": (100,), "dtype": "bfloat16"},
        {"dtype": "float64"},
    ]
    flat, _ = parse(
        "s:Const; c:Const; v:VariableV2; u:VarHandleOp; r:VarHandleOp; b:VarHandleOp; n:VarHandleOp; m:MatMul",
        attrs=[*attrs, {}],
    )
    found = inventory.parameters(flat.graph)
    assert [(p.name, p.kind, p.dtype, p.shape, p.bytes) for p in found] == [
        ("b", "VarHandleOp", "bfloat16", (100,), 200),
        ("v", "VariableV2", "float32", (10, 4), 160),
        ("c", "Const", "int8", (3, 4), 12),
        ("u", "VarHandleOp", "half", None, 0),
        ("r", "VarHandleOp", "resource", (2, 2), 0),
        ("n", "VarHandleOp", "float64", None, 0),
    ]


def test_functions_are_counted_without_their_parameters():
    flat, _ = parse("a:MatMul")
    body, _ = parse("x:Placeholder; y:Relu(x); z:Relu(y)")
    small = Function("small", body.graph, (Argument("x", "float32", 0),), ())
    large = Function("large", body.graph, (), ())
    graph = replace(flat.graph, functions={"small": small, "large": large})
    assert isinstance(graph, Graph)
    found = inventory.functions(replace(flat.model, graph=graph))
    assert [(f.name, f.nodes) for f in found] == [("large", 3), ("small", 2)]


def test_regions_have_their_nodes_and_time():
    found = inventory.regions(
        *parse("a:MatMul@4us region=u; b:MatMul; c:MatMul@6us region=v; d:Relu@1us region=u; e:Print@9us region=u host")
    )
    assert [(size.region.name, size.nodes.tolist(), size.time_us) for size in found] == [
        ("u", [0, 3, 4], 5.0),
        ("v", [2], 6.0),
    ]


def test_groups_are_measured_largest_first():
    flat, _ = parse("a:MatMul; b:Relu[_class=loc:@a]; c:Relu; d:Relu[_class=loc:@e]; e:Relu; f:Relu[_class=loc:@e]")
    found = groups(flat)
    assert inventory.group_sizes(found).tolist() == [3, 2]
    assert [members.tolist() for members in found.members()] == [[0, 1], [3, 4, 5]]
    alone, _ = parse("a:MatMul")
    assert inventory.group_sizes(groups(alone)).tolist() == []
    assert groups(alone).members() == []


def test_tables_say_how_often_they_are_used():
    text = "t:Const[value=9x4]; a:GatherV2(t)@2us; b:GatherV2(t)@3us; u:Const[value=90x4]; c:GatherV2(u)@2us; j:AddN(a,b,c)@30us"
    found = inventory.table_uses(columns(*parse(text)))
    assert [(use.table.name, use.lookups, use.time_us) for use in found] == [("u", 1, 2.0), ("t", 2, 5.0)]
