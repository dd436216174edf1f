"""Weave written as programs: one call an atom or a pair, batched by the engine."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Operations, Ragged, Signature
from pyg_dynbatch.core.program import Program, Value
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.tensor_type import TensorType
from pyg_dynbatch.nn.weave import WeaveConv
from pyg_dynbatch.nn.weave_stack import WeaveStack


class WeaveProgram(nn.Module):
    """Runs the modules of a :class:`WeaveStack` by dynamic batching, with the same weights.

    A molecule is a program of calls of the six functions, written down exactly as in the
    equations; nothing in it knows of batches. It gives what the stack gives, and is the way to
    try a changed weave before it is worth a fast layer of its own.

    Args:
        stack: The modules; its parameters are shared. Batch normalisation is refused, since a
            call must not depend on others.
        table: Row of every pair code.

    Shape:
        - x: ``[atom, atom_in]`` of all molecules, one after another
        - returns: ``[atom, channels]``

    Raises:
        ValueError: If the modules have batch normalisation.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, equations 4-5.

    Example:
        >>> stack, table = WeaveStack(3, 2, channels=8), torch.eye(2)
        >>> weave = WeaveProgram(stack, table)
        >>> water = weave.program(3, [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
        >>> weave(torch.randn(6, 3), [water, water]).shape
        torch.Size([6, 8])
    """

    def __init__(self, stack: WeaveStack, table: Float[Tensor, "code channel"]) -> None:
        super().__init__()
        convs: list[WeaveConv] = list(stack.convs)  # type: ignore[arg-type]
        if any(conv.norm == "batch" for conv in convs):
            raise ValueError(
                mismatch(
                    "WeaveProgram: batch normalisation looks at several calls at once",
                    expected="norm=None or norm='layer'",
                    got="norm='batch'",
                )
            )
        operations = Operations()
        self.code = TensorType((), torch.long, "code")
        self.atom = TensorType((convs[0].atom_in,), tag="atom")
        pair = TensorType((table.size(1),), tag="pair")
        lookup = operations.add(_Lookup(table), [self.code], [pair], name="lookup")
        self.lookup: Signature = lookup
        self.levels = [_Level(operations, conv, number) for number, conv in enumerate(convs)]
        self.engine = Engine(operations)

    def program(self, num_atoms: int, code: Sequence[Sequence[int | None]]) -> Program:
        """Writes down one molecule.

        Args:
            num_atoms: Number of atoms.
            code: Code of every ordered pair; ``None`` for a pair that is not used.

        Returns:
            The program; it reads the atoms as inputs and gives the updated ones.
        """
        program, atoms = Program(), range(num_atoms)
        a: list[Value] = [program.input(self.atom, i) for i in atoms]
        used = [(i, j) for i in atoms for j in atoms if code[i][j] is not None]
        p: dict[tuple[int, int], Value] = {
            (i, j): program.call(self.lookup, program.constant(self.code, code[i][j]))
            for i, j in used
        }
        for level in self.levels:
            a, p = level.record(program, a, p)
        for value in a:
            program.output(value)
        return program

    def forward(
        self, x: Float[Tensor, "atom feature"], programs: Sequence[Program]
    ) -> Float[Tensor, "atom out"]:
        """Computes the atom rows of all molecules after the last module."""
        schedule = Schedule.from_programs(programs)
        return self.engine(schedule.to(x.device), {"atom": x})["output"]


class _Level:
    """The six functions of one module as operations."""

    def __init__(self, operations: Operations, conv: WeaveConv, number: int) -> None:
        self.pairs_too = conv.pair_out is not None
        atom = TensorType((conv.atom_in,), tag="" if number else "atom")
        pair = TensorType((conv.pair_in,), tag="pair")

        def add(name: str, inputs: list[Any], width: int, tag: str = "") -> Signature:
            part = _Part(conv, name)
            out = TensorType((width,), tag=tag)
            return operations.add(part, inputs, [out], name=f"{name}{number}")

        self.aa = add("aa", [atom], conv.lin_aa.out_features)
        self.pa = add("pa", [pair], conv.lin_pa.out_features)
        self.a = add("a", [atom, *self.aa.outputs, Ragged(self.pa.outputs[0])], conv.atom_out)
        if self.pairs_too:
            between = conv.lin_ap.out_features
            self.ap = add("ap", [atom, atom], between)
            self.pp = add("pp", [pair], conv.lin_pp.out_features)
            inputs = [*self.ap.outputs * 2, *self.pp.outputs, pair]
            self.p = add("p", inputs, conv.pair_out or 0, "pair")

    def record(
        self, program: Program, a: list[Value], p: dict[tuple[int, int], Value]
    ) -> tuple[list[Value], dict[tuple[int, int], Value]]:
        """Writes down equations 4 and 5 for one molecule."""
        call, atoms = program.call, range(len(a))
        new_a = [
            call(
                self.a,
                a[i],
                call(self.aa, a[i]),
                [call(self.pa, p[i, j]) for j in atoms if (i, j) in p],
            )
            for i in atoms
        ]
        if not self.pairs_too:
            return new_a, {}
        ap = {(i, j): call(self.ap, a[i], a[j]) for i, j in p}
        new_p = {
            (i, j): call(self.p, ap[i, j], ap[j, i], call(self.pp, p[i, j]), p[i, j]) for i, j in p
        }
        return new_a, new_p


class _Lookup(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, code: Tensor) -> Tensor:
        return self.get_buffer("table")[code]


class _Part(nn.Module):
    """One of the six functions of a module, on rows of calls."""

    def __init__(self, conv: WeaveConv, name: str) -> None:
        super().__init__()
        self.conv, self.name = conv, name

    def forward(self, *rows: Any) -> Tensor:
        conv, own = self.conv, None
        if self.name == "a":
            own, *rest = rows
            rows = (rest[0], rest[1].sum())
        elif self.name == "p":
            one, other, pair, own = rows
            rows = (one + other, pair)
        linear = getattr(conv, f"lin_{self.name}")
        result = linear(torch.cat(rows, 1) if len(rows) > 1 else rows[0])
        if conv.norm is not None:
            result = conv.norms[self.name](result)
        result = result.relu()
        if self.name == "a":
            result = conv.drop(result)
        fits = own is not None and conv.residual and own.shape == result.shape
        return result + own if fits else result
