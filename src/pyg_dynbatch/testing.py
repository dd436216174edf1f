"""Laws of dynamic batching, as assertions for your own operations, cells and models.

Every law is checked on a copy in float64 and evaluation mode, so that the tolerance can be tight
and the given module stays unchanged. If a law is broken, the ``AssertionError`` names the result,
the index and the difference.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.core.operation import Operations, Ragged, Signature, row_type_of
from pyg_dynbatch.core.recording import Recording, Value
from pyg_dynbatch.core.reference import run_one_by_one
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.structure import depth_of, slots_of
from pyg_dynbatch.core.types import RowType, TensorType, parts_of
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer

__all__ = [
    "assert_batching_agrees", "assert_cell_agrees", "assert_gradients_agree",
    "assert_model_agrees", "assert_order_is_free", "recording_of_structure",
]  # fmt: skip

TOLERANCE = 1e-10

Module = TypeVar("Module", bound=nn.Module)
Results = TypeVar("Results")

Inputs = Mapping[Any, Any]
Way = Callable[[Inputs], Any]


def assert_batching_agrees(
    engine: Engine,
    recordings: Sequence[Recording],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that batched calls and calls one by one agree, for every policy.

    Args:
        engine: The engine with the operations.
        recordings: One recording per example.
        inputs: As for :meth:`Engine.forward`.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If some output differs.

    Example:
        >>> from pyg_dynbatch.core import Operations, Recording, TensorType
        >>> vector, operations, recording = TensorType((3,)), Operations(), Recording()
        >>> squash = operations.add(nn.Linear(3, 3), [vector], [vector], name="squash")
        >>> first = recording.call(squash, recording.constant(vector, [1.0, 2.0, 3.0]))
        >>> recording.output(recording.call(squash, first))
        >>> assert_batching_agrees(Engine(operations), [recording, recording])
    """
    engine = prepared(engine)
    inputs = tree_map(in_float64, dict(inputs or {}))
    with torch.no_grad():
        results = {way: run(inputs) for way, run in _ways(engine, recordings).items()}
    _assert_agree("values", results, tolerance)


def assert_gradients_agree(
    engine: Engine,
    recordings: Sequence[Recording],
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
        >>> from pyg_dynbatch.core import Operations, Recording, TensorType
        >>> word, operations, recording = TensorType((3,), tag="word"), Operations(), Recording()
        >>> add = operations.add(nn.Bilinear(3, 3, 3), [word, word], [word], name="add")
        >>> one, two = (recording.input(word, row) for row in (0, 1))
        >>> recording.output(recording.call(add, one, two))
        >>> assert_gradients_agree(Engine(operations), [recording] * 2, {"word": torch.ones(4, 3)})
    """
    engine = prepared(engine)
    inputs = tree_map(in_float64, dict(inputs or {}))
    ways = _ways(engine, recordings)
    results = {way: gradients_of(engine, inputs, run) for way, run in ways.items()}
    _assert_agree("gradients", results, tolerance)


def assert_order_is_free(
    engine: Engine,
    recordings: Sequence[Recording],
    inputs: Inputs | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that results of an example do not depend on its position or on other examples.

    The whole batch, and the batch in reverse order, must agree with the examples one at a time.
    The arguments are those of :func:`assert_batching_agrees`.

    Raises:
        AssertionError: If some output differs.

    Example:
        >>> from pyg_dynbatch.core import Operations, Recording, TensorType
        >>> scalar, operations = TensorType(()), Operations()
        >>> recordings = [Recording(), Recording()]
        >>> double = operations.add(lambda x: 2 * x, [scalar], [scalar], name="double")
        >>> for number, recording in enumerate(recordings):
        ...     recording.output(recording.call(double, recording.constant(scalar, number)))
        >>> assert_order_is_free(Engine(operations), recordings)
    """
    engine = prepared(engine)
    inputs = tree_map(in_float64, dict(inputs or {}))
    examples = list(zip(recordings, _inputs_by_example(recordings, inputs), strict=True))

    def run(batch: Sequence[tuple[Recording, Inputs]]) -> dict[str, Any]:
        schedule = schedule_recordings([recording for recording, _ in batch])
        batch_inputs = {key: joined([share[key] for _, share in batch]) for key in inputs}
        return engine(schedule, batch_inputs)

    for law, batch in {"other examples": examples, "the order of examples": examples[::-1]}.items():
        with torch.no_grad():
            alone = [run([example]) for example in batch]
            together = run(batch)
        expected = {
            name: joined([results[name] for results in alone if name in results])
            for name in dict.fromkeys(name for results in alone for name in results)
        }
        assert_same(f"results do not depend on {law}", expected, together, tolerance)


def assert_cell_agrees(
    cell: RecursiveCell, structures: Sequence[Data], *, tolerance: float = TOLERANCE
) -> None:
    """Assert that a cell agrees in a layer, in recordings and node by node.

    Values and gradients must agree, and the levels of the structures must have the same sizes as
    the steps of the recordings.

    Args:
        cell: The cell.
        structures: The examples, as for :func:`recording_of_structure`, such as ``DynTreeData``.
        tolerance: Largest difference allowed, relative for numbers above 1.

    Raises:
        AssertionError: If values, gradients or steps differ.

    Example:
        >>> from pyg_dynbatch.nn import TreeGRUCell
        >>> tree = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> assert_cell_agrees(TreeGRUCell(4, 3), [tree, tree])
    """
    layer = prepared(RecursiveLayer(cell))
    row = TensorType((cell.in_channels,), tag="input")
    state = cell.state_type
    children = [Ragged(state)] if cell.arity is None else [state] * cell.arity

    # An engine for recordings. It has the cell of the layer, so that both compute gradients of the
    # same parameters.
    operations = Operations()
    node = operations.add(layer.cell, [row, *children], [state], name="node", random=True)
    engine = Engine(operations).double()
    recordings = [recording_of_structure(node, structure) for structure in structures]

    # Levels for the layer; they are as large as the steps of the engine.
    batch = Batch.from_data_list([_with_defaults(structure) for structure in structures])
    levels = schedule_structure(
        batch.edge_index,
        batch.num_nodes,
        arity=cell.arity,
        child_slot=batch.child_slot,
        has_input=batch.has_input,
    )
    step_sizes = [step.size for step in schedule_recordings(recordings).steps]
    sizes = {"recordings": step_sizes, "structures": list(levels.level_sizes)}
    _assert_agree("step sizes", sizes, 0.0)

    def in_layer(rows: Inputs) -> dict[str, Any]:
        states = layer(rows["input"], schedule=levels, return_state=True)
        return {"node": states if len(states) > 1 else states[0]}

    # Both on the same rows, and node by node as well.
    generator = torch.Generator().manual_seed(0)
    shape = (batch.num_nodes, cell.in_channels)
    inputs = {"input": torch.randn(shape, dtype=torch.float64, generator=generator)}
    ways = _ways(engine, recordings) | {"layer": in_layer}
    results = {way: (run(inputs), gradients_of(engine, inputs, run)) for way, run in ways.items()}
    _assert_agree("values and gradients", results, tolerance)


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
            are in the order of the examples, with any number of rows per example.
        examples: Such as ``Data`` objects, whose floating fields are converted to float64.
        collate: Builds a batch from a list of examples, such as a ``Collater``.
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
    converted = [
        example.clone().apply(in_float64) if callable(getattr(example, "apply", None)) else example
        for example in examples
    ]

    def results_of(batch: list[Any]) -> object:
        results = model(collate(batch))
        return dict(results) if isinstance(results, Mapping) else results

    ways: dict[str, Way] = {
        "each example alone": lambda _: joined([results_of([example]) for example in converted]),
        "batch": lambda _: results_of(converted),
    }
    results = {way: (run({}), gradients_of(model, {}, run)) for way, run in ways.items()}
    _assert_agree("values and gradients", results, tolerance)


# Structures as recordings -------------------------------------------------------------------------


def recording_of_structure(signature: Signature, structure: Data) -> Recording:
    """Record a tree, forest or acyclic graph as a recording, node by node.

    Args:
        signature: First the input, then one :class:`Ragged` for all children, or one argument per
            child slot.
        structure: The ``edge_index`` from child to parent and ``num_nodes``, optionally the
            ``child_slot`` of each edge (by default in the order of the edges) and ``has_input``,
            the nodes that read an input row (by default all). Node n reads input row n.

    Returns:
        The recording; its output ``"node"`` lists all nodes in node order.

    Example:
        >>> row = TensorType((2,))
        >>> node = Signature("node", (row, Ragged(row)), (row,))
        >>> tree = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> recording_of_structure(node, tree).depth
        2
    """
    input_type, *slot_types = signature.inputs
    data = _with_defaults(structure)
    num_nodes = data.num_nodes
    children: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    edges = zip(data.child_slot.tolist(), *data.edge_index.tolist(), strict=True)
    for slot, child, parent in sorted(edges):
        children[parent].append((slot, child))

    recording = Recording()

    @cache
    def zeros(argument: RowType | Ragged) -> Value:
        row_type = row_type_of(argument)
        rows = tree_map(lambda part: torch.zeros(part.shape, dtype=part.dtype), row_type)
        return recording.constant(row_type, rows)

    states: dict[int, Value] = {}
    for node in depth_of(data.edge_index, num_nodes).argsort(stable=True).tolist():
        reads = data.has_input[node]
        x = recording.input(row_type_of(input_type), node) if reads else zeros(input_type)
        if [type(slot_type) for slot_type in slot_types] == [Ragged]:
            arguments: list[Any] = [[states[child] for _, child in children[node]]]
        else:
            child_at = dict(children[node])
            arguments = [
                states[child_at[slot]] if slot in child_at else zeros(slot_type)
                for slot, slot_type in enumerate(slot_types)
            ]
        states[node] = recording.call(signature, x, *arguments)

    recording.declare_inputs(row_type_of(input_type), num_nodes)
    for node in range(num_nodes):
        recording.output(states[node], "node")
    return recording


def _with_defaults(structure: Data) -> Data:
    edges = structure.edge_index
    nodes = structure.num_nodes
    fields = {"child_slot": slots_of(edges, nodes), "has_input": torch.full((nodes,), True)}
    fields |= {name: structure[name] for name in fields if name in structure}
    return Data(edge_index=edges, num_nodes=nodes, **fields)


# Ways to run, and their results -------------------------------------------------------------------


def prepared(module: Module) -> Module:
    """Copy a module into float64 and evaluation mode."""
    return deepcopy(module).double().eval()


def in_float64(tensor: Tensor) -> Tensor:
    """Convert floating-point numbers to float64."""
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def joined(results: Sequence[Results]) -> Results:
    """Concatenate the rows of results with the same structure."""
    return tree_map(lambda *tensors: torch.cat(tensors), *results)


def gradients_of(module: nn.Module, inputs: Inputs, run: Way) -> dict[str, Tensor]:
    """Compute the gradients of a fixed random weighting of all floating-point results."""
    variables = tree_map(_variable, dict(inputs))
    leaves: dict[str, Tensor] = dict(module.named_parameters())
    for key, rows in variables.items():
        for number, leaf in enumerate(tree_leaves(rows)):
            leaves[f"input {key} {number}"] = leaf
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}

    results = run(variables)
    if isinstance(results, Mapping):
        results = [results[name] for name in sorted(results)]

    # The zero has a gradient even if no result and no parameter has one.
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = zero
    generator = torch.Generator().manual_seed(0)
    for rows in filter(torch.is_floating_point, tree_leaves(results)):
        weight = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        loss = loss + (rows * weight.to(rows.device)).sum().to(loss.device)
    _, *gradients = torch.autograd.grad(loss, [zero, *leaves.values()], materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _variable(tensor: Tensor) -> Tensor:
    """Copy a tensor; floating-point numbers get a gradient."""
    return tensor.clone().requires_grad_(tensor.is_floating_point())


def assert_same(law: str, expected: object, results: object, tolerance: float) -> None:
    """Assert that two nested containers of results are equal up to rounding."""
    try:
        torch.testing.assert_close(
            results,
            expected,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            check_device=False,
            check_dtype=False,
        )
    except AssertionError as error:
        raise AssertionError(f"Law {law!r} is broken.\n{error}") from None


def _assert_agree(name: str, results_of: Mapping[str, object], tolerance: float) -> None:
    """Compare the results of the first way to compute something with those of all others."""
    (first_way, expected), *others = results_of.items()
    for way, results in others:
        assert_same(f"{name}: {way} = {first_way}", expected, results, tolerance)


def _ways(engine: Engine, recordings: Sequence[Recording]) -> dict[str, Way]:
    """Return all ways to run recordings, the reference first."""
    ways: dict[str, Way] = {"one by one": partial(run_one_by_one, engine, recordings)}
    for policy in ("depth", "agenda"):
        schedule = schedule_recordings(recordings, policy)
        ways[f"batched ({policy})"] = partial(engine, schedule)
    return ways


def _inputs_by_example(recordings: Sequence[Recording], inputs: Inputs) -> list[dict[Any, Any]]:
    """Split the input rows of a batch into those of its examples."""
    used = dict.fromkeys(inputs, 0)
    shares = []
    for recording in recordings:
        counts = {
            row_type if row_type in inputs else parts_of(row_type)[0].tag: rows
            for row_type, rows in recording.num_inputs.items()
        }
        share = {}
        for key, rows in inputs.items():
            first = used[key]
            used[key] += counts.get(key, 0)
            share[key] = tree_map(itemgetter(slice(first, used[key])), rows)
        shares.append(share)
    return shares
