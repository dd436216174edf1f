"""Blocks that reduce a sequence of tensors in one call: sum, mean, least and greatest."""

from typing import Any

import torch

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.functions import record
from pyg_dynbatch.blocks.inputs import assign
from pyg_dynbatch.blocks.sequences import element_type, refuse_endless
from pyg_dynbatch.blocks.tensors import zero_value
from pyg_dynbatch.blocks.types import SequenceType, TensorType, TupleType, shown
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


def _infer_total(block: Block, refused: str = "") -> None:
    """Takes over the element's type; ``refused`` names the kind of numbers it may not have."""
    refuse_endless(block, block.input_type)
    element = element_type(block, block.input_type)
    if element is not None and not isinstance(element, TensorType):
        block._refuse(
            "the elements are no tensors",
            expected="a sequence of tensors",
            got=f"{shown(element)}, {element!r}",
        )
    if element is not None:
        dtype = element.torch_dtype
        whole = not (dtype.is_floating_point or dtype.is_complex)
        if (refused == "integer" and whole) or (refused == "complex" and dtype.is_complex):
            block._refuse(
                "the elements are of the wrong dtype",
                expected="floats" if refused == "complex" else "floats or complex numbers",
                got=f"{shown(element)}, {element!r}",
                hint="td.Map(td.Function(lambda tensor: tensor.float())) in front of it",
            )
        block.set_output_type(element)


def _emit_total(code: Code, block: Block, function: Any, value: Any) -> Any:
    """Writes one call for all elements; of one element nothing, and zeros of none."""
    kind = block._known("output")
    rows, result = code.fresh("s"), code.fresh()
    code.line(f"{rows} = {packed(value)}")
    with code.inside(f"if len({rows}) > 1:"):
        found = record(code, function, SequenceType(kind), kind, rows)
        assign(code, result, found)
    with code.inside(f"elif {rows}:"):
        code.line(f"{result} = {rows}[0]")
    with code.inside("else:"):
        assign(code, result, zero_value(code, kind))
    return result


class Sum(Block):
    """Adds up a sequence of tensors; zeros for the empty one.

    Args:
        name: For messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Sum()).eval([1, 2, 3])
        tensor(6.)
    """

    def __init__(self, name: Any = None) -> None:
        super().__init__(name=name)
        self.set_input_type_classes(SequenceType, TupleType)
        self.set_output_type_classes(TensorType)
        self._settle()

    def _infer(self) -> None:
        _infer_total(self)

    def _emit(self, code: Code, value: Any) -> Any:
        return _emit_total(code, self, _sum, value)


class Mean(Block):
    """Averages a sequence of tensors; zeros for the empty one.

    Args:
        name: For messages and pictures.

    Raises:
        TypeError: If the sequence never ends, or holds integers or booleans.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Mean()).eval([1, 2, 3])
        tensor(2.)
    """

    def __init__(self, name: Any = None) -> None:
        super().__init__(name=name)
        self.set_input_type_classes(SequenceType, TupleType)
        self.set_output_type_classes(TensorType)
        self._settle()

    def _infer(self) -> None:
        _infer_total(self, "integer")

    def _emit(self, code: Code, value: Any) -> Any:
        return _emit_total(code, self, _mean, value)


class Min(Block):
    """Takes the least of a sequence of tensors, entry by entry; zeros for the empty one.

    Args:
        name: For messages and pictures.

    Raises:
        TypeError: If the sequence never ends, or holds complex numbers.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Vector(2)) >> td.Min()).eval([[1, 4], [2, 3]])
        tensor([1., 3.])
    """

    def __init__(self, name: Any = None) -> None:
        super().__init__(name=name)
        self.set_input_type_classes(SequenceType, TupleType)
        self.set_output_type_classes(TensorType)
        self._settle()

    def _infer(self) -> None:
        _infer_total(self, "complex")

    def _emit(self, code: Code, value: Any) -> Any:
        return _emit_total(code, self, _min, value)


class Max(Block):
    """Takes the greatest of a sequence of tensors, entry by entry; zeros for the empty one.

    Args:
        name: For messages and pictures.

    Raises:
        TypeError: If the sequence never ends, or holds complex numbers.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Vector(2)) >> td.Max()).eval([[1, 4], [2, 3]])
        tensor([2., 4.])
    """

    def __init__(self, name: Any = None) -> None:
        super().__init__(name=name)
        self.set_input_type_classes(SequenceType, TupleType)
        self.set_output_type_classes(TensorType)
        self._settle()

    def _infer(self) -> None:
        _infer_total(self, "complex")

    def _emit(self, code: Code, value: Any) -> Any:
        return _emit_total(code, self, _max, value)
