"""Predicting trees in memory, from checkpoints alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_dynbatch.data import Vocabulary
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.models import TreePredictor
from tests.trees.helpers import WORDS, assert_same, tree_checkpoint


@pytest.fixture
def predictor(tmp_path: Path) -> TreePredictor:
    return TreePredictor([tree_checkpoint(tmp_path / "a.ckpt")])


def test_text_and_nested_lists_are_the_same_trees(predictor: TreePredictor) -> None:
    words = Vocabulary(WORDS)
    tree = predictor.read("((not) ((very) (new)))")
    assert tree.token.tolist() == [-1, words.row("not"), -1, words.row("very"), 0]
    assert_same(tree, predictor.read(["not", ["very", "new"]]))
    assert_same(tree, predictor.read("(2 (0 not) (1 (2 very) (1 new)))"))
    assert_same(predictor.read("(good)"), predictor.read("(1 good)"))


NO_TREES = [
    ("((not) (good)", "1 bracket is never closed"),
    ("(3 good)", "expected: *a label in 0..2"),
    (["not", 7], "a part of the tree is not a word.*\n.*\n.*got: *7"),
    (["not", []], "a part of the tree is not a word"),
    (None, "from_nested"),
]


@pytest.mark.parametrize(("tree", "said"), NO_TREES)
def test_what_is_not_a_tree_of_words_is_refused(predictor, tree, said):
    with pytest.raises(ValueError, match=said):
        predictor.read(tree)


def test_predictions_are_those_of_the_task_on_the_merged_trees(predictor: TreePredictor) -> None:
    trees = [predictor.read(text) for text in ("((not) (good))", "(good)", "((very) (good))")]
    predictor.model.train()
    found = predictor.predict(trees)  # in evaluation
    assert all(part.training for part in predictor.model.modules())
    predictor.model.eval()
    with torch.no_grad():
        expected = predictor.model.predict(Collater(arity=2)(trees))
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column.numpy())
    assert found["example"][found["is_root"]].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="child"):
        predictor.predict([predictor.read(["not", "very", "good"])])


def test_several_checkpoints_are_averaged(tmp_path: Path) -> None:
    paths = [tree_checkpoint(tmp_path / f"{seed}.ckpt", seed) for seed in (1, 2)]
    alone = [TreePredictor([path]) for path in paths]
    tree = alone[0].read("((not) (good))")
    parts = [each.predict([tree])["probability"] for each in alone]
    found = TreePredictor(paths).predict([tree])["probability"]
    np.testing.assert_allclose(found, np.mean(parts, 0), rtol=1e-5)
    other = tree_checkpoint(tmp_path / "other.ckpt", 1, ["good", "not", "so"])
    with pytest.raises(ValueError, match="prepare the data differently"):
        TreePredictor([paths[0], other])
    with pytest.raises(ValueError, match="no checkpoints"):
        TreePredictor([])
