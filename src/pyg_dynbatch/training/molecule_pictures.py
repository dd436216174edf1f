"""Turn what a test of molecular properties has found into a table and a picture."""

import math
from pathlib import Path

from pyg_dynbatch.training.molecule_metrics import MAIN_METRIC
from pyg_dynbatch.training.molecule_task_table import (
    TaskRow,
    TestedSplit,
    task_table,
    write_task_table,
)
from pyg_dynbatch.visualize import draw_calibration, draw_parity, new_figure, save_figure

TASK_TABLE = "task_metrics.csv"
PARITY = "parity.png"
CALIBRATION = "calibration.png"

_MOST_SHOWN = 12


def report_test(folder: Path, tested: TestedSplit, resamples: int) -> list[TaskRow]:
    """Writes the table of properties and draws parity (regression) or calibration (binary).

    Args:
        folder: Where to write.
        tested: What the test has found.
        resamples: Bootstrap resamples of the intervals.

    Returns:
        The rows of the table.
    """
    schema = tested.schema
    rows = task_table(
        tested.prediction,
        tested.target,
        schema.task_names,
        schema.kind,
        resamples,
        tested.deviation,
    )
    write_task_table(folder / TASK_TABLE, rows, schema.kind)
    if schema.kind != "multiclass":
        _draw(folder, tested, rows)
    return rows


def _draw(folder: Path, tested: TestedSplit, rows: list[TaskRow]) -> None:
    schema = tested.schema
    known = [t for t in range(schema.num_tasks) if rows[t].molecules]
    counted = known[:_MOST_SHOWN]
    if not counted:
        return
    columns = min(4, len(counted))
    figure, axes = new_figure(math.ceil(len(counted) / columns), columns, 3.8, 3.8)
    for place in axes[len(counted) :]:
        place.set_axis_off()
    gold, guess = tested.target.double().numpy(), tested.prediction.double().numpy()
    raw = tested.uncalibrated
    for place, task in zip(axes, counted, strict=False):
        given = (place, gold[:, task], guess[:, task], _title(rows[task], schema.kind))
        if schema.kind == "regression":
            draw_parity(*given)
        else:
            before = None if raw is None else raw[:, task].double().numpy()
            draw_calibration(*given, uncalibrated=before)
    if len(known) < schema.num_tasks or len(counted) < len(known):
        figure.suptitle(_left_out(schema.num_tasks, len(counted), len(known)))
    name = PARITY if schema.kind == "regression" else CALIBRATION
    save_figure(figure, folder / name)


def _left_out(tasks: int, drawn: int, known: int) -> str:
    unknown = f", {tasks - known} without targets" if known < tasks else ""
    return f"{drawn} of {tasks} properties{unknown}; all of them: {TASK_TABLE}"


def _title(row: TaskRow, kind: str) -> str:
    main = MAIN_METRIC[kind]  # type: ignore[index]
    score = row.scores[main]
    found = f"{main} {score:.3f}" if score == score else row.status
    return f"{row.name}\n{found}, {row.molecules:,} molecules"
