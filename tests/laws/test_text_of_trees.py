"""Law: the trees of a raw file are predicted as the data set of the training would have them."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from pyg_dynbatch.models import TreeClassifier, TreeSchema, load, predict
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
    return TreeFileData("train.txt", "val.txt", "test.txt", **options)


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

    def trees(split: str) -> TreeFile:
        return TreeFile(f"{split}.txt", None, 4, labels, words, transform=with_target)

    return DatasetData(trees("train"), trees("val"), trees("test"))


class Case(NamedTuple):
    """The texts of the splits, and how data are made of them."""

    text: dict[str, str]
    data: Callable[[], DataModule]


CASES = {
    "labels at all nodes": Case(LABELLED, files),
    "labels at some nodes": Case(OPTIONAL, lambda: files(labels="optional")),
    "more classes": Case(LABELLED, lambda: files(classes=7)),
    "words share a vector": Case(LABELLED, lambda: files(vectors=glove(missing="shared_uniform"))),
    "vectors of cased words": Case(LABELLED, lambda: files(vectors=glove(lower_case=False))),
    "treebank": Case(LABELLED, sst),
    "treebank, words of training": Case(LABELLED, lambda: sst(vocabulary="train")),
    "operators": Case({}, lambda: listops("operator")),
    "operators, labels everywhere": Case({}, lambda: listops("operator", "all")),
    "binary parses": Case({}, lambda: listops("binary")),
}
for name, vocabulary in VOCABULARIES.items():
    CASES[f"own data, {name}, labels none"] = Case(DEPENDENCIES, partial(own, vocabulary, "none"))
    CASES[f"own data, {name}, labels required"] = Case(
        LABELLED, partial(own, vocabulary, "required")
    )


def loaded(data: DataModule) -> TreeClassifier:
    """A model of the data, saved and opened."""
    TreeClassifier(data.schema, 3, 4, cell="child_sum").save("a.ckpt")
    return load("a.ckpt")


def write(texts: dict[str, str]) -> None:
    for split, lines in texts.items():
        Path(f"{split}.txt").write_text(lines, encoding="utf-8")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_raw_file_is_predicted_as_the_data_set(case: str) -> None:
    texts, make = CASES[case]
    write(texts)
    data = make()
    model = loaded(data)
    expected = predict(model, data.dataset("test"), nodes=True)
    got = predict(model, "test.txt", nodes=True)
    for column in ("example", "node", "prediction", "probability"):
        np.testing.assert_array_equal(got[column], expected[column])


@pytest.fixture
def schema() -> TreeSchema:
    """The schema of data with labels, saved and opened."""
    write(LABELLED)
    return loaded(files()).schema


def tokens(schema: TreeSchema, tree: Any) -> list[int]:
    return schema.entry(tree).data.token.tolist()


@pytest.mark.parametrize("tree", ["((fun) ((3) (Good)))", ["fun", ["3", "Good"]]], ids=str)
def test_trees_without_labels_are_those_with_labels(tree: Any, schema: TreeSchema) -> None:
    labelled = "(3 (2 fun) (1 (0 3) (1 Good)))"
    assert tokens(schema, tree) == tokens(schema, labelled)


def test_an_integer_is_a_label_unless_it_is_all_that_a_node_has(schema: TreeSchema) -> None:
    row = schema.vocabulary.row
    assert tokens(schema, "(3 (2 fun) (3))") == [-1, row("fun"), row("3")]
    assert tokens(schema, "(million (3 (about)) (fun))") == [0, -1, 0, row("fun")]
