"""Operators of real plans of PostgreSQL, from a server of the test, add up to the root."""

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from plan_reader import operators_of, read_plan

FOLDERS = [Path(shutil.which("initdb") or "/").parent, *Path("/usr/lib/postgresql").glob("*/bin")]
PROGRAMS = [folder for folder in FOLDERS if (folder / "initdb").is_file()]

TABLES = """
CREATE TABLE part AS
  SELECT i AS p_id, i % 50 AS p_size, 900 + i % 1000 AS p_price FROM generate_series(0, 1999) i;
CREATE TABLE orders AS SELECT i AS o_id, DATE '1995-01-01' + i % 2000 AS o_day, i % 5 AS o_priority
  FROM generate_series(0, 19999) i;
CREATE TABLE item AS SELECT i * 13 % 20000 AS i_order, i * 31 % 2000 AS i_part,
  i % 50 AS i_quantity, md5(i::text) AS i_note FROM generate_series(0, 99999) i;
CREATE TABLE low (a int);
CREATE TABLE measured (day int, value int) PARTITION BY RANGE (day);
CREATE TABLE measured_1 PARTITION OF measured FOR VALUES FROM (0) TO (100);
CREATE TABLE measured_2 PARTITION OF measured FOR VALUES FROM (100) TO (200);
INSERT INTO measured SELECT i % 200, i FROM generate_series(0, 50000) i;
CREATE INDEX ON item (i_order);
CREATE UNIQUE INDEX ON orders (o_id);
ANALYZE;
"""
SUMS = "SELECT i_order, sum(i_quantity) AS s FROM item GROUP BY 1"
ALONE = {
    "InitPlan": "SELECT count(*) FROM orders WHERE o_id < (SELECT avg(i_order) FROM item)",
    "InitPlan in SELECT": "SELECT (SELECT max(i_note) FROM item), o_id FROM orders ORDER BY o_day",
    "InitPlan in LIMIT": "SELECT o_id FROM orders LIMIT (SELECT count(*) / 100 FROM item)",
    "two InitPlans": """SELECT count(*) FROM orders WHERE o_id < (SELECT avg(i_order) FROM item)
        AND o_day > (SELECT min(o_day) + 3 FROM orders)""",
    "InitPlan in an InitPlan": """SELECT count(*) FROM orders WHERE o_id <
        (SELECT avg(i_order) FROM item WHERE i_part > (SELECT avg(p_id) FROM part))""",
    "InitPlan in a SubPlan": """SELECT (SELECT count(*) FROM measured WHERE day <
        (SELECT min(p_size) FROM part q WHERE q.p_id = p.p_id)) FROM part p WHERE p_id < 50""",
    "SubPlan": "SELECT (SELECT sum(i_quantity) FROM item WHERE i_order = o_id) FROM orders",
    "hashed SubPlan": """SELECT count(*) FROM item
        WHERE i_part NOT IN (SELECT p_id FROM part WHERE p_size < 20)""",
    "CTE": f"WITH x AS MATERIALIZED ({SUMS}) SELECT count(*) FROM x WHERE s > 100",
    "CTE read twice": f"""WITH x AS MATERIALIZED ({SUMS})
        SELECT count(*) FROM x a JOIN x b ON a.i_order = b.i_order + 1 WHERE a.s > b.s""",
    "CTE read in part": """WITH x AS MATERIALIZED (SELECT * FROM item WHERE i_quantity > 10)
        (SELECT i_order FROM x LIMIT 30000) UNION ALL (SELECT i_part FROM x)""",
    "CTE of a CTE": f"""WITH x AS MATERIALIZED ({SUMS}),
        y AS MATERIALIZED (SELECT s, count(*) AS c FROM x GROUP BY 1)
        SELECT count(*) FROM y, x WHERE y.c = x.s""",
    "CTE in an InitPlan": f"""WITH x AS ({SUMS})
        SELECT count(*) FROM x WHERE s = (SELECT max(s) FROM x)""",
    "CTE with the name of another": """WITH t AS MATERIALIZED (SELECT i_part AS a FROM item)
        SELECT count(*) FROM (WITH t AS MATERIALIZED (SELECT a % 10 AS b FROM t WHERE a > 5)
        SELECT b, count(*) FROM t GROUP BY b) s""",
    "recursive CTE": """WITH RECURSIVE t(n) AS
        (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 30000) SELECT sum(n) FROM t""",
    "recursive join": """WITH RECURSIVE t(n, d) AS (SELECT o_id, 0 FROM orders WHERE o_id < 100
        UNION ALL SELECT i_part, d + 1 FROM t JOIN item ON i_order = n WHERE d < 4)
        SELECT d, count(*) FROM t GROUP BY d""",
    "LATERAL": """SELECT count(*) FROM orders, LATERAL (SELECT i_part FROM item
        WHERE i_order = o_id ORDER BY i_quantity LIMIT 1) z WHERE o_priority < 3""",
    "Append": "SELECT i_part FROM item UNION ALL SELECT p_id FROM part UNION ALL SELECT 1",
    "window": """SELECT max(r) FROM
        (SELECT rank() OVER (PARTITION BY i_part ORDER BY i_quantity) AS r FROM item) q""",
    "outer join": "SELECT count(*) FROM item FULL JOIN part ON i_part = p_id",
    "INSERT": "INSERT INTO low SELECT i_part FROM item",
    "UPDATE": "UPDATE part SET p_price = p_price + (SELECT count(*) FROM orders)",
    "INSERT in a CTE": """WITH x AS (INSERT INTO low SELECT i_part FROM item RETURNING a)
        SELECT count(*) FROM x""",
}
LOOPS = {"many short loops": "SELECT count(*) FROM item JOIN orders ON i_order = o_id"}
PARALLEL = {
    "aggregate": """SELECT i_quantity, count(*) FROM item
        WHERE i_note LIKE '%5 > 3%' OR i_part < 500 GROUP BY 1""",
    "join": """SELECT count(*) FROM item JOIN orders ON i_order = o_id JOIN part ON i_part = p_id
        WHERE o_day > '1996-03-15'""",
    "Gather Merge": "SELECT i_note FROM item ORDER BY i_note LIMIT 500",
    "parallel Append": "SELECT day, sum(value) FROM measured GROUP BY day",
    "InitPlans": """SELECT count(*) FROM item WHERE i_part < (SELECT avg(p_id) FROM part)
        AND i_order < (SELECT avg(o_id) FROM orders)""",
    "CTE": ALONE["CTE"],
}
LATER = "WITH x AS (INSERT INTO low SELECT i_part FROM item RETURNING a) SELECT a FROM x LIMIT 10"
ONE_PROCESS = "max_parallel_workers_per_gather = 0"
NESTED_LOOPS = f"{ONE_PROCESS}; SET enable_hashjoin = off; SET enable_mergejoin = off"
MANY_PROCESSES = """parallel_setup_cost = 0; SET parallel_tuple_cost = 0;
    SET min_parallel_table_scan_size = 0"""
SETTINGS = {ONE_PROCESS: ALONE, NESTED_LOOPS: LOOPS, MANY_PROCESSES: PARALLEL}


@contextmanager
def database() -> Iterator[Callable[[str], str]]:
    """Start a server in a temporary folder, as a user without rights, and yield its psql."""
    folder, user = tempfile.mkdtemp(), {}
    if os.geteuid() == 0:  # which PostgreSQL refuses
        user = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
        shutil.chown(folder, "nobody")

    def run(name: str, *options: str) -> str:
        command: list[str] = [str(PROGRAMS[-1] / name), *options]
        made: Any = {"cwd": folder, "check": True, "text": True, "stdout": subprocess.PIPE, **user}
        return subprocess.run(command, **made).stdout

    server = f"-c listen_addresses='' -k {folder} -c jit=off"
    try:
        run("initdb", "-D", f"{folder}/data", "-U", "me", "-A", "trust", "--no-sync")
        run("pg_ctl", "-D", f"{folder}/data", "-l", f"{folder}/log", "-o", server, "-w", "start")
        try:
            options = ("-h", folder, "-U", "me", "-XqAt", "-v", "ON_ERROR_STOP=1", "postgres")
            yield lambda text: run("psql", *options, "-c", text)
        finally:
            run("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.skipif(not PROGRAMS, reason="PostgreSQL is not installed")
def test_operators_add_up_to_the_root() -> None:
    with database() as sql:
        sql(TABLES)

        def plan_of(setting: str, query: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
            text = sql(f"SET {setting}; EXPLAIN (ANALYZE, FORMAT JSON) {query}")
            plan = read_plan(text)
            [document] = json.loads(text)
            planned = sql(f"SET {setting}; EXPLAIN (FORMAT JSON) {query}")
            for known, run in zip(
                operators_of(read_plan(planned)), operators_of(plan), strict=True
            ):
                assert known["kind"] == run["kind"] and known["values"] == run["values"]
            assert all(each["seconds"] >= 0 for each in operators_of(plan))
            return document, operators_of(plan)

        kinds = set()
        for setting, queries in SETTINGS.items():
            for name, query in queries.items():
                document, operators = plan_of(setting, query)
                kinds |= {each["kind"] for each in operators}
                total = sum(each["seconds"] for each in operators) * 1000
                root = document["Plan"]["Actual Total Time"]
                assert total == pytest.approx(root, rel=0.02), name
        wanted = {"Gather", "Gather Merge", "CTE Scan", "Recursive Union", "Append", "ModifyTable"}
        assert wanted <= kinds
        # Rows are inserted to the last after the ten of the result.
        document, operators = plan_of("jit = off", LATER)
        total = sum(each["seconds"] for each in operators) * 1000
        assert document["Plan"]["Actual Total Time"] < total / 10
        assert total <= document["Execution Time"] * 1.02
