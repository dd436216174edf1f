"""Decisions as tensors: loops and branches that run on the rows of the examples that take them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from pyg_dynbatch.autobatch.lazy import ACTIVE
from pyg_dynbatch.autobatch.programs import (
    Body,
    Choice,
    Loop,
    Operands,
    endless,
    flattened,
    program_of,
    type_of,
    unflattened,
)
from pyg_dynbatch.autobatch.ragged import as_row, record_own
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.stack import Node
from pyg_dynbatch.core.errors import checked_count, describe_value, mismatch
from pyg_dynbatch.core.types import TensorType


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    *,
    max_iterations: int = 10_000,
) -> tuple[Any, ...]:
    """Repeat a function of a state while a condition holds, each example as often as it needs.

    Equal to ``while cond_fn(*state): state = body_fn(*state)``. While a model is recorded, both
    functions are called once per call of ``while_loop``, and recorded; the loops of all examples
    then run together. Each iteration runs on the examples that go on, so the work is the sum of
    all iterations. Loops and branches may be inside of each other.

    Args:
        cond_fn: Called with the state; returns one boolean tensor.
        body_fn: Called with the state; returns the next one, of equal structure, shapes and
            dtypes. Both may use other tensors of the example, and modules and parameters of the
            model, but may not read values (``item``, ``if x > 0``) or emit them.
        carried_inputs: The first state: a tuple or list of tensors, stacks (:class:`Stack`), or
            structures of them.
        max_iterations: Number of iterations after which an error is raised.

    Returns:
        The last state, a tuple.

    Raises:
        TypeError: If the state holds anything but tensors, changes in structure, shape or dtype,
            or if the condition is not one boolean.
        RuntimeError: If a loop is not finished after ``max_iterations``, or if a function reads a
            value.

    Reference:
        ``torch.while_loop``, whose arguments these are, for a single example; Radul et al. (2019),
        arXiv:1910.11141 (local static autobatching, of which this is the part for loops).

    Example:
        >>> halved = lambda x, steps: (x / 2, steps + 1)
        >>> x = torch.tensor(5.0)
        >>> while_loop(lambda x, steps: x > 1, halved, (x, torch.tensor(0)))
        (tensor(0.6250), tensor(3))
    """
    owner = "autobatch.while_loop"
    session = ACTIVE.session_for("it has a loop")
    most = max_iterations
    if type(most) is not int or most < 1:
        most = checked_count(f"{owner}: max_iterations", most)
    if not isinstance(carried_inputs, tuple | list) or not carried_inputs:
        what = f"{owner}: the state is not a tuple"
        wanted = "a tuple of tensors, such as (x, y)"
        got = describe_value(carried_inputs)
        hint = "(x,) for one tensor"
        raise mismatch(TypeError, what, wanted, got, where=ACTIVE.where(), hint=hint)
    state: tuple[Any, ...] = tuple(carried_inputs)
    leaves, shape = _read(state, f"{owner}: the state holds")
    structure = shape.structure
    if session is None:
        for _ in range(most):
            if not _condition(cond_fn(*state)):
                return state
            state = unflattened(_next_state(body_fn(*state), shape), structure)
        if _condition(cond_fn(*state)):
            raise endless(most, 1)
        return state
    operands = Operands(session, [as_row(session, leaf) for leaf in leaves], len(leaves))

    def arguments(body: Body) -> Sequence[Any]:
        return unflattened([body.operand(n) for n in range(len(leaves))], structure)

    bodies = [
        Body.of(operands, f"the {name} of while_loop", function, arguments, listed)
        for name, function, listed in (
            ("condition", cond_fn, lambda found: [_condition(found)]),
            ("body", body_fn, lambda found: _next_state(found, shape)),
        )
    ]
    key = (while_loop, len(leaves), most, *_keys(bodies))

    def make() -> Loop:
        condition, body = (program_of(*found) for found in bodies)
        return Loop(condition, body, len(leaves), most)

    found = record_own(session, key, make, operands.values)
    return unflattened(found, structure)


def cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    """Call one of two functions, each example the one that it chooses.

    Equal to ``true_fn(*operands) if pred else false_fn(*operands)``. While a model is recorded,
    both are called once, and recorded; each then runs on the examples that chose it.

    Args:
        pred: One boolean tensor; with a Python boolean only one function is called.
        true_fn: Returns a tensor, a :class:`Stack`, or a structure of them.
        false_fn: Returns the same structure, with equal shapes and dtypes. Both may use other
            tensors of the example, and modules and parameters of the model, but may not read
            values or emit them.
        operands: Arguments of both.

    Returns:
        What the function returns.

    Raises:
        TypeError: If ``pred`` is not one boolean, or the functions return different structures,
            shapes or dtypes, or anything but tensors.
        RuntimeError: If a function reads a value.

    Reference:
        ``torch.cond``, whose arguments these are, for a single example.

    Example:
        >>> x = torch.tensor(-3.0)
        >>> cond(x > 0, lambda x: x.sqrt(), lambda x: 2 * x, (x,))
        tensor(-6.)
    """
    session = ACTIVE.session_for("it has a branch")
    owner = "autobatch.cond"
    if isinstance(pred, bool):
        return (true_fn if pred else false_fn)(*operands)
    chosen = _boolean(pred, f"{owner}: the condition")
    branches = {"true_fn": true_fn, "false_fn": false_fn}
    if session is None:
        name = "true_fn" if chosen else "false_fn"
        result = branches[name](*operands)
        _result(result, f"{owner}: {name}")
        return result
    return _choose(session, chosen, branches, operands)


def _choose(
    session: Session, chosen: Any, branches: dict[str, Any], operands: Sequence[Any]
) -> Any:
    """Record both branches, and the choice."""
    owner = "autobatch.cond"
    leaves, structure = flattened(tuple(operands))
    tensors = [n for n, leaf in enumerate(leaves) if type_of(leaf)]
    given = Operands(session, [as_row(session, leaves[n]) for n in tensors])
    results = list[_Shape]()

    def arguments(body: Body) -> Sequence[Any]:
        filled = [*leaves]
        for position, number in enumerate(tensors):
            filled[number] = body.operand(position)
        return unflattened(filled, structure)

    def listed(found: Any) -> Sequence[Any]:
        name = [*branches][len(results)]
        flat, shape = _result(found, f"{owner}: {name}")
        results.append(shape)
        if results[-1] != results[0]:
            what = f"{owner}: true_fn and false_fn return different structures, shapes or dtypes"
            hint = "torch.zeros(...) or .to(dtype) in the branch that has nothing to say"
            facts = (str(results[0]), str(results[-1]))
            raise mismatch(TypeError, what, *facts, where=session.where(), hint=hint)
        return flat

    bodies = [
        Body.of(given, f"{name} of cond", function, arguments, listed)
        for name, function in branches.items()
    ]

    def make() -> Choice:
        if_true, if_false = (program_of(*found) for found in bodies)
        types = tuple(filter(None, results[0].types))
        return Choice(if_true, if_false, types)

    choice = as_row(session, chosen)
    found = record_own(session, (_choose, *_keys(bodies)), make, [choice, *given.values])
    return unflattened(found, results[0].structure)


def _keys(bodies: Sequence[tuple[Body, tuple[int, ...]]]) -> list[Any]:
    return [part for body, outputs in bodies for part in (tuple(body.code), outputs)]


class _Shape(NamedTuple):
    """The structure of a value, and the type of each tensor in it; ``None`` for stacks."""

    structure: Any
    types: tuple[TensorType | None, ...]

    def __str__(self) -> str:
        types = ", ".join(map(str, self.types)) or "nothing"
        return types if self.structure.is_leaf() else f"{types} in {self.structure}"


def _read(value: Any, what: str) -> tuple[list[Any], _Shape]:
    """List the tensors in a value; raise an error if it holds anything but those and stacks."""
    leaves, structure = flattened(value)
    types = list[TensorType | None]()
    for number, leaf in enumerate(leaves):
        types.append(type_of(leaf))
        if types[-1] is None and type(leaf) is not Node:
            got = describe_value(leaf)
            place = _place(value, number)
            what = f"{what} something else than tensors"
            wanted = "tensors, stacks, and tuples, lists or dicts of them"
            got = f"{got}{place}"
            hint = "a tensor, such as torch.tensor(0.0)"
            raise mismatch(TypeError, what, wanted, got, where=ACTIVE.where(), hint=hint)
    return leaves, _Shape(structure, tuple(types))


def _place(value: Any, leaf: int) -> str:
    """Say where a leaf is, by its number."""
    path = tree_flatten_with_path(value)[0][leaf][0]
    return f" at {keystr(path)}" if path else ""


def _boolean(value: Any, what: str) -> Any:
    """Check that a value is one boolean; return it."""
    row_type = type_of(value)
    if row_type is None or row_type.dtype != torch.bool or row_type.shape not in ((), (1,)):
        got = row_type or describe_value(value)
        what = f"{what} is not a boolean"
        expected = "a boolean tensor of shape []"
        hint = "such as x.sum() > 0"
        raise mismatch(TypeError, what, expected, got, where=ACTIVE.where(), hint=hint)
    return value


def _condition(value: Any) -> Any:
    return _boolean(value, "autobatch.while_loop: the condition")


def _result(value: Any, what: str) -> tuple[list[Any], _Shape]:
    leaves, shape = _read(value, f"{what} returns")
    if not leaves:
        raise mismatch(TypeError, f"{what} returns no tensor", "one, or more", where=ACTIVE.where())
    return leaves, shape


def _next_state(found: Any, wanted: _Shape) -> list[Any]:
    """Check that a state is like the first one; list its tensors."""
    owner = "autobatch.while_loop"
    hint = "return a tuple, such as (x,)"
    what = f"{owner}: the body does not return a state like that which it is given"
    found = tuple(found) if isinstance(found, list) else found
    leaves, got = _read(found, f"{owner}: the body returns")
    if got.structure != wanted.structure:
        facts = (wanted.structure, got.structure)
        raise mismatch(TypeError, what, *facts, where=ACTIVE.where(), hint=hint)
    for number, (before, now) in enumerate(zip(wanted.types, got.types, strict=True)):
        if before is not None and now is not None and now != before:
            hint = "an autobatch.Stack for what grows"
            if now.dtype != before.dtype:
                hint = f".to({before.dtype}) in the body; or .to({now.dtype}) before"
            facts = (before, f"{now}{_place(found, number)}")
            raise mismatch(TypeError, what, *facts, where=ACTIVE.where(), hint=hint)
    return leaves
