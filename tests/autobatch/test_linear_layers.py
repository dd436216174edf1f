"""Linear layers in the steps of autobatch give what the plain loop gives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 3)
        self.leaf = nn.Linear(3, 3)

    def forward(self, tree: Any) -> Tensor:
        if isinstance(tree, tuple):
            return torch.tanh(self.mix(torch.cat([self(part) for part in tree])))
        return torch.sigmoid(self.leaf(torch.full((3,), float(tree))))


@pytest.mark.usefixtures("products_of_few_rows")
def test_batched_equals_the_plain_loop() -> None:
    trees = [1, (1, 2), ((1, 2), (3, (4, 5)))]
    torch.manual_seed(0)
    model = Recursive()
    batched = torch.stack(list(autobatch(model)(trees)))
    one_by_one = torch.stack([model(tree) for tree in trees])
    torch.testing.assert_close(batched, one_by_one)
    weights = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(batched.sum(), weights), torch.autograd.grad(one_by_one.sum(), weights)
    )
