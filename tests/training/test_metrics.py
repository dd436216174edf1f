"""Losses and accuracies of trees: against counting by hand in plain Python."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.models import TreeClassifier, TreeSchema

rows = st.lists(
    st.tuples(st.lists(st.floats(-5, 5, width=32), min_size=5, max_size=5), st.integers(-1, 4)),
    min_size=1,
    max_size=30,
)


def classifier(**options: Any) -> TreeClassifier:
    schema = TreeSchema(num_tokens=2, num_classes=5)
    return TreeClassifier(schema, embedding_channels=2, hidden_channels=2, **options)


@given(rows)
def test_accuracies_are_those_counted_by_hand(drawn: list[tuple[list[float], int]]) -> None:
    logits = torch.tensor([row for row, _ in drawn])
    labels = np.array([label for _, label in drawn])
    nodes = range(len(drawn))
    roots = set(nodes[::3])
    probability = classifier().values(logits)
    columns = {
        "prediction": probability.argmax(-1).numpy(),
        "probability": probability.numpy(),
        "target": labels,
        "is_root": np.array([node in roots for node in nodes]),
    }

    def binary(node: int) -> bool:
        chance = columns["probability"][node].tolist()
        return (chance[3] + chance[4] > chance[0] + chance[1]) == (labels[node] > 2)

    known = [n for n in nodes if labels[n] >= 0]
    polar = [n for n in known if labels[n] != 2]
    hit = [bool(columns["prediction"][n] == labels[n]) for n in nodes]
    hits = {
        "accuracy": [hit[n] for n in known if n in roots],
        "node_accuracy": [hit[n] for n in known],
        "binary_accuracy": [binary(n) for n in polar if n in roots],
        "node_binary_accuracy": [binary(n) for n in polar],
    }
    # The most frequent class, for all rows, and for all rows that are roots.
    for prefix, nodes_counted in (("", [n for n in known if n in roots]), ("node_", known)):
        counts = Counter(labels[n] for n in nodes_counted)
        hits[f"{prefix}majority_accuracy"] = [
            labels[n] == counts.most_common()[0][0] for n in nodes_counted
        ]
    # What is not defined is left out.
    expected = {name: sum(each) / len(each) for name, each in hits.items() if each}
    assert classifier(polarity=True).metrics(columns) == pytest.approx(expected)


def test_loss_is_summed_over_labelled_rows_in_full_precision() -> None:
    logits = torch.randn(6, 5)
    labels = torch.tensor([0, -1, 2, 1, -1, 0])
    batch = SimpleNamespace(y=labels)
    loss, terms = classifier().loss(logits, batch)
    chance = logits.log_softmax(-1)
    expected = -sum(chance[n, c].item() for n, c in enumerate(labels.tolist()) if c >= 0)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert terms.item() == 4
    loss, _ = classifier().loss(logits.bfloat16(), batch)
    assert loss.dtype == torch.float32


def test_loss_of_no_labels_is_zero_and_has_a_gradient() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    loss, terms = classifier().loss(logits, SimpleNamespace(y=torch.tensor([-1, -1])))
    assert (loss.item(), terms.item()) == (0, 0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient.any()


def test_polarity_needs_a_middle() -> None:
    with pytest.raises(ValueError, match="polarity needs a neutral middle class"):
        TreeClassifier(TreeSchema(4, 4), polarity=True)
