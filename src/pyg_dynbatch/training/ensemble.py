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
                other = [
                    f"{name} {value!r}, in the file {theirs.get(name)!r}"
                    for name, value in task.hparams.items()
                    if isinstance(value, (int, float, str, list)) and theirs.get(name) != value
                ]
                if other:
                    error.add_note(f"  differs:  {'; '.join(other)}")
                raise
        member = copy.deepcopy(task)
        member.load_state_dict(checkpoint["state_dict"])
        members.append(member)
    # The average keeps the scale of the targets, by which errors are measured.
    averaged = copy.deepcopy((members or [task])[0])
    averaged.network = averaged.averaged(members)
    return averaged
