"""NCI, MoleculeNet and a user's own file: what is in them, how they are processed, and faults."""

import gzip
import hashlib
import os
import pickle
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.datasets import MoleculeNet as PyGMoleculeNet
from tqdm import tqdm

from pyg_dynbatch.columns import Columns
from pyg_dynbatch.data import MoleculeFeaturizer, TableOptions
from pyg_dynbatch.datasets import NCI, MoleculeDataset, MoleculeFile, MoleculeNet
from pyg_dynbatch.loader import MoleculeLoader
from pyg_dynbatch.molecules import datasets, processes
from pyg_dynbatch.molecules.datasets import SHA256, table_of
from tests.conftest import Server
from tests.molecules.batches import assert_same
from tests.molecules.molecules import DESCRIBED, SMILES, molecule_csv


def assert_same_sets(found: MoleculeDataset, expected: MoleculeDataset) -> None:
    assert len(found) == len(expected)
    for pair in zip(found, expected, strict=True):
        assert_same(*pair)
    assert found.errors == expected.errors


def processed_files(root: Path) -> list[str]:
    folder = root / "processed"
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("pre_"))


# Your own file.


@pytest.fixture
def mixed(samples: Path) -> Path:
    return samples / "molecules" / "mixed.csv"


def test_a_file_of_your_own(mixed: Path, tmp_path: Path) -> None:
    dataset = MoleculeFile(mixed, tmp_path, target_columns=["melts", "toxic"], bad="skip")
    assert [data.row for data in dataset] == [0, 1, 2, 4, 5, 6, 8, 10, 11]
    assert [data.num_nodes for data in dataset] == [3, 6, 2, 1, 2, 3, 6, 7, 3]
    assert dataset.sizes == [6, 21, 3, 1, 3, 6, 21, 28, 6]
    assert [error.row for error in dataset.errors] == [3, 7, 9]
    assert (dataset.errors[0].atom, dataset.errors[0].where) == (1, f"{mixed}:5")
    assert dataset.target_names == ("melts", "toxic")
    assert np.isnan(dataset.targets).sum() == 3
    assert dataset.targets[2].tolist() == pytest.approx([801, np.nan], nan_ok=True)
    assert dataset.smiles[8] == dataset[8].smiles == "OCC"
    with pytest.raises(ValueError, match="row 3 cannot be used") as caught:
        MoleculeFile(mixed)
    assert f"{mixed}:5" in str(caught.value)


def test_parts_know_their_own(mixed: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_columns": ["melts"], "bad": "skip", "featurizer": DESCRIBED}
    dataset = MoleculeFile(mixed, tmp_path, **options)
    chosen = [7, 0, 4]
    for part in (dataset[chosen], dataset[torch.tensor(chosen)], dataset.shuffle()[:3]):
        rows = [data.row for data in part]
        places = [[data.row for data in dataset].index(row) for row in rows]
        assert part.smiles == [dataset.smiles[place] for place in places]
        assert part.sizes == [dataset.sizes[place] for place in places]
        np.testing.assert_array_equal(part.targets, dataset.targets[places])
        np.testing.assert_array_equal(part.descriptors, dataset.descriptors[places])
        assert_same(part[1], dataset[places[1]])
        columns = part.__getitems__([2, 0])
        assert isinstance(columns, Columns)
        assert_same(columns[0], part[2])
    assert [data.row for data in dataset[[7, 0]]] == [10, 0]
    assert dataset[:0].sizes == [] and dataset[:0].targets.shape == (0, 1)


def test_what_is_read_back_is_what_was_built(mixed: Path, tmp_path: Path, monkeypatch) -> None:
    options: dict[str, Any] = {"target_columns": ["melts"], "bad": "skip", "featurizer": DESCRIBED}
    in_memory = MoleculeFile(mixed, **options)
    built = MoleculeFile(mixed, tmp_path, **options)
    monkeypatch.setattr(datasets, "featurized", None)
    loaded = MoleculeFile(mixed, tmp_path, **options)
    assert_same_sets(built, in_memory)
    assert_same_sets(loaded, in_memory)
    assert len(processed_files(tmp_path)) == 1


def test_any_change_makes_another_file(mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(mixed.read_bytes())
    changes: list[dict[str, Any]] = [
        {},
        {"target_columns": ["melts"]},
        {"featurizer": MoleculeFeaturizer(fragments="largest")},
        {"table": TableOptions(missing=("0",))},
    ]
    for number, options in enumerate(changes, start=1):
        MoleculeFile(path, tmp_path, bad="skip", **options)
        assert len(processed_files(tmp_path)) == number
    path.write_text("smiles\nCO\n")
    assert len(MoleculeFile(path, tmp_path, bad="skip")) == 1


def test_files_without_targets_molecules_or_any_good_one(tmp_path: Path, samples: Path) -> None:
    dataset = MoleculeFile(samples / "molecules" / "mixed.smi")
    assert dataset.targets.shape == (3, 0) and "y" not in dataset[0]
    (batch,) = MoleculeLoader(dataset, dataset.pair_table, batch_size=3)
    assert batch.num_nodes == 3 + 6 + 2
    path = tmp_path / "bad.csv"
    path.write_text("smiles,y\nC(,1\n")
    for root in (None, tmp_path):
        none = MoleculeFile(path, root, target_columns=["y"], featurizer=DESCRIBED, bad="skip")
        assert (len(none), len(none.errors)) == (0, 1)
        assert none.targets.shape == (0, 1) and none.descriptors.shape == (0, 5)


def double(data: Any) -> Any:
    data.y = 2 * data.y
    return data


def test_transforms_are_those_of_pyg(tmp_path: Path) -> None:
    path = molecule_csv(tmp_path)
    options: dict[str, Any] = {"target_columns": ["first"]}
    plain = MoleculeFile(path, tmp_path, **options)
    each = MoleculeFile(path, tmp_path, transform=double, **options)
    once = MoleculeFile(path, pre_transform=double, **options)
    with pytest.warns(UserWarning, match="pre_transform"):
        MoleculeFile(path, tmp_path, pre_transform=double, **options)
    again = MoleculeFile(path, tmp_path, pre_transform=double, force_reload=True, **options)
    for changed in (each[3], each.__getitems__([3])[0], once[3], again[3]):
        assert torch.equal(changed.y, 2 * plain[3].y)
    # Scales are fitted on what a model is trained on.
    for changed in (each, each[3:], once):
        np.testing.assert_array_equal(
            changed.targets, [example.y[0].numpy() for example in changed]
        )
    assert once.errors == plain.errors
    with pytest.raises(ValueError, match="pre_transform"):
        MoleculeFile(path, pre_transform=lambda data: data.row % 2 or data, **options)


def test_a_worker_gets_the_path(tmp_path: Path) -> None:
    path = molecule_csv(tmp_path, smiles=SMILES * 20)
    dataset = MoleculeFile(path, tmp_path, target_columns=["first"])[5:]
    sent = pickle.dumps(dataset)
    assert len(sent) < 20_000
    assert_same_sets(pickle.loads(sent), dataset)
    assert len(pickle.dumps(MoleculeFile(path))) > 200_000


# Processing part by part, in processes.


class Failing:
    """Featurizes some molecules, and then fails."""

    def __init__(self, remaining: int, error: BaseException) -> None:
        self.remaining = remaining
        self.error = error
        self.work = datasets.featurized

    def __call__(self, featurizer: MoleculeFeaturizer, records: Any) -> Any:
        if self.remaining < len(records):
            raise self.error
        self.remaining -= len(records)
        return self.work(featurizer, records)


def test_a_run_that_was_killed_goes_on_after_its_last_part(tmp_path: Path, monkeypatch) -> None:
    path = molecule_csv(tmp_path)
    expected = MoleculeFile(path, target_columns=["first"])
    assert len(expected) == len(SMILES) == 32
    monkeypatch.setattr(datasets, "RECORDS_PER_PART", 4)
    monkeypatch.setattr(datasets, "featurized", Failing(10, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        MoleculeFile(path, tmp_path, target_columns=["first"])
    parts = [name.rpartition(".")[2] for name in processed_files(tmp_path)]
    assert parts == ["part0of4", "part1of4"]
    monkeypatch.undo()
    monkeypatch.setattr(datasets, "RECORDS_PER_PART", 4)
    remaining = Failing(24, AssertionError("two parts are there already"))
    monkeypatch.setattr(datasets, "featurized", remaining)
    found = MoleculeFile(path, tmp_path, target_columns=["first"])
    assert remaining.remaining == 0
    assert_same_sets(found, expected)
    assert len(processed_files(tmp_path)) == 1


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
def test_processes_do_what_this_one_does(
    count: int, tmp_path: Path, mixed: Path, monkeypatch
) -> None:
    options: dict[str, Any] = {"target_columns": ["melts"], "bad": "skip", "featurizer": DESCRIBED}
    expected = MoleculeFile(mixed, processes=0, **options)
    started = []
    monkeypatch.setattr(processes, "ProcessPoolExecutor", recorded_pool(started))
    monkeypatch.setattr(datasets, "RECORDS_PER_PART", 5)
    monkeypatch.setattr(datasets, "_CHUNK", 2)
    found = MoleculeFile(mixed, tmp_path, processes=count, **options)
    assert started == [count]
    assert_same_sets(found, expected)


def recorded_pool(started: list[int]) -> Any:
    """Return a pool of processes that notes how many it starts."""

    def pool(count: int, context: Any, **options: Any) -> ProcessPoolExecutor:
        assert context.get_start_method() == "spawn"
        started.append(count)
        return ProcessPoolExecutor(count, context, **options)

    return pool


def test_little_work_starts_no_process(mixed: Path, monkeypatch) -> None:
    monkeypatch.setattr(processes, "ProcessPoolExecutor", None)
    MoleculeFile(mixed, bad="skip")


SCRIPTS = {
    "import sys\n": True,
    "if __name__ == '__main__':\n    main()\n": False,
    None: False,  # typed at a prompt
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_would_run_again_stays_alone(script, tmp_path: Path, monkeypatch) -> None:
    main = ModuleType("__main__")
    if script is not None:
        (tmp_path / "main.py").write_text(script, "utf-8")
        main.__file__ = str(tmp_path / "main.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    if not SCRIPTS[script]:
        assert processes._usable_processes() == 3
        return
    with pytest.warns(UserWarning, match="in one process"):
        assert processes._usable_processes() == 0


def test_the_bar_counts_what_is_done(tmp_path: Path, monkeypatch) -> None:
    bars = []

    def bar(**options: Any) -> tqdm:
        bars.append(tqdm(**{**options, "disable": False}))
        return bars[-1]

    monkeypatch.setattr(datasets, "tqdm", bar)
    monkeypatch.setattr(datasets, "RECORDS_PER_PART", 20)
    path = molecule_csv(tmp_path)
    # The first run ends after one part, and the second does the other one.
    for done, run in ((20, Failing(20, KeyboardInterrupt())), (32, Failing(12, AssertionError()))):
        monkeypatch.setattr(datasets, "featurized", run)
        with suppress(KeyboardInterrupt):
            MoleculeFile(path, tmp_path, target_columns=["first"])
        assert (bars[-1].n, bars[-1].total) == (done, 32)


def test_an_error_of_a_feature_says_where(tmp_path: Path, monkeypatch) -> None:
    path = molecule_csv(tmp_path)
    monkeypatch.setattr(MoleculeFeaturizer, "arrays", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        MoleculeFile(path, bad="skip")
    assert caught.value.__notes__ == [f"row 0 ({path}:2): 'CO'"]


LABELS = [("binary", "2"), ("binary", "0.5"), ("binary", "-1"), ("multiclass", "1.5")]


@pytest.mark.parametrize(("kind", "label"), LABELS)
def test_a_label_is_not_of_its_kind(tmp_path: Path, kind: Any, label: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(f"smiles,active\nCO,0\nCCO,\nCC,{label}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"out of range(?s:.*)got: +{label}(?s:.*)CC, target act"):
        MoleculeFile(path, target_columns="active", kind_of_targets=kind)


def test_wrong_options_and_files_are_refused(tmp_path: Path) -> None:
    path = molecule_csv(tmp_path)
    with pytest.raises(ValueError, match="bad"):
        MoleculeFile(path, bad="ignore")
    with pytest.raises(ValueError, match="'third'"):
        MoleculeFile(path, target_columns=["third"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        MoleculeFile(tmp_path / "nowhere.csv")


# NCI.


@pytest.mark.long
def test_nci_needs_no_network(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", None)
    dataset = NCI(tmp_path)
    assert len(dataset) + len(dataset.errors) == 4999
    assert len(dataset) >= 4985  # how many RDKit accepts depends on its version
    assert dataset.target_names == ("TPSA",)
    assert (dataset[0].smiles, dataset.targets[0, 0]) == ("CC1=CC(=O)C=CC1=O", 34.14)
    assert np.isfinite(dataset.targets).all()


def test_nci_of_an_rdkit_without_data(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "rdkit_data_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="lacks the file"):
        NCI()


# MoleculeNet.


REAL_SETS = [
    ("FreeSolv", "freesolv", 642, 0, -3.8030),
    pytest.param("ESOL", "esol", 1128, 0, -3.0501, marks=pytest.mark.long),
    pytest.param("Lipo", "lipophilicity", 4200, 0, 2.1863, marks=pytest.mark.long),
    pytest.param("BBBP", "bbbp", 2039, 11, None, marks=pytest.mark.long),
    pytest.param("Tox21", "tox21", 7823, 8, None, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "file", "good", "bad", "mean"), REAL_SETS)
def test_real_sets(shared_data, name, file, good, bad, mean) -> None:
    raw = shared_data(f"molecules/{file}.csv").parent
    dataset = MoleculeNet(None, name, raw_dir=raw)
    assert (len(dataset), len(dataset.errors)) == (good, bad)
    assert dataset.targets.shape == (good, 12 if name == "Tox21" else 1)
    known = dataset.targets[~np.isnan(dataset.targets)]
    if mean is None:
        assert dataset.kind_of_targets == "binary" and set(known.tolist()) == {0.0, 1.0}
    else:
        assert dataset.kind_of_targets == "regression"
        assert known.mean() == pytest.approx(mean, abs=1e-3)


def write(folder: Path, content: str | bytes, name: str = "freesolv.csv") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def raw(samples: Path) -> str:
    return (samples / "molecules" / "freesolv.csv").read_text()


def net(root: Path | None = None, name: str = "FreeSolv", **options: Any) -> MoleculeNet:
    return MoleculeNet(root, name, **{"verify": False, **options})


PLACES = [("FreeSolv", "freesolv.csv"), ("freesolv", "SAMPL.csv"), ("FREESOLV", "SAMPL.csv.gz")]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_where_files_are_found(tmp_path: Path, raw: str, name: str, place: str) -> None:
    content = gzip.compress(raw.encode()) if place.endswith("gz") else raw
    write((tmp_path / place).parent, content, place.rpartition("/")[2])
    dataset = net(name=name, raw_dir=tmp_path)
    assert dataset.target_names == ("expt",)
    assert dataset.targets.ravel().tolist() == [-5.0, 2.0, -0.9]


def test_a_file_that_was_changed(tmp_path: Path, raw: str) -> None:
    write(tmp_path / "raw", raw)
    first = net(tmp_path)
    write(tmp_path / "raw", raw.replace("-5.0", "-6.0"))
    assert net(tmp_path).targets[0, 0] == -6.0 != first.targets[0, 0]
    with pytest.raises(ValueError, match="not the published file") as caught:
        net(tmp_path, verify=True)
    assert SHA256["freesolv"] in str(caught.value) and "verify=False" in str(caught.value)


@pytest.mark.long
def test_line_ends_do_not_matter(shared_data, tmp_path: Path) -> None:
    content = shared_data("molecules/freesolv.csv").read_bytes().replace(b"\r\n", b"\n")
    for name, text in [("plain", content), ("windows", content.replace(b"\n", b"\r\n"))]:
        write(tmp_path / name, text)
        assert len(net(raw_dir=tmp_path / name, verify=True)) == 642


def test_missing_files_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="HIV is missing") as caught:
        net(name="HIV", raw_dir=tmp_path)
    assert "HIV.csv or hiv.csv" in str(caught.value)
    with pytest.raises(ValueError, match="no folder"):
        net()
    with pytest.raises(ValueError, match="unknown name"):
        net(name="ESOLA")


@pytest.fixture
def served(server: Server, monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(PyGMoleculeNet, "url", server.url("{}"))
    return server


def test_a_download_is_checked_against_the_first(served: Server, tmp_path: Path, raw: str) -> None:
    served.files["SAMPL.csv"] = raw.encode()
    assert len(net(tmp_path / "one")) == 3
    noted = (tmp_path / "one/raw/SAMPL.csv.sha256").read_text().strip()
    assert noted == hashlib.sha256(raw.encode()).hexdigest()
    (tmp_path / "one/raw/SAMPL.csv").unlink()
    served.files["SAMPL.csv"] = raw.replace("-5.0", "-6.0").encode()
    with pytest.raises(ValueError, match="wrong checksum"):
        net(tmp_path / "one")
    with pytest.raises(ValueError, match="not the published file"):
        net(tmp_path / "two", verify=True)


def test_a_download_that_fails(served: Server, tmp_path: Path, raw: str) -> None:
    with pytest.raises(ConnectionError, match="MUV: the download failed") as caught:
        net(tmp_path, "MUV")
    assert "muv.csv.gz" in str(caught.value) and "raw_dir=" in str(caught.value)
    served.files["SAMPL.csv"] = raw.encode()
    served.sent = 20
    with pytest.raises(ConnectionError, match="ended after 20"):
        net(tmp_path)
    assert not list((tmp_path / "raw").iterdir())


@pytest.mark.parametrize("key", sorted(PyGMoleculeNet.names))
def test_the_columns_are_those_of_pyg(tmp_path: Path, key: str) -> None:
    *_, smiles, chosen = PyGMoleculeNet.names[key]
    header = [f"c{number}" for number in range(700)]
    header[smiles] = table_of(key).smiles_column or ""
    # Labels of classes; the names of the columns are compared with those of PyG.
    labels = [number % 2 for number in range(700)]
    row = ["CO" if number == smiles % 700 else str(labels[number]) for number in range(700)]
    write(tmp_path, ",".join(header) + "\n" + ",".join(row) + "\n", f"{key}.csv")
    dataset = net(name=key, raw_dir=tmp_path)
    chosen = chosen if isinstance(chosen, slice) else slice(chosen % 700, chosen % 700 + 1)
    assert list(dataset.target_names) == header[chosen]
    assert dataset.targets.tolist() == [labels[chosen]]
    write(tmp_path, "smiles\n", f"{key}.csv")
    with pytest.raises(ValueError, match="column"):
        net(name=key, raw_dir=tmp_path)
