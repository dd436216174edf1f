"""The molecule collater makes PyG's batch, quicker, with the chosen pairs."""

import pickle
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset
from torch_geometric.data import Batch

from pyg_dynbatch.loader import MoleculeCollater, node_counts, pair_counts
from pyg_dynbatch.molecules.data import MoleculeColumns
from pyg_dynbatch.molecules.nets.models import WeaveNet
from pyg_dynbatch.nn.pairs import Pairs
from tests.molecules.batches import FEATURES, TABLE, molecule
from tests.molecules.packed import assert_same as assert_same_molecule


def assert_same_batch(wanted: Batch, found: Batch) -> None:
    assert type(found) is type(wanted)
    assert set(found.keys()) == set(wanted.keys())
    for key in wanted.keys():  # noqa: SIM118 - no dict
        assert type(found[key]) is type(wanted[key])
        if isinstance(wanted[key], torch.Tensor):
            assert found[key].dtype == wanted[key].dtype
            assert torch.equal(found[key].nan_to_num(9), wanted[key].nan_to_num(9))
        else:
            assert found[key] == wanted[key]
    assert found.num_graphs == wanted.num_graphs
    for name in ("_slice_dict", "_inc_dict"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert list(mine) == list(theirs)
        for key in theirs:
            same = mine[key] is theirs[key] or torch.equal(mine[key], theirs[key])
            assert same, (name, key)
    for one, other in zip(found.to_data_list(), wanted.to_data_list(), strict=True):
        assert_same_molecule(other, one)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans())
def test_same_as_pyg(sizes, rich):
    bare = {} if rich else {"y": None, "smiles": None, "row": None, "descriptor": None}
    data = [molecule(n, **({"row": i} | bare)) for i, n in enumerate(sizes)]
    columns = MoleculeColumns.of(data, ())
    assert columns is not None
    assert_same_batch(Batch.from_data_list(data), columns.merged())


@given(st.integers(0, 6), st.booleans())
def test_one_molecule_is_a_batch_like_any_other(size, rich):
    bare = {} if rich else {"y": None, "smiles": None, "row": None, "descriptor": None}
    data = molecule(size, **bare)
    net = WeaveNet(FEATURES, 2, TABLE.features, hidden=4, head=(3,)).eval()
    alone = MoleculeCollater(TABLE)([data])
    with mock.patch.object(MoleculeColumns, "batch_of_one", return_value=None):
        general = MoleculeCollater(TABLE)([data])
    with torch.inference_mode():
        assert all(torch.equal(net(alone), net(each)) for each in (general, data))
    assert alone.pairs == general.pairs
    assert alone.x.data_ptr() != data.x.data_ptr() or not size
    del alone.pairs
    assert_same_batch(Batch.from_data_list([data]), alone)


def test_descriptors_are_one_row_a_molecule():
    for data in ([molecule(n) for n in (3, 0, 1)], MoleculeColumns.of([molecule(2)] * 3, ())):
        batch = MoleculeCollater(TABLE)(data)
        assert batch.descriptor.shape == (3, 3)
        assert batch.descriptor[:, 0].tolist() == batch.ptr.diff().tolist()
        assert torch.isnan(batch.descriptor[:, 1]).all()
    wider = molecule(2, descriptor=torch.zeros(1, 5))
    assert MoleculeColumns.of([molecule(2), wider], ()) is None


def test_columns_are_a_list_of_the_same_molecules():
    data = [molecule(n, row=n) for n in (3, 0, 1)]
    columns = MoleculeColumns.of(data, ())
    assert len(columns) == 3
    for one, other in zip(columns, data, strict=True):
        assert_same_molecule(other, one)
    assert_same_molecule(data[-1], columns[-1])
    assert [one.row for one in columns[1:]] == [0, 1]
    with pytest.raises(IndexError):
        columns[3]
    assert repr(columns) == "MoleculeColumns(3 examples, 4 nodes)"


def test_the_requested_pairs_are_attached():
    data = [molecule(4), molecule(0), molecule(3)]
    for pairs, self_pairs, wanted in [
        ("all", True, 10 + 6),
        ("all", False, 6 + 3),
        ("bonds", False, 3 + 2),
        (2, True, 4 + 3 + 2 + 3 + 2 + 1),
    ]:
        batch = MoleculeCollater(TABLE, pairs, self_pairs)(data)
        assert isinstance(batch.pairs, Pairs)
        assert batch.pairs.num_pairs == wanted
        kept = TABLE.kept(pairs, self_pairs)
        expected = Pairs.from_codes(batch.pair_code, torch.tensor([4, 0, 3]), kept)
        assert batch.pairs == expected


def test_a_split_batch_has_no_pairs():
    data = [molecule(2), molecule(1)]
    batch = MoleculeCollater(TABLE)(data)
    for one, other in zip(batch.to_data_list(), data, strict=True):
        assert_same_molecule(other, one)
    again = MoleculeCollater(TABLE)(batch.to_data_list())
    assert again.pairs == batch.pairs


@pytest.mark.parametrize("extra", [{"mark": torch.zeros(1)}, {"edge_index": torch.zeros(2, 0)}])
def test_further_fields_are_merged_by_pyg(extra):
    data = [molecule(2, **extra), molecule(3, **extra)]
    assert MoleculeColumns.of(data, ()) is None
    batch = MoleculeCollater(TABLE)(data)
    assert set(extra) <= set(batch.keys())
    assert batch.pairs == MoleculeCollater(TABLE)([molecule(2), molecule(3)]).pairs


def test_follow_and_exclude():
    data = [molecule(2), molecule(3)]
    batch = MoleculeCollater(TABLE, follow_batch=["pair_code"], exclude_keys=["smiles"])(data)
    assert batch.pair_code_batch.tolist() == [0] * 3 + [1] * 6
    assert "smiles" not in batch
    quick = MoleculeCollater(TABLE, exclude_keys=["smiles", "y"])(data)
    kept = set(quick.keys())
    assert kept.isdisjoint({"smiles", "y"})
    packed = MoleculeCollater(TABLE, follow_batch=["x"])(MoleculeColumns.of(data, ()))
    assert packed.x_batch.tolist() == [0, 0, 1, 1, 1]


def test_molecules_in_tuples():
    pairs = [(molecule(2), molecule(1)), (molecule(3), molecule(1))]
    first, second = MoleculeCollater(TABLE)(pairs)
    assert first.pairs.num_pairs == 9
    assert second.pairs.num_pairs == 2


def coded(atoms, codes):
    return molecule(atoms, pair_code=torch.tensor(codes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("options", "data", "words"),
    [
        ({}, [], "MoleculeCollater: the batch is empty"),
        ({"exclude_keys": ["pair_code"]}, [], "exclude_keys holds what the plan is made from"),
        ({"pairs": "some"}, [], "unknown set of pairs"),
        ({}, [molecule(2), molecule(2, y=None)], "an example has other fields.*example 1 of the b"),
        ({}, [molecule(2), coded(3, [0] * 5)], "wrong number of pairs.*6 codes for 3 atoms.*le 1"),
        (
            {},
            [molecule(3), molecule(0), coded(2, [0, 5, 0])],
            "not in the table.*where: *example 2",
        ),
    ],
)
def test_faults_are_named(options, data, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        MoleculeCollater(TABLE, **options)(data)


def test_collater_and_columns_travel_to_workers():
    data = [molecule(2), molecule(3)]
    collate = pickle.loads(pickle.dumps(MoleculeCollater(TABLE, 2, False)))
    columns = pickle.loads(pickle.dumps(MoleculeColumns.of(data, ())))
    assert collate(columns).pairs == MoleculeCollater(TABLE, 2, False)(data).pairs
    assert repr(collate) == "MoleculeCollater(pairs=2, self_pairs=False)"


def test_counts():
    data = [molecule(4), molecule(0), molecule(1)]
    assert node_counts(data) == [4, 0, 1]
    assert pair_counts(data) == [10, 0, 1]
    assert pair_counts(Subset(data, [2, 0])) == [1, 10]
