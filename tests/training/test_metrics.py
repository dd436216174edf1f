"""Metrics: against counting by hand in plain Python."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch_geometric.data import Batch

from pyg_dynbatch.lightning import TreeClassification, TreeRelatedness
from pyg_dynbatch.training.task import RatioMetric, summed_cross_entropy
from pyg_dynbatch.trees.task import polarity_hits

rows = st.lists(
    st.tuples(st.lists(st.floats(-5, 5, width=32), min_size=5, max_size=5), st.integers(-1, 4)),
    min_size=1,
    max_size=30,
)


@given(rows)
def test_accuracies_are_those_counted_by_hand(drawn: list[tuple[list[float], int]]) -> None:
    logits = torch.tensor([row for row, _ in drawn])
    labels = torch.tensor([label for _, label in drawn])
    roots = torch.arange(0, len(drawn), 3)
    task = TreeClassification(num_tokens=2, num_classes=5, hidden_channels=2, polarity=True)
    metrics: Any = task.scores["val_scores"]
    half = len(drawn) // 2
    first = Batch(y=labels[:half], root_index=roots[roots < half])
    second = Batch(y=labels[half:], root_index=roots[roots >= half] - half)
    task.update_scores("val", logits[:half], first)
    task.update_scores("val", logits[half:], second)
    found = {name: metric.compute().item() for name, metric in metrics.items()}

    def share(hits: list[bool]) -> float:
        return sum(hits) / len(hits) if hits else math.nan

    def binary(node: int) -> bool:
        chance = torch.softmax(logits[node], 0).tolist()
        return (chance[3] + chance[4] > chance[0] + chance[1]) == (int(labels[node]) > 2)

    nodes = range(len(drawn))
    known = [n for n in nodes if labels[n] >= 0]
    polar = [n for n in known if labels[n] != 2]
    hit = [bool(logits[n].argmax() == labels[n]) for n in nodes]
    tops = set(roots.tolist())
    wanted = {
        "accuracy": share([hit[n] for n in known if n in tops]),
        "node_accuracy": share([hit[n] for n in known]),
        "binary_accuracy": share([binary(n) for n in polar if n in tops]),
        "node_binary_accuracy": share([binary(n) for n in polar]),
    }
    assert found == pytest.approx(wanted, nan_ok=True)


def test_the_ratio_of_nothing_is_nan_and_counts_stay_exact() -> None:
    rate = RatioMetric(0)
    rate.update(torch.tensor(0), torch.tensor(0))
    assert math.isnan(rate.compute().item())
    for part in (2**24, 1):
        rate.update(torch.tensor(part), torch.tensor(part))
    assert rate.total == rate.count == 2**24 + 1


def test_polarity_weighs_sides_and_not_single_classes() -> None:
    # Class 1 is the likeliest, yet 3 and 4 together have more.
    logits = torch.tensor([[0.01, 0.4, 0.09, 0.25, 0.25]]).log()
    hit, counts = polarity_hits(logits, torch.tensor([4]))
    assert hit.tolist() == [True]
    assert counts.tolist() == [True]


def test_score_agreement_adds_up_over_batches() -> None:
    chance, target = torch.rand(2, 40, 5).softmax(-1)
    predicted, gold = (rows @ torch.arange(1.0, 6.0) for rows in (chance, target))
    task = TreeRelatedness(num_tokens=2, hidden_channels=2)
    metrics: Any = task.scores["val_scores"]
    for part in torch.arange(40).split(7):
        task.update_scores("val", chance[part].log(), Batch(target=target[part]))
    found = {name: metric.compute().item() for name, metric in metrics.items()}
    rank = [x.argsort().argsort().float() for x in (predicted, gold)]
    assert found["pearson"] == pytest.approx(
        torch.corrcoef(torch.stack([predicted, gold]))[0, 1].item(), abs=1e-5
    )
    assert found["spearman"] == pytest.approx(
        torch.corrcoef(torch.stack(rank))[0, 1].item(), abs=1e-5
    )
    assert found["mse"] == pytest.approx((predicted - gold).pow(2).mean().item(), abs=1e-6)


def test_loss_is_summed_over_labelled_rows_in_full_precision() -> None:
    logits = torch.randn(6, 3)
    labels = torch.tensor([0, -1, 2, 1, -1, 0])
    loss, count = summed_cross_entropy(logits, labels)
    chance = logits.log_softmax(-1)
    assert loss.item() == pytest.approx(
        -sum(chance[n, c].item() for n, c in enumerate(labels.tolist()) if c >= 0), abs=1e-5
    )
    assert count.item() == 4
    assert summed_cross_entropy(logits.bfloat16(), labels)[0].dtype == torch.float32


def test_loss_of_no_labels_is_zero_and_has_a_gradient() -> None:
    task = TreeClassification(num_tokens=2, num_classes=3, hidden_channels=4)
    logits = torch.randn(2, 3, requires_grad=True)
    loss, count = summed_cross_entropy(logits, torch.tensor([-1, -1]))
    task.scaled_loss(loss, count, Batch(), "mean").backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("reduction", ["sum", "mean", "per_tree"])
def test_the_mean_of_scaled_losses_over_ranks_is_the_loss_of_one_process(
    reduction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TreeClassification(num_tokens=2, num_classes=3, hidden_channels=2)
    losses, terms, trees = torch.tensor([6.0, 7.0]), torch.tensor([2, 3]), (1, 3)
    batches = [Batch(ptr=torch.zeros(count + 1)) for count in trees]
    whole = Batch(ptr=torch.zeros(sum(trees) + 1))
    alone = task.scaled_loss(losses.sum(), terms.sum(), whole, reduction)
    total = torch.tensor({"mean": 5.0, "per_tree": 4.0}.get(reduction, torch.nan))
    strategy = SimpleNamespace(reduce=lambda count, reduce_op: total)
    task.trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=1)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    ranks = [
        task.scaled_loss(loss, count, batch, reduction)
        for loss, count, batch in zip(losses, terms, batches, strict=True)
    ]
    torch.testing.assert_close(torch.stack(ranks).mean(), alone)
