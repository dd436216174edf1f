"""Rows whose lengths differ, such as sentences, and functions of all of them at once.

Two sentences ``[3, 8]`` and ``[5, 8]`` are kept as eight positions ``[8, 8]`` with the lengths 3
and 5: :class:`Sequences`. What treats every position alike is called once on all positions; sums
and maxima over the positions are those of padded rows; layers of torch take packed rows. Whatever
else there is is called once per length; its results are :class:`Groups` of stacked rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

MOST_PADDING = 4
"""Rows are padded if this takes at most so many times the memory of their positions."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows of any lengths.

    Args:
        positions: ``[position, ...]``, those of one row after those of another.
        lengths: Number of positions of each row.
        axis: Along which axis of a row its positions lie.
    """

    positions: Tensor
    lengths: np.ndarray
    axis: int

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.lengths)

    @property
    def sizes(self) -> np.ndarray:
        """The length of each row, ``[row, 1]``."""
        return self.lengths[:, None]

    def grouped(self, groups: Sequence[np.ndarray]) -> list[Tensor]:
        """Return the rows of each group of row numbers, which have one length, stacked."""
        ordered = self.pick(np.concatenate(groups))
        counts = [int(self.lengths[rows].sum()) for rows in groups]
        stacks = list[Tensor]()
        for positions, rows in zip(ordered.positions.split(counts), groups, strict=True):
            size = (len(rows), int(self.lengths[rows[0]]))
            stacks.append(positions.unflatten(0, size).movedim(1, 1 + self.axis))
        return stacks

    def as_groups(self) -> "Groups":
        """Return the same rows, those of one length stacked."""
        groups = groups_of([self])
        return Groups(self.grouped(groups), groups)

    @classmethod
    def of_stacked(cls, rows: Tensor, axis: int) -> "Sequences":
        """Return stacked rows ``[row, ...]``, which all have one length."""
        moved = rows.movedim(1 + axis, 1)
        lengths = np.full(rows.size(0), moved.size(1))
        return cls(moved.flatten(0, 1), lengths, axis)

    @classmethod
    def joined(cls, parts: Sequence["Sequences"]) -> "Sequences":
        """Return the rows of all parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        positions = torch.cat([part.positions for part in parts])
        return cls(positions, np.concatenate([part.lengths for part in parts]), parts[0].axis)

    @property
    def starts(self) -> np.ndarray:
        """The first position of each row."""
        return self.lengths.cumsum() - self.lengths

    def at(self, places: np.ndarray) -> Tensor:
        """Return positions by their numbers."""
        return self.positions.index_select(0, _on(places, self.positions))

    def pick(self, rows: np.ndarray) -> "Sequences":
        """Return some rows."""
        if np.array_equal(rows, np.arange(len(self.lengths))):
            return self
        lengths = self.lengths[rows]
        return Sequences(self.at(_ranges(self.starts[rows], lengths)), lengths, self.axis)

    def stacked(self) -> Tensor:
        """Return rows that all have one length, stacked ``[row, ...]``."""
        size = len(self.lengths), int(self.lengths[0])
        return self.positions.unflatten(0, size).movedim(1, 1 + self.axis)

    def padded(self, filling: float) -> Tensor:
        """Return the rows as long as the longest, stacked; a number is put behind their ends."""
        size = len(self.lengths), int(self.lengths.max())
        empty = self.positions.new_full((size[0] * size[1], *self.positions.shape[1:]), filling)
        places = _on(self._places_in_padded(), self.positions)
        filled = empty.index_copy_(0, places, self.positions)
        return filled.unflatten(0, size).movedim(1, 1 + self.axis)

    def unpadded(self, rows: Tensor) -> "Sequences":
        """Return padded rows, which are as long as these, without what lies behind their ends."""
        flat = rows.movedim(1 + self.axis, 1).flatten(0, 1)
        positions = flat.index_select(0, _on(self._places_in_padded(), rows))
        return replace(self, positions=positions)

    def _places_in_padded(self) -> np.ndarray:
        starts = np.arange(len(self.lengths)) * self.lengths.max()
        return _ranges(starts, self.lengths)

    @property
    def can_be_padded(self) -> bool:
        """Whether padded rows are not much larger; empty rows have no maximum."""
        padded = len(self.lengths) * self.lengths.max()
        return bool(self.lengths.min() > 0 and padded <= MOST_PADDING * self.lengths.sum())

    def has_lengths_of(self, other: "Sequences") -> bool:
        """Return whether the rows are as long as others."""
        return np.array_equal(self.lengths, other.lengths)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """List the integers from each start on, as many as each length says."""
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def _on(places: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(places, dtype=np.int64)).to(like.device)


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows of any shapes, those of one shape stacked.

    Args:
        stacks: Stacked rows ``[row, ...]`` of each group.
        rows: The numbers of the rows of each group.
    """

    stacks: Sequence[Tensor]
    rows: Sequence[np.ndarray]

    @classmethod
    def of_stacked(cls, rows: Tensor) -> "Groups":
        """Return stacked rows as one group."""
        return cls([rows], [np.arange(rows.size(0))])

    @classmethod
    def joined(cls, parts: "Sequence[Groups]") -> "Groups":
        """Return the rows of all parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        stacks = list[Tensor]()
        rows = list[np.ndarray]()
        first = 0
        for part in parts:
            stacks += part.stacks
            rows += [numbers + first for numbers in part.rows]
            first += part.num_rows
        return cls(stacks, rows)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.rows))

    @property
    def sizes(self) -> np.ndarray:
        """The shape of each row, ``[row, dimension]``."""
        sizes = np.empty((self.num_rows, self.stacks[0].dim() - 1), dtype=np.int64)
        for stack, rows in zip(self.stacks, self.rows, strict=True):
            sizes[rows] = stack.shape[1:]
        return sizes

    def pick(self, rows: np.ndarray) -> "Groups":
        """Return some rows."""
        if np.array_equal(rows, np.arange(self.num_rows)):
            return self
        group_of_row = np.empty(self.num_rows, dtype=np.int64)
        place_of_row = np.empty(self.num_rows, dtype=np.int64)
        for number, members in enumerate(self.rows):
            group_of_row[members] = number
            place_of_row[members] = np.arange(len(members))
        stacks = list[Tensor]()
        numbers = list[np.ndarray]()
        for number, stack in enumerate(self.stacks):
            chosen = np.flatnonzero(group_of_row[rows] == number)
            if chosen.size:
                numbers.append(chosen)
                stacks.append(stack.index_select(0, _on(place_of_row[rows[chosen]], stack)))
        return Groups(stacks, numbers)

    def grouped(self, groups: Sequence[np.ndarray]) -> Sequence[Tensor]:
        """Return stacked rows of each group, which have one shape."""
        if groups is self.rows:
            return self.stacks
        return [self.pick(rows).stacked() for rows in groups]

    def stacked(self) -> Tensor:
        """Return rows that all have one shape, stacked ``[row, ...]``."""
        joined = torch.cat(list(self.stacks)) if len(self.stacks) > 1 else self.stacks[0]
        order = np.concatenate(self.rows)
        if np.array_equal(order, np.arange(order.size)):
            return joined
        return joined.index_select(0, _on(np.argsort(order), joined))

    def as_sequences(self, axis: int) -> Sequences:
        """Return the same rows, which differ in one axis alone, as positions."""
        parts = [Sequences.of_stacked(stack, axis) for stack in self.stacks]
        return Sequences.joined(parts).pick(np.argsort(np.concatenate(self.rows)))


def of_any_length(value: object) -> TypeGuard[Sequences | Groups]:
    """Return whether a value stands for rows of any lengths."""
    return isinstance(value, Sequences | Groups)


class SequenceRows:
    """The rows of one varying type, by the numbers that a schedule gives them."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._parts: list[Sequences | Groups] = []

    def append(self, first: int, rows: Sequences | Groups) -> None:
        """Add rows with numbers larger than those before."""
        self._firsts.append(first)
        self._parts.append(rows)

    def take(self, rows: np.ndarray) -> Sequences | Groups:
        """Return the rows of some numbers."""
        part_of_row = np.searchsorted(self._firsts, rows, side="right") - 1
        used = np.unique(part_of_row)
        parts = [self._parts[number] for number in used]
        sizes = np.array([part.num_rows for part in parts])
        first_in_joined = sizes.cumsum() - sizes
        number_of_part = np.searchsorted(used, part_of_row)
        within = rows - np.array(self._firsts)[part_of_row]
        return _joined(parts).pick(first_in_joined[number_of_part] + within)


def _joined(parts: Sequence[Sequences | Groups]) -> Sequences | Groups:
    sequences = [part for part in parts if isinstance(part, Sequences)]
    if len(sequences) == len(parts):
        return Sequences.joined(sequences)
    as_groups = [part.as_groups() if isinstance(part, Sequences) else part for part in parts]
    return Groups.joined(as_groups)


# Rows of one shape at a time.


def groups_of(arguments: Sequence[Sequences | Groups]) -> Sequence[np.ndarray]:
    """List the numbers of the rows that are alike in the shapes of all arguments."""
    known = next((each.rows for each in arguments if isinstance(each, Groups)), None)
    # What was computed length by length goes on so.
    if known is not None and all(_are_alike(each, known) for each in arguments):
        return known
    sizes = np.concatenate([each.sizes for each in arguments], axis=1)
    _, group = np.unique(sizes, axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    ends = np.bincount(group.reshape(-1)).cumsum()
    return np.split(order, ends[:-1])


def _are_alike(argument: Sequences | Groups, groups: Sequence[np.ndarray]) -> bool:
    """Return whether the rows of each group have one shape."""
    if isinstance(argument, Groups):
        return argument.rows is groups
    return all(np.ptp(argument.lengths[rows]) == 0 for rows in groups)


# Layers of torch.


def run_recurrent_layer(layer: nn.RNNBase, rows: Sequences) -> tuple[Sequences | Tensor, ...]:
    """Run an LSTM, GRU or RNN on packed rows; return its output and its last states."""
    order = np.argsort(-rows.lengths, kind="stable")  # the longest first
    lengths = rows.lengths[order]
    times = np.arange(lengths[0])
    sizes = (lengths[None, :] > times[:, None]).sum(1)  # how many rows are so long
    time = np.repeat(times, sizes)
    row = np.arange(time.size) - np.repeat(sizes.cumsum() - sizes, sizes)
    places = rows.starts[order][row] + time
    output, state = layer(PackedSequence(rows.at(places), torch.from_numpy(sizes)))

    positions = output.data.index_select(0, _on(np.argsort(places), output.data))
    states = state if isinstance(state, tuple) else (state,)
    place_of_row = _on(np.argsort(order, kind="stable"), positions)
    last_states = [each.index_select(1, place_of_row).transpose(0, 1) for each in states]
    return Sequences(positions, rows.lengths, 0), *last_states


def can_convolve(layer: nn.Module) -> TypeGuard[nn.Conv1d]:
    """Return whether :func:`convolve` is right for a layer."""
    return (
        type(layer) is nn.Conv1d
        and layer.stride == (1,)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def length_after(layer: nn.Conv1d, length: int) -> int:
    """Return the length of the result of a convolution."""
    padding = int(layer.padding[0])
    width = layer.dilation[0] * (layer.kernel_size[0] - 1)
    return length + 2 * padding - width


def convolve(layer: nn.Conv1d, rows: Sequences) -> Sequences:
    """Convolve all rows as one long row, and keep the windows that lie within a row."""
    padding = int(layer.padding[0])
    (dilation,) = layer.dilation
    padded = rows.lengths + 2 * padding
    positions = rows.positions
    if padding:
        starts = padded.cumsum() - padded + padding
        places = _on(_ranges(starts, rows.lengths), positions)
        empty = positions.new_zeros(int(padded.sum()), positions.size(1))
        positions = empty.index_copy_(0, places, positions)
    size = layer.kernel_size[0]
    windows = positions.size(0) - dilation * (size - 1)
    # One product for each place of the window: nothing is copied.
    total = F.linear(positions[:windows], layer.weight[:, :, 0], layer.bias)
    for place in range(1, size):
        first = dilation * place
        inputs = positions[first : first + windows]
        total = torch.addmm(total, inputs, layer.weight[:, :, place].t())
    lengths = padded - dilation * (size - 1)
    kept = _ranges(padded.cumsum() - padded, lengths)
    return Sequences(total.index_select(0, _on(kept, total)), lengths, 1)
