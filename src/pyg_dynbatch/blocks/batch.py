"""Hold what a mini-batch needs on the device, and what comes back from there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.blocks.decode import Traced, merge_traced
from pyg_dynbatch.blocks.result_types import ResultType
from pyg_dynbatch.blocks.site import Recipe
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.merge import schedule_merged
from pyg_dynbatch.core.schedule import Schedule


@dataclass(frozen=True, eq=False)
class TracedBatch:
    """Carries the schedule of a mini-batch from a loader worker to the compiled module.

    Args:
        schedule: Integers and constants.
        labels: For each metric the labels of its values, example after example.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> compiler.collate([[1.0, 2.0], [3.0]])
        TracedBatch(2 examples, 1 steps)
    """

    schedule: Schedule
    labels: dict[str, list[Any]]

    def _with(self, schedule: Schedule) -> "TracedBatch":
        return TracedBatch(schedule, self.labels)

    def to(self, *args: Any, **kwargs: Any) -> "TracedBatch":
        """Moves to a device."""
        return self._with(self.schedule.to(*args, **kwargs))

    def pin_memory(self) -> "TracedBatch":
        """Copies into page-locked memory, from which the copy to a device is asynchronous."""
        return self._with(self.schedule.pin_memory())

    def record_stream(self, stream: Any) -> "TracedBatch":
        """Tells the CUDA allocator that a stream uses the tensors."""
        self.schedule.record_stream(stream)
        return self

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return self.schedule.num_examples

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        """Says how large it is."""
        return f"TracedBatch({self.num_examples} examples, {len(self.schedule.steps)} steps)"


@dataclass(frozen=True, eq=False)
class BlockResult:
    """Gives what a compiled block computed for a mini-batch.

    Args:
        output: The root's output, nested as its type says, each tensor ``[example, …]``.
        metric_tensors: For each metric its values, ``[value, …]``: any number an example.
        metric_labels: For each metric the label of each value (``None`` where none was given).
        metric_examples: For each metric the example of each value, ``[value]``.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> model = td.Compiler.create(td.AllOf(td.Scalar(), td.Scalar() >> td.Metric("m")))
        >>> result = model([1.0, 2.0])
        >>> result.output_tensors, result.metric_tensors["m"]
        ([tensor([1., 2.])], tensor([1., 2.]))
    """

    output: Any
    metric_tensors: dict[str, Tensor]
    metric_labels: dict[str, list[Any]]
    metric_examples: dict[str, Tensor]

    @property
    def output_tensors(self) -> list[Tensor]:
        """The tensors of the output, one after another."""
        return _flat(self.output)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return [] if value is None else [value]


def collate_traced(
    recipe: Recipe, traced: Sequence[Traced], policy: Any, merge_equal: bool
) -> TracedBatch:
    """Merges traced examples into the schedule of a mini-batch."""
    if not traced:
        raise ValueError(
            mismatch("Compiler: there is no example", expected="one example or more", got=0)
        )
    merged, _ = merge_traced(recipe, traced)
    schedule = schedule_merged(merged, policy, merge_equal, len(traced))
    labels = {
        name: [label for one in traced for label in one.labels[name]]
        for name in recipe.metric_types
    }
    return TracedBatch(schedule, labels)


def result_of(
    kind: ResultType, found: dict[str, Any], batch: TracedBatch, empty: Callable[[str], Tensor]
) -> BlockResult:
    """Nests the rows that an engine gave."""
    count = sum(name.startswith("output_") for name in found)
    rows: Iterator[Tensor] = (found[f"output_{number}"] for number in range(count))
    metrics, examples = {}, {}
    for name in batch.labels:
        key = f"metric:{name}"
        metrics[name] = found[key] if key in found else empty(name)
        has = key in found
        examples[name] = (
            batch.schedule.example_of(key)
            if has
            else torch.zeros(0, dtype=torch.int64, device=batch.schedule.device)
        )
    output = kind.unflatten(rows, None)
    return BlockResult(output, metrics, batch.labels, examples)


def refuse_one_example(examples: Any) -> list[Any]:
    """Takes any iterable of examples.

    Raises:
        TypeError: If it is none; often that is one example alone.
    """
    try:
        return list(examples)
    except TypeError as error:
        raise TypeError(
            mismatch(
                "Compiler: the examples cannot be iterated over",
                expected="a list of examples",
                got=type(examples).__name__,
                mend="[example], if this is a single one",
            )
        ) from error
