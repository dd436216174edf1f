"""Selection: folds, shares of the stacked mean, the model that is kept, and targets found."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyg_dynbatch.datasets import Split
from pyg_dynbatch.models import MoleculePredictor, explain
from pyg_dynbatch.molecules.files.read import find_targets
from pyg_dynbatch.molecules.nets.properties import AveragedProperties, TargetScale
from pyg_dynbatch.molecules.splits import (
    canonical_texts,
    describe_leakage,
    inner_folds,
    murcko_scaffold,
    random_split,
    scaffold_split,
)
from pyg_dynbatch.prediction import read_checkpoint
from tests.console import complaint, prepare, rows_of, run
from tests.molecules.molecules import SMILES, molecule_csv, molecule_data, property_task
from tests.test_cli_molecules import CONFIG

pytest.importorskip("sklearn")
pytest.importorskip("skops")
select = pytest.importorskip("pyg_dynbatch.molecules.work.select")


@given(st.sampled_from(["random", "scaffold"]), st.integers(2, 6), st.integers(0, 9))
def test_each_example_that_is_not_tested_validates_once(method: str, folds: int, seed: int) -> None:
    smiles = [*SMILES, *SMILES[::3], "OCC", "CCO", "C(O)C"]
    split = scaffold_split(smiles) if method == "scaffold" else random_split(len(smiles), seed=seed)
    found = inner_folds(split, smiles, folds, seed)
    known = sorted([*split.train, *split.val])
    assert sorted(np.concatenate([each.val for each in found])) == known
    for each in found:
        assert sorted([*each.train, *each.val]) == known
        assert each.test.tolist() == split.test.tolist()
        assert "both train and val" not in describe_leakage(each, canonical_texts(smiles))
        if method == "scaffold":
            parts = ({murcko_scaffold(smiles[i]) for i in part} for part in (each.train, each.val))
            assert set.intersection(*parts) <= {""}
    if method == "random":
        sizes = [len(each.val) for each in found]
        assert max(sizes) - min(sizes) <= 4  # copies of ethanol


class Fixed(nn.Module):
    """A member with given outputs."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows


@given(st.integers(0, 99), st.sampled_from(["regression", "binary", "multiclass"]))
def test_an_average_has_the_shares_of_its_members(seed: int, kind: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    classes, tasks = (3 if kind == "multiclass" else 1), 2
    outputs = torch.randn(3, 4, tasks * classes, generator=generator)
    scales = [TargetScale(tasks) for _ in range(4)]
    for scale in scales if kind == "regression" else ():
        scale.fit(torch.randn(9, tasks, generator=generator))
    members = list(zip(map(Fixed, outputs), scales[:3], strict=True))
    average = AveragedProperties(members, scales[3], kind, tasks)
    shares = torch.rand(3, generator=generator, dtype=torch.float64)
    shares[0] *= seed % 2  # a share of 0 is possible
    shares /= shares.sum()
    average.weights.copy_(shares)
    if kind == "regression":
        each = torch.stack([s.restored(x) for x, s in zip(outputs, scales[:3], strict=True)])
        found = scales[3].restored(average(None))
    elif kind == "binary":
        each, found = outputs.double().sigmoid(), average(None).double().sigmoid()
    else:
        each, found = (
            x.double().unflatten(-1, (tasks, -1)).softmax(-1).flatten(-2)
            for x in (outputs, average(None))
        )
    expected = torch.einsum("m,mro->ro", shares, each.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_shares_of_small_errors_have_the_least_loss(tmp_path: Path) -> None:
    """The exact shares of unbounded least squares, which are positive here."""
    task = property_task(molecule_data(tmp_path))
    for size in (1.0, 1e-3, 1e-6):
        generator = torch.Generator().manual_seed(1)
        gold = torch.randn(60, 2, generator=generator).double()
        errors = torch.tensor([1.0, 1.5, 2.0])[:, None, None] * torch.randn(
            3, 60, 2, generator=generator
        )
        errors = size * errors.double()
        rows = errors.flatten(1)
        exact = torch.linalg.solve(rows @ rows.t(), torch.ones(3).double())
        found = select.stacked_weights(gold + errors, gold, task)
        np.testing.assert_allclose(found, exact / exact.sum(), atol=1e-3)


def test_a_candidate_that_has_diverged_is_left_out(tmp_path: Path, monkeypatch, capsys) -> None:
    def result(folder: Path, name: str, fold: int) -> dict[str, torch.Tensor]:
        value = torch.nan if name in diverged and fold == 2 else 1.0
        return {"val": torch.full((4, 2), value), "test": torch.ones(3, 2)}

    monkeypatch.setattr(select, "_result", result)
    monkeypatch.setattr(select, "run_candidate", lambda *given: "")
    run = SimpleNamespace(candidates=["network", "linear"], folds=2)
    diverged = ["network"]
    assert list(select.SelectRun._measured(run, tmp_path, [])) == ["linear"]
    assert "candidate network: left out" in capsys.readouterr().out
    diverged.append("linear")
    with pytest.raises(ValueError, match="all candidates have diverged"):
        select.SelectRun._measured(run, tmp_path, [])


@pytest.mark.parametrize("kind", ["regression", "binary", "multiclass"])
def test_shares_have_the_least_loss(tmp_path: Path, kind: Any) -> None:
    task = property_task(molecule_data(tmp_path, kind))
    generator = torch.Generator().manual_seed(1)
    classes = 3 if kind == "multiclass" else 2
    gold = torch.randint(0, classes, (40, 2), generator=generator).double()
    gold[::7, 1] = torch.nan
    noisy = torch.randn(3, 40, 2 * (3 if kind == "multiclass" else 1), generator=generator).double()
    if kind == "regression":
        guesses = gold.nan_to_num(0) + noisy * torch.tensor([0.5, 0.6, 3.0])[:, None, None]
    elif kind == "binary":
        guesses = (4 * gold.nan_to_num(0) - 2 + noisy).sigmoid()
    else:
        labels = nn.functional.one_hot(gold.nan_to_num(0).long(), 3).double()
        guesses = (2 * labels + noisy.unflatten(2, (2, 3))).softmax(-1).flatten(2)
    found = select.stacked_weights(guesses, gold, task)
    assert found.min() >= 0 and found.sum() == pytest.approx(1)

    def loss(shares: np.ndarray) -> float:
        mean, known = np.einsum("m,mro->ro", shares, guesses.numpy()), ~gold.isnan().numpy()
        filled = gold.nan_to_num(0).numpy()
        if kind == "regression":
            return float(np.square(mean - filled)[known].mean())
        if kind == "binary":
            return float(-np.log(np.where(filled == 1, mean, 1 - mean))[known].mean())
        chance = mean.reshape(40, 2, 3)
        right = np.take_along_axis(chance, filled.astype(int)[..., None], 2)[..., 0]
        return float(-np.log(right)[known].mean())

    steps = np.linspace(0, 1, 21)
    grid = [(a, b, 1 - a - b) for a in steps for b in steps if a + b <= 1 + 1e-9]
    assert loss(found) <= min(loss(np.array(shares)) for shares in grid) + 1e-4


TABLE = """num,name,smiles,label,value,same,gap
1,methanol,CO,0,0.5,3,
2,ethanol,CCO,1,1.5,3,2
3,propanol,CCCO,1,-2,3,NA
5,butanol,CCCCO,0,7,3,1.5
"""


def test_targets_are_the_columns_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TABLE, encoding="utf-8")
    with pytest.raises(ValueError, match=r"binary: label; regression: value, gap[\s\S]*targets"):
        find_targets(path, None, ())
    labels, values = (find_targets(path, None, (), None, k) for k in ("binary", "regression"))
    assert labels.names == ("label",) and values.names == ("value", "gap")
    said = str(values)
    assert said.startswith(
        "targets (regression): value, gap; not targets: num (whole numbers that never"
    )
    assert "name (not numbers, such as 'methanol')" in said and "same (fewer than two" in said
    assert "label (labels)" in said
    assert find_targets(path, None, (), ["label"]).kind == "binary"
    assert find_targets(path, None, (), ["label", "gap"]).kind == "regression"
    rows = ["O,,", *(f"{'C' * n},{n * 37 % 61},{n / 8}" for n in range(1, 9))]
    path.write_text("\n".join(["smiles,registered,value", *rows]), encoding="utf-8")
    assert "value; not targets: registered (whole" in str(find_targets(path, None, ()))
    path.write_text("\n".join(["smiles,registered,value", *rows, "CO,9,<0.5"]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"some cells of 'value' are not[\s\S]*<0.5[\s\S]*missing"):
        find_targets(path, None, ())
    assert find_targets(path, None, ["<0.5"]).names == ("value",)
    assert find_targets(path, None, (), ["registered"]).names == ("registered",)
    path.write_text("smiles,name\nCO,methanol\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot be found[\s\S]*name \(not numbers, such"):
        find_targets(path, None, ())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, monkeypatch, CONFIG)
    molecule_csv(tmp_path)
    return tmp_path


def fold_area(place: Path, table: Path, name: str, number: int) -> float:
    """The area of a candidate on its fold, mean of the properties."""
    metrics = pytest.importorskip("sklearn.metrics")
    guesses = torch.load(place / f"folds/{name}-{number}/result.pt", weights_only=True)["val"]
    rows = np.array(rows_of(table))[Split.read(place / f"folds/split-{number}.json").val]
    areas = []
    for column, task in enumerate(("first", "second")):
        known = [place for place, row in enumerate(rows) if row[task]]
        gold = [int(rows[place][task]) for place in known]
        areas.append(metrics.roc_auc_score(gold, guesses[known, column]))
    return float(np.mean(areas))


WORDS = ["fit", "--config", "small.yaml", "--trainer.max_epochs", "2"]
WORDS += ["--model.init_args.counts", "false"]
WORDS += ["--data.init_args.featurizer.class_path", "MoleculeFeaturizer"]
WORDS += ["--data.init_args.featurizer.init_args.descriptors", "[rdkit, morgan]"]
SELECT = [*WORDS, "--folds", "2", "--select"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_the_best_on_validation_is_kept(folder: Path, capsys, kind: str) -> None:
    path = molecule_csv(folder, kind)
    options = ["--data.init_args.file", str(path), "--data.init_args.kind", kind]
    options += ["--checkpoint.monitor", "null"]
    if kind == "binary":
        options += ["--model.init_args.messages", "directed", "--data.init_args.pairs", "bonds"]
    assert run(*SELECT, *options) == 0
    said = capsys.readouterr().out
    place = Path("runs/small/version_0")
    rows = rows_of(place / "selection.csv")
    names = [row["candidate"] for row in rows]
    if kind == "binary":  # the mean over folds of the area of each
        found = [fold_area(place, path, "linear", number) for number in (1, 2)]
        assert float(rows[3]["val_roc_auc"]) == pytest.approx(np.mean(found), abs=1e-6)
    assert names == ["network", "forest", "boosting", "linear", "stack"]
    metric = "scaled_rmse" if kind == "regression" else "roc_auc"
    losses = [float(row["val_loss"]) for row in rows]
    best = losses.index(min(losses))
    assert [row["candidate"] for row in rows if row["chosen"]] == [names[best]]
    assert losses[4] <= min(losses[:4]) + 1e-6
    assert "chosen on validation" in said and f"test/{metric}: " in said
    assert str(place / "best.ckpt") in said and str(place / "split.json") in said
    # The table of the test is of the model that is kept, which any command can load.
    chosen = rows[best]
    tested = {row["task"]: row for row in rows_of(place / "task_metrics.csv")}
    assert float(tested["mean"][metric]) == pytest.approx(float(chosen[f"test_{metric}"]), rel=1e-4)
    predictor = MoleculePredictor([place / "best.ckpt"])
    table = rows_of(place / "predictions.csv")
    found = predictor.predict([predictor.featurizer(row["smiles"]) for row in table]).values
    column = "prediction_first" if kind == "regression" else "probability_first"
    expected = [float(row[column]) for row in table]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4, atol=1e-5)
    assert run("test", "--run", str(place)) == 0
    other = ["test", "--run", str(place), "--data.init_args.split.seed", "77"]
    assert "trained on a different split" in complaint(capsys, *other)
    # What a mean cannot do.
    with pytest.raises(ValueError, match="only of a single network"):
        explain(predictor, predictor.featurizer("CCO"))
    assert "trained on the validation" in complaint(capsys, "validate", "--run", str(place))
    assert "cannot be trained" in complaint(capsys, "fit", "--config", str(place / "config.yaml"))
    again = ["fit", "--run", str(place), "--ckpt_path", str(place / "best.ckpt")]
    assert "no state of training" in complaint(capsys, *again)
    # A candidate alone is its mean over the folds.
    assert run(*WORDS, "--folds", "2", *options, "--select", "linear") == 0
    (alone,) = set(Path("runs/small").glob("*/selection.csv")) - {place / "selection.csv"}
    (row,) = rows_of(alone)
    assert row["candidate"] == "linear" and row["chosen"] == "yes"
    contents = read_checkpoint(alone.with_name("best.ckpt"))
    assert contents["hyper_parameters"]["members"] == ["linear", "linear"]
    assert row[f"test_{metric}"] == rows[3][f"test_{metric}"]


def test_what_cannot_be_selected_is_refused(folder: Path, capsys) -> None:
    for words, said in (
        (["--model.init_args.coverage", "0.9"], "an option cannot be used"),
        (["--folds", "1"], "expected at least 2"),
        (["--folds", "25"], "too many folds"),
        (["--trainer.devices", "2"], "one device"),
        (["--trainer.precision", "64-true"], "one of 32-true"),
        (["--data.init_args.split.fractions", "[0.75, 0.25, 0.0]"], "the test split is empty"),
        (["--data.init_args.featurizer.init_args.descriptors", "null"], "have no descriptors"),
        (["--model.init_args.members", "[network]"], "members: null"),
    ):
        assert said in complaint(capsys, *SELECT, *words)
