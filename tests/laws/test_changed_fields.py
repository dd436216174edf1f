"""Law: whatever changes in a batch after a call, the next call sees it.

The results are those of a new model on a new object with the same fields, or the same error.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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


def tree() -> DynTreeData:
    x = torch.arange(10.0).view(5, 2).sin()
    return DynTreeData(EDGES, token=TOKEN, x=x, y=TOKEN.clamp(min=0), has_input=TOKEN >= 0)


def without_tokens() -> DynTreeData:
    example = tree()
    del example.token
    return example


def classifier(cell: str) -> TreeClassifier:
    return TreeClassifier(TreeSchema(6, 3), 4, 3, cell=cell)


def of_features() -> TreeClassifier:
    return TreeClassifier(TreeSchema(0, 3), 2, 3)


def top_down() -> TreeEncoder:
    return TreeEncoder(6, 4, NaryTreeLSTM(4, 3, direction="top_down"))


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


class Model(NamedTuple):
    """How a model is made, an example, the collater that plans for it, and fields that it reads."""

    make: Callable[[], nn.Module]
    example: Callable[[], DynTreeData]
    collate: Collater
    reads: set[str]


MODELS = {
    "nary": Model(
        lambda: classifier("nary"), tree, Collater(arity=2), {"token", "has_input", "child_slot"}
    ),
    "child_sum": Model(lambda: classifier("child_sum"), tree, Collater(), {"token", "has_input"}),
    "gru": Model(
        lambda: classifier("gru"), tree, Collater(arity=2), {"token", "has_input", "child_slot"}
    ),
    "rnn": Model(
        lambda: classifier("rnn"), tree, Collater(arity=2), {"token", "has_input", "child_slot"}
    ),
    "features": Model(of_features, without_tokens, Collater(arity=2), {"x", "has_input"}),
    "top_down": Model(top_down, tree, Collater(arity=2, direction="both"), {"token", "has_input"}),
    "dagnn": Model(OnFields, tree, Collater(), {"x"}),
    "predict": Model(Predict, tree, Collater(arity=2), {"token", "has_input", "child_slot"}),
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


def change_field(batch: Any, field: str, way: str, kind: str) -> Any:
    """Change a field of a copy of the batch, or of itself."""
    batch = COPIES[kind](batch)
    WAYS[way](batch, field, VALUES[field](batch[field]))
    return batch


def add_a_node(batch: Any) -> Any:
    for field in ("token", "x", "y", "has_input", "depth", "batch"):
        if field in batch:
            batch[field] = torch.cat([batch[field], batch[field][:1]])
    batch.num_nodes += 1
    return batch


def without_nodes(*nodes: int) -> Change:
    def subgraph(batch: Any) -> Any:
        keep = torch.ones(batch.num_nodes, dtype=torch.bool)
        keep[list(nodes)] = False
        return batch.subgraph(keep)

    return subgraph


def without_field(field: str) -> Change:
    def delete(batch: Any) -> Any:
        if field in batch:
            delattr(batch, field)
        return batch

    return delete


STRUCTURAL: dict[str, Change] = {
    "a node is added": add_a_node,
    "a leaf is removed": without_nodes(1),
    "an inner node is removed": without_nodes(2),
    "the children of a node are removed": without_nodes(0, 1),
    "no slots": without_field("child_slot"),
    "no inputs told": without_field("has_input"),
    "no tokens": without_field("token"),
}


def changes_of(fields: set[str]) -> dict[str, Change]:
    """Return every change of a batch with such fields by name, which begins with the field."""
    changes: dict[str, Change] = {}
    for field, way, kind in product(sorted(VALUES.keys() & fields), WAYS, COPIES):
        change = partial(change_field, field=field, way=way, kind=kind)
        changes[f"{field} {way} of {kind}"] = change
    return changes | STRUCTURAL


def fresh(batch: Any) -> Any:
    """Return a new object with the same fields and without a plan."""
    copied = copy.deepcopy(batch)
    for field, value in batch.to_dict().items():
        if isinstance(value, MovablePlan):
            delattr(copied, field)
    return copied


def outcome(model: nn.Module, batch: Any) -> Tensor | str:
    """Return the result, or the first line of the error."""
    try:
        return model(batch).detach()
    except (ValueError, IndexError, TypeError) as error:
        return str(error).splitlines()[0]


def check(model: nn.Module, batch: Any, change: Change, name: str) -> bool:
    """Compare the call after a change with one on a new object; return whether results differ."""
    fields = set(batch.keys())
    before = outcome(model, batch)
    assert isinstance(before, Tensor), before
    assert set(batch.keys()) == fields, "nothing is kept in the batch"

    batch = change(batch)
    got = outcome(model, batch)
    expected = outcome(copy.deepcopy(model), fresh(batch))
    if isinstance(expected, str):
        assert got == expected, name
        return False
    assert isinstance(got, Tensor), (name, got)
    torch.testing.assert_close(got, expected, msg=name)
    return got.shape != before.shape or not torch.equal(got, before)


def check_changes(name: str, door: str, every: int, folder: Path) -> set[str]:
    """Check each ``every``-th change; return the fields whose changes matter."""
    torch.manual_seed(0)
    model = MODELS[name].make()

    def batch() -> Any:
        return DOORS[door](MODELS[name].example(), MODELS[name].collate, folder)

    changes = changes_of(set(batch().keys()))
    first = list(MODELS).index(name) + 9 * list(DOORS).index(door)
    matter = set[str]()
    for changed in list(changes)[first % every :: every]:
        if check(model, batch(), changes[changed], changed):
            matter.add(changed.split()[0])
    return matter


# A task takes batches alone.
TAKEN = [(m, d) for m in MODELS for d in DOORS if (m, d) != ("predict", "one example")]


@pytest.mark.parametrize(("name", "door"), TAKEN)
def test_the_next_call_sees_changes(name: str, door: str, tmp_path: Path) -> None:
    check_changes(name, door, 48, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "door"), TAKEN)
def test_the_next_call_sees_changes_of_all_that_it_reads(
    name: str, door: str, tmp_path: Path
) -> None:
    assert MODELS[name].reads <= check_changes(name, door, 4, tmp_path)


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
    pruned = without_nodes(0, 1)(whole)
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
    planned = MoleculeCollater(TABLE)(molecules)
    stock = Batch.from_data_list(molecules)
    torch.testing.assert_close(net(planned), net(stock))

    planned = COPIES[kind](planned)
    WAYS[way](planned, "pair_code", 1 - planned.pair_code)
    with pytest.raises(ValueError, match="do not belong to its pair_code"):
        net(planned)

    stock = COPIES[kind](stock)
    WAYS[way](stock, "pair_code", 1 - stock.pair_code)
    torch.testing.assert_close(net(stock), net(fresh(stock)))
