import pytest

from msplit.analysis.embeddings import columns, default_ops, lookups
from tests.graphs import parse, table


def found(text, **named):
    """Per column its node names."""
    flat, costs = parse(text, **named)
    return [{flat.graph.names[node] for node in column.nodes} for column in columns(flat, costs)]


def looked_up(text, **named):
    flat, _ = parse(text, **named)
    return [(flat.graph.names[lookup.node], lookup.table.name) for lookup in lookups(flat)]


@pytest.mark.parametrize(
    "text",
    [
        "t:Const[value=9x4]; g:GatherV2(t)",
        "t:Const[value=9x4]; i:Identity(t); c:Cast(i); g:Gather(c)",
        "t:VarHandleOp[shape=9x4,dtype=float32]; g:ResourceGather(t)",
        "t:VarHandleOp[dtype=float32]; r:ReadVariableOp(t); g:GatherV2(r)",
        "t:VariableV2[shape=9x4,dtype=float32_ref]; r:Identity(t); g:SparseSegmentMean(r)",
        "t:KvVarHandleOp[dtype=float32]; g:KvResourceGather(t)",
        "x:Placeholder; y:Placeholder; t:Const[value=9x4]; g:FusedEmbeddingLocalSparseLookUp(x,y,t)",
    ],
)
def test_tables_are_found_behind_reads_and_casts(text):
    assert looked_up(text) == [("g", "t")]


@pytest.mark.parametrize(
    "text",
    [
        "t:Placeholder; g:GatherV2(t)",
        "t:Const; g:GatherV2(t)",
        "m:MatMul; i:Identity(m); g:GatherV2(i)",
        "t:VarHandleOp[shape=9x4,dtype=int64]; g:ResourceGather(t)",
        "g:GatherV2",
        "t:Const[value=9x4]; p:Placeholder; a:Const; c:ConcatV2(t,p,a); g:GatherV2(c)",
    ],
)
def test_what_gathers_from_something_else_is_no_lookup(text):
    assert looked_up(text) == []


def test_whole_numbers_and_other_ranks_are_no_tables():
    text = "t:Const; g:GatherV2(t)"
    for value, expected in (
        (table(9, 4), [("g", "t")]),
        (table(9, 4, "int32"), []),
        (type(table(1, 1))("float32", (9,), lambda: None), []),
    ):
        assert looked_up(text, attrs=[{"value": value}, {}]) == expected


@pytest.mark.parametrize("shape", [("VALID", "SAME"), (2.5, "9"), ((9,), None), (True, "x")])
def test_a_damaged_shape_of_a_variable_is_one_that_is_not_known(shape):
    flat, _ = parse("t:VarHandleOp; g:ResourceGather(t)", attrs=[{"shape": shape, "dtype": "float32"}, {}])
    (lookup,) = lookups(flat)
    assert (lookup.table.rows, lookup.table.columns) == (0, 0)


def test_only_rows_are_looked_up():
    import numpy as np

    from msplit.core.graph import TensorValue

    def axis(value, shape=()):
        return TensorValue("int32", shape, lambda: np.full(shape, value, np.int32))

    text = "t:Const; i:Placeholder; a:Const; g:GatherV2(t,i,a)"
    for value, expected in ((axis(0), 1), (axis(1), 0), (axis(0, (1,)), 1), (None, 1), (axis(5, (3,)), 1)):
        attrs = [{"value": table(9, 4)}, {}, {"value": value} if value else {}, {}]
        assert len(looked_up(text, attrs=attrs)) == expected


def test_a_partitioned_table_is_one_table():
    flat, _ = parse(
        "p0:VarHandleOp[shape=9x4,dtype=float32]; p1:VarHandleOp[shape=5x4,dtype=float32]; r0:ReadVariableOp(p0); r1:ReadVariableOp(p1)"
        "; ax:Const; c:ConcatV2(r0,r1,ax); g:GatherV2(c); g2:GatherV2(c); d:Concat(ax,r0,r1); g3:Gather(d)"
    )
    first, second, third = lookups(flat)
    assert first.table is second.table
    assert third.table == first.table
    assert (first.table.rows, first.table.columns, first.table.bytes) == (14, 4, 14 * 4 * 4)
    assert [flat.graph.names[part] for part in first.table.parts] == ["p0", "p1"]


def test_unknown_sizes_are_zero_and_not_guessed():
    flat, _ = parse("t:KvVarHandleOp[dtype=float32]; g:KvResourceGather(t)")
    assert lookups(flat)[0].table.bytes == 0


def test_a_long_way_to_the_table_ends_the_search():
    chain = "".join(f"i{n}:Identity({'t' if n == 0 else f'i{n - 1}'});" for n in range(2000))
    assert looked_up(f"t:Const[value=9x4]; {chain} g:GatherV2(i1999); h:GatherV2(i10)") == [("h", "t")]


COLUMN = "{n}_ids:Placeholder; {n}_cast:Cast({n}_ids); {n}_t:Const[value=9x4]; {n}_g:GatherV2({n}_t,{n}_cast)@2us; {n}_r:Relu({n}_g)@2us;"
REST = "j:ConcatV2(a_r,b_r)@2us; o:MatMul(j)@50us"
A_AND_B = COLUMN.format(n="a") + COLUMN.format(n="b")
PARTS = {"ids", "cast", "t", "g", "r"}


def test_a_column_is_what_feeds_it_and_what_works_on_its_result():
    assert found(A_AND_B + REST) == [{f"{n}_{part}" for part in PARTS} for n in "ab"]


def test_it_ends_where_something_expensive_comes_in_that_others_use_too():
    shared = A_AND_B + "d:MatMul@30us; m:Mul(a_r,d)@1us; m2:Relu(m)@1us; j:ConcatV2(m2,b_r)@2us; o:MatMul(j,d)@50us"
    assert found(shared)[0] == {f"a_{part}" for part in PARTS}
    cheap = shared.replace("d:MatMul@30us", "d:MatMul@3us")
    assert found(cheap)[0] == {f"a_{part}" for part in PARTS} | {"m", "m2"}
    own = shared.replace("MatMul(j,d)", "MatMul(j)")
    assert found(own)[0] == {f"a_{part}" for part in PARTS} | {"m", "m2", "d"}


def test_what_is_cut_off_takes_what_only_fed_it():
    text = (
        A_AND_B
        + "e:MatMul@1us; d:MatMul@30us; m:Mul(a_r,d,e)@1us; k:Relu(e)@1us; n:Mul(m,k)@1us; j:ConcatV2(n,b_r)@2us; o:MatMul(j,d)@50us"
    )
    assert found(text)[0] == {f"a_{part}" for part in PARTS}


def test_inputs_shared_by_columns_go_to_the_nearest_scope_or_to_none():
    def shared(prep):
        return (
            f"x:Placeholder; {prep}:Cast(x)@1us; u/t:Const[value=9x4]; u/g:GatherV2(u/t,{prep})@2us; v/w/t:Const[value=9x4]; "
            f"v/w/g:GatherV2(v/w/t,{prep})@2us; j:ConcatV2(u/g,v/w/g)@20us"
        )

    assert [column & {"u/c", "x"} for column in found(shared("u/c"))] == [{"u/c", "x"}, set()]
    assert [column & {"v/w/c"} for column in found(shared("v/w/c"))] == [set(), {"v/w/c"}]
    assert [column & {"c"} for column in found(shared("c"))] == [set(), set()]


def test_lookups_by_one_handle_are_one_column():
    gathers = "; ".join(f"{n}:ResourceGather(t)@2us" for n in "abc")
    text = f"t:VarHandleOp[shape=9x4,dtype=float32]; {gathers}; j:AddN(a,b,c)@9us"
    assert len(found(text)) == 1
    read = text.replace(
        "t:VarHandleOp[shape=9x4,dtype=float32]", "v:VarHandleOp[shape=9x4,dtype=float32]; t:ReadVariableOp(v)"
    )
    assert len(found(read.replace("ResourceGather", "GatherV2"))) == 3


def test_a_lookup_in_the_result_of_another_column_starts_its_own():
    text = "t:Const[value=9x4]; g:GatherV2(t)@2us; c:Cast(g)@1us; u:Const[value=9x4]; h:GatherV2(u,c)@2us; o:MatMul(h)@50us"
    first, second = found(text)
    assert {"t", "g", "c"} <= first
    assert {"u", "h"} <= second


TRAINING = """
v:VarHandleOp[shape=9x4,dtype=float32]; ids:Placeholder; tower/g:ResourceGather(v,ids)@2us; tower/m:MatMul(tower/g)@4us
w:VarHandleOp[shape=9x4,dtype=float32]; tower_1/g:ResourceGather(w,ids)@2us; tower_1/m:MatMul(tower_1/g)@4us
loss:AddV2(tower/m,tower_1/m)@60us; other:VarHandleOp[shape=4x4,dtype=float32]
{p}tower/m{s}MatMul:MatMul(loss,tower/g)@4us; scale:Mul({p}tower/m{s}MatMul)@1us
{p}tower_1/m{s}MatMul:MatMul(loss,tower_1/g)@4us; own:Mul(loss)@1us
step:ResourceSparseApplyAdagrad(v,scale,ids)@2us; step_1:ResourceScatterAdd(w,{p}tower_1/m{s}MatMul,own)@2us
{p}other{s}MatMul:MatMul(loss)@2us; step_2:ResourceApplyAdam(other,{p}other{s}MatMul)@2us
"""


@pytest.mark.parametrize(
    ("prefix", "suffix"), [("gradients/", "_grad/"), ("gradients_7/", "_grad/"), ("gradient_tape/", "/")]
)
def test_gradients_and_updates_belong_to_the_column(prefix, suffix):
    first, second = found(TRAINING.format(p=prefix, s=suffix))
    assert {"tower/g", "tower/m", f"{prefix}tower/m{suffix}MatMul", "scale", "step"} <= first
    assert {"tower_1/g", "tower_1/m", f"{prefix}tower_1/m{suffix}MatMul", "own", "step_1"} <= second
    assert {"loss", "step_2", "ids", f"{prefix}other{suffix}MatMul"} & (first | second) == set()


def test_gradients_inside_an_inlined_call_are_found():
    text = (
        "c/t:Const[value=9x4]; c/g:GatherV2(c/t)@2us; c/m:MatMul(c/g)@4us; c/u:Const[value=9x4]; c/h:GatherV2(c/u)@2us; "
        "loss:AddV2(c/m,c/h)@60us; c/gradients/m_grad/MatMul:MatMul(loss)@4us; c/gradientsx/m_grad/MatMul:MatMul(loss)@4us; "
        "c/gradients_x/m_grad/MatMul:MatMul(loss)@4us; o:AddN(c/gradients/m_grad/MatMul,c/gradientsx/m_grad/MatMul)"
    )
    first, _ = found(text)
    assert "c/gradients/m_grad/MatMul" in first
    assert not {"c/gradientsx/m_grad/MatMul", "c/gradients_x/m_grad/MatMul"} & first


def test_a_table_written_for_two_columns_is_nobodys():
    text = (
        "t:VariableV2[shape=9x4,dtype=float32_ref]; r:Identity(t); a:GatherV2(r)@2us; b:GatherV2(r)@2us; j:AddV2(a,b)@20us; "
        "s:ScatterSub(t,j)@2us"
    )
    assert all("s" not in column for column in found(text))


def test_without_lookups_there_are_no_columns():
    assert found("a:MatMul; b:Relu(a)") == []


def test_hostile_names_take_no_time():
    name = "gradients/" * 20_000 + "gradient_tape/" * 20_000 + "x"
    text = COLUMN.format(n="a") + COLUMN.format(n="b") + f"{name}:MatMul(a_r,b_r)@9us"
    assert len(found(text)) == 2


def test_the_data_file_is_whole():
    ops = default_ops()
    assert ops.lookups["GatherV2"] == 0
    assert {"Const", "VarHandleOp"} <= ops.tables
    assert "ReadVariableOp" in ops.through
    assert all(isinstance(slot, int) for slot in ops.lookups.values())
