"""Calls that take any number of values: sums and attention over lists that differ in length."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.autobatch.lazy import ACTIVE, Lazy, TensorOrLazy, unseen
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.signatures import NO_TEMPLATE, Own, Spec
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.types import RaggedRows, TensorType

RaggedValues = tuple[Sequence[Lazy], int]
"""The argument of a call that takes any number of values: these, and their row type."""


def total(values: Sequence[TensorOrLazy], *, like: TensorOrLazy | None = None) -> Any:
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
    if session is not None and _has_lazy((values, like)):
        return _record(session, _summed, _lazy(session, "total", values, like))
    return _stacked(values).sum(0) if len(values) else torch.zeros_like(like)  # type: ignore[arg-type]


def attend(
    query: TensorOrLazy, keys: Sequence[TensorOrLazy], values: Sequence[TensorOrLazy] | None = None
) -> Any:
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
        problem = "autobatch.attend: not one value per key"
        raise mismatch(ValueError, problem, len(keys), len(values), where=ACTIVE.where())
    session = ACTIVE.session
    if session is None or not _has_lazy((query, keys, values)):
        weights = torch.softmax(_stacked(keys) @ query, 0)  # type: ignore[operator]
        return torch.tensordot(weights, _stacked(values), 1)
    lazy_keys, kind_of_keys = _lazy(session, "attend", keys)
    lazy_values = _lazy(session, "attend", values)
    lazy_query = as_row(session, query)
    expected = session.table.row_types[lazy_query._kind]
    got = session.table.row_types[kind_of_keys]
    if expected.shape != got.shape or len(got.shape) != 1:
        problem = "autobatch.attend: query and keys are not vectors of one width"
        raise mismatch(TypeError, problem, str(expected), str(got), where=ACTIVE.where())
    return _record(session, _attended, lazy_query, (lazy_keys, kind_of_keys), lazy_values)


def rows(tensor: TensorOrLazy) -> list[Any]:
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


def _record(
    session: Session, function: Callable[..., Tensor], *arguments: Lazy | RaggedValues
) -> Lazy:
    no_grad = torch.is_grad_enabled() is not session.grad
    return record_own(session, (function, no_grad), lambda: function, arguments, no_grad)[0]


def _summed(values: RaggedRows) -> Tensor:
    return values.sum()


def _attended(query: Tensor, keys: RaggedRows, values: RaggedRows) -> Tensor:
    scores = (keys.rows * query.index_select(0, keys.segment_ids)).sum(-1)
    weights = keys._replace(rows=scores).softmax()
    shape = (-1, *[1] * (values.rows.dim() - 1))
    return values._replace(rows=values.rows * weights.view(shape)).sum()


def _checked(name: str, values: object, like: object) -> Sequence[Any]:
    if isinstance(values, Tensor | Lazy) or not isinstance(values, Sequence):
        problem = f"autobatch.{name}: not a list of tensors"
        got = type(values).__name__
        raise mismatch(TypeError, problem, "a list of tensors", got, where=ACTIVE.where())
    if not len(values) and like is None:
        problem = f"autobatch.{name}: the list is empty"
        hint = "like=tensor for the shape of the zeros" if name == "total" else ""
        raise mismatch(
            ValueError, problem, "at least one tensor", 0, where=ACTIVE.where(), hint=hint
        )
    return values


def _stacked(tensors: Sequence[Any]) -> Tensor:
    return torch.stack(list(tensors))


def _has_lazy(arguments: object) -> bool:
    if isinstance(arguments, tuple | list):
        return any(map(_has_lazy, arguments))
    return type(arguments) is Lazy


def as_row(session: Session, value: TensorOrLazy) -> Lazy:
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
    session: Session, name: str, values: Sequence[TensorOrLazy], like: TensorOrLazy | None = None
) -> RaggedValues:
    """Return the values as lazy values, and their row type."""
    lazy_values = [as_row(session, value) for value in values]
    kinds = {value._kind for value in lazy_values}
    if like is not None:
        kinds.add(as_row(session, like)._kind)
    if len(kinds) > 1:
        problem = f"autobatch.{name}: shapes or dtypes differ"
        got = ", ".join(str(session.table.row_types[kind]) for kind in sorted(kinds))
        raise mismatch(
            TypeError, problem, "tensors of one shape and dtype", got, where=ACTIVE.where()
        )
    return lazy_values, kinds.pop()


def record_own(
    session: Session,
    key: tuple[object, ...],
    make: Callable[[], Own | Callable[..., Tensor]],
    arguments: Sequence[Lazy | RaggedValues],
    no_grad: bool = False,
) -> tuple[Lazy, ...]:
    """Record a call of a target with a form of its own, or of a function of ragged rows.

    Args:
        session: Records.
        key: Together with the types of the arguments, equal for equal targets.
        make: Makes the target; called if the key is new.
        arguments: The arguments, ragged or not.
        no_grad: Whether no gradient flows through it. That is false under ``no_grad``, too, for
            targets whose calls inside have that mode: what only moves keeps its gradient.
    """
    kinds = [each._kind if type(each) is Lazy else (each[1],) for each in arguments]
    exact = (*key, *kinds)
    site = session.table.by_key.get(exact)
    if site is None:
        target = make()
        inputs = tuple(_input_type(session, each) for each in arguments)
        spec = Spec((target, no_grad, *inputs), target, NO_TEMPLATE, inputs, no_grad)
        site = session.table.site_of(spec, session.device, session.where())
        session.table.by_key[exact] = site

    reads = list[int]()
    code = list[int]()
    for argument in arguments:
        if type(argument) is Lazy:
            reads.append(argument._number)
            code.append(argument._number)
        else:
            numbers = [value._number for value in argument[0]]
            reads += numbers
            code += [len(numbers), *numbers]
    results = session.record(site, reads, code)
    return (results,) if type(results) is Lazy else results


def _input_type(session: Session, argument: Lazy | RaggedValues) -> TensorType | Ragged:
    row_types = session.table.row_types
    if type(argument) is Lazy:
        return row_types[argument._kind]
    return Ragged(row_types[argument[1]])
