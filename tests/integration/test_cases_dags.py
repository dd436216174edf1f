"""The cases of architectures, names of functions and synthesis routes: what they read, and runs."""

import ast
import gzip
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pyg_dynbatch.loader import DataLoader
from tests.example_files import FOLDER, defined_in
from tests.nn.test_pytorch_tree_lstm import recursion
from tests.strategies import Dag

ETHER = ("CCOCC", (("CCO", ()), ("CCO", ())))


def case(name: str) -> dict[str, Any]:
    return defined_in(f"cases/{name}")


def run(name: str, *argv: object) -> None:
    with mock.patch.object(sys, "argv", [name, *map(str, argv)]):
        case(name)["main"]()


def numbers(printed: str, before: str) -> list[float]:
    (found,) = re.findall(rf"^{re.escape(before)} (.*)$", printed, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r"-?\d+\.\d+", found)]


@pytest.mark.parametrize("name", ["architectures", "method_names", "routes", "route_data"])
def test_case_is_short(name: str) -> None:
    assert len((FOLDER / "cases" / f"{name}.py").read_text("utf-8").splitlines()) <= 150


def test_an_architecture_is_a_dag_from_input_to_output() -> None:
    layers = [[1], [4, 0], [5, 1, 0], [0, 1, 1, 1], [2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 1]]
    data = case("architectures")["graph"](layers, 0.5)
    assert data.x.argmax(1).tolist() == [0, 2, 5, 6, 1, 3, 4, 7]
    chain = [(v, v + 1) for v in range(7)]
    further = [(0, 3), (0, 4), (1, 4), (2, 4), (4, 6)]
    assert sorted(map(tuple, data.edge_index.t().tolist())) == sorted(chain + further)


@pytest.fixture
def architectures(tmp_path: Path) -> Path:
    """Write architectures whose target is how often the last operation is used."""
    rng, lines = random.Random(1), []
    for _ in range(1160):
        bits = [[rng.randrange(6), *(rng.randrange(2) for _ in range(n))] for n in range(6)]
        lines.append(f"{bits}, {0.7 + 0.01 * sum(row[0] == 5 for row in bits)}")
    path = tmp_path / "drawn.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_architectures_run(architectures, tmp_path, capsys):
    train, valid, test = case("architectures")["read"](architectures, None)
    assert [len(train), len(valid), len(test)] == [128, 16, 16]
    figure = tmp_path / "figure.svg"
    run("architectures", architectures, "--seeds", 2, "--epochs", 1, "--figure", figure)
    printed = capsys.readouterr().out
    assert figure.is_file()
    # A sum of operations is linear in their counts.
    assert numbers(printed, "counts, ridge")[0] < 0.1
    assert {len(numbers(printed, kind)) for kind in ("GCN", "GIN", "DAGNN")} == {4}


@pytest.mark.long
def test_dagnn_predicts_accuracies_better_than_counts(shared_data, capsys):
    path = shared_data("dags/final_structures6.txt.gz")
    parts = case("architectures")["read"](path, None)
    assert [len(part) for part in parts] == [16_118, 1000, 1902]
    run("architectures", path, "--seeds", 1, "--epochs", 4)
    printed = capsys.readouterr().out
    assert numbers(printed, "DAGNN")[0] < 0.6 * numbers(printed, "counts, ridge")[0]


def test_identifiers_of_a_function_are_shared_and_its_name_is_hidden() -> None:
    (function,) = ast.parse("def get_one(a):\n    return a + get_one(a.b)").body
    word, tokens, edges = case("method_names")["graph"](function)
    assert word == "get"
    assert sorted(t for t in tokens if t[0] in "'<") == ["'a", "'b", "<self>"]
    shared = tokens.index("'a")
    assert [tokens[parent] for child, parent in edges if child == shared] == ["arg", "Name", "Name"]
    sinks = set(range(len(tokens))) - {child for child, _ in edges}
    assert [tokens[sink] for sink in sinks] == ["FunctionDef"]


def test_method_names_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{chr(97 + n)}erb" for n in range(20)]
    for number in range(12):
        functions = [
            f"def {word}_{number}(self):\n    value = self.{word}\n    return [value, {number}]\n"
            for word in words
        ]
        (tmp_path / f"module{number}.py").write_text("\n".join(functions), encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "broken.py").write_text("def", encoding="utf-8")
    run("method_names", "--folder", tmp_path, "--epochs", 8)
    printed = capsys.readouterr().out
    assert numbers(printed, "set of tokens, linear: accuracy")[0] > 0.1  # chance: 0.05
    assert numbers(printed, "DAGNN: accuracy")[0] > 0.1  # chance: 0.05


def test_edit_distances_of_routes() -> None:
    data = case("route_data")
    edits, jaccard = data["edits"], data["jaccard"]
    bare, longer = (("CCOCC", ()),), (("CCOCC", (("CCO", (("CC", ()),)), ("CCO", ()))),)
    assert edits((ETHER,), (ETHER,)) == 0
    assert edits((ETHER,), bare) == edits(bare, (ETHER,)) == 2
    assert edits((ETHER,), longer) == 1
    other = (("CCOCC", (("CCO", ()), ("CCN", ()))),)
    assert edits((ETHER,), other) == pytest.approx(jaccard("CCO", "CCN"))
    assert 0 < jaccard("CCO", "CCN") < 1
    rng = random.Random(0)
    drawn = [data["draw"]("CCOC(=O)c1ccc(NC(=O)Cc2ccccc2)cc1", rng) for _ in range(8)]
    assert len(set(drawn)) > 1
    for a in drawn:
        for b in drawn:
            there, back = edits((a,), (b,)), edits((b,), (a,))
            assert there == pytest.approx(back)
            assert abs(data["size"](a) - data["size"](b)) <= there + 1e-9
            assert all(there <= edits((a,), (c,)) + edits((c,), (b,)) + 1e-9 for c in drawn)


def test_the_network_of_route_distances(shared_data: Callable[[str], Path]) -> None:
    """Its embeddings of planned routes equal a recursion on its own weights."""
    path = shared_data("routes/dummy_state.pt")
    state = torch.load(path, weights_only=True)["state_dict"]
    model, data = case("routes")["Embedding"].of_route_distances(path), case("route_data")
    planned = json.loads(shared_data("routes/example_routes.json").read_text("utf-8"))
    routes = [data["of_planner"](route) for route in planned]
    assert [data["size"](route) for route in routes] == [3, 5, 5]

    def by_hand(route: Any) -> Tensor:
        tree = data["tree"](route, 32)
        children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
        for child, parent in tree.edge_index.t().tolist():
            children[parent].append(child)
        x = tree.x
        for part in ("0", "3"):
            of = "_tree_lstm._compression." + part
            x = torch.relu(x @ state[f"{of}.weight"].T + state[f"{of}.bias"])
        own = {k.removeprefix("_tree_lstm._tree_lstm."): v for k, v in state.items()}
        return recursion(own, Dag(tuple(map(tuple, children))), x)[0]

    trees = [data["tree"](route, 32) for route in routes]
    found = model(next(iter(DataLoader(trees, len(trees)))))
    torch.testing.assert_close(found, torch.stack(list(map(by_hand, routes))), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_routes_run(shared_data, tmp_path, capsys):
    figure = tmp_path / "figure.svg"
    files = {"--routes": "routes/example_routes.json", "--state": "routes/dummy_state.pt"}
    more = [word for key, name in files.items() for word in (key, shared_data(name))]
    options = ["--targets", 100, "--epochs", 3, "--figure", figure]
    run("routes", shared_data("molecules/lipophilicity.csv"), *options, *more)
    printed = capsys.readouterr().out
    assert figure.is_file()
    assert numbers(printed, "linear model of the sets")[0] < numbers(printed, "mean")[0]
    assert len(numbers(printed, "planner's routes, edit distances:")) == 3
    assert len(numbers(printed, "  by dummy_state.pt:")) == 3
