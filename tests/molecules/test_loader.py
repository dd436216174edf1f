"""The molecule loader behaves as the other loader does, with pairs instead of schedules."""

import pytest
from torch.utils.data import SequentialSampler

from pyg_dynbatch.data import MoleculeFeaturizer
from pyg_dynbatch.loader import Collater, MoleculeLoader, NodeBudgetBatchSampler, pair_counts
from pyg_dynbatch.nn.pairs import Pairs
from tests.molecules.batches import TABLE, molecule


def molecules(count: int = 20):
    return [molecule(n % 6, row=n) for n in range(count)]


def rows(batches):
    return [batch.row.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_carry_their_pairs(workers):
    options = {"batch_size": 8, "pair_set": 2, "self_pairs": False}
    loader = MoleculeLoader(molecules(), TABLE, **options, num_workers=workers)
    plain = list(MoleculeLoader(molecules(), TABLE, **options))
    for batch, other in zip(loader, plain, strict=True):
        assert isinstance(batch.pairs, Pairs)
        assert batch.pairs == other.pairs
        assert batch.pairs.num_molecules == batch.num_graphs


def test_batches_bounded_by_pairs():
    data = molecules()
    sampler = NodeBudgetBatchSampler(SequentialSampler(data), pair_counts(data), 30)
    loader = MoleculeLoader(data, TABLE, batch_sampler=sampler)
    assert all(batch.pairs.num_pairs <= 30 for batch in loader)
    assert sorted(sum(rows(loader), [])) == list(range(20))


def test_a_featurizer_is_not_taken_for_its_table():
    # Annotations that are checked say so in other words.
    with pytest.raises(TypeError, match="MoleculeFeaturizer"):
        MoleculeLoader(molecules(), MoleculeFeaturizer())


def test_options_are_kept_under_their_own_names():
    options = {"pair_set": "bonds", "self_pairs": False, "shuffle": True}
    options |= {"exclude_keys": ["smiles"], "pair_table": TABLE}
    loader = MoleculeLoader(molecules(), **options)
    assert {key: getattr(loader, key) for key in options} == options


def test_faulty_arguments_are_refused():
    words = r"(?s)MoleculeLoader: collate_fn is given.*this loader collates with MoleculeCollater"
    with pytest.raises(TypeError, match=words):
        MoleculeLoader(molecules(), TABLE, collate_fn=Collater())
    sampler = NodeBudgetBatchSampler(SequentialSampler(range(3)), [1, 2, 3], 10)
    words = r"(?s)MoleculeLoader: the sizes .* belong to a different.*pair_counts\(dataset\)"
    with pytest.raises(ValueError, match=words):
        MoleculeLoader(molecules(), TABLE, batch_sampler=sampler)
