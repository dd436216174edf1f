"""Turn a block into a module that takes mini-batches of Python examples."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, NoReturn

import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block, convert_to_block, opened, runners
from pyg_dynbatch.blocks.code import Code, Model, Recipe, packed
from pyg_dynbatch.blocks.draw import explained, schedule_text
from pyg_dynbatch.blocks.left_out import left_out
from pyg_dynbatch.blocks.rewrites import MERGE_EQUAL, PASSES, SPLIT_LINEAR, split_linear
from pyg_dynbatch.blocks.tracing import (
    BlockResult,
    Collater,
    Traced,
    TracedBatch,
    Tracer,
    list_of_examples,
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
    shown,
)
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Operations
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.schedule import Schedule


def compile_block(
    root: Block,
    operations: Operations,
    passes: Iterable[str] = PASSES,
    *,
    keeps_result: bool = False,
) -> Tracer:
    """Write the tracer of a block and register what it calls."""
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
    _write_root(code, root)
    model.finish()
    return Tracer(_recipe(model, code, root._known("output"), keeps_result))


def _reached(root: Block) -> list[Block]:
    """The block and all inside, those behind forward declarations too, each once."""
    found: dict[int, Block] = {}
    left = [root]
    while left:
        for block in left.pop().walk():
            if id(block) not in found:
                found[id(block)] = block
                target = getattr(block, "target", None)
                left += [target] if isinstance(target, Block) else []
    return list(found.values())


def _write_root(code: Code, root: Block) -> None:
    """Write the function of the root, whose input may be of any type but arrives as one object."""
    value = _write_input(code, root._known("input"), "x_")
    result = code.emit(root, value)
    code.line(f"yield None, {packed(result)}")
    code.lines.insert(0, ("    def root(x_):", ("Root", False)))


def _write_input(code: Code, wanted: ResultType, source: str) -> Any:
    """Write lines that read a value of any type off a host object."""
    if isinstance(wanted, TensorType):
        return code.record_constant(wanted, source)
    if isinstance(wanted, VoidType):
        return "None"
    if isinstance(wanted, BroadcastSequenceType):
        value = code.fresh("x")
        code.line(f"{value} = {code.model.name_of(repeated)}({source})")
        return _write_input(code, wanted.element_type, value)
    if isinstance(wanted, TupleType):
        names = tuple(code.fresh("x") for _ in wanted)
        code.line(f"{packed(names)} = {source}")
        return tuple(
            _write_input(code, item, name) for item, name in zip(wanted, names, strict=True)
        )
    if isinstance(wanted, SequenceType):
        found, element = code.fresh("s"), code.fresh("x", varying=True)
        code.line(f"{found} = []")
        with code.loop(element, source):
            value = _write_input(code, wanted.element_type, element)
            code.line(f"{found}.append({packed(value)})")
        return found
    name = code.fresh("x")
    code.line(f"{name} = {source}")
    return name


def _recipe(model: Model, root: Code, result_type: ResultType, keeps_result: bool) -> Recipe:
    free = list(model.free.values())
    metrics = range(len(model.metric_types))
    data = [n for n, site in enumerate(model.sites) if site.kind in ("constant", "input")]
    # C holds the code and P its starts; L is the length of C, E and A extend and append to it, S
    # appends to P; d1 appends to the data of site 1, m0 and n0 to values and labels of metric 0.
    head = [
        "def begin():",
        f"    C = {free}; P = {list(range(len(free)))}",
        "    L = C.__len__; E = C.extend; A = C.append; S = P.append",
        *(f"    z{site} = {place}" for place, site in enumerate(free)),
        *(f"    D{site} = []; d{site} = D{site}.append" for site in data),
        *(f"    M{n} = []; m{n} = M{n}.append; N{n} = []; n{n} = N{n}.append" for n in metrics),
        *(f"    {name} = {{}}" for name in model.dictionaries),
    ]
    items = ", ".join(f"{site}: D{site}" for site in data)
    rows, labels = ("".join(f"{letter}{n}, " for n in metrics) for letter in "MN")
    tail = f"    return C, P, {{{items}}}, ({rows}), ({labels}), root\n"
    lines = [(text, ("Root", False)) for text in head]
    for code in (root, *model.functions.values()):
        lines += code.lines
    lines.append((tail, ("Root", False)))
    return Recipe(
        "\n".join(text for text, _ in lines),
        [origin for _, origin in lines],
        model.named,
        tuple(model.sites),
        tuple(model.signatures),
        tuple(model.row_types),
        model.metric_types,
        result_type,
        keeps_result,
    )


def _evaluate(block: Block, inp: Any, *, tolist: bool = False, inputs: Any = None) -> Any:
    """Evaluate one input; see :meth:`Block.eval`."""
    operations = Operations()
    tracer = compile_block(block, operations, keeps_result=True)
    traced = tracer(inp)
    first = next(operations.parameters(), None)
    engine = Engine(operations).to("cpu" if first is None else first.device)
    schedule = Schedule.from_programs([tracer.program(traced)]).to(engine.device)
    found = engine(schedule, inputs)
    result = _fill_in(block._known("output"), traced.result, found, tolist)
    metrics: dict[str, list[Any]] = {}
    for name, labels in traced.labels.items():
        values = [row.tolist() if tolist else row for row in found.get(f"metric:{name}", ())]
        is_labelled = any(label is not None for label in labels)
        metrics[name] = list(zip(values, labels, strict=True)) if is_labelled else values
    return (result, metrics) if metrics else result


def _fill_in(kind: ResultType, result: Any, found: dict[str, torch.Tensor], tolist: bool) -> Any:
    """Replace the numbers of values by tensors."""
    rows: dict[str, Iterator[torch.Tensor]] = {name: iter(r) for name, r in found.items()}
    flat: list[Any] = []
    numbers = count()

    def fill(terminal: ResultType, value: Any) -> None:
        if isinstance(terminal, TensorType):
            name = f"output_{next(numbers)}" if kind.size else f"output:{terminal}"
            row = next(rows[name])
            value = row.tolist() if tolist else row
        flat.append(value)

    kind.for_each_terminal(fill, result)
    return kind.unflatten(iter(flat), result)


def _max_depth(block: Block, inp: Any) -> int:
    """Compute the length of the longest chain of calls; see :meth:`Block.max_depth`."""
    tracer = compile_block(block, Operations())
    return tracer.program(tracer(inp)).depth


runners.update({"eval": _evaluate, "max_depth": _max_depth})


class Compiler(nn.Module):
    """Run a block on mini-batches; a module with all parameters of its layers.

    ``Compiler.create(root)`` makes one. Call it on a list of examples; or let loader workers
    call its :attr:`tracer` or :attr:`collate`, which hold no parameters, and call it on their
    batches.

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
            max_depth: Refuse examples with more calls one after another.
            policy: Order of the steps: ``"depth"``, ``"agenda"``, ``LearnedPolicy``, a function.
            passes: The rewrites to make, of :data:`~pyg_dynbatch.blocks.PASSES`.

        Raises:
            ValueError: If the policy or a rewrite is unknown.
            TypeError: If a type cannot be inferred, the output holds a host object or a
                sequence, or there are neither outputs nor metrics.
        """
        compiler = cls().compile(root_block_like, passes=passes)
        compiler.init_loom(max_depth, policy=policy)
        return compiler

    # Fold's name, in place of the method of modules with another meaning.
    def compile(  # type: ignore[override]
        self, root_block_like: Any, *, passes: Iterable[str] = PASSES
    ) -> "Compiler":
        """Compile a block, as the first of two steps, and return itself; see :meth:`create`."""
        if self._root is not None:
            self._wrong_order("a block was compiled before", "a new Compiler()")
        root = convert_to_block(root_block_like)
        self._passes = tuple(passes)
        if unknown := [name for name in self._passes if name not in PASSES]:
            what = f"Compiler: unknown pass {unknown[0]!r}"
            raise mismatch(ValueError, what, f"some of {PASSES}", repr(unknown[0]))
        operations = Operations()
        tracer = compile_block(root, operations, self._passes)
        _check_root(root, tracer)
        self._root, self._tracer, self.engine = root, tracer, Engine(operations)
        return self

    def init_loom(self, max_depth: int | None = None, *, policy: str | Policy = "depth") -> None:
        """Prepare for examples, as the second of two steps; see :meth:`create`."""
        tracer = self.tracer
        if self._collate is not None:
            self._wrong_order("init_loom was called before", "one call")
        self._collate = Collater(tracer, policy, MERGE_EQUAL in self._passes, max_depth)

    def _wrong_order(self, what: str, wanted: str) -> NoReturn:
        got, hint = "compile, init_loom, use: in another order", "Compiler.create(block) does both"
        raise mismatch(RuntimeError, f"Compiler: {what}", wanted, got, hint=hint)

    @property
    def is_loom_initialized(self) -> bool:
        """Whether examples can be taken."""
        return self._collate is not None

    @property
    def root(self) -> Block:
        """The block."""
        if self._root is None:
            self._wrong_order("nothing is compiled", "compiler.compile(block)")
        return self._root

    @property
    def tracer(self) -> Tracer:
        """Records the calls of one example; has no parameters."""
        if self._tracer is None:
            self._wrong_order("nothing is compiled", "compiler.compile(block)")
        return self._tracer

    @property
    def collate(self) -> Collater:
        """Makes a mini-batch of examples, traced or not; has no parameters."""
        if self._collate is None:
            self._wrong_order("used before init_loom", "compiler.init_loom()")
        return self._collate

    def forward(self, examples: Any, inputs: Any = None) -> BlockResult:
        """Compute a mini-batch.

        Args:
            examples: Python examples (traced or not), or what :attr:`collate` made of them.
            inputs: Rows from outside by tag, see :class:`InputRow`.
        """
        if self.engine is None:
            self._wrong_order("used before init_loom", "compiler.init_loom()")
        batch = examples if isinstance(examples, TracedBatch) else self.collate(examples)
        batch = batch.to(self.engine.device)
        schedule, found = batch.schedule, self.engine(batch.schedule, inputs)
        rows = (found[f"output_{number}"] for number in count())
        output = self.root._known("output").unflatten(rows, None)
        metrics, metric_examples = {}, {}
        for name in batch.labels:
            key = f"metric:{name}"
            if key in found:
                metrics[name], metric_examples[name] = found[key], schedule.example_of(key)
            else:
                metrics[name] = self._empty_metric(self.engine, name)
                metric_examples[name] = torch.zeros(0, dtype=torch.int64, device=schedule.device)
        return BlockResult(output, metrics, batch.labels, metric_examples)

    def _empty_metric(self, engine: Engine, name: str) -> torch.Tensor:
        """The values of a metric that no example has."""
        kind: Any = self.tracer.recipe.metric_types[name]
        dtype = engine.working_dtype(kind.torch_dtype)
        return torch.zeros((0, *kind.shape), dtype=dtype, device=engine.device)

    def max_depth(self, inp: Any) -> int:
        """Compute the length of the longest chain of calls for an input; nothing is run."""
        return self.tracer.program(self.tracer(inp)).depth

    def explain(self, example: Any) -> str:
        """List the calls of an example, one per line, each with its block.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> print(Compiler.create(td.Map(td.Scalar()) >> td.Sum()).explain([1.0, 2.0]))
            call 0: sum([1.0, 2.0])  Root.Sum
        """
        return "\n".join(map(str, explained(self.tracer.recipe, self.tracer(example))))

    def draw_schedule(self, examples: Iterable[Any]) -> str:
        """Draw the schedule of a mini-batch: one line per step, as long as the step has rows."""
        return schedule_text(self.collate(examples).schedule)

    # Tracing ahead.

    @property
    def pool(self) -> Any:
        """The innermost open pool of worker processes, or None."""
        return self._pool[-1] if self._pool else None

    @contextmanager
    def multiprocessing_pool(self, processes: int | None = None) -> Iterator[Any]:
        """Trace in other processes inside the context; contexts may be nested.

        Args:
            processes: Their number; by default one per core.

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
    ) -> Iterator[Traced]:
        """Trace examples one by one, in the pool if there is one; keep them for all epochs.

        Args:
            examples: Any iterable of examples.
            metric_labels: Keep the labels of metrics.
            chunk_size: Number of examples per task of a worker process.
            ordered: Keep the order of the examples; matters with a pool only.
        """
        if not isinstance(examples, Iterable):
            list_of_examples(examples)
        if self.pool is None:
            found: Iterator[Traced] = map(self.tracer, examples, count())
        else:
            found = traced_in(self.pool, examples, chunk_size, ordered)
        return found if metric_labels else map(_without_labels, found)

    def build_loom_input_batched(
        self,
        examples: Iterable[Any],
        batch_size: int = 100,
        metric_labels: bool = False,
        ordered: bool = False,
    ) -> Iterator[TracedBatch]:
        """Make mini-batches of examples, for calls of the compiler.

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
        """Find parameters and modules; name what replaces the members of Fold's compiler."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if line := left_out(f"Compiler.{name}"):
                raise AttributeError(line) from None
            raise

    def __getstate__(self) -> dict[str, Any]:
        """The state without pools of processes."""
        return {**self.__dict__, "_pool": []}

    def extra_repr(self) -> str:
        """Text of the block."""
        return repr(self._root)


def _without_labels(traced: Traced) -> Traced:
    return traced._replace(labels={name: [None] * len(v) for name, v in traced.labels.items()})


def _check_root(root: Block, tracer: Tracer) -> None:
    """Refuse roots whose output cannot be stacked over examples."""
    kind = root._known("output")
    left = [kind]
    while left:
        part = left.pop(0)
        if isinstance(part, PyObjectType | SequenceType):
            what = "a host object" if isinstance(part, PyObjectType) else "a sequence"
            hint = "root.eval(example) returns anything; td.Metric any number of values"
            expected = "tensors and tuples of them"
            root._refuse(f"{what} in the output of the root", expected, kind, hint=hint)
        left += part._inside()
    if not kind.size and not tracer.recipe.metric_types:
        root._refuse("there is nothing to compute", "an output or a metric", shown(kind))
