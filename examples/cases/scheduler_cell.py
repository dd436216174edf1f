"""The recursion of Decima over the stages of jobs, as a cell.

Messages go against the edges, from the stages that wait to those that they wait for, so that a
stage knows the work behind it. ``project`` and ``step`` are the definition; :class:`_Levels`
repeats it without autograd in between, because single states are small and overhead decides.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional

from pyg_dynbatch import Levels, RaggedRows
from pyg_dynbatch.core.errors import check_first_derivative
from pyg_dynbatch.nn import RecursiveCell

SLOPE = 0.2


def mlp(width: int, hidden: Sequence[int], out: int, activation: nn.Module) -> nn.Sequential:
    """Create layers with an activation between them."""
    widths, parts = [width, *hidden, out], list[nn.Module]()
    for a, b in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(a, b), activation]
    return nn.Sequential(*parts[:-1])


def encoder(width: int) -> nn.Sequential:
    """Create one of the five networks that encode stages, messages, jobs and the state."""
    return mlp(width, [32, 16], 16, nn.LeakyReLU(SLOPE))


class StageCell(RecursiveCell):
    """Compute ``p + update(sum of msg(h) over the successors)``, or ``update(p)`` without any."""

    def __init__(self) -> None:
        super().__init__(5, 16, arity=None)
        self.mlp_prep, self.mlp_msg, self.mlp_update = encoder(5), encoder(16), encoder(16)

    def project(self, x: Tensor) -> Tensor:
        """Compute p for all stages at once."""
        return self.mlp_prep(x)

    def step(self, projected: Tensor, children: RaggedRows | None) -> tuple[Tensor]:
        """Compute the states of many stages; see the class."""
        if children is None:
            return (self.mlp_update(projected),)
        messages = self.mlp_msg(children.rows[0])
        total = torch.zeros_like(projected).index_add(0, children.segment_ids, messages)
        return (projected + self.mlp_update(total),)

    def run_schedule(
        self,
        schedule: Levels,
        inputs: Tensor,
        leaf_inverse: Tensor | None = None,
        level_order: bool = False,
    ) -> tuple[Tensor] | None:
        """Run all levels in one autograd function, which a single small state needs to be fast."""
        if leaf_inverse is not None or not 0 < schedule.num_nodes == schedule.num_inputs:
            return None
        both = (layer for part in (self.mlp_msg, self.mlp_update) for layer in part)
        linear = (layer for layer in both if isinstance(layer, nn.Linear))
        weights = (part for layer in linear for part in (layer.weight, layer.bias))
        h = _Levels.apply(schedule, self.project(inputs), *weights)
        return (h if level_order else h.index_select(0, schedule.row - 1),)


class _Levels(Function):
    """Compute all states, and their derivatives; those of the weights once for all levels."""

    @staticmethod
    def forward(ctx: Any, schedule: Levels, prepared: Tensor, *weights: Tensor) -> Tensor:
        h, counts = torch.empty_like(prepared), schedule.level_children
        edges = (schedule.children - 1).split(counts), schedule.child_segment.split(counts)
        nodes = prepared.split(schedule.level_sizes), h.split(schedule.level_sizes)
        kept = list[tuple[list[Tensor], list[Tensor]]]()
        msg, update = (tuple(w.t() for w in part) for part in (weights[:6], weights[6:]))
        for own, out, index, ids in zip(*nodes, *edges, strict=True):
            sent, total = list[Tensor](), own
            if kept:
                sent = layers(h.index_select(0, index), *msg)
                total = torch.zeros_like(own).index_add_(0, ids, sent[-1])
            found = layers(total, *update)
            torch.add(own, found[-1], out=out) if sent else out.copy_(found[-1])
            kept.append((sent, found))
        ctx.kept, ctx.edges, ctx.sizes = kept, edges, schedule.level_sizes
        ctx.save_for_backward(*weights)
        return h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("StageCell")
        weights, to_h = ctx.saved_tensors, gradient.clone()
        of_sent, of_found = list[list[Tensor]](), list[list[Tensor]]()
        levels = zip(to_h.split(ctx.sizes), *ctx.edges, ctx.kept, strict=True)
        for own, index, ids, (sent, found) in reversed([*levels]):
            # The parents of a level are above it, so its gradients are complete.
            of_found.append(derivatives(found, weights[6:], own))
            if sent:
                messages = of_found[-1][0].index_select(0, ids)
                of_sent.append(derivatives(sent, weights[:6], messages))
                to_h.index_add_(0, index, of_sent[-1][0])
        of_update = of_weights([found for _, found in ctx.kept], of_found[::-1])
        of_msg = list(map(torch.zeros_like, weights[:6]))
        if of_sent:
            of_msg = of_weights([sent for sent, _ in ctx.kept[1:]], of_sent[::-1])
        to_h[: ctx.sizes[0]] = of_found[-1][0]  # now those of the prepared inputs
        return None, to_h, *of_msg, *of_update


def layers(rows: Tensor, *weights: Tensor) -> list[Tensor]:
    """Return the inputs of the three linear layers of an encoder, and the result."""
    w1, b1, w2, b2, w3, b3 = weights
    one = functional.leaky_relu_(torch.addmm(b1, rows, w1), SLOPE)
    two = functional.leaky_relu_(torch.addmm(b2, one, w2), SLOPE)
    return [rows, one, two, torch.addmm(b3, two, w3)]


def derivatives(found: list[Tensor], weights: Sequence[Tensor], own: Tensor) -> list[Tensor]:
    """Return the derivatives by the input of an encoder, and by the results of its layers."""
    by = [own]
    for number in (2, 1, 0):
        own = own @ weights[2 * number]
        if number:
            own = torch.ops.aten.leaky_relu_backward(own, found[number], SLOPE, True)
        by.insert(0, own)
    return by


def of_weights(found: list[list[Tensor]], by: list[list[Tensor]]) -> list[Tensor]:
    """Return the derivatives by the weights of an encoder, of all levels at once."""
    rows, grads = (list(map(torch.cat, zip(*each, strict=True))) for each in (found, by))
    parts = ([g.t() @ x, g.sum(0)] for x, g in zip(rows[:3], grads[1:], strict=True))
    return [part for pair in parts for part in pair]
