"""Dynamic batching on one page, in plain PyTorch: record, schedule by depth, run with gathers.

A network over trees computes another graph for every example, so examples cannot simply be
stacked. Dynamic batching (Looks et al., 2017) instead

1. **records** what each example computes, as a list of calls;
2. **schedules** the calls of a whole mini-batch: a call has depth 0 if it reads no other call,
   otherwise one more than the deepest call it reads; all calls of one operation at one depth
   become one *step*;
3. **runs** the steps in order: gather the rows that a step reads, call its operation once on all
   of them, append the rows that it returns. Autograd takes care of the gradients.

Here the trees are Boolean expressions and the network learns to evaluate them. The engine in
``pyg_dynbatch.core`` does the same; it adds types, many kinds of values, one preallocated buffer
of rows instead of ``torch.cat``, shared gradients and other policies than depth.
"""

import random
import time
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

WIDTH = 32
OPERATORS = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


class Call(NamedTuple):
    """A call of an operation on earlier results, or on a constant if there are none."""

    operation: str
    arguments: tuple[int, ...] = ()
    constant: int = 0


class Step(NamedTuple):
    """One call of an operation for many rows."""

    operation: str
    gathers: list[Tensor]  # per argument: which row of the buffer each call reads, [call]
    constants: Tensor  # [call]


def record(tree: int | tuple) -> list[Call]:
    """1. Record the calls for a tree such as ``("xor", ("and", 1, 0), 1)``; the root is last."""
    calls: list[Call] = []

    def visit(node: int | tuple) -> int:
        if isinstance(node, int):
            calls.append(Call("leaf", constant=node))
        else:
            operator, left, right = node
            calls.append(Call(operator, (visit(left), visit(right))))
        return len(calls) - 1

    visit(tree)
    return calls


def schedule(programs: list[list[Call]]) -> tuple[list[Step], Tensor]:
    """2. Group the calls of all programs by depth and operation; also return the roots' rows."""
    groups: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for program, calls in enumerate(programs):
        depth: list[int] = []
        for number, call in enumerate(calls):
            depth.append(1 + max((depth[argument] for argument in call.arguments), default=-1))
            groups[depth[-1], call.operation].append((program, number))

    row: dict[tuple[int, int], int] = {}  # the row of each call's result in the buffer
    steps = []
    for (_, operation), members in sorted(groups.items()):
        calls = [programs[program][number] for program, number in members]
        sources = [
            [row[program, argument] for argument in call.arguments]
            for (program, _), call in zip(members, calls, strict=True)
        ]
        gathers = [torch.tensor(column) for column in zip(*sources, strict=True)]
        steps.append(Step(operation, gathers, torch.tensor([call.constant for call in calls])))
        row |= {member: len(row) + place for place, member in enumerate(members)}
    return steps, torch.tensor([row[i, len(calls) - 1] for i, calls in enumerate(programs)])


def run(operations: nn.ModuleDict, steps: list[Step], roots: Tensor) -> Tensor:
    """3. Run the steps and return the roots' rows, [program, width]."""
    rows = operations["leaf"].weight.new_empty(0, WIDTH)
    for step in steps:
        inputs = [rows[index] for index in step.gathers] or [step.constants]
        rows = torch.cat([rows, operations[step.operation](*inputs)])
    return rows[roots]


class Merge(nn.Module):
    """Combine the rows of two children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Map two tensors [row, width] to one."""
        return torch.tanh(self.outer(torch.relu(self.inner(torch.cat([left, right], 1)))))


def random_tree(depth: int) -> tuple[int | tuple, int]:
    """Draw an expression and its value."""
    if depth == 0 or random.random() < 0.2:
        value = random.randrange(2)
        return value, value
    operator = random.choice(list(OPERATORS))
    (left, a), (right, b) = random_tree(depth - 1), random_tree(depth - 1)
    return (operator, left, right), OPERATORS[operator](a, b)


def main() -> None:
    """Train the network and compare batched with one-by-one evaluation."""
    random.seed(0)
    torch.manual_seed(0)
    merges = {name: Merge() for name in OPERATORS}
    operations = nn.ModuleDict({"leaf": nn.Embedding(2, WIDTH), **merges})
    head = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.Adam([*operations.parameters(), *head.parameters()], lr=0.003)
    for _ in range(150):
        trees, values = zip(*(random_tree(5) for _ in range(64)), strict=True)
        logits = head(run(operations, *schedule([record(tree) for tree in trees])))
        loss = nn.functional.cross_entropy(logits, torch.tensor(values))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    trees, values = zip(*(random_tree(5) for _ in range(256)), strict=True)
    programs = [record(tree) for tree in trees]
    start = time.perf_counter()
    steps, roots = schedule(programs)
    batched = run(operations, steps, roots)
    middle = time.perf_counter()
    alone = torch.cat([run(operations, *schedule([program])) for program in programs])
    torch.testing.assert_close(batched, alone, rtol=1e-4, atol=1e-5)
    ratio = (time.perf_counter() - middle) / (middle - start)
    accuracy = (head(batched).argmax(1) == torch.tensor(values)).float().mean()
    print(f"{sum(map(len, programs))} calls of {len(programs)} trees run as {len(steps)} steps")
    print(f"batched = one by one, {ratio:.0f} times as fast; test accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
