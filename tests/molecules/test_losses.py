"""Losses of partly known properties: only known cells count, in values and in gradients."""

import pytest
import torch
import torch.nn.functional as F

from pyg_dynbatch.molecules.task import TargetScale, balanced_positive_weight, summed_property_loss

NAN = float("nan")
ONES = torch.ones(2)


def test_scale_is_that_of_the_known_targets() -> None:
    targets = torch.tensor([[1.0, 5.0, NAN], [3.0, NAN, NAN], [NAN, 5.0, NAN]])
    scale = TargetScale(3)
    scale.fit(targets)
    assert scale.mean.tolist() == [2.0, 5.0, 0.0]
    assert scale.deviation.tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(scale.restored(scale.scaled(targets)), targets, equal_nan=True)
    assert set(scale.state_dict()) == {"mean", "deviation"}


@pytest.mark.parametrize(("name", "loss"), [("mse", F.mse_loss), ("l1", F.l1_loss)])
def test_unknown_values_count_nowhere(name, loss) -> None:
    output = torch.randn(3, 2, requires_grad=True)
    target = torch.tensor([[0.5, NAN], [NAN, NAN], [1.0, -2.0]])
    total, terms = summed_property_loss(output, target, "regression", ONES, ONES, name)
    known = ~target.isnan()
    expected = loss(output[known], target[known], reduction="sum")
    torch.testing.assert_close(total, expected)
    assert terms.item() == 3
    (gradient,) = torch.autograd.grad(total, output)
    assert torch.equal(gradient == 0, ~known)
    assert torch.isfinite(gradient).all()


def test_weights_of_positives_and_of_properties_and_nothing_known() -> None:
    weights = torch.tensor([1.0, 0.5]), torch.tensor([3.0, 1.0])
    total, _ = summed_property_loss(torch.zeros(1, 2), torch.ones(1, 2), "binary", *weights)
    assert total.item() == pytest.approx(3.5 * 0.6931472)
    output = torch.randn(2, 2, requires_grad=True)
    total, terms = summed_property_loss(output, torch.full((2, 2), NAN), "binary", *weights)
    (gradient,) = torch.autograd.grad(total, output)
    assert (total.item(), terms.item(), gradient.abs().sum().item()) == (0.0, 0, 0.0)


def test_classes_lie_property_after_property() -> None:
    output = torch.randn(4, 6)
    target = torch.tensor([[0.0, 2.0], [1.0, NAN], [2.0, 1.0], [NAN, 0.0]])
    total, terms = summed_property_loss(output, target, "multiclass", ONES, ONES)
    expected = torch.zeros(())
    for task in range(2):
        known = ~target[:, task].isnan()
        logits = output[known, 3 * task : 3 * task + 3]
        expected += F.cross_entropy(logits, target[known, task].long(), reduction="sum")
    torch.testing.assert_close(total, expected)
    assert terms.item() == 6


def test_balanced_weight_of_single_classes_is_one() -> None:
    targets = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, NAN], [0.0, NAN, NAN]])
    assert balanced_positive_weight(targets).tolist() == [2.0, 1.0, 1.0]
