"""Read query plans of DuckDB and PostgreSQL from the JSON of ``EXPLAIN (ANALYZE, FORMAT JSON)``.

Both become the same nested dictionary, which ``query_plans.py`` learns from. It holds only what is
known before a query runs, and beside it the measured seconds: plans from ``EXPLAIN`` without
``ANALYZE`` give the same dictionaries, with ``None`` for the seconds.
"""

import json
from pathlib import Path
from typing import Any

from plan_postgresql import from_postgresql
from plan_texts import LARGEST, field_of, number_of, texts_of

# EXPLAIN_ANALYZE and RESULT_COLLECTOR stand above the plan of the query itself.
WRAPPERS = {"EXPLAIN_ANALYZE", "RESULT_COLLECTOR", "QUERY", "RESULT"}
SAME_KIND = {"SEQ_SCAN": "TABLE_SCAN"}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file with a template and its plan per line; an error names the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        text = f"{path} is not a file of plans; a database needs queries too: {error}"
        raise SystemExit(text) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [_row(line)] if line.strip() else []
        except ValueError as error:
            raise SystemExit(f"{path}:{number}: {error}") from error
    return rows


def _row(line: str) -> dict[str, Any]:
    row = _parsed(line)
    if not isinstance(row, dict) or "plan" not in row or not isinstance(row.get("template"), str):
        raise ValueError('expected {"template": NAME, "plan": PLAN}')
    row["plan"] = read_plan(row["plan"])
    if any(each["seconds"] is None for each in operators_of(row["plan"])):
        raise ValueError("no times: EXPLAIN (ANALYZE, FORMAT JSON) has them")
    if not isinstance(times := row.get("times", [0.0]), list) or not times:
        raise ValueError('expected a list of numbers as "times"')
    for each in times:
        number_of({"times": each}, "times")
    return row


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"expected one JSON document per line: {error}") from error


def read_plan(document: Any) -> dict[str, Any]:
    """Read one plan: what ``EXPLAIN`` gave, as text or parsed, or a plan that was read before.

    Returns:
        The topmost operator: its ``kind``, the ``rows`` that the optimiser expects, the ``words``
        of its columns and conditions, the ``values`` that these compare with, the ``seconds`` it
        took without its inputs (None if it was not run) and its ``children``.

    Raises:
        ValueError: If the document is not a plan of DuckDB or PostgreSQL.
    """
    found = _parsed(document) if isinstance(document, str) else document
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        got = f"{len(found)} plans" if isinstance(found, list) else type(found).__name__
        raise ValueError(f"not a query plan: expected one JSON object, got {got}")
    try:
        if "Plan" in found:
            return from_postgresql(found["Plan"])
        if "words" in found:
            return _as_saved(found)
        # The plan is below the settings of the query, except for EXPLAIN without ANALYZE.
        roots = found.get("operator") or ([found] if _name(found) else found.get("children"))
        if not roots or not isinstance(roots, list):
            raise ValueError(f"not a query plan: expected operators, got the keys {list(found)}")
        return _from_duckdb(_without_wrappers(roots[0]))
    except RecursionError as error:
        raise ValueError("not a query plan: operators are nested too deeply") from error


def _without_wrappers(operator: Any) -> Any:
    while _name(operator) in WRAPPERS and field_of(operator, "children", list, []):
        operator = operator["children"][0]
    return operator


def _name(operator: Any) -> str:
    keys = ("type", "operator_type", "operator_name", "name")
    names = (field_of(operator, key, str, "").strip() for key in keys)
    name = next(filter(None, names), "")
    return SAME_KIND.get(name, name)


def _from_duckdb(operator: Any) -> dict[str, Any]:
    info = field_of(operator, "extra_info", dict, {})
    key = "timing" if "timing" in operator else "operator_timing"
    return {
        "kind": field_of({"name": _name(operator) or None}, "name", str),
        "rows": number_of({"Estimated Cardinality": 0, **info}, "Estimated Cardinality"),
        **texts_of(info),
        "seconds": number_of(operator, key) if key in operator else None,
        "children": [_from_duckdb(each) for each in field_of(operator, "children", list, [])],
    }


def _as_saved(operator: Any) -> dict[str, Any]:
    children = [_as_saved(each) for each in field_of(operator, "children", list)]
    kind, words = field_of(operator, "kind", str), field_of(operator, "words", list)
    own = {"kind": kind, "rows": number_of(operator, "rows"), "words": list(map(str, words))}
    values = field_of(operator, "values", dict)
    own["values"] = {name: number_of(values, name, least=-LARGEST) for name in values}
    return {**own, "seconds": number_of(operator, "seconds"), "children": children}


def operators_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """List all operators of a plan."""
    return [plan, *(each for child in plan["children"] for each in operators_of(child))]


def seconds_of(plan: dict[str, Any]) -> float:
    """Return the run time of a plan: the sum over its operators."""
    return sum(each["seconds"] for each in operators_of(plan))
