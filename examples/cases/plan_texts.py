"""Read the words, numbers and dates in the operators of a plan."""

import math
import re
from datetime import datetime
from typing import Any

# Where the words of an operator come from: what the optimiser decides before the query runs.
TEXTS = {
    "Table", "Projections", "Filters", "Join Type", "Conditions", "Groups", "Aggregates",
    "Order By", "Top", "Expression", "Function", "Relation Name", "Index Name", "Index Cond",
    "Hash Cond", "Merge Cond", "Join Filter", "Recheck Cond", "Filter", "Sort Key", "Group Key",
    "Strategy",
}  # fmt: skip
LARGEST = 1e100  # as many rows as PostgreSQL expects at most
QUOTED = re.compile(r"'(?:[^']|'')*'")
# A column, which PostgreSQL may write as ("column")::type, and the constant it is compared with.
COMPARED = re.compile(
    r"(?<![:\w])([^\W\d]\w*)\"?(?:\)?::[a-z ]+(?:\([\d,]+\))?)?\s*([<>=!]+)\s*"
    r"('[^']*'|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
)


def texts_of(info: dict[str, Any]) -> dict[str, Any]:
    """Return the words of an operator, and the numbers and dates that it compares columns with."""
    read = {key: info[key] if isinstance(info[key], list) else [info[key]] for key in info}
    found = " ".join(f"{key} {' '.join(map(str, read[key]))}" for key in info if key in TEXTS)
    # An operator in a quoted text, as in LIKE '%5 > 3%', compares nothing.
    found = QUOTED.sub(lambda text: re.sub("[<>=!~]", " ", text[0]), found.lower())
    values = {}
    for column, sign, constant in COMPARED.findall(found):
        if (value := value_of(constant.strip("'"))) is not None:
            values[column + sign] = value
    return {"words": re.findall(r"[a-z_]\w*|[<>=!~]+", found), "values": values}


def value_of(text: str) -> float | None:
    """Return a number, or the days from 1970 to a date; None for other texts."""
    try:
        value = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            return None
        value = (date - datetime(1970, 1, 1, tzinfo=date.tzinfo)).total_seconds() / 86400
    return value if abs(value) <= LARGEST else None


def field_of(given: Any, key: str, kind: type, default: Any = None) -> Any:
    """Return a value of an operator, or raise an error if it is of another kind."""
    if not isinstance(given, dict):
        raise ValueError(f"not a query plan: expected an operator, got {given!r:.40}")
    found = given.get(key)
    value = default if found is None else found
    if not isinstance(value, kind):
        what = f'expected a {kind.__name__} as "{key}"'
        raise ValueError(f"not a query plan: {what}, got {found!r:.40}")
    return value


def number_of(given: dict[str, Any], key: str, hint: str = "", least: float = 0) -> float:
    """Return a number of an operator, or raise an error."""
    try:
        value = float(given[key])
    except (KeyError, TypeError, ValueError, OverflowError):
        value = math.nan
    if not least <= value <= LARGEST:
        got = f"{given.get(key)!r:.40}{hint}"
        raise ValueError(f'not a query plan: expected a number as "{key}", got {got}')
    return value
