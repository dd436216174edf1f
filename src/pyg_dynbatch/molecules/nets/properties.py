"""Models of molecular properties: a network, the scale of its outputs, and what they mean."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.nets.models import WeaveNet
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind, check_same
from pyg_dynbatch.prediction import SAME_CONFIGURATION, ExactBuffers, Model

_LARGEST_LOG = math.log(20.0)  # temperatures are between 1/20 and 20
_HALVINGS = 50
# Versions that made the features; the featurizer itself warns if they differ.
_VERSIONS = ("featurizer.rdkit", "featurizer.pyg_dynbatch")


class TargetScale(ExactBuffers):
    """Scale targets to mean 0 and standard deviation 1, and predictions back.

    It computes in double precision: the differences between targets may be far smaller than the
    targets. For labels the deviation is 1 over the temperature.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_tasks).double())
        self.register_buffer("deviation", torch.ones(num_tasks).double())

    def fit(self, targets: Float[Tensor, "molecule task"]) -> None:
        """Measure mean and deviation of the known targets; of a constant it is taken to be 1."""
        exact = targets.double()
        mean = exact.nanmean(0).nan_to_num(0.0)
        deviation = (exact - mean).square().nanmean(0).nan_to_num(0.0, math.inf).sqrt()
        first = exact.nan_to_num(math.inf).amin(0)  # a rounded mean may differ from all targets
        varies = (exact > first).any(0)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(varies, deviation, 1.0))

    def calibrate(
        self, logits: Float[Tensor, "molecule task"], target: Float[Tensor, "molecule task"]
    ) -> None:
        """Fit the temperatures that make the known labels most likely."""
        known = ~target.isnan()
        label = torch.where(known, target, 0.5).double()
        score = torch.where(known, logits.double(), 0.0)
        high = torch.full_like(label[0], _LARGEST_LOG)
        low = -high
        # The loss is convex in 1/T, so its slope changes sign once.
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            slope = (score * ((score * middle.exp()).sigmoid() - label)).sum(0)
            low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
        self.deviation.copy_(1 / (-(low + high) / 2).exp())

    def scaled(self, values: Float[Tensor, "molecule task"]) -> Float[Tensor, "molecule task"]:
        """Convert values to the scale of the model."""
        return (values - self.mean) / self.deviation

    def restored(self, outputs: Float[Tensor, "molecule task"]) -> Float[Tensor, "molecule task"]:
        """Convert outputs of the model to the units of the targets."""
        return outputs * self.deviation + self.mean


class AveragedProperties(ExactBuffers):
    """Average the values, in the units of the data, or probabilities that networks predict.

    Args:
        members: The networks, each with the scale of its targets.
        scale: Scale of the result, which can replace the outputs of one network.
        kind: Kind of the properties.
        num_tasks: Number of properties.

    Example:
        >>> scale = TargetScale(1)
        >>> members = [(nn.Linear(2, 1), scale), (nn.Linear(2, 1), scale)]
        >>> AveragedProperties(members, scale, "binary", 1)(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        members: Sequence[tuple[nn.Module, TargetScale]],
        scale: TargetScale,
        kind: PropertyKind,
        num_tasks: int,
    ) -> None:
        super().__init__()
        if not members:
            raise mismatch(ValueError, "AveragedProperties: no networks", "at least one", 0)
        networks, scales = zip(*members, strict=True)
        self.members, self.scales = nn.ModuleList(networks), nn.ModuleList(scales)
        self.scale = scale
        self.kind: PropertyKind = kind
        self.num_tasks = num_tasks

    def forward(self, batch: Any) -> Float[Tensor, "molecule output"]:
        """Return the average as scaled values, logits, or log-probabilities."""
        outputs = torch.stack([member(batch) for member in self.members])
        share = math.log(len(self.members))
        if self.kind == "multiclass":
            logs = outputs.unflatten(2, (self.num_tasks, -1)).log_softmax(-1)
            return (logs.logsumexp(0) - share).flatten(1)
        pairs: Any = zip(self.scales, outputs, strict=True)
        values = torch.stack([scale.restored(output) for scale, output in pairs])
        if self.kind == "regression":
            return self.scale.scaled(values.mean(0)).float()
        # log(p / (1 - p)) of the mean probability, exact also where p is nearly 0 or 1.
        ones, zeros = F.logsigmoid(values).logsumexp(0), F.logsigmoid(-values).logsumexp(0)
        return self.scale.scaled(ones - zeros).float()


class ConformalSets(ExactBuffers):
    r"""Intervals and sets that hold the target of a new molecule with a chosen probability.

    The score of a molecule is :math:`|y - \hat y|` for a value, :math:`1 - \hat p_y` for a class.
    The margin of a property is the :math:`\lceil (n + 1) c \rceil`-th smallest of its :math:`n`
    scores, for the coverage :math:`c`; a set holds everything whose score is at most the margin. If
    the molecules are exchangeable with those of the calibration, it holds the target with a
    probability of at least :math:`c`, on average over all molecules.

    Args:
        schema: What the predictions mean.
        coverage: The probability, between 0 and 1.

    Raises:
        ValueError: If the coverage is not between 0 and 1.

    Reference:
        Vovk, Gammerman, Shafer (2005), doi:10.1007/b106715; Sadinle, Lei, Wasserman (2019),
        doi:10.1080/01621459.2017.1395341 (sets of classes).
    """

    margin: Tensor

    def __init__(self, schema: MoleculeSchema, coverage: float) -> None:
        super().__init__()
        if not 0 < coverage < 1:
            what = "ConformalSets: the coverage is out of range"
            raise mismatch(ValueError, what, "between 0 and 1, such as 0.9", coverage)
        self.schema = schema
        self.coverage = coverage
        self.register_buffer("margin", torch.full((schema.num_tasks,), math.nan).double())

    @property
    def fitted(self) -> bool:
        """Whether the margins are known."""
        return not bool(self.margin.isnan().any())

    def check(self, targets: Float[Tensor, "molecule task"], names: Sequence[str]) -> None:
        """Raise an error if a property has too few targets for the coverage."""
        least = math.ceil(self.coverage / (1 - self.coverage) - 1e-9)
        for name, known in zip(names, (~targets.isnan()).sum(0).tolist(), strict=True):
            if known < least:
                what = f"coverage: too few validation targets of {name}"
                expected = f"at least {least} for a coverage of {self.coverage}"
                raise mismatch(ValueError, what, expected, known, hint="a larger validation split")

    def fit(
        self, values: Float[Tensor, "molecule output"], targets: Float[Tensor, "molecule task"]
    ) -> None:
        """Compute the margins from predictions and targets, NaN where unknown."""
        for task, (scores, target) in enumerate(zip(self._scores(values), targets.T, strict=True)):
            known = ~target.isnan()
            found = self._of_target(scores, target)[known].sort().values
            rank = math.ceil((len(found) + 1) * self.coverage - 1e-9)
            self.margin[task] = found[rank - 1] if rank <= len(found) else math.inf

    def columns(self, values: Float[Tensor, "molecule output"]) -> dict[str, Tensor]:
        """Name the ends of intervals, or whether each class is in the set, of every molecule."""
        columns: dict[str, Tensor] = {}
        names = self.schema.task_names
        for task, (name, scores) in enumerate(zip(names, self._scores(values), strict=True)):
            if self.schema.kind == "regression":
                columns[f"low_{name}"] = values[:, task] - self.margin[task]
                columns[f"high_{name}"] = values[:, task] + self.margin[task]
            else:
                columns[f"set_{name}"] = (scores <= self.margin[task]).long()
        return columns

    def measured(
        self, values: Float[Tensor, "molecule output"], targets: Float[Tensor, "molecule task"]
    ) -> list[dict[str, float]]:
        """Return the share of targets that are covered, and the mean width or size, by property."""
        size = "width" if self.schema.kind == "regression" else "set_size"
        found = []
        for task, (scores, target) in enumerate(zip(self._scores(values), targets.T, strict=True)):
            known, margin = ~target.isnan(), float(self.margin[task])  # on any device
            inside: Bool[Tensor, " known"] = self._of_target(scores, target)[known] <= margin
            sizes = (scores <= margin).sum(1)[known].double()
            mean = 2 * margin if self.schema.kind == "regression" else sizes.mean()
            found.append({"coverage": float(inside.double().mean()), size: float(mean)})
        return found

    def _scores(self, values: Tensor) -> list[Tensor]:
        """Return for every property the values, or the scores of all classes."""
        each = values.unflatten(1, (self.schema.num_tasks, -1)).unbind(1)
        if self.schema.kind == "regression":
            return list(each)
        if self.schema.kind == "binary":
            return [torch.cat([chance, 1 - chance], 1) for chance in each]
        return [1 - chance for chance in each]

    def _of_target(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.schema.kind == "regression":
            return (scores[:, 0] - target).abs()
        return scores.gather(1, target.nan_to_num(0).long()[:, None])[:, 0]


class MoleculePropertyModel(Model):
    """Predict properties of molecules, in the units of the data or as probabilities.

    Args:
        schema: ``MoleculeSchema.as_dict`` of a schema.
        coverage: If given, predictions have intervals, or sets of classes: ``ConformalSets``.
        **network: Options of ``WeaveNet``.
    """

    task = "MoleculeProperty"
    task_options = ("loss", "positive_weight", "task_weights", "calibration")
    training_options = ("coverage", "pair_block", "schema", "sync")

    def __init__(
        self, schema: Mapping[str, Any], coverage: float | None = None, **network: Any
    ) -> None:
        known = MoleculeSchema.from_dict(schema)
        if network.get("messages") == "directed" and known.pairs not in ("bonds", 1):
            what, hint = "model: directed messages need bonds", "--data.init_args.pairs bonds"
            raise mismatch(ValueError, what, "pairs: bonds", f"pairs: {known.pairs}", hint=hint)
        net = WeaveNet(
            known.atom_channels,
            known.num_outputs,
            known.pair_table.features,
            num_descriptors=len(known.descriptor_names),
            **network,
        )
        net.kept = known.pair_table.kept(known.pairs, known.self_pairs)
        super().__init__(net)
        self.schema = known
        self.scale = TargetScale(known.num_tasks)
        self.conformal = None if coverage is None else ConformalSets(self.schema, coverage)

    def predicted(
        self, output: Float[Tensor, "molecule output"]
    ) -> Float[Tensor, "molecule output"]:
        """Convert outputs of the network to values in the units of the data, or probabilities."""
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.schema.kind == "multiclass":
            return exact.unflatten(1, (self.schema.num_tasks, -1)).softmax(-1).view_as(exact)
        values = self.scale.restored(exact)
        return values if self.schema.kind == "regression" else values.sigmoid().to(exact)

    @property
    def weave(self) -> WeaveNet:
        """The network of a model that is no mean, for fingerprints."""
        if not isinstance(self.network, WeaveNet):
            what = "fingerprints: only of a single network"
            raise mismatch(ValueError, what, "WeaveNet", type(self.network).__name__)
        return self.network

    @property
    def sets(self) -> ConformalSets | None:
        """The fitted intervals or sets; None for an average, whose errors are different."""
        averaged = isinstance(self.network, AveragedProperties)
        known = self.conformal is not None and self.conformal.fitted and not averaged
        return self.conformal if known else None

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict one row per molecule.

        Returns:
            Columns ``example``, ``prediction_NAME`` (the value, or the class),
            ``probability_NAME`` (of the positive class, or one column per class), with a coverage
            ``low_NAME`` and ``high_NAME`` or ``set_NAME`` (1 for each class in the set), and, where
            the molecules have targets, ``target_NAME``.
        """
        values = self.predicted(self(batch))
        columns = {"example": torch.arange(values.size(0), device=values.device)}
        columns |= property_columns(values, self.schema)
        if self.sets is not None:
            columns |= self.sets.columns(values)
        if "y" in batch:
            names = (f"target_{name}" for name in self.schema.task_names)
            columns |= zip(names, batch.y.unbind(1), strict=True)
        return columns

    def averaged(self, members: Sequence[Any]) -> AveragedProperties:
        """Average values in the units of the data, or probabilities."""
        parts = [(member.network, member.scale) for member in members]
        return AveragedProperties(parts, self.scale, self.schema.kind, self.schema.num_tasks)

    def check_origin(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Raise an error if the training molecules were described in a different way."""
        ours = self.schema.as_dict()
        theirs = hyper_parameters.get("schema", ours)
        what = "MoleculeProperty: the checkpoint was trained on molecules described differently"
        check_same(what, ours, theirs, SAME_CONFIGURATION, _VERSIONS)


def property_columns(
    values: Float[Tensor, "molecule output"], schema: MoleculeSchema
) -> dict[str, Tensor]:
    """Name the columns of a table of predictions."""
    columns: dict[str, Tensor] = {}
    each = values.unflatten(1, (schema.num_tasks, -1))
    for name, found in zip(schema.task_names, each.unbind(1), strict=True):
        if schema.kind == "regression":
            columns[f"prediction_{name}"] = found[:, 0]
        elif schema.kind == "binary":
            columns[f"prediction_{name}"] = (found[:, 0] > 0.5).long()
            columns[f"probability_{name}"] = found[:, 0]
        else:
            columns[f"prediction_{name}"] = found.argmax(1)
            columns[f"probability_{name}"] = found
    return columns
