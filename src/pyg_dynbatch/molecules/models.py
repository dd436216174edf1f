"""Networks that predict properties of molecules from rows of atoms and of their pairs."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.aggr import Aggregation, AttentionalAggregation
from torch_geometric.nn.inits import reset
from torch_geometric.nn.resolver import aggregation_resolver

from pyg_dynbatch import metrics, plots
from pyg_dynbatch.core.errors import checked_choice, checked_shape, mismatch
from pyg_dynbatch.core.structure import checksum
from pyg_dynbatch.model import Loss, Model
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.nn.directed import DirectedStack
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.readout import GaussianHistogramAggregation, StandardizedInputs
from pyg_dynbatch.nn.weave import CountedBatchNorm, WeaveStack


class WeaveNet(nn.Module):
    """Predict properties of molecules with weave modules, or messages along directed bonds.

    Weave modules and a linear layer with tanh, or a :class:`~pyg_dynbatch.nn.DirectedStack`; then a
    normalization, a readout per molecule, and a dense head with ReLU between its layers.

    Args:
        atom_channels: Width of ``batch.x``.
        num_outputs: Width of the result: targets, or logits.
        pair_table: Features of every pair code, ``[code][feature]``; kept with the weights.
        hidden: Width of all rows within the weave modules, or of a message.
        num_modules: Number of weave modules, or of steps of messages.
        atom_out: Width of an atom row before the readout.
        readout: ``"histogram"``, ``"attention"``, or the name of any aggregation of PyG
            (``"sum"``, ``"mean"``, ``"max"``, ...); several in a list are concatenated.
        head: Width of each hidden layer of the head; empty for one linear layer.
        dropout: Dropout probability in the head.
        norm: ``"batch"``, ``"layer"`` or ``None``, within the weave modules.
        atom_norm: Before the readout: ``"batch"``, as histograms expect, ``"layer"`` or ``None``.
        sync: Whether all batch normalizations use the statistics of all ranks while training; see
            :class:`~pyg_dynbatch.nn.CountedBatchNorm`.
        residual: Whether weave modules add rows to their updates.
        weave_dropout: Dropout probability of the atom rows between weave modules, or of messages.
        messages: ``"weave"``, or ``"directed"`` along the pairs, which should be the bonds; without
            ``norm``, ``residual`` and ``pair_block``.
        pair_block: See :class:`~pyg_dynbatch.nn.WeaveStack`.
        num_descriptors: Width of ``batch.descriptor``, which is concatenated to the readout after
            the attribute ``descriptors`` has standardized it (fit that first, see
            :meth:`~pyg_dynbatch.nn.StandardizedInputs.fit`).

    Shape:
        - batch: ``x`` ``[atom, atom_channels]``, ``batch``, and ``pairs`` or ``pair_code`` (of all
          pairs of atoms); perhaps ``descriptor`` ``[molecule, num_descriptors]``, NaN if unknown
        - returns: ``[molecule, num_outputs]``

    Raises:
        ValueError: If an option is unknown, a batch does not fit, or there are no batch statistics
            to synchronize.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856. Differs: no batch normalization within the modules
        by default; tanh before the readout, as in DeepChem. Directed messages: Yang et al. (2019),
        arXiv:1904.01561.

    Example:
        >>> from torch_geometric.data import Batch, Data
        >>> water = Data(x=torch.eye(3), pair_code=torch.tensor([0, 1, 2, 0, 1, 0]))
        >>> net = WeaveNet(3, 1, [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], hidden=8, head=(16,))
        >>> net(Batch.from_data_list([water, water])).shape
        torch.Size([2, 1])
    """

    def __init__(  # noqa: PLR0913 - every argument is a key of the configs
        self,
        atom_channels: int,
        num_outputs: int,
        pair_table: Sequence[Sequence[float]] | Tensor,
        *,
        hidden: int = 50,
        num_modules: int = 2,
        atom_out: int = 128,
        readout: str | Sequence[str] = "histogram",
        head: Sequence[int] = (512, 128),
        dropout: float = 0.0,
        norm: str | None = None,
        atom_norm: str | None = "batch",
        sync: bool = False,
        residual: bool = False,
        weave_dropout: float = 0.0,
        messages: str = "weave",
        pair_block: int | None = None,
        num_descriptors: int = 0,
    ) -> None:
        super().__init__()
        self.messages = checked_choice(
            "WeaveNet: unknown messages", messages, ("weave", "directed")
        )
        checked_choice("WeaveNet: unknown atom_norm", atom_norm, _ATOM_NORMS)
        table = _checked_table(pair_table)
        self.register_buffer("pair_table", table)
        self.kept: Tensor | None = None  # whether pairs of each code are read, from the schema

        self.weave: nn.Module
        self.lin_atom: nn.Module
        if messages == "weave":
            self.weave = WeaveStack(
                atom_channels,
                table.size(1),
                hidden,
                num_modules,
                norm=norm,
                residual=residual,
                dropout=weave_dropout,
                pair_block=pair_block,
            )
            self.lin_atom = nn.Linear(hidden, atom_out)
        else:
            _refuse_with_directed(norm=norm, residual=residual, pair_block=pair_block)
            self.weave = DirectedStack(
                atom_channels,
                table.size(1),
                hidden,
                num_modules,
                atom_out=atom_out,
                dropout=weave_dropout,
            )
            self.lin_atom = nn.Identity()
        self.norm_atom = _ATOM_NORMS[atom_norm](atom_out)

        names = [readout] if isinstance(readout, str) else list(readout)
        self.readouts = nn.ModuleList(_readout(name, atom_out) for name in names)
        # A readout returns as many channels as the atoms have, a histogram so many per bin.
        bins = [getattr(aggregation, "num_bins", 1) for aggregation in self.readouts]
        self.fingerprint_channels = atom_out * sum(bins)
        self.descriptors = StandardizedInputs(num_descriptors) if num_descriptors else None

        head_inputs = self.fingerprint_channels + num_descriptors
        self.head = _head([head_inputs, *head, num_outputs], dropout)
        if sync:
            CountedBatchNorm.synchronise(self)

    def reset_parameters(self) -> None:
        """Reset all learnable parameters."""
        for child in self.children():
            reset(child)

    def forward(self, batch: Data) -> Float[Tensor, "molecule output"]:
        """Predict one row per molecule."""
        fingerprint = self.fingerprint(batch)
        if self.descriptors is None:
            return self.head(fingerprint)
        descriptor = checked_shape(
            "WeaveNet: batch.descriptor does not fit",
            getattr(batch, "descriptor", None),
            (fingerprint.size(0), self.descriptors.num_inputs),
            hint="featurize as for training",
        )
        standardized = self.descriptors(descriptor).to(fingerprint.dtype)
        return self.head(torch.cat([fingerprint, standardized], 1))

    def encode(self, batch: Data) -> Float[Tensor, "atom channel"]:
        """Compute the atom rows that the readout sees, in the order of ``batch.x``."""
        table = self.get_buffer("pair_table")
        x = self.weave(batch.x.to(table.dtype), table, self.pairs_of(batch))
        if self.messages == "weave":
            x = torch.tanh(self.lin_atom(x))
        return self.norm_atom(x)

    def fingerprint(self, batch: Data) -> Float[Tensor, "molecule channel"]:
        """Compute the readout of every molecule."""
        x = self.encode(batch)
        molecule = batch.batch
        count = 1
        if molecule is None:
            molecule = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        else:
            count = batch.num_graphs
        rows = [readout(x, molecule, dim_size=count) for readout in self.readouts]
        return torch.cat(rows, 1) if len(rows) > 1 else rows[0]

    def pairs_of(self, batch: Data) -> Pairs:
        """Return the pairs of a batch, or build them from all of its pair codes."""
        num_codes = self.get_buffer("pair_table").size(0)
        pairs = getattr(batch, "pairs", None)
        code = getattr(batch, "pair_code", None)

        if pairs is None and code is not None:
            ptr = getattr(batch, "ptr", None)
            sizes = [batch.num_nodes] if ptr is None else ptr.diff()
            pairs = Pairs.from_codes(code, sizes, self.kept, num_codes).to(batch.x.device)

        if pairs is None or pairs.num_codes != num_codes:
            raise mismatch(
                ValueError,
                "WeaveNet: the pairs of the batch do not fit the table",
                f"batch.pairs or batch.pair_code with {num_codes} codes",
                "neither" if pairs is None else f"{pairs.num_codes} codes of a different table",
            )
        if code is not None and code.is_cpu:
            self._check_pairs(pairs, code)
        return pairs

    def _check_pairs(self, pairs: Pairs, code: Tensor) -> None:
        """Raise an error unless the pairs are those of these codes that the model was made for."""
        hint = "collate again, with the pairs of the schema"
        if pairs.checksum not in (None, checksum(code)):
            problem = "WeaveNet: the pairs of the batch do not belong to its pair_code"
            raise mismatch(ValueError, problem, hint=hint)
        if self.kept is not None and pairs.plan.is_cpu:
            expected = torch.bincount(code, minlength=pairs.num_codes) * self.kept
            if not torch.equal(pairs.by_code[1].diff().long(), expected):
                problem = (
                    "WeaveNet: the model was made for different pairs of the atoms of the batch"
                )
                raise mismatch(ValueError, problem, hint=hint)


_ATOM_NORMS = {None: nn.Identity, "batch": CountedBatchNorm, "layer": nn.LayerNorm}


def _checked_table(pair_table: Sequence[Sequence[float]] | Tensor) -> Tensor:
    """Return a copy of the table as float32, or raise an error unless it has codes and features."""
    table = torch.as_tensor(pair_table, dtype=torch.float32).detach().clone()
    if table.dim() != 2 or not table.numel():
        problem = "WeaveNet: pair_table cannot be used"
        raise mismatch(ValueError, problem, "a table [code, feature]", list(table.shape))
    return table


def _refuse_with_directed(**options: object) -> None:
    """Raise an error if options of weave modules are given that directed messages do not have."""
    refused = {name: value for name, value in options.items() if value not in (None, False)}
    if refused:
        problem = f"WeaveNet: directed messages have no {', '.join(refused)}"
        raise mismatch(ValueError, problem, "messages='weave', or the default", refused)


def _head(widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Build the layers from one width to the next; all but the last have a ReLU and dropout."""
    *hidden_widths, num_outputs = widths
    layers: list[nn.Module] = []
    for before, after in pairwise(hidden_widths):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden_widths[-1], num_outputs))


def _readout(name: str, channels: int) -> Aggregation:
    if name == "histogram":
        return GaussianHistogramAggregation()
    if name == "attention":
        return AttentionalAggregation(nn.Linear(channels, 1))
    try:
        return aggregation_resolver(name)
    except (ValueError, TypeError) as error:
        problem = f"WeaveNet: the readout {name!r} cannot be used"
        expected = "'histogram', 'attention', or an aggregation without arguments, such as 'sum'"
        raise mismatch(ValueError, problem, expected, str(error).splitlines()[0]) from error


# Properties ---------------------------------------------------------------------------------------


class ExactBuffers(nn.Module):
    """Base of modules whose buffers keep their type when a model is cast to a lower precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExactBuffers":
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self


class TargetScale(ExactBuffers):
    """Scale targets to mean 0 and standard deviation 1, and predictions back.

    It computes in double precision: the differences between targets may be far smaller than the
    targets.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, num_targets: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_targets).double())
        self.register_buffer("deviation", torch.ones(num_targets).double())

    def fit(self, targets: Float[Tensor, "molecule target"], names: Sequence[str]) -> None:
        """Measure mean and deviation of the known targets; of a constant it is taken to be 1."""
        exact = targets.double()
        mean = exact.nanmean(0).nan_to_num(0.0)
        deviation = (exact - mean).square().nanmean(0).nan_to_num(0.0, math.inf).sqrt()
        first = exact.nan_to_num(math.inf).amin(0)  # a rounded mean may differ from all targets
        varies = (exact > first).any(0)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(varies, deviation, 1.0))
        for name, own_deviation in zip(names, self.deviation.tolist(), strict=True):
            if not 0 < own_deviation < math.inf:
                problem = f"the numbers of the target {name!r} are too large or too close together"
                expected = "a deviation from 1e-160 to 1e150, as it is squared"
                raise mismatch(
                    ValueError, problem, expected, f"{own_deviation:g}", hint="another unit"
                )

    def scaled(self, values: Float[Tensor, "molecule target"]) -> Float[Tensor, "molecule target"]:
        """Convert values to the scale of the model."""
        return (values - self.mean) / self.deviation

    def restored(
        self, outputs: Float[Tensor, "molecule target"]
    ) -> Float[Tensor, "molecule target"]:
        """Convert outputs of the model to the units of the targets."""
        return outputs * self.deviation + self.mean


METRICS: dict[str, tuple[str, ...]] = {
    "regression": ("rmse", "mae", "r2", "spearman", "scaled_rmse"),
    "binary": ("roc_auc", "prc_auc", "accuracy", "majority_accuracy"),
    "multiclass": ("accuracy", "majority_accuracy", "roc_auc"),
}
"""Names of all metrics by kind of property; the first is the main one."""

IN_UNITS = ("rmse", "mae")
"""Metrics in the unit of their property, of which several properties have no mean."""

_REGRESSION_LOSSES = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}


class MoleculeModel(Model):
    """Predict properties of molecules, some of which may be unknown, with a :class:`WeaveNet`.

    Trained with the mean loss of the known targets. Regression targets, and descriptors that the
    head reads, are scaled to mean 0 and deviation 1 of the training set; metrics and predictions
    are in the units of the data.

    Metrics: ``rmse``, ``mae``, ``r2``, ``spearman``, ``scaled_rmse`` (regression), ``roc_auc``,
    ``prc_auc``, ``accuracy`` (binary), ``accuracy``, ``roc_auc`` (multiclass), each the mean over
    the properties for which it is defined. ``majority_accuracy`` is the accuracy of one answer for
    all molecules of the split, the most frequent one. Errors in units are not averaged: several
    regressions have ``rmse_NAME`` and ``mae_NAME``, and ``scaled_rmse`` (errors divided by the
    deviation of the training targets) chooses the best checkpoint.

    Args:
        schema: Featurizer, properties and pairs; a :class:`~pyg_dynbatch.models.MoleculeSchema` or
            its ``as_dict()``.
        loss_of_values: Loss of a regression: ``"mse"``, ``"l1"`` or ``"huber"``.
        positive_weight: Weight of positive labels: ``"none"``, or ``"balanced"``, negatives over
            positives of the training set.
        **network: Options of :class:`~pyg_dynbatch.models.WeaveNet`.

    Shape:
        - batch: a batch of molecules, see :class:`~pyg_dynbatch.models.WeaveNet`
        - returns: ``[molecule, schema.num_outputs]``, scaled values or logits

    Raises:
        ValueError: If an option is unknown, or the messages do not fit the pairs.

    Example:
        >>> model = MoleculeModel(MoleculeSchema(("logS",)), hidden=4, atom_out=4, head=[3])
        >>> batch = model.collater()([model.schema.entry("CO").data])
        >>> model.predict(batch)["prediction_logS"].shape
        torch.Size([1])
    """

    positive: Tensor  # the weight of positive labels, one per target

    def __init__(
        self,
        schema: MoleculeSchema | Mapping[str, Any],
        loss_of_values: Literal["mse", "l1", "huber"] = "mse",
        positive_weight: Literal["none", "balanced"] = "none",
        **network: Any,
    ) -> None:
        super().__init__()
        self.schema: MoleculeSchema = MoleculeSchema.of(schema)
        self.loss_of_values = checked_choice(
            "MoleculeModel: loss_of_values", loss_of_values, _REGRESSION_LOSSES
        )
        self.positive_weight = checked_choice(
            "MoleculeModel: positive_weight", positive_weight, ("none", "balanced")
        )
        kind = self.schema.kind
        targets = self.schema.targets
        if (loss_of_values != "mse" and kind != "regression") or (
            positive_weight != "none" and kind != "binary"
        ):
            problem = f"MoleculeModel: an option has no effect on a {kind}"
            expected = "loss_of_values for a regression, positive_weight for binary labels"
            raise mismatch(ValueError, problem, expected, f"{loss_of_values}, {positive_weight}")
        self.network = network  # the options alone, which a checkpoint holds
        if network.get("messages") == "directed" and self.schema.pair_set not in ("bonds", 1):
            problem = "MoleculeModel: directed messages need bonds"
            raise mismatch(
                ValueError, problem, "pair_set: bonds", f"pair_set: {self.schema.pair_set}"
            )
        self.net = WeaveNet(
            len(self.schema.featurizer.atom_names),
            self.schema.num_outputs,
            self.schema.pair_table.features,
            num_descriptors=len(self.schema.featurizer.descriptor_names),
            **network,
        )
        self.net.kept = self.schema.pair_table.kept(self.schema.pair_set, self.schema.self_pairs)
        self.scale = TargetScale(len(targets))
        self.register_buffer("positive", torch.ones(len(targets)))

        several = kind == "regression" and len(targets) > 1
        self.monitor = "scaled_rmse" if several else METRICS[kind][0]
        self.mode = "min" if kind == "regression" else "max"

    def forward(self, batch: Data) -> Float[Tensor, "molecule output"]:
        """Return scaled values, or logits."""
        return self.net(batch)

    def loss(self, output: Float[Tensor, "molecule output"], batch: Data) -> Loss:
        """Sum the losses of the known targets, and count them, without a device sync."""
        shape = (len(output), len(self.schema.targets))
        target = checked_shape("MoleculeModel: batch.y", getattr(batch, "y", None), shape)
        known = ~target.isnan()
        if self.schema.kind == "regression":
            target = self.scale.scaled(target)
        # Replace every NaN first: 0 * NaN is NaN, in the gradients too.
        filled = torch.where(known, target, torch.zeros_like(target))
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.schema.kind == "multiclass":
            by_class = exact.unflatten(1, (target.size(1), -1)).movedim(-1, 1)
            losses = F.cross_entropy(by_class, filled.long(), reduction="none")
        elif self.schema.kind == "binary":
            weight = self.positive.to(exact)
            losses = F.binary_cross_entropy_with_logits(
                exact, filled.to(exact), pos_weight=weight, reduction="none"
            )
        else:
            loss = _REGRESSION_LOSSES[self.loss_of_values]
            losses = loss(exact, filled.to(exact), reduction="none")
        return torch.where(known, losses, torch.zeros_like(losses)).sum(), known.sum()

    def values(self, output: Float[Tensor, "molecule output"]) -> Float[Tensor, "molecule output"]:
        """Return values in the units of the data, or probabilities."""
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.schema.kind == "multiclass":
            classes = exact.unflatten(1, (len(self.schema.targets), -1))
            return classes.softmax(-1).flatten(1)
        return self.scale.restored(exact) if self.schema.kind == "regression" else exact.sigmoid()

    def columns(
        self, values: Tensor, batch: Any, deviation: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return one row per molecule.

        Columns ``prediction_NAME`` (the value, or the class), ``probability_NAME`` (of the positive
        class, or one column per class), with several models ``deviation_NAME``, and where the
        molecules have targets ``target_NAME``.
        """
        count = len(self.schema.targets)
        columns: dict[str, Tensor] = {}
        each = values.unflatten(1, (count, -1)).unbind(1)
        for number, (name, value) in enumerate(zip(self.schema.targets, each, strict=True)):
            if self.schema.kind == "regression":
                columns[f"prediction_{name}"] = value[:, 0]
            elif self.schema.kind == "binary":
                columns[f"prediction_{name}"] = (value[:, 0] > 0.5).long()
                columns[f"probability_{name}"] = value[:, 0]
            else:
                columns[f"prediction_{name}"] = value.argmax(1)
                columns[f"probability_{name}"] = value
            if deviation is not None:
                spread = deviation.unflatten(1, (count, -1))[:, number]
                columns[f"deviation_{name}"] = spread if spread.size(1) > 1 else spread[:, 0]
            if "y" in batch:
                columns[f"target_{name}"] = batch.y[:, number].to(values.device)
        return columns

    def metrics(self, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the mean of every metric over the properties for which it is defined."""
        scores = {name: self._scores(name, columns) for name in self.schema.targets}
        several = len(scores) > 1
        means: dict[str, float] = {}
        for metric in METRICS[self.schema.kind]:
            scores_of_metric = {name: own[metric] for name, own in scores.items()}
            defined = {
                name: score for name, score in scores_of_metric.items() if not math.isnan(score)
            }
            if several and metric in IN_UNITS:
                means |= {f"{metric}_{name}": value for name, value in defined.items()}
            elif defined:
                means[metric] = sum(defined.values()) / len(defined)
        return means

    def _scores(self, name: str, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics of one property; NaN where one is not defined."""
        target = columns[f"target_{name}"].astype(np.float64)
        known = ~np.isnan(target)
        gold = target[known]
        guess = columns[f"prediction_{name}"][known].astype(np.float64)
        if not gold.size:
            return dict.fromkeys(METRICS[self.schema.kind], math.nan)

        if self.schema.kind == "regression":
            error = metrics.rmse(guess, gold)
            deviation = float(self.scale.deviation[self.schema.targets.index(name)])
            return {
                "rmse": error,
                "mae": metrics.mae(guess, gold),
                "r2": metrics.r2(guess, gold),
                "spearman": metrics.spearman(guess, gold),
                "scaled_rmse": error / deviation,
            }

        accuracies = {
            "accuracy": float((guess == gold).mean()),
            "majority_accuracy": metrics.majority_accuracy(gold),
        }
        score = columns[f"probability_{name}"][known].astype(np.float64)
        if self.schema.kind == "binary":
            is_positive = gold == 1
            return {
                "roc_auc": metrics.roc_auc(score, is_positive),
                "prc_auc": metrics.average_precision(score, is_positive),
                **accuracies,
            }

        # The mean over the classes for which the area is defined.
        areas = [metrics.roc_auc(score[:, c], gold == c) for c in range(score.shape[1])]
        areas = [area for area in areas if not math.isnan(area)]
        return {"roc_auc": float(np.mean(areas)) if areas else math.nan, **accuracies}

    def start_from(self, dataset: Any) -> None:
        """Fit the scales of targets and descriptors, and label weights, on the training set."""
        targets = torch.from_numpy(dataset.targets)
        if self.schema.kind == "regression":
            self.scale.fit(targets, self.schema.targets)
        elif self.schema.kind == "binary" and self.positive_weight == "balanced":
            self.positive.copy_(_balanced(targets))
        if self.net.descriptors is not None:
            self.net.descriptors.fit(torch.from_numpy(dataset.descriptors))

    def draw(self, folder: Path, columns: Mapping[str, np.ndarray], dataset: object) -> None:
        """Draw parity (regression) or ROC curves (binary) of the properties of a test."""
        if self.schema.kind == "multiclass":
            return
        drawn = self.schema.targets[:_MOST_DRAWN]
        figure, axes = plots.panels(len(drawn), 4, 3.8, 3.8)
        main = METRICS[self.schema.kind][0]
        for panel, name in zip(axes, drawn, strict=True):
            target = columns[f"target_{name}"].astype(np.float64)
            title = f"{name}\n{main} {self._scores(name, columns)[main]:.4g}"
            if self.schema.kind == "regression":
                plots.draw_parity(panel, target, columns[f"prediction_{name}"], title)
            else:
                plots.draw_roc(panel, target, columns[f"probability_{name}"], title)
        file = "parity.png" if self.schema.kind == "regression" else "roc.png"
        plots.save_figure(figure, folder / file)


_MOST_DRAWN = 12


def _balanced(targets: Float[Tensor, "molecule target"]) -> Float[Tensor, " target"]:
    """Return negatives over positives; 1 for properties with a single class."""
    positives = (targets == 1).sum(0)
    negatives = (targets == 0).sum(0)
    both = (positives > 0) & (negatives > 0)
    return torch.where(both, negatives / positives.clamp(min=1), torch.ones(targets.size(1)))
