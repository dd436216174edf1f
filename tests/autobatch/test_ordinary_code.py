"""Code as people write it, after public programs, equals the plain loop: values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch
from tests.autobatch.test_autobatch import Wrap

SIZE = 7
Function = Callable[[Any, Any], Any]


def examples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(SIZE)]


def model_of(function: Function) -> Any:
    torch.manual_seed(0)
    parts = {"part": nn.Linear(3, 3), "cell": nn.LSTMCell(3, 2), "word": nn.Embedding(5, 3)}
    return Wrap(function, **parts).double()


def stack_lstm(m: Any, x: Tensor) -> Any:
    """A transition parser keeps states with a batch axis of one, and pops by values."""
    stack = [m.cell(m.part(x[None]))]
    for number in range(3):
        state = m.cell(m.part(x[None] * number), stack[-1])
        if state[0].sum() > 0:
            stack.append(state)
        elif len(stack) > 1:
            stack.pop()
    return torch.cat(stack[-1], 1).squeeze(0)


def weighted_losses(m: Any, x: Tensor) -> Any:
    scores, weights = m.part(x), torch.tensor([0.1, 0.2, 0.7]).double()
    target = x.detach().argmax()
    loss = F.cross_entropy(scores, target, weight=weights)
    loss = loss + F.cross_entropy(scores[None], target[None], label_smoothing=0.1)
    return loss + F.binary_cross_entropy_with_logits(scores, (x > 0).double(), weight=weights)


def float_masks(m: Any, x: Tensor) -> Any:
    states = torch.stack([m.part(x), m.part(-x), m.part(x * 2)])
    mask = torch.zeros(3, 3).double().masked_fill(torch.ones(3, 3).triu(1) > 0, -1e9)
    scores = (states @ states.T + mask).softmax(-1)
    attended = F.scaled_dot_product_attention(states, states, states, attn_mask=mask)
    return (scores @ states).sum(0) + attended.mean(0)


def numbers_of_its_own(m: Any, x: Tensor) -> Any:
    state = m.part(x)
    for step in range(3):
        pause = float(x.detach()[step].abs())
        state = state * torch.exp(-pause * m.part(state).sigmoid()) + pause / 2 - 3 ** m.part(x)
    return torch.where(state > pause, state, 0.1 * state)


def sentence(m: Any, x: Tensor) -> Any:
    """A biaffine scorer over as many words as the example has."""
    words = (x[:1].abs() * 10).long() + torch.arange(2 + int(x.detach()[1].abs() * 3))
    states = m.word(words % 5)
    scores = m.part(states) @ states.T
    return F.cross_entropy(scores, torch.zeros(len(words), dtype=torch.long), reduction="sum")


def accumulated(m: Any, x: Tensor) -> Any:
    loss = m.part(x).sum()
    for number in range(3):
        loss += m.part(x * number).square().sum()
    loss *= torch.tensor(2.0)  # of another dtype, which the loss keeps its own beside
    return loss


def masked(m: Any, x: Tensor) -> Any:
    return m.part(x)[x > 0].sum() + m.part(x)[torch.tensor([True, False, True])].prod()


def ties(m: Any, x: Tensor) -> Any:
    equal = torch.stack([m.part(x), m.part(x)])
    return equal.median() * 3 + equal.max() + equal.min() + equal.median(0).values.sum()


def distribution(m: Any, x: Tensor) -> Any:
    normal = torch.distributions.MultivariateNormal(m.part(x), torch.eye(3).double())
    return normal.log_prob(x) + torch.distributions.Bernoulli(logits=m.part(x)).entropy().sum()


CODE: dict[str, Function] = {
    "a batch axis of one": stack_lstm,
    "weighted losses": weighted_losses,
    "float masks": float_masks,
    "numbers of its own": numbers_of_its_own,
    "a sentence": sentence,
    "+=": accumulated,
    "masks": masked,
    "ties": ties,
    "distributions": distribution,
    "cholesky": lambda m, x: torch.linalg.cholesky(m.part(x).outer(m.part(x)) + torch.eye(3)),
    "bernoulli": lambda m, x: m.part(x) + torch.bernoulli((m.part(x) > 0).double()),
    "targets without a derivative": lambda m, x: F.soft_margin_loss(m.part(x), x.detach().sign()),
    "einsum": lambda m, x: torch.einsum("i,j,ij->i", x, m.part(x), m.part.weight),
    "gather": lambda m, x: m.part(x).gather(0, x.argsort()).scatter_add(0, x.argsort(), x),
}


@pytest.mark.parametrize("name", CODE)
def test_code_equals_the_plain_loop_over_three_steps(name: str) -> None:
    models = [model_of(CODE[name]) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(3):
        results = list[Tensor]()
        for model, optimizer in zip(models, optimizers, strict=True):
            given = [row.requires_grad_() for row in examples()]
            results.append(autobatch(model)(given, batch=model is models[0]))
            optimizer.zero_grad()
            (results[-1] / 10).tanh().sum().backward()
            results += [row.grad for row in given if row.grad is not None]
            optimizer.step()
        half = len(results) // 2
        torch.testing.assert_close(results[:half], results[half:], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(*(dict(model.named_parameters()) for model in models))


def test_numbers_that_differ_become_one_signature() -> None:
    model = autobatch(model_of(lambda m, x: m.part(x) * float(x[0]) + float(x[1])))
    operations = model.explain(examples()).operations
    # The first numbers have signatures of their own, the others share two.
    assert sum(each.name.startswith(("mul", "add")) for each in operations) == 2 * 5


def test_numbers_of_half_precision_are_not_rounded() -> None:
    model = model_of(lambda m, x: m.part(x) * (1 - float(x[0]) / 1000)).bfloat16()
    given = [row.bfloat16() for row in examples()]
    torch.testing.assert_close(autobatch(model)(given), autobatch(model)(given, batch=False))


@pytest.mark.parametrize("cache", [True, False])
def test_results_without_gradients_have_none(cache: bool) -> None:
    model = autobatch(
        model_of(lambda m, x: (m.part(x), m.part(x).detach(), torch.ones(3))), cache=cache
    )
    for _ in range(2):
        assert [result.requires_grad for result in model(examples())] == [True, False, False]


def test_hooks_see_single_examples_and_no_tensors_without_content() -> None:
    seen: list[Any] = []
    plain = model_of(lambda m, x: m.part(x))
    plain.part.register_forward_hook(lambda _, given, y: seen.append(y.detach().sum() * 1))
    results = autobatch(plain)(examples())
    assert len(seen) == SIZE
    assert not any(isinstance(each, Tensor) and each.is_meta for each in seen)
    torch.testing.assert_close(results, torch.stack([plain(row) for row in examples()]))


def seeded(m: Any, x: Tensor) -> Any:
    torch.manual_seed(0)
    return F.dropout(m.part(x))


REFUSED: dict[str, tuple[Function, str]] = {
    "a seed": (seeded, "seeds torch"),
    "empty_like": (lambda m, x: torch.empty_like(m.part(x)), "new_zeros"),
    "new": (lambda m, x: m.part(x).new(1, 3), "new_zeros"),
    "torch.cond": (
        lambda m, x: torch.cond(m.part(x).sum() > 0, torch.sin, torch.cos, (x,)), "autobatch.cond"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_to_write_instead(name: str) -> None:
    function, hint = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError), match=hint):
        autobatch(model_of(function))(examples())


def test_sparse_gradients_of_an_embedding() -> None:
    gradients = list[Tensor]()
    for batch in (True, False):
        torch.manual_seed(0)
        plain = Wrap(lambda m, word: m.word(word).sin(), word=nn.Embedding(5, 3, sparse=True))
        model = autobatch(plain)
        assert model.explain([torch.tensor(1)]).operations[0].name == "sin"
        model([torch.tensor(n % 3) for n in range(SIZE)], batch=batch).sum().backward()
        assert plain.word.weight.grad.is_sparse  # type: ignore[union-attr]
        gradients.append(plain.word.weight.grad.to_dense())  # type: ignore[union-attr, operator]
    torch.testing.assert_close(*gradients)
    model.collate([torch.tensor(1)])
