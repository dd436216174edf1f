"""The base class of blocks, pipes of blocks, and wires to items of their outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import singledispatch
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from pyg_dynbatch.blocks.types import (
    IOBase,
    PerThread,
    PyObjectType,
    ResultType,
    TypeLike,
    VoidType,
)
from pyg_dynbatch.core.errors import mismatch

if TYPE_CHECKING:
    from pyg_dynbatch.blocks.code import Code, Expression
    from pyg_dynbatch.blocks.layers import Layer

#: The compositions whose scopes are open.
scopes = PerThread()

#: Functions that run a block, ``"eval"`` and ``"max_depth"``; set by ``compiler.py``.
runners: dict[str, Callable[..., Any]] = {}


class Block(IOBase):
    """Map an input to an output, for one example; blocks are combined into larger ones.

    A block has at most one parent, so an expression is always a tree; only layers are shared.
    Types are inferred while blocks are combined; when the whole is compiled, each block is checked
    and writes its part of the code that reads an example.

    Args:
        children: Blocks inside, each anything that :func:`convert_to_block` takes.
        input_type: Type of the input, if it is known.
        output_type: Type of the output, if it is known.
        name: For messages and drawings; all kinds of blocks take one.

    Raises:
        TypeError: If a child has a parent already.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Sum()).eval([1, 2, 3])
        tensor(6.)
    """

    # Lets ``array >> block`` call ``block.__rrshift__``.
    __array_ufunc__ = None
    __iter__ = None
    # Whether the output is a host object if the input is one.
    _keeps_objects = False
    # Keys of the children in paths and drawings.
    _child_keys: Sequence[str] = ()

    def __init__(
        self,
        children: Sequence["BlockLike"] = (),
        input_type: TypeLike | None = None,
        output_type: TypeLike | None = None,
        name: str | None = None,
    ) -> None:
        self._parent: Block | None = None
        # The forward declaration that was resolved to this block.
        self._declaration: IOBase | None = None
        self._children: list[Block] = []
        super().__init__(input_type, output_type, name)
        for child in children:
            self._adopt(convert_to_block(child))

    # Structure.

    @property
    def children(self) -> list["Block"]:
        """The blocks directly inside."""
        return list(self._children)

    @property
    def parent(self) -> "Block | None":
        """The block directly outside, if there is one."""
        return self._parent

    def _adopt(self, child: "Block") -> None:
        if child._parent is not None:
            problem = f"already a child of {child._parent._label()}"
            hint = "make a second block; share weights by using one layer in both"
            child._fail(problem, "a block without a parent", repr(child), hint=hint)
        child._parent = self
        child._dependents.append(self)
        self._children.append(child)

    def walk(self) -> Iterator["Block"]:
        """Iterate over the block and all blocks inside, parents before children."""
        yield self
        for child in self._children:
            yield from child.walk()

    def _path(self) -> str:
        if self._parent is not None:
            return self._parent._path() + self._parent._step_to(self)
        return self._declaration._label() if self._declaration is not None else "Root"

    def _step_to(self, child: "Block") -> str:
        """Part of the path from here to a child."""
        key = self._key_of(child)
        label = child._label()
        if isinstance(child, _Pipe):  # pipes are left out
            return key
        if key:
            return f"{key}.{label}"

        same_label = [sibling for sibling in self._children if sibling._label() == label]
        number = f"#{same_label.index(child) + 1}" if len(same_label) > 1 else ""
        return f".{label}{number}"

    def _key_of(self, child: "Block") -> str:
        """Key of a child in a path, such as ``['pair']``; empty if it has none."""
        if not self._child_keys:
            return ""
        return f"[{self._child_keys[self._children.index(child)]}]"

    # Combining.

    def __bool__(self) -> bool:
        _fail_as_truth_value(self)

    # These three are also methods of layers.

    def __rshift__(self: "Block | Layer", other: "BlockLike") -> "Block":
        return Pipe(self, other)

    def __rrshift__(self: "Block | Layer", other: "BlockLike") -> "Block":
        return Pipe(other, self)

    def reads(self: "Block | Layer", *others: "SourceLike") -> "Block":
        """Wire inputs, inside ``with composition.scope():``.

        Args:
            *others: Blocks, wires ``block[i]``, ``composition.input``; several become a tuple.

        Returns:
            The block itself; for a layer, a block of it.
        """
        if not scopes.items:
            problem = f"{self._label()}.reads: used outside a scope"
            expected = "an open scope"
            raise mismatch(AssertionError, problem, expected, hint="with composition.scope(): …")
        block = convert_to_block(self)
        source = others[0] if len(others) == 1 else others
        scopes.items[-1].connect(source, block)
        return block

    def __getitem__(self, key: object) -> "Wire":
        """Return a wire from one item, or from a slice, of the output."""
        return Wire(self, key)

    # Defined by subclasses:
    #
    # _infer, _output_for, _expect_output   whenever a type becomes known
    # _check                                when a model is compiled, all types being propagated
    # _emit                                 when the block's code is written

    def _infer(self) -> None:
        """Derive types from those that are known; by default, the output type from the input."""
        kind = self.input_type
        if kind is None:
            return
        is_kept = self._keeps_objects and isinstance(kind, PyObjectType)
        self.set_output_type(kind if is_kept else self._output_for(kind))

    def _output_for(self, kind: Any) -> ResultType | None:
        """Return the type of the output for an input of a valid type, if it is known by now."""
        return None

    def _expect_output(self, expected: ResultType) -> None:
        """Use the type that the reader of the output expects."""
        self.set_output_type(expected)

    def _check(self) -> None:
        """Raise errors that can be found only when the model is compiled."""

    def _emit(self, code: "Code", value: "Expression") -> "Expression":
        """Write the lines that compute the output from the input; ``code`` is a ``code.Code``."""
        raise NotImplementedError

    def _known(self, side: str) -> ResultType:
        """Return the input or output type, which must be known by now."""
        kind = self._types[side]
        if kind is None:
            expected = f"a type from its neighbors, or block.set_{side}_type(...)"
            self._fail(f"the {side} type cannot be inferred", expected, "no type")
        return kind

    # Running.

    def eval(
        self, inp: object, *, tolist: bool = False, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> Any:
        """Evaluate one input, in evaluation mode: without dropout, with the statistics of norms.

        A compiled block, see :class:`Compiler`, follows ``train()`` and ``eval()``.

        Args:
            inp: The input: a Python object.
            tolist: Return numbers and lists instead of tensors.
            inputs: External rows by tag, see :class:`InputRow`.

        Returns:
            The output; if there are metrics, with a dictionary of their values.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> td.Vector(2).eval([1, 2], tolist=True)
            [1.0, 2.0]
        """
        return runners["eval"](self, inp, tolist=tolist, inputs=inputs)

    def max_depth(self, inp: object) -> int:
        """Return the length of the longest chain of batched calls; nothing is computed.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> td.Map(td.Scalar()).max_depth([1, 2])
            0
        """
        return int(runners["max_depth"](self, inp))


class Wire(NamedTuple):
    """One item, or a slice, of the output of a block; ``block[key]``."""

    source: "Source"
    key: object

    def __bool__(self) -> bool:
        _fail_as_truth_value(self)

    def __getitem__(self, key: object) -> "Wire":
        return Wire(self, key)


def _fail_as_truth_value(self: object) -> NoReturn:
    """Raise an error: no example exists while blocks are wired, so they have no truth value."""
    problem = f"{type(self).__name__}: used as a truth value while blocks are wired"
    hint = "td.OneOf(key_fn, cases), torch.where in a td.Function, or `block is not None`"
    raise mismatch(TypeError, problem, "a decision per example", repr(self), hint=hint)


# Conversion ---------------------------------------------------------------------------------------

FieldsLike = dict[Any, Any] | list[Any] | tuple["BlockLike", ...]
"""Blocks by key, pairs of a key and a block, or blocks for the keys 0, 1, …."""

BlockLike = Block | nn.Module | torch.Tensor | np.ndarray | FieldsLike
"""What :func:`convert_to_block` takes."""

Source = Block | Wire | tuple["Source", ...]
"""What the input of a block consists of inside a composition."""

SourceLike = BlockLike | Wire | tuple["SourceLike", ...]
"""What :meth:`Block.reads` takes."""


@singledispatch
def conversion(block_like: object) -> Block:
    """Convert an object that is not a block; each kind is registered next to its block."""
    problem = "convert_to_block: cannot be turned into a block"
    expected = "a block, layer, module, tensor, array, dict, list or tuple"
    hint = "td.Function(f) for a function on tensors, td.InputTransform(f) for a Python function"
    raise mismatch(TypeError, problem, expected, repr(block_like), hint=hint)


# A wire is a tuple, but not a tuple of blocks.
conversion.register(Wire, conversion.dispatch(object))


def convert_to_block(block_like: BlockLike) -> Block:
    """Convert an object to a block.

    Args:
        block_like: A block; a layer or ``nn.Module`` (becomes :class:`Function`); a tensor or
            numpy array (:class:`FromTensor`); a dict, list or tuple (:class:`Record`).

    Raises:
        TypeError: If it is none of these.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> convert_to_block({"a": td.Scalar()})
        Record({'a': Scalar()})
    """
    return block_like if isinstance(block_like, Block) else conversion(block_like)


# Types that are equal -----------------------------------------------------------------------------


def equate(first: tuple[IOBase, str], *others: tuple[IOBase, str]) -> ResultType | None:
    """Propagate a type among inputs and outputs, such as ``(block, "input")``, that are equal."""
    owner, own_side = first
    for other, side in others:
        owner._set_type(own_side, other._types[side])
    for other, side in others:
        other._set_type(side, owner._types[own_side])
    return owner._types[own_side]


def share(owner: Block, side: str, blocks: Sequence[Block]) -> ResultType | None:
    """Propagate a type between an owner and blocks that share its input, if any, or its output."""
    sharing = [block for block in blocks if side == "output" or block.input_type != VoidType()]
    return equate((owner, side), *((block, side) for block in sharing))


# Pipes --------------------------------------------------------------------------------------------


class Identity(Block):
    """Return the input.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Identity().eval("text")
        'text'
    """

    def _infer(self) -> None:
        equate((self, "output"), (self, "input"))

    def _emit(self, code: "Code", value: "Expression") -> "Expression":
        return value


class _Pipe(Block):
    """Apply at least two blocks one after another; see :func:`Pipe`."""

    def __init__(self, *blocks: Block, name: str | None = None) -> None:
        super().__init__(blocks, name=name)

    def _release_children(self) -> list[Block]:
        """Move the children to a longer pipe; this one can be evaluated, but not used again."""
        for child in self._children:
            child._parent = None
            # The longer pipe propagates types from now on; this one does when it is compiled.
            child._dependents.remove(self)
        return self._children

    def _infer(self) -> None:
        equate((self._children[0], "input"), (self, "input"))
        for block, following in pairwise(self._children):
            # Most neighbors agree already, and this runs often in long pipes.
            if block.output_type is following.input_type:
                continue
            if block.output_type is None and following.input_type is not None:
                block._expect_output(following.input_type)
            following.set_input_type(block.output_type)
        equate((self._children[-1], "output"), (self, "output"))

    def _emit(self, code: "Code", value: "Expression") -> "Expression":
        for child in self._children:
            value = code.emit(child, value)
        return value


def Pipe(*blocks: BlockLike, name: str | None = None) -> Block:  # named like the classes
    """Apply blocks one after another; ``a >> b`` makes it.

    Pipes are flattened and identities dropped; an empty pipe is an identity, a pipe of one block
    is that block.

    Args:
        *blocks: What :func:`convert_to_block` takes.
        name: For messages and drawings.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Pipe(td.InputTransform(len), td.Scalar()).eval("abc")
        tensor(3.)
    """
    converted = [convert_to_block(block) for block in blocks]
    kept = [block for block in converted if type(block) is not Identity] or converted[:1]
    if not kept:
        return Identity(name=name)

    # An identity has the type of its neighbors.
    set_neighbor: Callable[[ResultType | None], Block] = kept[0].set_input_type
    for block in converted:
        if block in kept:
            set_neighbor = block.set_output_type
        else:
            set_neighbor(block.input_type)
    if len(kept) == 1 and name is None:
        return kept[0]

    flat: list[Block] = []
    for block in kept:
        if isinstance(block, _Pipe) and block.name is None and block._parent is None:
            flat += block._release_children()
        else:
            flat.append(block)
    pipe = _Pipe(*flat, name=name)
    for block in kept:
        block._parent = pipe
    return pipe
