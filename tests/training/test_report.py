"""Reports: pictures at the end of a run, read from the run's own files."""

from pathlib import Path

from pyg_dynbatch.training import PredictionTable, RunReport
from pyg_dynbatch.training.report import closing_lines, metrics_file, read_curve
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
    assert [line.split(":")[0] for line in lines] == [
        "checkpoint",
        "metrics",
        "predictions",
        "learning curve",
        "predicted trees",
    ]
    assert all(Path(line.split(":", 1)[1].strip()).is_file() for line in lines)


def test_nothing_is_drawn_without_a_folder(tmp_path: Path) -> None:
    data = listops(tmp_path)
    report = RunReport()
    run = trainer(tmp_path, logger=False, callbacks=[report], enable_checkpointing=False)
    module = task(data)
    run.fit(module, datamodule=data)
    assert metrics_file(run) is None
    assert report.places(run) == {}
    assert [line for line in closing_lines(run) if "tree" in line] == []


def test_no_trees_on_request(tmp_path: Path) -> None:
    data = listops(tmp_path)
    report = RunReport(trees=0)
    run = trainer(tmp_path, callbacks=[report])
    run.test(task(data), datamodule=data, verbose=False)
    assert not report.places(run)["predicted trees"].exists()
