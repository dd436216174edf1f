"""Packed molecules are read one by one, in batches, and by loader workers, without being loaded."""

import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torch_geometric.loader import DataLoader as PyGDataLoader

from pyg_dynbatch.datasets import FeaturizeOptions, PackedMolecules, build_store, featurize_record
from pyg_dynbatch.loader import MoleculeLoader, node_counts, pair_counts
from pyg_dynbatch.molecules.data import MoleculeColumns
from pyg_dynbatch.molecules.datasets import open_or_build
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.files.store import FORMAT, HEADER, AtomPacking, write_store
from tests.molecules.packed import TASKS, Letters, assert_same, records

OPTIONS = FeaturizeOptions(block_size=20, progress=False)


@pytest.fixture
def dataset(tmp_path):
    return build_store(tmp_path, records(50, [5]), Letters(), task_names=TASKS, options=OPTIONS)


def wanted():
    return [featurize_record(Letters(), record) for record in records(50) if record.row != 5]


def test_items(dataset):
    assert len(dataset) == 49
    for i, data in enumerate(wanted()):
        assert_same(dataset[i], data)
    assert_same(dataset[-1], wanted()[-1])
    for i in (49, -50):
        with pytest.raises(IndexError, match="0 to 48"):
            dataset[i]


@pytest.mark.parametrize(
    "index",
    [slice(3, 9, 2), [0, 48, -1], np.array([4, 2]), torch.tensor([7, 1]), [], range(3), slice(0)],
)
def test_several_items_are_a_subset(dataset, index):
    part = dataset[index]
    chosen = np.arange(49)[index.numpy() if isinstance(index, torch.Tensor) else index]
    assert isinstance(part, Subset) and part.indices == chosen.tolist()
    assert node_counts(part) == dataset.num_atoms[chosen].tolist()
    for data, number in zip(part, chosen, strict=True):
        assert_same(data, dataset[number])


def test_masks_and_single_tensors(dataset):
    mask = torch.arange(49) % 7 == 0
    assert dataset[mask].indices == mask.nonzero().flatten().tolist()
    assert_same(dataset[torch.tensor(3)], dataset[3])
    assert_same(dataset[np.int64(-1)], dataset[48])
    with pytest.raises(IndexError):
        dataset[[49]]


def test_facts(dataset):
    assert dataset.task_names == TASKS
    assert dataset.atom_names == Letters.atom_names
    assert dataset.featurizer_spec == {"option": "plain"}
    assert dataset.pair_table == Letters().pair_table
    assert dataset.num_atoms.tolist() == [data.num_nodes for data in wanted()]
    assert dataset.targets.dtype == np.float64
    assert np.array_equal(
        dataset.targets, torch.cat([data.y for data in wanted()]).numpy(), equal_nan=True
    )
    assert dataset.texts() == [data.smiles for data in wanted()]
    assert [dataset.smiles(i) for i in range(49)] == dataset.texts()
    assert repr(dataset) == "PackedMolecules(49 molecules, 2 tasks)"


def test_batches_come_as_columns(dataset):
    chosen = [45, 3, 21, 3, 0]
    columns = dataset.__getitems__(chosen)
    assert isinstance(columns, MoleculeColumns)
    for one, i in zip(columns, chosen, strict=True):
        assert_same(one, dataset[i])
    assert len(dataset.__getitems__([])) == 0


def test_descriptors(tmp_path):
    letters = Letters(descriptors=True)
    given = [featurize_record(letters, record) for record in records(50) if record.row != 5]
    made = build_store(tmp_path, records(50, [5]), letters, task_names=TASKS, options=OPTIONS)
    for found in (made, PackedMolecules(made), PackedMolecules(tmp_path, letters)):
        assert found.descriptor_names == ("length", "unknown")
        expected = torch.cat([data.descriptor for data in given])
        assert np.array_equal(found.descriptors, expected.numpy(), equal_nan=True)
        assert found.descriptors.dtype == np.float32
        for number in (0, 21, 48):
            assert_same(found[number], given[number])
        chosen = [45, 3, 21]
        for one, i in zip(found.__getitems__(chosen), chosen, strict=True):
            assert_same(one, given[i])
    with pytest.raises(ValueError, match="a different featurizer made them"):
        PackedMolecules(tmp_path, Letters())


def test_counts_without_reading_molecules(dataset, monkeypatch):
    monkeypatch.setattr(AtomPacking, "unpack", None)
    sizes = [data.num_nodes for data in wanted()]
    assert node_counts(dataset) == sizes
    assert pair_counts(dataset) == [n * (n + 1) // 2 for n in sizes]
    assert pair_counts(Subset(dataset, [7, 2])) == [n * (n + 1) // 2 for n in (sizes[7], sizes[2])]


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_loaders(dataset, method):
    workers = 0 if method is None else 1
    plain = list(MoleculeLoader(wanted(), dataset.pair_table, batch_size=20))
    options = {"num_workers": workers, "multiprocessing_context": method}
    loader = MoleculeLoader(dataset, dataset.pair_table, batch_size=20, **options)
    for batch, other in zip(loader, plain, strict=True):
        assert batch.pairs == other.pairs
        assert torch.equal(batch.x, other.x)
        assert batch.smiles == other.smiles
        assert torch.equal(batch.y_mask, other.y_mask)
    (batch,) = PyGDataLoader(dataset, batch_size=49)  # the stock loader of PyG
    assert batch.num_graphs == 49 and batch.row.tolist() == dataset.rows.tolist()


def test_transform(dataset):
    def mark(data):
        data.mark = torch.tensor([data.row])
        return data

    marked = PackedMolecules(dataset.folder, transform=mark)
    assert marked[3].mark.tolist() == [3]
    (batch,) = MoleculeLoader(marked, marked.pair_table, batch_size=49)
    assert batch.mark.tolist() == batch.row.tolist()


def test_only_names_travel_to_workers(dataset):
    dataset.check()
    assert len(pickle.dumps(PackedMolecules(dataset.folder))) < 5000


def test_another_featurizer_is_refused(dataset):
    assert len(PackedMolecules(dataset.folder, Letters())) == 49
    words = rf"{Letters('changed').digest}[\s\S]*{Letters().digest}: .*plain[\s\S]*{dataset.folder}"
    with pytest.raises(ValueError, match=rf"a different featurizer made them[\s\S]*{words}"):
        PackedMolecules(dataset.folder, Letters("changed"))


def test_no_store_and_missing_columns(dataset, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"not a finished store[\\s\\S]*{HEADER}"):
        PackedMolecules(tmp_path / "none")
    (path,) = dataset.folder.glob("codes-*.npy")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"a column is missing[\\s\\S]*{path.name}"):
        PackedMolecules(dataset.folder)


CORRUPT_HEADERS = [
    (lambda text: text[:-5], "JSONDecodeError"),
    (lambda text: "[]", "TypeError"),
    (lambda text: "{}", "KeyError"),
    (lambda text: text.replace("first", "worst"), "other content than was written"),
    (None, "format other"),
]


@pytest.mark.parametrize(("change", "message"), CORRUPT_HEADERS)
def test_a_corrupt_header(dataset, change, message):
    path = dataset.folder / HEADER
    if change is None:
        write_store(dataset.folder, [], [], {"format": "other"})
    else:
        path.write_text(change(path.read_text()))
    words = rf"store.json cannot be used[\s\S]*{message}[\s\S]*{path}"
    with pytest.raises(ValueError, match=words):
        PackedMolecules(dataset.folder)


def opened(root, featurizer=None, key="a", **changes):
    def read():
        calls.append(key)
        yield from records(50, [5])

    calls = []
    options = FeaturizeOptions(**({"block_size": 20, "progress": False} | changes))
    given = {"task_names": TASKS, "options": options}
    found = open_or_build(root, "Mine", {"file": key}, read(), featurizer or Letters(), **given)
    return found, len(calls)


def test_made_once_and_every_change_makes_another(tmp_path):
    first, made = opened(tmp_path)
    again, remade = opened(tmp_path)
    assert (made, remade) == (1, 0)
    folder = first.folder
    assert again.folder == folder
    assert folder.parent == tmp_path / "processed" and folder.name.startswith("mine.")
    assert opened(tmp_path, key="b")[0].folder != folder
    assert opened(tmp_path, featurizer=Letters("changed"))[0].folder != folder
    blank, made = opened(tmp_path, bad="blank")
    assert (len(blank), made) == (50, 1)
    assert opened(tmp_path, force=True)[1] == 1
    assert opened(tmp_path)[1] == 0
    assert opened(None)[0].folder is None


def test_a_corrupt_store_is_rebuilt(tmp_path):
    folder = opened(tmp_path)[0].folder
    (folder / HEADER).write_text("{")
    again, made = opened(tmp_path)
    assert (len(again), made) == (49, 1)
    next(folder.glob("text-*.npy")).unlink()
    again, made = opened(tmp_path)
    assert (len(again), made) == (49, 1) and again.smiles(0)


def test_a_large_store_is_opened_without_being_read(tmp_path):
    """100 MB: opening it, and reading ten molecules, needs a fraction of that."""
    count, atoms = 160_000, 33
    pairs = atoms * (atoms + 1) // 2
    shape = {
        "bits": np.zeros((count * atoms, 1), np.uint8),
        "counts": np.zeros((count * atoms, 1), np.int8),
        "reals": np.zeros((count * atoms, 1), np.float32),
        "codes": np.zeros(count * pairs, np.uint8),
        "text": np.full(count, ord("C"), np.uint8),
        "y": np.zeros((count, 0), np.float32),
        "row": np.arange(count),
        "atom_start": np.arange(count + 1) * atoms,
        "pair_start": np.arange(count + 1) * pairs,
        "text_start": np.arange(count + 1),
    }
    table = PairTable(torch.zeros(1, 1), ("a",), torch.tensor([0]))
    header = {"format": FORMAT, "featurizer": {}, "featurizer_digest": "", "task_names": []}
    header |= {"atom_names": ["a", "b", "c"], "atom_kinds": ["bit", "count", "real"]}
    header |= {"descriptor_names": [], "pair_table": table.as_dict()}
    header |= {"parts": [{"molecules": count, "errors": []}]}
    write_store(tmp_path, [shape.__getitem__], list(shape), header)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    del shape
    tracemalloc.start()
    try:
        dataset = PackedMolecules(tmp_path)
        data = dataset[count // 2 + 5]
        dataset.__getitems__([0, 40_000, count - 1, 7])
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(dataset) == count
    assert (data.num_nodes, data.row, data.smiles) == (atoms, count // 2 + 5, "C")
    assert size > 100_000_000
    assert used < 10_000_000
