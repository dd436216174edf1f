"""Find a batched form of a call, and check it row by row: the row law.

A call written for one example is run on stacked rows by the first of four forms that gives
the same as row by row: a known batched form (:mod:`operations`), the call itself, the call with
parameters repeated for each row, ``torch.vmap``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import draws_random_numbers
from pyg_dynbatch.core.types import TensorType

Form = Callable[..., Any]
NUM_ROWS = 3
_LOCK = RLock()


class ReadsValue(Exception):
    """The call reads a value, so that its Python must run for every example."""


class ChangesArgument(Exception):
    """The call changes its argument in place, which other calls may read."""


class Examined(NamedTuple):
    """How a call is run on many rows at once.

    Args:
        form: Takes the stacked rows; returns the result of the call, with a batch axis.
        way: ``"fast"``, ``"direct"``, ``"expanded"`` (parameters repeated) or ``"vmap"``.
        leaves: For each leaf of the result its tensor type, or the object itself.
        spec: Structure of the result.
        random: Whether each call draws random numbers.
    """

    form: Form
    way: str
    leaves: list[Any]
    spec: Any
    random: bool


_READS = {
    getattr(Tensor, name)
    for name in (
        "__bool__", "item", "tolist", "__int__", "__float__", "__complex__", "__index__", "numpy",
        "__array__", "__contains__", "__format__", "equal", "allclose", "is_nonzero",
    )
} | {torch.equal, torch.allclose, torch.is_nonzero}  # fmt: skip


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and isinstance(args[0], Tensor):
            raise ReadsValue
        return func(*args, **(kwargs or {}))


def examine(
    call: Any,
    module: nn.Module | None,
    row_types: Sequence[TensorType],
    device: torch.device,
    name: str,
    where: str,
    random_function: bool = False,
) -> Examined:
    """Run a call on random rows, once per signature, and choose its batched form.

    Raises:
        ReadsValue: If it reads a value.
        ValueError: If no form gives the same as row by row.
        RuntimeError: If it changes its module, or draws random numbers without saying so.
    """
    for part in () if module is None else module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            what = f"autobatch: {name} normalizes over the batch, so its rows are not independent"
            hint = "nn.LayerNorm or nn.GroupNorm"
            raise mismatch(ValueError, what, got=type(part).__name__, where=where, hint=hint)
    random = random_function or (module is not None and draws_random_numbers(module))
    with _LOCK, _inspecting(module, device):
        buffers = [] if module is None else [*module.named_buffers()]
        state = [(name, buffer, buffer._version, buffer.clone()) for name, buffer in buffers]
        try:
            rows, single = _single_results(call, row_types, device)
        except ChangesArgument:
            what = f"autobatch: {name} changes its argument in place"
            hint = "the form that returns a new tensor: x + y, torch.stack, inplace=False"
            raise mismatch(TypeError, what, where=where, hint=hint) from None
        expected = single(call)
        leaves, spec = tree_flatten(expected[0])
        types = [
            TensorType(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves
        ]
        changed = [each for each in state if each[1]._version != each[2]]
        if changed:
            for _, buffer, _, before in changed:
                buffer.copy_(before)
            what = f"autobatch: {name} changes its buffer {changed[0][0]!r} when it is called"
            hint = "keep no state between calls, or autobatch.open(module)"
            raise mismatch(RuntimeError, what, "the same result every time", where=where, hint=hint)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not outputs:
            what = f"autobatch: {name} returns no tensor"
            hint = "item() or tolist() of the argument, which suspend the example"
            raise mismatch(TypeError, what, "at least one tensor", leaves, where=where, hint=hint)
        if elsewhere := [leaf.device for leaf in outputs if leaf.device != device]:
            what = f"autobatch: {name} returns a tensor on a different device"
            raise mismatch(ValueError, what, device, elsewhere[0], where=where)
        flat = [tree_flatten(one)[0] for one in expected]
        if not all(_equal([one], [flat[0]], values=False) for one in flat):
            what = f"autobatch: the result of {name} depends on values in shape or structure"
            hint = "item() or tolist() of the argument, which suspend the example"
            raise mismatch(ValueError, what, "one shape for all rows", where=where, hint=hint)
        draws = not _equal(flat, [tree_flatten(one)[0] for one in single(call)])
        if draws and not random:
            what = f"autobatch: {name} gives a different result when it is called again"
            hint = (
                "keep no state between calls; random numbers by nn.Dropout, or with "
                "`random = True` on a module whose rows are independent"
            )
            raise mismatch(RuntimeError, what, "the same result every time", where=where, hint=hint)
        way, form = _first_form(call, rows, flat, draws, module is not None, name, where)
        return Examined(form, way, types, spec, random)


def _first_form(
    call: Any,
    rows: Sequence[Tensor],
    expected: list[list[Any]],
    draws: bool,
    is_module: bool,
    name: str,
    where: str,
) -> tuple[str, Form]:
    def by_vmap(*rows: Tensor) -> Any:
        return torch.vmap(call, randomness="different")(*rows)

    forms = {"fast": call.fast, "direct": call, "expanded": call.expanded, "vmap": by_vmap}
    reason: Exception | None = None
    for way, form in forms.items():
        try:
            agrees = _agrees(form, rows, expected, draws)
            # Draws of the other two are independent by their nature.
            if agrees and draws and way in ("direct", "expanded"):
                agrees = _is_independent(form, rows)
        except Exception as error:  # noqa: BLE001 - the next form may do
            reason = error
            continue
        if agrees:
            return way, form
    what = f"autobatch: {name} cannot be run on several rows at once"
    got = f"torch.vmap: {reason}" if reason else "results that differ from row by row"
    hint = "autobatch.open(module) records what is inside" if is_module else ""
    raise mismatch(ValueError, what, "a form that equals row by row", got, where=where, hint=hint)


def _agrees(form: Form, rows: Sequence[Tensor], expected: list[list[Any]], draws: bool) -> bool:
    for size in (NUM_ROWS, NUM_ROWS - 1):  # with one size alone, an axis may have it by chance
        stacked = [
            torch.stack(column) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*expected[:size], strict=True)
        ]
        found = tree_flatten(form(*(row[:size] for row in rows)))[0]
        if not _equal([found], [stacked], values=not draws):
            return False
    return True


def _is_independent(form: Form, rows: Sequence[Tensor]) -> bool:
    """Return whether, with the same random numbers, a row does not depend on the first one."""
    results = []
    for given in (rows, [torch.cat([row[1:2], row[1:]]) for row in rows]):
        torch.manual_seed(0)
        leaves = tree_flatten(form(*given))[0]
        results.append([leaf[1:] for leaf in leaves if isinstance(leaf, Tensor)])
    return _equal(results[:1], results[1:])


def _equal(ours: list[list[Any]], theirs: list[list[Any]], values: bool = True) -> bool:
    for mine, other in zip(ours, theirs, strict=True):
        if len(mine) != len(other):
            return False
        for a, b in zip(mine, other, strict=True):
            if isinstance(a, Tensor) != isinstance(b, Tensor):
                return False
            if isinstance(a, Tensor):
                if a.shape != b.shape or a.dtype != b.dtype:
                    return False
                if values and not _close(a, b):
                    return False
            elif a != b:
                return False
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    # A batched product adds up in another order.
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(a.dtype, 5e-2)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@contextmanager
def _inspecting(module: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Evaluation mode, no gradients, no recording, random numbers restored."""
    flags = [] if module is None else [(part, part.training) for part in module.modules()]
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            for part, _ in flags:
                part.training = False
            yield
        finally:
            for part, training in flags:
                part.training = training


def _single_results(
    call: Form, row_types: Sequence[TensorType], device: torch.device
) -> tuple[list[Tensor], Callable[[Form], list[Any]]]:
    """Draw rows on which the call works; also return what runs it row by row."""

    def run(rows: Sequence[Tensor]) -> Callable[[Form], list[Any]]:
        def one_by_one(form: Form) -> list[Any]:
            results = []
            for n in range(NUM_ROWS):
                row = [row[n].clone() for row in rows]
                with _NoReads():
                    results.append(form(*row))
                if any(not each.is_inference() and each._version for each in row):
                    raise ChangesArgument
            return results

        return one_by_one

    first: Exception | None = None
    for draw in (_normal, _positive, _zeros):
        rows = [draw(row_type, device) for row_type in row_types]
        try:
            run(rows)(call)
            return rows, run(rows)
        except (ReadsValue, ChangesArgument):
            raise
        except Exception as error:  # noqa: BLE001 - raised again if no rows do
            first = first or error
    raise first  # type: ignore[misc]


def _normal(row_type: TensorType, device: torch.device) -> Tensor:
    shape, dtype = (NUM_ROWS, *(row_type.shape or ())), row_type.dtype or torch.float32
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    if dtype == torch.bool:
        return torch.rand(shape, device=device) < 0.5
    return torch.randint(0, NUM_ROWS, shape, dtype=dtype, device=device)


def _positive(row_type: TensorType, device: torch.device) -> Tensor:
    drawn = _normal(row_type, device)
    return drawn.abs() + 0.5 if drawn.is_floating_point() else drawn


def _zeros(row_type: TensorType, device: torch.device) -> Tensor:
    drawn = _normal(row_type, device)
    return drawn if drawn.is_floating_point() else drawn.zero_()
