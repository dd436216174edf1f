"""Shuffle so that an epoch can be repeated and resumed."""

from collections.abc import Iterator, Sized

import numpy as np
import torch
from torch.utils.data import RandomSampler

from pyg_dynbatch.core.errors import mismatch


class EpochSampler(RandomSampler):
    """Shuffles anew in every epoch, from nothing but a seed and the number of the epoch.

    A stock ``RandomSampler`` draws from the global random state, so that a resumed run sees
    another order. Here the order of an epoch is the same whenever and wherever it is asked for.

    Args:
        data_source: The data set, or anything of its length.
        seed: Non-negative; None takes torch's initial seed, which ``seed_everything`` sets.

    Example:
        >>> sampler = EpochSampler(range(5), seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> first == list(sampler), sorted(second) == sorted(first)
        (True, True)
    """

    def __init__(self, data_source: Sized, seed: int | None = None) -> None:
        super().__init__(data_source)
        self.seed = seed = torch.initial_seed() % 2**32 if seed is None else checked_seed(seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch whose order comes next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data_source))
        yield from order.tolist()
        if self.epoch == epoch:
            self.epoch = epoch + 1


def checked_seed(seed: int) -> int:
    """Returns the seed unless it is negative."""
    if seed < 0:
        raise ValueError(mismatch("seed is negative", expected="0 or more", got=seed))
    return seed
