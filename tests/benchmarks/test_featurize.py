"""Featurizers are timed, as is a stand-in for DeepChem with DeepChem's own features."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench, featurize, molecules

pytest.importorskip("rdkit")

SMALL = ["--repeats", "1"]

# Knows the molecules of the golden file alone, in DeepChem's own order of atoms.
STAND_IN = """
import numpy as np

__version__ = "stand-in"
file = np.load({golden!r})
atoms, pairs = np.cumsum(file["num_atoms"])[:-1], np.cumsum(file["num_pairs"])[:-1]
known = dict(zip(file["smiles"].tolist(), zip(
    np.split(file["atom"], atoms), np.split(file["pair"], pairs),
    np.split(file["pair_ends"], pairs),
)))


class WeaveMol:
    def __init__(self, smiles):
        self.parts = known[smiles]

    def get_atom_features(self):
        return self.parts[0] {fault}

    def get_pair_features(self):
        return self.parts[1]

    def get_pair_edges(self):
        return self.parts[2].T


class feat:
    class WeaveFeaturizer:
        def featurize(self, smiles):
            print("a remark between the answers")
            return [WeaveMol(each) for each in smiles]
"""


@pytest.fixture
def golden(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the molecules of the golden file in the place of those that come with RDKit."""
    path = samples / "deepchem" / "golden.npz"
    with np.load(path) as file:
        smiles = file["smiles"].tolist()
    (tmp_path / "NCI").mkdir()
    (tmp_path / "NCI" / "first_5K.smi").write_text("\n".join(smiles) + "\n", encoding="utf-8")
    monkeypatch.setattr(molecules, "rdkit_data_folder", lambda: tmp_path)
    return path


@pytest.mark.parametrize(
    ("modes", "processes"),
    [
        (["kearnes", "deepchem"], ["1"]),
        pytest.param(["deepchem"], ["1", "2"], marks=pytest.mark.long),
    ],
)
def test_records(run, modes, processes, tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text("smiles\nCO\nC(\nCCO\n", encoding="utf-8")
    options = ["--molecules", "3", "--processes", *processes, "--features", *modes]
    records = run(featurize, *SMALL, *options, "--files", str(file))
    alone = [r["case"] for r in records if r["mode"] == featurize.RDKIT]
    assert alone == ["nci", "mine"]
    records = [r for r in records if r["mode"] != featurize.RDKIT]
    found = {(r["case"], r["mode"], r["phase"], r["processes"]) for r in records}
    assert found == {
        (case, mode, phase, number)
        for case in ("nci", "mine")
        for mode in modes
        for phase, number in (("features", 1), *(("packed", int(each)) for each in processes))
    }
    sizes = {r["case"]: (r["batch"], r["left_out"]) for r in records}
    assert sizes == {"nci": (3, 0), "mine": (2, 1)}
    for record in records:
        assert record["molecules_per_second"] == record["batch"] / record["median_seconds"]
        assert 0 < record["bytes_packed"] < record["bytes_in_memory"]
        assert ("times_one_process" in record) == (record["processes"] == 2)
        assert record["ratio"] is None
    assert "1 left out" in capsys.readouterr().out


@pytest.mark.long
def test_beside_deepchem(run, golden, interpreter, capsys):
    python = interpreter(STAND_IN.format(golden=str(golden), fault=""))
    options = ["--features", "deepchem", "--processes", "1", "--deepchem-python", str(python)]
    records = run(featurize, *SMALL, *options)
    records = [r for r in records if r["mode"] != featurize.RDKIT]
    assert [r["mode"] for r in records] == ["deepchem", "deepchem", "deepchem's own"]
    assert [r["ratio"] is None for r in records] == [False, False, True]
    assert {r["deepchem"] for r in records} == {"stand-in"}
    assert {(r["compared"], r["with_lost_rings"]) for r in records} == {(32, 1)}
    assert records[-1]["bytes_in_memory"] > 0
    shown = capsys.readouterr().out
    assert "32 molecules compared with DeepChem stand-in" in shown


def test_other_features_are_not_timed(golden: Path, interpreter: Callable[[str], Path]) -> None:
    python = interpreter(STAND_IN.format(golden=str(golden), fault="+ 1"))
    with pytest.raises(RuntimeError, match="the features are not those of DeepChem"):
        bench.main(featurize, [*SMALL, "--deepchem-python", str(python)])


def test_an_interpreter_without_deepchem(interpreter: Callable[[str], Path]) -> None:
    python = interpreter("raise ImportError('no such luck')")
    with pytest.raises(RuntimeError, match="DeepChem did not begin") as caught:
        bench.main(featurize, [*SMALL, "--deepchem-python", str(python)])
    assert "ImportError: no such luck" in str(caught.value)


def test_no_molecule_at_all(tmp_path: Path) -> None:
    file = tmp_path / "bad.smi"
    file.write_text("C(\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no record is a molecule"):
        bench.main(
            featurize, [*SMALL, "--molecules", "2", "--processes", "1", "--files", str(file)]
        )
