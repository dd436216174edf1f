"""Blocks that reduce a sequence of tensors in one call: sum, mean, minimum and maximum."""

from collections.abc import Callable
from typing import Any

import torch

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.functions import record
from pyg_dynbatch.blocks.sequences import element_type, refuse_endless
from pyg_dynbatch.blocks.tensors import zero_value
from pyg_dynbatch.blocks.types import SequenceType, TensorType, TupleType
from pyg_dynbatch.core.types import RaggedRows


def _sum(ragged: RaggedRows) -> torch.Tensor:
    return ragged.sum()


def _mean(ragged: RaggedRows) -> torch.Tensor:
    total = ragged.sum()
    # Not by bincount, for which the host waits on a GPU; in single precision, which counts on
    # where half precision stops.
    ones = torch.ones(ragged.owner.size(0), device=total.device)
    count = torch.zeros(ragged.num_calls, device=total.device).index_add(0, ragged.owner, ones)
    count = count.clamp(min=1).to(total.dtype)
    return total / count.view(-1, *(1,) * (total.dim() - 1))


def _extreme(ragged: RaggedRows, kind: str) -> torch.Tensor:
    rows = ragged.rows
    start = rows.new_zeros((ragged.num_calls, *rows.shape[1:]))
    owner = ragged.owner.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
    return start.scatter_reduce(0, owner, rows, kind, include_self=False)


def _min(ragged: RaggedRows) -> torch.Tensor:
    return _extreme(ragged, "amin")


def _max(ragged: RaggedRows) -> torch.Tensor:
    return _extreme(ragged, "amax")


class _Reduction(Block):
    """What the four blocks share; they differ in a function and in the numbers it takes."""

    _function: Callable[[RaggedRows], torch.Tensor]
    _takes_integers = True
    _takes_complex = True

    def __init__(self, name: Any = None) -> None:
        super().__init__(name=name)
        self.set_input_type_classes(SequenceType, TupleType)
        self.set_output_type_classes(TensorType)

    def _infer(self) -> None:
        refuse_endless(self, self.input_type)
        element: Any = element_type(self, self.input_type)
        if element is None:
            return
        if not isinstance(element, TensorType):
            self._refuse("the elements are not tensors", "a sequence of tensors", element)
        is_complex = element.torch_dtype.is_complex
        is_integer = not (element.torch_dtype.is_floating_point or is_complex)
        refused = (is_complex and not self._takes_complex) or (
            is_integer and not self._takes_integers
        )
        if refused:
            expected = "floats or complex numbers" if self._takes_complex else "floats"
            hint = "td.Map(td.Function(lambda tensor: tensor.float())) in front of it"
            self._refuse("the elements are of the wrong dtype", expected, element, hint=hint)
        self.set_output_type(element)

    def _emit(self, code: Code, value: Any) -> Any:
        # One call for all elements; none for a single one, and zeros for an empty sequence.
        kind = self._known("output")
        rows, result = code.fresh("s"), code.fresh()
        code.line(f"{rows} = {packed(value)}")
        with code.inside(f"if len({rows}) > 1:"):
            function = type(self)._function
            code.assign(result, record(code, function, SequenceType(kind), kind, rows))
        with code.inside(f"elif {rows}:"):
            code.line(f"{result} = {rows}[0]")
        with code.inside("else:"):
            code.assign(result, zero_value(code, kind))
        return result


class Sum(_Reduction):
    """Add up a sequence of tensors; zeros for an empty one.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Sum()).eval([1, 2, 3])
        tensor(6.)
    """

    _function = staticmethod(_sum)


class Mean(_Reduction):
    """Average a sequence of tensors; zeros for an empty one.

    Raises:
        TypeError: If the sequence never ends, or its elements are integers or booleans.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Mean()).eval([1, 2, 3])
        tensor(2.)
    """

    _function = staticmethod(_mean)
    _takes_integers = False


class Min(_Reduction):
    """Minimum of a sequence of tensors, entry by entry; zeros for an empty one.

    Raises:
        TypeError: If the sequence never ends, or its elements are complex.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Vector(2)) >> td.Min()).eval([[1, 4], [2, 3]])
        tensor([1., 3.])
    """

    _function = staticmethod(_min)
    _takes_complex = False


class Max(_Reduction):
    """Maximum of a sequence of tensors, entry by entry; zeros for an empty one.

    Raises:
        TypeError: If the sequence never ends, or its elements are complex.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Vector(2)) >> td.Max()).eval([[1, 4], [2, 3]])
        tensor([2., 4.])
    """

    _function = staticmethod(_max)
    _takes_complex = False
