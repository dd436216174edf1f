"""Predict with the average of several checkpoints of one model."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.checkpoints import naming_file, read_checkpoint
from pyg_dynbatch.training.task import Task, check_weights


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


def ensemble_of(task: Task, checkpoints: Sequence[str | Path]) -> Task:
    """Return a task that predicts with the average of several checkpoints.

    Args:
        task: A task with the configuration of the checkpoints; it is not changed.
        checkpoints: Paths of checkpoints.

    Raises:
        ValueError: If no checkpoint is given, or one is invalid or belongs to a different model.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.tasks import TreeClassification
        >>> task = TreeClassification(num_tokens=5, num_classes=2, hidden_channels=4)
        >>> contents = {"state_dict": task.state_dict(), "pytorch-lightning_version": "2.6"}
        >>> torch.save(contents, getfixture("tmp_path") / "a.ckpt")
        >>> averaged = ensemble_of(task, [getfixture("tmp_path") / "a.ckpt"])
        >>> type(averaged.network).__name__
        'AveragedNetwork'
    """
    members: list[Task] = []
    for path in map(Path, checkpoints):
        checkpoint = read_checkpoint(path)
        with naming_file(path):
            try:
                check_weights(task, checkpoint)
            except ValueError as error:
                theirs = checkpoint.get("hyper_parameters", {})
                if other := [
                    f"{name} {value!r}, in the file {theirs.get(name)!r}"
                    for name, value in task.hparams.items()
                    if isinstance(value, (int, float, str, list)) and theirs.get(name) != value
                ]:
                    error.add_note(f"  differs:  {'; '.join(other)}")
                raise
        member = copy.deepcopy(task)
        member.load_state_dict(checkpoint["state_dict"])
        members.append(member)
    # The average keeps the scale of the targets, with which errors are measured.
    averaged = copy.deepcopy((members or [task])[0])
    averaged.network = averaged.averaged(members)
    return averaged
