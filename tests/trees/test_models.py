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
from pyg_dynbatch.models import TreeClassifier, TreeEncoder, TreeSchema
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, TreeGRU, TreeRNN
from pyg_dynbatch.testing import assert_model_agrees
from pyg_dynbatch.trees.models import make_layer
from tests import strategies as some
from tests.strategies import Dag, balanced, chain, few, single_node, star

FEW = few(8)
CELLS = ("nary", "child_sum", "gru", "rnn")
ARITY = {"nary": 3, "child_sum": None, "gru": 3, "rnn": 3}
TOKENS = 11


def example(dag: Dag, seed: int = 0, every: int = 1, **fields: Any) -> DynTreeData:
    """Tokens on every ``every``-th node."""
    token = (torch.arange(dag.num_nodes) * 7 + seed) % TOKENS
    token[torch.arange(dag.num_nodes) % every > 0] = -1
    return DynTreeData(
        dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes, token=token,
        has_input=token >= 0, **fields,
    )  # fmt: skip


def classifier(cell: str = "nary", **options: Any) -> TreeClassifier:
    return TreeClassifier(TreeSchema(TOKENS, 5), 4, 3, cell=cell, arity=3, **options)


def without_tokens(**options: Any) -> TreeClassifier:
    return TreeClassifier(TreeSchema(0, 5), 4, 3, **options)


EXAMPLES = [
    example(balanced(2)),
    example(single_node(), 3),
    example(chain(5), 1, every=2),
    example(star(4), 2, every=3),
]


@pytest.mark.parametrize("cell", CELLS)
@FEW
@given(data=st.data())
def test_a_batch_is_like_its_examples_alone(cell: str, data: st.DataObject) -> None:
    dags = data.draw(st.lists(some.structures(10, 3), min_size=1, max_size=4))
    every = data.draw(st.integers(1, 3))
    examples = [example(dag, seed, every) for seed, dag in enumerate(dags)]
    assert_model_agrees(classifier(cell), examples, Collater(arity=ARITY[cell]))


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


class HalfOfTheRows(nn.Module):
    """Dropout of a user's own, which does not ask whether it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.5)


SWITCHES: dict[str, tuple[float, Callable[[TreeEncoder], Any]]] = {
    "dropout that trains": (0.5, lambda encoder: encoder.input_dropout.train()),
    "a changed rate": (0.0, lambda encoder: setattr(encoder.input_dropout.train(), "p", 0.7)),
    "own dropout": (0.5, lambda encoder: setattr(encoder, "input_dropout", HalfOfTheRows().eval())),
    "dropout in the embedding": (
        0.5,
        lambda encoder: setattr(
            encoder, "embedding", nn.Sequential(encoder.embedding, nn.Dropout(0.5))
        ),
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_equal_leaves_have_their_own_dropout_whoever_drops(switch: str) -> None:
    rate, turn = SWITCHES[switch]
    model = classifier(embedding_dropout=rate).eval()
    leaves = DynTreeData(torch.empty(2, 0, dtype=torch.long), token=torch.ones(200).long())
    batch = Collater(arity=3)([leaves])
    assert len(model(batch).unique(dim=0)) == 1
    turn(model.encoder)
    assert len(model(batch).unique(dim=0)) > 10


@pytest.mark.parametrize("cell", CELLS)
def test_stock_batches_give_the_same(cell: str) -> None:
    model = classifier(cell)
    (ours,) = DataLoader(EXAMPLES, batch_size=4, arity=ARITY[cell])
    (stock,) = PyGDataLoader(EXAMPLES, batch_size=4)
    for _ in range(2):
        assert torch.equal(model(ours), model(stock))
        assert not any(isinstance(value, Levels) for _, value in stock), "nothing is kept in it"
        model = classifier("child_sum" if cell == "nary" else "nary")  # of a different arity
        (ours,) = DataLoader(EXAMPLES, batch_size=4, arity=model.encoder.layer.arity)


def test_one_example_without_a_batch() -> None:
    model = classifier()
    plain = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3,
                 token=torch.tensor([5, 6, -1]), has_input=torch.tensor([1, 1, 0]))  # fmt: skip
    alone = DynTreeData(plain.edge_index, token=plain.token, has_input=plain.token >= 0)
    torch.testing.assert_close(model(plain), model(Collater(arity=3)([alone])))


def test_features_instead_of_tokens() -> None:
    dag = balanced(2)
    tree = DynTreeData(dag.edge_index, num_nodes=7, x=torch.randn(7, 4))
    model = without_tokens()
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


def test_parameters() -> None:
    dense, sparse = classifier(), classifier(sparse_embedding=True)
    batch = dense.collater()(EXAMPLES)
    assert not torch.equal(dense(batch), sparse(batch))
    sparse.load_state_dict(copy.deepcopy(dense.state_dict()))
    assert torch.equal(dense(batch), sparse(batch))
    for model in (dense, sparse):
        model(batch).square().sum().backward()
    assert sparse.embedding.weight.grad.is_sparse
    for mine, theirs in zip(dense.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.to_dense())
    before = {name: value.clone() for name, value in dense.named_parameters()}
    dense.reset_parameters()
    kept = [name for name, value in dense.named_parameters() if torch.equal(before[name], value)]
    assert all(name.endswith(("cell.bias", "classifier.bias")) for name in kept)
    assert dense.embedding.weight.abs().max() <= 0.05


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
NODE, TOKEN = next((n, t) for n, t in enumerate(Collater()(EXAMPLES).token.tolist()) if t > 2)
OUTSIDE = f"token is not in the embedding.*0 to 2.*got: +{TOKEN}.*node {NODE} of the"
FOUR = example(Dag(((), (), (), (), (0, 1, 2, 3))))
BELOW = DynTreeData(torch.tensor([[0], [1]]), num_nodes=2, token=torch.tensor([-2, 1]))
UNSAID = DynTreeData(torch.tensor([[0], [1]]), token=torch.tensor([1, -1]))
GOOD = Data(edge_index=torch.tensor([[0], [1]]), token=torch.ones(2).long(), num_nodes=2)
LOOP = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), token=GOOD.token, num_nodes=2)


def stock(*examples: Data) -> Batch:
    return Batch.from_data_list(list(examples))


MISFITS = [
    (classifier(), Collater(arity=2)(EXAMPLES[:1]), "the schedule was made for"),
    (classifier(), Collater(arity=3)([TREE]), "the batch has no token.*num_tokens=0 for"),
    (classifier(), stock(EXAMPLES[0], FOUR, EXAMPLES[1]), "^TreeEncoder: example 1 of the"),
    (classifier(), stock(GOOD, GOOD, LOOP), "example 2 of the batch: .*has a cycle"),
    (classifier("child_sum"), stock(BELOW), "not in the embedding.*got: +-2.*node 0"),
    (classifier(), stock(UNSAID), "not in the embedding.*got: +-1.*try: +has_input = token >= 0"),
    (without_tokens(), Collater(arity=2)(EXAMPLES[:1]), "the batch has no x"),
    (without_tokens(), Collater(arity=2)([WIDE]), "floating .row, 4."),
    (TreeClassifier(TreeSchema(3, 5), 4, 3, arity=3), Collater(arity=3)(EXAMPLES), OUTSIDE),
]


@pytest.mark.parametrize(("model", "batch", "match"), MISFITS)
def test_batches_that_do_not_fit(model: nn.Module, batch: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError, IndexError), match=f"(?s){match}"):
        model(batch)


def test_input_gradients_reach_the_embedding_of_leaves_and_inner_nodes() -> None:
    model, batch = classifier(), Collater(arity=3)([example(balanced(1))])
    model.encoder(batch)[batch.root_index].sum().backward()
    used = model.embedding.weight.grad.abs().sum(1) > 0
    assert sorted(used.nonzero()[:, 0].tolist()) == sorted(batch.token.unique().tolist())
