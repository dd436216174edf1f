"""Law: the trees of a raw file are predicted as the data set of the training would have them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyg_dynbatch.data import Vocabulary
from pyg_dynbatch.datasets import ListOpsRecipe, TreeFile
from pyg_dynbatch.lightning import (
    DataModule,
    DatasetData,
    ListOpsData,
    SSTData,
    TreeFileData,
    VectorOptions,
)
from pyg_dynbatch.models import TreeClassifier, load, predict
from tests.trees.helpers import bracketed

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
    return TreeFileData(*[f"{split}.txt" for split in ("train", "val", "test")], **options)


def glove(**options: Any) -> VectorOptions:
    Path("vectors.txt").write_text(VECTORS)
    return VectorOptions("vectors.txt", **options)


def sst(**options: Any) -> SSTData:
    Path("dev.txt").write_text(LABELLED["val"])
    return SSTData("cache", ".", verify=False, **options)


def listops(form: Any, labels: str = "root") -> ListOpsData:
    recipe = ListOpsRecipe(train=6, val=2, test=4, max_depth=4, labels=labels)
    data = ListOpsData("cache", form, recipe)
    lines = []
    for tree in data.dataset("test"):
        del tree.y
        lines.append(bracketed(tree, data.schema.vocabulary))
    Path("test.txt").write_text("\n".join(lines))
    return data


def with_target(tree: Any) -> Any:
    tree.y = tree.depth.clamp(max=3)
    return tree


def own(vocabulary: Callable[[str], Vocabulary], labels: str) -> DatasetData:
    """A user's data, with any vocabulary, and targets that are not in the text."""
    words = vocabulary(Path("train.txt").read_text())
    splits = ("train", "val", "test")
    return DatasetData(
        *[TreeFile(f"{s}.txt", None, 4, labels, words, transform=with_target) for s in splits]
    )


CASES: dict[str, tuple[Any, Callable[[], DataModule]]] = {
    "labels at all nodes": (LABELLED, files),
    "labels at some nodes": (OPTIONAL, lambda: files(labels="optional")),
    "more classes": (LABELLED, lambda: files(classes=7)),
    "words share a vector": (LABELLED, lambda: files(vectors=glove(missing="shared_uniform"))),
    "vectors of cased words": (LABELLED, lambda: files(vectors=glove(lower_case=False))),
    "treebank": (LABELLED, lambda: sst()),
    "treebank, words of training": (LABELLED, lambda: sst(vocabulary="train")),
    "operators": ({}, lambda: listops("operator")),
    "operators, labels everywhere": ({}, lambda: listops("operator", "all")),
    "binary parses": ({}, lambda: listops("binary")),
    **{
        f"own data, {name}, labels {kind}": (text, lambda v=vocabulary, k=kind: own(v, k))
        for name, vocabulary in VOCABULARIES.items()
        for kind, text in (("none", DEPENDENCIES), ("required", LABELLED))
    },
}


def loaded(data: DataModule) -> TreeClassifier:
    """A model of the data, saved and opened."""
    TreeClassifier(data.schema, 3, 4, cell="child_sum").save("a.ckpt")
    return load("a.ckpt")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def write(text: dict[str, str]) -> None:
        monkeypatch.chdir(tmp_path)
        for split, lines in text.items():
            Path(f"{split}.txt").write_text(lines, encoding="utf-8")

    return write


@pytest.mark.parametrize("case", CASES)
def test_a_raw_file_is_predicted_as_the_data_set(case: str, prepared: Any) -> None:
    text, make = CASES[case]
    prepared(text)
    data = make()
    model = loaded(data)
    expected = predict(model, data.dataset("test"), nodes=True)
    found = predict(model, "test.txt", nodes=True)
    for name in ("example", "node", "prediction", "probability"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_trees_without_labels_are_those_with_labels(prepared: Any) -> None:
    prepared(LABELLED)
    schema = loaded(files()).schema

    def tokens(tree: Any) -> list[int]:
        return schema.entry(tree).data.token.tolist()

    labelled = tokens("(3 (2 fun) (1 (0 3) (1 Good)))")
    for text in ("((fun) ((3) (Good)))", ["fun", ["3", "Good"]]):
        assert tokens(text) == labelled
    # An integer is a label unless it is all that a node has.
    row = schema.vocabulary.row
    assert tokens("(3 (2 fun) (3))") == [-1, row("fun"), row("3")]
    assert tokens("(million (3 (about)) (fun))") == [0, -1, 0, row("fun")]
