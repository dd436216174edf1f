"""Write weave by the equations of one molecule; the engine batches molecules of any size.

    python examples/weave_with_engine.py

The equations are (4) and (5) of Looks et al. (2017), arXiv:1702.02181. The factored layer with the
same weights gives the same results faster. In this way, a variant of weave can be tried as a
recording first, and a layer for it can be checked.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch import (
    Engine,
    Operations,
    Ragged,
    RaggedRows,
    Recording,
    Signature,
    TensorType,
    Value,
    schedule_recordings,
)
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.nn import Pairs, WeaveConv, WeaveStack

NUM_CODES = 9
ATOM_FEATURES = 6
PAIR_FEATURES = 5
_WEAVE_METHODS = ("forward", "split", "sum_pairs", "update_pairs", "update_atoms")


class WeaveRecorder(nn.Module):
    """Run the modules of a `WeaveStack` by dynamic batching, with the same weights.

    A molecule is a recording of calls of six functions, written as in the equations. The results
    equal those of the stack, so a new variant can be tried here before a fast layer is written.

    Refuses batch normalization, which depends on other calls, hooks, and overridden methods.
    """

    def __init__(self, stack: WeaveStack, table: Tensor) -> None:
        super().__init__()
        convs: list[WeaveConv] = list(stack.convs)  # type: ignore[arg-type]
        if any(conv.norm == "batch" for conv in convs):
            raise ValueError("WeaveRecorder: batch normalization depends on other calls")
        operations = Operations()
        self.code = TensorType((), torch.long, "code")
        self.atom = TensorType((convs[0].atom_in,), tag="atom")
        pair = TensorType((table.size(1),), tag="pair")
        lookup = nn.Embedding.from_pretrained(table)
        self.lookup = operations.add(lookup, [self.code], [pair], name="lookup")
        self.levels = [_WeaveModule(operations, conv, level) for level, conv in enumerate(convs)]
        self.engine = Engine(operations)

    def recording(self, num_atoms: int, code: Sequence[Sequence[int | None]]) -> Recording:
        """Record one molecule, given the code of every ordered pair; None for an unused pair."""
        recording = Recording()
        atoms = range(num_atoms)
        a: list[Value] = [recording.input(self.atom, i) for i in atoms]
        p: dict[tuple[int, int], Value] = {
            (i, j): recording.call(self.lookup, recording.constant(self.code, code[i][j]))
            for i in atoms
            for j in atoms
            if code[i][j] is not None
        }
        for module in self.levels:
            a, p = module.record(recording, a, p)
        for value in a:
            recording.output(value)
        return recording

    def forward(self, x: Tensor, recordings: Sequence[Recording]) -> Tensor:
        """Compute the atom rows of all molecules after the last module."""
        code = {name: getattr(WeaveConv, name) for name in _WEAVE_METHODS}
        for module in self.levels:
            if not calls_only(module.conv, **code):
                raise ValueError("WeaveRecorder: a module has hooks or overrides methods")
        schedule = schedule_recordings(recordings)
        return self.engine(schedule.to(x.device), {"atom": x})["output"]


class _WeaveModule(nn.Module):
    """One weave module as six operations, each of one function of equations 4 and 5."""

    def __init__(self, operations: Operations, conv: WeaveConv, level: int) -> None:
        super().__init__()
        self.conv = conv
        atom = TensorType((conv.atom_in,), tag="" if level else "atom")
        pair = TensorType((conv.pair_in,), tag="pair")

        def add(
            name: str, *inputs: Any, run: Callable[..., Tensor] | None = None, tag: str = ""
        ) -> Signature:
            linear: Any = conv.get_submodule(f"lin_{name}")
            outputs = [TensorType((linear.out_features,), tag=tag)]
            run = run or partial(self.activated, name)
            return operations.add(run, inputs, outputs, name=f"{name}{level}")

        aa = add("aa", atom)
        pa = add("pa", pair)
        a = add("a", atom, *aa.outputs, Ragged(pa.outputs[0]), run=self.atom)
        self.of_atoms = aa, pa, a
        self.of_pairs = None
        if conv.pair_out is not None:
            ap = add("ap", atom, atom)
            pp = add("pp", pair)
            inputs = pair, *ap.outputs, *ap.outputs, *pp.outputs
            self.of_pairs = ap, pp, add("p", *inputs, run=self.pair, tag="pair")

    def record(
        self, recording: Recording, a: list[Value], p: dict[tuple[int, int], Value]
    ) -> tuple[list[Value], dict[tuple[int, int], Value]]:
        """Record equations 4 and 5 for one molecule."""
        call = recording.call
        atoms = range(len(a))
        f_aa, f_pa, f_a = self.of_atoms
        new_a = []
        for i in atoms:
            received = [call(f_pa, p[i, j]) for j in atoms if (i, j) in p]
            new_a.append(call(f_a, a[i], call(f_aa, a[i]), received))
        if self.of_pairs is None:
            return new_a, {}
        f_ap, f_pp, f_p = self.of_pairs
        ap = {(i, j): call(f_ap, a[i], a[j]) for i, j in p}
        return new_a, {
            (i, j): call(f_p, pair, ap[i, j], ap[j, i], call(f_pp, pair))
            for (i, j), pair in p.items()
        }

    def atom(self, x: Tensor, own: Tensor, received: RaggedRows) -> Tensor:
        """Update the rows of atoms."""
        return self._updated(x, self.conv.drop(self.activated("a", own, received.sum())))

    def pair(self, pair: Tensor, one: Tensor, other: Tensor, own: Tensor) -> Tensor:
        """Update the rows of pairs."""
        return self._updated(pair, self.activated("p", one + other, own))

    def activated(self, name: str, *rows: Tensor) -> Tensor:
        """Apply the linear layer of a function, its normalization and ReLU."""
        joined = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
        result = getattr(self.conv, f"lin_{name}")(joined)
        if self.conv.norm is not None:
            result = self.conv.norms[name](result)
        return result.relu()

    def _updated(self, before: Tensor, update: Tensor) -> Tensor:
        fits = self.conv.residual and before.shape == update.shape
        return update + before if fits else update


def timed(stack: nn.Module, run: nn.Module, *arguments: Any) -> tuple[Tensor, list[Tensor], float]:
    """Return the result, the gradients of all weights, and the seconds."""
    start = time.perf_counter()
    found = run(*arguments)
    gradients = torch.autograd.grad(found.square().sum(), list(stack.parameters()))
    return found, list(gradients), time.perf_counter() - start


def main() -> None:
    """Compute a batch of chains of atoms in both ways, and compare."""
    torch.manual_seed(0)
    stack = WeaveStack(ATOM_FEATURES, PAIR_FEATURES, channels=16, num_modules=2)
    table = torch.rand(NUM_CODES, PAIR_FEATURES)
    weave = WeaveRecorder(stack, table)  # the stack's weights, not copies of them

    # 1. Molecules of different sizes: chains of atoms, whose pair code is the number of bonds.
    sizes = [int(n) for n in torch.randint(1, 12, (24,))]
    x = torch.randn(sum(sizes), ATOM_FEATURES)
    bonds = [[[min(abs(i - j), 8) for j in range(n)] for i in range(n)] for n in sizes]

    # 2. One recording per molecule: a few hundred calls, recorded by loops over atoms and pairs.
    recordings = [weave.recording(n, code) for n, code in zip(sizes, bonds, strict=True)]
    schedule = schedule_recordings(recordings)
    calls = sum(recording.num_calls for recording in recordings)
    print(
        f"{calls} calls of {len(recordings)} molecules run as {len(schedule.steps)} batched calls"
    )

    # 3. The factored layer: one plan of integers for the whole batch.
    upper = [code[i][j] for code in bonds for i in range(len(code)) for j in range(i, len(code))]
    pairs = Pairs.from_codes(torch.tensor(upper), sizes, num_codes=NUM_CODES)

    by_engine, engine_gradients, engine_seconds = timed(stack, weave, x, recordings)
    by_layer, layer_gradients, layer_seconds = timed(stack, stack, x, table, pairs)
    torch.testing.assert_close(by_engine, by_layer, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(engine_gradients, layer_gradients, rtol=1e-3, atol=1e-4)
    difference = float((by_engine - by_layer).detach().abs().max())
    print(f"engine and layer agree to {difference:.0e}, and so do all gradients")
    print(f"engine {1e3 * engine_seconds:.0f} ms, layer {1e3 * layer_seconds:.1f} ms")


if __name__ == "__main__":
    main()
