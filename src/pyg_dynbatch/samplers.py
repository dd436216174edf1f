"""Batches limited by nodes or pairs, equally many per rank, in a reproducible order."""

import hashlib
import math
import warnings
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

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

from pyg_dynbatch.core.errors import checked_choice, checked_count, count_or_none, mismatch

Batch = list[int]


def node_counts(dataset: Any) -> list[int]:
    """Return the number of nodes of every example, where possible without loading any.

    Args:
        dataset: An ``InMemoryDataset`` (uses its slices), packed molecules (uses ``num_atoms``), a
            ``Subset`` of these, or any sequence of ``Data`` (each is loaded once).

    Returns:
        One number per example, in the order of the data set.

    Example:
        >>> from pyg_dynbatch.data import DynTreeData
        >>> leaf = DynTreeData(torch.empty(2, 0, dtype=torch.long), num_nodes=1)
        >>> node_counts([leaf, leaf])
        [1, 1]
    """
    if isinstance(dataset, Subset):
        counts = node_counts(dataset.dataset)
        return [counts[i] for i in dataset.indices]
    if (known := getattr(dataset, "num_atoms", None)) is not None:
        return [int(count) for count in known]
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
        >>> from pyg_dynbatch.data import MoleculeData
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> pair_counts([oxygen])
        [3]
    """
    return [count * (count + 1) // 2 for count in node_counts(dataset)]


def digest_of_sizes(sizes: Sequence[int]) -> str:
    """Hash the sizes of all examples, in order."""
    return hashlib.sha256(np.asarray(sizes, np.int64).tobytes()).hexdigest()[:16]


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


def pack_evenly(
    order: Sequence[int], sizes: Sequence[int], weights: Sequence[int], budget: int, count: int
) -> list[Batch] | None:
    """Put each example into the batch of least weight that has room, the last fifth by weight.

    The first four fifths keep the batches random, the others make their weights nearly equal.
    Return None if the examples do not fit into ``count`` batches, or leave one empty.
    """
    alone = [[example] for example in order if sizes[example] > budget]
    if len(alone) > count:
        return None
    fitting = [example for example in order if sizes[example] <= budget]
    shuffled = len(fitting) * 4 // 5
    last = sorted(fitting[shuffled:], key=lambda example: -weights[example])
    batches: list[Batch] = [[] for _ in range(count - len(alone))]
    rooms, least = [budget] * len(batches), min(sizes)
    lightest = [(0, number) for number in range(len(batches))]  # a heap of weights and batches
    for example in (*fitting[:shuffled], *last):
        full = []
        while lightest and rooms[lightest[0][1]] < sizes[example]:
            full.append(heappop(lightest))
        if not lightest or len(full) > _MOST_FULL:
            return None
        weight, number = heappop(lightest)
        batches[number].append(example)
        rooms[number] -= sizes[example]
        for entry in (*full, (weight + weights[example], number)):
            if rooms[entry[1]] >= least:
                heappush(lightest, entry)
    return [*alone, *batches] if all(batches) else None


def make_exactly(batches: list[Batch], sizes: Sequence[int], count: int) -> list[Batch]:
    """Split the largest batch in two until there are ``count`` batches."""

    def costed(batch: Batch) -> tuple[int, Batch]:
        return sum(sizes[example] for example in batch), batch

    splittable = sorted(costed(batch) for batch in batches if len(batch) > 1)
    done = [costed(batch) for batch in batches if len(batch) == 1]
    while splittable and len(splittable) + len(done) < count:
        _, largest = splittable.pop()
        for part in _halves(largest, sizes):
            insort(splittable, costed(part)) if len(part) > 1 else done.append(costed(part))
    ranked = sorted(splittable + done, key=lambda item: -item[0])
    again = ranked[::-1]
    ranked += [again[extra % len(again)] for extra in range(count - len(ranked))]
    return [list(batch) for _, batch in ranked[:count]]


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
    turned = ((step, number % ranks) for number, step in enumerate(steps))
    return [step[-turn:] + step[:-turn] for step, turn in turned]


class Ranks(NamedTuple):
    """The number of virtual ranks, which are planned for, the real number, and the own rank."""

    virtual: int
    real: int
    own: int


class EpochSampler(RandomSampler):
    """Shuffle differently in every epoch, depending only on a seed and the epoch.

    ``RandomSampler`` draws from the global random state, so a resumed run has a different order.

    Args:
        data_source: The data set, or anything of its length.
        seed: Non-negative; by default torch's initial seed, which ``seed_everything`` sets.

    Example:
        >>> sampler = EpochSampler(range(5), seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> first == list(sampler), sorted(second) == sorted(first)
        (True, True)
    """

    def __init__(self, data_source: Sized, seed: int | None = None) -> None:
        super().__init__(data_source)
        seed = torch.initial_seed() % 2**32 if seed is None else seed
        self.seed = checked_count(f"{type(self).__name__}: seed", seed, least=0)
        self.epoch = 0

    def plan(self) -> dict[str, Any]:
        """Return what decides the order of the examples, for a checkpoint."""
        return {"virtual_ranks": 1, "seed": self.seed, "examples": len(self.data_source)}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data_source))
        yield from order.tolist()
        if self.epoch == epoch:
            self.epoch = epoch + 1


_ALWAYS = {
    "virtual_ranks": "by default the number of ranks at the start of the run",
    "seed": "use the seed the run was started with",
    "examples": "use the data set the run was started with",
    "sizes": "use the data set the run was started with, with the examples in the same order",
}
_WITHIN_AN_EPOCH = ("batch_size", "max_nodes", "shuffle", "drop_last", "ranks", "sampler")


def check_plan(own: Mapping[str, Any], state: Mapping[str, Any], name: str) -> None:
    """Raise an error if a state was saved under a plan with other batches.

    In the middle of an epoch, the options of the sampler must be the same as well.
    """
    compared = [key for key in _ALWAYS if key in state and key in own]
    if "steps" in state and 0 < state["position"] < state["steps"]:
        compared += _WITHIN_AN_EPOCH
    for key in compared:
        if state.get(key) != own.get(key):
            what = f"{name}: cannot resume, {key} differs from that of the checkpoint"
            hint = _ALWAYS.get(key, "resume at the end of an epoch to change it")
            raise mismatch(ValueError, what, state.get(key), own.get(key), hint=hint)


_MOST_FULL = 256  # batches without room to look at before packing less evenly
_TRIES = 8  # shuffles to try for few enough batches before packing by decreasing size


class NodeBudgetBatchSampler(BatchSampler):
    """Build batches of at most ``max_nodes`` nodes instead of a number of examples.

    One epoch is planned for all ranks together, from ``seed`` and the epoch: the examples are
    packed under the budget into a multiple of the number of ranks, and batches of about equal size
    form a step. So every example is used exactly once per epoch, and all ranks get the same number
    of batches, in every epoch.

    With ``virtual_ranks``, the epoch is planned for that many ranks, whatever their real number:
    each rank gets ``batches_per_step`` batches per step, whose gradients are to be accumulated, so
    a run can continue on a different number of ranks with the same batches in the same order. Its
    state counts whole steps, and raises an error in a sampler with a different plan.

    The rank is that of ``sampler`` if it is a ``DistributedSampler``, which Lightning inserts;
    otherwise that of ``torch.distributed``. Lightning calls ``set_epoch``; a plain loop need not,
    since each full pass increments the epoch.

    Args:
        sampler: A ``DistributedSampler``; or None or a stock sampler over all examples.
        sizes: Cost of every example, such as ``node_counts(dataset)`` or ``pair_counts(dataset)``.
        max_nodes: Largest sum of sizes in a batch.
        shuffle: Whether to shuffle; else the order is kept on one rank, nearly kept on several.
        drop_last: Whether to leave out the smallest batches rather than split the largest when
            their number is not a multiple of the number of ranks.
        seed: Non-negative, the same on all ranks.
        oversize: What to do with an example above the budget: ``"raise"``, put it in a batch
            ``"alone"``, or ``"skip"`` it with a warning.
        virtual_ranks: Number of ranks to plan for, a multiple of the real number; None for the
            real number.
        weights: What to balance between the batches of a step, per example; by default the sizes.

    Raises:
        ValueError: If an example exceeds the budget, an option is out of range, or, later, the
            number of ranks does not divide ``virtual_ranks``.
        TypeError: If ``sampler`` selects examples itself.

    Example:
        >>> sampler = NodeBudgetBatchSampler(None, [3, 4, 2, 7], max_nodes=7, shuffle=False)
        >>> len(sampler), list(sampler)
        (3, [[0, 1], [2], [3]])
        >>> sampler = NodeBudgetBatchSampler(None, [1] * 8, max_nodes=2, virtual_ranks=4)
        >>> len(sampler), sampler.batches_per_step
        (4, 4)
    """

    def __init__(
        self,
        sampler: Sampler | None,
        sizes: Sequence[int] | Tensor | np.ndarray,
        max_nodes: int,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        oversize: str = "raise",
        virtual_ranks: int | None = None,
        weights: Sequence[int] | None = None,
    ) -> None:
        name = type(self).__name__
        self.sizes: tuple[int, ...] = tuple(map(int, np.asarray(sizes).reshape(-1).tolist()))
        if not self.sizes:
            raise mismatch(ValueError, f"{name}: there are no examples", "at least one size")
        if (least := min(self.sizes)) < 0:
            where = f"example {self.sizes.index(least)}"
            raise mismatch(ValueError, f"{name}: a size is negative", got=least, where=where)
        checked_choice(f"{name}: unknown value of oversize", oversize, ("raise", "alone", "skip"))
        self.weights: Sequence[int] = self.sizes if weights is None else weights
        if len(self.weights) != len(self.sizes):
            what = f"{name}: weights belong to a different data set"
            raise mismatch(ValueError, what, f"{len(self.sizes)} weights", len(self.weights))
        self.max_nodes = checked_count(f"{name}: max_nodes", max_nodes)
        self.virtual_ranks = count_or_none(f"{name}: virtual_ranks", virtual_ranks)
        self.shuffle, self.drop_last, self.oversize = shuffle, drop_last, oversize
        self.seed = checked_count(f"{name}: seed", seed, least=0)
        self.epoch = 0
        """Number of the current or next epoch."""
        self._given_ranks = _ranks_of(sampler, len(self.sizes))
        self._examples = self._admit()
        self._position = self._start = 0  # steps of this epoch that were returned, or are left out
        self._planned: tuple[int, int, list[list[Batch]]] = (-1, 0, [])

    @property
    def batches_per_step(self) -> int:
        """Number of batches whose gradients each rank accumulates per step of the optimiser."""
        ranks = self.ranks()
        return ranks.virtual // ranks.real

    @property
    def sampler(self) -> Any:  # type: ignore[override]  # never set, only read
        """The object whose ``set_epoch`` Lightning calls."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; a position to resume at in a different epoch is discarded."""
        if epoch != self.epoch:
            self._start = self._position = 0
        self.epoch = epoch

    def plan(self) -> dict[str, Any]:
        """Return what decides the batches of every epoch, for a checkpoint."""
        virtual = self.ranks().virtual
        own = {"virtual_ranks": virtual, "steps": self._num_steps(virtual)}
        return {**self._facts(), **own}

    def _facts(self) -> dict[str, Any]:
        seed = self.seed if self.shuffle else None
        facts = {"seed": seed, "examples": len(self.sizes), "sizes": self._digest}
        options = ("virtual_ranks", "max_nodes", "shuffle", "drop_last")
        return facts | {name: getattr(self, name) for name in options}

    def compare_ranks(self) -> None:
        """Check that all ranks of the default process group have the same plan.

        All ranks must call it; data modules do so when they make their loaders.

        Raises:
            ValueError: On all ranks, if their sizes, order, seeds or options differ.

        Example:
            >>> NodeBudgetBatchSampler(None, [1, 2], 3).compare_ranks()  # one rank: nothing to do
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        plans: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(plans, self._facts())
        for rank, other in enumerate(plans):
            for key in (key for key in other if other[key] != plans[0][key]):
                what = f"{type(self).__name__}: ranks have different plans, so different batches"
                wanted, got = f"{key} {plans[0][key]}, as on rank 0", f"{key} {other[key]}"
                hint = "the same data, in the same order, and the same seed on all ranks"
                raise mismatch(ValueError, what, wanted, got, where=f"rank {rank}", hint=hint)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, the epoch, and the number of its steps whose batches were returned.

        Workers ask for batches ahead of their use: ``DataLoader.state_dict`` counts those received.
        """
        return {"epoch": self.epoch, "position": self._position, **self.plan()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a state, which may be from any rank, and any number of them."""
        if self.virtual_ranks is None:
            self.virtual_ranks = state.get("virtual_ranks")
        check_plan(self.plan(), state, type(self).__name__)
        epoch, position = state["epoch"], state["position"]
        if position >= state.get("steps", self._num_steps(self.ranks().virtual)):
            epoch, position = epoch + 1, 0
        self.epoch, self._start, self._position = epoch, position, position

    def __len__(self) -> int:
        return self._num_steps(self.ranks().virtual) * self.batches_per_step

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self.epoch, self._start
        virtual, real, own = self.ranks()
        steps = self._steps(epoch, virtual)
        self._start, self._position = 0, start
        for position in range(start, len(steps)):
            for number in range(own, virtual, real):
                if number + real >= virtual:
                    self._position = position + 1
                yield list(steps[position][number])
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def step_weights(self) -> np.ndarray:
        """Return the weight of every batch of the current epoch, on all ranks.

        Returns:
            Sums of weights, of shape ``[step, virtual rank]``.

        Example:
            >>> sampler = NodeBudgetBatchSampler(None, [3, 4, 2, 7], 7, False, virtual_ranks=2)
            >>> sampler.step_weights().tolist()
            [[2, 3], [7, 4]]
        """
        each = np.asarray(self.weights)
        steps = self._steps(self.epoch, self.ranks().virtual)
        return np.array([[each[batch].sum() for batch in step] for step in steps])

    def __repr__(self) -> str:
        options = f"shuffle={self.shuffle}, seed={self.seed}, epoch={self.epoch}"
        size = f"{len(self._examples)} examples, max_nodes={self.max_nodes}"
        return f"{type(self).__name__}({size}, {options})"

    @cached_property
    def _digest(self) -> str:
        return digest_of_sizes([*self.sizes, *self.weights])

    def ranks(self) -> Ranks:
        """Return the number of virtual ranks, the real number of ranks, and this rank.

        Raises:
            ValueError: If the number of ranks does not divide that of virtual ranks.

        Example:
            >>> NodeBudgetBatchSampler(None, [1, 2], 3, virtual_ranks=2).ranks()
            Ranks(virtual=2, real=1, own=0)
        """
        if self._given_ranks is not None:
            real, own = self._given_ranks
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            # Not earlier: the process group may be initialised after this object is made.
            real, own = torch.distributed.get_world_size(), torch.distributed.get_rank()
        else:
            real, own = 1, 0
        virtual = real if self.virtual_ranks is None else self.virtual_ranks
        if virtual % real:
            what = "NodeBudgetBatchSampler: virtual_ranks is not a multiple of the number of ranks"
            divisors = ", ".join(str(n) for n in range(1, virtual + 1) if virtual % n == 0)
            expected = f"{divisors} ranks for {virtual} virtual ranks"
            hint = "virtual_ranks is fixed when a run starts, by default its number of ranks"
            raise mismatch(ValueError, what, expected, f"{real} ranks", hint=hint)
        return Ranks(virtual, real, own)

    def _admit(self) -> list[int]:
        too_big = [example for example, size in enumerate(self.sizes) if size > self.max_nodes]
        if not too_big or self.oversize == "alone":
            return list(range(len(self.sizes)))
        if self.oversize == "raise":
            more = f" ({len(too_big)} examples are too big)" if len(too_big) > 1 else ""
            what, wanted = "an example is larger than the budget", f"at most {self.max_nodes} nodes"
            what, where = f"NodeBudgetBatchSampler: {what}", f"example {too_big[0]}"
            got = f"{self.sizes[too_big[0]]} nodes{more}"
            hint = f"max_nodes={max(self.sizes)}, oversize='alone' or oversize='skip'"
            raise mismatch(ValueError, what, wanted, got, where=where, hint=hint)
        left_out = f"left out {len(too_big)} of {len(self.sizes)} examples"
        reason = f"more than {self.max_nodes} nodes, the first of them example {too_big[0]}"
        warnings.warn(f"NodeBudgetBatchSampler: {left_out} with {reason}.", stacklevel=3)
        return [example for example, size in enumerate(self.sizes) if size <= self.max_nodes]

    def _pack(self, epoch: int, attempt: int = 0) -> list[Batch]:
        """Pack one epoch for all ranks; the number of batches varies with epoch and attempt."""
        if not self.shuffle:
            return pack_in_order(self._examples, self.sizes, self.max_nodes)
        generator = np.random.default_rng([self.seed, epoch, attempt])
        order = generator.permutation(self._examples).tolist()
        if attempt == _TRIES:
            # In order of decreasing size, the number of batches depends on the sizes alone.
            order.sort(key=lambda example: -self.sizes[example])
        return pack_tightly(order, self.sizes, self.max_nodes)

    @cached_property
    def _enough(self) -> int:
        """A number of batches that suffices in every epoch on one rank."""
        tries = (0, _TRIES) if self.shuffle else (0,)
        return max(len(self._pack(0, attempt)) for attempt in tries)

    def _num_steps(self, virtual: int) -> int:
        """Return the number of batches per rank, which is the same in every epoch."""
        steps = self._enough // virtual if self.drop_last else math.ceil(self._enough / virtual)
        if steps == 0:
            what = "NodeBudgetBatchSampler: there are fewer batches than ranks"
            expected, got = f"at least {virtual} batches", f"{len(self._examples)} examples"
            hint = "drop_last=False, a smaller max_nodes, or fewer ranks"
            raise mismatch(ValueError, what, expected, got, hint=hint)
        return steps

    def _steps(self, epoch: int, virtual: int) -> list[list[Batch]]:
        """Return the batches of an epoch, by step and virtual rank; the last plan is kept."""
        if self._planned[:2] != (epoch, virtual):
            self._planned = epoch, virtual, self._plan_steps(epoch, virtual)
        return self._planned[2]

    def _plan_steps(self, epoch: int, virtual: int) -> list[list[Batch]]:
        count = self._num_steps(virtual) * virtual
        if count > len(self._examples):
            given = len(self._examples)
            what = f"{given} examples are fewer than {count} batches on {virtual} ranks"
            repeated = f"{count - given} are repeated"
            warnings.warn(f"NodeBudgetBatchSampler: {what}; {repeated}.", stacklevel=3)
        tries = (self._pack(epoch, attempt) for attempt in range(_TRIES + 1))
        batches = next(batches for batches in tries if len(batches) <= self._enough)
        if virtual == 1 and not self.shuffle:
            return [[batch] for batch in batches]
        even = self._evenly(epoch, count) if virtual > 1 and self.shuffle else None
        batches = make_exactly(batches, self.sizes, count) if even is None else even
        if self.weights is not self.sizes or even is not None:
            batches.sort(key=self._weight, reverse=True)
        steps = assign_to_ranks(batches, virtual)
        if not self.shuffle:
            return sorted(steps, key=lambda step: min(min(batch) for batch in step))
        # In the order of decreasing size the steps would be a curriculum.
        generator = np.random.default_rng([self.seed, epoch, _TRIES + 1])
        return [steps[i] for i in generator.permutation(len(steps))]

    def _evenly(self, epoch: int, count: int) -> list[Batch] | None:
        """Pack an epoch evenly; return None if all tries have failed."""
        for attempt in range(_TRIES):
            generator = np.random.default_rng([self.seed, epoch, attempt, count])
            order = generator.permutation(self._examples).tolist()
            even = pack_evenly(order, self.sizes, self.weights, self.max_nodes, count)
            if even is not None:
                return even
        return None

    def _weight(self, batch: Batch) -> int:
        return sum(self.weights[example] for example in batch)


def _ranks_of(sampler: Any, num_examples: int) -> tuple[int, int] | None:
    """Return the number of ranks and the rank of a sampler that has them."""
    if sampler is None:
        return None
    ranked = isinstance(sampler, DistributedSampler)
    if not ranked and type(sampler) not in (SequentialSampler, RandomSampler, EpochSampler):
        what = "NodeBudgetBatchSampler: the sampler selects examples itself"
        expected = "a DistributedSampler, a SequentialSampler, a RandomSampler or None"
        hint = "torch.utils.data.Subset(dataset, indices) for a part of the examples"
        raise mismatch(TypeError, what, expected, type(sampler).__name__, hint=hint)
    over = len(sampler.dataset if ranked else sampler.data_source)
    if over != num_examples:
        what = "NodeBudgetBatchSampler: sizes belong to a different data set"
        raise mismatch(ValueError, what, f"{over} sizes, one per example", num_examples)
    return (sampler.num_replicas, sampler.rank) if ranked else None
