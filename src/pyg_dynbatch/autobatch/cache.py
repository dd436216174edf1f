"""Recordings by the structure of examples, and what that structure is."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._pytree import TreeSpec

from pyg_dynbatch.core.native import extension

MOST_INTEGERS = 2**25
"""How many integers a model keeps in one mode; the recordings used least recently go first."""

_LONGEST_KEY = 100_000
_ATOMS = {int, str, bytes, type(None)}
_NUMBERS = {float, complex, bool}  # which may equal an integer


ExampleKey = tuple[object, ...] | bytes
"""The structure of an example; bytes if C has found it."""


class Example(NamedTuple):
    """An example, its structure, and the tensors among its arguments."""

    value: object
    key: "ExampleKey | None" = None  # None if it has no structure
    tensors: Sequence[Tensor] = ()
    problem: str = ""  # why it has none

    @property
    def size(self) -> int:
        """How many integers the key takes."""
        if isinstance(self.key, bytes):
            return len(self.key) // 4
        return 2 * len(self.key or ())


def example_of(value: object) -> Example:
    """Find the structure of an example, as :func:`structure_of` defines it; mostly in C."""
    key_and_tensors = None if _structure is None else _structure(value)
    return structure_of(value) if key_and_tensors is None else Example(value, *key_and_tensors)


_structure = getattr(extension(), "structure", None)


def structure_of(value: object) -> Example:
    """Find the structure of an example.

    It is a flat tuple: classes, numbers of items, and plain values as they are; floats by their
    text, in which -0.0 differs from 0.0. A tensor is its shape, its dtype and whether it requires
    gradients; one that was met before is its number among the tensors.

    Example:
        >>> structure_of((1, ["a", 2.0])).key
        (<class 'tuple'>, 2, 1, <class 'list'>, 2, 'a', <class 'float'>, '2.0')
    """
    key = list[object]()
    tensors = list[Tensor]()
    numbers: dict[int, int] = {}
    todo = [value]  # the next item last
    while todo:
        item: Any = todo.pop()
        cls = type(item)
        if cls in _ATOMS:
            key.append(item)
        elif cls is tuple or cls is list:
            key += cls, len(item)
            todo += item[::-1]
        elif cls is Tensor:
            number = numbers.setdefault(id(item), len(tensors))
            if number == len(tensors):
                tensors.append(item)
                key += Tensor, item.shape, item.dtype, item.requires_grad
            else:
                key += Tensor, number
        elif cls in _NUMBERS:
            key += cls, repr(item)
        elif (items := _items_of(item, cls)) is not None:
            key += cls, len(items)
            todo += items[::-1]
        else:
            name = cls.__qualname__
            return Example(value, problem=f"its arguments hold an object of class {name}")
        if len(key) > _LONGEST_KEY:
            return Example(value, problem="its arguments are too large")
    return Example(value, tuple(key), tensors)


def rebuilt(key: Iterable[object], tensors: Sequence[Tensor]) -> object:
    """Return the example of a structure with other tensors.

    Example:
        >>> rebuilt(structure_of((1, ["a", 2.0])).key, [])
        (1, ['a', 2.0])
    """
    tokens = list(key)[::-1]  # the next one last
    nodes = list[_Container | _Leaf]()
    num_tensors = 0
    while tokens:
        token = tokens.pop()
        if token is Tensor:
            number = tokens.pop()
            if not isinstance(number, int):  # the shape of a new tensor, before dtype and gradient
                del tokens[-2:]
                number = num_tensors
                num_tensors += 1
            nodes.append(_Leaf(tensors[number]))
        elif token in _NUMBERS:
            nodes.append(_Leaf(_number_of(token, tokens.pop())))
        elif isinstance(token, type):
            nodes.append(_Container(token, tokens.pop()))
        else:
            nodes.append(_Leaf(token))

    items = list[object]()  # the next one last
    for node in reversed(nodes):
        if isinstance(node, _Leaf):
            items.append(node.item)
        else:
            items.append(_built(node.cls, [items.pop() for _ in range(node.num_items)]))
    return items[0]


class _Container(NamedTuple):
    """The class of a container, and how many items follow."""

    cls: type
    num_items: Any


class _Leaf(NamedTuple):
    """An item that holds no others."""

    item: object


def _number_of(cls: type, text: object) -> object:
    return text == "True" if cls is bool else cls(text)


def _built(cls: type, items: list[Any]) -> object:
    if cls is dict:
        return dict(zip(items[::2], items[1::2], strict=True))
    if cls is list:
        return items
    if issubclass(cls, tuple):
        return tuple.__new__(cls, items)
    built = object.__new__(cls)
    for name, item in zip(_names_of(cls), items, strict=True):
        object.__setattr__(built, name, item)
    return built


def _items_of(container: Any, cls: type) -> list[object] | None:
    """List what a dict, a named tuple or a dataclass holds; ``None`` for other objects."""
    if cls is dict:
        return [item for key_and_value in container.items() for item in key_and_value]
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return [*container]
    bases = cls.__mro__[:-1]
    if not all("__dataclass_fields__" in vars(base) for base in bases):
        return None
    names = _names_of(cls)
    has_others = not set(getattr(container, "__dict__", ())) <= set(names)
    if has_others or not all(hasattr(container, name) for name in names):
        return None
    return [getattr(container, name) for name in names]


def _names_of(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


class ResultLayout(NamedTuple):
    """What the results of examples have in common."""

    structure: TreeSpec
    kinds: tuple[int, ...]  # the row type of each leaf, or -1 for one that is no tensor


class KeptRows(NamedTuple):
    """Rows of one row type from outside."""

    kind: int
    is_whole: bool  # whether each source is stacked rows
    sources: Sequence[int]  # of tensors of the example, after these of `held`, then `constants`
    places: np.ndarray  # where the code refers to the rows


@dataclass(eq=False)
class CacheEntry:
    """What is known of a structure.

    Args:
        size: How many integers it takes.
        used: When it was used last.
    """

    size: int
    used: int = 0


@dataclass(eq=False)
class Refused(CacheEntry):
    """A structure whose examples are recorded each time.

    Args:
        reason: Why.
    """

    reason: str = ""


@dataclass(eq=False, kw_only=True)
class Kept(CacheEntry):
    """What an example of a structure has recorded.

    Args:
        code: Its records, which number its values from 0.
        places: Where in the user's code each record was made.
        rows: Its rows from outside.
        held: Tensors that the model holds, which are rows as well.
        constants: Stacked constants.
        layout: That of its result.
        numbers: Value of each leaf of the result; 0 for those that are no tensors.
        trained: Values of the result, and of what is emitted, from which gradients flow back.
        plain: Each leaf that is no tensor; ``None`` for the others.
        emitted: What it emits: name, row type and value.
    """

    code: np.ndarray
    places: np.ndarray
    rows: Sequence[KeptRows]
    held: Sequence[Tensor]
    constants: Sequence[Tensor]
    layout: ResultLayout
    numbers: np.ndarray
    trained: Sequence[int]
    plain: Sequence[object]
    emitted: Sequence[tuple[str, int, int]]


class Cache:
    """Recordings by structure; those used least recently go first."""

    def __init__(self) -> None:
        self.entries: dict[ExampleKey, CacheEntry] = {}
        self.layouts = deque[ResultLayout](maxlen=64)
        self.size = 0
        self.now = 0

    def find(self, example: Example) -> CacheEntry | None:
        """Return what is known of the structure of an example."""
        entry = None if example.key is None else self.entries.get(example.key)
        if entry is not None:
            self.now += 1
            entry.used = self.now
        return entry

    def add(self, example: Example, entry: CacheEntry) -> None:
        """Keep what an example has recorded, or why that is not kept."""
        if example.key is None or entry.size > MOST_INTEGERS:
            return
        self.now += 1
        entry.used = self.now
        known = self.entries.get(example.key)
        self.size += entry.size - (0 if known is None else known.size)
        self.entries[example.key] = entry
        if self.size > MOST_INTEGERS:
            self._shrink()

    def refuse(self, example: Example, reason: str) -> None:
        """Note that examples of a structure are recorded each time."""
        self.add(example, Refused(example.size, reason=reason))

    def _shrink(self) -> None:
        """Drop entries until a quarter of the room is free."""
        for key, entry in sorted(self.entries.items(), key=lambda item: item[1].used):
            if self.size <= 3 * MOST_INTEGERS // 4:
                break
            self.size -= entry.size
            del self.entries[key]

    def layout_of(self, structure: TreeSpec, kinds: tuple[int, ...]) -> ResultLayout:
        """Return one of all layouts that are equal."""
        layout = ResultLayout(structure, kinds)
        for known in self.layouts:
            if known == layout:
                return known
        self.layouts.append(layout)
        return layout
