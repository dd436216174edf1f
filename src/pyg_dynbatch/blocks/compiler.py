"""Turn a block into a module that takes mini-batches of Python examples."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block, BlockLike, Identity, convert_to_block, runners
from pyg_dynbatch.blocks.code import Code, ModelCode, TraceError
from pyg_dynbatch.blocks.control import Record, Void
from pyg_dynbatch.blocks.draw import explained
from pyg_dynbatch.blocks.sequences import Broadcast, Map
from pyg_dynbatch.blocks.tensors import InputTransform, Tensor
from pyg_dynbatch.blocks.tracing import BlockResult, Collater, Tracer, check_model, named_terminals
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    propagate_types,
    repeated_value,
)
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.modules import copy_of, set_mode
from pyg_dynbatch.core.operation import Operations
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import Steps


class Compiler(nn.Module):
    """Compute a block on mini-batches; a module with all parameters of its layers.

    Call it on a list of examples; or let loader workers call its ``tracer`` or ``collate``, which
    have no parameters, and call it on their batches.

    Args:
        root_block_like: What :func:`convert_to_block` takes.
        max_depth: Raise an error for examples with more calls one after another.
        policy: Order of the steps: ``"depth"`` or ``"agenda"``.

    Attributes:
        root: The block.
        tracer: Records the calls of one example.
        collate: Makes a mini-batch of examples, traced or not.
        engine: Runs mini-batches; holds the parameters.

    Raises:
        ValueError: If the policy is unknown.
        TypeError: If a type cannot be inferred, the output holds a host object or a sequence, or
            there are neither outputs nor metrics.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> cell = torch.nn.Bilinear(1, 1, 1)
        >>> model = Compiler(td.Map(td.Vector(1)) >> td.Fold(cell, td.Zeros(1)))
        >>> model([[[1.0], [2.0]], [[3.0]]]).output.shape
        torch.Size([2, 1])
    """

    def __init__(
        self, root_block_like: BlockLike, max_depth: int | None = None, *, policy: Policy = "depth"
    ) -> None:
        super().__init__()
        operations = Operations()
        self.root: Block = convert_to_block(root_block_like)
        self.tracer: Tracer = compile_block(self.root, operations)
        _check_root(self.root, self.tracer)
        self.collate: Collater = Collater(self.tracer, policy, max_depth)
        self.engine: Engine = Engine(operations)

    @classmethod
    def create(
        cls, root_block_like: BlockLike, max_depth: int | None = None, *, policy: Policy = "depth"
    ) -> "Compiler":
        """Compile a block: Fold's name of the constructor."""
        return cls(root_block_like, max_depth, policy=policy)

    def forward(
        self, examples: Iterable[object] | Steps, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> BlockResult:
        """Compute a mini-batch.

        Args:
            examples: Python examples (traced or not), or what ``collate`` made of them.
            inputs: External rows by tag, see :class:`InputRow`.
        """
        steps = examples if isinstance(examples, Steps) else self.collate(examples)
        check_model(self.tracer.source, steps.model, "the mini-batch is")
        steps = steps.to(self.engine.device)
        rows = self.engine(steps, inputs)

        terminals = (rows[f"output_{number}"] for number in count())
        output = self.root._known("output").unflatten(terminals, None)

        metrics: dict[str, torch.Tensor] = {}
        metric_examples: dict[str, torch.Tensor] = {}
        for name in steps.result:
            key = f"metric:{name}"
            if key in rows:
                metrics[name] = rows[key]
                metric_examples[name] = steps.example_of(key)
            else:  # no example has a value
                row_type = self.tracer.source.metric_types[name].row_type
                (metrics[name],) = self.engine.no_rows(row_type)
                metric_examples[name] = torch.zeros(0, dtype=torch.int64, device=steps.device)
        return BlockResult(output, metrics, steps.result, metric_examples)

    def max_depth(self, inp: object) -> int:
        """Return the length of the longest chain of calls for an input; nothing is computed."""
        return self.tracer(inp).depth

    def explain(self, example: object) -> str:
        """List the calls of an example, one per line, each with its block.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> print(Compiler(td.Map(td.Scalar()) >> td.Sum()).explain([1.0, 2.0]))
            call 0: sum([1.0, 2.0])  Root.Sum
        """
        return "\n".join(explained(self.tracer.source, self.tracer(example)))

    def extra_repr(self) -> str:
        """Text of the block."""
        return repr(self.root)


def _check_root(root: Block, tracer: Tracer) -> None:
    """Raise an error if the output of the root cannot be stacked over examples."""
    kind = root._known("output")
    for inner in kind.walk():
        if isinstance(inner, PyObjectType | SequenceType):
            invalid = "a host object" if isinstance(inner, PyObjectType) else "a sequence"
            hint = "root.eval(example) returns anything; td.Metric any number of values"
            expected = "tensors and tuples of them"
            root._fail(f"{invalid} in the output of the root", expected, kind, hint=hint)
    if not kind.size and not tracer.source.metric_types:
        root._fail("there is nothing to compute", "an output or a metric", str(kind))


def compile_block(root: Block, operations: Operations) -> Tracer:
    """Write the tracer of a block and register the operations that it calls."""
    if root.input_type is None:
        root.set_input_type(PyObjectType())
    blocks = _blocks_reached_from(root)
    propagate_types(*blocks)
    for block in blocks:
        block._check()
    for block in blocks:
        block._known("input")
        block._known("output")

    model = ModelCode(operations)
    code = Code(model, "root")
    code.path = root._path()
    reader = _reader_of(root._known("input")).set_input_type(PyObjectType())
    code.write(PyObjectType(), lambda example: code.emit(root, code.emit(reader, example)))
    return Tracer(model.finish(code, root._known("output")))


def _blocks_reached_from(root: Block) -> list[Block]:
    """The block and all inside, including those of forward declarations, each once."""
    reached: dict[int, Block] = {}
    waiting = [root]
    while waiting:
        for block in waiting.pop().walk():
            if id(block) in reached:
                continue
            reached[id(block)] = block
            target = getattr(block, "target", None)
            if isinstance(target, Block):
                waiting.append(target)
    return list(reached.values())


def _reader_of(kind: ResultType) -> Block:
    """Return a block that reads a value of any type from one host object."""
    if isinstance(kind, TensorType):
        return Tensor(kind.shape, kind.dtype)
    if isinstance(kind, BroadcastSequenceType):
        return InputTransform(repeated_value) >> _reader_of(kind.element_type) >> Broadcast()
    if isinstance(kind, SequenceType):
        return Map(_reader_of(kind.element_type))
    if isinstance(kind, TupleType):
        items = InputTransform(partial(_items_of, len(kind)))
        return items >> Record(tuple(map(_reader_of, kind)))
    return Void() if isinstance(kind, VoidType) else Identity()


def _items_of(size: int, instance: Iterable[object]) -> tuple[object, ...]:
    items = tuple(instance)
    if len(items) != size:
        raise TraceError(ValueError, "wrong number of items", str(size), len(items))
    return items


def _evaluate(
    block: Block,
    inp: object,
    *,
    tolist: bool = False,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Evaluate one input; see :meth:`Block.eval`."""
    operations = Operations()
    tracer = compile_block(block, operations)
    recording, positions = tracer.trace(inp)

    parameter = next(operations.parameters(), None)
    engine = Engine(operations).to("cpu" if parameter is None else parameter.device)
    steps = schedule_recordings([recording]).to(engine.device)
    rows: dict[str, Any] = set_mode(copy_of(engine), False)(steps, inputs)
    if tolist:
        rows = {name: tensor.tolist() for name, tensor in rows.items()}

    kind = block._known("output")
    rows_left = {name: iter(tensor) for name, tensor in rows.items()}
    flat = []
    for name, value in named_terminals(kind, positions):
        flat.append(next(rows_left[name]) if name else value)
    result = kind.unflatten(flat, positions)

    metrics: dict[str, list[Any]] = {}
    for name, labels in recording.result.items():
        values = list(rows.get(f"metric:{name}", ()))
        is_labelled = any(label is not None for label in labels)
        metrics[name] = list(zip(values, labels, strict=True)) if is_labelled else values
    return (result, metrics) if metrics else result


def _depth(block: Block, inp: object) -> int:
    return compile_block(block, Operations())(inp).depth


runners["eval"] = _evaluate
runners["max_depth"] = _depth
