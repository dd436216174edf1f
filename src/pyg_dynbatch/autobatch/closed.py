"""Find out whether a module that is written for one example may be called on stacked rows.

It may if it is *closed*: run on one row, on 3 and on 67 stacked rows, it calls the same functions
of torch with the same static arguments, and of each the table (``table/functions.py``) says that
the same call on stacked rows is right. What holds for each of them holds for their composition. The
module is tried on a twin, with rows that have no content, so that neither its values nor its state
have a part in this, and nothing of it changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only

from pyg_dynbatch.autobatch.lazy import METADATA, NeedsPython
from pyg_dynbatch.autobatch.table.calls import Template
from pyg_dynbatch.autobatch.table.functions import ROW, Batched, batched, named
from pyg_dynbatch.autobatch.table.layers import batched_layer, is_in_table
from pyg_dynbatch.autobatch.twins import HostDraws, Twins, changed_between
from pyg_dynbatch.core.operation import HOOKS
from pyg_dynbatch.core.types import TensorType, has_gradient

STACKS = (3, 67)
"""Numbers of stacked rows on which a module is tried."""

READS = frozenset(
    named(
        "__bool__ item tolist __int__ __float__ __complex__ __index__ numpy __array__ __contains__ "
        "__format__ equal allclose is_nonzero"
    )
)
"""Functions that read the values of a tensor."""

# What tensors of a trial cannot answer: they have no content, and any number of rows.
_OF_AUTOGRAD = {getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")}
_OF_DEVICE: dict[Callable[..., Any], Callable[[torch.device], object]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
}
_OF_SHAPE = {Tensor.__len__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.shape.__get__}  # type: ignore[attr-defined]
_LIKE = frozenset(named("to type_as"))


class CannotOpen(Exception):
    """A module computes what cannot be recorded either, such as a gradient in Python."""


class ChangesUnseen(Exception):
    """A module changes a tensor in place in a way that torch does not count, such as ``.data``."""


class RowCount(int):
    """The number of stacked rows, or a number computed from it: nothing may depend on it."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NeedsPython("it computes with the number of rows")


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "str", "repr", "format")
_UNARY = ("neg", "pos", "abs", "invert", "round", "float", "int")
_BINARY = (
    *("add", "sub", "mul", "floordiv", "truediv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in (*_COMPARISONS, *_UNARY, *_BINARY, *(f"r{each}" for each in _BINARY)):
    setattr(RowCount, f"__{_name}__", RowCount._refuse)


class Called(NamedTuple):
    """One call of a function, or of a layer that has a form of its own."""

    target: Callable[..., Any]
    static: tuple[object, ...]  # the structure of its arguments, and those that are not tensors
    are_rows: tuple[bool, ...]  # of each operand, then of each result
    shapes: tuple[torch.Size, ...]  # of its results
    aliases: tuple[bool, ...]  # of each result and operand, whether they share memory


class Trial(NamedTuple):
    """What a module did on some rows: its calls, and its result, a structure of leaves."""

    calls: list[Called]
    leaves: list[Any]
    structure: TreeSpec
    is_view: bool  # whether the result shares memory with an argument


class Compute(NamedTuple):
    """A call of a module: how it is made with a module, or its twin, on rows.

    Args:
        module: The module.
        types: Types of the rows.
        device: Where they will be.
        twin: Returns what makes the call on twins of the module and of other tensors.
    """

    module: nn.Module
    types: Sequence[TensorType]
    device: torch.device
    twin: Callable[[Twins], Callable[..., Any]]


def check_closed(compute: Compute) -> Trial:
    """Return what a module does on one row, if it is closed.

    Raises:
        NeedsPython: If it is not, but its inside can be recorded call by call.
        CannotOpen: If its inside cannot be recorded, either.
    """
    decisions = Decisions(set(), set()), Decisions(set(), set())
    trials = _trials(compute, 0, decisions)
    for size in STACKS:
        stacked_trials = _trials(compute, size, decisions)
        if len(trials) != len(stacked_trials):
            raise NeedsPython("it keeps other state on stacked rows")
        for one, stacked in zip(trials, stacked_trials, strict=True):
            _compare(one, stacked, size)
    return trials[0]


def has_hooks_of_users(module: nn.Module, names: Sequence[str] = HOOKS) -> bool:
    """Return whether a module or one inside has hooks of these kinds that are not torch's own."""
    for each in module.modules():
        for name in names:
            hooks = getattr(each, name).values()
            if not all(type(hook).__module__.startswith("torch.") for hook in hooks):
                return True
    return False


def share_memory(leaves: Sequence[object], rows: Sequence[Tensor]) -> bool:
    """Return whether tensors in a result share memory with rows, or with each other."""
    memories = [_memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    distinct = set(memories)
    return len(distinct) < len(memories) or not distinct.isdisjoint(map(_memory, rows))


class Decisions(NamedTuple):
    """What was decided on one row: by the number of a call, and by layer."""

    constants: set[int]  # their results depend on no row
    opened: set[nn.Module]  # what they call is listed instead of them


Decide = Callable[[Template, Sequence[TensorType]], Batched | None]
"""Returns what the table says of a call, from its arguments and the types of its rows."""


class _Listing(TorchFunctionMode):
    """Lists the calls of functions of torch on tensors without content.

    layer() for each layer of the table → entered while the module runs, functions and layers are
    listed → is_row() says which results depend on the rows

    Args:
        twins: Take the place of tensors with content.
        rows: What the module is called on.
        size: The number of stacked rows; 0 for one row.
        decisions: Made on one row; stacked rows follow them.
        device: Where the rows will be.
    """

    def __init__(
        self, twins: Twins, rows: Sequence[Tensor], size: int, decisions: Decisions,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.device = device
        self.draws = False  # whether the function that is running draws random numbers
        self.twins = twins
        self.size = size
        self.decisions = decisions
        self.calls: list[Called] = []
        self.depth = 0  # of functions that are running
        self.host_draws: HostDraws | None = None  # while it is entered
        self._rows = {id(row): row for row in rows}
        self._arguments = {_memory(row) for row in rows}
        self._made: dict[int, Tensor] = {}  # by memory, one tensor each

    def is_row(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the rows."""
        return id(tensor) in self._rows

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func in METADATA:
            return self._metadata(func, args, kwargs or {})
        with self._inside():
            return self._function(func, args, kwargs or {})

    def _metadata(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        """Answer what a module asks of a tensor but its values: shape, device, requires_grad."""
        is_asked_by_torch = self.depth > 0
        if is_asked_by_torch:
            return func(*args, **kwargs)
        if func in _OF_DEVICE:
            return _OF_DEVICE[func](self.device)
        if func in _OF_AUTOGRAD:
            raise NeedsPython("it reads requires_grad, which may differ between calls")
        if func is Tensor.__len__ and self.is_row(args[0]):  # which cannot return a RowCount
            raise NeedsPython("it computes with the length of an argument")
        answer = func(*args, **kwargs)
        if self.size and func in _OF_SHAPE and self.is_row(args[0]):
            return _marked(func, answer, args[0].shape)
        return answer

    def _function(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        args, kwargs = tree_map_only(Tensor, self.twins.tensor, (args, kwargs))
        if self.depth > 1:  # inside of a layer
            return func(*args, **kwargs)
        if func in READS and isinstance(args[0], Tensor):
            raise NeedsPython("it reads a value")
        if func is Tensor.register_hook:
            raise CannotOpen("a hook changes gradients")

        def decide(template: Template, types: Sequence[TensorType]) -> Batched | None:
            args, kwargs = template
            return batched(func, args, kwargs, types)

        return self._listed(func, func, args, kwargs, decide)

    def layer(self, layer: nn.Module, twin: nn.Module) -> Callable[..., Any]:
        """Return a ``forward`` for the twin of a layer that lists its call, not what it calls."""
        forward = twin.forward

        def decide(template: Template, types: Sequence[TensorType]) -> Batched | None:
            args, kwargs = template
            return batched_layer(layer, args, kwargs, types)

        def listed(*args: object, **kwargs: object) -> object:
            with self._inside():
                args, kwargs = tree_map_only(Tensor, self.twins.tensor, (args, kwargs))
                if not self.size and decide(*self._template(args, kwargs)) is None:
                    self.decisions.opened.add(layer)
                if layer not in self.decisions.opened:
                    return self._listed(layer, forward, args, kwargs, decide)
            return forward(*args, **kwargs)

        return listed

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """List nothing meanwhile, and watch no code of torch."""
        self.depth += 1
        if self.host_draws is not None and self.depth == 1:
            self.host_draws.pause()
        try:
            yield
        finally:
            self.depth -= 1
            if self.host_draws is not None and not self.depth:
                self.host_draws.resume()

    def _listed(
        self,
        target: Callable[..., Any],
        run: Callable[..., Any],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        decide: Decide,
    ) -> object:
        """Run one call, and list it."""
        leaves, structure = tree_flatten((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        are_rows = [self.is_row(operand) for operand in operands]
        depends = any(are_rows) and not self._reads_only_the_type(target, args)
        if depends and not self.size and self._is_constant(target, args, kwargs, decide):
            self.decisions.constants.add(len(self.calls))
        depends &= len(self.calls) not in self.decisions.constants
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise NeedsPython("it draws from a generator of its own")

        versions = [operand._version for operand in operands]
        self.draws = False
        result = run(*args, **kwargs)
        if self.draws and not any(are_rows):
            raise NeedsPython("it draws random numbers that all stacked rows would share")
        self._check_changes(operands, are_rows, versions)

        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        memories = [_memory(operand) for operand in operands]
        for each in results:
            if _memory(each) not in memories:
                self._made[_memory(each)] = each
            if depends:
                self._rows[id(each)] = each
        called = Called(
            target,
            static=(structure, *map(_static, leaves)),
            are_rows=(*are_rows, *map(self.is_row, results)),
            shapes=tuple(each.shape for each in results),
            aliases=tuple(_memory(each) == memory for each in results for memory in memories),
        )
        self.calls.append(called)
        return result

    def _reads_only_the_type(self, target: Callable[..., Any], args: Sequence[object]) -> bool:
        """Return whether a call takes only the dtype of a row, as ``table.to(x)`` does."""
        return target in _LIKE and isinstance(args[0], Tensor) and not self.is_row(args[0])

    def _is_constant(
        self,
        target: Callable[..., Any],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        decide: Decide,
    ) -> bool:
        """Return whether a call makes the same of all rows; refuse one that is not direct."""
        decision = decide(*self._template(args, kwargs))
        if decision is None or not (decision.is_direct or decision.is_constant):
            name = getattr(target, "__name__", type(target).__name__).strip("_")
            raise NeedsPython(f"{name} is not the same call on stacked rows")
        return decision.is_constant

    def _template(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[Template, list[TensorType]]:
        """Return the arguments of a call with marks for rows, and the types of these."""
        types = list[TensorType]()

        def marked(operand: Tensor) -> object:
            if not self.is_row(operand):
                return operand
            types.append(TensorType(tuple(operand.shape), operand.dtype))
            return ROW

        return tree_map_only(Tensor, marked, (args, kwargs)), types

    def _check_changes(
        self, operands: Sequence[Tensor], are_rows: Sequence[bool], versions: Sequence[int]
    ) -> None:
        for operand, is_row, version in zip(operands, are_rows, versions, strict=True):
            if operand._version == version:
                continue
            if _memory(operand) in self._arguments:
                raise NeedsPython("it changes its argument in place")
            if _memory(operand) not in self._made:
                if self.twins.changed() is None:
                    raise ChangesUnseen
                raise NeedsPython("it changes a tensor in place that it has not made")
            if not is_row and any(are_rows):
                raise NeedsPython("it writes rows into another tensor")


class _HiddenCalls(TorchDispatchMode):
    """Notices operators that draw, and those that no listed function calls.

    The latter are those of a scripted function, or of compiled code.
    """

    def __init__(self, listing: _Listing) -> None:
        super().__init__()
        self.listing = listing
        self.noticed = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        self.noticed |= not self.listing.depth and func not in _ALIASES
        self.listing.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _static(leaf: object) -> tuple[type, str] | None:
    if isinstance(leaf, Tensor):
        return None
    return type(leaf), int.__repr__(leaf) if isinstance(leaf, RowCount) else repr(leaf)


def _marked(func: Callable[..., Any], answer: Any, shape: torch.Size) -> object:
    """Mark what a function of shapes returns, where it depends on the number of rows."""
    if isinstance(answer, torch.Size):
        return torch.Size((RowCount(answer[0]), *answer[1:])) if answer else answer
    if func is Tensor.size and answer != shape[0]:
        return answer
    return RowCount(answer)


def _trials(compute: Compute, size: int, decisions: tuple[Decisions, Decisions]) -> list[Trial]:
    """Run a module on a twin; twice if it keeps something, which may change the second call."""
    twins = Twins()
    twin = twins.module(compute.module)
    own = {id(each) for each in twin.modules()}
    untouched = twins.state()
    first, listing = _try(compute, twins, size, decisions[0])
    modules = [twin for _, twin in twins.modules()]
    state = twins.state()
    changed = changed_between(untouched, state)
    for number, name in changed:
        leaves = tree_leaves(state.get((number, name)))
        depends = any(isinstance(leaf, Tensor) and listing.is_row(leaf) for leaf in leaves)
        depends |= RowCount in map(type, leaves) or name in modules[number]._buffers
        if depends or id(modules[number]) not in own:
            raise NeedsPython(f"it keeps state in {name!r}")
    if not changed:
        return [first]
    second, _ = _try(compute, twins, size, decisions[1])
    for _, name in changed_between(state, twins.state()):
        raise NeedsPython(f"it keeps state in {name!r}")
    return [first, second]


def _try(compute: Compute, twins: Twins, size: int, decisions: Decisions) -> tuple[Trial, _Listing]:
    """Run a module once on a twin; ``size`` is the number of stacked rows, 0 for one row."""
    rows = []
    for row_type in compute.types:
        shape = (size, *row_type.shape) if size else row_type.shape
        row = torch.empty(shape, dtype=row_type.dtype, device="meta")
        rows.append(row.requires_grad_(has_gradient(row.dtype)).clone())
    listing = _Listing(twins, rows, size, decisions, compute.device)
    result, draws, below = _run(compute, twins, listing, rows)
    if draws.noticed:
        raise NeedsPython("it draws random numbers of Python or NumPy, or seeds a generator")
    if below.noticed:
        raise CannotOpen("it computes by scripted or compiled code")
    if _has_gradient_in_python(result):
        raise CannotOpen("its gradient is computed in Python")
    leaves, structure = tree_flatten(result)
    if any(isinstance(leaf, Tensor) and not listing.is_row(leaf) for leaf in leaves):
        raise NeedsPython("its result does not depend on its arguments")
    return Trial(listing.calls, leaves, structure, share_memory(leaves, rows)), listing


def _run(
    compute: Compute, twins: Twins, listing: _Listing, rows: Sequence[Tensor]
) -> tuple[object, HostDraws, _HiddenCalls]:
    """Run a twin on rows, and list what it does."""
    layers = [(module, twin) for module, twin in twins.modules() if is_in_table(module)]
    for layer, twin in layers:
        vars(twin)["forward"] = listing.layer(layer, twin)
    below = _HiddenCalls(listing)
    draws = HostDraws()
    call = compute.twin(twins)
    try:
        with ExitStack() as watches:
            if not listing.size:  # what they notice is the same on stacked rows
                listing.host_draws = watches.enter_context(draws)
            watches.enter_context(listing)
            if not listing.size:
                watches.enter_context(below)
            result = call(*rows)
    except (NeedsPython, CannotOpen, ChangesUnseen, RecursionError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if below.noticed:
            raise CannotOpen("it computes by scripted or compiled code") from error
        where = "on stacked rows" if listing.size else "on a row without content"
        raise NeedsPython(f"it fails {where}: {error}") from error
    finally:
        for _, twin in layers:
            del vars(twin)["forward"]
    return result, draws, below


def _has_gradient_in_python(result: object) -> bool:
    nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    seen = set[torch.autograd.graph.Node]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def _compare(one: Trial, stacked: Trial, size: int) -> None:
    """Raise an error unless a module does the same on one row and on stacked rows."""
    if len(one.calls) != len(stacked.calls):
        raise NeedsPython("it calls other functions on stacked rows")
    for call, stacked_call in zip(one.calls, stacked.calls, strict=True):
        if call._replace(shapes=()) != stacked_call._replace(shapes=()):
            raise NeedsPython("it calls other functions on stacked rows")
        are_rows = call.are_rows[len(call.are_rows) - len(call.shapes) :]
        shapes = zip(call.shapes, are_rows, stacked_call.shapes, strict=True)
        for shape, is_row, stacked_shape in shapes:
            if stacked_shape != ((size, *shape) if is_row else shape):
                raise NeedsPython("its results have other shapes on stacked rows")
    if one.structure != stacked.structure:
        raise NeedsPython("its result has another structure on stacked rows")
    for leaf, other_leaf in zip(one.leaves, stacked.leaves, strict=True):
        if isinstance(leaf, Tensor):
            is_same = (size, *leaf.shape) == other_leaf.shape
        else:
            is_same = leaf == other_leaf
        if not is_same:
            raise NeedsPython("its result is another one on stacked rows")
