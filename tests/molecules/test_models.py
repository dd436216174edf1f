"""The whole network: options, batches of every kind, and that it learns."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch_geometric.data import Batch, Data

from pyg_dynbatch.models import WeaveNet
from pyg_dynbatch.nn.pairs import Pairs

TABLE = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]


def batch_of(*sizes: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for size in sizes:
        x = torch.randn(size, 4, generator=generator)
        length = size * (size + 1) // 2
        code = torch.randint(0, 3, (length,), generator=generator, dtype=torch.uint8)
        graphs.append(Data(x=x, pair_code=code, num_nodes=size))
    return Batch.from_data_list(graphs)


def small(**options: object) -> WeaveNet:
    return WeaveNet(4, 2, TABLE, **{"hidden": 8, "atom_out": 6, "head": (10,)} | options)


@pytest.mark.parametrize(
    "readout", ("histogram", "sum", "mean", "max", "attention", ["sum", "max"])
)
@pytest.mark.parametrize("norm", (None, "batch", "layer"))
def test_every_readout_learns_from_every_batch(readout: str | list[str], norm: str | None) -> None:
    net = small(readout=readout, norm=norm, atom_norm=norm, residual=True, num_modules=3)
    batch = batch_of(3, 0, 1, 5)
    net(batch).square().sum().backward()
    # A column of zeros behind a ReLU may leave single weights without gradient, never a layer.
    assert all(p.grad is not None for p in net.parameters())
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
    assert net(batch).shape == (4, 2)
    assert net.fingerprint(batch).shape == (4, net.fingerprint_channels)
    assert net.encode(batch).shape == (9, 6)


@pytest.mark.parametrize("options", ({"norm": "batch"}, {"messages": "directed"}))
@pytest.mark.parametrize("sizes", ((1,), (0,), (0, 0), (1, 1)))
@pytest.mark.parametrize("training", (True, False))
def test_molecules_without_proper_pairs(
    sizes: tuple[int, ...], training: bool, options: dict[str, str]
) -> None:
    found = small(**options).train(training)(batch_of(*sizes))
    assert found.shape == (len(sizes), 2)
    assert torch.isfinite(found).all()


def test_single_atoms_without_self_pairs() -> None:
    batch = batch_of(1, 2)
    batch.pairs = Pairs.from_codes(
        torch.tensor([0, 0, 1, 0]), [1, 2], torch.tensor([False, True, True])
    )
    assert batch.pairs.num_pairs == 1
    assert torch.isfinite(small(norm="batch")(batch)).all()


def test_pairs_of_the_collater_come_first() -> None:
    net, batch = small().eval(), batch_of(3, 2)
    expected = net(batch)
    batch.pairs = Pairs.from_codes(batch.pair_code, [3, 2], num_codes=3)
    torch.testing.assert_close(net(batch), expected)
    batch.pairs = Pairs.from_codes(batch.pair_code, [3, 2], torch.tensor([True, False, False]))
    assert not torch.allclose(net(batch), expected)
    torch.testing.assert_close(net(batch_of(3).get_example(0)), net(batch_of(3)))


@pytest.mark.parametrize("options", ({"norm": "batch", "pair_block": 4}, {"messages": "directed"}))
def test_result_does_not_depend_on_company(options: dict[str, object]) -> None:
    net, batch = small(**options).eval(), batch_of(3, 0, 6, 1)
    alone = [net(Batch.from_data_list([batch.get_example(n)])) for n in range(4)]
    torch.testing.assert_close(net(batch), torch.cat(alone))


@pytest.mark.parametrize("messages", ("weave", "directed"))
def test_network_learns_to_count_bonds(messages: str) -> None:
    """Fails for a network whose weave weights stay where they started."""
    batch = batch_of(*range(1, 9))
    pairs = Pairs.from_codes(batch.pair_code, batch.ptr.diff(), num_codes=3)
    bonds = pairs.code_count[:, 1].float()
    y = torch.zeros(8).index_add(0, batch.batch, bonds)
    y = (y - y.mean()) / y.std()
    net = small(readout="sum", atom_norm=None, messages=messages)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    before = copy.deepcopy(net.state_dict())
    for _ in range(60):
        optimizer.zero_grad()
        loss = (net(batch)[:, 0] - y).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    unmoved = [n for n, p in net.named_parameters() if torch.equal(p, before[n])]
    assert unmoved == []


@pytest.mark.parametrize("options", ({"norm": "batch"}, {"messages": "directed"}))
def test_network_is_saved_copied_and_moved(options: dict[str, Any]) -> None:
    net, batch = small(**options), batch_of(4, 3)
    net(batch)
    net.eval()
    expected = net(batch)
    twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    twins.append(WeaveNet(4, 2, torch.zeros(3, 2), hidden=8, atom_out=6, head=(10,), **options))
    twins[-1].load_state_dict(net.state_dict())
    twins[-1].eval()
    for twin in twins:
        assert torch.equal(twin(batch), expected)
    assert "pair_table" in net.state_dict()
    with torch.inference_mode():
        assert torch.equal(net(batch), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(net(batch).float(), expected, rtol=0.1, atol=0.1)
    assert {p.device.type for p in net.to("meta").state_dict().values()} == {"meta"}
    twins[0].reset_parameters()
    assert not torch.equal(twins[0](batch), expected)


def test_directed_messages_refuse_options_of_weave() -> None:
    words = "directed messages have no norm, pair_block.*got.*'batch'"
    with pytest.raises(ValueError, match=f"(?s){words}"):
        small(messages="directed", norm="batch", pair_block=5)
    with pytest.raises(ValueError, match="(?s)unknown messages.*'weave' or 'directed'"):
        small(messages="both")


class Wrapped(torch.nn.Module):
    """Calls a module, as compiled modules and those of several devices do."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> torch.Tensor:
        return self.inner(*given)


@pytest.mark.parametrize("messages", ("weave", "directed"))
def test_layers_may_be_wrapped(messages: str) -> None:
    net, batch = small(messages=messages, weave_dropout=0.5, atom_out=8), batch_of(4, 3)
    assert not torch.equal(net(batch), net(batch))
    expected = net.eval()(batch)
    net.weave = Wrapped(net.weave)
    torch.testing.assert_close(net(batch), expected)


def test_head_may_be_of_any_depth() -> None:
    assert len(small(head=()).head) == 1
    assert len(small(head=(5, 6, 7)).head) == 10


def with_descriptors(batch: Batch, width: int = 3) -> Batch:
    """Adds descriptors, some unknown and some huge."""
    rows = torch.linspace(-4, 4, batch.num_graphs * width).view(-1, width)
    rows[::2, 0] = torch.nan
    rows[:, -1] *= 1e30
    batch.descriptor = rows
    batch._slice_dict["descriptor"] = torch.arange(batch.num_graphs + 1)
    batch._inc_dict["descriptor"] = torch.zeros(batch.num_graphs)
    return batch


def test_descriptors_stand_beside_the_readout() -> None:
    net, batch = small(num_descriptors=3).eval(), with_descriptors(batch_of(3, 0, 4, 1))
    net.descriptors.fit(batch.descriptor)
    assert net.head[0].in_features == net.fingerprint_channels + 3
    read = net.fingerprint(batch)
    assert read.shape == (4, net.fingerprint_channels)
    found = net(batch)
    both = torch.cat([read, net.descriptors(batch.descriptor)], 1)
    torch.testing.assert_close(found, net.head(both))
    batch.descriptor = batch.descriptor.flip(0)
    assert torch.equal(net.fingerprint(batch), read)
    assert not torch.allclose(net(batch), found)
    expected = net(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(net(batch).float(), expected, rtol=0.1, atol=0.1)
    one = batch.get_example(1)
    torch.testing.assert_close(net(one), net(batch)[1:2])


def test_descriptors_that_are_not_asked_for_are_ignored() -> None:
    net, batch = small().eval(), batch_of(2)
    torch.testing.assert_close(net(batch), net(with_descriptors(batch)))


def test_batches_without_the_descriptors_are_refused() -> None:
    net, batch = small(num_descriptors=3), batch_of(2, 3)
    for given, got in ((batch, "nothing"), (with_descriptors(batch.clone(), 5), r".*\[2, 5\]")):
        message = rf"(?s)batch.descriptor does not fit.*\[2, 3\].*got: *{got}"
        with pytest.raises(ValueError, match=message):
            net(given)


def test_wrong_options_and_batches_are_refused() -> None:
    for words, make in {
        r"pair_table cannot be used.*got: +\[0\]": lambda: WeaveNet(4, 2, []),
        "WeaveNet: there are no batch stat": lambda: small(norm="layer", atom_norm=None, sync=True),
        "readout 'nothing' cannot be used.*'histogram'": lambda: small(readout="nothing"),
        "readout 'quantile' cannot be used": lambda: small(readout="quantile"),
    }.items():
        with pytest.raises(ValueError, match=f"(?s){words}"):
            make()
    with pytest.raises(ValueError, match=r"(?s)do not fit the table.*got: *neither"):
        small()(Batch.from_data_list([Data(x=torch.zeros(2, 4))]))
    batch = batch_of(2)
    batch.pairs = Pairs.from_codes(batch.pair_code, [2], num_codes=9)
    with pytest.raises(ValueError, match=r"(?s)3 codes.*got: *9 codes"):
        small()(batch)
