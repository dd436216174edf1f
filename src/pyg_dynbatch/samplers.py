"""Batches bounded by nodes or pairs, equally many per rank, in an order that can be repeated."""

import warnings
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from pyg_dynbatch.core.errors import mismatch

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
        >>> from pyg_dynbatch.trees.data import DynTreeData
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
        >>> from pyg_dynbatch.molecules.data import MoleculeData
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> pair_counts([oxygen])
        [3]
    """
    return [count * (count + 1) // 2 for count in node_counts(dataset)]


def pack_in_order(order: Iterable[int], sizes: Sequence[int], budget: int) -> list[Batch]:
    """Fills batch after batch without changing the order of the examples."""
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
    """Puts each example into the fullest batch that still has room for it (best fit)."""
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
    """Split the largest batch in two until there are ``count`` batches."""
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


def assign_to_ranks(batches: list[Batch], ranks: int) -> list[list[Batch]]:
    """Forms steps of one batch a rank, so that ranks run batches of about one size at one time."""
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
        raise mismatch(ValueError, "seed is negative", "0 or more", seed)
    return seed


OVERSIZE = ("raise", "alone", "skip")

_TRIES = 8  # shuffles to try for few enough batches before packing by falling size


@dataclass(frozen=True)
class NodeBudget:
    """Holds the options of a ``NodeBudgetBatchSampler``, all but the sampler and ``drop_last``."""

    sizes: tuple[int, ...]
    max_nodes: int
    shuffle: bool
    seed: int
    oversize: str


class NodeBudgetBatchSampler(BatchSampler):
    """Builds batches of at most ``max_nodes`` nodes instead of a number of examples.

    One epoch is planned for all ranks together, from ``seed`` and the epoch: the examples are
    packed under the budget, the biggest batches are split until their number suits the ranks,
    batches of about one size form a step, and the steps come in random order. So every example
    comes exactly once an epoch, all ranks do equally many batches of about equal size, and the
    number of batches is the same in every epoch.

    The ranks are read off ``sampler`` when it is a ``DistributedSampler``, which Lightning puts
    there by itself; its own list of examples is not used. Otherwise they are those of
    ``torch.distributed`` where that runs, else there is one. ``set_epoch`` is called by Lightning;
    a plain loop on one rank may leave it, since each full pass counts the epoch up.

    Args:
        sampler: Where to read rank and epoch: a ``DistributedSampler``; None or a stock sampler
            over all examples for none.
        sizes: Number of nodes of every example (``node_counts(dataset)``), or any other cost,
            such as pairs of nodes. It is read once; no example is loaded.
        max_nodes: Largest sum of sizes in a batch.
        shuffle: Whether to mix the examples; else their order is kept on one rank, and nearly so
            on several.
        drop_last: Whether to leave out the smallest batches rather than split the biggest when
            their number is no multiple of the number of ranks.
        seed: Non-negative, the same on all ranks.
        oversize: What to do with an example above the budget: ``"raise"``, put it in a batch
            ``"alone"``, or ``"skip"`` it with a warning.
        batch_size: The options of another sampler, which take the place of all others. Lightning
            hands them back under this name when it builds a sampler again that was not made
            inside a ``*_dataloader`` hook.

    Raises:
        ValueError: If an example is bigger than the budget (unless ``oversize`` says otherwise),
            or an option is out of range.
        TypeError: If ``sampler`` picks examples by itself.

    Example:
        >>> sampler = NodeBudgetBatchSampler(None, [3, 4, 2, 7], max_nodes=7, shuffle=False)
        >>> len(sampler), list(sampler)
        (3, [[0, 1], [2], [3]])
    """

    def __init__(
        self,
        sampler: Sampler | None = None,
        sizes: Sequence[int] | Tensor | np.ndarray | None = None,
        max_nodes: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        oversize: str = "raise",
        batch_size: NodeBudget | None = None,
    ) -> None:
        if batch_size is None:
            batch_size = _checked_budget(sizes, max_nodes, shuffle, seed, oversize)
        self.batch_size = batch_size  # type: ignore[assignment]  # see the argument's description
        self.sizes = batch_size.sizes
        self.max_nodes = batch_size.max_nodes
        self.shuffle = batch_size.shuffle
        self.drop_last = drop_last
        self.seed = batch_size.seed
        self.oversize = batch_size.oversize
        self._ranked = _checked_sampler(sampler, len(self.sizes))
        self._examples = self._admit()
        self._epoch = 0
        self._position = 0
        self._resume_at = 0
        self._enough: int | None = None
        self._counts: dict[int, int] = {}
        self._plan: tuple[tuple[int, int], list[list[list[int]]]] | None = None

    @property
    def sampler(self) -> Any:  # type: ignore[override]  # never set, only looked at
        """What Lightning calls ``set_epoch`` on: the ``DistributedSampler``, else this object."""
        return self if self._ranked is None else self._ranked

    @property
    def epoch(self) -> int:
        """Number of the epoch that comes next or is under way."""
        return self._epoch if self._ranked is None else self._ranked.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; a place to resume at in another epoch is forgotten."""
        if epoch != self.epoch:
            self._resume_at = self._position = 0
        self._set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Gives the epoch and the number of its batches handed out so far.

        A loader with workers asks for batches ahead of their use: ``DataLoader.state_dict`` of
        this package counts the batches that the training loop has taken.
        """
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next pass begin where the state was taken.

        Args:
            state: What ``state_dict`` returned, on any rank.
        """
        epoch, position = state["epoch"], state["position"]
        if position >= len(self):
            epoch, position = epoch + 1, 0
        self._set_epoch(epoch)
        self._resume_at = self._position = position

    def __len__(self) -> int:
        ranks, _ = self._ranks()
        return self._count(ranks) // ranks

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = self.epoch, self._resume_at
        _, rank = self._ranks()
        steps = self._steps(epoch)
        self._resume_at = 0
        for position in range(start, len(steps)):
            self._position = position + 1
            yield list(steps[position][rank])
        if self._ranked is None and self._epoch == epoch:
            self._epoch += 1
            self._position = 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self._examples)} examples, max_nodes={self.max_nodes}, "
            f"shuffle={self.shuffle}, seed={self.seed}, epoch={self.epoch})"
        )

    def _set_epoch(self, epoch: int) -> None:
        if self._ranked is None:
            self._epoch = epoch
        else:
            self._ranked.set_epoch(epoch)

    def _ranks(self) -> tuple[int, int]:
        if self._ranked is not None:
            return self._ranked.num_replicas, self._ranked.rank
        # Asked for late: the process group may start after this object is made.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size(), torch.distributed.get_rank()
        return 1, 0

    def _admit(self) -> list[int]:
        examples = list(range(len(self.sizes)))
        if self.oversize == "alone":
            return examples
        too_big = [example for example in examples if self.sizes[example] > self.max_nodes]
        if too_big and self.oversize == "raise":
            first = too_big[0]
            more = f" ({len(too_big)} examples are too big)" if len(too_big) > 1 else ""
            raise mismatch(
                ValueError,
                "NodeBudgetBatchSampler: an example is bigger than the budget",
                f"at most {self.max_nodes} nodes",
                f"{self.sizes[first]} nodes{more}",
                where=f"example {first}",
                hint=f"max_nodes={max(self.sizes)}, oversize='alone' or oversize='skip'",
            )
        if too_big:
            warnings.warn(
                f"NodeBudgetBatchSampler: left out {len(too_big)} of {len(examples)} examples "
                f"with more than {self.max_nodes} nodes, the first of them example {too_big[0]}.",
                stacklevel=3,
            )
        return [example for example in examples if self.sizes[example] <= self.max_nodes]

    def _pack(self, epoch: int, attempt: int = 0) -> list[list[int]]:
        """Packs one epoch for all ranks; the number of batches varies with epoch and attempt."""
        if not self.shuffle:
            return pack_in_order(self._examples, self.sizes, self.max_nodes)
        order = self._generator(epoch, attempt).permutation(self._examples).tolist()
        if attempt == _TRIES:
            # By falling size the number of batches depends on the sizes alone.
            order.sort(key=lambda example: -self.sizes[example])
        return pack_tightly(order, self.sizes, self.max_nodes)

    def _bound(self) -> int:
        """Finds a number of batches that suffices in every epoch, before ranks are thought of."""
        if self._enough is None:
            tries = (0, _TRIES) if self.shuffle else (0,)
            self._enough = max(len(self._pack(0, attempt)) for attempt in tries)
        return self._enough

    def _count(self, ranks: int) -> int:
        """Fixes the number of batches of every epoch, over all ranks."""
        if ranks not in self._counts:
            enough = self._bound()
            count = enough - enough % ranks if self.drop_last else -(-enough // ranks) * ranks
            self._warn_of_too_few(count, ranks)
            self._counts[ranks] = count
        return self._counts[ranks]

    def _warn_of_too_few(self, count: int, ranks: int) -> None:
        if not self._examples or count == 0:
            raise mismatch(
                ValueError,
                "NodeBudgetBatchSampler: there is not one batch for every rank",
                f"{ranks} batches or more",
                f"{len(self._examples)} examples",
                hint="drop_last=False, a smaller max_nodes, or fewer ranks",
            )
        if count > len(self._examples):
            warnings.warn(
                f"NodeBudgetBatchSampler: {len(self._examples)} examples do not go into equally "
                f"many batches on {ranks} ranks; {count - len(self._examples)} of them come twice.",
                stacklevel=3,
            )

    def _steps(self, epoch: int) -> list[list[list[int]]]:
        ranks, _ = self._ranks()
        key = (epoch if self.shuffle else 0, ranks)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, self._make_steps(epoch, ranks))
        return self._plan[1]

    def _make_steps(self, epoch: int, ranks: int) -> list[list[list[int]]]:
        count = self._count(ranks)
        tries = (self._pack(epoch, attempt) for attempt in range(_TRIES + 1))
        batches = next(batches for batches in tries if len(batches) <= self._bound())
        if ranks == 1 and not self.shuffle:
            return [[batch] for batch in batches]
        steps = assign_to_ranks(make_exactly(batches, self.sizes, count), ranks)
        if not self.shuffle:
            return sorted(steps, key=lambda step: min(min(batch) for batch in step))
        # Dealt by falling size the steps would be a curriculum.
        return [steps[i] for i in self._generator(epoch, _TRIES + 1).permutation(len(steps))]

    def _generator(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, epoch, purpose])


def _checked_budget(
    sizes: Sequence[int] | Tensor | np.ndarray | None,
    max_nodes: int | None,
    shuffle: bool,
    seed: int,
    oversize: str,
) -> NodeBudget:
    name = "NodeBudgetBatchSampler"
    if sizes is None or max_nodes is None:
        missing = "sizes" if sizes is None else "max_nodes"
        raise mismatch(
            ValueError,
            f"{name}: {missing} is missing",
            "sizes (one number an example) and max_nodes",
            hint=f"{name}(None, node_counts(dataset), max_nodes=4000)",
        )
    listed = tuple(int(size) for size in np.asarray(sizes).reshape(-1).tolist())
    if not listed:
        raise mismatch(ValueError, f"{name}: there are no examples", "one size or more")
    if min(listed) < 0:
        first = next(example for example, size in enumerate(listed) if size < 0)
        raise mismatch(
            ValueError, f"{name}: a size is negative", got=listed[first], where=f"example {first}"
        )
    if max_nodes < 1:
        raise mismatch(ValueError, f"{name}: the budget is no budget", "max_nodes >= 1", max_nodes)
    if oversize not in OVERSIZE:
        raise mismatch(
            ValueError, f"{name}: unknown value of oversize", " | ".join(OVERSIZE), oversize
        )
    return NodeBudget(listed, int(max_nodes), shuffle, checked_seed(seed), oversize)


def _checked_sampler(sampler: Any, num_examples: int) -> DistributedSampler | None:
    """Keeps a sampler that knows ranks, drops one over all examples, refuses every other."""
    if isinstance(sampler, DistributedSampler):
        over: Any = sampler.dataset
    elif type(sampler) in (SequentialSampler, RandomSampler, EpochSampler):
        over = sampler.data_source
    elif sampler is None or isinstance(sampler, NodeBudgetBatchSampler):
        return None
    else:
        raise mismatch(
            TypeError,
            "NodeBudgetBatchSampler: the sampler picks examples by itself",
            "a DistributedSampler, a SequentialSampler, a RandomSampler or None",
            type(sampler).__name__,
            hint="torch.utils.data.Subset(dataset, indices) for a part of the examples",
        )
    if len(over) != num_examples:
        raise mismatch(
            ValueError,
            "NodeBudgetBatchSampler: sizes belong to another data set",
            f"{len(over)} sizes, one an example",
            num_examples,
        )
    return sampler if isinstance(sampler, DistributedSampler) else None
