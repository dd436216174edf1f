"""NCI, MoleculeNet and a user's own file: what is in them, and what is said of faults."""

import gzip
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

from pyg_dynbatch.data import MoleculeError, MoleculeFeaturizer, TableOptions
from pyg_dynbatch.datasets import NCI, FeaturizeOptions, MoleculeFile, MoleculeNet, PackedMolecules
from pyg_dynbatch.loader import MoleculeLoader
from pyg_dynbatch.molecules.datasets import MEMBERS, SHA256
from pyg_dynbatch.molecules.features.rdkit_access import rdkit_data_folder

QUIET = FeaturizeOptions(progress=False)


@pytest.mark.long
def test_nci_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", None)
    dataset = NCI(tmp_path, options=QUIET)
    assert len(dataset) + len(dataset.errors) == 4999
    assert len(dataset) >= 4985  # how many RDKit accepts depends on its version
    assert dataset.task_names == ("TPSA",)
    assert dataset.task_type == "regression"
    assert np.isfinite(dataset.targets).all()
    assert dataset[0].smiles == "CC1=CC(=O)C=CC1=O"
    assert dataset.targets[0, 0] == np.float64(34.14)
    again = NCI(tmp_path, options=QUIET)
    assert again.folder == dataset.folder
    assert torch.equal(again[17].x, dataset[17].x)
    (batch, *_) = MoleculeLoader(again, again.pair_table, batch_size=64)
    assert batch.pairs.num_molecules == 64
    sizes = sum(path.stat().st_size for path in dataset.folder.iterdir())
    assert sizes / len(dataset) < 600


def test_nci_of_an_rdkit_without_data(monkeypatch, tmp_path):
    monkeypatch.setattr("pyg_dynbatch.molecules.datasets.rdkit_data_folder", lambda: tmp_path)
    words = r"NCI: this RDKit lacks the file[\s\S]*first_5k\.tpsa\.csv"
    with pytest.raises(FileNotFoundError, match=words):
        NCI()
    assert (rdkit_data_folder() / "NCI" / "first_5k.tpsa.csv").is_file()


REAL_SETS = [
    ("FreeSolv", "freesolv", 642, 0, 1),
    pytest.param("ESOL", "esol", 1128, 0, 1, marks=pytest.mark.long),
    pytest.param("Lipophilicity", "lipophilicity", 4200, 0, 1, marks=pytest.mark.long),
    pytest.param("BBBP", "bbbp", 2039, 11, 1, marks=pytest.mark.long),
    pytest.param("Tox21", "tox21", 7823, 8, 12, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "file", "good", "bad", "tasks"), REAL_SETS)
def test_real_sets(shared_data, name, file, good, bad, tasks):
    raw = shared_data(f"molecules/{file}.csv").parent
    dataset = MoleculeNet(None, name, raw_dir=raw, options=QUIET)
    assert (len(dataset), len(dataset.errors)) == (good, bad)
    assert dataset.targets.shape == (good, tasks)
    assert dataset.task_type == ("regression" if good in (1128, 642, 4200) else "binary")
    known = dataset.targets[~np.isnan(dataset.targets)]
    figures = {"ESOL": -3.0501, "FreeSolv": -3.8030, "Lipophilicity": 2.1863}
    if name in figures:
        assert known.mean() == pytest.approx(figures[name], abs=1e-3)
    else:
        assert set(known.tolist()) == {0.0, 1.0}
    if name == "BBBP":
        assert (dataset.num_atoms.min(), dataset.num_atoms.max()) == (2, 132)
    if name == "Tox21":
        assert all("Al" in error.smiles and error.reason for error in dataset.errors)
        blank = FeaturizeOptions(progress=False, bad="blank")
        kept = MoleculeNet(None, name, raw_dir=raw, options=blank)
        assert len(kept) == 7831
        assert (kept.num_atoms == 0).sum() == 8


def write(folder, text, name="freesolv.csv"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def raw(samples):
    return (samples / "molecules" / "freesolv.csv").read_text()


def net(root=None, name="FreeSolv", **options):
    return MoleculeNet(root, name, options=QUIET, **({"verify": False} | options))


PLACES = [
    ("FreeSolv", "freesolv.csv"),
    ("freesolv", "SAMPL.csv"),
    ("SAMPL", "SAMPL.csv.gz"),
    ("FreeSolv", "freesolv/raw/SAMPL.csv"),
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_where_files_are_found(tmp_path, raw, name, place):
    content = gzip.compress(raw.encode()) if place.endswith("gz") else raw
    write((tmp_path / place).parent, content, place.rpartition("/")[2])
    dataset = net(name=name, raw_dir=tmp_path)
    assert dataset.name == "FreeSolv"
    assert dataset.task_names == ("expt",)
    assert dataset.targets.ravel().tolist() == pytest.approx([-5.0, 2.0, -0.9])
    assert dataset.num_atoms.tolist() == [3, 1, 6]


def test_the_root_has_the_raw_file_and_the_packed_molecules(tmp_path, raw):
    write(tmp_path / "raw", raw)
    first = net(tmp_path)
    assert first.folder.parent == tmp_path / "processed"
    write(tmp_path / "raw", raw.replace("-5.0", "-6.0"))
    assert net(tmp_path).folder != first.folder


def test_a_file_that_was_changed(tmp_path, raw):
    write(tmp_path, raw)
    words = rf"not the published file of FreeSolv[\s\S]*{SHA256['freesolv']}[\s\S]*verify=False if"
    with pytest.raises(ValueError, match=words):
        net(raw_dir=tmp_path, verify=True)


@pytest.mark.long
def test_line_ends_do_not_matter(shared_data, tmp_path):
    content = shared_data("molecules/freesolv.csv").read_bytes().replace(b"\r\n", b"\n")
    for name, text in [("plain", content), ("windows", content.replace(b"\n", b"\r\n"))]:
        write(tmp_path / name, text)
        assert len(net(raw_dir=tmp_path / name, verify=True)) == 642


def test_a_missing_raw_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="the raw file of HIV is missing") as caught:
        net(name="HIV", raw_dir=tmp_path)
    assert "HIV.csv or HIV.csv.gz or hiv.csv" in str(caught.value)
    assert "pass raw_dir=that folder" in str(caught.value)
    with pytest.raises(ValueError, match="MoleculeNet: no folder is given"):
        net()
    with pytest.raises(ValueError, match="MoleculeNet: the name is unknown") as caught:
        net(name="ESOLA")
    assert "ESOL, FreeSolv, Lipophilicity" in str(caught.value)


def test_without_network(tmp_path, monkeypatch):
    asked = []

    def refuse(url, **_):
        asked.append(url)
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ConnectionError, match="MoleculeNet MUV: the download failed") as caught:
        net(tmp_path, "MUV")
    assert asked == ["https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/muv.csv.gz"]
    assert "put muv.csv.gz (or muv.csv) into a folder and pass raw_dir=" in str(caught.value)


def test_qm8_has_some_columns_twice(tmp_path):
    names = MEMBERS["qm8"].tasks
    header = ["smiles", *names[:8], *names[4:8], *names[8:]]
    row = ["CO", *map(str, range(16))]
    write(tmp_path, ",".join(header) + "\n" + ",".join(row) + "\n", "qm8.csv")
    with pytest.warns(UserWarning, match="several columns are named 'E1-PBE0'"):
        dataset = net(name="QM8", raw_dir=tmp_path)
    assert dataset.targets[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize("key", sorted(MEMBERS))
def test_the_columns_of_every_member(tmp_path, key):
    member = MEMBERS[key]
    names = member.tasks
    if isinstance(names, int):
        names = tuple(f"t{i}" for i in range(names))
    header = ["mol_id", *names, member.smiles_column]
    row = ["M1", *("1" for _ in names), "CO"]
    write(tmp_path, ",".join(header) + "\n" + ",".join(row) + "\n", f"{key}.csv")
    dataset = net(name=member.title, raw_dir=tmp_path)
    assert dataset.task_names == names
    assert dataset.targets.tolist() == [[1.0] * len(names)]
    write(tmp_path, ",".join(header[:-2] + header[-1:]) + "\n", f"{key}.csv")
    with pytest.raises(ValueError, match=f"are not those of {member.title}|not found") as caught:
        net(name=member.title, raw_dir=tmp_path)
    assert "column" in str(caught.value)


@pytest.fixture
def mixed(samples):
    return samples / "molecules" / "mixed.csv"


def test_a_file_of_your_own(tmp_path, mixed):
    skip = FeaturizeOptions(progress=False, bad="skip")
    dataset = MoleculeFile(mixed, tmp_path, target_columns=["melts", "toxic"], options=skip)
    assert dataset.rows.tolist() == [0, 1, 2, 4, 5, 6, 8, 10, 11]
    assert [error.row for error in dataset.errors] == [3, 7, 9]
    assert dataset.errors[0].atom == 1
    assert dataset.errors[0].where.endswith("mixed.csv:5")
    assert dataset.num_atoms.tolist() == [3, 6, 2, 1, 2, 3, 6, 7, 3]
    assert np.isnan(dataset.targets).sum() == 3
    assert dataset[2].y.tolist()[0][0] == 801
    assert dataset.smiles(8) == "OCC"
    opened = PackedMolecules(dataset.folder, MoleculeFeaturizer())
    assert opened.task_names == ("melts", "toxic")
    with pytest.raises(ValueError, match="a different featurizer made them"):
        PackedMolecules(dataset.folder, MoleculeFeaturizer(fragments="largest"))
    assert MoleculeFile(mixed, tmp_path, options=skip).folder != dataset.folder


def test_text_after_a_blank_is_not_part_of_a_smiles(tmp_path):
    (tmp_path / "a.csv").write_text("smiles,y\nCC (=O)O,1\nCC |$a;b$|,2\n", encoding="utf-8")
    (tmp_path / "a.smi").write_text("CC (=O)O\nCC |$a;b$| ethane\n", encoding="utf-8")
    skip = FeaturizeOptions("skip", progress=False)
    table = MoleculeFile(tmp_path / "a.csv", target_columns=["y"], options=skip)
    assert [(bad.where, bad.smiles) for bad in table.errors] == [
        (f"{tmp_path / 'a.csv'}:2", "CC (=O)O")
    ]
    assert "the blank at character 3 is followed by '(=O)O'" in table.errors[0].reason
    assert table[0].smiles == "CC |$a;b$|" and table[0].num_nodes == 2
    named = MoleculeFile(tmp_path / "a.smi", options=skip)
    assert [one.smiles for one in named] == ["CC", "CC |$a;b$|"]
    with pytest.raises(MoleculeError, match="the blank at character 3"):
        MoleculeFeaturizer()("CC (=O)O")


def test_a_file_without_targets(samples):
    dataset = MoleculeFile(samples / "molecules" / "mixed.smi")
    assert dataset.task_names == ()
    assert dataset.targets.shape == (3, 0)
    assert "y" not in dataset[0]
    (batch,) = MoleculeLoader(dataset, dataset.pair_table, batch_size=3)
    assert batch.num_nodes == 3 + 6 + 2


def test_texts_that_mean_a_missing_target(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("smiles,y\nCO,?\nC,-999\nCC,-9\n")
    given = {"target_columns": ["y"], "options": FeaturizeOptions(bad="raise", progress=False)}
    with pytest.raises(ValueError, match=r"not a number[\s\S]*missing=\('\?',\)"):
        MoleculeFile(path, tmp_path, **given)
    one = MoleculeFile(path, tmp_path, **given, table=TableOptions(missing=("?",)))
    both = MoleculeFile(path, tmp_path, **given, table=TableOptions(missing=("?", "-999")))
    assert one.targets.ravel().tolist() == pytest.approx([float("nan"), -999, -9], nan_ok=True)
    assert np.isnan(both.targets).ravel().tolist() == [True, True, False]
    assert both.folder != one.folder
