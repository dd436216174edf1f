"""Choose how a call that is written for one example is run on stacked rows.

The first of four forms that obeys the row law (:mod:`pyg_dynbatch.core.row_law`) is used: a known
batched form (:mod:`pyg_dynbatch.autobatch.operations`), the call itself, the call with parameters
among its arguments repeated for each row, or ``torch.vmap``, which cannot mix rows but is slower.
"""

import gc
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from pyg_dynbatch.core import row_law
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.listing import (
    Called,
    ChangesArgument,
    ChangesState,
    NeedsPython,
    listed,
    share_memory,
)
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.core.row_law import Check, Operand
from pyg_dynbatch.core.shadow import (
    draw_rows,
    draws_on_host,
    module_of,
    set_mode,
    state_of,
    tensors_of,
    undisturbed,
)
from pyg_dynbatch.core.types import TensorType, has_gradient

Form = Callable[..., Any]
# Whose modules are operators with parameters as operands.
_LIBRARIES = {"torch.nn.modules", "pyg_dynbatch.nn"}


class Examined(NamedTuple):
    """How a call is run on many rows at once.

    Args:
        form: Takes the stacked rows; returns the result of the call, with a batch axis.
        way: ``"fast"``, ``"direct"``, ``"expanded"``, ``"vmap"`` or ``"ragged"``.
        leaves: For each leaf of the result its tensor type, or the object itself.
        spec: Structure of the result.
        random: Whether each call draws random numbers.
    """

    form: Form
    way: str
    leaves: list[Any]
    spec: Any
    random: bool


class Candidate(NamedTuple):
    """A call to examine.

    Args:
        call: What will be run.
        copied: The same on a copy of the module, so that no check changes anything of it.
        copy: Makes such a copy.
        module: The module that is called, unless it is a function.
    """

    call: Any
    copied: Any
    copy: Callable[..., Any]
    module: nn.Module | None

    def fresh(self) -> Any:
        """Make a copy with parameters drawn anew."""
        return self.copy(True)


def examine(
    given: Candidate, row_types: Sequence[TensorType], device: torch.device, name: str, where: str
) -> Examined:
    """Run a call on random rows, once per signature, and choose its batched form.

    Raises:
        NeedsPython: If it reads a value, keeps state in an attribute, or draws random numbers of
            Python or NumPy; or if it has no batched form and its inside can be recorded.
        ValueError: If no form gives the results of single rows, or if the call normalizes over
            the batch, returns a tensor on another device, or a shape that depends on values.
        TypeError: If it changes an argument in place or returns no tensor.
        RuntimeError: If it changes a buffer or parameter, or gives a different result when it is
            repeated.
    """
    module, call = given.module, given.copied
    if got := row_law.normalizes_over_rows(module):
        what = f"autobatch: {name} {row_law.NORMALIZES}"
        raise mismatch(ValueError, what, got=got, where=where, hint=row_law.OTHER_NORMS)
    with undisturbed(device):
        untouched = state_of(call.target)
        try:
            rows, results, calls = _results(call, row_types, device)
        except ChangesArgument:
            what = f"autobatch: {name} changes its argument in place"
            hint = "the form that returns a new tensor: x + y, torch.stack, inplace=False"
            raise mismatch(TypeError, what, where=where, hint=hint) from None
        except ChangesState as error:
            raise _changes(name, _described(call.target, error.args[0]), where) from None
        if draws_on_host(lambda: call(*(row[0] for row in rows))):
            raise NeedsPython("it draws random numbers of Python or NumPy, or seeds a generator")
        _check_first_call(given, untouched, rows, name, where)
        leaves, spec = tree_flatten(results[0])
        random = any(each.random for each in calls)
        _check_results(results, device, name, where)
        _check_state(call, rows, None if random else results[0], name, where)
        way, form = _form(_Trial(given, rows, results, calls), name, where)
    types = [TensorType(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
    random |= row_law.draws_random_numbers(module)
    return Examined(form, way, types, spec, random)


def _results(
    call: Form, row_types: Sequence[TensorType], device: torch.device
) -> tuple[list[Tensor], list[Any], list[Called]]:
    """Draw rows on which the call works; also return what it makes of each, and how."""
    found: list[Any] = []

    def run(rows: Sequence[Tensor]) -> None:
        found[:] = [listed(call, [row[n] for row in rows]) for n in range(3)]

    rows = draw_rows(run, row_types, device)
    return rows, [result for _, result in found], found[0][0].calls


def _described(target: Any, changed: Tensor) -> str:
    if isinstance(target, nn.Module):
        for kind, named in ("buffer", target.named_buffers), ("parameter", target.named_parameters):
            for name, tensor in named():
                if share_memory(tensor, changed):
                    return f"its {kind} {name!r}"
    return "a tensor that it has not made"


def _changes(name: str, what: str, where: str) -> RuntimeError:
    what, wanted = f"autobatch: {name} changes {what} when it is called", "equal results each time"
    hint = "keep no state between calls, or autobatch.open(module)"
    return mismatch(RuntimeError, what, wanted, where=where, hint=hint)


def _check_first_call(
    given: Candidate, untouched: dict[str, Any], rows: list[Tensor], name: str, where: str
) -> None:
    """Raise an error if the first call keeps anything but what it would keep for any rows."""
    kept = state_of(given.copied.target)
    if not (changed := _differing(untouched, kept)):
        return
    if buffers := [each for each in changed if each in given.copied.target.state_dict()]:
        raise _changes(name, f"its buffer {buffers[0]!r}", where)
    for columns in [row[1] for row in rows], rows:
        other = given.copy()
        try:
            other(*columns)
        except Exception as error:
            raise NeedsPython(f"it keeps state in {changed[0]!r}") from error
        if _differing(kept, state_of(other.target)):
            raise NeedsPython(f"it keeps state in {changed[0]!r}")


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = {**before, **after}
    return [name for name in names if not row_law.alike(before.get(name), after.get(name))]


def _check_state(call: Any, rows: Sequence[Tensor], result: Any, name: str, where: str) -> None:
    """Raise an error if the next call finds what an earlier one has left behind."""
    before = state_of(call.target)
    found, again = listed(call, [row[0] for row in rows])
    if result is not None and not row_law.agree(result, again):
        what = f"autobatch: {name} gives a different result when it is called again"
        hint = "keep no state between calls; draw random numbers by functions of torch"
        raise mismatch(RuntimeError, what, "the same result every time", where=where, hint=hint)
    for kept in _differing(before, state_of(call.target)):
        if kept in call.target.state_dict():
            raise _changes(name, f"its buffer {kept!r}", where)
        raise NeedsPython(f"it keeps state in {kept!r}")
    # A hook, or anything else that the module refers to, may keep what it is given.
    own = [*map(id, tensors_of(module_of(call.target)))]
    leaves = (*found.rows, *tree_leaves(again))
    held = [ref(x) for x in leaves if isinstance(x, Tensor) and id(x) not in own]
    del found, again, leaves
    alive = lambda: any(tensor() is not None for tensor in held)  # noqa: E731
    if alive() and gc.collect() >= 0 and alive():  # not in a cycle only
        raise NeedsPython("it keeps its arguments or results")


def _check_results(results: list[Any], device: torch.device, name: str, where: str) -> None:
    outputs = [x for x in tree_flatten(results[0])[0] if isinstance(x, Tensor)]
    if results[0] is NotImplemented:
        what = f"autobatch: {name} does not take operands of these types"
        raise mismatch(TypeError, what, "tensors and numbers", where=where)
    if not outputs:
        what = f"autobatch: {name} returns no tensor"
        hint = "item() or tolist() of the argument, which suspend the example"
        got = tree_flatten(results[0])[0]
        raise mismatch(TypeError, what, "at least one tensor", got, where=where, hint=hint)
    if elsewhere := [leaf.device for leaf in outputs if leaf.device != device]:
        what = f"autobatch: {name} returns a tensor on a different device"
        raise mismatch(ValueError, what, device, elsewhere[0], where=where)
    if not all(row_law.agree(result, results[0], values=False) for result in results):
        what = f"autobatch: the result of {name} depends on values in shape or structure"
        hint = "item() or tolist() of the argument, which suspend the example"
        raise mismatch(ValueError, what, "one shape for all rows", where=where, hint=hint)


def _mapped(call: Form, result: Any) -> Form:
    """Return a call under ``torch.vmap``, which takes functions that return tensors alone."""
    leaves, spec = tree_flatten(result)

    def form(*rows: Tensor) -> Any:
        flat = torch.vmap(lambda *row: tuple(row_law.flat(call)(row)), randomness="different")
        made = iter(flat(*rows))
        return tree_unflatten([next(made) if isinstance(x, Tensor) else x for x in leaves], spec)

    return form


def _is_operator(target: Any) -> bool:
    """Return whether a few draws decide a call: of a function of torch, or a plain module."""
    parts = target.modules() if isinstance(target, nn.Module) else ()
    return all(
        type(part).__module__.rpartition(".")[0] in _LIBRARIES
        and calls_only(part, forward=type(part).forward)
        for part in parts
    )


def _may_be_opened(call: Any, rows: list[Tensor]) -> bool:
    """Return whether the calls inside of a module can be recorded one by one, without hooks."""
    is_own = type(call.target).__module__.rpartition(".")[0] not in _LIBRARIES
    plain = all(calls_only(part, forward=type(part).forward) for part in call.target.modules())
    return is_own and plain and not row_law.has_python_gradient(call, rows)


def _trained(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _takes_batches(call: Form, rows: list[Tensor]) -> bool:
    """Return whether a call obeys the row law on batches, which a single row is not."""
    try:
        return row_law.judge(call, rows, batched=True) is True
    except Exception:  # noqa: BLE001 - it does not take batches
        return False


def _run_backward(form: Form, rows: list[Tensor]) -> None:
    """Run a backward pass, which may raise an error under ``torch.vmap``."""
    given = [row.detach().requires_grad_(has_gradient(row.dtype)) for row in rows]
    made = [x.sum() for x in tree_leaves(form(*given)) if isinstance(x, Tensor) and x.requires_grad]
    wanted = [row for row in given if row.requires_grad]
    if made and wanted:
        torch.autograd.grad(made, wanted, allow_unused=True)


class _Trial(NamedTuple):
    """Tries the forms of a call; ``rows``, ``results`` and ``calls`` are those of single rows."""

    given: Candidate
    rows: list[Tensor]
    results: list[Any]
    calls: Sequence[Called]

    @property
    def random(self) -> bool:
        """Whether the call draws random numbers."""
        return any(each.random for each in self.calls)

    def compared(
        self, one: Form, many: Form, sizes: Sequence[int] = (1, 3), in_python: bool = False
    ) -> list[Any]:
        """Compare a form of one row with one of stacked rows, at each size."""
        owner = module_of(getattr(one, "target", None))
        operands = [Operand(tuple(row.shape[1:]), row.dtype, True) for row in self.rows]
        parameters = [] if owner is None else _trained(owner)
        facts: Any = {"scale": row_law.largest(self.calls), "in_python": in_python}
        check = Check(operands, self.rows[0].device, False, parameters, **facts)
        single, stacked = row_law.flat(one), row_law.flat(many)
        return [row_law.obeys(single, stacked, size, check) for size in sizes]

    def equal(self, one: Form, many: Form, **options: Any) -> bool:
        """Return whether two forms are equal, and all results are rows."""
        return all(found and all(found) for found in self.compared(one, many, **options))

    def fast(self) -> bool:
        """Return whether the known batched form is right, if there is one."""
        if not self.given.call.has_fast():
            return False
        fresh = self.given.fresh()
        if self.random:  # a recurrent layer, whose dropout draws for each element
            set_mode(fresh.target, False)
        return self.equal(fresh, fresh.fast)

    def direct(self) -> bool:
        """Return whether the call itself is right on stacked rows."""
        copied, rows = self.given.copied, self.rows
        verdict = row_law.judge(copied, rows)
        if verdict is not None:
            return verdict
        if self.random:
            # One row draws the same numbers alone and as a batch of one.
            one = row_law.seeded(self.given.fresh())
            return _takes_batches(copied, rows) and self.equal(one, one, sizes=(1,))
        # Nothing is listed of a backward pass in Python.
        in_python = row_law.has_python_gradient(copied, rows)
        simple, fresh = _is_operator(copied.target) or in_python, self.given.fresh()
        simple = simple or _takes_batches(copied, rows)
        return simple and self.equal(fresh, fresh, in_python=in_python)

    def expanded(self) -> bool:
        """Return whether the call is right with parameters repeated, as for a first state."""
        call = self.given.call
        if not call.has_shared() or self.random or not _is_operator(call.target):
            return False
        fresh = self.given.fresh()
        return self.equal(fresh, fresh.expanded)

    def mapped(self) -> bool:
        """Return whether ``torch.vmap`` is right; it raises errors of many classes."""
        copied, rows, result = self.given.copied, self.rows, self.results[0]
        found = _mapped(copied, result)(*rows)
        parts = [tree_map_only(Tensor, itemgetter(n), found) for n in range(3)]
        ones = [copied(*(row[n] for row in rows)) for n in range(3)]
        if not row_law.agree(parts, ones, values=not self.random):
            return False
        fresh = self.given.fresh()
        mapped = _mapped(fresh, result)
        if self.random:
            _run_backward(mapped, rows)
            return True
        # A hook or a backward pass in Python may see the gradients of all rows.
        if row_law.has_python_gradient(copied, rows):
            return self.equal(fresh, mapped, in_python=True)
        return [] not in self.compared(fresh, mapped)


def _form(trial: _Trial, name: str, where: str) -> tuple[str, Form]:
    given = trial.given
    if trial.fast():
        return "fast", given.call.fast
    if trial.direct():
        return "direct", given.call
    if trial.expanded():
        return "expanded", given.call.expanded
    reason = "results that differ from row by row"
    try:
        if trial.mapped():
            return "vmap", _mapped(given.call, trial.results[0])
    except Exception as error:  # noqa: BLE001 - part of the message
        reason = f"torch.vmap: {error}"
    if given.module is not None and _may_be_opened(given.copied, trial.rows):
        raise NeedsPython(f"it cannot be run on several rows at once ({reason})")
    what = f"autobatch: {name} cannot be run on several rows at once"
    wanted = "a form that equals row by row"
    hint = "autobatch.open(module) records what is inside" if given.module is not None else ""
    raise mismatch(ValueError, what, wanted, reason, where=where, hint=hint)
