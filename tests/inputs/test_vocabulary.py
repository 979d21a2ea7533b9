"""Vocabularies that a model carries, without TensorFlow."""

import numpy as np
import pytest

from msplit.core.graph import TensorValue
from msplit.inputs.lookups import vocabularies

from .graphs import const, flat_of, placeholder


def keys_of(path, **attrs):
    """Keys of a table of integers that is filled from a column of a file; None where they are not known."""
    name = TensorValue("string", (), lambda: np.array(str(path).encode(), object))
    nodes = [
        placeholder("x", "int64", (None,)),
        ("default", "Const", [], const(np.int64(0))),
        ("table", "HashTableV2", [], {"key_dtype": "int64", "value_dtype": "int64"}),
        ("file", "Const", [], {"dtype": "string", "value": name}),
        ("fill", "InitializeTableFromTextFileV2", ["table", "file"], {"key_index": 0, "delimiter": "\t", **attrs}),
        ("find", "LookupTableFindV2", ["table", "x", "default"], {"Tin": "int64", "Tout": "int64"}),
    ]
    found = vocabularies(flat_of(nodes, [("x", "int64", (None,))], ["find"]).model).get("table")
    return None if found is None else found.tolist()


@pytest.mark.parametrize("wrong", ["99999999999999999999", "-9223372036854775809", "9" * 5000, "word"])
def test_a_line_that_is_no_integer_of_64_bits_is_left_out(tmp_path, wrong):
    (tmp_path / "keys").write_text(f"3\n{wrong}\n-9223372036854775808\n9223372036854775807\tx\n 4\n")
    assert keys_of(tmp_path / "keys") == [3, -(2**63), 2**63 - 1, 4]


def test_columns_that_nothing_separates_are_not_known(tmp_path):
    (tmp_path / "keys").write_text("3\n4\n")
    assert keys_of(tmp_path / "keys", delimiter="") is None
