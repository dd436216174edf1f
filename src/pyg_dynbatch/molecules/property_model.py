"""Models of molecular properties: a network, the scale of its outputs, and what they mean."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.conformal import ConformalSets
from pyg_dynbatch.molecules.models import WeaveNet
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.prediction import SAME_CONFIGURATION, ExactBuffers, Model, differences

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


class AveragedProperties(nn.Module):
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
        if self.kind == "multiclass":
            logs = outputs.unflatten(2, (self.num_tasks, -1)).log_softmax(-1)
            return (logs.logsumexp(0) - math.log(len(outputs))).flatten(1)
        pairs: Any = zip(self.scales, outputs, strict=True)
        values = torch.stack([scale.restored(output) for scale, output in pairs])
        if self.kind == "regression":
            return self.scale.scaled(values.mean(0)).float()
        # log(p / (1 - p)) of the mean probability, exact also where p is nearly 0 or 1.
        mean = F.logsigmoid(values).logsumexp(0) - F.logsigmoid(-values).logsumexp(0)
        return self.scale.scaled(mean).float()


class MoleculePropertyModel(Model):
    """Predict properties of molecules, in the units of the data or as probabilities.

    Args:
        schema: ``MoleculeSchema.as_dict`` of a schema.
        coverage: If given, predictions have intervals, or sets of classes: ``ConformalSets``.
        **network: Options of ``WeaveNet``.
    """

    task = "MoleculeProperty"
    task_options = ("loss", "positive_weight", "task_weights", "calibration")

    def __init__(
        self, schema: Mapping[str, Any], coverage: float | None = None, **network: Any
    ) -> None:
        known = MoleculeSchema.from_dict(schema)
        super().__init__(
            WeaveNet(
                known.atom_channels,
                known.num_outputs,
                known.pair_table.features,
                num_descriptors=len(known.descriptor_names),
                **network,
            )
        )
        self.schema = known
        self.scale = TargetScale(self.schema.num_tasks)
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
        found = [part for part in differences(ours, theirs) if part[0] not in _VERSIONS]
        if found:
            what = "MoleculeProperty: the checkpoint was trained on molecules described differently"
            expected = "; ".join(f"{name}: {str(own):.80}" for name, own, _ in found)
            got = "; ".join(f"{name}: {str(other):.80}" for name, _, other in found)
            raise mismatch(ValueError, what, expected, got, hint=SAME_CONFIGURATION)


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
