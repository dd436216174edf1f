"""Evaluate one input of a block, without keeping anything."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pyg_dynbatch.blocks.compile import compile_block
from pyg_dynbatch.blocks.decode import Traced
from pyg_dynbatch.blocks.result_types import ResultType, TensorType
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.operation import Operations
from pyg_dynbatch.core.schedule import Schedule

if TYPE_CHECKING:
    from pyg_dynbatch.blocks.block import Block


def evaluate(block: "Block", inp: Any, *, tolist: bool = False, inputs: Any = None) -> Any:
    """Evaluates one input; see :meth:`Block.eval`."""
    operations = Operations()
    tracer = compile_block(block, operations, keeps_result=True)
    traced = tracer(inp)
    engine = Engine(operations).to(_device_of(operations))
    schedule = Schedule.from_programs([tracer.program(traced)]).to(engine.device)
    found = engine(schedule, inputs)
    result = _filled(block._known("output"), traced.result, found, tolist)
    metrics = _metrics(traced, found, tolist)
    return (result, metrics) if tracer.recipe.metrics else result


def _metrics(traced: Traced, found: dict[str, Any], tolist: bool) -> dict[str, list[Any]]:
    """The values of each metric; with its label where one was given."""
    metrics: dict[str, list[Any]] = {}
    for name, labels in traced.labels.items():
        rows = list(found.get(f"metric:{name}", ()))
        values = [row.tolist() if tolist else row for row in rows]
        labelled = any(label is not None for label in labels)
        metrics[name] = list(zip(values, labels, strict=True)) if labelled else values
    return metrics


def _filled(kind: ResultType, result: Any, found: dict[str, torch.Tensor], tolist: bool) -> Any:
    """Puts tensors in place of the numbers of values."""
    rows: dict[str, Iterator[torch.Tensor]] = {name: iter(r) for name, r in found.items()}
    numbers = iter(range(len(found)))

    def take(terminal: ResultType, value: Any) -> Any:
        if not isinstance(terminal, TensorType):
            return value
        name = f"output_{next(numbers)}" if kind.size else f"output:{terminal}"
        row = next(rows[name])
        return row.tolist() if tolist else row

    flat: list[Any] = []
    kind.for_each_terminal(lambda t, value: flat.append(take(t, value)), result)
    return kind.unflatten(iter(flat), result)


def _device_of(operations: Operations) -> torch.device:
    first = next(operations.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def depth_for(block: "Block", inp: Any) -> int:
    """Counts the longest chain of calls; see :meth:`Block.max_depth`."""
    tracer = compile_block(block, Operations())
    return tracer.program(tracer(inp)).depth
