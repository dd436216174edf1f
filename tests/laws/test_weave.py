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


def stack_of(norm: str | None, residual: bool, modules: int = 2) -> WeaveStack:
    return shaken(WeaveStack(3, 2, 4, modules, norm=norm, residual=residual))  # type: ignore[return-value]


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
    return x, torch.randn(5, 2, dtype=torch.double, requires_grad=True)


@few(40)
@given(mols=molecules(12, 3), norm=NORM, residual=st.booleans(), training=st.booleans())
def test_stack_is_the_equations(
    mols: Molecules, norm: str | None, residual: bool, training: bool
) -> None:
    stack = stack_of(norm, residual, 3).train(training)
    x, table = inputs_of(mols)
    wanted = [x, table, *stack.parameters()]
    expected = plain_stack(stack, x, table, mols)
    found = stack(x, table, pairs_of(mols))
    close(found, expected)
    close(gradients([found], wanted), gradients([expected], wanted))


@few(20)
@given(mols=molecules(6, 3), norm=NORM, widths=st.permutations((3, 4, 5, 6)))
def test_module_with_pair_rows_is_the_equations(
    mols: Molecules, norm: str | None, widths: list[int]
) -> None:
    names = dict(zip(("aa", "pa", "ap", "pp"), widths, strict=True))
    conv = shaken(WeaveConv(3, 2, 3, 2, hidden=names, norm=norm, residual=True))
    pairs, (x, _), ordered = pairs_of(mols), inputs_of(mols), mols.ordered()
    rows = torch.randn(pairs.num_pairs, 2, dtype=torch.double, requires_grad=True)
    number = numbers_of(pairs, ordered)
    want_x, want_pair = plain_weave(conv, x, rows[number], ordered)
    new_x, new_pair = conv(x, rows, pairs)
    assert want_pair is not None
    assert new_pair is not None
    close(new_x, want_x)
    close(new_pair[number], want_pair)  # p' of (i, j) is p' of (j, i)
    wanted = [x, rows, *conv.parameters()]
    close(gradients([new_x, new_pair[number]], wanted), gradients([want_x, want_pair], wanted))


@few(40)
@given(mols=molecules(7, 3), steps=st.integers(1, 4), coded=st.booleans())
def test_directed_messages_are_the_equations(mols: Molecules, steps: int, coded: bool) -> None:
    stack: Any = shaken(DirectedStack(3, 2, 4, steps, atom_out=5))
    pairs, (x, rows), ordered = pairs_of(mols), inputs_of(mols), mols.ordered()
    number = [c for _, _, c in ordered]
    if not coded:
        rows = torch.randn(pairs.num_pairs, 2, dtype=torch.double, requires_grad=True)
        number = numbers_of(pairs, ordered)
    wanted = [x, rows, *stack.parameters()]
    expected = plain_directed(stack, x, rows[number], ordered)
    found = stack(x, rows, pairs, coded=coded)
    close(found, expected)
    close(gradients([found], wanted), gradients([expected], wanted))


@few(20)
@given(mols=molecules(5, 3), norm=NO_BATCH_NORM)
def test_program_is_the_fused_layer(mols: Molecules, norm: str | None) -> None:
    stack = stack_of(norm, True, 3)
    x, table = inputs_of(mols)
    weave = WeaveRecorder(stack, table.detach()).double()
    recordings = [weave.recording(len(codes), codes) for codes in mols.tables()]
    if not sum(mols.sizes):
        return
    found, expected = weave(x, recordings), stack(x, table.detach(), pairs_of(mols))
    close(found, expected)
    wanted = [x, *stack.parameters()]
    close(gradients([found], wanted), gradients([expected], wanted))


@FEW
@given(mols=molecules(6, 3), block=st.integers(1, 9), norm=NO_BATCH_NORM)
def test_the_block_size_changes_nothing(mols: Molecules, block: int, norm: str | None) -> None:
    stack, (x, table), pairs = stack_of(norm, False, 3), inputs_of(mols), pairs_of(mols)
    whole = stack(x, table, pairs)
    wanted = [x, table, *stack.parameters()]
    expected = gradients([whole], wanted)
    stack.pair_block = block
    found = stack(x, table, pairs)
    close(found, whole)
    close(gradients([found], wanted), expected)


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
    data = [
        Data(x=rows, pair_code=code, num_nodes=len(rows), descriptor=row)
        for rows, code, row in zip(*parts_of(mols, num_descriptors), strict=True)
    ]
    options: Any = {"num_descriptors": num_descriptors, "messages": messages}
    net = WeaveNet(3, 2, torch.randn(5, 2), hidden=4, atom_out=5, head=[6], **options)
    shaken(net).eval()
    if net.descriptors is not None:
        net.descriptors.fit(torch.cat([one.descriptor for one in data]))
    whole = Batch.from_data_list(data)
    whole.x.requires_grad_()
    together = net(whole)
    alone = [Batch.from_data_list([one]) for one in data]
    for one in alone:
        one.x.requires_grad_()
    each = [net(one) for one in alone]
    close(together, torch.cat(each))
    weights = list(net.parameters())
    of_whole = gradients([together], [whole.x, *weights])
    of_each = gradients(each, [*(one.x for one in alone), *weights])
    close(of_whole[0], torch.cat(of_each[: len(data)]))
    close(of_whole[1:], of_each[len(data) :])


def parts_of(mols: Molecules, width: int) -> tuple[tuple[Tensor, ...], ...]:
    """Return atoms, codes and descriptors of each molecule; some descriptors are unknown."""
    x = torch.randn(sum(mols.sizes), 3, dtype=torch.double)
    code = torch.tensor(mols.code, dtype=torch.uint8)
    rows = torch.randn(len(mols.sizes), width, dtype=torch.double)
    rows = torch.where(torch.rand(rows.shape) < 0.3, torch.nan, rows)
    return x.split(mols.sizes), code.split([n * (n + 1) // 2 for n in mols.sizes]), rows.split(1)


@pytest.mark.parametrize("make", [partial(WeaveStack, norm="batch"), DirectedStack])
def test_the_same_input_twice_is_the_same_to_the_bit(make: Any) -> None:
    mols = Molecules([9, 1, 12], [n % 5 for n in range(45 + 1 + 78)])
    stack, pairs = make(3, 2, 16), pairs_of(mols)
    x, table = torch.randn(22, 3), torch.randn(5, 2)
    runs = []
    for _ in range(2):
        found = stack(x, table, pairs)
        runs.append([found, *gradients([found], list(stack.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    "change", [name for name in CHANGES if name not in (*OVERRIDES, "global hook")]
)
def test_changed_modules_are_called(change: str) -> None:
    """Hooks and other weights of the linear maps and normalizations, while training."""
    mols = Molecules([3, 1], [0, 1, 2, 3, 1, 0, 4])
    stack, (x, table) = stack_of("layer", True, 3), inputs_of(mols)
    for module in [m for m in stack.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]:
        # The largest singular value stands out, so that its iterations converge.
        nn.init.normal_(module.weight, 0.4, 0.15)
        CHANGES[change](module)
    weave = WeaveRecorder(stack, table.detach()).double()
    recordings = [weave.recording(len(codes), codes) for codes in mols.tables()]
    optimizer = SGD(stack.parameters(), 0.1)
    for _ in range(3):
        wanted = [x, *stack.parameters()]
        found, expected = stack(x, table.detach(), pairs_of(mols)), weave(x, recordings)
        close(found, expected)
        optimizer.zero_grad()
        expected.sum().backward()
        right = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in wanted]
        optimizer.zero_grad()
        x.grad = None
        found.sum().backward()
        close([torch.zeros_like(p) if p.grad is None else p.grad for p in wanted], right)
        x.grad = None
        optimizer.step()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
def test_hooks_that_only_look_change_nothing(norm: str | None, training: bool) -> None:
    mols = Molecules([3, 1], [0, 1, 2, 3, 1, 0, 4])
    stack, (x, table) = stack_of(norm, True, 3).train(training), inputs_of(mols)
    stack.pair_block = 2
    wanted = [x, table, *stack.parameters()]
    other = copy.deepcopy(stack)
    expected, seen = stack(x, table, pairs_of(mols)), list[Any]()
    for module in other.modules():
        module.register_forward_hook(lambda m, x, found: seen.append(m))
    found = other(x, table, pairs_of(mols))
    close(found, expected)
    right = gradients([expected], wanted)
    close(gradients([found], [x, table, *other.parameters()]), right)
    assert {m for m in other.modules() if next(m.children(), None) is None} <= set(seen)
    for name, buffer in stack.named_buffers():
        close(other.get_buffer(name), buffer)


def test_programs_refuse_modules_with_hooks() -> None:
    stack, table = WeaveStack(3, 2, 4), torch.eye(2)
    weave = WeaveRecorder(stack, table)
    stack.convs[0].register_forward_hook(lambda *_: None)
    recording = weave.recording(1, [[0]])
    refused(
        ValueError, lambda: weave(torch.randn(1, 3), [recording]), "WeaveRecorder: a module has"
    )
