"""The example server: batches with bad requests, answers over HTTP, workers that are killed."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.serving import Answer, Server, serving
from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.models import MoleculePredictor, TreePredictor
from tests.example_files import FOLDER, defined_in
from tests.molecules.molecules import trained
from tests.trees.helpers import tree_checkpoint

TREES = [["good", "not"], "(good)", ["very", ["not", "good"]], "((very) ((new) (good)))"]
BAD_TREES = {
    "((good) (not)": "1 bracket is never closed",
    "good": "there is text outside the brackets",
    ("not", "very", "good"): "child",
    (): "a part of the tree is not a word",
    7: "a part of the tree is not a word",
}
SMILES = ["CCO", "c1ccccc1O", "C", "[Na+].[Cl-]"]
BAD_SMILES = {"C1CC": "cannot be used", "": "cannot be used", 7: "the input is not a molecule"}

OWN = '''"""A model of formulas, each operator with a layer of its own."""

import os
import time

import torch
from torch import nn

from pyg_dynbatch.autobatch import autobatch


class Formula(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.number, self.head = nn.Linear(1, 8), nn.Linear(8, 1)
        self.operators = nn.ModuleDict({name: nn.Linear(16, 8) for name in "+*"})

    def encode(self, tree):
        if isinstance(tree, torch.Tensor):
            return self.number(tree).tanh()
        ((name, parts),) = tree.items()
        if name not in self.operators:
            raise ValueError(f"there is no operator {name!r}")
        return self.operators[name](torch.cat([self.encode(part) for part in parts], -1)).tanh()

    def forward(self, example):
        return self.head(self.encode(example["tree"]))


def read(value):
    def convert(tree):
        if isinstance(tree, dict):
            return {name: [convert(part) for part in parts] for name, parts in tree.items()}
        return torch.tensor([float(tree)])

    return {**value, "tree": convert(value["tree"])}


def serve(device):
    model = autobatch(Formula().to(device))

    def answer(examples):
        time.sleep(max(example.get("wait", 0) for example in examples))
        with torch.no_grad():
            values = model(examples)[:, 0].tolist()
        return [{"value": v, "batch": len(values), "pid": os.getpid()} for v in values]

    return "formula", read, answer
'''
FORMULAS: list[Any] = [{"+": [1, 2]}, 3, {"*": [{"+": [1, 2]}, {"*": [4, 0.5]}]}]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute as a worker does, whose only thread adds in one order."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture
def tree_file(tmp_path: Path) -> str:
    return str(tree_checkpoint(tmp_path / "trees.ckpt"))


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return tmp_path / "own.py"


def answered(kind: str, given: Any, requests: Sequence[Any], most: int = 64) -> list[Answer]:
    """Answer requests as a worker does, in batches of at most so many."""
    names = defined_in("serving")
    worker = names["Predictions"](partial(names[kind], given), max_batch_size=most)
    worker.setup("cpu")
    read = [worker.decode_request(request) for request in requests]
    batches = (worker.batch(read[first : first + most]) for first in range(0, len(read), most))
    responses = [
        worker.encode_response(each) for batch in batches for each in worker.predict(batch)
    ]
    return [Answer(each.status_code, json.loads(each.body)) for each in responses]


def close(found: Any, expected: Any) -> bool:
    return bool(found == pytest.approx(expected, rel=1e-5, abs=1e-6))


@pytest.mark.parametrize("most", [1, 64])
def test_bad_trees_are_answered_alone(tree_file: str, one_thread: None, most: int) -> None:
    bad = [{"tree": tree} for tree in BAD_TREES] + [{"text": "(good)"}]
    requests = [{"tree": tree} for tree in TREES]
    mixed = [each for pair in zip(bad, requests * 2, strict=False) for each in pair]
    found = answered("trees", [tree_file], mixed, most)
    for answer, said in zip(found[::2], [*BAD_TREES.values(), "no field 'tree'"], strict=True):
        assert answer.status == 422 and said in answer.content["detail"]
    predictor = TreePredictor([tree_file])
    for answer, tree in zip(found[1::2], TREES * 2, strict=False):
        alone = predictor.predict([predictor.read(tree)])
        assert answer.status == 200
        assert answer.content["prediction"] == alone["prediction"][0]
        assert close(answer.content["probability"], alone["probability"][0].tolist())


def test_a_batch_of_bad_requests_alone_is_answered(tree_file: str, one_thread: None) -> None:
    found = answered("trees", [tree_file], [{"tree": 7}, {"tree": ["not", "very", "good"]}])
    assert [answer.status for answer in found] == [422, 422]


def test_a_request_that_the_model_fails_on_is_answered_alone(own_file, one_thread, caplog):
    trees = [*FORMULAS, {"+": [1]}, {"-": [1, 2]}]
    found = answered(
        "load_service", f"{own_file}:serve", [{"formula": {"tree": tree}} for tree in trees]
    )
    assert [answer.status for answer in found] == [200, 200, 200, 500, 422]
    assert found[3].content == {"detail": "Internal server error"}
    assert "shapes cannot be multiplied" in caplog.text
    assert "there is no operator '-'" in found[4].content["detail"]


def test_bad_molecules_are_answered_alone(tmp_path: Path, one_thread: None) -> None:
    path = trained(tmp_path)
    found = answered("molecules", [path], [{"smiles": text} for text in [*BAD_SMILES, *SMILES]])
    for answer, said in zip(found, BAD_SMILES.values(), strict=False):
        assert answer.status == 422 and said in answer.content["detail"]
    predictor = MoleculePredictor([path])
    for answer, text in zip(found[len(BAD_SMILES) :], SMILES, strict=True):
        assert answer.status == 200
        expected = predictor.predict([predictor.featurizer(text)]).values[0].tolist()
        assert list(answer.content) == ["prediction_first", "prediction_second"]
        assert close(list(answer.content.values()), expected)


BAD_JSON: list[Any] = [
    *(None, [], "x", 3, {}, {"a": 1}, float("nan"), float("inf"), 10**400, "\ud800", 1e308),
    *([float("nan")], {"\ud800": 1}, {"-": ["\ud800", 1]}, {"+": [1, 1e308]}, {"+": 7}),
]


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"+": [found, 1]}
    return found


@pytest.mark.parametrize("kind", ["trees", "molecules", "load_service"])
def test_one_bad_request_of_any_json_is_refused_alone(
    kind: str, tmp_path: Path, tree_file: str, own_file: Path, one_thread: None
) -> None:
    made: dict[str, tuple[Any, str, list[Any]]] = {
        "trees": ([tree_file], "tree", TREES),
        "molecules": ([trained(tmp_path)], "smiles", SMILES),
        "load_service": (f"{own_file}:serve", "formula", [{"tree": tree} for tree in FORMULAS]),
    }
    given, field, values = made[kind]
    good = [{field: value} for value in values]
    inner = (
        [{"tree": value} for value in [*BAD_JSON, nested(3000)]] if kind == "load_service" else []
    )
    wrong = [*BAD_JSON, nested(3000), *inner]
    bad = [*BAD_JSON, *({field: value} for value in wrong), {"\ud800": 1}]
    alone = answered(kind, given, good)
    assert {answer.status for answer in alone} == {200}
    requests = [each for one in bad for each in (one, *good)]
    found = answered(kind, given, requests, most=len(good) + 1)
    for number, one in enumerate(bad):
        first, *others = found[number * (len(good) + 1) : (number + 1) * (len(good) + 1)]
        assert first.status == 422 or is_good(kind, one), f"{one!r:.60}: {first}"
        for answer, expected in zip(others, alone, strict=True):
            assert answer.status == 200
            for name in set(expected.content) - {"batch", "pid"}:
                found_value, value = answer.content[name], expected.content[name]
                assert found_value == value or close(found_value, value)


def is_good(kind: str, request: Any) -> bool:
    """Return whether a request, which is wrong for most models, may be answered."""
    numbers = (3, 1e308, {"+": [1, 1e308]})
    return kind == "load_service" and request in [{"formula": {"tree": tree}} for tree in numbers]


def test_a_wrong_checkpoint_is_named_before_listening(tmp_path: Path, tree_file: str) -> None:
    whole = Path(tree_file).read_bytes()
    (other := tmp_path / "other.ckpt").write_bytes(whole[: len(whole) // 2])
    (text := tmp_path / "text.ckpt").write_text("weights")
    contents = torch.load(tree_file, weights_only=True)
    unknown, broken = tmp_path / "unknown.ckpt", tmp_path / "broken.ckpt"
    torch.save({**contents, "pyg_dynbatch_task": "TreeRelatedness"}, unknown)
    torch.save({**contents, "state_dict": {}}, broken)
    said = {
        (tmp_path / "none.ckpt",): "there is no such file",
        (other,): "is not a checkpoint, or is truncated",
        (text,): "is not a checkpoint, or is truncated",
        (unknown,): "got: 'TreeRelatedness'",
        (broken,): "broken.ckpt",
    }
    for paths, part in said.items():
        argv = ["serving.py", "--checkpoint", *map(str, paths)]
        with mock.patch("sys.argv", argv), pytest.raises(SystemExit) as caught:
            defined_in("serving")["main"]()
        assert part in str(caught.value) and "\n" not in str(caught.value)


def ask_all(server: Server, requests: Sequence[Any]) -> list[Answer]:
    """Send requests at the same time."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(server.ask, requests))


@contextmanager
def server_of(*options: object) -> Iterator[Server]:
    """Start a server, terminate it, and check that it ends by itself."""
    with serving(*options) as server:
        yield server
    assert server.process.returncode == 0


FULL = ("--batch-timeout", "1", "--max-batch-size", "8")  # eight requests at once are one batch


@pytest.mark.long
def test_trees_over_http(tree_file: str, one_thread: None) -> None:
    bad = [{"tree": ["not", "very", "good"]}, {"tree": "((good) (not)"}, {"text": "(good)"}]
    said = ["child", "1 bracket is never closed", "no field 'tree'"]
    predictor = TreePredictor([tree_file])
    with server_of("--checkpoint", tree_file, *FULL) as server:
        found = ask_all(server, [*bad, *({"tree": tree} for tree in TREES), {"tree": "(good)"}])
        (alone,) = ask_all(server, [{"tree": TREES[2]}])
        bodies = [
            '{"tree": ',
            "[NaN]",
            '["\\ud800"]',
            "[" * 100_000,
            '{"tree": 1' + "0" * 5000 + "}",
        ]
        malformed = [server.ask(body).status for body in bodies]
    assert [answer.status for answer in found] == [422] * 3 + [200] * 5
    assert all(text in answer.content["detail"] for text, answer in zip(said, found, strict=False))
    for answer, tree in zip(found[3:], TREES, strict=False):
        expected = predictor.predict([predictor.read(tree)])["probability"][0].tolist()
        assert close(answer.content["probability"], expected)
    expected = predictor.predict([predictor.read(TREES[2])])
    assert alone.content["probability"] == expected["probability"][0].tolist()  # every bit
    assert malformed == [422] * len(bodies)


@pytest.mark.long
@pytest.mark.parametrize("all_processes", [False, True])  # as systemd does
def test_a_server_ends_without_starting_workers(
    own_file: Path, tmp_path: Path, monkeypatch: Any, capfd: Any, all_processes: bool
) -> None:
    code = (FOLDER / "serving.py").read_text("utf-8")
    impatient = "    server.monitor_internal = 0.001\n    server.run("  # seconds, instead of 2
    assert code.count("    server.run(") == 1
    script = tmp_path / "impatient.py"
    script.write_text(code.replace("    server.run(", impatient), "utf-8")
    monkeypatch.setattr("benchmarks.serving._SERVER", script)
    with server_of("--model", f"{own_file}:serve") as server:
        if all_processes:
            server.signal(signal.SIGTERM)
        else:
            server.process.terminate()  # and again, by leaving
            time.sleep(0.05)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="lists threads in /proc")
def test_a_server_ends_whichever_thread_is_signalled(own_file: Path) -> None:
    with server_of("--model", f"{own_file}:serve") as server:
        first, *others = sorted(
            int(path.name) for path in Path(f"/proc/{server.process.pid}/task").iterdir()
        )
        assert ctypes.CDLL(None).tgkill(first, others[-1], signal.SIGTERM) == 0
        server.process.wait(30)


@pytest.mark.long
def test_own_model_and_a_killed_worker(own_file: Path, one_thread: None) -> None:
    names: dict[str, Any] = {}
    exec(compile(OWN, str(own_file), "exec"), names)
    model = autobatch(names["Formula"]())
    examples = [names["read"]({"tree": tree}) for tree in FORMULAS]
    requests = [{"formula": {"tree": tree}} for tree in FORMULAS]
    with server_of("--model", f"{own_file}:serve", *FULL, "--timeout", "10") as server:
        found = ask_all(server, [*requests, {"formula": {"tree": "x"}}])
        assert [answer.status for answer in found] == [200, 200, 200, 422]
        assert "could not convert" in found[3].content["detail"]
        with torch.no_grad():
            expected = model(examples)[:, 0].tolist()
        assert close([answer.content["value"] for answer in found[:3]], expected)
        assert {answer.content["batch"] for answer in found[:3]} == {3}

        worker = found[0].content["pid"]
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(server.ask, {"formula": {"tree": 1, "wait": 100}})
            time.sleep(3)
            os.kill(worker, signal.SIGKILL)
            answer = lost.result(timeout=60)
        assert (answer.status, answer.content["detail"]) == (504, "no answer within 10 seconds")
        end = time.monotonic() + 150
        while (again := server.ask(requests[0])).status == 504 and time.monotonic() < end:
            pass
        assert again.status == 200 and again.content["pid"] != worker
        assert close(again.content["value"], expected[0])
