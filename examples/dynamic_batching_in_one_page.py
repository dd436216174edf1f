r"""Dynamic batching on one page, in plain PyTorch: record, schedule by depth, run with gathers.

    python examples/dynamic_batching_in_one_page.py

A network over trees computes a different graph for every example, so examples cannot be stacked
into one tensor. Dynamic batching (Looks et al., 2017) instead

1. **records** what each example computes, as a list of calls;
2. **schedules** the calls of all examples: calls of one operation at one depth become one *step*;
3. **runs** the steps: gather the rows that the calls read, call the operation once on all of them,
   append the resulting rows to those of earlier steps. Autograd does the rest.

Here the trees are Boolean expressions, and the network learns to evaluate them:

    ("xor", ("and", 1, 0), 1)       ("and", 0, 1)         steps of both examples

              xor                                         depth 2: one xor
             /   \
          and     1                     and               depth 1: two ands
         /   \                         /   \
        1     0                       0     1             depth 0: five leaves
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
    """A call of an operation: a leaf reads a constant, all others the results of earlier calls."""

    operation: str
    arguments: tuple[int, ...] = ()  # numbers of calls of the same example
    constant: int = 0


class Step(NamedTuple):
    """All calls of one operation at one depth."""

    operation: str
    gathers: list[Tensor]  # for each argument, the row that each call reads, [call]
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


def schedule(examples: list[list[Call]]) -> tuple[list[Step], Tensor]:
    """2. Group the calls of all examples into steps; also return the row of each root."""
    groups: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for example, calls in enumerate(examples):
        depth: list[int] = []
        for number, call in enumerate(calls):
            depth.append(1 + max((depth[argument] for argument in call.arguments), default=-1))
            groups[depth[-1], call.operation].append((example, number))

    # A step appends one row per call, so the row of every call is known before anything runs.
    row: dict[tuple[int, int], int] = {}
    steps = []
    for (_, operation), members in sorted(groups.items()):
        reads = []
        constants = []
        for example, number in members:
            call = examples[example][number]
            reads.append([row[example, argument] for argument in call.arguments])
            constants.append(call.constant)
            row[example, number] = len(row)
        gathers = [torch.tensor(column) for column in zip(*reads, strict=True)]
        steps.append(Step(operation, gathers, torch.tensor(constants)))
    return steps, torch.tensor([row[k, len(calls) - 1] for k, calls in enumerate(examples)])


def run(operations: nn.ModuleDict, steps: list[Step], roots: Tensor) -> Tensor:
    """3. Run the steps and return the rows of the roots, [example, width]."""
    rows = torch.empty(0, WIDTH)
    for step in steps:
        inputs = [rows[index] for index in step.gathers] or [step.constants]
        rows = torch.cat([rows, operations[step.operation](*inputs)])
    return rows[roots]


class Merge(nn.Sequential):
    """Compute the rows of parents from the rows of their two children."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Map two tensors [call, width] to one; nothing here knows about trees."""
        return super().forward(torch.cat([left, right], 1))


def random_tree(depth: int) -> tuple[int | tuple, int]:
    """Draw an expression and its value."""
    if depth == 0 or random.random() < 0.2:
        return (bit := random.randrange(2)), bit
    operator = random.choice(list(OPERATORS))
    left, a = random_tree(depth - 1)
    right, b = random_tree(depth - 1)
    return (operator, left, right), OPERATORS[operator](a, b)


def main() -> None:
    """Train the network, then compare batched evaluation with one example at a time."""
    random.seed(0)
    torch.manual_seed(0)
    operations = nn.ModuleDict({"leaf": nn.Embedding(2, WIDTH)} | {k: Merge() for k in OPERATORS})
    head = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.Adam([*operations.parameters(), *head.parameters()], lr=0.003)
    for _ in range(150):
        trees, values = zip(*(random_tree(5) for _ in range(64)), strict=True)
        logits = head(run(operations, *schedule([record(tree) for tree in trees])))
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, torch.tensor(values)).backward()
        optimizer.step()

    trees, values = zip(*(random_tree(5) for _ in range(256)), strict=True)
    examples = [record(tree) for tree in trees]
    start = time.perf_counter()
    steps, roots = schedule(examples)
    batched = run(operations, steps, roots)
    middle = time.perf_counter()
    alone = torch.cat([run(operations, *schedule([calls])) for calls in examples])
    ratio = (time.perf_counter() - middle) / (middle - start)
    torch.testing.assert_close(batched, alone, rtol=1e-4, atol=1e-5)
    accuracy = (head(batched).argmax(1) == torch.tensor(values)).float().mean()
    print(f"{sum(map(len, examples))} calls of {len(examples)} trees run as {len(steps)} steps")
    print(f"batched = one by one, {ratio:.0f} times as fast; test accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
