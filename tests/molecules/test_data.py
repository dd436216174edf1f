import pytest
import torch
from torch_geometric.loader import DataLoader as PyGDataLoader
from torch_geometric.nn import GCNConv

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.molecules.data import atoms_of_pairs
from tests.molecules.batches import TABLE, molecule


def test_only_what_is_given_is_stored():
    assert MoleculeData().keys() == []
    data = MoleculeData(torch.ones(2, 3), torch.zeros(3, dtype=torch.uint8))
    assert sorted(data.keys()) == ["num_nodes", "pair_code", "x"]
    assert MoleculeData(pair_code=torch.zeros(6, dtype=torch.uint8)).num_nodes == 3


def test_a_length_that_fits_no_molecule():
    assert [atoms_of_pairs(pairs) for pairs in (0, 1, 3, 28)] == [0, 1, 2, 7]
    with pytest.raises(ValueError, match="matches no number of atoms"):
        atoms_of_pairs(4)


def test_one_atom_has_no_other_field_of_atoms():
    # Everything has length one here, and PyG would take all of it for atoms.
    data = molecule(1)
    assert [key for key in data.keys() if data.is_node_attr(key)] == ["x"]  # noqa: SIM118
    assert not any(data.is_edge_attr(key) for key in data.keys())  # noqa: SIM118


def test_bonds_in_both_directions():
    chain = molecule(4).with_bonds(TABLE)
    assert chain.edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    features = TABLE.features[TABLE.distance == 1]
    assert torch.equal(chain.edge_attr, features.expand(6, -1))
    assert molecule(1).with_bonds(TABLE).edge_index.shape == (2, 0)
    assert len(molecule(1).with_bonds(TABLE).edge_attr) == 0
    assert molecule(0).with_bonds(TABLE).edge_index.shape == (2, 0)


def test_any_layer_of_pyg_runs_on_the_bonds():
    data = [molecule(n).with_bonds(TABLE) for n in (3, 1, 0, 2)]
    (batch,) = PyGDataLoader(data, batch_size=4)
    assert batch.edge_index.tolist() == [[0, 1, 1, 2, 4, 5], [1, 0, 2, 1, 5, 4]]
    assert GCNConv(5, 2)(batch.x, batch.edge_index).shape == (6, 2)


def test_saved_and_read_without_unsafe_loading(tmp_path):
    data = molecule(3)
    torch.save(data, tmp_path / "a.pt")
    again = torch.load(tmp_path / "a.pt", weights_only=True)
    assert isinstance(again, MoleculeData)
    assert torch.equal(again.x, data.x)
