"""Run things in float64, take gradients, and compare results by name."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch

TOLERANCE = 1e-10

Inputs = Mapping[Any, Any]
Flat = dict[str, Tensor]


def prepared(module: Any) -> Any:
    """Copies a module into float64 and evaluation mode."""
    return deepcopy(module).double().eval()


def fixed_generator() -> torch.Generator:
    """Makes a generator that draws the same numbers every time."""
    return torch.Generator().manual_seed(0)


def parts_of_rows(rows: Any) -> tuple[Tensor, ...]:
    """Lists the tensors of rows, one for a plain tensor."""
    return rows if isinstance(rows, tuple) else (rows,)


def shaped_like(rows: Any, parts: Iterable[Tensor]) -> Any:
    """Gives a tuple where ``rows`` is one, else the only part."""
    found = tuple(parts)
    return found if isinstance(rows, tuple) else found[0]


def in_float64(part: Tensor) -> Tensor:
    """Turns floating numbers into float64, and leaves others alone."""
    return part.detach().double() if part.is_floating_point() else part


def inputs_in_float64(inputs: Inputs | None) -> dict[Any, Any]:
    """Turns all floating input rows into float64."""
    return {
        key: shaped_like(rows, (in_float64(part) for part in parts_of_rows(rows)))
        for key, rows in (inputs or {}).items()
    }


def flattened(results: Mapping[str, Any]) -> Flat:
    """Gives every tensor a name: the parts of a tuple become ``name.0``, ``name.1`` and so on."""
    flat: Flat = {}
    for name, rows in results.items():
        if isinstance(rows, tuple):
            flat |= {f"{name}.{number}": part for number, part in enumerate(rows)}
        else:
            flat[name] = rows
    return flat


def gradients_of(
    module: nn.Module, inputs: Inputs, run: Callable[[Inputs], Mapping[str, Any]]
) -> Flat:
    """Takes the gradient of a fixed random weighting of all floating results.

    Args:
        module: Its parameters are differentiated; an unused one gets zeros.
        inputs: Its floating rows are differentiated too.
        run: Gives named results for inputs.

    Returns:
        One gradient a parameter and input part.
    """
    leaves: Flat = dict(module.named_parameters())
    given = {}
    for key, rows in inputs.items():
        parts = [p.clone().requires_grad_(p.is_floating_point()) for p in parts_of_rows(rows)]
        leaves |= {f"input {key} {number}": part for number, part in enumerate(parts)}
        given[key] = shaped_like(rows, parts)
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    loss, generator = torch.zeros((), dtype=torch.float64), fixed_generator()
    for _, rows in sorted(flattened(run(given)).items()):
        if rows.is_floating_point():
            weight = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
            loss = loss + (rows * weight.to(rows.device)).sum().to(loss.device)
    if not loss.requires_grad or not leaves:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def assert_same(law: str, wanted: Flat, found: Flat, tolerance: float) -> None:
    """Asserts that two sets of named results are equal up to rounding.

    Raises:
        AssertionError: If names, shapes or numbers differ; it names the law, the result and the
            row.
    """
    if sorted(wanted) != sorted(found):
        raise AssertionError(
            mismatch(
                f"Law {law!r} is broken: other results",
                expected=", ".join(sorted(wanted)) or "nothing",
                got=", ".join(sorted(found)) or "nothing",
            )
        )
    for name, right in wanted.items():
        mine = found[name]
        if right.shape != mine.shape:
            raise AssertionError(
                mismatch(
                    f"Law {law!r} is broken: {name!r} has another shape",
                    expected=list(right.shape),
                    got=list(mine.shape),
                )
            )
        _assert_close(f"Law {law!r} is broken: {name!r} differs", right, mine, tolerance)


def _assert_close(what: str, right: Tensor, mine: Tensor, tolerance: float) -> None:
    common = torch.complex128 if right.is_complex() or mine.is_complex() else torch.float64
    right, mine = right.detach().cpu().to(common), mine.detach().cpu().to(common)
    fits = torch.isclose(mine, right, tolerance, tolerance, equal_nan=True)
    if fits.all():
        return
    place = (~fits).nonzero()[0].tolist()
    raise AssertionError(
        mismatch(
            what,
            expected=f"{right[tuple(place)].item():.12g}, to a tolerance of {tolerance:g}",
            got=f"{mine[tuple(place)].item():.12g}",
            where=f"entry {place}, row first; {int((~fits).sum())} of {fits.numel()} differ",
        )
    )
