"""Shards on local clusters of Dask and Ray: equal to one process, also if a worker is killed."""

import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from pyg_dynbatch import clusters
from pyg_dynbatch.clusters import compute
from pyg_dynbatch.datasets import FeaturizeOptions
from pyg_dynbatch.lightning import repeat, select, tune
from pyg_dynbatch.molecules import featurize, predict
from tests.console import prepare, rows_of
from tests.molecules.molecules import SMILES, molecule_csv, trained
from tests.molecules.packed import files_of
from tests.test_cli import CONFIG as TREES
from tests.test_cli_molecules import CONFIG as MOLECULES

SMALL_BLOCKS = FeaturizeOptions(block_size=128, progress=False)


def _children() -> set[psutil.Process]:
    """Return the processes started by this one, except Python's own, which stays."""
    every = psutil.Process().children(recursive=True)
    return {child for child in every if "multiprocessing.resource_tracker" not in _command(child)}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _folders() -> list[Path]:
    """Return the folders that Dask and Ray leave behind unless they are told otherwise."""
    temporary = Path(tempfile.gettempdir())
    paths = [Path.home() / ".ray", temporary / "ray", temporary / "dask-scratch-space"]
    return [path for path in paths if path.exists()]


@pytest.fixture(scope="module")
def nothing_left() -> Iterator[None]:
    children, folders = _children(), _folders()
    yield
    _, alive = psutil.wait_procs(_children() - children, timeout=60)
    assert alive == []
    assert _folders() == folders


@pytest.fixture(scope="module")
def dask(nothing_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    reason = 'Dask is not installed: pip install "pyg_dynbatch[dask]"'
    distributed = pytest.importorskip("dask.distributed", reason=reason)
    folder = {"temporary-directory": str(tmp_path_factory.mktemp("dask"))}
    workers = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1"}
    quiet = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with (
        pytest.importorskip("dask").config.set(folder),
        distributed.LocalCluster(**workers, **quiet) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def ray(nothing_left: None) -> Iterator[Any]:
    reason = 'Ray is not installed: pip install "pyg_dynbatch[ray]"'
    ray = pytest.importorskip("ray", reason=reason)
    # The paths of Ray's sockets must be short, so they cannot be in tmp_path.
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="shards") as folder,
    ):
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise it is saved in ~/.ray
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            logging_level=logging.CRITICAL,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module", params=["dask", "ray"])
def client(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute as the workers do, whose sums would else be rounded differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def molecule_file(path: Path, bad: slice, rows: int = 1_200) -> Path:
    """Write molecules of 5 to about 40 atoms, of which some are bad."""
    texts = ["CCO" * (row % 11) + "C" + SMILES[row % 32] for row in range(rows)]
    texts[bad] = ["C1CC"] * len(texts[bad])
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def smiles(tmp_path: Path) -> Path:
    return molecule_file(tmp_path / "molecules.smi", bad=slice(7, None, 100))


class Killer(Thread):
    """Kill the process that holds a lock as soon as it has begun."""

    def __init__(self, lock: Path, begun: Callable[[], object], left: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.lock, self.begun, self.left = lock, begun, left
        self.found: object = "nobody was killed"
        self.start()

    def killed(self) -> object:
        """What the process had finished when it was killed."""
        self.join(60)
        return self.found

    def _holder(self) -> list[str]:
        """Words of the lock, which is empty before its holder has written them."""
        return self.lock.read_text(encoding="utf-8").split() if self.lock.is_file() else []

    def run(self) -> None:
        while len(holder := self._holder()) < 2 or not self.begun():
            time.sleep(0.002)
        os.kill(int(holder[1]), signal.SIGKILL)
        self.found = self.left()


def shard_killer(folder: Path, saved: str) -> Killer:
    def files() -> object:
        return json.loads((folder / "manifest.json").read_text())["manifest"]["files"]

    return Killer(folder / ".lock", lambda: list(folder.glob(saved)), files)


@pytest.mark.long
def test_featurizing_gives_the_files_of_one_process(client, smiles, tmp_path):
    killer = shard_killer(tmp_path / "many" / "shard-0001-of-0003", "part-*/store.json")
    many = featurize(smiles, tmp_path / "many", shards=3, client=client, options=SMALL_BLOCKS)
    assert len(many) == 1_188
    assert killer.killed() == {}  # the shard was not finished when its process was killed
    featurize(smiles, tmp_path / "one", options=SMALL_BLOCKS)
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


@pytest.mark.long
def test_predicting_gives_the_files_of_one_process(client, smiles, one_thread, monkeypatch):
    # The workers have another working folder, in which these paths do not exist.
    monkeypatch.chdir(smiles.parent)
    molecule_file(smiles, slice(7, None, 100), rows=9_000)  # a shard notes its rows twice
    checkpoint = trained(Path("trained"))
    options = {"fingerprints": "prints.npy", "block_size": 128}
    killer = shard_killer(Path("many", "shard-0001-of-0003"), "predictions.csv.part.json")
    path = predict(smiles.name, "many", [checkpoint], shards=3, client=client, **options)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 9_001
    assert killer.killed() == {}
    predict(smiles, "one", [checkpoint], **options)  # errors.csv has absolute paths
    assert files_of(Path("many")) == files_of(Path("one"))
    assert {"predictions.csv", "prints.npy"} <= files_of(Path("one")).keys()


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    prepare(tmp_path, monkeypatch, TREES)
    return ["--config", "small.yaml"]


@pytest.mark.long
def test_repeating_gives_the_table_of_one_process(client, trees, one_thread) -> None:
    words = [*trees, "--times", "3", "--output"]
    alone = repeat([*words, "alone.csv"]).read_bytes()

    def results() -> list[str]:
        return [row["run_2"] for row in rows_of("many.csv")] if Path("many.csv").is_file() else []

    def folders(seed: str = "") -> int:
        configs = Path("runs/small").glob("*/config.yaml")
        return sum(f"seed_everything: {seed}" in path.read_text() for path in configs)

    killer = Killer(Path(".many.csv.run_2.lock"), lambda: folders("2") == 2, results)
    assert repeat(" ".join([*words, "many.csv"]), client).read_bytes() == alone
    assert set(killer.killed()) <= {""}
    assert Path("many.png").is_file() and not list(Path().glob(".many.csv*"))
    assert folders() == 7  # of which one belongs to the run that was killed
    assert repeat([*words, "many.csv"], client).read_bytes() == alone
    assert folders() == 7
    # In the folder of the first run by default.
    assert repeat(words[:-1], client).read_bytes() == alone


@pytest.mark.long
def test_selecting_gives_the_table_of_one_process(client, tmp_path, monkeypatch, one_thread):
    pytest.importorskip("skops")
    prepare(tmp_path, monkeypatch, MOLECULES)
    molecule_csv(tmp_path)
    words = "--config small.yaml --folds 2 --select network boosting"
    words += " --data.init_args.featurizer.class_path MoleculeFeaturizer"
    words += " --data.init_args.featurizer.init_args.descriptors rdkit"
    alone = select(words)
    place = alone.with_name("version_1") / "folds/network-1"

    def results() -> list[str]:
        return [str(path) for path in place.glob("result.pt")]

    lock = place.with_name(".network-1.lock")
    killer = Killer(lock, lambda: (place / "metrics.csv").is_file(), results)
    found = select(words, client)
    assert killer.killed() == []
    assert found == alone.with_name("version_1")
    assert rows_of(found / "selection.csv") == rows_of(alone / "selection.csv")
    assert rows_of(found / "predictions.csv") == rows_of(alone / "predictions.csv")


@pytest.mark.long
def test_tuning_gives_the_settings_of_one_process(client, trees, one_thread) -> None:
    pytest.importorskip("optuna")
    Path("space.yaml").write_text("model.init_args.hidden_channels: {low: 2, high: 9}\n")
    words = [*trees, "--space", "space.yaml", "--trials", "3"]
    alone = tune([*words, "--study", "alone.log"]).read_text().splitlines()
    many = tune([*words, "--study", "many.log", "--output", "many.yaml"], client)
    assert many.read_text().splitlines()[1:] == alone[1:]
    assert [line.replace("many", "alone") for line in many.read_text().splitlines()] == alone
    assert len(list(Path("runs/small").iterdir())) == 6
    Path("space.yaml").write_text("model.init_args.hiden_channels: [2, 3]\n")
    with pytest.raises(ValueError, match="did you mean '--model.init_args.hidden") as raised:
        tune([*words, "--study", "wrong.log"], client)
    assert "task " in raised.value.__notes__[-1]


@pytest.mark.long
def test_an_error_of_a_run_is_raised_with_its_number(client, trees) -> None:
    wrong = ["--data.init_args.tsv_dir", "nowhere", "--output", "wrong.csv"]
    with pytest.raises(FileNotFoundError, match="nowhere") as raised:
        repeat([*trees, *wrong], client)
    assert re.match("run [1-5] on ", raised.value.__notes__[-1])


@pytest.mark.long
def test_an_error_names_row_and_shard(client: Any, tmp_path: Path) -> None:
    file, folder = molecule_file(tmp_path / "few.smi", bad=slice(200, 201)), tmp_path / "packed"
    options = FeaturizeOptions("raise", block_size=128, progress=False)
    with pytest.raises(ValueError, match="few.smi:201") as raised:
        featurize(file, folder, shards=2, client=client, options=options)
    assert raised.value.__notes__[-1].startswith("shard 1/2 on ")
    # The cluster can still be used.
    molecule_file(file, bad=slice(0))
    packed = featurize(file, tmp_path / "mended", shards=2, client=client, options=options)
    assert len(packed) == 1_200


@pytest.mark.long
@pytest.mark.parametrize("work", ["shards", "repeat and tune"])
def test_the_scripts_of_the_guide_run(nothing_left, tmp_path, monkeypatch, work):
    """Run all of them; ``tests/test_docs.py`` runs only what is not under ``if __name__``."""
    for package in ("distributed", "ray"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    guide = Path(__file__).parents[1] / "docs" / "scale.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.M | re.S)
    blocks = [block for block in blocks if ("{small}" in block) == (work != "shards")]
    Path(trained(tmp_path / "trained")).rename(tmp_path / "best.ckpt")
    printed = ""
    with tempfile.TemporaryDirectory(prefix="shards") as folder:
        for name in ("DASK_TEMPORARY_DIRECTORY", "RAY_TMPDIR"):
            monkeypatch.setenv(name, folder)
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for number, block in enumerate(blocks):
            script = tmp_path / f"script{number}.py"
            script.write_text(block, encoding="utf-8")
            command = [sys.executable, script.name]
            printed += subprocess.check_output(command, cwd=tmp_path, text=True)
    lines = printed.splitlines()
    if work == "shards":
        assert {"True", "99 molecules", "99 predictions"} <= set(lines)
        return
    assert {"repeated.csv", "best.yaml"} <= set(lines)
    assert len(list(tmp_path.glob("runs/listops/version_*/predictions.csv"))) == 3
    (row,) = [row for row in rows_of(tmp_path / "repeated.csv") if row["metric"] == "accuracy"]
    assert row["runs"] == "3" and row["run_1"] and row["run_2"] and row["run_3"]
    assert "best of 3 trials: val/accuracy" in printed


@pytest.mark.long
def test_a_dask_cluster_without_workers_is_waited_for_but_not_forever(
    dask: Any, smiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from dask.distributed import Client, LocalCluster

    monkeypatch.setattr(clusters, "PATIENCE", 2.0)
    options = {"shards": 2, "options": SMALL_BLOCKS}
    none = {"n_workers": 0, "host": "127.0.0.1", "dashboard_address": ":0"}
    with LocalCluster(**none, silence_logs=logging.CRITICAL) as cluster, Client(cluster) as client:
        later = Timer(3.0, cluster.scale, [1])
        later.start()
        assert len(featurize(smiles, tmp_path / "one", client=client, **options)) == 1_188
        said = capsys.readouterr().err
        assert said.count("Dask: the cluster has no workers; waiting for the first one") == 1
        # As after a death while it starts: the nanny does not start it again.
        later = Timer(0.1, cluster.scale, [0])
        later.start()
        with pytest.raises(TimeoutError, match="Dask: the cluster has lost all of its workers"):
            featurize(many(tmp_path), tmp_path / "two", client=client, **options)


@pytest.mark.long
@pytest.mark.parametrize("starting", [True, False])
def test_workers_of_dask_that_are_killed_again_and_again_end_the_call(
    starting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second, also while they start; or always as soon as they have a task."""
    distributed = pytest.importorskip("dask.distributed")
    monkeypatch.setattr(clusters, "PATIENCE", 5.0 if starting else 60.0)
    two = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": ":0"}
    ended = Event()

    def kill() -> None:
        while not ended.wait(1.0 if starting else 0.2):
            if starting or (len(client.nthreads()) == 2 and not ended.wait(0.5)):
                for worker in list(cluster.workers.values()):
                    with suppress(ProcessLookupError, TypeError):  # dead already, or none yet
                        os.kill(worker.pid, signal.SIGKILL)

    with (
        distributed.LocalCluster(**two, silence_logs=logging.CRITICAL) as cluster,
        distributed.Client(cluster) as client,
    ):
        killer = Thread(target=kill, daemon=True)
        killer.start()
        options = {"shards": 4, "options": SMALL_BLOCKS}
        with pytest.raises((TimeoutError, distributed.KilledWorker)) as raised:
            featurize(many(tmp_path), tmp_path / "out", client=client, **options)
        ended.set()
        killer.join()
    # A worker that starts within a second may get a task before it is killed.
    assert starting or isinstance(raised.value, distributed.KilledWorker)


@pytest.mark.parametrize("finishing", [False, True])
def test_workers_of_dask_that_come_and_go_do_not_set_the_clock_back(finishing, monkeypatch):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    futures = [SimpleNamespace(status="pending", result=lambda: "done") for _ in range(3)]
    polls = 0

    def poll(*_: object, **__: object) -> None:
        nonlocal polls
        polls += 1
        assert polls < 100, "the call has no end"
        if finishing and polls % 5 == 0:
            futures[polls // 5 - 1].status = "finished"

    class Client(SimpleNamespace):
        map = staticmethod(lambda *_, **__: futures)
        nthreads = staticmethod(lambda: {"worker": 1} if polls % 2 else {})
        cancel = staticmethod(list)

    monkeypatch.setattr(distributed, "Client", Client)
    monkeypatch.setattr(distributed, "wait", poll)
    monkeypatch.setattr(clusters, "monotonic", lambda: polls * clusters.PATIENCE * 0.3)
    if finishing:
        assert list(compute(str, [1, 2, 3], Client(), "run")) == ["done"] * 3
        return
    with pytest.raises(TimeoutError, match="Dask: the cluster has lost all of its workers"):
        list(compute(str, [1, 2, 3], Client(), "run"))


def many(folder: Path) -> Path:
    """Write molecules that take longer than a cluster takes to stop."""
    path = folder / "many.smi"
    path.write_text("CCOCCN(C)CCCCCCCCO\n" * 60_000, encoding="utf-8")
    return path


@pytest.mark.parametrize(("gpu", "kind"), [(False, "CPU"), (None, "CPU"), (True, "GPU")])
def test_a_ray_cluster_without_what_the_items_need_is_refused(gpu, kind, monkeypatch):
    empty = SimpleNamespace(cluster_resources=lambda: {"memory": 1.0})
    monkeypatch.setitem(sys.modules, "ray", empty)
    with pytest.raises(ValueError, match=f"Ray: the cluster has no {kind}"):
        list(compute(str, [0], empty, "run", gpu))


@pytest.mark.parametrize("client", ["ray", 3, []], ids=repr)
def test_an_unknown_client_is_refused(client: Any, smiles: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"(?s)the client is unknown.*pyg_dynbatch\[dask\]"):
        featurize(smiles, tmp_path / "packed", shards=2, client=client)
    assert not (tmp_path / "packed").exists()
