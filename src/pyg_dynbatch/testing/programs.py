"""Laws of operations: any programs, batched, give what their calls give one by one."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pyg_dynbatch.core.compact import AnyProgram
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.reference import run_one_by_one
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.tensor_type import parts_of
from pyg_dynbatch.testing.compare import (
    TOLERANCE,
    Flat,
    Inputs,
    assert_same,
    flattened,
    gradients_of,
    inputs_in_float64,
    parts_of_rows,
    prepared,
    shaped_like,
)


def assert_batching_agrees(
    engine: Engine,
    programs: Sequence[AnyProgram],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that batched calls give what calls one by one give, whatever the policy.

    Args:
        engine: Holds the operations.
        programs: One program an example.
        inputs: As for :meth:`Engine.forward`.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If some output differs.

    Example:
        >>> from torch import nn
        >>> from pyg_dynbatch.core import Operations, Program, TensorType
        >>> vector, operations, program = TensorType((3,)), Operations(), Program()
        >>> squash = operations.add(nn.Linear(3, 3), [vector], [vector], name="squash")
        >>> first = program.call(squash, program.constant(vector, [1.0, 2.0, 3.0]))
        >>> program.output(program.call(squash, first))
        >>> assert_batching_agrees(Engine(operations), [program, program])
    """
    engine, inputs = prepared(engine), inputs_in_float64(inputs)
    with torch.no_grad():
        wanted = flattened(run_one_by_one(engine, programs, inputs))
        for policy in ("depth", "agenda"):
            found = flattened(engine(Schedule.from_programs(programs, policy), inputs))
            assert_same(f"batched ({policy}) = one by one", wanted, found, tolerance)


def assert_gradients_agree(
    engine: Engine,
    programs: Sequence[AnyProgram],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that parameters and inputs get the gradients they get one by one.

    The loss is a fixed random weighting of all floating outputs.

    Args:
        engine: Holds the operations.
        programs: One program an example.
        inputs: As for :meth:`Engine.forward`.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If some gradient differs.

    Example:
        >>> from torch import nn
        >>> from pyg_dynbatch.core import Operations, Program, TensorType
        >>> word, operations, program = TensorType((3,), tag="word"), Operations(), Program()
        >>> add = operations.add(nn.Bilinear(3, 3, 3), [word, word], [word], name="add")
        >>> program.output(program.call(add, program.input(word, 0), program.input(word, 1)))
        >>> assert_gradients_agree(Engine(operations), [program] * 2, {"word": torch.ones(4, 3)})
    """
    engine, inputs = prepared(engine), inputs_in_float64(inputs)
    wanted = gradients_of(engine, inputs, lambda given: run_one_by_one(engine, programs, given))
    for policy in ("depth", "agenda"):
        schedule = Schedule.from_programs(programs, policy)
        found = gradients_of(engine, inputs, partial(engine, schedule))
        assert_same(f"gradients batched ({policy}) = one by one", wanted, found, tolerance)


def assert_order_is_free(
    engine: Engine,
    programs: Sequence[AnyProgram],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that an example's results depend neither on its place nor on its company.

    Each example alone, and all examples backwards, must give what the whole batch gives.

    Args:
        engine: Holds the operations.
        programs: One program an example.
        inputs: As for :meth:`Engine.forward`.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If some output differs.

    Example:
        >>> from pyg_dynbatch.core import Operations, Program, TensorType
        >>> scalar, operations, programs = TensorType(()), Operations(), [Program(), Program()]
        >>> double = operations.add(lambda x: 2 * x, [scalar], [scalar], name="double")
        >>> for number, program in enumerate(programs):
        ...     program.output(program.call(double, program.constant(scalar, number)))
        >>> assert_order_is_free(Engine(operations), programs)
    """
    engine, inputs = prepared(engine), inputs_in_float64(inputs)
    shares = _inputs_by_example(programs, inputs)
    with torch.no_grad():
        whole = _by_example(engine, programs, inputs)
        alone = [
            _by_example(engine, [program], share)[0]
            for program, share in zip(programs, shares, strict=True)
        ]
        backwards = _by_example(engine, programs[::-1], _joined(shares[::-1]))[::-1]
    for number, wanted in enumerate(whole):
        for law, others in (("company", alone), ("order", backwards)):
            title = f"example {number}: the same whatever the {law} of the batch"
            assert_same(title, wanted, others[number], tolerance)


def _inputs_by_example(programs: Sequence[AnyProgram], inputs: Inputs) -> list[dict[Any, Any]]:
    """Cuts the input rows of a batch into those of its examples."""
    used = dict.fromkeys(inputs, 0)
    shares = []
    for program in programs:
        wanted: dict[Any, int] = {}
        for row_type, rows in zip(program.row_types, program.num_inputs, strict=True):
            key = row_type if row_type in inputs else parts_of(row_type)[0].tag
            wanted[key] = rows
        share = {}
        for key, rows in inputs.items():
            first, last = used[key], used[key] + wanted.get(key, 0)
            share[key] = shaped_like(rows, (part[first:last] for part in parts_of_rows(rows)))
            used[key] = last
        shares.append(share)
    return shares


def _joined(shares: Sequence[Inputs]) -> dict[Any, Any]:
    return {
        key: shaped_like(
            rows, (torch.cat(p) for p in zip(*(parts_of_rows(s[key]) for s in shares), strict=True))
        )
        for key, rows in (shares[0] if shares else {}).items()
    }


def _by_example(engine: Engine, programs: Sequence[AnyProgram], inputs: Inputs) -> list[Flat]:
    schedule = Schedule.from_programs(programs)
    results = engine(schedule, inputs)
    found: list[Flat] = [{} for _ in programs]
    for name, rows in results.items():
        example = schedule.example_of(name)
        for number, program in enumerate(programs):
            if name in program.outputs:
                mine = shaped_like(rows, (part[example == number] for part in parts_of_rows(rows)))
                found[number] |= flattened({name: mine})
    return found
