"""Inspection: recorded trees, statistics by hand, the table and the picture."""

from pathlib import Path

import pytest
from hypothesis import given

from pyg_dynbatch.data import DynTreeData, from_nested
from pyg_dynbatch.trees.inspection import record_tree, run_inspect, schedules_of, stats_table
from tests.strategies import Dag, trees


def data_of(tree: Dag) -> DynTreeData:
    return DynTreeData(tree.edge_index, tree.child_slot, num_nodes=tree.num_nodes)


@given(trees(max_nodes=25, max_arity=4))
def test_a_recorded_tree_has_its_nodes_its_depth_and_its_kinds(tree: Dag) -> None:
    recording = record_tree(data_of(tree))
    assert recording.num_calls == tree.num_nodes
    assert recording.depth == 1 + max(tree.depth)
    kinds = {len(children) for children in tree.children}
    assert len(recording.sites.signatures) == len(kinds)


def test_statistics_of_two_trees_by_hand() -> None:
    # ((a b) (a b)) and (a (a b)), words at the leaves: equal calls are made once.
    first, second = from_nested(((1, 2), (1, 2))), from_nested((1, (1, 2)))
    stats = {name: made.stats() for name, made in schedules_of([first, second]).items()}
    assert stats["layer"].widths == (6, 3, 2) or sum(stats["layer"].widths) == 12
    for policy in ("depth", "agenda"):
        assert stats[policy].operations[0] == "leaf"
        assert stats[policy].rows == 5  # two words, (a b), ((a b) (a b)), (a (a b))
        assert stats[policy].merged_calls == 7
        assert stats[policy].steps == stats[policy].lower_bound == 3
    table = stats_table([stats])
    assert table[0].split() == ["layer", "depth", "agenda"]
    assert table[1].split()[-3:] == ["3.0", "3.0", "3.0"]


def test_inspect_a_file_of_trees(tmp_path: Path, capsys) -> None:
    lines = ["(3 (2 good) (4 (2 very) (3 fun)))", "(1 (0 bad) (2 film))", "(2 word)"]
    (tmp_path / "trees.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    picture = tmp_path / "out" / "schedule.svg"
    arguments = [str(tmp_path / "trees.txt"), "--batches", "2", "--output", str(picture)]
    assert run_inspect([*arguments, "--print"]) == 0
    said = capsys.readouterr().out
    assert "3 trees, 9 nodes" in said
    assert "nodes per tree: 3.0 on average, 1 to 5" in said
    assert "means over 2 batches of 3 trees" in said
    assert "lower bound on steps" in said
    assert "node x" in said and "Steps(" in said
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


def test_inspect_generated_data_and_pairs(tmp_path: Path, samples: Path, capsys) -> None:
    picture = str(tmp_path / "p.png")
    pairs = ["sick", "--root", str(tmp_path / "sick"), "--raw-dir", str(samples / "sick")]
    assert run_inspect([*pairs, "--batches", "1", "--output", picture]) == 0
    assert "SICK train: 2 trees" in capsys.readouterr().out


def test_inspect_complains(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file") as caught:
        run_inspect([str(tmp_path / "none.txt")])
    assert "a file of bracketed trees" in str(caught.value)
    with pytest.raises(ValueError, match="must be at least 1"):
        run_inspect(["sst", "--batches", "0"])
