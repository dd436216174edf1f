"""Every example in blocks runs, learns, and takes real trees where it claims to."""

import re
from pathlib import Path

import pytest
import torch

from pyg_dynbatch import blocks as td
from tests.example_files import FOLDER, defined_in
from tests.integration.test_examples import printed_by

# What stands before each figure, the least that it must be, and the most.
BOUNDS = {
    "blocks_attention": [("solved", 0.8, 1)],
    "blocks_text": [
        ("plain RNN: test accuracy", 0.95, 1),
        ("LSTM: test accuracy", 0.95, 1),
        ("pairs of words: test accuracy", 0.8, 0.98),
        # Without the order of the words it cannot be told what is negated.
        ("bag of words: test accuracy", 0.3, 0.7),
    ],
    "blocks_language_id": [("right on new sentences:", 8, 12)],
    "blocks_calculator": [("test accuracy", 0.75, 1), ("saying positive", 0.4, 0.6)],
    "blocks_tree_lstm": [("nodes", 0.95, 1), ("roots", 0.9, 1)],
    "blocks_sentiment": [
        (name, 0.9, 1) for name in ("root_hits", "root_binary_hits", "all_hits", "all_binary_hits")
    ],
    "blocks_weave": [("test error", 0, 0.4), ("bonds,", 1, 2)],
}
# Whole files; the two on trees of sentences also read, measure and keep the best.
LINES = dict.fromkeys(BOUNDS, 80) | {"blocks_tree_lstm": 135, "blocks_sentiment": 160}
EVERY = pytest.mark.parametrize("name", BOUNDS)


def test_every_example_in_blocks_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("blocks_*.py")) == sorted(BOUNDS)


@EVERY
def test_example_is_short_and_guarded(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES[name]
    assert text.endswith('\n\n\nif __name__ == "__main__":\n    main()\n')


@EVERY
def test_example_runs_and_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = printed_by(name)
    for before, least, most in BOUNDS[name]:
        found = re.search(rf"{before} (\d+(?:\.\d+)?)", printed)
        assert found is not None, printed
        assert least <= float(found.group(1)) <= most, printed
    assert list(tmp_path.iterdir()) == [], "an example leaves files behind"


def test_steps_of_the_calculator_by_agenda_are_fewer() -> None:
    by_depth, by_agenda = re.findall(r"as (\d+) batched calls", printed_by("blocks_calculator"))
    assert int(by_agenda) < int(by_depth)


def test_attention_is_a_weighted_mean() -> None:
    attention = defined_in("blocks_attention")["attention"]
    score = td.Function(torch.nn.Linear(2, 1))
    block = td.Map(td.Vector(2)) >> attention(score)
    rows = torch.randn(7, 2)
    with torch.no_grad():
        expected = score.tf_fn(rows).softmax(0).mul(rows).sum(0)
        torch.testing.assert_close(block.eval(rows.tolist()), expected)


# Real trees, in the form of the treebank.


def epochs_of(name: str, lines: list[str]) -> list[dict[str, float]]:
    """The metrics of three epochs of an example on trees of a file."""
    trees = [defined_in("blocks_tree_lstm")["read_tree"](line) for line in lines]
    words = sorted({word for line in lines for word in re.findall(r"([^ ()]+)\)", line)})
    make = "model_of" if name == "blocks_sentiment" else "sentiment"
    model = defined_in(name)[make](words, 8, 12)
    traced = list(model.build_loom_inputs(trees))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    return [defined_in(name)["run_epoch"](model, traced, optimizer) for _ in range(3)]


METRICS = {
    "blocks_tree_lstm": ["node_loss", "node_hit", "root_loss", "root_hit"],
    "blocks_sentiment": [
        f"{where}_{what}" for where in ("root", "all") for what in ("loss", "hits", "binary_hits")
    ],
}


@pytest.mark.parametrize("name", METRICS)
def test_model_of_sentiment_trains_on_sample_trees(name: str, samples: Path) -> None:
    lines = (samples / "sst" / "train.txt").read_text(encoding="utf-8").splitlines()
    found = epochs_of(name, lines)
    assert sorted(found[0]) == sorted(METRICS[name])
    loss = next(key for key in found[0] if key in ("node_loss", "all_loss"))
    assert found[2][loss] < found[0][loss]


@pytest.mark.parametrize("name", METRICS)
def test_model_of_sentiment_trains_on_the_treebank(name: str, shared_data: object) -> None:
    path: Path = shared_data("sst/train.txt")  # type: ignore[operator]
    lines = path.read_text(encoding="utf-8").split("\n")[:50]
    found = epochs_of(name, lines)
    loss = next(key for key in found[0] if key in ("node_loss", "all_loss"))
    assert found[2][loss] < found[0][loss]


def test_reader_takes_the_odd_tokens_of_the_treebank() -> None:
    read = defined_in("blocks_tree_lstm")["read_tree"]
    line = "(1 (2 It) (0 (2 -LRB-) (2 8\N{NO-BREAK SPACE}1\\/2)))"
    assert read(line) == [1, [2, "It"], [0, [2, "-LRB-"], [2, "8\N{NO-BREAK SPACE}1\\/2"]]]
    assert read("(3 (2 7) (4 x))") == [3, [2, "7"], [4, "x"]]
