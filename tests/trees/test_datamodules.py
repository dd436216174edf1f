"""Data modules: what they open, their loaders, seeds and word vectors, and faulty files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_dynbatch.datasets import ListOps
from pyg_dynbatch.lightning import DataModule, DatasetData, SSTData, TreeFileData, VectorOptions
from pyg_dynbatch.lightning import trees as file_of_datamodules
from pyg_dynbatch.loader import NodeBudgetBatchSampler
from tests.training.helpers import RECIPE, bare_trainer, listops, task, trainer, tree_files


def sst(samples: Path, folder: Path, **options: Any) -> SSTData:
    raw = str(samples / "sst")
    return SSTData(str(folder), raw_dir=raw, verify=False, **{"batch_size": 2, **options})


def attached(data: DataModule, folder: Path, **options: Any) -> Any:
    """Hang a data module on a trainer with a model, as fitting does."""
    run = trainer(folder)
    run.strategy.connect(task(data, **options))
    data.trainer = run
    return data


def test_the_schema_is_that_of_the_training_set(tmp_path: Path, samples: Path) -> None:
    schema = sst(samples, tmp_path / "sst").schema
    assert (schema.num_classes, schema.num_tokens) == (5, len(schema.vocabulary))
    assert listops(tmp_path).schema.num_classes == 10
    with pytest.raises(ValueError, match="ListOpsData: batch_size is too small"):
        listops(tmp_path, batch_size=0)


@pytest.mark.parametrize(("cell", "arity"), [("nary", 3), ("child_sum", None), ("gru", 5)])
def test_loaders_ask_the_model_for_its_collater(tmp_path: Path, cell: str, arity: Any) -> None:
    data = attached(listops(tmp_path), tmp_path, cell=cell, arity=arity or 2)
    for loader in (data.train_dataloader(), data.test_dataloader()):
        assert loader.collate_fn.arity == arity
    assert listops(tmp_path).train_dataloader().collate_fn.arity is None


@pytest.mark.parametrize("with_trainer", [False, True])
@pytest.mark.parametrize("loading", [{"batch_size": 16}, {"max_size": 150}], ids=str)
def test_every_example_comes_once_and_only_training_is_shuffled(
    tmp_path: Path, loading: Any, with_trainer: bool
) -> None:
    data: Any = listops(tmp_path, **loading)
    if with_trainer:
        attached(data, tmp_path)
    for split in ("train", "val", "test"):
        batches = list(getattr(data, f"{split}_dataloader")())
        assert sum(batch.num_graphs for batch in batches) == getattr(RECIPE, split)
        expected = torch.cat([example.token for example in data.dataset(split)])
        found = torch.cat([batch.token for batch in batches])
        assert torch.equal(found, expected) == (split != "train")
        by_size = "max_size" in loading
        most = max(batch.num_nodes if by_size else batch.num_graphs for batch in batches)
        assert most <= next(iter(loading.values()))
    assert isinstance(data.val_dataloader().batch_sampler, NodeBudgetBatchSampler)


@pytest.mark.filterwarnings("ignore:.*(overfit|You requested)")
@pytest.mark.parametrize("loading", [{"batch_size": 8}, {"max_size": 40}], ids=str)
def test_lightning_may_rebuild_the_loaders(tmp_path: Path, loading: Any) -> None:
    data = tree_files(tmp_path, **loading)
    run = bare_trainer(tmp_path, overfit_batches=2)
    run.fit(task(data), datamodule=data)
    assert run.global_step == 2


def test_given_splits(tmp_path: Path) -> None:
    splits = [ListOps(tmp_path, split, recipe=RECIPE) for split in ("train", "val")]
    data = DatasetData(*splits, batch_size=7)
    assert data.splits == ("train", "val")
    assert data.schema == splits[0].schema
    run = bare_trainer(tmp_path)
    module = task(data)
    run.fit(module, datamodule=data)
    with pytest.raises(ValueError, match="no such split"):
        run.test(module, datamodule=data)
    empty = DatasetData(splits[0], splits[1][:0])
    with pytest.raises(ValueError, match="the val split is empty"):
        bare_trainer(tmp_path).fit(task(empty), datamodule=empty)


# Files of trees.


def test_all_files_share_the_words_and_classes_of_training(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    with (tmp_path / "test.txt").open("a", encoding="utf-8") as file:
        file.write("(1 (2 unheard) (0 word))\n")
    assert data.dataset("test").schema == data.schema
    assert data.dataset("test")[-1].token.tolist() == [-1, 0, 0]


def test_a_faulty_test_file_is_said_before_training(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    (tmp_path / "test.txt").write_text("(1 (2 good)\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"test\.txt:1"):
        bare_trainer(tmp_path).fit(task(data), datamodule=data)


def test_files_without_a_label_have_no_classes(tmp_path: Path) -> None:
    path = tmp_path / "trees.txt"
    path.write_text("((good) (film))\n(-1 (dull) (film))\n", encoding="utf-8")
    data = TreeFileData(str(path), str(path), labels="optional")
    with pytest.raises(ValueError, match=r"no node has a label(?s:.*)trees\.txt"):
        data.dataset("train")
    data = TreeFileData(str(path), str(path), labels="optional", classes=3)
    assert data.schema.num_classes == 3


def test_trees_above_the_budget_are_said(tmp_path: Path) -> None:
    data = tree_files(tmp_path, max_size=4)  # all trees have five nodes
    said = r"24 of 24 examples are above the budget of 4 \(the largest 5\): a batch for each"
    with pytest.warns(UserWarning, match=said):
        batches = list(data.train_dataloader())
    assert [batch.num_graphs for batch in batches] == [1] * 24
    assert len(list(tree_files(tmp_path, max_size=5).train_dataloader())) == 24


# Word vectors; that they reach the model is in ``tests/training/test_task.py``.


def glove(samples: Path, **options: Any) -> VectorOptions:
    return VectorOptions(str(samples / "glove.txt"), **options)


def test_words_without_a_vector(tmp_path: Path, samples: Path) -> None:
    data = sst(samples, tmp_path, vectors=glove(samples, missing="shared_uniform"))
    assert data.word_vectors is not None and bool(data.word_vectors.found[1:].all())
    vocabulary = data.schema.vocabulary
    assert set(vocabulary.words[1:]) == {"film", "The", "-LRB-", ".", "Café"}
    assert data.schema.num_tokens == data.word_vectors.matrix.size(0)
    tokens = data.dataset("train")[0].token
    words = [vocabulary[row] for row in tokens[tokens >= 0].tolist()]
    assert words == ["The", "film", "<unk>", "<unk>", "."]
    apart = sst(samples, tmp_path, vectors=glove(samples, missing="uniform"))
    assert apart.word_vectors is not None
    assert apart.schema == sst(samples, tmp_path).schema
    missing = apart.word_vectors.matrix[~apart.word_vectors.found]
    assert missing.abs().max() <= 0.05
    assert len(missing.unique(dim=0)) == len(missing) > 1


def test_vectors_are_scaled_and_counted(
    tmp_path: Path, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sst(samples, tmp_path, vectors=glove(samples, scale=2.0))
    lines: list[str] = []
    monkeypatch.setattr(file_of_datamodules, "rank_zero_info", lines.append)
    module = task(data, embedding_channels=3, cell="nary")
    bare_trainer(tmp_path, limit_train_batches=0).fit(module, datamodule=data)
    film = module.model.embedding.weight[data.schema.vocabulary.row("film")]
    assert film.tolist() == [2.0, 4.0, 6.0]
    splits = [f"word vectors, {split}" for split in ("train", "val", "test")]
    assert [line.split(":")[0] for line in lines] == splits


# Seeds of the order.


def test_seed_is_the_global_one_else_that_of_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seed() -> int:
        data = attached(listops(tmp_path), tmp_path)
        monkeypatch.setattr(data.trainer.strategy, "broadcast", lambda seed: seed + 5)
        loader = data.train_dataloader()
        assert loader.generator.initial_seed() == loader.sampler.seed
        assert data.state_dict()["order_seed"] == loader.sampler.seed
        return loader.sampler.seed

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(12)
    assert seed() == 17
    monkeypatch.setenv("PL_GLOBAL_SEED", "41")
    assert seed() == 46


def test_a_second_fit_takes_the_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = attached(listops(tmp_path), tmp_path)
    seeds = []
    for seed in (1, 2):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        data.setup("fit")
        seeds.append(data.train_dataloader().sampler.seed)
    assert seeds == [1, 2]
