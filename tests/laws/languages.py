"""Random recordings in a small typed language, and a plain recursion that evaluates them.

A recording is drawn as a list of plain calls. :func:`recorded` converts it to a ``Recording``;
:func:`meaning` evaluates it call by call on single rows, without any code of the core.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
        self.a, self.b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))

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


# Names of the types of the arguments (a list for a ragged one) and of the results.
FORMS: dict[str, tuple[list[Any], list[str]]] = {
    "embed": (["word"], ["vector"]),
    "gate": (["vector", "vector"], ["vector"]),
    "split": (["vector"], ["scalar", "matrix"]),
    "step": (["state", "matrix", "scalar"], ["state"]),
    "total": ([["vector"], "scalar"], ["vector"]),
    "gather": ([["state"]], ["state"]),
}


class Language:
    """The operations, and the meaning of one call of each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        embed = nn.Embedding(4, 3)
        modules = (embed, Gate(), Split(), Step(), Total(), Gather())
        self.modules = dict(zip(FORMS, modules, strict=True))
        self.signatures, operations = {}, Operations()
        for name, (arguments, results) in FORMS.items():
            inputs = [Ragged(TYPES[a[0]]) if isinstance(a, list) else TYPES[a] for a in arguments]
            outputs = [TYPES[result] for result in results]
            module = self.modules[name]
            self.signatures[name] = operations.add(module, inputs, outputs, name=name)
        self.engine = Engine(operations).double()

    def call(self, name: str, arguments: list[Any]) -> list[Any]:
        """Evaluate one call on rows without a batch axis."""
        module: Any = self.modules[name]
        if name == "embed":
            return [module.weight[arguments[0]]]
        if name == "gate":
            return [torch.tanh(arguments[0] @ module.a + arguments[1] @ module.b)]
        if name == "split":
            (row,) = arguments
            return [torch.cos((row * row).sum()), torch.sin(row @ module.w).view(2, 3)]
        if name == "step":
            (h, c), matrix, scalar = arguments
            c = torch.sigmoid(c + scalar)
            return [(torch.tanh(h * c + (matrix[0] + matrix[1]) * module.w), c)]
        if name == "total":
            rows, scalar = arguments
            total = scalar * torch.ones(3, dtype=torch.float64)
            for position, row in enumerate(rows):
                total = total + row * module.w / (1 + position)
            return [torch.tanh(total)]
        total = torch.zeros(3, dtype=torch.float64)
        for h, c in arguments[0]:
            total = total + h * c
        return [(torch.tanh(total), total.mean())]


@dataclass
class Sketch:
    """One random recording: leaves, calls on values by number, and outputs."""

    leaves: list[tuple[str, str, int]] = field(default_factory=list)
    calls: list[tuple[str, list[Any]]] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)
    types: list[str] = field(default_factory=list)


def sketch_of(integer: Callable[[int, int], int], max_calls: int = 14) -> Sketch:
    """Draw a recording with shared values, values read at any later level, any number of outputs.

    ``integer(low, high)`` draws a number; both ends are included.
    """
    sketch = Sketch()
    for name in ("word", "vector", "scalar", "matrix", "state"):
        sketch.leaves.append(("constant", name, integer(0, 3)))
        sketch.types.append(name)
    for row in range(integer(0, 3)):
        sketch.leaves.append(("input", "vector", row))
        sketch.types.append("vector")
    for _ in range(integer(0, max_calls)):
        name = sorted(FORMS)[integer(0, len(FORMS) - 1)]
        wanted, results = FORMS[name]
        arguments: list[Any] = []
        for each in wanted:
            ragged = isinstance(each, list)
            known = [n for n, t in enumerate(sketch.types) if t == (each[0] if ragged else each)]
            count = integer(0, 3) if ragged else 1
            # The newest values first, so that recordings become deep.
            drawn = [known[-1 - integer(0, len(known) - 1)] for _ in range(count)]
            arguments.append(drawn if ragged else drawn[0])
        sketch.calls.append((name, arguments))
        sketch.types += results
    for _ in range(integer(0, 4)):
        value = integer(0, len(sketch.types) - 1)
        sketch.outputs.append((value, f"{sketch.types[value]} {integer(0, 1)}"))
    return sketch


@st.composite
def sketches(draw: st.DrawFn, max_calls: int = 14) -> Sketch:
    """Draw random recordings for a law."""
    return sketch_of(lambda low, high: draw(st.integers(low, high)), max_calls)


def leaf(name: str, seed: int) -> Any:
    """Return a constant of a type; float32, so that a recording does not round it."""
    if name == "word":
        return seed
    generator = torch.Generator().manual_seed(seed)
    if name == "state":
        return torch.randn(3, generator=generator), torch.randn((), generator=generator)
    return torch.randn(TYPES[name].shape, generator=generator)


def recorded(language: Language, sketch: Sketch) -> Recording:
    """Record a sketch as a recording."""
    recording, values = Recording(), []
    for kind, name, number in sketch.leaves:
        if kind == "input":
            values.append(recording.input(VECTOR, number))
        else:
            values.append(recording.constant(TYPES[name], leaf(name, number)))
    for name, arguments in sketch.calls:
        given = [[values[n] for n in a] if isinstance(a, list) else values[a] for a in arguments]
        results = recording.call(language.signatures[name], *given)
        values += results if isinstance(results, tuple) else [results]
    for value, name in sketch.outputs:
        recording.output(values[value], name)
    return recording


def rows_read(sketch: Sketch) -> int:
    """Count the input rows of an example."""
    return sum(kind == "input" for kind, _, _ in sketch.leaves)


def meaning(language: Language, batch: list[Sketch], x: Tensor) -> dict[str, Any]:
    """Evaluate a batch of sketches, one call at a time on single rows."""
    found: dict[str, list[Any]] = {}
    first = 0
    for sketch in batch:
        values: list[Any] = []
        for kind, name, number in sketch.leaves:
            if kind == "input":
                values.append(x[first + number])
                continue
            row = leaf(name, number)
            parts = row if isinstance(row, tuple) else (row,)
            parts = tuple(p.double() if isinstance(p, Tensor) else torch.tensor(p) for p in parts)
            values.append(parts if isinstance(row, tuple) else parts[0])
        for name, arguments in sketch.calls:
            given = [
                [values[n] for n in a] if isinstance(a, list) else values[a] for a in arguments
            ]
            values += language.call(name, given)
        for value, name in sketch.outputs:
            found.setdefault(name, []).append(values[value])
        first += rows_read(sketch)
    return {
        name: tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
        if isinstance(rows[0], tuple)
        else torch.stack(rows)
        for name, rows in found.items()
    }
