"""Measure scikit-learn's models of fingerprints and descriptors on the split of a run."""

from collections.abc import Sequence
from pydoc import locate
from typing import Any

from jsonargparse import Namespace

from pyg_dynbatch.console import OneLineArguments
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.datamodules import MoleculeDataModule
from pyg_dynbatch.molecules.features.descriptors import DESCRIPTORS
from pyg_dynbatch.molecules.nets.tabular import METHODS, TabularModel, library
from pyg_dynbatch.molecules.task import MoleculeProperty
from pyg_dynbatch.training.command import Run, prepare_process, with_run


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
