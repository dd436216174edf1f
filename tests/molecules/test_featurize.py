import os
from dataclasses import replace

import numpy as np
import pytest

from pyg_dynbatch.data import MoleculeData, MoleculeError, MoleculeFeaturizer
from pyg_dynbatch.datasets import FeaturizeOptions, featurize_record
from pyg_dynbatch.molecules.files.build import Workers, featurize_stream, packing_of
from pyg_dynbatch.molecules.files.read import RawMolecule
from pyg_dynbatch.molecules.files.store import AtomPacking
from tests.molecules.packed import Letters, records, texts


def molecules(pieces) -> list[MoleculeData]:
    packing = AtomPacking(Letters.atom_kinds, Letters.atom_names, 2)
    found = []
    for piece in pieces:
        count = len(piece.arrays["row"])
        found += packing.unpack(piece.arrays, np.arange(count))
    return found


def test_a_record_becomes_a_molecule():
    (record,) = records(1)
    data = featurize_record(Letters(), record)
    assert data.smiles == texts(1)[0]
    assert data.row == 0
    assert data.y.tolist() == [[0.0, 0.5]]
    missing = featurize_record(Letters(), RawMolecule(5, "here", " ab ", targets=(1.0, None)))
    assert missing.smiles == "ab"
    assert missing.y_mask.tolist() == [[True, False]]
    assert "y" not in featurize_record(Letters(), RawMolecule(5, "here", "ab"))
    assert "y" not in featurize_record(Letters(), record, num_tasks=0)
    assert featurize_record(Letters(), record, num_tasks=1).y.shape == (1, 1)


def test_a_blank_has_no_known_descriptor():
    letters = Letters(descriptors=True)
    (piece,) = featurize_stream(records(5, [3]), letters)
    columns = packing_of(letters, 0).unpack(piece.arrays, np.arange(5))
    lengths = [len(text) for text in texts(5)]
    for one, length in zip(columns, lengths, strict=True):
        first, second = one.descriptor[0].tolist()
        assert second != second
        assert first != first if one.row == 3 else first == length


class Unsent(str):
    def __reduce__(self):
        raise TypeError("other columns were sent to a process")


class Dying(Letters):
    """Ends its process without an error, as a fault in compiled code does."""

    def arrays(self, text):
        if text == "dying":
            os._exit(3)
        return super().arrays(text)


@pytest.mark.long
def test_a_process_works_fails_and_dies():
    """In the process that reads them stay the other columns; errors name the rows."""
    given = [replace(record, extra={"note": Unsent("long")}) for record in records(3)]
    broken = [RawMolecule(7, "mine.csv:9", "broken")]
    dying = [RawMolecule(row, "", "dying") for row in range(10)]
    featurizer = Dying()
    with Workers(featurizer, packing_of(featurizer, 2), "skip", 1) as workers:
        ((mark, piece),) = workers.run([("mark", given)])
        assert mark == "mark" and [one.row for one in molecules([piece])] == [0, 1, 2]
        assert given[0].extra == {"note": "long"}
        with pytest.raises(RuntimeError, match="this featurizer has a fault") as caught:
            list(workers.run([(None, broken)]))
        assert caught.value.__notes__ == ["row 7 (mine.csv:9): 'broken'"]
        with pytest.raises(RuntimeError, match="featurize: a process died") as caught:
            list(workers.run([(None, dying)]))
    assert "rows 0 to 9" in str(caught.value)
    assert "num_workers=0 to see why" in str(caught.value)


def test_a_stream_is_not_read_to_its_end_first():
    read = []

    def endless():
        row = 0
        while True:
            read.append(row)
            yield RawMolecule(row, "", "ab", targets=(0.0, 0.0))
            row += 1

    pieces = featurize_stream(endless(), Letters(), num_tasks=2)
    next(pieces)
    next(pieces)
    assert len(read) < 1000
    pieces.close()


def test_a_fault_of_the_featurizer_names_the_row():
    given = [RawMolecule(7, "mine.csv:9", "broken", targets=(0.0, 0.0))]
    with pytest.raises(RuntimeError, match="this featurizer has a fault") as caught:
        list(featurize_stream(given, Letters(), num_tasks=2))
    assert caught.value.__notes__ == ["row 7 (mine.csv:9): 'broken'"]


def test_options_are_checked():
    for bad in (FeaturizeOptions, lambda bad: list(featurize_stream([], Letters(), bad=bad))):
        words = (
            "unknown policy for bad rows.\n +expected: 'raise', 'skip' or 'blank'\n +got: +'drop'"
        )
        with pytest.raises(ValueError, match=words):
            bad("drop")
    with pytest.raises(
        ValueError, match=r"num_workers is out of range[\s\S]*at least 0\n +got: +-1"
    ):
        FeaturizeOptions(num_workers=-1)
    with pytest.raises(ValueError, match="block_size is out of range"):
        FeaturizeOptions(block_size=0)


def test_a_mol_block():
    chem = pytest.importorskip("rdkit.Chem")

    block = chem.MolToMolBlock(chem.MolFromSmiles("OCC"))
    data = featurize_record(MoleculeFeaturizer(), RawMolecule(2, "a.sdf:1", block=block))
    assert data.smiles == "CCO"
    assert data.num_nodes == 3
    with pytest.raises(MoleculeError):
        featurize_record(MoleculeFeaturizer(), RawMolecule(2, "a.sdf:1", block="no block\n"))
    with pytest.raises(MoleculeError):
        featurize_record(MoleculeFeaturizer(), RawMolecule(2, "a.sdf:1"))
