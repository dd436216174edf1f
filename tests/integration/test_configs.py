"""Every configuration can be read, names the source of its numbers, and runs on small data."""

import csv
from pathlib import Path

import pytest

from pyg_dynbatch.cli import main

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    # A model of six units gives nearly the same score to the few pairs of the sample.
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero"),
]

SMALL = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
SMALL += ["--model.init_args.hidden_channels", "6", "--model.init_args.embedding_channels", "5"]


def small_data(config: Path, samples: Path) -> list[str]:
    """Options that put small data in the place of that of a configuration."""
    data = "--data.init_args."
    if config.stem.startswith("listops"):
        recipe = [f"{data}recipe.{split}" for split in ("train", "val", "test")]
        return [recipe[0], "60", recipe[1], "20", recipe[2], "20"]
    kind = "sick" if config.stem == "sick" else "sst"
    options = [f"{data}raw_dir", str(samples / kind), f"{data}vectors.source", "none"]
    return options if kind == "sick" else [*options, f"{data}verify", "false"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_a_lab_note(config: Path) -> None:
    head = config.read_text(encoding="utf-8").split("trainer:")[0]
    for part in ("# Data:", "# Run:", f"configs/{config.name}"):
        assert part in head


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_runs_on_small_data(
    config: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["fit", "--config", str(config), *SMALL, *small_data(config, samples)]
    assert main([*argv, "--data.init_args.root", str(tmp_path / "data")]) == 0
    said = capsys.readouterr().out
    metric = "test/pearson: " if config.stem == "sick" else "test/accuracy: "
    assert metric in said
    table = next(tmp_path.glob("runs/*/version_0/predictions.csv"))
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["example"] for row in rows] == [str(n) for n in range(len(rows))]
    assert rows
