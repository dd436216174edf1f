"""Layers of Fold: fully connected, and embedding."""

from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.layers import TensorToTensorLayer
from pyg_dynbatch.blocks.result_types import TensorType
from pyg_dynbatch.core.errors import mismatch


def _probability(who: str, name: str, keep: Any) -> float:
    if keep is None:
        return 1.0
    if not isinstance(keep, float | int) or not 0 < keep <= 1:
        raise ValueError(
            mismatch(f"{who}: {name} is no probability", expected="above 0, at most 1", got=keep)
        )
    return float(keep)


def unit_scaling(activation: Any) -> float | None:
    """Scale that keeps the size of activations: 1.43 for relu, 1.15 for tanh, 1 for none.

    Example:
        >>> unit_scaling(torch.tanh)
        1.15
    """
    if activation is None or isinstance(activation, nn.Identity):
        return 1.0
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return {"relu": 1.43, "relu6": 1.43, "tanh": 1.15}.get(name)


def _initial(who: str, table: Tensor, initializer: Any) -> Tensor:
    """The first values of a weight: given as they are, or by a function that fills or returns."""
    given = initializer
    if callable(initializer):
        # Entries that the function leaves alone must not be whatever was in memory before.
        given = initializer(table.fill_(float("nan")))
        given = table if given is None else given
    values = torch.as_tensor(given).detach().to(table, copy=True)
    if values.shape != table.shape:
        raise ValueError(
            mismatch(
                f"{who}: the initial weights have another shape",
                expected=list(table.shape),
                got=list(values.shape),
            )
        )
    if values.isnan().any():
        raise ValueError(
            mismatch(
                f"{who}: the initial weights are not all set",
                expected="a number in every entry",
                got=f"{int(values.isnan().sum())} of {values.numel()} entries unset or NaN",
                mend="fill the tensor in place, as torch.nn.init does, or return a tensor",
            )
        )
    return values


class FC(TensorToTensorLayer):
    """Computes activation(x W^T + b).

    Args:
        num_units_out: Length of the output.
        activation: A function on tensors; None for none.
        initializer: The weights themselves (tensor or array, ``[out, in]``), or a function that
            fills a tensor in place, as ``torch.nn.init`` does, or returns one. Left out: uniform,
            of unit scaling for relu, tanh and no activation; a truncated normal of 0.01 otherwise.
        input_keep_prob: Share of the inputs that dropout keeps in training.
        output_keep_prob: Share of the outputs that dropout keeps in training.
        normalization_fn: Applied before the activation; skipped where there is none.
        weight_norm: Learn length and direction of the weights apart; the lengths start at 1.
        name: For messages and pictures.

    Shape:
        ``[row, in] -> [row, out]``.

    Raises:
        TypeError: If the input is no float32 vector.
        ValueError: If a share is none, or the initial weights do not fit.
        RuntimeError: If the weights are asked for before the layer was used.

    Reference:
        Salimans and Kingma (2016), arXiv:1602.07868, equation 2 (weight normalisation).

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Vector(3) >> td.FC(2)).eval([1, 2, 3]).shape
        torch.Size([2])
    """

    def __init__(
        self,
        num_units_out: int,
        activation: Any = torch.relu,
        initializer: Any = None,
        input_keep_prob: Any = None,
        output_keep_prob: Any = None,
        normalization_fn: Any = None,
        weight_norm: bool = False,
        name: Any = None,
    ) -> None:
        super().__init__(output_type=TensorType((num_units_out,)), name_or_scope=name)
        self.activation, self.initializer = activation, initializer
        self.normalization_fn, self.weight_norm = normalization_fn, weight_norm
        self.input_keep_prob = _probability("FC", "input_keep_prob", input_keep_prob)
        self.output_keep_prob = _probability("FC", "output_keep_prob", output_keep_prob)
        # Says that every call draws numbers of its own.
        self.dropout = 1.0 - min(self.input_keep_prob, self.output_keep_prob)
        self.output_size = num_units_out
        self._say(
            num_units_out,
            activation=None if activation is torch.relu else activation or "None",
            initializer=initializer,
            input_keep_prob=input_keep_prob,
            output_keep_prob=output_keep_prob,
            normalization_fn=normalization_fn,
            weight_norm=True if weight_norm else None,
        )

    def __repr__(self) -> str:
        """Reads like the call that makes it."""
        return super().__repr__().replace("activation='None'", "activation=None")

    def _create(self, input_type: Any) -> None:
        if input_type.dtype != "float32" or len(input_type.shape) != 1:
            raise self._wrong_input(input_type, "a float32 vector")
        weight = torch.empty(self.output_size, input_type.shape[0])
        scale = unit_scaling(self.activation)
        if self.initializer is not None:
            weight = _initial(self.io._label(), weight, self.initializer)
        elif scale is None:
            nn.init.trunc_normal_(weight, std=0.01, a=-0.02, b=0.02)
        else:
            bound = scale * (3.0 / max(1, input_type.shape[0])) ** 0.5
            nn.init.uniform_(weight, -bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(self.output_size))
        if self.weight_norm:
            self.scales = nn.Parameter(torch.ones(self.output_size))

    @property
    def weights(self) -> Tensor:
        """The matrix the input is multiplied by, ``[out, in]``."""
        if not self._is_built:
            raise RuntimeError(
                mismatch(
                    f"{self.io._label()}: there are no weights yet",
                    expected="a layer whose input type is known",
                    got=repr(self),
                    mend="call the layer first, or put it behind a block with >>",
                )
            )
        if not self.weight_norm:
            return self.weight
        return self.scales[:, None] * nn.functional.normalize(self.weight, dim=1)

    def split_weight(self) -> Tensor:
        """The weights, for a product that is made in parts."""
        return self.weights

    def can_split(self) -> bool:
        """Whether the product may be made in parts: not if dropout comes before it."""
        return self.input_keep_prob == 1.0

    def after_product(self, total: Tensor) -> Tensor:
        """What comes after the product."""
        total = total + self.bias
        if self.activation is not None:
            if self.normalization_fn is not None:
                total = self.normalization_fn(total)
            total = self.activation(total)
        return self._dropped(total, self.output_keep_prob)

    def _process(self, *rows: Any) -> Any:
        (x,) = rows
        x = self._dropped(x, self.input_keep_prob)
        return self.after_product(nn.functional.linear(x, self.weights))

    def _dropped(self, rows: Tensor, keep: float) -> Tensor:
        return rows if keep == 1.0 else nn.functional.dropout(rows, 1 - keep, self.training)


_INTEGERS = ("int8", "uint8", "int16", "int32", "int64")


class Embedding(TensorToTensorLayer):
    """Looks up one of many learned vectors by an integer.

    Args:
        num_buckets: Number of vectors.
        num_units_out: Length of each.
        initializer: The vectors themselves (tensor or array), or a function that fills a tensor
            in place or returns one. Left out: uniform of unit variance scaled by
            1/sqrt(num_units_out).
        name: For messages and pictures.
        trainable: Whether the vectors are learned.
        mod_inputs: Take the absolute value modulo ``num_buckets`` first, so that any integer has
            a vector; otherwise an integer outside is an error.

    Shape:
        ``[row] -> [row, out]``.

    Raises:
        TypeError: If the input is no integer scalar.
        ValueError: If the initial vectors do not fit.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Scalar("int64") >> td.Embedding(10, 2)).eval(3).shape
        torch.Size([2])
    """

    def __init__(
        self,
        num_buckets: int,
        num_units_out: int,
        initializer: Any = None,
        name: Any = None,
        trainable: bool = True,
        mod_inputs: bool = True,
    ) -> None:
        super().__init__(output_type=TensorType((num_units_out,)), name_or_scope=name)
        self.num_buckets, self.num_units_out = num_buckets, num_units_out
        self.mod_inputs = mod_inputs
        table = torch.empty(num_buckets, num_units_out)
        if initializer is None:
            bound = (3.0 / num_units_out) ** 0.5
            nn.init.uniform_(table, -bound, bound)
        else:
            table = _initial(self.io._label(), table, initializer)
        self.weight = nn.Parameter(table, requires_grad=trainable)
        self._say(
            num_buckets,
            num_units_out,
            initializer=initializer,
            trainable=None if trainable else False,
            mod_inputs=None if mod_inputs else False,
        )

    @property
    def weights(self) -> Tensor:
        """The vectors, ``[bucket, out]``."""
        return self.weight

    def _create(self, input_type: Any) -> None:
        if input_type.shape != () or input_type.dtype not in _INTEGERS:
            raise self._wrong_input(input_type, "an integer scalar")

    def _process(self, *rows: Any) -> Any:
        index = rows[0].long()
        if self.mod_inputs:
            index = index.abs() % self.num_buckets
        return nn.functional.embedding(index, self.weight)
