"""Columns of trees are a list of trees, and merge as PyG does; batches are saved and sent."""

import copy
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from pyg_dynbatch.columns import Columns, batch_of_one
from pyg_dynbatch.data import DynTreeData, MoleculeData, PairTable, allow_batches
from pyg_dynbatch.datasets import SST, ListOps, ListOpsRecipe, MoleculeFile, TreeFile
from pyg_dynbatch.loader import Collater, MoleculeCollater
from tests.strategies import Dag, chain, structures
from tests.trees.helpers import assert_same, chain_tree


def tree_of(dag: Dag, rich: bool) -> DynTreeData:
    number = torch.arange(dag.num_nodes)
    fields: dict[str, Any] = {"token": number - 1}
    if rich:
        fields |= {"x": number[:, None] * torch.ones(2), "y": number / 2, "has_input": number > 0}
        fields["target"] = torch.tensor([[1.0 * dag.num_nodes]])
    return DynTreeData(dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes, **fields)


def full(nodes: int) -> DynTreeData:
    return tree_of(chain(nodes), rich=True)


def small() -> list[DynTreeData]:
    edges = torch.tensor([[0, 1], [2, 2]])
    return [DynTreeData(edges, token=torch.tensor([5 + n, 6, -1])) for n in range(3)]


def columns_of(trees: list[DynTreeData], rows: Sequence[int]) -> Columns:
    columns = Columns.of(trees)
    assert columns is not None
    return columns[rows]


def assert_same_batch(wanted: Batch, found: Batch | None) -> None:
    assert found is not None
    # Data.keys makes a list of a set; the order of the fields counts.
    assert list(found.stores[0].keys()) == list(wanted.stores[0].keys())
    assert_same(wanted, found)


@given(st.lists(structures(), min_size=1, max_size=4), st.booleans(), st.data())
def test_same_as_the_list(dags: list[Dag], rich: bool, data: st.DataObject) -> None:
    trees = [tree_of(dag, rich) for dag in dags]
    rows = data.draw(st.lists(st.integers(0, len(trees) - 1), min_size=1, max_size=6))
    chosen = [trees[row] for row in rows]
    joined = Columns.of(trees)
    assert joined is not None
    twice = Columns.joined([joined, joined])
    shifted = [row + len(trees) for row in rows]
    for columns in (joined[rows], twice[shifted]):
        assert len(columns) == len(list(columns)) == len(rows)
        for wanted, found in zip(chosen, columns, strict=True):
            assert_same(wanted, found)
        for _ in range(2):  # the columns are not used up
            assert_same_batch(Batch.from_data_list(list(columns)), columns.merged())
        for arity in (None, 3):
            one, other = (Collater(arity=arity)(each) for each in (columns, chosen))
            assert one.schedule == other.schedule
            assert one.schedule.checksums == other.schedule.checksums
    assert joined.sizes == [tree.num_nodes for tree in trees]


@given(dags=st.lists(structures(), min_size=1, max_size=4), rich=st.booleans())
def test_what_is_saved_is_loaded(dags, rich, tmp_path_factory) -> None:
    trees = [tree_of(dag, rich) for dag in dags]
    columns = Columns.of(trees)
    assert columns is not None
    columns.facts = {"words": ["a"]}
    path = tmp_path_factory.mktemp("columns") / "trees.pt"
    columns.save(path)
    again = Columns.load(path, DynTreeData)
    assert again.facts == columns.facts
    for wanted, found in zip(trees, again, strict=True):
        assert_same(wanted, found)
    rows = [len(trees) - 1, 0]
    assert_same_batch(columns[rows].merged(), again[rows].merged())


@pytest.mark.parametrize("content", [b"", b"PK half of a file"])
def test_a_damaged_file_says_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trees.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="columns: the file cannot be used"):
        Columns.load(path, DynTreeData)
    torch.save({"format": "another"}, path)
    with pytest.raises(ValueError, match="another"):
        Columns.load(path, DynTreeData)
    with pytest.raises(FileNotFoundError):
        Columns.load(tmp_path / "none.pt", DynTreeData)


def test_excluded_fields() -> None:
    trees = [full(2), full(3)]
    wanted = Batch.from_data_list(trees, exclude_keys=["x", "y"])
    for left_out, excluded in ((["x", "y"], ()), ([], "xy")):
        columns = Columns.of(trees, left_out)
        assert columns is not None
        assert_same_batch(wanted, columns.merged(excluded))
        assert columns.merged(["num_nodes"]) is None


def test_examples_stay_as_they_were() -> None:
    tree = full(3)
    Collater()([tree, tree])
    assert torch.equal(tree.edge_index, full(3).edge_index)
    Collater()([tree]).edge_index.add_(7)
    assert torch.equal(tree.edge_index, full(3).edge_index)


@given(structures(), st.booleans(), st.sampled_from([(None, "both"), (3, "bottom_up")]))
def test_a_batch_of_one_is_like_any_other(dag: Dag, rich: bool, option: tuple[Any, str]) -> None:
    tree, collate = tree_of(dag, rich), Collater(arity=option[0], direction=option[1])
    columns = Columns.of([tree])
    assert columns is not None
    found, wanted = collate([tree]), collate(columns)
    assert batch_of_one(tree) is not None, "it was built as a batch of several"
    for batch in (found, pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):  # noqa: S301
        assert_same_batch(wanted, batch)
        assert all(type(value) is type(wanted[key]) for key, value in batch)
    assert found.schedule.checksums == wanted.schedule.checksums
    assert_same_batch(Batch.from_data_list([tree]), batch_of_one(tree))
    assert_same(collate([collate([tree]).get_example(0)]), found)
    for key, value in tree:
        if isinstance(value, torch.Tensor) and value.numel():
            assert found[key].data_ptr() != value.data_ptr(), "a batch owns its tensors"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"token": torch.tensor([4, 7])}, "token has the wrong length"),
        ({"child_slot": torch.tensor([0])}, "child_slot has the wrong length"),
        ({"has_input": torch.tensor([1, 0, -1])}, "has_input is not a mask"),
        ({"root_index": torch.tensor([1])}, "root_index does not belong"),
        ({"root_index": torch.tensor([], dtype=torch.long)}, "root_index does not belong"),
        ({"edge_index": torch.tensor([[0, 1], [2, 3]])}, "a node that does not exist"),
        ({"edge_index": torch.tensor([[0, 1, 2], [1, 2, 0]])}, "edge_index has a cycle"),
        ({"child_slot": torch.tensor([1, 1])}, "two arguments in one slot"),
        ({"child_slot": torch.tensor([0, 2])}, "beyond the arity"),
        ({"has_input": torch.tensor([True, False])}, "has_input has the wrong length"),
    ],
)
def test_a_batch_of_one_is_checked(changed: dict[str, Any], told: str) -> None:
    tree = small()[0]
    if changed.get("edge_index", tree.edge_index).size(1) == 3:
        changed = {**changed, "child_slot": torch.zeros(3, dtype=torch.long)}
    for key, value in changed.items():
        tree[key] = value
    with pytest.raises(ValueError, match=rf"{told}[\s\S]*example 0|example 0[\s\S]*{told}"):
        Collater(arity=2)([tree])


def test_is_a_sequence() -> None:
    columns = columns_of(small(), [2, 0])
    assert [tree.token[0].item() for tree in columns[:]] == [7, 5]
    last = columns[-1].token.tolist()
    for chosen in ([-1], np.array([False, True])):
        assert columns[chosen][0].token.tolist() == last == [5, 6, -1]
    assert len(columns[[]]) == len(columns[2:]) == 0
    assert repr(columns) == "Columns(2 examples, 6 nodes)"
    for wrong in (2, [0, 2]):
        with pytest.raises(IndexError):
            columns[wrong]


def test_the_collater_leaves_fields_out_and_follows_others() -> None:
    columns = columns_of(small(), [1, 1, 0])
    for examples in (columns, list(columns)):
        followed = Collater(follow_batch=["child_slot"], exclude_keys=["token"])(examples)
        assert "token" not in followed and "token" not in Collater(exclude_keys=["token"])(examples)
        assert followed.child_slot_batch.tolist() == [0, 0, 1, 1, 2, 2]
        plain = Collater(exclude_keys=["token"])(examples)
        assert followed.schedule == plain.schedule


BROKEN_TREES = [
    ("edge_index", torch.tensor([[0, 3], [2, 2]]), "got:      3 -> 2\n  where:    example 1"),
    ("edge_index", torch.tensor([[0, -1], [2, 2]]), "got:      -1 -> 2\n  where:    example 1"),
    ("edge_index", torch.tensor([[0, 1], [2, 2]]).int(), "int32 tensor"),
    ("token", torch.tensor([1]), "the wrong length.\n.* 3 rows\n.* 1\n.*example 1 of"),
    ("child_slot", torch.tensor([1]), r"the wrong length[\s\S]*try: +leave child_slot out"),
]


@pytest.mark.parametrize(("key", "value", "told"), BROKEN_TREES)
def test_broken_trees_are_named(key: str, value: torch.Tensor, told: str) -> None:
    trees = small()
    if value.dtype == torch.int32:
        for tree in trees:
            tree[key] = value
    trees[1][key] = value
    for examples in (trees, Columns.of(trees)):
        with pytest.raises(ValueError, match=told):
            Collater()(examples)


class OwnTree(DynTreeData):
    """A user's own class."""


allow_batches(OwnTree)


class Shifted(DynTreeData):
    """A user's own class, whose rows PyG joins in another way."""

    def __inc__(self, key: str, value: Any, *rest: Any) -> Any:
        return 5 if key == "mark" else super().__inc__(key, value, *rest)


OTHER_EXAMPLES = [
    [Data(edge_index=torch.tensor([[0], [1]]))],  # the number of nodes is guessed
    [Data(x=[1.0, 2.0])],
    [Data(x=torch.zeros(1, 1), y=[torch.zeros(1)])],
    [Data(x=torch.zeros(1, 1), y=1.0), Data(x=torch.zeros(1, 1), y=2)],
    [Data(x=torch.zeros(1, 1), top_index=torch.tensor(0))],
    [Data(x=torch.zeros(1, 1), y=torch.tensor(0)), Data(x=torch.zeros(1, 1), y=torch.zeros(1))],
    [Shifted(torch.empty(2, 0, dtype=torch.int64), num_nodes=1)],
    [chain_tree(2, mark_batch=torch.zeros(1))],
    [chain_tree(2), full(2)],
    [chain_tree(2, y=torch.zeros(2)), chain_tree(2, y=torch.zeros(2, dtype=torch.int64))],
    [chain_tree(2, x=torch.zeros(2, 1)), chain_tree(2, x=torch.zeros(2, 3))],
    [chain_tree(2, x=torch.zeros(2, 1).to_sparse())],
    [chain_tree(2, x=torch.zeros(2, 1, device="meta"))],
]


@pytest.mark.parametrize("examples", OTHER_EXAMPLES)
def test_steps_aside_for_examples(examples: list[Data]) -> None:
    assert Columns.of(examples) is None


OWN_EXAMPLES = [
    [OwnTree(torch.empty(2, 0, dtype=torch.int64), num_nodes=1)] * 2,
    [chain_tree(2, mark=torch.zeros(1)), chain_tree(3, mark=torch.ones(4))],
    [chain_tree(2, name="a"), chain_tree(1, name="b")],
    [chain_tree(2, number=3), chain_tree(1, number=4)],
    [chain_tree(3, leaf_index=torch.tensor([0])), chain_tree(2, leaf_index=torch.tensor([1]))],
]


def plain(nodes: int, **fields: Any) -> Data:
    child = torch.arange(1, nodes)
    return Data(x=torch.rand(nodes, 2), edge_index=torch.stack([child, child - 1]), **fields)


OWN_EXAMPLES += [
    [plain(3), plain(1), plain(2)],
    [plain(3, y=0.1), plain(2, y=0.7)],
    [plain(3, y=torch.tensor(4)), plain(2, y=torch.tensor(5))],
    [plain(3, marks=[1, "a", 0.5]), plain(2, marks=[])],
    [Data(pos=torch.rand(3, 2), y=torch.zeros(1)), Data(pos=torch.rand(1, 2), y=torch.ones(1))],
]


@pytest.mark.parametrize("examples", OWN_EXAMPLES)
def test_own_classes_and_fields(examples: list[Data]) -> None:
    columns = Columns.of(examples)
    assert columns is not None
    for wanted, found in zip(examples, columns, strict=True):
        assert_same(wanted, found)
    merged = columns.merged()
    assert_same_batch(Batch.from_data_list(examples), merged)
    assert_same_batch(Batch.from_data_list(examples[:1]), batch_of_one(examples[0]))
    for wanted, found in zip(
        Batch.from_data_list(examples).to_data_list(), merged.to_data_list(), strict=True
    ):
        assert_same(wanted, found)
    followed = list(examples[0].keys())
    assert_same_batch(Batch.from_data_list(examples, followed), columns.merged((), followed))


@pytest.mark.parametrize("examples", OWN_EXAMPLES)
def test_own_classes_and_fields_are_saved(examples: list[Data], tmp_path: Path) -> None:
    columns = Columns.of(examples)
    assert columns is not None
    columns.save(tmp_path / "columns.pt")
    again = Columns.load(tmp_path / "columns.pt", type(examples[0]))
    twice = Columns.joined([again[[1]], again])
    for wanted, found in zip([examples[1], *examples], twice, strict=True):
        assert_same(wanted, found)


TREES = [DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * 2
PLAIN = [Data(edge_index=tree.edge_index, num_nodes=3) for tree in TREES]
OWN = [OwnTree(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * 2
TABLE = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
OXYGEN = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8), smiles="O=O")


def test_batches_without_a_schedule_need_pyg_alone() -> None:
    assert b"pyg_dynbatch" not in pickle.dumps(Batch.from_data_list(PLAIN))


BATCHES = [
    (lambda: Collater(arity=2, direction="bottom_up")(TREES), ["schedule"]),
    (lambda: Collater(direction="both")(TREES), ["schedule", "schedule_down"]),
    (lambda: Collater(follow_batch=["depth"])(TREES), ["schedule"]),  # merged by PyG
    (lambda: Collater(arity=2)(PLAIN), ["schedule"]),
    (lambda: Collater(arity=2)(OWN), ["schedule"]),
    (lambda: MoleculeCollater(TABLE)([OXYGEN] * 3), ["pairs"]),
]


@pytest.mark.parametrize(("make", "plans"), BATCHES)
def test_loads_without_unpickling_code(make: Any, plans: list[str], tmp_path: Path) -> None:
    batch = make()
    torch.save(batch, tmp_path / "batch.pt")
    again = torch.load(tmp_path / "batch.pt", weights_only=True)
    assert list(again.keys()) == list(batch.keys()) and set(plans) <= set(batch.keys())
    assert_same(batch, again)


class Batches(torch.utils.data.Dataset[Batch]):
    """Makes one batch of each data set, wherever it is asked."""

    def __init__(self, parts: Sequence[tuple[Any, Any]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> Batch:
        dataset, collater = self.parts[i]
        return collater(dataset.__getitems__([2, 0, 1]))


def all_kinds(folder: Path, samples: Path) -> Batches:
    trees = folder / "trees.txt"
    trees.write_text("(3 (2 good) (1 fun))\n(0 bad)\n(1 (0 (1 a) (1 bad)) (2 film))\n" * 100)
    recipe = ListOpsRecipe(train=100, val=1, test=1)
    sst = SST(None, "train", raw_dir=samples / "sst", verify=False)
    molecules = MoleculeFile(samples / "molecules" / "freesolv.csv", target_columns=["expt"])
    datasets = [sst, TreeFile(trees), ListOps(None, "train", recipe=recipe)]
    collaters = [(dataset, Collater()) for dataset in datasets]
    return Batches([*collaters, (molecules, MoleculeCollater(molecules.pair_table))])


@pytest.mark.parametrize("context", [None, pytest.param("spawn", marks=pytest.mark.long)])
def test_batches_before_there_and_afterwards(context, tmp_path, samples):
    batches = all_kinds(tmp_path, samples)
    before = [batches[i] for i in range(len(batches))]
    if context is None:
        sent = pickle.loads(ForkingPickler.dumps(batches))
        there: Any = [sent[i] for i in range(len(batches))]
    else:
        there = torch.utils.data.DataLoader(
            batches, batch_size=None, num_workers=1, multiprocessing_context=context
        )
    for wanted, found in zip(before, there, strict=True):
        assert_same(wanted, found)
    for i, wanted in enumerate(before):
        assert_same(wanted, batches[i])
