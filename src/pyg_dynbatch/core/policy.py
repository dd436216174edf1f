"""The order of steps, in plain Python: what ``order`` of ``native/steps.c`` computes.

Calls and their dependencies are arrays: the kind of each call, and for each dependency its source,
the call that must come first, and its target.
"""

from typing import Literal, get_args

import numpy as np

from pyg_dynbatch.core.errors import checked_choice
from pyg_dynbatch.core.structure import TopologicalOrder, longest_paths

Policy = Literal["depth", "agenda"]
"""What decides which calls form a step, and in which order."""


def checked_policy(policy: Policy) -> Policy:
    """Return the name of a policy, or raise an error for anything else."""
    problem = f"schedule_recordings: unknown policy {policy!r}"
    return checked_choice(problem, policy, get_args(Policy))


def steps_by_depth(kind: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the step of each call: all calls of one kind at one depth run together.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2.
    """
    depth = longest_paths(source, target, kind.size)
    num_kinds = int(kind.max(initial=0)) + 1
    return np.unique(depth * num_kinds + kind, return_inverse=True)[1]


def steps_by_agenda(kind: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the step of each call: the ready calls of the kind whose waiting calls are shallowest.

    A kind with deep calls waits for them, so it mostly runs in fewer and fuller steps. Where this
    takes more steps than by depth, those by depth are returned.

    Reference:
        Neubig, Goldberg, Dyer (2017), arXiv:1705.07860, section 3.2 (agenda-based batching).
        Differs: never more steps than by depth.
    """
    depth = longest_paths(source, target, kind.size)
    order = TopologicalOrder(source, target, kind.size)
    calls_left = np.bincount(kind)
    depth_left = np.bincount(kind, weights=depth)
    step = np.zeros(kind.size, dtype=np.int64)
    number = 0
    ready = order.first()
    while ready.size:
        kinds = np.unique(kind[ready])
        # Ties go to the lower kind, so that the order is the same in every process.
        shallowest = kinds[np.argmin(depth_left[kinds] / calls_left[kinds])]
        is_chosen = kind[ready] == shallowest
        chosen = ready[is_chosen]
        step[chosen] = number
        number += 1
        calls_left[shallowest] -= chosen.size
        depth_left[shallowest] -= depth[chosen].sum()
        ready = np.concatenate([ready[~is_chosen], order.remove(chosen)])

    by_depth = steps_by_depth(kind, source, target)
    return by_depth if by_depth.max(initial=0) < step.max(initial=0) else step


def order_calls(
    kind: np.ndarray, source: np.ndarray, target: np.ndarray, policy: Policy
) -> np.ndarray:
    """Return the step of each call: one group of kinds after another, in the order of the policy.

    Kinds that depend on each other, as in a recursion, form a group. So a kind that only reads the
    results of a recursion, such as a classifier, runs once after it.
    """
    steps_of_group = steps_by_agenda if policy == "agenda" else steps_by_depth
    step = np.zeros(kind.size, dtype=np.int64)
    if not kind.size:
        return step

    group = _groups(kind, source, target)[kind]
    first = 0
    for number in np.unique(group):
        calls = np.flatnonzero(group == number)
        is_inside = (group[source] == number) & (group[target] == number)
        sources = np.searchsorted(calls, source[is_inside])
        targets = np.searchsorted(calls, target[is_inside])
        step[calls] = first + steps_of_group(kind[calls], sources, targets)
        first = int(step[calls].max()) + 1
    return step


def _groups(kind: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Number the strongly connected groups of kinds in topological order."""
    num_kinds = int(kind.max()) + 1
    reach = np.eye(num_kinds, dtype=bool)
    reach[kind[source], kind[target]] = True
    # Warshall's closure: kinds are few (one per operation), calls are many.
    for middle in range(num_kinds):
        reach |= np.outer(reach[:, middle], reach[middle])

    mutual = reach & reach.T
    leaders, group = np.unique(mutual.argmax(1), return_inverse=True)
    # A group comes after every group that reaches it: fewer ancestors first, then by number.
    ancestors = reach.sum(0)[leaders]
    return np.argsort(np.lexsort((leaders, ancestors)))[group]
