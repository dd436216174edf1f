"""Every configuration is documented, can be read, and runs on small data."""

from pathlib import Path

import pytest

from pyg_dynbatch.molecules.chemistry import rdkit_data_folder
from tests.console import rows_of, run

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
# The long tests run these variants of other configurations.
VARIANTS = ("bbbp", "freesolv", "sst_glove", "tox21")

# Options that replace the sizes and the data of a configuration with small ones.
SMALL = "--trainer.max_epochs 1 --trainer.enable_progress_bar false --data.root {folder}"
TREES = f"{SMALL} --model.hidden_channels 6 --model.embedding_channels 5"
RECIPE = "--data.recipe"
LISTOPS = f"{TREES} {RECIPE}.train 60 {RECIPE}.val 20 {RECIPE}.test 20"
SST = f"{TREES} --data.raw_dir {{samples}}/sst --data.verify false"
FILES = f"{TREES} --data.train_file {{samples}}/sst/train.txt"
FILES += " --data.val_file {samples}/sst/dev.txt --data.test_file {samples}/sst/test.txt"
NCI = f"{SMALL} --model.hidden 6 --model.head [8]"
MOLECULES = f"{NCI} --data.raw_dir {{folder}} --data.verify false"
# By the name of the configuration, with a metric of its test.
CASES = {
    **dict.fromkeys(("bbbp", "tox21"), (MOLECULES, "roc_auc")),
    **dict.fromkeys(("esol", "freesolv"), (MOLECULES, "rmse")),
    "molecules": (
        f"{NCI} --data.file {{folder}}/mine.csv --data.targets label --data.kind binary",
        "roc_auc",
    ),
    "listops": (LISTOPS, "accuracy"),
    "sst": (SST, "accuracy"),
    "sst_glove": (f"{SST} --data.vectors.file {{folder}}/vectors.txt", "accuracy"),
    "tpsa": (NCI, "rmse"),
    "tree_file": (FILES, "accuracy"),
}
# File name and columns of the sets of molecules.
COLUMNS = {
    "esol": ("esol", ["mol_id", "measured log solubility in mols per litre", "smiles"]),
    "freesolv": ("freesolv", ["mol_id", "smiles", "expt"]),
    "bbbp": ("bbbp", ["mol_id", "p_np", "smiles"]),
    "molecules": ("mine", ["mol_id", "label", "smiles"]),
    "tox21": ("tox21", [*(f"assay {number}" for number in range(12)), "mol_id", "smiles"]),
}


def write_molecules(folder: Path, name: str, columns: list[str]) -> None:
    """Write rings and chains with labels 0 and 1 in the format of MoleculeNet."""
    rings = [f"C1{'C' * n}1" for n in range(2, 12)]
    lines = [",".join(columns)]
    for number, smiles in enumerate("C" * n + ring for ring in rings for n in range(1, 5)):
        cells = {"mol_id": f"M{number}", "smiles": smiles}
        labels = [str((number + place) % 2) for place in range(len(columns))]
        lines.append(",".join(cells.get(*pair) for pair in zip(columns, labels, strict=True)))
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_documented(config: Path) -> None:
    head = config.read_text(encoding="utf-8").split("trainer:")[0]
    for part in ("# Data:", "# Run:", f"configs/{config.name}"):
        assert part in head


def test_every_configuration_has_a_case() -> None:
    assert {path.stem for path in CONFIGS} == set(CASES)


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
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_configuration_runs_on_small_data(config, samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nci = Path("NCI", "first_5k.tpsa.csv")
    lines = (rdkit_data_folder() / nci).read_text(encoding="utf-8").splitlines(keepends=True)
    nci.parent.mkdir()
    nci.write_text("".join(lines[:100]), encoding="utf-8")
    Path("vectors.txt").write_text("good 1 2 3 4 5\nfilm 1 1 1 1 1\n", encoding="utf-8")
    monkeypatch.setattr("pyg_dynbatch.molecules.datasets.rdkit_data_folder", lambda: tmp_path)
    if config.stem in COLUMNS:
        write_molecules(tmp_path, *COLUMNS[config.stem])
    options, metric = CASES[config.stem]
    small = [word.format(samples=samples, folder=tmp_path) for word in options.split()]
    assert run("fit", "--config", str(config), *small) == 0
    logged = rows_of(next(tmp_path.glob("runs/*/version_0/metrics.csv")))
    assert [row for row in logged if row.get(f"test/{metric}")]
