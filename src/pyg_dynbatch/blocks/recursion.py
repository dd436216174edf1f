"""Let a block be made of itself."""

from typing import Any, cast

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.complaint import Complaint
from pyg_dynbatch.blocks.result_types import PyObjectType, shown
from pyg_dynbatch.blocks.typed import IOBase, wake
from pyg_dynbatch.core.errors import mismatch


class ForwardDeclaration(IOBase):
    """Stands for a block that is defined later, in terms of itself.

    Args:
        input_type: Type of its input, where nothing else says it.
        output_type: Type of its output, where nothing else says it.
        name: For messages and pictures.
        memoize: Evaluate each host object once an example, however often it is reached: for
            acyclic graphs with shared parts, and for reading a first pass again in a second.
            Objects are told apart by identity.

    Raises:
        ValueError: If it is called or resolved after it was resolved; and, when an example is
            evaluated with ``memoize``, if an object contains itself.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> tree = td.ForwardDeclaration(td.PyObjectType(), td.TensorType(()))
        >>> pair = td.Map(tree()) >> td.Reduce(td.Function(torch.add))
        >>> tree.resolve_to(td.OneOf(lambda x: type(x) is list, {True: pair, False: td.Scalar()}))
        >>> tree.target.eval([[1, 2], 3])
        tensor(6.)
    """

    def __init__(
        self,
        input_type: Any = None,
        output_type: Any = None,
        name: Any = None,
        *,
        memoize: bool = False,
    ) -> None:
        super().__init__(input_type, output_type, name)
        self.memoize = memoize
        self.target: Block | None = None
        self._resolved = False

    def __call__(self) -> Block:
        """Makes a block that stands for the declared one."""
        if self._resolved:
            raise ValueError(
                mismatch(
                    f"{self._label()}: called after it was resolved",
                    expected="all calls before resolve_to",
                    got=f"resolved to {type(self.target).__name__}",
                )
            )
        return _Reference(self)

    def resolve_to(self, target_block: Any) -> None:
        """Says what the declaration stands for.

        Args:
            target_block: What :func:`convert_to_block` takes.

        Raises:
            ValueError: If it was said before.
            TypeError: If its types differ from the declared ones.
        """
        if self._resolved:
            raise ValueError(
                mismatch(
                    f"{self._label()}: resolved twice",
                    expected="one call of resolve_to",
                    got=f"resolved to {type(self.target).__name__}",
                )
            )
        self._resolved = True
        self.target = convert_to_block(target_block)
        self.target._declaration = self
        self.target._listeners.append(self)
        self._listeners.append(self.target)
        wake(self)

    def _infer(self) -> None:
        if self.target is not None:
            self.set_io_types(self.target)
            self.target.set_io_types(self)

    def _path(self) -> str:
        return self._label()

    def __repr__(self) -> str:
        """Reads like the call that makes it, with the types as they are known by now."""
        name = f", name={self._name!r}" if self._name else ""
        memoize = ", memoize=True" if self.memoize else ""
        return f"ForwardDeclaration({self.input_type!r}, {self.output_type!r}{name}{memoize})"


class _Reference(Block):
    """Stands for the block that a forward declaration will be resolved to."""

    def __init__(self, declaration: ForwardDeclaration) -> None:
        super().__init__(name=declaration.name)
        self._of = declaration
        declaration._listeners.append(self)
        self._settle()

    @property
    def target(self) -> Block | None:
        """What it stands for."""
        return self._of.target

    def _infer(self) -> None:
        self.set_io_types(self._of)
        self._of.set_io_types(self)

    def _check(self) -> None:
        if self._of.target is None:
            self._refuse(
                "the forward declaration was never resolved",
                expected="declaration.resolve_to(block)",
                got=repr(self._of),
            )
        if self._of.memoize and self.input_type != PyObjectType():
            self._refuse(
                "memoize works on host objects only",
                expected="an input of PyObjectType()",
                got=shown(self.input_type),
            )

    def _emit(self, code: Code, value: Any) -> Any:
        # That the declaration is resolved was checked before.
        target = cast("Block", self._of.target)
        if not self._of.memoize:
            return code.call(target, value)
        memo = code.model.memo_of(self._of)
        found, result = code.fresh(), code.new(self._known("output"))
        code.line(f"{found} = {memo}.get(id({value}))")
        with code.inside(f"if {found} is None:"):
            code.line(f"{memo}[id({value})] = False")
            called = code.call(target, value)
            # The object is kept, so that its identity is not given to another one.
            code.line(f"{found} = {memo}[id({value})] = ({packed(called)}, {value})")
        with code.inside(f"elif {found} is False:"):
            code.line(f"{code.model.name_of(_complain_about_cycle)}({self._label()!r}, {value})")
        if result != ():
            code.line(f"{packed(result)} = {found}[0]")
        return result

    def __repr__(self) -> str:
        """Reads like the call that makes it, where the declaration has its name."""
        return f"{self._of.name or 'declaration'}()"


def _complain_about_cycle(label: str, value: Any) -> None:
    raise Complaint(
        ValueError,
        f"{label}: an object contains itself",
        expected="a tree or an acyclic graph",
        got=type(value).__name__,
    )
