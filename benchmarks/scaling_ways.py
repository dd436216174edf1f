"""Ways to run one Tree-LSTM over a forest: fused, level by level, by the engine on programs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.protocol import Stopwatch
from benchmarks.shapes import forest_edges, tree_edges
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.operation import Signature
from pyg_dynbatch.core.program import Program, Value
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import slots_of
from pyg_dynbatch.core.types import TensorType
from pyg_dynbatch.nn.recursive import NaryTreeLSTM, run_levels


class Forest(NamedTuple):
    """Copies of one tree.

    Args:
        shape: Name of the shape.
        edges: Of one tree, ``[2, edge]``.
        tree_nodes: Nodes of one tree.
        trees: Number of copies.
    """

    shape: str
    edges: Tensor
    tree_nodes: int
    trees: int

    @property
    def nodes(self) -> int:
        """Number of nodes of the forest."""
        return self.tree_nodes * self.trees

    @classmethod
    def of(cls, shape: str, nodes: int, largest_tree: int) -> "Forest":
        """Makes a forest of about so many nodes.

        Args:
            shape: ``"balanced"``, ``"random"`` or ``"chain"``.
            nodes: Number of nodes wanted.
            largest_tree: Nodes of one tree at most.

        Example:
            >>> Forest.of("chain", 100, 10).trees
            10
        """
        tree_nodes = min(nodes, largest_tree)
        return cls(shape, tree_edges(shape, tree_nodes), tree_nodes, max(1, nodes // tree_nodes))


class Ways:
    """Runs one Tree-LSTM layer over a forest in several ways.

    Args:
        layer: The layer.
        forest: The forest; every node reads an input row.
        device: Where to run.
    """

    def __init__(self, layer: NaryTreeLSTM, forest: Forest, device: torch.device) -> None:
        self.layer, self.forest, self.device = layer, forest, device
        row = TensorType((layer.in_channels,), tag="input")
        self.engine = Engine.of_cell(layer.cell, layer.cell.state_type, layer.arity, row)
        self.edges = forest_edges(forest.edges, forest.tree_nodes, forest.trees)
        generator = torch.Generator().manual_seed(0)
        shape = (forest.nodes, layer.in_channels)
        self.x = torch.randn(shape, generator=generator).to(device).requires_grad_()
        self.grad = torch.randn(forest.nodes, layer.out_channels, generator=generator).to(device)
        self.programs: list[Program] = []

    def schedule(self, mode: str) -> Schedule:
        """Makes the schedule, for the engine from programs recorded before."""
        if mode != "engine":
            return Schedule.from_structure(self.edges, self.forest.nodes, arity=self.layer.arity)
        if not self.programs:
            signature = self.engine.operations["node"].signature
            program = record_tree(signature, self.forest.edges, self.forest.tree_nodes)
            self.programs = [program] * self.forest.trees
        return Schedule.from_programs(self.programs)

    def forward(self, mode: str, schedule: Schedule) -> Tensor:
        """Computes the hidden rows of all nodes, ``[node, unit]``."""
        if mode == "fused":
            return self.layer(self.x, self.edges, schedule)
        if mode == "generic":
            inputs = self.x.index_select(0, schedule.input_node)
            return run_levels(self.layer.cell, schedule, inputs)[0]
        return self.engine(schedule, {"input": self.x})["node"][0]

    def clear(self) -> None:
        """Forgets the gradients."""
        self.x.grad = None
        self.layer.zero_grad()

    def train(self, mode: str, schedule: Schedule) -> Tensor:
        """Runs both passes; gives the hidden rows."""
        self.clear()
        hidden = self.forward(mode, schedule)
        hidden.backward(self.grad)
        return hidden.detach()

    def timed(self, mode: str, schedule: Schedule, lap: Stopwatch) -> None:
        """Makes the schedule once more and runs both passes under a stopwatch."""
        self.clear()
        lap.skip()
        self.schedule(mode)
        lap("schedule")
        hidden = self.forward(mode, schedule)
        lap("forward")
        hidden.backward(self.grad)
        lap("backward")

    def results(self, mode: str, schedule: Schedule) -> list[Tensor]:
        """Gives the hidden rows and all gradients."""
        hidden = self.train(mode, schedule)
        grads = [p.grad for p in (self.x, *self.layer.parameters())]
        return [hidden, *(grad.clone() for grad in grads if grad is not None)]


def record_tree(signature: Signature, edges: Tensor, num_nodes: int) -> Program:
    """Records one binary tree, every missing child the same zero state.

    Args:
        signature: Of the cell: an input row and two states.
        edges: Child to parent, children before parents in number.
        num_nodes: Number of nodes.

    Returns:
        The program; its output ``"node"`` lists all nodes in node order.
    """
    input_type, *places = signature.inputs
    state = signature.outputs[0]
    program = Program()
    parts = state if isinstance(state, tuple) else (state,)
    zeros = tuple(torch.zeros(part.shape or ()) for part in parts)
    missing = program.constant(state, zeros if isinstance(state, tuple) else zeros[0])
    below: list[dict[int, int]] = [{} for _ in range(num_nodes)]
    slots = slots_of(edges, num_nodes).tolist()
    for child, parent, slot in zip(*edges.tolist(), slots, strict=True):
        below[parent][slot] = child
    states: list[Value] = []
    for node in range(num_nodes):
        children = (
            states[below[node][place]] if place in below[node] else missing
            for place in range(len(places))
        )
        x: Any = program.input(input_type, node)  # type: ignore[arg-type]
        states.append(program.call(signature, x, *children))
    for value in states:
        program.output(value, "node")
    return program
