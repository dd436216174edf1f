"""The bare products are those of the models, and are counted right."""

import numpy as np
import pytest
import torch

from benchmarks import products
from benchmarks.bench import Stopwatch
from benchmarks.products import BareProducts, PackedProducts, classifier_products, work
from benchmarks.table1 import cell_products
from benchmarks.trees import Shape, schedule_of, sentiment_like_trees
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.kernels.products import RowProduct

CPU = torch.device("cpu")


def test_products_of_a_classifier() -> None:
    tree = sentiment_like_trees(1, seed=3)[0]
    listed = classifier_products(schedule_of([tree]), 7, 3, 5)
    leaves = int((tree.token >= 0).sum())
    inner = tree.num_nodes - leaves
    forward = 2 * (leaves * 7 * 9 + inner * 6 * 15 + tree.num_nodes * 3 * 5)
    counted = work(listed)
    assert counted["flops_forward"] == forward
    assert counted["flops_backward"] == 2 * forward
    bare, watch = BareProducts(listed, CPU), Stopwatch(CPU)
    bare.run(watch)
    assert set(watch.seconds) == {"forward", "backward", "inference"}
    assert_computed(bare)


def assert_computed(bare: BareProducts) -> None:
    for part in bare.parts:
        torch.testing.assert_close(part.out, part.rows @ part.weight.t(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.row_grad, part.out @ part.weight, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.weight_grad, part.out.t() @ part.rows, rtol=1e-4, atol=1e-4)


def test_products_of_a_single_leaf() -> None:
    schedule = schedule_structure(torch.empty(2, 0, dtype=torch.int64), 1, arity=2)
    listed = classifier_products(schedule, 2, 3, 5)
    assert [product.rows for product in listed] == [1, 0, 1]
    BareProducts(listed, CPU).run(Stopwatch(CPU))


def test_packed_products_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedule_of(sentiment_like_trees(20, seed=3))
    packed = PackedProducts(classifier_products(schedule, 30, 15, 5), CPU)
    packed.packed = dict.fromkeys(packed.packed, True)
    computed: list[tuple[torch.Tensor, torch.Tensor]] = []
    multiply = RowProduct.__call__

    def kept(self: RowProduct, rows: torch.Tensor, first: int, size: int) -> torch.Tensor:
        found = multiply(self, rows, first, size)
        computed.append((rows[first : first + size] @ self.weight.t(), found))
        return found

    monkeypatch.setattr(RowProduct, "__call__", kept)
    packed.forward()
    packed.backward()
    rows = sum(part.rows.size(0) for part in packed.parts)
    assert sum(len(found) for _, found in computed) == 2 * rows
    for wanted, found in computed:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_race_takes_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(k * k) for k in range(1000))
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(clock))
    # The clock gets faster and faster, so what runs first wins.
    packed = PackedProducts(classifier_products(schedule_of(sentiment_like_trees(1)), 7, 3, 5), CPU)
    assert not any(packed.packed.values())
    monkeypatch.undo()
    packed.run(Stopwatch(CPU))
    assert_computed(packed)


def test_products_are_those_of_the_paper() -> None:
    shapes = [Shape.draw("random", 128, np.random.default_rng(seed)) for seed in range(2)]
    schedule = schedule_of([s.example(torch.zeros(128, dtype=torch.int64)) for s in shapes])
    full = 2 * 127 * (2048 * 1024 + 1024 * 4096)  # 1.598 GFLOP per tree
    assert work(cell_products("fold", schedule, 1024))["flops_forward"] == 2 * full
    tai = work(cell_products("tai", schedule, 1))
    assert tai["flops_forward"] == 2 * 2 * (128 * 3 + 127 * 10)
    bare = BareProducts(cell_products("fold", schedule, 3), CPU)
    bare.run(Stopwatch(CPU))
    assert_computed(bare)
