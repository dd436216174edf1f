"""The molecule collater makes PyG's batch, quicker, with the chosen pairs."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset
from torch_geometric.data import Batch

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.loader import MoleculeCollater, node_counts, pair_counts
from pyg_dynbatch.molecules.data import MoleculeColumns
from pyg_dynbatch.nn.pairs import Pairs
from tests.molecules.batches import TABLE, molecule


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


def assert_same_molecule(wanted: MoleculeData, found: MoleculeData) -> None:
    assert type(found) is type(wanted)
    assert set(found.keys()) == set(wanted.keys())
    for key in wanted.keys():  # noqa: SIM118 - no dict
        if isinstance(wanted[key], torch.Tensor):
            assert torch.equal(found[key].nan_to_num(9), wanted[key].nan_to_num(9)), key
        else:
            assert found[key] == wanted[key], key


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans())
def test_same_as_pyg(sizes, rich):
    bare = {} if rich else {"y": None, "smiles": None, "row": None, "descriptor": None}
    data = [molecule(n, **({"row": i} | bare)) for i, n in enumerate(sizes)]
    columns = MoleculeColumns.of(data, ())
    assert columns is not None
    assert_same_batch(Batch.from_data_list(data), columns.merged())


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
    first, second = MoleculeCollater(TABLE)(
        [(molecule(2), molecule(1)), (molecule(3), molecule(1))]
    )
    assert first.pairs.num_pairs == 9
    assert second.pairs.num_pairs == 2


def test_faults_are_named():
    collate = MoleculeCollater(TABLE)
    with pytest.raises(ValueError, match="MoleculeCollater: the batch is empty"):
        collate([])
    with pytest.raises(ValueError, match="exclude_keys holds what the plan is made from"):
        MoleculeCollater(TABLE, exclude_keys=["pair_code"])
    with pytest.raises(ValueError, match="unknown set of pairs"):
        MoleculeCollater(TABLE, pairs="some")
    with pytest.raises(ValueError, match="MoleculeCollater: an example has other fields") as caught:
        collate([molecule(2), molecule(2, y=None)])
    assert "example 1 of the batch" in str(caught.value)
    bad = molecule(3)
    bad.pair_code = bad.pair_code[:5]
    with pytest.raises(ValueError, match="a molecule has a wrong number of pairs") as caught:
        collate([molecule(2), bad])
    assert "6 codes for 3 atoms" in str(caught.value)
    assert "molecule 1 of the batch" in str(caught.value)
    unknown = molecule(2, pair_code=torch.tensor([0, 5, 0], dtype=torch.uint8))
    with pytest.raises(ValueError, match="a code is not in the table") as caught:
        collate([molecule(3), molecule(0), unknown, molecule(1)])
    assert "where:    example 2" in str(caught.value)


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
