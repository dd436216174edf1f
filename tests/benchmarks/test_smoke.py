"""Every benchmark runs on tiny sizes: its ways agree, and its records are complete."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, fidelity
from tests.benchmarks.conftest import Run

# The options, and what must be among the modes.
SMOKE: dict[str, tuple[str, set[str]]] = {
    "autobatch": (
        "--models trees calls spinn translation grown-tree --repeats 1 --trees 4 --width 4 "
        "--sentences 3 --leaves 4 --units 3 --words 9 "
        "--batch-sizes 3 --expressions 20 --loop-examples 5 --calls 50 --longest 6 "
        "--examples 2 --channels 4",
        {"autobatch"},
    ),
    "blocks": (
        "--trees 8 --units 4 --embedding 5 --width 4 --repeats 1 --batch-sizes 3 --batches 1",
        {"fused", "blocks", "depth", "agenda"},
    ),
    "compat": (
        "--batch-sizes 1 3 --nodes 4 --units 2 --repeats 1",
        {"pyg_dynbatch.compat.tree_lstm"},
    ),
    "dags": (
        "--cases architectures --batch-sizes 3 --widths 4 --batches 1 --repeats 1",
        {"DAGNN", "masks"},
    ),
    "data_sets": (
        "--molecules 100 --graphs 20 --batch-sizes 16 --repeats 1",
        {"data set", "DataLoader", "PyG's DataLoader"},
    ),
    "decisions": (
        "--models spinn tree --sizes 3 --width 4 --longest 3 --repeats 1",
        {"plain loop", "batched, if and while", "batched, while_loop and cond"},
    ),
    "featurize": (
        "--molecules 3 --descriptors morgan --processes 2 --repeats 1",
        {"with morgan descriptors"},
    ),
    "fidelity": (
        "--steps 3 --batch 4 --units 6 --trees 10 --modes fused generic engine",
        {"fused", "generic", "engine"},
    ),
    "gates": ("--cases gates --batch-sizes 3 --units 4 --repeats 1", {"eager", "compiled"}),
    "latency": (
        "--leaves 3 --units 4 --words 9 --calls 2 --repeats 1 --peers autobatch "
        "--batch-sizes 1 2 --molecules 4",
        {"ready batch", "from Data", "from SMILES", "alone, from Data"},
    ),
    "peers": (
        "--leaves 4 --units 3 --words 9 --batch-sizes 3 --repeats 1 --loop-trees 2",
        {"pyg_dynbatch", "recursive loop", "PyG level loop", "padded"},
    ),
    "policies": (
        "--batch-sizes 3 --batches 2 --repeats 1 --shapes chain turns",
        {"depth", "agenda"},
    ),
    "scaling": (
        "--sizes 7 14 --tree-nodes 7 --units 3 --repeats 1 --shapes chain random",
        {"fused", "generic", "engine"},
    ),
    "sst": (
        "--batch-sizes 3 --units 4 --embedding 5 --trees 6 --batches 1 --repeats 1 --loop-trees 2"
        " --precision bfloat16",
        {"fused", "unshared", "engine", "bare", "one by one", "engine, bfloat16"},
    ),
    "table1": (
        "--batch-sizes 1 3 --leaves 5 --units 4 --repeats 1",
        {"manual", "dynamic", "different shapes"},
    ),
    "weave": (
        "--molecules 5 --units 4 --repeats 1 --batches 1 --batch-sizes 2 --sizes 3 6",
        {"fused", "plain", "engine", "bare"},
    ),
}


def module_of(name: str) -> Any:
    return import_module(f"benchmarks.{name}")


def test_all_benchmarks_are_run() -> None:
    folder = Path(bench.__file__).parent
    found = {
        path.stem for path in folder.glob("*.py") if "def add_options" in path.read_text("utf-8")
    }
    assert found == {*SMOKE}


@pytest.mark.parametrize("name", SMOKE)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(module_of(name), ["--help"])
    assert end.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SMOKE)
def test_benchmark(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    options, modes = SMOKE[name]
    records = run(module_of(name), *options.split())
    assert {record["mode"] for record in records} >= modes
    assert "records: " in capsys.readouterr().out


@pytest.mark.long
def test_a_wrong_gradient_is_seen(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = fidelity.Training.backward

    def slightly_wrong(self: fidelity.Training, *given: Any) -> float:
        loss = right(self, *given)
        if self.mode != fidelity.REFERENCE:
            self.model.classifier.bias.grad.mul_(1 + 1e-6)
        return loss

    monkeypatch.setattr(fidelity.Training, "backward", slightly_wrong)
    options = "--steps 3 --batch 4 --units 6 --trees 10 --dtypes float64"
    run(fidelity, *options.split(), code=1)
    assert "fused and one by one DO NOT AGREE" in capsys.readouterr().out
