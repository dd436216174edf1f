"""Turn a block into a module that takes mini-batches of Python examples."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block, Identity, convert_to_block, opened, runners
from pyg_dynbatch.blocks.code import Code, Model, TraceError
from pyg_dynbatch.blocks.control import Record, Void
from pyg_dynbatch.blocks.draw import explained, schedule_text
from pyg_dynbatch.blocks.porting import replacement_of
from pyg_dynbatch.blocks.rewrites import MERGE_EQUAL, PASSES, SPLIT_LINEAR, split_linear
from pyg_dynbatch.blocks.sequences import Broadcast, Map
from pyg_dynbatch.blocks.tensors import InputTransform, Tensor
from pyg_dynbatch.blocks.tracing import (
    BlockResult,
    Collater,
    Tracer,
    check_model,
    list_of_examples,
    named_terminals,
    pool_of,
    traced_in,
)
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    propagate_types,
    repeated,
)
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.core.fingerprint import digest
from pyg_dynbatch.core.operation import Operations
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.recording import Recording
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.shadow import set_mode, shadow
from pyg_dynbatch.core.steps import Steps

_T = TypeVar("_T")


def compile_block(root: Block, operations: Operations, passes: Iterable[str] = PASSES) -> Tracer:
    """Write the tracer of a block and register the operations that it calls."""
    if root.input_type is None:
        root.set_input_type(PyObjectType())
    reached = _reached(root)
    propagate_types(*reached)
    for block in reached:
        block._check()
    for block in reached:
        block._known("input")
        block._known("output")
    model = Model(operations)
    if SPLIT_LINEAR in passes:
        model.rewritten |= split_linear(reached)
    code = Code(model, "root")
    code.path = root._path()
    reader = _reader_of(root._known("input")).set_input_type(PyObjectType())
    code.write(PyObjectType(), lambda example: code.emit(root, code.emit(reader, example)))
    return Tracer(model.finish(code, root._known("output")))


def _reached(root: Block) -> list[Block]:
    """The block and all inside, including those of forward declarations, each once."""
    found: dict[int, Block] = {}
    left = [root]
    while left:
        for block in left.pop().walk():
            if id(block) not in found:
                found[id(block)] = block
                target = getattr(block, "target", None)
                left += [target] if isinstance(target, Block) else []
    return list(found.values())


def _reader_of(kind: ResultType) -> Block:
    """Return a block that reads a value of any type from one host object."""
    if isinstance(kind, TensorType):
        return Tensor(kind.shape, kind.dtype)
    if isinstance(kind, BroadcastSequenceType):
        return InputTransform(repeated) >> _reader_of(kind.element_type) >> Broadcast()
    if isinstance(kind, SequenceType):
        return Map(_reader_of(kind.element_type))
    if isinstance(kind, TupleType):
        items = InputTransform(partial(_items_of, len(kind)))
        return items >> Record(tuple(map(_reader_of, kind)))
    return Void() if isinstance(kind, VoidType) else Identity()


def _items_of(size: int, instance: Any) -> tuple[Any, ...]:
    if len(items := tuple(instance)) != size:
        raise TraceError(ValueError, "wrong number of items", str(size), len(items))
    return items


def _evaluate(block: Block, inp: Any, *, tolist: bool = False, inputs: Any = None) -> Any:
    """Evaluate one input; see :meth:`Block.eval`."""
    operations = Operations()
    tracer = compile_block(block, operations)
    traced, positions = tracer.trace(inp)
    first = next(operations.parameters(), None)
    engine = Engine(operations).to("cpu" if first is None else first.device)
    schedule = schedule_recordings([traced]).to(engine.device)
    found = set_mode(shadow(engine), False)(schedule, inputs)
    if tolist:
        found = {name: tensor.tolist() for name, tensor in found.items()}
    kind, rows = block._known("output"), {name: iter(tensor) for name, tensor in found.items()}
    terminals = named_terminals(kind, positions)
    flat = [next(rows[name]) if name else value for name, value in terminals]
    result = kind.unflatten(flat, positions)
    metrics: dict[str, list[Any]] = {}
    for name, labels in traced.result.items():
        values = list(found.get(f"metric:{name}", ()))
        is_labelled = any(label is not None for label in labels)
        metrics[name] = list(zip(values, labels, strict=True)) if is_labelled else values
    return (result, metrics) if metrics else result


runners["eval"] = _evaluate
runners["max_depth"] = lambda block, inp: compile_block(block, Operations())(inp).depth


class Compiler(nn.Module):
    """Compute a block on mini-batches; a module with all parameters of its layers.

    :meth:`create` returns one. Call it on a list of examples; or let loader workers call its
    :attr:`tracer` or :attr:`collate`, which have no parameters, and call it on their batches.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> cell = torch.nn.Bilinear(1, 1, 1)
        >>> model = Compiler.create(td.Map(td.Vector(1)) >> td.Fold(cell, td.Zeros(1)))
        >>> model([[[1.0], [2.0]], [[3.0]]]).output.shape
        torch.Size([2, 1])
    """

    def __init__(self) -> None:
        super().__init__()
        self._root: Block | None = None
        self._tracer: Tracer | None = None
        self._collate: Collater | None = None
        self._pool: list[Any] = []
        self.engine: Engine | None = None
        self._passes: tuple[str, ...] = PASSES

    @classmethod
    def create(
        cls,
        root_block_like: Any,
        max_depth: int | None = None,
        *,
        policy: str | Policy = "depth",
        passes: Iterable[str] = PASSES,
    ) -> "Compiler":
        """Compile a block.

        Args:
            root_block_like: What :func:`convert_to_block` takes.
            max_depth: Raise an error for examples with more calls one after another.
            policy: Order of the steps: ``"depth"``, ``"agenda"``, a ``LearnedPolicy``, a function.
            passes: The rewrites to apply, of :data:`~pyg_dynbatch.blocks.PASSES`.

        Raises:
            ValueError: If the policy or a rewrite is unknown.
            TypeError: If a type cannot be inferred, the output holds a host object or a
                sequence, or there are neither outputs nor metrics.
        """
        compiler = cls().compile(root_block_like, passes=passes)
        compiler.init_loom(max_depth, policy=policy)
        return compiler

    # Fold's name; it overrides a method of modules with a different meaning.
    def compile(  # type: ignore[override]
        self, root_block_like: Any, *, passes: Iterable[str] = PASSES
    ) -> "Compiler":
        """Compile a block, as the first of two steps, and return itself; see :meth:`create`."""
        self._check_first("compile", self._root)
        root = convert_to_block(root_block_like)
        self._passes = tuple(passes)
        for name in self._passes:
            checked_choice(f"Compiler: unknown pass {name!r}", name, PASSES)
        operations = Operations()
        tracer = compile_block(root, operations, self._passes)
        _check_root(root, tracer)
        # Now, since functions may change what they read; and once, for all worker processes.
        tracer.source.host = digest(tracer.source.names, strict=False)
        self._root, self._tracer, self.engine = root, tracer, Engine(operations)
        return self

    def init_loom(self, max_depth: int | None = None, *, policy: str | Policy = "depth") -> None:
        """Prepare for examples, as the second of two steps; see :meth:`create`."""
        self._check_first("init_loom", self._collate)
        self._collate = Collater(self.tracer, policy, MERGE_EQUAL in self._passes, max_depth)

    def _check_first(self, step: str, made: object) -> None:
        if made is not None:
            what, hint = f"Compiler: {step} was called before", "a new Compiler"
            raise mismatch(RuntimeError, what, "one call", "a second one", hint=hint)

    def _made_by(self, step: str, made: _T | None) -> _T:
        """Return what a step has created; raise an error if it was not called."""
        if made is None:
            what, hint = f"Compiler: used before {step}", "Compiler.create(block) makes all steps"
            raise mismatch(RuntimeError, what, f"compiler.{step}(…) first", hint=hint)
        return made

    @property
    def is_loom_initialized(self) -> bool:
        """Whether the compiler can be called."""
        return self._collate is not None

    @property
    def root(self) -> Block:
        """The block."""
        return self._made_by("compile", self._root)

    @property
    def tracer(self) -> Tracer:
        """Records the calls of one example; has no parameters."""
        return self._made_by("compile", self._tracer)

    @property
    def collate(self) -> Collater:
        """Makes a mini-batch of examples, traced or not; has no parameters."""
        return self._made_by("init_loom", self._collate)

    def forward(self, examples: Any, inputs: Any = None) -> BlockResult:
        """Compute a mini-batch.

        Args:
            examples: Python examples (traced or not), or what :attr:`collate` made of them.
            inputs: External rows by tag, see :class:`InputRow`.
        """
        engine = self._made_by("init_loom", self.engine)
        steps = examples if isinstance(examples, Steps) else self.collate(examples)
        check_model(self.tracer.source, steps.model, "the mini-batch is")
        steps = steps.to(engine.device)
        found = engine(steps, inputs)
        rows = (found[f"output_{number}"] for number in count())
        output = self.root._known("output").unflatten(rows, None)
        metrics, metric_examples = {}, {}
        for name in steps.result:
            key = f"metric:{name}"
            if key in found:
                metrics[name], metric_examples[name] = found[key], steps.example_of(key)
            else:  # no example has a value
                kind: Any = self.tracer.source.metric_types[name]
                (metrics[name],) = engine.no_rows(kind.row_type)
                metric_examples[name] = torch.zeros(0, dtype=torch.int64, device=steps.device)
        return BlockResult(output, metrics, steps.result, metric_examples)

    def max_depth(self, inp: Any) -> int:
        """Return the length of the longest chain of calls for an input; nothing is computed."""
        return self.tracer(inp).depth

    def explain(self, example: Any) -> str:
        """List the calls of an example, one per line, each with its block.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> print(Compiler.create(td.Map(td.Scalar()) >> td.Sum()).explain([1.0, 2.0]))
            call 0: sum([1.0, 2.0])  Root.Sum
        """
        return "\n".join(explained(self.tracer.source, self.tracer(example)))

    def draw_schedule(self, examples: Iterable[Any]) -> str:
        """Draw the schedule of a mini-batch: one line per step, as long as the step has rows."""
        return schedule_text(self.collate(examples))

    # Tracing ahead.

    @property
    def pool(self) -> Any:
        """The innermost open pool of worker processes, or None."""
        return self._pool[-1] if self._pool else None

    @contextmanager
    def multiprocessing_pool(self, processes: int | None = None) -> Iterator[Any]:
        """Trace in other processes inside the context; contexts may be nested.

        Args:
            processes: Number of processes; by default one per core.

        Raises:
            TypeError: If a function cannot be pickled, and this system does not fork.
        """
        pool = pool_of(self.tracer, processes)
        try:
            with opened(self._pool, pool, "Compiler.multiprocessing_pool: contexts overlap"):
                yield pool
        finally:
            pool.terminate()
            pool.join()

    def build_loom_inputs(
        self,
        examples: Iterable[Any],
        metric_labels: bool = False,
        chunk_size: int = 100,
        ordered: bool = False,
    ) -> Iterator[Recording]:
        """Trace examples one by one, in the pool if there is one; the result serves all epochs.

        Args:
            examples: Any iterable of examples.
            metric_labels: Keep the labels of metrics.
            chunk_size: Number of examples per task of a worker process.
            ordered: Keep the order of the examples; matters with a pool only.
        """
        if not isinstance(examples, Iterable):
            list_of_examples(examples)
        if self.pool is None:
            found: Iterator[Recording] = map(self.tracer, examples, count())
        else:
            found = traced_in(self.pool, examples, chunk_size, ordered)
        return found if metric_labels else map(_without_labels, found)

    def build_loom_input_batched(
        self,
        examples: Iterable[Any],
        batch_size: int = 100,
        metric_labels: bool = False,
        ordered: bool = False,
    ) -> Iterator[Steps]:
        """Trace examples in mini-batches, for calls of the compiler.

        Args:
            examples: Any iterable of examples.
            batch_size: Number of examples in each.
            metric_labels: As for :meth:`build_loom_inputs`.
            ordered: As for :meth:`build_loom_inputs`.
        """
        found = self.build_loom_inputs(examples, metric_labels, batch_size, ordered)
        while group := list(islice(found, batch_size)):
            yield self.collate(group)

    def __getattr__(self, name: str) -> Any:
        """Find parameters and modules; say what replaces a member of Fold's compiler."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if line := replacement_of(f"Compiler.{name}"):
                raise AttributeError(line) from None
            raise

    def __getstate__(self) -> dict[str, Any]:
        """The state without pools of processes."""
        return {**self.__dict__, "_pool": []}

    def extra_repr(self) -> str:
        """Text of the block."""
        return repr(self._root)


def _without_labels(recording: Recording) -> Recording:
    labels = {name: [None] * len(found) for name, found in recording.result.items()}
    return replace(recording, result=labels)


def _check_root(root: Block, tracer: Tracer) -> None:
    """Raise an error if the output of the root cannot be stacked over examples."""
    kind = root._known("output")
    for part in kind.walk():
        if isinstance(part, PyObjectType | SequenceType):
            what = "a host object" if isinstance(part, PyObjectType) else "a sequence"
            hint = "root.eval(example) returns anything; td.Metric any number of values"
            expected = "tensors and tuples of them"
            root._fail(f"{what} in the output of the root", expected, kind, hint=hint)
    if not kind.size and not tracer.source.metric_types:
        root._fail("there is nothing to compute", "an output or a metric", str(kind))
