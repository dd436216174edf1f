"""Reports: pictures at the end of a run, read from the run's own files."""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pyg_dynbatch.training import PredictionTable, RunReport
from pyg_dynbatch.training import report as report_module
from pyg_dynbatch.training.report import closing_lines, metrics_file, read_curve
from pyg_dynbatch.trees import task as task_module
from tests.training.helpers import checkpointing, listops, task, trainer, tree_files


def test_curves_and_trees_are_drawn_and_named(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    module = task(data)
    report, table = RunReport(trees=3), PredictionTable()
    run = trainer(tmp_path, epochs=2, callbacks=[checkpointing(), table, report])
    run.fit(module, datamodule=data)
    places = report.places(run)
    assert places["learning curve"] == Path(run.log_dir) / "learning_curve.png"
    assert places["learning curve"].stat().st_size > 5000
    module.train()
    run.test(module, datamodule=data, verbose=False)
    assert places["predicted trees"] == Path(run.log_dir) / "predicted_trees.png"
    assert places["predicted trees"].stat().st_size > 5000
    run.predict(module, datamodule=data)

    metrics = metrics_file(run)
    assert metrics is not None
    epochs, values = read_curve(metrics, "val/accuracy")
    assert epochs == [0.0, 1.0]
    assert len(values) == 2
    assert read_curve(metrics, "no/such") == ([], [])

    lines = closing_lines(run)
    names = ["checkpoint", "metrics", "predictions", "learning curve", "predicted trees"]
    assert [line.split(":")[0] for line in lines] == names
    assert all(Path(line.split(":", 1)[1].strip()).is_file() for line in lines)


def test_curves_show_whole_epochs_and_mark_the_best_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> Path:
        drawn[path.name] = figure
        return path

    for module in (report_module, task_module):
        monkeypatch.setattr(module, "save_figure", keep)
    data = tree_files(tmp_path)
    module = task(data)
    run = trainer(tmp_path, epochs=2, callbacks=[checkpointing(), RunReport(trees=2)])
    run.fit(module, datamodule=data)
    run.test(module, datamodule=data, verbose=False)
    _, values = read_curve(metrics_file(run), "val/accuracy")
    best = values.index(max(values))
    for axes in drawn["learning_curve.png"].axes:
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.lines[-1].get_label() == f"best val/accuracy, epoch {best}"
        assert list(axes.lines[-1].get_xdata()) == [best, best]
    trees = drawn["predicted_trees.png"]
    assert "class 0" in [text.get_text() for text in trees.legends[0].get_texts()]
    shape = r"test example \d+: true class \d, predicted \d\n\d+ of \d+ labelled nodes correct"
    assert all(re.fullmatch(shape, axes.get_title()) for axes in trees.axes)


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
