"""The protocol: order of rounds, medians, ratios, agreement, memory."""

import math
import time

import pytest
import torch

from benchmarks.memory import peak_bytes
from benchmarks.products import BareProducts, PackedProducts, Sizes
from benchmarks.protocol import (
    Stopwatch,
    assert_agreement,
    interleave,
    median_ratio,
    median_seconds,
)
from benchmarks.records import number, table
from benchmarks.scaling import growth_exponent
from benchmarks.shapes import forest_edges, sentiment_like_trees, tree_edges
from benchmarks.table1_trees import schedule_of
from pyg_dynbatch.core import Schedule, depth_of, roots_of
from pyg_dynbatch.nn.fused_gates import RowProduct

CPU = torch.device("cpu")


def test_contenders_take_turns() -> None:
    calls: list[str] = []

    def contender(name: str) -> object:
        def run(lap: Stopwatch) -> None:
            calls.append(name)
            lap("run")

        return run

    rounds = interleave(
        {name: contender(name) for name in "abc"},  # type: ignore[misc]
        repeats=2,
        device=CPU,
    )
    assert calls == list("abc" + "bca" + "cab")
    assert {name: len(each) for name, each in rounds.items()} == {"a": 2, "b": 2, "c": 2}


def test_budget_leaves_one_round() -> None:
    rounds = interleave({"a": lambda lap: lap("run")}, repeats=9, device=CPU, budget=0.0)
    assert len(rounds["a"]) == 1


def test_skipped_time_does_not_count() -> None:
    watch = Stopwatch(CPU)
    watch._since -= 1000.0
    watch.skip()
    watch("run")
    watch("run")
    assert 0 <= watch.seconds["run"] < 500


def test_ratio_is_of_the_same_round() -> None:
    # The machine is ten times as slow in the second round, for both.
    mine = [{"a": 2.0, "b": 1.0}, {"a": 20.0, "b": 10.0}, {"a": 2.0, "b": 1.0}]
    theirs = [{"a": 1.0, "b": 0.5}, {"a": 10.0, "b": 5.0}, {"a": 1.0, "b": 0.5}]
    assert median_ratio(mine, theirs, ["a", "b"]) == 2.0
    assert median_seconds(mine, "a", "b") == 3.0


@pytest.mark.parametrize("found", [torch.tensor([1.0, 2.1]), torch.tensor([1.0, math.nan])])
def test_disagreement_is_refused(found: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"engine computes something else.*\n.*within 0\.0001"):
        assert_agreement("engine", [torch.tensor([1.0, 2.0])], [found])


def test_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"got: +\[3\]"):
        assert_agreement("engine", [torch.zeros(2)], [torch.zeros(3)])


def test_peak_memory_counts_what_is_freed_again() -> None:
    def run() -> None:
        torch.ones(4_000_000).add_(1)

    peak = peak_bytes(run, CPU)
    if peak is None:
        pytest.skip("this system does not tell the resident memory")
    assert 15_000_000 < peak < 24_000_000


def test_growth_exponent() -> None:
    assert growth_exponent([(10, 3.0), (100, 300.0)]) == pytest.approx(2.0)
    assert growth_exponent([(10, 3.0)]) is None


@pytest.mark.parametrize("shape", ["balanced", "random", "chain"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 10, 100])
def test_shapes_are_binary_trees(shape: str, nodes: int) -> None:
    edges = tree_edges(shape, nodes)
    assert edges.shape == (2, nodes - 1)
    assert (edges[0] < edges[1]).all()
    assert roots_of(edges, nodes).tolist() == [nodes - 1]
    assert int(torch.bincount(edges[1], minlength=nodes).max()) <= 2
    assert int(torch.bincount(edges[0], minlength=nodes).max()) <= 1
    depth = int(depth_of(edges, nodes).max())
    assert depth == {"chain": nodes - 1, "balanced": int(math.log2(nodes))}.get(shape, depth)


def test_forest_is_copies() -> None:
    edges = tree_edges("random", 5)
    forest = forest_edges(edges, 5, 3)
    assert torch.equal(forest[:, :4], edges)
    assert torch.equal(forest[:, 8:], edges + 10)


def test_random_trees_resemble_sentiment_trees() -> None:
    trees = sentiment_like_trees(300)
    words = torch.tensor([float((tree.token >= 0).sum()) for tree in trees])
    assert 17 < words.mean() < 21
    assert words.min() >= 2 and words.max() <= 56
    for tree in trees[:20]:
        tree.validate(require_tree=True, num_tokens=21_702, num_classes=5)
        assert torch.equal(tree.token >= 0, tree.depth == 0)


def test_products_are_counted() -> None:
    tree = sentiment_like_trees(1, seed=3)[0]
    schedule = Schedule.from_structure(
        tree.edge_index, tree.num_nodes, arity=2, has_input=tree.token >= 0
    )
    bare = BareProducts(schedule, Sizes(7, 3, 5), CPU)
    leaves = int((tree.token >= 0).sum())
    inner = tree.num_nodes - leaves
    forward = 2 * (leaves * 7 * 9 + inner * 6 * 15 + tree.num_nodes * 3 * 5)
    assert sum(product.flops for product in bare.forward_products()) == forward
    assert sum(product.flops for product in bare.backward_products()) == 2 * forward
    watch = Stopwatch(CPU)
    bare.run(watch)
    assert set(watch.seconds) == {"forward", "backward", "inference"}
    assert torch.allclose(bare.results[1], bare.children @ bare.weights[1].t(), atol=1e-4)
    assert torch.allclose(bare.input_grads[1], bare.gates @ bare.weights[1], atol=1e-4)


def test_packed_products_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedProducts, "_race", lambda self, *given: True)
    trees = sentiment_like_trees(90, seed=3)
    schedule = schedule_of(trees)
    with monkeypatch.context() as patch:
        products: list[tuple[torch.Tensor, ...]] = []
        multiply = RowProduct.__call__

        def kept(self: RowProduct, rows: torch.Tensor, first: int, size: int) -> torch.Tensor:
            found = multiply(self, rows, first, size)
            products.append((rows[first : first + size] @ self.weight.t(), found))
            return found

        patch.setattr(RowProduct, "__call__", kept)
        packed = PackedProducts(schedule, Sizes(300, 150, 5), CPU)
    assert len(packed.faster) == 6
    rows = 2 * sum(packed.levels) + 2 * packed.nodes
    assert sum(len(found) for _, found in products) == rows
    for wanted, found in products:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_race_takes_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.products._packed", lambda *given: time.sleep(0.02))
    tree = sentiment_like_trees(1, seed=3)[0]
    packed = PackedProducts(schedule_of([tree]), Sizes(7, 3, 5), CPU)
    assert not any(packed.faster.values())
    packed.run(Stopwatch(CPU))
    assert torch.allclose(packed.results[1], packed.children @ packed.weights[1].t(), atol=1e-4)


def test_products_of_a_single_leaf() -> None:
    schedule = Schedule.from_structure(torch.empty(2, 0, dtype=torch.int64), 1, arity=2)
    bare = BareProducts(schedule, Sizes(2, 3, 5), CPU)
    bare.run(Stopwatch(CPU))
    assert [product.rows for product in bare.forward_products()] == [1, 1]


def test_table_aligns_numbers_to_the_right() -> None:
    text = table("t", ["mode", "ms"], [["fused", "1.5"], ["engine", number(None)]])
    assert text.splitlines() == ["t", "mode     ms", "------  ---", "fused   1.5", "engine    -"]
