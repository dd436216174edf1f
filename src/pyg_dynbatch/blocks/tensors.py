"""Blocks that make or join tensors: constants and parameters, zeros, concatenation."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block, conversion
from pyg_dynbatch.blocks.code import Code, flattened
from pyg_dynbatch.blocks.functions import record, row_types_of
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    convert_to_type,
)


class _Constant(nn.Module):
    """Hold one row: a tensor from outside, a parameter, or a constant that moves with ``.to``."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        if isinstance(tensor, nn.Parameter):
            self.tensor = tensor
        elif tensor.requires_grad:
            # Part of a graph from outside: not copied, moved or saved with this module.
            self._outside = [tensor]
        else:
            self.register_buffer("tensor", tensor, persistent=False)

    def forward(self) -> Tensor:
        """Return the row, with a batch axis of 1."""
        held = self._outside[0] if "_outside" in self.__dict__ else self.tensor
        return held[None]


class FromTensor(Block):
    """Return one tensor: a constant, a parameter, or any tensor that gradients flow back into.

    Args:
        tensor: Tensor or numpy array.

    Raises:
        TypeError: If it is neither.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.FromTensor(torch.ones(2)).eval(None)
        tensor([1., 1.])
    """

    def __init__(self, tensor: Any, name: Any = None) -> None:
        super().__init__(input_type=VoidType(), name=name)
        if not isinstance(tensor, Tensor | np.ndarray | np.generic):
            expected = "a tensor, a parameter or a numpy array"
            what = "neither a tensor nor an array"
            self._refuse(what, expected, repr(tensor), hint="torch.tensor(...)")
        if isinstance(tensor, nn.UninitializedParameter):
            self._refuse("the shape is not known yet", "a full shape", repr(tensor))
        self.tensor = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
        self.set_output_type(TensorType(tuple(self.tensor.shape), self.tensor.dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        row_types = row_types_of(self._known("output"))
        module = code.model.unique(id(self.tensor), lambda: _Constant(self.tensor))
        return code.record_free(code.model.signature(module, [], row_types, self._name))


conversion.register(Tensor, FromTensor)
conversion.register(np.ndarray, FromTensor)


def zero_value(code: Code, result_type: ResultType) -> Any:
    """Write a value of zeros; an empty sequence for a sequence type."""
    if isinstance(result_type, TupleType):
        return tuple(zero_value(code, item) for item in result_type)
    if isinstance(result_type, BroadcastSequenceType):
        return zero_value(code, result_type.element_type)
    if isinstance(result_type, SequenceType):
        return "[]"
    if isinstance(result_type, TensorType):
        zeros = torch.zeros(result_type.shape, dtype=result_type.torch_dtype)
        module = code.model.unique(("zeros", result_type), lambda: _Constant(zeros))
        row_types = row_types_of(result_type)
        return code.record_free(code.model.signature(module, [], row_types, "zeros"))
    return "None"


def refuse_no_zeros(block: Block, result_type: ResultType) -> None:
    """Refuse types without zeros: host objects and endless sequences."""
    left = [result_type]
    while left:
        kind = left.pop()
        if isinstance(kind, PyObjectType | BroadcastSequenceType):
            expected = "tensors, tuples, sequences that end, or nothing"
            block._refuse("this type has no zeros", expected, result_type)
        left += kind._inside()


class Zeros(Block):
    """Return zeros of a type; an empty sequence for a sequence type.

    Args:
        output_type: What :func:`convert_to_type` takes.

    Raises:
        TypeError: For host objects and endless sequences.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Zeros((2, "int64")).eval(None)
        (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, output_type: Any, name: Any = None) -> None:
        super().__init__(input_type=VoidType(), name=name)
        found = convert_to_type(output_type)
        refuse_no_zeros(self, found)
        self.set_output_type(found)

    def _emit(self, code: Code, value: Any) -> Any:
        return zero_value(code, self._known("output"))


class Catenation:
    """Concatenate tensors along an axis of one example; scalars count as vectors of one."""

    name = "concat"

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def __call__(self, *parts: Any) -> Tensor:
        """Concatenate rows."""
        rows = [part[:, None] if part.dim() == 1 else part for part in flattened(parts)]
        return torch.cat(rows, self.dim + 1)


class Concat(Block):
    """Concatenate the tensors of a tuple.

    Args:
        concat_dim: The axis, counted without the batch axis.
        flatten: Flatten nested tuples first.

    Raises:
        TypeError: If the tuple is empty, or holds a tuple without ``flatten`` or a tensor without
            that axis, or if other axes or dtypes differ.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> ((td.Vector(2), td.Scalar()) >> td.Concat()).eval(([1, 2], 3))
        tensor([1., 2., 3.])
    """

    def __init__(self, concat_dim: int = 0, flatten: bool = False, name: Any = None) -> None:
        super().__init__(name=name)
        self._dim, self._flatten = concat_dim, flatten
        self.set_input_type_classes(TupleType)
        self.set_output_type_classes(TensorType)

    def _infer(self) -> None:
        kind = self.input_type
        if not isinstance(kind, TupleType) or self.output_type is not None:
            return
        items = kind.terminal_types() if self._flatten else list(kind)
        tensors = [item for item in items if isinstance(item, TensorType)]
        dim = self._dim
        if problem := self._problem(items, tensors):
            nested = any(isinstance(item, TupleType) for item in items)
            expected = f"a tuple of tensors that differ only in axis {dim}"
            hint = "flatten=True for nested tuples" if nested else ""
            self._refuse(problem, expected, kind, hint=hint)
        shapes = [item.shape or (1,) for item in tensors]
        length = sum(shape[dim] for shape in shapes)
        shape = (*shapes[0][:dim], length, *shapes[0][dim + 1 :])
        self.set_output_type(TensorType(shape, tensors[0].dtype))

    def _problem(self, items: list[ResultType], tensors: list[TensorType]) -> str:
        """What keeps items from being concatenated; empty if nothing does."""
        dim = self._dim
        shapes = [item.shape or (1,) for item in tensors]
        if len(tensors) < len(items):
            return "an item is not a tensor"
        if not tensors:
            return "no tensor to concatenate"
        if any(not 0 <= dim < len(shape) for shape in shapes):
            return f"a tensor has no axis {dim}"
        if len({(*shape[:dim], -1, *shape[dim + 1 :]) for shape in shapes}) > 1:
            return "the other axes differ"
        return "dtypes differ" if len({item.dtype for item in tensors}) > 1 else ""

    def _emit(self, code: Code, value: Any) -> Any:
        function = code.model.unique(("concat", self._dim), lambda: Catenation(self._dim))
        return record(code, function, self._known("input"), self._known("output"), value)
