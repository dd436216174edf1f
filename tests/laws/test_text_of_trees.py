"""Law: the trees of a raw file are predicted as the data module of the training would have them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch.data import Vocabulary, to_bracketed
from pyg_dynbatch.datasets import ListOpsRecipe, TreeFile
from pyg_dynbatch.lightning import ListOpsData, SSTData, TreeDataModule, TreeFileData, VectorOptions
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.models import TreePredictor
from pyg_dynbatch.prediction import computed
from pyg_dynbatch.trees.predict import arity_of, run_tree_predict
from tests.training.helpers import bare_trainer, task

LABELLED = {
    "train": "(3 (2 Good) (1 fun))\n(0 (1 good) (2 (1 FUN) (2 3)))",
    "val": "(1 (1 good) (2 fun))",
    "test": "(2 (1 GOOD) (0 (3 Fun) (0 new)))\n(1 -LRB-)",
}
OPTIONAL = {
    "train": "((3 Good) (fun))\n(0 (1 good) (2 (FUN) (3)))",
    "val": "((1 good) (2 fun))",
    "test": "(2 (GOOD) (-1 (3 Fun) (new)))\n(3)",
}
# Words at the nodes, numerals among them, and no labels.
DEPENDENCIES = {
    "train": "(million (3 (about)) (shares))\n(sold (she) (shares (million (3))))",
    "val": "((it) (works))",
    "test": "(million (3 (About)) (shares))\n((It) (works))\n(2 (1 (3)) (3 (shares)))",
}
VECTORS = "good 0.5 1.5 1\nfun 1 2 3\n( 4 4 4\n"


class OwnData(TreeDataModule):
    """A data module of a user, with any vocabulary, and targets that are not in the text."""

    num_classes = 4

    def __init__(self, vocabulary: Callable[[str], Vocabulary], labels: str) -> None:
        super().__init__(batch_size=2)
        self.words, self.kind = vocabulary(Path("train.txt").read_text()), labels

    def load(self, split: str, vocabulary: Vocabulary | None) -> TreeFile:
        def with_target(tree: Any) -> Any:
            tree.y = tree.depth.clamp(max=3)
            return tree

        return TreeFile(f"{split}.txt", None, 4, self.kind, self.words, transform=with_target)


def words_of(text: str) -> list[str]:
    return text.replace("(", " ").replace(")", " ").split()


VOCABULARIES = {
    "cased": lambda text: Vocabulary.from_words(words_of(text)),
    "lower case": lambda text: Vocabulary.from_words(words_of(text), lower_case=True),
    "own name of row 0": lambda text: Vocabulary(dict.fromkeys(words_of(text)), "UNK"),
    "frequent": lambda text: Vocabulary.from_counts(
        Counter(words_of(text)), min_count=2, lower_case=True
    ),
}


def files(**options: Any) -> TreeFileData:
    paths = [f"{split}.txt" for split in ("train", "val", "test")]
    return TreeFileData(*paths, **{"batch_size": 2, **options})


def glove(**options: Any) -> VectorOptions:
    Path("vectors.txt").write_text(VECTORS)
    return VectorOptions("glove", "vectors.txt", **options)


def sst(**options: Any) -> SSTData:
    Path("dev.txt").write_text(LABELLED["val"])
    return SSTData("cache", ".", verify=False, **options)


def listops(form: str, labels: str = "root") -> ListOpsData:
    recipe = ListOpsRecipe(train=6, val=2, test=4, max_depth=4, labels=labels)
    data = ListOpsData("cache", form, recipe)
    lines = []
    for tree in data.dataset("test"):
        del tree.y
        lines.append(to_bracketed(tree, data.vocabulary))
    Path("test.txt").write_text("\n".join(lines))
    return data


CASES: dict[str, tuple[Any, Callable[[], TreeDataModule]]] = {
    "labels at all nodes": (LABELLED, files),
    "labels at some nodes": (OPTIONAL, lambda: files(labels="optional")),
    "words of all files": (LABELLED, lambda: files(vocabulary="all")),
    "more classes": (LABELLED, lambda: files(classes=7, max_nodes=9)),
    "words share a vector": (
        LABELLED,
        lambda: files(vectors=glove(missing="shared_uniform", lower_case=True)),
    ),
    "vectors of cased words": (LABELLED, lambda: files(vectors=glove(lower_case=False))),
    "treebank": (LABELLED, lambda: sst()),
    "treebank, words of training": (LABELLED, lambda: sst(vocabulary="train")),
    "operators": ({}, lambda: listops("operator")),
    "operators, labels everywhere": ({}, lambda: listops("operator", "all")),
    "binary parses": ({}, lambda: listops("binary")),
    **{
        f"own data, {name}, labels {kind}": (text, lambda v=vocabulary, k=kind: OwnData(v, k))
        for name, vocabulary in VOCABULARIES.items()
        for kind, text in (("none", DEPENDENCIES), ("required", LABELLED))
    },
}


def checkpoint_of(data: TreeDataModule, folder: Path) -> tuple[Path, Any]:
    """Train for one step, and save a checkpoint."""
    module = task(data, embedding_channels=3)
    run = bare_trainer(folder, limit_train_batches=1, limit_val_batches=0)
    run.fit(module, datamodule=data)
    path = folder / "a.ckpt"
    run.save_checkpoint(path)
    return path, module


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def write(text: dict[str, str]) -> None:
        monkeypatch.chdir(tmp_path)
        for split, lines in text.items():
            Path(f"{split}.txt").write_text(lines, encoding="utf-8")

    return write


@pytest.mark.filterwarnings("ignore:.*(num_workers|DistributedSampler)")
@pytest.mark.parametrize("case", CASES)
def test_a_raw_file_is_predicted_as_the_data_set(case: str, prepared: Any) -> None:
    text, make = CASES[case]
    prepared(text)
    data = make()
    path, module = checkpoint_of(data, Path())
    trees = data.dataset("test")
    (batch,) = DataLoader(trees, batch_size=len(trees), arity=arity_of(module))
    expected = computed(module.model, batch)
    options = ["--checkpoint", str(path), "--input", "test.txt", "--output", "roots.csv"]
    assert run_tree_predict([*options, "--nodes", "nodes.csv"]) == 0
    table = np.genfromtxt("nodes.csv", delimiter=",", names=True)
    for name in ("example", "node", "prediction"):
        np.testing.assert_array_equal(table[name], expected[name])
    chances = [table[f"probability_{number}"] for number in range(data.num_classes)]
    np.testing.assert_allclose(np.stack(chances, 1), expected["probability"], rtol=1e-5)


def test_trees_without_labels_are_those_with_labels(prepared: Any) -> None:
    prepared(LABELLED)
    path, _ = checkpoint_of(files(), Path())
    predictor = TreePredictor([path])
    labelled = predictor.read("(3 (2 fun) (1 (0 3) (1 Good)))")
    for text in ("((fun) ((3) (Good)))", ["fun", ["3", "Good"]]):
        assert torch.equal(predictor.read(text).token, labelled.token)
    # One tree has labels everywhere or nowhere, as in training.
    with pytest.raises(ValueError, match="a second token"):
        predictor.read("(3 (2 fun) (3))")
    row = predictor.vocabulary.row
    found = predictor.read("(million (3 (about)) (fun))")
    assert found.token.tolist() == [0, row("3"), 0, row("fun")]


def test_labels_can_be_said(prepared: Any) -> None:
    prepared(OPTIONAL)
    path, _ = checkpoint_of(files(labels="optional"), Path())
    row = TreePredictor([path]).vocabulary.row
    text, numeral = "(good (3 (fun)) (Good))", row("3")
    assert numeral > 0
    found = {
        labels: TreePredictor([path], labels=labels).read(text).token.tolist()
        for labels in (None, "none")
    }
    words = [row(word) for word in ("good", "fun", "Good")]
    assert found[None] == [words[0], -1, *words[1:]], "as in training, 3 is a label"
    assert found["none"] == [words[0], numeral, *words[1:]]
