"""Draw the animation of the front page: a mini-batch of trees is computed step by step."""

import io
import re

from matplotlib import rc_context
from torch_geometric.data import Data

from pyg_dynbatch.data import from_nested
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.visualize import counted, draw_schedule, draw_steps, new_figure

SENTENCES = (
    ("not", ("a", ("good", "film"))),
    ("we", ("liked", "it")),
    (("what", "a"), ("great", "cast")),
)
SECONDS = 1.8
"""Time per picture."""
INK = "#123456"
"""Colour of text and lines in matplotlib, replaced by that of the surrounding page."""

STYLE = """
<style>
.batching .frame { opacity: 0; animation: batching %(total).1fs step-end infinite }
@keyframes batching { 0%% { opacity: 1 } %(share).2f%% { opacity: 0 } 100%% { opacity: 0 } }
@media (prefers-reduced-motion: reduce) {
  .batching .frame { animation: none }
  .batching .frame:last-of-type { opacity: 1 }
}
</style>
"""


def batching_svg() -> str:
    """Return one SVG whose groups are shown in turn, without a script; the first is complete."""
    frames = [frame_svg(until) for until in (3, 0, 1, 2, 3)]
    head = re.search(r"<svg[^>]*?(viewBox=\"[^\"]*\")", frames[0])
    total = SECONDS * len(frames)
    label = "Three trees: all nodes of one depth, of all trees, are computed in one call."
    parts = [
        f'<svg class="batching" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" {head[1]} role="img" aria-label="{label}">',
        STYLE % {"total": total, "share": 100 / len(frames)},
    ]
    for number, frame in enumerate(frames):
        inside = re.search(r"<defs>.*</svg>", frame, flags=re.DOTALL)[0].removesuffix("</svg>")
        delay = SECONDS * number - total
        parts.append(f'<g class="frame" style="animation-delay: {delay:.1f}s">{inside}</g>')
    return "\n".join([*parts, "</svg>", ""])


def frame_svg(until: int) -> str:
    """Draw the trees above, and the steps up to one of them below."""
    batch, texts = mini_batch()
    arrays = [batch[key].numpy() for key in ("edge_index", "child_slot", "depth")]
    widths = list(batch.schedule.level_sizes)
    names = ["leaves", *(f"depth {number}" for number in range(1, len(widths)))]
    keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    ink = dict.fromkeys(keys, INK)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "batching", "font.size": 11, **ink}):
        figure, (above, below) = new_figure(2, 1, 4.8, 1.8)
        draw_steps(above, *arrays, batch.depth.numpy(), texts, until)
        shown, count = until + 1, counted(widths[until], "node")
        done = f"{counted(sum(widths), 'node')} in {counted(len(widths), 'call')}"
        title = f"step {until}: one call for {count}; in all, {done}"
        above.set_title(title, fontsize="medium")
        draw_schedule(below, names[:shown], list(range(shown)), widths[:shown], "")
        below.get_legend().remove()
        below.set(xlim=(-0.6, len(widths) - 0.4), ylim=(0, 2 * max(widths)))
        below.set_xticks(range(len(widths)), names)
        below.set_yticks([1, 10], ["1", "10"])
        below.spines[["top", "right"]].set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True)
    # Text, lines and empty nodes take the colours of the page, light or dark.
    paper = "var(--color-background-primary, white)"
    return out.getvalue().replace(INK, "currentColor").replace("#ffffff", paper)


def mini_batch() -> tuple[Data, list[str]]:
    """Collate the sentences; also return the word of every node."""
    words: dict[str, int] = {}

    def token(part: object) -> int | None:
        return words.setdefault(part, len(words)) if isinstance(part, str) else None

    batch = Collater()([from_nested(sentence, token=token) for sentence in SENTENCES])
    return batch, [[*words, ""][number] for number in batch.token.tolist()]
