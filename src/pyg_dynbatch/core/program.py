"""Programs: lists of calls on rows.

The values of a program are numbered: its operands, then the results of each call. With operands
0 and 1, ``a * b + a`` has the product as value 2 and the sum as value 3::

    Program(num_operands=2, calls=(Call(MUL, (0, 1)), Call(ADD, (2, 0))), outputs=(3,))

A step of a schedule runs one program on the rows of many calls at once, and so does each iteration
of a loop and each branch of a decision.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

BatchedCall = Callable[[Sequence[Any], int], Sequence[Any]]
"""Makes one call: given its arguments and the number of rows, returns all results."""


class Call(NamedTuple):
    """One call of a program."""

    operation: Any  # the number of a signature, a signature, or what makes the call
    arguments: tuple[int, ...]  # numbers of values


class Program(NamedTuple):
    """Calls in order, and the numbers of the values that they return."""

    num_operands: int
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]

    @property
    def operations(self) -> list[Any]:
        """The operation of each call."""
        return [call.operation for call in self.calls]

    @property
    def operands_read(self) -> list[int]:
        """The operands on which the results depend, in ascending order."""
        read = set(self.outputs)
        for call in self.calls:
            read.update(call.arguments)
        return sorted(value for value in read if value < self.num_operands)

    def run(
        self, call_of: Callable[[Any], BatchedCall], operands: Sequence[Any], size: int
    ) -> list[Any]:
        """Make all calls.

        Args:
            call_of: Returns what makes the calls of an operation.
            operands: One per operand: rows, or whatever the calls take.
            size: Number of rows.
        """
        values = list(operands)
        for operation, arguments in self.calls:
            call = call_of(operation)
            values += call([values[number] for number in arguments], size)
        return [values[number] for number in self.outputs]


@lru_cache(maxsize=4096)
def program_of_call(operation: Any, num_arguments: int, num_results: int) -> Program:
    """Return the program that makes one call of its operands and returns all results."""
    call = Call(operation, tuple(range(num_arguments)))
    return Program(num_arguments, (call,), tuple(range(num_arguments, num_arguments + num_results)))
