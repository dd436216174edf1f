"""Recurrent layers of torch over sequences of one length, which have an axis for them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn

from pyg_dynbatch.autobatch.operations import ROW


def is_layer(module: object) -> TypeGuard[nn.RNNBase]:
    """Return whether a module is a recurrent layer whose calls can be batched."""
    return type(module) in (nn.LSTM, nn.GRU, nn.RNN)


def layer_form(
    module: nn.RNNBase, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Return the batched form of a call of a layer; ``None`` if there is none."""
    x, state = [*args, None][:2] if args else (None, None)
    state = kwargs.get("hx", state)
    parts = state if isinstance(state, tuple) else () if state is None else (state,)
    if x is not ROW or kwargs.keys() - {"hx"}:
        return None

    def form(*rows: Tensor) -> Any:
        state_rows = iter(rows[1:])
        size = rows[0].size(0)
        states = [
            next(state_rows) if part is ROW else part.expand(size, *part.shape) for part in parts
        ]
        return _run_layer(module, rows[0], states)

    return form


def _run_layer(module: nn.RNNBase, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, Any]:
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
    first = [part.transpose(0, 1).flatten(1, -2).contiguous() for part in states]
    state = tuple(first) if len(first) > 1 else first[0] if first else None
    y, last = module(sequences.transpose(0, 1) if is_turned else sequences, state)
    y = y.transpose(0, 1) if is_turned else y
    y = y.unflatten(0, (-1, own_batch))
    if is_alone:
        y = y.squeeze(1)
    elif is_turned:
        y = y.transpose(1, 2)

    def of_calls(part: Tensor) -> Tensor:
        parts = part if is_alone else part.unflatten(1, (-1, own_batch))
        return parts.transpose(0, 1)

    return y, tuple(map(of_calls, last)) if isinstance(last, tuple) else of_calls(last)
