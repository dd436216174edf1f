"""The molecule collater makes PyG's batch, quicker, with the chosen pairs."""

import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch

from pyg_dynbatch.columns import Columns
from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.loader import MoleculeCollater
from pyg_dynbatch.models import WeaveNet
from pyg_dynbatch.nn.pairs import Pairs
from tests.molecules.batches import FEATURES, TABLE, assert_same, molecule


def assert_same_batch(found: Batch, expected: Batch) -> None:
    assert_same(found, expected)
    assert found.num_graphs == expected.num_graphs
    for name in ("_slice_dict", "_inc_dict"):
        mine = getattr(found, name)
        theirs = getattr(expected, name)
        assert list(mine) == list(theirs)
        for key in theirs:
            same = mine[key] is theirs[key] or torch.equal(mine[key], theirs[key])
            assert same, (name, key)
    for pair in zip(found.to_data_list(), expected.to_data_list(), strict=True):
        assert_same(*pair)


def drawn(size: int, row: int, is_rich: bool) -> MoleculeData:
    bare = {} if is_rich else {"y": None, "smiles": None, "row": None, "descriptor": None}
    return molecule(size, **{"row": row, **bare})


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans())
def test_columns_are_the_molecules_and_their_batch_is_that_of_pyg(sizes, is_rich):
    data = [drawn(size, row, is_rich) for row, size in enumerate(sizes)]
    columns = Columns.of(data)
    assert columns is not None
    assert_same_batch(columns.merged(), Batch.from_data_list(data))
    for pair in zip(columns, data, strict=True):
        assert_same(*pair)


@given(st.integers(0, 6), st.booleans())
def test_one_molecule_is_a_batch_like_any_other(size, is_rich):
    data = drawn(size, 0, is_rich)
    net = WeaveNet(FEATURES, 2, TABLE.features, hidden=4, head=(3,)).eval()
    alone = MoleculeCollater(TABLE)([data])
    with mock.patch("pyg_dynbatch.loading.batch_of_one", return_value=None):
        general = MoleculeCollater(TABLE)([data])
    with torch.inference_mode():
        assert all(torch.equal(net(alone), net(each)) for each in (general, data))
    assert alone.pairs == general.pairs
    assert alone.x.data_ptr() != data.x.data_ptr() or not size
    del alone.pairs
    assert_same_batch(alone, Batch.from_data_list([data]))


def test_descriptors_are_one_row_a_molecule():
    data = [molecule(size) for size in (3, 0, 1)]
    for examples in (data, Columns.of(data)):
        batch = MoleculeCollater(TABLE)(examples)
        assert batch.descriptor.shape == (3, 3)
        assert batch.descriptor[:, 0].tolist() == [3, 0, 1]
        assert torch.isnan(batch.descriptor[:, 1]).all()
    wider = molecule(2, descriptor=torch.zeros(1, 5))
    assert Columns.of([molecule(2), wider]) is None


def test_the_requested_pairs_are_attached():
    data = [molecule(4), molecule(0), molecule(3)]
    for pair_set, self_pairs, expected in [
        ("all", True, 10 + 6),
        ("all", False, 6 + 3),
        ("bonds", False, 3 + 2),
        (2, True, 4 + 3 + 2 + 3 + 2 + 1),
    ]:
        batch = MoleculeCollater(TABLE, pair_set, self_pairs)(data)
        assert batch.pairs.num_pairs == expected
        kept = TABLE.kept(pair_set, self_pairs)
        sizes = torch.tensor([4, 0, 3])
        assert batch.pairs == Pairs.from_codes(batch.pair_code, sizes, kept)


def test_a_split_batch_has_no_pairs():
    data = [molecule(2), molecule(1)]
    batch = MoleculeCollater(TABLE)(data)
    for pair in zip(batch.to_data_list(), data, strict=True):
        assert_same(*pair)
    again = MoleculeCollater(TABLE)(batch.to_data_list())
    assert again.pairs == batch.pairs


@pytest.mark.parametrize("extra", [{"mark": torch.zeros(1)}, {"edge_index": torch.zeros(2, 0)}])
def test_further_fields_are_merged_as_by_pyg(extra: dict[str, Any]) -> None:
    batch = MoleculeCollater(TABLE)([molecule(2, **extra), molecule(3, **extra)])
    assert set(extra) <= set(batch.keys())
    assert batch.pairs == MoleculeCollater(TABLE)([molecule(2), molecule(3)]).pairs


def coded(atoms: int, codes: list[int]) -> MoleculeData:
    return molecule(atoms, pair_code=torch.tensor(codes, dtype=torch.uint8))


FAULTS: list[tuple[dict[str, Any], list[MoleculeData], str]] = [
    ({}, [], "the batch is empty"),
    ({"exclude_keys": ["pair_code"]}, [], "exclude_keys"),
    ({"pair_set": "some"}, [], "set of pairs"),
    ({}, [molecule(2), molecule(2, y=None)], "other fields(?s:.*)example 1"),
    ({}, [molecule(2), coded(3, [0] * 5)], "wrong number of pairs(?s:.*)6 codes for 3 atoms"),
    ({}, [molecule(3), molecule(0), coded(2, [0, 5, 0])], "not in the table(?s:.*)example 2"),
]


@pytest.mark.parametrize(("options", "data", "said"), FAULTS)
def test_faults_are_named(options, data, said):
    with pytest.raises(ValueError, match=said):
        MoleculeCollater(TABLE, **options)(data)


def test_collater_and_columns_travel_to_workers():
    data = [molecule(2), molecule(3)]
    collate = pickle.loads(pickle.dumps(MoleculeCollater(TABLE, 2, False)))
    columns = pickle.loads(pickle.dumps(Columns.of(data)))
    assert collate(columns).pairs == MoleculeCollater(TABLE, 2, False)(data).pairs
    assert repr(collate) == "MoleculeCollater(pair_set=2, self_pairs=False)"
