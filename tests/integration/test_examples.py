"""Every example runs, learns and leaves no files; the models of sentiment take real trees too."""

import contextlib
import io
import logging
import re
import runpy
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from benchmarks.autobatch import PaddedTranslate
from benchmarks.decisions import Twin, values
from pyg_dynbatch import blocks as td
from pyg_dynbatch.autobatch import autobatch
from tests.example_files import FOLDER, USES, defined_in

ANY = float("inf")

# The text before each number that an example prints, and the bounds of the number.
BOUNDS = {
    "any_conv_over_dag": [(r"GINEConv: .* topological order", 0.9, 1)],
    "autobatch_decisions": [
        (f"{name}: largest difference.*, of a gradient", 0, 1e-11)
        for name in ("spinn", "act", "greedy", "beam", "tree")
    ],
    "autobatch_lattice": [
        ("tags right with the lexicon:", 0.6, 1),
        ("tags right without:", 0.35, 0.75),
    ],
    "autobatch_spinn": [
        # The most frequent class has 0.12.
        ("test accuracy with the parse:", 0.3, 1),
        ("test accuracy with its own decisions:", 0.3, 1),
        ("flushes; words at most", 5, 12),
    ],
    "autobatch_symbolic": [
        ("step  0: median error", 0.02, 0.2),
        ("step 39: median error", 0, 0.005),
        ("step 39: .*, mean", 0, 0.1),
    ],
    "autobatch_syntax": [
        ("syntax trees of", 300, ANY),
        ("syntax trees of .* test accuracy", 0.4, 1),
        ("bags of words of .* test accuracy", 0.4, 1),
    ],
    "autobatch_translation": [("loss", 0, 0.8), ("words right:", 0.6, 1)],
    "autobatch_tree_lstm": [
        ("64 examples,", 2496, 2496),
        ("largest difference to the layer:", 0, 1e-12),
        ("largest difference of a gradient:", 0, 1e-12),
    ],
    "blocks_attention": [("solved", 0.8, 1)],
    "blocks_calculator": [("test accuracy", 0.75, 1), ("predicting positive", 0.4, 0.6)],
    "blocks_language_id": [("right on new sentences:", 8, 12)],
    "blocks_sentiment": [
        (name, 0.9, 1) for name in ("root_hits", "root_binary_hits", "all_hits", "all_binary_hits")
    ],
    "blocks_text": [
        ("plain RNN: test accuracy", 0.95, 1),
        ("LSTM: test accuracy", 0.95, 1),
        ("pairs of words: test accuracy", 0.8, 0.98),
        # Without the order of the words, what is negated is unknown.
        ("bag of words: test accuracy", 0.3, 0.7),
    ],
    "blocks_tree_lstm": [("nodes", 0.95, 1), ("roots", 0.9, 1)],
    "blocks_weave": [("test error", 0, 0.4), ("bonds,", 1, 2)],
    "dynamic_batching_in_one_page": [("as fast; test accuracy", 0.9, 1)],
    "molecule_pair_feature": [("without the feature:", 0.6, ANY)],
    "molecule_predict_and_draw": [("pictures:", 10, ANY), ("atom is polar in", 8, ANY)],
    "own_lightning_module": [("validation accuracy:", 0.4, 1)],
    "own_cell": [("mean error of the count after training:", 0, 0.1)],
    "python_ast": [("test accuracy", 0.7, 1), ("positive", 0.5, ANY)],
    "sentiment_plain_pytorch": [("roots", 0.9, 1), ("nodes", 0.9, 1)],
    "tree_lstm_in_pyg_model": [(r"SAGEConv \+ Tree-LSTM: test accuracy", 0.9, 1)],
    "weave_in_pyg_model": [("three SAGEConv: test error", 0.5, ANY)],
    "weave_with_engine": [("", 100, ANY), ("ms, layer", 0, ANY)],
}
SLOW = (
    "any_conv_over_dag",
    "autobatch_lattice",
    "autobatch_spinn",
    "autobatch_syntax",
    "autobatch_translation",
    "blocks_attention",
    "blocks_calculator",
    "blocks_sentiment",
    "blocks_text",
    "blocks_tree_lstm",
    "blocks_weave",
    "dynamic_batching_in_one_page",
    "molecule_predict_and_draw",
    "python_ast",
    "tree_lstm_in_pyg_model",
    "weave_in_pyg_model",
)
# Tested by files of their own.
ELSEWHERE = [
    "deepchem_features", "json_documents", "predict_with_ray", "sick", "sst_contextual", *USES
]  # fmt: skip


# Pairs of numbers that an example compares, and what must hold for them.
COMPARED: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "any_conv_over_dag": (r"stacked (\d\.\d+), .* order (\d\.\d+)", lambda a, b: a < b),
    "autobatch_lattice": (
        r"lexicon: (\d\.\d+)\n.*without: (\d\.\d+)",
        lambda lexicon, without: without + 0.03 < lexicon,
    ),
    "autobatch_symbolic": (r"mean (\d\.\d+)(?s:.*)mean (\d\.\d+)", lambda a, b: b < a / 5),
    "blocks_calculator": (r"as (\d+) batched calls by depth\n.* as (\d+) bat", lambda a, b: b < a),
    "molecule_pair_feature": (
        r"without the feature: (\d\.\d+), with it (\d\.\d+)",
        lambda without, with_it: with_it < without / 2,
    ),
    "tree_lstm_in_pyg_model": (
        r"accuracy (\d\.\d+)(?s:.*)accuracy (\d\.\d+)",
        lambda plain, recursive: plain + 0.05 < recursive,
    ),
    "weave_in_pyg_model": (
        r"test error (\d\.\d+)(?s:.*)test error (\d\.\d+)",
        lambda convolutions, weave: weave < convolutions / 2,
    ),
}


def printed_by(name: str) -> str:
    out, log = io.StringIO(), logging.getLogger("lightning.pytorch")
    level = log.level
    with contextlib.redirect_stdout(out), mock.patch.object(sys, "argv", [f"{name}.py"]):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    log.setLevel(level)
    return out.getvalue()


@pytest.mark.parametrize("name", ["spinn", "act", "greedy", "beam", "tree"])
def test_decisions_train_as_those_of_python(name: str) -> None:
    names = defined_in("autobatch_decisions")
    torch.manual_seed(0)
    sentences = names["draw"](8, 5)
    models = [names["MODELS"][name](6).double().train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.02) for model in models]
    tensors, python = autobatch(models[0]), autobatch(Twin(models[1]))
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(5):
            results = tensors(sentences), python(sentences, batch=False)
            torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
            for result, optimizer in zip(results, optimizers, strict=True):
                optimizer.zero_grad()
                values(result, 8).square().sum().backward()
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
        assert mine.grad is None or not mine.grad.any() or other.grad is not None


def test_every_example_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted([*BOUNDS, *ELSEWHERE])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in BOUNDS]
)
def test_example_runs_and_learns(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = printed_by(name)
    for before, least, most in BOUNDS[name]:
        found = re.search(rf"{before} ?(\d+(?:\.\d+)?)", printed)
        assert found is not None, printed
        assert least <= float(found.group(1)) <= most, printed
    if name in COMPARED:
        pattern, holds = COMPARED[name]
        pairs = re.findall(pattern, printed)
        assert pairs and all(holds(float(a), float(b)) for a, b in pairs), printed
    assert list(tmp_path.iterdir()) == [], "the example leaves files"


def test_attention_is_a_weighted_mean() -> None:
    attention = defined_in("blocks_attention")["attention"]
    score = td.Function(torch.nn.Linear(2, 1))
    block = td.Map(td.Vector(2)) >> attention(score)
    rows = torch.randn(7, 2)
    with torch.no_grad():
        expected = score.tf_fn(rows).softmax(0).mul(rows).sum(0)
        torch.testing.assert_close(block.eval(rows.tolist()), expected)


def test_spinn_flushes_no_more_often_than_its_longest_example() -> None:
    torch.manual_seed(0)
    model = autobatch(defined_in("autobatch_spinn")["Spinn"](8))
    sentences = [(list(torch.randint(16, (length,))), None) for length in (1, 3, 7, 12, 12)]
    alone = [model.explain([sentence]).flushes for sentence in sentences]
    together = model.explain(sentences)
    assert together.flushes == max(alone) < sum(together.reads.values())
    torch.testing.assert_close(model(sentences), model(sentences, batch=False))


def test_translation_equals_the_padded_and_masked_model() -> None:
    torch.manual_seed(0)
    names = defined_in("autobatch_translation")
    examples = names["draw"](20, seed=1)
    source, target = (
        pad_sequence([torch.stack(example[part]) for example in examples], True) for part in (0, 1)
    )
    lengths = torch.tensor([len(words) for words, _ in examples])
    model = autobatch(names["Translate"](6).double())
    padded = PaddedTranslate(model.plain).double()
    model(examples)
    scores, example = model.emitted["scores"]
    words = torch.cat([torch.stack(part) for _, part in examples])
    found = torch.zeros(20, dtype=torch.double).index_add(
        0, example, cross_entropy(scores, words, reduction="none") / lengths[example]
    )
    expected = padded(source, lengths, target)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ours, theirs = (
        torch.autograd.grad(losses.square().sum(), list(parameters))
        for losses, parameters in ((found, model.parameters()), (expected, padded.in_order))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


METRICS = {
    "blocks_tree_lstm": ["node_loss", "node_hit", "root_loss", "root_hit"],
    "blocks_sentiment": [
        f"{where}_{what}" for where in ("root", "all") for what in ("loss", "hits", "binary_hits")
    ],
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("source", ["samples", "treebank"])
def test_model_of_sentiment_trains_on_real_trees(name, source, samples, shared_data):
    path = samples / "sst" / "train.txt" if source == "samples" else shared_data("sst/train.txt")
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")[:50]
    trees = [defined_in("blocks_tree_lstm")["read_tree"](line) for line in lines]
    words = sorted({word for line in lines for word in re.findall(r"([^ ()]+)\)", line)})
    make = "model_of" if name == "blocks_sentiment" else "sentiment"
    model = defined_in(name)[make](words, 8, 12)
    traced = [model.tracer(tree) for tree in trees]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    found = [defined_in(name)["run_epoch"](model, traced, optimizer) for _ in range(3)]
    assert sorted(found[0]) == sorted(METRICS[name])
    loss = "all_loss" if name == "blocks_sentiment" else "node_loss"
    assert found[2][loss] < found[0][loss]


def test_the_reader_accepts_the_unusual_tokens_of_the_treebank() -> None:
    read = defined_in("blocks_tree_lstm")["read_tree"]
    line = "(1 (2 It) (0 (2 -LRB-) (2 8\N{NO-BREAK SPACE}1\\/2)))"
    assert read(line) == [1, [2, "It"], [0, [2, "-LRB-"], [2, "8\N{NO-BREAK SPACE}1\\/2"]]]
    assert read("(3 (2 7) (4 x))") == [3, [2, "7"], [4, "x"]]
