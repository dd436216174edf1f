"""One example, recorded ahead: integers that loader workers can make and disks can keep."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyg_dynbatch.autobatch.calls import Block, Session, Spec, stacked
from pyg_dynbatch.autobatch.lazy import Lazy
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.types import TensorType


@dataclass(frozen=True)
class _Value:
    """Marks a value in the result of an example."""

    number: int


@dataclass(eq=False, repr=False)
class Trace:
    """The calls of one example, made by :meth:`AutoBatch.trace`; a model takes it as an example.

    Args:
        code: Records, one after another: the number of a site, then the values it reads.
        starts: Where each record begins.
        count: Number of values.
        sites: Signature of each site; a row type for rows from outside.
        outside: Rows from outside, by row type.
        leaves: Leaves of the result; values by their number.
        structure: Structure of the result.
        emitted: Name and value of what the example emitted.
    """

    code: np.ndarray
    starts: np.ndarray
    count: int
    sites: tuple[Spec | TensorType, ...]
    outside: dict[TensorType, Tensor]
    leaves: list[Any]
    structure: Any
    emitted: list[tuple[str, int]]

    def __repr__(self) -> str:
        return f"Trace({self.starts.size} calls, {len(self.sites)} signatures)"


def trace_of(session: Session, result: Any) -> Trace:
    """Freeze what a session has recorded."""

    def marked(leaf: Any) -> Any:
        leaf = session.outside_row(leaf) if isinstance(leaf, Tensor) else leaf
        return _Value(leaf._number) if isinstance(leaf, Lazy) else leaf

    leaves, structure = tree_flatten(result)
    leaves = list(map(marked, leaves))
    emitted = [(n, marked(v).number) for n, (found, _) in session.emitted.items() for v in found]
    code, starts = np.array(session.code, np.int32), np.array(session.starts, np.int32)
    used, code[starts] = np.unique(code[starts], return_inverse=True)
    table = session.table
    sites = tuple(
        table.row_types[site.kinds[0]] if site.spec_of is None else site.spec_of
        for site in map(table.sites.__getitem__, used.tolist())
    )
    outside = {}
    for kind, items in session.outside.items():
        row_type = table.row_types[kind]
        outside[row_type] = stacked(items, row_type, session.device)
        if outside[row_type].requires_grad:
            what = "autobatch.trace: a tensor of the example requires gradients"
            hint = "call the model on the example itself; traces hold no graph"
            got = f"a tensor of {row_type}"
            raise mismatch(ValueError, what, "plain data", got, hint=hint)
    return Trace(code, starts, session.count, sites, outside, leaves, structure, emitted)


def replay(session: Session, trace: Trace) -> Any:
    """Append a recorded example to a session and return its result."""
    table = session.table
    local = np.array([_site_number(session, site) for site in trace.sites], dtype=np.int64)
    code = trace.code.astype(np.int64) + session.count
    code[trace.starts] = local[trace.code[trace.starts]]
    session.starts += (trace.starts + len(session.code)).tolist()
    session.code += code.tolist()
    first, session.count = session.count, session.count + trace.count
    for row_type, rows in trace.outside.items():
        session.outside.setdefault(table.kind(row_type), []).append(Block(rows.to(session.device)))
    kinds = _kinds(trace, [table.sites[number].kinds for number in local.tolist()])

    def value(number: int) -> Lazy:
        return Lazy(session, first + number, kinds[number])

    for name, number in trace.emitted:
        session.emit(name, value(number))
    leaves = [value(leaf.number) if isinstance(leaf, _Value) else leaf for leaf in trace.leaves]
    return tree_unflatten(leaves, trace.structure)


def _kinds(trace: Trace, kinds_of_site: list[tuple[int, ...]]) -> dict[int, int]:
    """Row type of the values that leave the example."""
    wanted = {leaf.number for leaf in trace.leaves if isinstance(leaf, _Value)}
    wanted |= {number for _, number in trace.emitted}
    widths = np.array([len(kinds) for kinds in kinds_of_site], dtype=np.int64)
    site = trace.code[trace.starts]
    last = np.cumsum(widths[site])
    found = {}
    for number in wanted:
        record = int(np.searchsorted(last, number, side="right"))
        kinds = kinds_of_site[site[record]]
        found[number] = kinds[number - (int(last[record]) - len(kinds))]
    return found


def _site_number(session: Session, site: Spec | TensorType) -> int:
    if isinstance(site, TensorType):
        return session.table.external[session.table.kind(site)].number
    return session.table.site_of(site, session.device, "a trace").number
