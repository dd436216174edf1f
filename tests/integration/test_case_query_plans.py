"""Plans of both databases are read alike, hold nothing measured, and are learned from."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from plan_baselines import ridge
from plan_model import prepared, run_time, totals
from plan_reader import operators_of, read_plan, seconds_of
from query_plans import main

from pyg_dynbatch import blocks as td


def read(path: Path) -> dict[str, Any]:
    return read_plan(path.read_text(encoding="utf-8"))


def without_seconds(plan: dict[str, Any]) -> dict[str, Any]:
    children = [without_seconds(child) for child in plan["children"]]
    return {**plan, "seconds": None, "children": children}


def test_plan_of_postgresql(samples: Path) -> None:
    plan = read(samples / "plans" / "postgresql.json")
    kinds = [each["kind"] for each in operators_of(plan)]
    assert kinds == ["Sort", "Nested Loop", "Seq Scan", "Index Scan"]
    # The index scan ran 95 times; a time includes those of the inputs.
    seconds = [each["seconds"] for each in operators_of(plan)]
    assert seconds == pytest.approx([0.0015, 0.0085 - 0.002 - 95 * 5e-5, 0.002, 95 * 5e-5])
    assert seconds_of(plan) == pytest.approx(0.01)
    scan = operators_of(plan)[2]
    assert scan["rows"] == 100 and scan["values"] == {"day<": 1200.0} and "orders" in scan["words"]


def node(kind: str, time: float, *plans: dict[str, Any], **others: Any) -> dict[str, Any]:
    own = {"Node Type": kind, "Plan Rows": 1, "Actual Total Time": time, "Actual Loops": 1}
    return {
        **own,
        **{key.replace("_", " "): value for key, value in others.items()},
        "Plans": [*plans],
    }


def part(name: str, time: float, *plans: dict[str, Any], kind: str = "Part") -> dict[str, Any]:
    others = {"Parent Relationship": "InitPlan", "Subplan Name": name}
    return {**node(kind, time, *plans), **others}


def init(name: str, time: float, *plans: dict[str, Any]) -> dict[str, Any]:
    return part(f"InitPlan {name}", time, *plans)


def cte(name: str, time: float, *plans: dict[str, Any]) -> dict[str, Any]:
    return part(f"CTE {name}", time, *plans)


def read_cte(name: str, time: float, kind: str = "CTE Scan", **others: Any) -> dict[str, Any]:
    return node(kind, time, CTE_Name=name, **others)


FIRST, X = init("1 (returns $0)", 60), cte("x", 60)
READS_X = cte("x", 60, read_cte("x", 50))
# A plan of PostgreSQL, and the own milliseconds of its nodes from top to bottom.
PLANS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "named InitPlan": (node("Sort", 100, FIRST, node("Scan", 90, Filter="(a < $0)")), [10, 60, 30]),
    "named InitPlan of PostgreSQL 17": (
        node("Sort", 100, init("1", 60), node("Scan", 90, Filter="a < (InitPlan 1).col1")),
        [10, 60, 30],
    ),
    "other names": (
        node("Sort", 100, init("1 (returns $1)", 9), node("Scan", 30, Filter="(a < $10)")),
        [61, 9, 30],
    ),
    "InitPlan in SELECT": (node("Sort", 100, FIRST, node("Scan", 90)), [10, 60, 30]),
    "InitPlan in SELECT of the node itself": (
        node("Result", 100, FIRST, node("Scan", 20)),
        [20, 60, 20],
    ),
    "InitPlan that workers need": (
        node("Gather", 99, FIRST, node("Scan", 20, Filter="(a < $0)", Actual_Loops=3)),
        [19, 60, 20],
    ),
    "CTE": (node("Sort", 100, X, read_cte("x", 90)), [10, 60, 30]),
    "CTE that was read twice, once for all": (
        node("Join", 100, X, read_cte("x", 70), read_cte("x", 20)),
        [10, 60, 10, 20],
    ),
    "CTE that was read twice, by each in part": (
        node("Join", 100, X, read_cte("x", 50), read_cte("x", 30)),
        [20, 60, 12.5, 7.5],
    ),
    "CTE of a CTE": (
        node("Sort", 100, cte("x", 30), cte("y", 60, read_cte("x", 50)), read_cte("y", 90)),
        [10, 30, 10, 20, 30],
    ),
    "CTE with the name of an outer one": (
        node("Sort", 100, cte("x", 30), node("Group", 90, READS_X, read_cte("x", 80))),
        [10, 30, 10, 10, 20, 20],
    ),
    "recursive CTE": (
        node(
            "Aggregate",
            100,
            cte("x", 80, read_cte("x", 5, "WorkTable Scan", Actual_Loops=10)),
            read_cte("x", 90),
        ),
        [10, 30, 50, 10],
    ),
    "CTE that goes on after the root": (node("Limit", 2, X, read_cte("x", 1)), [1, 60, 0]),
    "InitPlan that reads a CTE too": (
        node(
            "Aggregate",
            100,
            X,
            init("2 (returns $1)", 25, read_cte("x", 20)),
            read_cte("x", 90, Filter="(a = $1)"),
        ),
        [10, 60, 5, 20, 5],
    ),
    "parallel": (
        node("Gather Merge", 50, node("Append", 40, node("Scan", 90), Actual_Loops=3)),
        [10, 10, 30],
    ),
    "parallel in a loop": (
        node("Loop", 100, node("Gather", 9, node("Scan", 8, Actual_Loops=20), Actual_Loops=10)),
        [10, 10, 80],
    ),
    "many short loops": (
        node("Loop", 80, node("Scan", 20), node("Index Scan", 0.001, Actual_Loops=80_000)),
        [0, 16, 64],
    ),
    "never run": (node("Loop", 10, node("Gather", 0, node("Scan", 0, Actual_Loops=0))), [10, 0, 0]),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_second_of_a_plan_of_postgresql_counts_once(name: str) -> None:
    given, expected = PLANS[name]
    found = [each["seconds"] * 1000 for each in operators_of(read_plan([{"Plan": given}]))]
    assert found == pytest.approx(expected)


COMPARED = {
    "(day < '1995-03-15'::date)": {"day<": 9204.0},
    "(day < '1995-04-15 12:00:00'::timestamp without time zone)": {"day<": 9235.5},
    "((note)::text ~~ '%5 > 3%'::text)": {},
    "(note = 'it''s = 3')": {},
    "((code)::text = '12abc'::text)": {},
    "((price)::numeric(10,2) <= '-5.5'::numeric)": {"price<=": -5.5},
    "(share > '1e-05'::double precision)": {"share>": 1e-5},
    "((a > 'Infinity'::real) AND (b = 7))": {"b=": 7.0},
    "(((a + b))::numeric < '5'::numeric)": {},
}


@pytest.mark.parametrize("text", COMPARED)
def test_constants_that_columns_are_compared_with(text: str) -> None:
    for given in (text, [text]):
        operator = read_plan({"Plan": node("Scan", 1, Filter=given)})
        assert operator["values"] == COMPARED[text]
        assert (">" in operator["words"]) == (">" in text and "%" not in text)


def test_plan_of_postgresql_holds_nothing_measured(samples: Path) -> None:
    def planned(node: dict[str, Any]) -> dict[str, Any]:
        measured = ("Actual", "Sort Method", "Sort Space", "Rows Removed")
        kept = {key: value for key, value in node.items() if not key.startswith(measured)}
        return {**kept, "Plans": [planned(each) for each in node.get("Plans", ())]}

    [document] = json.loads((samples / "plans" / "postgresql.json").read_text(encoding="utf-8"))
    assert read_plan([{"Plan": planned(document["Plan"])}]) == without_seconds(read_plan(document))


def test_plans_of_both_versions_of_duckdb_are_equal(samples: Path) -> None:
    plan = read(samples / "plans" / "duckdb_2.json")
    assert plan == read(samples / "plans" / "duckdb_1.json")
    [scan] = plan["children"]
    assert (plan["kind"], plan["seconds"], scan["rows"]) == ("UNGROUPED_AGGREGATE", 0.0005, 200)
    assert scan["values"] == {"day<": 1200.0} and "optional" not in scan["words"]


BAD = ["[]", "{}", "3", "null", '{"Planning Time": 1}', '{"Plan": {}}', "[" * 3000 + "]" * 3000]


@pytest.mark.parametrize("document", [*BAD, '[{"Plan": {}}, {"Plan": {}}]', "[{}]\n[{}]"])
def test_other_documents_are_refused(document: str) -> None:
    with pytest.raises(ValueError, match="not a query plan|one JSON document|nested too deeply"):
        read_plan(document)


def test_plans_of_many_levels_are_read_or_refused() -> None:
    def plan(levels: int) -> dict[str, Any]:
        found = node("Scan", 1)
        for level in range(2, levels + 1):
            found = node("Sort", level, found)
        return {"Plan": found}

    assert [each["seconds"] for each in operators_of(read_plan(plan(250)))] == pytest.approx(
        [1e-3] * 250
    )
    with pytest.raises(ValueError, match="not a query plan: operators are nested too deeply"):
        read_plan(plan(3000))


def broken(document: Any) -> Iterator[Any]:
    """Yield a document with other values, or none, in place of every part of it."""
    for other in (None, True, 3, -1, 1e308, float("nan"), "x", "\ud800", [], {}, [[]], [{}]):
        yield other
    if not isinstance(document, list | dict):
        return
    for key in list(range(len(document)) if isinstance(document, list) else document):
        rest = document.copy()
        del rest[key]
        yield rest
        for other in broken(document[key]):
            changed = document.copy()
            changed[key] = other
            yield changed


@pytest.mark.parametrize("name", ["postgresql", "duckdb_1", "duckdb_2"])
def test_broken_plans_are_refused_or_read_as_plans(samples: Path, name: str) -> None:
    document = json.loads((samples / "plans" / f"{name}.json").read_text(encoding="utf-8"))
    for given in [*broken(document), *broken(read_plan(document))]:
        try:
            operators = operators_of(read_plan(given))
        except ValueError as error:
            assert "not a query plan" in str(error) or "one JSON document" in str(error)
            continue
        for each in operators:
            assert isinstance(each["kind"], str) and each["kind"] and 0 <= each["rows"] <= 1e100
            assert each["seconds"] is None or 0 <= each["seconds"] < 1e200
            assert np.isfinite(list(each["values"].values())).all()
            assert all(isinstance(word, str) for word in each["words"])


def test_the_time_of_a_plan_is_the_sum_of_its_operators(samples: Path) -> None:
    torch.manual_seed(0)
    plans = [prepared(read(path), {"Sort"}) for path in sorted((samples / "plans").iterdir())]
    model = td.Compiler.create(run_time({"Sort"}, 8)).eval()
    together, operators = totals(model(plans), len(plans))
    assert len(operators) == 2 + 2 + 4
    for number, plan in enumerate(plans):
        total, own = totals(model([plan]), 1)
        torch.testing.assert_close(total[0], own.exp().sum().log())
        torch.testing.assert_close(total[0], together[number])


def test_a_penalty_keeps_ridge_from_following_noise() -> None:
    rng = np.random.default_rng(0)
    tables = [np.hstack([np.ones((40, 1)), rng.normal(size=(40, 30))]) for _ in range(3)]
    log = [table[:, 1] + rng.normal(size=40) for table in tables]
    plain = tables[2] @ np.linalg.lstsq(tables[0], log[0], rcond=None)[0]
    found = ridge(tables, log[0], log[1])
    assert np.abs(found - log[2]).mean() < np.abs(plain - log[2]).mean()


def test_plans_of_a_real_database_hold_nothing_measured() -> None:
    duckdb = pytest.importorskip("duckdb")
    from plan_data import create_tables, draw_queries, run_queries

    connection = duckdb.connect()
    create_tables(connection, 5000)
    rows = list(run_queries(connection, draw_queries(20, 1), repeats=2))
    assert len({row["template"] for row in rows}) == 20
    assert sum(len(operators_of(row["plan"])) for row in rows) > 60
    for row in rows:
        assert row["times"] == sorted(row["times"]) and row["times"][0] > 0
        [[_, text]] = connection.execute(f"EXPLAIN (FORMAT JSON) {row['query']}").fetchall()
        assert read_plan(text) == without_seconds(row["plan"])


def test_what_cannot_be_learned_from_is_named(tmp_path: Path, samples: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    database = tmp_path / "my.duckdb"
    duckdb.connect(str(database)).close()

    def complaint(*given: object) -> str:
        argv = ["query_plans.py", *map(str, given)]
        with mock.patch.object(sys, "argv", argv), pytest.raises(SystemExit) as caught:
            main()
        return str(caught.value)

    assert "a database needs queries too" in complaint(database)
    (queries := tmp_path / "queries.sql").write_text("SELECT 1; CREATE TABLE t (a INT)")
    assert "not a query: CREATE TABLE t" in complaint(database, queries)
    queries.write_text("SELECT 1; SELECT a FROM missing")
    assert "SELECT a FROM missing" in complaint(database, queries)
    plan = duckdb.sql("EXPLAIN (FORMAT JSON) SELECT 1").fetchall()[0][1]
    costless = node("Scan", 1)
    del costless["Plan Rows"]
    good = json.dumps({"template": "a", "plan": {"Plan": node("Scan", 1)}})
    lines = {
        json.dumps({"template": "a", "plan": plan}): "no times",
        json.dumps({"template": "a", "plan": {"Plan": costless}}): "COSTS OFF",
        json.dumps({"template": "a", "plan": "[{}]\n[{}]"}): "one JSON document",
        json.dumps({"template": "a", "plan": [{}, {}]}): "got 2 plans",
        json.dumps({"template": "a", "plan": None}): "not a query plan",
        json.dumps({"template": "a"}): 'expected {"template": NAME, "plan": PLAN}',
        json.dumps({"template": 3, "plan": plan}): 'expected {"template": NAME, "plan": PLAN}',
        f"{good} {good}": "expected one JSON document per line",
        "[" * 3000: "nested too deeply",
        f'{good[:-1]}, "times": ["x"]}}': '"times"',
        "null": 'expected {"template": NAME, "plan": PLAN}',
    }
    for line, said in lines.items():
        (plans := tmp_path / "plans.jsonl").write_text(f"{good}\n\n{line}\n", encoding="utf-8")
        found = complaint(plans)
        assert found.startswith(f"{plans}:3: ") and said in found
    plans.write_text(f"\n{good}\n \n", encoding="utf-8")
    assert "at least 10 templates are needed, got 1" in complaint(plans)
    assert "no_file" in complaint(tmp_path / "no_file")


@pytest.mark.long
def test_the_command_learns_from_a_database_of_the_user(tmp_path, capsys):
    duckdb = pytest.importorskip("duckdb")
    from plan_data import create_tables, draw_queries

    with duckdb.connect(str(tmp_path / "my.duckdb")) as connection:
        create_tables(connection, 50_000)
    queries = [query for _, query in draw_queries(30, 8)]
    (tmp_path / "queries.sql").write_text(";\n".join(queries), encoding="utf-8")
    given = [tmp_path / "my.duckdb", tmp_path / "queries.sql", "--save", tmp_path / "plans.jsonl"]
    with mock.patch.object(sys, "argv", ["query_plans.py", *map(str, given)]):
        main()
    again = [tmp_path / "plans.jsonl", "--figure", tmp_path / "figure.svg"]
    with mock.patch.object(sys, "argv", ["query_plans.py", *map(str, again)]):
        main()
    tables = [part.split("q-error")[1] for part in capsys.readouterr().out.split("test plans")[1:]]
    assert len(tables) == 2
    for table in tables:
        errors = {
            line[:28].strip(): float(line[28:].split()[0]) for line in table.splitlines()[1:6]
        }
        assert errors["one module per operator"] < 4
    assert (tmp_path / "figure.svg").stat().st_size > 1000
