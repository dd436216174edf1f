"""Recurrent layers of torch over sequences: one call for many of them, of different lengths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from pyg_dynbatch.autobatch.operations import ROW
from pyg_dynbatch.core.engine import Run
from pyg_dynbatch.core.movable import MovablePlan

Given = tuple[Tensor, ...]
"""The inputs of calls on sequences of one length, and the parts of their states, with a batch axis
in front of each."""


def is_layer(module: object) -> bool:
    """Return whether a module is a recurrent layer whose calls can be batched."""
    return type(module) in (nn.LSTM, nn.GRU, nn.RNN)


def layer_form(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the batched form of a call of a layer; ``None`` if there is none."""
    x, state = [*args, None][:2] if args else (None, None)
    state = kwargs.get("hx", state)
    parts = state if isinstance(state, tuple) else () if state is None else (state,)
    if x is not ROW or kwargs.keys() - {"hx"}:
        return None

    def form(*rows: Tensor) -> Any:
        given, size = iter(rows[1:]), rows[0].size(0)
        filled = (next(given) if p is ROW else p.expand(size, *p.shape) for p in parts)
        (found,) = run_layer(module, [(rows[0], *filled)])
        return found[0], found[1:] if len(found) > 2 else found[1]

    return form


def run_layer(module: Any, calls: Sequence[Given]) -> list[Given]:
    """Run a layer on sequences of several lengths, the longest first.

    Args:
        module: The layer.
        calls: Those of each length.

    Returns:
        For each length the outputs and the parts of the states, with a batch axis in front.
    """
    alone, turned = calls[0][0].dim() == 3, not module.batch_first
    # A call may have a batch of its own: [call, batch, time, channel].
    xs = [x.unsqueeze(1) if alone else x.transpose(1, 2) if turned else x for x, *_ in calls]
    rows, inner = [x.flatten(0, 1) for x in xs], xs[0].size(1)
    states = [
        torch.cat(parts).transpose(0, 1).flatten(1, -2).contiguous()
        for parts in zip(*(state for _, *state in calls), strict=True)
    ]
    state = tuple(states) if len(states) > 1 else states[0] if states else None
    if len(calls) > 1:
        packed, last = module(pack_sequence([row for x in rows for row in x]), state)
        y, _ = pad_packed_sequence(packed, batch_first=True)
    else:
        y, last = module(rows[0].transpose(0, 1) if turned else rows[0], state)
        y = y.transpose(0, 1) if turned else y
    parts = [
        part.transpose(0, 1) if alone else part.unflatten(1, (-1, inner)).transpose(0, 1)
        for part in (last if isinstance(last, tuple) else (last,))
    ]
    results, start = [], 0
    for x in xs:
        chosen, start = slice(start, start + x.size(0)), start + x.size(0)
        out = y.unflatten(0, (-1, inner))[chosen, :, : x.size(2)]
        out = out.squeeze(1) if alone else out.transpose(1, 2) if turned else out
        results.append((out, *(part[chosen] for part in parts)))
    return results


class SameLength(NamedTuple):
    """Calls on sequences of one length.

    Args:
        name: Of their operation.
        reads: For each argument its row type and its rows.
        kinds: Row type of each result.
    """

    name: str
    reads: tuple[tuple[int, Tensor], ...]
    kinds: tuple[int, ...]


@dataclass(eq=False)
class SequenceRun(MovablePlan):
    """Calls of one recurrent layer on sequences of several lengths.

    Args:
        layer: Path of the layer in the model.
        calls: Those of each length, the longest first.
    """

    layer: str
    calls: tuple[SameLength, ...]

    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(rows for same in self.calls for _, rows in same.reads)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "SequenceRun":
        moved = (
            same._replace(reads=tuple((kind, fn(rows)) for kind, rows in same.reads))
            for same in self.calls
        )
        return replace(self, calls=tuple(moved))

    def extend(self, run: Run, modules: Mapping[str, nn.Module]) -> None:
        """Run all calls, and add their results to a run."""
        found = iter(run.read([read for same in self.calls for read in same.reads]))
        given = [tuple(next(found)[0] for _ in same.reads) for same in self.calls]
        results = run_layer(modules[self.layer], given)
        for same, made in zip(self.calls, results, strict=True):
            for kind, rows in zip(same.kinds, made, strict=True):
                run.append(kind, rows)
