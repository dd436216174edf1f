import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.core import depth_of, roots_of, slots_of
from tests.core.helpers import message
from tests.strategies import Dag, dags, deep, structures, wide

FUNCTIONS = (depth_of, slots_of, roots_of)


@given(st.one_of(structures(), dags(repeats=True)))
def test_depth_slots_and_roots_of_random_structures(dag: Dag) -> None:
    assert depth_of(dag.edge_index, dag.num_nodes).tolist() == dag.depth
    assert roots_of(dag.edge_index, dag.num_nodes).tolist() == dag.roots
    seen: dict[int, int] = {}
    for parent, slot in zip(
        dag.edge_index[1].tolist(), slots_of(dag.edge_index, dag.num_nodes).tolist(), strict=True
    ):
        assert slot == seen.get(parent, 0)
        seen[parent] = slot + 1


def test_long_chains_and_wide_stars() -> None:
    assert torch.equal(depth_of(deep(5000).edge_index, 5000), torch.arange(5000))
    dag = wide()
    assert depth_of(dag.edge_index, dag.num_nodes)[0] == 1
    assert slots_of(dag.edge_index, dag.num_nodes).tolist() == list(range(2000))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_node_and_no_edge(function: object) -> None:
    assert len(function(torch.empty(2, 0, dtype=torch.long), 0)) == 0


@given(st.integers(1, 10), st.integers(0, 8), st.randoms(use_true_random=False))
def test_an_error_shows_a_cycle(length: int, others: int, random: object) -> None:
    num_nodes = length + others
    labels = list(range(num_nodes))
    random.shuffle(labels)
    pairs = [(labels[i], labels[(i + 1) % length]) for i in range(length)]
    pairs += [(labels[random.randrange(i)], labels[i]) for i in range(length, num_nodes)]
    random.shuffle(pairs)
    text = message(ValueError, depth_of, torch.tensor(pairs).t(), num_nodes)
    shown = re.search(r"\d+(?: -> \d+)+", text)
    assert shown is not None, text
    *cycle, last = map(int, shown.group().split(" -> "))
    assert last == cycle[0]
    assert sorted(cycle) == sorted(labels[:length])
    assert all((a, b) in pairs for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True))
