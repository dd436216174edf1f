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
from pyg_dynbatch.molecules.nets.models import WeaveNet
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind, check_same
from pyg_dynbatch.prediction import SAME_CONFIGURATION, ExactBuffers, Model

# Versions that made the features; the featurizer itself warns if they differ.
_VERSIONS = ("featurizer.rdkit", "featurizer.pyg_dynbatch")


class TargetScale(ExactBuffers):
    """Scale targets to mean 0 and standard deviation 1, and predictions back.

    It computes in double precision: the differences between targets may be far smaller than the
    targets. Labels are not scaled.
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
        if self.kind == "multiclass":
            logs = outputs.unflatten(2, (self.num_tasks, -1)).log_softmax(-1)
            return (logs.logsumexp(0) - math.log(len(self.members))).flatten(1)
        if self.kind == "binary":
            # log(p / (1 - p)) of the mean probability, exact also where p is nearly 0 or 1.
            exact = outputs.double()
            log_ones = F.logsigmoid(exact).logsumexp(0)
            log_zeros = F.logsigmoid(-exact).logsumexp(0)
            return (log_ones - log_zeros).float()
        pairs: Any = zip(self.scales, outputs, strict=True)
        values = torch.stack([scale.restored(output) for scale, output in pairs])
        return self.scale.scaled(values.mean(0)).float()


class MoleculePropertyModel(Model):
    """Predict properties of molecules, in the units of the data or as probabilities.

    Args:
        schema: ``MoleculeSchema.as_dict`` of a schema.
        **network: Options of ``WeaveNet``.
    """

    task = "MoleculeProperty"
    task_options = ("loss", "positive_weight", "task_weights")
    training_options = ("pair_block", "schema", "sync")

    def __init__(self, schema: Mapping[str, Any], **network: Any) -> None:
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

    def predicted(
        self, output: Float[Tensor, "molecule output"]
    ) -> Float[Tensor, "molecule output"]:
        """Convert outputs of the network to values in the units of the data, or probabilities."""
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.schema.kind == "multiclass":
            return exact.unflatten(1, (self.schema.num_tasks, -1)).softmax(-1).view_as(exact)
        return self.scale.restored(exact) if self.schema.kind == "regression" else exact.sigmoid()

    @property
    def weave(self) -> WeaveNet:
        """The network of a model that is no mean, for fingerprints."""
        if not isinstance(self.network, WeaveNet):
            raise mismatch(
                ValueError,
                "fingerprints: only of a single network",
                "WeaveNet",
                type(self.network).__name__,
            )
        return self.network

    @torch.no_grad()
    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict one row per molecule.

        Returns:
            Columns ``example``, ``prediction_NAME`` (the value, or the class),
            ``probability_NAME`` (of the positive class, or one column per class), and, where the
            molecules have targets, ``target_NAME``.
        """
        values = self.predicted(self(batch))
        columns = {"example": torch.arange(values.size(0), device=values.device)}
        columns |= property_columns(values, self.schema)
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
