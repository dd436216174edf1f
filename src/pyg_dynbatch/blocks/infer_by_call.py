"""Find out what a batched function gives by calling it on a few rows of zeros."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_dynbatch.blocks.result_types import (
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    shown,
)
from pyg_dynbatch.core.operation import module_of
from pyg_dynbatch.core.ragged import RaggedRows

if TYPE_CHECKING:
    from pyg_dynbatch.blocks.block import Block


def flattened(value: Any) -> list[Any]:
    """Lists the parts of nested tuples and lists.

    Example:
        >>> flattened((1, [2, (3,)]))
        [1, 2, 3]
    """
    if isinstance(value, tuple | list):
        return [part for item in value for part in flattened(item)]
    return [value]


def shaped_as(result_type: ResultType, rows: Iterator[Any]) -> Any:
    """Nests rows as a type says; the ragged rows of a sequence of tuples become one."""
    if isinstance(result_type, TupleType):
        return tuple(shaped_as(item, rows) for item in result_type)
    if isinstance(result_type, SequenceType):
        nested = first = shaped_as(result_type.element_type, rows)
        while not isinstance(first, RaggedRows):
            first = first[0]
        return RaggedRows(_rows_only(nested), first.owner, first.num_calls)
    return next(rows)


def _rows_only(nested: Any) -> Any:
    if isinstance(nested, RaggedRows):
        return nested.rows
    return tuple(_rows_only(item) for item in nested)


def infer_output_type(block: "Block", called: Callable[..., Any], input_type: Any) -> ResultType:
    """Calls a function on two and on three rows, and reads the type off what comes back.

    Modules are in evaluation mode meanwhile, and the random state stays as it was.

    Args:
        block: For messages.
        called: The function.
        input_type: Type of its input.

    Returns:
        The output type.

    Raises:
        TypeError: If the function fails, or gives something that is no batch of tensors.
    """
    if callable(build := getattr(called, "build", None)):
        # Parameters must be drawn from the random state of the user.
        build(input_type)
    found = []
    like = _like(called)
    with _undisturbed(called):
        for rows in (2, 3):
            arguments = _rows_of_zeros(input_type, rows, like)
            spread = arguments if isinstance(input_type, TupleType) else (arguments,)
            try:
                found.append(called(*spread))
            except Exception as error:
                raise TypeError(
                    _complaint(block, input_type, f"{type(error).__name__}: {error}")
                ) from error
    return _type_of(block, input_type, like, *found)


def _complaint(block: "Block", input_type: ResultType, got: str) -> str:
    from pyg_dynbatch.core.errors import mismatch

    return mismatch(
        f"{block._label()}: its function cannot be called with {shown(input_type)}",
        expected="a function on batched tensors: one row an example, first axis",
        got=got,
        where=block._path(),
    )


def _like(called: Any) -> Tensor:
    """A tensor on the device and in the precision in which a function works."""
    owner = module_of(called)
    parameters = iter(()) if owner is None else owner.parameters()
    return next((p for p in parameters if p.is_floating_point()), torch.empty(0))


@contextmanager
def _undisturbed(called: Any) -> Iterator[None]:
    owner = module_of(called)
    modules = [] if owner is None else list(owner.modules())
    training = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag


def _rows_of_zeros(input_type: ResultType, rows: int, like: Tensor) -> Any:
    if isinstance(input_type, TupleType):
        return tuple(_rows_of_zeros(item, rows, like) for item in input_type)
    if isinstance(input_type, SequenceType):
        # Two elements for every example.
        nested = _rows_of_zeros(input_type.element_type, 2 * rows, like)
        owner = torch.arange(rows, device=like.device).repeat_interleave(2)
        return RaggedRows(nested, owner, rows)
    (kind,) = (k for k in input_type.terminal_types() if isinstance(k, TensorType))
    # float32 stands for the precision of the model, which may be double by now.
    dtype = like.dtype if kind.torch_dtype == torch.float32 else kind.torch_dtype
    return torch.zeros((rows, *kind.shape), dtype=dtype, device=like.device)


def _type_of(
    block: "Block", input_type: ResultType, like: Tensor, two: Any, three: Any
) -> ResultType:
    if isinstance(two, tuple | list):
        if not flattened(two):
            raise TypeError(_complaint(block, input_type, "nothing, where tensors were expected"))
        return TupleType(
            *(_type_of(block, input_type, like, a, b) for a, b in zip(two, three, strict=True))
        )
    problem = ""
    if not isinstance(two, Tensor):
        problem = f"{type(two).__name__}, which is no tensor"
    elif two.dim() == 0:
        problem = "a scalar, without a batch axis"
    elif (two.size(0), three.size(0)) != (2, 3):
        problem = f"{two.size(0)} and {three.size(0)} rows for 2 and 3 rows"
    elif two.shape[1:] != three.shape[1:]:
        problem = f"rows of {list(two.shape[1:])} and of {list(three.shape[1:])}"
    if problem:
        raise TypeError(_complaint(block, input_type, problem))
    return TensorType(tuple(two.shape[1:]), "float32" if two.dtype == like.dtype else two.dtype)
