"""Weave modules: primitives, options, memory, precision, and what is refused."""

import copy
import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.nn import pairs as pair_sums
from pyg_dynbatch.nn.directed import DirectedStack
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.weave import CountedBatchNorm, WeaveConv, WeaveStack


def some_pairs() -> Pairs:
    code = torch.tensor([0, 1, 2, 0, 1, 0, 0, 0, 2, 0])
    return Pairs.from_codes(code, [3, 0, 1, 2], num_codes=4)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


LINEAR = {"pair_sum": (10, 3), "neighbor_sum": (6, 3), "order_gather": (6, 4), "code_rows": (4, 3)}
LINEAR |= {"order_rows": (6, 3), "order_sum": (2, 10, 3)}


@pytest.mark.parametrize("name", [*LINEAR, "order_relu"])
def test_primitives_have_right_derivatives(name: str) -> None:
    function = getattr(pair_sums, name)
    given = rows(*LINEAR.get(name, (6, 4)))
    pairs = some_pairs()
    assert torch.autograd.gradcheck(lambda x: function(x, pairs), [given])
    assert torch.autograd.gradgradcheck(lambda x: function(x, pairs), [given])


@pytest.mark.parametrize("width", (1, 7, 50))
def test_c_computes_the_bits_of_torch(width: int) -> None:
    pairs, parts = Pairs.all_pairs([5, 0, 1, 90]), torch.randn(96, 2 * width)
    parts[7, 0] = torch.nan
    in_c = pair_sums.order_relu(parts, pairs)
    with mock.patch.dict(os.environ, {NATIVE_SWITCH: "0"}):
        assert torch.equal(in_c.nan_to_num(9), pair_sums.order_relu(parts, pairs).nan_to_num(9))
    recorded = pair_sums.order_relu(parts.requires_grad_(), pairs)
    assert torch.equal(in_c.nan_to_num(9), recorded.nan_to_num(9))
    assert recorded.requires_grad
    with pytest.raises(IndexError):  # rather than reading memory that is not theirs
        pair_sums.order_relu(parts.detach()[:5], pairs)


@pytest.mark.parametrize(("channels", "modules"), [(3, 2), (50, 2), (50, 3), (130, 2)])
def test_c_adds_up_the_pairs_that_torch_adds_up(channels: int, modules: int) -> None:
    stack, sizes = WeaveStack(4, 5, channels, modules), [5, 0, 1, 90]
    code = torch.randint(0, 7, (sum(n * (n + 1) // 2 for n in sizes),), dtype=torch.uint8)
    pairs = Pairs.from_codes(code, sizes, torch.arange(7) < 6)
    given = torch.randn(96, 4), torch.randn(7, 5), pairs
    found = []
    with torch.inference_mode():
        for threads in (1, 2, 3):
            with mock.patch.object(torch, "get_num_threads", lambda n=threads: n):
                found.append(stack(*given))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    with mock.patch.object(pair_sums, "is_native", lambda *_: False):
        torch.testing.assert_close(found[0], stack(*given), rtol=1e-5, atol=1e-5)
    hook = stack.convs[-2].lin_p.register_forward_hook(lambda *given: given[-1] + 1)
    assert not torch.allclose(found[0], stack(*given))
    hook.remove()
    pairs.plan[: pairs.num_pairs] += 90
    with pytest.raises(IndexError), torch.inference_mode():
        stack(*given)


def test_half_precision_is_added_up_in_single_precision() -> None:
    pairs = Pairs.all_pairs([400])
    total = pair_sums.pair_sum(torch.ones(pairs.num_pairs, 1, dtype=torch.bfloat16), pairs)
    assert total.dtype == torch.float32
    assert total.eq(400).all()


@pytest.mark.parametrize("training", (True, False))
def test_counted_norm_is_batch_norm_of_repeated_rows(training: bool) -> None:
    ours, torchs = CountedBatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    x, counts = rows(5, 3), torch.tensor([2, 1, 2, 3, 1])
    repeated = x.detach().repeat_interleave(counts, 0).requires_grad_()
    for norm in (ours, torchs):
        torch.nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        found, expected = ours(x, counts.double()), torchs(repeated)
    ours.train(training)
    torchs.train(training)
    found, expected = ours(x, counts.double()), torchs(repeated)
    torch.testing.assert_close(found.repeat_interleave(counts, 0), expected)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    torch.testing.assert_close(ours.running_var, torchs.running_var)
    weight = torch.randn(9, 3, dtype=torch.double)
    (expected * weight).sum().backward()
    (found.repeat_interleave(counts, 0) * weight).sum().backward()
    segment_ids = torch.arange(5).repeat_interleave(counts)
    summed = torch.zeros(5, 3, dtype=torch.double).index_add(0, segment_ids, repeated.grad)
    torch.testing.assert_close(x.grad, summed)
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, torchs.bias.grad)


def test_counted_norm_takes_one_row_and_none() -> None:
    norm = CountedBatchNorm(2)
    assert norm(torch.ones(1, 2)).eq(0).all()
    assert norm(torch.ones(0, 2)).shape == (0, 2)
    assert torch.isfinite(norm.running_var).all()
    norm.reset_parameters()
    norm(torch.ones(3, 2), torch.zeros(3), 0)  # a table of codes in a batch without pairs
    assert norm.running_var.eq(1).all()
    assert norm.running_mean.eq(0).all()
    assert "2" in repr(norm)


def set_norms(stack: WeaveStack, training: bool) -> None:
    for part in stack.modules():
        if isinstance(part, CountedBatchNorm):
            part.train(training)


@pytest.mark.parametrize("pair_block", (None, 2))
def test_batch_normalization_has_a_mode_of_its_own(pair_block: int | None) -> None:
    stack = WeaveStack(3, 2, 4, 3, norm="batch")
    given = torch.randn(5, 3), torch.randn(2, 2), Pairs.from_codes(torch.arange(15) % 2, [5])
    stack(*given)
    trained = copy.deepcopy(stack)(*given)
    stack.pair_block = pair_block
    fixed = copy.deepcopy(stack).eval()(*given)
    frozen = copy.deepcopy(stack)
    set_norms(frozen, False)
    torch.testing.assert_close(frozen(*given), fixed)
    for mine, wanted in zip(frozen.buffers(), stack.buffers(), strict=True):
        assert torch.equal(mine, wanted), "frozen statistics stay"
    set_norms(stack.eval(), True)
    torch.testing.assert_close(stack(*given), trained)


def test_second_derivatives_of_batch_norm_are_refused() -> None:
    norm, x = CountedBatchNorm(2), torch.randn(3, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"(?s)second derivatives.*create_graph.*eval\(\)"):
        torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("norm", (None, "layer"))
def test_layer_has_right_second_derivatives(norm: str | None) -> None:
    pairs, conv = some_pairs(), WeaveConv(3, 2, 4, 4, hidden=4, norm=norm).double()
    inputs = [rows(6, 3), rows(10, 2)]
    assert torch.autograd.gradgradcheck(lambda x, p: conv(x, p, pairs), inputs, atol=1e-4)


def test_pairs_seen_in_inference_mode_train_afterwards() -> None:
    stack, pairs = WeaveStack(3, 2, 4, norm="batch"), some_pairs()
    x, table = torch.randn(6, 3), torch.randn(4, 2)
    with torch.inference_mode():
        stack(x, table, pairs)
    stack(x, table, pairs).sum().backward()
    assert stack.convs[0].lin_ap.weight.grad is not None


def test_last_module_has_no_weights_for_pairs() -> None:
    conv = WeaveConv(3, 2, 4, None)
    assert not hasattr(conv, "lin_p")
    assert conv(torch.randn(6, 3), torch.randn(10, 2), some_pairs())[1] is None


def test_dropped_messages() -> None:
    """A row of dropped messages is that of an atom without neighbors."""
    stack, pairs = DirectedStack(3, 2, 8, dropout=1.0), some_pairs()
    x, table = torch.randn(6, 3), torch.randn(4, 2)
    alone = stack.lin_out(torch.cat([x, torch.zeros(6, 8)], 1)).relu()
    torch.testing.assert_close(stack(x, table, pairs), alone)
    half = DirectedStack(3, 2, 400, dropout=0.5)
    assert not torch.equal(half(x, table, pairs), half(x, table, pairs))
    assert torch.equal(half.eval()(x, table, pairs), half(x, table, pairs))


def test_dropout_drops_only_while_training() -> None:
    conv, pairs = WeaveConv(3, 2, 400, None, dropout=0.5), some_pairs()
    x, pair_rows = torch.randn(6, 3), torch.randn(10, 2)
    assert not torch.equal(conv(x, pair_rows, pairs)[0], conv(x, pair_rows, pairs)[0])
    conv.eval()
    assert torch.equal(conv(x, pair_rows, pairs)[0], conv(x, pair_rows, pairs)[0])


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_batch_normalization_of_half_precision_is_exact(precision: torch.dtype) -> None:
    given = (torch.randn(800, 4) + 10).to(precision)
    counts = torch.randint(1, 100, (800,))
    counted, expected = CountedBatchNorm(4), nn.BatchNorm1d(4).double()
    with torch.autocast("cpu", dtype=precision):
        found = counted(given, counts.float())
    repeated = expected(given.double().repeat_interleave(counts, 0))[counts.cumsum(0) - counts]
    torch.testing.assert_close(found.double(), repeated, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(counted.running_var.double(), expected.running_var)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coded", [True, False])
def test_inference_under_autocast(precision: torch.dtype, coded: bool) -> None:
    """Linear maps return half precision, which C, in single precision, must not read."""
    torch.manual_seed(0)
    pairs = Pairs.from_codes(torch.randint(0, 3, (20 * 55,)), [10] * 20)
    stack, x, table = WeaveStack(3, 2, 24), torch.randn(200, 3), torch.randn(3, 2)
    pair_rows = table if coded else table[pairs.code]
    with torch.no_grad():
        expected = stack(x, pair_rows, pairs, coded=coded)
        with torch.autocast("cpu", dtype=precision):
            found = stack(x, pair_rows, pairs, coded=coded)
    difference = (found.float() - expected).norm() / expected.norm()
    assert 0 < difference < 0.02


@pytest.mark.parametrize("autocast", [True, False])
def test_more_pairs_of_one_code_than_float16_counts(autocast: bool) -> None:
    """Beyond 65504 a count is infinite in float16, and all that is divided by it is lost."""
    pairs = Pairs.from_codes(torch.ones(19 * 1830, dtype=torch.int64), [60] * 19, num_codes=2)
    stack, x, table = WeaveStack(3, 2, 4, norm="batch"), torch.randn(1140, 3), torch.eye(2)
    expected = copy.deepcopy(stack)(x, table, pairs)
    if autocast:
        with torch.autocast("cpu", dtype=torch.float16):
            found = stack(x, table, pairs)
    else:
        found = stack.half()(x.half(), table.half(), pairs)
        assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=0.2, atol=0.1)


def saved_bytes(stack: WeaveStack, pairs: Pairs) -> tuple[int, Tensor, list[Tensor]]:
    """Bytes kept for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.linspace(-1, 1, pairs.num_atoms * 3).view(-1, 3).requires_grad_()
    table = torch.linspace(-1, 1, 50).view(25, 2)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = stack(x, table, pairs)
    found.square().mean().backward()
    gradients = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
    stack.zero_grad()
    return sum(kept.values()), found.detach(), gradients


def test_492_atoms_fit_into_little_memory_by_blocks() -> None:
    """The largest molecule of SIDER: 242,064 ordered pairs."""
    size = 492
    code = torch.arange(size * (size + 1) // 2) % 25
    pairs, stack = Pairs.from_codes(code, [size], num_codes=25), WeaveStack(3, 2, 50)
    whole, expected, expected_gradients = saved_bytes(stack, pairs)
    stack.pair_block = 16384
    blocked, found, gradients = saved_bytes(stack, pairs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-5)
    assert blocked < 50e6 < whole
    assert blocked < 10e6  # atoms and indices alone


CONV, PAIRS = WeaveConv(3, 2), some_pairs()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: WeaveConv(3, 2, norm="group"), "unknown norm.*'batch', 'layer' or None.*'group'"),
        (lambda: WeaveConv(3, 2, hidden={"xx": 3}), "invalid width.*got: *xx=3"),
        (lambda: WeaveConv(3, 2, 0), "got: *atom_out=0"),
        (lambda: WeaveStack(3, 2, num_modules=0), "num_modules is too small.*got: *0"),
        (lambda: DirectedStack(3, 2, num_modules=0), "num_modules is too small.*got: *0"),
        (lambda: DirectedStack(3, 2, 0), "channels is too small.*got: *0"),
        (lambda: DirectedStack(3, 2, atom_out=0), "atom_out is too small.*got: *0"),
        (
            lambda: DirectedStack(3, 2)(torch.zeros(6, 3), torch.zeros(5, 2), PAIRS),
            r"DirectedStack: wrong shape of the rows per code.*\[4, 2\].*\[5, 2\].*coded says",
        ),
        (
            lambda: CONV(torch.zeros(5, 3), torch.zeros(10, 2), PAIRS),
            r"x has the wrong shape.*\[6, 3\].*\[5, 3\]",
        ),
        (
            lambda: CONV(torch.zeros(6, 3), torch.zeros(4, 2), PAIRS),
            "wrong shape of the rows per pair.*coded says",
        ),
        (
            lambda: CONV(torch.zeros(6, 3), torch.zeros(10, 2), PAIRS, coded=True),
            "wrong shape of the rows per code.*coded says",
        ),
    ],
)
def test_refuses(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()
    assert "(3, 2) -> (50, 50), norm=None" in repr(CONV)
