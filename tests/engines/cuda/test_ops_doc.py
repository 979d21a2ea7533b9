"""docs/ops.md says what the table says."""

import importlib.util
from pathlib import Path

from msplit.engines.cuda.registry import table

ROOT = Path(__file__).parents[3]


def test_the_page_of_ops_is_what_the_table_gives():
    spec = importlib.util.spec_from_file_location("make_ops_doc", ROOT / "scripts" / "make_ops_doc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.TARGET.read_text(encoding="utf-8")
    assert found == module.page(table()), "docs/ops.md is stale: python scripts/make_ops_doc.py"
    assert all((f"| `{op}` |" in found) != lowering.own for op, lowering in table().items())
