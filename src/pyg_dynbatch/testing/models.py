"""Laws of cells and models: structures and batches give what nodes and examples give alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.reference import run_one_by_one
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.tensor_type import RowType, TensorType
from pyg_dynbatch.testing.compare import (
    TOLERANCE,
    Inputs,
    assert_same,
    fixed_generator,
    flattened,
    gradients_of,
    in_float64,
    prepared,
)
from pyg_dynbatch.testing.structures import Structure, join_structures, program_of_structure


def assert_cell_agrees(
    cell: nn.Module,
    state: RowType,
    structures: Sequence[Structure],
    *,
    in_channels: int,
    arity: int | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that a cell run over structures gives what it gives node by node.

    Three roads must meet, in values and in gradients: the schedule of the structures, the
    schedule of recorded programs, and one call after another. The two schedules must also have
    the same steps.

    Args:
        cell: As for :meth:`Engine.of_cell`.
        state: Type of a state.
        structures: The examples.
        in_channels: Width of an input row.
        arity: Argument places for children; ``None`` for a ragged argument.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If values, gradients or steps differ.

    Example:
        >>> from pyg_dynbatch.testing import Structure
        >>> class Sum(nn.Module):
        ...     def forward(self, x, children):
        ...         return torch.tanh(x + children.sum())
        >>> tree = Structure(torch.tensor([[0, 1], [2, 2]]), 3)
        >>> assert_cell_agrees(Sum(), TensorType((4,)), [tree, tree], in_channels=4)
    """
    input_type = TensorType((in_channels,), tag="input")
    engine = prepared(Engine.of_cell(cell, state, arity, input_type))
    signature = engine.operations["node"].signature
    programs = [program_of_structure(signature, structure) for structure in structures]
    joined = join_structures(structures)
    by_structure = Schedule.from_structure(
        joined.edge_index,
        joined.num_nodes,
        child_slot=joined.child_slot,
        arity=arity,
        has_input=joined.has_input,
    )
    by_program = Schedule.from_programs(programs)
    sizes = [[step.size for step in schedule.steps] for schedule in (by_structure, by_program)]
    if sizes[0] != sizes[1]:
        raise AssertionError(
            mismatch(
                "Law 'schedule of structures = schedule of programs' is broken: step sizes differ",
                expected=f"the steps of the programs, {sizes[1]}",
                got=f"the steps of the structures, {sizes[0]}",
            )
        )
    x = torch.randn(joined.num_nodes, in_channels, dtype=torch.float64, generator=fixed_generator())
    roads: dict[str, Callable[[Inputs], dict[str, Any]]] = {
        "one by one": lambda given: run_one_by_one(engine, programs, given),
        "recorded programs": lambda given: engine(by_program, given),
        "structures": lambda given: engine(
            by_structure, {"input": given["input"].index_select(0, by_structure.input_node)}
        ),
    }
    wanted, *others = (
        (road, flattened(run({"input": x})), gradients_of(engine, {"input": x}, run))
        for road, run in roads.items()
    )
    for road, values, gradients in others:
        assert_same(f"{road} = {wanted[0]}", wanted[1], values, tolerance)
        assert_same(f"gradients: {road} = {wanted[0]}", wanted[2], gradients, tolerance)


def assert_model_agrees(
    model: nn.Module,
    examples: Sequence[Any],
    collate: Callable[[list[Any]], Any],
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that a model gives a batch what it gives each example in a batch of its own.

    Args:
        model: Called with a batch; returns a tensor (or a dict or tuple of tensors) whose rows
            follow the order of the examples, so many rows an example as it needs.
        examples: The examples, such as ``Data`` objects; floating fields are turned to float64.
        collate: Makes a batch of a list of examples, such as a ``Collater``.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If values, or gradients of parameters, differ.

    Example:
        >>> from pyg_dynbatch.data import Collater, DynTreeData
        >>> class Heads(nn.Module):
        ...     def forward(self, batch):
        ...         return batch.x[batch.root_index]
        >>> trees = [DynTreeData(torch.tensor([[0], [1]]), x=torch.ones(2, 3)) for _ in range(2)]
        >>> assert_model_agrees(Heads(), trees, Collater())
    """
    model = prepared(model)
    examples = [_data_in_float64(example) for example in examples]

    def alone(_: Inputs) -> dict[str, Any]:
        found = [flattened(_named(model(collate([example])))) for example in examples]
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}

    def together(_: Inputs) -> dict[str, Any]:
        return flattened(_named(model(collate(list(examples)))))

    assert_same("batch = each example alone", alone({}), together({}), tolerance)
    wanted, found = (gradients_of(model, {}, run) for run in (alone, together))
    assert_same("gradients: batch = each example alone", wanted, found, tolerance)


def _data_in_float64(example: Any) -> Any:
    if not callable(getattr(example, "apply", None)):
        return example
    return example.clone().apply(in_float64)


def _named(results: Any) -> dict[str, Any]:
    return dict(results) if isinstance(results, Mapping) else {"result": results}
