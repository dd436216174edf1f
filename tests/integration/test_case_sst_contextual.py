"""The case of contextual vectors: means of words, and a whole run with a stand-in encoder."""

import json
import sys
from unittest import mock

import numpy as np
import pytest
import sst_contextual
import torch
import yaml
from sst_baselines import means

from pyg_dynbatch.data import Vocabulary, parse_bracketed
from pyg_dynbatch.loader import DataLoader
from tests.example_files import FOLDER
from tests.trees.test_contextual import WIDTH, model

__all__ = ["model"]  # a fixture

LINES = ["(0 (1 (2 a) (3 b)) (4 c))", "(2 d)", "(1 (0 a) (3 (2 (1 b) (0 e)) (4 (2 f) (1 a))))"]


def test_means_of_the_words_below() -> None:
    trees = [parse_bracketed(line).to_data(Vocabulary("abcdef")) for line in LINES]
    for tree in trees:
        tree.x = torch.randn(tree.num_nodes, 3) * (tree.token >= 0).unsqueeze(1)
    batch = next(iter(DataLoader(trees, 3)))
    child, parent = batch.edge_index.tolist()

    def below(node: int) -> list[np.ndarray]:
        rows = [batch.x[node].numpy()] if batch.token[node] >= 0 else []
        children = (c for c, p in zip(child, parent, strict=True) if p == node)
        return rows + [row for each in children for row in below(each)]

    wanted = np.stack([np.mean(below(node), 0) for node in range(batch.num_nodes)])
    np.testing.assert_allclose(means(batch), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sst_baselines", "sst_contextual"])
def test_case_is_short(name: str) -> None:
    assert len((FOLDER / "cases" / f"{name}.py").read_text("utf-8").splitlines()) <= 150


@pytest.mark.long
def test_case_runs(model, tmp_path, monkeypatch, capsys):
    words = ["awful", "bad", "plain", "good", "great"]
    for name, count in {"train": 60, "dev": 20, "test": 20}.items():
        pairs = [(n % 5, n // 5 % 5) for n in range(count)]
        lines = [f"({a} ({a} {words[a]}) (2 (2 film) ({b} {words[b]})))" for a, b in pairs]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    config = yaml.safe_load(sst_contextual.CONFIG.read_text("utf-8"))
    config["model"]["init_args"] |= {"embedding_channels": 3 * WIDTH, "hidden_channels": 8}
    config["data"]["init_args"]["vectors"] |= {"file": model, "layers": [0, 1, 2]}
    small, written = tmp_path / "small.yaml", tmp_path / "rows.json"
    small.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sst_contextual, "CONFIG", small)
    argv = ["case", tmp_path, "--root", tmp_path / "root", "--seeds", 2, "--epochs", 3]
    argv += ["--any-trees", "--json", written]
    with mock.patch.object(sys, "argv", list(map(str, argv))):
        sst_contextual.main()
    assert "seed 2, dev, test:" in capsys.readouterr().out
    rows = json.loads(written.read_text())["rows"]
    kinds = ("Tree-LSTM", "mean of words")
    assert {name: len(row["five classes"]) for name, row in rows.items()} == {
        **dict.fromkeys(("linear, last layer", "linear, all"), 1),
        **dict.fromkeys(kinds, 2),
        **{f"{kind}, ensemble": 1 for kind in kinds},
    }
    assert all(0 <= v <= 1 for row in rows.values() for values in row.values() for v in values)
