"""Plans of both databases are read alike, hold nothing measured, and are learned from."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from pyg_dynbatch import blocks as td

CASES = Path(__file__).parents[2] / "examples" / "cases"


@pytest.fixture(autouse=True)
def _cases_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CASES))


def read(path: Path) -> dict[str, Any]:
    from plan_reader import read_plan

    return read_plan(path.read_text(encoding="utf-8"))


def without_seconds(plan: dict[str, Any]) -> dict[str, Any]:
    children = [without_seconds(child) for child in plan["children"]]
    return {**plan, "seconds": None, "children": children}


def test_plan_of_postgresql(samples: Path) -> None:
    from plan_reader import operators_of, seconds_of

    plan = read(samples / "plans" / "postgresql.json")
    kinds = [each["kind"] for each in operators_of(plan)]
    assert kinds == ["Sort", "Nested Loop", "Seq Scan", "Index Scan"]
    # The index scan ran 95 times; a time includes those of the inputs.
    seconds = [each["seconds"] for each in operators_of(plan)]
    assert seconds == pytest.approx([0.0015, 0.0085 - 0.002 - 95 * 5e-5, 0.002, 95 * 5e-5])
    assert seconds_of(plan) == pytest.approx(0.01)
    scan = operators_of(plan)[2]
    assert scan["rows"] == 100 and scan["values"] == {"day<": 1200.0} and "orders" in scan["words"]


def test_plan_of_postgresql_holds_nothing_measured(samples: Path) -> None:
    from plan_reader import read_plan

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


@pytest.mark.parametrize("document", ["[]", "{}", "3", '{"Planning Time": 1}'])
def test_other_documents_are_refused(document: str) -> None:
    from plan_reader import read_plan

    with pytest.raises(ValueError, match="not a query plan"):
        read_plan(document)


def test_the_time_of_a_plan_is_the_sum_of_its_operators(samples: Path) -> None:
    from plan_model import prepared, run_time, totals

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
    from plan_baselines import ridge

    rng = np.random.default_rng(0)
    tables = [np.hstack([np.ones((40, 1)), rng.normal(size=(40, 30))]) for _ in range(3)]
    log = [table[:, 1] + rng.normal(size=40) for table in tables]
    plain = tables[2] @ np.linalg.lstsq(tables[0], log[0], rcond=None)[0]
    found = ridge(tables, log[0], log[1])
    assert np.abs(found - log[2]).mean() < np.abs(plain - log[2]).mean()


def test_plans_of_a_real_database_hold_nothing_measured() -> None:
    duckdb = pytest.importorskip("duckdb")
    from plan_data import create_tables, draw_queries, run_queries
    from plan_reader import operators_of, read_plan

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
    from query_plans import main

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
    (plans := tmp_path / "plans.jsonl").write_text(json.dumps({"template": "a", "plan": plan}))
    assert f"{plans}:1: no times" in complaint(plans)


@pytest.mark.long
def test_the_command_learns_from_a_database_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    duckdb = pytest.importorskip("duckdb")
    from plan_data import create_tables, draw_queries
    from query_plans import main

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
