"""Random recordings in a small typed language, and a plain recursion that evaluates them.

A recording is drawn as a list of plain calls. :func:`recorded` converts it to a ``Recording``;
:func:`meaning` evaluates it call by call on single rows, without any code of the core.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch.core import Engine, Operations, Ragged, RaggedRows, Recording, TensorType

VECTOR = TensorType((3,), tag="vector")
SCALAR = TensorType(())
MATRIX = TensorType((2, 3))
WORD = TensorType((), torch.int64, "word")
STATE = (TensorType((3,)), TensorType(()))
TYPES = {"vector": VECTOR, "scalar": SCALAR, "matrix": MATRIX, "word": WORD, "state": STATE}


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 3))
        self.b = nn.Parameter(torch.randn(3, 3))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(left @ self.a + right @ self.b)


class Split(nn.Module):
    """Two results, one of them with two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 6))

    def forward(self, row: Tensor) -> tuple[Tensor, Tensor]:
        return row.square().sum(-1).cos(), torch.sin(row @ self.w).unflatten(-1, (2, 3))


class Step(nn.Module):
    """A state that is a tuple, from a state, a matrix and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(
        self, state: tuple[Tensor, Tensor], matrix: Tensor, scalar: Tensor
    ) -> tuple[Tensor, Tensor]:
        h, c = state
        c = torch.sigmoid(c + scalar)
        return torch.tanh(h * c[..., None] + matrix.sum(-2) * self.w), c


class Total(nn.Module):
    """A ragged and a fixed argument; the weights depend on the order of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, rows: RaggedRows, scalar: Tensor) -> Tensor:
        position = torch.zeros_like(rows.segment_ids)
        for number in range(1, len(position)):
            same = rows.segment_ids[number] == rows.segment_ids[number - 1]
            position[number] = torch.where(same, position[number - 1] + 1, 0)
        weighted = rows.rows * (self.w / (1 + position)[:, None])
        total = weighted.new_zeros(rows.num_calls, 3).index_add(0, rows.segment_ids, weighted)
        return torch.tanh(total + scalar[:, None])


class Gather(nn.Module):
    """A ragged argument of tuples."""

    def forward(self, rows: RaggedRows) -> tuple[Tensor, Tensor]:
        h, c = rows.rows
        total = h.new_zeros(rows.num_calls, 3).index_add(0, rows.segment_ids, h * c[:, None])
        return torch.tanh(total), total.mean(-1)


# What one call means, on rows without a batch axis.


def plain_embed(module: Any, word: Tensor) -> list[Any]:
    return [module.weight[word]]


def plain_gate(module: Any, left: Tensor, right: Tensor) -> list[Any]:
    return [torch.tanh(left @ module.a + right @ module.b)]


def plain_split(module: Any, row: Tensor) -> list[Any]:
    return [torch.cos((row * row).sum()), torch.sin(row @ module.w).view(2, 3)]


def plain_step(
    module: Any, state: tuple[Tensor, Tensor], matrix: Tensor, scalar: Tensor
) -> list[Any]:
    h, c = state
    c = torch.sigmoid(c + scalar)
    return [(torch.tanh(h * c + (matrix[0] + matrix[1]) * module.w), c)]


def plain_total(module: Any, rows: list[Tensor], scalar: Tensor) -> list[Any]:
    total = scalar * torch.ones(3, dtype=torch.float64)
    for position, row in enumerate(rows):
        total = total + row * module.w / (1 + position)
    return [torch.tanh(total)]


def plain_gather(module: Any, states: list[tuple[Tensor, Tensor]]) -> list[Any]:
    total = torch.zeros(3, dtype=torch.float64)
    for h, c in states:
        total = total + h * c
    return [(torch.tanh(total), total.mean())]


class Form(NamedTuple):
    """An operation: its module, the names of its types (a list if ragged), and its meaning."""

    make: Callable[[], nn.Module]
    arguments: list[Any]
    results: list[str]
    meaning: Callable[..., list[Any]]


FORMS = {
    "embed": Form(lambda: nn.Embedding(4, 3), ["word"], ["vector"], plain_embed),
    "gate": Form(Gate, ["vector", "vector"], ["vector"], plain_gate),
    "split": Form(Split, ["vector"], ["scalar", "matrix"], plain_split),
    "step": Form(Step, ["state", "matrix", "scalar"], ["state"], plain_step),
    "total": Form(Total, [["vector"], "scalar"], ["vector"], plain_total),
    "gather": Form(Gather, [["state"]], ["state"], plain_gather),
}


class Language:
    """The operations, and an engine for them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.modules = {name: form.make() for name, form in FORMS.items()}
        self.signatures = {}
        operations = Operations()
        for name, form in FORMS.items():
            inputs = [
                Ragged(TYPES[argument[0]]) if isinstance(argument, list) else TYPES[argument]
                for argument in form.arguments
            ]
            outputs = [TYPES[result] for result in form.results]
            module = self.modules[name]
            self.signatures[name] = operations.add(module, inputs, outputs, name=name)
        self.engine = Engine(operations).double()


class Leaf(NamedTuple):
    """An input or a constant: the name of its type, and its row or its seed."""

    is_input: bool
    kind: str
    number: int


class PlainCall(NamedTuple):
    """A call on values by their numbers; a list for a ragged argument."""

    name: str
    arguments: list[Any]


class Output(NamedTuple):
    """A value by its number, and the name under which it is returned."""

    value: int
    name: str


@dataclass
class Sketch:
    """One random recording; values are numbered, leaves before results of calls."""

    leaves: list[Leaf] = field(default_factory=list)
    calls: list[PlainCall] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        return sum(leaf.is_input for leaf in self.leaves)


CONSTANTS = ("word", "vector", "scalar", "matrix", "state")


def sketch_of(integer: Callable[[int, int], int], max_calls: int = 14) -> Sketch:
    """Draw a recording with shared values, values read at any later level, any number of outputs.

    ``integer(low, high)`` draws a number; both ends are included.
    """
    sketch = Sketch()
    for kind in CONSTANTS:
        sketch.leaves.append(Leaf(False, kind, integer(0, 3)))
    for row in range(integer(0, 3)):
        sketch.leaves.append(Leaf(True, "vector", row))
    kinds = [leaf.kind for leaf in sketch.leaves]

    def value_of(kind: str) -> int:
        known = [value for value, other in enumerate(kinds) if other == kind]
        # The newest values first, so that recordings become deep.
        return known[-1 - integer(0, len(known) - 1)]

    for _ in range(integer(0, max_calls)):
        name = sorted(FORMS)[integer(0, len(FORMS) - 1)]
        arguments: list[Any] = []
        for kind in FORMS[name].arguments:
            if isinstance(kind, list):
                arguments.append([value_of(kind[0]) for _ in range(integer(0, 3))])
            else:
                arguments.append(value_of(kind))
        sketch.calls.append(PlainCall(name, arguments))
        kinds += FORMS[name].results
    for _ in range(integer(0, 4)):
        value = integer(0, len(kinds) - 1)
        sketch.outputs.append(Output(value, f"{kinds[value]} {integer(0, 1)}"))
    return sketch


@st.composite
def sketches(draw: st.DrawFn, max_calls: int = 14) -> Sketch:
    """Draw random recordings for a law."""
    return sketch_of(lambda low, high: draw(st.integers(low, high)), max_calls)


def constant(kind: str, seed: int) -> Any:
    """Return a constant of a type; float32, so that a recording does not round it."""
    if kind == "word":
        return seed
    generator = torch.Generator().manual_seed(seed)
    if kind == "state":
        return torch.randn(3, generator=generator), torch.randn((), generator=generator)
    return torch.randn(TYPES[kind].shape, generator=generator)


def constant_row(kind: str, seed: int) -> Any:
    """Return a constant as the meaning of a call takes it."""
    value = constant(kind, seed)
    if isinstance(value, int):
        return torch.tensor(value)
    if isinstance(value, tuple):
        return tuple(part.double() for part in value)
    return value.double()


def arguments_of(call: PlainCall, values: list[Any]) -> list[Any]:
    return [
        [values[number] for number in argument] if isinstance(argument, list) else values[argument]
        for argument in call.arguments
    ]


def recorded(language: Language, sketch: Sketch) -> Recording:
    """Record a sketch as a recording."""
    recording = Recording()
    values: list[Any] = []
    for leaf in sketch.leaves:
        if leaf.is_input:
            values.append(recording.input(VECTOR, leaf.number))
        else:
            values.append(recording.constant(TYPES[leaf.kind], constant(leaf.kind, leaf.number)))
    for call in sketch.calls:
        results = recording.call(language.signatures[call.name], *arguments_of(call, values))
        values += results if isinstance(results, tuple) else [results]
    for output in sketch.outputs:
        recording.output(values[output.value], output.name)
    return recording


def values_of(language: Language, sketch: Sketch, rows: Tensor) -> list[Any]:
    """Evaluate all values of a sketch, one call at a time."""
    values: list[Any] = []
    for leaf in sketch.leaves:
        if leaf.is_input:
            values.append(rows[leaf.number])
        else:
            values.append(constant_row(leaf.kind, leaf.number))
    for call in sketch.calls:
        meaning_of_call = FORMS[call.name].meaning
        values += meaning_of_call(language.modules[call.name], *arguments_of(call, values))
    return values


def meaning(language: Language, batch: list[Sketch], x: Tensor) -> dict[str, Any]:
    """Evaluate a batch of sketches, whose input rows follow each other, on single rows."""
    outputs: dict[str, list[Any]] = {}
    rows_of_examples = x.split([sketch.num_inputs for sketch in batch])
    for sketch, rows in zip(batch, rows_of_examples, strict=True):
        values = values_of(language, sketch, rows)
        for output in sketch.outputs:
            outputs.setdefault(output.name, []).append(values[output.value])
    return {name: stacked(values) for name, values in outputs.items()}


def stacked(values: list[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*values, strict=True))
    return torch.stack(values)
