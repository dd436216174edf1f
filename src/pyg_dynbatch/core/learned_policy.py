"""Learn a good execution order from a model's first mini-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.policy import DependencyGraph, Walk, agenda_policy, depth_policy
from pyg_dynbatch.core.recording import Recording
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.structure import TopologicalOrder

Frontier = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the kinds with a ready call, sorted: those that may be chosen, and the others."""

Choose = Callable[["_Walk", list[int], Frontier], int]
"""Chooses one of several kinds."""

RULES: dict[str, Callable[["_Walk", int], float]] = {
    "*shallowest": lambda walk, kind: -walk.mean_depth(kind),
    "*nearest": lambda walk, kind: walk.heads_ready(kind),
    "*longest": lambda walk, kind: walk.longest[kind],
    "*fullest": lambda walk, kind: walk.ready[kind].sum() / walk.calls_left[kind],
}
"""A rule chooses the kind with the largest value: minus the average depth of its waiting calls
(agenda); the ready fraction of the calls that begin one of its longest chains; the length of these
chains; the ready fraction of all its waiting calls."""


class LearnedPolicy:
    """Policy that repeatedly runs all ready calls of one kind, chosen by a small table.

    The lower bound on steps is the sum over kinds of the longest chain of calls of that kind. A
    step is free if it reduces this sum: if every call that begins one of the longest remaining
    chains of its kind is ready. Among the kinds whose step is free (all ready kinds if there is
    none), the table chooses a kind or a rule by the set of ready kinds; a default rule applies to
    other sets. :meth:`fit` fills the table by search. If depth or agenda takes fewer steps, their
    order is used. A policy can be used before it is fitted.

    Args:
        table: The result of :meth:`to_dict`; empty by default.

    Reference:
        Chen et al. (2023), arXiv:2302.03851 (the set of kinds on the frontier as the state, the
        bound). Differs: free steps come first; the table is found by descent over whole orders.

    Example:
        >>> from pyg_dynbatch.core import Operations, Recording, TensorType, schedule_recordings
        >>> vector, operations = TensorType((2,)), Operations()
        >>> one = operations.add(lambda x: x, [vector], [vector], name="one")
        >>> two = operations.add(lambda x: 2 * x, [vector], [vector], name="two")
        >>> def record(kinds):
        ...     recording = Recording()
        ...     value = recording.constant(vector, [1.0, 2.0])
        ...     for kind in kinds:
        ...         value = recording.call(kind, value)
        ...     recording.output(value)
        ...     return recording
        >>> recordings = [record([one, two] * 3), record([two, one] * 3)]
        >>> policy = LearnedPolicy().fit([recordings])
        >>> [len(schedule_recordings(recordings, p).steps) for p in ("depth", policy)]
        [12, 7]
    """

    def __init__(self, table: Mapping[str, Any] | None = None) -> None:
        self.table: dict[Frontier, str] = {}
        self.rule = next(iter(RULES))
        if table is not None:
            self.table, self.rule = _read_table(table)

    def fit(
        self, batches: Sequence[Sequence[Recording]], *, evaluations: int = 200
    ) -> "LearnedPolicy":
        """Fill the table with the entries that save steps, and return the policy itself.

        Args:
            batches: At least one mini-batch, each a list of recordings.
            evaluations: Largest number of tables to try on each group of operations.
        """
        if not len(batches):
            raise mismatch(ValueError, "LearnedPolicy.fit: no batches", "at least one", 0)
        self.table = {}
        walks: dict[tuple[str, ...], list[_Walk]] = {}
        for recordings in batches:
            for graph in _graphs_of(recordings):
                if np.unique(graph.kind).size > 1:
                    walk = _Walk(graph)
                    walks.setdefault(tuple(sorted(walk.names)), []).append(walk)
        steps, every_walk = {}, [walk for mine in walks.values() for walk in mine]
        for rule in RULES:
            self.rule = rule
            steps[rule] = self._measure(every_walk)[0]
        self.rule = min(steps, key=lambda rule: steps[rule])
        for mine in walks.values():
            self._descend(mine, evaluations)
        return self

    def _descend(self, walks: "list[_Walk]", evaluations: int) -> None:
        """Change one entry at a time, until no change saves steps or the bound is reached."""
        bound = sum(walk.bound for walk in walks)
        best, seen = self._measure(walks)
        moves = _moves(seen)
        while best > bound and evaluations > 0 and (move := next(moves, None)):
            frontier, choice = move
            former = self.table.get(frontier, self.rule)
            if choice == former:
                continue
            evaluations -= 1
            self.table[frontier] = choice
            steps, now_seen = self._measure(walks)
            # A rule also suits other batches; a kind must save a step on each of these.
            if best - steps >= (1 if choice in RULES else len(walks)):
                best, seen = steps, now_seen
                # Other entries may save steps now: all of them are tried again.
                moves = _moves(seen)
            else:
                self.table[frontier] = former
        for frontier in seen:
            self.table.setdefault(frontier, self.rule)

    def _measure(self, walks: "list[_Walk]") -> "tuple[int, list[Frontier]]":
        """Count the steps, and collect the frontiers with a choice."""
        seen: dict[Frontier, None] = {}

        def choose(walk: "_Walk", free: list[int], frontier: Frontier) -> int:
            seen[frontier] = None
            return self._choose(walk, free, frontier)

        return sum(int(walk.steps(choose).max()) + 1 for walk in walks), list(seen)

    def _choose(self, walk: "_Walk", free: list[int], frontier: Frontier) -> int:
        choice = self.table.get(frontier, self.rule)
        if choice not in RULES:
            return walk.names.index(choice)
        value = RULES[choice]
        # Ties are broken by name, so that the order is the same in every process.
        return min(free, key=lambda kind: (-value(walk, kind), walk.names[kind]))

    def __call__(self, graph: DependencyGraph) -> np.ndarray:
        """Return the step of each call; the table needs a graph with names of operations."""
        if graph.num_calls == 0 or np.unique(graph.kind).size == 1:
            return depth_policy(graph)
        walk = _Walk(graph)
        step = walk.steps(self._choose)
        if int(step.max()) + 1 == walk.bound:
            return step
        # Agenda never takes more steps than depth.
        return min(step, agenda_policy(graph), key=lambda found: int(found.max()))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as lists and strings, to save as JSON or in a checkpoint.

        Example:
            >>> LearnedPolicy().to_dict()
            {'table': [], 'rule': '*shallowest'}
        """
        entries = [[list(free), list(rest), kind] for (free, rest), kind in self.table.items()]
        return {"table": sorted(entries), "rule": self.rule}

    def __eq__(self, other: object) -> bool:
        """Compare tables."""
        if not isinstance(other, LearnedPolicy):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show the size of the table."""
        return f"LearnedPolicy({len(self.table)} frontiers)"


def _moves(frontiers: Sequence[Frontier]) -> Iterator[tuple[Frontier, str]]:
    for frontier in frontiers:
        for choice in (*RULES, *frontier[0]):
            yield frontier, choice


def _graphs_of(recordings: Sequence[Recording]) -> list[DependencyGraph]:
    """Return a graph for each group of operations that depend on each other."""
    found: list[DependencyGraph] = []

    def record(graph: DependencyGraph) -> np.ndarray:
        found.append(graph)
        return depth_policy(graph)

    schedule_recordings(recordings, record)
    return found


def _read_table(saved: Mapping[str, Any]) -> tuple[dict[Frontier, str], str]:
    try:
        table = {(tuple(free), tuple(rest)): str(kind) for free, rest, kind in saved["table"]}
        rule = str(saved["rule"])
        known = all(kind in free or kind in RULES for (free, _), kind in table.items())
        if known and rule in RULES:
            return table, rule
        problem = "a choice that is neither a rule nor a kind of its frontier"
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    wanted = "the result of LearnedPolicy.to_dict()"
    raise mismatch(ValueError, "LearnedPolicy: not a saved table", wanted, problem)


class _Walk(Walk):
    """Walk that also counts ready and remaining calls by the length of the chains they begin."""

    def __init__(self, graph: DependencyGraph) -> None:
        super().__init__(graph)
        # Kinds without names match no entry.
        self.names = [graph.names[kind] if graph.names else f"\0{kind}" for kind in self.kinds]
        self.chain = self._chains()
        self.chains = [int(self.chain[self.kind == k].max()) for k in range(len(self.names))]
        self.bound = sum(self.chains)

    def _chains(self) -> np.ndarray:
        """Length of the longest chain of its own kind that begins with each call, ``[call]``."""
        graph = self.graph
        uses = TopologicalOrder(graph.source, graph.target, graph.num_calls)
        chains = np.zeros((graph.num_calls, len(self.names)), dtype=np.int64)
        order = np.argsort(self.depth, kind="stable")
        for calls in np.split(order, np.cumsum(np.bincount(self.depth))[:-1])[::-1]:
            used = calls[uses.count[calls] > 0]
            if used.size:
                starts = np.cumsum(uses.count[used]) - uses.count[used]
                chains[used] = np.maximum.reduceat(chains[uses.users_of(used)], starts)
            chains[calls, self.kind[calls]] += 1
        return chains[np.arange(graph.num_calls), self.kind]

    def heads_ready(self, kind: int) -> float:
        """Return the ready fraction of the calls that begin one of the longest chains of a kind."""
        longest = self.longest[kind]
        return float(self.ready[kind, longest] / self.left[kind, longest])

    def steps(self, choose: Choose) -> np.ndarray:
        """Run all calls; choose among the kinds whose step is free, or all if there is none."""

        def pick(ready: list[int]) -> int:
            free = [kind for kind in ready if self.heads_ready(kind) == 1] or ready
            if len(free) == 1:
                return free[0]
            others = set(ready) - set(free)
            names, rest = (tuple(sorted(self.names[k] for k in each)) for each in (free, others))
            return choose(self, free, (names, rest))

        return self.run(pick)

    def begin(self) -> None:
        """Start with all calls remaining and none ready."""
        super().begin()
        kinds, width = len(self.names), max(self.chains) + 1
        self.longest: list[int] = list(self.chains)
        # One cell per kind and chain length.
        self.cell = self.kind * width + self.chain
        self.left = np.bincount(self.cell, minlength=kinds * width).reshape(kinds, width)
        self.ready: np.ndarray = np.zeros_like(self.left)

    def add_ready(self, calls: np.ndarray) -> None:
        """Count calls that have become ready."""
        np.add.at(self.ready.reshape(-1), self.cell[calls], 1)

    def remove(self, kind: int, calls: np.ndarray) -> None:
        """Count the ready calls of a kind as made."""
        super().remove(kind, calls)
        self.left[kind] -= self.ready[kind]
        self.ready[kind] = 0
        while self.longest[kind] and not self.left[kind, self.longest[kind]]:
            self.longest[kind] -= 1
