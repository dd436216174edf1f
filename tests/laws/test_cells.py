"""Law of cells: layers, programs and single calls give what a plain recursion gives.

For every cell of :data:`tests.laws.cells.CELLS` and every structure, in values and gradients.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data

from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer
from pyg_dynbatch.testing import assert_cell_agrees
from tests.core.helpers import as_users_run_it
from tests.laws.cells import CELLS, IN, plain_recursion, structure_of
from tests.nn.recursion import assert_equal
from tests.strategies import SHAPES, Dag, dags, deep, few, forests, trees, wide


def structures_for(name: str, max_nodes: int = 10) -> st.SearchStrategy[Dag]:
    """Return trees, forests and DAGs whose nodes have no more children than the cell takes."""
    arity = CELLS[name]().arity or 3
    return st.one_of(
        trees(max_nodes, arity), forests(3, 4, arity), dags(max_nodes, arity, repeats=True)
    )


def fits(name: str, dag: Dag) -> bool:
    arity = CELLS[name]().arity
    return arity is None or max(map(len, dag.children)) <= arity


def check_public_law(name: str, structures: list[Data]) -> None:
    torch.manual_seed(0)
    assert_cell_agrees(CELLS[name](), structures)


@pytest.mark.parametrize("name", CELLS)
@few(5)
@given(data=st.data())
def test_structures_programs_and_single_calls_agree(name: str, data: Any) -> None:
    batch = data.draw(st.lists(structures_for(name), min_size=1, max_size=3))
    masks: list[Tensor | None] = [None] * len(batch)
    if data.draw(st.booleans()):
        masks = [data.draw(masks_of(dag)) for dag in batch]
    check_public_law(name, list(map(structure_of, batch, masks)))


def masks_of(dag: Dag) -> st.SearchStrategy[Tensor]:
    """Say for each node whether it has an input."""
    flags = st.lists(st.booleans(), min_size=dag.num_nodes, max_size=dag.num_nodes)
    return flags.map(torch.tensor)


@pytest.mark.parametrize("name", CELLS)
def test_special_shapes_agree_alone_and_together(name: str) -> None:
    shapes = [make() for make in SHAPES.values()]
    fitting = [dag for dag in shapes if fits(name, dag)]
    assert len(fitting) >= 2
    structures = [structure_of(dag) for dag in fitting]
    check_public_law(name, structures[:1])
    # All together: different depths, and two equal examples.
    check_public_law(name, [*structures, structures[-1]])


def prepared(name: str, dag: Dag) -> tuple[RecursiveCell, Tensor]:
    """Return a cell in float64, and an input row for every node."""
    torch.manual_seed(0)
    x = torch.randn(dag.num_nodes, IN, dtype=torch.float64, requires_grad=True)
    return CELLS[name]().double(), x


def states_of_layer(cell: RecursiveCell, dag: Dag, x: Tensor) -> tuple[Tensor, ...]:
    schedule = schedule_structure(
        dag.edge_index, dag.num_nodes, child_slot=dag.child_slot, arity=cell.arity
    )
    return RecursiveLayer(cell)(x, schedule=schedule, return_state=True)


def gradients(states: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of all states."""
    loss = torch.zeros((), dtype=torch.float64)
    for part in states:
        loss = loss + (part * torch.linspace(-1, 2, part.numel()).view_as(part)).sum()
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def check_plain_recursion(cell: RecursiveCell, dag: Dag, x: Tensor) -> None:
    """Compare the states of a layer, and their gradients."""
    leaves = [x, *cell.parameters()]
    expected = plain_recursion(cell, dag, x)
    states = states_of_layer(cell, dag, x)
    assert_equal(states, expected)
    assert_equal(gradients(states, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("name", CELLS)
@few(5)
@given(data=st.data())
def test_values_and_gradients_are_those_of_a_plain_recursion(name: str, data: Any) -> None:
    dag = data.draw(structures_for(name))
    cell, x = prepared(name, dag)
    check_plain_recursion(cell, dag, x)


@pytest.mark.parametrize("num_nodes", [1100, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_chain_beyond_the_recursion_limit_equals_the_plain_recursion(num_nodes: int) -> None:
    dag = deep(num_nodes)
    cell, x = prepared("ragged", dag)
    with as_users_run_it():
        check_plain_recursion(cell, dag, x)


ONE_OF_EACH_KIND = [name for name in CELLS if not name.endswith(("_1", "_3"))]


@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH_KIND if name != "ragged"])
def test_values_of_a_long_chain_are_those_of_the_plain_recursion(name: str) -> None:
    dag = deep(1100)
    cell, x = prepared(name, dag)
    with as_users_run_it(), torch.no_grad():
        expected = plain_recursion(cell, dag, x)
        states = states_of_layer(cell, dag, x)
    assert_equal(states, expected)


@pytest.mark.parametrize("name", [name for name in CELLS if CELLS[name]().arity is None])
def test_two_thousand_children_equal_the_plain_recursion(name: str) -> None:
    dag = wide()
    cell, x = prepared(name, dag)
    with as_users_run_it(), torch.no_grad():
        expected = plain_recursion(cell, dag, x)
        states = states_of_layer(cell, dag, x)
    torch.testing.assert_close(states, expected, rtol=1e-9, atol=1e-9)
