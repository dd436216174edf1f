"""Laws of autobatch: programs give what the plain loop gives, or an error of this package."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import attend, autobatch, rows, total
from tests.autobatch.test_autobatch import Wrap, check

Forward = Callable[[Any, Any], Any]
ROWS = [*torch.randn(3, 3, generator=torch.Generator().manual_seed(0))]

# A part in single precision, and numbers of the default dtype.
IN_SINGLE_PRECISION: dict[str, Forward] = {
    "part": lambda m, x: m.part(x),
    "data": lambda m, x: x,
    "number": lambda m, x: m.part(x) * 0.1,
    "tensor": lambda m, x: m.part(x) * torch.tensor(0.1),
    "wide": lambda m, x: m.part(x) * torch.tensor([0.1, 0.2, 0.3]),
    "average": lambda m, x: (m.part(x) > 0).sum() / 3 + m.part(x),
    "read": lambda m, x: torch.tensor(m.part(x).sum().item()) * m.part(x),
    "embedding": lambda m, x: m.word(torch.tensor(1)) + m.part(x),
    "recurrent": lambda m, x: m.gru(m.part(x).view(3, 1))[0],
    "total": lambda m, x: total([m.part(x), x]),
    "attend": lambda m, x: attend(m.part(x), [m.part(x), x], [x, m.part(x)]),
    "rows": lambda m, x: rows(torch.ones(2, 3))[0] * m.part(x),
    "new": lambda m, x: m.part(x) + m.part(x).new_zeros(3) + m.part(x).new_tensor([0.1, 0.2, 0.3]),
}  # fmt: skip


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", IN_SINGLE_PRECISION)
def test_dtypes_are_those_of_the_plain_loop(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = {"part": nn.Linear(3, 3), "word": nn.Embedding(3, 3), "gru": nn.GRU(1, 2)}
    function = IN_SINGLE_PRECISION[name]
    model = Wrap(lambda m, x: function(m, x) * m.unit, **parts).float()
    model.unit = nn.Parameter(torch.ones((), dtype=torch.float32))
    check(model, ROWS, tolerance=1e-5)
