"""Find out what JSON documents consist of: the kinds of values at every path, and their encoding.

A path names the position of values in all documents: ``$`` is the document, ``$.atoms[].charge``
the key ``charge`` of every element of the list at the key ``atoms``.
"""

import difflib
import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pyg_dynbatch.core.errors import mismatch

_KIND_OF_CLASS: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "number", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}
_KINDS = tuple(dict.fromkeys(_KIND_OF_CLASS.values()))
_LARGEST = 1e300
_CHOICES = {
    **{"number": ("number",), "categories": ("number", "string"), "text": ("string",)},
    **{"ignore": _KINDS, "like": _KINDS, "mean": ("array",), "max": ("array",), "sum": ("array",)},
}
# Rows that the words and trigrams of a text are hashed into.
_BUCKETS = 4096
_MAX_LEVELS, _MAX_PATHS = 64, 2000


def kind_of(value: Any, where: object = "") -> str:
    """Return the kind of a JSON value; raise an error for anything else."""
    kind = _KIND_OF_CLASS.get(type(value), "")
    if not kind or (kind == "number" and not abs(value) <= _LARGEST):
        expected = "null, true, false, a string, an array, an object, or a number up to 1e300"
        got = "a larger number, or NaN" if kind else type(value).__name__
        raise mismatch(ValueError, "the value cannot be used", expected, got, where=where)
    return kind


def category_of(value: Any) -> str:
    """Return the name of a category: the text of a string, number or boolean; 1.0 is 1."""
    return value if type(value) is str else json.dumps(value).removesuffix(".0")


def step_to(key: str) -> str:
    """Return the part of a path that names a key."""
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"


@dataclass
class Node:
    """The values at one path: how many, and how those of each kind are encoded."""

    path: str
    count: int
    missing: int  # objects that lack this key
    kinds: dict[str, dict[str, Any]]
    ignored: bool = False

    def children(self) -> Iterator[tuple[str, str]]:
        """Iterate over the paths inside, and the paths of the nodes that describe their values."""
        for how in self.kinds.values():
            for key, path in how.get("fields", {}).items():
                yield f"{self.path}{step_to(key)}", path
            if "element" in how:
                yield f"{self.path}[]", how["element"]

    def lines(self) -> Iterator[str]:
        """Describe each kind of values in one line."""
        share = f"missing in {self.missing:,} of {self.count + self.missing:,}"
        more = [share] * (self.missing > 0)
        for kind, how in self.kinds.items() or [("ignored" if self.ignored else "nothing", {})]:
            yield f"{kind:<8} {'; '.join([*_notes_on(kind, how), *more])}".strip()
        yield from (f"{name} is like {path}" for name, path in self.children() if name != path)


def _notes_on(kind: str, how: Mapping[str, Any]) -> Iterator[str]:
    if "mean" in how:
        yield f"mean {how['mean']:.4g}, deviation {how['deviation']:.4g}"
    if "categories" in how and kind != "boolean":
        known = how["categories"]
        names = [json.dumps(name) if kind == "string" else name for name in known[:4]]
        yield f"categories ({len(known)}): {', '.join(names)}{', …' * (len(known) > 4)}"
    if "buckets" in how:
        yield f"words and trigrams, hashed into {how['buckets']} rows"
    if "readout" in how:
        yield f"{how['readout'].replace('+', ' and ')} of its elements"
    if "fields" in how:
        yield f"keys: {len(how['fields'])}"


class Part(NamedTuple):
    """One value inside a document."""

    path: str  # such as $.atoms[3].charge
    schema_path: str  # such as $.atoms[].charge
    value: Any
    owner: Any = None  # the object or list that holds the value
    key: Any = None
    problem: str = ""  # why the schema does not know it

    def inside(self, step: str, schema_path: str, key: Any, value: Any) -> "Part":
        """Return a value directly inside this one."""
        return Part(f"{self.path}{step}", schema_path, value, self.value, key)


@dataclass
class DocumentSchema:
    """What JSON documents consist of; ``str(schema)`` lists all paths with their encodings.

    Args:
        nodes: The values at every path, by path.
        documents: How many documents it was inferred from.

    Example:
        >>> schema = DocumentSchema.infer([{"a": 1.5, "b": ["x", "x"]}, {"a": 2.5, "b": []}])
        >>> print(schema)
        2 documents
        $      object   keys: 2
        $.a    number   mean 2, deviation 0.5
        $.b    array    mean and max of its elements
        $.b[]  string   categories (1): "x"
    """

    nodes: dict[str, Any]
    documents: int

    @classmethod
    def infer(
        cls,
        documents: Iterable[Any],
        overrides: Mapping[str, str] | None = None,
        *,
        max_categories: int = 100,
        names: Sequence[str] | None = None,
    ) -> "DocumentSchema":
        """Infer a schema from example documents.

        Numbers are standardised; whole numbers that have few different values, each seen twice on
        average, are categories too. Strings that have few are categories, others are bags of words
        and trigrams. Lists are read out by the mean and maximum of their elements.

        Args:
            documents: JSON values as :func:`json.loads` returns them.
            overrides: A choice by path, instead of the inferred one: ``"number"``,
                ``"categories"``, ``"text"``; for lists ``"mean"``, ``"max"``, ``"sum"``, or several
                joined by ``+``; ``"ignore"``; in recursive documents ``"like PATH"``, for values
                that have the form of those at the path, which contain them.
            max_categories: Largest number of different values that are categories.
            names: What messages call each document, such as file and line.

        Raises:
            ValueError: If there are no documents, one holds what JSON cannot, or a choice is
                unknown or fits no value of its path.
        """
        inference, number = _Inference(dict(overrides or {}), max_categories), 0
        for number, document in enumerate(documents, start=1):
            try:
                inference.add(document)
            except ValueError as error:
                error.add_note(f"  document: {names[number - 1] if names else number}")
                raise
        if not number:
            what = "DocumentSchema: there are no documents"
            raise mismatch(ValueError, what, "at least one example", 0)
        return cls(inference.nodes(), number)

    def walk(self, document: Any) -> Iterator[Part]:
        """Iterate over the parts of a document that are not ignored, outer ones first."""
        left = deque([Part("$", "$", document)])
        while left:
            part = left.popleft()
            node = self.nodes.get(part.schema_path)
            if node is not None and node.ignored:
                continue
            kind = kind_of(part.value, part.path)
            if node is None or kind not in node.kinds:
                known = " or ".join(node.kinds) if node else "no such key"
                yield part._replace(problem=f"{kind}, expected {known or 'no elements'}")
                continue
            yield part
            if kind == "array":
                element, steps = node.kinds[kind]["element"], enumerate(part.value)
                left += (part.inside(f"[{n}]", element, n, value) for n, value in steps)
            elif kind == "object":
                fields = node.kinds[kind]["fields"]
                for key, value in part.value.items():
                    step = step_to(str(key))
                    known = fields.get(key, f"{part.schema_path}{step}")
                    left.append(part.inside(step, known, key, value))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        nodes = {path: asdict(node) for path, node in self.nodes.items()}
        return {"documents": self.documents, "nodes": nodes}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "DocumentSchema":
        """Build a schema from the result of :meth:`as_dict`."""
        nodes = {path: Node(**node) for path, node in plain["nodes"].items()}
        return cls(nodes, plain["documents"])

    def __str__(self) -> str:
        width = min(48, max(map(len, self.nodes)))
        lines = [f"{self.documents:,} document{'s' * (self.documents != 1)}"]
        for path, node in self.nodes.items():
            lines += [f"{path:<{width}}  {line}" for line in node.lines()]
        return "\n".join(lines)


class _Found:
    """What was found at one path so far."""

    def __init__(self, path: str, choice: str, owner: Any) -> None:
        self.path, self.choice, self.owner = path, choice, owner
        self.level: int = 0 if owner is None else owner.level + 1
        self.kinds: Counter[str] = Counter()
        self.categories: dict[str, Counter[str]] = {"number": Counter(), "string": Counter()}
        self.is_whole = True
        self.mean = self.squares = 0.0
        self.fields: dict[str, _Found] = {}
        self.element: _Found | None = None

    def add(self, kind: str, value: Any, most: int) -> None:
        """Add a value that contains no others."""
        if kind == "number":
            # Welford's method, which is exact for large numbers that differ little.
            self.is_whole &= float(value).is_integer()
            change = value - self.mean
            self.mean += change / self.kinds["number"]
            self.squares += change * (value - self.mean)
        known = self.categories.get(kind)
        if known is not None and (self.choice == "categories" or len(known) <= most):
            known[category_of(value)] += 1


class _Inference:
    """Collect what example documents consist of."""

    def __init__(self, choices: dict[str, str], most: int) -> None:
        self.choices, self.most = choices, most
        self.found: dict[str, _Found] = {}
        self.root = self._at("$", None)

    def _at(self, path: str, owner: Any) -> _Found:
        choice = self.choices.get(path, "")
        found = self.found[path] = _Found(path, choice, owner)
        what = expected = ""
        if choice.startswith("like "):
            while owner is not None and f"like {owner.path}" != choice:
                owner = owner.owner
            if owner is None:
                what, expected = "DocumentSchema: an override is unknown", "a path that contains it"
                raise mismatch(ValueError, what, expected, choice, where=path)
            self.found[path] = owner
            return owner
        if found.level > _MAX_LEVELS:
            what, expected = "the documents are nested deeply", f"at most {_MAX_LEVELS} levels"
        elif len(self.found) > _MAX_PATHS:
            what, expected = "the documents have many paths", f"at most {_MAX_PATHS:,}"
        if what:
            where = path if len(path) < 80 else f"{path[:40]} … {path[-30:]}"
            hint = 'overrides such as {"$.replies[]": "like $"} for recursive documents, or ignore'
            raise mismatch(ValueError, what, expected, "one more", where=where, hint=hint)
        return found

    def add(self, document: Any) -> None:
        """Add the values of a document; without recursion, since it can be nested deeply."""
        left = [(self.root, document)]
        while left:
            found, value = left.pop()
            kind = kind_of(value, found.path)
            found.kinds[kind] += 1
            if found.choice == "ignore":
                continue
            if kind == "array":
                found.element = found.element or self._at(f"{found.path}[]", found)
                left += [(found.element, part) for part in reversed(value)]
            elif kind == "object":
                left += reversed([(self._field(found, key), part) for key, part in value.items()])
            else:
                found.add(kind, value, self.most)

    def _field(self, found: _Found, key: Any) -> _Found:
        if key not in found.fields:
            if type(key) is not str:
                what, got = "a key cannot be used", f"{type(key).__name__} {key!r}"
                raise mismatch(ValueError, what, "a string", got, where=found.path)
            found.fields[key] = self._at(f"{found.path}{step_to(key)}", found)
        return found.fields[key]

    def nodes(self) -> dict[str, Any]:
        """Decide on the encodings."""
        self._check_choices()
        nodes: dict[str, Node] = {}
        left = [(self.root, 0)]
        while left:
            found, possible = left.pop()
            if found.path in nodes:  # of what it is like
                continue
            count, ignored = found.kinds.total(), found.choice == "ignore"
            kinds = [] if ignored else [kind for kind in _KINDS if found.kinds[kind]]
            encodings = {kind: self._encoding(found, kind) for kind in kinds}
            missing = max(0, possible - count)
            nodes[found.path] = Node(found.path, count, missing, encodings, ignored)
            left += [(found.element, 0)] if found.element else []
            fields = [(field, found.kinds["object"]) for field in found.fields.values()]
            left += reversed(fields)
        return nodes

    def _check_choices(self) -> None:
        for path, choice in self.choices.items():
            if path not in self.found:
                what = "DocumentSchema: an override has a path that no document has"
                near = difflib.get_close_matches(path, self.found, n=1)
                hint = near[0] if near else "print(schema) lists all paths"
                raise mismatch(ValueError, what, "a path of a value", path, hint=hint)
            parts = choice.split()[:1] if choice.startswith("like ") else choice.split("+")
            kinds = {kind for part in parts for kind in _CHOICES.get(part, ("none",))}
            found = self.found[path].kinds
            if not any(found[kind] for kind in kinds) or "none" in kinds:
                what = "DocumentSchema: an override is unknown, or fits no value of its path"
                got, where = f"{choice!r} for {' or '.join(found)}", path
                raise mismatch(ValueError, what, ", ".join(_CHOICES), got, where=where)

    def _encoding(self, found: _Found, kind: str) -> dict[str, Any]:
        choice, count = found.choice, found.kinds[kind]
        if kind == "array" and found.element is not None:
            readout = choice if "array" in _CHOICES.get(choice.split("+")[0], ()) else "mean+max"
            return {"readout": readout, "element": found.element.path}
        if kind == "object":
            return {"fields": {key: field.path for key, field in found.fields.items()}}
        if kind not in found.categories:
            return {"categories": ["false", "true"]} if kind == "boolean" else {}
        counts = found.categories[kind]
        names = sorted(counts, key=lambda name: (-counts[name], name))
        few = len(names) <= self.most and 2 * len(names) <= count
        if choice == "categories" or (kind == "string" and few and choice != "text"):
            return {"categories": names}
        if kind == "string":
            return {"buckets": _BUCKETS}
        deviation = math.sqrt(found.squares / count)
        scale = {"mean": found.mean, "deviation": deviation or 1.0}
        return {**scale, "categories": names} if few and found.is_whole and not choice else scale
