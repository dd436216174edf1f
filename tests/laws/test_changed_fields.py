"""Law: whatever changes in a batch after a call, the next call sees it.

The results are those of a new model on a new object with the same fields, or the same error.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.data import DynTreeData, MoleculeData, PairTable
from pyg_dynbatch.loader import Collater, MoleculeCollater
from pyg_dynbatch.models import TreeClassifier, TreeEncoder, TreeSchema, WeaveNet
from pyg_dynbatch.nn import DAGNN, NaryTreeLSTM, RecursiveCell, RecursiveLayer

Change = Callable[[Any], Any]

EDGES = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 4]])
TOKEN = torch.tensor([1, 2, -1, 3, -1])


def tree(**fields: Any) -> DynTreeData:
    x, has_input = torch.arange(10.0).view(5, 2).sin(), TOKEN >= 0
    return DynTreeData(EDGES, token=TOKEN, x=x, y=TOKEN.clamp(min=0), has_input=has_input, **fields)


def without_tokens() -> DynTreeData:
    found = tree()
    del found.token
    return found


def classifier(cell: str, **options: Any) -> TreeClassifier:
    return TreeClassifier(TreeSchema(6, 3), 4, 3, cell=cell, **options)


class OnFields(nn.Module):
    """A model that does not take the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DAGNN(2, 3)

    def forward(self, batch: Any) -> Tensor:
        return self.model(batch.x, batch.edge_index, batch.get("batch"))


class Predict(nn.Module):
    """The table of predictions of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier("nary").eval()

    def forward(self, batch: Any) -> Tensor:
        return self.model.predict(batch)["probability"]


def top_down() -> TreeEncoder:
    return TreeEncoder(6, 4, NaryTreeLSTM(4, 3, direction="top_down"))


# Per model: how it is made, an example, and the collater that plans for it.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], DynTreeData], Collater]] = {
    "nary": (lambda: classifier("nary"), tree, Collater(arity=2)),
    "child_sum": (lambda: classifier("child_sum"), tree, Collater()),
    "gru": (lambda: classifier("gru"), tree, Collater(arity=2)),
    "rnn": (lambda: classifier("rnn"), tree, Collater(arity=2)),
    "features": (lambda: TreeClassifier(TreeSchema(0, 3), 2, 3), without_tokens, Collater(arity=2)),
    "top_down": (top_down, tree, Collater(arity=2, direction="both")),
    "dagnn": (OnFields, tree, Collater()),
    "predict": (Predict, tree, Collater(arity=2)),
}


def saved(batch: Any, folder: Path) -> Any:
    torch.save(batch, folder / "batch.pt")
    return torch.load(folder / "batch.pt", weights_only=True)


# How a batch reaches the model: from PyG, from the loader's collater, from a file.
DOORS: dict[str, Callable[[DynTreeData, Collater, Path], Any]] = {
    "one example": lambda example, collate, folder: example.clone(),
    "stock": lambda example, collate, folder: Batch.from_data_list([example, example.clone()]),
    "collated": lambda example, collate, folder: collate([example, example.clone()]),
    "saved": lambda example, collate, folder: saved(collate([example, example.clone()]), folder),
}

# In place; the same values in a new tensor of the same field; unseen by the version of a tensor.
WAYS: dict[str, Callable[[Any, str, Tensor], object]] = {
    "in place": lambda batch, key, value: batch[key].copy_(value),
    "assigned": lambda batch, key, value: setattr(batch, key, value),
    "by numpy": lambda batch, key, value: batch[key].numpy().__setitem__(..., value.numpy()),
}

# A changed value of each field.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "edge_index": lambda edges: edges[:, [1, 0, *range(2, edges.size(1))]],
    "child_slot": lambda slots: 1 - slots,
    "token": lambda token: (token + 1) % 6,
    "has_input": lambda has_input: has_input & (torch.arange(len(has_input)) > 0),
    "x": lambda x: 1 - x,
    "depth": torch.zeros_like,
}

COPIES: dict[str, Change] = {
    "itself": lambda batch: batch,
    "clone": lambda batch: batch.clone(),
    "shallow copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "moved": lambda batch: batch.to("cpu"),
}


def more_nodes(batch: Any) -> Any:
    for key in ("token", "x", "y", "has_input", "depth", "batch"):
        if key in batch:
            batch[key] = torch.cat([batch[key], batch[key][:1]])
    batch.num_nodes += 1
    return batch


def without(nodes: list[int]) -> Change:
    def subgraph(batch: Any) -> Any:
        keep = torch.ones(batch.num_nodes, dtype=torch.bool)
        keep[nodes] = False
        return batch.subgraph(keep)

    return subgraph


STRUCTURAL: dict[str, Change] = {
    "a node is added": more_nodes,
    "a leaf is removed": without([1]),
    "an inner node is removed": without([2]),
    "the children of a node are removed": without([0, 1]),
    "no slots": lambda batch: delattr(batch, "child_slot") or batch,
    "no inputs told": lambda batch: delattr(batch, "has_input") or batch,
    "no tokens": lambda batch: delattr(batch, "token") or batch if "token" in batch else batch,
}


def changed(make: Callable[[], Any]) -> Iterator[tuple[str, Change]]:
    """All changes of a batch."""
    fields = set(make().keys())
    for key in sorted(VALUES.keys() & fields):
        for way, write in WAYS.items():
            for kind, duplicate in COPIES.items():

                def change(batch: Any, key=key, write=write, duplicate=duplicate) -> Any:
                    batch = duplicate(batch)
                    write(batch, key, VALUES[key](batch[key]))
                    return batch

                yield f"{key} {way} of {kind}", change
    yield from STRUCTURAL.items()


def fresh(batch: Any) -> Any:
    """A new object with the same fields and without a plan."""
    found = copy.deepcopy(batch)
    for key, value in batch.to_dict().items():
        if isinstance(value, MovablePlan):
            delattr(found, key)
    return found


def outcome(model: nn.Module, batch: Any) -> Tensor | str:
    try:
        return model(batch).detach()
    except (ValueError, IndexError, TypeError) as error:
        return str(error).splitlines()[0]


# A task takes batches alone.
TAKEN = [(m, d) for m in MODELS for d in DOORS if (m, d) != ("predict", "one example")]


@pytest.mark.parametrize("every", (48, pytest.param(4, marks=pytest.mark.long)))
@pytest.mark.parametrize(("name", "door"), TAKEN)
def test_the_next_call_sees_every_change(name: str, door: str, every: int, tmp_path: Path) -> None:
    make, example, collate = MODELS[name]
    first = (list(MODELS).index(name) + 9 * list(DOORS).index(door)) % every
    torch.manual_seed(0)
    model = make()

    def batch() -> Any:
        return DOORS[door](example(), collate, tmp_path)

    seen = set()
    for what, change in islice(changed(batch), first, None, every):
        given = batch()
        keys = set(given.keys())
        before = outcome(model, given)
        assert isinstance(before, Tensor), before
        assert set(given.keys()) == keys, "nothing is kept in the batch"
        given = change(given)
        found, wanted = outcome(model, given), outcome(copy.deepcopy(model), fresh(given))
        if isinstance(wanted, str):
            assert found == wanted, what
        else:
            assert isinstance(found, Tensor), (what, found)
            torch.testing.assert_close(found, wanted, msg=what)
            if found.shape != before.shape or not torch.equal(found, before):
                seen.add(what.split()[0])
    some = {"dagnn": {"x"}, "features": {"x", "has_input"}}
    some |= dict.fromkeys(("child_sum", "top_down"), {"token", "has_input"})
    known = some.get(name, {"token", "has_input", "child_slot"})
    assert every > 4 or known <= seen, "the changes matter"


class Height(RecursiveCell):
    def __init__(self) -> None:
        super().__init__(1, 1, arity=None)

    def leaf(self, x: Tensor) -> tuple[Tensor]:
        return (100 * x,)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor]:
        (total,) = children.sum()
        return (total + projected,)


def test_a_node_that_lost_its_children_is_a_leaf() -> None:
    whole = tree()
    layer = RecursiveLayer(Height())
    pruned = without([0, 1])(whole)
    del pruned.root_index  # PyG keeps that too, and the collater refuses it
    pruned.depth = whole.depth[2:]
    assert pruned.depth.tolist() != [0, 0, 1], "the depths of the whole tree"
    schedule = Collater()([pruned]).schedule
    assert schedule == schedule_structure(pruned.edge_index, 3, has_input=pruned.has_input)
    pruned.has_input[:] = True
    x = torch.ones(3, 1)
    schedule = Collater()([pruned]).schedule
    assert layer(x, schedule=schedule).squeeze(1).tolist() == [100, 100, 201]


TABLE = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", COPIES)
def test_pairs_that_do_not_belong_to_the_codes_are_refused(kind: str, way: str) -> None:
    code = torch.tensor([0, 1, 0], dtype=torch.uint8)
    molecules = [MoleculeData(torch.randn(2, 3), code)] * 2
    net = WeaveNet(3, 1, TABLE.features, hidden=4, head=()).eval()
    batch, stock = MoleculeCollater(TABLE)(molecules), Batch.from_data_list(molecules)
    torch.testing.assert_close(net(batch), net(stock))
    for each in (batch, stock):
        net(each)
    batch, stock = COPIES[kind](batch), COPIES[kind](stock)
    for each in (batch, stock):
        WAYS[way](each, "pair_code", 1 - each.pair_code)
    with pytest.raises(ValueError, match="do not belong to its pair_code"):
        net(batch)
    torch.testing.assert_close(net(stock), net(fresh(batch)))
