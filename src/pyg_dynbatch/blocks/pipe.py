"""Feed each block with what the one before gives."""

from typing import Any

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code


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
