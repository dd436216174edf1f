"""Calls that take any number of values: sums and attention over lists that differ in length."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.autobatch.lazy import ACTIVE, Lazy, unseen
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.signatures import Spec
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.types import RaggedRows


def total(values: Any, *, like: Any = None) -> Any:
    """Add up any number of values of one shape.

    Examples with different numbers of values are batched together, which ``sum(values)`` and
    ``torch.stack`` are not.

    Args:
        values: Tensors of one shape and dtype.
        like: A tensor of that shape and dtype; needed only where ``values`` may be empty.

    Returns:
        The sum; zeros if there are no values.

    Raises:
        ValueError: If there are no values and ``like`` is not given.
        TypeError: If shapes or dtypes differ.

    Example:
        >>> total([torch.ones(2), torch.ones(2)])
        tensor([2., 2.])
    """
    values = _checked("total", values, like)
    session = ACTIVE.session
    if session is None or not _has_lazy((values, like)):
        return torch.stack(list(values)).sum(0) if len(values) else torch.zeros_like(like)
    return _record(session, _summed, _lazy(session, "total", values, like))


def attend(query: Any, keys: Any, values: Any = None) -> Any:
    """Average values with the softmax of the products of their keys with a query.

    Args:
        query: Tensor ``[feature]``.
        keys: At least one tensor ``[feature]``.
        values: As many tensors of one shape; the keys by default.

    Returns:
        The weighted mean of the values.

    Raises:
        ValueError: If there are no keys, or not one value per key.
        TypeError: If shapes or dtypes differ.

    Reference:
        Luong, Pham, Manning (2015), arXiv:1508.04025, section 3.1 (dot-product scores).

    Example:
        >>> attend(torch.zeros(2), [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
        tensor([0.5000, 0.5000])
    """
    keys = _checked("attend", keys, None)
    values = keys if values is None else _checked("attend", values, None)
    if len(keys) != len(values):
        what = "autobatch.attend: not one value per key"
        raise mismatch(ValueError, what, len(keys), len(values), where=ACTIVE.where())
    session = ACTIVE.session
    if session is None or not _has_lazy((query, keys, values)):
        weights = torch.softmax(torch.stack(list(keys)) @ query, 0)
        return torch.tensordot(weights, torch.stack(list(values)), 1)
    ragged = [_lazy(session, "attend", v) for v in (keys, values)]
    asking = as_row(session, query)
    wanted, got = (session.table.row_types[kind] for kind in (asking._kind, ragged[0][1]))
    if wanted.shape != got.shape or len(got.shape) != 1:
        what = "autobatch.attend: query and keys are not vectors of one width"
        raise mismatch(TypeError, what, str(wanted), str(got), where=ACTIVE.where())
    return _record(session, _attended, asking, *ragged)


def _record(session: Session, function: Callable[..., Tensor], *values: Any) -> Lazy:
    no_grad = torch.is_grad_enabled() is not session.grad
    return record_own(session, (function, no_grad), lambda: function, values, no_grad)[0]


def _summed(values: RaggedRows) -> Tensor:
    return values.sum()


def _attended(query: Tensor, keys: RaggedRows, values: RaggedRows) -> Tensor:
    scores = (keys.rows * query.index_select(0, keys.segment_ids)).sum(-1)
    weights = keys._replace(rows=scores).softmax()
    shape = (-1, *[1] * (values.rows.dim() - 1))
    return values._replace(rows=values.rows * weights.view(shape)).sum()


def rows(tensor: Any) -> list[Any]:
    """Return the rows of a tensor, such as the result of a batched encoder, as single values.

    Equal to ``list(tensor)``; a tensor that was computed outside the model is stored as a whole
    instead of row by row. Gradients flow back into it.

    Args:
        tensor: Tensor ``[row, ...]``.

    Example:
        >>> rows(torch.eye(2))
        [tensor([1., 0.]), tensor([0., 1.])]
    """
    session = ACTIVE.session
    if session is None or isinstance(tensor, Lazy) or not isinstance(tensor, Tensor):
        return list(tensor)
    return session.outside_rows(tensor)


def _checked(name: str, values: Any, like: Any) -> Sequence[Any]:
    if isinstance(values, Tensor | Lazy) or not isinstance(values, Sequence):
        what = f"autobatch.{name}: not a list of tensors"
        got = type(values).__name__
        raise mismatch(TypeError, what, "a list of tensors", got, where=ACTIVE.where())
    if not len(values) and like is None:
        what = f"autobatch.{name}: the list is empty"
        hint = "like=tensor for the shape of the zeros" if name == "total" else ""
        raise mismatch(ValueError, what, "at least one tensor", 0, where=ACTIVE.where(), hint=hint)
    return values


def _has_lazy(arguments: Any) -> bool:
    if isinstance(arguments, tuple | list):
        return any(map(_has_lazy, arguments))
    return type(arguments) is Lazy


def as_row(session: Session, value: Any) -> Lazy:
    """Return a tensor, a parameter or a value of an enclosing session as a value of a session."""
    if type(value) is Lazy:
        return value if value._session is session else session.foreign(value)
    if (row := session.row_of(value)) is not None:
        return row
    with unseen():
        if session.shared_of(value) is None:
            return session.outside_row(value)
    number = torch.tensor(0, device=session.device)  # made where a mode sees it
    with unseen():
        anyone = session.outside_row(number)
    repeated: Lazy = session.call(_repeated, (value, anyone))
    return repeated


def _repeated(value: Tensor, row: Tensor) -> Tensor:
    """Return a parameter as the value of a row."""
    return value.clone()


def _lazy(
    session: Session, name: str, values: Sequence[Any], like: Any = None
) -> tuple[list[Lazy], int]:
    """Return the values as lazy values, and their row type."""
    found = [as_row(session, value) for value in values]
    kinds = {value._kind for value in found}
    if like is not None:
        kinds.add(as_row(session, like)._kind)
    if len(kinds) > 1:
        what = f"autobatch.{name}: shapes or dtypes differ"
        got = ", ".join(str(session.table.row_types[kind]) for kind in sorted(kinds))
        raise mismatch(TypeError, what, "tensors of one shape and dtype", got, where=ACTIVE.where())
    return found, kinds.pop()


def record_own(
    session: Session, key: tuple[Any, ...], make: Callable[[], Any], values: Sequence[Any],
    no_grad: bool = False,
) -> tuple[Lazy, ...]:  # fmt: skip
    """Record a call of a target with a form of its own, or of a function of ragged rows.

    Args:
        session: Records.
        key: Together with the types of the values, equal for equal targets.
        make: Makes the target; called if the key is new.
        values: The arguments; a list of values and their row type is a ragged argument.
        no_grad: Whether no gradient flows through it. That is false under ``no_grad``, too, for
            targets whose calls inside have that mode: what only moves keeps its gradient.
    """
    kinds = [v._kind if type(v) is Lazy else (v[1],) for v in values]
    exact = (*key, *kinds)
    site = session.table.by_key.get(exact)
    if site is None:
        target = make()
        types = session.table.row_types
        inputs = tuple(types[k] if isinstance(k, int) else Ragged(types[k[0]]) for k in kinds)
        spec = Spec((target, no_grad, *inputs), target, (), inputs, no_grad)
        site = session.table.site_of(spec, session.device, session.where())
        session.table.by_key[exact] = site
    reads = list[int]()
    code = list[int]()
    for value in values:
        if type(value) is Lazy:
            reads.append(value._number)
            code.append(value._number)
        else:
            numbers = [each._number for each in value[0]]
            reads += numbers
            code += [len(numbers), *numbers]
    found = session.record(site, reads, code)
    return (found,) if type(found) is Lazy else found
