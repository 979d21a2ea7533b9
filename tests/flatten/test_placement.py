"""Host and GPU."""

import pytest

from msplit.flatten.flat import host_nodes
from tests.flatten.graphdefs import function, model
from tests.graphs import flat


def on_host(text):
    graph = flat(text).graph
    return {graph.names[node] for node in host_nodes(graph).nonzero()[0]}


def test_ops_without_a_gpu_kernel_for_their_types_are_the_hosts():
    text = """
    s:Placeholder[dtype=string]
    h:StringToHashBucketFast(s)
    t:HashTableV2[key_dtype=string,value_dtype=int64]
    d:Const[dtype=int64]
    f:LookupTableFindV2(t,s,d)[Tin=string,Tout=int64]
    x:Placeholder[dtype=int32]
    i:MatMul(x,x)[T=int32]
    y:Placeholder[dtype=float32]
    m:MatMul(y,y)[T=float32]
    """
    assert on_host(text) == {"s", "h", "t", "d", "f", "x", "i"}


def test_shape_arithmetic_is_the_hosts():
    text = """
    x:Placeholder[dtype=float32]
    shape:Shape(x)[T=float32]
    zero:Const[dtype=int32]
    one:Const[dtype=int32]
    batch:StridedSlice(shape,zero,one,one)[T=int32,Index=int32]
    size:Mul(batch,one)[T=int32]
    packed:Pack(size,one)[T=int32,N=2]
    y:Reshape(x,packed)[T=float32]
    """
    assert on_host(text) == {"shape", "zero", "one", "batch", "size", "packed"}


def test_constants_follow_their_consumers():
    text = """
    x:Placeholder[dtype=float32]
    axis:Const[dtype=int32]
    w:Const[dtype=float32]
    c:ConcatV2(x,w,axis)[T=float32,N=2]
    ids:Const[dtype=int32]
    g:GatherV2(w,ids,axis)[Tparams=float32,Tindices=int32,Taxis=int32]
    loose:Const[dtype=int32]
    """
    assert on_host(text) == {"axis"}


def test_an_identity_is_the_hosts_only_between_host_nodes():
    text = """
    x:Placeholder[dtype=float32]
    r:Relu(x)[T=float32]
    out:Identity(r)[T=float32]
    text:AsString(out)[T=float32]
    axis:Const[dtype=int32]
    same:Identity(axis)[T=int32]
    again:Identity(same)[T=int32]
    c:ConcatV2(r,r,again)[T=float32,N=2]
    ids:Const[dtype=int32]
    both:Identity(ids)[T=int32]
    g:GatherV2(r,both,axis)[Tparams=float32,Tindices=int32,Taxis=int32]
    """
    assert on_host(text) == {"text", "axis", "same", "again"}


def test_a_handle_is_where_its_readers_are():
    text = """
    v:VarHandleOp[dtype=float32]
    r:ReadVariableOp(v)[dtype=float32]
    s:VarHandleOp[dtype=string]
    q:ReadVariableOp(s)[dtype=string]
    """
    assert on_host(text) == {"s", "q"}


def test_custom_ops_are_the_gpus_unless_they_handle_strings_or_tables():
    text = """
    x:Placeholder[dtype=float32]
    s:Placeholder[dtype=string]
    t:MutableHashTableV2[key_dtype=int64,value_dtype=float32]
    vendor:VendorHashTable
    a:VendorFused(x)[T=float32]
    b:VendorParse(x)[out_type=string]
    c:VendorSplit(s)
    d:VendorLookup(t,x)
    e:VendorFind(vendor,x)
    """
    assert on_host(text) == {"s", "t", "b", "c", "d", "e"}


def test_noop_assert_and_functional_ops():
    text = """
    x:Placeholder[dtype=float32]
    p:Placeholder[dtype=bool]
    s:Placeholder[dtype=string]
    ok:Assert(p,s)[T=string]
    group:NoOp(^ok)
    if:If(p,x)[Tin=float32,Tout=float32]
    words:StatelessIf(p,s)[Tcond=bool,Tin=string,Tout=string]
    call:PartitionedCall(x)[Tin=float32,Tout=float32]
    """
    graph = flat(text).graph
    attrs = [dict(a) for a in graph.attrs]
    for name in ("if", "call"):
        attrs[graph.index[name]].update(Tout=("float32",), Tin=("float32",))
    attrs[graph.index["words"]].update(Tout=("string",), Tin=("string",))
    attrs[graph.index["ok"]].update(T=("string",))
    view = type(graph)(graph.names, graph.ops, graph.devices, attrs, graph.edges)
    assert {view.names[n] for n in host_nodes(view).nonzero()[0]} == {"s", "ok", "words"}


@pytest.mark.parametrize(
    "device", ["/cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0", "/CPU:1"]
)
def test_an_explicit_cpu_device_is_the_hosts(tmp_path, device):
    loaded = model(
        tmp_path, f"x:Placeholder[dtype=float32]\ny:Relu(x)@{device}[T=float32]\nz:Relu(y)@/gpu:0[T=float32]"
    )
    assert host_nodes(loaded.graph).tolist() == [True, True, False], "x feeds nothing else"


def test_a_call_by_name_is_no_custom_op(tmp_path):
    pass_on = function("pass_on", "a:string", "r:string=a")
    loaded = model(tmp_path, "x:Placeholder[dtype=string]\ny:pass_on(x)", pass_on, outputs=["y"])
    assert host_nodes(loaded.graph).tolist() == [True, False]
