"""Decisions as tensors: loops and branches that run on the rows of the examples that take them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path

from pyg_dynbatch.autobatch.lazy import ACTIVE, TensorOrLazy
from pyg_dynbatch.autobatch.nesting import flattened, type_of, unflattened
from pyg_dynbatch.autobatch.programs import Body, Choice, Loop, Operands, endless, program_of
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
        problem = f"{owner}: the state is not a tuple"
        expected = "a tuple of tensors, such as (x, y)"
        got = describe_value(carried_inputs)
        hint = "(x,) for one tensor"
        raise mismatch(TypeError, problem, expected, got, where=ACTIVE.where(), hint=hint)
    state: tuple[Any, ...] = tuple(carried_inputs)
    leaves, shape = _read(state, f"{owner}: the state holds")
    if session is None:
        for _ in range(most):
            if not _condition(cond_fn(*state)):
                return state
            state = unflattened(_next_state(body_fn(*state), shape), shape.structure)
        if _condition(cond_fn(*state)):
            raise endless(most, 1)
        return state
    return _loop(session, cond_fn, body_fn, leaves, shape, most)


def cond(
    pred: TensorOrLazy | bool,
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
    if isinstance(pred, bool):
        return (true_fn if pred else false_fn)(*operands)
    choice = _boolean(pred, "autobatch.cond: the condition")
    if session is not None:
        return _choose(session, choice, true_fn, false_fn, operands)
    result = (true_fn if choice else false_fn)(*operands)
    _result(result, f"autobatch.cond: {'true_fn' if choice else 'false_fn'}")
    return result


def _loop(
    session: Session,
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    leaves: Sequence[TensorOrLazy],
    shape: "_Shape",
    most: int,
) -> tuple[Any, ...]:
    """Record the condition and the body, and the loop."""
    size = len(leaves)
    operands = Operands(session, [as_row(session, leaf) for leaf in leaves], size)

    def arguments(body: Body) -> Sequence[object]:
        return unflattened([body.operand(number) for number in range(size)], shape.structure)

    def next_state(result: object) -> Sequence[TensorOrLazy]:
        return _next_state(result, shape)

    condition, condition_outputs = Body.of(
        operands,
        "the condition of while_loop",
        cond_fn,
        arguments,
        lambda result: [_condition(result)],
    )
    body, body_outputs = Body.of(operands, "the body of while_loop", body_fn, arguments, next_state)
    recorded = (tuple(condition.code), condition_outputs, tuple(body.code), body_outputs)
    key = (while_loop, size, most, *recorded)

    def make() -> Loop:
        return Loop(
            condition=program_of(condition, condition_outputs),
            body=program_of(body, body_outputs),
            width=size,
            most=most,
        )

    results = record_own(session, key, make, operands.values)
    return unflattened(results, shape.structure)


def _choose(
    session: Session,
    choice: TensorOrLazy,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[object],
) -> Any:
    """Record both branches, and the choice."""
    owner = "autobatch.cond"
    leaves, structure = flattened(tuple(operands))
    places = [place for place, leaf in enumerate(leaves) if type_of(leaf)]  # of tensors
    rows = Operands(session, [as_row(session, leaves[place]) for place in places])
    shapes = list[_Shape]()

    def arguments(body: Body) -> Sequence[object]:
        filled = [*leaves]
        for position, place in enumerate(places):
            filled[place] = body.operand(position)
        return unflattened(filled, structure)

    def tensors_in(result: object) -> Sequence[TensorOrLazy]:
        name = "false_fn" if shapes else "true_fn"
        tensors, shape = _result(result, f"{owner}: {name}")
        shapes.append(shape)
        if shape != shapes[0]:
            problem = f"{owner}: true_fn and false_fn return different structures, shapes or dtypes"
            hint = "torch.zeros(...) or .to(dtype) in the branch that has nothing to say"
            expected = str(shapes[0])
            raise mismatch(
                TypeError, problem, expected, str(shape), where=session.where(), hint=hint
            )
        return tensors

    if_true, true_outputs = Body.of(rows, "true_fn of cond", true_fn, arguments, tensors_in)
    if_false, false_outputs = Body.of(rows, "false_fn of cond", false_fn, arguments, tensors_in)
    key = (_choose, tuple(if_true.code), true_outputs, tuple(if_false.code), false_outputs)

    def make() -> Choice:
        types = tuple(filter(None, shapes[0].types))
        return Choice(
            if_true=program_of(if_true, true_outputs),
            if_false=program_of(if_false, false_outputs),
            types=types,
        )

    results = record_own(session, key, make, [as_row(session, choice), *rows.values])
    return unflattened(results, shapes[0].structure)


class _Shape(NamedTuple):
    """The structure of a value, and the type of each tensor in it; ``None`` for stacks."""

    structure: TreeSpec
    types: tuple[TensorType | None, ...]

    def __str__(self) -> str:
        types = ", ".join(map(str, self.types)) or "nothing"
        return types if self.structure.is_leaf() else f"{types} in {self.structure}"


def _read(value: object, subject: str) -> tuple[list[Any], _Shape]:
    """List the tensors in a value; raise an error if it holds anything but those and stacks.

    The subject and the verb of the message are given, such as "the state holds".
    """
    leaves, structure = flattened(value)
    types = list[TensorType | None]()
    for number, leaf in enumerate(leaves):
        row_type = type_of(leaf)
        types.append(row_type)
        if row_type is None and type(leaf) is not Node:
            problem = f"{subject} something else than tensors"
            expected = "tensors, stacks, and tuples, lists or dicts of them"
            got = f"{describe_value(leaf)}{_place(value, number)}"
            hint = "a tensor, such as torch.tensor(0.0)"
            raise mismatch(TypeError, problem, expected, got, where=ACTIVE.where(), hint=hint)
    return leaves, _Shape(structure, tuple(types))


def _place(value: object, leaf: int) -> str:
    """Say where a leaf is, by its number."""
    path = tree_flatten_with_path(value)[0][leaf][0]
    return f" at {keystr(path)}" if path else ""


def _boolean(value: Any, subject: str) -> TensorOrLazy:
    """Check that a value is one boolean; return it."""
    row_type = type_of(value)
    if row_type is None or row_type.dtype != torch.bool or row_type.shape not in ((), (1,)):
        problem = f"{subject} is not a boolean"
        expected = "a boolean tensor of shape []"
        got = row_type or describe_value(value)
        hint = "such as x.sum() > 0"
        raise mismatch(TypeError, problem, expected, got, where=ACTIVE.where(), hint=hint)
    return value


def _condition(value: object) -> TensorOrLazy:
    return _boolean(value, "autobatch.while_loop: the condition")


def _result(value: object, subject: str) -> tuple[list[Any], _Shape]:
    leaves, shape = _read(value, f"{subject} returns")
    if not leaves:
        problem = f"{subject} returns no tensor"
        raise mismatch(TypeError, problem, "one, or more", where=ACTIVE.where())
    return leaves, shape


def _next_state(state: object, first: _Shape) -> list[Any]:
    """Check that a state is like the first one; list its tensors."""
    problem = "autobatch.while_loop: the body does not return a state like that which it is given"
    if isinstance(state, list):
        state = tuple(state)
    leaves, shape = _read(state, "autobatch.while_loop: the body returns")
    if shape.structure != first.structure:
        hint = "return a tuple, such as (x,)"
        expected = first.structure
        raise mismatch(
            TypeError, problem, expected, shape.structure, where=ACTIVE.where(), hint=hint
        )
    for number, (before, now) in enumerate(zip(first.types, shape.types, strict=True)):
        if before is not None and now is not None and now != before:
            hint = "an autobatch.Stack for what grows"
            if now.dtype != before.dtype:
                hint = f".to({before.dtype}) in the body; or .to({now.dtype}) before"
            got = f"{now}{_place(state, number)}"
            raise mismatch(TypeError, problem, before, got, where=ACTIVE.where(), hint=hint)
    return leaves
