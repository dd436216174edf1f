"""Law: a model written in blocks is the fused layer: same values and gradients.

The blocks are those of the examples, so the law holds for the code shown there.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.nn import NaryTreeLSTM, WeaveConv
from pyg_dynbatch.nn.pairs import Pairs
from tests.example_files import defined_in
from tests.laws.test_weave import numbers_of
from tests.nn.plain_weave import Molecules, close, gradients, molecules, shaken
from tests.strategies import few

FEW = few(5)
IN, OUT, WORDS = 3, 4, 6
Tree = list[Any]


# Tree-LSTM.


class Joint(nn.Module):
    """Multiply [x, h of the left, h of the right] by the weights of a cell of ``nn``.

    Args:
        cell: Its gates are in the order u, i, o, f; its hidden part has an f for each child.
        order: In which order the gates u, i, o, f0 and f1 are needed, by number.
        less_forget: Subtracted from the bias of the forget gates.
    """

    def __init__(self, cell: nn.Module, order: tuple[int, ...], less_forget: float) -> None:
        super().__init__()
        self.cell, self.order, self.less_forget = cell, order, less_forget

    def forward(self, rows: Tensor) -> Tensor:
        of_input = self.cell.weight_input.split(OUT)
        of_hidden = self.cell.weight_hidden.split(OUT)
        bias = self.cell.bias.split(OUT)
        weights, biases = [], []
        for gate in self.order:
            is_forget = gate >= 3
            shared = 3 if is_forget else gate
            weights.append(torch.cat([of_input[shared], of_hidden[gate]], 1))
            biases.append(bias[shared] - self.less_forget * is_forget)
        return linear(rows, torch.cat(weights), torch.cat(biases))


def plain_tree_lstm(layer: NaryTreeLSTM, words: nn.Module, scores: nn.Module) -> td.Block:
    example = defined_in("blocks_tree_lstm")
    cell = example["BinaryTreeLSTM"](IN, OUT)
    cell.gates = Joint(layer.cell, (0, 1, 2, 3, 4), 0)
    word = td.Scalar("int64") >> td.Function(words)
    return example["tree_lstm"](word, cell, scores, OUT) >> td.Void()


def sentiment_of_fold(layer: NaryTreeLSTM, words: nn.Module, scores: nn.Module) -> td.Block:
    example = defined_in("blocks_sentiment")
    cell = example["DropoutTreeLSTM"](IN, OUT, keep=0.75)
    cell.gates = Joint(layer.cell, (1, 0, 3, 4, 2), 1)
    word = td.Scalar("int64") >> td.Function(words)
    return example["sentiment"](word, cell, scores, OUT)


def trees() -> st.SearchStrategy[list[Tree]]:
    label = st.integers(0, 4)
    leaf = st.tuples(label, st.integers(0, WORDS - 1)).map(list)
    tree = st.recursive(leaf, lambda t: st.tuples(label, t, t).map(list), max_leaves=12)
    return st.lists(tree, min_size=1, max_size=5)


class Nodes:
    """All nodes of some trees, children first, as tensors for the fused layer."""

    def __init__(self, trees: list[Tree]) -> None:
        self.edges: list[tuple[int, int, int]] = []
        self.words: list[int] = []
        self.labels: list[int] = []
        self.roots = [self._add(tree) for tree in trees]

    def _add(self, tree: Tree) -> int:
        children = [self._add(child) for child in tree[1:]] if len(tree) == 3 else []
        number = len(self.words)
        self.words.append(-1 if children else tree[1])
        self.labels.append(tree[0])
        self.edges += [(child, number, slot) for slot, child in enumerate(children)]
        return number

    def states(self, layer: NaryTreeLSTM, words: nn.Module) -> Tensor:
        """Run the fused layer."""
        edges = torch.tensor(self.edges, dtype=torch.long).reshape(-1, 3).t()
        word = torch.tensor(self.words)
        has_input = word >= 0
        x = torch.where(has_input[:, None], words(word.clamp(min=0)), 0.0)
        schedule = schedule_structure(
            edges[:2], len(word), child_slot=edges[2], arity=2, has_input=has_input
        )
        return layer(x, schedule=schedule)


class Written(NamedTuple):
    """A model written in blocks, and the fused layers whose weights it has."""

    model: td.Compiler
    layer: NaryTreeLSTM
    words: nn.Module
    scores: nn.Module


@cache
def written(write: Callable[..., td.Block]) -> Written:
    layer = NaryTreeLSTM(IN, OUT, arity=2)
    with torch.no_grad():
        layer.cell.bias.normal_()
    words, scores = nn.Embedding(WORDS, IN), nn.Linear(OUT, 5)
    model = td.Compiler(write(layer, words, scores)).double().eval()
    return Written(model, layer, words, scores)


@pytest.mark.parametrize(
    ("write", "loss_of_nodes", "hits"),
    [(plain_tree_lstm, "node_loss", "node_hit"), (sentiment_of_fold, "all_loss", "all_hits")],
)
@FEW
@given(given_trees=trees())
def test_tree_lstm_in_blocks_is_the_fused_layer(
    write: Callable[..., td.Block], loss_of_nodes: str, hits: str, given_trees: list[Tree]
) -> None:
    model, layer, words, scores = written(write)
    weights = [*layer.parameters(), *words.parameters(), *scores.parameters()]
    assert {id(weight) for weight in weights} == {id(weight) for weight in model.parameters()}

    metrics = model(given_trees).metric_tensors
    got = [metrics[loss_of_nodes], metrics["root_loss"]]

    nodes = Nodes(given_trees)
    rows = scores(nodes.states(layer, words))
    labels = torch.tensor(nodes.labels)
    loss = cross_entropy(rows, labels, reduction="none")
    expected = [loss, loss[nodes.roots]]

    close(got, expected)
    close(gradients(got, weights), gradients(expected, weights))
    assert torch.equal(metrics[hits].bool(), rows.argmax(1) == labels)


@FEW
@given(given_trees=trees())
def test_metrics_of_fold_leave_neutral_nodes_out(given_trees: list[Tree]) -> None:
    model, layer, words, scores = written(sentiment_of_fold)
    metrics = model(given_trees).metric_tensors
    nodes = Nodes(given_trees)
    share = scores(nodes.states(layer, words)).softmax(1)
    label = torch.tensor(nodes.labels)
    is_root = torch.zeros(len(label), dtype=torch.bool)
    is_root[nodes.roots] = True
    is_neutral = label == 2
    is_positive = share[:, 3] + share[:, 4] > share[:, 0] + share[:, 1]
    right_side = is_positive == (label > 2)
    assert torch.equal(metrics["all_binary_hits"].bool(), right_side[~is_neutral])
    assert torch.equal(metrics["root_binary_hits"].bool(), right_side[~is_neutral & is_root])
    assert torch.equal(metrics["root_hits"].bool(), (share.argmax(1) == label)[is_root])


# Weave.


def in_blocks(convs: list[WeaveConv], table: nn.Module) -> td.Block:
    """Chain weave modules written in blocks, with the layers of the fused modules."""
    atoms = td.Map(td.InputRow("x", convs[0].atom_in))
    pairs = td.Map(td.Map(td.Scalar("int64") >> td.Function(table)))
    model: td.Block = td.Record([("atoms", atoms), ("codes", pairs)])
    for conv in convs:
        names = ("a", "aa", "pa", "p", "pp", "ap")
        layers = {name: nn.Sequential(getattr(conv, f"lin_{name}"), nn.ReLU()) for name in names}
        model = model >> defined_in("blocks_weave")["weave_module"](layers)
    rows = (td.Map(td.Metric("atom")), td.Map(td.Map(td.Metric("pair"))))
    return model >> rows >> td.Void()


@cache
def compiled_weave() -> tuple[td.Compiler, list[WeaveConv], nn.Module]:
    widths = {"aa": 3, "pa": 6, "ap": 4, "pp": 5}
    convs = [WeaveConv(3, 2, 4, 5, hidden=widths), WeaveConv(4, 5, 2, 3, hidden=widths)]
    table = nn.Embedding(5, 2)
    model = td.Compiler(in_blocks(convs, table)).double()
    for part in (*convs, table):
        shaken(part)
    return model, convs, table


@few(4)
@given(mols=molecules(4, 3).map(lambda m: Molecules(m.sizes, m.code)))
def test_weave_in_blocks_is_the_fused_layer(mols: Molecules) -> None:
    model, convs, table = compiled_weave()
    if not sum(mols.sizes):
        return
    x = torch.randn(sum(mols.sizes), 3, dtype=torch.double, requires_grad=True)
    examples = [
        {"atoms": [(n, size) for n in range(size)], "codes": codes}
        for size, codes in zip(mols.sizes, mols.tables(), strict=True)
    ]
    metrics = model(examples, {"x": x}).metric_tensors
    got = [metrics["atom"], metrics["pair"]]

    code = torch.tensor(mols.code, dtype=torch.uint8)
    pairs = Pairs.from_codes(code, mols.sizes, torch.ones(5, dtype=torch.bool))
    atom, pair = x, table(pairs.code.long())
    for conv in convs:
        atom, pair = conv(atom, pair, pairs)
    expected = [atom, pair[numbers_of(pairs, mols.ordered())]]

    close(got, expected)
    weights = [weight for part in (*convs, table) for weight in part.parameters()]
    close(gradients(got, [x, *weights]), gradients(expected, [x, *weights]))
