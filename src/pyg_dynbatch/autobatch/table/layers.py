"""The table of layers: modules of torch, and the cells of this package, on stacked rows.

Each entry is right for all calls that it accepts; the test suite proves it against single rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from pyg_dynbatch.autobatch.table.calls import ROW, Batched, caller, filled, items_of, repeated
from pyg_dynbatch.autobatch.table.neural import folded
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.core.types import TensorType


class LayerCall:
    """A call of a module on one row: its arguments, and the type of each row."""

    def __init__(
        self,
        module: Any,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        rows: Sequence[TensorType],
    ) -> None:
        self.module = module
        self.args = tuple(args)
        self.kwargs = kwargs
        self.rows = rows

    @property
    def rank(self) -> int:
        """Number of dimensions of the only row; -1 if there are other arguments."""
        is_of_one_row = self.args == (ROW,) and not self.kwargs
        return len(self.rows[0].shape) if is_of_one_row else -1

    def direct(self, *, draws: bool = False) -> Batched:
        """Run the same call on stacked rows."""
        return Batched(caller(self.module, self.args, self.kwargs), is_direct=True, draws=draws)

    def folded(self, *, draws: bool = False) -> Batched:
        """Run the call on rows whose own batch axis joins the one in front."""
        form = folded(caller(self.module, self.args, self.kwargs))
        return Batched(form, is_direct=False, draws=draws)


LayerMaker = Callable[[LayerCall], Batched | None]

LAYERS: dict[type[nn.Module], LayerMaker] = {}
"""The maker of each class of torch."""

CELLS = {
    "pyg_dynbatch.nn.cell.ChildSumTreeLSTMCell",
    "pyg_dynbatch.nn.cell.NaryTreeLSTMCell",
    "pyg_dynbatch.nn.cell.TreeGRUCell",
    "pyg_dynbatch.nn.cell.TreeRNNCell",
    "pyg_dynbatch.nn.dagnn.DAGNNCell",
}
"""Cells of this package by name, as nothing here depends on them."""


def _form_of(*classes: type[nn.Module]) -> Callable[[LayerMaker], LayerMaker]:
    def register(maker: LayerMaker) -> LayerMaker:
        LAYERS.update(dict.fromkeys(classes, maker))
        return maker

    return register


def batched_layer(
    module: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    rows: Sequence[TensorType],
) -> Batched | None:
    """Return how a call of a module is run on stacked rows; ``None`` if the table does not say.

    Args:
        module: Of exactly one of the classes of the table, without hooks.
        args: Positional arguments, with ``ROW`` for each row, and shared tensors as they are.
        kwargs: Keyword arguments.
        rows: Type of each row, in the order of the arguments.
    """
    maker = _maker_of(module)
    return maker(LayerCall(module, args, kwargs, rows)) if maker and rows else None


def is_in_table(module: nn.Module) -> bool:
    """Return whether a module is in the table."""
    return _maker_of(module) is not None


def _maker_of(module: nn.Module) -> LayerMaker | None:
    cls = type(module)
    is_cell = f"{cls.__module__}.{cls.__qualname__}" in CELLS
    maker = _recursive_cell if is_cell else LAYERS.get(cls)
    return maker if maker and _runs_its_class(module) else None


def _runs_its_class(module: nn.Module) -> bool:
    """Return whether calls run the methods of the class, and no hook."""
    cls = type(module)
    has_own_methods = any(name in vars(module) for name in dir(cls) if callable(getattr(cls, name)))
    return calls_only(module, forward=cls.forward) and not has_own_methods


# Layers that compute the same for every row.


@_form_of(
    nn.Identity,
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
    *(nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Softplus, nn.Softsign, nn.Threshold),
)
def _of_elements(call: LayerCall) -> Batched | None:
    if call.rank < 0 or getattr(call.module, "inplace", False):
        return None
    return call.direct()


@_form_of(nn.Dropout, nn.AlphaDropout)
def _dropout(call: LayerCall) -> Batched | None:
    if call.rank < 0 or call.module.inplace:
        return None
    return call.direct(draws=call.module.training and call.module.p > 0)


@_form_of(nn.RReLU)
def _rrelu(call: LayerCall) -> Batched | None:
    if call.rank < 0 or call.module.inplace:
        return None
    return call.direct(draws=call.module.training)


@_form_of(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)
def _along_last(call: LayerCall) -> Batched | None:
    dim = call.module.dim
    if dim is None or not -call.rank <= dim < 0:
        return None
    return call.direct()


@_form_of(nn.Linear)
def _linear(call: LayerCall) -> Batched | None:
    return call.direct() if call.rank > 0 else None


@_form_of(nn.Bilinear)
def _bilinear(call: LayerCall) -> Batched | None:
    ranks = {len(row.shape) for row in call.rows}
    if call.args != (ROW, ROW) or call.kwargs or len(ranks) > 1 or ranks == {0}:
        return None
    return call.direct()


@_form_of(nn.Embedding)
def _embedding(call: LayerCall) -> Batched | None:
    module = call.module
    if module.max_norm is not None or module.scale_grad_by_freq or call.rank < 0:
        return None
    return call.direct()


@_form_of(nn.LayerNorm, nn.RMSNorm)
def _norm_over_last(call: LayerCall) -> Batched | None:
    return call.direct() if call.rank >= len(call.module.normalized_shape) else None


@_form_of(nn.PReLU)
def _prelu(call: LayerCall) -> Batched | None:
    if call.module.num_parameters == 1:
        return call.direct() if call.rank >= 0 else None
    return call.folded() if call.rank > 1 else None


# Layers that take a batch: of rows without one, or of the batch axes of rows.


@_form_of(nn.GroupNorm)
def _group_norm(call: LayerCall) -> Batched | None:
    return call.folded() if call.rank > 1 else None


@_form_of(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(call: LayerCall) -> Batched | None:
    if call.module.training or call.module.running_mean is None:
        return None
    return call.folded() if call.rank > 1 else None


@_form_of(
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
def _over_space(call: LayerCall) -> Batched | None:
    number = int(type(call.module).__name__[-2])
    if call.rank == number + 1:
        return call.direct()
    return call.folded() if call.rank == number + 2 else None


# Cells, on rows ``[channel]``, or ``[batch, channel]`` with a batch axis of their own.


@_form_of(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def _cell(call: LayerCall) -> Batched | None:
    return _stepped(call, draws=False)


def _recursive_cell(call: LayerCall) -> Batched | None:
    return _stepped(call, draws=call.module.training and call.module.recurrent_dropout > 0)


def _stepped(call: LayerCall, *, draws: bool) -> Batched | None:
    """Run a cell, whose arguments are rows and states, tuples or lists of rows."""
    values = (*call.args, *call.kwargs.values())
    shared = [*_shared_in(values)]
    ranks = {len(row.shape) for row in call.rows} | {tensor.dim() for tensor in shared}
    if ranks not in ({1}, {2}) or not all(map(_is_state, values)):
        return None
    is_alone = ranks == {1}
    if is_alone and not shared:
        return call.direct(draws=draws)

    def form(*rows: Tensor) -> Any:
        size = rows[0].shape[: 1 if is_alone else 2]
        arguments = (call.args, dict(call.kwargs))
        arguments = tree_map_only(Tensor, lambda tensor: repeated(tensor, size[0]), arguments)
        args, kwargs = filled(arguments, iter(rows))
        if is_alone:
            return call.module(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda row: row.flatten(0, 1), (args, kwargs))
        return tree_map(lambda row: row.unflatten(0, size), call.module(*args, **kwargs))

    return Batched(form, is_direct=False, draws=draws)


def _is_state(value: object) -> bool:
    """Return whether an argument is a row, missing, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return all(map(_is_state, value))
    return value is None or value is ROW or isinstance(value, Tensor)


def _shared_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for item in items_of(value):
        yield from _shared_in(item)


# Recurrent layers, over sequences of one length.


@_form_of(nn.LSTM, nn.GRU, nn.RNN)
def _recurrent(call: LayerCall) -> Batched | None:
    module = call.module
    rank = len(call.rows[0].shape)
    if call.args[:1] != (ROW,) or call.kwargs.keys() - {"hx"} or rank not in (2, 3):
        return None
    states = _states_of(call)
    ranks = {len(row.shape) for row in call.rows[1:]}
    ranks |= {state.dim() for state in states if isinstance(state, Tensor)}
    if not ranks <= {rank}:
        return None

    def form(*rows: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        state_rows = iter(rows[1:])
        size = rows[0].size(0)
        filled_states = [
            next(state_rows) if state is ROW else repeated(state, size) for state in states
        ]
        return _run_layer(module, rows[0], filled_states)

    draws = module.training and module.dropout > 0 and module.num_layers > 1
    return Batched(form, is_direct=False, draws=draws)


def _states_of(call: LayerCall) -> tuple[Any, ...]:
    """Return the states that a recurrent layer is given, rows or shared tensors."""
    state = call.args[1] if len(call.args) > 1 else None
    state = call.kwargs.get("hx", state)
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (state,)


def _run_layer(
    module: nn.RNNBase, x: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    """Run a layer on all calls at once; arguments and results have an axis for them in front."""
    is_alone = x.dim() == 3
    is_turned = not module.batch_first
    # A call may have a batch of its own: [call, batch, time, channel].
    if is_alone:
        x = x.unsqueeze(1)
    elif is_turned:
        x = x.transpose(1, 2)
    sequences = x.flatten(0, 1)
    own_batch = x.size(1)
    turned_states = [state.transpose(0, 1).flatten(1, -2).contiguous() for state in states]
    first = tuple(turned_states) if len(turned_states) > 1 else next(iter(turned_states), None)
    y, last = module(sequences.transpose(0, 1) if is_turned else sequences, first)
    y = y.transpose(0, 1) if is_turned else y
    y = y.unflatten(0, (-1, own_batch))
    if is_alone:
        y = y.squeeze(1)
    elif is_turned:
        y = y.transpose(1, 2)

    def of_calls(state: Tensor) -> Tensor:
        if not is_alone:
            state = state.unflatten(1, (-1, own_batch))
        return state.transpose(0, 1)

    return y, tuple(map(of_calls, last)) if isinstance(last, tuple) else of_calls(last)


# Attention.

_ATTENTION = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
    "average_attn_weights", "is_causal",
)  # fmt: skip


@_form_of(nn.MultiheadAttention)
def _attention(call: LayerCall) -> Batched | None:
    """Attend among positions, ``[time, channel]``; masks are rows or shared."""
    module = call.module
    values: dict[str, Any] = dict(zip(_ATTENTION, call.args, strict=False)) | dict(call.kwargs)
    types = iter(call.rows)
    ranks: dict[str, int] = {}
    for name, value in values.items():
        if value is ROW:
            ranks[name] = len(next(types).shape)
        elif isinstance(value, Tensor):
            ranks[name] = value.dim()
    if any(ranks.get(name) != 2 for name in _ATTENTION[:3]):
        return None
    if ranks.get("key_padding_mask", 1) != 1 or ranks.get("attn_mask", 2) not in (2, 3):
        return None
    draws = module.training and module.dropout > 0
    if module.batch_first and len(call.rows) == len(ranks) == 3:
        return call.direct(draws=draws)

    def form(*rows: Tensor) -> tuple[Tensor, Tensor | None]:
        arguments = filled(values, iter(rows))
        size = rows[0].size(0)
        for name in ("query", "key", "value", "key_padding_mask"):
            if name in ranks and values[name] is not ROW:
                arguments[name] = repeated(arguments[name], size)
        for name in ("query", "key", "value"):
            arguments[name] = arguments[name].transpose(0, 1)
        if "attn_mask" in ranks:
            mask = arguments["attn_mask"]
            is_row = values["attn_mask"] is ROW
            arguments["attn_mask"] = _mask_of_heads(mask, size, is_row, module.num_heads)
        result, weights = _attend(module, arguments)
        return result.transpose(0, 1), weights

    return Batched(form, is_direct=False, draws=draws)


def _attend(
    module: nn.MultiheadAttention, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Run the layer as it runs without a batch, with the time in front.

    Its fast path for batches differs where all positions are masked.
    """
    return F.multi_head_attention_forward(
        embed_dim_to_check=module.embed_dim,
        num_heads=module.num_heads,
        in_proj_weight=module.in_proj_weight,
        in_proj_bias=module.in_proj_bias,
        bias_k=module.bias_k,
        bias_v=module.bias_v,
        add_zero_attn=module.add_zero_attn,
        dropout_p=module.dropout,
        out_proj_weight=module.out_proj.weight,
        out_proj_bias=module.out_proj.bias,
        training=module.training,
        use_separate_proj_weight=not module._qkv_same_embed_dim,
        q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight,
        v_proj_weight=module.v_proj_weight,
        **arguments,
    )


def _mask_of_heads(mask: Tensor, size: int, is_row: bool, heads: int) -> Tensor:
    """Return one mask for each row and head, unless there is one for all."""
    if not is_row:
        return mask if mask.dim() == 2 else mask.repeat(size, 1, 1)
    return mask.flatten(0, 1) if mask.dim() == 4 else mask.repeat_interleave(heads, 0)
