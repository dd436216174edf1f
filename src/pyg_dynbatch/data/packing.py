"""Pack examples into batches under a budget, equally many for every rank."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import Subset

Batch = list[int]


def node_counts(dataset: Any) -> list[int]:
    """Reads the number of nodes of every example, where possible without loading any.

    Args:
        dataset: An ``InMemoryDataset`` (read off its slices), packed molecules (read off their
            ``num_atoms``), a ``Subset`` of these, or any sequence of ``Data`` (each is looked at
            once).

    Returns:
        One number an example, in the order of the data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.data.tree import DynTreeData
        >>> leaf = DynTreeData(torch.empty(2, 0, dtype=torch.long), num_nodes=1)
        >>> node_counts([leaf, leaf])
        [1, 1]
    """
    if isinstance(dataset, Subset):
        counts = node_counts(dataset.dataset)
        return [counts[i] for i in dataset.indices]
    known = getattr(dataset, "num_atoms", None)
    if known is not None:
        return [int(count) for count in known]
    slices = getattr(dataset, "slices", None)
    if slices and "depth" in slices:
        counts = slices["depth"].diff().tolist()
        return [counts[i] for i in dataset.indices()]
    return [int(data.num_nodes) for data in dataset]


def pair_counts(dataset: Any) -> list[int]:
    """Counts the unordered atom pairs of every molecule, each atom with itself included.

    Args:
        dataset: Packed molecules, a ``Subset`` of them, or any sequence of ``Data``.

    Returns:
        ``N (N + 1) / 2`` for each molecule of N atoms, in the order of the data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.data.molecule import MoleculeData
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> pair_counts([oxygen])
        [3]
    """
    return [count * (count + 1) // 2 for count in node_counts(dataset)]


def pack_in_order(order: Iterable[int], sizes: Sequence[int], budget: int) -> list[Batch]:
    """Fills batch after batch without changing the order of the examples.

    Args:
        order: Numbers of the examples.
        sizes: Size of every example.
        budget: Largest sum of sizes in a batch; a bigger example stands alone.

    Returns:
        The batches.

    Example:
        >>> pack_in_order(range(4), [3, 4, 2, 9], budget=7)
        [[0, 1], [2], [3]]
    """
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
    """Puts each example into the fullest batch that still has room for it (best fit).

    Args:
        order: Numbers of the examples, first come first served.
        sizes: Size of every example.
        budget: Largest sum of sizes in a batch; a bigger example stands alone.

    Returns:
        The batches.

    Example:
        >>> pack_tightly(range(4), [3, 5, 2, 4], budget=7)
        [[0, 3], [1, 2]]
    """
    batches: list[Batch] = []
    rooms: list[tuple[int, int]] = []  # (room left, batch), rising
    for example in order:
        size = sizes[example]
        place = bisect_left(rooms, (size, -1))
        if place == len(rooms):
            insort(rooms, (budget - size, len(batches)))
            batches.append([example])
            continue
        room, batch = rooms.pop(place)
        batches[batch].append(example)
        insort(rooms, (room - size, batch))
    return batches


def make_exactly(batches: list[Batch], sizes: Sequence[int], count: int) -> list[Batch]:
    """Brings the number of batches to ``count`` by splitting the biggest in two, again and again.

    No example is repeated or left out as long as there are ``count`` examples; beyond that the
    smallest ones come once more, since a rank without a batch would stop all others. Where there
    are more batches than ``count``, the smallest are left out.

    Args:
        batches: The batches.
        sizes: Size of every example.
        count: Number of batches wanted, at least 1.

    Returns:
        ``count`` batches, the most costly first.

    Example:
        >>> make_exactly([[0, 1, 2], [3]], [4, 1, 3, 9], 3)
        [[3], [1, 2], [0]]
    """
    splittable = sorted((_cost(batch, sizes), batch) for batch in batches if len(batch) > 1)
    done = [(_cost(batch, sizes), batch) for batch in batches if len(batch) == 1]
    while splittable and len(splittable) + len(done) < count:
        _, batch = splittable.pop()
        for part in _halves(batch, sizes):
            item = (_cost(part, sizes), part)
            insort(splittable, item) if len(part) > 1 else done.append(item)
    ranked = sorted(splittable + done, key=lambda item: -item[0])
    again = ranked[::-1]
    ranked += [again[extra % len(again)] for extra in range(count - len(ranked))]
    return [list(batch) for _, batch in ranked[:count]]


def deal(batches: list[Batch], ranks: int) -> list[list[Batch]]:
    """Forms steps of one batch a rank, so that ranks run batches of about one size at one time.

    Args:
        batches: Batches, the most costly first; their number a multiple of ``ranks``.
        ranks: Number of ranks.

    Returns:
        For each step the batches of all ranks; the biggest goes to another rank each step.

    Example:
        >>> deal([[0], [1], [2], [3]], 2)
        [[[0], [1]], [[3], [2]]]
    """
    steps = []
    for number, start in enumerate(range(0, len(batches), ranks)):
        step = batches[start : start + ranks]
        turn = number % ranks
        steps.append(step[-turn:] + step[:-turn] if turn else step)
    return steps


def _cost(batch: Batch, sizes: Sequence[int]) -> int:
    return sum(sizes[example] for example in batch)


def _halves(batch: Batch, sizes: Sequence[int]) -> tuple[Batch, Batch]:
    half = _cost(batch, sizes) / 2
    cut, total = 1, sizes[batch[0]]
    while cut < len(batch) - 1 and total + sizes[batch[cut]] / 2 <= half:
        total += sizes[batch[cut]]
        cut += 1
    return batch[:cut], batch[cut:]
