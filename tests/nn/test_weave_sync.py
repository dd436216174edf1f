"""Synchronized batch statistics: ranks with unequal shares compute what one rank does with all."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_dynbatch.nn import CountedBatchNorm, Pairs, WeaveConv
from tests.nn.plain_weave import Molecules, gradients, molecules, shaken
from tests.strategies import few

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="forks processes, on the CPU only"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def on_ranks(work: Callable[[Any], Any], shares: Sequence[Any]) -> list[Any]:
    """Call a function in one process per share, joined by gloo, and return all results."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        start_processes(_rank, (folder, work, shares), len(shares), start_method="fork")
        return [torch.load(folder / f"{rank}.pt") for rank in range(len(shares))]


def _rank(rank: int, folder: Path, work: Callable[[Any], Any], shares: Sequence[Any]) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads of OpenMP
    store = dist.FileStore(str(folder / "store"), len(shares))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shares))
    torch.save(work(shares[rank]), folder / f"{rank}.pt")
    dist.destroy_process_group()


def assert_one_rank(whole: Any, parts: list[Any]) -> None:
    """Compare outputs, gradients of inputs and of parameters, and running statistics."""
    (outputs, of_inputs, of_parameters, buffers), shares = whole, list(zip(*parts, strict=True))
    for found, expected in ((shares[0], outputs), (shares[1], of_inputs)):
        close([torch.cat(rows) for rows in zip(*found, strict=True)], expected)
    close([sum(each) for each in zip(*shares[2], strict=True)], of_parameters)
    for own in shares[3]:
        close(own, buffers)
        assert all(map(torch.equal, own.values(), shares[3][0].values()))


def results(module: nn.Module, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
    found = gradients(outputs, [*inputs, *module.parameters()])
    count, buffers = len(inputs), {name: value.clone() for name, value in module.named_buffers()}
    return [each.detach() for each in outputs], found[:count], found[count:], buffers


@few(8)
@given(counts=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=2, max_size=3))
def test_norm(counts: list[list[int]]) -> None:
    flat = [count for share in counts for count in share]
    assume(sum(flat) or not flat)
    norm: Any = shaken(CountedBatchNorm(3, sync=True))
    rows = torch.randn(len(flat), 3, dtype=torch.double) + 5

    def work(share: tuple[Tensor, Tensor]) -> Any:
        own, (x, weights) = copy.deepcopy(norm), share
        x = x.clone().requires_grad_()
        for _ in range(2):
            found = own(x, weights, int(weights.sum()))
        return results(own, [found], [x])

    weights = [torch.tensor(share, dtype=torch.double) for share in counts]
    shares = list(zip(rows.split([len(share) for share in counts]), weights, strict=True))
    assert_one_rank(work((rows, torch.cat(weights))), on_ranks(work, shares))


@few(6)
@given(
    shares=st.lists(molecules(4, 3), min_size=2, max_size=3),
    coded=st.booleans(),
    residual=st.booleans(),
)
def test_weave_conv(shares: list[Molecules], coded: bool, residual: bool) -> None:
    kept = shares[0].kept
    conv: Any = shaken(WeaveConv(3, 2, 3, 2, hidden=4, norm="batch", residual=residual))
    CountedBatchNorm.synchronise(conv)

    def work(share: Molecules) -> Any:
        own, code = copy.deepcopy(conv), torch.tensor(share.code, dtype=torch.uint8)
        pairs = Pairs.from_codes(code, share.sizes, torch.tensor(kept))
        table = torch.linspace(-1, 1, 10, dtype=torch.double).view(5, 2).requires_grad_()
        pair_rows = table if coded else table[pairs.code].detach().requires_grad_()
        # Whatever the share, the same atom has the same row.
        sizes = torch.tensor([float(10 * n + i) for n in share.sizes for i in range(n)])
        x = torch.sin(sizes[:, None] * torch.arange(1, 4)).double().requires_grad_()
        found = own(x, pair_rows, pairs, coded=coded)
        outputs, (of_x, of_pair_rows), of_parameters, buffers = results(
            own, list(found), [x, pair_rows]
        )
        if coded:  # every rank has the whole table
            return outputs, [of_x], [*of_parameters, of_pair_rows], buffers
        return outputs, [of_x, of_pair_rows], of_parameters, buffers

    whole = Molecules([n for s in shares for n in s.sizes], [c for s in shares for c in s.code])
    assert_one_rank(work(whole), on_ranks(work, shares))


class Reads(TorchDispatchMode):
    """Notes when the value of a tensor is read, which would wait for a GPU."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.calls.append("read")
        return func(*args, **(kwargs or {}))


def test_one_exchange_per_norm_and_pass_and_none_in_evaluation() -> None:
    conv = WeaveConv(3, 2, 4, 4, norm="batch")
    CountedBatchNorm.synchronise(conv)
    pairs = Pairs.all_pairs([3, 1])
    x, pair_rows = torch.randn(4, 3), torch.randn(pairs.num_pairs, 2)

    def work(training: bool) -> list[str]:
        calls: list[str] = []
        for name in ("all_gather", "all_reduce", "all_gather_into_tensor", "broadcast"):
            given = getattr(dist, name)
            setattr(dist, name, lambda *a, f=given, n=name: (calls.append(n), f(*a)))
        with Reads(calls):
            for result in conv.train(training)(x, pair_rows, pairs):
                result.square().sum().backward(retain_graph=True)
                calls.append("end")
        return calls

    training, _ = on_ranks(work, [True, True])
    forward = training.index("all_reduce")
    assert training[:forward] == ["all_gather"] * len(conv.norms)
    # The atoms have three norms; the pairs three others.
    assert training[forward:] == [*["all_reduce"] * 3, "end"] * 2
    assert on_ranks(work, [False, False]) == [["end", "end"]] * 2


def test_without_a_process_group_nothing_changes() -> None:
    given = torch.randn(5, 3)
    alone, synchronized = CountedBatchNorm(3), CountedBatchNorm(3, sync=True)
    assert torch.equal(alone(given), synchronized(given))
    assert torch.equal(alone.running_var, synchronized.running_var)
    assert "sync=True" in repr(synchronized) and "sync" not in repr(alone)


def test_variances_of_large_rows_are_accurate_in_single_precision() -> None:
    """A mean of squares minus the square of the mean would be off by more than a percent."""
    shares = [torch.randn(n, 4) + 1_000 + offset for n, offset in ((3, 0), (500, 1), (40, -9))]

    def work(rows: Tensor) -> Tensor:
        norm = CountedBatchNorm(4, momentum=1.0, sync=True)
        return torch.cat([norm(rows), norm.get_buffer("running_var")[None]])

    exact = nn.BatchNorm1d(4, momentum=1.0).double()
    expected = exact(torch.cat(shares).double()).split([len(rows) for rows in shares])
    for found, rows in zip(on_ranks(work, shares), expected, strict=True):
        torch.testing.assert_close(found[:-1].double(), rows, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[-1].double(), exact.running_var, rtol=2e-4, atol=0.0)


def test_modules_without_batch_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)WeaveConv: there are no batch stat.*norm='batch'"):
        CountedBatchNorm.synchronise(WeaveConv(3, 2, norm="layer"))
