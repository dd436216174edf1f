"""The tree models: batches, loaders, dropout, embeddings, checkpoints, and what they refuse."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as PyGDataLoader

from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import Collater, DataLoader
from pyg_dynbatch.models import TreeClassifier, TreeEncoder, TreeSimilarity
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, TreeGRU, TreeRNN
from pyg_dynbatch.testing import assert_model_agrees
from pyg_dynbatch.trees.models import make_layer
from tests.strategies import (
    Dag,
    balanced,
    chain,
    few,
    full_trees,
    single_node,
    star,
    structures,
    trees,
)

FEW = few(8)
CELLS = ("nary", "child_sum", "gru", "rnn")
ARITY = {"nary": 3, "child_sum": None, "gru": 3, "rnn": 3}
TOKENS = 11


def example(dag: Dag, seed: int = 0, every: int = 1, **fields: Any) -> DynTreeData:
    """Tokens on every ``every``-th node."""
    token = (torch.arange(dag.num_nodes) * 7 + seed) % TOKENS
    token[torch.arange(dag.num_nodes) % every > 0] = -1
    return DynTreeData(
        dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes, token=token, **fields
    )


def pair(first: Dag, second: Dag, seed: int = 0) -> DynTreeData:
    shifted = [tuple(c + first.num_nodes for c in below) for below in second.children]
    return example(Dag((*first.children, *shifted)), seed)


def classifier(cell: str = "nary", **options: Any) -> TreeClassifier:
    return TreeClassifier(TOKENS, 5, 4, 3, cell=cell, arity=3, **options)


def similarity(cell: str = "child_sum", **options: Any) -> TreeSimilarity:
    return TreeSimilarity(TOKENS, 5, 4, 3, similarity_channels=6, cell=cell, arity=3, **options)


EXAMPLES = [
    example(balanced(2)),
    example(single_node(), 3),
    example(chain(5), 1, every=2),
    example(star(4), 2, every=3),
]
PAIRS = [pair(balanced(1), chain(3)), pair(single_node(), single_node(), 4), pair(star(3), star(4))]


def message(action: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("cell", CELLS)
@FEW
@given(data=st.data())
def test_a_batch_is_like_its_examples_alone(cell: str, data: st.DataObject) -> None:
    dags = data.draw(st.lists(structures(10, 3), min_size=1, max_size=4))
    every = data.draw(st.integers(1, 3))
    examples = [example(dag, seed, every) for seed, dag in enumerate(dags)]
    assert_model_agrees(classifier(cell), examples, Collater(arity=ARITY[cell]))
    several = st.lists(st.tuples(trees(6, 3), full_trees(4)), min_size=1, max_size=4)
    pairs = [pair(*dags, seed) for seed, dags in enumerate(data.draw(several))]
    assert_model_agrees(similarity(cell), pairs, Collater(arity=ARITY[cell]))


@pytest.mark.parametrize("cell", ("nary", "child_sum"))
def test_equal_words_are_computed_once(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_dynbatch.trees.models._MANY_LEAVES", 1)
    model = classifier(cell).double()
    batch = Collater(arity=ARITY[cell])([EXAMPLES[0]] * 3 + EXAMPLES)
    rows: list[int] = []
    model.encoder.layer.register_forward_pre_hook(lambda m, given: rows.append(len(given[0])))

    def results() -> list[torch.Tensor]:
        logits = model(batch)
        return [logits, *torch.autograd.grad(logits.cos().sum(), list(model.parameters()))]

    shared = results()
    assert rows.pop() < batch.schedule.num_inputs
    monkeypatch.setattr("pyg_dynbatch.trees.models._WORTH_SHARING", -1.0)
    torch.testing.assert_close(results(), shared, rtol=1e-10, atol=1e-10)
    assert rows.pop() == batch.schedule.num_inputs


@pytest.mark.parametrize("option", ("embedding_dropout", "recurrent_dropout"))
def test_leaves_with_dropout_of_their_own_are_computed_each(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyg_dynbatch.trees.models._MANY_LEAVES", 1)
    model = classifier(**{option: 0.5})
    batch = Collater(arity=3)([EXAMPLES[0]] * 3)
    rows: list[int] = []
    model.encoder.layer.register_forward_pre_hook(lambda m, given: rows.append(len(given[0])))
    model(batch)
    model.eval()(batch)
    # Dropout that stays on at inference, and a hook on the embedding, which might add noise.
    model.encoder.input_dropout.train()
    model.encoder.layer.cell.train()
    model(batch)
    model.eval().encoder.embedding.register_forward_hook(lambda m, token, found: found)
    model(batch)
    dropping, evaluating, *others = rows
    assert evaluating < dropping == batch.num_nodes
    assert others == [dropping, dropping]


class HalfOfTheRows(nn.Module):
    """Dropout of a user's own, which does not ask whether it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.5)


def dropout_trains(model: TreeClassifier) -> None:
    model.encoder.input_dropout.train()


def probability_changes(model: TreeClassifier) -> None:
    model.encoder.input_dropout.train().p = 0.7


def own_dropout(model: TreeClassifier) -> None:
    model.encoder.input_dropout = HalfOfTheRows().eval()


def dropout_in_the_embedding(model: TreeClassifier) -> None:
    model.encoder.embedding = nn.Sequential(model.embedding, nn.Dropout(0.5))


@pytest.mark.parametrize(
    "switch", (dropout_trains, probability_changes, own_dropout, dropout_in_the_embedding)
)
def test_equal_leaves_have_their_own_dropout_whoever_drops(
    switch: Callable[[TreeClassifier], None],
) -> None:
    model = classifier(embedding_dropout=0.0 if switch is probability_changes else 0.5).eval()
    leaves = DynTreeData(torch.empty(2, 0, dtype=torch.long), token=torch.ones(200).long())
    batch = Collater(arity=3)([leaves])
    assert len(model(batch).unique(dim=0)) == 1
    switch(model)
    assert len(model(batch).unique(dim=0)) > 10


def test_one_stock_batch_serves_models_of_different_arity() -> None:
    stock = Batch.from_data_list(EXAMPLES)
    for cell in CELLS:
        model = classifier(cell)
        assert torch.equal(model(stock), model(Collater(arity=ARITY[cell])(EXAMPLES)))


@pytest.mark.parametrize("cell", CELLS)
def test_stock_loader_gives_the_same(cell: str) -> None:
    model = classifier(cell)
    (ours,) = DataLoader(EXAMPLES, batch_size=4, arity=ARITY[cell])
    (stock,) = PyGDataLoader(EXAMPLES, batch_size=4)
    assert not hasattr(stock, "schedule")
    assert torch.equal(model(ours), model(stock))
    assert not any(isinstance(value, Levels) for _, value in stock), "nothing is kept in it"


def test_roots_that_are_none_are_refused() -> None:
    batch = Collater()([pair(balanced(1), balanced(1))])
    batch.root_index = batch.root_index.flip(0)
    text = message(lambda: similarity()(batch), ValueError)
    assert "root_index does not belong to edge_index" in text


def test_a_stock_batch_that_cannot_be_scheduled_names_the_example() -> None:
    four = DynTreeData(torch.tensor([[0, 1, 2, 3], [4] * 4]), token=torch.arange(5))
    (stock,) = PyGDataLoader([EXAMPLES[0], four, EXAMPLES[1]], batch_size=3)
    text = message(lambda: classifier()(stock), ValueError)
    assert text.startswith("TreeEncoder: example 1 of the batch: ")
    loop = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), token=torch.ones(2).long(), num_nodes=2)
    good = Data(edge_index=torch.tensor([[0], [1]]), token=torch.ones(2).long(), num_nodes=2)
    text = message(lambda: classifier()(Batch.from_data_list([good, good, loop])), ValueError)
    assert "example 2 of the batch: " in text and "has a cycle" in text


def test_one_example_without_a_batch() -> None:
    model = classifier()
    plain = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3,
                 token=torch.tensor([5, 6, -1]))  # fmt: skip
    alone = DynTreeData(plain.edge_index, num_nodes=3, token=plain.token)
    torch.testing.assert_close(model(plain), model(Collater(arity=3)([alone])))
    batch = Collater(arity=3)(EXAMPLES)
    roots = [model(Collater(arity=3)([e]))[e.root_index] for e in EXAMPLES]
    torch.testing.assert_close(model(batch)[batch.root_index], torch.cat(roots))


def test_features_instead_of_tokens() -> None:
    dag = balanced(2)
    tree = DynTreeData(dag.edge_index, num_nodes=7, x=torch.randn(7, 4))
    model = TreeClassifier(0, 5, 4, 3)
    assert model.embedding is None
    assert model(Collater(arity=2)([tree, tree])).shape == (14, 5)
    some = torch.arange(7) > 2
    tree.has_input = some
    stock = Batch.from_data_list([tree, tree])
    torch.testing.assert_close(model(stock), model(Collater(arity=2)([tree, tree])))


def test_encoder_takes_a_top_down_layer() -> None:
    encoder = TreeEncoder(TOKENS, 4, NaryTreeLSTM(4, 3, 3, direction="top_down"))
    batch = Collater(arity=3, direction="both")(EXAMPLES)
    found = encoder(batch)
    torch.testing.assert_close(encoder(Batch.from_data_list(EXAMPLES)), found)
    token = batch.token.clamp(min=0)
    rows = encoder.embedding(token) * (batch.token >= 0)[:, None]
    wanted = encoder.layer(rows, batch.edge_index, child_slot=batch.child_slot)
    torch.testing.assert_close(found, wanted)
    alone = Collater(arity=3, direction="top_down")(EXAMPLES)
    fields = set(alone.keys())
    assert torch.equal(encoder(alone), found)
    assert set(alone.keys()) == fields, "the schedule of the loader is taken, none is made"
    for other in (Collater(arity=3)(EXAMPLES), Collater()(EXAMPLES)):
        torch.testing.assert_close(encoder(other), found)


@pytest.mark.parametrize("option", ("embedding_dropout", "recurrent_dropout", "output_dropout"))
@pytest.mark.parametrize("cell", ("nary", "child_sum", "gru"))
def test_dropout_only_while_training(cell: str, option: str) -> None:
    plain = classifier(cell)
    model = classifier(cell, **{option: 0.5})
    model.load_state_dict(plain.state_dict())
    batch = Collater(arity=ARITY[cell])(EXAMPLES)
    wanted = plain(batch)
    assert torch.equal(model.eval()(batch), wanted)
    model.train()
    assert not torch.allclose(model(batch), wanted)
    assert not torch.equal(model(batch), model(batch))
    if option == "output_dropout":  # leaves the state alone
        assert torch.equal(model.encoder(batch), model.encoder(batch))


@pytest.mark.parametrize("make", (classifier, similarity))
def test_sparse_gradients_of_the_embedding(make: Callable[..., nn.Module]) -> None:
    dense, sparse = make(), make(sparse_embedding=True)
    sparse.load_state_dict(dense.state_dict())
    batch = Collater(arity=dense.encoder.layer.arity)(PAIRS)
    for model in (dense, sparse):
        model(batch).square().sum().backward()
    assert sparse.embedding.weight.grad.is_sparse
    torch.testing.assert_close(sparse.embedding.weight.grad.to_dense(), dense.embedding.weight.grad)
    others = zip(dense.named_parameters(), sparse.named_parameters(), strict=True)
    for (name, mine), (_, theirs) in others:
        if "embedding" not in name:
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("make", (classifier, similarity))
def test_checkpoints(make: Callable[..., nn.Module]) -> None:
    model, other = make(), make()
    batch = Collater(arity=model.encoder.layer.arity)(PAIRS)
    assert not torch.equal(model(batch), other(batch))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model(batch), other(batch))
    assert "grades" not in model.state_dict()
    wrong = TreeClassifier(TOKENS + 1, 5, 4, 3, arity=3)
    text = message(lambda: wrong.load_state_dict(classifier().state_dict()), RuntimeError)
    assert "size mismatch for encoder.embedding.weight" in text


def test_reset_parameters() -> None:
    model = similarity()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.reset_parameters()
    assert all(
        not torch.equal(before[name], value)
        for name, value in model.state_dict().items()
        if not name.endswith("cell.bias")
    )
    weight = classifier().embedding.weight
    assert weight.abs().max() <= 0.05


def test_similarity_by_the_equations() -> None:
    model, batch = similarity().double(), Collater()(PAIRS)
    hidden = model.encoder(batch)
    weight, bias = model.compare.weight, model.compare.bias
    rows = []
    for left, right in batch.root_index.view(-1, 2).tolist():
        times, plus = hidden[left] * hidden[right], (hidden[left] - hidden[right]).abs()
        compared = torch.sigmoid(weight[:, :3] @ times + weight[:, 3:] @ plus + bias)
        rows.append(torch.softmax(model.classifier(compared), 0))
    wanted = torch.stack(rows)
    found = model(batch)
    torch.testing.assert_close(found.exp(), wanted)
    torch.testing.assert_close(model.score(found), wanted @ torch.arange(1.0, 6.0).double())


def test_layers_by_name() -> None:
    kinds = {"nary": NaryTreeLSTM, "child_sum": ChildSumTreeLSTM, "gru": TreeGRU, "rnn": TreeRNN}
    for cell, kind in kinds.items():
        assert type(make_layer(cell, 4, 3)) is kind
    assert make_layer("nary", 4, 3, forget_bias=0.25).cell.forget_bias == 0.25
    for cell in ("lstm", "rnn"):
        match = rf"no layer for cell '{cell}'[\s\S]*'gru', 'rnn'; 'rnn' without recurrent dropout"
        with pytest.raises(ValueError, match=match):
            make_layer(cell, 4, 3, recurrent_dropout=0.1)


TREE = DynTreeData(balanced(1).edge_index, num_nodes=3, x=torch.zeros(3, 4))
WIDE = DynTreeData(balanced(1).edge_index, num_nodes=3, x=torch.zeros(3, 6))
FIRST = next((n, t) for n, t in enumerate(Collater()(EXAMPLES).token.tolist()) if t > 2)
THREE_ROOTS = example(Dag(((), (), ())))


@pytest.mark.parametrize(
    ("model", "batch", "match"),
    [
        (classifier(), Collater(arity=2)(EXAMPLES[:1]), "the schedule was made for"),
        (classifier(), Collater(arity=3)([TREE]), "the batch has no token.*num_tokens=0 for"),
        (TreeClassifier(0, 5, 4, 3), Collater(arity=2)(EXAMPLES[:1]), "the batch has no x"),
        (TreeClassifier(0, 5, 4, 3), Collater(arity=2)([WIDE]), "floating .row, 4."),
        (
            TreeClassifier(3, 5, 4, 3, arity=3),
            Collater(arity=3)(EXAMPLES),
            f"token is not in the embedding.*0 to 2.*got: +{FIRST[1]}.*node {FIRST[0]} of the",
        ),
        (
            similarity(),
            Collater()(EXAMPLES[:2]),
            "TreeSimilarity: not two roots per example.*got:      1 roots.*example 0 of the batch",
        ),
        # Four roots for two examples, but not two each.
        (similarity(), Collater()([THREE_ROOTS, EXAMPLES[0]]), "got:      3 roots"),
        (similarity(), THREE_ROOTS, "expected: 2 roots"),
    ],
)
def test_batches_that_do_not_fit(model: nn.Module, batch: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError, IndexError), match=f"(?s){match}"):
        model(batch)


def test_input_gradients_reach_the_embedding_of_leaves_and_inner_nodes() -> None:
    model, batch = classifier(), Collater(arity=3)([example(balanced(1))])
    model.encoder(batch)[batch.root_index].sum().backward()
    used = model.embedding.weight.grad.abs().sum(1) > 0
    assert sorted(used.nonzero()[:, 0].tolist()) == sorted(batch.token.unique().tolist())


def test_a_token_below_none_is_refused_in_stock_batches() -> None:
    tree = DynTreeData(torch.tensor([[0], [1]]), num_nodes=2, token=torch.tensor([-2, 1]))
    with pytest.raises(ValueError, match="token is out of range at node 0"):
        classifier("child_sum")(Batch.from_data_list([tree]))
