"""Predict with the average of several checkpoints of one model."""

import copy
from collections.abc import Sequence
from pathlib import Path

from pyg_dynbatch.training.checkpoints import naming_file, read_checkpoint
from pyg_dynbatch.training.task import Task, check_weights


def ensemble_of(task: Task, checkpoints: Sequence[str | Path]) -> Task:
    """Makes a task that predicts with the average of several checkpoints.

    Args:
        task: A task of the configuration the checkpoints were made with; it is not changed.
        checkpoints: Paths of checkpoints.

    Returns:
        A copy of the task whose network is the average.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If no checkpoint is given, one belongs to another model, or is none.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.training import TreeClassification
        >>> task = TreeClassification(num_tokens=5, num_classes=2, hidden_channels=4)
        >>> torch.save({"state_dict": task.state_dict()}, getfixture("tmp_path") / "a.ckpt")
        >>> averaged = ensemble_of(task, [getfixture("tmp_path") / "a.ckpt"])
        >>> type(averaged.network).__name__
        'AveragedNetwork'
    """
    members: list[Task] = []
    for path in map(Path, checkpoints):
        checkpoint = read_checkpoint(path)
        with naming_file(path):
            check_weights(task, checkpoint)
        member = copy.deepcopy(task)
        member.load_state_dict(checkpoint["state_dict"])
        members.append(member)
    averaged = copy.deepcopy(task)
    averaged.network = task.averaged(members)
    return averaged
