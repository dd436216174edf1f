"""What prediction needs, without Lightning: checkpoints as plain modules, averages and tables."""

import copy
import csv
import inspect
import math
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import atomic_file, check_checksums, existing

Columns = dict[str, np.ndarray]

SAME_CONFIGURATION = "use the configuration the checkpoint was made with"
_PREFIX = "model."  # of the weights of a model in the checkpoint of its task


class Model(nn.Module, ABC):
    """Base of networks that know what they predict; :func:`pyg_dynbatch.load` returns one.

    A Lightning task trains a model and writes it to checkpoints.

    Args:
        network: Module that takes a batch.

    Shape:
        - output: that of the network, with a row per example, or per node.
    """

    task: ClassVar[str]
    """Name of the task in checkpoints."""

    task_options: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters of a checkpoint that concern training only."""

    training_options: ClassVar[tuple[str, ...]] = ()
    """Options, besides dropout, that change no prediction, or are compared by check_origin."""

    first_class: ClassVar[int] = 0
    """First class, for the names of columns in the table of predictions."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Any) -> Tensor:
        """Run the network."""
        return self.network(batch)

    @abstractmethod
    def predict(self, batch: Any) -> dict[str, Tensor]:
        """Return the columns of the table of predictions, without gradients.

        ``example`` is relative to the batch.
        """

    def averaged(self, members: Sequence[Any]) -> nn.Module:
        """Return one network that predicts the mean of several models like this one."""
        return AveragedNetwork([member.network for member in members])

    def named_columns(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert columns of predictions to those of a table."""
        return dict(columns)

    def check_origin(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Check the options a checkpoint was made with; the default accepts all."""

    @classmethod
    def data_of(cls, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint notes of its data, which members of an ensemble must share."""
        return {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any], path: object) -> Any:
        """Build a model for prediction from the result of :func:`read_checkpoint`."""
        kind = checkpoint.get("pyg_dynbatch_task")
        if kind != cls.task or "hyper_parameters" not in checkpoint:
            what = f"{cls.task}: the model cannot be built from this checkpoint"
            expected = f"a checkpoint of {cls.task} with hyper_parameters"
            other = f"one of {kind or 'another program'}"
            got = other if kind != cls.task else "no hyper_parameters"
            raise mismatch(ValueError, what, expected, got, where=path)
        left_out = ("optimizer", "rate", *cls.task_options)
        options = checkpoint["hyper_parameters"].items()
        model = cls(**{n: v for n, v in options if n not in left_out and not n.startswith("_")})
        model.load_checkpoint(checkpoint)
        return model.eval()

    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the weights of a checkpoint if they fit."""
        self.check(checkpoint)
        self.load_state_dict(_weights(checkpoint))

    def check(self, checkpoint: Mapping[str, Any], name: str = "", options: Any = None) -> None:
        """Compare a checkpoint with the task, weights and, if they are given, options of this."""
        name = name or self.task
        what = f"{name}: the checkpoint belongs to a different model"
        if (other := checkpoint.get("pyg_dynbatch_task", name)) != name:
            expected, got = f"a checkpoint of {name}", f"a checkpoint of {other}"
            raise mismatch(ValueError, what, expected, got, hint=SAME_CONFIGURATION)
        self.check_origin(checkpoint.get("hyper_parameters", {}))
        if options is not None and "hyper_parameters" in checkpoint:
            own, saved = map(self._prediction_options, (options, checkpoint["hyper_parameters"]))
            for key, expected, got in differences(own, saved):
                texts = str(expected)[:80], str(got)[:80]
                raise mismatch(ValueError, what, *texts, where=key, hint=SAME_CONFIGURATION)
        own, saved = _shapes(self.state_dict()), _shapes(_weights(checkpoint))
        for key in sorted({*saved, *own}):
            expected, got = own.get(key, "no such weight"), saved.get(key, "no such weight")
            if expected != got:
                raise mismatch(ValueError, what, expected, got, where=key, hint=SAME_CONFIGURATION)

    def _prediction_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options that change predictions, or their defaults."""
        modules = (*getattr(self.network, "members", ()), self.network, self)
        parts = (inspect.signature(type(each)).parameters for each in modules)
        known = {name: given.default for part in parts for name, given in part.items()}
        names = [name for name in known if not name.endswith("dropout")]
        found = {n: options.get(n, known[n]) for n in names if n not in self.training_options}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}


def _weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    state = checkpoint.get("state_dict", {}).items()
    return {key.removeprefix(_PREFIX): value for key, value in state if key.startswith(_PREFIX)}


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    shapes = {key: getattr(value, "shape", None) for key, value in state.items()}
    return {
        key: "no tensor" if shape is None else f"a tensor of shape {list(shape)}"
        for key, shape in shapes.items()
    }


class AveragedNetwork(nn.Module):
    r"""Average the probabilities of several networks, and return the logarithm.

    .. math::
        \log \bar p = \log \frac1K \sum_k \mathrm{softmax}(z_k)

    The softmax of the result is :math:`\bar p` again, so it can replace the logits or the
    log-probabilities of one network.

    Args:
        members: The networks, at least one.
        values: Whether the outputs are values, whose mean is returned, and not logits.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, table 2, last row.

    Example:
        >>> members = [nn.Linear(2, 3), nn.Linear(2, 3)]
        >>> AveragedNetwork(members)(torch.ones(1, 2)).exp().sum().round().item()
        1.0
    """

    def __init__(self, members: Sequence[nn.Module], *, values: bool = False) -> None:
        super().__init__()
        self.values = values
        if not members:
            raise mismatch(ValueError, "AveragedNetwork: no networks", "at least 1", 0)
        self.members = nn.ModuleList(members)

    def forward(self, batch: Any) -> Float[Tensor, "row class"]:
        """Return log-probabilities or values, averaged over the members."""
        outputs = torch.stack([member(batch) for member in self.members])
        if self.values:
            return outputs.mean(0)
        return F.log_softmax(outputs, dim=-1).logsumexp(0) - math.log(len(self.members))


def average(
    model: Model, options: Mapping[str, Any], checkpoints: Sequence[str | Path], name: str = ""
) -> Model:
    """Return a model that predicts the average of several checkpoints.

    ``options`` are the hyper-parameters of the model, which is not changed, and ``name`` is the
    task it belongs to.
    """
    members, data = [], None
    for path in map(Path, checkpoints):
        checkpoint = read_checkpoint(path)
        with naming_file(path):
            model.check(checkpoint, name, options)
            own = model.data_of(checkpoint)
            for key, *values in differences(own if data is None else data, own):
                what = f"{name or model.task}: two members prepare the data differently"
                texts = (str(value)[:80] for value in values)
                raise mismatch(ValueError, what, *texts, where=key)
        data = own
        members.append(copy.deepcopy(model))
        members[-1].load_state_dict(_weights(checkpoint))
    # The average keeps the scale of the targets, with which errors are measured.
    averaged = copy.deepcopy((members or [model])[0])
    averaged.network = averaged.averaged(members)
    return averaged


@contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """Compute without gradients and dropout; the modes of all parts are restored."""
    in_training = [part for part in module.modules() if part.training]
    try:
        with torch.inference_mode():
            yield module.eval()
    finally:
        for part in in_training:
            part.training = True


class Predictor:
    """Base of what predicts with several checkpoints of one kind of model, on one device."""

    kind: ClassVar[type[Any]]

    def __init__(self, checkpoints: Sequence[Any], device: str) -> None:
        if not checkpoints:
            what = f"{type(self).__name__}: no checkpoints"
            raise mismatch(ValueError, what, "at least one", 0)
        self.checkpoints, self.device = checkpoints, checked_device(device)

    def averaged(self, **changed: Any) -> Any:
        """Return a model that predicts the mean of all checkpoints, with some options changed."""
        first = read_checkpoint(self.checkpoints[0])
        options = first.get("hyper_parameters", {})
        options.update(changed)
        model = self.kind.from_checkpoint(first, self.checkpoints[0])
        if self.checkpoints[1:]:
            model = average(model, options, self.checkpoints).eval()
        return model.to(self.device)


def computed(model: Model, batch: Any) -> Columns:
    """Return the columns of the predictions of a batch, on the host."""
    with evaluating(model):
        columns = model.predict(batch)
    return {name: value.cpu().numpy() for name, value in columns.items()}


class ExactBuffers(nn.Module):
    """Base of modules whose buffers keep their type when a model is cast to a lower precision."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            cast: Any = self._buffers[name]
            self._buffers[name] = cast if buffer is None else buffer.to(cast.device)
        return self


# Checkpoints --------------------------------------------------------------------------------------


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU without running code from it."""
    existing(path, "a checkpoint, which fit writes")
    try:
        check_checksums(path)
    except Exception as error:  # zipfile raises many classes for a corrupt file
        got = f"{Path(path).stat().st_size:,} bytes, {type(error).__name__}: {error}"
        raise _not_a_checkpoint(path, got) from error
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise _not_a_checkpoint(path, "an object that is not loaded for safety") from error
    if not isinstance(contents, dict):
        raise _not_a_checkpoint(path, f"a {type(contents).__name__}")
    missing = [key for key in ("state_dict", "pytorch-lightning_version") if key not in contents]
    if missing:
        raise _not_a_checkpoint(path, f"a dictionary without {' and '.join(missing)}")
    return contents


def _not_a_checkpoint(path: str | Path, got: str) -> ValueError:
    what = "the file is not a checkpoint, or is truncated or corrupt"
    return mismatch(ValueError, what, "a file written by fit, such as last.ckpt", got, where=path)


@contextmanager
def naming_file(path: object) -> Iterator[None]:
    """Add the path of a checkpoint to an error about it."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"  file:     {path}")
        raise


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], path: str = "", common: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the names, joined by dots, and the values of all entries that differ.

    With ``common``, entries that only one side has are skipped.
    """
    for name in [n for n in before if n in now] if common else {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{path}{name}.", common)
        elif old != new:
            yield f"{path}{name.lstrip('_')}", old, new


def checked_device(name: str) -> torch.device:
    """Return a device, or raise an error if it cannot be used."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        expected, got = "cpu, or a device of this machine", f"{name}: {str(error).splitlines()[0]}"
        raise mismatch(ValueError, "the device cannot be used", expected, got) from error
    return torch.device(name)


# Tables of predictions ----------------------------------------------------------------------------


def tree_rows(columns: Columns) -> Columns:
    """Keep the rows of the roots, where there is one row per node."""
    is_root = columns.get("is_root", slice(None))
    dropped = ("is_root", "node")
    return {name: value[is_root] for name, value in columns.items() if name not in dropped}


def node_rows(columns: Columns) -> Columns:
    """Keep all rows, without the column that marks roots."""
    return {name: value for name, value in columns.items() if name != "is_root"}


def merge_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> Columns:
    """Concatenate the rows of several parts."""
    if not parts:
        return {}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def numbered_columns(columns: Mapping[str, Any], first_class: int = 0) -> Columns:
    """Divide every column with several values per row into several columns."""
    divided: Columns = {}
    for name, value in columns.items():
        each = np.asarray(value)
        parts = enumerate(each.T, first_class)
        divided |= {f"{name}_{n}": part for n, part in parts} if each.ndim > 1 else {name: each}
    return divided


def write_table(path: str | Path, columns: Columns, first_class: int = 0) -> Path:
    """Write columns to a CSV file atomically."""
    listed = numbered_columns(columns, first_class)
    target = listed.get("target")
    if target is not None and target.dtype.kind == "i":  # a class, -1 if unknown
        listed["target"] = np.where(target == -1, "", target.astype(str))
    cells = [list(map(cell, column)) for column in listed.values()]
    opened = atomic_file(path, newline="", encoding="utf-8")
    with nullcontext(sys.stdout) if str(path) == "-" else opened as file:
        writer = csv.writer(file)
        writer.writerow(listed)
        writer.writerows(zip(*cells, strict=True))
    return Path(path)


def read_table(path: str | Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cell(entry: Any) -> str:
    """Write a number with the fewest digits that give it back, and NaN as an empty cell."""
    if isinstance(entry, float | np.floating):
        return "" if entry != entry else str(entry).removesuffix(".0")
    return str(entry)
