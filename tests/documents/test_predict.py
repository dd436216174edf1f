"""Train on a file of documents; predict and explain from the checkpoint alone."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_dynbatch.blocks import from_examples
from pyg_dynbatch.blocks.documents import LinearCounts
from pyg_dynbatch.documents.predict import collate
from pyg_dynbatch.lightning import DocumentPrediction
from pyg_dynbatch.models import DocumentPredictor
from tests.console import TRAINER, complaint, fit_small, prepare, rows_of, run
from tests.core.helpers import message

CKPT = "runs/small/version_0/best.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> Any:
    """A folder with a run of ten epochs."""
    folder = tmp_path_factory.mktemp("documents")
    shutil.copy(samples / "documents.jsonl", folder)
    data = {"file": "documents.jsonl", "label": "kind", "overrides": {"$.name": "ignore"}}
    rate = {"name": "adamw", "lr": 0.01}
    config = {
        "trainer": {**TRAINER, "max_epochs": 10, "log_every_n_steps": 1},
        "model": {"class_path": "DocumentPrediction", "init_args": {"width": 8, "optimizer": rate}},
        "data": {"class_path": "DocumentFileData", "init_args": {**data, "batch_size": 8}},
    }
    with pytest.MonkeyPatch.context() as patch:
        prepare(folder, patch, config)
        fit_small(folder)
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setattr("sys.argv", ["pyg-dynbatch"])
    return trained


def documents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines()]


def test_a_run_learns_and_names_classes(here: Path) -> None:
    assert "test/accuracy: 1.000" in (here / "output.txt").read_text()
    rows = rows_of("runs/small/version_0/predictions.csv")
    assert list(rows[0]) == [
        *("example", "document", "prediction", "probability_large", "probability_small", "target")
    ]
    given = documents(here)
    for row in rows:
        line = int(row["document"].removeprefix("documents.jsonl:"))
        assert row["target"] == row["prediction"] == given[line - 1]["kind"]


def test_the_checkpoint_alone_predicts_documents_without_label(here: Path) -> None:
    given = documents(here)
    unlabelled = [{key: value for key, value in one.items() if key != "kind"} for one in given]
    Path("new.jsonl").write_text("\n".join(map(json.dumps, unlabelled)))
    command = ["predict", "--checkpoint", CKPT, "--batch-size", "7"]
    assert run(*command, "--input", "new.jsonl", "--output", "new.csv") == 0
    assert run(*command, "--input", "documents.jsonl", "--output", "old.csv") == 0
    new, old = rows_of("new.csv"), rows_of("old.csv")
    assert [row["prediction"] for row in new] == [row["prediction"] for row in old]
    assert [row["document"] for row in new] == [f"new.jsonl:{n}" for n in range(1, 61)]
    whole = DocumentPredictor([CKPT]).predict(unlabelled)
    found = torch.tensor([float(row["probability_large"]) for row in new])
    torch.testing.assert_close(
        found, torch.from_numpy(whole["probability_large"]), atol=1e-5, rtol=0
    )


def test_attributions_are_differences_of_log_odds(here: Path) -> None:
    predictor = DocumentPredictor([CKPT, CKPT])  # the mean of two equal models
    document = {"kind": "small", "weight": 5.0, "parts": [{"size": 3.0, "color": "red"}, {}]}
    before = json.dumps(document)
    found = dict(predictor.explain(document, "large"))
    assert json.dumps(document) == before
    with pytest.raises(ValueError, match="unknown"):
        DocumentPredictor([CKPT], unknown="refuse").explain({**document, "x": 1})
    assert json.dumps(document) == before
    assert list(found) == ["$.weight", "$.parts", "$.parts[0]", "$.parts[1]", *PARTS_OF_FIRST]

    def odds(one: dict[str, Any]) -> float:
        chance = predictor.predict([one])
        return math.log(chance["probability_large"][0] / chance["probability_small"][0])

    without = {key: value for key, value in document.items() if key != "weight"}
    assert found["$.weight"] == pytest.approx(odds(document) - odds(without), abs=1e-3)
    shorter = {**document, "parts": [{}]}
    assert found["$.parts[0]"] == pytest.approx(odds(document) - odds(shorter), abs=1e-3)
    (first, *_), few = predictor.explain(document), predictor.explain(document, most=2)
    assert first[0] == "$.weight" and len(few) == 2
    with pytest.raises(ValueError, match="explain: most"):
        predictor.explain(document, most=-1)
    with pytest.raises(ValueError, match="number of documents"):
        predictor.predict([])


def test_many_parts_are_explained_as_few(here: Path) -> None:
    predictor = DocumentPredictor([CKPT])
    document = {"weight": 5.0, "parts": [{"size": 3.0}] * 200}  # with 402 parts
    found = dict(predictor.explain(document))
    assert len(found) == 402
    few = dict(predictor.explain(document, most=20))
    assert few == pytest.approx({path: found[path] for path in few}, abs=1e-5)
    last = {**document, "parts": [*document["parts"][1:], {}]}
    with torch.no_grad():
        rows = predictor.model.eval()(predictor._batch([document, last]))
    value = rows[:, 1] - rows[:, 0]  # log-odds of one of two classes
    wanted = abs(float(value[0] - value[1]))
    assert abs(found["$.parts[199].size"]) == pytest.approx(wanted, abs=1e-4)


def test_a_predictor_in_training_mode_predicts_as_in_evaluation(here: Path) -> None:
    predictor, given = DocumentPredictor([CKPT]), documents(here)[:3]
    before = predictor.predict(given)["probability_large"], predictor.explain(given[0])
    predictor.model.train()
    assert (predictor.predict(given)["probability_large"] == before[0]).all()
    assert predictor.explain(given[0]) == before[1]
    assert all(part.training for part in predictor.model.modules())


def test_one_object_at_two_places_is_explained_as_two(here: Path) -> None:
    part: dict[str, Any] = {"size": 3.0, "color": "red"}
    document = {"weight": 5.0, "parts": [part, part]}
    predictor = DocumentPredictor([CKPT])
    expected = predictor.explain(json.loads(json.dumps(document)))
    assert predictor.explain(document) == expected and len(expected) == 8
    assert document["parts"] == [part, part] and len(part) == 2


PARTS_OF_FIRST = ["$.parts[0].size", "$.parts[0].color"]


def test_unknown_parts_and_classes_are_refused(here: Path, capsys: Any) -> None:
    Path("bad.jsonl").write_text('{"weight": 1}\n{"weight": 1, "parts": [{"depth": 2}]}\n')
    command = ["predict", "--checkpoint", CKPT, "--input", "bad.jsonl", "--output", "bad.csv"]
    line = complaint(capsys, *command, "--unknown", "refuse")
    assert "$.parts[0].depth" in line and "bad.jsonl:2" in line
    assert not Path("bad.csv").exists()
    with pytest.warns(UserWarning, match=r"ignored at \$.parts\[\].depth"):
        assert run(*command) == 0
    with pytest.raises(ValueError, match="'large' or 'small'"):
        DocumentPredictor([CKPT]).explain({"weight": 1}, "huge")


@pytest.mark.long
def test_a_checkpoint_is_not_used_with_other_documents(here: Path, capsys: Any) -> None:
    changed = [{**one, "weight": 1.0} for one in documents(here)]
    Path("changed.jsonl").write_text("\n".join(map(json.dumps, changed)))
    options = ["--run", "runs/small/version_0", "--data.init_args.file", "changed.jsonl"]
    assert "schema.documents" in complaint(capsys, "test", *options)


@pytest.mark.long
def test_a_run_is_continued(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(here, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert run("fit", "--run", "runs/small/version_0", "--trainer.max_epochs", "11") == 0
    rows = rows_of("runs/small/version_0/metrics.csv")
    assert [int(row["epoch"]) for row in rows if row["val/accuracy"]] == list(range(11))


@pytest.mark.long
def test_numbers_are_predicted_in_their_units(trained, tmp_path, monkeypatch, capsys):
    shutil.copy(trained / "small.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    given = [one for one in documents(trained) if "weight" in one]
    Path("documents.jsonl").write_text("\n".join(map(json.dumps, given)))
    label = "--data.init_args.label"
    fit = ["fit", "--config", "small.yaml", label, "weight", "--data.init_args.overrides"]
    assert "the override {$.weight: number}" in complaint(capsys, *fit, "{}")
    assert "expected: number or categories" in complaint(capsys, *fit, "{$.weight: mean}")
    fit.append("{$.weight: number, $.name: ignore}")
    assert "--checkpoint.monitor val/rmse --checkpoint.mode min" in complaint(capsys, *fit)
    fit += ["--checkpoint.monitor", "val/rmse", "--checkpoint.mode", "min"]
    text = complaint(capsys, *fit, label, "kind", "--data.init_args.overrides", "{$.kind: number}")
    assert "expected: number" in text and "path $.kind" in text
    assert run(*fit) == 0
    shown = capsys.readouterr().out
    rows = rows_of("runs/small/version_0/predictions.csv")
    assert list(rows[0]) == ["example", "document", "prediction", "target"]
    pairs = [(float(row["prediction"]), float(row["target"])) for row in rows]
    for row, (_, target) in zip(rows, pairs, strict=True):
        line = int(row["document"].removeprefix("documents.jsonl:"))
        assert target == pytest.approx(given[line - 1]["weight"])
    error = math.sqrt(sum((found - target) ** 2 for found, target in pairs) / len(pairs))
    (said,) = re.findall(r"^test/rmse: ([\d.]+)", shown, re.MULTILINE)
    assert error == pytest.approx(float(said), abs=1e-3)
    assert error < 0.5 * torch.tensor([one["weight"] for one in given]).std()

    predictor = DocumentPredictor([CKPT, CKPT])
    document = {"kind": "large", "parts": [{"size": 3.0, "color": "red"}]}
    (whole,), (without,) = (
        predictor.predict([one])["prediction"] for one in (document, {"parts": document["parts"]})
    )
    assert dict(predictor.explain(document))["$.kind"] == pytest.approx(whole - without, abs=1e-4)
    with pytest.raises(ValueError, match="a number is predicted"):
        predictor.explain(document, "large")


def test_both_ways_to_predict_are_trained() -> None:
    documents = from_examples([{"x": 1.5}, {"x": 2.5}]).schema.as_dict()
    schema = {"documents": documents, "label": "y", "classes": ["a", "b"]}
    task = DocumentPrediction(schema, width=4, penalty=0.2, dropout=0.0, linear=0.25)
    network: Any = task.model.network
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter)
    batch = collate(network.encoder.collate, [({"x": x}, x > 2) for x in (1.0, 2.0, 3.0)])
    batch.y = batch.y.long()
    nested, counted = ways = task(batch)
    loss, terms = task.summed_loss(ways, batch)
    one = torch.nn.functional.one_hot(batch.y, 2) * 0.9 + 0.05
    expected = sum(-(one * ways.log_softmax(1)).sum() for ways in (nested, counted))
    table = next(each for each in network.modules() if isinstance(each, LinearCounts))
    squares = (10 * table.weight).square().sum()
    # Two paths, two documents in the schema, and three in the batch.
    torch.testing.assert_close(loss, expected + 3 * 0.2 * 2 * squares / (2 * 2))
    assert terms == 6
    output = task.eval().model(batch)
    torch.testing.assert_close(output, 0.75 * nested + 0.25 * counted)
    plain = torch.nn.functional.cross_entropy(output, batch.y, reduction="sum")
    torch.testing.assert_close(task.summed_loss(ways, batch)[0], plain)


@pytest.mark.parametrize("value", [-0.5, 1e9, math.nan])
@pytest.mark.parametrize("option", ["linear", "penalty", "dropout"])
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    documents = from_examples([{"x": 1.5}]).schema.as_dict()
    schema = {"documents": documents, "label": "y", "classes": ["a", "b"]}
    text = message(ValueError, DocumentPrediction, schema, **{option: value})
    assert option in text and "expected: a number in [0, " in text
