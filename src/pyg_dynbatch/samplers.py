"""Batches limited by nodes or pairs, in the order of any sampler, equally many on every rank."""

import math
import warnings
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate, islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler, Subset

from pyg_dynbatch.core.errors import checked_count, mismatch

Batch = list[int]

_ROTATIONS = 8  # ways to pack an order before packing it by decreasing size


class NodeBudgetBatchSampler(BatchSampler):
    """Build batches of at most ``max_nodes`` nodes instead of a number of examples.

    As in torch's ``BatchSampler``, the sampler alone decides the order of the examples, and so when
    it changes; this class decides which examples share a batch. With a ``SequentialSampler``, or a
    ``DistributedSampler`` that does not shuffle, batches are runs of the order; with any other, an
    example goes into the fullest batch with room for it. There are equally many batches in every
    pass, and ``len`` is known before the first; PyG's ``DynamicBatchSampler`` knows neither.

    With a ``DistributedSampler``, which Lightning inserts, all ranks plan the same pass: each
    example is used once, on one rank, all ranks get equally many batches, and those of one step are
    of about equal size. Call ``set_epoch`` of that sampler before every pass, as Lightning does.

    Args:
        sampler: Yields the number of every example once: a ``RandomSampler``, a
            ``SequentialSampler``, a ``DistributedSampler``, or one of your own.
        sizes: Cost of every example, such as ``node_counts(dataset)`` or ``pair_counts(dataset)``.
        max_nodes: Largest sum of sizes in a batch. An example above it becomes a batch of its own;
            the sampler warns of them once, when it is built.
        drop_last: Whether to leave out the smallest batches rather than split the largest when
            their number is not a multiple of the number of ranks.

    Raises:
        ValueError: If an option is out of range, there are too few examples for all ranks, or, in
            a pass, the sampler does not yield every example once.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> sizes = [3, 4, 2, 7]
        >>> sampler = NodeBudgetBatchSampler(SequentialSampler(sizes), sizes, max_nodes=7)
        >>> len(sampler), list(sampler)
        (3, [[0, 1], [2], [3]])
    """

    def __init__(
        self,
        sampler: Sampler[int],
        sizes: Sequence[int] | Tensor | np.ndarray,
        max_nodes: int,
        drop_last: bool = False,
    ) -> None:
        name = type(self).__name__
        self.sampler: Any = sampler
        self.sizes: list[int] = np.asarray(sizes).reshape(-1).tolist()
        if not self.sizes:
            raise mismatch(ValueError, f"{name}: there are no examples", "at least one size")
        smallest = min(self.sizes)
        if smallest < 0:
            where = f"example {self.sizes.index(smallest)}"
            raise mismatch(ValueError, f"{name}: a size is negative", got=smallest, where=where)
        self.max_nodes = checked_count(f"{name}: max_nodes", max_nodes)
        self.drop_last = drop_last
        self._warn_of_examples_above_the_budget()
        self._batches_in_pass = self._count_batches()
        self._batches_per_rank = self._share_of_a_rank()

    def __len__(self) -> int:
        return self._batches_per_rank

    def __iter__(self) -> Iterator[Batch]:
        rank = self.sampler.rank if self._is_distributed else 0
        drawn = iter(self._whole_sampler())
        order = self._checked_order(drawn)
        for step in self._steps(order):
            yield step[rank]
        # To the end, where `RandomSampler` draws once more: the generator is then in the state in
        # which torch's `BatchSampler` leaves it.
        if next(drawn, None) is not None:
            raise self._other_examples()

    def __repr__(self) -> str:
        options = f"max_nodes={self.max_nodes}, drop_last={self.drop_last}"
        return f"{type(self).__name__}({self.sampler}, {len(self.sizes)} sizes, {options})"

    @property
    def _is_distributed(self) -> bool:
        return isinstance(self.sampler, DistributedSampler)

    @property
    def _ranks(self) -> int:
        return int(self.sampler.num_replicas) if self._is_distributed else 1

    @property
    def _shuffles(self) -> bool:
        if isinstance(self.sampler, SequentialSampler):
            return False
        return not self._is_distributed or bool(self.sampler.shuffle)

    def _warn_of_examples_above_the_budget(self) -> None:
        """Warn on the first rank alone, as all ranks plan the same batches."""
        larger = [size for size in self.sizes if size > self.max_nodes]
        if larger and (not self._is_distributed or self.sampler.rank == 0):
            warnings.warn(
                f"{type(self).__name__}: {len(larger):,} of {len(self.sizes):,} examples are above "
                f"the budget of {self.max_nodes:,} (the largest {max(larger):,}): a batch for each",
                stacklevel=3,
            )

    def _share_of_a_rank(self) -> int:
        """Return the number of batches of each rank in every pass."""
        batches = self._batches_in_pass
        steps = batches // self._ranks if self.drop_last else math.ceil(batches / self._ranks)
        examples = len(self.sizes)
        if steps == 0 or steps * self._ranks > examples:
            raise mismatch(
                ValueError,
                f"{type(self).__name__}: too few examples for equally many batches on every rank",
                f"at least {max(steps, 1) * self._ranks} batches of one example or more",
                f"{examples} examples in {batches} batches on {self._ranks} ranks",
                hint="fewer ranks, or another max_nodes or drop_last",
            )
        return steps

    def _count_batches(self) -> int:
        """Return a number of batches, over all ranks, that suffices in every pass."""
        examples = range(len(self.sizes))
        if not self._shuffles:
            return len(pack_in_order(examples, self.sizes, self.max_nodes))
        shuffled = np.random.default_rng(0).permutation(examples).tolist()
        orders = (shuffled, self._by_size(examples))
        return max(len(pack_tightly(order, self.sizes, self.max_nodes)) for order in orders)

    def _by_size(self, examples: Iterable[int]) -> list[int]:
        return sorted(examples, key=lambda example: -self.sizes[example])

    def _whole_sampler(self) -> Sampler[int]:
        """Return the sampler of all ranks together."""
        if not self._is_distributed:
            return self.sampler
        # One rank of one, without the examples that are repeated to make the shares equal.
        whole = copy(self.sampler)
        whole.num_replicas = 1
        whole.rank = 0
        whole.num_samples = len(self.sizes)
        whole.total_size = len(self.sizes)
        return whole

    def _checked_order(self, drawn: Iterator[int]) -> list[int]:
        """Take the order of this pass, which has every example once."""
        order = list(islice(drawn, len(self.sizes)))
        if sorted(order) != list(range(len(self.sizes))):
            raise self._other_examples()
        return order

    def _other_examples(self) -> ValueError:
        return mismatch(
            ValueError,
            f"{type(self).__name__}: the sampler does not yield every example once",
            f"the numbers 0 to {len(self.sizes) - 1}, one per size",
            f"other numbers, of a {type(self.sampler).__name__}",
            hint="torch.utils.data.Subset(dataset, indices) for a part of the examples",
        )

    def _pack(self, order: list[int]) -> list[Batch]:
        """Pack an order into at most as many batches as every pass has."""
        if not self._shuffles:
            return pack_in_order(order, self.sizes, self.max_nodes)
        for rotation in range(_ROTATIONS):
            start = len(order) * rotation // _ROTATIONS
            rotated = order[start:] + order[:start]
            batches = pack_tightly(rotated, self.sizes, self.max_nodes)
            if len(batches) <= self._batches_in_pass:
                return batches
        # In order of decreasing size, the number of batches depends on the sizes alone.
        return pack_tightly(self._by_size(order), self.sizes, self.max_nodes)

    def _steps(self, order: list[int]) -> list[list[Batch]]:
        """Return the batches of a pass: per step, one for every rank."""
        batches = self._pack(order)
        num_batches = len(self) * self._ranks
        if len(batches) != num_batches:
            batches = split_or_drop(batches, self.sizes, num_batches)
        if self._ranks > 1:
            batches.sort(key=self._size, reverse=True)
        steps = assign_to_ranks(batches, self._ranks)

        position = {example: number for number, example in enumerate(order)}
        if not self._shuffles:
            return sorted(steps, key=lambda step: min(position[batch[0]] for batch in step))
        # Not in the order of size, which would be a curriculum.
        return sorted(steps, key=lambda step: position[step[0][0]])

    def _size(self, batch: Batch) -> int:
        return sum(self.sizes[example] for example in batch)


def node_counts(dataset: Any) -> list[int]:
    """Return the number of nodes of every example, where possible without loading any.

    Args:
        dataset: A data set of this package, an ``InMemoryDataset`` of trees, a ``Subset`` of these,
            or any sequence of ``Data`` (each is loaded once).

    Returns:
        One number per example, in the order of the data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.data import DynTreeData
        >>> leaf = DynTreeData(torch.empty(2, 0, dtype=torch.long), num_nodes=1)
        >>> node_counts([leaf, leaf])
        [1, 1]
    """
    if isinstance(dataset, Subset):
        counts = node_counts(dataset.dataset)
        return [counts[i] for i in dataset.indices]
    columns = getattr(dataset, "columns", None)
    if columns is not None:
        return columns.nodes.sizes[list(dataset.indices())].tolist()
    slices = getattr(dataset, "slices", None)
    if slices and "depth" in slices:
        counts = slices["depth"].diff().tolist()
        return [counts[i] for i in dataset.indices()]
    return [int(data.num_nodes) for data in dataset]


def pair_counts(dataset: Any) -> list[int]:
    """Count the unordered atom pairs of every molecule, including each atom with itself.

    Args:
        dataset: Packed molecules, a ``Subset`` of them, or any sequence of ``Data``.

    Returns:
        ``N (N + 1) / 2`` for each molecule of N atoms, in the order of the data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.data import MoleculeData
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> pair_counts([oxygen])
        [3]
    """
    return [count * (count + 1) // 2 for count in node_counts(dataset)]


# Packing ------------------------------------------------------------------------------------------


def pack_in_order(order: Iterable[int], sizes: Sequence[int], budget: int) -> list[Batch]:
    """Fill batch after batch without changing the order of the examples."""
    batches: list[Batch] = []
    room = 0
    for example in order:
        if not batches or sizes[example] > room:
            batches.append([])
            room = budget
        batches[-1].append(example)
        room -= sizes[example]
    return batches


def pack_tightly(order: Iterable[int], sizes: Sequence[int], budget: int) -> list[Batch]:
    """Put each example into the fullest batch that still has room for it (best fit)."""
    batches: list[Batch] = []
    rooms: list[tuple[int, int]] = []  # (room left, batch), ascending
    for example in order:
        size = sizes[example]
        fullest = bisect_left(rooms, (size, -1))
        if fullest == len(rooms):
            insort(rooms, (budget - size, len(batches)))
            batches.append([example])
            continue
        room, batch = rooms.pop(fullest)
        batches[batch].append(example)
        insort(rooms, (room - size, batch))
    return batches


def split_or_drop(batches: list[Batch], sizes: Sequence[int], count: int) -> list[Batch]:
    """Split the largest batch in two until there are ``count``, or leave out the smallest.

    There must be at least ``count`` examples. The largest batches come first.
    """

    def with_cost(batch: Batch) -> tuple[int, Batch]:
        return sum(sizes[example] for example in batch), batch

    splittable = sorted(with_cost(batch) for batch in batches if len(batch) > 1)
    single = [with_cost(batch) for batch in batches if len(batch) == 1]
    while splittable and len(splittable) + len(single) < count:
        _, largest = splittable.pop()
        for half in _halves(largest, sizes):
            if len(half) > 1:
                insort(splittable, with_cost(half))
            else:
                single.append(with_cost(half))
    ranked = sorted(splittable + single, key=lambda item: -item[0])
    return [batch for _, batch in ranked[:count]]


def _halves(batch: Batch, sizes: Sequence[int]) -> tuple[Batch, Batch]:
    """Split a batch where the sum of its sizes is closest to one half."""
    ends = list(accumulate(sizes[example] for example in batch))
    middles = [end - sizes[example] / 2 for example, end in zip(batch, ends, strict=True)]
    middle = bisect_right(middles, ends[-1] / 2, 1, len(batch) - 1)
    return batch[:middle], batch[middle:]


def assign_to_ranks(batches: list[Batch], ranks: int) -> list[list[Batch]]:
    """Form steps of one batch per rank, of about equal size if the batches are sorted by size."""
    steps = [batches[start : start + ranks] for start in range(0, len(batches), ranks)]
    # Rotated, so that the largest batch of a step is not always on the same rank.
    rotated_steps = []
    for number, step in enumerate(steps):
        rotation = number % ranks
        rotated_steps.append(step[-rotation:] + step[:-rotation])
    return rotated_steps
