"""SICK relatedness: two trees, one score; the divergence, and a run on pairs of trees."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.loader import DataLoader as StockLoader

from pyg_dynbatch.data import Vocabulary
from pyg_dynbatch.datasets import SICK
from pyg_dynbatch.lightning import OptimizerOptions, PredictionTable, SICKData, TreeRelatedness
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.trees.datasets import score_to_target
from pyg_dynbatch.trees.models import mean_score
from tests.training.helpers import SIZES, trainer

TITLES = "sentence_A\tsentence_B\trelatedness_score"


@pytest.fixture
def raw(samples: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(samples / "sick", tmp_path / "raw"))


@given(st.floats(1, 5))
def test_the_target_is_a_distribution_with_the_score_as_mean(score: float) -> None:
    target = score_to_target(score)
    assert target.shape == (1, 5)
    assert float(target.sum()) == pytest.approx(1, abs=1e-6)
    assert float(target.min()) >= 0 and int((target > 0).sum()) <= 2
    assert float(target[0] @ torch.arange(1.0, 6.0)) == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize(
    ("trees", "nodes", "roots"),
    [("dependency", [9, 5], [[2, 8], [1, 4]]), ("constituency", [18, 8], [[8, 17], [2, 7]])],
)
def test_two_trees_in_order(raw, trees, nodes, roots):
    dataset = SICK(None, "train", trees, raw_dir=raw)
    assert dataset.node_counts == nodes
    assert [data.root_index.tolist() for data in dataset] == roots
    for data in dataset:
        data.validate(require_tree=True, roots=2, num_tokens=dataset.num_tokens)
    data = dataset[0]
    assert float(data.score) == pytest.approx(4.2)
    torch.testing.assert_close(data.target, torch.tensor([[0, 0, 0, 0.8, 0.2]]))
    words = [dataset.vocabulary[token] for token in data.token.tolist() if token >= 0]
    second = ["A", "song", "is", "sung"] + (["."] if trees == "constituency" else [])
    assert words == ["A", "man", "sings", "a", "song", *second]
    if trees == "constituency":
        assert max(torch.bincount(data.edge_index[1])) == 2


def test_batches_keep_the_pairs(raw: Path) -> None:
    batch = next(iter(StockLoader(SICK(None, raw_dir=raw), batch_size=2)))
    assert batch.root_index.view(-1, 2).tolist() == [[2, 7 + 1], [10, 13]]
    assert batch.target.shape == (2, 5) and batch.score.shape == (2,)


def test_chains_need_words_alone(samples: Path, raw: Path) -> None:
    for path in [*raw.rglob("*.parents"), *raw.rglob("*.cparents")]:
        path.unlink()
    data = SICK(None, "train", "chain", raw_dir=raw)[0]
    assert data.depth.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    tables = SICK(None, "trial", "chain", raw_dir=samples / "sick_tables")
    assert [tables.vocabulary[t] for t in tables[0].token.tolist()] == (
        ["A", "man", "sings", ",", "loudly", "A", "man", "is", "singing"]
    )
    assert float(tables[0].score) == pytest.approx(4.7)


def test_vocabularies(raw: Path) -> None:
    assert "He" in SICK(None, raw_dir=raw).vocabulary
    assert "He" not in SICK(None, vocabulary="train", raw_dir=raw).vocabulary
    assert SICK(None, vocabulary=Vocabulary(["He"]), raw_dir=raw).num_tokens == 2


def test_the_cache_knows_trees_and_text(raw: Path, tmp_path: Path) -> None:
    SICK(tmp_path, "train")
    SICK(tmp_path, "dev", "constituency")
    assert len(list((tmp_path / "processed").iterdir())) == 6
    (raw / "dev" / "sim.txt").write_text("2.5\n")
    assert float(SICK(tmp_path, "dev", "constituency")[0].score) == 2.5


def test_missing_files_say_what_to_put_where(tmp_path: Path) -> None:
    names = "a.toks, b.toks, sim.txt, a.parents, b.parents"
    for trees, match in (
        ("dependency", rf"SICK: raw files are missing[\s\S]*{names}\n[\s\S]*{tmp_path / 'raw'}"),
        ("chain", "needs only SICK_train.txt, SICK_trial.txt"),
    ):
        with pytest.raises(FileNotFoundError, match=match):
            SICK(tmp_path, trees=trees)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("train/sim.txt", "4.2\nx\n", r"is not a number from 1 to 5[\s\S]*sim.txt:2"),
        ("train/sim.txt", "4.2\n5.5\n", r"is not a number from 1 to 5[\s\S]*sim.txt:2"),
        ("train/sim.txt", "nan\n1\n", r"is not a number from 1 to 5[\s\S]*sim.txt:1"),
        ("train/sim.txt", "4.2\n", r"two files of a split differ in length[\s\S]*sim.txt"),
        ("dev/b.parents", "2 x\n", r"a parent pointer is not an integer[\s\S]*b.parents:1"),
        ("dev/a.toks", " \n\n", r"the file is empty[\s\S]*a.toks"),
        ("train/a.toks", "\nNobody waits\n", r"a sentence is empty[\s\S]*a.parents:1"),
        ("SICK_train.txt", "a\tb\n1\t2\n", r"the table lacks a column[\s\S]*SICK_train.txt:1"),
        ("SICK_train.txt", f"{TITLES}\nA\tB\n", r"number of fields[\s\S]*SICK_train.txt:2"),
    ],
)
def test_faults_are_named_by_place(samples: Path, raw: Path, file, text, words) -> None:
    table = file.startswith("SICK")
    if table:
        raw = Path(shutil.copytree(samples / "sick_tables", raw / "tables"))
    (raw / file).write_text(text)
    with pytest.raises(ValueError, match=words):
        SICK(None, trees="chain" if table else "dependency", raw_dir=raw)


def test_options_are_checked(raw: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown trees[\s\S]*'dependency', 'constituency'"):
        SICK(None, trees="round", raw_dir=raw)
    with pytest.raises(ValueError, match="SICK: unknown vocabulary"):
        SICK(None, vocabulary="dev", raw_dir=raw)


def pairs(samples: Path, folder: Path, trees: str = "dependency") -> SICKData:
    raw = str(samples / "sick")
    return SICKData(str(folder / "sick"), raw_dir=raw, trees=trees, batch_size=2)


def model(data: SICKData, **options) -> TreeRelatedness:
    chosen = OptimizerOptions("adagrad", lr=0.05)
    return TreeRelatedness(data.num_tokens, optimizer=chosen, **{**SIZES, **options})


def test_loss_is_the_divergence_from_the_target(tmp_path: Path, samples: Path) -> None:
    data = pairs(samples, tmp_path)
    module = model(data)
    batch = next(iter(DataLoader(data.dataset("train"), 2)))
    module.log = lambda *args, **kwargs: None
    found = module.training_step(batch)
    log_chance = module(batch)
    wanted = 0.0
    for row, target in zip(log_chance, batch.target, strict=True):
        wanted += sum((t * (t.log() - p)).item() for p, t in zip(row, target, strict=True) if t > 0)
    assert found.item() == pytest.approx(wanted / 2, abs=1e-5)
    torch.testing.assert_close(mean_score(batch.target), batch.score)


NARY = {"cell": "nary", "arity": 2}


@pytest.mark.parametrize(
    ("trees", "options"), [("dependency", {}), ("constituency", NARY), ("chain", {"cell": "gru"})]
)
def test_a_whole_run(tmp_path: Path, samples: Path, trees: str, options: dict) -> None:
    data = pairs(samples, tmp_path, trees)
    module = model(data, **options)
    table = PredictionTable(str(tmp_path))
    run = trainer(tmp_path, callbacks=[table], enable_checkpointing=False)
    run.fit(module, datamodule=data)
    names = {f"val/{name}" for name in ("loss", "pearson", "spearman", "mse")}
    assert names <= set(run.callback_metrics)
    run.test(module, datamodule=data, verbose=False)
    run.predict(module, datamodule=data)
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    probabilities = [f"probability_{k}" for k in range(1, 6)]
    assert list(rows[0]) == ["example", "prediction", *probabilities, "target"]
    for row, example in zip(rows, data.dataset("test"), strict=True):
        assert float(row["target"]) == pytest.approx(example.score.item(), abs=1e-4)
        assert 1.0 <= float(row["prediction"]) <= 5.0
