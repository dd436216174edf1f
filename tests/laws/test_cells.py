"""Laws of every cell of :data:`tests.laws.cells.CELLS` on every kind of structure."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch.core import Engine
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer
from pyg_dynbatch.testing import assert_cell_agrees
from tests.core.helpers import as_users_run_it
from tests.laws.cells import CELLS, IN, CellCase, parts_of, plain_recursion, structure_of
from tests.nn.recursion import assert_equal
from tests.strategies import SHAPES, Dag, dags, deep, few, forests, trees, wide


def structures_for(case: CellCase, max_nodes: int = 10) -> st.SearchStrategy[Dag]:
    """Return trees, forests and DAGs whose nodes have no more children than the cell takes."""
    arity = case.arity or 3
    return st.one_of(
        trees(max_nodes, arity), forests(3, 4, arity), dags(max_nodes, arity, repeats=True)
    )


def fits(case: CellCase, dag: Dag) -> bool:
    return case.arity is None or max(map(len, dag.children)) <= case.arity


def check(case: CellCase, structures: list[Data]) -> None:
    torch.manual_seed(0)
    assert_cell_agrees(case.make(), case.state, structures, in_channels=IN, arity=case.arity)


@pytest.mark.parametrize("name", CELLS)
@few(5)
@given(data=st.data())
def test_structures_programs_and_single_calls_agree(name: str, data: Any) -> None:
    case = CELLS[name]
    batch = data.draw(st.lists(structures_for(case), min_size=1, max_size=3))
    masks: list[Tensor | None] = [None] * len(batch)
    if data.draw(st.booleans()):
        sizes = [dag.num_nodes for dag in batch]
        flags = [st.lists(st.booleans(), min_size=size, max_size=size) for size in sizes]
        masks = [torch.tensor(data.draw(each)) for each in flags]
    check(case, list(map(structure_of, batch, masks)))


@pytest.mark.parametrize("name", CELLS)
def test_edge_cases(name: str) -> None:
    case = CELLS[name]
    shapes = [make() for make in SHAPES.values()]
    fitting = [dag for dag in shapes if fits(case, dag)]
    assert len(fitting) >= 2
    structures = [structure_of(dag) for dag in fitting]
    check(case, structures[:1])
    # All together: different depths, and two equal examples.
    check(case, [*structures, structures[-1]])


def prepared(name: str, dag: Dag) -> tuple[CellCase, nn.Module, Tensor]:
    """Return a cell in float64, and an input row for every node."""
    torch.manual_seed(0)
    x = torch.randn(dag.num_nodes, IN, dtype=torch.float64, requires_grad=True)
    return CELLS[name], CELLS[name].make().double(), x


def run(engine: Engine, schedule: Levels, x: Tensor) -> tuple[Tensor, ...]:
    return parts_of(engine(schedule, {"input": x[schedule.input_node]})["node"])


def gradients(rows: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    loss = sum((part * torch.linspace(-1, 2, part.numel()).view_as(part)).sum() for part in rows)
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)
    ]


def ways(case: CellCase, cell: nn.Module, dag: Dag, x: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the states of the generic engine and, for a recursive cell, of its layer."""
    schedule = schedule_structure(
        dag.edge_index, dag.num_nodes, child_slot=dag.child_slot, arity=case.arity
    )
    engine = Engine.of_cell(cell, case.state, case.arity).double()
    found = [run(engine, schedule, x)]
    if isinstance(cell, RecursiveCell):
        found.append(RecursiveLayer(cell)(x, schedule=schedule, return_state=True))
    return found


@pytest.mark.parametrize("name", CELLS)
@few(5)
@given(data=st.data())
def test_values_and_gradients_are_those_of_a_plain_recursion(name: str, data: Any) -> None:
    dag = data.draw(structures_for(CELLS[name]))
    case, cell, x = prepared(name, dag)
    leaves = [x, *cell.parameters()]
    wanted = plain_recursion(case, cell, dag, x)
    right = gradients(wanted, leaves)
    for found in ways(case, cell, dag, x):
        assert_equal(found, wanted)
        assert_equal(gradients(found, leaves), right)


@pytest.mark.parametrize(
    ("name", "num_nodes"),
    [
        *((name, 1100) for name in CELLS if not name.endswith(("_1", "_3"))),
        pytest.param("ragged", 10_000, marks=pytest.mark.long),
    ],
)
def test_far_deeper_than_the_recursion_limit(name: str, num_nodes: int) -> None:
    dag = deep(num_nodes)
    case, cell, x = prepared(name, dag)
    leaves = [x, *cell.parameters()]
    with as_users_run_it(), torch.set_grad_enabled(name == "ragged"):
        wanted = plain_recursion(case, cell, dag, x)
        for found in ways(case, cell, dag, x):
            assert_equal(found, wanted)
            if name == "ragged":
                assert_equal(gradients(found, leaves), gradients(wanted, leaves))


@pytest.mark.parametrize("name", [name for name, case in CELLS.items() if case.arity is None])
def test_two_thousand_children(name: str) -> None:
    dag = wide()
    case, cell, x = prepared(name, dag)
    with as_users_run_it(), torch.no_grad():
        wanted = plain_recursion(case, cell, dag, x)
        for found in ways(case, cell, dag, x):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
