"""Law: a function of torch on values of many examples is that function on each example.

The calls are those with which torch tests its own functions.
"""

from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pyg_dynbatch.autobatch import autobatch

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
MOST_CALLS = 8


class Function(nn.Module):
    """Calls a function on what is recorded."""

    def __init__(self, function: Any, structure: Any) -> None:
        super().__init__()
        self.keep = nn.Identity()
        self.function = function
        self.structure = structure

    def forward(self, leaves: list[Any]) -> Any:
        recorded = [self.keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(recorded, self.structure)
        return self.function(*args, **kwargs)


def functions() -> list[Any]:
    """List the functions of torch with their calls."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [each for each in op_db if torch.float64 in each.dtypes]


def examples(leaves: list[Any]) -> list[list[Any]]:
    """Vary the tensors among the arguments of a call."""

    def varied(leaf: Any, number: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.is_floating_point():
            return leaf.clone()
        tensor = leaf.detach().clone()
        if number == 1 and tensor.dim():
            tensor = tensor.flip(0)
        if number == 2:
            tensor = tensor / 2
        return tensor.requires_grad_()

    return [[varied(leaf, number) for leaf in leaves] for number in range(3)]


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def gradients(result: Any, rows: list[Tensor]) -> Any:
    """Return the gradients of a weighted sum of a result."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in tensors(result):
        if leaf.requires_grad:
            real = leaf.abs() if leaf.is_complex() else leaf
            weights = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64)
            total = total + (real.nan_to_num(0, 0, 0) * weights.view(real.shape)).sum()
    if not total.requires_grad:
        return tuple(map(torch.zeros_like, rows))
    return torch.autograd.grad(total, rows, allow_unused=True, materialize_grads=True)


def calls_of(function: Any) -> list[tuple[list[Any], Any]]:
    samples = islice(function.sample_inputs("cpu", torch.float64), MOST_CALLS)
    return [tree_flatten(((each.input, *each.args), each.kwargs)) for each in samples]


class Plain(NamedTuple):
    """Examples of a call, and what the plain loop makes of them."""

    examples: list[list[Any]]
    rows: list[Tensor]
    results: Any
    gradients: Any


def plain_loop(function: Any, leaves: list[Any], structure: Any) -> Plain | None:
    """Run examples of a call one by one; None if that fails or draws random numbers."""
    batch = examples(leaves)
    rows = [leaf for leaf in tensors(batch) if leaf.requires_grad]
    model = autobatch(Function(function.op, structure))
    try:
        results = model(batch, batch=False)
        again = model(batch, batch=False)
        torch.testing.assert_close(tensors(results), tensors(again), equal_nan=True)
        return Plain(batch, rows, results, gradients(results, rows))
    except Exception:  # of many classes; the plain loop has no result to compare with
        return None


def is_refusal(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or "Lazy" in text or "autobatch" in text


def is_compared(function: Any, leaves: list[Any], structure: Any) -> bool:
    """Compare a call with the plain loop; return whether both give a result."""
    rows = tensors(leaves)
    if not rows or any(row.layout != torch.strided for row in rows):
        return False
    torch.manual_seed(0)
    plain = plain_loop(function, leaves, structure)
    if plain is None:
        return False
    try:
        batched = autobatch(Function(function.op, structure))(plain.examples)
    except Exception as error:
        assert is_refusal(error), function.name
        return False
    call = f"{function.name} of {[getattr(leaf, 'shape', leaf) for leaf in leaves]}"
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6, equal_nan=True, msg=call)
    close(tensors(batched), tensors(plain.results))
    close(gradients(batched, plain.rows), plain.gradients)
    return True


@pytest.mark.parametrize("part", range(8))
def test_batched_functions_equal_single_calls(part: int) -> None:
    compared = 0
    for function in functions()[part::8]:
        for leaves, structure in calls_of(function):
            compared += is_compared(function, leaves, structure)
    assert compared > 300
