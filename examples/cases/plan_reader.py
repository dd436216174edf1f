"""Read query plans of DuckDB and PostgreSQL from the JSON of ``EXPLAIN (ANALYZE, FORMAT JSON)``.

Both become the same nested dictionary, which ``query_plans.py`` learns from. It holds only what is
known before a query runs, and beside it the measured seconds: plans from ``EXPLAIN`` without
``ANALYZE`` give the same dictionaries, with ``None`` for the seconds.
"""

import json
import re
from typing import Any

# Where the words of an operator come from: what the optimiser decides before the query runs.
TEXTS = {
    "Table", "Projections", "Filters", "Join Type", "Conditions", "Groups", "Aggregates",
    "Order By", "Top", "Expression", "Function", "Relation Name", "Index Name", "Index Cond",
    "Hash Cond", "Merge Cond", "Join Filter", "Recheck Cond", "Filter", "Sort Key", "Group Key",
    "Strategy",
}  # fmt: skip
# EXPLAIN_ANALYZE and RESULT_COLLECTOR stand above the plan of the query itself.
WRAPPERS = {"EXPLAIN_ANALYZE", "RESULT_COLLECTOR", "QUERY", "RESULT"}
SAME_KIND = {"SEQ_SCAN": "TABLE_SCAN"}


def read_plan(document: str | list | dict) -> dict[str, Any]:
    """Read one plan.

    Returns:
        The topmost operator: its ``kind``, the ``rows`` that the optimiser expects, the ``words``
        of its columns and conditions, the ``values`` that these compare with, the ``seconds`` it
        took without its inputs (None if it was not run) and its ``children``.

    Raises:
        ValueError: If the document is not a plan of DuckDB or PostgreSQL.
    """
    found = json.loads(document) if isinstance(document, str) else document
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise ValueError(f"not a query plan: expected a JSON object, got {type(found).__name__}")
    if "Plan" in found:
        return _from_postgresql(found["Plan"])
    # The plan stands below the settings of the query, except for EXPLAIN without ANALYZE.
    roots = found.get("operator") or ([found] if _name(found) else found.get("children"))
    if not roots:
        raise ValueError(f"not a query plan: expected operators, got the keys {sorted(found)}")
    return _from_duckdb(_without_wrappers(roots[0]))


def _without_wrappers(operator: dict) -> dict:
    while _name(operator) in WRAPPERS and operator.get("children"):
        operator = operator["children"][0]
    return operator


def _name(operator: dict) -> str:
    keys = ("type", "operator_type", "operator_name", "name")
    name = next((operator[key] for key in keys if key in operator), "").strip()
    return SAME_KIND.get(name, name)


def _from_duckdb(operator: dict) -> dict[str, Any]:
    info = operator.get("extra_info") or {}
    return {
        "kind": _name(operator),
        "rows": float(info.get("Estimated Cardinality", 0)),
        **_texts(info),
        "seconds": operator.get("timing", operator.get("operator_timing")),
        "children": [_from_duckdb(child) for child in operator.get("children", ())],
    }


def _from_postgresql(node: dict) -> dict[str, Any]:
    children = [_from_postgresql(child) for child in node.get("Plans", ())]
    seconds = _seconds(node)
    if seconds is not None:
        # PostgreSQL counts the time of the inputs to the operator that reads them.
        seconds = max(0.0, seconds - sum(_seconds(child) or 0.0 for child in node.get("Plans", ())))
    own = {"kind": node["Node Type"], "rows": float(node["Plan Rows"]), **_texts(node)}
    return {**own, "seconds": seconds, "children": children}


def _seconds(node: dict) -> float | None:
    """Return the time of a node of PostgreSQL with its inputs, over all its loops."""
    if "Actual Total Time" not in node:
        return None
    return node["Actual Total Time"] * node["Actual Loops"] / 1000


def _texts(info: dict) -> dict[str, Any]:
    """Read the words of an operator, and the numbers that it compares columns with."""
    found = " ".join(f"{key} {value}" for key, value in info.items() if key in TEXTS).lower()
    compared = re.findall(r"(\w+)\s*([<>=!]+)\s*'?(-?\d+(?:\.\d+)?)", found)
    values = {column + sign: float(number) for column, sign, number in compared}
    return {"words": re.findall(r"[a-z_]\w*|[<>=!~]+", found), "values": values}


def operators_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """List all operators of a plan."""
    return [plan, *(each for child in plan["children"] for each in operators_of(child))]


def seconds_of(plan: dict[str, Any]) -> float:
    """Return the run time of a plan: the sum over its operators."""
    return sum(each["seconds"] for each in operators_of(plan))
