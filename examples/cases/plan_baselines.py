"""Linear models of query plans, which the modules are compared with."""

from collections import Counter

import numpy as np
from plan_model import WORDS, Plan, features, log_seconds
from plan_reader import operators_of


def flat(plans: list[Plan], kinds: list[str], texts: bool) -> np.ndarray:
    """Return counts and summed log cardinalities by kind; with ``texts`` words and constants."""
    table = []
    for plan in plans:
        count, size, bag = Counter(), Counter(), np.zeros(2 * WORDS)
        for each in operators_of(plan):
            count[each["kind"]] += 1
            size[each["kind"]] += np.log1p(each["rows"])
            bag += features(each)[3:]
        row = [*(count[kind] for kind in kinds), *(size[kind] for kind in kinds)]
        table.append([1.0, *row, *(bag if texts else ())])
    return np.array(table)


def cardinality(plans: list[Plan]) -> np.ndarray:
    """Return the logarithm of the rows that the optimiser expects in all operators."""
    total = [1 + sum(each["rows"] for each in operators_of(plan)) for plan in plans]
    return np.stack([np.ones(len(total)), np.log(total)], 1)


def ridge(tables: list[np.ndarray], log: np.ndarray, valid_log: np.ndarray) -> np.ndarray:
    """Fit on the first table, choose the penalty on the second, predict the third."""
    train, valid, test = tables
    found = []
    for penalty in 10.0 ** np.arange(-3, 5):
        square = train.T @ train + penalty * np.eye(train.shape[1])
        weight = np.linalg.solve(square, train.T @ log)
        found.append((np.abs(valid @ weight - valid_log).mean(), penalty, weight))
    return test @ min(found, key=lambda each: each[:2])[2]


def per_operator(parts: list[list[Plan]], kinds: list[str]) -> np.ndarray:
    """Fit a line to the operators, which the modules are trained on too; sum their times."""
    tables, logs = [], []
    for plans in parts:
        alone = [{**each, "children": []} for plan in plans for each in operators_of(plan)]
        tables.append(flat(alone, kinds, True))
        logs.append(np.array([log_seconds(each) for each in alone]))
    sizes = [len(operators_of(plan)) for plan in parts[2]]
    seconds = np.exp(ridge(tables, logs[0], logs[1]))
    return np.log(np.add.reduceat(seconds, np.cumsum([0, *sizes[:-1]])))
