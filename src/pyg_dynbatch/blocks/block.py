"""The base of all blocks: pipes, wires, children and one-off evaluation."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from pyg_dynbatch.blocks.code import Code
from pyg_dynbatch.blocks.types import IOBase, ResultType, propagate_types
from pyg_dynbatch.core.errors import mismatch

if TYPE_CHECKING:
    from pyg_dynbatch.blocks.code import Code


def _no_truth(self: Any) -> NoReturn:
    """Refuses to decide anything: blocks are wired before there is any example."""
    raise mismatch(
        TypeError,
        f"{type(self).__name__}: used as a truth value while blocks are wired",
        "a decision that is made for each example",
        repr(self),
        hint="td.OneOf(key_fn, cases) by the host's data, torch.where in a td.Function by a "
        "tensor; `block is not None` for its presence",
    )


class Wire(NamedTuple):
    """One item of what a block gives; ``block[key]``."""

    source: Any
    key: Any

    def __bool__(self) -> bool:
        _no_truth(self)

    def __getitem__(self, key: Any) -> "Wire":
        return Wire(self, key)


class Block(IOBase):
    """Maps an input to an output, for one example; blocks are put together into larger ones.

    A block has at most one parent, so an expression is always a tree; layers are what is shared.

    Args:
        children: Blocks inside, each anything that :func:`convert_to_block` takes.
        input_type: Type of the input, if it is known.
        output_type: Type of the output, if it is known.
        name: For messages and pictures.

    Raises:
        TypeError: If a child has a parent already.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Sum()).eval([1, 2, 3])
        tensor(6.)
    """

    # Numpy arrays on the left of ``>>`` must leave the operation to the block.
    __array_ufunc__ = None
    __iter__ = None
    # Left out of paths: what only holds others in order.
    _transparent = False

    def __init__(
        self,
        children: Sequence[Any] = (),
        input_type: Any = None,
        output_type: Any = None,
        name: Any = None,
    ) -> None:
        super().__init__(input_type, output_type, name)
        self._settled = False
        self._parent: Block | None = None
        self._declaration: IOBase | None = None
        self._children: list[Block] = []
        self._said: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        for child in children:
            self._adopt(convert_to_block(child))

    # Structure.

    @property
    def children(self) -> list["Block"]:
        """The blocks directly inside."""
        return list(self._children)

    @property
    def parent(self) -> "Block | None":
        """The block directly around, if there is one."""
        return self._parent

    def _adopt(self, child: "Block") -> None:
        if child._parent is not None:
            raise mismatch(
                TypeError,
                f"{child._label()}: already a child of {child._parent._label()}",
                "a block without a parent",
                repr(child),
                where=child._path(),
                hint="make a second block; share weights by using one layer in both",
            )
        child._parent = self
        child._listeners.append(self)
        self._children.append(child)

    def _settle(self, *said: Any, **said_by_name: Any) -> None:
        """Ends every constructor: keeps what was said, for repr, and starts inference."""
        self._settled = True
        self._said = (said, {k: v for k, v in said_by_name.items() if v is not None})
        propagate_types(self)

    def walk(self) -> Iterator["Block"]:
        """Lists the block and all blocks inside, parents before children."""
        left = [self]
        while left:
            block = left.pop()
            yield block
            left += reversed(block._children)

    def _path(self) -> str:
        parts: list[str] = []
        block = self
        while block._parent is not None:
            parts.append(block._parent._step_to(block))
            block = block._parent
        top = block._declaration._label() if block._declaration is not None else "Root"
        return top + "".join(reversed(parts))

    def _step_to(self, child: "Block") -> str:
        """How the path goes on from here to a child."""
        if child._transparent:
            return self._key_of(child)
        alike = [c for c in self._children if c._label() == child._label()]
        number = f"#{alike.index(child) + 1}" if len(alike) > 1 else ""
        return f"{self._key_of(child)}.{child._label()}{number}"

    def _key_of(self, child: "Block") -> str:
        """How a block with keys tells its children apart: ``['pair']``."""
        return ""

    # Putting together.

    def __bool__(self) -> bool:
        _no_truth(self)

    def __rshift__(self, other: Any) -> "Block":

        return Pipe(self, other)

    def __rrshift__(self, other: Any) -> "Block":

        return Pipe(other, self)

    def __getitem__(self, key: Any) -> Any:
        """Gives a wire from one item of the output; of a slice, inside a scope, a block."""
        if isinstance(key, slice):
            from pyg_dynbatch.blocks.indexing import GetItem

            return GetItem(key).reads(self)
        return Wire(self, key)

    def reads(self, *others: Any) -> "Block":
        """Wires inputs, inside ``with composition.scope():``.

        Args:
            *others: Blocks, wires ``block[i]``, ``composition.input``; several become a tuple.

        Returns:
            The block itself.

        Raises:
            AssertionError: Outside a scope.
        """
        from pyg_dynbatch.blocks.composition import current_composition

        composition = current_composition(f"{self._label()}.reads")
        composition.connect(others[0] if len(others) == 1 else tuple(others), self)
        return self

    # What every kind of block says about itself.

    def _told(self, wanted: ResultType) -> None:
        """Takes up what the block behind it in a pipe expects to be given."""
        self.set_output_type(wanted)

    def _check(self) -> None:
        """Refuses, when the model is compiled, what could only be known at the end."""

    def _emit(self, code: "Code", value: Any) -> Any:
        """Writes the lines that compute the output from the input; see :mod:`.code`."""
        raise NotImplementedError

    def _known(self, side: str) -> ResultType:
        """A type that must be known by now."""
        found = self._types[side]
        if found is None:
            raise mismatch(
                TypeError,
                f"{self._label()}: the {side} type cannot be inferred",
                f"a type from its neighbours, or block.set_{side}_type(...)",
                "nothing that says it",
                where=self._path(),
            )
        return found

    def _refuse(
        self, what: str, error: type[Exception] = TypeError, hint: str = "", **facts: Any
    ) -> NoReturn:
        raise mismatch(error, f"{self._label()}: {what}", where=self._path(), hint=hint, **facts)

    # Running.

    def eval(self, inp: Any, *, tolist: bool = False, inputs: Any = None, **options: Any) -> Any:
        """Evaluates one input, without keeping anything.

        Args:
            inp: The input: a Python object.
            tolist: Give numbers and lists instead of tensors.
            inputs: Rows from outside by tag, see :class:`InputRow`.
            **options: None; those of Fold are refused by name.

        Returns:
            The output, with tensors where the type has tensors; together with a dictionary of
            the values of each metric, if there is any.

        Raises:
            TypeError: For any other option.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> td.Vector(2).eval([1, 2], tolist=True)
            [1.0, 2.0]
        """
        from pyg_dynbatch.blocks.compiler import evaluate
        from pyg_dynbatch.blocks.left_out import left_out

        for name in options:
            unknown = f"Block.eval() got an unexpected keyword argument {name!r}"
            raise TypeError(left_out(f"Block.eval({name}=)") or unknown)
        return evaluate(self, inp, tolist=tolist, inputs=inputs)

    def max_depth(self, inp: Any) -> int:
        """Counts the longest chain of batched calls for an input; nothing is run.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> td.Map(td.Scalar()).max_depth([1, 2])
            0
        """
        from pyg_dynbatch.blocks.compiler import depth_for

        return depth_for(self, inp)

    def __repr__(self) -> str:
        """Reads like the call that makes it."""
        said, by_name = self._said
        named = {**by_name, **({"name": self._name} if self._name else {})}
        parts = [said_as(value) for value in said]
        parts += [f"{key}={said_as(value)}" for key, value in named.items()]
        return f"{type(self).__name__.lstrip('_')}({', '.join(parts)})"


def said_as(value: Any) -> str:
    """Writes an argument so that it can be read back where its names are known."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {said_as(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(said_as, value))}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(said_as, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.dtype):
        return repr(str(value).removeprefix("torch."))
    is_plain = callable(value) and not isinstance(value, IOBase | nn.Module)
    return getattr(value, "__name__", repr(value)) if is_plain else repr(value)


def convert_to_block(block_like: Any) -> Block:
    """Turns what stands for a block into one.

    Args:
        block_like: A block; a layer or ``nn.Module`` (becomes :class:`Function`); a tensor or
            numpy array (:class:`FromTensor`); a dict, list or tuple (:class:`Record`).

    Returns:
        The block.

    Raises:
        TypeError: If it is none of these.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> convert_to_block({"a": td.Scalar()})
        Record({'a': Scalar()})
    """
    if isinstance(block_like, Block):
        # Before the imports, which would make long pipes slow to wire.
        return block_like
    from pyg_dynbatch.blocks.functions import Function
    from pyg_dynbatch.blocks.records import Record
    from pyg_dynbatch.blocks.tensors import FromTensor

    if isinstance(block_like, nn.Module):
        return Function(block_like)
    if isinstance(block_like, torch.Tensor | np.ndarray):
        return FromTensor(block_like)
    if isinstance(block_like, dict | list | tuple) and not isinstance(block_like, Wire):
        return Record(block_like)
    raise mismatch(
        TypeError,
        "convert_to_block: cannot be turned into a block",
        "a block, layer, module, tensor, array, dict, list or tuple",
        repr(block_like),
        hint="td.Function(f) for a function on tensors, td.InputTransform(f) for one on the host",
    )


class _Pipe(Block):
    """Feeds each of two blocks or more with what the one before gives; see :func:`Pipe`."""

    _transparent = True

    def __init__(self, blocks: list[Block], name: Any) -> None:
        parts: list[Block] = []
        for block in blocks:
            is_pipe = isinstance(block, _Pipe) and block._name is None and block._parent is None
            parts += block._lend() if is_pipe else [block]  # type: ignore[attr-defined]
        super().__init__(parts, name=name)
        for block in blocks:
            block._parent = self
        self._settle(*parts)

    def _lend(self) -> list[Block]:
        """Gives its parts to a longer pipe; it can still be evaluated, but not be used again."""
        for part in self._children:
            part._parent = None
            # The longer pipe passes types on from now; this one asks again when it is compiled.
            part._listeners.remove(self)
        return self._children

    def _infer(self) -> None:
        if not self._children:
            return
        first, last = self._children[0], self._children[-1]
        if self.input_type is not None:
            first.set_input_type(self.input_type)
        for one, other in zip(self._children, self._children[1:], strict=False):
            given, wanted = one._types["output"], other._types["input"]
            if given is wanted:
                continue
            if given is None and wanted is not None:
                one._told(wanted)
                given = one._types["output"]
            if given is not None:
                other.set_input_type(given)
        if self.output_type is not None:
            last.set_output_type(self.output_type)
        if first.input_type is not None:
            self.set_input_type(first.input_type)
        if last.output_type is not None:
            self.set_output_type(last.output_type)

    def _emit(self, code: Code, value: Any) -> Any:
        from pyg_dynbatch.blocks.split_linear import split

        number = 0
        while number < len(self._children):
            found = split(code, self._children[number : number + 2], value)
            if found is not None:
                value = found
                number += 2
            else:
                value = code.emit(self._children[number], value)
                number += 1
        return value


def Pipe(*blocks: Any, name: Any = None) -> Block:  # noqa: N802 - stands among classes
    """Feeds each block with what the one before gives; ``a >> b`` makes it.

    Pipes inside and identities are dissolved; a pipe of nothing is an identity, of one block
    that block.

    Args:
        *blocks: What :func:`convert_to_block` takes.
        name: For messages and pictures.

    Returns:
        The pipe.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Pipe(td.InputTransform(len), td.Scalar()).eval("abc")
        tensor(3.)
    """
    from pyg_dynbatch.blocks.control import Identity

    found = [convert_to_block(block) for block in blocks]
    kept = [block for block in found if type(block) is not Identity] or found[:1]
    if not kept:
        return Identity(name=name)
    for number, block in enumerate(found):
        if type(block) is Identity and block is not kept[0]:
            # What an identity was told about its type, its neighbour must know.
            before = [b for b in found[:number] if b in kept]
            if before and block.input_type is not None:
                before[-1].set_output_type(block.input_type)
            elif not before and block.input_type is not None:
                kept[0].set_input_type(block.input_type)
    return kept[0] if len(kept) == 1 and name is None else _Pipe(kept, name)
