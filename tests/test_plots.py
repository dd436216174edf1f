"""Figures: layouts computed by hand and the contents of the axes; no pixels are compared."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from matplotlib.colors import to_hex

from pyg_dynbatch import plots
from pyg_dynbatch.metrics import roc_auc
from tests.strategies import Dag, trees


def one_axes():
    return plots.new_figure(1, 1, 4.0, 3.0)[1][0]


def drawn(children: tuple, predicted: list[int], gold: list[int], words: list[str], classes: int):
    tree = Dag(children)
    edges, slots, depth = tree.edge_index.numpy(), tree.child_slot.numpy(), np.array(tree.depth)
    labels = (np.array(predicted), np.array(gold))
    return plots.draw_tree(one_axes(), edges, slots, depth, *labels, words, classes)


def texts_of(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def labels_of(legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_steps_are_drawn_in_colours_until_one_of_them() -> None:
    tree = Dag(((), (), (0, 1), (), (2, 3)))
    depth = np.array(tree.depth)
    arrays = (tree.edge_index.numpy(), tree.child_slot.numpy(), depth, depth)
    axes = plots.draw_steps(one_axes(), *arrays, ["a", "b", "", "c", ""], until=1)
    _, nodes = axes.collections
    assert nodes.get_offsets()[:, 1].tolist() == tree.depth
    edges = [to_hex(colour) for colour in nodes.get_edgecolors()]
    assert edges == [plots.SEQUENCE[step] for step in depth]
    faces = [to_hex(colour) for colour in nodes.get_facecolors()]
    assert faces == [*edges[:4], "#ffffff"]
    assert texts_of(axes) == ["a", "b", "", "c", ""]


@given(trees(max_nodes=30))
def test_leaves_are_side_by_side_in_order_and_parents_between_children(tree: Dag) -> None:
    edges, slots = tree.edge_index.numpy(), tree.child_slot.numpy()
    x, y = plots.tree_layout(edges, slots, np.array(tree.depth))
    assert y.tolist() == tree.depth
    order: list[int] = []
    stack = list(reversed(tree.roots))
    while stack:
        node = stack.pop()
        stack.extend(reversed(tree.children[node]))
        if not tree.children[node]:
            order.append(node)
    assert x[order].tolist() == list(range(len(order)))
    for node, children in enumerate(tree.children):
        if children:
            assert x[node] == (x[children[0]] + x[children[-1]]) / 2
            assert list(x[list(children)]) == sorted(x[list(children)])


def test_layout_of_a_deep_chain_and_of_shared_nodes() -> None:
    n = 2000
    x, y = plots.tree_layout(
        np.stack([np.arange(n - 1), np.arange(1, n)]), np.zeros(n - 1, int), np.arange(n)
    )
    assert (x == 0).all()
    diamond = np.array([[0, 0, 1, 2], [1, 2, 3, 3]])
    x, y = plots.tree_layout(diamond, np.array([0, 0, 0, 1]), np.array([0, 1, 1, 2]))
    assert not np.isnan(x).any()


def test_tree_shows_predictions_words_and_rings() -> None:
    axes = drawn(((), (), (0, 1)), [0, 4, 1], [0, 3, -1], ["bad", "", ""], 5)
    assert texts_of(axes) == ["0", "4", "bad"]
    rings, faces = (points.get_facecolors() for points in axes.collections[1:])
    assert rings[0].tolist() == pytest.approx([0.878, 0.659, 0.0, 1.0], abs=0.01)  # gold: right
    assert rings[1].tolist() != faces[1].tolist()  # the colour of class 3: wrong
    assert (len(rings), len(faces)) == (2, 3)  # no label: no ring


def test_every_word_is_drawn_and_signs_are_not_rotated() -> None:
    assert texts_of(drawn(((),), [0], [-1], ["word"], 1)) == ["word"]
    axes = drawn(((), (), (0, 1)), [7, 3, 7], [7, 5, 7], ["7", "5", "MAX"], 10)
    assert texts_of(axes) == ["7", "3", "7", "7", "5", "MAX"]
    words = [*["word", "+"] * 7, "root"]
    axes = drawn((*[()] * 14, tuple(range(14))), [0] * 15, [-1] * 15, words, 2)
    assert {text.get_text(): text.get_rotation() for text in axes.texts} == {
        "word": 60, "+": 0, "root": 60
    }  # fmt: skip


def test_legend_of_many_classes_names_a_few() -> None:
    figure, _ = plots.new_figure(1, 1, 4.0, 3.0)
    plots.draw_tree_legend(figure, 300)
    labels = labels_of(figure.legends[0])
    assert len(labels) == 13
    assert labels[0] == "class 0" and labels[9] == "class 299"


def test_schedule_has_one_bar_per_step_in_the_colour_of_its_operation() -> None:
    axes = plots.draw_schedule(one_axes(), ["leaf", "node"], [0, 1, 1, 0], [9, 4, 2, 1], "agenda")
    heights = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in axes.patches}
    assert heights == {0: 9, 1: 4, 2: 2, 3: 1}
    assert len({bar.get_facecolor() for bar in axes.patches}) == 2
    assert labels_of(axes.get_legend()) == ["leaf (2 steps, 10 rows)", "node (2 steps, 6 rows)"]
    with pytest.raises(ValueError, match="operation and rows differ in length"):
        plots.draw_schedule(one_axes(), ["leaf"], [0, 0], [1], "depth")


def test_curves_have_labels() -> None:
    axes = plots.draw_curves(
        one_axes(), {"train": ([0, 1], [1, 2]), "val": ([0], [3])}, "epoch", "loss"
    )
    assert [line.get_label() for line in axes.lines] == ["train", "val"]
    assert plots.draw_curves(one_axes(), {}, "epoch", "loss").get_legend() is None


def test_many_curves_differ_and_the_legend_is_next_to_them() -> None:
    many = {f"curve {number}": ([0, 1], [number, number]) for number in range(18)}
    axes = plots.draw_curves(one_axes(), many, "epoch", "loss")
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 18
    axes.figure.draw_without_rendering()
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1


@pytest.mark.parametrize("name", ["picture.png", "picture.svg", "deep/er/picture.pdf"])
def test_figures_are_saved_atomically(tmp_path: Path, name: str) -> None:
    figure, _ = plots.new_figure(1, 1, 2.0, 2.0)
    path = plots.save_figure(figure, tmp_path / name)
    assert path.stat().st_size > 500
    with pytest.raises(ValueError, match="not supported"):
        plots.save_figure(figure, path.with_suffix(".nothing"))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plots: matplotlib is missing"):
        plots.new_figure(1, 1, 1.0, 1.0)


def test_parity_shows_known_values_on_equal_axes() -> None:
    target = np.array([1.0, np.nan, 3.0])
    axes = plots.draw_parity(one_axes(), target, np.array([0.5, 9.0, 4.0]), "logS")
    assert axes.collections[0].get_offsets().tolist() == [[1.0, 0.5], [3.0, 4.0]]
    assert axes.get_xlim() == axes.get_ylim()
    assert axes.get_xlim()[0] < 0.5 < 4.0 < axes.get_xlim()[1]
    assert axes.get_title() == "logS"


def test_parity_without_values_and_with_one_value() -> None:
    points = plots.draw_parity(one_axes(), np.array([np.nan]), np.array([1.0])).collections[0]
    assert len(points.get_offsets()) == 0
    low, high = plots.draw_parity(one_axes(), np.array([2.0]), np.array([2.0])).get_xlim()
    assert low < 2.0 < high


def test_roc_is_a_staircase_whose_area_is_the_metric() -> None:
    random = np.random.default_rng(0)
    score = random.integers(0, 6, 200) / 6
    label = (random.random(200) < score).astype(float)
    label[:20] = np.nan
    x, y = plots.draw_roc(one_axes(), label, score).lines[1].get_data()
    known = ~np.isnan(label)
    area = np.trapezoid(y, x)
    assert area == pytest.approx(roc_auc(score[known], label[known] == 1))
    assert len(x) <= 7 and (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)


def test_a_learning_curve_reads_the_table_of_lightning(tmp_path: Path) -> None:
    table = tmp_path / "metrics.csv"
    table.write_text("epoch,train/loss,val/loss,val/rmse\n0,2.0,,\n0,,1.5,3\n1,1.0,,\n1,,1.2,2\n")
    path = plots.draw_learning_curve(table, tmp_path / "curve.png", ["loss", "rmse"])
    assert path.stat().st_size > 1000
