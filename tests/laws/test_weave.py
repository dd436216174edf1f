"""Law of weave: it computes the equations, whatever the numbers of the atoms and the batch."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch_geometric.data import Batch, Data

from examples.weave_with_engine import WeaveRecorder
from pyg_dynbatch.core import Recording
from pyg_dynbatch.molecules.models import WeaveNet
from pyg_dynbatch.nn.directed import DirectedStack
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.weave import WeaveConv, WeaveStack
from tests.laws.changes import CHANGES, OVERRIDES
from tests.nn.plain_weave import (
    Molecules,
    close,
    gradients,
    molecules,
    plain_directed,
    plain_weave,
    shaken,
)
from tests.nn.recursion import refused
from tests.strategies import few

FEW = few(12)
NORM = st.sampled_from((None, "batch", "layer"))
NO_BATCH_NORM = st.sampled_from((None, "layer"))


def pairs_of(mols: Molecules) -> Pairs:
    code = torch.tensor(mols.code, dtype=torch.uint8)
    return Pairs.from_codes(code, mols.sizes, torch.tensor(mols.kept))


def stack_of(norm: str | None, residual: bool) -> WeaveStack:
    return shaken(WeaveStack(3, 2, 4, 3, norm=norm, residual=residual))  # type: ignore[return-value]


def plain_stack(stack: WeaveStack, x: Tensor, table: Tensor, mols: Molecules) -> Tensor:
    ordered = mols.ordered()
    pair_rows = table[[c for _, _, c in ordered]]
    for conv in stack.convs:
        x, pair_rows = plain_weave(conv, x, pair_rows, ordered)
    return x


def numbers_of(pairs: Pairs, ordered: list[tuple[int, int, int]]) -> list[int]:
    """Return the index of the unordered pair of each ordered pair."""
    ends = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    number = {pair: n for n, pair in enumerate(ends)}
    return [number[min(i, j), max(i, j)] for i, j, _ in ordered]


def inputs_of(mols: Molecules) -> tuple[Tensor, Tensor]:
    x = torch.randn(sum(mols.sizes), 3, dtype=torch.double, requires_grad=True)
    table = torch.randn(5, 2, dtype=torch.double, requires_grad=True)
    return x, table


def rows_of(pairs: Pairs) -> Tensor:
    return torch.randn(pairs.num_pairs, 2, dtype=torch.double, requires_grad=True)


@few(40)
@given(mols=molecules(12, 3), norm=NORM, residual=st.booleans(), training=st.booleans())
def test_stack_is_the_equations(
    mols: Molecules, norm: str | None, residual: bool, training: bool
) -> None:
    stack = stack_of(norm, residual).train(training)
    x, table = inputs_of(mols)
    leaves = [x, table, *stack.parameters()]
    expected = plain_stack(stack, x, table, mols)
    got = stack(x, table, pairs_of(mols))
    close(got, expected)
    close(gradients([got], leaves), gradients([expected], leaves))


@few(20)
@given(mols=molecules(6, 3), norm=NORM, widths=st.permutations((3, 4, 5, 6)))
def test_module_with_pair_rows_is_the_equations(
    mols: Molecules, norm: str | None, widths: list[int]
) -> None:
    hidden = dict(zip(("aa", "pa", "ap", "pp"), widths, strict=True))
    conv = shaken(WeaveConv(3, 2, 3, 2, hidden=hidden, norm=norm, residual=True))
    x, _ = inputs_of(mols)
    pairs, ordered = pairs_of(mols), mols.ordered()
    rows = rows_of(pairs)
    number = numbers_of(pairs, ordered)
    leaves = [x, rows, *conv.parameters()]

    expected_x, expected_pair = plain_weave(conv, x, rows[number], ordered)
    assert expected_pair is not None
    expected = [expected_x, expected_pair]

    new_x, new_pair = conv(x, rows, pairs)
    assert new_pair is not None
    got = [new_x, new_pair[number]]  # p' of (i, j) is p' of (j, i)

    close(got, expected)
    close(gradients(got, leaves), gradients(expected, leaves))


def check_directed(
    mols: Molecules, steps: int, rows: Tensor, number: list[int], **options: Any
) -> None:
    """Compare messages along pairs, of which each has one of the rows."""
    stack: Any = shaken(DirectedStack(3, 2, 4, steps, atom_out=5))
    x, _ = inputs_of(mols)
    leaves = [x, rows, *stack.parameters()]
    expected = plain_directed(stack, x, rows[number], mols.ordered())
    got = stack(x, rows, pairs_of(mols), **options)
    close(got, expected)
    close(gradients([got], leaves), gradients([expected], leaves))


@few(20)
@given(mols=molecules(7, 3), steps=st.integers(1, 4))
def test_directed_messages_along_codes_are_the_equations(mols: Molecules, steps: int) -> None:
    _, table = inputs_of(mols)
    codes = [code for _, _, code in mols.ordered()]
    check_directed(mols, steps, table, codes, coded=True)


@few(20)
@given(mols=molecules(7, 3), steps=st.integers(1, 4))
def test_directed_messages_along_pair_rows_are_the_equations(mols: Molecules, steps: int) -> None:
    pairs = pairs_of(mols)
    number = numbers_of(pairs, mols.ordered())
    check_directed(mols, steps, rows_of(pairs), number, coded=False)


@few(20)
@given(mols=molecules(5, 3), norm=NO_BATCH_NORM)
def test_program_is_the_fused_layer(mols: Molecules, norm: str | None) -> None:
    stack = stack_of(norm, True)
    x, table = inputs_of(mols)
    weave = WeaveRecorder(stack, table.detach()).double()
    recordings = recordings_of(weave, mols)
    if not sum(mols.sizes):
        return
    leaves = [x, *stack.parameters()]
    expected = stack(x, table.detach(), pairs_of(mols))
    got = weave(x, recordings)
    close(got, expected)
    close(gradients([got], leaves), gradients([expected], leaves))


def recordings_of(weave: WeaveRecorder, mols: Molecules) -> list[Recording]:
    return [weave.recording(len(codes), codes) for codes in mols.tables()]


@FEW
@given(mols=molecules(6, 3), block=st.integers(1, 9), norm=NO_BATCH_NORM)
def test_the_block_size_changes_nothing(mols: Molecules, block: int, norm: str | None) -> None:
    stack = stack_of(norm, False)
    x, table = inputs_of(mols)
    pairs = pairs_of(mols)
    leaves = [x, table, *stack.parameters()]
    expected = stack(x, table, pairs)
    expected_gradients = gradients([expected], leaves)
    stack.pair_block = block
    got = stack(x, table, pairs)
    close(got, expected)
    close(gradients([got], leaves), expected_gradients)


@few(20)
@given(
    mols=molecules(5, 4),
    num_descriptors=st.sampled_from((0, 3)),
    messages=st.sampled_from(("weave", "directed")),
)
def test_network_on_a_batch_is_the_network_on_each(
    mols: Molecules, num_descriptors: int, messages: Any
) -> None:
    """Compare values, and gradients of all weights and atoms."""
    if not mols.sizes:
        return
    data = data_of(mols, num_descriptors)
    net = WeaveNet(
        3,
        2,
        torch.randn(5, 2),
        hidden=4,
        atom_out=5,
        head=[6],
        num_descriptors=num_descriptors,
        messages=messages,
    )
    shaken(net).eval()
    if net.descriptors is not None:
        net.descriptors.fit(torch.cat([one.descriptor for one in data]))
    weights = list(net.parameters())

    alone = [Batch.from_data_list([one]) for one in data]
    for one in alone:
        one.x.requires_grad_()
    each = [net(one) for one in alone]
    of_each = gradients(each, [*(one.x for one in alone), *weights])

    whole = Batch.from_data_list(data)
    whole.x.requires_grad_()
    together = net(whole)
    of_whole = gradients([together], [whole.x, *weights])

    close(together, torch.cat(each))
    close(of_whole[0], torch.cat(of_each[: len(data)]))
    close(of_whole[1:], of_each[len(data) :])


def data_of(mols: Molecules, num_descriptors: int) -> list[Data]:
    """Return a molecule each, with random atoms and descriptors, of which some are unknown."""
    x = torch.randn(sum(mols.sizes), 3, dtype=torch.double)
    code = torch.tensor(mols.code, dtype=torch.uint8)
    descriptor = torch.randn(len(mols.sizes), num_descriptors, dtype=torch.double)
    is_unknown = torch.rand(descriptor.shape) < 0.3
    descriptor[is_unknown] = torch.nan
    parts = zip(
        x.split(mols.sizes),
        code.split([size * (size + 1) // 2 for size in mols.sizes]),
        descriptor.split(1),
        strict=True,
    )
    return [
        Data(x=rows, pair_code=codes, num_nodes=len(rows), descriptor=row)
        for rows, codes, row in parts
    ]


@pytest.mark.parametrize("make", [partial(WeaveStack, norm="batch"), DirectedStack])
def test_the_same_input_twice_is_the_same_to_the_bit(make: Any) -> None:
    mols = Molecules([9, 1, 12], [n % 5 for n in range(45 + 1 + 78)])
    stack = make(3, 2, 16)
    pairs = pairs_of(mols)
    x, table = torch.randn(22, 3), torch.randn(5, 2)

    def run() -> list[Tensor]:
        result = stack(x, table, pairs)
        return [result, *gradients([result], list(stack.parameters()))]

    for once, again in zip(run(), run(), strict=True):
        assert torch.equal(once, again)


SMALL = Molecules([3, 1], [0, 1, 2, 3, 1, 0, 4])


def gradients_after_backward(result: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Run backward, which calls hooks of modules, and return what it leaves."""
    for leaf in leaves:
        leaf.grad = None
    result.sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    "change", [name for name in CHANGES if name not in (*OVERRIDES, "global hook")]
)
def test_changed_modules_are_called(change: str) -> None:
    """Hooks and other weights of the linear maps and normalizations, while training."""
    stack = stack_of("layer", True)
    x, table = inputs_of(SMALL)
    for module in [m for m in stack.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]:
        # The largest singular value stands out, so that its iterations converge.
        nn.init.normal_(module.weight, 0.4, 0.15)
        CHANGES[change](module)
    weave = WeaveRecorder(stack, table.detach()).double()
    recordings = recordings_of(weave, SMALL)
    leaves = [x, *stack.parameters()]
    optimizer = SGD(stack.parameters(), 0.1)
    for _ in range(3):
        expected = weave(x, recordings)
        got = stack(x, table.detach(), pairs_of(SMALL))
        close(got, expected)
        expected_gradients = gradients_after_backward(expected, leaves)
        close(gradients_after_backward(got, leaves), expected_gradients)
        optimizer.step()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
def test_hooks_that_only_look_change_nothing(norm: str | None, training: bool) -> None:
    plain = stack_of(norm, True).train(training)
    plain.pair_block = 2
    hooked = copy.deepcopy(plain)
    seen = list[nn.Module]()
    for module in hooked.modules():
        module.register_forward_hook(lambda m, arguments, result: seen.append(m))

    x, table = inputs_of(SMALL)
    expected = plain(x, table, pairs_of(SMALL))
    got = hooked(x, table, pairs_of(SMALL))
    close(got, expected)
    close(
        gradients([got], [x, table, *hooked.parameters()]),
        gradients([expected], [x, table, *plain.parameters()]),
    )
    for name, buffer in plain.named_buffers():
        close(hooked.get_buffer(name), buffer)
    innermost = {module for module in hooked.modules() if not list(module.children())}
    assert innermost <= set(seen)


def test_programs_refuse_modules_with_hooks() -> None:
    stack = WeaveStack(3, 2, 4)
    weave = WeaveRecorder(stack, torch.eye(2))
    stack.convs[0].register_forward_hook(lambda *_: None)
    recording = weave.recording(1, [[0]])
    refused(
        ValueError, lambda: weave(torch.randn(1, 3), [recording]), "WeaveRecorder: a module has"
    )
