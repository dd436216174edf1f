"""Draw schedules, learning curves, labelled trees, predictions: arrays in, matplotlib axes out.

No function here opens a window, loads a checkpoint or runs a model. Figures are made without
``pyplot``, so they work without a display and leave no global state behind.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEQUENCE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Colours that people who are colour-blind can tell apart (Tol's bright scheme)."""

# For more curves than colours.
_STYLES = ("-", "--", ":", "-.")
_GOLD = "#e0a800"
_UNLABELLED = -1


def new_figure(rows: int, columns: int, width: float, height: float) -> "tuple[Figure, list[Axes]]":
    """Makes a figure with a grid of axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise mismatch(
            ImportError,
            "visualize: matplotlib is missing",
            "the package matplotlib",
            error,
            hint="pip install 'pyg_dynbatch[cli]'",
        ) from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, [axes for line in grid for axes in line]


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Writes a figure to a file whose name says the format, whole or not at all."""
    form = Path(path).suffix.removeprefix(".")
    return write_atomically(path, lambda file: figure.savefig(file, dpi=150, format=form or None))


def draw_schedule(
    axes: "Axes", names: Sequence[str], operation: Sequence[int], rows: Sequence[int], title: str
) -> "Axes":
    """Draws one bar a step, as high as the step has rows, coloured by operation."""
    kind, height = np.asarray(operation, dtype=int), np.asarray(rows, dtype=int)
    if kind.shape != height.shape:
        raise mismatch(
            ValueError,
            "draw_schedule: operation and rows differ in length",
            "one operation and one number of rows a step",
            f"{kind.size} and {height.size}",
        )
    for number, name in enumerate(names):
        steps = np.flatnonzero(kind == number)
        colour = SEQUENCE[number % len(SEQUENCE)]
        count = "1 step" if steps.size == 1 else f"{steps.size} steps"
        label = f"{name} ({count}, {height[steps].sum():,} rows)"
        axes.bar(steps, height[steps], width=0.9, color=colour, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("rows")
    # Leaves outnumber the last levels a hundredfold; on a plain scale the tail would vanish.
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    if len(names):
        axes.legend(frameon=False, fontsize="small")
    return axes


def draw_curves(
    axes: "Axes",
    curves: Mapping[str, tuple[Sequence[float | int], Sequence[float | int]]],
    x_label: str,
    y_label: str,
) -> "Axes":
    """Draws one line for each named curve."""
    for number, (name, (x, y)) in enumerate(curves.items()):
        again, colour = divmod(number, len(SEQUENCE))
        # A single point has no line, so every point carries a mark while they are few.
        marker = "o" if len(x) <= 30 else None
        style: dict[str, Any] = {"linestyle": _STYLES[again % len(_STYLES)], "markersize": 3}
        axes.plot(x, y, color=SEQUENCE[colour], label=name, marker=marker, **style)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if curves:
        # Many names would hide the curves.
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        where = beside if len(curves) > len(SEQUENCE) else {}
        axes.legend(frameon=False, fontsize="small", **where)
    return axes


def draw_parity(axes: "Axes", target: np.ndarray, predicted: np.ndarray, title: str = "") -> "Axes":
    """Draws predicted against true values, with the line where they are equal."""
    known = ~np.isnan(target)
    gold, guess = np.asarray(target)[known], np.asarray(predicted)[known]
    shown: dict[str, Any] = {"s": 14, "alpha": 0.5 if gold.size < 2000 else 0.2, "linewidths": 0}
    axes.scatter(gold, guess, color=SEQUENCE[0], **shown)
    if gold.size:
        ends = [min(gold.min(), guess.min()), max(gold.max(), guess.max())]
        margin = 0.04 * (ends[1] - ends[0]) or 1.0
        limits = (ends[0] - margin, ends[1] + margin)
        axes.plot(limits, limits, color="#555555", linewidth=0.8)
        axes.set(xlim=limits, ylim=limits)
    axes.set_aspect("equal")
    axes.set(xlabel="measured", ylabel="predicted")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    return axes


def draw_calibration(
    axes: "Axes",
    label: np.ndarray,
    probability: np.ndarray,
    title: str = "",
    bins: int = 10,
    uncalibrated: np.ndarray | None = None,
) -> "Axes":
    """Draws how often a label is positive against how probable the model says it is."""
    known = np.flatnonzero(~np.isnan(label))
    axes.plot([0, 1], [0, 1], color="#555555", linewidth=0.8)
    shown = {"calibrated": probability}
    if uncalibrated is not None:
        shown["uncalibrated"] = uncalibrated
    for (name, chance), colour in zip(shown.items(), SEQUENCE, strict=False):
        order = known[np.argsort(np.asarray(chance)[known], kind="stable")]
        parts = [part for part in np.array_split(order, bins) if part.size]
        said = [float(np.mean(chance[part])) for part in parts]
        seen = [float(np.mean(label[part])) for part in parts]
        error = [2 * (s * (1 - s) / part.size) ** 0.5 for s, part in zip(seen, parts, strict=True)]
        axes.errorbar(said, seen, error, color=colour, marker="o", ms=4, capsize=2, label=name)
    if len(shown) > 1:
        axes.legend(frameon=False, fontsize="small")
    axes.set_aspect("equal")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.set(xlabel="predicted probability", ylabel="share of positives")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    return axes


def tree_layout(
    edge_index: np.ndarray, child_slot: np.ndarray, depth: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places the nodes of a tree: leaves side by side in order, parents above their children."""
    num_nodes = len(depth)
    children: list[list[int]] = [[] for _ in range(num_nodes)]
    has_parent = np.zeros(num_nodes, dtype=bool)
    for edge in np.lexsort((child_slot, edge_index[1])):
        child, parent = int(edge_index[0, edge]), int(edge_index[1, edge])
        children[parent].append(child)
        has_parent[child] = True
    x = np.full(num_nodes, np.nan)
    next_leaf = 0.0
    stack = [int(root) for root in np.flatnonzero(~has_parent)[::-1]]
    while stack:
        node = stack[-1]
        waiting = [child for child in children[node] if np.isnan(x[child])]
        if waiting:
            stack.extend(reversed(waiting))
            continue
        stack.pop()
        if not np.isnan(x[node]):
            continue
        if children[node]:
            x[node] = (x[children[node][0]] + x[children[node][-1]]) / 2
        else:
            x[node], next_leaf = next_leaf, next_leaf + 1
    return x, np.asarray(depth, dtype=float)


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
    """Draws a tree with the predicted class of every node and the words below the nodes."""
    from matplotlib.collections import LineCollection

    x, y = tree_layout(edge_index, child_slot, depth)
    ends = np.stack([np.stack([x, y], -1)[edge_index[0]], np.stack([x, y], -1)[edge_index[1]]], 1)
    axes.add_collection(LineCollection(list(ends), colors="#999999", linewidths=0.8, zorder=1))
    size = max(3.0, 12.0 - 0.12 * len(x))
    colours = _class_colours(num_classes)
    rings = [_ring(int(p), int(g), colours) for p, g in zip(predicted, gold, strict=True)]
    faces = [colours[int(p)] for p in predicted]
    # Two discs, one on the other: the outline keeps a white ring visible on white paper.
    outline: dict[str, Any] = {"edgecolors": "#555555", "linewidths": 0.4}
    axes.scatter(x, y, s=size**2 * 2.4, c=rings, zorder=2, **outline)
    axes.scatter(x, y, s=size**2 * 1.3, c=faces, zorder=2, **outline)
    shown = [str(p) if g != _UNLABELLED else "" for p, g in zip(predicted, gold, strict=True)]
    for node in np.flatnonzero(np.asarray(gold) != _UNLABELLED):
        ink = "white" if sum(faces[node][:3]) < 1.5 else "black"
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size * 0.75}
        axes.text(x[node], y[node], shown[node], color=ink, zorder=3, **style)
    below = [word if word != number else "" for word, number in zip(words, shown, strict=True)]
    _write_words(axes, x, y, below, size)
    axes.margins(x=0.04, y=0.1)
    axes.set_axis_off()
    return axes


def draw_tree_legend(figure: "Figure", num_classes: int) -> None:
    """Explains the colours of :func:`draw_tree` below a figure."""
    from matplotlib.lines import Line2D

    colours = _class_colours(num_classes)
    classes = np.unique(np.linspace(0, num_classes - 1, min(num_classes, 10)).round().astype(int))
    rings: dict[str, Any] = {
        "correct": ("white", _GOLD, 3.0),
        "wrong: ring of the true class": (colours[0], colours[-1], 3.0),
        "no label: no ring": (colours[0], "#555555", 0.5),
    }
    marks: dict[str, Any] = {f"class {i}": (colours[i], "#555555", 0.5) for i in classes} | rings
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=9, label=label,
               markerfacecolor=face, markeredgecolor=edge, markeredgewidth=width)
        for label, (face, edge, width) in marks.items()
    ]  # fmt: skip
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(handles), 8)}
    figure.legend(handles=handles, frameon=False, fontsize="small", **where)


def _class_colours(num_classes: int) -> list[tuple[float, float, float, float]]:
    from matplotlib import colormaps

    # The ends of the map are nearly black; four fifths of it leave room for a number.
    places = np.linspace(0.1, 0.9, num_classes) if num_classes > 1 else np.array([0.5])
    return [tuple(colour) for colour in colormaps["RdBu"](places)]


def _ring(predicted: int, gold: int, colours: Sequence[tuple[float, ...]]) -> Any:
    if gold == _UNLABELLED:
        return colours[predicted]
    return _GOLD if predicted == gold else colours[gold]


def _write_words(
    axes: "Axes", x: np.ndarray, y: np.ndarray, words: Sequence[str], size: float
) -> None:
    crowded = len([word for word in words if word]) > 12
    below = 0.05 * max(1.0, float(np.max(y))) + 0.15
    for node, word in enumerate(words):
        if word:
            axes.text(
                x[node],
                y[node] - below,
                word,
                ha="right" if crowded else "center",
                va="top",
                rotation=60 if crowded else 0,
                rotation_mode="anchor" if crowded else "default",
                fontsize=max(5.0, size * 0.8),
                # Words of inner nodes stand on the lines to their children.
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                zorder=1.5,
            )
