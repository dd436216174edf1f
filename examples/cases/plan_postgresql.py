"""Read a plan of PostgreSQL, and find the time that every operator took itself.

PostgreSQL gives the mean time of the loops of a node, where every parallel process has its own
loops, with all that the node waited for: its inputs, and the InitPlans and CTEs that it read. These
are listed below the node that they belong to, but run when another node first reads them.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Optional

from plan_texts import field_of, number_of, texts_of


class Node:
    """A node of a plan, and those below it.

    Attributes:
        total: The seconds of all its loops, divided by the processes that shared them.
        own: What is left of them without the nodes that it waited for.
    """

    def __init__(self, given: Any, timed: bool, parent: Optional["Node"] = None) -> None:
        self.kind: str = field_of(given, "Node Type", str)
        self.given, self.timed = given, timed
        self.name = str(given.get("Subplan Name", ""))
        self.is_cte = self.name.startswith("CTE ")
        self.is_input = given.get("Parent Relationship") != "InitPlan"  # which CTEs have too
        self.rows = number_of(given, "Plan Rows", "; EXPLAIN with COSTS OFF leaves it out")
        self.loops = number_of(given, "Actual Loops") if timed else 0.0
        self.processes = parent.processes if parent else 1.0
        if parent and parent.loops and parent.kind.startswith("Gather"):
            # What it gathers runs once per loop in every worker and, mostly, in the leader.
            self.processes = max(1.0, self.loops / parent.loops)
        mean = number_of(given, "Actual Total Time") if timed else 0.0
        self.total = self.own = mean * self.loops / self.processes / 1000
        self.children = [Node(each, timed, self) for each in field_of(given, "Plans", list, [])]

    def subtract_inputs(self) -> None:
        """Subtract the time of each node's inputs from its own, in the whole subtree."""
        inputs = [each for each in self.children if each.is_input]
        total = sum(each.total for each in inputs)
        # Means are rounded to a microsecond: those of many short loops can add up to too much.
        scale = min(1.0, self.total / total) if total else 1.0
        for each in inputs:
            each.total *= scale
        self.own = self.total - scale * total
        for each in self.children:
            each.subtract_inputs()

    def nodes(self, part: Optional["Node"] = None) -> Iterator["Node"]:
        """Yield this node and its descendants, except the subtree ``part``."""
        if self is not part:
            yield self
            for child in self.children:
                yield from child.nodes(part)

    def readers(self, part: "Node") -> list["Node"]:
        """Return the nodes here and below that may have read an InitPlan or CTE first."""
        if self is part:
            return []
        hidden = [each for each in self.children if each.name == part.name and each is not part]
        below = [each for child in hidden or self.children for each in child.readers(part)]
        if below and self.kind.startswith("Gather"):
            return [self]  # It evaluates what the workers need.
        return [self] * self.reads(part) + below

    def reads(self, part: "Node") -> bool:
        """Return whether this node reads an InitPlan or CTE."""
        if part.is_cte:
            return self.kind == "CTE Scan" and f"CTE {self.given.get('CTE Name')}" == part.name
        texts = {key: self.given[key] for key in self.given if key not in ("Plans", "Subplan Name")}
        marks = re.findall(r"\$\d+", part.name) or [part.name]  # before PostgreSQL 17: numbers
        return any(re.search(rf"{re.escape(mark)}\b", json.dumps(texts)) for mark in marks)

    def operator(self) -> dict[str, Any]:
        """Return the node as ``read_plan`` does."""
        own = {"kind": self.kind, "rows": self.rows, **texts_of(self.given)}
        children = [each.operator() for each in self.children]
        return {**own, "seconds": self.own if self.timed else None, "children": children}


def subtract_reads(root: Node) -> None:
    """Subtract InitPlans and CTEs from the nodes that read them."""
    found = []
    for node in root.nodes():
        parts = [each for each in node.children if not each.is_input]
        found += [(part, node, node.readers(part)) for part in parts]
    # First what is certain: only CTEs have several readers that may each have waited for a share.
    for part, node, readers in sorted(found, key=lambda each: (each[0].is_cte, not each[2])):
        # No text names an InitPlan in SELECT or LIMIT; a CTE that changes rows may have no reader.
        readers = readers or ([] if part.is_cte else list(node.nodes(part)))
        slowest = sorted(readers, key=lambda each: each.own)[-1:]
        if not part.is_cte or slowest and slowest[0].own >= 0.99 * part.total:
            readers = slowest
        share = min(1.0, part.total / (sum(each.own for each in readers) or 1.0))
        for each in readers:
            each.own -= share * each.own


def from_postgresql(given: Any) -> dict[str, Any]:
    """Read the value of "Plan"."""
    root = Node(given, isinstance(given, dict) and "Actual Total Time" in given)
    root.subtract_inputs()
    subtract_reads(root)
    return root.operator()
