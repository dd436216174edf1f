"""Requests per second and latency of examples/serving.py, in batches and one by one.

Two servers with the same checkpoint are asked in turn, over the loopback, by clients in a process
of their own: each client sends its next request when the last one is answered. The other server is
stopped meanwhile. Models have random weights; trees are random and have 20 leaves.
"""

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch

from benchmarks import bench
from benchmarks.trees import CLASSES, Shape
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.rdkit_access import rdkit_data_folder
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.molecules.task import MoleculeProperty
from pyg_dynbatch.trees.predict import TEXT
from pyg_dynbatch.trees.task import TreeClassification
from pyg_dynbatch.trees.words import Vocabulary

ONE, BATCHES = "one by one", "batches"
_LEAVES, _WORDS, _BODIES = 20, 1000, 256
_SERVER = Path(__file__).parents[1] / "examples" / "serving.py"
_START, _END = 180, 60  # seconds that a server has to start and to end


class Answer(NamedTuple):
    """Status and content of the answer to a request."""

    status: int
    content: Any


class Server(NamedTuple):
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]

    def ask(self, request: Any, method: str = "POST", path: str = "/predict") -> Answer:
        """Send one request; text is sent as it is, everything else as JSON."""
        body = request if isinstance(request, str) else json.dumps(request)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return Answer(response.status, json.loads(content) if is_json else content)
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        """Wait for the workers to load the model."""
        end = time.monotonic() + _START
        while self.process.poll() is None and time.monotonic() < end:
            try:
                if self.ask("", "GET", "/health").status == 200:
                    return
            except ConnectionError:
                pass
            time.sleep(0.2)
        raise mismatch(RuntimeError, "the server does not start", f"ready within {_START} s")

    def running(self) -> set[int]:
        """Return the numbers of its processes that have not ended (Linux only)."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text("utf-8").rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if int(session) == self.process.pid and state != "Z":
                found.add(int(path.parent.name))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        os.killpg(self.process.pid, number)


@contextmanager
def serving(*options: object) -> Iterator[Server]:
    """Start the server of the example in a session of its own, and terminate it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(_SERVER), "--port", str(port), *map(str, options)]
    with subprocess.Popen(command, start_new_session=True) as process:
        server = Server(port, process)
        try:
            server.wait_until_ready()
            yield server
            process.terminate()
            process.wait(_END)
            end = time.monotonic() + _END
            while (left := server.running()) and time.monotonic() < end:
                time.sleep(0.05)  # such as multiprocessing's resource tracker
            if left:
                raise mismatch(RuntimeError, "the server left processes behind", "none", left)
        finally:
            if server.running():
                server.signal(signal.SIGKILL)


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.counts("--units", [150, 300], "widths of the Tree-LSTMs (default: 150 300)")
    parser.counts("--clients", [1, 8, 64], "clients at the same time (default: 1 8 64)")
    parser.count("--max-batch-size", 64, "requests in a batch (default: 64)", least=2)
    text = "seconds to wait for more requests (default: 0)"
    parser.add_argument("--batch-timeout", type=float, default=0.0, metavar="S", help=text)
    text = "seconds of each round (default: 4)"
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help=text)
    parser.common(repeats=3, seed=1)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure trees of all widths, and molecules."""
    records: list[bench.Record] = []
    clients = ProcessPoolExecutor(1, get_context("spawn"))
    with tempfile.TemporaryDirectory() as name, clients:
        folder = Path(name)
        trees = _trees(np.random.default_rng(options.seed))
        for units in options.units:
            path = _tree_checkpoint(folder / f"{units}.ckpt", units)
            records += _measure(f"trees, {units} units", path, trees, options, device, clients)
        path = _write_molecule_checkpoint(folder)
        records += _measure("molecules", path, _molecules(), options, device, clients)
    return records


def _tree_checkpoint(path: Path, units: int) -> Path:
    torch.manual_seed(0)
    options: Any = {"num_tokens": _WORDS + 1, "num_classes": CLASSES}
    options |= {"embedding_channels": units, "hidden_channels": units}
    contents: Any = {"state_dict": TreeClassification(**options).state_dict()}
    contents |= {"hyper_parameters": options, "pyg_dynbatch_task": "TreeClassification"}
    vocabulary = Vocabulary(f"w{number}" for number in range(_WORDS))
    text = {"labels": "none", "vocabulary": vocabulary.as_dict()}
    torch.save({**contents, "pytorch-lightning_version": "2", "data": {TEXT: text}}, path)
    return path


def _trees(generator: np.random.Generator) -> list[Any]:
    """Draw requests with bracketed trees."""
    requests = []
    for _ in range(_BODIES):
        shape = Shape.draw("random", _LEAVES, generator)
        texts = [f"(w{word})" for word in generator.integers(_WORDS, size=len(shape.children))]
        for node in shape.order:
            if shape.children[node]:
                texts[node] = f"({' '.join(texts[child] for child in shape.children[node])})"
        requests.append({"tree": texts[0]})
    return requests


def _write_molecule_checkpoint(folder: Path) -> Path:
    """Write a small weave network with random weights."""
    featurizer = MoleculeFeaturizer()
    pair_table = featurizer.pair_table
    schema = MoleculeSchema(featurizer.spec, len(featurizer.atom_names), pair_table, ("y",))
    torch.manual_seed(0)
    task = MoleculeProperty(schema.as_dict(), hidden=50, atom_out=128, readout="sum", head=[64])
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.strategy.connect(task)
    path = folder / "small.ckpt"
    trainer.save_checkpoint(path)
    return path


def _molecules() -> list[Any]:
    """Take the first molecules of a set that comes with RDKit."""
    path = rdkit_data_folder() / "NCI" / "first_5K.smi"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{"smiles": line.split()[0]} for line in lines[:_BODIES]]


def _measure(
    case: str,
    path: Path,
    requests: Sequence[Any],
    options: Namespace,
    device: torch.device,
    executor: Executor,
) -> Iterator[bench.Record]:
    given = ("--checkpoint", path, "--device", device.type, "--max-batch-size")
    batches = (*given, options.max_batch_size, "--batch-timeout", options.batch_timeout)
    with ExitStack() as stack:
        servers = {ONE: stack.enter_context(serving(*given, 1))}
        servers[BATCHES] = stack.enter_context(serving(*batches))
        _check(servers, requests[:16], path)
        for clients in options.clients:
            rounds: dict[str, list[Load]] = {name: [] for name in servers}
            for number in range(1 + options.repeats):
                for name in sorted(servers, reverse=number % 2 == 0):
                    work = (servers[name].port, requests, clients, options.seconds)
                    with _alone(servers, name):
                        found = executor.submit(load, *work).result(options.seconds + 120)
                    if number:
                        rounds[name].append(found)
            yield from _records(case, clients, rounds)


def _check(servers: dict[str, Server], requests: Sequence[Any], path: Path) -> None:
    """Raise an error unless the servers answer as direct calls of the model do."""
    example: Any = bench.example("serving")
    make = example.molecules if "smiles" in requests[0] else example.trees
    service = make([str(path)], "cpu")
    examples = [service.read(request[service.field]) for request in requests]
    expected = [_numbers(service.answer([each])[0]) for each in examples]
    for name, server in servers.items():
        with ThreadPoolExecutor(len(requests)) as pool:
            found = [_numbers(answer.content) for answer in pool.map(server.ask, requests)]
        bench.assert_agreement(f"the server, {name},", expected, found)


def _numbers(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(np.hstack([*answer.values()]))


@contextmanager
def _alone(servers: dict[str, Server], name: str) -> Iterator[None]:
    """Stop all other servers for a while."""
    others = [server for each, server in servers.items() if each != name]
    for server in others:
        server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for server in others:
            server.signal(signal.SIGCONT)


class Load(NamedTuple):
    """What clients have seen."""

    per_second: float
    latencies: list[float]  # seconds


def load(port: int, requests: Sequence[Any], clients: int, seconds: float) -> Load:
    """Send requests from several clients at the same time; all must be answered with 200."""
    bodies = [json.dumps(request) for request in requests]
    begun = time.perf_counter()

    def client(number: int) -> list[float]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        latencies: list[float] = []
        while (sent := time.perf_counter()) < begun + seconds:
            body = bodies[(len(latencies) * clients + number) % len(bodies)]
            connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            latencies.append(time.perf_counter() - sent)
            if response.status != 200:
                raise mismatch(RuntimeError, "a request has failed", 200, content.decode())
        connection.close()
        return latencies

    with ThreadPoolExecutor(clients) as pool:
        latencies = [each for part in pool.map(client, range(clients)) for each in part]
    return Load(len(latencies) / (time.perf_counter() - begun), latencies)


def _records(case: str, clients: int, rounds: dict[str, list[Load]]) -> Iterator[bench.Record]:
    common: bench.Record = {"case": case, "batch": clients, "unit": "requests"}
    for name, loads in rounds.items():
        latencies = [each for part in loads for each in part.latencies]
        p50, p99 = np.quantile(latencies, [0.5, 0.99]).tolist()
        common |= {"repeats": len(loads), "requests": len(latencies), "p99_seconds": p99}
        record = bench.make_record(common, name, "requests", p50)
        record["requests_per_second"] = statistics.median(part.per_second for part in loads)
        if name != ONE:
            pairs = zip(loads, rounds[ONE], strict=True)
            record["ratio"] = statistics.median(a.per_second / b.per_second for a, b in pairs)
            record["ratio_to"] = ONE
        yield record


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case."""
    columns = {
        "clients": "batch",
        "server": "mode",
        "requests/s": bench.cell("requests_per_second", form=",.0f"),
        "x": bench.cell("ratio", form=".2f"),
        "50 % ms": bench.cell("median_seconds", form=".1f", times=1e3),
        "99 % ms": bench.cell("p99_seconds", form=".1f", times=1e3),
    }
    for case, mine in bench.grouped(records, "case").items():
        yield bench.table(case[0], mine, columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw requests per second over the number of clients."""
    labels = ("clients", "requests per second")
    yield bench.Panel(records, "{case}, {mode}", "batch", "requests_per_second", labels, "xy")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
