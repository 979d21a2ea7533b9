"""docs/ops.md and msplit/opset/data/lowered.json say what the table says."""

import importlib.util
from pathlib import Path

from msplit.engines.cuda.ir.lowering import listed, table

ROOT = Path(__file__).parents[3]


def script():
    spec = importlib.util.spec_from_file_location("make_ops_doc", ROOT / "scripts" / "make_ops_doc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_ops_is_what_the_table_gives():
    module = script()
    found = module.TARGET.read_text(encoding="utf-8")
    assert found == module.page(table()), "docs/ops.md is stale: python scripts/make_ops_doc.py"
    assert all((f"| `{op}` |" in found) != lowering.own for op, lowering in table().items())


def test_the_list_of_ops_is_what_the_table_gives():
    module = script()
    written = module.LISTED.read_text(encoding="utf-8")
    assert written == module.listed(table()), "msplit/opset/data/lowered.json is stale: python scripts/make_ops_doc.py"
    assert set(listed()) == {op for op, lowering in table().items() if not lowering.own}
    for op, entry in listed().items():
        for attrs in ({}, {table()[op].unless: True}):
            assert entry.dynamic_with(attrs) == table()[op].dynamic_with(attrs)
