"""Laws that dynamic batching must keep, as assertions for your own operations, cells and models.

Every law works on a copy in float64 and evaluation mode, so the tolerance can be tight and the
object handed in is left alone. A broken law raises ``AssertionError`` and says which result, which
row and by how much.
"""

from pyg_dynbatch.testing.models import assert_cell_agrees, assert_model_agrees
from pyg_dynbatch.testing.programs import (
    assert_batching_agrees,
    assert_gradients_agree,
    assert_order_is_free,
)
from pyg_dynbatch.testing.structures import Structure, program_of_structure

__all__ = [
    "Structure",
    "assert_batching_agrees",
    "assert_cell_agrees",
    "assert_gradients_agree",
    "assert_model_agrees",
    "assert_order_is_free",
    "program_of_structure",
]
