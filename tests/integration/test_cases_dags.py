"""The cases of architectures, jobs, names of functions and synthesis routes: data and runs."""

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

import architecture_models
import job_data
import job_models
import pytest
import torch
from torch import Tensor

from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import ChildSumTreeLSTM
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


@pytest.mark.parametrize(
    "name",
    ["architectures", "architecture_models", "common", "job_data", "job_models", "job_times"]
    + ["method_names", "routes", "route_data", "route_model"],
)
def test_case_is_short(name: str) -> None:
    assert len((FOLDER / "cases" / f"{name}.py").read_text("utf-8").splitlines()) <= 150


def test_an_architecture_is_a_dag_from_input_to_output() -> None:
    layers = [[1], [4, 0], [5, 1, 0], [0, 1, 1, 1], [2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 1]]
    data = case("architectures")["graph"](layers, 0.5)
    assert data.x.argmax(1).tolist() == [0, 2, 5, 6, 1, 3, 4, 7]
    assert data.level.tolist() == list(range(8))  # the length of the longest path to each
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


@pytest.mark.long
def test_architectures_run(architectures, tmp_path, capsys):
    train, valid, test = case("architectures")["read"](architectures, None)
    assert [len(train), len(valid), len(test)] == [128, 16, 16]
    figure = tmp_path / "figure.svg"
    files = ["--figure", figure, "--json", tmp_path / "rows.json"]
    options = ["--seeds", 1, "--epochs", 1, "--tries", 1, "--rates", 0.01]
    run("architectures", architectures, *options, *files)
    printed = capsys.readouterr().out
    assert figure.is_file()
    # A sum of operations is linear in their counts.
    assert numbers(printed, "counts, ridge")[0] < 0.1
    names = re.findall(r"^(.*?) +RMSE", printed, flags=re.MULTILINE)
    assert len(names) == 11 and {len(numbers(printed, name)) for name in names} == {4}
    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"]
    assert list(rows) == names
    assert [len(rows[name]["RMSE"]) for name in names] == [1] * 11


def test_only_directed_convolutions_see_the_direction() -> None:
    torch.manual_seed(0)
    networks = architecture_models.NETWORKS
    create = case("architectures")["graph"]
    layers = [[1], [4, 0], [5, 1, 0], [0, 1, 1, 1], [2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 1]]
    batch = next(iter(DataLoader([create(layers, 0.0)] * 2, 2, direction="both")))
    turned = batch.clone()
    turned.edge_index = batch.edge_index.flip(0)
    for name in ("GCN", "GIN", "directed GCN", "directed GIN"):
        model = networks[name]().eval()
        same = torch.allclose(model(batch), model(turned), atol=1e-6)
        assert same == (not name.startswith("directed"))


def test_the_mlp_reads_what_ridge_reads() -> None:
    create = case("architectures")["graph"]
    graphs = [create([[n], *[[3, *[n] * k] for k in range(1, 6)]], 0.0) for n in (0, 1)]
    network = architecture_models.PlaceMLP()
    network.layers = torch.nn.Identity()
    read: list[Tensor] = []
    network.layers.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    network(next(iter(DataLoader(graphs, 2))))
    expected = torch.stack([architecture_models.features(graph, True) for graph in graphs])
    assert torch.equal(read[0].double(), expected)


@pytest.mark.long
def test_dagnn_predicts_accuracies_better_than_counts(shared_data, capsys):
    path = shared_data("dags/final_structures6.txt.gz")
    parts = case("architectures")["read"](path, None)
    assert [len(part) for part in parts] == [16_118, 1000, 1902]
    run("architectures", path, "--seeds", 1, "--epochs", 4, "--tries", 1, "--rates", 0.012)
    printed = capsys.readouterr().out
    assert numbers(printed, "DAGNN")[0] < 0.6 * numbers(printed, "counts, ridge")[0]


def longest_path(edges: list[tuple[int, int]], times: list[float], stage: int) -> float:
    """Return when a stage finishes, by recursion over all paths that lead to it."""
    before = [longest_path(edges, times, a) for a, b in edges if b == stage]
    return times[stage] + max(before, default=0)


def test_the_time_of_a_job_is_its_longest_path() -> None:
    rng = random.Random(0)
    for levels in (1, 2, 5, 7):
        edges, times = job_data.draw(levels, rng)
        data = job_data.graph(rng.sample(edges, len(edges)), times)
        every = range(len(times))
        most = max(longest_path(edges, times, stage) for stage in every)
        assert data.target.item() == pytest.approx(most / sum(times) * len(times), rel=1e-6)
        ones = [1.0] * len(times)
        depth = [longest_path(edges, ones, stage) - 1 for stage in every]
        assert data.level.tolist() == depth and max(depth) == levels - 1
        longest = (max(data.x[data.level == n]).item() for n in range(levels))
        assert data.bound.item() == pytest.approx(sum(longest), rel=1e-6)


def test_the_jobs_of_tpch(shared_data: Callable[[str], Path]) -> None:
    jobs = job_data.read_tpch(shared_data("schedulers/tpch_dags.json"))
    assert len(jobs) == 154 and sum(job.num_nodes for job in jobs) == 7 * 202
    assert {int(job.level.max()) + 1 for job in jobs} <= set(range(2, 10))
    # Query 1 at 2 GB: four stages in a row; 50 executors run 200 tasks in four waves.
    times = [4041.740741, 4 * 247.942778, 4 * 46.025, 230.333333]
    assert jobs[0].x[:, 0].tolist() == pytest.approx([t * 4 / sum(times) for t in times])
    assert jobs[0].target.item() == pytest.approx(4)


def test_a_layer_in_order_computes_what_its_repetition_converges_to() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    graphs = [job_data.graph(*job_data.draw(levels, rng)) for levels in (1, 4, 9)]
    batch = next(iter(DataLoader(graphs, 3)))
    batch.x = batch.x.double()
    once, often = job_models.InOrder().double(), job_models.Repeated().double()
    once.layer.conv.load_state_dict(often.layer.state_dict())
    rows = [model(batch) for model in (once, often)]
    torch.testing.assert_close(*rows, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(rows[0])
    grads = []
    for found, model in zip(rows, (once, often), strict=True):
        grads.append(torch.autograd.grad((found * weight).sum(), list(model.parameters())))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.long
def test_job_times_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, file = tmp_path / "figure.svg", tmp_path / "rows.json"
    options = ["--seeds", 1, "--epochs", 1, "--train", 64, "--test", 4]
    run("job_times", *options, "--figure", figure, "--json", file)
    assert figure.is_file()
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert len(rows) == len(capsys.readouterr().out.splitlines()) - 1 == 8
    # The bound is above the time: a job cannot take longer than the longest stages of its levels.
    assert all(values[0] >= 0 for values in rows["longest stages of all levels"].values())


@pytest.mark.long
def test_a_max_layer_in_order_predicts_deeper_jobs(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run("job_times", "--seeds", 1, "--epochs", 15, "--train", 1500, "--test", 40, "--json", file)
    rows = json.loads(file.read_text("utf-8"))["rows"]
    errors = {name: row["32 levels"][0] for name, row in rows.items()}
    in_order = errors.pop("max layer, in order")
    assert in_order < 0.08 and errors.pop("max layer, repeated") < 0.08
    assert in_order < 0.5 * min(errors.values())


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


def test_a_fixed_projection_of_molecules_is_not_trained() -> None:
    data, route_model = case("route_data"), case("route_model")
    rng = random.Random(0)
    routes = sorted({data["draw"]("CCOC(=O)c1ccc(NC(=O)Cc2ccccc2)cc1", rng) for _ in range(6)})
    part = routes, data["pairs_of"](routes)
    torch.manual_seed(0)
    model = route_model["Embedding"](data["BITS"], ChildSumTreeLSTM(8, 8), fixed=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = route_model["trained"](model, part, part, 3)
    changed = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert changed == {name for name in before if not name.startswith("compress.0.")}
    found = [route_model["predict"](model, routes, part[1][0]) for _ in range(2)]
    assert torch.equal(*found)  # without dropout


@pytest.mark.long
def test_routes_run(shared_data, tmp_path, capsys):
    figure, file = tmp_path / "figure.svg", tmp_path / "rows.json"
    files = {"--routes": "routes/example_routes.json", "--state": "routes/dummy_state.pt"}
    more = [word for key, name in files.items() for word in (key, shared_data(name))]
    options = ["--targets", 100, "--epochs", 3, "--seeds", 2, "--figure", figure, "--json", file]
    run("routes", shared_data("molecules/lipophilicity.csv"), *options, *more)
    printed = capsys.readouterr().out
    assert figure.is_file()
    rows = json.loads(file.read_text("utf-8"))["rows"]
    networks = [name for name in rows if name.startswith("Tree-LSTM")]
    assert {len(rows[name]["MAE, train"]) for name in networks} == {2}
    assert all(0 < value < 10 for name in networks for value in rows[name]["MAE, train"])
    for name in ("linear", "gradient boosting"):  # three epochs are too few for the networks
        assert min(rows[name]["MAE, train"]) < rows["mean"]["MAE, train"][0]
    assert len(numbers(printed, "planner's routes, edit distances:")) == 3
    assert len(numbers(printed, "  by dummy_state.pt:")) == 3


def test_a_state_without_routes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("routes", "molecules.csv", "--state", "state.pt")
    assert "--state is compared on the routes of --routes" in capsys.readouterr().err
