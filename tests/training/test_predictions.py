"""Ensembles, tables of predictions, and reports with pictures of a run."""

import inspect
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyg_dynbatch import lightning
from pyg_dynbatch.lightning import PredictionTable, RunReport, ensemble_of
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.prediction import write_table
from pyg_dynbatch.training import runs as report_module
from pyg_dynbatch.training.runs import closing_lines, metrics_file, read_curve
from pyg_dynbatch.trees import task as task_module
from pyg_dynbatch.visualize import save_figure
from tests.console import rows_of
from tests.training.helpers import checkpointing, last_of, listops, task, trainer, tree_files


@pytest.mark.parametrize("loading", [{"batch_size": 3}, {"max_nodes": 20}])
def test_tables_keep_the_order_of_the_data(tmp_path: Path, loading: dict) -> None:
    data = tree_files(tmp_path, **loading)
    module = task(data)
    table = PredictionTable(str(tmp_path / "out"), node_name="nodes.csv")
    run = trainer(tmp_path, callbacks=[table])
    run.predict(module, datamodule=data, return_predictions=False)
    rows, nodes = (rows_of(path) for path in table.places(run).values())
    classes = [f"probability_{k}" for k in range(5)]
    assert list(rows[0]) == ["example", "prediction", *classes, "target"]
    assert [int(row["example"]) for row in rows] == list(range(7))

    batch = next(iter(DataLoader(data.dataset("test"), 7)))
    module.eval()
    with torch.no_grad():
        chance = module(batch).softmax(-1)
    roots = chance[batch.root_index]
    assert [int(row["prediction"]) for row in rows] == roots.argmax(-1).tolist()
    assert [int(row["target"]) for row in rows] == batch.y[batch.root_index].tolist()
    found = torch.tensor([[float(row[name]) for name in classes] for row in rows])
    torch.testing.assert_close(found, roots, atol=1e-5, rtol=1e-5)
    assert len(nodes) == batch.num_nodes
    assert [int(row["prediction"]) for row in nodes] == chance.argmax(-1).tolist()
    assert [(int(row["example"]), int(row["node"])) for row in nodes] == [
        (example, node) for example in range(7) for node in range(5)
    ]


def test_missing_labels_and_the_folder_of_the_run(tmp_path: Path) -> None:
    data = listops(tmp_path)
    table = PredictionTable(node_name="nodes.csv")
    run = trainer(tmp_path, callbacks=[table])
    run.predict(task(data), datamodule=data)
    folder = Path(run.log_dir)
    names = {"predictions": "predictions.csv", "node predictions": "nodes.csv"}
    assert table.places(run) == {what: folder / name for what, name in names.items()}
    assert len(rows_of(folder / "predictions.csv")) == 17
    targets = {row["target"] for row in rows_of(folder / "nodes.csv")}
    assert "" in targets and "-1" not in targets


def test_columns_are_named_by_class_and_an_interrupted_table_leaves_the_old_one(tmp_path):
    path = write_table(tmp_path / "t.csv", {"p": np.array([[0.25, 0.75]])}, first_class=1)
    with pytest.raises(ValueError, match="shorter|longer"):
        write_table(path, {"a": np.array([1]), "b": np.array([1, 2])})
    assert path.read_text().splitlines() == ["p_1,p_2", "0.25,0.75"]
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_batches_of_unknown_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the examples of a batch are unknown") as caught:
        run, module = trainer(tmp_path), task(listops(tmp_path))
        PredictionTable().write_on_batch_end(run, module, {}, None, None, 3, 0)
    assert "no indices of batch 3" in str(caught.value)


def checkpoints(folder: Path, data, count: int = 2) -> list[str]:
    paths = []
    for seed in range(count):
        torch.manual_seed(seed)
        run = trainer(folder / str(seed))
        run.fit(task(data), datamodule=data)
        paths.append(last_of(run))
    return paths


def test_probabilities_are_averaged(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    paths = checkpoints(tmp_path, data)
    plain = task(data)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    ensemble = ensemble_of(plain, paths).eval()
    batch = next(iter(DataLoader(data.dataset("test"), 7)))
    chances = []
    for path in paths:
        member = task(data).eval()
        member.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        with torch.no_grad():
            chances.append(member(batch).softmax(-1))
    with torch.no_grad():
        found = ensemble(batch).softmax(-1)
    torch.testing.assert_close(found, (chances[0] + chances[1]) / 2)
    assert not torch.equal(chances[0], chances[1])
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())

    (result,) = trainer(tmp_path).test(ensemble, datamodule=data, verbose=False)
    hit = found.argmax(-1) == batch.y
    assert result["test/accuracy"] == pytest.approx(hit[batch.root_index].float().mean().item())


def test_members_that_cannot_be_averaged(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    with pytest.raises(ValueError, match="AveragedNetwork: no networks"):
        ensemble_of(task(data), [])
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        ensemble_of(task(data), [tmp_path / "none.ckpt"])
    (path,) = checkpoints(tmp_path, data, 1)
    with pytest.raises(ValueError, match="belongs to a different model") as caught:
        ensemble_of(task(data, hidden_channels=11), [path])
    assert "expected: 11\n  got:      8\n  where:    hidden_channels" in str(caught.value)
    assert caught.value.__notes__ == [f"  file:     {path}"]


def test_curves_and_trees_are_drawn_and_named(tmp_path, monkeypatch):
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> Path:
        drawn[path.name] = figure
        return save_figure(figure, path)

    for module in (report_module, task_module):
        monkeypatch.setattr(module, "save_figure", keep)
    data = tree_files(tmp_path)
    module = task(data)
    callbacks = [checkpointing(), PredictionTable(), RunReport(trees=2)]
    run = trainer(tmp_path, epochs=2, callbacks=callbacks)
    run.fit(module, datamodule=data)
    run.test(module, datamodule=data, verbose=False)
    run.predict(module, datamodule=data)

    metrics = metrics_file(run)
    epochs, values = read_curve(metrics, "val/accuracy")
    assert epochs == [0.0, 1.0] and len(values) == 2
    assert read_curve(metrics, "no/such") == ([], [])
    best = values.index(max(values))
    for axes in drawn["learning_curve.png"].axes:
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.lines[-1].get_label() == f"best val/accuracy, epoch {best}"
        assert list(axes.lines[-1].get_xdata()) == [best, best]
    trees = drawn["predicted_trees.png"]
    assert "class 0" in [text.get_text() for text in trees.legends[0].get_texts()]
    shape = r"test example \d+: true class \d, predicted \d\n\d+ of \d+ labeled nodes correct"
    assert all(re.fullmatch(shape, axes.get_title()) for axes in trees.axes)

    written = dict(re.split(r":\s+", line, maxsplit=1) for line in closing_lines(run))
    names = ["checkpoint", "metrics", "predictions", "learning curve", "predicted trees"]
    assert list(written) == names
    assert all(Path(path).stat().st_size > 100 for path in written.values())
    assert {Path(written[name]).parent for name in names[1:]} == {Path(run.log_dir)}


def test_nothing_is_drawn_without_a_folder_or_trees(tmp_path: Path) -> None:
    data = listops(tmp_path)
    report = RunReport(trees=0)
    run = trainer(tmp_path, logger=False, callbacks=[report], enable_checkpointing=False)
    module = task(data)
    run.fit(module, datamodule=data)
    assert metrics_file(run) is None
    assert report.places(run) == {}
    assert [line for line in closing_lines(run) if "tree" in line] == []
    run = trainer(tmp_path, callbacks=[report])
    run.test(module, datamodule=data, verbose=False)
    assert not report.places(run)["predicted trees"].exists()


TASKS = [
    each
    for each in map(partial(getattr, lightning), lightning.__all__)
    if inspect.isclass(each) and issubclass(each, lightning.Task) and not inspect.isabstract(each)
]


@pytest.mark.parametrize("kind", TASKS)
def test_options_that_change_predictions_are_compared(kind: Any) -> None:
    """Even where all weights fit: no model predicts or is averaged with options of another."""
    task = kind.dry_run_instance({}, {})
    parts = (type(task.model.network), type(task.model))
    named = [each for part in parts for each in inspect.signature(part).parameters.values()]
    known = {each.name for each in named if each.default is not each.empty}
    known |= {each.name for each in named if each.name in task.hparams}
    assert set(task.model.training_options) <= known
    contents = {"state_dict": task.state_dict(), "hyper_parameters": dict(task.hparams)}
    task.model.check(contents, kind.__name__, task.hparams)
    for name in known - {"schema"}:  # of which some differences are none
        changed = {**contents, "hyper_parameters": {**task.hparams, name: "another"}}
        refused = name not in task.model.training_options and not name.endswith("dropout")
        with pytest.raises(ValueError, match=name) if refused else nullcontext():
            task.model.check(changed, kind.__name__, task.hparams)
