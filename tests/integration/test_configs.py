"""Every configuration is documented, can be read, and runs on small data."""

from pathlib import Path

import pytest

from pyg_dynbatch.data import rdkit_data_folder
from tests.console import rows_of, run

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
# The long tests run these variants of other configurations.
VARIANTS = ("freesolv", "lipophilicity", "listops_long", "sst_sentence_vectors")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    # A model of six units gives nearly the same score to the few pairs of the sample.
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero"),
]

SMALL = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
SMALL_TREES = ["--model.init_args.hidden_channels", "6"]
SMALL_TREES += ["--model.init_args.embedding_channels", "5"]
SMALL_MOLECULES = ["--model.init_args.hidden", "6", "--model.init_args.head", "[8]"]
SMALL_MOLECULES += ["--report.resamples", "20"]

# File name and target columns of the sets of molecules.
MOLECULES = {
    "esol": ("esol", ["measured log solubility in mols per litre"]),
    "freesolv": ("freesolv", ["expt"]),
    "lipophilicity": ("lipo", ["exp"]),
    "bbbp": ("bbbp", ["p_np"]),
    "tox21": ("tox21", [f"assay {number}" for number in range(12)]),
}
TREE_FILES = [("train", "train.txt"), ("val", "dev.txt"), ("test", "test.txt")]
METRICS = {"sick": "pearson", "tpsa": "rmse", "esol": "rmse", "freesolv": "rmse"}
METRICS |= {"lipophilicity": "rmse", "bbbp": "roc_auc", "tox21": "roc_auc"}


def molecule_file(folder: Path, name: str, tasks: list[str]) -> None:
    """Write rings and chains with labels 0 and 1 in the format of MoleculeNet."""
    rings = [f"C1{'C' * n}1" for n in range(2, 12)]
    smiles = ["C" * n + ring for ring in rings for n in range(1, 5)]
    lines = [",".join([*tasks, "mol_id", "smiles"])]
    for number, text in enumerate(smiles):
        labels = [str((number + task) % 2) for task in range(len(tasks))]
        lines.append(",".join([*labels, f"M{number}", text]))
    folder.mkdir()
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def small_data(config: Path, samples: Path, folder: Path) -> list[str]:
    """Return options that replace the data of a configuration with small data."""
    data = "--data.init_args."
    if config.stem == "tpsa":
        return SMALL_MOLECULES
    if config.stem in MOLECULES:
        molecule_file(folder / "raw", *MOLECULES[config.stem])
        return [*SMALL_MOLECULES, f"{data}raw_dir", str(folder / "raw"), f"{data}verify", "false"]
    return [*SMALL_TREES, *small_trees(config, samples, data)]


def small_trees(config: Path, samples: Path, data: str) -> list[str]:
    """Return options that replace the trees of a configuration with small ones."""
    if config.stem.startswith("listops"):
        recipe = [f"{data}recipe.{split}" for split in ("train", "val", "test")]
        return [recipe[0], "60", recipe[1], "20", recipe[2], "20"]
    if config.stem == "tree_file":
        files = [(f"{data}{split}_file", samples / "sst" / name) for split, name in TREE_FILES]
        return [str(word) for pair in files for word in pair]
    kind = "sick" if config.stem == "sick" else "sst"
    options = [f"{data}raw_dir", str(samples / kind), f"{data}vectors.source", "none"]
    return options if kind == "sick" else [*options, f"{data}verify", "false"]


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
def test_a_configuration_runs_on_small_data(
    config: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    nci = Path("NCI", "first_5k.tpsa.csv")
    lines = (rdkit_data_folder() / nci).read_text(encoding="utf-8").splitlines(keepends=True)
    nci.parent.mkdir()
    nci.write_text("".join(lines[:100]), encoding="utf-8")
    monkeypatch.setattr("pyg_dynbatch.molecules.datasets.rdkit_data_folder", lambda: tmp_path)
    argv = ["fit", "--config", str(config), *SMALL, *small_data(config, samples, tmp_path)]
    assert run(*argv, "--data.init_args.root", str(tmp_path / "data")) == 0
    assert f"test/{METRICS.get(config.stem, 'accuracy')}: " in capsys.readouterr().out
    rows = rows_of(next(tmp_path.glob("runs/*/version_0/predictions.csv")))
    assert rows and [row["example"] for row in rows] == [str(n) for n in range(len(rows))]
