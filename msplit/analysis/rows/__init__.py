"""Proof that the rows of a batch are independent, on the graph: `independent_rows`.

A step may take rows of several requests at once, or a batch that was padded, if row r of every output depends on row r of the inputs
alone, and the same is done to it whatever other rows there are and however many. What does not follow from the rules of known ops
is refused, with the op that stands in the way.
"""

# These register what ops do to rows.
from msplit.analysis.rows import counts, elements, products, reshaping  # noqa: F401
from msplit.analysis.rows.node import RowDependence
from msplit.analysis.rows.walk import Rows, independent_rows

__all__ = ["RowDependence", "Rows", "independent_rows"]
