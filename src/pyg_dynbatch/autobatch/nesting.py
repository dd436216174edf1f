"""Values as leaves and a structure, as torch's pytrees do, but faster for tuples of tensors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final, runtime_checkable

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyg_dynbatch.autobatch.lazy import Lazy
from pyg_dynbatch.core.types import TensorType


def type_of(value: object) -> TensorType | None:
    """Return the type of a tensor or recorded value; ``None`` for anything else."""
    if type(value) is Lazy:
        return value._session.table.row_types[value._kind]
    return TensorType(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


LEAF = tree_flatten(0)[1]
"""The structure of a single tensor."""


@runtime_checkable
class LeafNode(Protocol):
    """Makes objects with one leaf, such as stacks, and returns their leaves."""

    def __call__(self, leaf: Any) -> object:
        """Make an object."""

    def leaf_of(self, node: Any) -> object:
        """Return the leaf of an object."""


Nesting = LeafNode | tuple["Nesting", ...] | None
"""How tensors, each ``None``, and objects with one leaf are nested in tuples."""

NODES: dict[type, Callable[[Any], LeafNode]] = {}
"""Of classes of objects with one leaf: returns what makes such objects."""


def flattened(value: object) -> tuple[list[Any], TreeSpec]:
    """List the tensors in a value; also return its structure."""
    nesting = _nesting_of(value)
    if nesting is None:
        return [value], LEAF
    if type(nesting) is _Other:
        return tree_flatten(value)
    leaves = list[object]()
    _list_leaves(value, nesting, leaves)
    structure = _STRUCTURES.get(nesting)
    if structure is None:
        if len(_STRUCTURES) > 1000:
            _STRUCTURES.clear()
            _NESTINGS.clear()
        structure = tree_flatten(_filled(nesting, iter(leaves)))[1]
        structure = _STRUCTURES.setdefault(nesting, structure)
        _NESTINGS[id(structure)] = nesting, structure
    return leaves, structure


def unflattened(leaves: Sequence[object], structure: TreeSpec) -> Any:
    """Return the value of a structure."""
    if structure is LEAF:
        return leaves[0]
    nesting, known = _NESTINGS.get(id(structure), (None, None))
    if known is not structure:
        return tree_unflatten(leaves, structure)
    return _filled(nesting, iter(leaves))


_STRUCTURES: dict[Nesting, TreeSpec] = {}
_NESTINGS: dict[int, tuple[Nesting, TreeSpec]] = {}  # by the identity of the structure


@final
class _Other:
    """Stands for the nesting of everything else."""


_OTHER = _Other()


def _nesting_of(value: object) -> Nesting | _Other:
    """Return the nesting of a value; ``_OTHER`` if anything in it has none, as a list."""
    kind = type(value)
    if kind is Lazy or kind is Tensor:
        return None
    if type(value) is tuple:
        nestings = list[Nesting]()
        for item in value:
            nesting = _nesting_of(item)
            if type(nesting) is _Other:
                return nesting
            nestings.append(nesting)
        return tuple(nestings)
    if kind in NODES:
        return NODES[kind](value)
    return _OTHER


def _list_leaves(value: Any, nesting: Nesting, leaves: list[object]) -> None:
    if isinstance(nesting, tuple):
        for item, nesting_of_item in zip(value, nesting, strict=True):
            _list_leaves(item, nesting_of_item, leaves)
    else:
        leaves.append(value if nesting is None else nesting.leaf_of(value))


def _filled(nesting: Nesting, leaves: Iterator[object]) -> object:
    if nesting is None:
        return next(leaves)
    if isinstance(nesting, tuple):
        return tuple([_filled(each, leaves) for each in nesting])
    return nesting(next(leaves))
