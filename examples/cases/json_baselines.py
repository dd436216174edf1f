"""Plain baselines of json_documents.py on bags of paths: linear, boosting and extra trees.

With crosses they also know which values occur in the same object of a list.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
)
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, ShuffleSplit
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, StandardScaler

Documents = list[dict[str, Any]]


def parts_of(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the paths and values of a document."""
    left: list[tuple[str, Any]] = list(document.items())
    while left:
        path, value = left.pop()
        yield path, value
        if isinstance(value, dict):
            left += [(f"{path}.{key}", part) for key, part in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[]", part) for part in value]


def names_in(document: dict[str, Any]) -> list[str]:
    """Name every path with its value, and the words and trigrams of strings."""
    found = []
    for path, value in parts_of(document):
        if isinstance(value, str):
            text = value.lower()
            found += [f"{path}={text}", *(f"{path}~{word}" for word in text.split())]
            padded = [f"<{word}>" for word in text.split()]
            found += [f"{path}*{w[n : n + 3]}" for w in padded for n in range(len(w) - 2)]
        elif not isinstance(value, float | dict | list):
            found.append(f"{path}={value}")
    return found


def keys_in(documents: Documents) -> dict[str, set[str]]:
    """Collect the keys of the objects in the lists at every path."""
    found = defaultdict[str, set[str]](set)
    for path, value in (part for document in documents for part in parts_of(document)):
        for element in value if isinstance(value, list) else ():
            found[path] |= set(element if isinstance(element, dict) else ())
    return found


def crosses_in(keys: dict[str, set[str]], document: dict[str, Any]) -> list[str]:
    """Name the pairs of values inside each object of a list; of missing keys too."""
    found = []
    for path, value in parts_of(document):
        for element in value if isinstance(value, list) else ():
            if not isinstance(element, dict):
                continue
            names = {f"no {key}" for key in keys[path] - set(element)}
            for key, part in parts_of(element):
                text = f"{part:.1g}" if isinstance(part, float) else part
                names.add(key if isinstance(part, dict | list) else f"{key}={text}")
            found += [f"{path}[]: {a} & {b}" for a, b in combinations(sorted(names), 2)]
    return found + names_in(document)


def numbers_in(documents: Documents) -> list[dict[str, float]]:
    """Summarize the numbers at every path, and the lengths of lists and number of objects."""
    found = []
    for document in documents:
        numbers = defaultdict[str, list[float]](list)
        for path, value in parts_of(document):
            if isinstance(value, int | float):
                numbers[path].append(float(value))
            elif isinstance(value, dict | list):
                numbers[f"{path} size"].append(float(len(value)))
        sums = {"mean": np.mean, "least": np.min, "most": np.max, "count": len}
        parts = {f"{p} {name}": f(v) for p, v in numbers.items() for name, f in sums.items()}
        found.append({name: float(value) for name, value in parts.items()})
    return found


CROSSES = " with crosses"
# Model, whether its features are scaled, and what is chosen on validation.
MODELS: dict[str, Any] = {
    "linear": (LogisticRegression(max_iter=5000, tol=1e-3), True, {"C": [0.3, 1, 3, 10, 30]}),
    "extra trees": (
        ExtraTreesClassifier(200, random_state=0),
        False,
        {"min_samples_leaf": [1, 2], "max_features": ["sqrt", 0.1]},
    ),
    "gradient boosting": (
        GradientBoostingClassifier(
            n_estimators=100, max_features="sqrt", subsample=0.8, random_state=0
        ),
        False,
        {"max_depth": [3, 6]},
    ),
}
MODELS["linear" + CROSSES] = MODELS["linear"]
# Of thousands of features; with dense rows.
MODELS["gradient boosting" + CROSSES] = (
    HistGradientBoostingClassifier(max_bins=15, early_stopping=False, random_state=0),
    False,
    {"max_iter": [100, 400]},
)


def baseline(name: str, parts: dict[str, Documents], label: str) -> float:
    """Tune a model on a fifth of the training documents; return its test accuracy."""
    model, is_scaled, choices = MODELS[name]
    y = {split: [document[label] for document in parts[split]] for split in parts}
    x = {
        split: [{k: v for k, v in document.items() if k != label} for document in parts[split]]
        for split in parts
    }
    scaled = [StandardScaler(with_mean=False)] * is_scaled
    numbers = make_pipeline(FunctionTransformer(numbers_in), DictVectorizer(), *scaled)
    analyzer: Callable[[dict[str, Any]], list[str]] = names_in
    if name.endswith(CROSSES):
        analyzer = partial(crosses_in, keys_in(x["train"]))
    words: Any = TfidfVectorizer(analyzer=analyzer, sublinear_tf=True)
    if not is_scaled:
        words = CountVectorizer(analyzer=analyzer, min_df=3)
    features = make_union(words, numbers)
    train, test = features.fit_transform(x["train"]), features.transform(x["test"])
    if isinstance(model, HistGradientBoostingClassifier):
        train, test = train.toarray(), test.toarray()
    few = len(y["train"]) < 500
    folds = ShuffleSplit(5 if few else 1, test_size=0.2, random_state=0)
    search = GridSearchCV(model, choices, cv=folds).fit(train, y["train"])
    return float(search.score(test, y["test"]))
