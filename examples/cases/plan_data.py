"""Make a database with skewed and correlated columns, draw queries, and run them."""

import random
from collections.abc import Iterable
from typing import Any

import duckdb
from plan_reader import operators_of, read_plan, seconds_of

# Skew: u * u * u of a uniform u. Correlation: prices follow sizes, segments nations, suppliers
# parts, status and shipping the date. An optimiser that multiplies selectivities gets these wrong.
TABLES = """
SELECT setseed(0.42);
CREATE TABLE nation AS SELECT i AS n_id, i % 5 AS n_region FROM range(25) t(i);
CREATE TABLE customer AS SELECT i AS c_id, c_nation, (c_nation + (random() * 2)::INT) % 5
  AS c_segment, random() * 9999 AS c_balance
  FROM (SELECT i, floor(25 * random() ** 3)::INT AS c_nation FROM range({n} // 40) t(i));
CREATE TABLE part AS SELECT i AS p_id, p_size, (p_size // 10 + (random() * 2)::INT) AS p_type,
  (50 * random() ** 2)::INT AS p_brand, 900 + 20 * p_size + random() * 100 AS p_price
  FROM (SELECT i, (random() * 50)::INT AS p_size FROM range({n} // 50) t(i));
CREATE TABLE supplier AS SELECT i AS s_id, floor(25 * random() ** 2)::INT AS s_nation
  FROM range({n} // 500) t(i);
CREATE TABLE orders AS SELECT i AS o_id, floor({n} // 40 * random() ** 3)::INT AS o_customer,
  i * 2400 // ({n} // 4) AS o_day, CASE WHEN i * 2400 // ({n} // 4) + random() * 200 < 1600
  THEN 'F' ELSE 'O' END AS o_status, (5 * random() ** 2)::INT AS o_priority
  FROM range({n} // 4) t(i);
CREATE TABLE lineitem AS SELECT l_order, l_part, (l_part * 7 + (random() * 3)::INT) % ({n} // 500)
  AS l_supplier, l_quantity, l_quantity * (900 + l_part % 50 * 20) AS l_price,
  (random() * 10)::INT AS l_discount, l_order * 2400 // ({n} // 4) + (random() * 90)::INT AS l_day
  FROM (SELECT floor({n} // 4 * random())::INT AS l_order, (random() * 49 + 1)::INT AS l_quantity,
  floor({n} // 50 * random() ** 3)::INT AS l_part FROM range({n}) t(i));
"""
JOINS = {
    "orders": ("lineitem", "l_order = o_id"),
    "part": ("lineitem", "l_part = p_id"),
    "supplier": ("lineitem", "l_supplier = s_id"),
    "customer": ("orders", "o_customer = c_id"),
    "nation": ("customer", "c_nation = n_id"),
}
# Condition, and how a query draws its constants.
FILTERS = {
    "lineitem": [("l_quantity < {}", 2, 50), ("l_discount = {}", 0, 10), ("l_day > {}", 100, 2400)],
    "orders": [("o_day < {}", 50, 2400), ("o_priority = {}", 0, 5), ("o_status <> 'F'", 0, 0)],
    "part": [("p_size < {}", 2, 50), ("p_brand = {}", 0, 49), ("p_price > {}", 900, 1900)],
    "supplier": [("s_nation = {}", 0, 24), ("s_nation < {}", 1, 24)],
    "customer": [("c_segment = {}", 0, 4), ("c_nation = {}", 0, 24), ("c_balance < {}", 99, 9999)],
    "nation": [("n_region = {}", 0, 4), ("n_id <> {}", 0, 24)],
}
KEYS = {
    "lineitem": ["l_part", "l_discount", "l_supplier", "l_day"],
    "orders": ["o_priority", "o_customer", "o_status"],
    "part": ["p_brand", "p_type"],
    "supplier": ["s_nation"],
    "customer": ["c_segment", "c_nation"],
    "nation": ["n_region"],
}
VALUES = {"lineitem": "l_price", "orders": "o_day", "part": "p_price", "customer": "c_balance"}
EXISTS = {
    "lineitem": "EXISTS (SELECT 1 FROM part q WHERE q.p_id = l_part AND q.p_size > {})",
    "orders": "o_customer NOT IN (SELECT c_id FROM customer WHERE c_balance < {} * 50)",
    "customer": "c_id IN (SELECT o_customer FROM orders WHERE o_day > {} * 40)",
}


def create_tables(connection: duckdb.DuckDBPyConnection, rows: int) -> None:
    """Create all tables; the largest has the given number of rows."""
    connection.execute(TABLES.format(n=rows))


def draw_template(rng: random.Random) -> tuple[str, list[tuple[int, int]]]:
    """Draw a query with gaps, and the bounds of the number for each gap."""
    tables = [rng.choice(["lineitem", "lineitem", "orders", "customer"])]
    for _ in range(rng.randrange(5)):
        near = [t for t, (other, _) in JOINS.items() if other in tables and t not in tables]
        tables += rng.sample(near, min(1, len(near)))
    conditions, bounds = [JOINS[table][1] for table in tables[1:]], []
    choices = [each for table in tables for each in FILTERS[table]]
    for text, least, most in rng.sample(choices, min(len(choices), rng.randrange(4))):
        conditions.append(text)
        bounds += [(least, most)] * ("{}" in text)
    if rng.random() < 0.25 and tables[0] in EXISTS:
        conditions.append(EXISTS[tables[0]])
        bounds.append((2, 48))
    keys = rng.sample([key for table in tables for key in KEYS[table]], rng.choice([1, 1, 2]))
    value = VALUES[rng.choice([table for table in tables if table in VALUES])]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    source, listed = f" FROM {', '.join(tables)}{where}", ", ".join(keys)
    shape = rng.randrange(6)
    if shape == 0:
        return f"SELECT count(*), sum({value}){source}", bounds
    if shape == 1:
        return f"SELECT {listed}, {value}{source} ORDER BY {value} LIMIT 100", bounds
    if shape == 2:
        return f"SELECT {listed}, count(DISTINCT {value}){source} GROUP BY {listed}", bounds
    if shape == 3:
        rank = f"rank() OVER (PARTITION BY {keys[0]} ORDER BY {value}) AS place"
        return f"SELECT max(place) FROM (SELECT {rank}{source})", bounds
    grouped = f"SELECT {listed}, sum({value}) AS total{source} GROUP BY {listed}"
    return grouped + (" ORDER BY total DESC LIMIT 10" if shape == 4 else ""), bounds


def draw_queries(templates: int, each: int, seed: int = 16) -> list[tuple[str, str]]:
    """Draw queries of different templates: the template and the query."""
    rng, drawn = random.Random(seed), {}
    while len(drawn) < templates:
        text, bounds = draw_template(rng)
        drawn[text] = bounds
    return [
        (text, text.format(*(rng.randint(*pair) for pair in bounds)))
        for text, bounds in drawn.items()
        for _ in range(each)
    ]


def run_queries(
    connection: duckdb.DuckDBPyConnection, queries: Iterable[tuple[str, str]], repeats: int = 5
) -> Iterable[dict[str, Any]]:
    """Run every query some times; keep its plan with the shortest time of each operator."""
    connection.execute("SET threads = 1")  # with more, operators wait for one another
    for template, query in queries:
        plans = []
        for _ in range(repeats):
            found = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}").fetchall()
            plans.append(read_plan(found[0][1]))
        times = sorted(map(seconds_of, plans))
        operators = [operators_of(plan) for plan in plans]
        alike = [each for each in operators if kinds_of(each) == kinds_of(operators[0])]
        # What else runs on the machine adds to a few operators of a run, not to the same of all.
        for same in zip(*alike, strict=True):
            same[0]["seconds"] = min(each["seconds"] for each in same)
        yield {"template": template, "query": query, "times": times, "plan": plans[0]}


def kinds_of(operators: list[dict[str, Any]]) -> list[str]:
    """Return the kinds of some operators."""
    return [each["kind"] for each in operators]
