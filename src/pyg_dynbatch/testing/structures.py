"""Structures as the laws take them, and the programs that mean the same."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.program import Program
from pyg_dynbatch.core.structure import depth_of, slots_of
from pyg_dynbatch.core.tensor_type import RowType, parts_of


class Structure(NamedTuple):
    """One tree, forest or acyclic graph.

    Args:
        edge_index: Edges from child to parent, ``[2, edge]``.
        num_nodes: Number of nodes.
        child_slot: Position of each edge's child among its siblings; the order of the edges if
            left out.
        has_input: Which nodes read an input row, bool ``[node]``; all if left out.

    Example:
        >>> Structure(torch.tensor([[0, 1], [2, 2]]), 3).num_nodes
        3
    """

    edge_index: Tensor
    num_nodes: int
    child_slot: Tensor | None = None
    has_input: Tensor | None = None


def program_of_structure(signature: Signature, structure: Structure) -> Program:
    """Records what a schedule of a structure does, node by node.

    Args:
        signature: First the input, then one :class:`Ragged` for all children, or one argument a
            child slot; all types with a shape.
        structure: The structure; its nodes' input rows are rows 0, 1, … of the input type.

    Returns:
        The program; its output ``"node"`` lists all nodes in node order.

    Example:
        >>> from pyg_dynbatch.core import TensorType
        >>> row = TensorType((2,))
        >>> node = Signature("node", (row, Ragged(row)), (row,))
        >>> program_of_structure(node, Structure(torch.tensor([[0, 1], [2, 2]]), 3)).depth
        2
    """
    edge_index, num_nodes, child_slot, has_input = structure
    slots = slots_of(edge_index, num_nodes) if child_slot is None else child_slot
    input_type, *places = signature.inputs
    ragged = len(places) == 1 and isinstance(places[0], Ragged)
    children: list[dict[int, list[int]]] = [{} for _ in range(num_nodes)]
    for child, parent, slot in zip(*edge_index.tolist(), slots.tolist(), strict=True):
        children[parent].setdefault(slot, []).append(child)
    program = Program()
    states: dict[int, Any] = {}
    for node in depth_of(edge_index, num_nodes).argsort(stable=True).tolist():
        reads = has_input is None or bool(has_input[node])
        x = program.input(row_type_of(input_type), node) if reads else _zeros(program, input_type)
        below = children[node]
        if ragged:
            arguments = [[states[child] for slot in sorted(below) for child in below[slot]]]
        else:
            arguments = [
                states[below[slot][0]] if slot in below else _zeros(program, wanted)
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


def join_structures(structures: Sequence[Structure]) -> Structure:
    """Puts structures side by side as one, as PyG puts graphs into a batch."""
    edges, slots, inputs, first = [], [], [], 0
    for edge_index, num_nodes, child_slot, has_input in structures:
        edges.append(edge_index + first)
        slots.append(slots_of(edge_index, num_nodes) if child_slot is None else child_slot)
        inputs.append(torch.ones(num_nodes, dtype=torch.bool) if has_input is None else has_input)
        first += num_nodes
    return Structure(torch.cat(edges, 1), first, torch.cat(slots), torch.cat(inputs))
