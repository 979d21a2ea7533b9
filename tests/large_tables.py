"""A recommender whose tables are announced by their shapes and never allocated, as text of a GraphDef."""

from __future__ import annotations


def recommender(rows: dict[str, int], width: int = 128, hidden: int = 512) -> str:
    """Lookups in tables of float32 in so many rows, side by side, and two layers on them."""
    nodes: list[str] = []

    def node(name: str, op: str, *inputs: str, **attrs: str) -> str:
        given = " ".join(f'input: "{one}"' for one in inputs)
        said = " ".join(f'attr {{ key: "{key}" value {{ {value} }} }}' for key, value in attrs.items())
        nodes.append(f'node {{ name: "{name}" op: "{op}" {given} {said} }}')
        return name

    def variable(name: str, *shape: int) -> str:
        sizes = " ".join(f"dim {{ size: {size} }}" for size in shape)
        return node(
            name, "VarHandleOp", dtype="type: DT_FLOAT", shape=f"shape {{ {sizes} }}", shared_name=f's: "{name}"'
        )

    def weight(name: str, *shape: int) -> str:
        return node(f"{name}/read", "ReadVariableOp", variable(name, *shape), dtype="type: DT_FLOAT")

    found = []
    for name, count in rows.items():
        ids = node(f"{name}/ids", "Placeholder", dtype="type: DT_INT64", shape="shape { dim { size: -1 } }")
        table = variable(f"{name}/table", count, width)
        types = {"dtype": "type: DT_FLOAT", "Tindices": "type: DT_INT64"}
        found.append(node(f"{name}/lookup", "ResourceGather", table, ids, **types))
    node(
        "axis",
        "Const",
        dtype="type: DT_INT32",
        value="tensor { dtype: DT_INT32 tensor_shape {} int_val: 1 }",
    )
    last = node(
        "side_by_side", "ConcatV2", *found, "axis", N=f"i: {len(found)}", T="type: DT_FLOAT", Tidx="type: DT_INT32"
    )
    for number, (before, after) in enumerate(((width * len(found), hidden), (hidden, 1))):
        last = node(f"layer{number}", "MatMul", last, weight(f"w{number}", before, after), T="type: DT_FLOAT")
        last = node(f"layer{number}/relu", "Relu", last, T="type: DT_FLOAT")
    return "\n".join(nodes) + "\nversions { producer: 1645 }\n"
