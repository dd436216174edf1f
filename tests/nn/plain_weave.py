"""Weave over all ordered pairs as the paper writes it, in dense tables, for one molecule or many.

It shares no code with the package: only names of parameters.
"""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Molecules:
    """Molecules with one code an unordered pair; ``kept`` tells which codes are used."""

    sizes: list[int]
    code: list[int]
    kept: list[bool] = field(default_factory=lambda: [True] * 5)

    def tables(self) -> list[list[list[int | None]]]:
        """For every molecule the code of every ordered pair, None where it is not used."""
        found, codes = [], iter(self.code)
        for size in self.sizes:
            table: list[list[int | None]] = [[None] * size for _ in range(size)]
            for i in range(size):
                for j in range(i, size):
                    code = next(codes)
                    table[i][j] = table[j][i] = code if self.kept[code] else None
            found.append(table)
        return found

    def ordered(self) -> list[tuple[int, int, int]]:
        """All ordered pairs of the batch that are used: first atom, second atom, code."""
        found, start = [], 0
        for table in self.tables():
            for i, row in enumerate(table):
                found += [(start + i, start + j, c) for j, c in enumerate(row) if c is not None]
            start += len(table)
        return found


@st.composite
def molecules(draw: st.DrawFn, max_atoms: int = 7, max_molecules: int = 4) -> Molecules:
    """Up to some molecules of any size, 0 and 1 included, with any codes."""
    sizes = draw(st.lists(st.integers(0, max_atoms), max_size=max_molecules))
    length = sum(n * (n + 1) // 2 for n in sizes)
    code = draw(st.lists(st.integers(0, 4), min_size=length, max_size=length))
    kept = draw(
        st.sampled_from(
            [[True] * 5, [False, True, True, True, True], [True, True, False, False, True]]
        )
    )
    return Molecules(sizes, code, kept)


def normalized(rows: Tensor, conv: torch.nn.Module, name: str) -> Tensor:
    """Batch or layer normalization of rows that are all written out."""
    if conv.norm is None or not rows.numel():
        return rows
    norm = conv.norms[name]
    if conv.norm == "layer":
        mean = rows.mean(-1, keepdim=True)
        var = ((rows - mean) ** 2).mean(-1, keepdim=True)
    elif conv.training:
        mean = rows.mean(0)
        var = ((rows - mean) ** 2).mean(0)
    else:
        mean, var = norm.running_mean, norm.running_var
    return (rows - mean) / (var + norm.eps) ** 0.5 * norm.weight + norm.bias


def plain_weave(
    conv: torch.nn.Module, x: Tensor, pair_rows: Tensor, ordered: list[tuple[int, int, int]]
) -> tuple[Tensor, Tensor | None]:
    """One module; ``pair_rows`` has a row for every ordered pair."""

    def f(name: str, *arguments: Tensor) -> Tensor:
        linear = getattr(conv, f"lin_{name}")
        rows = torch.cat(arguments, 1) @ linear.weight.t() + linear.bias
        return torch.clamp(normalized(rows, conv, name), min=0)

    first = torch.tensor([i for i, _, _ in ordered], dtype=torch.long)
    second = torch.tensor([j for _, j, _ in ordered], dtype=torch.long)
    from_pairs = f("pa", pair_rows)
    sums = [from_pairs[first == i].sum(0) for i in range(x.size(0))]
    total = torch.stack(sums) if sums else x.new_zeros(0, from_pairs.size(1))
    new_x = f("a", f("aa", x), total)
    if conv.residual and new_x.shape == x.shape:
        new_x = new_x + x
    if conv.pair_out is None:
        return new_x, None
    one = f("ap", x[first], x[second])
    place = {(i, j): n for n, (i, j, _) in enumerate(ordered)}
    reverse = torch.tensor([place[j, i] for i, j, _ in ordered], dtype=torch.long)
    new_pair_rows = f("p", one + one[reverse], f("pp", pair_rows))
    if conv.residual and new_pair_rows.shape == pair_rows.shape:
        new_pair_rows = new_pair_rows + pair_rows
    return new_x, new_pair_rows


def plain_directed(
    stack: torch.nn.Module, x: Tensor, pair_rows: Tensor, ordered: list[tuple[int, int, int]]
) -> Tensor:
    """Messages along every ordered pair of two atoms; ``pair_rows`` has a row for each."""
    weight = dict(stack.named_parameters())
    zero = x.new_zeros(weight["lin_message.weight"].size(0))
    start, sent = {}, {}
    for (i, j, _), row in zip(ordered, pair_rows, strict=True):
        if i != j:
            of_atom = weight["lin_atom.weight"] @ x[i] + weight["lin_atom.bias"]
            start[i, j] = of_atom + weight["lin_pair.weight"] @ row
            sent[i, j] = start[i, j].clamp(min=0)

    def arrived(at: int, without: int | None = None) -> Tensor:
        return sum((m for (k, i), m in sent.items() if i == at and k != without), zero)

    for _ in range(stack.num_modules):
        sent = {
            (i, j): (own + weight["lin_message.weight"] @ arrived(i, j)).clamp(min=0)
            for (i, j), own in start.items()
        }
    both = [torch.cat([row, arrived(atom)]) for atom, row in enumerate(x)]
    rows = torch.stack(both) if both else x.new_zeros(0, weight["lin_out.weight"].size(1))
    return (rows @ weight["lin_out.weight"].t() + weight["lin_out.bias"]).clamp(min=0)


def close(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """Makes all parameters and running statistics different from where they start."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter += 0.3 * torch.sin(torch.arange(parameter.numel()) + number).view_as(
                parameter
            )
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer += 0.5
            elif name.endswith("running_mean"):
                buffer -= 0.1
    return module.double()


def gradients(results: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    loss = sum(((part + 0.1) * (part.detach() + 1).cos()).sum() for part in results)
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return list(found)
