"""A block with one module per type of operator, trained on measured plans."""

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import fit
from torch import Tensor, nn

from pyg_dynbatch import blocks as td

WORDS = 64  # buckets that words and columns are hashed into
FEATURES = 2 * WORDS + 3
SHORTEST = 1e-4  # seconds; shorter plans count as this, as their time is mostly noise
Plan = dict[str, Any]


def features(operator: Plan) -> np.ndarray:
    """Return what a module reads: expected rows, a bag of words, and constants by column."""
    found = np.zeros(FEATURES)
    # The operator's own rows, and those of its first two inputs.
    for place, each in enumerate([operator, *operator["children"]][:3]):
        found[place] = np.log1p(each["rows"]) / 10
    for word in operator["words"]:
        found[3 + zlib.crc32(word.encode()) % WORDS] += 0.5
    for column, value in operator["values"].items():
        found[3 + WORDS + zlib.crc32(column.encode()) % WORDS] += np.arcsinh(value) / 5
    return found


def log_seconds(operator: Plan) -> float:
    """Return the logarithm of the seconds of an operator."""
    return float(np.log(max(operator["seconds"], SHORTEST / 10)))


def prepared(plan: Plan, kinds: set[str]) -> Plan:
    """Return a plan as the block reads it; kinds outside ``kinds`` become "other"."""
    children = [prepared(child, kinds) for child in plan["children"]]
    kind = plan["kind"] if plan["kind"] in kinds else "other"
    label = None if plan["seconds"] is None else log_seconds(plan)
    key = kind, min(len(children), 3)
    own = {"key": key, "x": features(plan), "label": label, "children": children}
    return own | dict(enumerate(children))


def key_of(operator: Plan) -> tuple[str, int]:
    """Return the kind of an operator, and its number of inputs (3 for more than two)."""
    return operator["key"]


def run_time(kinds: set[str], width: int) -> td.Block:
    """Return the block whose metric ``log`` is the scaled logarithm of each operator's seconds."""
    plan = td.ForwardDeclaration(td.PyObjectType(), td.TensorType(width), name="plan")
    root, cases = plan(), {}
    for kind in sorted({*kinds, "other"}):
        for count in range(4):
            inputs: list[Any] = [(number, plan()) for number in range(count)]
            if count == 3:
                inputs = [("children", td.Map(plan()) >> td.Sum())]
            unit = nn.Sequential(
                nn.Dropout(0.1),
                nn.Linear(FEATURES + len(inputs) * width, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
            )
            operands = td.Record([("x", td.Vector(FEATURES)), *inputs])
            cases[kind, count] = operands >> td.Concat() >> unit
    node = td.Composition(name="node")
    with node.scope():
        state = td.OneOf(key_of, cases).reads(node.input)
        log = td.FC(1, activation=None).reads(state)
        td.Metric("log").reads(log, td.GetItem("label").reads(node.input))
        node.output.reads(state)
    plan.resolve_to(node)
    return root


def totals(result: td.BlockResult, num_plans: int) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the seconds of each plan and of each operator."""
    log = 3 * result.metric_tensors["log"].squeeze(-1) - 9
    total = log.new_zeros(num_plans).index_add(0, result.metric_examples["log"], log.exp())
    return total.log(), log


def train(model: Any, plans: list[Plan], log: Tensor, valid: list[Plan], valid_log: Tensor) -> None:
    """Minimise the error of plans and operators; keep the epoch that is best on validation."""
    epochs, every = 20, range(len(plans))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    traced = [model.tracer(plan) for plan in plans]
    orders = (random.Random(epoch).sample(every, len(plans)) for epoch in range(epochs))

    def losses() -> Iterator[Tensor]:
        order = next(orders)
        for numbers in (order[first : first + 100] for first in range(0, len(order), 100)):
            result = model([traced[number] for number in numbers])
            found, of_operators = totals(result, len(numbers))
            label = torch.tensor(result.metric_labels["log"], dtype=torch.float32)
            yield (found - log[numbers]).abs().mean() + 0.5 * (of_operators - label).abs().mean()
        rate.step()

    def error() -> float:
        found = float((predict(model, valid) - valid_log).abs().mean())
        print(f"typical factor on validation {np.exp(found):.2f}", flush=True)
        return found

    fit(model, optimizer, losses, error, epochs)


@torch.no_grad()
def predict(model: Any, plans: list[Plan]) -> Tensor:
    """Return the logarithm of the seconds of each plan."""
    model.eval()
    return totals(model(plans), len(plans))[0]
