"""Random programs in a small typed language, and a plain recursion that gives their meaning.

A program is drawn as a list of plain calls; :func:`recorded` turns it into a ``Program``, and
:func:`meaning` works it out by itself, call after call, on single rows, with no code of the core.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch.core import Engine, Operations, Program, Ragged, RaggedRows, TensorType

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
    """A ragged and a fixed argument; the sum does not know the order, the weighting does."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, rows: RaggedRows, scalar: Tensor) -> Tensor:
        place = torch.zeros_like(rows.segment_ids)
        for number in range(1, len(place)):
            same = rows.segment_ids[number] == rows.segment_ids[number - 1]
            place[number] = torch.where(same, place[number - 1] + 1, 0)
        weighted = rows.rows * (self.w / (1 + place)[:, None])
        total = weighted.new_zeros(rows.num_calls, 3).index_add(0, rows.segment_ids, weighted)
        return torch.tanh(total + scalar[:, None])


class Gather(nn.Module):
    """A ragged argument of tuples."""

    def forward(self, rows: RaggedRows) -> tuple[Tensor, Tensor]:
        h, c = rows.rows
        total = h.new_zeros(rows.num_calls, 3).index_add(0, rows.segment_ids, h * c[:, None])
        return torch.tanh(total), total.mean(-1)


class Language:
    """The operations, and for each of them its meaning for one call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        operations, gate = Operations(), Gate()
        self.modules = {
            "embed": nn.Embedding(4, 3),
            "gate": gate,
            "split": Split(),
            "step": Step(),
            "total": Total(),
            "gather": Gather(),
        }
        signatures = {
            "embed": ([WORD], [VECTOR]),
            "gate": ([VECTOR, VECTOR], [VECTOR]),
            "split": ([VECTOR], [SCALAR, MATRIX]),
            "step": ([STATE, MATRIX, SCALAR], [STATE]),
            "total": ([Ragged(VECTOR), SCALAR], [VECTOR]),
            "gather": ([Ragged(STATE)], [STATE]),
        }
        self.signatures = {
            name: operations.add(self.modules[name], inputs, outputs, name=name)
            for name, (inputs, outputs) in signatures.items()
        }
        self.engine = Engine(operations).double()

    def call(self, name: str, arguments: list[Any]) -> list[Any]:
        """What one call means, on rows without a batch axis."""
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
            for place, row in enumerate(rows):
                total = total + row * module.w / (1 + place)
            return [torch.tanh(total)]
        total = torch.zeros(3, dtype=torch.float64)
        for h, c in arguments[0]:
            total = total + h * c
        return [(torch.tanh(total), total.mean())]


# What goes in (a list marks a ragged argument) and what comes out, by the names of the types.
FORMS: dict[str, tuple[list[Any], list[str]]] = {
    "embed": (["word"], ["vector"]),
    "gate": (["vector", "vector"], ["vector"]),
    "split": (["vector"], ["scalar", "matrix"]),
    "step": (["state", "matrix", "scalar"], ["state"]),
    "total": ([["vector"], "scalar"], ["vector"]),
    "gather": ([["state"]], ["state"]),
}


@dataclass
class Sketch:
    """One random program: leaves, then calls on values by number, then marked values."""

    leaves: list[tuple[str, str, int]] = field(default_factory=list)
    calls: list[tuple[str, list[Any]]] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)
    types: list[str] = field(default_factory=list)


def sketch_of(integer: Callable[[int, int], int], max_calls: int = 14) -> Sketch:
    """Random programs: shared values, values read at any later level, any number of outputs.

    ``integer(low, high)`` draws a number, both ends included.
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
        wanted, made = FORMS[name]
        arguments: list[Any] = []
        for each in wanted:
            ragged = isinstance(each, list)
            known = [n for n, t in enumerate(sketch.types) if t == (each[0] if ragged else each)]
            # The newest values first, so that programs become deep.
            drawn = [
                known[-1 - integer(0, len(known) - 1)]
                for _ in range(integer(0, 3) if ragged else 1)
            ]
            arguments.append(drawn if ragged else drawn[0])
        sketch.calls.append((name, arguments))
        sketch.types += made
    for _ in range(integer(0, 4)):
        value = integer(0, len(sketch.types) - 1)
        sketch.outputs.append((value, f"{sketch.types[value]} {integer(0, 1)}"))
    return sketch


@st.composite
def sketches(draw: st.DrawFn, max_calls: int = 14) -> Sketch:
    """Random programs for a law."""
    return sketch_of(lambda low, high: draw(st.integers(low, high)), max_calls)


def leaf(name: str, seed: int) -> Any:
    """The constant of a type with a number; float32, so that nothing is rounded in a program."""
    if name == "word":
        return seed
    generator = torch.Generator().manual_seed(seed)
    if name == "state":
        return torch.randn(3, generator=generator), torch.randn((), generator=generator)
    return torch.randn(TYPES[name].shape, generator=generator)


def recorded(language: Language, sketch: Sketch) -> Program:
    """The program of a sketch."""
    program, values = Program(), []
    for kind, name, number in sketch.leaves:
        if kind == "input":
            values.append(program.input(VECTOR, number))
        else:
            values.append(program.constant(TYPES[name], leaf(name, number)))
    for name, arguments in sketch.calls:
        given = [[values[n] for n in a] if isinstance(a, list) else values[a] for a in arguments]
        results = program.call(language.signatures[name], *given)
        values += results if isinstance(results, tuple) else [results]
    for value, name in sketch.outputs:
        program.output(values[value], name)
    return program


def rows_read(sketch: Sketch) -> int:
    """How many input rows an example has."""
    return sum(kind == "input" for kind, _, _ in sketch.leaves)


def meaning(language: Language, batch: list[Sketch], x: Tensor) -> dict[str, Any]:
    """What a batch of sketches means, worked out one call at a time on single rows."""
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
