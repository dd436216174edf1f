"""Ways to run two weave modules with the same weights: factored, plain, by the engine."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.protocol import Stopwatch, assert_agreement
from benchmarks.weave_cost import WeaveSizes
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.molecules.data import MoleculeCollater, MoleculeData
from pyg_dynbatch.molecules.models import WeaveProgram
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.weave import WeaveConv, WeaveStack

FUSED, PLAIN, ENGINE = "fused", "plain", "engine"


class OrderedPairs(NamedTuple):
    """Lists every pair of two atoms in both orders, sorted by the first atom.

    Args:
        first: Atom whose sum the pair is part of.
        second: The other one.
        code: Code of the pair.
    """

    first: Int[Tensor, " ordered"]
    second: Int[Tensor, " ordered"]
    code: Int[Tensor, " ordered"]

    @classmethod
    def of(cls, pairs: Pairs) -> "OrderedPairs":
        """Writes the pairs of a plan out in both orders.

        Args:
            pairs: The plan, with codes.

        Example:
            >>> pairs = Pairs.from_codes(torch.tensor([0, 1, 0]), [2])
            >>> [part.tolist() for part in OrderedPairs.of(pairs)]
            [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
        """
        twice = ~pairs.is_self
        first = torch.cat([pairs.first, pairs.second[twice]]).long()
        second = torch.cat([pairs.second, pairs.first[twice]]).long()
        code = torch.cat([pairs.code, pairs.code[twice]]).long()
        order = torch.argsort(first * pairs.num_atoms + second)
        return cls(first[order], second[order], code[order])


def plain_weave(
    stack: WeaveStack,
    x: Float[Tensor, "atom feature"],
    pair: Float[Tensor, "ordered channel"],
    ends: OrderedPairs,
) -> Float[Tensor, "atom out"]:
    """Runs the modules as the equations stand there: one row for every ordered pair.

    Args:
        stack: Holds the weights; without normalisation.
        x: Atom rows.
        pair: Rows of all ordered pairs.
        ends: The atoms of each.

    Returns:
        The atom rows after the last module.
    """
    for conv in _convs(stack):
        own = conv.lin_aa(x).relu()
        received = conv.lin_pa(pair).relu()
        total = torch.zeros_like(own).index_add(0, ends.first, received)
        if conv.pair_out is not None:
            first, second = x[ends.first], x[ends.second]
            there = conv.lin_ap(torch.cat([first, second], 1)).relu()
            back = conv.lin_ap(torch.cat([second, first], 1)).relu()
            kept = conv.lin_pp(pair).relu()
            pair = conv.lin_p(torch.cat([there + back, kept], 1)).relu()
        x = conv.lin_a(torch.cat([own, total], 1)).relu()
    return x


def _convs(stack: WeaveStack) -> list[WeaveConv]:
    return list(stack.convs)  # type: ignore[arg-type]


class WeaveBatch:
    """Holds a mini-batch of molecules in the form that every way wants.

    Args:
        molecules: The molecules.
        collate: Makes the plan of the pairs.
        device: Where to put all.
    """

    def __init__(
        self, molecules: Sequence[MoleculeData], collate: MoleculeCollater, device: torch.device
    ) -> None:
        batch: Any = collate(list(molecules))
        self.molecules = molecules
        self.x: Tensor = batch.x.to(device)
        self.pairs: Pairs = batch.pairs.to(device)
        self.table = collate.pair_table.features.to(device)
        self.ends = OrderedPairs.of(self.pairs)
        self.pair = self.table[self.ends.code]
        self.schedule: Schedule | None = None

    def double(self) -> "WeaveBatch":
        """Copies the batch with its rows in double precision."""
        copied = copy.copy(self)
        copied.x, copied.table = self.x.double(), self.table.double()
        copied.pair = self.pair.double()
        return copied

    def sizes(self, units: int) -> WeaveSizes:
        """Gives the sizes that decide the cost.

        Args:
            units: Width of the modules.
        """
        atoms, atom_in = self.x.shape
        codes, pair_in = self.table.shape
        pairs, ordered = self.pairs.num_pairs, self.ends.first.numel()
        return WeaveSizes(atoms, pairs, ordered, codes, atom_in, pair_in, units)


class WeaveWays:
    """Runs two weave modules in several ways.

    Args:
        stack: The modules, without normalisation.
        table: Row of every pair code.
    """

    def __init__(self, stack: WeaveStack, table: Tensor) -> None:
        self.stack = stack
        self.program = WeaveProgram(stack, table)

    def record(self, batch: WeaveBatch) -> None:
        """Writes the molecules down as programs and makes the schedule that the engine runs."""
        programs = []
        for molecule in batch.molecules:
            atoms = int(molecule.num_nodes or 0)
            code = np.zeros((atoms, atoms), dtype=np.int64)
            code[np.triu_indices(atoms)] = molecule.pair_code.numpy()
            both = np.maximum(code, code.T)
            programs.append(self.program.program(atoms, both.tolist()))
        batch.schedule = Schedule.from_programs(programs).to(batch.x.device)

    def atoms(self, mode: str, batch: WeaveBatch) -> Tensor:
        """Computes the updated atom rows, ``[atom, unit]``."""
        if mode == PLAIN:
            return plain_weave(self.stack, batch.x, batch.pair, batch.ends)
        if mode == ENGINE:
            return self.program.engine(batch.schedule, {"atom": batch.x})["output"]
        return self.stack(batch.x, batch.table, batch.pairs)

    def train(self, mode: str, batch: WeaveBatch) -> Tensor:
        """Runs both passes; gives the atom rows."""
        self.stack.zero_grad()
        atoms = self.atoms(mode, batch)
        atoms.backward(self._gradient(atoms))
        return atoms.detach()

    def timed(self, mode: str, batch: WeaveBatch, lap: Stopwatch) -> None:
        """Runs both passes, and then the forward pass alone, under a stopwatch."""
        self.stack.zero_grad()
        lap.skip()
        atoms = self.atoms(mode, batch)
        lap("forward")
        atoms.backward(self._gradient(atoms))
        lap("backward")
        del atoms
        with torch.inference_mode():
            lap.skip()
            self.atoms(mode, batch)
            lap("inference")

    def _gradient(self, atoms: Tensor) -> Tensor:
        return torch.ones_like(atoms)

    def check(self, modes: Sequence[str], batch: WeaveBatch) -> Tensor:
        """Compares atom rows and gradients of all modes with those of the fused layers.

        Plain and fused are compared in double precision: over the 250,000 ordered pairs of one
        large molecule single precision rounds by nearly a thousandth.

        Args:
            modes: The modes.
            batch: The molecules.

        Returns:
            The atom rows.

        Raises:
            RuntimeError: If one of them differs.
        """
        wanted = self._results(FUSED, batch)
        if ENGINE in modes:
            assert_agreement(ENGINE, wanted, self._results(ENGINE, batch))
        if PLAIN in modes:
            exact = WeaveWays(copy.deepcopy(self.stack).double(), batch.table.double())
            doubled = batch.double()
            right = exact._results(FUSED, doubled)
            assert_agreement(PLAIN, right, exact._results(PLAIN, doubled), 1e-9)
        return wanted[0]

    def _results(self, mode: str, batch: WeaveBatch) -> list[Tensor]:
        atoms = self.train(mode, batch)
        grads = [p.grad.clone() for p in self.stack.parameters() if p.grad is not None]
        return [atoms, *grads]

    def arrays(self, batch: WeaveBatch) -> dict[str, np.ndarray]:
        """Gives weights and rows under the names that DeepChem's layers know them by.

        Args:
            batch: The molecules.
        """
        ends = torch.stack([batch.ends.first, batch.ends.second], 1)
        found = {"x": batch.x, "pair": batch.pair, "source": batch.ends.first, "ends": ends}
        for level, conv in enumerate(_convs(self.stack)):
            for name in ("aa", "pa", "a", "ap", "pp", "p"):
                linear = getattr(conv, f"lin_{name}", None)
                if linear is not None:
                    found[f"{level}.W_{name.upper()}"] = linear.weight.t()
                    found[f"{level}.b_{name.upper()}"] = linear.bias
        return {key: t.detach().cpu().contiguous().numpy() for key, t in found.items()}
