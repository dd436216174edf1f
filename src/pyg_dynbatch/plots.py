"""Draw schedules, learning curves, labelled trees and predictions.

Figures are created without ``pyplot``, so they need no display and leave no global state.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyg_dynbatch.core.errors import mismatch, optional
from pyg_dynbatch.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEQUENCE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Tol's bright scheme, whose colours colour-blind readers can distinguish."""

_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": "small"}
_LINE = "#555555"
_GOLD = "#e0a800"


def new_figure(rows: int, columns: int, width: float, height: float) -> "tuple[Figure, list[Axes]]":
    """Create a figure with a grid of axes, listed row by row."""
    problem = "plots: matplotlib is missing"
    module = optional("matplotlib.figure", problem, "plot", "the package matplotlib")
    figure = module.Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Save a figure atomically in the format that the suffix names."""
    form = Path(path).suffix.removeprefix(".") or None
    return write_atomically(path, lambda file: figure.savefig(file, dpi=150, format=form))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``"1 step"`` or ``"2 steps"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def draw_schedule(
    axes: "Axes", names: Sequence[str], operation: Sequence[int], rows: Sequence[int], title: str
) -> "Axes":
    """Draw one bar per step: its height is the number of rows, its colour the operation."""
    kind = np.asarray(operation, dtype=int)
    height = np.asarray(rows, dtype=int)
    if kind.shape != height.shape:
        raise mismatch(
            ValueError,
            "draw_schedule: operation and rows differ in length",
            "one operation and one number of rows per step",
            (kind.size, height.size),
        )
    for number, name in enumerate(names):
        steps = np.flatnonzero(kind == number)
        colour = SEQUENCE[number % len(SEQUENCE)]
        counts = f"{counted(steps.size, 'step')}, {counted(int(height[steps].sum()), 'row')}"
        label = f"{name} ({counts})"
        axes.bar(steps, height[steps], width=0.9, color=colour, label=label)
    # There are a hundred times as many leaves as nodes near the root: a linear scale hides those.
    axes.set_yscale("symlog", linthresh=1)
    axes.set(ylim=(0, None), xlabel="step", ylabel="rows", title=title)
    if names:
        axes.legend(**_LEGEND)
    return axes


def draw_curves(
    axes: "Axes",
    curves: Mapping[str, tuple[Sequence[float | int], Sequence[float | int]]],
    x_label: str,
    y_label: str,
) -> "Axes":
    """Draw one labelled line per curve ``(x, y)``."""
    from cycler import cycler

    # After the last colour, the colours repeat with a different line style.
    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":", "-."]) * cycler(color=SEQUENCE))
    for name, (x, y) in curves.items():
        # A single point has no line, so every point has a marker while they are few.
        axes.plot(x, y, label=name, marker="o" if len(x) <= 30 else None, markersize=3)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    if curves:
        # A long legend would hide the curves, so it goes next to the axes.
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(**_LEGEND, **(beside if len(curves) > len(SEQUENCE) else {}))
    return axes


def draw_parity(axes: "Axes", target: np.ndarray, predicted: np.ndarray, title: str = "") -> "Axes":
    """Draw predicted against measured values, with the line where they are equal."""
    known = ~np.isnan(target)
    both = np.stack([target[known], predicted[known]])
    low, high = (both.min(), both.max()) if both.size else (0.0, 0.0)
    margin = 0.04 * (high - low) or 1.0
    _prepare_square(axes, (low - margin, high + margin), title, "measured", "predicted")
    alpha = 0.5 if both.size < 4000 else 0.2
    axes.scatter(both[0], both[1], color=SEQUENCE[0], s=14, alpha=alpha, linewidths=0)
    return axes


def draw_roc(axes: "Axes", label: np.ndarray, score: np.ndarray, title: str = "") -> "Axes":
    """Draw the share of positives found against the share of negatives that are taken for one."""
    known = ~np.isnan(label)
    order = np.argsort(-score[known], kind="stable")
    positive = label[known][order] == 1
    # Only where the score changes: molecules with equal scores are found together.
    last_of_score = np.append(np.diff(score[known][order]) != 0, True)
    hits = np.append(0, np.cumsum(positive)[last_of_score])
    misses = np.append(0, np.cumsum(~positive)[last_of_score])
    _prepare_square(axes, (-0.02, 1.02), title, "false positive rate", "true positive rate")
    axes.plot(misses / max(misses[-1], 1), hits / max(hits[-1], 1), color=SEQUENCE[0])
    return axes


def _prepare_square(
    axes: "Axes", limits: tuple[float, float], title: str, x_label: str, y_label: str
) -> None:
    axes.plot(limits, limits, color=_LINE, linewidth=0.8)
    axes.set(xlim=limits, ylim=limits, xlabel=x_label, ylabel=y_label, aspect="equal")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)


def tree_layout(
    edge_index: np.ndarray, child_slot: np.ndarray, depth: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of every node: leaves side by side in order, parents above their children."""
    children: list[list[int]] = [[] for _ in depth]
    for child, parent in edge_index[:, np.lexsort((child_slot, edge_index[1]))].T.tolist():
        children[parent].append(child)

    stack = np.setdiff1d(np.arange(len(depth)), edge_index[0])[::-1].tolist()
    x = np.zeros(len(depth))
    leaf_x = count()
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(reversed(children[node]))
            if not children[node]:
                x[node] = next(leaf_x)

    for node in np.argsort(depth, kind="stable"):
        if children[node]:
            x[node] = (x[children[node][0]] + x[children[node][-1]]) / 2
    return x, np.asarray(depth, dtype=float)


def draw_steps(
    axes: "Axes",
    edge_index: np.ndarray,
    child_slot: np.ndarray,
    depth: np.ndarray,
    step: np.ndarray,
    words: Sequence[str] = (),
    until: int | None = None,
) -> "Axes":
    """Draw trees, each node in the colour of the step that computes it, empty after ``until``."""
    x, y = tree_layout(edge_index, child_slot, depth)
    _draw_edges(axes, x, y, edge_index)
    colours = [SEQUENCE[int(number) % len(SEQUENCE)] for number in step]
    last = np.inf if until is None else until
    faces = [one if at <= last else "white" for one, at in zip(colours, step, strict=True)]
    axes.scatter(x, y, s=130, c=faces, edgecolors=colours, linewidths=1.2, zorder=2)
    for node, word in enumerate(words):
        axes.text(x[node], y[node] - 0.3, word, ha="center", va="top", fontsize="small")
    axes.margins(x=0.04, y=0.15)
    axes.set_axis_off()
    return axes


def _draw_edges(axes: "Axes", x: np.ndarray, y: np.ndarray, edge_index: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    ends = list(np.stack([x, y], -1)[edge_index.T])
    axes.add_collection(LineCollection(ends, colors="#999999", linewidths=0.8, zorder=1))


def draw_tree(
    axes: "Axes",
    edge_index: np.ndarray,
    child_slot: np.ndarray,
    depth: np.ndarray,
    predicted: np.ndarray,
    gold: np.ndarray,
    words: Sequence[str],
    num_classes: int,
) -> "Axes":
    """Draw a tree; ``gold`` is -1 for no label, and an empty string among ``words`` for no word."""
    from matplotlib.colors import to_rgba

    x, y = tree_layout(edge_index, child_slot, depth)
    _draw_edges(axes, x, y, edge_index)

    size = max(3.0, 12.0 - 0.12 * len(x))
    colours = _class_colours(num_classes)
    labelled = gold >= 0
    faces = colours[predicted]
    rings = colours[np.where(labelled, gold, predicted)]
    rings[predicted == gold] = to_rgba(_GOLD)
    # A small disc on a large one; the outline keeps a white ring visible on white paper.
    for scale, filled, at in ((2.4, rings, labelled), (1.3, faces, labelled | True)):
        disc: dict[str, Any] = {"s": size**2 * scale, "edgecolors": _LINE, "linewidths": 0.4}
        axes.scatter(x[at], y[at], c=filled[at], zorder=2, **disc)

    number: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size * 0.75, "zorder": 3}
    for node in np.flatnonzero(labelled).tolist():
        ink = "white" if faces[node, :3].sum() < 1.5 else "black"
        axes.text(x[node], y[node], str(predicted[node]), color=ink, **number)

    shown = [node for node, word in enumerate(words) if word]
    # The box keeps the words of inner nodes legible on the lines to their children.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    below: dict[str, Any] = {"ha": "center", "va": "top", "zorder": 1.5, "bbox": box}
    rotated = {"ha": "right", "rotation": 60, "rotation_mode": "anchor"}
    gap = 0.05 * max(1.0, float(np.max(y))) + 0.15
    for node in shown:
        # Short words need no room; a rotated "+" would look like a different sign.
        style = below | (rotated if len(shown) > 12 and len(words[node]) > 2 else {})
        axes.text(x[node], y[node] - gap, words[node], fontsize=max(5.0, size * 0.8), **style)
    axes.margins(x=0.04, y=0.1)
    axes.set_axis_off()
    return axes


def draw_tree_legend(figure: "Figure", num_classes: int) -> None:
    """Add a legend for the colours of :func:`draw_tree` below a figure."""
    from matplotlib.lines import Line2D

    colours = _class_colours(num_classes)
    # At most ten classes are shown.
    spaced = np.linspace(0, num_classes - 1, min(num_classes, 10))
    shown_classes = np.unique(spaced.round().astype(int))

    def mark(label: str, face: Any, edge: Any, edge_width: float = 0.5) -> Line2D:
        return Line2D(
            [], [], label=label, linestyle="", marker="o", markersize=9,
            mfc=face, mec=edge, mew=edge_width,
        )  # fmt: skip

    handles = [mark(f"class {number}", colours[number], _LINE) for number in shown_classes]
    handles += [
        mark("correct", "white", _GOLD, 3.0),
        mark("wrong: ring of the true class", colours[0], colours[-1], 3.0),
        mark("no label: no ring", colours[0], _LINE),
    ]
    columns = min(len(handles), 8)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **_LEGEND)


def _class_colours(num_classes: int) -> np.ndarray:
    from matplotlib import colormaps

    # The ends of the map are nearly black: a number is legible on the middle four fifths only.
    return colormaps["RdBu"](np.linspace(0.1, 0.9, num_classes) if num_classes > 1 else [0.5])


# Pictures of a run --------------------------------------------------------------------------------


def panels(count: int, most_per_row: int, width: float, height: float) -> "tuple[Figure, Any]":
    """Create a figure with this many axes, in rows."""
    columns = min(most_per_row, count)
    figure, axes = new_figure(math.ceil(count / columns), columns, width, height)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def draw_trees(
    path: Path,
    trees: Sequence[Any],
    predicted: Sequence[np.ndarray],
    words: Sequence[Sequence[str]],
    num_classes: int,
    numbers: Sequence[int],
) -> Path:
    """Draw trees with their predicted and true classes into a file."""
    figure, axes = panels(len(trees), 2, 6.5, 4.5)
    for panel, tree, classes, texts, number in zip(
        axes, trees, predicted, words, numbers, strict=True
    ):
        gold = tree.y.numpy() if "y" in tree else np.full(tree.num_nodes, -1)
        edges = tree.edge_index.numpy()
        slots = tree.child_slot.numpy()
        draw_tree(panel, edges, slots, tree.depth.numpy(), classes, gold, texts, num_classes)
        correct = f"{(classes == gold).sum()} of {(gold >= 0).sum()} labelled nodes correct"
        panel.set_title(f"test example {number}: {correct}", fontsize="medium")
    draw_tree_legend(figure, num_classes)
    return save_figure(figure, path)


def draw_learning_curve(metrics: Path, path: Path, names: Sequence[str]) -> Path:
    """Draw metrics of Lightning's ``metrics.csv``, of training and validation, into a file."""
    with metrics.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure, axes = new_figure(1, len(names), 5.0, 3.5)
    for panel, name in zip(axes, names, strict=True):
        curves = {}
        for stage in ("train", "val"):
            logged = [row for row in rows if row.get(f"{stage}/{name}")]
            epochs = [int(row["epoch"]) for row in logged]
            if logged:
                curves[stage] = epochs, [float(row[f"{stage}/{name}"]) for row in logged]
        draw_curves(panel, curves, "epoch", name)
        panel.locator_params(axis="x", integer=True)
    return save_figure(figure, path)
