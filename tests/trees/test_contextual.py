"""Contextual vectors: of words within sentences, in a file, in batches, in checkpoints."""

import csv
import multiprocessing
import os
import pickle
import sys
import time
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_dynbatch.data import SentenceEncoder
from pyg_dynbatch.datasets import SICK, SST, ListOps, ListOpsRecipe, TreeDataset, TreeFile
from pyg_dynbatch.lightning import SICKData, TreeRelatedness, VectorOptions, ensemble_of
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.models import TreePredictor, load
from pyg_dynbatch.trees import contextual
from pyg_dynbatch.trees.contextual import ContextualVectors
from pyg_dynbatch.trees.words import DEFAULT_MODEL, Vocabulary, WordVectors, find_model, unescape
from tests.console import run
from tests.training.helpers import listops, task, trainer, tree_files
from tests.trees.helpers import assert_same

LIMIT, WIDTH = 40, 4
DROPPED = "\N{ZERO WIDTH SPACE}"


class Pieces(dict[str, Tensor]):
    """What a tokenizer returns."""

    words: list[list[int | None]]

    def word_ids(self, number: int) -> list[int | None]:
        return self.words[number]


class Tokenizer:
    """Splits words into pieces of two letters, between a first and a last piece."""

    def __call__(self, sentences: list[list[str]], **options: Any) -> Pieces:
        assert options == {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
        ids, words = [], []
        for sentence in sentences:
            kept = [word.replace(DROPPED, "") for word in sentence]
            split = [(i, w[k : k + 2]) for i, w in enumerate(kept) for k in range(0, len(w), 2)]
            ids.append([1, *(number_of(piece) for _, piece in split), 2])
            words.append([None, *(i for i, _ in split), None])
        length = max(map(len, ids))
        pieces = Pieces(input_ids=torch.tensor([row + [0] * (length - len(row)) for row in ids]))
        pieces.words = [row + [None] * (length - len(row)) for row in words]
        return pieces


def number_of(piece: str) -> int:
    return 3 + sum(ord(letter) * 7**place for place, letter in enumerate(piece)) % 90


def states_of(ids: Sequence[int]) -> list[np.ndarray]:
    """Two layers after the embedding: each adds what is known of the sentence and the place."""
    table = np.sin(np.arange(93 * WIDTH, dtype=np.float64)).reshape(93, WIDTH)
    states = [table[list(ids)]]
    for _ in range(2):
        place = np.arange(len(ids))[:, None] / 10
        states.append(np.tanh(states[-1] + states[-1].mean(0) + place))
    return states


class Network:
    """A transformer, as far as its results are read."""

    config = types.SimpleNamespace(max_position_embeddings=LIMIT)
    calls = 0

    def __call__(self, input_ids: Tensor, output_hidden_states: bool) -> Any:
        assert output_hidden_states
        type(self).calls += 1
        states = [torch.zeros(*input_ids.shape, WIDTH) for _ in range(3)]
        for number, ids in enumerate(input_ids.tolist()):
            real = [each for each in ids if each]  # the result does not depend on the padding
            for state, found in zip(states, states_of(real), strict=True):
                state[number, : len(real)] = torch.from_numpy(found).float()
        return types.SimpleNamespace(hidden_states=states)

    def float(self) -> "Network":
        return self

    eval = float


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A model in a folder, that the package transformers can load."""

    def from_pretrained(kind: type) -> Any:
        def load_from(where: str, **options: Any) -> Any:
            if not Path(where, "config.json").is_file():
                raise OSError(f"{where} is not a local folder\nand so on")
            return kind()

        return types.SimpleNamespace(from_pretrained=load_from)

    module = types.ModuleType("transformers")
    module.AutoTokenizer = from_pretrained(Tokenizer)  # type: ignore[attr-defined]
    module.AutoModel = from_pretrained(Network)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setattr(Network, "calls", 0)
    contextual._transformer.cache_clear()
    contextual.weights_digest.cache_clear()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the package transformers unavailable."""

    def remove() -> None:
        contextual._transformer.cache_clear()
        monkeypatch.setitem(sys.modules, "transformers", None)

    return remove


def by_hand(sentence: Sequence[str], layers: Sequence[int]) -> np.ndarray:
    """Encode one sentence alone, in float64, word by word."""
    sentence = [word.replace(DROPPED, "") for word in sentence]
    pieces = [[word[k : k + 2] for k in range(0, len(word), 2)] for word in sentence]
    states = states_of([1, *(number_of(each) for word in pieces for each in word), 2])
    rows, start = [], 1
    for word in pieces:
        part = [states[layer][start : start + len(word)].sum(0) for layer in layers]
        rows.append(np.concatenate(part) / max(len(word), 1))
        start += len(word)
    return np.stack(rows)


@pytest.mark.parametrize("layers", [(0, 1, -1), (2,)])
def test_vectors_are_means_over_the_pieces_of_words(model, monkeypatch, layers):
    monkeypatch.setattr(contextual, "_CHUNK", 4)
    monkeypatch.setattr(contextual, "_BATCH", 2)
    sentences = [["unforgettable", "film"], ["a"], ["a", "dull", DROPPED, "film", "x"]]
    sentences += [["film"], ["film", "film"], [DROPPED], ["even", "the", "oddest"]]
    parts = list(SentenceEncoder(model, layers).encode(sentences))
    assert [len(part) for part in parts] == [9, 6]
    found = torch.cat(parts)
    assert found.dtype == torch.float16 and not found.is_inference()
    wanted = np.concatenate([by_hand(sentence, layers) for sentence in sentences])
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-3, atol=1e-3)
    assert not torch.equal(found[8], found[9])  # the same word in two sentences


def test_treebank_tokens_are_unescaped(model: str) -> None:
    found = next(encode(model).encode([["-LRB-", "1\\/2"]]))
    np.testing.assert_allclose(found, by_hand(["(", "1/2"], (0, 2)), rtol=1e-3, atol=1e-3)


def encode(model: str) -> SentenceEncoder:
    return SentenceEncoder(model, (0, 2))


def sst(samples: Path, root: Path | None, split: str, **options: Any) -> SST:
    return SST(root, split, raw_dir=samples / "sst", verify=False, **options)


def sentence_of(dataset: TreeDataset, number: int) -> list[str]:
    token = dataset[number].token
    return [unescape(dataset.vocabulary[row]) for row in token[token >= 0].tolist()]


def check_x(dataset: TreeDataset) -> None:
    """Compare every way to take examples with the encoded sentences."""
    loaded = [example for batch in DataLoader(dataset, 2) for example in batch.to_data_list()]
    for number, example in enumerate(dataset):
        wanted = torch.zeros(example.num_nodes, 2 * WIDTH)
        rows = by_hand(sentence_of(dataset, number), (0, 2))
        wanted[example.token >= 0] = torch.from_numpy(rows).float()
        torch.testing.assert_close(example.x, wanted, rtol=1e-3, atol=1e-3)
        assert_same(example.validate(feature_width=2 * WIDTH), dataset[[number]][0])
        assert "word" not in example
        assert torch.equal(loaded[number].x, example.x)


@pytest.mark.parametrize("cached", [True, False])
def test_words_of_a_data_set_have_rows(model, samples, tmp_path, cached):
    for split in ("train", "dev", "test"):
        dataset = sst(samples, tmp_path / "sst" if cached else None, split, encoder=encode(model))
        check_x(dataset)
    dataset = sst(samples, tmp_path / "sst", "train", encoder=encode(model))
    last = dataset[1:]
    check_x(last)
    check_x(last.copy())
    assert_same(last[0], dataset[1])
    plain = sst(samples, tmp_path / "sst", "train")
    assert "x" not in plain[0] and plain.vectors is None
    dataset.transform = lambda tree: tree.clone()
    check_x(dataset)


def test_the_sentences_of_a_pair_are_encoded_apart(model, samples, tmp_path):
    raw = samples / "sick"
    lines = [(raw / "train" / f"{name}.toks").read_text("utf-8").splitlines() for name in "ab"]
    for trees in ("dependency", "constituency", "chain"):
        pairs = SICK(tmp_path, trees=trees, raw_dir=raw, encoder=encode(model))
        for pair, first, second in zip(pairs, *lines, strict=True):
            if trees == "dependency":
                second = second.removesuffix(" .")  # left out by the parser
            both = [by_hand(sentence.split(" "), (0, 2)) for sentence in (first, second)]
            found = pair.x[pair.token >= 0].numpy()
            np.testing.assert_allclose(found, np.concatenate(both), rtol=1e-3, atol=1e-3)


def test_a_file_is_written_once_and_mapped(model, samples, tmp_path, no_package):
    first = sst(samples, tmp_path, "train", encoder=encode(model))
    calls, before = Network.calls, first[:][0].x
    file = first.vectors.path
    assert file.parent == tmp_path / "processed" and calls > 0
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".npy", *[".pt"] * 3]
    no_package()
    again = sst(samples, tmp_path, "train", encoder=encode(model))
    assert Network.calls == calls and torch.equal(again[0].x, before)
    assert again.vectors.rows.dtype == np.float16
    for vectors in (again.vectors, pickle.loads(pickle.dumps(again.vectors))):
        base = vectors.rows
        while isinstance(base, np.ndarray):  # rows that are mapped, and cannot be changed
            assert isinstance(base, np.memmap) and not base.flags.writeable
            base = base.base
    assert torch.equal(pickle.loads(pickle.dumps(again))[0].x, before)
    with pytest.raises(ImportError, match=r"transformers, [\s\S]*pyg_dynbatch\[sentence"):
        sst(samples, tmp_path, "dev", encoder=encode(model))
    with pytest.raises(ImportError, match="transformers, which encodes new sentences, is missing"):
        sst(samples, tmp_path, "train", encoder=SentenceEncoder(model, (0, 1)))


def test_ranks_that_come_together_encode_once(model, samples, tmp_path, monkeypatch):
    """The second waits for the first, and then opens its file."""
    sst(samples, tmp_path, "train")
    run_network = Network.__call__

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return run_network(*args, **options)

    monkeypatch.setattr(Network, "__call__", slowly)
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(sst, samples, tmp_path, "train", encoder=encode(model)) for _ in "123"]
        first, *others = [rank.result() for rank in ranks]
    assert Network.calls == 1
    assert all(torch.equal(first[0].x, each[0].x) for each in others)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_folder_that_cannot_be_written(model, samples, tmp_path):
    wanted = sst(samples, tmp_path, "train", encoder=encode(model))[0].x
    folder = tmp_path / "processed"
    folder.chmod(0o500)
    try:
        assert torch.equal(sst(samples, tmp_path, "train", encoder=encode(model))[0].x, wanted)
        with pytest.raises(OSError, match=r"cannot be written[\s\S]*processed"):
            sst(samples, tmp_path, "dev", encoder=encode(model))
    finally:
        folder.chmod(0o700)


def test_nothing_is_written_where_the_file_exists(model, samples, tmp_path):
    sst(samples, tmp_path, "train", encoder=encode(model))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "processed").iterdir()}
    before[tmp_path / "processed"] = (tmp_path / "processed").stat().st_mtime_ns
    sst(samples, tmp_path, "train", encoder=encode(model))
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_files_of_others_are_refused(model, samples, tmp_path):
    files = {
        split: sst(samples, tmp_path, split, encoder=encode(model)).vectors.path
        for split in ("train", "dev")
    }
    content = files["train"].read_bytes()
    table = np.load(files["train"])
    for other in (table[:-1], table[:, 0], table.astype(np.float32)):
        np.save(files["train"], other)
        with pytest.raises(ValueError, match=r"belongs to other trees[\s\S]*delete it"):
            sst(samples, tmp_path, "train", encoder=encode(model))
    for damaged in (content[:-2], content[:100], b"half", b""):
        files["train"].write_bytes(damaged)
        with pytest.raises(ValueError, match=r"the file is damaged[\s\S]*delete it"):
            sst(samples, tmp_path, "train", encoder=encode(model))
    files["train"].write_bytes(files["dev"].read_bytes())
    with pytest.raises(ValueError, match="belongs to other trees"):
        sst(samples, tmp_path, "train", encoder=encode(model))
    files["train"].write_bytes(content)
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("train", "dev", "test"):
        lines = (samples / "sst" / f"{name}.txt").read_text().splitlines()
        (changed / f"{name}.txt").write_text("\n".join(reversed(lines)))
    check_x(SST(tmp_path, "train", raw_dir=changed, verify=False, encoder=encode(model)))
    check_x(sst(samples, tmp_path, "train", encoder=encode(model)))


def change_weights(model: str, content: str, file: str = "model.safetensors") -> None:
    Path(model, file).write_text(content)
    contextual.weights_digest.cache_clear()


def test_vectors_of_other_weights_are_not_mixed(model, samples, tmp_path, monkeypatch):
    change_weights(model, "first")
    train = sst(samples, tmp_path, "train", encoder=encode(model)).vectors
    change_weights(model, "second")
    other = sst(samples, tmp_path, "train", encoder=encode(model)).vectors
    assert train.path != other.path and train.encoder != other.encoder
    change_weights(model, "of pieces", "tokenizer.json")
    third = sst(samples, tmp_path, "train", encoder=encode(model)).vectors.path
    assert third not in (train.path, other.path)
    third.unlink()
    Path(model, "tokenizer.json").unlink()
    change_weights(model, "second")
    again = sst(samples, tmp_path, "train", encoder=train.encoder).vectors
    assert again.path == train.path
    for root in (tmp_path, None):  # the weights that made the vectors of train are gone
        with pytest.raises(ValueError, match=r"has other weights[\s\S]*made the vectors of train"):
            sst(samples, root, "dev", encoder=train.encoder)
    with pytest.raises(ValueError, match="has other weights"):
        next(train.encoder.encode([["a"]]))
    # Of a name alone, the weights are not known: neither its vectors nor its model are taken.
    monkeypatch.setattr(contextual, "weights_digest", lambda model: "unknown")
    third = sst(samples, tmp_path, "train", encoder=encode(model)).vectors.path
    assert third not in (train.path, other.path)
    third.unlink()
    other.path.unlink()
    only = sst(samples, tmp_path, "train", encoder=encode(model)).vectors
    assert only.path == train.path
    with pytest.raises(ValueError, match="has other weights"):
        sst(samples, tmp_path, "dev", encoder=only.encoder)
    unknown = sst(samples, tmp_path, "dev", encoder=encode(model)).vectors
    monkeypatch.undo()
    for root in (tmp_path, None):
        with pytest.raises(ValueError, match="has other weights"):
            sst(samples, root, "train", encoder=unknown.encoder)


def test_a_failure_leaves_no_file(model, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(Network, "config", types.SimpleNamespace(max_position_embeddings=3))
    with pytest.raises(ValueError, match=r"a sentence is too long[\s\S]*3 word pieces"):
        sst(samples, tmp_path, "train", encoder=encode(model))
    assert {path.suffix for path in (tmp_path / "processed").iterdir()} == {".pt"}


def test_what_cannot_be_encoded_is_refused(model, samples, tmp_path):
    for layers in ((0, 3), (-4,)):
        with pytest.raises(ValueError, match="the model has no such layer"):
            next(SentenceEncoder(model, layers).encode([["a"]]))
    with pytest.raises(ConnectionError, match=r"^SentenceEncoder: .* cannot be loaded[\s\S]*pip"):
        sst(samples, tmp_path, "dev", encoder=SentenceEncoder("o/n"))
    with pytest.raises(ValueError, match=r"SST: an encoder needs the sentences as they are"):
        sst(samples, tmp_path, "dev", encoder=encode(model), pre_transform=copy)
    recipe = ListOpsRecipe(train=2, val=2, test=2)
    with pytest.raises(ValueError, match="ListOps: an encoder needs the sentences"):
        ListOps(tmp_path, recipe=recipe, encoder=encode(model))
    with pytest.raises(ValueError, match="ListOps: an encoder needs the sentences"):
        listops(tmp_path, vectors=options(model)).dataset("train")


def options(model: str, **more: Any) -> VectorOptions:
    return VectorOptions("contextual", model, **{"layers": (0, 2), "scale": 0.3, **more})


def test_features_are_standardized_on_train(model: str, tmp_path: Path) -> None:
    data = tree_files(tmp_path, vectors=options(model))
    test = next(iter(data.test_dataloader()))
    raw = [by_hand(sentence_of(data.dataset("train"), i), (0, 2)) for i in range(24)]
    mean, deviation = np.concatenate(raw).mean(0), np.concatenate(raw).std(0)
    wanted = [by_hand(sentence_of(data.dataset("test"), i), (0, 2)) for i in range(7)]
    wanted = 0.3 * (np.concatenate(wanted) - mean) / deviation
    found = test.x[test.token >= 0].numpy()
    np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02)
    assert test.x[test.token < 0].eq(0).all() and data.num_tokens == 0
    assert data.dataset("train").num_tokens == 0


def test_constant_features_stay_constant() -> None:
    rows = np.array([[1.0, 0.1, 3], [3.0, 0.1, 3], [5.0, 0.1, 3]], np.float16)
    rows[0, 1] = np.nextafter(rows[0, 1], np.float16(1))
    vectors = ContextualVectors(SentenceEncoder(), [0, 2, 3], rows)
    vectors.encoder = vectors.standardized(0.3)
    spread = 0.3 * 1.5**0.5
    wanted = torch.tensor([[spread, 0, 0], [-spread, 0, 0], [0, 0, 0], [0, 0, 0]])
    found = vectors(torch.tensor([7, 7, -1, 0])[[0, 1, 3, 2]], [1, 0])
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    vectors = ContextualVectors(SentenceEncoder(), [0, 3], np.ones((3, 2), np.float16))
    assert vectors.standardized(0.3).factor == (pytest.approx(0.3),) * 2


class Recorded(VectorOptions):
    """Options that note which of them are read."""

    reads: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Recorded.reads.add(name)
        return super().__getattribute__(name)


def test_every_option_is_read_or_refused(model, samples, tmp_path, monkeypatch):
    files = {"glove": str(samples / "glove.txt"), "sentence": "some-model", "contextual": model}
    given = {"cache": "a", "scale": 2.0, "layers": (0, 1), "missing": "zeros", "lower_case": False}
    assert {*given, "source", "file"} == {option.name for option in fields(VectorOptions)}

    def ones(words: Vocabulary, model: str, **options: Any) -> WordVectors:
        return WordVectors(words, torch.ones(len(words), 2), torch.ones(len(words)).bool())

    monkeypatch.setattr("pyg_dynbatch.trees.task.sentence_vectors", ones)
    for source in ("none", *files):
        for name, value in {**given, "file": files.get(source, "a")}.items():
            known = {"layers": (0, 2)} if source == "contextual" else {}
            chosen = {"file": files.get(source), **known, name: value}
            try:
                options = Recorded(source, **chosen)
            except ValueError as error:
                assert f"VectorOptions: the source {source!r} does not use {name}" in str(error)
                continue
            Recorded.reads.clear()
            data = tree_files(tmp_path, vectors=options)
            assert (data.word_vectors or data.dataset("train")) and name in Recorded.reads
    for wrong in ({"scale": 0.0}, {"scale": float("nan")}, {"layers": ()}):
        with pytest.raises(ValueError, match="is out of range"):
            VectorOptions("contextual", **wrong)


def test_models_that_do_not_fit_are_refused(model: str, tmp_path: Path) -> None:
    data = tree_files(tmp_path, vectors=options(model))
    words, narrow = task(tree_files(tmp_path), embedding_channels=8), task(data)
    for wrong, got in ((words, "num_tokens 6, embedding_channels 8"), (narrow, "num_tokens 0")):
        match = rf"num_tokens 0, embedding_channels 8\n[\s\S]*got: *{got}"
        with pytest.raises(ValueError, match=match):
            trainer(tmp_path, max_epochs=1).fit(wrong, data)


def test_pairs_are_trained(model: str, samples: Path, tmp_path: Path) -> None:
    raw = str(samples / "sick")
    data = SICKData(str(tmp_path), raw, batch_size=2, vectors=options(model))
    pairs = TreeRelatedness(data.num_tokens, embedding_channels=8, hidden_channels=4)
    run_of = trainer(tmp_path, callbacks=[])
    run_of.fit(pairs, data)
    assert np.isfinite(run_of.test(pairs, data, verbose=False)[0]["test/loss"])


def small(folder: Path, model: str, number: int = 1) -> Path:
    """Train a small classifier; return its checkpoint."""
    data = tree_files(folder, vectors=options(model))
    torch.manual_seed(number)
    run_of = trainer(folder, max_epochs=1)
    run_of.fit(task(data, embedding_channels=8), data)
    path = folder / f"{number}.ckpt"
    run_of.save_checkpoint(path)
    return path


def test_a_checkpoint_predicts_new_trees(model, tmp_path, monkeypatch, no_package, capsys):
    path = small(tmp_path, model)
    # Other sentences than those of training, and other means.
    (tmp_path / "new.txt").write_text("(2 (1 film) (3 good))\n((unseen) ((film) (dull)))\n")
    kept = load(path)
    trees = TreeFile(tmp_path / "new.txt", None, 5, "optional", encoder=kept.encoder)
    raw = [by_hand(sentence, (0, 2)) for sentence in (["film", "good"], ["unseen", "film", "dull"])]
    scaled = (np.concatenate(raw) - kept.encoder.mean) * kept.encoder.factor
    found = torch.cat([tree.x[tree.token >= 0] for tree in trees])
    np.testing.assert_allclose(found, scaled, rtol=0.02, atol=0.02)
    with torch.no_grad():
        wanted = kept(next(iter(DataLoader(trees, 2)))).softmax(-1)
    assert len(kept.vocabulary) == 1 and kept.encoder.mean
    predictor = TreePredictor([path])
    read = [predictor.read("((film) (good))"), predictor.read(["unseen", ["film", "dull"]])]
    np.testing.assert_allclose(predictor.predict(read)["probability"], wanted, rtol=1e-4, atol=1e-4)
    names = {"--checkpoint": path, "--input": tmp_path / "new.txt", "--nodes": tmp_path / "n.csv"}
    words = [str(word) for pair in names.items() for word in pair]
    assert run("predict", *words, "--output", str(tmp_path / "out.csv")) == 0
    with (tmp_path / "n.csv").open() as file:
        rows = [[float(row[f"probability_{i}"]) for i in range(5)] for row in csv.DictReader(file)]
    np.testing.assert_allclose(np.array(rows), wanted, rtol=1e-4, atol=1e-4)
    no_package()
    assert run("predict", *words, "--output", str(tmp_path / "out.csv")) != 0
    assert "transformers, which encodes new sentences, is missing" in capsys.readouterr().err


def test_checkpoints_of_other_vectors_are_refused(model, tmp_path):
    paths = [small(tmp_path, model, number) for number in (1, 2)]
    data = tree_files(tmp_path, vectors=options(model))
    averaged = ensemble_of(task(data, embedding_channels=8), paths)
    assert trainer(tmp_path).test(averaged, data, verbose=False)
    both = TreePredictor(paths)
    tree = both.read("((film) (good))")
    found = [TreePredictor([path]).predict([tree])["probability"] for path in paths]
    np.testing.assert_allclose(both.predict([tree])["probability"], np.mean(found, 0), rtol=1e-5)
    content = torch.load(paths[1], weights_only=True)
    content["TreeFileData"]["text_of_trees"]["encoder"]["mean"] = (0.5,) * 2 * WIDTH
    torch.save(content, tmp_path / "other.ckpt")
    mixed = [paths[0], tmp_path / "other.ckpt"]
    refused = pytest.raises(ValueError, match=r"two members prepare the data differently")
    with refused:
        TreePredictor(mixed)
    with refused:
        ensemble_of(task(data, embedding_channels=8), mixed)
    again = tree_files(tmp_path, vectors=options(model))
    classifier = task(again, embedding_channels=8)
    trainer(tmp_path).test(classifier, again, ckpt_path=tmp_path / "other.ckpt", verbose=False)
    # The mean of training is part of the checkpoint.
    assert again.encoder.mean == again.dataset("test").vectors.encoder.mean == (0.5,) * 2 * WIDTH
    wrong = tree_files(tmp_path, vectors=options(model, layers=(0, 1)))
    with pytest.raises(ValueError, match=r"different layers[\s\S]*\(0, 1\)[\s\S]*\(0, 2\)"):
        trainer(tmp_path).test(classifier, wrong, ckpt_path=paths[0], verbose=False)


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_open_the_file(model, samples, tmp_path, method):
    assert method in multiprocessing.get_all_start_methods()
    dataset = sst(samples, tmp_path, "train", encoder=encode(model))
    wanted = [batch.x for batch in DataLoader(dataset, 2)]
    workers = {"num_workers": 2, "multiprocessing_context": method}
    found = [batch.x.clone() for batch in DataLoader(dataset, 2, **workers)]
    assert all(map(torch.equal, wanted, found)) and len(wanted) == len(found)


def test_a_bert_of_transformers(tmp_path: Path) -> None:
    """Every sentence alone, its words found by the places of their letters."""
    transformers = pytest.importorskip("transformers")
    contextual._transformer.cache_clear()
    letters = [chr(code) for code in range(97, 123)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "film", "(", *letters]
    pieces += [f"##{letter}" for letter in letters]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": len(pieces), "num_hidden_layers": 3}
    network = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    tokenizer.save_pretrained(tmp_path)
    network.save_pretrained(tmp_path)
    sentences = [["film", "-LRB-", "dull"], ["a", "very", "odd", "films"], ["film"]]
    found = torch.cat(list(SentenceEncoder(str(tmp_path)).encode(sentences)))
    start = 0
    for sentence in sentences:
        # Bert splits at spaces, so the text of words has the same pieces.
        text = " ".join(sentence).replace("-LRB-", "(")
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = network(**encoded, output_hidden_states=True).hidden_states
        for number in range(len(sentence)):
            mine = [i for i, word in enumerate(encoded.word_ids()) if word == number]
            wanted = torch.cat([states[k][0, mine].mean(0) for k in (0, 3, 3)])
            torch.testing.assert_close(found[start].float(), wanted, rtol=2e-3, atol=2e-3)
            start += 1
    contextual._transformer.cache_clear()


@pytest.mark.parametrize("most", [8, 12])
def test_a_roberta_of_transformers(tmp_path: Path, most: int) -> None:
    """Two of its places are not for pieces."""
    transformers = pytest.importorskip("transformers")
    contextual._transformer.cache_clear()
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "\u0120a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    transformers.RobertaTokenizerFast(vocab=vocabulary, merges=[]).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": 7, "num_hidden_layers": 1, "max_position_embeddings": most + 2}
    network = transformers.RobertaModel(transformers.RobertaConfig(**sizes, pad_token_id=1))
    network.save_pretrained(tmp_path)
    encoder = SentenceEncoder(str(tmp_path), (0, -1))
    longest = ["a"] * (most - 2)
    assert next(encoder.encode([longest])).shape == (most - 2, 16)
    for more in (1, 2):
        with pytest.raises(ValueError, match=rf"a sentence is too long[\s\S]*{most} word pieces"):
            next(encoder.encode([longest + ["a"] * more]))
    contextual._transformer.cache_clear()


def test_the_packaged_model() -> None:
    pytest.importorskip("transformers")
    if find_model(DEFAULT_MODEL, "config.json") == DEFAULT_MODEL:
        pytest.skip(f"the package {DEFAULT_MODEL} is not installed")
    contextual._transformer.cache_clear()
    texts = ["the bank of the river", "the bank lends money", "a loan from the bank"]
    found = torch.cat(list(SentenceEncoder().encode([text.split() for text in texts])))
    assert found.shape == (14, 1152)
    river, money, loan = (found[row, -384:].float() for row in (1, 6, 13))
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(money, loan, 0) > cosine(river, loan, 0)
    contextual._transformer.cache_clear()
