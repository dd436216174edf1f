"""Draw records: every benchmark has one row of panels, every panel one line a curve."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.records import Record


class Panel(NamedTuple):
    """Describes one panel of a figure.

    Args:
        records: The records to draw; those without a figure for either axis are left out.
        curve: Name of the curve of a record, with its fields in braces.
        x: Field along.
        y: Field upwards.
        labels: Written below and at the left.
        log: Axes that are logarithmic: ``""``, ``"x"``, ``"y"`` or ``"xy"``.
        title: Written above.
    """

    records: Iterable[Record]
    curve: str
    x: str
    y: str
    labels: tuple[str, str]
    log: str = ""
    title: str = ""

    def curves(self) -> dict[str, tuple[list[float | int], list[float | int]]]:
        """Collects the points of each curve.

        Example:
            >>> record = {"mode": "fused", "batch": 1, "median_seconds": 0.5}
            >>> Panel([record], "{mode}", "batch", "median_seconds", ("", "")).curves()
            {'fused': ([1], [0.5])}
        """
        found: dict[str, tuple[list[float | int], list[float | int]]] = {}
        for record in self.records:
            if record.get(self.x) is not None and record.get(self.y):
                x, y = found.setdefault(self.curve.format_map(record), ([], []))
                x.append(record[self.x])
                y.append(record[self.y])
        return found


def draw_panels(panels: Iterable[Panel], path: Path) -> Path:
    """Draws panels side by side.

    Args:
        panels: The panels.
        path: File to write; its name says the format.

    Returns:
        The path.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from pyg_dynbatch.visualize import draw_curves, new_figure, save_figure

    wanted = list(panels)
    figure, places = new_figure(1, len(wanted), 5.0, 3.5)
    for axes, panel in zip(places, wanted, strict=True):
        draw_curves(axes, panel.curves(), *panel.labels)
        if panel.title:
            axes.set_title(panel.title)
        if "x" in panel.log:
            axes.set_xscale("log")
        if "y" in panel.log:
            axes.set_yscale("log")
    return save_figure(figure, path)
