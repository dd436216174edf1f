"""Feed, group and repeat examples, as Fold's helpers do."""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pyg_dynbatch.core.errors import mismatch


class EdibleIterator:
    """Is an iterator that can be fed further items while it is consumed.

    Args:
        iterable: Items to begin with.

    Example:
        >>> items = EdibleIterator([1])
        >>> items.eat([2, 3])
        >>> list(items)
        [1, 2, 3]
    """

    def __init__(self, iterable: Iterable[Any] | None = None) -> None:
        self._sources: deque[Iterator[Any]] = deque()
        if iterable is not None:
            self.eat(iterable)

    def eat(self, iterable: Iterable[Any]) -> None:
        """Takes further items; they are consumed only when they are asked for."""
        self._sources.append(iter(iterable))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._sources:
            for item in islice(self._sources[0], 1):
                return item
            self._sources.popleft()
        raise StopIteration


def group_by_batches(
    iterable: Iterable[Any], batch_size: int, truncate: bool = False
) -> Iterator[list[Any]]:
    """Cuts any iterable into lists.

    Args:
        iterable: The items.
        batch_size: Length of each list.
        truncate: Leave out a last list that is shorter.

    Returns:
        The lists, lazily.

    Raises:
        ValueError: If ``batch_size`` is not positive.

    Example:
        >>> list(group_by_batches(range(5), 2))
        [[0, 1], [2, 3], [4]]
    """
    if batch_size < 1:
        raise ValueError(
            mismatch("group_by_batches: no batch", expected="1 item or more", got=batch_size)
        )
    return _groups(iter(iterable), batch_size, truncate)


def _groups(items: Iterator[Any], size: int, truncate: bool) -> Iterator[list[Any]]:
    while len(group := list(islice(items, size))) == size or (group and not truncate):
        yield group


def epochs(
    items: Iterable[Any],
    n: int | None = None,
    shuffle: bool = True,
    prng: random.Random | None = None,
) -> Iterator[Iterable[Any]]:
    """Repeats items for several epochs; the first is lazy and in their order.

    Args:
        items: Any iterable; it is kept in memory while it is consumed, unless n is 1.
        n: Number of epochs; without end where left out.
        shuffle: Shuffle the items from the second epoch on.
        prng: Random numbers for that.

    Returns:
        The items of each epoch.

    Raises:
        ValueError: If n is not positive.

    Example:
        >>> [list(epoch) for epoch in epochs([1, 2], n=2, shuffle=False)]
        [[1, 2], [1, 2]]
    """
    if n is not None and n < 1:
        raise ValueError(mismatch("epochs: no epoch", expected="n of 1 or more, or None", got=n))
    return _epochs(items, n, shuffle, prng or random.Random())


def _epochs(
    items: Iterable[Any], n: int | None, shuffle: bool, prng: random.Random
) -> Iterator[Iterable[Any]]:
    if n == 1:
        yield items
        return
    kept: list[Any] = []
    first = _keeping(items, kept)
    yield first
    # Whoever left the first epoch half-way has the rest of it in the next ones all the same.
    for _ in first:
        pass
    done = 1
    while n is None or done < n:
        if shuffle:
            prng.shuffle(kept)
        yield list(kept)
        done += 1


def _keeping(items: Iterable[Any], kept: list[Any]) -> Iterator[Any]:
    for item in items:
        kept.append(item)
        yield item
