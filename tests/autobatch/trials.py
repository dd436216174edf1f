"""Run calls of the tables by their forms and one by one, and compare values and gradients."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pyg_dynbatch.autobatch.table.functions import ROW, Batched, batched
from pyg_dynbatch.core.types import TensorType, has_gradient
from tests.autobatch.operation_cases import REAL, Case, Of

ACCEPTED = {"direct", "form", "constant"}
REFUSALS = (
    RuntimeError, TypeError, IndexError, NotImplementedError, ValueError, AttributeError,
    AssertionError,
)  # fmt: skip


def draw(of: Of, size: int | None, dtype: torch.dtype) -> Tensor:
    """Draw an operand: different numbers, unless its kind says something else."""
    shape = of.shape if size is None else (size, *of.shape)
    count = torch.Size(shape).numel()
    if of.kind in ("unit", "fixed"):
        kind = dtype if dtype.is_floating_point else torch.float64
        return (torch.rand(shape) * 0.9 + 0.05).to(kind)
    if of.kind == "ties":
        return torch.randint(2, shape).to(dtype)
    if of.kind == "index":
        return torch.randint(2, shape)
    if of.kind == "negative":
        return torch.randint(-2, 2, shape)
    if of.kind == "distinct":  # no index twice along any dimension
        sums = torch.zeros(shape, dtype=torch.int64)
        for place, length in enumerate(shape):
            sums += torch.arange(length).view(-1, *(1,) * (len(shape) - place - 1))
        return sums % min(of.shape, default=1)
    if of.kind == "padding":  # never of everything
        mask = torch.rand(shape) < 0.5
        mask[..., 0] = False
        return mask
    if of.kind == "mask":
        return torch.rand(shape) < 0.5
    kind = dtype if of.kind == REAL else of.kind
    if kind == torch.bool:
        return torch.rand(shape) < 0.5
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, dtype=torch.complex128 if kind.is_complex else torch.float64).to(
            kind
        )
    return (torch.randperm(count).view(shape) % 100 + 1).to(kind)


def operands(value: Any) -> Iterator[Of]:
    """List the operands in nested containers."""
    if isinstance(value, Of):
        yield value
    elif isinstance(value, slice):
        yield from operands((value.start, value.stop, value.step))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from operands(item)
    elif isinstance(value, dict):
        yield from operands(tuple(value.values()))


def filled(value: Any, tensors: Iterator[Any]) -> Any:
    """Put tensors in the places of operands."""
    if isinstance(value, Of):
        return next(tensors)
    if isinstance(value, slice):
        return slice(*(filled(part, tensors) for part in (value.start, value.stop, value.step)))
    if isinstance(value, list | tuple):
        return type(value)([filled(item, tensors) for item in value])
    if isinstance(value, dict):
        return {name: filled(item, tensors) for name, item in value.items()}
    return value


class Trial:
    """One call of a function on some rows, run by its form and one by one."""

    def __init__(
        self, function: Any, case: Case, size: int, dtype: torch.dtype, lookup: Any = batched
    ) -> None:
        self.function = function
        self.lookup = lookup
        is_module = isinstance(function, torch.nn.Module)
        self.parameters: Sequence[Tensor] = [*function.parameters()] if is_module else ()
        self.case = case
        self.size = size
        self.operands = [*operands((case.args, case.kwargs))]
        self.tensors = []
        for of in self.operands:
            tensor = draw(of, size if of.is_row else None, dtype)
            needs_gradient = has_gradient(tensor.dtype) and of.kind != "fixed"
            self.tensors.append(tensor.requires_grad_(needs_gradient))

    def call(self, row: int | None) -> Any:
        """Call the function with one row, or with stacked rows, of copies."""
        tensors = [
            (tensor[row] if of.is_row and row is not None else tensor).clone()
            for of, tensor in zip(self.operands, self.tensors, strict=True)
        ]
        args, kwargs = filled((self.case.args, self.case.kwargs), iter(tensors))
        return self.function(*args, **kwargs)

    def singles(self) -> list[Any] | None:
        """Return the results row by row; ``None`` if the function refuses its arguments."""
        try:
            return [self.call(row) for row in range(self.size)]
        except REFUSALS:
            return None

    def batched(self) -> Batched | None:
        """Look up how the table runs the call."""
        marks = iter(
            ROW if of.is_row else tensor.clone()
            for of, tensor in zip(self.operands, self.tensors, strict=True)
        )
        args, kwargs = filled((self.case.args, self.case.kwargs), marks)
        types = [
            TensorType(of.shape, tensor.dtype)
            for of, tensor in zip(self.operands, self.tensors, strict=True)
            if of.is_row
        ]
        return self.lookup(self.function, args, kwargs, types)

    def form(self, found: Batched) -> Any:
        """Run the form on copies of the stacked rows."""
        pairs = zip(self.operands, self.tensors, strict=True)
        return found.form(*(tensor.clone() for of, tensor in pairs if of.is_row))

    def gradients(self, leaves: list[Tensor]) -> list[Tensor]:
        """Gradients of a weighted sum of all results."""
        inputs = [tensor for tensor in (*self.tensors, *self.parameters) if tensor.requires_grad]
        parts = []
        for leaf in leaves:
            if leaf.requires_grad and has_gradient(leaf.dtype):
                part = leaf * torch.arange(leaf.numel()).cos().view(leaf.shape)
                parts.append(
                    torch.view_as_real(part.resolve_conj()).sum()
                    if part.is_complex()
                    else part.sum()
                )
        if not parts:
            return []
        total: Any = sum(parts)
        return [*torch.autograd.grad(total, inputs, materialize_grads=True)]


def leaves_of(result: Any) -> list[Tensor]:
    """List the tensors of a result, in which something may be missing."""
    return [leaf for leaf in tree_flatten(result)[0] if leaf is not None]


def stacked(singles: list[Any]) -> tuple[list[Tensor], Any]:
    """Stack the results of single rows, leaf by leaf."""
    columns = zip(*map(leaves_of, singles), strict=True)
    leaves = []
    for column in columns:
        # Whole numbers that were changed in place may claim to have a gradient.
        leaves.append(torch.stack([x if has_gradient(x.dtype) else x.detach() for x in column]))
    return leaves, tree_flatten(singles[0])[1]


ROUNDING = {torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.complex64: 1e-4}


def compare(trial: Trial, run: Any, singles: list[Any]) -> None:
    """Compare structure, dtypes, values and gradients with those of single rows."""
    expected, structure = stacked(singles)
    result = run()
    found_structure = tree_flatten(result)[1]
    leaves = leaves_of(result)
    size = max(ROUNDING.get(tensor.dtype, 1e-9) for tensor in (*trial.tensors, *expected))
    near: Any = {"equal_nan": True, "rtol": size, "atol": size}
    assert found_structure == structure
    torch.testing.assert_close(leaves, expected, **near)
    # Where single rows have no derivative, there is nothing to compare.
    try:
        gradients = trial.gradients(expected)
    except RuntimeError:
        return
    if size == ROUNDING[torch.float16] and not all(x.isfinite().all() for x in gradients):
        return  # too large for this dtype, depending on the order of sums
    if size >= ROUNDING[torch.float16]:
        near["atol"] = 1.0  # gradients of scalars are sums of up to 64 numbers
    assert len(gradients) == 0 or any(leaf.requires_grad for leaf in leaves)
    torch.testing.assert_close(trial.gradients(leaves), gradients, **near)


def check(
    function: Any, case: Case, dtype: torch.dtype = torch.float64, lookup: Any = batched
) -> str:
    """Check a call; return ``"direct"``, ``"form"``, ``"constant"``, ``"none"`` or ``"raises"``."""
    trial = Trial(function, case, 3, dtype, lookup)
    torch.manual_seed(0)
    singles = trial.singles()
    found = trial.batched()
    if singles is None:
        _check_refused(trial, found)
        return "raises"
    if found is None:
        return "none"
    if found.draws:
        check_draws(
            Trial(function, case, 1, dtype, lookup), Trial(function, case, 67, dtype, lookup)
        )
    else:
        compare(trial, lambda: trial.form(found), singles)
        if found.is_direct:
            compare(trial, lambda: trial.call(None), singles)
        check_many(Trial(function, case, 67, dtype, lookup))
    if found.is_constant:
        torch.testing.assert_close(trial.call(None), singles[0])
    return "direct" if found.is_direct else "constant" if found.is_constant else "form"


@torch.no_grad()
def check_many(trial: Trial) -> None:
    """Compare some of many rows, which may be computed by other kernels than few rows."""
    if any(not has_gradient(tensor.dtype) for tensor in trial.tensors) and not trial.singles():
        return  # division by zero
    found = trial.batched()
    assert found is not None
    results = leaves_of(trial.call(0))
    size = max(ROUNDING.get(tensor.dtype, 1e-9) for tensor in (*trial.tensors, *results))
    for run in [lambda: trial.form(found)] + [lambda: trial.call(None)] * found.is_direct:
        leaves = leaves_of(run())
        for row in 0, 33, 66:
            own = [leaf[row] for leaf in leaves]
            expected = leaves_of(trial.call(row))
            torch.testing.assert_close(own, expected, equal_nan=True, rtol=size, atol=size)


def _check_refused(trial: Trial, found: Batched | None) -> None:
    if found is not None:
        with pytest.raises(REFUSALS):
            trial.form(found)


def check_draws(one: Trial, many: Trial) -> None:
    """One row draws the same numbers alone and as a batch of one; no two rows draw the same."""
    found = one.batched()
    assert found is not None and found.draws
    runs = [lambda: one.form(found)] + [lambda: one.call(None)] * found.is_direct
    for run in runs:
        torch.manual_seed(1)
        singles = one.singles()
        assert singles is not None

        def again(run: Any = run) -> Any:
            torch.manual_seed(1)
            return run()

        compare(one, again, singles)
    with torch.no_grad():
        for tensor, of in zip(many.tensors, many.operands, strict=True):
            if of.is_row:
                tensor[:] = tensor[:1].clone()
    results = leaves_of(many.form(found))[0].detach()
    if results[0].numel() > 1 and bool((results != results.flatten()[0]).any()):
        assert (results != results[0]).any()


def check_all(function: Any, cases: Iterable[Case], dtype: torch.dtype, enough: float) -> None:
    """Check calls of a function, until there are enough that are accepted."""
    torch.manual_seed(0)
    accepted = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            try:
                accepted += check(function, case, dtype) in ACCEPTED
            except Exception as error:
                error.add_note(f"{function} of {case}, {dtype}")
                raise
            if accepted >= enough:
                return
    assert accepted or dtype != torch.float64, f"no call of {function} is accepted"
