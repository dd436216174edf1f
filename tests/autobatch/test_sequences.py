"""Recurrent layers of torch over sequences: one call for all of one length."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch

LENGTHS = (3, 1, 5, 3, 2)
LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
FORMS = [*product(LAYERS, (False, True), ({}, {"bidirectional": True, "num_layers": 2}))]


class Encoder(nn.Module):
    """Encode a sequence, alone or in a batch of two, from a state or from none."""

    def __init__(self, kind: Any, stateful: bool, several: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.layer = kind(3, 4, **options)
        self.count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.start, self.part = nn.Linear(3, self.count * 4), nn.Linear(3, 3)
        self.stateful, self.several = stateful, several

    def state(self, x: Tensor) -> Tensor:
        h = self.start(x[0]).view(self.count, 4)
        return torch.stack([h, -h], 1) if self.several else h

    def forward(self, x: Tensor) -> Any:
        words = torch.stack([self.part(word) for word in x]) if len(x) % 2 else self.part(x)
        if self.several:
            words = torch.stack([words, -words], 0 if self.layer.batch_first else 1)
        state = None
        if self.stateful:
            state = (self.state(x), self.state(2 * x))
            state = state if isinstance(self.layer, nn.LSTM) else state[0]
        y, last = self.layer(words, state)
        last = last if isinstance(last, tuple) else (last,)
        return torch.stack([y.sum(), y.flatten()[0], *(part.square().sum() for part in last)])


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in LENGTHS]


def gradients(result: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    options: Any = {"materialize_grads": True}
    return torch.autograd.grad(result.square().sum(), [*model.parameters()], **options)


def marks_of(kind: Any, stateful: bool, options: Any, first: bool, several: bool) -> Any:
    """Quick are six forms in which each option takes both values."""
    quick = stateful == bool(options) == first and several == (kind is nn.GRU)
    return () if quick else pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "stateful", "options", "first", "several"),
    [
        pytest.param(*form, *layout, marks=marks_of(*form, *layout))
        for form in FORMS
        for layout in product((False, True), repeat=2)
    ],
)
def test_layers_over_sequences(
    kind: Any, stateful: bool, options: Any, first: bool, several: bool
) -> None:
    torch.manual_seed(0)
    options = {**options, "batch_first": first}
    model = autobatch(Encoder(kind, stateful, several, options).double())
    expected = model(sequences(), batch=False)
    wanted = gradients(expected, model)
    for given in (sequences(), model.collate(sequences())):
        found = model(given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found, model), wanted)


def test_sequences_of_one_length_are_one_call() -> None:
    model = autobatch(Encoder(nn.LSTM, False, False, {}).double())

    model(sequences())

    model(sequences())

    operations = model.explain(sequences()).operations

    layers = [op for op in operations if op.name.startswith("layer")]
    assert {op.way for op in layers} == {"fast"}
    assert sum(op.steps for op in layers) == len(set(LENGTHS))
    assert sum(op.calls for op in layers) == len(LENGTHS)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_whose_first_state_is_one_tensor(kind: Any) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(3, 4)

        def forward(self, x: Tensor) -> Any:
            h = c = torch.zeros(4).double()
            for word in x:
                if kind is nn.LSTMCell:
                    h, c = self.cell(word, (h, c))
                else:
                    h = self.cell(word, h)
            return h + c

    model = autobatch(Steps().double())
    found, expected = model(sequences()), model(sequences(), batch=False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, model), gradients(expected, model))
    # The last calls run in one step, together with the sums that read them.
    assert model.explain(sequences()).steps == max(LENGTHS) + 1
