"""Turn a block into a module that takes mini-batches of Python examples."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code, Model, Recipe, packed
from pyg_dynbatch.blocks.draw import explained, schedule_text
from pyg_dynbatch.blocks.left_out import left_out
from pyg_dynbatch.blocks.tracing import (
    BlockResult,
    Traced,
    TracedBatch,
    Tracer,
    collate_traced,
    pool_of,
    refuse_one_example,
    result_of,
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
from pyg_dynbatch.core.policy import Policy, policy_of
from pyg_dynbatch.core.schedule import Schedule

if TYPE_CHECKING:
    from pyg_dynbatch.blocks.block import Block


SPLIT_LINEAR, MERGE_EQUAL = "split_linear", "merge_equal"
PASSES = (SPLIT_LINEAR, MERGE_EQUAL)
"""All rewrites: a linear layer on a concatenation with a broadcast part is split; equal calls on
equal constants are made once a mini-batch."""


def checked_passes(passes: Iterable[str]) -> tuple[str, ...]:
    """Refuses rewrites that do not exist."""
    found = tuple(passes)
    unknown = [name for name in found if name not in PASSES]
    if unknown:
        raise mismatch(
            ValueError,
            f"Compiler: unknown pass {unknown[0]!r}",
            f"some of {', '.join(map(repr, PASSES))}",
            repr(unknown[0]),
        )
    return found


def compile_block(
    root: Block,
    operations: Operations,
    passes: Iterable[str] = PASSES,
    *,
    keeps_result: bool = False,
) -> Tracer:
    """Writes the tracer of a block and registers what it calls."""
    if root.input_type is None:
        root.set_input_type(PyObjectType())
    reached = _reached(root)
    propagate_types(*reached)
    for block in reached:
        block._check()
    for block in reached:
        block._known("input")
        block._known("output")
    model = Model(operations, SPLIT_LINEAR in passes)
    code = Code(model, "root")
    code.block = root
    _write_root(code, root)
    model.finish()
    kind = root._known("output")
    return Tracer(_recipe(model, [code, *model.functions.values()], kind, keeps_result))


def _reached(root: Block) -> list[Block]:
    """The block and all inside, those behind forward declarations too, each once."""
    found: dict[int, Block] = {}
    left = [root]
    while left:
        for block in left.pop().walk():
            if id(block) in found:
                continue
            found[id(block)] = block
            target = getattr(block, "target", None)
            if isinstance(target, Block) and id(target) not in found:
                left.append(target)
    return list(found.values())


def _write_root(code: Code, root: Block) -> None:
    """Writes the function of the root, whose input may be of any type but arrives as one object."""
    value = lifted(code, root._known("input"), "x_")
    result = code.emit(root, value)
    code.line(f"yield None, {packed(result)}")
    code.lines.insert(0, "    def root(x_):")
    code.origin.insert(0, ("Root", False))


def lifted(code: Code, wanted: ResultType, source: str) -> Any:
    """Writes lines that read a value of any type off a host object."""
    if isinstance(wanted, TensorType):
        return code.record_constant(wanted, source)
    if isinstance(wanted, VoidType):
        return "None"
    if isinstance(wanted, BroadcastSequenceType):
        value = code.fresh("x")
        code.line(f"{value} = {code.model.name_of(repeated)}({source})")
        return lifted(code, wanted.element_type, value)
    if isinstance(wanted, TupleType):
        names = tuple(code.fresh("x") for _ in wanted)
        code.line(f"({', '.join(names)}{',' if names else ''}) = {source}")
        return tuple(lifted(code, item, name) for item, name in zip(wanted, names, strict=True))
    if isinstance(wanted, SequenceType):
        found, element = code.fresh("s"), code.fresh("x", varying=True)
        code.line(f"{found} = []")
        with code.loop(element, source):
            code.line(f"{found}.append({packed(lifted(code, wanted.element_type, element))})")
        return found
    name = code.fresh("x")
    code.line(f"{name} = {source}")
    return name


def _recipe(model: Model, codes: list[Code], result_type: ResultType, keeps_result: bool) -> Recipe:
    free = list(model.free.values())
    metrics = range(len(model.metrics))
    data = [n for n, site in enumerate(model.sites) if site.kind in ("constant", "input")]
    head = [
        "def begin():",
        f"    C = {free}; P = {list(range(len(free)))}",
        "    L = C.__len__; E = C.extend; A = C.append; S = P.append",
        *(f"    z{site} = {place}" for place, site in enumerate(free)),
        *(f"    D{site} = []; d{site} = D{site}.append" for site in data),
        *(f"    M{n} = []; m{n} = M{n}.append; N{n} = []; n{n} = N{n}.append" for n in metrics),
        *(f"    {name} = {{}}" for name in model.dictionaries),
    ]
    lines, origin = list(head), [("Root", False)] * len(head)
    for code in codes:
        lines += code.lines
        origin += code.origin
    items = ", ".join(f"{site}: D{site}" for site in data)
    rows, labels = ("".join(f"{letter}{n}, " for n in metrics) for letter in "MN")
    lines.append(f"    return C, P, {{{items}}}, ({rows}), ({labels}), root")
    origin.append(("Root", False))
    names: dict[str, Any] = model.named
    return Recipe(
        "\n".join(lines) + "\n",
        origin,
        names,
        tuple(model.sites),
        tuple(model.signatures),
        tuple(model.row_types),
        {name: model.metric_types[name] for name in model.metrics},
        result_type,
        keeps_result,
    )


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


class Collater:
    """Traces examples and merges them into a mini-batch; fits a loader's ``collate_fn``.

    Args:
        tracer: From a compiler.
        policy: ``"depth"``, ``"agenda"``, ``LearnedPolicy``, a function.
        merge_equal: Make equal calls on equal constants once.
        max_depth: Refuse deeper examples.

    Raises:
        ValueError: If there is no such policy.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> loader = DataLoader([[1.0, 2.0], [3.0]], batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self,
        tracer: Tracer,
        policy: str | Policy = "depth",
        merge_equal: bool = True,
        max_depth: int | None = None,
    ) -> None:
        # Here, not with the first mini-batch, is where a name that does not exist is refused.
        policy_of(policy)
        self.tracer, self.policy = tracer, policy
        self.merge_equal, self.max_depth = merge_equal, max_depth

    def __call__(self, examples: Iterable[Any]) -> TracedBatch:
        """Makes a mini-batch of examples, traced or not."""
        traced = [
            one if isinstance(one, Traced) else self.tracer(one, number)
            for number, one in enumerate(refuse_one_example(examples))
        ]
        if self.max_depth is not None:
            self._check_depth(traced)
        return collate_traced(self.tracer.recipe, traced, self.policy, self.merge_equal)

    def _check_depth(self, traced: Sequence[Traced]) -> None:
        for number, one in enumerate(traced):
            if (depth := self.tracer.program(one).depth) > (self.max_depth or 0):
                raise mismatch(
                    AssertionError,
                    "Compiler: an example is deeper than max_depth",
                    f"{self.max_depth} calls one after another at most",
                    depth,
                    where=f"example {number}",
                )


class Compiler(nn.Module):
    """Runs a block on mini-batches; holds all parameters of its layers.

    ``Compiler.create(root)`` makes one. Call it on a list of examples; or let loader workers
    call its :attr:`tracer` or :attr:`collate`, which know no parameters, and hand it their
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
        """Compiles a block.

        Args:
            root_block_like: What :func:`convert_to_block` takes.
            max_depth: Refuse examples with more calls one after another.
            policy: Order of the steps: ``"depth"``, ``"agenda"``, ``LearnedPolicy``, a function.
            passes: The rewrites to make, of :data:`~pyg_dynbatch.blocks.compiler.PASSES`.

        Returns:
            The module.

        Raises:
            ValueError: If there is no such policy or rewrite.
            TypeError: If a type cannot be inferred, the output holds a host object or a
                sequence, or there are neither outputs nor metrics.
        """
        compiler = cls().compile(root_block_like, passes=passes)
        compiler.init_loom(max_depth, policy=policy)
        return compiler

    # Stands in place of the method of modules, which torch gives another meaning.
    def compile(  # type: ignore[override]
        self, root_block_like: Any, *, passes: Iterable[str] = PASSES
    ) -> "Compiler":
        """Compiles a block, as the first of two steps, and gives itself; see :meth:`create`.

        Raises:
            RuntimeError: If a block was compiled before.
        """
        if self._root is not None:
            self._wrong_order("a block was compiled before", "a new Compiler()")
        root = convert_to_block(root_block_like)
        self._passes = checked_passes(passes)
        operations = Operations()
        tracer = compile_block(root, operations, self._passes)
        _check_root(root, tracer)
        self._root, self._tracer, self.engine = root, tracer, Engine(operations)
        return self

    def init_loom(self, max_depth: int | None = None, *, policy: str | Policy = "depth") -> None:
        """Makes ready for examples, as the second of two steps; see :meth:`create`.

        Raises:
            RuntimeError: If nothing is compiled, or this was done before.
        """
        if self._tracer is None:
            self._wrong_order("nothing is compiled", "compiler.compile(block)")
        if self._collate is not None:
            self._wrong_order("init_loom was called before", "one call")
        self._collate = Collater(self._tracer, policy, MERGE_EQUAL in self._passes, max_depth)

    def _wrong_order(self, what: str, wanted: str) -> NoReturn:
        raise mismatch(
            RuntimeError,
            f"Compiler: {what}",
            wanted,
            "compile, init_loom, use: in another order",
            hint="Compiler.create(block) does both",
        )

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
        """Records the calls of one example; without parameters."""
        if self._tracer is None:
            self._wrong_order("nothing is compiled", "compiler.compile(block)")
        return self._tracer

    @property
    def collate(self) -> Collater:
        """Makes a mini-batch of examples, traced or not; without parameters."""
        if self._collate is None:
            self._wrong_order("used before init_loom", "compiler.init_loom()")
        return self._collate

    def forward(self, examples: Any, inputs: Any = None) -> BlockResult:
        """Computes a mini-batch.

        Args:
            examples: Python examples (traced or not), or what :attr:`collate` made of them.
            inputs: Rows from outside by tag, see :class:`InputRow`.

        Returns:
            Outputs and metrics, in the order of the examples.
        """
        batch = examples if isinstance(examples, TracedBatch) else self.collate(examples)
        engine = self._engine()
        batch = batch.to(engine.device)
        found = engine(batch.schedule, inputs)
        return result_of(self.root._known("output"), found, batch, self._empty_metric)

    def _engine(self) -> Engine:
        if self.engine is None:
            self._wrong_order("nothing is compiled", "compiler.compile(block)")
        return self.engine

    def _empty_metric(self, name: str) -> Tensor:
        """The values of a metric that no example has."""
        engine = self._engine()
        kind = cast("TensorType", self.tracer.recipe.metric_types[name])
        dtype = engine.working_dtype(kind.torch_dtype)
        return torch.zeros((0, *kind.shape), dtype=dtype, device=engine.device)

    def max_depth(self, inp: Any) -> int:
        """Counts the longest chain of calls for an input; nothing is run."""
        return self.tracer.program(self.tracer(inp)).depth

    def explain(self, example: Any) -> str:
        """Lists the calls that an example makes, one a line, each with its block.

        Example:
            >>> from pyg_dynbatch import blocks as td
            >>> print(Compiler.create(td.Map(td.Scalar()) >> td.Sum()).explain([1.0, 2.0]))
            call 0: sum([1.0, 2.0])  Root.Sum
        """
        return "\n".join(map(str, explained(self.tracer.recipe, self.tracer(example))))

    def draw_schedule(self, examples: Iterable[Any]) -> str:
        """Draws the schedule of a mini-batch: one line a step, as long as the step has rows."""
        return schedule_text(self.collate(examples).schedule)

    # Tracing ahead.

    @property
    def pool(self) -> Any:
        """The pool of worker processes in whose context we are, or None."""
        return self._pool[-1] if self._pool else None

    @contextmanager
    def multiprocessing_pool(self, processes: int | None = None) -> Iterator[Any]:
        """Traces in other processes inside the context; contexts may be nested.

        Args:
            processes: Their number; one a core where left out.

        Raises:
            TypeError: If a function cannot be sent to other processes, and this system does not
                fork.
            AssertionError: If contexts are left in another order than the reverse of entering.
        """
        pool = pool_of(self.tracer, processes)
        self._pool.append(pool)
        try:
            yield pool
        finally:
            if not self._pool or self._pool[-1] is not pool:
                raise mismatch(
                    AssertionError,
                    "Compiler.multiprocessing_pool: contexts overlap",
                    "the pool opened last to be left first",
                    "another one",
                )
            self._pool.pop()
            pool.terminate()
            pool.join()

    def build_loom_inputs(
        self,
        examples: Iterable[Any],
        metric_labels: bool = False,
        chunk_size: int = 100,
        ordered: bool = False,
    ) -> Iterator[Traced]:
        """Traces examples one by one, in the pool if there is one; keep them for all epochs.

        Args:
            examples: Any iterable of examples.
            metric_labels: Keep the labels of metrics.
            chunk_size: How many a worker process takes at a time.
            ordered: Give them in the order of the examples; matters with a pool only.

        Returns:
            One traced example each.
        """
        if not isinstance(examples, Iterable):
            refuse_one_example(examples)
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
        """Makes mini-batches of examples, to be handed to the compiler one by one.

        Args:
            examples: Any iterable of examples.
            batch_size: Number of examples in each.
            metric_labels: Keep the labels of metrics.
            ordered: Keep the order of the examples; matters with a pool only.

        Returns:
            The mini-batches.
        """
        found = self.build_loom_inputs(examples, metric_labels, batch_size, ordered)
        while group := list(islice(found, batch_size)):
            yield self.collate(group)

    def __getattr__(self, name: str) -> Any:
        """Finds parameters and modules; names what stands in for Fold's members."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if line := left_out(f"Compiler.{name}"):
                raise AttributeError(line) from None
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Leaves pools of processes behind."""
        return {**self.__dict__, "_pool": []}

    def extra_repr(self) -> str:
        """Shows the block."""
        return repr(self._root)


def _without_labels(traced: Traced) -> Traced:
    return traced._replace(labels={name: [None] * len(v) for name, v in traced.labels.items()})


def _check_root(root: Block, tracer: Tracer) -> None:
    """Refuses roots whose output cannot be stacked over examples."""
    kind = root._known("output")
    bad = _first_bad(kind)
    if bad is not None:
        what = "a host object" if isinstance(bad, PyObjectType) else "a sequence"
        root._refuse(
            f"{what} in the output of the root",
            expected="tensors and tuples of them",
            got=f"{shown(kind)}, {kind!r}",
            hint="root.eval(example) gives anything; td.Metric hands out any number of values",
        )
    if not kind.size and not tracer.recipe.metrics:
        root._refuse(
            "there is nothing to compute", expected="an output or a metric", got=shown(kind)
        )


def _first_bad(kind: ResultType) -> ResultType | None:
    if isinstance(kind, TupleType):
        return next((bad for item in kind if (bad := _first_bad(item)) is not None), None)
    return kind if isinstance(kind, PyObjectType | SequenceType) else None
