"""Learn the run time of a database's queries from their plans, with one module per operator type.

    pip install -e ".[plans,cli]"
    python examples/cases/query_plans.py                         # generated tables
    python examples/cases/query_plans.py my.duckdb queries.sql   # your database and its queries
    python examples/cases/query_plans.py plans.jsonl             # plans recorded before

Data: 4,000 plans of DuckDB over generated tables (``plan_data.py``), 400 templates with 10 queries
each, with the time of every operator; or your own: a database, opened read-only, and a file of
queries; or a file with one ``{"template": ..., "plan": ...}`` per line, where the plan is the JSON
of ``EXPLAIN (ANALYZE, FORMAT JSON)`` of DuckDB or PostgreSQL.
Protocol: templates are split, not queries: 70% to train, 10% to validate, 20% to test. The q-error
of a prediction is the factor by which it is too large or too small. Results:
``docs/cases/query_plans.md``.

Reference: Marcus and Papaemmanouil (2019), "Plan-structured deep neural network models for query
performance prediction", arXiv:1902.00132. Differs: the time of a plan is the sum of its operators.
"""

import argparse
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_rows
from plan_baselines import cardinality, flat, per_operator, ridge
from plan_model import SHORTEST, predict, prepared, run_time, train
from plan_reader import operators_of, read_rows, seconds_of

from pyg_dynbatch import blocks as td
from pyg_dynbatch.visualize import draw_parity, new_figure, save_figure

MODULES, PERCENT = "one module per operator", (50, 90, 99)


def collect(database: Path | None, queries: Path | None, size: int) -> Iterator[dict[str, Any]]:
    """Run queries of the user, or drawn ones on generated tables, and record their plans."""
    import duckdb
    from plan_data import create_tables, draw_queries, run_queries

    if database is None or queries is None:
        connection = duckdb.connect()
        create_tables(connection, 500_000)
        yield from run_queries(connection, draw_queries(size // 10, 10))
        return
    connection = duckdb.connect(str(database), read_only=True)
    texts = []
    for each in duckdb.extract_statements(queries.read_text(encoding="utf-8")):
        try:  # before any query is measured
            if each.type != duckdb.StatementType.SELECT:
                raise SystemExit(f"{queries}: not a query: {each.query.strip()}")
            connection.execute(f"EXPLAIN {each.query}")
        except duckdb.Error as error:
            raise SystemExit(f"{queries}: {error}\n{each.query.strip()}") from None
        texts.append(each.query)
    # Queries that differ in their constants alone are of one template.
    named = [(re.sub(r"'[^']*'|\b\d+(\.\d+)?\b", "?", text), text) for text in texts]
    yield from run_queries(connection, named)


def split(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split rows by template: 70% to train, 10% to validate, 20% to test."""
    templates = sorted({row["template"] for row in rows})
    random.Random(0).shuffle(templates)
    if len(templates) < 10:
        raise SystemExit(f"queries of at least 10 templates are needed, got {len(templates)}")
    bounds = len(templates) * 7 // 10, len(templates) * 8 // 10
    part = {name: sum(n >= bound for bound in bounds) for n, name in enumerate(templates)}
    return [[row for row in rows if part[row["template"]] == number] for number in range(3)]


def compare(
    rows: list[dict[str, Any]], seeds: int = 1
) -> tuple[dict[str, list[np.ndarray]], np.ndarray]:
    """Train all models; return their predictions for the test plans, and the measured seconds."""
    parts = split(rows)
    plans = [[row["plan"] for row in part] for part in parts]
    log = [np.log([max(SHORTEST, seconds_of(plan)) for plan in part]) for part in plans]
    count = Counter(each["kind"] for plan in plans[0] for each in operators_of(plan))
    # Modules of rarer kinds would learn nothing; those that are new in the test share "other".
    kinds = {kind for kind, number in count.items() if number >= 20}
    found = {
        "optimiser's cardinality": [cardinality(part) for part in plans],
        "flat: counts, cardinalities": [flat(part, sorted(kinds), False) for part in plans],
        "flat, with texts": [flat(part, sorted(kinds), True) for part in plans],
    }
    guesses = {name: [ridge(tables, log[0], log[1])] for name, tables in found.items()}
    guesses["linear per operator"] = [per_operator(plans, sorted(kinds))]
    guesses[MODULES] = []
    read = [[prepared(plan, kinds) for plan in part] for part in plans]
    logs = [torch.from_numpy(each).float() for each in log]
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = td.Compiler.create(run_time(kinds, 32))
        train(model, read[0], logs[0], read[1], logs[1])
        guesses[MODULES].append(predict(model, read[2]).numpy())
    if all("times" in row for row in parts[2]):
        again = [max(SHORTEST, row["times"][len(row["times"]) // 2]) for row in parts[2]]
        guesses["a run of the same query"] = [np.log(again)]
    return guesses, log[2]


def main() -> None:
    """Print the q-errors of all models, and draw the predictions of two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path, nargs="?", help="a database, or a file of plans")
    parser.add_argument("queries", type=Path, nargs="?", help="queries, separated by semicolons")
    parser.add_argument("--size", type=int, default=4000, help="number of generated queries")
    parser.add_argument("--save", type=Path, help="file for the plans, as read above")
    parser.add_argument("--seeds", type=int, default=1, help="models that are trained")
    parser.add_argument("--json", type=Path, help="file for the q-errors of all models")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    if options.source and not options.queries:
        rows = read_rows(options.source)
    else:
        rows = []
        with (options.save or Path(os.devnull)).open("w", encoding="utf-8") as file:
            for row in collect(options.source, options.queries, options.size):
                file.write(json.dumps(row) + "\n")
                rows.append(row)
    guesses, log = compare(rows, options.seeds)
    print(f"{len(log)} test plans, {np.exp(np.median(log)) * 1000:.1f} ms; q-error 50%, 90%, 99%")
    results = {}
    for name, found in guesses.items():
        factors = np.exp([np.percentile(abs(guess - log), PERCENT) for guess in found])
        print(f"{name:28}", *(f"{factor:7.2f}" for factor in factors.mean(0)))
        named = zip(PERCENT, factors.T.tolist(), strict=True)
        results[name] = {f"q-error, {percent}%": values for percent, values in named}
    write_rows(options.json, results)
    if options.figure:
        figure, axes = new_figure(1, 2, 3.5, 3.5)
        for each, name in zip(axes, (list(guesses)[1], MODULES), strict=True):
            draw_parity(each, log / np.log(10), guesses[name][0] / np.log(10), f"{name} (log10 s)")
        save_figure(figure, options.figure)


if __name__ == "__main__":
    main()
