"""Work and drawn trees are what the tables say of them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.products import classifier_products, work
from benchmarks.trees import schedule_of, sentiment_like_trees
from benchmarks.weave import Ways, WeaveBatch
from pyg_dynbatch.molecules.data import MoleculeCollater
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.nn.weave import WeaveStack


def test_products_of_a_classifier() -> None:
    tree = sentiment_like_trees(1, seed=3)[0]
    counted = work(classifier_products(schedule_of([tree]), 7, 3, 5))
    leaves = int((tree.token >= 0).sum())
    inner = tree.num_nodes - leaves
    forward = 2 * (leaves * 7 * 9 + inner * 6 * 15 + tree.num_nodes * 3 * 5)
    assert counted["flops_forward"] == forward
    assert counted["flops_backward"] == 2 * forward


@pytest.mark.parametrize("mode", ["fused", "plain"])
def test_products_of_weave_are_those_that_torch_counts(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The counter follows modules by global hooks, which the fast way would make room for.
    monkeypatch.setattr("torch.nn.modules.module._has_any_global_hook", lambda: False)
    featurizer = MoleculeFeaturizer()
    table = featurizer.pair_table.features
    ways = Ways(WeaveStack(len(featurizer.atom_names), table.size(1), 8), table)
    molecules = [featurizer(smiles) for smiles in ("CC(=O)O", "c1ccccc1", "O")]
    collate = MoleculeCollater(featurizer.pair_table)
    batch = WeaveBatch(molecules, collate, torch.device("cpu"))
    sizes = batch.sizes(8)
    counted = work(sizes.factored() if mode == "fused" else sizes.plain())
    # The counter of torch ignores addmm_, the product that the layer adds in place.
    unseen = 2 * sizes.pairs * 8 * 8 if mode == "fused" else 0
    with FlopCounterMode(display=False) as forward:
        ways.atoms(mode, batch)
    assert forward.get_total_flops() + unseen == counted["flops_forward"]
    with FlopCounterMode(display=False) as both:
        ways.train(mode, batch)
    assert both.get_total_flops() - forward.get_total_flops() == counted["flops_backward"]


def test_random_trees_resemble_sentiment_trees() -> None:
    trees = sentiment_like_trees(300)
    words = torch.tensor([float((tree.token >= 0).sum()) for tree in trees])
    assert 17 < words.mean() < 21
    assert words.min() >= 2 and words.max() <= 56
    for tree in trees[:20]:
        tree.validate(require_tree=True)
        assert tree.token.max() < 21_702 and tree.y.max() < 5
        assert torch.equal(tree.token >= 0, tree.depth == 0)
