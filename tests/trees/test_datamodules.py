"""Data modules: sizes before set-up, loaders, word vectors, pictures, and faulty files."""

from pathlib import Path

import pytest
import torch

from pyg_dynbatch.lightning import SICKData, SSTData, TreeDataModule, TreeFileData, VectorOptions
from pyg_dynbatch.loader import NodeBudgetBatchSampler
from pyg_dynbatch.trees import task as datamodule_file
from tests.training.helpers import RECIPE, last_of, listops, task, trainer, tree_files


def sst(samples: Path, folder: Path, **options) -> SSTData:
    raw = str(samples / "sst")
    return SSTData(str(folder), raw_dir=raw, verify=False, **{"batch_size": 2, **options})


def attached(data: TreeDataModule, folder: Path, **options) -> TreeDataModule:
    """Hangs a data module on a trainer with a model, as fitting does."""
    run = trainer(folder)
    run.strategy.connect(task(data, **options))
    data.trainer = run
    return data


def test_options_and_sizes_at_construction(tmp_path: Path, samples: Path) -> None:
    sentiment = sst(samples, tmp_path / "sst")
    assert (sentiment.num_classes, sentiment.num_tokens) == (5, len(sentiment.vocabulary))
    assert (listops(tmp_path).num_classes, listops(tmp_path).num_tokens) == (10, 16)
    pairs = SICKData(str(tmp_path / "sick"), raw_dir=str(samples / "sick"))
    assert pairs.num_classes == 5 < pairs.num_tokens
    with pytest.raises(ValueError, match="ListOpsData: batch_size is too small"):
        listops(tmp_path, batch_size=0)
    data = listops(tmp_path, predict_split="val")
    assert sum(batch.num_graphs for batch in data.predict_dataloader()) == RECIPE.val


@pytest.mark.parametrize(("cell", "arity"), [("nary", 3), ("child_sum", None), ("gru", 5)])
def test_loaders_ask_the_model_for_its_arity(tmp_path: Path, cell: str, arity: int | None) -> None:
    data = attached(listops(tmp_path), tmp_path, cell=cell, arity=arity or 2)
    assert data.train_dataloader().arity == data.test_dataloader().arity == arity
    assert listops(tmp_path, arity=4).train_dataloader().arity == 4
    assert listops(tmp_path).train_dataloader().arity is None


@pytest.mark.parametrize("options", [{}, {"max_nodes": 150}])
def test_every_example_comes_once_and_only_training_is_shuffled(tmp_path, options):
    data = attached(listops(tmp_path, **options), tmp_path)
    for split in ("train", "val", "test"):
        batches = list(getattr(data, f"{split}_dataloader")())
        assert sum(batch.num_graphs for batch in batches) == getattr(RECIPE, split)
        wanted = torch.cat([example.token for example in data.dataset(split)])
        found = torch.cat([batch.token for batch in batches])
        assert torch.equal(found, wanted) == (split != "train")
        largest = 150 if options else 16
        assert all((b.num_nodes if options else b.num_graphs) <= largest for b in batches)
    assert isinstance(data.val_dataloader().batch_sampler, NodeBudgetBatchSampler)
    assert data.train_dataloader().drop_last is False


def test_splits_of_one_run_share_words_and_classes(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    with (tmp_path / "test.txt").open("a", encoding="utf-8") as file:
        file.write("(1 (2 unheard) (0 word))\n")
    assert data.dataset("test").vocabulary == data.vocabulary
    assert data.dataset("test")[-1].token.tolist() == [-1, 0, 0]
    everything = TreeFileData(*data.files.values(), vocabulary="all")
    assert everything.dataset("test")[-1].token.min() == -1
    assert 0 not in everything.dataset("test")[-1].token


def test_a_faulty_test_file_is_said_before_training(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    (tmp_path / "test.txt").write_text("(1 (2 good)\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"test\.txt:1"):
        data.setup("fit")


def test_without_a_test_file_there_is_no_test_part(tmp_path: Path) -> None:
    files = tree_files(tmp_path).files
    data = TreeFileData(files["train"], files["val"], vectors=VectorOptions("none"))
    assert data.splits == ("train", "val")
    (predicted,) = data.predict_dataloader()
    assert predicted.num_graphs == len(data.dataset("val")) == 9
    run, module = trainer(tmp_path), task(data)
    run.fit(module, datamodule=data)
    with pytest.raises(ValueError, match=r"no such part[\s\S]*'train' or 'val'[\s\S]*test_file"):
        run.test(module, datamodule=data, verbose=False)


def glove(samples: Path, **options) -> VectorOptions:
    return VectorOptions("glove", str(samples / "glove.txt"), **options)


def test_words_without_a_vector(tmp_path: Path, samples: Path) -> None:
    data = sst(samples, tmp_path, vectors=glove(samples, missing="shared_uniform"))
    assert data.word_vectors is not None and bool(data.word_vectors.found[1:].all())
    assert set(data.vocabulary.words[1:]) == {"film", "The", "-LRB-", ".", "Café"} - {"missing"}
    assert data.num_tokens == data.word_vectors.matrix.size(0)
    tokens = data.dataset("train")[0].token
    words = [data.vocabulary[row] for row in tokens[tokens >= 0].tolist()]
    assert words == ["The", "film", "<unk>", "<unk>", "."]
    apart = sst(samples, tmp_path, vectors=glove(samples, missing="uniform"))
    assert apart.word_vectors is not None
    assert apart.vocabulary == sst(samples, tmp_path).vocabulary
    missing = apart.word_vectors.matrix[~apart.word_vectors.found]
    assert missing.abs().max() <= 0.05
    assert len(missing.unique(dim=0)) == len(missing) > 1


def test_vectors_are_scaled_and_reach_the_model(tmp_path, samples, monkeypatch):
    data = sst(samples, tmp_path, vectors=glove(samples, missing="zeros", scale=2.0))
    module = task(data, embedding_channels=3, cell="nary")
    run = trainer(tmp_path, limit_train_batches=0)
    lines: list[str] = []
    monkeypatch.setattr(datamodule_file, "rank_zero_info", lines.append)
    run.fit(module, datamodule=data)
    assert module.model.network.embedding is not None
    film = module.model.network.embedding.weight[data.vocabulary.row("film")]
    assert film.tolist() == [2.0, 4.0, 6.0]
    said = [f"word vectors, {split}" for split in ("train", "val", "test")]
    assert [line.split(":")[0] for line in lines] == said
    module = task(data, embedding_channels=7, cell="nary")
    match = r"do not fit the model[\s\S]*--model.init_args.embedding_channels 3"
    with pytest.raises(ValueError, match=match):
        trainer(tmp_path).fit(module, datamodule=data)


def test_resumed_vectors_are_those_of_the_checkpoint(tmp_path: Path, samples: Path) -> None:
    data = sst(samples, tmp_path, vectors=glove(samples))
    module = task(data, embedding_channels=3, cell="nary")
    run = trainer(tmp_path)
    run.fit(module, datamodule=data)
    path = last_of(run)
    trained = module.model.network.embedding.weight.detach().clone()
    again = task(data, embedding_channels=3, cell="nary")
    trainer(tmp_path, epochs=1).fit(again, datamodule=data, ckpt_path=path)
    assert torch.equal(again.model.network.embedding.weight, trained)


def test_sentence_vectors_come_from_the_cache(tmp_path: Path, samples: Path) -> None:
    words = sst(samples, tmp_path).vocabulary.words[1:]
    cache, content = tmp_path / "vectors.pt", {"format": "pyg_dynbatch.sentence_vectors.1"}
    content |= {"model": "some-model", "words": list(words), "vectors": torch.ones(len(words), 4)}
    torch.save(content, cache)
    options = VectorOptions("sentence", "some-model", cache=str(cache), scale=6.0)
    data = sst(samples, tmp_path, vectors=options)
    assert data.word_vectors is not None
    assert data.word_vectors.matrix[1:].eq(6.0).all()


def test_vectors_that_cannot_be(tmp_path: Path, samples: Path) -> None:
    data = sst(samples, tmp_path, vectors=VectorOptions("glove"))
    with pytest.raises(ValueError, match="source 'glove' needs a file"):
        _ = data.word_vectors
    data = listops(tmp_path, vectors=glove(samples, missing="shared_uniform"))
    with pytest.raises(ValueError, match="pieces of this data set have no pretrained vectors"):
        _ = data.num_tokens


def test_pictures_show_small_trees_with_their_true_words(tmp_path: Path, samples: Path) -> None:
    vectors = glove(samples, missing="shared_uniform")
    data = attached(sst(samples, tmp_path, vectors=vectors), tmp_path, cell="nary")
    batch, trees, words = data.shown_trees(4)
    assert batch.num_graphs == len(trees) == len(words) == 1
    assert words == [["", "The", "end"]]
    assert all(name == f"test example {int(name.split()[-1])}" for name in trees)
    assert batch.schedule.arity == 2
    _, _, words = attached(listops(tmp_path), tmp_path).shown_trees(2)
    shown = {text for texts in words for text in texts}
    assert shown & {"MIN", "MAX", "MED", "SM"} and not any("[" in text for text in shown)


def test_seed_is_the_global_one_else_that_of_the_first_rank(tmp_path, monkeypatch):
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


def test_a_second_fit_takes_the_seed_of_its_own(tmp_path, monkeypatch):
    data = attached(listops(tmp_path), tmp_path)
    seeds = []
    for seed in (1, 2):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        data.setup("fit")
        seeds.append(data.train_dataloader().sampler.seed)
    assert seeds == [1, 2]


def test_trees_above_the_budget_are_said(tmp_path: Path) -> None:
    data = tree_files(tmp_path, max_nodes=4)  # all trees have five nodes
    said = r"TreeFileData: 24 of 24 examples are larger than the budget of 4 \(the largest 5\)"
    with pytest.warns(UserWarning, match=said):
        batches = list(data.train_dataloader())
    assert [batch.num_graphs for batch in batches] == [1] * 24
    assert len(list(tree_files(tmp_path, max_nodes=5).train_dataloader())) == 24


@pytest.mark.parametrize("vocabulary", ["train", "all"])
def test_files_without_a_label_have_no_classes(tmp_path: Path, vocabulary: str) -> None:
    train, val = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("((good) (film))\n(-1 (dull) (film))\n", encoding="utf-8")
    val.write_text("((dull) (film))\n", encoding="utf-8")
    data = TreeFileData(str(train), str(val), labels="optional", vocabulary=vocabulary)
    with pytest.raises(ValueError, match="TreeFileData: no node has a label") as caught:
        _ = data.num_classes
    files = [str(train)] if vocabulary == "train" else [str(train), str(val)]
    assert f"where:    {', '.join(files)}" in str(caught.value)
    with pytest.raises(ValueError, match="no node has a label"):
        data.dataset("train")
    data = TreeFileData(str(train), str(val), labels="optional", classes=3)
    assert data.num_classes == data.dataset("train").num_classes == 3
