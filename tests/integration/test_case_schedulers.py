"""The policy of Decima: equal to a recursion, to a loop over masks and to published scores."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import schedulers
import torch
from scheduler_cell import StageCell
from scheduler_data import State, draw, read_episode
from scheduler_model import Batch, Scheduler
from schedulers import by_masks, decisions
from torch import Tensor

from pyg_dynbatch import TensorType, schedule_structure, testing
from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.nn import RecursiveLayer

PARTS = ("h_node", "h_dag", "h_glob", "stage_scores")


def drawn(num_jobs: int, seed: int, edges: bool = True) -> State:
    """Draw a state of small random DAGs."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, num_jobs)
    ptr, pairs = np.cumsum([0, *sizes]), list[tuple[int, int]]()
    for first, size in zip(ptr, sizes, strict=False):
        pairs += [
            (first + a, first + b)
            for b in range(size)
            for a in range(b)
            if edges and rng.random() < 0.4
        ]
    chosen = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    ready = ~np.isin(np.arange(ptr[-1]), chosen[:, 1])
    x = rng.normal(size=(ptr[-1], 5)).astype(np.float32)
    return State(x, chosen, ptr, ready)


def by_recursion(model: Scheduler, state: State) -> tuple[Tensor, ...]:
    """Compute embeddings and scores of one state, stage by stage."""
    x, cell, jobs = torch.from_numpy(state.x).double(), model.layer.cell, range(len(state.ptr) - 1)
    waiting: dict[int, list[int]] = {}
    for a, b in state.edges.tolist():
        waiting.setdefault(a, []).append(b)

    def h(stage: int) -> Tensor:
        own = cell.mlp_prep(x[stage])
        if not len(state.edges):
            return own
        if stage not in waiting:
            return cell.mlp_update(own)
        return own + cell.mlp_update(sum(cell.mlp_msg(h(b)) for b in waiting[stage]))

    nodes = torch.stack([h(stage) for stage in range(len(x))])
    of_job = [range(state.ptr[j], state.ptr[j + 1]) for j in jobs]
    dags = [sum(model.dag(torch.cat([x[v], nodes[v]])) for v in part) for part in of_job]
    whole = sum(model.glob(dag) for dag in dags)
    scores = [
        model.stage(torch.cat([x[v], nodes[v], dags[j], whole]))
        for j in jobs
        for v in of_job[j]
        if state.ready[v]
    ]
    return nodes, torch.stack(dags), whole[None], torch.cat(scores)


def test_batches_equal_a_recursion_also_without_edges() -> None:
    torch.manual_seed(0)
    model = Scheduler().double()
    states = [drawn(1 + seed % 3, seed, edges=seed != 2) for seed in range(5)]
    batch = Batch.of(states, torch.float64)
    assert len(batch.unconnected) == len(states[2].x)
    with torch.no_grad():
        found = model(batch)
        wanted = [by_recursion(model, state) for state in states]
    for part, each in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(part, torch.cat(each), rtol=1e-10, atol=1e-10)


def test_cell_keeps_the_law_of_cells() -> None:
    torch.manual_seed(0)
    structures = []
    for seed in range(4):
        state = drawn(2, seed)
        edges = torch.from_numpy(np.ascontiguousarray(state.edges[:, ::-1].T))
        structures.append(DynTreeData(edges, x=torch.from_numpy(state.x)))
    testing.assert_cell_agrees(StageCell(), TensorType((16,)), structures, in_channels=5)


@pytest.mark.parametrize("edges", [True, False])
def test_gradients_of_all_levels_at_once_equal_those_level_by_level(edges: bool) -> None:
    class Plain(StageCell):
        def run_schedule(self, *args: Any, **options: Any) -> None:
            return None

    torch.manual_seed(0)
    batch = Batch.of([drawn(3, seed, edges) for seed in range(4)], torch.float64)
    fused, plain = RecursiveLayer(StageCell().double()), RecursiveLayer(Plain().double())
    plain.load_state_dict(fused.state_dict())
    found = []
    for layer in (fused, plain):
        x = batch.x.clone().requires_grad_()
        h = layer(x, None, batch.schedule)
        weight = torch.linspace(-1, 1, h.numel(), dtype=torch.float64).view_as(h)
        found.append([h, *torch.autograd.grad((h * weight).sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    if edges:
        x = batch.x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(fused(x, None, batch.schedule).sum(), x, create_graph=True)


def test_the_loop_over_masks_embeds_the_same() -> None:
    """In chains, and without edges; an edge between two successors of one stage it gets wrong."""
    torch.manual_seed(0)
    model, one = Scheduler().double(), drawn(3, 2, edges=False)
    chain = np.array([(v, v + 1) for v in range(len(one.x) - 1)])
    for edges in (one.edges, chain):
        batch = Batch.of([one._replace(edges=edges)], torch.float64)
        torch.testing.assert_close(by_masks(model, batch), model(batch).h_node)
    edges = np.array([(0, 1), (0, 2), (1, 2), (1, 3)])
    batch = Batch.of([one._replace(edges=edges)], torch.float64)
    assert float((by_masks(model, batch) - model(batch).h_node).detach().abs().max()) > 1e-4


@pytest.fixture
def published(shared_data: Any) -> Scheduler:
    return Scheduler.of_spark_sched_sim(np.load(shared_data("schedulers/decima_model.npz")))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_reference(published: Any, dtype: Any, atol: float, shared_data: Any) -> None:
    """20 states, one by one and in one batch; one of them has no edge."""
    data = np.load(shared_data("schedulers/reference.npz"))
    names = ("x", "edges", "ptr", "stage_mask")
    states = [State(*(data[f"s{k:02}_{name}"] for name in names)) for k in range(20)]
    model = published.to(dtype)
    for parts in ([states], [[state] for state in states]):
        found = list[tuple[Tensor, ...]]()
        for part in parts:
            batch = Batch.of(part, dtype)
            with torch.no_grad():
                found.append(model(batch))
        for name, each in zip(PARTS, zip(*found, strict=True), strict=True):
            wanted = [data[f"s{k:02}_{name}"] for k in range(20)]
            rows = np.stack(wanted) if name == "h_glob" else np.concatenate(wanted)
            np.testing.assert_allclose(torch.cat(each), rows, rtol=0, atol=atol)


def test_an_edge_between_two_successors_is_computed_once(published: Any, shared_data: Any) -> None:
    data, model = np.load(shared_data("schedulers/reference.npz")), published.double()
    for name in ("demo", "demo2"):
        x, edges = torch.from_numpy(data[f"{name}_x"]).double(), data[f"{name}_edges"]
        columns = torch.from_numpy(np.ascontiguousarray(edges[:, ::-1].T).astype(np.int64))
        schedule = schedule_structure(columns, len(x))
        with torch.no_grad():
            h = model.layer(x, None, schedule)
        np.testing.assert_allclose(h, data[f"{name}_h_node_once"], rtol=0, atol=1e-10)
        assert abs(h.numpy() - data[f"{name}_h_node"]).max() > 1e-3


def test_decisions_of_an_episode(published: Any, shared_data: Any) -> None:
    states, scores = read_episode(shared_data("schedulers/episode.npz"))
    assert len(states) == 969
    with torch.no_grad():
        found = published(Batch.of(states)).stage_scores.numpy()
    np.testing.assert_allclose(found, scores, rtol=0, atol=1e-5)
    assert decisions(found, states) == decisions(scores, states)


@pytest.mark.long
def test_the_command_runs(shared_data: Any, tmp_path: Path, capsys: Any) -> None:
    folder, found = shared_data("schedulers/episode.npz").parent, tmp_path / "found.json"
    options = ["--folder", folder, "--rounds", 1, "--every", 200, "--json", found]
    with mock.patch.object(sys, "argv", ["schedulers", *map(str, options)]):
        schedulers.main()
    rows = json.loads(found.read_text())["rows"]
    assert rows["one batch"]["same decisions"] == rows["one by one"]["same decisions"] == [969]
    assert "50 jobs of TPC-H, batch of 32" in capsys.readouterr().out


def test_a_drawn_state_has_its_jobs() -> None:
    query = {"query": 1, "edges": [[0, 1], [0, 2]]}
    job = {"query": 1, "num_tasks": [3, 1, 200], "rough_task_duration_ms": [1000, 10, 5]}
    state = draw([job], [query], 2, np.random.default_rng(0))
    assert state.edges.tolist() == [[0, 1], [0, 2], [3, 4], [3, 5]]
    assert state.ready.tolist() == [True, False, False] * 2
    assert state.x[2].tolist() == pytest.approx([1, -1, 0, 1, 0.01])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"edges": [[0, 1], [1, 3]]}, r"state 1: edge \[1, 3\] refers to a missing stage"),
        ({"edges": [[0, 1], [-1, 1]]}, r"state 1: edge \[-1, 1\] refers to a missing stage"),
        ({"edges": [[0, 1], [0, 2], [0, 1]]}, r"state 1: edge \[0, 1\] is listed twice"),
        ({"ptr": [0, 2, 4]}, r"state 1: ptr \[0, 2, 4\] for 3 stages"),
        ({"ptr": [0, 4, 3]}, r"state 1: ptr \[0, 4, 3\] for 3 stages"),
        ({"ready": [0]}, "state 1: ready is no mask of its 3 stages"),
        ({"ready": [True, False]}, "state 1: ready is no mask of its 3 stages"),
    ],
)
def test_states_that_do_not_fit_are_refused(changed: Any, said: str) -> None:
    right = State(
        np.ones((3, 5), np.float32), np.array([[0, 1]]), np.array([0, 1, 3]), np.ones(3, bool)
    )
    assert Batch.of([right, right]).edges.tolist() == [[1, 4], [0, 3]]
    wrong = right._replace(**{name: np.array(value) for name, value in changed.items()})
    with pytest.raises(ValueError, match=said):
        Batch.of([right, wrong, right])


def test_missing_data(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is missing; set PYG_DYNBATCH_DATA"):
        read_episode(tmp_path / "episode.npz")
