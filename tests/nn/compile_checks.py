"""Checks of torch.compile, each a function; a separate process runs them all.

In a separate process, as the tests check shapes at every call, which the compiler cannot trace. The
backend needs no compiler of C++ or CUDA; it takes the graphs of the backend "eager", and those of
their derivatives.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core import RaggedRows, TensorType, schedule_recordings
from pyg_dynbatch.models import WeaveNet
from pyg_dynbatch.nn import (
    ChildSumTreeLSTMCell,
    DirectedStack,
    GaussianHistogramAggregation,
    NaryTreeLSTMCell,
    TreeGRUCell,
    TreeRNNCell,
    WeaveConv,
    WeaveStack,
)
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.testing import recording_of_structure
from tests.core.helpers import cell_engine
from tests.nn.own_process import print_outcomes

BACKEND = "aot_eager"
NORMS = (None, "layer", "batch")


def results(found: Any, wanted: Iterable[Tensor]) -> list[Tensor]:
    """Tensors, and gradients of their squares."""
    parts = [part for part in (found if isinstance(found, tuple) else (found,)) if part is not None]
    total = sum(part.square().sum() for part in parts)
    return [*parts, *torch.autograd.grad(total, list(wanted), materialize_grads=True)]


def compare(
    module: nn.Module, function: Callable[..., Any], *given: Any, leaves: tuple[Tensor, ...] = ()
) -> None:
    """Compiles without any graph break, and compares values and gradients."""
    wanted = [*module.parameters(), *leaves]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    right = results(function(*given), wanted)
    after = {name: value.clone() for name, value in module.state_dict().items()}
    torch._dynamo.reset()
    module.load_state_dict(state)
    mine = results(torch.compile(function, backend=BACKEND, fullgraph=True)(*given), wanted)
    torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dict(module.state_dict()), after, rtol=1e-12, atol=1e-12)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def ragged() -> tuple[RaggedRows, tuple[Tensor, Tensor]]:
    parts = rows(6, 5), rows(6, 5)
    return RaggedRows(parts, torch.tensor([0, 0, 1, 3, 3, 3]), 4), parts


def check_tree_lstm_cells() -> None:
    x, a, b, c, d = rows(4, 3), *(rows(4, 5) for _ in range(4))
    cell = NaryTreeLSTMCell(3, 5)
    compare(cell, cell, x, (a, b), (c, d), leaves=(x, a, b, c, d))
    compare(cell, cell.leaf, x, leaves=(x,))
    children, parts = ragged()
    cell = ChildSumTreeLSTMCell(3, 5)
    compare(cell, cell, x, children, leaves=(x, *parts))


def check_other_cells() -> None:
    x, a, b = rows(4, 3), rows(4, 5), rows(4, 5)
    for make in (TreeGRUCell, TreeRNNCell):
        cell = make(3, 5)
        compare(cell, cell, x, a, b, leaves=(x, a, b))


def check_cell_in_an_engine() -> None:
    edges = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 4]])
    structure, x = Data(edge_index=edges, num_nodes=5), rows(5, 3)
    cell, row = NaryTreeLSTMCell(3, 5), TensorType((3,))
    wanted = [*cell.parameters(), x]
    run = {}
    for name, module in (("plain", cell), ("compiled", torch.compile(cell, backend="aot_eager"))):
        engine, node = cell_engine(module, cell.state_type, 2, row)
        steps = schedule_recordings([recording_of_structure(node, structure)])
        run[name] = results(engine(steps, {row: x})["node"], wanted)
    torch.testing.assert_close(run["compiled"], run["plain"], rtol=1e-12, atol=1e-12)


def weave(norm: str | None) -> tuple[WeaveConv, Pairs, Tensor, Tensor]:
    return WeaveConv(3, 2, 8, 4, norm=norm), coded(), rows(6, 3), rows(4, 2)


def coded() -> Pairs:
    code = torch.tensor([0, 1, 2, 0, 1, 0, 0, 0, 2, 0])
    return Pairs.from_codes(code, [3, 0, 1, 2], num_codes=4)


def check_weave_modules() -> None:
    for norm, training in ((None, True), ("layer", True), ("batch", True), ("batch", False)):
        conv, pairs, x, table = weave(norm)
        conv.train(training)
        pair_rows = rows(10, 2)
        compare(conv, conv, x, pair_rows, pairs, leaves=(x, pair_rows))
        compare(conv, lambda *given: conv(*given, coded=True), x, table, pairs, leaves=(x, table))  # noqa: B023


def check_weave_parts() -> None:
    for norm in NORMS:
        conv, pairs, x, _ = weave(norm)
        parts, pair_rows, total = rows(6, 100), rows(10, 2), rows(6, 50)
        compare(conv, conv.update_pairs, parts, pair_rows, pairs, leaves=(parts, pair_rows))
        compare(conv, conv.update_atoms, x, total, leaves=(x, total))
        compare(conv, conv.sum_pairs, pair_rows, pairs, leaves=(pair_rows,))
        compare(conv, conv.split, x, pairs, leaves=(x,))


def check_weave_stack() -> None:
    for norm in NORMS:
        stack, pairs, x, table = WeaveStack(3, 2, 8, 2, norm=norm), coded(), rows(6, 3), rows(4, 2)
        compare(stack, stack, x, table, pairs, leaves=(x, table))
    directed, pairs, x, table = DirectedStack(3, 2, 8), coded(), rows(6, 3), rows(4, 2)
    compare(directed, directed, x, table, pairs, leaves=(x, table))


def check_heads() -> None:
    net = WeaveNet(3, 1, [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], hidden=8, head=(16, 4)).eval()
    width = next(net.head.parameters()).size(1)
    given = rows(5, width)
    compare(net.head, net.head, given, leaves=(given,))
    atoms, molecule = rows(6, 3), torch.tensor([0, 0, 0, 2, 3, 3])
    readout = GaussianHistogramAggregation()
    compare(readout, readout, atoms, molecule, None, 4, leaves=(atoms,))


def batches() -> Iterator[tuple[Tensor, Tensor, Pairs]]:
    for sizes in ([3, 2], [4, 1, 2], [5, 5], [2, 3, 4], [6, 2], [7, 3]):
        pairs = Pairs.all_pairs(sizes)
        yield rows(sum(sizes), 3), rows(pairs.num_pairs, 2), pairs


def check_other_sizes_are_compiled_once() -> None:
    for norm in NORMS:
        torch._dynamo.reset()
        conv, counter = WeaveConv(3, 2, 8, 4, norm=norm), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(conv, backend=counter, fullgraph=True)
        for given in batches():
            results(compiled(*given), conv.parameters())
        # Once for the first sizes, and once for all.
        assert counter.frame_count <= 3, (norm, counter.frame_count)


def check_networks_take_other_sizes() -> None:
    for messages in ("weave", "directed"):
        torch._dynamo.reset()
        net = (
            WeaveNet(3, 1, torch.eye(3)[:, 1:], hidden=8, head=(4,), messages=messages)
            .double()
            .eval()
        )
        compiled = torch.compile(net, backend="aot_eager")
        for sizes in ([3, 2], [4, 1, 2], [5, 5]):
            code = torch.arange(sum(n * (n + 1) // 2 for n in sizes)) % 3
            molecule = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            data = Batch(x=rows(sum(sizes), 3), batch=molecule, pairs=Pairs.from_codes(code, sizes))
            data._num_graphs = len(sizes)
            found, wanted = (results(run(data), net.parameters()) for run in (compiled, net))
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def main() -> None:
    """Runs all checks in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    print_outcomes(globals(), "check_")


if __name__ == "__main__":
    main()
