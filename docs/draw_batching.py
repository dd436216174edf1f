"""Draw the animated picture of the README: ``python docs/draw_batching.py``.

Three trees of different shapes, and the steps in which one mini-batch computes them. The levels are
those that the collater of this package derives.
"""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from pyg_dynbatch.data import from_nested
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.plots import tree_layout

TREES = [(((1, 2), 3), (4, 5)), (1, (2, (3, (4, 5)))), ((1, 2), (3, 4))]
COLOURS = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677"]
WAITING = "#dddddd"
MILLISECONDS = 1100


def draw(trees: list, level_sizes: tuple[int, ...], steps: int) -> Image.Image:
    """Draw the trees after some steps, with one bar for each of them."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    left = 0.0
    for tree in trees:
        depth = tree.depth.numpy()
        x, _ = tree_layout(tree.edge_index.numpy(), tree.child_slot.numpy(), depth)
        x = x - x.min() + left
        left = x.max() + 1.5
        for child, parent in tree.edge_index.T.tolist():
            upper.plot(x[[child, parent]], depth[[child, parent]], color="#999999", zorder=1)
        colours = [COLOURS[level] if level < steps else WAITING for level in depth]
        upper.scatter(x, depth, s=200, c=colours, edgecolors="#555555", zorder=2)
    upper.set_ylim(-0.5, len(level_sizes) - 0.5)
    upper.set_title("three trees of a mini-batch", fontsize=12)
    for step, rows in enumerate(level_sizes):
        is_done = step < steps
        lower.barh(step, rows if is_done else 0, color=COLOURS[step])
        text = f"call {step + 1}: {rows} {'node' if rows == 1 else 'nodes'}"
        alpha = 1.0 if is_done else 0.5
        lower.text(-0.2, step, text, ha="right", va="center", fontsize=11, alpha=alpha)
    lower.set_xlim(-4, max(level_sizes) + 1)
    lower.set_ylim(len(level_sizes) - 0.5, -0.5)
    done = steps == len(level_sizes)
    total = sum(level_sizes)
    title = f"{steps} calls instead of {total}" if done else "one call computes a whole level"
    lower.set_title(title, fontsize=12)
    for axes in (upper, lower):
        axes.axis("off")
    buffer = BytesIO()
    figure.savefig(buffer, dpi=140)
    return Image.open(buffer).convert("RGB").quantize(32)


def main() -> None:
    """Write the picture."""
    trees = [from_nested(tree) for tree in TREES]
    level_sizes = Collater(arity=2)(trees).schedule.level_sizes
    frames = [draw(trees, level_sizes, steps) for steps in range(len(level_sizes) + 1)]
    durations = [MILLISECONDS] * len(frames)
    durations[-1] *= 3
    path = Path(__file__).parent / "_static" / "batching.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)


if __name__ == "__main__":
    main()
