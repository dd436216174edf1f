"""Stacks that grow and shrink by decisions: rows written once, and pointers to them.

While a model is recorded, a stack is a pointer, an ordinary value of an example. All rows of one
type that were pushed during a run are in one :class:`_Arena`, which knows the row below each. Rows
are never changed, so that old stacks stay as they were, and nothing is copied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, TreeSpec, register_pytree_node

from pyg_dynbatch.autobatch.forms import Examined
from pyg_dynbatch.autobatch.lazy import ACTIVE, Lazy, TensorOrLazy
from pyg_dynbatch.autobatch.nesting import NODES, flattened, type_of, unflattened
from pyg_dynbatch.autobatch.programs import own_form
from pyg_dynbatch.autobatch.ragged import RaggedValues, as_row, record_own, rows
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.signatures import Own, SignatureTable, Spec
from pyg_dynbatch.core.engine import current_run
from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.row_buffer import Read, RowBuffer, Rows, Write, exchange, new_token
from pyg_dynbatch.core.types import RaggedRows, TensorType


class Stack:
    """A stack of tensors of one shape and dtype, or of structures of them, that never changes.

    ``push`` and ``pop`` return new stacks, so that a stack can be part of the state of
    :func:`while_loop`, and several stacks can share what is below. It works alone and while a
    model is recorded, where each operation runs on the stacks of many examples at once. Nothing is
    copied, and gradients flow back to what was pushed.

    Args:
        like: A value with the structure, shapes and dtypes of all values; its content is not used.

    Raises:
        TypeError: If ``like`` or a value that is pushed is not a structure of tensors, or differs
            in structure, shape or dtype.
        IndexError: If a stack has fewer values than are read. While a model is recorded, this is
            found when the calls run.

    Reference:
        Bowman et al. (2016), arXiv:1603.06021, section 3.2 (thin stacks). Differs: rows that
        different stacks share are stored once, so a stack can be kept while others grow from it.

    Example:
        >>> stack = Stack(torch.tensor(0.0)).push(torch.tensor(1.0)).push(torch.tensor(2.0))
        >>> value, below = stack.pop()
        >>> value, below.top, int(below.size), int(stack.size)
        (tensor(2.), tensor(1.), 1, 2)
    """

    __slots__ = ("_type", "_top")

    def __init__(self, like: object) -> None:
        leaves, structure = flattened(like)
        types = tuple(row_type for row_type in map(type_of, leaves) if row_type)
        if not leaves or len(types) < len(leaves):
            got = ", ".join(map(describe_value, leaves)) or "an empty structure"
            problem = "autobatch.Stack: not a tensor"
            hint = "such as Stack(torch.zeros(3))"
            expected = "a tensor, or a structure of tensors, like those on the stack"
            raise mismatch(TypeError, problem, expected, got, where=ACTIVE.where(), hint=hint)
        stack_type = StackType(types, structure, leaves[0].device)
        if len(_KNOWN_TYPES) > 1000:
            _KNOWN_TYPES.clear()
        self._type = _KNOWN_TYPES.setdefault(stack_type, stack_type)
        self._top: Node | Lazy = _EMPTY

    @classmethod
    def of(cls, values: Sequence[object] | TensorOrLazy) -> "Stack":
        """Make a stack of values; the last one is the top.

        Args:
            values: At least one value, all alike; a tensor stands for its rows.

        Example:
            >>> Stack.of(torch.eye(2)).top
            tensor([0., 1.])
        """
        listed = rows(values) if isinstance(values, Tensor | Lazy) else [*values]
        if not listed:
            problem = "autobatch.Stack.of: there are no values"
            where = ACTIVE.where()
            hint = "Stack(like) is an empty stack"
            raise mismatch(ValueError, problem, "at least one value", 0, where=where, hint=hint)
        stack = cls(listed[0])
        if (session := ACTIVE.session_for("it uses a Stack")) is None:
            for value in listed:
                stack = stack.push(value)
            return stack
        arguments = list[RaggedValues]()
        for column in zip(*map(stack._leaves, listed), strict=True):
            lazy_values = [as_row(session, leaf) for leaf in column]
            arguments.append((lazy_values, lazy_values[0]._kind))
        key = ("stack", stack._type)
        return stack._type(record_own(session, key, stack._making(_PushAll), arguments)[0])

    def push(self, value: object) -> "Stack":
        """Return a stack with one more value on top."""
        leaves = self._leaves(value)
        if (session := ACTIVE.session_for("it uses a Stack")) is None:
            return self._type(Node(leaves, self._node()))
        pointer = self._pointer(session)
        arguments = [pointer, *(as_row(session, leaf) for leaf in leaves)]
        key = ("push", self._type)
        return self._type(record_own(session, key, self._making(_Push), arguments)[0])

    def pop(self) -> tuple[Any, "Stack"]:
        """Return the top, and a stack without it."""
        return self.top, self._below(1)

    @property
    def top(self) -> Any:
        """The value that was pushed last."""
        if (session := ACTIVE.session_for("it uses a Stack")) is None:
            node, _ = self._top_and_below()
            return unflattened(node.leaves, self._type.structure)
        key = ("top", self._type)
        leaves = record_own(session, key, self._making(_Top), [self._pointer(session)])
        return unflattened(leaves, self._type.structure)

    def peek(self, depth: int) -> Any:
        """Return a value below the top: ``peek(0)`` is the top, ``peek(1)`` the one below it."""
        if not isinstance(depth, int) or depth < 0:
            problem = "autobatch.Stack.peek: not a depth"
            expected = "0 or more"
            raise mismatch(TypeError, problem, expected, repr(depth), where=ACTIVE.where())
        return self._below(depth).top

    @property
    def size(self) -> Any:
        """Number of values, an int64 tensor ``[]``."""
        if (session := ACTIVE.session_for("it uses a Stack")) is None:
            return torch.tensor(self._node().size, device=self._type.device)
        key = ("size", self._type)
        return record_own(session, key, self._making(_Size), [self._pointer(session)])[0]

    def _below(self, depth: int) -> "Stack":
        stack = self
        for _ in range(depth):
            if (session := ACTIVE.session_for("it uses a Stack")) is None:
                _, below = stack._top_and_below()
                stack = stack._type(below)
            else:
                key = ("below", stack._type)
                pointer = stack._pointer(session)
                (below_pointer,) = record_own(session, key, stack._making(_Below), [pointer])
                stack = stack._type(below_pointer)
        return stack

    def _making(self, operation_class: "type[_OnStacks]") -> "Callable[[], _OnStacks]":
        """Return what makes an operation of these stacks."""
        return lambda: operation_class(self._type.types)

    def _leaves(self, value: object) -> list[Any]:
        """Check a value, and list its tensors."""
        leaves, structure = flattened(value)
        if structure is self._type.structure and all(map(_fits, leaves, self._type.types)):
            return leaves
        types = tuple(map(type_of, leaves))
        if structure != self._type.structure or types != self._type.types:
            problem = "autobatch.Stack: a value that is pushed is not like the others"
            if None in types:
                got = ", ".join(map(describe_value, leaves))
            else:
                got = ", ".join(map(str, types))
            if structure != self._type.structure:
                got += f" in {structure}"
            expected = ", ".join(map(str, self._type.types))
            raise mismatch(TypeError, problem, expected, got, where=ACTIVE.where())
        return leaves

    def _node(self) -> "Node":
        if type(self._top) is Lazy:
            self._top.item()  # which raises the error for a value of an earlier call
        return self._top  # type: ignore[return-value]

    def _top_and_below(self) -> "tuple[Node, Node]":
        node = self._node()
        if node.below is None:
            raise underflow(ACTIVE.where())
        return node, node.below

    def _pointer(self, session: Session) -> Lazy:
        """Return the pointer; push what is on a stack that was made outside the model."""
        if type(self._top) is Lazy:
            return as_row(session, self._top)
        values = list[object]()
        node = self._top
        while node.below is not None:
            values.append(unflattened(node.leaves, self._type.structure))
            node = node.below
        if values:
            return Stack.of(values[::-1])._pointer(session)
        return as_row(session, torch.tensor(-1, device=session.device))

    def __repr__(self) -> str:
        """Name the type of the values, and how many there are, if that is known."""
        size = "" if type(self._top) is Lazy else f", size {self._top.size}"
        return f"Stack({', '.join(map(str, self._type.types))}{size})"


def _fits(value: object, row_type: TensorType) -> bool:
    if type(value) is Lazy:
        return type_of(value) == row_type
    has_dtype = getattr(value, "dtype", None) == row_type.dtype
    return has_dtype and getattr(value, "shape", None) == row_type.shape


POINTER = TensorType((), torch.int64)
Types = tuple[TensorType, ...]


class Node:
    """A value on a stack that is not recorded, and what is below it."""

    __slots__ = ("below", "leaves", "size")

    def __init__(self, leaves: Sequence[object], below: "Node | None") -> None:
        self.leaves = leaves
        self.below = below
        self.size: int = 0 if below is None else below.size + 1


_EMPTY = Node((), None)


def underflow(where: str = "") -> IndexError:
    """Create the error for a read below the last value of a stack."""
    problem = "autobatch.Stack: a value is read from an empty stack"
    hint = "stack.size says how many there are; or push what stands below all others"
    return mismatch(IndexError, problem, "at least one value", "none", where=where, hint=hint)


class StackType:
    """What stacks of equal values have in common; called with a top, it makes a stack."""

    def __init__(self, types: Types, structure: TreeSpec, device: torch.device) -> None:
        self.types = types
        self.structure = structure
        self.device = device
        self._hash = hash((types, device))

    def __call__(self, top: Node | Lazy) -> Stack:
        """Return the stack with a top."""
        stack = object.__new__(Stack)
        stack._type = self
        stack._top = top
        return stack

    @staticmethod
    def leaf_of(stack: Stack) -> Node | Lazy:
        """Return the top; while a model is recorded, the pointer to it."""
        session = ACTIVE.session
        return stack._top if session is None else stack._pointer(session)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StackType) and self._facts() == other._facts()

    def __reduce__(self) -> tuple[object, ...]:
        return StackType, self._facts()

    def _facts(self) -> tuple[Types, TreeSpec, torch.device]:
        return self.types, self.structure, self.device


# One of all that are equal, which are then found sooner.
_KNOWN_TYPES: dict[StackType, StackType] = {}


NODES[Stack] = attrgetter("_type")  # a stack is a node with one leaf: its top
_POINTER = GetAttrKey("pointer")
register_pytree_node(
    Stack,
    lambda stack: ([StackType.leaf_of(stack)], stack._type),
    lambda leaves, stack_type: stack_type(*leaves),
    flatten_with_keys_fn=lambda stack: ([(_POINTER, StackType.leaf_of(stack))], stack._type),
)


class _Arena:
    """All rows of one type that were pushed during one run; -1 points to the empty stack."""

    def __init__(self, types: Types, device: torch.device) -> None:
        self.rows = 0
        self.buffer = RowBuffer(256)
        no_rows = tuple(
            torch.empty((0, *each.shape), dtype=each.dtype, device=device) for each in types
        )
        self.buffer.allocate(no_rows, tuple(each.dtype for each in types))
        # Of each row the one below it, and the size of the stack. The last entry, which the empty
        # stack finds, is never used.
        self.below = torch.zeros(257, dtype=torch.int64, device=device)
        self.sizes = torch.zeros(257, dtype=torch.int64, device=device)
        # Rows to be written before the next read: one call of autograd does both.
        self.token = new_token(no_rows[0])
        self.pending = list[Write]()

    def push(self, below: Tensor, rows: Rows, sizes: Tensor) -> Tensor:
        """Add rows; return pointers to them."""
        first = self.rows
        self.rows = self.rows + below.size(0)
        self.buffer.grow(self.rows)
        if (room := self.buffer.parts[0].size(0)) >= self.below.size(0):
            more = self.below.new_zeros(room + 1 - self.below.size(0))
            self.below = torch.cat([self.below, more])
            self.sizes = torch.cat([self.sizes, more])
        self.pending.append(Write(self.buffer, first, rows))
        self.below[first : self.rows] = below
        self.sizes[first : self.rows] = sizes
        return torch.arange(first, self.rows, device=below.device)

    def read(self, pointers: Sequence[Tensor]) -> Rows:
        """Return the rows at pointers, those of several vectors in one gather."""
        joined = torch.cat(list(pointers)) if len(pointers) > 1 else pointers[0]
        with _checked(joined):
            read = Read(self.buffer, joined, len(pointers))
            self.token, rows_read = exchange(self.token, self.pending, [read])
        self.pending = []
        return tuple(part for rows in rows_read for part in rows)


@contextmanager
def _checked(pointers: Tensor) -> Iterator[None]:
    """Raise an error for the empty stack. On a CPU, indexing finds it."""
    if pointers.is_cuda and bool((pointers < 0).any()):
        raise underflow()
    try:
        yield
    except IndexError as error:
        raise underflow() from error


@dataclass(frozen=True)
class _OnStacks(Own):
    """An operation of stacks, on many of them."""

    types: Types

    @property
    def results(self) -> Types:
        """Types of the results."""
        return (POINTER,)

    def run(self, arena: _Arena, *arguments: Any) -> Tensor | Rows:
        """Run the operation on stacked rows."""
        raise NotImplementedError

    def examined(self, table: SignatureTable, spec: Spec) -> Examined:
        """Return the form on stacked rows."""
        types = self.types
        run = self.run
        name = f"stacks of {self.types}"

        def form(*arguments: Tensor | RaggedRows) -> Tensor | Rows:
            shared = current_run.get().shared  # type: ignore[union-attr]
            if name not in shared:
                shared[name] = _Arena(types, table.engine.device)
            return run(shared[name], *arguments)

        return own_form(form, self.results)


class _Push(_OnStacks):
    __name__ = "push"

    def run(self, arena: _Arena, below: Tensor, *rows: Tensor) -> Tensor:
        return arena.push(below, rows, arena.sizes[below] + 1)


class _PushAll(_OnStacks):
    """Makes a stack of the values of a list, the last one on top; ``columns`` hold many lists."""

    __name__ = "stack"

    def run(self, arena: _Arena, *columns: RaggedRows) -> Tensor:
        list_of_row = columns[0].segment_ids
        ends = torch.bincount(list_of_row, minlength=columns[0].num_calls).cumsum(0)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        row = torch.arange(list_of_row.numel(), device=list_of_row.device)
        place_in_list = row - begins[list_of_row]

        # In the arena, the rows of a list stand one after another.
        pointer_below = arena.rows + row - 1
        below = torch.where(place_in_list > 0, pointer_below, -1)
        rows_pushed = tuple(column.rows for column in columns)
        pointers = arena.push(below, rows_pushed, sizes=place_in_list + 1)
        return pointers[ends - 1]


@dataclass(frozen=True)
class _Top(_OnStacks):
    calls: int = 1
    __name__ = "top"

    @property
    def results(self) -> Types:
        return self.types * self.calls

    def joined(self, calls: int) -> "_Top":
        return _Top(self.types, calls)

    def run(self, arena: _Arena, *pointers: Tensor) -> Tensor | Rows:
        rows = arena.read(pointers)
        return rows if len(rows) > 1 else rows[0]


class _Below(_OnStacks):
    __name__ = "below"

    def run(self, arena: _Arena, pointers: Tensor) -> Tensor:
        with _checked(pointers):
            return arena.below.index_select(0, pointers)


class _Size(_OnStacks):
    __name__ = "size"

    def run(self, arena: _Arena, pointers: Tensor) -> Tensor:
        return arena.sizes[pointers]
