"""The wrapped model: the same parameters, called on a list of examples."""

import builtins
import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from threading import Lock, local
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from pyg_dynbatch.autobatch.cache import Example, Kept, example_of
from pyg_dynbatch.autobatch.collate import (
    Emitted,
    Outcome,
    ResultColumn,
    Schedule,
    ValueColumn,
    run_batch,
    schedule_batch,
    structured,
)
from pyg_dynbatch.autobatch.explain import Explanation, explain
from pyg_dynbatch.autobatch.fibers import run_examples
from pyg_dynbatch.autobatch.lazy import (
    ACTIVE,
    EmittedValues,
    Lazy,
    NeedsPython,
    TensorOrLazy,
    find_implementation,
)
from pyg_dynbatch.autobatch.recorder import intercepted, is_instance, recorded_call
from pyg_dynbatch.autobatch.replay import Replay, outcome_of, record, results_of
from pyg_dynbatch.autobatch.session import Session, is_library
from pyg_dynbatch.autobatch.signatures import NOTE, SignatureTable, failed
from pyg_dynbatch.autobatch.state import holds_values
from pyg_dynbatch.core.errors import Mismatch, checked_count, describe_value, mismatch
from pyg_dynbatch.core.operation import HOOKS
from pyg_dynbatch.core.policy import Policy, checked_policy

# A model that makes new signatures all the time, such as x * y.item(), starts again from here on.
_MOST_SITES = 16_384
_MOST_MODES = 16
LOOP_BELOW_IN_TRAINING = 12
LOOP_BELOW_IN_INFERENCE = 64
"""Numbers of examples from which on batching was faster on most models of benchmarks.autobatch."""
_Ended = TypeVar("_Ended")


class AutoBatch(nn.Module):
    """A model for one example, called on many.

    Made by :func:`autobatch`. It shares parameters, buffers and submodules with the module that it
    wraps, under the same names: ``state_dict``, optimizers, ``.to()``, ``train()`` and checkpoints
    work as with the plain module.

    Args:
        module: The model for one example.
        policy: Order of the batched calls, as for :func:`schedule_recordings`.
        cache: Whether to keep what examples have recorded.
        loop_below: For fewer examples, the plain loop runs.
    """

    plain: nn.Module
    """The model for one example."""

    policy: Policy
    cache: bool
    loop_below: int | None
    _local: local  # the tables of each thread

    emitted: dict[str, Emitted]
    """What :func:`emit` collected in the last call, by name."""

    def __init__(
        self, module: nn.Module, policy: Policy = "depth", cache: bool = False,
        loop_below: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(module, nn.Module) or isinstance(module, AutoBatch):
            problem = "autobatch: not a module for one example"
            got = type(module).__name__
            raise mismatch(TypeError, problem, "an nn.Module", got)
        # Past nn.Module.__setattr__: a submodule `plain` would change all names of parameters.
        vars(self).update(plain=module, policy=checked_policy(policy), cache=cache, emitted={})
        if loop_below is not None:
            loop_below = checked_count("autobatch: loop_below", loop_below, least=0)
        vars(self)["loop_below"] = loop_below
        self.clear()
        # The very dictionaries of the module, so that both see every change.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(module)[name]
        self.training = module.training

    def clear(self) -> None:
        """Forget what examples have recorded, and the signatures of their calls."""
        vars(self)["_local"] = local()

    def train(self, mode: bool = True) -> "AutoBatch":
        """Set training mode, also of the wrapped module."""
        super().train(mode)
        self.plain.training = mode
        return self

    def forward(self, examples: Iterable[Any] | Schedule, *, batch: bool = True) -> Any:
        """Run the model on all examples.

        Args:
            examples: A list, or any iterable, of what is passed to the module one by one.
            batch: Whether to batch; ``False`` runs the module on one example after the other, as
                for fewer than ``loop_below`` examples.

        Returns:
            The results, stacked: a tensor ``[example, ...]`` if the module returns one tensor,
            otherwise the same structure with a stacked tensor in place of each tensor. Other
            objects become lists.

        Raises:
            ValueError: If there are no examples, or their results differ in structure.
            TypeError: If a value is used as a tensor in a way that cannot be recorded.
        """
        if batch and isinstance(examples, Schedule):
            return self._scheduled(examples)
        listed = _checked(examples)
        if batch and len(listed) >= self._least_batch():
            result, _ = self._batched(listed)
            return result
        return self._one_by_one(listed)

    def collate(self, examples: Iterable[Any]) -> Schedule:
        """Record and schedule a mini-batch without running it; a ``collate_fn`` for loaders.

        Args:
            examples: As for the model.

        Returns:
            What the model takes in place of the examples; it can be made in loader workers,
            pickled, and run any number of times.

        Raises:
            RuntimeError: If an example reads a value, or something is computed at once from
                parameters or buffers.
            ValueError: If a tensor of an example requires gradients.
        """
        examples = _checked(examples)
        session = self._begin()
        session.can_run = False
        with closing(session):
            schedule = partial(schedule_batch, session, num_examples=len(examples))
            return self._recorded(session, examples, schedule)

    def explain(self, examples: Iterable[Any]) -> Explanation:
        """Run a batch and return how: steps, rows, flushes, and what did not batch and why.

        Args:
            examples: As for the model.

        Example:
            >>> model = autobatch(nn.Sequential(nn.Linear(2, 1)))
            >>> explanation = model.explain([torch.ones(2), torch.zeros(2)])
            >>> explanation.calls, explanation.steps
            (2, 1)
        """
        examples = _checked(examples)
        return explain(self._batched(examples)[1], len(examples))

    def _least_batch(self) -> int:
        if self.loop_below is not None:
            return self.loop_below
        if self.cache:
            return 0
        return LOOP_BELOW_IN_TRAINING if torch.is_grad_enabled() else LOOP_BELOW_IN_INFERENCE

    def _batched(self, examples: list[Any]) -> tuple[Any, Session]:
        session = self._begin()
        with closing(session), _uncollected(self.cache):
            outcome = self._recorded(session, examples, partial(_finished, session))
            return self._computed(session, outcome), session

    def _recorded(
        self, session: Session, examples: list[Any], end: Callable[[Outcome], _Ended]
    ) -> _Ended:
        """Record the examples, or replay them; return what ``end`` makes of it.

        It is called before the model is restored, which may hold values that are computed then.
        """
        keyed = [example_of(value) if self.cache else Example(value) for value in examples]
        if self.cache and (replayed := _replayed(session, keyed)) is not None:
            return end(replayed)
        with _recording(session, self.plain):
            function = partial(record, session, self.plain)
            results = results_of(session, run_examples(session, function, keyed))
            columns, structure = _collect(session, results)
            return end(Outcome(columns, structure, _emitted(session)))

    def _computed(self, session: Session, outcome: Outcome) -> Any:
        value_columns = outcome.value_columns
        # The values of the results, column by column, then those that were emitted, by name.
        rows = iter(session.rows_of(value_columns) if value_columns else ())
        leaves = [
            next(rows) if isinstance(column, ValueColumn) else column for column in outcome.columns
        ]
        emitted = {
            name: Emitted(next(rows), torch.tensor(examples, device=session.device))
            for name, (_, examples) in outcome.emitted.items()
        }
        return self._finish(tree_unflatten(leaves, outcome.structure), emitted)

    def _scheduled(self, batch: Schedule) -> Any:
        session = self._begin()
        return self._finish(*run_batch(session.table, batch, session.device))

    def _begin(self) -> Session:
        tensors = dict((*self.named_parameters(), *self.named_buffers()))
        mode = self._mode(tensors)
        tables: dict[Any, SignatureTable] = vars(self._local)
        table = tables.get(mode)
        if table is None or len(table.sites) > _MOST_SITES or not table.state.is_as_judged():
            if len(tables) > _MOST_MODES:
                tables.clear()
            table = tables[mode] = SignatureTable(self.plain)
        return Session(self.plain, table, tensors, self.policy)

    def _mode(self, tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
        """Return all on which it depends what calls mean: of the model, and of torch."""
        described = tuple(
            (name, tensor.dtype, None if is_lazy(tensor) else tensor.shape, tensor.requires_grad)
            for name, tensor in tensors.items()
        )
        return (
            tuple(map(_call_identity, self.plain.modules())), described,
            torch.is_grad_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
        )  # fmt: skip

    def _one_by_one(self, examples: list[Any]) -> Any:
        collected: EmittedValues = {}
        results = []
        for number, example in enumerate(examples):
            with _emitting(collected, number):
                results.append(self.plain(example))
        emitted = dict[str, Emitted]()
        for name, (values, numbers) in collected.items():
            rows = torch.stack(values)  # type: ignore[arg-type] # no lazy values
            emitted[name] = Emitted(rows, torch.tensor(numbers, device=rows.device))
        return self._finish(_stack(results), emitted)

    def _finish(self, output: Any, emitted: dict[str, Emitted]) -> Any:
        """Keep what was emitted; connect all parameters, as other ranks wait for all gradients."""
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_distributed and torch.is_grad_enabled():
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            nothing = sum(parameter.flatten()[:0].sum() for parameter in trained)
            output, emitted = tree_map_only(
                Tensor, lambda x: x + nothing if x.is_floating_point() else x, (output, emitted)
            )
        self.emitted = emitted
        return output

    def __deepcopy__(self, memo: dict[int, object]) -> "AutoBatch":
        return AutoBatch(copy.deepcopy(self.plain, memo), *self._options())

    def __reduce__(self) -> tuple[object, ...]:
        return AutoBatch, (self.plain, *self._options())

    def _options(self) -> tuple[Policy, bool, int | None]:
        return self.policy, self.cache, self.loop_below


def autobatch(
    module: nn.Module, policy: Policy = "depth", cache: bool = False, loop_below: int | None = None
) -> AutoBatch:
    """Batch a model that is written for one example.

    With ``cache=True`` the model must be a function of its arguments and parameters; call
    ``model.clear()`` after changing a plain attribute.

    Args:
        module: Its ``forward`` takes one example, any Python object, and computes with ordinary
            torch functions and modules, without a batch axis.
        policy: Order of the batched calls: ``"depth"`` or ``"agenda"``.
        cache: Whether to record one example of each structure, and to replay its calls for the
            others. The structure of an example is its arguments, but of tensors only shape and
            dtype.
        loop_below: For fewer examples the plain loop runs, which is faster for a few. By default
            12 where gradients are enabled and 64 where they are not; 0 with ``cache=True``.

    Returns:
        A module that takes a list of examples. It shares the parameters of ``module``.

    Reference:
        Neubig, Goldberg, Dyer (2017), arXiv:1705.07860 (batching on the fly).

    Example:
        >>> class Sum(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.leaf, self.pair = nn.Linear(1, 4), nn.Linear(8, 4)
        ...     def forward(self, tree):
        ...         if not isinstance(tree, tuple):
        ...             return self.leaf(torch.tensor([float(tree)]))
        ...         return torch.tanh(self.pair(torch.cat([self(part) for part in tree])))
        >>> model = autobatch(Sum())
        >>> model([1, (2, 3), ((4, 5), 6)]).shape
        torch.Size([3, 4])
    """
    return AutoBatch(module, policy, cache, loop_below)


def emit(name: str, value: TensorOrLazy) -> None:
    """Collect a value of the current example; any number per example.

    Args:
        name: Name under which :attr:`AutoBatch.emitted` holds the values.
        value: Tensor; values of one name have one shape and dtype. Ignored where the plain module
            is called alone, which collects nothing.

    Raises:
        TypeError: If the value is not a tensor.

    Example:
        >>> class Words(nn.Module):
        ...     def forward(self, words):
        ...         for word in words:
        ...             emit("length", torch.tensor(float(len(word))))
        >>> model = autobatch(Words())
        >>> model([["one", "three"], ["seven"]])
        [None, None]
        >>> model.emitted["length"].rows, model.emitted["length"].example
        (tensor([3., 5., 5.]), tensor([0, 0, 1]))
    """
    session = ACTIVE.session
    if ACTIVE.examining:
        raise NeedsPython("it emits values")  # so that each of its calls is recorded
    if not isinstance(value, Tensor | Lazy):
        problem = f"autobatch.emit: {name!r} is not a tensor"
        where = session.where() if session else ""
        raise mismatch(TypeError, problem, "a tensor", describe_value(value), where=where)
    if session is not None:
        session.emit(name, value)
    elif (eager := ACTIVE.eager) is not None:
        collected, number = eager
        values, examples = collected.setdefault(name, ([], []))
        values.append(value)
        examples.append(number)


def open(module: nn.Module) -> nn.Module:  # noqa: A001 - autobatch.open
    """Record the calls inside a module, instead of the module as one call.

    Args:
        module: Part of a model.

    Returns:
        The module itself.

    Example:
        >>> model = nn.Sequential(open(nn.Sequential(nn.Linear(2, 2), nn.Tanh())))
        >>> [op.name for op in autobatch(model).explain([torch.ones(2)]).operations]
        ['0/0', '0/1']
    """
    module.autobatch_open = True  # type: ignore[assignment]
    return module


def recurse(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a recursive generator function without Python's limit on recursion.

    Args:
        function: A generator function. Where it would call itself it yields the argument
            of that call, and receives its result.
        argument: Its first argument.

    Returns:
        What the function returns.

    Example:
        >>> def depth(tree):
        ...     if not tree:
        ...         return 0
        ...     return 1 + (yield tree[0])
        >>> chain = ()
        >>> for _ in range(100_000):
        ...     chain = (chain,)
        >>> recurse(depth, chain)
        100000
    """
    stack = [function(argument)]
    value = None
    while stack:
        try:
            next_argument = stack[-1].send(value)
        except StopIteration as stop:
            stack.pop()
            value = stop.value
        else:
            stack.append(function(next_argument))
            value = None
    return value


def _finished(session: Session, outcome: Outcome) -> Outcome:
    session.finish(outcome.values_read())
    return outcome


def _replayed(session: Session, examples: Iterable[Example]) -> Outcome | None:
    """Replay all examples; ``None`` if one must be recorded."""
    replays = list[Replay]()
    for example in examples:
        entry = session.table.cache.find(example)
        if not isinstance(entry, Kept):
            return None
        replays.append(Replay(entry, example.tensors))
    return outcome_of(session, replays)


def _call_identity(module: nn.Module) -> tuple[object, ...]:
    """Return what differs when a call of a module runs something else than the call before."""
    if isinstance(module, torch.jit.ScriptModule):
        problem = "autobatch: a scripted module is part of the model"
        hint = "the module itself"
        raise mismatch(TypeError, problem, "modules in Python", module.original_name, hint=hint)
    # A forward that was set on the module itself comes before that of its class.
    forward = vars(module).get("forward") or type(module).forward
    hook_numbers = (number for kind in HOOKS for number in getattr(module, kind))
    return id(module), module.training, forward, *hook_numbers


@contextmanager
def _emitting(collected: EmittedValues, number: int) -> Iterator[None]:
    outer = ACTIVE.eager
    ACTIVE.eager = (collected, number)
    try:
        yield
    finally:
        ACTIVE.eager = outer


# The results of all examples.


def _collect(session: Session, results: list[Any]) -> tuple[list[ResultColumn], TreeSpec]:
    """Collect the leaves of all results; also return their structure."""
    leaves_of_results, structure = _columns_of(results)
    problem = "autobatch: examples return tensors of different shapes or dtypes"
    columns = list[ResultColumn]()
    for leaves in leaves_of_results:
        if any(isinstance(leaf, Lazy | Tensor) for leaf in leaves):
            columns.append(_value_column(session, leaves, problem, range(len(leaves))))
        else:
            columns.append(leaves)
    return columns, structure


def _emitted(session: Session) -> dict[str, tuple[ValueColumn, Sequence[int]]]:
    """Collect what was emitted, by example: examples take turns where they read values."""
    collected: dict[str, tuple[ValueColumn, Sequence[int]]] = {}
    for name, (values, examples) in session.emitted.items():
        order = sorted(range(len(examples)), key=examples.__getitem__)
        examples_in_order = [examples[number] for number in order]
        values_in_order = [values[number] for number in order]
        problem = f"autobatch.emit: values of {name!r} differ in shape or dtype"
        column = _value_column(session, values_in_order, problem, examples_in_order)
        collected[name] = column, examples_in_order
    return collected


def _value_column(
    session: Session, leaves: Sequence[object], problem: str, examples: Sequence[int]
) -> ValueColumn:
    """Return the values of one leaf of all results; raise an error if their row types differ."""
    values: list[Lazy] = []
    for leaf in leaves:
        if type(leaf) is Lazy:
            value = leaf
        elif isinstance(leaf, Tensor):
            value = session.outside_row(leaf)
        else:
            where = f"example {len(values)}"
            got = describe_value(leaf)
            different = "autobatch: examples return different types"
            raise mismatch(TypeError, different, "a tensor", got, where=where)
        if value._session is not session:
            value = session.foreign(value)
        values.append(value)
    kind = values[0]._kind
    for value, example in zip(values, examples, strict=True):
        if value._kind != kind:
            row_types = session.table.row_types
            hint = "" if problem.startswith("autobatch.emit") else _ANY_NUMBER
            where = f"example {example}"
            raise mismatch(
                ValueError, problem, row_types[kind], row_types[value._kind], where=where, hint=hint
            )
    return ValueColumn(kind, [value._number for value in values])


_ANY_NUMBER = "autobatch.emit(name, value) collects any number of values per example"
_LEAVES = {Lazy, Tensor, str, int, float, bool, type(None)}


def _columns_of(results: list[Any]) -> tuple[list[list[Any]], TreeSpec]:
    """Return the leaves of all results, one list per leaf of a result, and their structure."""
    leaves, structure = tree_flatten(results)
    if not {*map(type, leaves)} <= _LEAVES:
        results = [structured(result, f"example {n}") for n, result in enumerate(results)]
        leaves, structure = tree_flatten(results)
    # Older versions of torch have no `children`, later ones warn of `children_specs`.
    has_children = hasattr(structure, "children")
    structures = structure.children() if has_children else structure.children_specs
    first = structures[0]
    for number, each in enumerate(structures):
        if each != first:
            problem = "autobatch: examples return different structures"
            where = f"example {number}"
            raise mismatch(ValueError, problem, first, each, where=where, hint=_ANY_NUMBER)
    return [leaves[n :: first.num_leaves] for n in range(first.num_leaves)], first


def _stack(results: list[Any]) -> Any:
    columns, structure = _columns_of(results)
    stacked = [
        torch.stack(column) if isinstance(column[0], Tensor) else column for column in columns
    ]
    return tree_unflatten(stacked, structure)


# What is different while examples are recorded.


@contextmanager
def _uncollected(cache: bool) -> Iterator[None]:
    """Collect no garbage if examples are replayed: what is made is needed, or freed at once."""
    collects = cache and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _recording(session: Session, root: nn.Module) -> Iterator[None]:
    """Record all calls of modules on this thread."""
    classes = {base for module in root.modules() for base in type(module).__mro__}
    calling = [each for each in classes - {object} if "__call__" in vars(each)]
    intercepted: list[type] = []
    try:
        _intercept(calling, intercepted)
        ACTIVE.session = session
        yield
    except RecursionError as error:
        problem = "autobatch: the model calls itself too deeply for Python"
        expected = f"at most about {sys.getrecursionlimit()} calls inside one another"
        hint = "autobatch.recurse(function, root), or a stack of your own"
        where = f"example {session.example}"
        raise mismatch(RecursionError, problem, expected, where=where, hint=hint) from error
    except Exception as error:
        if _says_where(error):
            raise
        line, inner_frames = _raised(error)
        if "Lazy(" in str(error) or any(map(_holds_values, inner_frames)):
            raise _not_computed(session, error, line, inner_frames) from error
        if session.example is not None:
            error.add_note(f"{NOTE}{session.where(line)}")
        raise
    finally:
        ACTIVE.session = None
        session.table.state.restore()
        _release(intercepted)


# Of each class of modules: how many sessions record its calls, and its own __call__.
_INTERCEPTED: dict[type, tuple[int, Callable[..., Any]]] = {}
_LOCK = Lock()
_TOUCHED: list["_Process"] = []  # as it was before the first of these sessions


def _seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that seeds torch, except inside of a model that is recorded."""

    @functools.wraps(original)
    def seed(*args: object, **kwargs: object) -> object:
        if ACTIVE.session is not None:
            problem = "autobatch: the model seeds torch while it is recorded"
            expected = "random numbers of the calls themselves, which are drawn later"
            hint = "seed before the call of the model; or draw from a torch.Generator of your own"
            where = ACTIVE.where()
            raise mismatch(
                RuntimeError, problem, expected, original.__name__, where=where, hint=hint
            )
        return original(*args, **kwargs)

    return seed


class _Process(NamedTuple):
    """What belongs to the whole process, and is different while models are recorded."""

    is_instance: Callable[..., bool]
    find_implementation: Callable[..., Any]  # of functools.singledispatch
    collects: bool  # whether garbage is collected
    manual_seed: Callable[..., Any]
    seed: Callable[..., Any]

    @classmethod
    def touch(cls) -> "_Process":
        """Let lazy values be tensors, and collect no garbage; return what was before."""
        before = cls(
            is_instance=builtins.isinstance,
            find_implementation=functools._find_impl,  # type: ignore[attr-defined]
            collects=gc.isenabled(),
            manual_seed=torch.manual_seed,
            seed=torch.seed,
        )
        gc.disable()  # what is recorded is kept: to look through it again and again takes time
        builtins.isinstance = is_instance
        for owner in (torch, torch.random):
            owner.manual_seed = _seed(before.manual_seed)  # type: ignore[attr-defined]
            owner.seed = _seed(before.seed)  # type: ignore[attr-defined]
        functools._find_impl = find_implementation  # type: ignore[attr-defined]
        return before

    def restore(self) -> None:
        """Put back what was before."""
        functools._find_impl = self.find_implementation  # type: ignore[attr-defined]
        builtins.isinstance = self.is_instance
        for owner in (torch, torch.random):
            owner.manual_seed = self.manual_seed  # type: ignore[attr-defined]
            owner.seed = self.seed  # type: ignore[attr-defined]
        if self.collects:
            gc.enable()


def _intercept(classes: Iterable[type], done: list[type]) -> None:
    """Let calls of modules be recorded on threads with a session; list what was done."""
    with _LOCK:
        if not _TOUCHED:
            _TOUCHED.append(_Process.touch())
        for each in classes:
            users, original = _INTERCEPTED.get(each, (0, vars(each)["__call__"]))
            if not users:
                is_base = each is nn.Module
                recorded = intercepted(each) if is_base else recorded_call(original)
                each.__call__ = recorded  # type: ignore[method-assign]
            _INTERCEPTED[each] = users + 1, original
            done.append(each)


def _release(classes: Iterable[type]) -> None:
    with _LOCK:
        for each in classes:
            users, original = _INTERCEPTED.pop(each)
            if users > 1:
                _INTERCEPTED[each] = users - 1, original
            else:
                each.__call__ = original  # type: ignore[method-assign]
        if not _INTERCEPTED and _TOUCHED:
            _TOUCHED.pop().restore()


# Errors and checks.


def _says_where(error: Exception) -> bool:
    """Return whether an error says where it was raised."""
    if isinstance(error.args[0] if error.args else "", Mismatch):
        return True
    return any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))


def _raised(error: Exception) -> tuple[str, list[FrameType]]:
    """Find the innermost line of the user's code that raised an error, and all frames inside."""
    inner: list[FrameType] = []
    for frame, number in reversed(list(walk_tb(error.__traceback__))):
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{number}", inner
        inner.append(frame)
    return "", []


def _holds_values(frame: FrameType) -> bool:
    return any(map(holds_values, frame.f_locals.values()))


def _not_computed(
    session: Session, error: Exception, line: str, inner_frames: Sequence[FrameType]
) -> Exception:
    """Create the error for code of others that was given a value."""
    problem = "autobatch: a function was given a value that has not been computed"
    hint = "call it in a submodule that is not opened, which is run on real tensors"
    if any("_higher_order_ops" in frame.f_code.co_filename for frame in inner_frames):
        hint = "autobatch.cond or autobatch.while_loop, which take the same arguments"
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    for module, (_, reason) in session.table.opened.items():
        if any(owner is module for owner in owners):
            hint += f" ({type(module).__name__} is recorded call by call: {reason})"
    return failed(error, problem, session.where(line), hint)


def _checked(examples: object) -> list[Any]:
    """List the examples of a call."""
    if (session := ACTIVE.session) is not None:
        problem = "autobatch: a batched model is called inside a batched model"
        expected = "a plain module"
        got = "autobatch(...)"
        hint = "call the plain module there: its calls are batched with the others"
        raise mismatch(RuntimeError, problem, expected, got, where=session.where(), hint=hint)
    if isinstance(examples, Schedule):
        problem = "autobatch: a scheduled batch can only be run batched"
        raise mismatch(TypeError, problem, "the examples themselves", "a Schedule")
    if isinstance(examples, str | Mapping) or not isinstance(examples, Iterable):
        problem = "autobatch: not a list of examples"
        got = describe_value(examples)
        raise mismatch(TypeError, problem, "a list, or an iterable such as a generator", got)
    listed = list(examples)
    if not listed:
        problem = "autobatch: the list of examples is empty"
        raise mismatch(ValueError, problem, "at least one example", 0)
    return listed
