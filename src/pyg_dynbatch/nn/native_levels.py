"""Run whole schedules of fused Tree-LSTMs in one call of C each way; float32 on CPUs."""

import ctypes
import logging
import sys
from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.native import fastest
from pyg_dynbatch.nn.fused_gates import BLOCK, FusedPlan, Gates, Kept, StateGradients
from pyg_dynbatch.nn.native_gates import Incoming, Struct, fields_of, gates_library, incoming
from pyg_dynbatch.nn.products import RowProduct, ones

_log = logging.getLogger(__name__)

STATES = ("hidden", "memory")

# From this many rows on, products of aligned copies are faster by more than copying takes.
_WORTH_COPYING = 16


class _Run(Struct):
    """``struct run`` in C."""

    _fields_ = fields_of(
        "width arity leaves levels features cells inputs keeps narrow",
        "multiply sizes filled index starts leaf_of"
        " rows weight_input weight_hidden bias own dropout_mask"
        " hidden memory activated leaf_hidden leaf_memory leaf_activated"
        " gathered sums leaf_gates gates forget"
        " all_bias aligned_input aligned_hidden aligned_rows"
        " leaf_grads grads to_forget to_hidden to_memory to_sums",
    )


def forward_run(plan: FusedPlan, inputs: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Kept]:
    """Compute all nodes; return h after a row for missing children, and the rest.

    In inference, the gates kept are those of the last block alone.
    """
    weight_input, weight_hidden, bias = map(_plain, weights)
    width = bias.size(0) // 4
    leaves, rows, children = plan.leaf_cells, plan.inner, plan.slots
    if not plan.with_backward:
        leaves, rows = min(leaves, BLOCK), min(max(plan.sizes[1:], default=0), BLOCK)
        if plan.ragged and plan.inner > BLOCK:
            starts = np.append(plan.child_start.numpy(), plan.slots)
            children = (starts[BLOCK:] - starts[:-BLOCK]).max()
    states = [bias.new_empty(plan.nodes + 1, width) for _ in range(3)]
    of_leaves = [state[1:] for state in states]
    if plan.leaf_inverse is not None:
        of_leaves = [bias.new_empty(plan.leaf_cells, width) for _ in states]
    gates = Gates(
        bias.new_empty(rows, (3 + plan.arity) * width),
        bias.new_empty(children, width) if plan.ragged else None,
    )
    kept = Kept(
        gathered=bias.new_empty(plan.slots, width),
        sums=bias.new_empty(plan.inner, width) if plan.ragged else None,
        memory=states[1], activated=states[2], leaf_activated=of_leaves[2],
        aligned_weight=_aligned(weight_hidden, plan.inner),
        leaf_gates=[bias.new_empty(leaves, 3 * width)], gates=[gates],
    )  # fmt: skip
    own, filled = None, inputs[plan.leaf_inputs :]
    if count := filled.size(0):
        own = RowProduct(weight_input, rows=count)(filled, 0, count)
    stride, features = _stride(weight_hidden.size(1)), inputs.size(1)
    run = _run(
        plan, kept, weight_hidden, hidden=states[0], rows=inputs, weight_input=weight_input,
        bias=bias, own=own, all_bias=bias.new_empty(gates.rows.size(1)), features=features,
        leaf_hidden=of_leaves[0], leaf_memory=of_leaves[1], keeps=plan.with_backward,
        aligned_input=_aligned(weight_input, plan.leaf_inputs),
        aligned_rows=bias.new_empty(BLOCK, max(stride, _stride(features))),
    )  # fmt: skip
    library: Any = gates_library()
    library.tree_lstm_forward_run(byref(run), plan.inner, plan.slots, torch.get_num_threads())
    return states[0], kept


def backward_run(
    plan: FusedPlan, kept: Kept, weight_hidden: Tensor, given: StateGradients
) -> tuple[Gates, Tensor]:
    """Return the gradients of the products of inner nodes and of computed leaves."""
    like, (rows, forget) = kept.memory, kept.gates[0][:2]
    width, most = like.size(1), min(max(plan.sizes[1:], default=0), BLOCK)
    grads = Gates(torch.empty_like(rows), None if forget is None else torch.empty_like(forget))
    leaf_grads = torch.empty_like(kept.leaf_gates[0])
    to_hidden, to_memory = given.buffers(0, plan.slots)
    run = _run(
        plan, kept, _plain(weight_hidden), keeps=True, leaf_grads=leaf_grads, grads=grads.rows,
        to_forget=grads.forget, to_hidden=to_hidden, to_memory=to_memory,
        to_sums=like.new_empty(most, width) if plan.ragged else None,
    )  # fmt: skip
    of_cells, shared = None, plan.leaf_inverse is not None
    if shared:
        of_cells = Incoming(**{name: like.new_zeros(plan.leaf_cells, width) for name in STATES})
    sizes = plan.inner, plan.slots, torch.get_num_threads()
    library: Any = gates_library()
    library.tree_lstm_backward_run(byref(run), incoming(given), of_cells, *sizes)
    return grads, leaf_grads


def _run(plan: FusedPlan, kept: Kept, weight_hidden: Tensor, **more: Tensor | int | None) -> _Run:
    mask, (rows, forget) = plan.dropout_mask, kept.gates[0][:2]
    if mask is not None:
        mask = mask.to(kept.memory.dtype).contiguous()
    sizes, filled = (
        (c_int64 * len(each))(*each) for each in (plan.sizes, plan.schedule.level_inputs)
    )
    return _Run(
        width=kept.memory.size(1), arity=-1 if plan.ragged else plan.arity, leaves=plan.leaves,
        levels=len(plan.sizes), cells=plan.leaf_cells, inputs=plan.leaf_inputs,
        narrow=narrow_rows(),
        multiply=multiply_address(), sizes=sizes, filled=filled, index=plan.children,
        starts=plan.child_start if plan.ragged else None,
        leaf_of=None if plan.leaf_inverse is None else plan.spread_leaves().contiguous(),
        weight_hidden=weight_hidden, dropout_mask=mask, memory=kept.memory,
        activated=kept.activated, leaf_activated=kept.leaf_activated, gathered=kept.gathered,
        sums=kept.sums, aligned_hidden=kept.aligned_weight, leaf_gates=kept.leaf_gates[0],
        gates=rows, forget=forget, **more,
    )  # fmt: skip


def _aligned(weight: Tensor, rows: int) -> Tensor | None:
    """Room for a copy of a matrix whose rows begin cache lines; itself if they do."""
    if rows < _WORTH_COPYING:
        return None
    if weight.size(1) == _stride(weight.size(1)) and weight.data_ptr() % 64 == 0:
        return weight
    return weight.new_empty(weight.size(0), _stride(weight.size(1)))


def _stride(inner: int) -> int:
    return (inner + 15) // 16 * 16


@cache
def narrow_rows() -> int:
    """Race ``narrow_products.c`` against the BLAS of torch; return up to how many rows it wins."""
    library: Any = gates_library()
    inner, columns, narrow = 300, 750, 7
    with torch.inference_mode():
        weight, rows = ones(columns, inner), ones(BLOCK, inner)
        copies = [ones(each.size(0), _stride(inner)) for each in (weight, rows)]
        shared: Any = {"weight_hidden": weight, "bias": ones(columns)}
        shared |= {"aligned_hidden": copies[0], "aligned_rows": copies[1], "rows": rows}
        shared |= {"all_bias": ones(BLOCK, columns), "multiply": multiply_address()}
        runs = {"own": _Run(narrow=BLOCK, **shared), "blas": _Run(narrow=0, **shared)}
    for count in (8, 32, BLOCK):
        sizes = count, inner, columns, 1
        ways = {
            name: partial(library.tree_lstm_multiply, byref(run), *sizes)
            for name, run in runs.items()
        }
        # Its name contains a checksum of the kernels.
        if fastest(f"{count}-rows-{Path(library._name).stem}", ways) != "own":
            break
        narrow = count
    return narrow


def _plain(rows: Tensor) -> Tensor:
    # A tensor that is negated only when it is read is not negated in memory.
    return rows.resolve_neg().contiguous()


@cache
def multiply_address() -> int | None:
    """Find ``sgemm`` in the libraries that torch has loaded."""
    if sys.byteorder != "little":
        # The low half of a number would not come first.
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("*torch_cpu.*")):
        try:
            function = ctypes.CDLL(str(path)).sgemm_
        except (OSError, AttributeError) as error:
            _log.info("no sgemm_ in %s: %s", path.name, error)
            continue
        if _multiplies(function):
            return ctypes.cast(function, c_void_p).value
        _log.info("sgemm_ of %s does not multiply as expected", path.name)
    return None


def _multiplies(function: object) -> bool:
    """Whether a function is called as C will call it: numbers of 64 bits, no lengths of strings."""
    # Independent of the default dtype and device.
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    left, right = torch.arange(6, **plain).view(2, 3), torch.arange(12, **plain).view(4, 3)
    found = torch.ones(2, 4, **plain)
    sizes = [byref(c_int64(size)) for size in (4, 2, 3)]
    three, four = (byref(c_int64(size)) for size in (3, 4))
    one = byref(ctypes.c_float(1))
    weight, given, out = (c_void_p(part.data_ptr()) for part in (right, left, found))
    function(b"T", b"N", *sizes, one, weight, three, given, three, one, out, four)  # type: ignore[operator]
    return torch.equal(found, left @ right.t() + 1)
