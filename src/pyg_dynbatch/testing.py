"""Laws of dynamic batching, as assertions for your own operations, cells and models.

Every law is checked on a copy in float64 and evaluation mode, so the tolerance can be tight and
the given object is not changed. A broken law raises ``AssertionError`` with the result, the row
and the difference.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.program import Program
from pyg_dynbatch.core.reference import run_one_by_one
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import depth_of, slots_of
from pyg_dynbatch.core.types import RowType, TensorType, parts_of

TOLERANCE = 1e-10

Inputs = Mapping[Any, Any]


def prepared(module: Any) -> Any:
    """Copy a module into float64 and evaluation mode."""
    return deepcopy(module).double().eval()


def in_float64(part: Tensor) -> Tensor:
    """Convert floating numbers to float64."""
    return part.detach().double() if part.is_floating_point() else part


def gradients_of(
    module: nn.Module, inputs: Inputs, run: Callable[[Inputs], Any]
) -> dict[str, Tensor]:
    """Compute the gradients of a fixed random weighting of all floating results."""
    given = tree_map(lambda p: p.clone().requires_grad_(p.is_floating_point()), dict(inputs))
    leaves = dict(module.named_parameters())
    for key, rows in given.items():
        leaves |= {f"input {key} {number}": part for number, part in enumerate(tree_leaves(rows))}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    results = run(given)
    if isinstance(results, Mapping):
        results = [results[name] for name in sorted(results)]
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss, generator = zero, torch.Generator().manual_seed(0)
    for rows in tree_leaves(results):
        if rows.is_floating_point():
            weight = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
            loss = loss + (rows * weight.to(rows.device)).sum().to(loss.device)
    # The zero has a gradient even if no result and no parameter has one.
    _, *found = torch.autograd.grad(loss, [zero, *leaves.values()], materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def assert_same(law: str, wanted: Any, found: Any, tolerance: float) -> None:
    """Assert that two nested containers of results are equal up to rounding."""

    def exact(part: Tensor) -> Tensor:
        return part.detach().to(torch.promote_types(part.dtype, torch.float64))

    torch.testing.assert_close(
        tree_map(exact, found),
        tree_map(exact, wanted),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        check_device=False,
        check_dtype=False,
        msg=lambda text: f"Law {law!r} is broken.\n{text}",
    )


def program_of_structure(signature: Signature, structure: Data) -> Program:
    """Record a tree, forest or acyclic graph as a program, node by node.

    Args:
        signature: First the input, then one :class:`Ragged` for all children, or one argument per
            child slot; all types with a shape.
        structure: The ``edge_index`` from child to parent and ``num_nodes``, optionally the
            ``child_slot`` of each edge (else the order of the edges) and ``has_input``, which
            nodes read an input row (else all). The rows of nodes are rows 0, 1, … of the input.

    Returns:
        The program; its output ``"node"`` lists all nodes in node order.

    Example:
        >>> row = TensorType((2,))
        >>> node = Signature("node", (row, Ragged(row)), (row,))
        >>> tree = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> program_of_structure(node, tree).depth
        2
    """
    data, num_nodes = _with_defaults(structure), structure.num_nodes
    input_type, *places = signature.inputs
    ragged = len(places) == 1 and isinstance(places[0], Ragged)
    children: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    edges = torch.cat([data.edge_index, data.child_slot[None]])
    for child, parent, slot in edges.T.tolist():
        children[parent].append((slot, child))
    program = Program()
    zeros = cache(partial(_zeros, program))  # one constant per type, however many are missing
    states: dict[int, Any] = {}
    for node in depth_of(data.edge_index, num_nodes).argsort(stable=True).tolist():
        reads = data.has_input[node]
        x = program.input(row_type_of(input_type), node) if reads else zeros(input_type)
        below = sorted(children[node], key=itemgetter(0))
        arguments: list[Any]
        if ragged:
            arguments = [[states[child] for _, child in below]]
        else:
            child_at = dict(below)
            arguments = [
                states[child_at[slot]] if slot in child_at else zeros(wanted)
                for slot, wanted in enumerate(places)
            ]
        states[node] = program.call(signature, x, *arguments)
    program.declare_inputs(row_type_of(input_type), num_nodes)
    for node in range(num_nodes):
        program.output(states[node], "node")
    return program


def _zeros(program: Program, wanted: RowType | Ragged) -> Any:
    row_type = row_type_of(wanted)
    rows = tuple(torch.zeros(part.shape or (), dtype=part.dtype) for part in parts_of(row_type))
    return program.constant(row_type, rows if isinstance(row_type, tuple) else rows[0])


def _with_defaults(structure: Data) -> Data:
    edges, nodes = structure.edge_index, structure.num_nodes
    slots = structure.child_slot if "child_slot" in structure else slots_of(edges, nodes)
    every = torch.ones(nodes, dtype=torch.bool)
    has_input = structure.has_input if "has_input" in structure else every
    return Data(edge_index=edges, num_nodes=nodes, child_slot=slots, has_input=has_input)


def assert_batching_agrees(
    engine: Engine,
    programs: Sequence[Program],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that batched calls and calls one by one agree, for every policy.

    Args:
        engine: The engine with the operations.
        programs: One program per example.
        inputs: As for :meth:`Engine.forward`.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If some output differs.

    Example:
        >>> from pyg_dynbatch.core import Operations, Program, TensorType
        >>> vector, operations, program = TensorType((3,)), Operations(), Program()
        >>> squash = operations.add(nn.Linear(3, 3), [vector], [vector], name="squash")
        >>> first = program.call(squash, program.constant(vector, [1.0, 2.0, 3.0]))
        >>> program.output(program.call(squash, first))
        >>> assert_batching_agrees(Engine(operations), [program, program])
    """
    engine, inputs = prepared(engine), tree_map(in_float64, dict(inputs or {}))
    with torch.no_grad():
        wanted = run_one_by_one(engine, programs, inputs)
        for policy in ("depth", "agenda"):
            found = engine(Schedule.from_programs(programs, policy), inputs)
            assert_same(f"batched ({policy}) = one by one", wanted, found, tolerance)


def assert_gradients_agree(
    engine: Engine,
    programs: Sequence[Program],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that gradients of parameters and inputs agree with those of calls one by one.

    The loss is a fixed random weighting of all floating outputs. The arguments are those of
    :func:`assert_batching_agrees`.

    Raises:
        AssertionError: If some gradient differs.

    Example:
        >>> from pyg_dynbatch.core import Operations, Program, TensorType
        >>> word, operations, program = TensorType((3,), tag="word"), Operations(), Program()
        >>> add = operations.add(nn.Bilinear(3, 3, 3), [word, word], [word], name="add")
        >>> program.output(program.call(add, program.input(word, 0), program.input(word, 1)))
        >>> assert_gradients_agree(Engine(operations), [program] * 2, {"word": torch.ones(4, 3)})
    """
    engine, inputs = prepared(engine), tree_map(in_float64, dict(inputs or {}))
    wanted = gradients_of(engine, inputs, partial(run_one_by_one, engine, programs))
    for policy in ("depth", "agenda"):
        schedule = Schedule.from_programs(programs, policy)
        found = gradients_of(engine, inputs, partial(engine, schedule))
        assert_same(f"gradients batched ({policy}) = one by one", wanted, found, tolerance)


def assert_order_is_free(
    engine: Engine,
    programs: Sequence[Program],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that results of an example do not depend on its position or on other examples.

    Each example alone, and all examples in reverse order, must agree with the whole batch. The
    arguments are those of :func:`assert_batching_agrees`.

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
    engine, inputs = prepared(engine), tree_map(in_float64, dict(inputs or {}))
    shares = _inputs_by_example(programs, inputs)
    turned = tree_map(lambda *parts: torch.cat(parts), *shares[::-1]) if shares else {}
    with torch.no_grad():
        whole = _by_example(engine, programs, inputs)
        alone = [
            _by_example(engine, [program], share)[0]
            for program, share in zip(programs, shares, strict=True)
        ]
        reverse = _by_example(engine, programs[::-1], turned)[::-1]
    assert_same("results do not depend on other examples", whole, alone, tolerance)
    assert_same("results do not depend on the order of examples", whole, reverse, tolerance)


def _inputs_by_example(programs: Sequence[Program], inputs: Inputs) -> list[dict[Any, Any]]:
    """Split the input rows of a batch into those of its examples."""
    used = dict.fromkeys(inputs, 0)
    shares = []
    for program in programs:
        types = [t if t in inputs else parts_of(t)[0].tag for t in program.row_types]
        counts = dict(zip(types, program.num_inputs, strict=True))
        share = {}
        for key, rows in inputs.items():
            first, used[key] = used[key], used[key] + counts.get(key, 0)
            share[key] = tree_map(itemgetter(slice(first, used[key])), rows)
        shares.append(share)
    return shares


def _by_example(
    engine: Engine, programs: Sequence[Program], inputs: Inputs
) -> list[dict[str, Any]]:
    schedule = Schedule.from_programs(programs)
    results = engine(schedule, inputs)
    return [
        {
            name: tree_map(itemgetter(schedule.example_of(name) == number), rows)
            for name, rows in results.items()
            if name in program.outputs
        }
        for number, program in enumerate(programs)
    ]


def assert_cell_agrees(
    cell: nn.Module,
    state: RowType,
    structures: Sequence[Data],
    *,
    in_channels: int,
    arity: int | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that a cell applied to structures and node by node agree.

    Values and gradients must agree for the schedule of the structures, the schedule of recorded
    programs, and one call after another; the two schedules must have equal steps.

    Args:
        cell: As for :meth:`Engine.of_cell`.
        state: Type of a state.
        structures: The examples, as for :func:`program_of_structure`, such as ``DynTreeData``.
        in_channels: Width of an input row.
        arity: Number of arguments for children; ``None`` for a ragged argument.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If values, gradients or steps differ.

    Example:
        >>> class Sum(nn.Module):
        ...     def forward(self, x, children):
        ...         return torch.tanh(x + children.sum())
        >>> tree = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> assert_cell_agrees(Sum(), TensorType((4,)), [tree, tree], in_channels=4)
    """
    input_type = TensorType((in_channels,), tag="input")
    engine = prepared(Engine.of_cell(cell, state, arity, input_type))
    signature = engine.operations["node"].signature
    programs = [program_of_structure(signature, structure) for structure in structures]
    joined = Batch.from_data_list([_with_defaults(structure) for structure in structures])
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
        what = "Law 'schedule of structures = schedule of programs' is broken: step sizes differ"
        expected, got = f"{sizes[1]}, of programs", f"{sizes[0]}, of structures"
        raise mismatch(AssertionError, what, expected, got)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(joined.num_nodes, in_channels, dtype=torch.float64, generator=generator)

    def on_structures(given: Inputs) -> dict[str, Any]:
        return engine(by_structure, {"input": given["input"][by_structure.input_node]})

    ways: dict[str, Callable[[Inputs], Any]] = {
        "one by one": partial(run_one_by_one, engine, programs),
        "recorded programs": partial(engine, by_program),
        "structures": on_structures,
    }
    found = {
        way: (run({"input": x}), gradients_of(engine, {"input": x}, run))
        for way, run in ways.items()
    }
    first, *others = found
    for way in others:
        assert_same(f"{way} = {first}", found[first], found[way], tolerance)


def assert_model_agrees(
    model: nn.Module,
    examples: Sequence[Any],
    collate: Callable[[list[Any]], Any],
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that the results of a model for a batch and for each example alone agree.

    Args:
        model: Called with a batch; returns a tensor (or a dict or tuple of tensors) whose rows
            are in the order of the examples, any number per example.
        examples: Such as ``Data`` objects, whose floating fields are converted to float64.
        collate: Makes a batch of a list of examples, such as a ``Collater``.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If values, or gradients of parameters, differ.

    Example:
        >>> from pyg_dynbatch.loader import Collater
        >>> from pyg_dynbatch.data import DynTreeData
        >>> class Heads(nn.Module):
        ...     def forward(self, batch):
        ...         return batch.x[batch.root_index]
        >>> trees = [DynTreeData(torch.tensor([[0], [1]]), x=torch.ones(2, 3)) for _ in range(2)]
        >>> assert_model_agrees(Heads(), trees, Collater())
    """
    model = prepared(model)
    examples = [
        example.clone().apply(in_float64) if callable(getattr(example, "apply", None)) else example
        for example in examples
    ]

    def results_of(batch: list[Any]) -> Any:
        results = model(collate(batch))
        return dict(results) if isinstance(results, Mapping) else results

    def alone(_: Inputs) -> Any:
        return tree_map(lambda *parts: torch.cat(parts), *(results_of([each]) for each in examples))

    def together(_: Inputs) -> Any:
        return results_of(examples)

    assert_same("batch = each example alone", alone({}), together({}), tolerance)
    wanted, found = (gradients_of(model, {}, run) for run in (alone, together))
    assert_same("gradients: batch = each example alone", wanted, found, tolerance)


__all__ = [
    "assert_batching_agrees", "assert_cell_agrees", "assert_gradients_agree",
    "assert_model_agrees", "assert_order_is_free", "program_of_structure",
]  # fmt: skip
