"""Choose the order of steps: pure functions from a dependency graph to step numbers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.core.structure import TopologicalOrder, find_cycle, longest_paths


@dataclass(frozen=True)
class DependencyGraph:
    """Dependencies between calls, and the kind of each call.

    Args:
        kind: Operation of each call, ``[call]``.
        source: The call that must come first, ``[dependency]``.
        target: The call that depends on it, ``[dependency]``.
        names: Name of each operation, for policies that use names.
    """

    kind: np.ndarray
    source: np.ndarray
    target: np.ndarray
    names: tuple[str, ...] = ()

    @property
    def num_calls(self) -> int:
        """Number of calls."""
        return int(self.kind.size)


def depth_of_calls(graph: DependencyGraph) -> np.ndarray:
    """Return the longest path to each call; raise an error if there is none, in a cycle."""
    ends, calls = np.concatenate([graph.source, graph.target]), graph.num_calls
    if graph.source.shape != graph.target.shape or (ends < 0).any() or (ends >= calls).any():
        what, wanted = "DependencyGraph: invalid dependencies", f"pairs of calls, 0 to {calls - 1}"
        got = f"source {graph.source.tolist()[:10]}, target {graph.target.tolist()[:10]}"
        raise mismatch(ValueError, what, wanted, got)
    depth = longest_paths(graph.source, graph.target, calls)
    if depth.min(initial=0) < 0:
        cycle = find_cycle(torch.from_numpy(np.stack([graph.source, graph.target])), calls)
        what, got = "DependencyGraph: calls depend on each other", " -> ".join(map(str, cycle))
        raise mismatch(ValueError, what, "no cycle", f"calls {got} -> {cycle[0]}")
    return depth


Policy = Callable[[DependencyGraph], np.ndarray]
"""Returns the step of each call; calls of one step are of one kind and independent."""


def depth_policy(graph: DependencyGraph) -> np.ndarray:
    """Run all calls of one kind at one depth together.

    Args:
        graph: Calls and their dependencies.

    Returns:
        Step of each call, ``[call]``, without gaps.

    Raises:
        ValueError: If calls depend on each other in a cycle.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2.

    Example:
        >>> chain = DependencyGraph(np.array([0, 0, 1]), np.array([0, 1]), np.array([1, 2]))
        >>> depth_policy(chain).tolist()
        [0, 1, 2]
    """
    depth = depth_of_calls(graph)
    num_kinds = int(graph.kind.max()) + 1 if graph.num_calls else 1
    return np.unique(depth * num_kinds + graph.kind, return_inverse=True)[1]


def agenda_policy(graph: DependencyGraph) -> np.ndarray:
    """Repeatedly run all ready calls of the kind whose waiting calls are shallowest.

    A kind with deep calls waits for them, so it mostly runs in fewer and fuller steps. If this
    rule takes more steps than :func:`depth_policy`, the latter's order is used.

    Args:
        graph: Calls and their dependencies.

    Returns:
        Step of each call, ``[call]``, without gaps.

    Raises:
        ValueError: If calls depend on each other in a cycle.

    Reference:
        Neubig, Goldberg, Dyer (2017), arXiv:1705.07860, section 3.2 (agenda-based batching).
        Differs: never more steps than by depth.

    Example:
        >>> chain = DependencyGraph(np.array([0, 0, 1]), np.array([0, 1]), np.array([1, 2]))
        >>> agenda_policy(chain).tolist()
        [0, 1, 2]
    """
    if not graph.num_calls:
        return np.zeros(0, dtype=np.int64)
    walk = Walk(graph)
    # Ties go to the lower kind, so that the order is the same in every process.
    step = walk.run(lambda ready: min(ready, key=lambda kind: (walk.mean_depth(kind), kind)))
    by_depth = depth_policy(graph)
    return by_depth if by_depth.max() < step.max() else step


class Walk:
    """Simulated run of a graph, step by step: all ready calls of one kind at a time."""

    def __init__(self, graph: DependencyGraph) -> None:
        self.graph = graph
        self.kinds, self.kind = np.unique(graph.kind, return_inverse=True)
        self.depth = depth_of_calls(graph)

    def begin(self) -> None:
        """Start with all calls remaining."""
        graph, kinds = self.graph, self.kinds.size
        self.order = TopologicalOrder(graph.source, graph.target, graph.num_calls)
        self.calls_left: np.ndarray = np.bincount(self.kind, minlength=kinds)
        self.depth_left: np.ndarray = np.bincount(self.kind, weights=self.depth, minlength=kinds)

    def mean_depth(self, kind: int) -> float:
        """Return the average depth of the remaining calls of a kind."""
        return float(self.depth_left[kind] / self.calls_left[kind])

    def add_ready(self, calls: np.ndarray) -> None:
        """Count calls that are now ready."""

    def remove(self, kind: int, calls: np.ndarray) -> None:
        """Remove the ready calls of a kind from the remaining ones."""
        self.calls_left[kind] -= calls.size
        self.depth_left[kind] -= self.depth[calls].sum()

    def run(self, choose: Callable[[list[int]], int]) -> np.ndarray:
        """Run all calls, each step of a chosen ready kind; return the step of each call."""
        self.begin()
        step, number = np.empty(self.graph.num_calls, dtype=np.int64), 0
        ready: list[list[np.ndarray]] = [[] for _ in self.kinds]
        new = self.order.first()
        while True:
            self.add_ready(new)
            for kind in np.unique(self.kind[new]):
                ready[kind].append(new[self.kind[new] == kind])
            kinds = [kind for kind, calls in enumerate(ready) if calls]
            if not kinds:
                return step
            chosen = choose(kinds)
            calls, ready[chosen] = np.concatenate(ready[chosen]), []
            step[calls] = number
            number += 1
            self.remove(chosen, calls)
            new = self.order.remove(calls)


POLICIES: dict[str, Policy] = {"depth": depth_policy, "agenda": agenda_policy}


def policy_of(policy: str | Policy) -> Policy:
    """Return the policy of a name; return a function as it is."""
    if callable(policy):
        return policy
    what = f"schedule_recordings: unknown policy {policy!r}"
    hint = "or a function of a DependencyGraph"
    return POLICIES[checked_choice(what, policy, POLICIES, hint)]


def order_calls(graph: DependencyGraph, policy: str | Policy) -> np.ndarray:
    """Return the step of each call: one group of kinds after another, ordered by the policy."""
    chosen = policy_of(policy)
    if not graph.num_calls:
        return np.zeros(0, dtype=np.int64)
    group = _groups(graph)[graph.kind]
    step = np.empty(graph.num_calls, dtype=np.int64)
    inner = group[graph.source] == group[graph.target]
    first = 0
    for number in np.unique(group):
        calls = np.flatnonzero(group == number)
        new_number = np.full(graph.num_calls, -1)
        new_number[calls] = np.arange(calls.size)
        edges = inner & (group[graph.source] == number)
        source, target = new_number[graph.source[edges]], new_number[graph.target[edges]]
        part = DependencyGraph(graph.kind[calls], source, target, graph.names)
        inside = chosen(part)
        if chosen not in POLICIES.values():
            inside = _checked_steps(part, inside)
        step[calls] = first + inside
        first += int(inside.max()) + 1
    return step


def _checked_steps(graph: DependencyGraph, step: object) -> np.ndarray:
    """Check the result of a user's policy, and number its steps without gaps."""
    found = np.asarray(step)
    problem = ""
    if found.shape != (graph.num_calls,) or not np.issubdtype(found.dtype, np.integer):
        problem = f"{found.dtype} array {list(found.shape)} for {graph.num_calls} calls"
    else:
        late = np.flatnonzero(found[graph.source] >= found[graph.target])
        _, first, found = np.unique(found, return_index=True, return_inverse=True)
        mixed = np.flatnonzero(graph.kind[first][found] != graph.kind)
        if late.size:
            source, target = graph.source[late[0]], graph.target[late[0]]
            problem = f"call {target} not in a later step than call {source}, on which it depends"
        elif mixed.size:
            problem = f"call {mixed[0]} in one step with a call of a different kind"
    if problem:
        what = "schedule_recordings: invalid steps of the policy"
        wanted = "an integer per call; calls of one step are of one kind and independent"
        raise mismatch(ValueError, what, wanted, problem)
    return found


def _groups(graph: DependencyGraph) -> np.ndarray:
    """Number the strongly connected groups of kinds in topological order."""
    num_kinds = int(graph.kind.max()) + 1
    reach = np.eye(num_kinds, dtype=bool)
    reach[graph.kind[graph.source], graph.kind[graph.target]] = True
    # Warshall's closure: kinds are few (one per operation), calls are many.
    for middle in range(num_kinds):
        reach |= np.outer(reach[:, middle], reach[middle])
    mutual = reach & reach.T
    leaders, group = np.unique(mutual.argmax(1), return_inverse=True)
    # A group comes after every group that reaches it: fewer ancestors first, then by number.
    ancestors = reach.sum(0)[leaders]
    return np.argsort(np.lexsort((leaders, ancestors)))[group]
