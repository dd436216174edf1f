"""Models: networks that know their loss, their predictions and their metrics."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import UNREADABLE, existing, write_atomically

Loss = tuple[Float[Tensor, ""], Int[Tensor, ""]]
"""A sum of losses, and the number of its terms."""

Reduction = Literal["mean", "sum", "per_example"]

Table = dict[str, np.ndarray]

HEADER = "pyg_dynbatch"
"""Name of the part of a checkpoint that describes its model."""

_PREFIX = "model."  # of the weights in the checkpoint of a Task

M = TypeVar("M", bound="Model")


class Model(nn.Module, ABC):
    """Base of networks that a :class:`~pyg_dynbatch.lightning.Task` trains.

    The contract has one rule: every argument of the constructor is kept as an attribute of the same
    name, a plain value or an object with ``as_dict()``. A checkpoint holds them and the weights, so
    that :func:`~pyg_dynbatch.load` opens it without Lightning, and without any other file.

    What the data decide, such as the words of the tokens, is the argument ``schema``; the command
    line takes it from the data module.

    What a run calls, in this order:

    - before training ``start_from(dataset)``, then ``parameter_groups()``;
    - for a batch ``forward(batch)`` → ``loss(output, batch)``, and in validation and test also
      ``values(output)`` → ``columns(values, batch)``;
    - at the end of an epoch of these ``metrics(columns)`` of all batches;
    - on the command line, after a test, ``draw(folder, columns, dataset)``.

    Example:
        >>> from torch_geometric.data import Data
        >>> class Mean(Model):
        ...     def __init__(self, width: int) -> None:
        ...         super().__init__()
        ...         self.width = width
        ...         self.linear = nn.Linear(width, 1)
        ...
        ...     def forward(self, batch):
        ...         return self.linear(batch.x.mean(0, keepdim=True))
        ...
        ...     def loss(self, output, batch):
        ...         return (output - batch.y).square().sum(), torch.tensor(output.numel())
        ...
        ...     def columns(self, values, batch, deviation=None):
        ...         return {"prediction": values[:, 0], "target": batch.y[:, 0]}
        >>> model = Mean(3)
        >>> table = model.predict(Data(x=torch.ones(2, 3), y=torch.zeros(1, 1)))
        >>> list(table), model.options()
        (['prediction', 'target'], {'width': 3})
    """

    reduction: Reduction = "mean"
    """What the sum of losses is divided by in training: the number of its terms (``mean``), nothing
    (``sum``), or the number of examples (``per_example``)."""

    monitor: str = "loss"
    """Name of the metric that chooses the best checkpoint."""

    mode: Literal["min", "max"] = "min"
    """Whether the best value of that metric is the smallest or the largest."""

    schema: Any = None
    """What the model knows about its data, an object with ``as_dict()`` and ``collater()``; for
    :func:`~pyg_dynbatch.models.predict` also with ``entry(example)``, which returns a
    :class:`~pyg_dynbatch.models.Entry`, and ``read(path)``, which yields those of a file."""

    is_started: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Kept with the weights, so that a trained model does not start again.
        self.register_buffer("is_started", torch.tensor(False))

    @abstractmethod
    def loss(self, output: Tensor, batch: Any) -> Loss:
        """Return the sum of the losses of a batch, and the number of its terms.

        Args:
            output: What ``forward`` returned.
            batch: The batch.
        """

    @abstractmethod
    def columns(
        self, values: Tensor, batch: Any, deviation: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the columns of the table of predictions: a name, and a row per example or node.

        Columns whose name begins with ``target`` are what the batch says is right.

        Args:
            values: What :meth:`values` returned, or the mean over several models.
            batch: The batch.
            deviation: Standard deviation over several models.
        """

    def collater(self) -> Callable[..., Any]:
        """Return what merges examples to batches; by default that of the schema."""
        return self.schema.collater()

    def values(self, output: Tensor) -> Tensor:
        """Return what is predicted, in its unit or as probabilities; by default the output."""
        return output

    def metrics(self, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics of a whole split from the columns of all its batches.

        A metric that is not defined, such as the correlation with a constant, is left out.
        """
        return {}

    def start_from(self, dataset: Any) -> None:
        """Take over what the training set decides, such as scales; called before training."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters for the optimizer, with their own options if any."""
        learned = [weight for weight in self.parameters() if weight.requires_grad]
        return [{"params": learned}]

    def draw(self, folder: Path, columns: Mapping[str, np.ndarray], dataset: Any) -> None:
        """Draw the predictions of a test into a folder; nothing by default."""

    def predict(self, batch: object) -> dict[str, Tensor]:
        """Return the table of predictions of a batch, without gradients and dropout."""
        with evaluating(self):
            return self.columns(self.values(self(batch)), batch)

    def options(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values."""
        options: dict[str, Any] = {}
        for name, parameter in inspect.signature(type(self)).parameters.items():
            try:
                value = getattr(self, name)
            except AttributeError as error:
                problem = f"{type(self).__name__}: the argument {name!r} is not kept"
                expected = f"self.{name} = {name} in the constructor"
                raise mismatch(AttributeError, problem, expected) from error
            if hasattr(value, "as_dict"):
                value = value.as_dict()
            _check_plain(f"{type(self).__name__}: the argument {name!r}", value)
            if parameter.kind is parameter.VAR_KEYWORD:
                options |= value
            else:
                options[name] = value
        return options

    def header(self) -> dict[str, Any]:
        """Return what a checkpoint says about its model."""
        return {"model": type(self).__name__, "options": self.options()}

    def save(self, path: str | Path) -> None:
        """Write the model to a file that :func:`~pyg_dynbatch.load` opens."""
        weights = {f"{_PREFIX}{name}": value for name, value in self.state_dict().items()}
        content = {HEADER: self.header(), "state_dict": weights}
        write_atomically(path, partial(torch.save, content))


def open_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of a model of this package onto the CPU, without running code from it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or a checkpoint of something else.
    """
    existing(path, "a checkpoint, which fit writes")
    problem = "load: the file is not a checkpoint of a model of this package"
    expected = "a checkpoint that fit or Model.save has written"
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        header = contents[HEADER]
    except UNREADABLE as error:
        # Not the text of torch, which advises to run the code of the file.
        got = f"{Path(path).stat().st_size:,} bytes, {type(error).__name__}"
        raise mismatch(ValueError, problem, expected, got, where=path) from error
    return {**header, "weights": _weights_of(contents["state_dict"])}


def build(kind: type[M], checkpoint: Mapping[str, Any], where: object) -> M:
    """Build a model from what :func:`open_checkpoint` returned."""
    if checkpoint["model"] != kind.__name__:
        problem = f"load: the checkpoint is not one of {kind.__name__}"
        raise mismatch(ValueError, problem, kind.__name__, checkpoint["model"], where=where)
    # The weights that are drawn here are replaced: the caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        model = kind(**checkpoint["options"])
    model.load_state_dict(checkpoint["weights"])
    return model.eval()


def check_same_model(model: Model, contents: Mapping[str, Any], where: object = "") -> None:
    """Raise an error if a checkpoint belongs to a model with other options."""
    theirs = contents.get(HEADER)
    ours = model.header()
    problem = f"{type(model).__name__}: the checkpoint belongs to a different model"
    if theirs is None or theirs["model"] != ours["model"]:
        got = "one of another program" if theirs is None else f"one of {theirs['model']}"
        raise mismatch(ValueError, problem, f"a checkpoint of {ours['model']}", got, where=where)

    for name, (own, saved) in differences(ours["options"], theirs["options"]).items():
        if not name.endswith("dropout"):
            expected = f"{name}: {str(own):.80}"
            raise mismatch(ValueError, problem, expected, f"{name}: {str(saved):.80}", where=where)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return all values in which two nested mappings differ, under names joined by points."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in {**ours, **theirs}:
        own = ours.get(name)
        other = theirs.get(name)
        if isinstance(own, Mapping) and isinstance(other, Mapping):
            for key, pair in differences(own, other).items():
                pairs[f"{name}.{key}"] = pair
        elif _with_lists(own) != _with_lists(other):
            pairs[name] = (own, other)
    return pairs


def _check_plain(owner: str, value: object) -> None:
    """Raise an error for a value that a checkpoint cannot hold without code."""
    kind = type(value)
    if isinstance(value, list | tuple | dict) and kind in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(owner, item)
    elif value is not None and kind not in (bool, int, float, str):
        expected = "numbers, texts, lists, dictionaries, or an object with as_dict()"
        got = f"{kind.__module__}.{kind.__name__}"
        raise mismatch(TypeError, f"{owner} cannot be kept in a checkpoint", expected, got)


def _with_lists(value: object) -> object:
    """Return a list in place of a tuple: as options, both are equal."""
    return list(value) if isinstance(value, tuple) else value


def _weights_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(_PREFIX): value
        for name, value in state.items()
        if name.startswith(_PREFIX)
    }


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Compute without gradients and dropout; the modes of all parts are restored."""
    in_training = [
        submodule for module in modules for submodule in module.modules() if submodule.training
    ]
    try:
        for module in modules:
            module.eval()
        with torch.inference_mode():
            yield
    finally:
        for submodule in in_training:
            submodule.training = True


def joined_columns(tables: Sequence[Mapping[str, Any]]) -> Table:
    """Concatenate the columns of several batches."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
