import re

import pytest
import torch
from torch_geometric.loader import DataLoader as PyGDataLoader
from torch_geometric.nn import GCNConv

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.molecules.data import atoms_of_pairs, bonds_of, pairs_of_atoms
from tests.molecules.batches import TABLE, molecule


def test_only_what_is_given_is_stored():
    assert MoleculeData().keys() == []
    data = MoleculeData(torch.ones(2, 3), torch.zeros(3, dtype=torch.uint8))
    assert sorted(data.keys()) == ["num_nodes", "pair_code", "x"]
    assert MoleculeData(pair_code=torch.zeros(6, dtype=torch.uint8)).num_nodes == 3


def test_missing_targets_are_masked():
    data = MoleculeData(y=torch.tensor([[1.0, torch.nan]]))
    assert data.y_mask.tolist() == [[True, False]]


@pytest.mark.parametrize("atoms", [0, 1, 2, 7])
def test_a_sound_molecule_is_valid(atoms):
    data = molecule(atoms)
    assert data.validate(num_codes=5) is data
    assert atoms_of_pairs(pairs_of_atoms(atoms)) == atoms


FAULTS = [
    ({"x": None}, "x is missing or invalid.\n  expected: float32 [atom, feature]\n  got:"),
    ({"x": torch.ones(3)}, "x is missing or invalid"),
    ({"x": torch.ones(3, 2).double()}, "got:      float64 tensor [3, 2]"),
    ({"num_nodes": 4}, "num_nodes is missing or invalid.\n  expected: 3, the rows of x"),
    ({"x": torch.tensor([[1.0], [torch.nan], [0.0]])}, "got:      nan at atom 1, feature 0"),
    ({"pair_code": torch.zeros(3, dtype=torch.uint8)}, "one for every pair of 3 atoms"),
    ({"pair_code": torch.zeros(6)}, "got:      float32 tensor [6]"),
    ({"pair_code": torch.full((6,), 9, dtype=torch.uint8)}, "codes from 0 to 4\n  got:      9"),
    ({"descriptor": torch.zeros(3)}, "float32 [1, descriptor]\n  got:      float32 tensor [3]"),
    ({"descriptor": torch.zeros(2, 3)}, "descriptor is missing or invalid"),
    ({"descriptor": torch.zeros(1, 3).double()}, "got:      float64 tensor [1, 3]"),
    ({"descriptor": torch.tensor([[0.0, torch.inf]])}, "got:      inf for descriptor 1"),
    ({"y": torch.zeros(2)}, "y is missing or invalid.\n  expected: float64 or float32 [1"),
    ({"y_mask": None}, "y_mask is missing or invalid.\n  expected: bool [1, 2]"),
    ({"y_mask": torch.ones(1, 2, dtype=torch.bool)}, "got:      nan for task 0"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_faults_are_named(change, message):
    data = molecule(3)
    for key, value in change.items():
        data[key] = value
    words = rf"MoleculeData: [\s\S]*{re.escape(message)}[\s\S]*where: +mine\.csv:4"
    with pytest.raises(ValueError, match=words):
        data.validate(num_codes=5, where="mine.csv:4")


def test_a_length_that_fits_no_molecule():
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
    assert molecule(1).with_bonds(TABLE).edge_index.shape == (2, 0)
    assert molecule(0).with_bonds(TABLE).edge_index.shape == (2, 0)


def test_any_layer_of_pyg_runs_on_the_bonds():
    data = [molecule(n).with_bonds(TABLE) for n in (3, 1, 0, 2)]
    (batch,) = PyGDataLoader(data, batch_size=4)
    assert batch.edge_index.tolist() == [[0, 1, 1, 2, 4, 5], [1, 0, 2, 1, 5, 4]]
    assert GCNConv(5, 2)(batch.x, batch.edge_index).shape == (6, 2)


def test_bonds_of_an_unknown_code():
    words = r"bonds_of: a code is not in the table[\s\S]*codes from 0 to 4\n +got: +7"
    with pytest.raises(ValueError, match=words):
        bonds_of(torch.tensor([7], dtype=torch.uint8), TABLE)


def test_saved_and_read_without_unsafe_loading(tmp_path):
    data = molecule(3)
    torch.save(data, tmp_path / "a.pt")
    again = torch.load(tmp_path / "a.pt", weights_only=True)
    assert isinstance(again, MoleculeData)
    assert torch.equal(again.x, data.x)
