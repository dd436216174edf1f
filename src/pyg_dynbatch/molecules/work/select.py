"""Measure scikit-learn's models, and choose between them, a network and their stacked mean."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pydoc import locate
from shutil import rmtree
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pyg_dynbatch.console import OneLineArguments
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import atomic_file, locked_folder
from pyg_dynbatch.molecules.datamodules import MoleculeDataModule
from pyg_dynbatch.molecules.features.descriptors import DESCRIPTORS
from pyg_dynbatch.molecules.nets.tabular import METHODS, TabularModel, library
from pyg_dynbatch.molecules.splits import inner_folds
from pyg_dynbatch.molecules.task import MoleculeProperty, ScoredSplit
from pyg_dynbatch.prediction import evaluating, read_checkpoint, write_table
from pyg_dynbatch.training.command import Run, prepare_process, with_run
from pyg_dynbatch.training.experiments import as_list
from pyg_dynbatch.training.runs import FILES, best_checkpoint, folder_of

CANDIDATES = ("network", *METHODS)
STACK = "stack"
TABLE, RESULT = "selection.csv", "result.pt"
_TREES = 100  # of the forest of one fold
_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")
_LEAST = 1e-6  # probability
_LEAST_WEIGHT = 1e-3


def fit_tabular(
    task: MoleculeProperty, data: MoleculeDataModule, method: str, seed: int, trees: int = 500
) -> TabularModel:
    """Fit a model of descriptors to the training split, and the scale of a task to its targets."""
    task.start_from(data)
    scaled = task.schema.kind == "regression"
    scale = task.model.scale.scaled if scaled else lambda targets: targets
    train, val = ((data.descriptors(part), scale(data.targets(part))) for part in ("train", "val"))
    model = TabularModel(task.schema, method)
    model.fit(train, val, seed, trees)
    return model


def check_molecules(command: str, run: Run) -> None:
    """Raise an error if a run is not one of molecules."""
    name = run.plain_config()["model"]["class_path"]
    kind: Any = locate(name)
    if not issubclass(kind, MoleculeProperty):
        what, expected = f"{command}: only for molecules", "a configuration with MoleculeProperty"
        raise mismatch(ValueError, what, expected, name)


class SelectRun(Run):
    """Train all candidates on folds of the training and validation molecules; keep the best."""

    def __init__(self, words: Sequence[str], candidates: Sequence[str], folds: int) -> None:
        for name in ("scipy.optimize", "skops.io") if {*candidates} - {"network"} else ():
            library(name)  # before hours of other work
        self.words, self.folds = list(words), folds
        self.candidates = [*dict.fromkeys(candidates)]
        super().__init__("fit", words)

    def before_instantiate_classes(self) -> None:
        """Refuse what a mean of models cannot have, before data are loaded."""
        super().before_instantiate_classes()
        check_molecules("fit --select", self)
        options = self.plain_config()["model"]["init_args"]
        for name in ("coverage", "members"):
            if options.get(name) is not None:
                what, got = "fit --select: an option cannot be used", f"{name}: {options[name]}"
                raise mismatch(ValueError, what, f"{name}: null", got)
        if self.checkpoint is not None:
            what = "fit --select: a run cannot be continued"
            raise mismatch(ValueError, what, "no --ckpt_path", self.checkpoint)

    def fit(self) -> None:
        """Measure the candidates, weight them, and write the best as one checkpoint."""
        task, data, folder = self.model, self.datamodule, folder_of(self.trainer)
        exact = self.trainer.precision in _PRECISIONS
        if folder is None or self.trainer.world_size > 1 or not exact:
            what = "fit --select: the trainer cannot be used"
            got = f"folder {folder}, {self.trainer.world_size} devices, {self.trainer.precision}"
            wanted = f"a CSVLogger, one device, one of {', '.join(_PRECISIONS)}"
            raise mismatch(ValueError, what, wanted, got)
        for stage in ("fit", "test"):
            data.setup(stage)
        self._check_candidates()
        task.fit_targets(data.targets("train"))
        rows = self._measured(folder, list(self._fold_words(folder)))
        val, test = ([found[part] for found in rows.values()] for part in ("val", "test"))
        order = np.concatenate([split.val for split in self.splits])
        golds = torch.from_numpy(data.molecules.targets[order]), data.targets("test")
        shares = {name: np.eye(len(rows))[place] for place, name in enumerate(rows)}
        if len(rows) > 1:
            shares[STACK] = stacked_weights(torch.stack(val), golds[0], task)
        table = self._table(shares, (torch.stack(val), torch.stack(test)), golds)
        chosen = table["candidate"][table["chosen"] == "yes"][0]
        write_table(folder / TABLE, table)
        data.parts.write(folder / FILES["split"])
        self._keep(folder, dict(zip(rows, shares[chosen], strict=True)))
        self.trainer.test(self.model, self.datamodule)
        # With the split, which the trainer knows from the test.
        self.trainer.save_checkpoint(folder / "best.ckpt", weights_only=True)
        self._predict_too()
        files = f"selection:        {folder / TABLE}", f"checkpoint:       {folder / 'best.ckpt'}"
        print(*summary(table), *files, sep="\n")

    def _fold_words(self, folder: Path) -> Any:
        """Write the folds; yield the options of the run of each."""
        data, first = self.datamodule, int(self.config["seed_everything"])
        for number, split in enumerate(self.splits, start=1):
            path = split.write(folder / "folds" / f"split-{number}.json")
            own = {
                "--seed_everything": first + number - 1,
                "--data.init_args.split.method": "file",
                "--data.init_args.split.file": path,
                "--data.init_args.split.leakage": "false",
                "--trainer.devices": 1,
                "--trainer.logger.init_args.save_dir": folder,
                "--trainer.logger.init_args.name": "folds",
            }
            if getattr(data, "root", "") is None:
                own["--data.init_args.root"] = folder / "molecules"  # featurized once
            yield [*self.words, *(str(word) for pair in own.items() for word in pair)]

    def _check_candidates(self) -> None:
        """Raise an error now if a candidate or a fold cannot be used."""
        task, data = self.model, self.datamodule
        tabular = [name for name in self.candidates if name != "network"]
        if tabular and not len(TabularModel(task.schema, tabular[0]).counts):
            text = "no Morgan counts for trees; descriptors: '[rdkit, morgan]' adds them"
            rank_zero_info(f"fit --select: {text}")
        kept = data.parts
        first = int(self.config["seed_everything"])
        self.splits = inner_folds(kept, data.molecules.texts(), self.folds, first)
        for data.parts in self.splits:
            data.check_parts()
        data.parts = kept

    def _measured(self, folder: Path, words: list[list[str]]) -> dict[str, dict[str, Tensor]]:
        """Train all candidates on all folds; return their predictions, the mean for the test."""
        items = [f"{name}-{fold}" for name in self.candidates for fold in range(1, self.folds + 1)]
        work = partial(run_candidate, folder / "folds", words)
        for number, item in enumerate(map(work, items), start=1):
            print(f"candidate {item}: done, {number} of {len(items)}")
        rows = {}
        for name in self.candidates:
            found = [_result(folder, name, fold) for fold in range(1, self.folds + 1)]
            val = torch.cat([each["val"] for each in found])
            test = torch.stack([each["test"] for each in found]).mean(0)
            if val.isfinite().all() and test.isfinite().all():
                rows[name] = {"val": val, "test": test}
            else:
                print(f"candidate {name}: left out, as some of its predictions are not finite")
        if not rows:
            raise mismatch(ValueError, "fit --select: all candidates have diverged")
        return rows

    def _table(self, shares: Any, predictions: Any, golds: Any) -> dict[str, np.ndarray]:
        """Tabulate loss and main metric of every candidate, and which has the least loss."""
        task = self.model
        metric, deviation = task.main_metric, task.model.scale.deviation

        def mean_score(guess: Tensor, gold: Tensor, sizes: list[int]) -> float:
            # Ranks of different models cannot be compared.
            parts = zip(guess.split(sizes), gold.split(sizes), strict=True)
            found = [ScoredSplit(*part, task.schema, deviation).mean[metric] for part in parts]
            return float(np.nanmean(found))

        sizes = [len(split.val) for split in self.splits], [len(golds[1])]
        scores = {
            part: [mean_score(mean_of(guess, each), *rest) for each in shares.values()]
            for part, guess, *rest in zip(("val", "test"), predictions, golds, sizes, strict=True)
        }
        losses = [stack_loss(predictions[0], golds[0], task, each) for each in shares.values()]
        best, names = int(np.argmin(losses)), list(shares)
        return {
            "candidate": np.array(names, dtype=object),
            "val_loss": np.array(losses),
            f"val_{metric}": np.array(scores["val"]),
            f"test_{metric}": np.array(scores["test"]),
            "weight": np.array([*shares.get(STACK, np.ones(1)), 1.0][: len(names)]),
            "chosen": np.array(["yes" if place == best else "" for place in range(len(names))]),
        }

    def _keep(self, folder: Path, shares: dict[str, float]) -> None:
        """Build the model that was chosen from its members, and write its checkpoint."""
        members: list[str] = []
        weights: list[float] = []
        states: dict[str, Tensor] = {}
        for name, share in shares.items():
            for number in range(1, self.folds + 1) if share > 0 else ():
                result = _result(folder, name, number)
                for part in ("members", "scales"):
                    prefix = f"model.network.{part}.{len(members)}."
                    states |= {prefix + key: value for key, value in result[part].items()}
                members.append(name)
                weights.append(share / self.folds)
        options = {**self.model.hparams, "members": members}
        task = type(self.model).from_plain(options)
        task.data_options = self.model.data_options
        task.model.scale.load_state_dict(self.model.model.scale.state_dict())
        task.model.network.weights.copy_(torch.tensor(weights))
        task.load_state_dict({**task.state_dict(), **states})
        self.model = task
        self.config.model.init_args.members = members


def _result(folder: Path, name: str, number: int) -> dict[str, Any]:
    path = folder / "folds" / f"{name}-{number}" / RESULT
    return dict(torch.load(path, weights_only=True))


def run_candidate(folder: Path, words: Sequence[Sequence[str]], item: str) -> str:
    """Train a candidate on a fold; keep its weights, and its predictions of fold and test."""
    name, fold = item.split("-")
    with locked_folder(folder, True, f".{item}.lock"):
        rmtree(folder / item, ignore_errors=True)  # of a process that was killed
        run = Run("fit", [*words[int(fold) - 1], "--trainer.logger.init_args.version", item])
        task, data = run.model, run.datamodule
        if name == "network":
            run.train()
            best = read_checkpoint(best_checkpoint(run.trainer).best_model_path)
            task.load_state_dict(best["state_dict"])
        else:
            data.setup("fit")
            seed = int(run.config.seed_everything)
            task.model.network = fit_tabular(task, data, name, seed, _TREES)
        found = {part: predictions(task, data, part) for part in ("val", "test")}
        network, scale = task.model.network.state_dict(), task.model.scale.state_dict()
        with atomic_file(folder / item / RESULT, "wb") as file:
            torch.save({**found, "members": network, "scales": scale}, file)
    return item


def predictions(task: MoleculeProperty, data: MoleculeDataModule, part: Any) -> Tensor:
    """Return values or probabilities for a split."""
    loader = data.make_loader(data.dataset(part), data.batch_size, shuffle=False)
    model = task.model
    with evaluating(model):
        rows = [model.predicted(model(batch)).double() for batch in loader]
    return torch.cat(rows)


def mean_of(predictions: Tensor, weights: np.ndarray) -> Tensor:
    """Average predictions ``[candidate, molecule, output]``."""
    return torch.einsum("cmo,c->mo", predictions, torch.from_numpy(np.asarray(weights)).double())


def stack_loss(rows: Tensor, gold: Tensor, task: MoleculeProperty, weights: np.ndarray) -> float:
    """Return the squared error in deviations, or the log loss, of a mean, for known targets."""
    mean, filled = mean_of(rows, weights), gold.nan_to_num(0)
    if task.schema.kind == "regression":
        error = ((mean - filled) / task.model.scale.deviation).square()
    elif task.schema.kind == "binary":
        error = -torch.where(filled == 1, mean, 1 - mean).clamp(min=_LEAST).log()
    else:
        chance = mean.unflatten(1, (task.schema.num_tasks, -1))
        right = chance.gather(2, filled.long()[..., None])[..., 0]
        error = -right.clamp(min=_LEAST).log()
    return float(error[~gold.isnan()].mean())


def stacked_weights(predictions: Tensor, gold: Tensor, task: MoleculeProperty) -> np.ndarray:
    r"""Return the shares of the mean with the least loss.

    Shares are at least 0 and sum to 1: stacked regressions, Breiman (1996), doi:10.1007/BF00117832.
    """
    optimize, count = library("scipy.optimize"), len(predictions)
    loss = partial(stack_loss, predictions, gold, task)
    unit = min(map(loss, np.eye(count))) or 1.0
    start = np.full(count, 1 / count)
    limits: Any = {"bounds": [(0, 1)] * count, "options": {"ftol": 1e-12, "maxiter": 500}}
    limits["constraints"] = {"type": "eq", "fun": lambda weights: weights.sum() - 1}
    found = optimize.minimize(lambda given: loss(given) / unit, start, method="SLSQP", **limits).x
    found = np.where(found < _LEAST_WEIGHT, 0, found)
    return found / found.sum()


def summary(table: dict[str, np.ndarray]) -> list[str]:
    """Format the table of candidates."""
    names = list(table)
    lines = [f"{names[0]:<10} {names[1]:>9} {names[2]:>16} {names[3]:>16} {names[4]:>7}"]
    for name, loss, *scores, weight, chosen in zip(*table.values(), strict=True):
        numbers = " ".join(f"{score:>16.4f}" for score in scores)
        mark = "  chosen on validation" if chosen else ""
        lines.append(f"{name:<10} {loss:>9.4f} {numbers} {weight:>7.2f}{mark}")
    return lines


def select(words: str | Sequence[str]) -> Path:
    """Choose between models of molecules on validation folds, as ``fit --select`` does.

    Args:
        words: Words of the command: options of ``fit``, ``--select``, ``--folds``.

    Returns:
        Folder of the run: ``selection.csv`` with the figures of all candidates, and ``best.ckpt``.

    Raises:
        ImportError: If scikit-learn or skops is not installed.
        ValueError: If an option cannot be used.

    Example:
        >>> select("--config molecules.yaml --folds 1")
        Traceback (most recent call last):
        ValueError: argument --folds: expected at least 2, got 1; see 'pyg-dynbatch fit --help'
    """
    parser = OneLineArguments("pyg-dynbatch fit", add_help=False)
    parser.add_argument("--select", nargs="*", choices=CANDIDATES)
    parser.add_argument("--folds", type=int, default=5)
    own, others = parser.parse_known_args(as_list(words))
    if own.folds < 2:
        parser.error(f"argument --folds: expected at least 2, got {own.folds}")
    prepare_process()
    run = SelectRun(others, own.select or CANDIDATES, own.folds)
    run.start()
    return Path(str(folder_of(run.trainer)))


_FEATURIZER = "pyg_dynbatch.data.MoleculeFeaturizer"


class BaselineRun(Run):
    """Test a baseline in place of the model of a configuration."""

    needs_weights = False
    methods = METHODS

    def __init__(self, method: str, words: Sequence[str]) -> None:
        self.method = method
        library("skops.io")  # before hours of other work
        super().__init__("test", [*words, "--trainer.accelerator", "cpu", "--trainer.devices", "1"])

    def before_instantiate_classes(self) -> None:
        """Check that the task is one of molecules, and add descriptors, before data are loaded."""
        super().before_instantiate_classes()
        check_molecules("baseline", self)
        data: Any = self.config.data.init_args
        if self.config.data.class_path.rpartition(".")[2] == "PackedMoleculeData":
            return  # whose descriptors are in its files
        if data.featurizer is None:
            data.featurizer = Namespace(class_path=_FEATURIZER, init_args=Namespace())
        options = data.featurizer.init_args
        given = options.get("descriptors") or []
        parts = list(given) if isinstance(given, list) else [given]
        names = [part if isinstance(part, str) else str(part.class_path) for part in parts]
        for name, kind in DESCRIPTORS.items():
            if not any(each == name or each.endswith(kind.__name__) for each in names):
                parts.append(name)
        options.descriptors = parts

    def test(self) -> None:
        """Fit the baseline, and test it in place of the network."""
        task, data = self.model, self.datamodule
        if self.checkpoint is not None:  # for its split; the weights are not used
            self.take_split(self.contents, self.checkpoint)
            self.checkpoint = None
        data.setup("fit")  # checks the targets, as 'fit' does
        seed = int(self.config["seed_everything"])
        task.model.network = fit_tabular(task, data, self.method, seed)
        self.trainer.validate(task, data, verbose=False)
        name = f"val/{task.main_metric}"
        print(f"{name}: {float(self.trainer.callback_metrics[name]):#.4g}")
        super().test()


def run_baseline(argv: list[str]) -> int:
    """Run ``baseline``: the options of ``test``, and ``--methods``."""
    parser = OneLineArguments(
        "pyg-dynbatch baseline",
        "Fit scikit-learn's models on the training split of a configuration, and test them as "
        "'fit' tests a network, with the same tables and pictures in the folder of a new run: "
        + "; ".join(f"{name}: {text}" for name, text in METHODS.items())
        + ". All options of 'test' are available too, such as --config, or --run for the split "
        "of a run.",
    )
    text = "which of them (default: all)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help=text)
    own, others = parser.parse_known_args(argv)
    prepare_process()
    for method in own.methods:
        print(f"{method}: {METHODS[method]}")
        BaselineRun(method, with_run("test", others)).start()
    return 0
