"""Where pairs stand; only places of small molecules are kept."""

import numpy as np

from pyg_dynbatch.molecules.featurizer import upper_triangle


def test_places_of_pairs_of_large_molecules_are_not_kept() -> None:
    for atoms in (128, 129, 300):
        first, second = np.triu_indices(atoms)
        assert np.array_equal(upper_triangle(atoms), first * atoms + second)
    assert upper_triangle(128) is upper_triangle(128)
    assert upper_triangle(129) is not upper_triangle(129)
