"""Plan what was recorded: which calls run now, and in which steps."""

from collections.abc import Sequence

import numpy as np
import torch

from pyg_dynbatch.core import scheduling
from pyg_dynbatch.core.joining import Constants
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.scheduling import Calls, Records
from pyg_dynbatch.core.steps import BufferSpec, Steps


def plan(
    records: Records,
    rows: np.ndarray,
    policy: Policy,
    *,
    alive: np.ndarray,
    places: np.ndarray,
    read_now: Sequence[int] | None = None,
    read_later: np.ndarray | None = None,
) -> tuple[Steps, np.ndarray]:
    """Schedule calls; the rows of their values are known afterwards.

    Args:
        records: Those that have not been run.
        rows: Number of rows of each row type, which becomes larger by those of results.
        policy: Order of the steps.
        alive: Of each value, whether the model may read it later.
        places: Of each value, where in the user's code it was made.
        read_now: Values for which calls are made now, while calls that can wait do; by default no
            call waits.
        read_later: The only values that are read later, so that other calls are left out; by
            default all that the model may read.

    Returns:
        The steps, and where the calls begin that are left out.
    """
    kept = alive.copy()
    if read_later is not None:
        kept[:] = 0
        kept[read_later] = 1
    calls = _calls_of(records)
    is_left_out = _left_out(calls, kept, read_now, read_later)
    left_out = calls.member[is_left_out]
    if left_out.size:
        calls = _calls_of(records._replace(begins=calls.member[~is_left_out]))
    return _steps(calls, kept, places, policy, rows), left_out


def _calls_of(records: Records) -> Calls:
    """Decode records into calls."""
    # Equal calls are not looked for: a constant that was met before is one value already.
    calls, _ = scheduling.merge(records, Constants.none(records.sites), merge_equal=False)
    return calls


def _left_out(
    calls: Calls, kept: np.ndarray, read_now: Sequence[int] | None, read_later: np.ndarray | None
) -> np.ndarray:
    """Return which calls are not made now; values that they read later are marked in ``kept``."""
    if read_now is not None:
        return scheduling.choose(calls, read_now, kept, joins=True)
    if read_later is not None:  # the derivative of what nobody reads could be infinite
        return scheduling.choose(calls, read_later, kept.copy(), joins=False)
    return np.zeros(calls.num_calls, dtype=bool)


def _steps(
    calls: Calls, kept: np.ndarray, places: np.ndarray, policy: Policy, rows: np.ndarray
) -> Steps:
    """Fuse calls, and place them in steps."""
    sites = calls.records.sites
    rows_before = rows.tolist()
    fused = scheduling.fuse(calls, kept, places)
    steps, index = scheduling.place(fused, policy, rows)
    columns = zip(sites.row_types, rows_before, rows.tolist(), strict=True)
    return Steps(
        signatures=sites.signatures,
        buffers=tuple(BufferSpec(kind, 0, inputs, size) for kind, inputs, size in columns),
        steps=steps,
        index=torch.from_numpy(index),
        constants=(None,) * len(rows_before),
        outputs={},
        num_examples=1,
        fused=fused.programs,
    )
