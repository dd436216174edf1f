"""Every configuration is documented, can be read, and runs on small data."""

from pathlib import Path

import pytest

from pyg_dynbatch.molecules.features.rdkit_access import rdkit_data_folder
from tests.console import rows_of, run

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
# The long tests run these variants of other configurations.
VARIANTS = ("bbbp", "freesolv", "lipophilicity", "listops_long", "sst_tai", "tox21")


# Options that replace the sizes and the data of a configuration with small ones.
SMALL = "--trainer.max_epochs 1 --trainer.enable_progress_bar false --data.init_args.root {folder}"
TREES = f"{SMALL} --model.init_args.hidden_channels 6 --model.init_args.embedding_channels 5"
RECIPE = "--data.init_args.recipe"
LISTOPS = f"{TREES} {RECIPE}.train 60 {RECIPE}.val 20 {RECIPE}.test 20"
VECTORS = {"source": "none", "file": "null", "cache": "null", "scale": 1.0}
VECTORS |= {"missing": "uniform", "lower_case": "true"}
SST = f"{TREES} --data.init_args.raw_dir {{samples}}/sst --data.init_args.verify false "
SST += " ".join(f"--data.init_args.vectors.{name} {value}" for name, value in VECTORS.items())
FILES = f"{TREES} --data.init_args.train_file {{samples}}/sst/train.txt"
FILES += " --data.init_args.val_file {samples}/sst/dev.txt"
FILES += " --data.init_args.test_file {samples}/sst/test.txt"
NCI = f"{SMALL} --model.init_args.hidden 6 --model.init_args.head [8]"
MOLECULES = f"{NCI} --data.init_args.raw_dir {{folder}} --data.init_args.verify false"
# By the name of the configuration, with the metric that its run prints.
CASES = {
    **dict.fromkeys(("bbbp", "tox21"), (MOLECULES, "roc_auc")),
    **dict.fromkeys(("esol", "freesolv", "lipophilicity"), (MOLECULES, "rmse")),
    "molecules": (f"{NCI} --data.init_args.file {{folder}}/mine.csv", "roc_auc"),
    **dict.fromkeys(("listops", "listops_long"), (LISTOPS, "accuracy")),
    **dict.fromkeys(("sst", "sst_tai"), (SST, "accuracy")),
    "tpsa": (NCI, "rmse"),
    "tree_file": (FILES, "accuracy"),
}
# File name and target columns of the sets of molecules.
TARGETS = {
    "esol": ("esol", ["measured log solubility in mols per litre"]),
    "freesolv": ("freesolv", ["expt"]),
    "lipophilicity": ("lipo", ["exp"]),
    "bbbp": ("bbbp", ["p_np"]),
    "molecules": ("mine", ["label"]),
    "tox21": ("tox21", [f"assay {number}" for number in range(12)]),
}


def write_molecules(folder: Path, name: str, tasks: list[str]) -> None:
    """Write rings and chains with labels 0 and 1 in the format of MoleculeNet."""
    rings = [f"C1{'C' * n}1" for n in range(2, 12)]
    lines = [",".join([*tasks, "mol_id", "smiles"])]
    for number, smiles in enumerate("C" * n + ring for ring in rings for n in range(1, 5)):
        labels = [str((number + task) % 2) for task in range(len(tasks))]
        lines.append(",".join([*labels, f"M{number}", smiles]))
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_documented(config: Path) -> None:
    head = config.read_text(encoding="utf-8").split("trainer:")[0]
    for part in ("# Data:", "# Run:", f"configs/{config.name}"):
        assert part in head


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_understood(name: str, capsys: pytest.CaptureFixture) -> None:
    config = next(path for path in CONFIGS if path.stem == name)
    assert run("fit", "--config", str(config), "--print_config") == 0
    assert "class_path: pyg_dynbatch." in capsys.readouterr().out


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem in VARIANTS))
        for path in CONFIGS
    ],
)
def test_a_configuration_runs_on_small_data(config, samples, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    nci = Path("NCI", "first_5k.tpsa.csv")
    lines = (rdkit_data_folder() / nci).read_text(encoding="utf-8").splitlines(keepends=True)
    nci.parent.mkdir()
    nci.write_text("".join(lines[:100]), encoding="utf-8")
    monkeypatch.setattr("pyg_dynbatch.molecules.datasets.rdkit_data_folder", lambda: tmp_path)
    if config.stem in TARGETS:
        write_molecules(tmp_path, *TARGETS[config.stem])
    options, metric = CASES[config.stem]
    small = [word.format(samples=samples, folder=tmp_path) for word in options.split()]
    assert run("fit", "--config", str(config), *small) == 0
    assert f"test/{metric}: " in capsys.readouterr().out
    rows = rows_of(next(tmp_path.glob("runs/*/version_0/predictions.csv")))
    assert rows and [row["example"] for row in rows] == [str(n) for n in range(len(rows))]
