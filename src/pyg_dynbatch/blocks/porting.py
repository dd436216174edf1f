"""For recordings of TensorFlow Fold: its helpers for iterators, and what replaces other names."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, tee
from typing import Any

import numpy as np

from pyg_dynbatch.core.errors import checked_count, mismatch


class EdibleIterator(Iterator[Any]):
    """An iterator that can be converted to an array, any number of times.

    Args:
        iterable: The items, for instance of a computation that is still running.

    Example:
        >>> items = EdibleIterator(n * n for n in range(3))
        >>> np.asarray(items), np.asarray(items)
        (array([0, 1, 4]), array([0, 1, 4]))
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._items = iter(iterable)
        #: The array, if it exists already.
        self.value: np.ndarray | None = None

    def __next__(self) -> Any:
        return next(self._items)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all remaining items; later calls return the same array."""
        if self.value is None:
            self.value = np.array(list(self._items), dtype)
        given = self.value if dtype is None else self.value.astype(dtype, copy=False)
        return given.copy() if copy else given


def group_by_batches(
    iterable: Iterable[Any], batch_size: int, truncate: bool = False
) -> Iterator[list[Any]]:
    """Split any iterable into lists.

    Args:
        iterable: The items.
        batch_size: Length of each list.
        truncate: Drop a last list that is shorter.

    Example:
        >>> list(group_by_batches(range(5), 2))
        [[0, 1], [2, 3], [4]]
    """
    checked_count("group_by_batches: batch_size", batch_size)
    items = iter(iterable)
    groups = iter(lambda: list(islice(items, batch_size)), [])
    return (group for group in groups if not truncate or len(group) == batch_size)


def epochs(
    items: Iterable[Any],
    n: int | None = None,
    shuffle: bool = True,
    prng: random.Random | Callable[[], float] | None = None,
) -> Iterator[Iterable[Any]]:
    """Repeat items for several epochs; the first is lazy and keeps their order.

    Args:
        items: Any iterable; it is kept in memory while it is consumed, unless n is 1.
        n: Number of epochs; None or 0 for endless epochs.
        shuffle: Shuffle the items from the second epoch on.
        prng: A ``random.Random``, or a function that returns random numbers from 0 to 1.

    Example:
        >>> [list(epoch) for epoch in epochs([1, 2], n=2, shuffle=False)]
        [[1, 2], [1, 2]]
    """
    if not isinstance(items, Iterable):
        what = "epochs: the items cannot be iterated over"
        raise mismatch(TypeError, what, "an iterable", repr(items))
    if n is not None:
        checked_count("epochs: n", n, least=0)
    if n == 1:
        return iter([items])
    draw = prng.random if isinstance(prng, random.Random) else prng or random.random
    first, again = tee(items)

    def others() -> Iterator[list[Any]]:
        kept = list(again)  # with items that the first epoch did not reach
        while True:
            if shuffle:
                kept.sort(key=lambda _: draw())
            yield list(kept)

    return islice(chain([first], others()), n or None)


_SCHEDULING = "pyg_dynbatch has {} instead (docs/scheduling.md)"
_LIGHTNING = "train under Lightning, with lightning.pytorch.Trainer.{}"

REPLACEMENTS = {
    "SerializedMessageToTree": "parse before, or in td.InputTransform: "
    "google.protobuf.json_format.MessageToDict returns nested dictionaries",
    "Loom": _SCHEDULING.format("Engine and Recording"),
    "Weaver": _SCHEDULING.format("Recording"),
    "TypeShape": _SCHEDULING.format("TensorType"),
    "LoomOp": _SCHEDULING.format("Operations.add(module, inputs, outputs)"),
    "PassThroughLoomOp": "nothing is needed: values are not copied from depth to depth",
    "WeaverOpBase": _SCHEDULING.format("Recording and schedule_structure"),
    "DeserializingWeaver": "call compiler.collate on traced examples",
    "Plan": _LIGHTNING.format("fit, validate, test or predict"),
    "TrainPlan": _LIGHTNING.format("fit"),
    "EvalPlan": _LIGHTNING.format("validate or test"),
    "InferPlan": _LIGHTNING.format("predict, or call compiler(examples) after compiler.eval()"),
    "define_plan_flags": "use the command line of Lightning (docs/training.md)",
    "plan_default_params": "set defaults in your LightningModule",
    "parse_spec": "use torch.optim, or pyg_dynbatch.training.OptimizerOptions",
    "Compiler.build_feed_dict": "call the compiler on a list of examples: "
    "result = compiler(examples)",
    "Compiler.input_tensor": "use DataLoader(examples, collate_fn=compiler.collate)",
    "Compiler.loom_input_tensor": "call the compiler on compiler.collate(examples), or "
    "keep traced examples in td.TracedExamples",
    "Compiler.output_tensors": "read them from a result: compiler(examples).output_tensors",
    "Compiler.metric_tensors": "read them from a result: compiler(examples).metric_tensors",
    "Block.eval(feed_dict=)": "values are part of the example; external rows are read by "
    "td.InputRow(tag, shape) from inputs={tag: rows}",
    "Block.eval(session=)": "there are no sessions; leave it out",
    "Block.eval(use_while_loop=)": "there is no while_loop; leave it out",
}


def replacement_of(name: str) -> str:
    """Describe in one line what replaces a name of Fold; empty for all other names."""
    return f"{name} is not supported; {REPLACEMENTS[name]}" if name in REPLACEMENTS else ""
