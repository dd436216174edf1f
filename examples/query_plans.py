"""Learn the run time of a database's queries from their plans, with one module per operator type.

    pip install "duckdb>=2"
    python examples/query_plans.py

A plan is a tree of operators of different types. The module of an operator reads the rows that the
optimiser expects, the words and constants of its conditions, and the states of its inputs. Calls of
the same type and depth are batched over all plans of a mini-batch.
Data: random queries over generated tables with skewed and correlated columns, 400 templates with 10
queries each; DuckDB runs each five times, and the fastest run counts.
Protocol: templates are split, not queries: 80% to train, 20% to test. The linear model reads what
the modules read, summed over operators; its penalty is chosen by cross-validation. The q-error of a
prediction is the factor by which it is too large or too small. Figures: docs/examples.md.

Reference: Marcus and Papaemmanouil (2019), "Plan-structured deep neural network models for query
performance prediction", arXiv:1902.00132. Differs: the time of a plan is the sum of its operators.
"""

import argparse
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np
import torch
from sklearn.linear_model import RidgeCV
from torch import Tensor
from torch_geometric.nn import MLP

from pyg_dynbatch import blocks as td

# Keys are skewed, and parts follow days. An optimiser that multiplies selectivities errs here.
TABLES = """
SELECT setseed(0.42);
CREATE TABLE customer AS SELECT i AS c_id, floor(25 * random() ** 3)::INT AS c_nation,
  random() * 9999 AS c_balance FROM range({n} // 40) t(i);
CREATE TABLE part AS SELECT i AS p_id, (random() * 50)::INT AS p_size,
  (50 * random() ** 2)::INT AS p_brand FROM range({n} // 50) t(i);
CREATE TABLE orders AS SELECT i AS o_id, floor({n} // 40 * random() ** 3)::INT AS o_customer,
  i * 2400 // ({n} // 4) AS o_day, (5 * random() ** 2)::INT AS o_priority FROM range({n} // 4) t(i);
CREATE TABLE lineitem AS SELECT l_order,
  (l_order // 25 + {n} // 100 * random() ** 3)::INT AS l_part, (random() * 50)::INT AS l_quantity,
  (random() * 10)::INT AS l_discount, l_order * 2400 // ({n} // 4) + (random() * 90)::INT AS l_day
  FROM (SELECT floor({n} // 4 * random())::INT AS l_order FROM range({n}) t(i));
"""
JOINS = {
    "orders": ("lineitem", "l_order = o_id"),
    "part": ("lineitem", "l_part = p_id"),
    "customer": ("orders", "o_customer = c_id"),
}
# Columns to filter and group by, with their largest values.
COLUMNS = {
    "lineitem": {"l_quantity": 50, "l_discount": 10, "l_day": 2400},
    "orders": {"o_day": 2400, "o_priority": 5},
    "part": {"p_size": 50, "p_brand": 49},
    "customer": {"c_nation": 24, "c_balance": 9999},
}
QUERIES = [
    "SELECT count(*), sum({value}) {source}",
    "SELECT {key}, {value} {source} ORDER BY {value} LIMIT 100",
    "SELECT {key}, count(DISTINCT {value}) {source} GROUP BY {key}",
    "SELECT {key}, sum({value}) AS total {source} GROUP BY {key} ORDER BY total DESC LIMIT 10",
]
TEXTS = {"Table", "Filters", "Join Type", "Conditions", "Groups", "Aggregates", "Order By", "Top"}
SHORTEST = 1e-4  # seconds; shorter plans count as this, as their time is mostly noise
WORDS = 64  # buckets that words and columns are hashed into
FEATURES = 3 + 2 * WORDS
WIDTH = 32


class Operator(NamedTuple):
    """An operator of a plan: what the optimiser knows about it, and the seconds it took itself."""

    kind: str
    rows: float
    text: str
    seconds: float
    inputs: list["Operator"]


def draw_template(rng: random.Random) -> tuple[str, list[int]]:
    """Draw a query with gaps, and the largest number for each gap."""
    tables = [rng.choice(["lineitem", "lineitem", "orders", "customer"])]
    for _ in range(rng.randrange(4)):
        near = [t for t, (other, _) in JOINS.items() if other in tables and t not in tables]
        tables += rng.sample(near, min(1, len(near)))
    columns = [pair for table in tables for pair in COLUMNS[table].items()]
    filters = rng.sample(columns, rng.randrange(3))
    conditions = [JOINS[table][1] for table in tables[1:]]
    conditions += [f"{column} {rng.choice('<=>')} {{}}" for column, _ in filters]
    source = f"FROM {', '.join(tables)} WHERE {' AND '.join(['true', *conditions])}"
    (key, _), (value, _) = rng.sample(columns, 2)
    text = rng.choice(QUERIES).format(key=key, value=value, source=source)
    return text, [most for _, most in filters]


def draw_queries(num_templates: int, rng: random.Random) -> list[list[str]]:
    """Draw ten queries of each of some different templates."""
    templates: dict[str, list[int]] = {}
    while len(templates) < num_templates:
        text, largest = draw_template(rng)
        templates[text] = largest
    return [
        [text.format(*(rng.randint(0, most) for most in largest)) for _ in range(10)]
        for text, largest in templates.items()
    ]


def run_query(connection: duckdb.DuckDBPyConnection, query: str) -> Operator:
    """Run a query five times, and return the plan of the fastest run."""
    plans = []
    for _ in range(5):
        (row,) = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}").fetchall()
        (collector,) = json.loads(row[1])["operator"]
        (explanation,) = collector["children"]
        plans.append(read_operator(explanation["children"][0]))
    return min(plans, key=log_seconds)


def read_operator(operator: dict[str, Any]) -> Operator:
    """Read an operator and its inputs; nothing that is measured is read but the seconds."""
    info = operator["extra_info"]
    return Operator(
        kind=operator["type"],
        rows=float(info.get("Estimated Cardinality", 0)),
        text=" ".join(f"{key} {info[key]}" for key in info if key in TEXTS).lower(),
        seconds=operator["timing"],
        inputs=[read_operator(child) for child in operator.get("children", [])],
    )


def operators_of(plan: Operator) -> Iterator[Operator]:
    """Yield all operators of a plan."""
    yield plan
    for child in plan.inputs:
        yield from operators_of(child)


def log_seconds(plan: Operator) -> float:
    """Return the logarithm of the run time of a plan, the sum over its operators."""
    return float(np.log(max(SHORTEST, sum(each.seconds for each in operators_of(plan)))))


def words_of(operator: Operator) -> np.ndarray:
    """Return a bag of the words of an operator, and the constants that it compares columns with."""
    row = np.zeros(2 * WORDS)
    for word in re.findall(r"[a-z_]\w*|[<>=]+", operator.text):
        row[zlib.crc32(word.encode()) % WORDS] += 0.5
    for column, sign, value in re.findall(r"(\w+)\s*([<>=]+)\s*(\d+)", operator.text):
        row[WORDS + zlib.crc32((column + sign).encode()) % WORDS] += np.arcsinh(float(value)) / 5
    return row


def nested(plan: Operator, kinds: set[str]) -> dict[Any, Any]:
    """Return a plan as the block reads it; kinds outside ``kinds`` become "other"."""
    sizes = [each.rows for each in (plan, *plan.inputs)][:3]
    return {
        "key": (plan.kind if plan.kind in kinds else "other", len(plan.inputs)),
        "x": np.concatenate([np.log1p([*sizes, 0, 0][:3]) / 10, words_of(plan)]),
        "log": float(np.log(max(plan.seconds, SHORTEST / 10))),
        **dict(enumerate(nested(child, kinds) for child in plan.inputs)),
    }


def run_time(kinds: set[str]) -> td.Block:
    """Return the block whose metric ``log`` is the scaled logarithm of each operator's seconds."""
    plan = td.ForwardDeclaration(td.PyObjectType(), td.TensorType(WIDTH), name="plan")
    root = plan()
    cases = {}
    for kind in sorted({*kinds, "other"}):
        for count in range(3):
            widths = [FEATURES + count * WIDTH, WIDTH, WIDTH]
            module = MLP(widths, dropout=0.1, norm=None, plain_last=False)
            inputs = [(number, plan()) for number in range(count)]
            operands = td.Record([("x", td.Vector(FEATURES)), *inputs])
            cases[kind, count] = operands >> td.Concat() >> module
    node = td.Composition(name="node")
    with node.scope():
        state = td.OneOf(lambda operator: operator["key"], cases).reads(node.input)
        log = td.FC(1, activation=None).reads(state)
        td.Metric("log").reads(log, td.GetItem("log").reads(node.input))
        node.output.reads(state)
    plan.resolve_to(node)
    return root


def plans_and_operators(result: td.BlockResult, num_plans: int) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the seconds of each plan and of each operator."""
    log = 3 * result.metric_tensors["log"].squeeze(-1) - 9
    total = log.new_zeros(num_plans).index_add(0, result.metric_examples["log"], log.exp())
    return total.log(), log


def train(model: td.Compiler, plans: list[dict[Any, Any]], log: Tensor, epochs: int) -> None:
    """Minimise the errors of plans and operators, in logarithms."""
    traced = [model.tracer(plan) for plan in plans]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    for _ in range(epochs):
        for numbers in torch.randperm(len(traced)).split(100):
            result = model([traced[number] for number in numbers])
            found, of_operators = plans_and_operators(result, len(numbers))
            labels = torch.tensor(result.metric_labels["log"])
            loss = (found - log[numbers]).abs().mean() + (of_operators - labels).abs().mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def predict(model: td.Compiler, plans: list[dict[Any, Any]]) -> np.ndarray:
    """Return the logarithm of the seconds of each plan."""
    model.eval()
    return plans_and_operators(model(plans), len(plans))[0].numpy()


def flat(plans: list[Operator], kinds: list[str]) -> np.ndarray:
    """Sum what the operators of a plan have: their kind, log cardinality, words and constants."""
    rows = np.zeros((len(plans), 2 * len(kinds) + 2 * WORDS))
    for row, plan in zip(rows, plans, strict=True):
        for each in operators_of(plan):
            row[-2 * WORDS :] += words_of(each)
            if each.kind in kinds:
                place = 2 * kinds.index(each.kind)
                row[place : place + 2] += 1, np.log1p(each.rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the q-errors of the modules and of a linear model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--templates", type=int, default=400, help="at least 10")
    parser.add_argument("--rows", type=int, default=500_000, help="of the largest table")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)
    connection = duckdb.connect()
    connection.execute(TABLES.format(n=options.rows))
    connection.execute("SET threads = 1")  # with more, operators wait for one another
    templates = [
        [run_query(connection, query) for query in queries]
        for queries in draw_queries(options.templates, random.Random(16))
    ]
    end = 4 * len(templates) // 5
    training = [plan for plans in templates[:end] for plan in plans]
    test = [plan for plans in templates[end:] for plan in plans]
    log, test_log = (torch.tensor([*map(log_seconds, part)]) for part in (training, test))
    counts = Counter(each.kind for plan in training for each in operators_of(plan))
    # Modules of rarer kinds would learn nothing; those that are new in the test share "other".
    kinds = {kind for kind, number in counts.items() if number >= 20}
    print(f"{len(test)} test plans, {1e3 * test_log.median().exp():.1f} ms in the median")
    linear = RidgeCV(10.0 ** np.arange(-3, 5)).fit(flat(training, sorted(kinds)), log)
    torch.manual_seed(0)
    model = td.Compiler(run_time(kinds))
    train(model, [nested(plan, kinds) for plan in training], log, options.epochs)
    for name, predicted in {
        "linear": linear.predict(flat(test, sorted(kinds))),
        "one module per operator": predict(model, [nested(plan, kinds) for plan in test]),
    }.items():
        factors = np.exp(np.percentile(abs(predicted - test_log.numpy()), (50, 90, 99)))
        print(f"{name:23} q-error 50%, 90%, 99%:", *(f"{each:5.2f}" for each in factors))


if __name__ == "__main__":
    main()
